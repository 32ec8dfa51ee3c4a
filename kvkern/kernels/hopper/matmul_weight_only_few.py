"""matmul_w4a16 and matmul_w8a16 of few tokens: two teams of warps take steps of K in turns.

Weights are the MMA's rows and tokens its columns. A step is 16 KB of words: of 32 columns of out
four chunks, of which each is a warp's, of 64 columns two, each of two warps. One more warp asks for
them by TMA; the first are asked for before it has started and the other barriers are made, which
takes 0.5 us. Three are on their way: with more, memory has them all at the end, when it is late to
multiply. At a tile's end the first team sums what both have found. K is not cut: a second launch,
that sums, takes longer than it saves.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvkern.kernels.device import EARLY_START, Gpu
from kvkern.kernels.hopper.compat import load_tile, tile_descriptor, view_tile
from kvkern.kernels.hopper.packed_ints import (
    inverse_step,
    prefetch_words,
    step_scales_layout,
    step_tokens_layout,
    step_words_layout,
    stored_token,
    tokens_of_step,
    weights_of_step,
)
from kvkern.kernels.hopper.paging import make_barriers, next_stage
from kvkern.warm_up import size_class

_TEAMS: gl.constexpr = gl.constexpr(2)
_WARPS: gl.constexpr = gl.constexpr(4)  # of a team
_COLUMNS: gl.constexpr = gl.constexpr(32)  # of out that a warp makes
_AHEAD: gl.constexpr = gl.constexpr(2)  # steps that are asked for before all else


@gluon.jit
def _fetch(ring, descs, n0, step, stage):
    """A step's words, tokens and scales."""
    words, xs, scales, full = ring
    words_desc, x_desc, scale_desc = descs
    STEP: gl.constexpr = words.shape[1]
    bar = full.index(stage)
    num_bytes: gl.constexpr = words_desc.block_type.nbytes + x_desc.block_type.nbytes
    if scale_desc is None:
        mbarrier.expect(bar, num_bytes)
    else:
        mbarrier.expect(bar, num_bytes + scale_desc.block_type.nbytes)
        load_tile(scale_desc, [0, step * STEP, n0], bar, scales.index(stage))
    load_tile(words_desc, [step * STEP, n0, 0], bar, words.index(stage))
    load_tile(x_desc, [0, step * STEP, 0, 0], bar, xs.index(stage))


@gluon.jit
def _num_tiles(most_tiles, num_columns, COLUMNS: gl.constexpr):
    """Of this program."""
    if most_tiles == 1:  # then known when compiled
        return 1
    else:
        return most_tiles - (_first_column(most_tiles - 1, COLUMNS) >= num_columns).to(gl.int32)


@gluon.jit
def _first_column(tile, COLUMNS: gl.constexpr):
    return (gl.program_id(0) + tile * gl.num_programs(0)) * COLUMNS


@gluon.jit
def _fetch_rest(ring, empty, descs, most_tiles, num_columns, num_steps):
    """All of the program's steps but the first, tile by tile."""
    words, _, _, full = ring
    STAGES: gl.constexpr = words.shape[0]
    COLUMNS: gl.constexpr = words.shape[2]
    stage = gl.minimum(num_steps, _AHEAD)
    phase = 1  # of the phase before a barrier's first, which has ended
    due = 0  # the stage that comes next: so one more than _AHEAD are on their way
    phase_due = 0
    for tile in range(_num_tiles(most_tiles, num_columns, COLUMNS)):
        n0 = _first_column(tile, COLUMNS)
        for step in range(gl.where(tile == 0, gl.minimum(num_steps, _AHEAD), 0), num_steps):
            mbarrier.wait(empty.index(stage), phase)
            _fetch(ring, descs, n0, step, stage)
            mbarrier.wait(full.index(due), phase_due)
            stage, phase = next_stage(stage, phase, STAGES)
            due, phase_due = next_stage(due, phase_due, STAGES)
    gdc_launch_dependents()  # in measured layers 97% of SMs have a program: the next's are spread


@gluon.jit
def _sum(sums, done, phase, of_out, num_rows, num_columns, n0, INVERSE_STEP: gl.constexpr):
    """A tile of out, of what the teams have found."""
    scale_ptr, bias_ptr, out_ptr = of_out
    STEP: gl.constexpr = sums.shape[1]
    COLUMNS: gl.constexpr = sums.shape[2]
    TOKENS: gl.constexpr = sums.shape[3]
    # a thread has its columns' sums of all chunks
    SPREAD: gl.constexpr = gl.BlockedLayout(
        [_TEAMS * STEP, COLUMNS // 32, 1], [1, 32, 1], [1, 1, _WARPS], [0, 1, 2]
    )
    OUT: gl.constexpr = gl.SliceLayout(0, SPREAD)
    column = n0 + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, OUT))
    mask_n = column < num_columns
    if scale_ptr is not None:
        scale = gl.load(scale_ptr + column, mask=mask_n, other=0.0)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + column, mask=mask_n, other=0.0).to(gl.float32)
    mbarrier.wait(done, phase)
    all_sums = view_tile(sums, gl.float32, [_TEAMS * STEP, COLUMNS, TOKENS], sums.type.layout)
    out = gl.sum(all_sums.load(SPREAD), 0) * INVERSE_STEP
    if scale_ptr is not None:
        out *= gl.expand_dims(scale, 1)
    if bias_ptr is not None:
        out += gl.expand_dims(bias, 1)
    row = stored_token(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, OUT)))
    mask = gl.expand_dims(mask_n, 1) & gl.expand_dims(row < num_rows, 0)
    into = gl.expand_dims(row.to(gl.int64) * num_columns, 0) + gl.expand_dims(column, 1)
    gl.store(out_ptr + into, out.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _multiply(
    TEAM: gl.constexpr, ring, sums, barriers, of_out, most_tiles, num_rows, num_columns, num_steps,
    HAS_GROUPS: gl.constexpr,
):  # fmt: skip
    """A team's steps and its sums of them; the first team's, and the sum of all.

    Its stages are its own: a barrier tells by one bit whether a stage has been filled, so a team
    that is ahead would take for its own step what the stage had before the other's.
    """
    words, xs, scales, full = ring
    empty, done, free = barriers
    STAGES: gl.constexpr = words.shape[0]
    STEP: gl.constexpr = words.shape[1]
    COLUMNS: gl.constexpr = words.shape[2]
    PARTS: gl.constexpr = xs.shape[1]  # of a chunk: 64 columns of x; of 4 bits two are a group
    BITS: gl.constexpr = 16 // PARTS
    DTYPE: gl.constexpr = xs.dtype
    ROWS: gl.constexpr = xs.shape[3]
    WARPS: gl.constexpr = _WARPS // STEP  # of a chunk
    WORDS: gl.constexpr = step_words_layout(STEP, COLUMNS, WARPS)
    TOKENS: gl.constexpr = step_tokens_layout(PARTS, STEP, ROWS, WARPS)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [STEP, WARPS, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    OF_ROW: gl.constexpr = gl.SliceLayout(2, ACC)
    HALF: gl.constexpr = PARTS // 2
    zero = gl.zeros([STEP, COLUMNS, max(ROWS, 8)], gl.float32, ACC)
    stage = TEAM
    phase = 0
    for tile in range(_num_tiles(most_tiles, num_columns, COLUMNS)):
        acc = zero
        acc_2 = zero  # of the second half of each chunk
        first = (tile * num_steps + TEAM) % _TEAMS  # the teams take turns from tile to tile
        for _ in range(first, num_steps, _TEAMS):
            mbarrier.wait(full.index(stage), phase)
            code = words.index(stage).load(WORDS)
            tokens = tokens_of_step(xs.index(stage).load(TOKENS), B)
            part = zero if HAS_GROUPS else acc
            part_2 = zero if HAS_GROUPS else acc_2
            for number in gl.static_range(HALF):  # in turns: a chain of products for each half
                weights = weights_of_step(code, number, BITS, DTYPE, A)
                weights_2 = weights_of_step(code, number + HALF, BITS, DTYPE, A)
                part = mma_v2(weights, tokens[number], part)
                part_2 = mma_v2(weights_2, tokens[number + HALF], part_2)
            if HAS_GROUPS:
                both = scales.index(stage).load(step_scales_layout(STEP, COLUMNS, WARPS))
                factor, factor_2 = both.permute((1, 2, 0)).split()
                factor = gl.convert_layout(factor, OF_ROW, assert_trivial=True)
                factor_2 = gl.convert_layout(factor_2, OF_ROW, assert_trivial=True)
                part = acc + part * gl.expand_dims(factor, 2)
                part_2 = acc_2 + part_2 * gl.expand_dims(factor_2, 2)
            acc = part
            acc_2 = part_2
            mbarrier.arrive(empty.index(stage), count=1)
            wraps = stage + _TEAMS >= STAGES
            stage = gl.where(wraps, stage + _TEAMS - STAGES, stage + _TEAMS)
            phase ^= wraps.to(gl.int32)
        if TEAM > 0 and most_tiles > 1:
            mbarrier.wait(free, (tile + 1) % 2)  # sums of the tile before have been read
        sums.index(TEAM).store(acc + acc_2)
        mbarrier.arrive(done, count=1)
        if TEAM == 0:
            INVERSE_STEP: gl.constexpr = inverse_step(BITS, DTYPE == gl.bfloat16)
            n0 = _first_column(tile, COLUMNS)
            _sum(sums, done, tile % 2, of_out, num_rows, num_columns, n0, INVERSE_STEP)
            if most_tiles > 1:
                mbarrier.arrive(free, count=1)


@gluon.jit(do_not_specialize=["num_rows"])
def matmul_few_kernel(
    words_desc,  # int32 [chunks, N, 32] in boxes [STEP, COLUMNS, 32]
    x_desc,  # [PARTS, chunks, M, 64] in boxes [PARTS, STEP, ROWS, 64]; PARTS 4 of 4 bits, 2 of 8
    scale_desc,  # fp32 [2, chunks, N] in boxes [2, STEP, COLUMNS]: of groups of 128; or None
    scale_ptr,  # fp32 [N], or None
    bias_ptr,  # [N], or None
    out_ptr,  # [M, N]
    words_ptr,  # the words
    num_rows,
    num_columns,
    num_chunks,
    most_tiles,  # of a program
    STAGES: gl.constexpr,
):
    """Programs that follow each other have tiles of 32 or 64 columns that do; some have several."""
    gl.static_assert(STAGES % _TEAMS == 0, "a team has stages of its own")
    gl.static_assert(STAGES > _AHEAD)
    STEP: gl.constexpr = words_desc.block_type.shape[0]
    COLUMNS: gl.constexpr = words_desc.block_type.shape[1]
    PARTS: gl.constexpr = x_desc.block_type.shape[0]
    ROWS: gl.constexpr = x_desc.block_type.shape[2]
    prefetch_words(words_ptr, 0, gl.program_id(0) * COLUMNS, num_chunks, num_columns, STEP, COLUMNS)
    # sums of a column's neighbours are together, and no two of a warp in a bank
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 2, 0])
    words = gl.allocate_shared_memory(gl.int32, [STAGES, STEP, COLUMNS, 32], words_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, PARTS, STEP, ROWS, 64], x_desc.layout)
    sums = gl.allocate_shared_memory(gl.float32, [_TEAMS, STEP, COLUMNS, max(ROWS, 8)], SUMS)
    HAS_GROUPS: gl.constexpr = scale_desc is not None
    NUM_SCALES: gl.constexpr = STAGES if HAS_GROUPS else 1
    SCALES: gl.constexpr = scale_desc.layout if HAS_GROUPS else SUMS
    scales = gl.allocate_shared_memory(gl.float32, [NUM_SCALES, 2, STEP, COLUMNS], SCALES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    num_steps = gl.cdiv(num_chunks, STEP)  # beyond the last chunk a box has zeros
    ring = (words, xs, scales, full)
    descs = (words_desc, x_desc, scale_desc)
    for stage in gl.static_range(_AHEAD):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    gdc_wait()
    for stage in gl.static_range(_AHEAD):
        if stage < num_steps:
            _fetch(ring, descs, gl.program_id(0) * COLUMNS, stage, stage)
    for stage in gl.static_range(_AHEAD, STAGES):
        mbarrier.init(full.index(stage), count=1)
    empty = make_barriers(STAGES, 1)
    done = make_barriers(1, _TEAMS).index(0)
    free = make_barriers(1, 1).index(0)
    fence_async_shared()
    barriers = (empty, done, free)
    of_out = (scale_ptr, bias_ptr, out_ptr)
    gl.warp_specialize(
        [
            (_multiply, (
                0, ring, sums, barriers, of_out, most_tiles, num_rows, num_columns, num_steps,
                HAS_GROUPS,
            )),
            (_multiply, (
                1, ring, sums, barriers, of_out, most_tiles, num_rows, num_columns, num_steps,
                HAS_GROUPS,
            )),
            (_fetch_rest, (ring, empty, descs, most_tiles, num_columns, num_steps)),
        ],
        [_WARPS, 1],
        [168, 24],
    )  # fmt: skip


MOST_ROWS = 16


class Tiles(NamedTuple):
    """How a product is cut up: ``rows`` of x, which are all, and ``columns`` of out."""

    rows: int
    columns: int
    stages: int


def choose_tiles(num_rows: int, num_columns: int, bits: int, has_groups: bool, gpu: Gpu) -> Tiles:
    """The narrowest of which an SM has one at most, and up to six stages."""
    rows = size_class(num_rows)
    columns = 32 if triton.cdiv(num_columns, 32) <= gpu.num_sms else 64
    step = _chunks_of_step(columns)
    of_chunk = columns * 128 + 16 // bits * rows * 128 + (8 * columns if has_groups else 0)
    summed = 4 * _TEAMS.value * step * columns * max(rows, 8)
    room = (_SHARED_BYTES - _BESIDE_BYTES - summed) // (step * of_chunk)
    return Tiles(rows, columns, min(room // _TEAMS.value * _TEAMS.value, 6))


def _chunks_of_step(columns: int) -> int:
    chunks: int = _WARPS.value * _COLUMNS.value // columns
    return chunks


_SHARED_BYTES = 232_448
_BESIDE_BYTES = 3072  # barriers, and what aligning takes


def few_call(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    group_size: int,
    out: Tensor,
    gpu: Gpu,
) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
    """Grid, arguments and options of the launch."""
    num_rows, depth = x.shape
    num_chunks, num_columns, _ = values.shape
    has_groups = group_size < depth
    bits = 8 if values.dtype == torch.int8 else 4
    tiles = choose_tiles(num_rows, num_columns, bits, has_groups, gpu)
    rows, columns = tiles.rows, tiles.columns
    step = _chunks_of_step(columns)
    num_tiles = triton.cdiv(num_columns, columns)
    num_programs = min(num_tiles, gpu.num_sms)
    parts_of_x = x.view(num_rows, num_chunks, 16 // bits, 64).permute(2, 1, 0, 3)
    scale_desc = None
    if has_groups:
        of_chunks = scale.view(num_chunks, 2, num_columns).permute(1, 0, 2)
        scale_desc = tile_descriptor(of_chunks, (2, step, columns))
    arguments = {
        "words_desc": tile_descriptor(values.view(torch.int32), (step, columns, 32)),
        "x_desc": tile_descriptor(parts_of_x, (16 // bits, step, rows, 64)),
        "scale_desc": scale_desc,
        "scale_ptr": None if has_groups else scale,
        "bias_ptr": bias,
        "out_ptr": out,
        "words_ptr": values,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "num_chunks": num_chunks,
        "most_tiles": triton.cdiv(num_tiles, num_programs),
        "STAGES": tiles.stages,
    }
    options = {"num_warps": _WARPS.value, "enable_fp_fusion": True, **EARLY_START}
    return (num_programs,), arguments, options
