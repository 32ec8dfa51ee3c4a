"""scaled_mm: out = sum over groups of 128 of K of (a @ b) * scale_a * scale_b, + bias; by wgmma.

A program takes every num_programs-th tile of ``out``, or part of K of one. One warp fetches steps
of 128 of K by TMA into a ring of STAGES; two warpgroups multiply, each one half of the tile's rows,
64 at a time. Where sums are exact, or scales change along K, the product of a step leaves the
tensor core, whose accumulator keeps some 13 bits, and is added in fp32. Most products of up to 64
rows have a kernel of their own, ``scaled_mm_few``; tiles, launches and repeats of both are here.
"""

import math
from collections.abc import Callable, Iterator, Sequence
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from kvkern.kernels.config import KernelConfig, config_of_call, spills
from kvkern.kernels.device import gpu_of
from kvkern.kernels.hopper.compat import (
    as_matrix,
    copy_values,
    load_tile,
    matrix_descriptor,
    store_tile,
    view_tile,
)
from kvkern.kernels.hopper.paging import make_barriers, next_stage, pin
from kvkern.kernels.hopper.scaled_mm_few import (
    BLOCK_K,
    OF_A_STEP,
    scaled_mm_few_kernel,
)
from kvkern.kernels.launch import Descriptors, Launch, launch
from kvkern.kernels.paging import power_of_two
from kvkern.kernels.sum_splits import MOST_SPLITS, SumAgain, launch_sum, new_partials
from kvkern.warm_up import size_class

_WAVE: gl.constexpr = gl.constexpr(64)  # rows that wgmma takes


@gluon.jit
def _num_rounds(num_units):
    """Of units that this program has."""
    rounds = num_units // gl.num_programs(0)
    return rounds + (_unit(rounds) < num_units).to(gl.int32)


@gluon.jit
def _unit(turn):
    """Turns go to and fro: programs that get a narrow tile get the next ones too."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    return turn * programs + gl.where(turn % 2 == 1, programs - 1 - program, program)


@gluon.jit
def _place(
    unit, tiles_m, tiles_n, num_matrices, num_splits, steps, BAND: gl.constexpr,
    HAS_NARROW: gl.constexpr,
):  # fmt: skip
    """Matrix, tile and steps of a unit: bands of row tiles, each column after column.

    Narrow tiles, the last column's, come after all others.
    """
    tile = unit // num_splits
    split = unit % num_splits
    wide_n = tiles_n - 1 if HAS_NARROW else tiles_n
    matrix = tile // (tiles_m * wide_n)
    in_matrix = tile % (tiles_m * wide_n)
    first = in_matrix // (BAND * wide_n) * BAND
    in_band = in_matrix % (BAND * wide_n)
    band_rows = gl.minimum(tiles_m - first, BAND)
    m = first + in_band % band_rows
    n = in_band // band_rows
    if HAS_NARROW:
        narrow = tile - num_matrices * tiles_m * wide_n
        matrix = gl.where(narrow < 0, matrix, narrow // tiles_m)
        m = gl.where(narrow < 0, m, narrow % tiles_m)
        n = gl.where(narrow < 0, n, wide_n)
    return matrix, m, n, split, split * steps // num_splits, (split + 1) * steps // num_splits


@gluon.jit
def _fetch(
    a,
    b,
    factors_a,
    factors_b,
    full,
    empty,
    a_desc,
    b_desc,
    scale_a_ptr,
    scale_b_ptr,
    num_rows,
    num_columns,
    depth,
    num_matrices,
    num_splits,
    stride_scale_a_matrix,
    stride_scale_a_row,
    stride_scale_a_group,
    stride_scale_b_matrix,
    stride_scale_b_group,
    stride_scale_b_column,
    BAND: gl.constexpr,
    HAS_GROUPS: gl.constexpr,
    IS_COLUMN_MAJOR: gl.constexpr,
    HAS_NARROW: gl.constexpr,
):
    """The warp that fills the ring; scales of a step come beside its operands."""
    STAGES: gl.constexpr = a.shape[0]
    BLOCK_M: gl.constexpr = a.shape[2]
    BLOCK_N: gl.constexpr = b.shape[2]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    BOX_M: gl.constexpr = a_desc.block_type.shape[1]
    COPIES: gl.constexpr = factors_b.shape[1]  # of a scale that all rows share
    OF_TILES: gl.constexpr = a_desc.block_type.nbytes + b_desc.block_type.nbytes
    NUM_BYTES: gl.constexpr = OF_TILES + (4 * BLOCK_M if IS_COLUMN_MAJOR else 0)
    tiles_m = gl.cdiv(num_rows, BLOCK_M)
    tiles_n = gl.cdiv(num_columns, BLOCK_N)
    steps = gl.cdiv(depth, BLOCK_K)
    num_units = num_matrices * tiles_m * tiles_n * num_splits
    stage = 0
    phase = 1
    for turn in range(_num_rounds(num_units)):
        matrix, m, n, _, first_step, end_step = _place(
            _unit(turn), tiles_m, tiles_n, num_matrices, num_splits, steps, BAND, HAS_NARROW
        )
        if HAS_GROUPS:
            if not IS_COLUMN_MAJOR:
                row = gl.minimum(m * BLOCK_M + gl.arange(0, BLOCK_M, layout=LANES), num_rows - 1)
                of_a = scale_a_ptr + matrix.to(gl.int64) * stride_scale_a_matrix
                of_a += first_step.to(gl.int64) * stride_scale_a_group
                of_a += row.to(gl.int64) * stride_scale_a_row
            of_b = scale_b_ptr + matrix.to(gl.int64) * stride_scale_b_matrix
            of_b += first_step.to(gl.int64) * stride_scale_b_group
            of_b += (n * BLOCK_N // 128).to(gl.int64) * stride_scale_b_column
            of_b += gl.zeros([COPIES], gl.int32, LANES)
        for step in range(first_step, end_step):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, NUM_BYTES)
            rows = a.index(stage).slice(0, BOX_M, dim=1)  # those past them are never stored
            load_tile(a_desc, [matrix, m * BLOCK_M, step * BLOCK_K], bar, rows)
            load_tile(b_desc, [matrix, n * BLOCK_N, step * BLOCK_K], bar, b.index(stage))
            if HAS_GROUPS:
                if IS_COLUMN_MAJOR:
                    at = [matrix, step, m * BLOCK_M]
                    load_tile(scale_a_ptr, at, bar, factors_a.index(stage))
                else:
                    copy_values(factors_a.index(stage), of_a)
                    of_a += stride_scale_a_group
                copy_values(factors_b.index(stage), of_b)
                of_b += stride_scale_b_group
                async_copy.mbarrier_arrive(bar, increment_count=False)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _sum_in_tensor_core(
    acc, acc_2, a, b, full, empty, num_steps, stage, phase, FIRST: gl.constexpr
):
    """Products of all steps into the accumulators; a step is let go when the next is under way."""
    STAGES: gl.constexpr = a.shape[0]
    BLOCK_M: gl.constexpr = a.shape[2]
    COLUMNS: gl.constexpr = acc.shape[1]
    HAS_TWO: gl.constexpr = BLOCK_M == 4 * _WAVE
    for step in range(num_steps):
        mbarrier.wait(full.index(stage), phase)
        rows = as_matrix(a.index(stage))
        columns = _columns_of(b, stage, COLUMNS)
        acc = warpgroup_mma(rows.slice(FIRST, _WAVE, dim=0), columns, acc, is_async=True)
        if HAS_TWO:
            acc_2 = warpgroup_mma(
                rows.slice(FIRST + _WAVE, _WAVE, dim=0), columns, acc_2, is_async=True
            )
            acc, acc_2 = warpgroup_mma_wait(2, deps=(acc, acc_2))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        last = gl.where(stage == 0, STAGES - 1, stage - 1)
        mbarrier.arrive(empty.index(last), count=1, pred=step > 0)
        stage, phase = next_stage(stage, phase, STAGES)
    if HAS_TWO:
        acc, acc_2 = warpgroup_mma_wait(0, deps=(acc, acc_2))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    last = gl.where(stage == 0, STAGES - 1, stage - 1)
    mbarrier.arrive(empty.index(last), count=1, pred=num_steps > 0)
    return acc, acc_2, stage, phase


@gluon.jit
def _sum_in_registers(
    acc,
    acc_2,
    a,
    b,
    factors_a,
    factors_b,
    full,
    empty,
    num_steps,
    stage,
    phase,
    FIRST: gl.constexpr,
    HAS_GROUPS: gl.constexpr,
):
    """The product of each step, times its scales, added in fp32."""
    STAGES: gl.constexpr = a.shape[0]
    BLOCK_M: gl.constexpr = a.shape[2]
    COLUMNS: gl.constexpr = acc.shape[1]
    HAS_TWO: gl.constexpr = BLOCK_M == 4 * _WAVE
    OF_ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    for _ in range(num_steps):
        mbarrier.wait(full.index(stage), phase)
        if HAS_GROUPS:  # pinned, so that they are loaded before the product is begun
            of_a = view_tile(factors_a.index(stage), gl.float32, [BLOCK_M], FLAT)
            of_b = pin(factors_b.index(stage).slice(0, 1).load(OF_ROW))
            factor = pin(of_a.slice(FIRST, _WAVE).load(OF_ROW))
            if HAS_TWO:
                factor_2 = pin(of_a.slice(FIRST + _WAVE, _WAVE).load(OF_ROW))
        rows = as_matrix(a.index(stage))
        columns = _columns_of(b, stage, COLUMNS)
        part = _product(rows.slice(FIRST, _WAVE, dim=0), columns)
        if HAS_TWO:
            if HAS_GROUPS:
                part *= gl.expand_dims(pin(factor) * of_b, 1)
            acc = pin(acc + part)
            # passes at once; ptxas begins no product before it that it lacks the registers for
            mbarrier.wait(full.index(stage), phase)
            part = _product(rows.slice(FIRST + _WAVE, _WAVE, dim=0), columns)
            mbarrier.arrive(empty.index(stage), count=1)
            if HAS_GROUPS:
                part *= gl.expand_dims(pin(factor_2) * of_b, 1)
            acc_2 = pin(acc_2 + part)
        else:
            mbarrier.arrive(empty.index(stage), count=1)
            if HAS_GROUPS:
                part *= gl.expand_dims(pin(factor) * of_b, 1)
            acc = pin(acc + part)
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, acc_2, stage, phase


@gluon.jit
def _product(rows, columns):
    COLUMNS: gl.constexpr = columns.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    zero = gl.zeros([_WAVE, COLUMNS], gl.float32, LAYOUT)
    part = warpgroup_mma(rows, columns, zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(part,))


@gluon.jit
def _columns_of(b, stage, COLUMNS: gl.constexpr):
    """The first of a stage, as wgmma takes them."""
    return as_matrix(b.index(stage)).slice(0, COLUMNS, dim=0).permute((1, 0))


@gluon.jit
def _multiply(
    which: gl.constexpr,
    a,
    b,
    staged,
    of_columns,
    factors_a,
    factors_b,
    full,
    empty,
    out_desc,
    scale_a_ptr,
    scale_b_ptr,
    bias_ptr,
    num_rows,
    num_columns,
    depth,
    num_matrices,
    num_splits,
    stride_scale_a_matrix,
    stride_scale_a_row,
    stride_scale_b_matrix,
    stride_scale_b_column,
    stride_bias,
    BAND: gl.constexpr,
    HAS_GROUPS: gl.constexpr,
    IS_EXACT: gl.constexpr,
    HAS_NARROW: gl.constexpr,
):
    """A warpgroup: one or two times 64 rows of each tile."""
    BLOCK_M: gl.constexpr = a.shape[2]
    BLOCK_N: gl.constexpr = b.shape[2]
    tiles_m = gl.cdiv(num_rows, BLOCK_M)
    tiles_n = gl.cdiv(num_columns, BLOCK_N)
    steps = gl.cdiv(depth, BLOCK_K)
    num_units = num_matrices * tiles_m * tiles_n * num_splits
    stage = 0
    phase = 0
    for turn in range(_num_rounds(num_units)):
        matrix, m, n, split, first_step, end_step = _place(
            _unit(turn), tiles_m, tiles_n, num_matrices, num_splits, steps, BAND, HAS_NARROW
        )
        row = m * BLOCK_M + which * BLOCK_M // 2
        into = split * num_matrices + matrix
        num_steps = end_step - first_step
        if HAS_NARROW and n == tiles_n - 1:
            stage, phase = _make_tile(
                a, b, staged, of_columns, factors_a, factors_b, full, empty, out_desc, scale_a_ptr,
                scale_b_ptr, bias_ptr, num_rows, num_columns, stride_scale_a_matrix,
                stride_scale_a_row, stride_scale_b_matrix, stride_scale_b_column, stride_bias,
                matrix, into, row, n, num_steps, stage, phase, which, BLOCK_N // 2, HAS_GROUPS,
                IS_EXACT,
            )  # fmt: skip
        else:
            stage, phase = _make_tile(
                a, b, staged, of_columns, factors_a, factors_b, full, empty, out_desc, scale_a_ptr,
                scale_b_ptr, bias_ptr, num_rows, num_columns, stride_scale_a_matrix,
                stride_scale_a_row, stride_scale_b_matrix, stride_scale_b_column, stride_bias,
                matrix, into, row, n, num_steps, stage, phase, which, BLOCK_N, HAS_GROUPS,
                IS_EXACT,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _make_tile(
    a,
    b,
    staged,
    of_columns,
    factors_a,
    factors_b,
    full,
    empty,
    out_desc,
    scale_a_ptr,
    scale_b_ptr,
    bias_ptr,
    num_rows,
    num_columns,
    stride_scale_a_matrix,
    stride_scale_a_row,
    stride_scale_b_matrix,
    stride_scale_b_column,
    stride_bias,
    matrix,
    into,
    row,
    n,
    num_steps,
    stage,
    phase,
    which: gl.constexpr,
    COLUMNS: gl.constexpr,
    HAS_GROUPS: gl.constexpr,
    IS_EXACT: gl.constexpr,
):
    """A warpgroup's rows of a tile, and of its first COLUMNS columns. The ring's place after it."""
    BLOCK_M: gl.constexpr = a.shape[2]
    BLOCK_N: gl.constexpr = b.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    FIRST: gl.constexpr = which * BLOCK_M // 2
    HAS_TWO: gl.constexpr = BLOCK_M == 4 * _WAVE
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    BOXES: gl.constexpr = staged.shape[0] // (1 if BLOCK_M == _WAVE else 2)
    # what the end of a tile wants is under way while its products are made
    column = gl.minimum(n * BLOCK_N + gl.arange(0, BLOCK_N, layout=THREADS), num_columns - 1)
    if not HAS_GROUPS:
        of_a = scale_a_ptr + matrix.to(gl.int64) * stride_scale_a_matrix
        scale_a = _load_of_rows(of_a, row, num_rows, stride_scale_a_row, LAYOUT)
        scale_a_2 = scale_a
        if HAS_TWO:
            scale_a_2 = _load_of_rows(of_a, row + _WAVE, num_rows, stride_scale_a_row, LAYOUT)
        of_b = scale_b_ptr + matrix.to(gl.int64) * stride_scale_b_matrix
        scale_b = gl.load(of_b + column.to(gl.int64) * stride_scale_b_column)
    if HAS_BIAS:
        bias = gl.load(bias_ptr + matrix.to(gl.int64) * stride_bias + column).to(gl.float32)

    acc = gl.zeros([_WAVE, COLUMNS], gl.float32, LAYOUT)
    acc_2 = gl.zeros([_WAVE, COLUMNS if HAS_TWO else 8], gl.float32, LAYOUT)
    if HAS_GROUPS or IS_EXACT:
        acc, acc_2, stage, phase = _sum_in_registers(
            acc, acc_2, a, b, factors_a, factors_b, full, empty, num_steps, stage, phase, FIRST,
            HAS_GROUPS,
        )  # fmt: skip
    else:
        acc, acc_2, stage, phase = _sum_in_tensor_core(
            acc, acc_2, a, b, full, empty, num_steps, stage, phase, FIRST
        )

    if not HAS_GROUPS:
        of_columns.index(2 * which).store(scale_b)
        acc *= gl.expand_dims(scale_a, 1)
        if HAS_TWO:
            acc_2 *= gl.expand_dims(scale_a_2, 1)
    if HAS_BIAS:
        of_columns.index(2 * which + 1).store(bias)
    _store(
        acc, staged, of_columns, out_desc, into, row, n * BLOCK_N, which, 0, 0, BOXES,
        HAS_GROUPS, HAS_BIAS,
    )  # fmt: skip
    if HAS_TWO:
        _store(
            acc_2, staged, of_columns, out_desc, into, row + _WAVE, n * BLOCK_N, which,
            COLUMNS // staged.shape[3], 0, BOXES, HAS_GROUPS, HAS_BIAS,
        )  # fmt: skip
    return stage, phase


@gluon.jit
def _load_of_rows(of_a, row, num_rows, stride, LAYOUT: gl.constexpr):
    rows = gl.minimum(row + gl.arange(0, _WAVE, layout=gl.SliceLayout(1, LAYOUT)), num_rows - 1)
    return gl.load(of_a + rows.to(gl.int64) * stride)


@gluon.jit
def _store(
    acc,
    staged,
    of_columns,  # scales and bias, of each warpgroup
    out_desc,
    into,
    row,
    column,
    WHICH: gl.constexpr,
    NUMBER: gl.constexpr,  # of boxes of the tile before
    OFFSET: gl.constexpr,  # of the first column in the tile
    BOXES: gl.constexpr,
    HAS_GROUPS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """Scale columns, add the bias, round and store, by as many columns as a box has.

    A warpgroup's boxes take turns in what it has of ``staged``; of a tile they are a multiple.
    """
    COLUMNS: gl.constexpr = acc.shape[1]
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    if COLUMNS > staged.shape[3]:
        left, right = acc.reshape([_WAVE, 2, COLUMNS // 2]).permute([0, 2, 1]).split()
        _store(
            left, staged, of_columns, out_desc, into, row, column, WHICH, NUMBER, OFFSET, BOXES,
            HAS_GROUPS, HAS_BIAS,
        )  # fmt: skip
        _store(
            right, staged, of_columns, out_desc, into, row, column, WHICH,
            NUMBER + COLUMNS // 2 // staged.shape[3], OFFSET + COLUMNS // 2, BOXES, HAS_GROUPS,
            HAS_BIAS,
        )  # fmt: skip
    else:
        if not HAS_GROUPS:
            scale = of_columns.index(2 * WHICH).slice(OFFSET, COLUMNS).load(OF_COLUMN)
            acc *= gl.expand_dims(scale, 0)
        if HAS_BIAS:
            bias = of_columns.index(2 * WHICH + 1).slice(OFFSET, COLUMNS).load(OF_COLUMN)
            acc += gl.expand_dims(bias, 0)
        tma.store_wait(BOXES - 1)  # what was staged there before has been read
        box = staged.index(WHICH * BOXES + NUMBER % BOXES)
        SWIZZLE: gl.constexpr = out_desc.layout.swizzle_byte_width
        FLAT: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, staged.dtype.primitive_bitwidth, 2)
        view_tile(box, box.dtype, [_WAVE, COLUMNS], FLAT).store(acc.to(box.dtype))
        fence_async_shared()
        store_tile(out_desc, [into, row, column + OFFSET], box)


@gluon.jit(do_not_specialize=OF_A_STEP)
def _scaled_mm_kernel(
    a_desc,  # fp8 [G, M, K] in boxes [1, BLOCK_M, 128], of fewer rows where there are few
    b_desc,  # fp8 [G, N, K] in boxes [1, BLOCK_N, 128]
    scale_a_ptr,  # fp32 [G, cells of M, cells of K], or [G, cells of K, M] in boxes [1, 1, BLOCK_M]
    scale_b_ptr,  # fp32 [G, cells of K, cells of N]
    bias_ptr,  # [G, N], or None
    out_desc,  # [S * G, M, N] in boxes [1, 64, 128 bytes]
    num_rows,
    num_columns,
    depth,
    num_matrices,
    num_splits,
    stride_scale_a_matrix,
    stride_scale_a_row,  # 0: one scale
    stride_scale_a_group,
    stride_scale_b_matrix,
    stride_scale_b_group,
    stride_scale_b_column,
    stride_bias,
    BLOCK_M: gl.constexpr,  # 64, or 128 or 256 for two warpgroups
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    BOXES: gl.constexpr,  # of a warpgroup's results that are on their way out
    HAS_GROUPS: gl.constexpr,  # scales of 1 x 128 and 128 x 128
    IS_COLUMN_MAJOR: gl.constexpr,  # those of a, which the TMA then fetches
    IS_EXACT: gl.constexpr,
    HAS_NARROW: gl.constexpr,  # the last column of tiles is no more than half as wide as others
):
    NUM_FACTORS: gl.constexpr = STAGES if HAS_GROUPS else 1
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 1, BLOCK_M, BLOCK_K], a_desc.layout)
    b = gl.allocate_shared_memory(
        b_desc.dtype, [STAGES, 1, b_desc.block_type.shape[1], BLOCK_K], b_desc.layout
    )
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[1]
    GROUPS: gl.constexpr = 1 if BLOCK_M == _WAVE else 2  # of warps that multiply
    staged = gl.allocate_shared_memory(
        out_desc.dtype, [GROUPS * BOXES, 1, _WAVE, out_desc.block_type.shape[2]], out_desc.layout
    )
    OF_COLUMNS: gl.constexpr = 1 if HAS_GROUPS and bias_ptr is None else BLOCK_N
    of_columns = gl.allocate_shared_memory(gl.float32, [2 * GROUPS, OF_COLUMNS], FLAT)
    if IS_COLUMN_MAJOR:
        factors_a = gl.allocate_shared_memory(
            gl.float32, [NUM_FACTORS, 1, 1, BLOCK_M], scale_a_ptr.layout
        )
    else:
        factors_a = gl.allocate_shared_memory(gl.float32, [NUM_FACTORS, BLOCK_M], FLAT)
    factors_b = gl.allocate_shared_memory(gl.float32, [NUM_FACTORS, 32], FLAT)
    full = make_barriers(STAGES, 33 if HAS_GROUPS else 1)  # lanes of the warp, and the TMA
    empty = make_barriers(STAGES, GROUPS)
    fence_async_shared()
    gdc_launch_dependents()  # a sum of splits that waits for all of this may start
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, a, b, staged, of_columns, factors_a, factors_b, full,
                    empty, out_desc, scale_a_ptr, scale_b_ptr, bias_ptr, num_rows, num_columns,
                    depth, num_matrices, num_splits, stride_scale_a_matrix, stride_scale_a_row,
                    stride_scale_b_matrix, stride_scale_b_column, stride_bias, BAND, HAS_GROUPS,
                    IS_EXACT, HAS_NARROW,
                )),
                (_multiply, (
                    1, a, b, staged, of_columns, factors_a, factors_b, full,
                    empty, out_desc, scale_a_ptr, scale_b_ptr, bias_ptr, num_rows, num_columns,
                    depth, num_matrices, num_splits, stride_scale_a_matrix, stride_scale_a_row,
                    stride_scale_b_matrix, stride_scale_b_column, stride_bias, BAND, HAS_GROUPS,
                    IS_EXACT, HAS_NARROW,
                )),
                (_fetch, (
                    a, b, factors_a, factors_b, full, empty, a_desc, b_desc, scale_a_ptr,
                    scale_b_ptr, num_rows, num_columns, depth, num_matrices, num_splits,
                    stride_scale_a_matrix, stride_scale_a_row, stride_scale_a_group,
                    stride_scale_b_matrix, stride_scale_b_group, stride_scale_b_column, BAND,
                    HAS_GROUPS, IS_COLUMN_MAJOR, HAS_NARROW,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, a, b, staged, of_columns, factors_a, factors_b, full,
                    empty, out_desc, scale_a_ptr, scale_b_ptr, bias_ptr, num_rows, num_columns,
                    depth, num_matrices, num_splits, stride_scale_a_matrix, stride_scale_a_row,
                    stride_scale_b_matrix, stride_scale_b_column, stride_bias, BAND, HAS_GROUPS,
                    IS_EXACT, HAS_NARROW,
                )),
                (_fetch, (
                    a, b, factors_a, factors_b, full, empty, a_desc, b_desc, scale_a_ptr,
                    scale_b_ptr, num_rows, num_columns, depth, num_matrices, num_splits,
                    stride_scale_a_matrix, stride_scale_a_row, stride_scale_a_group,
                    stride_scale_b_matrix, stride_scale_b_group, stride_scale_b_column, BAND,
                    HAS_GROUPS, IS_COLUMN_MAJOR, HAS_NARROW,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip


class Tiles(NamedTuple):
    """How a product is cut up."""

    rows: int
    columns: int
    num_splits: int  # of K
    stages: int
    is_few: bool = False  # whether ``scaled_mm_few`` has a kernel for it


_SHARED_BYTES = 232_448
# ns of a step of 128 rows by as many columns, where b is read from memory, not the L2 cache: with
# sums in the tensor core, and with others
_STEP_NS = {
    True: {32: 175, 64: 300, 128: 560, 256: 1050},
    False: {32: 220, 64: 400, 128: 610},
}


def choose_tiles(
    num_rows: int,
    num_columns: int,
    depth: int,
    num_matrices: int,
    *,
    sums_in_tensor_core: bool,
    num_sms: int,
    has_groups: bool = False,
    can_split: bool = True,
) -> Tiles:
    """What takes the busiest SM the least time.

    A thread holds a large tile's sums, and the product of a step beside them unless the tensor core
    sums: so it is 256 x 128 or 128 x 256. The end of a tile weighs where steps are few: then two
    boxes of a tile of 256 x 128 are on their way out, or with groups, whose scales take room, four
    in place of a stage.
    """
    steps = triton.cdiv(depth, 128)
    if num_rows <= _WAVE.value:
        return _choose_few(
            num_rows, triton.cdiv(num_columns, 64) * num_matrices, steps, num_sms, can_split
        )

    def ns(tile: Tiles) -> float:
        """Of the busiest SM."""
        rows, columns, num_splits, _, _ = tile
        tiles_m, tiles_n = triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns)
        count = float(num_matrices * tiles_m * tiles_n)
        if _has_narrow(num_columns, tile):
            count -= num_matrices * tiles_m / 2
        rounds = math.ceil(count * num_splits / num_sms)
        if rows == 128 and num_rows <= 256:
            of_step: float = _STEP_NS[sums_in_tensor_core][columns]
        else:  # what it fetches, multiplies, or waits for
            multiplied = 0.0195 * rows * columns * (1.15 if max(rows, columns) <= 128 else 1)
            of_step = max(1.2 * (rows + columns), multiplied, 80 + 1.2 * columns)
        of_sum = 0.0
        if num_splits > 1:  # a launch, and parts that are written and read
            of_sum = 2000 + num_splits * num_matrices * num_rows * num_columns / 1000
        return float(rounds * triton.cdiv(steps, num_splits) * of_step + of_sum)

    shapes = [(256, 128), (128, 128), (128, 64), (128, 32)]
    if sums_in_tensor_core and steps > 8:
        shapes.insert(0, (128, 256))
    splits = (1, 2, 4, 8) if can_split else (1,)
    tiles = [Tiles(*shape, split, 0) for shape in shapes for split in splits if split <= steps]
    best = min(tiles, key=ns)
    stages = min(_most_stages(best.rows, best.columns, _SHARED_BYTES), 8)
    if has_groups and best.rows == 256 and steps <= 12:
        stages -= 1
    return best._replace(stages=stages)


def _choose_few(num_rows: int, count: int, steps: int, num_sms: int, can_split: bool) -> Tiles:
    """``count`` tiles of 64 columns; K is cut into as many parts as give each SM one.

    With more than 16 rows a step takes longer than its bytes: up to 32 steps are shared by two
    programs an SM, more are better fetched by a warp of their own.
    """
    num_splits = max(round(num_sms / count), 1) if can_split else 1
    is_few = num_rows <= 16 or steps <= 32 * num_splits
    if can_split and is_few and num_rows > 16:
        num_splits = max(num_splits, min(steps // 14, 2 * num_sms // count))
    num_splits = max(min(num_splits, steps // 4, MOST_SPLITS), 1)
    if not is_few:
        return Tiles(64, 64, num_splits, min(_most_stages(64, 64, _SHARED_BYTES), 8))
    programs = min(triton.cdiv(count * num_splits, num_sms), 4)  # that an SM has at a time
    rows = power_of_two(max(num_rows, 8))
    most = _most_stages(rows, 64, _SHARED_BYTES // programs + 18 * 1024)
    steps = triton.cdiv(steps, num_splits)
    return Tiles(64, 64, num_splits, min(most, 10, steps), is_few=True)


def _most_stages(rows: int, columns: int, shared_bytes: int) -> int:
    """Beside what is staged for the store, scales and bias."""
    return (shared_bytes - 21 * 1024) // ((rows + columns) * 128 + 4 * (rows + 64))


def _has_narrow(num_columns: int, tiles: Tiles) -> bool:
    """Whether the last column's tiles are made as tiles of half the columns."""
    left = num_columns % tiles.columns
    is_wide = tiles.rows == 256 and num_columns > tiles.columns
    return is_wide and tiles.num_splits == 1 and 0 < left <= tiles.columns // 2


def _boxes(
    num_columns: int, tiles: Tiles, itemsize: int, *, has_groups: bool, has_bias: bool
) -> int:
    """As many as there is room for, and a tile has a multiple of; of a large tile 4 at most."""
    if max(tiles.rows, tiles.columns) < 256:
        return 1
    a_tile = tiles.rows * tiles.columns * itemsize // 128 // 128
    if _has_narrow(num_columns, tiles):
        a_tile //= 2
    used = tiles.stages * (tiles.rows + tiles.columns) * 128 + 512
    if has_groups:
        used += tiles.stages * (tiles.rows + 32) * 4
    if has_bias or not has_groups:
        used += 16 * tiles.columns
    fits = (_SHARED_BYTES - used) // (2 * 8192)
    return max(boxes for boxes in (1, 2, 4) if boxes <= max(fits, 1) and a_tile % boxes == 0)


def _is_column_major(scale: Tensor) -> bool:
    """Whether those of a step are next to each other, and begin at a multiple of 16 bytes."""
    of_matrix, of_row, of_group = scale.stride()
    return (
        (of_row == 1 or scale.shape[1] == 1)
        and (of_group % 4 == 0 or scale.shape[2] == 1)
        and (of_matrix % 4 == 0 or scale.shape[0] == 1)
        and scale.data_ptr() % 16 == 0
    )


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    cell_a: tuple[int, int],
    cell_b: tuple[int, int],
    row_offsets: None,
    bias: Tensor | None,
    is_exact: bool,
    out: Tensor,
) -> Callable[[Sequence[int | None]], None] | None:
    """Launch once, or twice where K is split. ``kvkern.scaled_mm`` states the contract.

    Returns how to repeat it with tensors that differ in nothing but addresses.
    """
    num_sms = gpu_of(out.device).num_sms
    tiles = _tiles_for(a, b, cell_a, is_exact, num_sms)
    into = _place_for(out, tiles)
    grid, arguments, options = _call(
        a, b, scale_a, scale_b, cell_a, bias if into is out else None, is_exact, into, tiles,
        num_sms,
    )  # fmt: skip
    kernel = scaled_mm_few_kernel if tiles.is_few else _scaled_mm_kernel
    num_varying = list(kernel.arg_names).index("num_rows")
    multiply = launch(kernel, grid, arguments, options, out.device, num_varying=num_varying)
    add = None if into is out else launch_sum(into, bias, out)
    if multiply is None or (add is None and into is not out):
        return None
    return _Again(multiply, arguments, add)


class _Again:
    """Launches the same variants for other addresses."""

    def __init__(
        self,
        multiply: Launch,
        arguments: dict[str, Any],
        add: SumAgain | None,  # where K is split
    ) -> None:
        self._multiply, self._add = multiply, add
        names = {0: "a_desc", 1: "b_desc", 2: "scale_a_ptr", 5: "out_desc"}
        given = {n: arguments.get(name) for n, name in names.items()}
        self._descriptors = Descriptors(
            multiply, {n: None if isinstance(x, Tensor) else x for n, x in given.items()}
        )

    def __call__(self, addresses: Sequence[int | None]) -> None:
        a, b, scale_a, scale_b, _, bias, out = addresses
        at = self._descriptors.at
        operands = (*at(0, a), *at(1, b), *at(2, scale_a), scale_b)
        if self._add is None:
            self._multiply((*operands, bias, *at(5, out)))
        else:
            self._add(lambda into: self._multiply((*operands, None, *at(5, into))), bias, out)


def _tiles_for(
    a: Tensor, b: Tensor, cell_a: tuple[int, int], is_exact: bool, num_sms: int
) -> Tiles:
    num_matrices, depth, num_columns = b.shape
    return choose_tiles(
        size_class(a.shape[1]),
        num_columns,
        depth,
        num_matrices,
        sums_in_tensor_core=not is_exact and cell_a[1] == 0,
        num_sms=num_sms,
        has_groups=cell_a[1] > 0,
        can_split=num_columns % 4 == 0,  # partial sums are stored by TMA too
    )


def _place_for(out: Tensor, tiles: Tiles) -> Tensor:
    return out if tiles.num_splits == 1 else new_partials(tiles.num_splits, out, torch.float32)


def _call(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    cell_a: tuple[int, int],
    bias: Tensor | None,
    is_exact: bool,
    out: Tensor,  # or partial sums [S, G, M, N]
    tiles: Tiles,
    num_sms: int,
) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
    num_matrices, depth, num_columns = b.shape
    num_rows = a.shape[1]

    def strides(name: str, x: Tensor, *dims: str) -> dict[str, int]:
        """0 along a dim that is no more than a scale long."""
        pairs = zip(dims, x.shape, x.stride(), strict=True)
        return {f"stride_{name}_{dim}": 0 if size == 1 else step for dim, size, step in pairs}

    parts = out.flatten(0, -3)  # [S * G, M, N]
    arguments: dict[str, Any] = {
        "a_desc": matrix_descriptor(a, (min(tiles.rows, power_of_two(max(num_rows, 8))), 128)),
        "b_desc": matrix_descriptor(b.mT, (tiles.columns, 128)),
        "scale_a_ptr": scale_a,
        "scale_b_ptr": scale_b,
        "bias_ptr": bias,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "depth": depth,
        "num_matrices": num_matrices,
        "num_splits": tiles.num_splits,
        **strides("scale_a", scale_a, "matrix", "row", "group"),
        **strides("scale_b", scale_b, "matrix", "group", "column"),
        "stride_bias": 0 if bias is None else bias.stride(0),
        "STAGES": tiles.stages,
        "HAS_GROUPS": cell_a[1] > 0,
        "IS_EXACT": is_exact,
    }
    num_tiles = triton.cdiv(num_rows, tiles.rows) * triton.cdiv(num_columns, tiles.columns)
    num_units = num_tiles * num_matrices * tiles.num_splits
    if tiles.is_few:
        arguments["out_ptr"] = out
        arguments["stride_out_part"], arguments["stride_out_row"] = parts.stride()[:2]
        return (num_units,), arguments, {"num_warps": 4, "enable_fp_fusion": True}
    box = (_WAVE.value, min(128 // out.element_size(), tiles.columns))
    arguments["out_desc"] = matrix_descriptor(parts, box)
    arguments["BLOCK_M"], arguments["BAND"] = tiles.rows, 2048 // tiles.rows
    arguments["HAS_NARROW"] = _has_narrow(num_columns, tiles)
    arguments["BOXES"] = _boxes(
        num_columns,
        tiles,
        out.element_size(),
        has_groups=cell_a[1] > 0,
        has_bias=bias is not None,
    )
    arguments["IS_COLUMN_MAJOR"] = cell_a[1] > 0 and _is_column_major(scale_a)
    if arguments["IS_COLUMN_MAJOR"]:
        of_steps = matrix_descriptor(scale_a.mT, (1, tiles.rows), is_swizzled=False)
        arguments["scale_a_ptr"] = of_steps
    options = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True}
    return (min(num_units, num_sms),), arguments, options


_BUDGET = spills("around a tile's end, where two sums meet scales and bias", 128, newer=256)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each kind of sum, both dtypes of an operand, tiles of each size, split and not."""
    if capability != 90:
        return
    fp16, fp32 = torch.float16, torch.float32
    calls: list[tuple[str, int, int, int, dict[str, Any]]] = [
        ("fast", 4096, 4096, 7168, {}),
        ("fast-narrow", 4096, 2112, 7168, {}),
        ("fast-short", 4096, 24576, 512, {}),
        ("fast", 16, 4096, 7168, {"a_dtype": torch.float8_e5m2, "dtype": fp16, "has_bias": True}),
        ("exact", 4096, 4096, 7168, {"is_exact": True, "has_bias": True}),
        ("exact", 128, 4096, 7168, {"is_exact": True, "dtype": fp16}),
        ("groups", 4096, 4096, 7168, {"of_groups": "column"}),
        ("groups-short", 4096, 24576, 1536, {"of_groups": "column"}),
        ("groups-narrow", 4096, 2112, 7168, {"of_groups": "row"}),
        ("groups-fp32", 4096, 24576, 7168, {"of_groups": "row", "dtype": fp32, "has_bias": True}),
        ("groups", 128, 24576, 1536, {"of_groups": "row"}),
        ("groups", 64, 24576, 1536, {"of_groups": "row"}),
        ("groups-long", 64, 7168, 16384, {"of_groups": "row"}),
    ]
    for label, num_rows, num_columns, depth, options in calls:
        yield _shipped(label, num_rows, num_columns, depth, **options)


def _shipped(
    label: str,
    num_rows: int,
    num_columns: int,
    depth: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    a_dtype: torch.dtype = torch.float8_e4m3fn,
    is_exact: bool = False,
    of_groups: str = "",  # whether scales are of groups, and what is next to each other
    has_bias: bool = False,
) -> KernelConfig:
    """One call on tensors without memory."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(1, *shape, dtype=dtype, device="meta")

    a = empty(num_rows, depth, dtype=a_dtype)
    b = empty(num_columns, depth, dtype=torch.float8_e4m3fn).mT
    out = empty(num_rows, num_columns, dtype=dtype)
    steps = depth // 128 if of_groups else 1
    scale_a = empty(steps, num_rows).mT if of_groups == "column" else empty(num_rows, steps)
    scale_b = empty(steps, num_columns)
    bias = empty(num_columns, dtype=torch.bfloat16) if has_bias else None
    cell_a, is_exact = (1, 128 if of_groups else 0), is_exact or bool(of_groups)
    tiles = _tiles_for(a, b, cell_a, is_exact, 132)
    into = _place_for(out, tiles)
    _, arguments, options = _call(
        a, b, scale_a, scale_b, cell_a, bias if into is out else None, is_exact, into, tiles, 132
    )
    kernel = scaled_mm_few_kernel if tiles.is_few else _scaled_mm_kernel
    return config_of_call(kernel, f"{label}-M{num_rows}", arguments, options, **_BUDGET)
