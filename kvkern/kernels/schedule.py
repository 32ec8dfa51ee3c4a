"""schedule: part p takes shares [p, p + 1) / parts of sum_b passes_b * (blocks_b + OVERHEAD).

Decode kernels run one program a part (or a gang of programs, one a tile of 64 rows), about one an
SM, and a part walks over as many requests as its share holds: no SM waits for another's tail. What
a part takes is between two bounds, ``(request, block)``: from its own to the next part's. A request
with a bound inside is cut; its pieces are written to the workspace and merged.

A bound only says where to cut. Lengths, and so what there is to do, are read when the work is done:
a schedule made for other lengths of the same requests costs balance, never a key. It is made by a
kernel, so that a replayed graph makes its own, once a step, for all layers.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.kernels.config import KernelConfig, config_of_call
from kvkern.kernels.numerics import LN_2, round_to
from kvkern.kernels.paging import power_of_two

_BLOCK_B = 1024  # requests looked at together
_OVERHEAD = 3  # what starting and finishing a request costs, in blocks of keys


class Work(NamedTuple):
    """How decode is cut up: constants of the launch that are known on the host."""

    num_parts: int
    gang: int  # programs a part: row tiles that share a read of the keys
    tile_rows: int  # rows (tokens x heads) of a program
    block_n: int  # keys a block


class Schedule(NamedTuple):
    """Bounds, and the workspace for what is cut. Pieces are partial results of whole row tiles.

    A part writes at most two pieces: slot ``2 * part`` for one that begins at its own bound, inside
    a request, and slot ``2 * part + 1`` for one that ends at the next part's bound.
    """

    work: Work
    bounds: Tensor  # int32 [num_parts + 1, 2]: request and block; (0, 0) first, (B, 0) last
    cuts: Tensor  # int32 [num_cuts]: the first part with a bound inside each cut request, then -1
    ends: Tensor  # int64 [B], scratch
    outs: Tensor  # [2 * num_parts, rows, L], normalised
    lses: Tensor  # fp32 [2 * num_parts, rows], base 2


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


@triton.jit(
    do_not_specialize=["num_requests", "num_heads", "num_parts", "num_cuts", "first_stride"],
    do_not_specialize_on_alignment=["offsets_ptr", "cache_lengths_ptr"],
)
def _schedule_kernel(
    offsets_ptr,  # int32 [B+1]
    cache_lengths_ptr,  # int32 [B]
    bounds_ptr,  # int32 [num_parts + 1, 2]
    cuts_ptr,  # int32 [num_cuts]
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

    # the request that each share of the total ends in: as many as end no later come before it
    part = tl.arange(0, BLOCK_P)
    target = part * total // num_parts
    owner = tl.zeros([BLOCK_P], tl.int32)
    stride = first_stride
    while stride > 0:
        probe = owner + stride
        end = tl.load(ends_ptr + probe - 1, mask=probe <= num_requests, other=2**62)
        owner = tl.where(end <= target, probe, owner)
        stride = stride // 2
    begin = tl.load(ends_ptr + owner - 1, mask=owner > 0, other=0)

    # a bound within a 24th of a share of the request's begin or end is moved there: a cut costs a
    # second start and a merge
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

    tl.store(cuts_ptr + part, tl.full([BLOCK_P], -1, tl.int32), mask=part < num_cuts)
    tl.debug_barrier()
    has_previous = mask & (part > 0)
    previous_owner = tl.load(bounds_ptr + 2 * part - 2, mask=has_previous, other=-1)
    previous_block = tl.load(bounds_ptr + 2 * part - 1, mask=has_previous, other=0)
    is_first = (block > 0) & ((previous_owner != owner) | (previous_block == 0))
    index = tl.cumsum(is_first.to(tl.int32), axis=0) - 1
    tl.store(cuts_ptr + index, part, mask=is_first & (index < num_cuts))


@triton.jit
def _load_pieces(lses_ptr, bounds_ptr, part, first, request, num_parts, slot_rows, row):
    """Rows of the workspace, and base-2 lse, of what parts wrote for ``request``; -inf: nothing.

    ``first`` is the first part whose own bound is inside the request; the part before it wrote the
    request's first piece.
    """
    mask = (part >= first - 1) & (part < num_parts)
    owner = tl.load(bounds_ptr + 2 * part, mask=mask, other=-1)
    block = tl.load(bounds_ptr + 2 * part + 1, mask=mask, other=0)
    next_owner = tl.load(bounds_ptr + 2 * part + 2, mask=mask, other=-1)
    next_block = tl.load(bounds_ptr + 2 * part + 3, mask=mask, other=0)
    # a part between equal bounds has nothing to do, and writes nothing
    has_work = (next_owner != owner) | (next_block != block)
    is_later = (part >= first) & (owner == request) & (block > 0) & has_work
    is_first = part == first - 1
    slot = 2 * part + is_first.to(tl.int32)
    piece_row = slot.to(tl.int64) * slot_rows + row
    lse = tl.load(lses_ptr + piece_row, mask=is_first | is_later, other=-float("inf"))
    return piece_row, lse


@triton.jit(
    do_not_specialize=["num_heads", "num_parts", "slot_rows"],
    do_not_specialize_on_alignment=["offsets_ptr"],
)
def _merge_cuts_kernel(
    outs_ptr,  # [2 * num_parts, slot_rows, L]
    lses_ptr,  # fp32 [2 * num_parts, slot_rows], base 2
    bounds_ptr,
    cuts_ptr,
    offsets_ptr,  # int32 [B+1]
    out_ptr,  # [T, H, L]
    lse_ptr,  # fp32 [T, H]
    num_heads,
    num_parts,
    slot_rows,
    LATENT_DIM: tl.constexpr,
    LN_2: tl.constexpr,
    BLOCK_C: tl.constexpr,  # columns a program
    BLOCK_S: tl.constexpr,  # pieces read together
    BLOCK_P: tl.constexpr,  # > num_parts
):
    """Program (columns, row, cut): out = sum 2^(lse_s - lse) out_s over a request's pieces."""
    row = tl.program_id(1)
    first = tl.load(cuts_ptr + tl.program_id(2))
    if first < 0:
        return
    request = tl.load(bounds_ptr + 2 * first)
    start = tl.load(offsets_ptr + request)
    if row >= (tl.load(offsets_ptr + request + 1) - start) * num_heads:
        return
    part = tl.arange(0, BLOCK_P)
    _, lse = _load_pieces(lses_ptr, bounds_ptr, part, first, request, num_parts, slot_rows, row)
    max_lse = tl.max(lse, axis=0)
    last = tl.max(tl.where(lse == -float("inf"), -1, part), axis=0)
    shift = tl.where(max_lse == -float("inf"), 0.0, max_lse)
    weight_sum = tl.sum(tl.exp2(lse - shift), axis=0)
    weight_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)  # then max_lse is -inf

    offs_l = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask_l = offs_l < LATENT_DIM
    acc = tl.zeros([BLOCK_C], tl.float32)
    for begin in range(first - 1, last + 1, BLOCK_S):
        piece_row, piece_lse = _load_pieces(
            lses_ptr, bounds_ptr, begin + tl.arange(0, BLOCK_S), first, request, num_parts,
            slot_rows, row,
        )  # fmt: skip
        weight = tl.exp2(piece_lse - shift)
        # a piece that saw no key holds nothing
        mask = (piece_lse != -float("inf"))[:, None] & mask_l[None, :]
        offs = piece_row[:, None] * LATENT_DIM + offs_l[None, :]
        piece = tl.load(outs_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        acc += tl.sum(piece * weight[:, None], axis=0)
    out_row = start.to(tl.int64) * num_heads + row
    out = round_to(acc / weight_sum, out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_row * LATENT_DIM + offs_l, out, mask=mask_l)
    if tl.program_id(0) == 0:
        tl.store(lse_ptr + out_row, (max_lse + tl.log2(weight_sum)) * LN_2)


def make_schedule(
    batch: PagedBatch, num_heads: int, max_query_len: int, latent_dim: int, work: Work
) -> Schedule:
    """Allocate, with room for requests of up to ``max_query_len`` new tokens each."""
    gang_rows = work.gang * work.tile_rows
    slot_rows = -(-max_query_len * num_heads // gang_rows) * gang_rows
    num_slots, device = 2 * work.num_parts, batch.device
    return Schedule(
        work,
        torch.empty(work.num_parts + 1, 2, dtype=torch.int32, device=device),
        torch.empty(
            max(min(batch.num_requests, work.num_parts - 1), 1), dtype=torch.int32, device=device
        ),
        torch.empty(batch.num_requests, dtype=torch.int64, device=device),
        torch.empty(num_slots, slot_rows, latent_dim, device=device),
        torch.empty(num_slots, slot_rows, device=device),
    )


def fill_schedule(schedule: Schedule, batch: PagedBatch, num_heads: int) -> None:
    """Set the bounds for the lengths that the batch has when this runs."""
    arguments, options = _schedule_call(batch, num_heads, schedule)
    _schedule_kernel[(1,)](**arguments, **options)


def merge_cuts(schedule: Schedule, batch: PagedBatch, out: Tensor, lse: Tensor) -> None:
    """Fill the rows of ``out`` ``[T, H, L]`` and ``lse`` ``[T, H]`` whose requests were cut."""
    if schedule.work.num_parts == 1 or batch.num_requests == 0:
        return
    grid, arguments, options = _merge_call(schedule, batch, out, lse)
    _merge_cuts_kernel[grid](**arguments, **options)


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
        "OVERHEAD": _OVERHEAD,
        "BLOCK_B": _BLOCK_B,
        "BLOCK_P": power_of_two(work.num_parts + 1),
    }
    return arguments, {"num_warps": 8}


def _merge_call(
    schedule: Schedule, batch: PagedBatch, out: Tensor, lse: Tensor
) -> tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]:
    num_slots, slot_rows, latent_dim = schedule.outs.shape
    block_c = min(power_of_two(latent_dim), 128)
    arguments = {
        "outs_ptr": schedule.outs,
        "lses_ptr": schedule.lses,
        "bounds_ptr": schedule.bounds,
        "cuts_ptr": schedule.cuts,
        "offsets_ptr": batch.input_row_offsets,
        "out_ptr": out,
        "lse_ptr": lse,
        "num_heads": out.shape[1],
        "num_parts": num_slots // 2,
        "slot_rows": slot_rows,
        "LATENT_DIM": latent_dim,
        "LN_2": LN_2,
        "BLOCK_C": block_c,
        "BLOCK_S": 16,
        "BLOCK_P": power_of_two(num_slots // 2 + 1),
    }
    grid = (triton.cdiv(latent_dim, block_c), slot_rows, len(schedule.cuts))
    return grid, arguments, {"num_warps": 4, "enable_fp_fusion": True}


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """One program an SM and a gang of two; both widths of a latent."""
    for num_parts, gang, latent_dim in ((132, 1, 512), (66, 2, 256)):
        work = Work(num_parts, gang, 64, 64)
        batch = PagedBatch([0, 1], [0], [[0]])
        schedule = make_schedule(batch, 16, 1, latent_dim, work)
        label = f"P{num_parts}-gang{gang}-L{latent_dim}"
        arguments, options = _schedule_call(batch, 16, schedule)
        yield config_of_call(_schedule_kernel, f"schedule-{label}", arguments, options)
        out, lse = torch.empty(1, 16, latent_dim, dtype=torch.bfloat16), torch.empty(1, 16)
        _, arguments, options = _merge_call(schedule, batch, out, lse)
        yield config_of_call(_merge_cuts_kernel, f"merge-{label}", arguments, options)
