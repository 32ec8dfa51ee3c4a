"""matmul_w8a16, matmul_w4a16 of many tokens: weights go from registers into wgmma.

Weights are wgmma's rows, which it takes from registers, as they are when their codes have been made
16-bit floats; tokens are its columns, in shared memory. Two warpgroups have half of a tile's
weights each, and make the next ones while their last are multiplied. One warp fetches by TMA: words
with their scales into one ring, tokens of a step into another.
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvkern.kernels.device import EARLY_START, Gpu
from kvkern.kernels.hopper.compat import copy_values, load_tile, tile_descriptor
from kvkern.kernels.hopper.packed_ints import (
    PART,
    inverse_step,
    prefetch_words,
    spread_zero,
    stored_row,
    weights_of_part,
    words_layout,
)
from kvkern.kernels.hopper.paging import make_barriers, next_stage, pin
from kvkern.kernels.hopper.tile_rows import first_row_of_part, rows_of_tile
from kvkern.kernels.packed_ints import chunk_columns
from kvkern.kernels.sum_splits import MOST_SPLITS
from kvkern.warm_up import size_class

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
    num_rows,
    num_columns,
    num_groups,
    first,
    last,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """The warp that fills both rings: of words with their groups' scales, and of tokens."""
    STAGES: gl.constexpr = words.shape[0]
    STAGES_X: gl.constexpr = full_x.shape[0]
    PARTS: gl.constexpr = xs.shape[0] // STAGES_X
    ROWS: gl.constexpr = words.shape[1]
    CHUNK: gl.constexpr = chunk_columns(BITS)
    GROUPS: gl.constexpr = CHUNK // GROUP if GROUP > 0 else 1
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    n0 = gl.program_id(0) * ROWS
    HALF: gl.constexpr = x_desc.block_type.shape[0]
    m0 = first_row_of_part(gl.program_id(2) * 2 * HALF, 0, num_rows, HALF)
    m1 = first_row_of_part(gl.program_id(2) * 2 * HALF, 1, num_rows, HALF)
    row = gl.arange(0, ROWS, layout=LANES)
    column = n0 + stored_row(row)
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
        stage, phase = next_stage(stage, phase, STAGES)
        for step in range(CHUNK // (PARTS * PART)):
            mbarrier.wait(empty_x.index(stage_x), phase_x)
            bar_x = full_x.index(stage_x)
            mbarrier.expect(bar_x, PARTS * 2 * x_desc.block_type.nbytes)
            for part in gl.static_range(PARTS):
                column_x = chunk * CHUNK + (step * PARTS + part) * PART
                x = xs.index(stage_x * PARTS + part)
                load_tile(x_desc, [m0, column_x], bar_x, x.slice(0, HALF))
                load_tile(x_desc, [m1, column_x], bar_x, x.slice(HALF, HALF))
            stage_x, phase_x = next_stage(stage_x, phase_x, STAGES_X)


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
    turns,
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
    """A warpgroup: 64 of the tile's columns of out.

    While a step's products are made the next one's first operand is; what lies between them then
    leaves the tensor core to the other warpgroup. ptxas has no product begin before one that is
    under way and takes its operand from registers, unless both are awaited together. Where much
    lies there, sums of a group for 128 tokens, they take turns: a step's products are begun when
    the other's have been, so that never both of them add at once.
    """
    STAGES: gl.constexpr = words.shape[0]
    STAGES_X: gl.constexpr = full_x.shape[0]
    PARTS: gl.constexpr = xs.shape[0] // STAGES_X
    STEPS: gl.constexpr = chunk_columns(BITS) // (PARTS * PART)  # of a chunk
    TOKENS: gl.constexpr = xs.shape[1]
    DTYPE: gl.constexpr = xs.dtype
    FIRST: gl.constexpr = WHICH * _WAVE
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = words_layout(_WAVE, 4)
    OF_ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    BACK: gl.constexpr = inverse_step(BITS, DTYPE == gl.bfloat16)
    TAKES_TURNS: gl.constexpr = GROUP > 0 and TOKENS == 128
    n0 = gl.program_id(0) * words.shape[1] + FIRST
    column = n0 + stored_row(gl.arange(0, _WAVE, layout=OF_ROW))
    scale_of_all = None
    zero_of_all = None
    if GROUP == 0:
        scale_of_all = _of_column(scale_ptr, column, num_columns)
        if zero_ptr is not None:
            of_word = n0 + gl.arange(0, _WAVE, layout=gl.SliceLayout(1, WORDS))
            zero_of_all = _of_column(zero_ptr, of_word, num_columns)
    if zero_ptr is None:
        zeros = None
    acc = gl.zeros([_WAVE, TOKENS], gl.float32, MMA)
    part_sum = gl.zeros([_WAVE, TOKENS], gl.float32, MMA)
    mbarrier.wait(ready.index(0), 0)
    mbarrier.wait(full.index(0), 0)
    tile = words.index(0).slice(FIRST, _WAVE, dim=0).load(WORDS)
    scale = _of_step(scales, scale_of_all, 0, FIRST, OF_ROW)
    weights = _weights_of_part(tile, zeros, zero_of_all, 0, 0, FIRST, BITS, DTYPE, A)
    mbarrier.wait(full_x.index(0), 0)
    stage = 0
    phase = 0
    stage_x = 0
    phase_x = 0
    turn = 1 - WHICH
    for chunk in range(first, last):
        for step in gl.static_range(STEPS):
            group = stage * STEPS + step
            if TAKES_TURNS:
                mbarrier.wait(turns.index(WHICH), turn)
                turn ^= 1
            x = xs.index(stage_x * PARTS).permute((1, 0))
            part_sum = warpgroup_mma(weights, x, part_sum, use_acc=GROUP == 0, is_async=True)
            before_x = gl.where(stage_x == 0, STAGES_X - 1, stage_x - 1)
            is_first = (chunk == first) & (step == 0)
            mbarrier.arrive(empty_x.index(before_x), count=1, pred=is_first == 0)
            for part in gl.static_range(1, PARTS):
                weights = _weights_of_part(
                    tile, zeros, zero_of_all, group, step * PARTS + part, FIRST, BITS, DTYPE, A
                )
                x = xs.index(stage_x * PARTS + part).permute((1, 0))
                part_sum = warpgroup_mma(weights, x, part_sum, is_async=True)
            if TAKES_TURNS:
                mbarrier.arrive(turns.index(1 - WHICH), count=1)
            stage_x, phase_x = next_stage(stage_x, phase_x, STAGES_X)
            goes_on = (chunk + 1 < last) | (step + 1 < STEPS)
            if step + 1 < STEPS:
                next_scale = _of_step(scales, scale_of_all, group + 1, FIRST, OF_ROW)
                weights = _weights_of_part(
                    tile, zeros, zero_of_all, group + 1, (step + 1) * PARTS, FIRST, BITS, DTYPE, A
                )
            else:  # after the last chunk whatever is there: it is not used
                after, phase = next_stage(stage, phase, STAGES)
                mbarrier.wait(full.index(after), phase, pred=goes_on)
                tile = words.index(after).slice(FIRST, _WAVE, dim=0).load(WORDS)
                next_scale = _of_step(scales, scale_of_all, after * STEPS, FIRST, OF_ROW)
                weights = _weights_of_part(
                    tile, zeros, zero_of_all, after * STEPS, 0, FIRST, BITS, DTYPE, A
                )
                mbarrier.arrive(empty.index(stage), count=1)
                stage = after
            mbarrier.wait(full_x.index(stage_x), phase_x, pred=goes_on)
            part_sum = warpgroup_mma_wait(0, deps=(part_sum,))
            if GROUP > 0:
                acc = pin(acc + part_sum * gl.expand_dims(scale * BACK, 1))
                scale = next_scale
    if GROUP == 0:
        acc = part_sum * gl.expand_dims(scale * BACK, 1)
    if bias_ptr is not None:
        acc += gl.expand_dims(_of_column(bias_ptr, column, num_columns).to(gl.float32), 1)
    gdc_launch_dependents()
    _store(acc.to(out_ptr.dtype.element_ty), n0, out_ptr, num_rows, num_columns)


@gluon.jit
def _of_step(of_groups, of_all, group, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """A warpgroup's scales or zeros, in shared memory by groups unless they are those of all."""
    if of_all is None:
        return of_groups.index(group).slice(FIRST, _WAVE).load(LAYOUT)
    else:
        return of_all


@gluon.jit
def _weights_of_part(
    tile, zeros, zero_of_all, group, INDEX: gl.constexpr, FIRST: gl.constexpr, BITS: gl.constexpr,
    DTYPE: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """64 columns of a chunk as an operand."""
    WORDS: gl.constexpr = tile.type.layout
    if zeros is None:
        zero = None
    else:
        of_rows = _of_step(zeros, zero_of_all, group, FIRST, gl.SliceLayout(1, WORDS))
        zero = spread_zero(of_rows, DTYPE, WORDS)
    return weights_of_part(tile, zero, INDEX, BITS, DTYPE, A)


@gluon.jit
def _of_column(ptr, column, num_columns):
    return gl.load(ptr + column, mask=column < num_columns, other=0.0)


@gluon.jit
def _store(tile, n0, out_ptr, num_rows, num_columns):
    """A warpgroup's sums, as many bytes of out at a time as memory takes: 32 or more."""
    if tile.dtype.primitive_bitwidth == 32:  # as they are: a register of eight lanes is 32 bytes
        _store_at(tile, n0 + stored_row(_columns(tile)), out_ptr, num_rows, num_columns)
    else:  # each thread 16 bytes
        TOKENS: gl.constexpr = tile.shape[1]
        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        ordered = tile.reshape([_WAVE // 8, 2, 4, TOKENS]).permute([0, 2, 1, 3])
        out = gl.convert_layout(ordered.reshape([_WAVE, TOKENS]), OUT)
        _store_at(out, n0 + _columns(out), out_ptr, num_rows, num_columns)


@gluon.jit
def _columns(tile):
    return gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, tile.type.layout))


@gluon.jit
def _store_at(tile, column, out_ptr, num_rows, num_columns):
    TOKENS: gl.constexpr = tile.shape[1]
    LAYOUT: gl.constexpr = gl.SliceLayout(0, tile.type.layout)
    token = rows_of_tile(gl.program_id(2) * TOKENS, num_rows, TOKENS, 2, LAYOUT)
    into = (gl.program_id(1) * num_rows + token).to(gl.int64) * num_columns
    mask = gl.expand_dims(column < num_columns, 1) & gl.expand_dims(token < num_rows, 0)
    gl.store(out_ptr + gl.expand_dims(into, 0) + gl.expand_dims(column, 1), tile, mask=mask)


@gluon.jit(do_not_specialize=["num_rows", "chunks_per_split"])
def matmul_many_kernel(
    words_desc,  # int32 [chunks * N, 32] in boxes [BLOCK_N, 32]
    x_desc,  # [M, K] in boxes [BLOCK_M / 2, 64]
    scale_ptr,  # fp32 [groups, N]
    zero_ptr,  # fp32 [groups, N], or None
    bias_ptr,  # [N], or None
    out_ptr,  # [S, M, N]: fp32 parts of the sum if S > 1
    words_ptr,  # the words
    num_rows,
    num_columns,
    num_groups,
    num_chunks,
    chunks_per_split,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,  # columns of x that share a scale; 0: all
    STAGES: gl.constexpr,
    STAGES_X: gl.constexpr,
    PARTS: gl.constexpr,  # boxes of x of a stage
    LETS_NEXT_START: gl.constexpr,
):
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS: gl.constexpr = words_desc.block_type.shape[0]
    TOKENS: gl.constexpr = 2 * x_desc.block_type.shape[0]
    GROUPS: gl.constexpr = chunk_columns(BITS) // GROUP if GROUP > 0 else 1
    NUM_SCALES: gl.constexpr = STAGES * GROUPS if GROUP > 0 else 1
    NUM_ZEROS: gl.constexpr = NUM_SCALES if zero_ptr is not None else 1
    words = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, 32], words_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES_X * PARTS, TOKENS, PART], x_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [NUM_SCALES, ROWS], FLAT)
    zeros = gl.allocate_shared_memory(gl.float32, [NUM_ZEROS, ROWS], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_x = gl.allocate_shared_memory(gl.int64, [STAGES_X, 1], mbarrier.MBarrierLayout())
    empty_x = gl.allocate_shared_memory(gl.int64, [STAGES_X, 1], mbarrier.MBarrierLayout())
    first = gl.program_id(1) * chunks_per_split
    n0 = gl.program_id(0) * ROWS
    prefetch_words(words_ptr, first, n0, num_chunks, num_columns, 1, ROWS)
    ready = make_barriers(1, 1)
    turns = make_barriers(2, 1)
    fence_async_shared()
    gdc_wait()
    if LETS_NEXT_START:
        gdc_launch_dependents()
    last = gl.minimum(first + chunks_per_split, num_chunks)
    gl.warp_specialize(
        [
            (_multiply, (
                0, words, xs, scales, zeros, full, empty, full_x, empty_x, ready, turns,
                scale_ptr, zero_ptr, bias_ptr, out_ptr, num_rows, num_columns, first, last, BITS,
                GROUP,
            )),
            (_multiply, (
                1, words, xs, scales, zeros, full, empty, full_x, empty_x, ready, turns,
                scale_ptr, zero_ptr, bias_ptr, out_ptr, num_rows, num_columns, first, last, BITS,
                GROUP,
            )),
            (_fetch, (
                words, xs, scales, zeros, full, empty, full_x, empty_x, ready, words_desc, x_desc,
                scale_ptr, zero_ptr, num_rows, num_columns, num_groups, first, last, BITS, GROUP,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


class Tiles(NamedTuple):
    """How a product is cut up: ``rows`` of x and 128 columns of out, K in ``num_splits``."""

    rows: int
    num_splits: int
    parts: int  # times 64 columns of x, multiplied at a time
    stages_x: int


def choose_tiles(
    num_rows: int,
    num_columns: int,
    depth: int,
    bits: int,
    group_size: int,
    has_zero: bool,
    gpu: Gpu,
) -> Tiles:
    """What takes the least time, by what was measured on an H200.

    That was of an earlier form; by this one's shorter times what is chosen takes longer. In 8 bits,
    and so without sums of groups beside those of all, registers suffice for 256 rows: a weight that
    has been converted is used twice as often.
    """
    num_rows = size_class(num_rows)  # a warm-up meets the variants of each
    num_chunks = triton.cdiv(depth, chunk_columns(bits))

    def us(rows: int, num_splits: int) -> float:
        num_tiles = triton.cdiv(num_columns, _COLUMNS) * triton.cdiv(num_rows, rows)
        waves: int = triton.cdiv(num_tiles * num_splits, gpu.num_sms)
        length: int = triton.cdiv(num_chunks, num_splits)
        of_row = 0.0066 if rows <= 128 else 0.0053
        of_chunk = max(of_row * rows * chunk_columns(bits) / 128, 0.5)  # multiplied, or fetched
        of_sum = 0.0
        if num_splits > 1:  # a launch, and parts that are written and read
            of_sum = 1.5 + num_splits * num_rows * num_columns * 8 / 6.5e6
        of_chunks: float = waves * (length * of_chunk + 2)
        return of_chunks + of_sum

    groups = chunk_columns(bits) // group_size if group_size < depth else 0
    fewest = next(size for size in (32, 64, 128) if size >= min(num_rows, 128))
    choices = [(fewest, splits) for splits in range(1, min(num_chunks, MOST_SPLITS) + 1)]
    if bits == 8 and num_rows > 128:
        choices.append((256, 1))  # where these would be cut, tiles of 128 rows fill the card
    rows, splits = min(choices, key=lambda choice: us(*choice))
    num_splits = triton.cdiv(num_chunks, triton.cdiv(num_chunks, splits))
    parts = 1 if rows == 256 or groups > 2 else 2
    of_words, of_x = _COLUMNS * (128 + 4 * groups * (1 + has_zero)), parts * rows * 128
    room = _SHARED_BYTES - _BESIDE_BYTES - _STAGES * of_words
    stages_x = min(_STAGES * chunk_columns(bits) // (64 * parts), room // of_x)  # as many chunks
    return Tiles(rows, num_splits, parts, stages_x)


_COLUMNS = 128  # of out: 64 for each warpgroup
_STAGES = 4  # of words
_SHARED_BYTES = 232_448
_BESIDE_BYTES = 2048 + 16_384  # barriers, and sums on their way out, some at a time


def many_call(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    out: Tensor,  # or parts of the sum [S, M, N]
    tiles: Tiles,
) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
    """Grid, arguments and options of the launch."""
    num_rows, depth = x.shape
    num_chunks, num_columns, _ = values.shape
    is_cut = tiles.num_splits > 1
    words = values.view(torch.int32).view(num_chunks * num_columns, 32)
    arguments = {
        "words_desc": tile_descriptor(words, (_COLUMNS, 32)),
        "x_desc": tile_descriptor(x, (tiles.rows // 2, 64)),
        "scale_ptr": scale,
        "zero_ptr": zero,
        "bias_ptr": None if is_cut else bias,
        "out_ptr": out,
        "words_ptr": values,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "num_groups": scale.shape[0],
        "num_chunks": num_chunks,
        "chunks_per_split": triton.cdiv(num_chunks, tiles.num_splits),
        "BITS": 8 if values.dtype == torch.int8 else 4,
        "GROUP": 0 if group_size >= depth else group_size,
        "STAGES": _STAGES,
        "STAGES_X": tiles.stages_x,
        "PARTS": tiles.parts,
        "LETS_NEXT_START": is_cut,
    }
    grid = (
        triton.cdiv(num_columns, _COLUMNS),
        tiles.num_splits,
        triton.cdiv(num_rows, tiles.rows),
    )
    options = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True, **EARLY_START}
    return grid, arguments, options
