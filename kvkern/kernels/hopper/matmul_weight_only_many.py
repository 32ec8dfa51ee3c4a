"""matmul_w8a16, matmul_w4a16 of many tokens: weights go from registers into wgmma.

Weights are wgmma's rows, which it takes from registers, as they are when their codes have been made
16-bit floats; tokens are its columns, in shared memory. Two warpgroups have half of a tile's
weights each, and convert while the other one multiplies. One warp fetches by TMA.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from kvkern.kernels.device import gpu_of
from kvkern.kernels.hopper.compat import copy_values, load_tile, tile_descriptor
from kvkern.kernels.hopper.matmul_weight_only import (
    PART,
    _inverse_step,
    _next,
    _spread,
    _stored_row,
    _weights,
    _words_layout,
)
from kvkern.kernels.hopper.paging import make_barriers
from kvkern.kernels.packed_ints import chunk_columns
from kvkern.kernels.sum_splits import new_partials, sum_splits_call, sum_splits_kernel

_WAVE: gl.constexpr = gl.constexpr(64)  # rows that wgmma takes


@gluon.jit
def _fetch(
    words,
    xs,
    scales,
    zeros,
    full,
    empty,
    full_x,
    empty_x,
    ready,
    words_desc,
    x_desc,
    scale_ptr,
    zero_ptr,
    num_columns,
    num_groups,
    first,
    last,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """The warp that fills both rings: of words with their groups' scales, and of tokens."""
    STAGES: gl.constexpr = words.shape[0]
    STAGES_X: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = words.shape[1]
    CHUNK: gl.constexpr = chunk_columns(BITS)
    PARTS: gl.constexpr = CHUNK // PART
    GROUPS: gl.constexpr = CHUNK // GROUP if GROUP > 0 else 1
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    n0 = gl.program_id(0) * ROWS
    m0 = gl.program_id(2) * x_desc.block_type.shape[0]
    row = gl.arange(0, ROWS, layout=LANES)
    column = n0 + _stored_row(row)
    for index in gl.static_range(STAGES):
        mbarrier.init(full.index(index), count=33 if GROUP > 0 else 1)
        mbarrier.init(empty.index(index), count=2)
    for index in gl.static_range(STAGES_X):
        mbarrier.init(full_x.index(index), count=1)
        mbarrier.init(empty_x.index(index), count=2)
    fence_async_shared()
    mbarrier.arrive(ready.index(0), count=1)
    stage = 0
    phase = 1
    stage_x = 0
    phase_x = 1
    for chunk in range(first, last):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, words_desc.block_type.nbytes)
        load_tile(words_desc, [chunk * num_columns + n0, 0], bar, words.index(stage))
        if GROUP > 0:
            for index in gl.static_range(GROUPS):
                group = chunk * GROUPS + index
                mask = (column < num_columns) & (group < num_groups)
                ptrs = scale_ptr + group * num_columns + column
                copy_values(scales.index(stage * GROUPS + index), ptrs, mask=mask)
                if zero_ptr is not None:
                    mask = (n0 + row < num_columns) & (group < num_groups)
                    ptrs = zero_ptr + group * num_columns + n0 + row
                    copy_values(zeros.index(stage * GROUPS + index), ptrs, mask=mask)
            async_copy.mbarrier_arrive(bar, increment_count=False)
        stage, phase = _next(stage, phase, STAGES)
        for part in range(PARTS):
            mbarrier.wait(empty_x.index(stage_x), phase_x)
            bar_x = full_x.index(stage_x)
            mbarrier.expect(bar_x, x_desc.block_type.nbytes)
            load_tile(x_desc, [m0, chunk * CHUNK + part * PART], bar_x, xs.index(stage_x))
            stage_x, phase_x = _next(stage_x, phase_x, STAGES_X)


@gluon.jit
def _multiply(
    WHICH: gl.constexpr,
    words,
    xs,
    scales,
    zeros,
    full,
    empty,
    full_x,
    empty_x,
    ready,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    first,
    last,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """A warpgroup: 64 or 128 of the tile's weights."""
    STAGES: gl.constexpr = words.shape[0]
    STAGES_X: gl.constexpr = xs.shape[0]
    TOKENS: gl.constexpr = xs.shape[1]
    DTYPE: gl.constexpr = xs.dtype
    PARTS: gl.constexpr = chunk_columns(BITS) // PART
    HAS_TWO: gl.constexpr = words.shape[1] == 4 * _WAVE
    FIRST: gl.constexpr = WHICH * words.shape[1] // 2
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = _words_layout(_WAVE, 4)
    OF_WORDS: gl.constexpr = gl.SliceLayout(1, WORDS)
    OF_ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    BACK: gl.constexpr = _inverse_step(BITS, DTYPE == gl.bfloat16)
    n0 = gl.program_id(0) * words.shape[1] + FIRST
    column = n0 + _stored_row(gl.arange(0, _WAVE, layout=OF_ROW))
    acc = gl.zeros([_WAVE, TOKENS], gl.float32, MMA)
    acc_2 = gl.zeros([_WAVE, TOKENS if HAS_TWO else 8], gl.float32, MMA)
    zero_of_all = None
    zero_of_all_2 = None
    if GROUP == 0:
        if zero_ptr is not None:
            of_word = n0 + gl.arange(0, _WAVE, layout=OF_WORDS)
            zero_of_all = _spread(_of_rows(zero_ptr, of_word, num_columns), DTYPE, WORDS)
            if HAS_TWO:
                zero_of_all_2 = _spread(
                    _of_rows(zero_ptr, of_word + _WAVE, num_columns), DTYPE, WORDS
                )
    mbarrier.wait(ready.index(0), 0)
    stage = 0
    phase = 0
    stage_x = 0
    phase_x = 0
    for _ in range(first, last):
        mbarrier.wait(full.index(stage), phase)
        tile = words.index(stage).slice(FIRST, _WAVE, dim=0).load(WORDS)
        if HAS_TWO:
            tile_2 = words.index(stage).slice(FIRST + _WAVE, _WAVE, dim=0).load(WORDS)
        for part in gl.static_range(PARTS):
            if GROUP > 0 and part * PART % GROUP == 0:
                of_group = stage * (PARTS * PART // GROUP) + part * PART // GROUP
                factor = scales.index(of_group).slice(FIRST, _WAVE).load(OF_ROW)
                if zero_ptr is None:
                    zero = None
                else:
                    zero = _spread(
                        zeros.index(of_group).slice(FIRST, _WAVE).load(OF_WORDS), DTYPE, WORDS
                    )
            if GROUP == 0:
                zero = zero_of_all
            weights = _weights(tile, zero, part, BITS, DTYPE, A)
            mbarrier.wait(full_x.index(stage_x), phase_x)
            x = xs.index(stage_x).permute((1, 0))
            if GROUP == 0:
                acc = warpgroup_mma(weights, x, acc, is_async=True)
                if HAS_TWO:
                    weights_2 = _weights(tile_2, zero_of_all_2, part, BITS, DTYPE, A)
                    acc_2 = warpgroup_mma(weights_2, x, acc_2, is_async=True)
                    acc, acc_2 = warpgroup_mma_wait(0, deps=(acc, acc_2))
                else:
                    acc = warpgroup_mma_wait(0, deps=(acc,))
            else:
                if part * PART % GROUP == 0:
                    nothing = gl.zeros([_WAVE, TOKENS], gl.float32, MMA)
                    part_sum = warpgroup_mma(weights, x, nothing, use_acc=False, is_async=True)
                else:
                    part_sum = warpgroup_mma(weights, x, part_sum, is_async=True)
                part_sum = warpgroup_mma_wait(0, deps=(part_sum,))
                if (part + 1) * PART % GROUP == 0:
                    acc += part_sum * gl.expand_dims(factor * BACK, 1)
            mbarrier.arrive(empty_x.index(stage_x), count=1)
            stage_x, phase_x = _next(stage_x, phase_x, STAGES_X)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = _next(stage, phase, STAGES)
    _store(acc, column, scale_ptr, bias_ptr, out_ptr, num_rows, num_columns, BACK, GROUP == 0)
    if HAS_TWO:
        _store(
            acc_2, column + _WAVE, scale_ptr, bias_ptr, out_ptr, num_rows, num_columns, BACK,
            GROUP == 0,
        )  # fmt: skip


@gluon.jit
def _of_rows(ptr, column, num_columns):
    return gl.load(ptr + column, mask=column < num_columns, other=0.0)


@gluon.jit
def _store(
    acc,
    column,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    BACK: gl.constexpr,
    HAS_ONE_SCALE: gl.constexpr,
):
    TOKENS: gl.constexpr = acc.shape[1]
    if HAS_ONE_SCALE:
        acc = acc * BACK * gl.expand_dims(_of_rows(scale_ptr, column, num_columns), 1)
    if bias_ptr is not None:
        acc += gl.expand_dims(_of_rows(bias_ptr, column, num_columns).to(gl.float32), 1)
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, acc.type.layout))
    token += gl.program_id(2) * TOKENS
    into = (gl.program_id(1) * num_rows + token).to(gl.int64) * num_columns
    mask = gl.expand_dims(column < num_columns, 1) & gl.expand_dims(token < num_rows, 0)
    ptrs = out_ptr + gl.expand_dims(into, 0) + gl.expand_dims(column, 1)
    gl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["num_rows", "chunks_per_split"])
def _many_kernel(
    words_desc,  # int32 [chunks * N, 32] in boxes [BLOCK_N, 32]
    x_desc,  # [M, K] in boxes [BLOCK_M, 64]
    scale_ptr,  # fp32 [groups, N]
    zero_ptr,  # fp32 [groups, N], or None
    bias_ptr,  # [N], or None
    out_ptr,  # [S, M, N]: fp32 parts of the sum if S > 1
    num_rows,
    num_columns,
    num_groups,
    num_chunks,
    chunks_per_split,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,  # columns of x that share a scale; 0: all
    STAGES: gl.constexpr,
    STAGES_X: gl.constexpr,
    LETS_NEXT_START: gl.constexpr,
):
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS: gl.constexpr = words_desc.block_type.shape[0]
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    GROUPS: gl.constexpr = chunk_columns(BITS) // GROUP if GROUP > 0 else 1
    NUM_SCALES: gl.constexpr = STAGES * GROUPS if GROUP > 0 else 1
    NUM_ZEROS: gl.constexpr = NUM_SCALES if zero_ptr is not None else 1
    words = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, 32], words_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES_X, TOKENS, PART], x_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [NUM_SCALES, ROWS], FLAT)
    zeros = gl.allocate_shared_memory(gl.float32, [NUM_ZEROS, ROWS], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [STAGES_X, 1], mbarrier.MBarrierLayout())
    empty_x = gl.allocate_shared_memory(gl.int64, [STAGES_X, 1], mbarrier.MBarrierLayout())
    ready = make_barriers(1, 1)
    fence_async_shared()
    if LETS_NEXT_START:
        gdc_launch_dependents()
    first = gl.program_id(1) * chunks_per_split
    last = gl.minimum(first + chunks_per_split, num_chunks)
    gl.warp_specialize(
        [
            (_multiply, (
                0, words, xs, scales, zeros, full, empty, full_x, empty_x, ready, scale_ptr,
                zero_ptr, bias_ptr, out_ptr, num_rows, num_columns, first, last, BITS, GROUP,
            )),
            (_multiply, (
                1, words, xs, scales, zeros, full, empty, full_x, empty_x, ready, scale_ptr,
                zero_ptr, bias_ptr, out_ptr, num_rows, num_columns, first, last, BITS, GROUP,
            )),
            (_fetch, (
                words, xs, scales, zeros, full, empty, full_x, empty_x, ready, words_desc, x_desc,
                scale_ptr, zero_ptr, num_columns, num_groups, first, last, BITS, GROUP,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


class Tiles(NamedTuple):
    rows: int  # of x
    columns: int  # of out: 128, or 256 for one scale a column
    num_splits: int
    stages: int
    stages_x: int


def tiles_for(
    num_rows: int, num_columns: int, depth: int, bits: int, group_size: int, has_zero: bool,
    columns: int, num_sms: int, splits: int = 0,
) -> Tiles:  # fmt: skip
    rows = 64 if num_rows <= 64 else 128
    num_chunks = triton.cdiv(depth, chunk_columns(bits))
    num_tiles = triton.cdiv(num_columns, columns) * triton.cdiv(num_rows, rows)
    splits = splits or max(1, min(num_sms // num_tiles, num_chunks, 16))
    splits = triton.cdiv(num_chunks, triton.cdiv(num_chunks, splits))
    groups = chunk_columns(bits) // group_size if group_size < depth else 0
    stages = 3
    stage_bytes = columns * 128 + (1 + has_zero) * groups * columns * 4
    stages_x = min((232_448 - 2048 - stages * stage_bytes) // (rows * 128), 10)
    return Tiles(rows, columns, splits, stages, stages_x)


def matmul_many(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    out: Tensor,
    tiles: Tiles,
) -> None:
    parts = out if tiles.num_splits == 1 else new_partials(tiles.num_splits, out, torch.float32)
    grid, arguments, options = call(x, values, scale, zero, bias, group_size, parts, tiles)
    _many_kernel[grid](**arguments, **options)
    if tiles.num_splits > 1:
        sum_grid, arguments, options = sum_splits_call(parts, bias, out, gpu_of(out.device))
        sum_splits_kernel[sum_grid](**arguments, **options)


def call(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    parts: Tensor,
    tiles: Tiles,
) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
    num_rows, depth = x.shape
    num_chunks, num_columns, _ = values.shape
    is_cut = tiles.num_splits > 1
    words = values.view(torch.int32).view(num_chunks * num_columns, 32)
    arguments = {
        "words_desc": tile_descriptor(words, (tiles.columns, 32)),
        "x_desc": tile_descriptor(x, (tiles.rows, 64)),
        "scale_ptr": scale,
        "zero_ptr": zero,
        "bias_ptr": None if is_cut else bias,
        "out_ptr": parts,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "num_groups": scale.shape[0],
        "num_chunks": num_chunks,
        "chunks_per_split": triton.cdiv(num_chunks, tiles.num_splits),
        "BITS": 8 if values.dtype == torch.int8 else 4,
        "GROUP": 0 if group_size >= depth else group_size,
        "STAGES": tiles.stages,
        "STAGES_X": tiles.stages_x,
        "LETS_NEXT_START": is_cut,
    }
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True}
    grid = (
        triton.cdiv(num_columns, tiles.columns),
        tiles.num_splits,
        triton.cdiv(num_rows, tiles.rows),
    )
    return grid, arguments, options
