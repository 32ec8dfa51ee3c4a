"""scaled_mm: out = sum over groups of 128 of K of (a @ b) * scale_a * scale_b, + bias; by wgmma.

A program takes every num_programs-th tile of ``out``, or part of K of one; where K is short, tiles
next to each other, whose rows of a it keeps. One warp fetches steps of 128 of K by TMA into a ring
of STAGES; two warpgroups multiply, each one half of the tile's rows, 64 at a time, or every other
tile; one does it all, if there are 64. Where sums are exact, or scales change along K, the product
of a step leaves the tensor core, whose accumulator keeps some 13 bits, and is added in fp32.
Columns that are left have narrow tiles, done last, or each tile has a few of them beside its own.
Rows of experts are cut into tiles that begin and end with them: every role finds whose a tile is,
on the device. Few rows have a kernel of their own, ``scaled_mm_few``, tiles are chosen in
``scaled_mm_tiles``; launches and repeats of both kernels are here.
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

from kvkern.kernels.config import FP8_PRODUCT, KernelConfig, config_of_call, spills
from kvkern.kernels.device import gpu_of
from kvkern.kernels.hopper.compat import (
    as_matrix,
    copy_values,
    load_tile,
    matrix_descriptor,
    slices_descriptor,
    store_tile,
    view_tile,
)
from kvkern.kernels.hopper.paging import fence_products, make_barriers, next_stage, pin
from kvkern.kernels.hopper.scaled_mm_few import BLOCK_K, OF_A_STEP, scaled_mm_few_kernel
from kvkern.kernels.hopper.scaled_mm_tiles import (
    NARROW_ROWS,
    Tiles,
    choose_tiles,
    choose_tiles_of_experts,
    has_narrow,
    num_boxes,
    num_groups,
    num_held,
    rows_of_box,
)
from kvkern.kernels.launch import Descriptors, Launch, launch
from kvkern.kernels.paging import power_of_two
from kvkern.kernels.sum_splits import SumAgain, launch_sum, new_partials
from kvkern.warm_up import size_class

_HUGE = 2**21  # units, from which on an inverse of 24 bits may be off by more than one
_WAVE: gl.constexpr = gl.constexpr(64)  # rows that wgmma takes
_NARROW_ROWS: gl.constexpr = gl.constexpr(NARROW_ROWS)


class _Order(NamedTuple):
    """Which tiles there are, and how they follow each other; all of it known when compiled."""

    rows: int  # of a tile
    columns: int
    steps: int  # of 128 of K that a stage of the ring has
    band: int  # row tiles that are done column after column
    kept: int  # steps of a that stay while tiles have the same rows: all, or none
    extra: int  # columns that a tile has beside its own, of those behind all tiles' own
    has_narrow: bool  # the last column of tiles has 64 columns or fewer
    has_splits: bool
    has_matrices: bool
    groups: int  # of warps that multiply
    has_turns: bool  # a warpgroup makes every other tile alone
    num_experts: int  # at most, that share out a's rows; 0: all rows go with each matrix
    adds_both: bool  # products of a pair before the next pair is begun
    ahead: int  # stages that are asked for before all barriers are made and the warps have begun
    divides: bool  # numbers of units as integers, not by an inverse
    held: int  # boxes of a result that a warpgroup stores under the next tile's products, or 0


@gluon.constexpr_function
def _first_row(which, order):
    """Of a warpgroup in a tile, whose rows are shared out if there are more than 64."""
    return which * order.rows // 2 if order.rows > 64 and not order.has_turns else 0


@gluon.constexpr_function
def _has_two(order):
    """Whether a warpgroup has twice the 64 rows that wgmma takes."""
    return order.rows == (128 if order.has_turns else 256)


@gluon.constexpr_function
def _has_two_products(order):
    """Of each step in a warpgroup."""
    return order.rows == (128 if order.has_turns else 256) or order.extra > 0


@gluon.jit
def _over(number, count, ORDER: gl.constexpr):
    """number // count, of neither that is negative.

    By an inverse, which is the same from tile to tile where the count is, the two of a tile take
    some 140 cycles less than as divisions of integers.
    """
    if ORDER.divides:
        return number // count
    else:
        inverse = 1.0 / (count + 0 * number).to(gl.float32)
        quotient = (number.to(gl.float32) * inverse).to(gl.int32)  # off by one, at most
        rest = number - quotient * count
        return quotient + (rest >= count).to(gl.int32) - (rest < 0).to(gl.int32)


@gluon.jit
def _tiles_n(num_columns, ORDER: gl.constexpr):
    return gl.cdiv(num_columns, ORDER.columns + ORDER.extra)


@gluon.jit
def _first_extra(n, num_columns, ORDER: gl.constexpr):
    """Of the columns that a tile has beside its own."""
    return _tiles_n(num_columns, ORDER) * ORDER.columns + n * ORDER.extra


@gluon.jit
def _num_units(shape, ORDER: gl.constexpr):
    num_rows, num_columns, _, num_matrices, num_splits, experts = shape
    tiles_n = _tiles_n(num_columns, ORDER)
    if ORDER.num_experts:
        _, _, tiles_m = experts
        return tiles_m * tiles_n
    tiles_m = gl.cdiv(num_rows, ORDER.rows)
    if ORDER.has_narrow:
        return num_matrices * (tiles_m * (tiles_n - 1) + gl.cdiv(num_rows, _NARROW_ROWS))
    else:
        return num_matrices * (tiles_m * tiles_n) * num_splits


@gluon.jit
def _num_rounds(shape, ORDER: gl.constexpr):
    """Units that this program has."""
    num_units = _num_units(shape, ORDER)
    if ORDER.kept:
        return _first_of(gl.program_id(0) + 1, num_units) - _first_of(gl.program_id(0), num_units)
    rounds = _over(num_units, gl.num_programs(0), ORDER)
    return rounds + (_in_turn(rounds, ORDER) < num_units).to(gl.int32)


@gluon.jit
def _in_turn(turn, ORDER: gl.constexpr):
    """With narrow tiles turns go to and fro: programs that get one get the next ones too."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    if ORDER.has_narrow:
        program = gl.where(turn % 2 == 1, programs - 1 - program, program)
    return turn * programs + program


@gluon.jit
def _first_of(program, num_units):
    """Where a's rows are kept a program's units are next to each other."""
    return (program.to(gl.int64) * num_units // gl.num_programs(0)).to(gl.int32)


@gluon.jit
def _share_out(row_offsets_ptr, num_rows, num_matrices, ORDER: gl.constexpr):
    """What ``_place`` finds experts by: how many row tiles there are up to each, and in all."""
    COUNT: gl.constexpr = ORDER.num_experts
    LAYOUT: gl.constexpr = gl.BlockedLayout([COUNT // 128], [32], [4], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    expert = gl.arange(0, COUNT, layout=LAYOUT)
    start, end = _rows_of(expert, row_offsets_ptr, num_rows, num_matrices)
    up_to = gl.associative_scan(gl.cdiv(end - start, ORDER.rows), 0, _sum)
    tiles_up_to = gl.allocate_shared_memory(gl.int32, [COUNT], FLAT)
    tiles_up_to.store(up_to)
    return row_offsets_ptr, tiles_up_to, gl.max(up_to, 0)


@gluon.constexpr_function
def _layout_of_experts(count, num_warps):
    """Each warp has all of them."""
    return gl.SliceLayout(0, gl.BlockedLayout([1, count // 32], [1, 32], [num_warps, 1], [1, 0]))


@gluon.jit
def _sum(one, other):
    return one + other


@gluon.jit
def _rows_of(expert, row_offsets_ptr, num_rows, num_matrices):
    """The first and the one past the last; within a, whatever the offsets are."""
    is_one = expert < num_matrices
    start = gl.load(row_offsets_ptr + expert, mask=is_one, other=0)
    end = gl.load(row_offsets_ptr + expert + 1, mask=is_one, other=0)
    start = gl.maximum(gl.minimum(start, num_rows), 0)
    return start, gl.maximum(gl.minimum(end, num_rows), start)


@gluon.jit
def _expert_of(row_tile, tiles_up_to, WARPS: gl.constexpr):
    """Whose a tile of rows is, the first of its tiles and the one past its last."""
    up_to = tiles_up_to.load(_layout_of_experts(tiles_up_to.shape[0], WARPS))
    is_before = up_to <= row_tile
    expert = gl.sum(is_before.to(gl.int32), 0)
    first = gl.max(gl.where(is_before, up_to, 0), 0)
    return expert, first, gl.min(gl.where(is_before, 2**30, up_to), 0)


@gluon.jit
def _place(turn, shape, ORDER: gl.constexpr, WARPS: gl.constexpr):
    """Matrix, first row, end of its rows, column tile, split and steps of a unit.

    Bands of row tiles, each column after column, expert after expert. Narrow tiles, the last
    column's, come after all others.
    """
    num_rows, num_columns, depth, num_matrices, num_splits, experts = shape
    BAND: gl.constexpr = ORDER.band
    tiles_m = gl.cdiv(num_rows, ORDER.rows)
    num_wide = _tiles_n(num_columns, ORDER) - (1 if ORDER.has_narrow else 0)
    if ORDER.kept:
        tile = _first_of(gl.program_id(0), _num_units(shape, ORDER)) + turn
    else:
        tile = _in_turn(turn, ORDER)
    split = 0 * turn
    first_step = 0 * turn
    end_step = gl.cdiv(depth, BLOCK_K)
    if ORDER.has_splits:  # each begins with a stage
        stages = gl.cdiv(end_step, ORDER.steps)
        unit = tile
        tile = _over(unit, num_splits, ORDER)
        split = unit - tile * num_splits
        first_step = _over(split * stages, num_splits, ORDER) * ORDER.steps
        end_of_split = _over((split + 1) * stages, num_splits, ORDER) * ORDER.steps
        end_step = gl.minimum(end_of_split, end_step)
    in_matrix = tile
    matrix = 0 * turn
    if ORDER.has_matrices:
        matrix = _over(tile, tiles_m * num_wide, ORDER)
        in_matrix = tile - matrix * tiles_m * num_wide
    if ORDER.num_experts:
        row_offsets_ptr, tiles_up_to, _ = experts
        matrix, before, up_to = _expert_of(_over(tile, num_wide, ORDER), tiles_up_to, WARPS)
        in_matrix = tile - before * num_wide
        tiles_m = up_to - before
    band = _over(in_matrix, BAND * num_wide, ORDER)
    in_band = in_matrix - band * BAND * num_wide
    n = in_band // BAND
    m = in_band % BAND
    band_rows = tiles_m - band * BAND
    if band_rows < BAND:
        n = _over(in_band, gl.maximum(band_rows, 1), ORDER)
        m = in_band - n * band_rows
    m += band * BAND
    row = m * ORDER.rows
    if ORDER.has_narrow:
        narrow = tile - num_matrices * tiles_m * num_wide
        if narrow >= 0:
            narrow_m = gl.cdiv(num_rows, _NARROW_ROWS)
            matrix = _over(narrow, narrow_m, ORDER) if ORDER.has_matrices else 0 * turn
            row = (narrow - matrix * narrow_m) * _NARROW_ROWS
            n = num_wide
    end = num_rows
    if ORDER.num_experts:
        start, end = _rows_of(matrix, row_offsets_ptr, num_rows, num_matrices)
        row += start
    return matrix, row, end, n, split, first_step, end_step


@gluon.jit
def _load_stage(
    stages, descs, scale_a, at, step, stage, has_rows, IS_COLUMN_MAJOR: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """What the TMA fetches for a tile that is not narrow."""
    a, b, extra, factors_a, full = stages
    a_desc, b_desc, extra_desc = descs
    of_rows, matrix, first_row, n, num_columns = at
    BOX_M: gl.constexpr = a_desc.block_type.shape[1]
    bar = full.index(stage)
    place = step if ORDER.kept else stage
    k = step * BLOCK_K
    if not has_rows:
        box = a.index(place).slice(0, BOX_M, dim=1)  # no more rows are ever stored
        load_tile(a_desc, [of_rows, first_row, k], bar, box)
    _load_boxes(b_desc, matrix, n * ORDER.columns, k, bar, b.index(stage))
    if IS_COLUMN_MAJOR:
        if not has_rows:
            load_tile(scale_a, [of_rows, step, first_row], bar, factors_a.index(place))
    if ORDER.extra:
        at_extra = [matrix, _first_extra(n, num_columns, ORDER), k]
        load_tile(extra_desc, at_extra, bar, extra.index(stage))


@gluon.jit
def _load_narrow_stage(
    ring, descs, scale_a, at, step, stage, IS_COLUMN_MAJOR: gl.constexpr, ORDER: gl.constexpr
):
    """The same for one that is."""
    a, b, _, factors_a, _, full, _, _ = ring
    a_desc, b_desc, _ = descs
    of_rows, matrix, first_row, n, _ = at
    bar = full.index(stage)
    k = step * BLOCK_K
    columns, rows = _narrow_operands(a, b, ORDER)
    columns = columns.index(stage).slice(0, _WAVE, dim=1)
    _load_boxes(b_desc, matrix, n * ORDER.columns, k, bar, columns)
    _load_boxes(a_desc, of_rows, first_row, k, bar, rows.index(stage))
    if IS_COLUMN_MAJOR:
        load_tile(scale_a, [of_rows, step, first_row], bar, factors_a.index(stage))


@gluon.jit
def _fetch_stage(
    ring, descs, scale_a, at, cells, step, end_step, stage, phase, has_rows,
    HAS_GROUPS: gl.constexpr, IS_COLUMN_MAJOR: gl.constexpr, IS_AHEAD: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """Fill a stage, or say what comes and add scales where the TMA ``IS_AHEAD``.

    ``cells`` are the scales' places, which come back as the next stage's.
    """
    a, b, extra, factors_a, factors_b, full, empty, _ = ring
    of_a, of_b, scale_b, step_of_a, step_of_b, a_group, b_group = cells
    _, _, _, n, num_columns = at
    STEPS: gl.constexpr = ORDER.steps
    OF_SCALES: gl.constexpr = 4 * STEPS * ORDER.rows if IS_COLUMN_MAJOR else 0
    OF_A: gl.constexpr = descs[0].block_type.nbytes + OF_SCALES
    OF_B: gl.constexpr = (ORDER.columns + ORDER.extra) * STEPS * BLOCK_K
    OF_NARROW: gl.constexpr = (_NARROW_ROWS + _WAVE) * BLOCK_K + OF_SCALES
    mbarrier.wait(empty.index(stage), phase)
    bar = full.index(stage)
    if HAS_GROUPS:  # before this warp arrives at the barrier; the next's are on their way
        factors_b.index(stage).store(scale_b)
        of_b += STEPS * b_group
        scale_b = gl.load(of_b, mask=step_of_b < end_step - step - STEPS, other=0)
    if ORDER.has_narrow and n == num_columns // ORDER.columns:
        mbarrier.expect(bar, OF_NARROW)
        _load_narrow_stage(ring, descs, scale_a, at, step, stage, IS_COLUMN_MAJOR, ORDER)
    else:
        if has_rows:
            mbarrier.expect(bar, OF_B)
        else:
            mbarrier.expect(bar, OF_A + OF_B)
        if not IS_AHEAD:
            stages = (a, b, extra, factors_a, full)
            _load_stage(stages, descs, scale_a, at, step, stage, has_rows, IS_COLUMN_MAJOR, ORDER)
    if HAS_GROUPS and not IS_COLUMN_MAJOR:
        place = step if ORDER.kept else stage
        if STEPS == 1:
            copy_values(factors_a.index(place), of_a)
        else:
            copy_values(factors_a.index(place), of_a, step_of_a < end_step - step)
        of_a += STEPS * a_group
        async_copy.mbarrier_arrive(bar, increment_count=False)
    return of_a, of_b, scale_b


@gluon.jit
def _fetch(
    ring, descs, scales, shape, strides, HAS_GROUPS: gl.constexpr, IS_COLUMN_MAJOR: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """The warp that fills the ring; scales of a step come beside its operands.

    Where a is kept its steps have a place each, and are there still for the next tile of its rows.
    """
    a, b, _, _, factors_b, _, _, _ = ring
    scale_a_ptr, scale_b_ptr, _ = scales
    STAGES: gl.constexpr = b.shape[0]
    BLOCK_M: gl.constexpr = a.shape[2]
    STEPS: gl.constexpr = ORDER.steps
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    num_rows, num_columns, _, _, _, _ = shape
    a_matrix, a_row, a_group, b_matrix, b_group, b_column, _ = strides
    stage = 0
    phase = 1
    matrix_before = -1
    row_before = -1
    for turn in range(_num_rounds(shape, ORDER)):
        matrix, first_row, _, n, _, first_step, end_step = _place(turn, shape, ORDER, 1)
        of_rows = matrix  # which of a's matrices
        if ORDER.num_experts:
            of_rows = 0 * matrix
        of_a = 0
        of_b = 0
        scale_b = 0
        step_of_a = 0
        step_of_b = 0
        if HAS_GROUPS and not IS_COLUMN_MAJOR:
            lane = gl.arange(0, STEPS * BLOCK_M, layout=LANES)
            row = gl.minimum(first_row + lane % BLOCK_M, num_rows - 1)
            step_of_a = lane // BLOCK_M  # of a stage
            of_a = scale_a_ptr + of_rows.to(gl.int64) * a_matrix
            of_a += (first_step + step_of_a).to(gl.int64) * a_group
            of_a += row.to(gl.int64) * a_row
        if HAS_GROUPS:  # those of b with a copy for each row of a warpgroup
            number = gl.arange(0, factors_b.shape[1], layout=LANES) // _WAVE
            step_of_b = number if ORDER.extra == 0 else 0 * number
            column = n * ORDER.columns
            if ORDER.extra:
                first_extra = gl.minimum(_first_extra(n, num_columns, ORDER), num_columns - 1)
                column = gl.where(number == 0, column, first_extra)
            of_b = scale_b_ptr + matrix.to(gl.int64) * b_matrix
            of_b += (column // 128).to(gl.int64) * b_column
            of_b += (first_step + step_of_b).to(gl.int64) * b_group
            scale_b = gl.load(of_b, mask=step_of_b < end_step - first_step, other=0)
        has_rows = (matrix == matrix_before) & (first_row == row_before) & (ORDER.kept > 0)
        matrix_before = matrix
        row_before = first_row
        at = (of_rows, matrix, first_row, n, num_columns)
        first_due = first_step
        if ORDER.ahead:
            end_ahead = gl.minimum(first_step + ORDER.ahead * STEPS, end_step)
            first_due = gl.where(turn == 0, end_ahead, first_step)
        bounds = (first_step, first_due, end_step)
        for part in gl.static_range(0 if ORDER.ahead else 1, 2):
            for step in range(bounds[part], bounds[part + 1], STEPS):
                cells = (of_a, of_b, scale_b, step_of_a, step_of_b, a_group, b_group)
                of_a, of_b, scale_b = _fetch_stage(
                    ring, descs, scale_a_ptr, at, cells, step, end_step, stage, phase, has_rows,
                    HAS_GROUPS, IS_COLUMN_MAJOR, part == 0, ORDER,
                )  # fmt: skip
                stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _load_boxes(desc, matrix, row, k, bar, tile):
    """As many, one below the other, as there is room for."""
    BOX: gl.constexpr = desc.block_type.shape[1]
    for part in gl.static_range(tile.shape[1] // BOX):
        load_tile(desc, [matrix, row + part * BOX, k], bar, tile.slice(part * BOX, BOX, dim=1))


@gluon.constexpr_function
def _is_transposed(order):
    """Whether narrow tiles are: b's columns are then the 64 rows that wgmma takes."""
    return order.has_narrow and order.rows == 128


@gluon.jit
def _narrow_operands(a, b, ORDER: gl.constexpr):
    """Where stages have b's columns and rows of a for a narrow tile."""
    if _is_transposed(ORDER):
        return view_tile(a, b.dtype, a.shape, b.layout), view_tile(b, a.dtype, b.shape, a.layout)
    else:
        return b, a


@gluon.constexpr_function
def _transposed_order(order):
    """Of narrow tiles that one warpgroup makes while the other goes on."""
    return _Order(*order)._replace(rows=_WAVE.value, columns=_NARROW_ROWS.value, groups=1)


@gluon.constexpr_function
def _makes_transposed(order):
    """Whether the order is ``_transposed_order``'s: stages are let go of for the other as well."""
    return order.has_narrow and order.rows == 64


@gluon.jit
def _begin_in_tensor_core(acc, acc_2, ring, stage, phase, WHICH: gl.constexpr, ORDER: gl.constexpr):
    """The first step's product, under way, or two of them."""
    _, _, _, _, _, full, _, _ = ring
    mbarrier.wait(full.index(stage), phase)
    rows, columns = _operands(ring, 0, stage, acc.shape[1], WHICH, 0, ORDER)
    acc = warpgroup_mma(rows, columns, acc, use_acc=False, is_async=True)
    if _has_two_products(ORDER):
        rows, columns = _operands(ring, 0, stage, acc_2.shape[1], WHICH, 1, ORDER)
        acc_2 = warpgroup_mma(rows, columns, acc_2, use_acc=False, is_async=True)
    return _wait_for_older(acc, acc_2, ORDER)


@gluon.jit
def _wait_for_older(acc, acc_2, ORDER: gl.constexpr):
    """Products than those of the last step."""
    if _has_two_products(ORDER):
        acc, acc_2 = warpgroup_mma_wait(2, deps=(acc, acc_2))
    else:
        acc = warpgroup_mma_wait(1, deps=(acc,))
    return acc, acc_2


@gluon.jit
def _sum_in_tensor_core(
    acc, acc_2, ring, num_steps, stage, phase, held, ends, WHICH: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """The products of the other steps, the last under way; what is held is stored under the first."""
    BOXES: gl.constexpr = ORDER.held
    for number in gl.static_range(BOXES):
        _store_box_of_held(held, number, ends, WHICH, ORDER)
        if number + 1 < BOXES:
            acc, acc_2, stage, phase = _go_on_in_tensor_core(
                acc, acc_2, ring, number + 1, stage, phase, WHICH, ORDER
            )
    for step in range(max(BOXES, 1), num_steps):
        acc, acc_2, stage, phase = _go_on_in_tensor_core(
            acc, acc_2, ring, step, stage, phase, WHICH, ORDER
        )
    return acc, acc_2, stage, phase


@gluon.jit
def _end_in_tensor_core(
    acc, acc_2, ring, stage, phase, WHICH: gl.constexpr, ORDER: gl.constexpr
):
    """The last step, whose stage is given, is made and let go."""
    _, b, _, _, _, _, empty, turns = ring
    STAGES: gl.constexpr = b.shape[0]
    ARRIVALS: gl.constexpr = 2 if _makes_transposed(ORDER) else 1
    if ORDER.has_turns or _makes_transposed(ORDER):
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
    if _has_two_products(ORDER):
        acc, acc_2 = warpgroup_mma_wait(0, deps=(acc, acc_2))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(stage), count=ARRIVALS)
    stage, phase = next_stage(stage, phase, STAGES)
    return acc, acc_2, stage, phase


@gluon.jit
def _go_on_in_tensor_core(
    acc, acc_2, ring, step, stage, phase, WHICH: gl.constexpr, ORDER: gl.constexpr
):
    """A step's product, under way; the step before, whose stage is given, is let go."""
    _, b, _, _, _, full, empty, _ = ring
    STAGES: gl.constexpr = b.shape[0]
    ARRIVALS: gl.constexpr = 2 if _makes_transposed(ORDER) else 1
    after, phase = next_stage(stage, phase, STAGES)
    mbarrier.wait(full.index(after), phase)
    rows, columns = _operands(ring, step, after, acc.shape[1], WHICH, 0, ORDER)
    acc = warpgroup_mma(rows, columns, acc, is_async=True)
    if _has_two_products(ORDER):
        rows, columns = _operands(ring, step, after, acc_2.shape[1], WHICH, 1, ORDER)
        acc_2 = warpgroup_mma(rows, columns, acc_2, is_async=True)
    acc, acc_2 = _wait_for_older(acc, acc_2, ORDER)
    mbarrier.arrive(empty.index(stage), count=ARRIVALS)
    return acc, acc_2, after, phase


@gluon.jit
def _begin_in_registers(
    acc, acc_2, ring, stage, phase, WHICH: gl.constexpr, HAS_GROUPS: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """The first step's first product, under way, and that step's scales."""
    _, _, _, _, _, full, _, _ = ring
    mbarrier.wait(full.index(stage), phase)
    factors = _scales_of_step(acc, acc_2, ring, 0, stage, WHICH, HAS_GROUPS, ORDER)
    rows, columns = _operands(ring, 0, stage, acc.shape[1], WHICH, 0, ORDER)
    return _begin(rows, columns), factors


@gluon.jit
def _sum_in_registers(
    part, factors, acc, acc_2, ring, num_steps, stage, phase, held, ends, WHICH: gl.constexpr,
    HAS_GROUPS: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """The two products of each step, times their scales if it has any, added in fp32.

    Registers allow a warpgroup one product at a time, and two keep the tensor core busy if little
    lies between products: so the next step is awaited under the last product of a step, and its
    scales, loaded before its first product, are multiplied after that. What is held is stored under
    the first step's products, as long as there are no sums.
    """
    acc, acc_2, factors, stage, phase = _end_step_in_registers(
        part, factors, acc, acc_2, ring, 0, num_steps, stage, phase, held, ends, WHICH,
        HAS_GROUPS, True, ORDER,
    )  # fmt: skip
    for step in range(1, num_steps):
        rows, columns = _operands(ring, step, stage, acc.shape[1], WHICH, 0, ORDER)
        part = _begin(rows, columns)
        acc, acc_2, factors, stage, phase = _end_step_in_registers(
            part, factors, acc, acc_2, ring, step, num_steps, stage, phase, held, ends, WHICH,
            HAS_GROUPS, False, ORDER,
        )  # fmt: skip
    return acc, acc_2, stage, phase


@gluon.jit
def _end_step_in_registers(
    part, factors, acc, acc_2, ring, step, num_steps, stage, phase, held, ends,
    WHICH: gl.constexpr, HAS_GROUPS: gl.constexpr,
    IS_FIRST: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """After its first product has begun; the next one's scales come back."""
    _, b, _, _, _, full, empty, _ = ring
    STAGES: gl.constexpr = b.shape[0]
    BOXES: gl.constexpr = ORDER.held if IS_FIRST else 0
    of_a, of_b, of_a_2, of_b_2 = factors
    COLUMNS: gl.constexpr = acc.shape[1]
    for number in gl.static_range(BOXES // 2):
        _store_box_of_held(held, number, ends, WHICH, ORDER)
    fence_products(num_steps)
    part = warpgroup_mma_wait(0, deps=(part,))
    acc = _add(acc, part, pin(of_a) * of_b if HAS_GROUPS else 1.0, HAS_GROUPS, IS_FIRST)
    fence_products(num_steps)
    rows, columns = _operands(ring, step, stage, COLUMNS, WHICH, 1, ORDER)
    part_2 = _begin(rows, columns)
    for number in gl.static_range(BOXES // 2, BOXES):
        _store_box_of_held(held, number, ends, WHICH, ORDER)
    after, phase_after = next_stage(stage, phase, STAGES)
    is_last = step + 1 == num_steps
    awaited = gl.where(is_last, stage, after)  # the next tile's is for the next tile to await
    mbarrier.wait(full.index(awaited), gl.where(is_last, phase, phase_after))
    part_2 = warpgroup_mma_wait(0, deps=(part_2,))
    mbarrier.arrive(empty.index(stage), count=1)
    acc_2 = _add(acc_2, part_2, pin(of_a_2) * of_b_2 if HAS_GROUPS else 1.0, HAS_GROUPS, IS_FIRST)
    factors = _scales_of_step(
        acc, acc_2, ring, gl.where(is_last, step, step + 1), awaited, WHICH, HAS_GROUPS, ORDER
    )
    return acc, acc_2, factors, after, phase_after


@gluon.jit
def _sum_of_narrow(
    acc, acc_2, ring, num_steps, stage, phase, WHICH: gl.constexpr, HAS_GROUPS: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """The same of 64 columns, where registers allow one product to be made under another's sum.

    ptxas lets products overlap only if there are two ways to end, as of ``_sum_in_pairs``.
    """
    _, b, _, _, _, full, empty, _ = ring
    STAGES: gl.constexpr = b.shape[0]
    mbarrier.wait(full.index(stage), phase)
    scale, scale_2 = _products_of_scales(acc, acc_2, ring, 0, stage, WHICH, HAS_GROUPS, ORDER)
    rows, columns = _operands(ring, 0, stage, acc.shape[1], WHICH, 0, ORDER)
    part = _begin(rows, columns)
    part = warpgroup_mma_wait(1, deps=(part,))  # none: it is of the type that it has in the loop
    for step in range(num_steps - 1):
        rows, columns = _operands(ring, step, stage, acc.shape[1], WHICH, 1, ORDER)
        part_2 = _begin(rows, columns)
        part, part_2 = warpgroup_mma_wait(1, deps=(part, part_2))
        acc = _add(acc, part, scale, HAS_GROUPS)
        after, phase_after = next_stage(stage, phase, STAGES)
        mbarrier.wait(full.index(after), phase_after)
        rows, columns = _operands(ring, step + 1, after, acc.shape[1], WHICH, 0, ORDER)
        part = _begin(rows, columns)
        part_2, part = warpgroup_mma_wait(1, deps=(part_2, part))
        mbarrier.arrive(empty.index(stage), count=1)
        acc_2 = _add(acc_2, part_2, scale_2, HAS_GROUPS)
        scale, scale_2 = _products_of_scales(
            acc, acc_2, ring, step + 1, after, WHICH, HAS_GROUPS, ORDER
        )
        stage = after
        phase = phase_after
    if stage < STAGES:  # always
        rows, columns = _operands(ring, num_steps - 1, stage, acc.shape[1], WHICH, 1, ORDER)
        part_2 = _begin(rows, columns)
        part, part_2 = warpgroup_mma_wait(1, deps=(part, part_2))
        acc = _add(acc, part, scale, HAS_GROUPS)
        part_2 = warpgroup_mma_wait(0, deps=(part_2,))
        mbarrier.arrive(empty.index(stage), count=1)
        acc_2 = _add(acc_2, part_2, scale_2, HAS_GROUPS)
    else:
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(stage), count=1)
        acc = _add(acc, part, scale, HAS_GROUPS)
    stage, phase = next_stage(stage, phase, STAGES)
    return acc, acc_2, stage, phase


@gluon.jit
def _products_of_scales(
    acc, acc_2, ring, step, stage, WHICH: gl.constexpr, HAS_GROUPS: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    of_a, of_b, of_a_2, of_b_2 = _scales_of_step(
        acc, acc_2, ring, step, stage, WHICH, HAS_GROUPS, ORDER
    )
    return of_a * of_b, of_a_2 * of_b_2


@gluon.jit
def _scales_of_step(
    acc, acc_2, ring, step, stage, WHICH: gl.constexpr, HAS_GROUPS: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """Of a's rows and b's columns of its first product, and of its second."""
    _, _, _, factors_a, factors_b, _, _, _ = ring
    OF_ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    OF_ROW_2: gl.constexpr = gl.SliceLayout(1, acc_2.type.layout)
    FIRST: gl.constexpr = _first_row(WHICH, ORDER)
    FIRST_2: gl.constexpr = FIRST if ORDER.extra else FIRST + _WAVE
    if HAS_GROUPS:
        place = step if ORDER.kept else stage
        of_a = _load_scales(factors_a, place, FIRST, OF_ROW)
        of_a_2 = _load_scales(factors_a, place, FIRST_2, OF_ROW_2)
        of_b = _load_scales(factors_b, stage, 0, OF_ROW)
        of_b_2 = of_b
        if ORDER.extra:
            of_b_2 = _load_scales(factors_b, stage, _WAVE, OF_ROW_2)
        return of_a, of_b, of_a_2, of_b_2
    else:
        return 1.0, 1.0, 1.0, 1.0


@gluon.jit
def _sum_in_pairs(
    acc, ring, num_steps, stage, phase, WHICH: gl.constexpr, HAS_GROUPS: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """The same of once 64 rows, with scales or without: one is added while the next is made.

    Where K is short, both of a pair before the next pair is begun. A stage has both steps of a
    pair, or one. ptxas lets products overlap only if there are two ways to end; a last step alone
    is the second.
    """
    _, b, _, _, _, _, empty, _ = ring
    STAGES: gl.constexpr = b.shape[0]
    SECOND: gl.constexpr = ORDER.steps - 1  # its number in its stage
    part, scale = _begin_step(acc, ring, stage, phase, 0, 0, WHICH, HAS_GROUPS, ORDER)
    part = warpgroup_mma_wait(1, deps=(part,))  # none: it is of the type that it has in the loop
    for pair in range((num_steps - 1) // 2):
        stage_2, phase_2 = _second_of_pair(stage, phase, STAGES, ORDER)
        part_2, scale_2 = _begin_step(
            acc, ring, stage_2, phase_2, 2 * pair + 1, SECOND, WHICH, HAS_GROUPS, ORDER
        )
        part, part_2 = warpgroup_mma_wait(1, deps=(part, part_2))
        if SECOND == 0:
            mbarrier.arrive(empty.index(stage), count=1)
        acc = _add(acc, part, scale, HAS_GROUPS)
        if ORDER.adds_both:
            part_2 = warpgroup_mma_wait(0, deps=(part_2,))
            mbarrier.arrive(empty.index(stage_2), count=1)
            acc = _add(acc, part_2, scale_2, HAS_GROUPS)
        stage, phase = next_stage(stage_2, phase_2, STAGES)
        part, scale = _begin_step(
            acc, ring, stage, phase, 2 * pair + 2, 0, WHICH, HAS_GROUPS, ORDER
        )
        if ORDER.adds_both:
            part = warpgroup_mma_wait(1, deps=(part,))
        else:
            part_2, part = warpgroup_mma_wait(1, deps=(part_2, part))
            mbarrier.arrive(empty.index(stage_2), count=1)
            acc = _add(acc, part_2, scale_2, HAS_GROUPS)
    if num_steps % 2 == 0:
        stage_2, phase_2 = _second_of_pair(stage, phase, STAGES, ORDER)
        part_2, scale_2 = _begin_step(
            acc, ring, stage_2, phase_2, num_steps - 1, SECOND, WHICH, HAS_GROUPS, ORDER
        )
        part, part_2 = warpgroup_mma_wait(1, deps=(part, part_2))
        if SECOND == 0:
            mbarrier.arrive(empty.index(stage), count=1)
        acc = _add(acc, part, scale, HAS_GROUPS)
        stage, phase = next_stage(stage_2, phase_2, STAGES)
        part_2 = warpgroup_mma_wait(0, deps=(part_2,))
        mbarrier.arrive(empty.index(stage_2), count=1)
        acc = _add(acc, part_2, scale_2, HAS_GROUPS)
    else:
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(stage), count=1)
        acc = _add(acc, part, scale, HAS_GROUPS)
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def _second_of_pair(stage, phase, STAGES: gl.constexpr, ORDER: gl.constexpr):
    """Where in the ring it is."""
    if ORDER.steps == 2:
        return stage, phase
    else:
        return next_stage(stage, phase, STAGES)


@gluon.jit
def _begin_step(
    acc, ring, stage, phase, step,
    NUMBER: gl.constexpr,  # in its stage
    WHICH: gl.constexpr, HAS_GROUPS: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """A step's product for what ``acc`` sums, under way, and its scales if it has any."""
    _, _, _, factors_a, factors_b, full, _, _ = ring
    OF_ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    FIRST: gl.constexpr = _first_row(WHICH, ORDER)
    place = step if ORDER.kept else stage
    if NUMBER == 0:
        mbarrier.wait(full.index(stage), phase)
    scale = 1.0
    if HAS_GROUPS:
        scale = _load_scales(factors_a, place, NUMBER * ORDER.rows + FIRST, OF_ROW)
        scale *= _load_scales(factors_b, stage, NUMBER * _WAVE, OF_ROW)
    rows, columns = _operands(ring, step, stage, acc.shape[1], WHICH, 0, ORDER)
    if ORDER.steps == 2:
        rows = rows.slice(NUMBER * BLOCK_K, BLOCK_K, dim=1)
        columns = columns.slice(NUMBER * BLOCK_K, BLOCK_K, dim=0)
    return _begin(rows, columns), scale


@gluon.constexpr_function
def _size_of(shape):
    return math.prod(shape)


@gluon.jit
def _load_scales(factors, place, FIRST: gl.constexpr, OF_ROW: gl.constexpr):
    """Of 64 rows; loaded here."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    of_place = factors.index(place)
    COUNT: gl.constexpr = _size_of(of_place.shape)
    flat = view_tile(of_place, gl.float32, [COUNT], FLAT)
    return pin(flat.slice(FIRST, _WAVE).load(OF_ROW))


@gluon.jit
def _add(acc, part, scale, HAS_SCALES: gl.constexpr, IS_FIRST: gl.constexpr = False):
    """Here: LLVM would put it off behind the next product."""
    if HAS_SCALES:
        part *= gl.expand_dims(scale, 1)
    return pin(part if IS_FIRST else acc + part)


@gluon.jit
def _begin(rows, columns):
    """A product of 64 rows and a step, under way."""
    COLUMNS: gl.constexpr = columns.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    zero = gl.zeros([_WAVE, COLUMNS], gl.float32, LAYOUT)
    return warpgroup_mma(rows, columns, zero, use_acc=False, is_async=True)


@gluon.jit
def _operands(
    ring, step, stage, COLUMNS: gl.constexpr, WHICH: gl.constexpr,
    NUMBER: gl.constexpr,  # which of the products of the step
    ORDER: gl.constexpr,
):  # fmt: skip
    """64 rows of a and columns of b, as wgmma takes them."""
    a, b, extra, _, _, _, _, _ = ring
    FIRST: gl.constexpr = _first_row(WHICH, ORDER)
    rows = as_matrix(a.index(step if ORDER.kept else stage))
    if NUMBER == 1 and ORDER.extra:
        columns = as_matrix(extra.index(stage)).permute((1, 0))
        return rows.slice(FIRST, _WAVE, dim=0), columns
    else:
        columns = as_matrix(b.index(stage)).slice(0, COLUMNS, dim=0).permute((1, 0))
        return rows.slice(FIRST + NUMBER * _WAVE, _WAVE, dim=0), columns


@gluon.jit
def _multiply(
    which: gl.constexpr, ring, ends, scales, shape, strides, HAS_GROUPS: gl.constexpr,
    HAS_COLUMN_SCALES: gl.constexpr, IS_EXACT: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """A warpgroup: one or two times 64 rows of each tile.

    Where they take turns the ring has steps of one tile after the other's, so that one multiplies
    while the other stores; the first product of a tile is begun when the last of the other's is.
    """
    a, b, extra, factors_a, factors_b, full, empty, turns = ring
    columns, rows = _narrow_operands(a, b, ORDER)
    narrow_ring = (columns, rows, extra, factors_a, factors_b, full, empty, turns)
    STAGES: gl.constexpr = b.shape[0]
    EVERY: gl.constexpr = 2 if ORDER.has_turns else 1
    BLOCK_N: gl.constexpr = ORDER.columns
    _, num_columns, _, _, _, _ = shape
    FIRST: gl.constexpr = which % EVERY
    HELD: gl.constexpr = ORDER.held
    stage = 0
    phase = 0
    narrow_turn = 0
    held = _nothing_held(shape, ORDER)
    place = _place(FIRST, shape, ORDER, 4)
    for turn in range(FIRST, _num_rounds(shape, ORDER), EVERY):
        num_steps = place[6] - place[5]
        if ORDER.has_turns:  # the other's steps have gone by
            stage = turn * num_steps % STAGES
            phase = turn * num_steps // STAGES % 2
            mbarrier.wait(turns.index(which), (turn // 2 + 1 - which) % 2)
        if ORDER.has_narrow and place[3] == num_columns // BLOCK_N:
            if _is_transposed(ORDER):
                if narrow_turn % 2 == which:
                    if narrow_turn > 0:  # the other's steps have gone by
                        mbarrier.wait(turns.index(which), (narrow_turn - 1) // 2 % 2)
                    _make_transposed_tile(
                        narrow_ring, ends, scales, shape, strides, place, stage, phase, held,
                        which, _transposed_order(ORDER),
                    )  # fmt: skip
                narrow_turn += 1
                phase = (phase + (stage + num_steps) // STAGES) % 2
                stage = (stage + num_steps) % STAGES
            else:
                stage, phase = _make_tile(
                    ring, ends, scales, shape, strides, place, stage, phase, held, which, _WAVE,
                    HAS_GROUPS, HAS_COLUMN_SCALES, IS_EXACT, ORDER,
                )  # fmt: skip
            place = _place(turn + EVERY, shape, ORDER, 4)
        elif ORDER.held:
            held, place, stage, phase = _make_held_tile(
                ring, ends, scales, shape, strides, place, turn + EVERY, stage, phase, held, which,
                HAS_GROUPS, HAS_COLUMN_SCALES, IS_EXACT, ORDER,
            )  # fmt: skip
        else:
            stage, phase = _make_tile(
                ring, ends, scales, shape, strides, place, stage, phase, held, which, BLOCK_N,
                HAS_GROUPS, HAS_COLUMN_SCALES, IS_EXACT, ORDER,
            )  # fmt: skip
            place = _place(turn + EVERY, shape, ORDER, 4)
    for number in gl.static_range(HELD):
        _store_box_of_held(held, number, ends, which, ORDER)
    if ORDER.num_experts and which == 0:
        _clear_padding(ends, shape)
    tma.store_wait(0)


@gluon.jit
def _clear_padding(ends, shape):
    """Zeros into rows past the last expert's."""
    staged, _, out_desc, _ = ends
    num_rows, num_columns, _, num_matrices, _, experts = shape
    row_offsets_ptr, _, _ = experts
    COLUMNS: gl.constexpr = staged.shape[len(staged.shape) - 1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    first_row = gl.maximum(gl.load(row_offsets_ptr + num_matrices), 0)
    if first_row < num_rows:
        box = staged.index(0)
        tma.store_wait(0)  # what was staged there before has been read
        _stage(gl.zeros([_WAVE, COLUMNS], box.dtype, LAYOUT), box)
        tiles_n = gl.cdiv(num_columns, COLUMNS)
        num_boxes = gl.cdiv(num_rows - first_row, _WAVE) * tiles_n
        for number in range(gl.program_id(0), num_boxes, gl.num_programs(0)):
            row = first_row + number // tiles_n * _WAVE
            _store_box(box, out_desc, num_rows, row, number % tiles_n * COLUMNS)


@gluon.jit
def _stage(x, box):
    """Store to shared memory, where the TMA sees it."""
    RANK: gl.constexpr = len(box.shape)
    SWIZZLE: gl.constexpr = box.type.layout.swizzle_byte_width
    FLAT: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, box.dtype.primitive_bitwidth, 2)
    view_tile(box, box.dtype, [box.shape[RANK - 2], box.shape[RANK - 1]], FLAT).store(x)
    fence_async_shared()


@gluon.jit
def _store_box(box, out_desc, into, row, column):
    """Into a matrix of out, or, of rows that are shared out, up to where an expert's end."""
    if len(out_desc.block_type.shape) == 4:
        store_tile(out_desc, [2**30, into, 2**30 - into + row, column], box)
    else:
        store_tile(out_desc, [into, row, column], box)


@gluon.jit
def _load_ends(
    scales, shape, strides, matrix, row, n, LAYOUT: gl.constexpr, HAS_GROUPS: gl.constexpr,
    HAS_COLUMN_SCALES: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """What the end of a tile wants, under way while its products are made.

    Scales of its rows, of the 64 rows after them, of its columns, and its bias.
    """
    scale_a_ptr, scale_b_ptr, bias_ptr = scales
    num_rows, num_columns, _, _, _, _ = shape
    a_matrix, a_row, _, b_matrix, _, b_column, stride_bias = strides
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    column = n * ORDER.columns + gl.arange(0, ORDER.columns, layout=THREADS)
    column = gl.minimum(column, num_columns - 1)
    scale_a = 1.0
    scale_a_2 = 1.0
    scale_b = 1.0
    bias = 0.0
    if not HAS_GROUPS:
        of_a = scale_a_ptr + matrix.to(gl.int64) * a_matrix
        scale_a = _load_of_rows(of_a, row, num_rows, a_row, LAYOUT)
        scale_a_2 = scale_a
        if _has_two(ORDER):
            scale_a_2 = _load_of_rows(of_a, row + _WAVE, num_rows, a_row, LAYOUT)
        of_b = scale_b_ptr + matrix.to(gl.int64) * b_matrix
        if HAS_COLUMN_SCALES:
            scale_b = gl.load(of_b + column.to(gl.int64) * b_column)
        else:
            scale_b = gl.load(of_b)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + matrix.to(gl.int64) * stride_bias + column).to(gl.float32)
    return scale_a, scale_a_2, scale_b, bias


@gluon.jit
def _make_tile(
    ring, ends, scales, shape, strides, place, stage, phase, held, which: gl.constexpr,
    COLUMNS: gl.constexpr, HAS_GROUPS: gl.constexpr, HAS_COLUMN_SCALES: gl.constexpr,
    IS_EXACT: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """A warpgroup's part of a tile, of COLUMNS columns. The ring's place after it."""
    staged, of_columns, _, _ = ends
    _, num_columns, _, _, _, _ = shape
    _, _, bias_ptr = scales
    matrix, row, _, n, _, first_step, end_step = place
    row += _first_row(which, ORDER)
    num_steps = end_step - first_step
    BLOCK_N: gl.constexpr = ORDER.columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    HAS_TWO: gl.constexpr = _has_two(ORDER)
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    BOXES: gl.constexpr = staged.shape[0] // ORDER.groups
    OF_GROUP: gl.constexpr = of_columns.shape[0] // ORDER.groups
    OF_BOX: gl.constexpr = staged.shape[len(staged.shape) - 1]
    scale_a, scale_a_2, scale_b, bias = _load_ends(
        scales, shape, strides, matrix, row, n, LAYOUT, HAS_GROUPS, HAS_COLUMN_SCALES, ORDER
    )
    acc = gl.zeros([_WAVE, COLUMNS], gl.float32, LAYOUT)
    COLUMNS_2: gl.constexpr = COLUMNS if HAS_TWO else max(ORDER.extra, 8)
    LAYOUT_2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS_2, 32])
    acc_2 = gl.zeros([_WAVE, COLUMNS_2], gl.float32, LAYOUT_2)
    if (HAS_GROUPS or IS_EXACT) and not _has_two_products(ORDER):
        acc, stage, phase = _sum_in_pairs(
            acc, ring, num_steps, stage, phase, which, HAS_GROUPS, ORDER
        )
    elif (HAS_GROUPS or IS_EXACT) and COLUMNS == _WAVE:
        acc, acc_2, stage, phase = _sum_of_narrow(
            acc, acc_2, ring, num_steps, stage, phase, which, HAS_GROUPS, ORDER
        )
    elif HAS_GROUPS or IS_EXACT:
        part, factors = _begin_in_registers(
            acc, acc_2, ring, stage, phase, which, HAS_GROUPS, ORDER
        )
        acc, acc_2, stage, phase = _sum_in_registers(
            part, factors, acc, acc_2, ring, num_steps, stage, phase, held, ends, which,
            HAS_GROUPS, ORDER,
        )  # fmt: skip
    else:
        acc, acc_2 = _begin_in_tensor_core(acc, acc_2, ring, stage, phase, which, ORDER)
        acc, acc_2, stage, phase = _sum_in_tensor_core(
            acc, acc_2, ring, num_steps, stage, phase, held, ends, which, ORDER
        )
        acc, acc_2, stage, phase = _end_in_tensor_core(
            acc, acc_2, ring, stage, phase, which, ORDER
        )

    into = _where_to(place, shape, ORDER)
    if not HAS_GROUPS:
        if HAS_COLUMN_SCALES:
            of_columns.index(which * OF_GROUP).store(scale_b)
        else:
            scale_a *= scale_b
            scale_a_2 *= scale_b
        acc *= gl.expand_dims(scale_a, 1)
        if HAS_TWO:
            acc_2 *= gl.expand_dims(scale_a_2, 1)
    if HAS_BIAS:
        of_columns.index(which * OF_GROUP + OF_GROUP - 1).store(bias)
    _store(
        acc, ends, into, row, n * BLOCK_N, which, 0, 0, BOXES, HAS_COLUMN_SCALES,
        HAS_BIAS, OF_GROUP,
    )  # fmt: skip
    if HAS_TWO:
        _store(
            acc_2, ends, into, row + _WAVE, n * BLOCK_N, which,
            COLUMNS // OF_BOX, 0, BOXES, HAS_COLUMN_SCALES, HAS_BIAS, OF_GROUP,
        )  # fmt: skip
    if ORDER.extra:
        if not HAS_GROUPS:
            acc_2 *= gl.expand_dims(gl.convert_layout(scale_a, gl.SliceLayout(1, LAYOUT_2)), 1)
        _store_extra(
            acc_2, ends, scales, shape, strides, matrix, row,
            _first_extra(n, num_columns, ORDER), HAS_COLUMN_SCALES,
        )  # fmt: skip
    return stage, phase


@gluon.jit
def _where_to(place, shape, ORDER: gl.constexpr):
    """Which of out's matrices, or the end of an expert's rows."""
    matrix, _, end, _, split, _, _ = place
    _, _, _, num_matrices, _, _ = shape
    return end if ORDER.num_experts else split * num_matrices + matrix


@gluon.jit
def _make_held_tile(
    ring, ends, scales, shape, strides, place, next_turn, stage, phase, held,
    which: gl.constexpr, HAS_GROUPS: gl.constexpr, HAS_COLUMN_SCALES: gl.constexpr,
    IS_EXACT: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """The same, scaled and rounded, but not stored; what was held before is, under its products.

    Between the products of two tiles there is then little else. Also where the next tile is.
    """
    staged, of_columns, _, _ = ends
    _, _, bias_ptr = scales
    matrix, row, _, n, _, first_step, end_step = place
    row += _first_row(which, ORDER)
    num_steps = end_step - first_step
    COLUMNS: gl.constexpr = ORDER.columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    OF_GROUP: gl.constexpr = of_columns.shape[0] // ORDER.groups
    acc = gl.zeros([_WAVE, COLUMNS], gl.float32, LAYOUT)
    acc_2 = acc
    if HAS_GROUPS or IS_EXACT:
        part, factors = _begin_in_registers(
            acc, acc_2, ring, stage, phase, which, HAS_GROUPS, ORDER
        )
    else:
        acc, acc_2 = _begin_in_tensor_core(acc, acc_2, ring, stage, phase, which, ORDER)
    place_after = _place(next_turn, shape, ORDER, 4)
    scale_a, scale_a_2, scale_b, bias = _load_ends(
        scales, shape, strides, matrix, row, n, LAYOUT, HAS_GROUPS, HAS_COLUMN_SCALES, ORDER
    )
    if HAS_GROUPS or IS_EXACT:
        acc, acc_2, stage, phase = _sum_in_registers(
            part, factors, acc, acc_2, ring, num_steps, stage, phase, held, ends, which,
            HAS_GROUPS, ORDER,
        )  # fmt: skip
    else:
        acc, acc_2, stage, phase = _sum_in_tensor_core(
            acc, acc_2, ring, num_steps, stage, phase, held, ends, which, ORDER
        )
    if HAS_COLUMN_SCALES:  # loaded while the tensor core's last product is made
        of_columns.index(which * OF_GROUP).store(scale_b)
        scale_b = pin(of_columns.index(which * OF_GROUP).load(OF_COLUMN))
    if not (HAS_GROUPS or IS_EXACT):
        acc, acc_2, stage, phase = _end_in_tensor_core(
            acc, acc_2, ring, stage, phase, which, ORDER
        )
    if HAS_BIAS:
        of_columns.index(which * OF_GROUP + OF_GROUP - 1).store(bias)
        bias = of_columns.index(which * OF_GROUP + OF_GROUP - 1).load(OF_COLUMN)
    of_ends = (scale_b, bias)
    first = _pack(acc, scale_a, of_ends, staged.dtype, HAS_GROUPS, HAS_COLUMN_SCALES, HAS_BIAS)
    second = first
    if _has_two(ORDER):
        second = _pack(
            acc_2, scale_a_2, of_ends, staged.dtype, HAS_GROUPS, HAS_COLUMN_SCALES, HAS_BIAS
        )
    held = (first, second, _where_to(place, shape, ORDER), row, n * COLUMNS)
    return held, place_after, stage, phase


@gluon.jit
def _pack(
    acc, scale_a, of_ends, DTYPE: gl.constexpr, HAS_GROUPS: gl.constexpr,
    HAS_COLUMN_SCALES: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """Scaled, with the bias, and rounded: two columns of 16 bits a register."""
    scale_b, bias = of_ends
    COLUMNS: gl.constexpr = acc.shape[1]
    if not HAS_GROUPS:
        if HAS_COLUMN_SCALES:
            acc *= gl.expand_dims(scale_a, 1)
            acc *= gl.expand_dims(scale_b, 0)
        else:
            acc *= gl.expand_dims(scale_a * scale_b, 1)
    if HAS_BIAS:
        acc += gl.expand_dims(bias, 0)
    even, odd = acc.reshape([_WAVE, COLUMNS // 2, 2]).split()
    TO: gl.constexpr = "bf16x2" if DTYPE == gl.bfloat16 else "f16x2"
    ASM: gl.constexpr = "cvt.rn." + TO + ".f32 $0, $2, $1;"
    packed = gl.inline_asm_elementwise(
        ASM, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=False, pack=1
    )
    return gl.convert_layout(packed, _packed_layout(COLUMNS), assert_trivial=True)


@gluon.constexpr_function
def _packed_layout(columns):
    """Of ``_pack``, as threads have what ``wgmma`` makes."""
    of_pairs = [[0, 4 << bit] for bit in range((columns // 8).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0], *of_pairs],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns // 2],
    )


@gluon.jit
def _nothing_held(shape, ORDER: gl.constexpr):
    """Of no rows that there are, so that nothing is stored."""
    num_rows, _, _, _, _, _ = shape
    COLUMNS: gl.constexpr = ORDER.columns if ORDER.held else 8
    nothing = gl.zeros([_WAVE, COLUMNS // 2], gl.int32, _packed_layout(COLUMNS))
    return nothing, nothing, 0 * num_rows, num_rows, 0 * num_rows


@gluon.jit
def _store_box_of_held(
    held, NUMBER: gl.constexpr, ends, WHICH: gl.constexpr, ORDER: gl.constexpr
):
    first, second, into, row, column = held
    staged, _, out_desc, _ = ends
    OF_BOX: gl.constexpr = staged.shape[len(staged.shape) - 1]
    BOXES: gl.constexpr = staged.shape[0] // 2
    COUNT: gl.constexpr = 2 * first.shape[1] // OF_BOX  # of 64 rows
    if NUMBER < COUNT:
        part = _columns_of(first, NUMBER, OF_BOX // 2)
    else:
        part = _columns_of(second, NUMBER - COUNT, OF_BOX // 2)
        row += _WAVE
    tma.store_wait(BOXES - 1)  # what was staged there before has been read
    box = staged.index(WHICH * BOXES + NUMBER % BOXES)
    FLAT: gl.constexpr = gl.NVMMASharedLayout(box.type.layout.swizzle_byte_width, 32, 2)
    view_tile(box, gl.int32, [_WAVE, OF_BOX // 2], FLAT).store(part)
    fence_async_shared()
    _store_box(box, out_desc, into, row, column + NUMBER % COUNT * OF_BOX)


@gluon.jit
def _columns_of(x, NUMBER: gl.constexpr, WIDTH: gl.constexpr):
    """As many, of registers."""
    COLUMNS: gl.constexpr = x.shape[1]
    if COLUMNS == WIDTH:
        return x
    else:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = x.reshape([_WAVE, 2, HALF]).permute([0, 2, 1]).split()
        if NUMBER < HALF // WIDTH:
            return _columns_of(left, NUMBER, WIDTH)
        else:
            return _columns_of(right, NUMBER - HALF // WIDTH, WIDTH)


@gluon.jit
def _make_transposed_tile(
    ring, ends, scales, shape, strides, place, stage, phase, held, which: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """256 rows of the last columns, by one warpgroup.

    A product of 64 columns and 256 rows reads each of them once, four of 64 rows the columns four
    times: what an SM reads of its shared memory is what narrow tiles take the time for.
    """
    scale_a_ptr, scale_b_ptr, bias_ptr = scales
    num_rows, num_columns, _, _, _, _ = shape
    a_matrix, a_row, _, b_matrix, _, b_column, stride_bias = strides
    matrix, row, _, n, _, first_step, end_step = place
    into = _where_to(place, shape, ORDER)
    column = n * ORDER.columns  # as many as a wide tile has
    ROWS: gl.constexpr = ORDER.columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    of_a = scale_a_ptr + matrix.to(gl.int64) * a_matrix
    of_b = scale_b_ptr + matrix.to(gl.int64) * b_matrix
    offs_m = row + gl.arange(0, _WAVE, layout=THREADS)
    scale_0 = gl.load(of_a + gl.minimum(offs_m, num_rows - 1).to(gl.int64) * a_row)
    scale_1 = gl.load(of_a + gl.minimum(offs_m + _WAVE, num_rows - 1).to(gl.int64) * a_row)
    scale_2 = gl.load(of_a + gl.minimum(offs_m + 2 * _WAVE, num_rows - 1).to(gl.int64) * a_row)
    scale_3 = gl.load(of_a + gl.minimum(offs_m + 3 * _WAVE, num_rows - 1).to(gl.int64) * a_row)
    offs_n = column + gl.arange(0, _WAVE, layout=gl.SliceLayout(1, LAYOUT))
    offs_n = gl.minimum(offs_n, num_columns - 1)
    scale_b = gl.load(of_b + offs_n.to(gl.int64) * b_column)
    bias = gl.zeros([_WAVE], gl.float32, gl.SliceLayout(1, LAYOUT))
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + matrix.to(gl.int64) * stride_bias + offs_n).to(gl.float32)

    acc = gl.zeros([_WAVE, ROWS], gl.float32, LAYOUT)
    acc, acc_2 = _begin_in_tensor_core(acc, acc, ring, stage, phase, which, ORDER)
    acc, acc_2, stage, phase = _sum_in_tensor_core(
        acc, acc_2, ring, end_step - first_step, stage, phase, held, ends, which, ORDER
    )
    acc, acc_2, stage, phase = _end_in_tensor_core(acc, acc_2, ring, stage, phase, which, ORDER)
    of_columns = (scale_b, bias)
    left, right = acc.reshape([_WAVE, 2, ROWS // 2]).permute([0, 2, 1]).split()
    part_0, part_1 = left.reshape([_WAVE, 2, _WAVE]).permute([0, 2, 1]).split()
    part_2, part_3 = right.reshape([_WAVE, 2, _WAVE]).permute([0, 2, 1]).split()
    _store_transposed(part_0, scale_0, of_columns, ends, into, row, column, which, 0)
    _store_transposed(part_1, scale_1, of_columns, ends, into, row + _WAVE, column, which, 1)
    _store_transposed(part_2, scale_2, of_columns, ends, into, row + 2 * _WAVE, column, which, 2)
    _store_transposed(part_3, scale_3, of_columns, ends, into, row + 3 * _WAVE, column, which, 3)


@gluon.jit
def _store_transposed(
    acc, scale_a, of_columns, ends, into, row, column, WHICH: gl.constexpr,
    NUMBER: gl.constexpr,  # of 64 rows
):  # fmt: skip
    """Scale, add the bias, round and store 64 columns of 64 rows.

    That is one box or, of four bytes, two next to each other.
    """
    staged, _, out_desc, _ = ends
    BOXES: gl.constexpr = staged.shape[0] // 2
    OF_BOX: gl.constexpr = staged.shape[3]
    COUNT: gl.constexpr = _WAVE // OF_BOX
    FIRST: gl.constexpr = WHICH * BOXES + NUMBER * COUNT % BOXES
    SWIZZLE: gl.constexpr = staged.type.layout.swizzle_byte_width
    FLAT: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, staged.dtype.primitive_bitwidth, 2)
    gl.static_assert(COUNT <= BOXES, "all columns of a narrow tile are staged at once")
    LAYOUT: gl.constexpr = acc.type.layout
    scale_b, bias = of_columns
    acc *= gl.expand_dims(gl.convert_layout(scale_a, gl.SliceLayout(0, LAYOUT)), 0)
    acc *= gl.expand_dims(gl.convert_layout(scale_b, gl.SliceLayout(1, LAYOUT)), 1)
    acc += gl.expand_dims(gl.convert_layout(bias, gl.SliceLayout(1, LAYOUT)), 1)
    tma.store_wait(BOXES - COUNT)  # what was staged there before has been read
    boxes = view_tile(staged, staged.dtype, [2 * BOXES * _WAVE, OF_BOX], FLAT)
    boxes = boxes.slice(FIRST * _WAVE, COUNT * _WAVE, dim=0)
    out = acc.to(staged.dtype).reshape([COUNT, OF_BOX, _WAVE]).permute([1, 0, 2])
    boxes.permute([1, 0]).store(out.reshape([OF_BOX, COUNT * _WAVE]))
    fence_async_shared()
    for number in gl.static_range(COUNT):
        box = staged.index(FIRST + number)
        _store_box(box, out_desc, into, row, column + number * OF_BOX)


@gluon.jit
def _store_extra(
    acc, ends, scales, shape, strides, matrix, row, column, HAS_COLUMN_SCALES: gl.constexpr
):
    """Scale columns, add the bias, round and store, from registers."""
    _, _, _, plain = ends
    out_ptr, stride_out_matrix, stride_out_row = plain
    _, scale_b_ptr, bias_ptr = scales
    num_rows, num_columns, _, _, _, _ = shape
    _, _, _, b_matrix, _, b_column, stride_bias = strides
    offs_m = row + gl.arange(0, _WAVE, layout=gl.SliceLayout(1, acc.type.layout))
    offs_n = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    mask_n = offs_n < num_columns
    if HAS_COLUMN_SCALES:
        of_b = scale_b_ptr + matrix.to(gl.int64) * b_matrix + offs_n.to(gl.int64) * b_column
        acc *= gl.expand_dims(gl.load(of_b, mask=mask_n, other=0), 0)
    if bias_ptr is not None:
        of_bias = bias_ptr + matrix.to(gl.int64) * stride_bias + offs_n
        acc += gl.expand_dims(gl.load(of_bias, mask=mask_n, other=0).to(gl.float32), 0)
    VEC: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    stride_out_matrix = stride_out_matrix // VEC * VEC  # rows begin at multiples of 16 bytes
    stride_out_row = stride_out_row // VEC * VEC
    out_ptr += matrix.to(gl.int64) * stride_out_matrix
    offs = gl.expand_dims(offs_m.to(gl.int64) * stride_out_row, 1) + gl.expand_dims(offs_n, 0)
    mask = gl.expand_dims(offs_m < num_rows, 1) & gl.expand_dims(mask_n, 0)
    gl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _load_of_rows(of_a, row, num_rows, stride, LAYOUT: gl.constexpr):
    rows = gl.minimum(row + gl.arange(0, _WAVE, layout=gl.SliceLayout(1, LAYOUT)), num_rows - 1)
    return gl.load(of_a + rows.to(gl.int64) * stride)


@gluon.jit
def _store(
    acc, ends, into, row, column, WHICH: gl.constexpr,
    NUMBER: gl.constexpr,  # of boxes of the tile before
    OFFSET: gl.constexpr,  # of the first column in the tile
    BOXES: gl.constexpr, HAS_COLUMN_SCALES: gl.constexpr, HAS_BIAS: gl.constexpr,
    OF_GROUP: gl.constexpr,  # what a warpgroup has in ``of_columns``
):  # fmt: skip
    """Scale columns, add the bias, round and store, by as many columns as a box has.

    A warpgroup's boxes take turns in what it has of ``staged``; of a tile they are a multiple.
    """
    staged, of_columns, out_desc, _ = ends
    COLUMNS: gl.constexpr = acc.shape[1]
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    OF_BOX: gl.constexpr = staged.shape[len(staged.shape) - 1]
    if COLUMNS > OF_BOX:
        left, right = acc.reshape([_WAVE, 2, COLUMNS // 2]).permute([0, 2, 1]).split()
        _store(
            left, ends, into, row, column, WHICH, NUMBER, OFFSET, BOXES,
            HAS_COLUMN_SCALES, HAS_BIAS, OF_GROUP,
        )  # fmt: skip
        _store(
            right, ends, into, row, column, WHICH,
            NUMBER + COLUMNS // 2 // OF_BOX, OFFSET + COLUMNS // 2, BOXES,
            HAS_COLUMN_SCALES, HAS_BIAS, OF_GROUP,
        )  # fmt: skip
    else:
        if HAS_COLUMN_SCALES:
            scale = of_columns.index(WHICH * OF_GROUP).slice(OFFSET, COLUMNS).load(OF_COLUMN)
            acc *= gl.expand_dims(scale, 0)
        if HAS_BIAS:
            bias = of_columns.index(WHICH * OF_GROUP + OF_GROUP - 1)
            bias = bias.slice(OFFSET, COLUMNS).load(OF_COLUMN)
            acc += gl.expand_dims(bias, 0)
        tma.store_wait(BOXES - 1)  # what was staged there before has been read
        box = staged.index(WHICH * BOXES + NUMBER % BOXES)
        _stage(acc.to(box.dtype), box)
        _store_box(box, out_desc, into, row, column + OFFSET)


@gluon.constexpr_function
def _registers_to_fetch(by_lanes, order):
    """Of a thread of the warp that fetches: more to copy scales, or to find one of many experts.

    With few it computes the address of a scale only when the copy before has read its own.
    """
    if (by_lanes and order.rows == 256) or order.num_experts > 512:
        return 56
    return 40 if by_lanes or order.num_experts > 256 else 24


@gluon.constexpr_function
def _several(count, shape):
    return [count, *shape]


@gluon.jit(do_not_specialize=[*OF_A_STEP, "stride_out_matrix"])
def _scaled_mm_kernel(
    a_desc,  # fp8 [G, M, K] in boxes of a stage, [1, BLOCK_M, 128 or 256], or fewer rows
    b_desc,  # fp8 [G, N, K] in boxes of a stage, [1, BLOCK_N or 64, 128 or 256]
    extra_desc,  # fp8 [G, N, K] in boxes of the columns that a tile has beside, [1, X, 128]
    scale_a_ptr,  # fp32 [G, cells of M, cells of K], or [G, cells of K, M] in boxes of a stage
    scale_b_ptr,  # fp32 [G, cells of K, cells of N]
    bias_ptr,  # [G, N], or None
    out_desc,  # [S * G, M, N] in boxes [1, 64, 128 bytes], or slices of [T, N]
    out_ptr,  # the same, where tiles have columns beside their own
    row_offsets_ptr,  # int32 [G + 1], or None: where each matrix's rows begin, of all in a
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
    stride_out_matrix,
    stride_out_row,
    STAGES: gl.constexpr,
    BOXES: gl.constexpr,  # of a warpgroup's results that are on their way out
    HAS_GROUPS: gl.constexpr,  # scales of 1 x 128 and 128 x 128
    IS_COLUMN_MAJOR: gl.constexpr,  # those of a, which the TMA then fetches
    HAS_COLUMN_SCALES: gl.constexpr,  # one for each of out
    IS_EXACT: gl.constexpr,
    ORDER: gl.constexpr,  # tiles of 64 rows, or of 128 or 256 for two warpgroups
):
    BLOCK_M: gl.constexpr = ORDER.rows
    BLOCK_N: gl.constexpr = ORDER.columns
    PLACES: gl.constexpr = ORDER.kept if ORDER.kept else STAGES  # of a's steps
    NUM_FACTORS: gl.constexpr = PLACES if HAS_GROUPS else 1
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    GROUPS: gl.constexpr = ORDER.groups
    STEPS: gl.constexpr = ORDER.steps
    IN_PAIRS: gl.constexpr = GROUPS == 1 and (HAS_GROUPS or IS_EXACT)
    gl.static_assert(STEPS == 1 or (IN_PAIRS and not ORDER.kept), "only pairs share a stage")
    IS_WHOLE: gl.constexpr = BLOCK_M == 128 and not ORDER.has_turns and not ORDER.kept
    gl.static_assert(ORDER.extra == 0 or IS_WHOLE, "one second product, of rows or of columns")
    LEAVES: gl.constexpr = HAS_GROUPS or IS_EXACT
    gl.static_assert(
        not (ORDER.has_turns and LEAVES), "no turns with sums that leave the tensor core"
    )
    OF_K: gl.constexpr = STEPS * BLOCK_K
    a = gl.allocate_shared_memory(a_desc.dtype, [PLACES, 1, BLOCK_M, OF_K], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 1, BLOCK_N, OF_K], b_desc.layout)
    staged = gl.allocate_shared_memory(
        out_desc.dtype, _several(GROUPS * BOXES, out_desc.block_type.shape), out_desc.layout
    )
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    OF_GROUP: gl.constexpr = 2 if HAS_COLUMN_SCALES and HAS_BIAS else 1
    OF_COLUMNS: gl.constexpr = BLOCK_N if HAS_COLUMN_SCALES or HAS_BIAS else 1
    of_columns = gl.allocate_shared_memory(gl.float32, [GROUPS * OF_GROUP, OF_COLUMNS], FLAT)
    if IS_COLUMN_MAJOR:
        factors_a = gl.allocate_shared_memory(
            gl.float32, [NUM_FACTORS, 1, STEPS, BLOCK_M], scale_a_ptr.layout
        )
    else:
        factors_a = gl.allocate_shared_memory(gl.float32, [NUM_FACTORS, STEPS * BLOCK_M], FLAT)
    NUM_OF_B: gl.constexpr = STAGES if HAS_GROUPS else 1
    OF_B: gl.constexpr = 2 if ORDER.extra else STEPS  # of 64 copies
    factors_b = gl.allocate_shared_memory(gl.float32, [NUM_OF_B, OF_B * _WAVE], FLAT)
    extra = b
    if ORDER.extra:
        extra = gl.allocate_shared_memory(
            b_desc.dtype, _several(STAGES, extra_desc.block_type.shape), extra_desc.layout
        )
    BY_LANES: gl.constexpr = HAS_GROUPS and not IS_COLUMN_MAJOR
    experts = (row_offsets_ptr,)
    if ORDER.num_experts:
        experts = _share_out(row_offsets_ptr, num_rows, num_matrices, ORDER)
    shape = (num_rows, num_columns, depth, num_matrices, num_splits, experts)
    descs = (a_desc, b_desc, extra_desc)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    gl.static_assert(ORDER.ahead <= STAGES)
    if ORDER.ahead:
        matrix, first_row, _, n, _, first_step, end_step = _place(0, shape, ORDER, 4)
        first_of_all = (matrix, matrix, first_row, n, num_columns)
    for stage in gl.static_range(STAGES):
        # lanes of the warp that fetches, and that warp, which tells what the TMA will bring
        mbarrier.init(full.index(stage), count=33 if BY_LANES else 1)
        if stage < ORDER.ahead:
            fence_async_shared()
            step = first_step + stage * STEPS
            if step < end_step:
                _load_stage(
                    (a, b, extra, factors_a, full), descs, scale_a_ptr, first_of_all, step, stage,
                    False, IS_COLUMN_MAJOR, ORDER,
                )  # fmt: skip
    empty = make_barriers(STAGES, 1 if ORDER.has_turns else GROUPS)
    HAS_TURNS: gl.constexpr = ORDER.has_turns or _is_transposed(ORDER)
    turns = make_barriers(2, 1) if HAS_TURNS else empty
    fence_async_shared()
    gdc_launch_dependents()  # a sum of splits that waits for all of this may start
    strides = (
        stride_scale_a_matrix, stride_scale_a_row, stride_scale_a_group, stride_scale_b_matrix,
        stride_scale_b_group, stride_scale_b_column, stride_bias,
    )  # fmt: skip
    ring = (a, b, extra, factors_a, factors_b, full, empty, turns)
    # what the end of a tile is made in, and goes to
    plain = (out_ptr, stride_out_matrix, stride_out_row)
    ends = (staged, of_columns, out_desc, plain)
    scales = (scale_a_ptr, scale_b_ptr, bias_ptr)
    TO_FETCH: gl.constexpr = _registers_to_fetch(BY_LANES, ORDER)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, ring, ends, scales, shape, strides, HAS_GROUPS, HAS_COLUMN_SCALES, IS_EXACT,
                    ORDER,
                )),
                (_multiply, (
                    1, ring, ends, scales, shape, strides, HAS_GROUPS, HAS_COLUMN_SCALES, IS_EXACT,
                    ORDER,
                )),
                (_fetch, (
                    ring, descs, scales, shape, strides, HAS_GROUPS, IS_COLUMN_MAJOR, ORDER,
                )),
            ],
            [4, 1],
            [252 - TO_FETCH // 2, TO_FETCH],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, ring, ends, scales, shape, strides, HAS_GROUPS, HAS_COLUMN_SCALES, IS_EXACT,
                    ORDER,
                )),
                (_fetch, (
                    ring, descs, scales, shape, strides, HAS_GROUPS, IS_COLUMN_MAJOR, ORDER,
                )),
            ],
            [1],
            [72],  # there is room
        )  # fmt: skip


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
    row_offsets: Tensor | None,
    bias: Tensor | None,
    is_exact: bool,
    out: Tensor,
) -> Callable[[Sequence[int | None]], None] | None:
    """Launch once, or twice where K is split. ``kvkern.scaled_mm`` states the contract.

    Returns how to repeat it with tensors that differ in nothing but addresses.
    """
    num_sms = gpu_of(out.device).num_sms
    tiles = _tiles_for(a, b, cell_a, row_offsets, is_exact, num_sms)
    into = _place_for(out, tiles)
    grid, arguments, options = _call(
        a, b, scale_a, scale_b, cell_a, row_offsets, bias if into is out else None, is_exact, into,
        tiles, num_sms,
    )  # fmt: skip
    kernel = scaled_mm_few_kernel if tiles.is_few else _scaled_mm_kernel
    varying = list(kernel.arg_names)[: list(kernel.arg_names).index("num_rows")]
    multiply = launch(kernel, grid, arguments, options, out.device, num_varying=len(varying))
    add = None if into is out else launch_sum(into, bias, out)
    if multiply is None or (add is None and into is not out):
        return None
    return _Again(multiply, arguments, varying, add)


class _Again:
    """Launches the same variants for other addresses."""

    def __init__(
        self,
        multiply: Launch,
        arguments: dict[str, Any],
        varying: Sequence[str],  # names of the kernel's first parameters
        add: SumAgain | None,  # where K is split
    ) -> None:
        self._multiply, self._add = multiply, add
        given = [arguments[name] for name in varying]
        described = {n: x for n, x in enumerate(given) if hasattr(x, "base")}
        self._descriptors = Descriptors(multiply, described)
        self._sources = [
            (n if n in described else None, _NOWHERE if given[n] is None else _SOURCES[name])
            for n, name in enumerate(varying)
        ]

    def __call__(self, addresses: Sequence[int | None]) -> None:
        *operands, bias, out = addresses
        if self._add is None:
            self._launch(addresses)
        else:
            self._add(lambda into: self._launch((*operands, None, into)), bias, out)

    def _launch(self, addresses: Sequence[int | None]) -> None:
        at, addresses = self._descriptors.at, (*addresses, None)
        given: list[Any] = []
        for described, source in self._sources:
            if described is None:
                given.append(addresses[source])
            else:
                given += at(described, addresses[source])
        self._multiply(given)


_NOWHERE = -1  # what is not given
_SOURCES = {  # which of the addresses that a call is repeated with a parameter is
    "a_desc": 0, "b_desc": 1, "extra_desc": 1, "scale_a_ptr": 2, "scale_b_ptr": 3,
    "row_offsets_ptr": 4, "bias_ptr": 5, "out_desc": 6, "out_ptr": 6,
}  # fmt: skip


def _tiles_for(
    a: Tensor,
    b: Tensor,
    cell_a: tuple[int, int],
    row_offsets: Tensor | None,
    is_exact: bool,
    num_sms: int,
) -> Tiles:
    num_matrices, depth, num_columns = b.shape
    if row_offsets is not None:
        return choose_tiles_of_experts(
            size_class(triton.cdiv(a.shape[1], num_matrices)),
            sums_in_tensor_core=not is_exact and cell_a[1] == 0,
        )
    return choose_tiles(
        size_class(a.shape[1]),
        num_columns,
        depth,
        num_matrices,
        sums_in_tensor_core=not is_exact and cell_a[1] == 0,
        has_groups=cell_a[1] > 0,
        num_sms=num_sms,
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
    row_offsets: Tensor | None,
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
    of_k = 128 * tiles.steps
    arguments: dict[str, Any] = {
        "a_desc": matrix_descriptor(a, (rows_of_box(num_rows, tiles), of_k)),
        "b_desc": matrix_descriptor(b.mT, (tiles.columns, of_k)),
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
    tiles_n = triton.cdiv(num_columns, tiles.columns + tiles.extra)
    num_units = triton.cdiv(num_rows, tiles.rows) * tiles_n * num_matrices * tiles.num_splits
    if tiles.is_few:
        arguments["out_ptr"] = out
        arguments["stride_out_part"], arguments["stride_out_row"] = parts.stride()[:2]
        maxnreg = 168 if tiles.rows == 128 else 128  # sums of 128 rows are 64 of them
        options = {"num_warps": 4, "maxnreg": maxnreg, "enable_fp_fusion": True}
        return (num_units,), arguments, options
    box = (_WAVE.value, min(128 // out.element_size(), tiles.columns))
    is_grouped = row_offsets is not None
    of_class = triton.cdiv(size_class(num_rows), tiles.rows)  # row tiles, at most
    of_class = of_class + num_matrices if is_grouped else of_class * num_matrices
    num_experts = max(power_of_two(num_matrices), 128) if is_grouped else 0
    has_column_scales = cell_a[1] == 0 and scale_b.shape[2] > 1
    sums_in_tensor_core = not is_exact and cell_a[1] == 0
    arguments["HAS_COLUMN_SCALES"] = has_column_scales
    arguments["BOXES"] = num_boxes(
        tiles,
        num_experts=num_experts,
        has_groups=cell_a[1] > 0,
        num_of_columns=int(has_column_scales) + int(bias is not None),
    )
    is_narrow = not is_grouped and has_narrow(
        num_columns, tiles, sums_in_tensor_core=sums_in_tensor_core
    )
    if tiles.rows == 128:  # transposed ones stage all of their columns at once
        is_narrow = is_narrow and arguments["BOXES"] * box[1] >= _WAVE.value
    if is_narrow:
        arguments["b_desc"] = matrix_descriptor(b.mT, (_WAVE.value, of_k))
    arguments["out_desc"] = (slices_descriptor if is_grouped else matrix_descriptor)(parts, box)
    arguments["extra_desc"] = arguments["out_ptr"] = None
    arguments["stride_out_matrix"] = arguments["stride_out_row"] = 0
    if tiles.extra:
        arguments["extra_desc"] = matrix_descriptor(b.mT, (tiles.extra, of_k))
        arguments["out_ptr"] = out
        arguments["stride_out_matrix"], arguments["stride_out_row"] = parts.stride()[:2]
    arguments["row_offsets_ptr"] = row_offsets
    arguments["ORDER"] = _Order(
        rows=tiles.rows,
        columns=tiles.columns,
        steps=tiles.steps,
        band=1 if tiles.kept else 2048 // tiles.rows,
        kept=tiles.kept,
        extra=tiles.extra,
        has_narrow=is_narrow,
        has_splits=tiles.num_splits > 1,
        has_matrices=not is_grouped and num_matrices > 1,
        groups=num_groups(tiles),
        has_turns=tiles.has_turns,
        num_experts=num_experts,
        adds_both=cell_a[1] > 0 and depth < 16 * 128 and num_groups(tiles) == 2,
        ahead=0 if is_grouped or is_narrow else min(2, tiles.stages),
        # where a's rows are kept products take 1% longer with inverses
        divides=tiles.kept > 0 or of_class * tiles_n * tiles.num_splits >= _HUGE,
        held=num_held(
            tiles,
            triton.cdiv(depth, 128),
            bytes_of_value=out.element_size(),
            is_narrow=is_narrow,
            is_grouped=is_grouped,
            sums_in_tensor_core=sums_in_tensor_core,
        ),
    )
    # the TMA takes boxes that begin at multiples of 16 bytes, as rows of an expert need not
    arguments["IS_COLUMN_MAJOR"] = cell_a[1] > 0 and not is_grouped and _is_column_major(scale_a)
    if arguments["IS_COLUMN_MAJOR"]:
        of_steps = matrix_descriptor(scale_a.mT, (tiles.steps, tiles.rows), is_swizzled=False)
        arguments["scale_a_ptr"] = of_steps
    options = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True}
    return (num_sms if is_grouped else min(num_units, num_sms),), arguments, options


_BUDGET = spills("128 registers of few rows; looking for one of 1024 experts", 0, newer=32)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each kind of sum, both dtypes of an operand, tiles of each size, split and not."""
    if capability != 90:
        return
    fp16, fp32 = torch.float16, torch.float32
    calls: list[tuple[str, int, int, int, dict[str, Any]]] = [
        ("fast", 4096, 4096, 7168, {}),
        ("fast-narrow", 4096, 2112, 7168, {}),
        ("fast-short", 4096, 24576, 512, {}),
        ("fast-fp32", 1024, 24576, 1536, {"dtype": fp32, "has_bias": True}),
        ("fast-turns", 2048, 7168, 2048, {}),
        ("fast", 16, 4096, 7168, {"a_dtype": torch.float8_e5m2, "dtype": fp16, "has_bias": True}),
        ("exact", 4096, 4096, 7168, {"is_exact": True, "has_bias": True}),
        ("exact", 128, 4096, 7168, {"is_exact": True, "dtype": fp16}),
        ("groups", 4096, 4096, 7168, {"of_groups": "column"}),
        ("groups-short", 4096, 32768, 512, {"of_groups": "column"}),
        ("groups-short", 128, 32768, 512, {"of_groups": "row"}),
        ("groups-narrow", 4096, 2112, 7168, {"of_groups": "row"}),
        ("groups-fp32", 4096, 24576, 7168, {"of_groups": "row", "dtype": fp32, "has_bias": True}),
        ("groups", 128, 24576, 1536, {"of_groups": "row"}),
        ("fast-extra", 128, 36864, 7168, {}),
        ("fast-extra", 2048, 2112, 7168, {"has_bias": True}),
        ("exact-extra", 256, 36864, 7168, {"is_exact": True, "dtype": fp32, "has_bias": True}),
        ("groups-extra", 128, 36864, 7168, {"of_groups": "column", "has_bias": True}),
        ("groups-extra", 256, 36864, 7168, {"of_groups": "row"}),
        ("fast-narrow-fp32", 4096, 2112, 7168, {"dtype": fp32}),
        ("fast", 128, 7168, 16384, {"has_bias": True}),
        ("fast-short", 128, 7168, 2048, {}),
        ("exact-long", 128, 7168, 16384, {"is_exact": True, "dtype": fp32}),
        ("groups", 64, 24576, 1536, {"of_groups": "row"}),
        ("exact", 64, 24576, 1536, {"is_exact": True}),
        ("groups-long", 64, 7168, 16384, {"of_groups": "row"}),
        ("groups-half", 64, 4096, 7168, {"of_groups": "column"}),
        ("groups-64", 128, 4096, 7168, {"of_groups": "row"}),
        ("experts", 4096, 4096, 7168, {"of_groups": "column", "num_experts": 256}),
        ("experts", 4096, 4096, 7168, {"of_groups": "row", "num_experts": 32}),
        ("experts", 4096, 4096, 7168, {"of_groups": "row", "num_experts": 1024}),
        ("experts", 32768, 4096, 7168, {"of_groups": "column", "num_experts": 32}),
        ("experts-fast", 4096, 7168, 2048, {"num_experts": 64, "has_bias": True}),
        ("experts-fast", 8192, 7168, 2048, {"num_experts": 64, "dtype": fp32}),
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
    num_experts: int = 0,
) -> KernelConfig:
    """One call on tensors without memory."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(1, *shape, dtype=dtype, device="meta")

    a = empty(num_rows, depth, dtype=a_dtype)
    b = empty(num_columns, depth, dtype=torch.float8_e4m3fn).mT
    row_offsets = None
    if num_experts:
        b = b.expand(num_experts, -1, -1)
        row_offsets = empty(num_experts, dtype=torch.int32)
        label += f"-E{num_experts}"
    out = empty(num_rows, num_columns, dtype=dtype)
    steps = depth // 128 if of_groups else 1
    scale_a = empty(steps, num_rows).mT if of_groups == "column" else empty(num_rows, steps)
    scale_b = empty(steps, num_columns)
    bias = empty(num_columns, dtype=torch.bfloat16) if has_bias else None
    cell_a, is_exact = (1, 128 if of_groups else 0), is_exact or bool(of_groups)
    tiles = _tiles_for(a, b, cell_a, row_offsets, is_exact, 132)
    into = _place_for(out, tiles)
    _, arguments, options = _call(
        a, b, scale_a, scale_b, cell_a, row_offsets, bias if into is out else None, is_exact, into,
        tiles, 132,
    )  # fmt: skip
    kernel = scaled_mm_few_kernel if tiles.is_few else _scaled_mm_kernel
    return config_of_call(
        kernel, f"{label}-M{num_rows}", arguments, options, **_BUDGET, product=FP8_PRODUCT
    )
