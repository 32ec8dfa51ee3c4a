"""schedule: part p takes what lies between two bounds (request, block), and all parts cost alike.

Decode kernels run one program a part (or a gang of programs, one a tile of rows), about one an SM,
and a part walks over as many requests as lie between its own bound and the next part's: no SM waits
for another's tail. A request with a bound inside is cut; its pieces are written to the workspace
and merged. To start another request, or a piece, costs as much as OVERHEAD blocks of keys. So of
three ways the one is taken whose costliest part is cheapest: each request cut evenly into parts of
its own, whole requests only, or cuts anywhere, at equal shares of passes_b * (blocks_b + OVERHEAD).

A bound only says where to cut. Lengths, and so what there is to do, are read when the work is done:
a schedule made for other lengths of the same requests costs balance, never a key. It is made by a
kernel, so that a replayed graph makes its own, once a step, for all layers.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from kvkern.cache.batch import PagedBatch
from kvkern.kernels.config import KernelConfig, config_of_call
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.launch import Launch, launch
from kvkern.kernels.numerics import LN_2, round_to
from kvkern.kernels.paging import power_of_two

_BLOCK_B = 1024  # requests looked at together


class Work(NamedTuple):
    """How decode is cut up: constants of the launch that are known on the host."""

    num_parts: int
    gang: int  # programs a part: row tiles that share a read of the keys
    tile_rows: int  # rows (tokens x heads) of a program
    block_n: int  # keys a block
    overhead: int = 3  # what starting and finishing a request costs, in blocks of keys


class Schedule(NamedTuple):
    """Bounds, and the workspace for what is cut. Pieces are partial results of whole row tiles.

    A part writes at most two pieces: slot ``2 * part`` for one that begins at its own bound, inside
    a request, and slot ``2 * part + 1`` for one that ends at the next part's bound.
    """

    work: Work
    bounds: Tensor  # int32 [num_parts + 1, 2]: request and block; (0, 0) first, (B, 0) last
    cuts: Tensor  # int32 [num_cuts, 3]: a request, first and last part with a bound inside; then -1
    ends: Tensor  # int64 [B], scratch
    outs: Tensor  # fp32 or fp16 [2 * num_parts, rows, L], normalised
    lses: Tensor  # fp32 [2 * num_parts, rows], base 2

    @property
    def addresses(self) -> tuple[int, ...]:
        """Of the tensors, in the order above."""
        return tuple(tensor.data_ptr() for tensor in self[1:])


@triton.jit
def _costs(
    offsets_ptr,
    cache_lengths_ptr,
    request,  # [N]
    num_requests,
    num_heads,
    GANG_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """How often a part goes over a request's keys, and how many blocks of them there are."""
    mask = request < num_requests
    start = tl.load(offsets_ptr + request, mask=mask, other=0)
    end = tl.load(offsets_ptr + request + 1, mask=mask, other=0)
    cached = tl.load(cache_lengths_ptr + request, mask=mask, other=0)
    num_tokens = end - start
    passes = tl.cdiv(num_tokens * num_heads, GANG_ROWS)
    return passes, tl.where(passes > 0, tl.cdiv(cached + num_tokens, BLOCK_N), 0)


@triton.jit
def _find(ends_ptr, target, num_requests, first_stride):
    """The request that a target lies in, as many as end no later come before it; and its begin."""
    owner = (target * 0).to(tl.int32)
    stride = first_stride
    while stride > 0:
        probe = owner + stride
        end = tl.load(ends_ptr + probe - 1, mask=probe <= num_requests, other=2**62)
        owner = tl.where(end <= target, probe, owner)
        stride = stride // 2
    return owner, tl.load(ends_ptr + owner - 1, mask=owner > 0, other=0)


@triton.jit
def _whole(ends_ptr, target, num_requests, first_stride):
    """The request that begins nearest to a target, and where that is."""
    owner, begin = _find(ends_ptr, target, num_requests, first_stride)
    end = tl.load(ends_ptr + owner, mask=owner < num_requests, other=2**62)
    is_past = end - target < target - begin
    return owner + is_past.to(tl.int32), tl.where(is_past, end, begin)


@triton.jit
def _parts_of(passes, blocks, most, num_parts, OVERHEAD: tl.constexpr):
    """How many parts a request needs if none may cost more than ``most``; 0 if it is empty."""
    room = most - passes * OVERHEAD
    parts = tl.cdiv(passes * blocks, tl.maximum(room, 1))
    parts = tl.where(room < passes, num_parts + 1, tl.minimum(tl.maximum(parts, 1), num_parts + 1))
    return tl.where(passes > 0, parts, 0)


@triton.jit(
    do_not_specialize=["num_requests", "num_heads", "num_parts", "num_cuts", "first_stride"],
    do_not_specialize_on_alignment=["offsets_ptr", "cache_lengths_ptr"],
)
def _schedule_kernel(
    offsets_ptr,  # int32 [B+1]
    cache_lengths_ptr,  # int32 [B]
    bounds_ptr,  # int32 [num_parts + 1, 2]
    cuts_ptr,  # int32 [num_cuts, 3]
    ends_ptr,  # int64 [B], scratch
    num_requests,
    num_heads,
    num_parts,
    num_cuts,
    first_stride,  # the largest power of two that is not above num_requests
    GANG_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERHEAD: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,  # > num_parts
):
    total = num_requests.to(tl.int64) * 0
    for first in range(0, num_requests, BLOCK_B):
        request = first + tl.arange(0, BLOCK_B)
        passes, blocks = _costs(
            offsets_ptr, cache_lengths_ptr, request, num_requests, num_heads, GANG_ROWS, BLOCK_N
        )
        costs = (passes * (blocks + OVERHEAD)).to(tl.int64)
        tl.store(ends_ptr + request, total + tl.cumsum(costs, axis=0), mask=request < num_requests)
        total += tl.sum(costs, axis=0)
    tl.debug_barrier()  # the program reads what it wrote
    part = tl.arange(0, BLOCK_P)
    share = tl.cdiv(total, num_parts)
    # what the costliest part would cost, each way: anywhere, with a second start and a merge
    load_anywhere = share + 2 * OVERHEAD

    load_own = 0 * total + 2**62
    most = 0 * num_requests
    if num_requests <= num_parts:
        candidate = share.to(tl.int32) + tl.arange(0, 64) * tl.maximum(share // 64, 1).to(tl.int32)
        needed = tl.zeros([64], tl.int32)
        for first in range(0, num_requests, 64):
            passes, blocks = _costs(
                offsets_ptr, cache_lengths_ptr, first + tl.arange(0, 64), num_requests, num_heads,
                GANG_ROWS, BLOCK_N,
            )  # fmt: skip
            needed += tl.sum(
                _parts_of(
                    passes[None, :], blocks[None, :], candidate[:, None], num_parts, OVERHEAD
                ),
                axis=1,
            )
        most = tl.min(tl.where(needed <= num_parts, candidate, 2**30), axis=0)
        if most < 2**30:
            own = tl.arange(0, BLOCK_P)
            passes, blocks = _costs(
                offsets_ptr, cache_lengths_ptr, own, num_requests, num_heads, GANG_ROWS, BLOCK_N
            )
            parts = _parts_of(passes, blocks, most, num_parts, OVERHEAD)
            costs = passes * (tl.cdiv(blocks, tl.maximum(parts, 1)) + OVERHEAD)
            load_own = tl.max(costs, axis=0).to(tl.int64)
            load_own += tl.where(tl.max(parts, axis=0) > 1, OVERHEAD, 0)
    is_own = load_own <= load_anywhere

    # as many requests to each part, if they were equal
    num_whole = tl.cdiv(num_requests, tl.maximum(tl.cdiv(num_requests, num_parts), 1))
    num_whole = tl.maximum(num_whole, 1)
    whole, whole_begin = _whole(ends_ptr, part * total // num_whole, num_requests, first_stride)
    _, whole_end = _whole(ends_ptr, (part + 1) * total // num_whole, num_requests, first_stride)
    load_whole = tl.max(tl.where(part < num_whole, whole_end - whole_begin, 0), axis=0)
    is_whole = (load_whole <= load_anywhere) & (load_whole < load_own)

    if is_whole:
        owner = tl.where(part < num_whole, whole, num_requests)
        block = part * 0
    elif is_own:
        own = tl.arange(0, BLOCK_P)
        passes, blocks = _costs(
            offsets_ptr, cache_lengths_ptr, own, num_requests, num_heads, GANG_ROWS, BLOCK_N
        )
        ends = tl.cumsum(_parts_of(passes, blocks, most, num_parts, OVERHEAD), axis=0)
        tl.debug_barrier()
        tl.store(ends_ptr + own, ends.to(tl.int64), mask=own < num_requests)
        tl.debug_barrier()
        owner, begin = _find(ends_ptr, part.to(tl.int64), num_requests, first_stride)
        passes, blocks = _costs(
            offsets_ptr, cache_lengths_ptr, owner, num_requests, num_heads, GANG_ROWS, BLOCK_N
        )
        parts = _parts_of(passes, blocks, most, num_parts, OVERHEAD)
        block = (part - begin.to(tl.int32)) * blocks // tl.maximum(parts, 1)
    else:
        target = part * total // num_parts
        owner, begin = _find(ends_ptr, target, num_requests, first_stride)
        # a bound within a 24th of a share of the request's begin or end is moved there
        passes, blocks = _costs(
            offsets_ptr, cache_lengths_ptr, owner, num_requests, num_heads, GANG_ROWS, BLOCK_N
        )
        passes = tl.maximum(passes, 1)
        slack = tl.maximum((total // (24 * num_parts)).to(tl.int32) // passes, 1)
        block = ((target - begin) // passes).to(tl.int32)
        is_past = block + slack > blocks
        owner += (is_past & (owner < num_requests)).to(tl.int32)
        block = tl.where(is_past | (block < slack), 0, block)
    # what comes before the first request with work, or after the last, may have work at a replay
    owner = tl.where(part == 0, 0, tl.where(part >= num_parts, num_requests, owner))
    block = tl.where((part == 0) | (part >= num_parts), 0, block)
    mask = part <= num_parts
    tl.store(bounds_ptr + 2 * part, owner, mask=mask)
    tl.store(bounds_ptr + 2 * part + 1, block, mask=mask)

    tl.store(cuts_ptr + 3 * part, tl.full([BLOCK_P], -1, tl.int32), mask=part < num_cuts)
    tl.debug_barrier()
    previous_owner = tl.load(bounds_ptr + 2 * part - 2, mask=mask & (part > 0), other=-1)
    previous_block = tl.load(bounds_ptr + 2 * part - 1, mask=mask & (part > 0), other=0)
    next_owner = tl.load(bounds_ptr + 2 * part + 2, mask=part < num_parts, other=-1)
    next_block = tl.load(bounds_ptr + 2 * part + 3, mask=part < num_parts, other=0)
    is_inside = mask & (block > 0)
    is_first = is_inside & ((previous_owner != owner) | (previous_block == 0))
    is_last = is_inside & ((next_owner != owner) | (next_block == 0))
    index = tl.cumsum(is_first.to(tl.int32), axis=0) - 1
    cut_ptrs = cuts_ptr + 3 * index
    tl.store(cut_ptrs, owner, mask=is_first & (index < num_cuts))
    tl.store(cut_ptrs + 1, part, mask=is_first & (index < num_cuts))
    tl.store(cut_ptrs + 2, part, mask=is_last & (index < num_cuts))


@triton.jit(
    do_not_specialize=["num_heads", "num_cuts", "slot_rows"],
    do_not_specialize_on_alignment=["offsets_ptr"],
)
def _merge_cuts_kernel(
    scale_ptr,  # fp32 [1], or None: what pieces are in units of
    outs_ptr,  # [2 * num_parts, slot_rows, L]
    lses_ptr,  # fp32 [2 * num_parts, slot_rows], base 2
    bounds_ptr,
    cuts_ptr,
    offsets_ptr,  # int32 [B+1]
    out_ptr,  # [T, H, L]
    lse_ptr,  # fp32 [T, H]
    num_heads,
    num_cuts,
    slot_rows,
    LATENT_DIM: tl.constexpr,
    LN_2: tl.constexpr,
    BLOCK_S: tl.constexpr,  # pieces read together
    BLOCK_R: tl.constexpr,  # rows and columns of a step
    BLOCK_C: tl.constexpr,
    IS_EARLY: tl.constexpr,  # whether it may start while pieces are still being written
):
    """out = scale * sum 2^(lse_s - lse) out_s, over a request's pieces.

    Steps of a program lie far apart.
    """
    NUM_CHUNKS: tl.constexpr = (LATENT_DIM + BLOCK_C - 1) // BLOCK_C
    steps_per_cut = tl.cdiv(slot_rows, BLOCK_R) * NUM_CHUNKS
    step = tl.program_id(0)
    request, first, last = _load_cut(cuts_ptr, step // steps_per_cut, num_cuts)
    if IS_EARLY & ((request >= 0) | (step == 0)):  # one waits for all
        gdc_wait()
    while request >= 0:  # -1: that was the last
        start, end = tl.load(offsets_ptr + request), tl.load(offsets_ptr + request + 1)
        chunk = step % NUM_CHUNKS
        row = step % steps_per_cut // NUM_CHUNKS * BLOCK_R + tl.arange(0, BLOCK_R)
        offs_l = chunk * BLOCK_C + tl.arange(0, BLOCK_C)
        # of rows that are not there too: to wait until it is known which are costs more
        out, lse = _merge_pieces(
            outs_ptr, lses_ptr, bounds_ptr, first, last, slot_rows, row, offs_l, LATENT_DIM, BLOCK_S
        )
        if scale_ptr is not None:
            out *= tl.load(scale_ptr)
        mask_row = row < (end - start) * num_heads
        mask = mask_row[:, None] & (offs_l < LATENT_DIM)[None, :]
        out_row = start.to(tl.int64) * num_heads + row
        out = round_to(out, out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_row[:, None] * LATENT_DIM + offs_l[None, :], out, mask=mask)
        if chunk == 0:
            tl.store(lse_ptr + out_row, lse * LN_2, mask=mask_row)
        step += tl.num_programs(0)
        request, first, last = _load_cut(cuts_ptr, step // steps_per_cut, num_cuts)


@triton.jit
def _load_cut(cuts_ptr, cut, num_cuts):
    """A request that is cut, and the first and last part with a bound inside it."""
    request = tl.load(cuts_ptr + 3 * cut, mask=cut < num_cuts, other=-1)
    first = tl.load(cuts_ptr + 3 * cut + 1, mask=cut < num_cuts, other=0)
    return request, first, tl.load(cuts_ptr + 3 * cut + 2, mask=cut < num_cuts, other=0)


@triton.jit
def _merge_pieces(
    outs_ptr,
    lses_ptr,
    bounds_ptr,
    first,
    last,
    slot_rows,
    row,  # [R]
    offs_l,  # [C]
    LATENT_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Rows of a request that the bounds of parts ``first`` to ``last`` cut: out, and base-2 lse."""
    max_lse = tl.full([row.shape[0]], -float("inf"), tl.float32)
    weight_sum = tl.zeros([row.shape[0]], tl.float32)
    acc = tl.zeros([row.shape[0], offs_l.shape[0]], tl.float32)
    # the part before the first with a bound inside the request wrote its first piece
    for begin in range(first - 1, last + 1, BLOCK_S):
        part = begin + tl.arange(0, BLOCK_S)
        is_there = part <= last
        slot = 2 * part + (part == first - 1).to(tl.int32)
        piece_row = slot.to(tl.int64)[:, None] * slot_rows + row[None, :]
        lse = tl.load(lses_ptr + piece_row, mask=is_there[:, None], other=-float("inf"))
        offs = piece_row[:, :, None] * LATENT_DIM + offs_l[None, None, :]
        mask_piece = is_there[:, None, None] & (offs_l < LATENT_DIM)[None, None, :]
        piece = tl.load(outs_ptr + offs, mask=mask_piece, other=0.0).to(tl.float32)
        # a part between equal bounds had nothing to do, and wrote nothing
        own = tl.load(bounds_ptr + 2 * part, mask=is_there, other=0)
        own_block = tl.load(bounds_ptr + 2 * part + 1, mask=is_there, other=0)
        next_own = tl.load(bounds_ptr + 2 * part + 2, mask=is_there, other=0)
        next_block = tl.load(bounds_ptr + 2 * part + 3, mask=is_there, other=0)
        has_work = (own != next_own) | (own_block != next_block)
        lse = tl.where(has_work[:, None], lse, -float("inf"))
        new_max = tl.maximum(max_lse, tl.max(lse, axis=0))
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        weight = tl.exp2(lse - shift[None, :])
        rescale = tl.exp2(max_lse - shift)
        # a piece that saw no key holds nothing
        piece = tl.where((weight == 0.0)[:, :, None], 0.0, piece)
        acc = acc * rescale[:, None] + tl.sum(piece * weight[:, :, None], axis=0)
        weight_sum = weight_sum * rescale + tl.sum(weight, axis=0)
        max_lse = new_max
    weight_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)  # then max_lse is -inf
    return acc / weight_sum[:, None], max_lse + tl.log2(weight_sum)


def make_schedule(
    batch: PagedBatch,
    num_heads: int,
    max_query_len: int,
    latent_dim: int,
    work: Work,
    dtype: torch.dtype = torch.float32,
) -> Schedule:
    """Allocate, with room for requests of up to ``max_query_len`` new tokens each.

    ``dtype``: of pieces. Written and read, they take as long as many blocks of keys.
    """
    gang_rows = work.gang * work.tile_rows
    slot_rows = -(-max_query_len * num_heads // gang_rows) * gang_rows
    num_slots, device = 2 * work.num_parts, batch.device
    num_cuts = max(min(batch.num_requests, work.num_parts - 1), 1)
    return Schedule(
        work,
        torch.empty(work.num_parts + 1, 2, dtype=torch.int32, device=device),
        torch.empty(num_cuts, 3, dtype=torch.int32, device=device),
        torch.empty(batch.num_requests, dtype=torch.int64, device=device),
        torch.empty(num_slots, slot_rows, latent_dim, dtype=dtype, device=device),
        torch.empty(num_slots, slot_rows, device=device),
    )


def fill_schedule(schedule: Schedule, batch: PagedBatch, num_heads: int) -> Launch | None:
    """Set the bounds for the lengths that the batch has when this runs.

    Returns how to do it again, at ``schedule_addresses``, for a batch of the same shape.
    """
    arguments, options = _schedule_call(batch, num_heads, schedule)
    return launch(_schedule_kernel, (1,), arguments, options, batch.device, num_varying=5)


def schedule_addresses(schedule: Sequence[int], batch: PagedBatch) -> tuple[int, ...]:
    """``schedule``: its addresses."""
    bounds, cuts, ends, _, _ = schedule
    offsets, lengths, _ = batch.addresses
    return offsets, lengths, bounds, cuts, ends


def merge_cuts(
    schedule: Schedule, batch: PagedBatch, out: Tensor, lse: Tensor, scale: Tensor | None = None
) -> Launch | None:
    """Fill the rows of ``out`` ``[T, H, L]`` and ``lse`` ``[T, H]`` whose requests were cut.

    ``scale``: fp32, whose first value pieces are in units of. Returns how to do it again, with its
    address and at ``merge_addresses``, for tensors and a batch of the same shapes; None where
    nothing can be cut.
    """
    if schedule.work.num_parts == 1 or batch.num_requests == 0:
        return None
    grid, arguments, options = _merge_call(schedule, batch, out, lse, scale, gpu_of(batch.device))
    return launch(_merge_cuts_kernel, grid, arguments, options, batch.device, num_varying=8)


def merge_addresses(schedule: Sequence[int], batch: PagedBatch) -> tuple[int, ...]:
    """``schedule``: its addresses. Those of ``out`` and ``lse`` follow."""
    bounds, cuts, _, outs, lses = schedule
    return outs, lses, bounds, cuts, batch.addresses[0]


def _schedule_call(
    batch: PagedBatch, num_heads: int, schedule: Schedule
) -> tuple[dict[str, Any], dict[str, Any]]:
    work = schedule.work
    arguments = {
        "offsets_ptr": batch.input_row_offsets,
        "cache_lengths_ptr": batch.cache_lengths,
        "bounds_ptr": schedule.bounds,
        "cuts_ptr": schedule.cuts,
        "ends_ptr": schedule.ends,
        "num_requests": batch.num_requests,
        "num_heads": num_heads,
        "num_parts": work.num_parts,
        "num_cuts": len(schedule.cuts),
        "first_stride": power_of_two(batch.num_requests + 1) // 2,
        "GANG_ROWS": work.gang * work.tile_rows,
        "BLOCK_N": work.block_n,
        "OVERHEAD": work.overhead,
        "BLOCK_B": _BLOCK_B,
        "BLOCK_P": power_of_two(work.num_parts + 1),
    }
    return arguments, {"num_warps": 8}


def _choose_blocks(
    num_parts: int, num_requests: int, latent_dim: int, dtype: torch.dtype
) -> tuple[int, int, int, int]:
    """Pieces, rows and columns that a program merges at once, and its warps.

    Whole rows, by few programs: on an H100 the 17 pieces of each of 4 requests with 128 heads took
    14.5 us by 1024 programs of 256 columns and 7.6 us so. But the many pieces of one request are
    read together, not one after the other. Room for more pieces than there are costs as much as
    the pieces: requests are seldom cut into quite as many as there are parts for. A warp has all
    pieces of its columns, if they fit: a merge that needs shared memory starts 2 to 3 us later
    beside a kernel that has most of it.
    """
    num_pieces = num_parts // num_requests
    columns = power_of_two(latent_dim)
    warps = max(columns * dtype.itemsize // 512, 1)  # a thread reads 16 bytes
    if num_pieces <= 4:
        return 4, 1, columns, warps
    if num_pieces <= 32:
        return 8, 1, columns, warps
    block_s = min(power_of_two(num_pieces * 15 // 16), 256)
    return block_s, 1, min(columns, 64, 8192 // block_s), 1 if block_s <= 64 else 4


def _merge_call(
    schedule: Schedule,
    batch: PagedBatch,
    out: Tensor,
    lse: Tensor,
    scale: Tensor | None,
    gpu: Gpu,
) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
    num_parts, num_cuts = schedule.work.num_parts, len(schedule.cuts)
    _, slot_rows, latent_dim = schedule.outs.shape
    block_s, block_r, block_c, num_warps = _choose_blocks(
        num_parts, batch.num_requests, latent_dim, schedule.outs.dtype
    )
    arguments = {
        "scale_ptr": scale,
        "outs_ptr": schedule.outs,
        "lses_ptr": schedule.lses,
        "bounds_ptr": schedule.bounds,
        "cuts_ptr": schedule.cuts,
        "offsets_ptr": batch.input_row_offsets,
        "out_ptr": out,
        "lse_ptr": lse,
        "num_heads": out.shape[1],
        "num_cuts": num_cuts,
        "slot_rows": slot_rows,
        "LATENT_DIM": latent_dim,
        "LN_2": LN_2,
        "BLOCK_S": block_s,
        "BLOCK_R": block_r,
        "BLOCK_C": block_c,
        "IS_EARLY": gpu.has_early_start,
    }
    num_steps = triton.cdiv(latent_dim, block_c) * triton.cdiv(slot_rows, block_r) * num_cuts
    options = {"num_warps": num_warps, "enable_fp_fusion": True, **gpu.early_start}
    return (min(num_steps, 16 * gpu.num_sms),), arguments, options


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """One program an SM and a gang of two; both widths of a latent; few requests and many."""
    fp32, fp16 = torch.float32, torch.float16
    for num_parts, gang, latent_dim, num_requests, dtype in (
        (132, 1, 512, 1, fp32), (132, 1, 512, 64, fp32), (66, 2, 256, 64, fp32),
        (132, 1, 512, 1, fp16),
    ):  # fmt: skip
        work = Work(num_parts, gang, 64, 64)
        batch = PagedBatch(range(num_requests + 1), [0] * num_requests, [[0]] * num_requests)
        schedule = make_schedule(batch, 16, 1, latent_dim, work, dtype)
        label = f"B{num_requests}-P{num_parts}-gang{gang}-L{latent_dim}"
        if dtype == fp32:
            arguments, options = _schedule_call(batch, 16, schedule)
            yield config_of_call(_schedule_kernel, f"schedule-{label}", arguments, options)
        out = torch.empty(num_requests, 16, latent_dim, dtype=torch.bfloat16)
        lse = torch.empty(num_requests, 16)
        scale = None if dtype == fp32 else torch.empty(2)
        gpu = Gpu(capability, 132)
        _, arguments, options = _merge_call(schedule, batch, out, lse, scale, gpu)
        label = f"merge-{label}" + ("" if dtype == fp32 else "-fp16")
        yield config_of_call(_merge_cuts_kernel, label, arguments, options)
