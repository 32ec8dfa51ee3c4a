"""scaled_mm: out = sum over groups of 128 of K of (a @ b) * scale_a * scale_b, + bias; by wgmma.

A program takes every num_programs-th tile of ``out``, or part of K of one; where K is short, tiles
next to each other, whose rows of a it keeps. One warp fetches steps of 128 of K by TMA into a ring
of STAGES, but for the first two, which are asked for before it has begun; two warpgroups multiply,
each one half of the tile's rows, 64 at a time, or every other tile; one does it all, if there are
64. They hold the result of a large tile until the next one's products are under way, so that the
tensor core waits for little between tiles.
Columns that are left have narrow tiles, done last, or each tile has a few of them beside its own.
Rows of experts are cut into tiles that begin and end with them.

Here are those that multiply, the kernel, and launches and repeats. Beside it: ``scaled_mm_tiles``
chooses tiles, ``scaled_mm_order`` says which one is whose, ``scaled_mm_ring`` fetches operands,
``scaled_mm_sums`` adds products up, ``scaled_mm_ends`` has the way out; few rows have a kernel of
their own, ``scaled_mm_few``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvkern.kernels.config import FP8_PRODUCT, KernelConfig, config_of_call, spills
from kvkern.kernels.device import EARLY_START, gpu_of
from kvkern.kernels.hopper.compat import matrix_descriptor, slices_descriptor
from kvkern.kernels.hopper.paging import make_barriers, pin
from kvkern.kernels.hopper.scaled_mm_ends import (
    clear_padding,
    load_ends,
    nothing_held,
    pack,
    store_box_of_held,
    store_extra,
    store_result,
    store_transposed,
)
from kvkern.kernels.hopper.scaled_mm_few import (
    BLOCK_K,
    OF_A_STEP,
    num_scales,
    scaled_mm_few_kernel,
)
from kvkern.kernels.hopper.scaled_mm_order import (
    HUGE,
    WAVE,
    Order,
    first_extra_column,
    has_two,
    has_two_products,
    is_transposed,
    num_rounds,
    place_of_unit,
    row_of_wave,
    share_out,
    transposed_order,
    where_to,
)
from kvkern.kernels.hopper.scaled_mm_ring import begin_ring, copies_of_b, fetch
from kvkern.kernels.hopper.scaled_mm_sums import (
    begin_in_registers,
    begin_in_tensor_core,
    end_in_tensor_core,
    narrow_operands,
    sum_in_pairs,
    sum_in_registers,
    sum_in_tensor_core,
    sum_under_products,
)
from kvkern.kernels.hopper.scaled_mm_tiles import (
    Tiles,
    band_of,
    choose_tiles,
    choose_tiles_of_experts,
    has_narrow,
    num_boxes,
    num_groups,
    num_held,
    num_parts_of_rows,
    rows_of_box,
)
from kvkern.kernels.launch import Descriptors, Launch, launch
from kvkern.kernels.paging import power_of_two
from kvkern.kernels.sum_splits import SumAgain, launch_sum, new_partials
from kvkern.warm_up import size_class


@gluon.constexpr_function
def _sleeps(count):
    return "nanosleep.u32 1; " * count + "mov.u32 $0, $1;"


@gluon.jit
def _shift_code(x, COUNT: gl.constexpr):
    """Instructions of 16 bytes that do next to nothing, so that what follows lies elsewhere.

    Where in 128 bytes a loop ends that multiplies and adds up decides how much power it draws, and
    power is what long products are short of: it makes 0.5 to 3% of their time.
    """
    if COUNT > 0:
        ASM: gl.constexpr = _sleeps(COUNT)
        gl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _multiply(
    which: gl.constexpr, ring, ends, scales, shape, strides, first_place, rounds,
    HAS_GROUPS: gl.constexpr, HAS_COLUMN_SCALES: gl.constexpr, IS_EXACT: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """A warpgroup: one or two times 64 rows of each tile.

    Where they take turns the ring has steps of one tile after the other's, so that one multiplies
    while the other stores; the first product of a tile is begun when the last of the other's is.
    """
    a, b, extra, factors_a, factors_b, full, empty, turns = ring
    columns, rows = narrow_operands(a, b, ORDER)
    narrow_ring = (columns, rows, extra, factors_a, factors_b, full, empty, turns)
    STAGES: gl.constexpr = b.shape[0]
    EVERY: gl.constexpr = 2 if ORDER.has_turns else 1
    BLOCK_N: gl.constexpr = ORDER.columns
    _, num_columns, _, _, _, _ = shape
    FIRST: gl.constexpr = which % EVERY
    HELD: gl.constexpr = ORDER.held
    if which == 1:
        _shift_code(rounds, ORDER.shift)
    stage = 0
    phase = 0
    narrow_turn = 0
    held = nothing_held(shape, ORDER)
    place = first_place
    if FIRST > 0:
        place = place_of_unit(FIRST, shape, ORDER, 4)
    for turn in range(FIRST, rounds, EVERY):
        first_step = place[5]
        num_steps = place[6] - first_step
        if ORDER.has_turns:  # the other's steps have gone by
            stage = turn * num_steps % STAGES
            phase = turn * num_steps // STAGES % 2
            mbarrier.wait(turns.index(which), (turn // 2 + 1 - which) % 2)
        if ORDER.has_narrow and place[3] == num_columns // BLOCK_N:
            if is_transposed(ORDER):
                if narrow_turn % 2 == which:
                    if narrow_turn > 0:  # the other's steps have gone by
                        mbarrier.wait(turns.index(which), (narrow_turn - 1) // 2 % 2)
                    _make_transposed_tile(
                        narrow_ring, ends, scales, shape, strides, place, stage, phase, which,
                        transposed_order(ORDER),
                    )  # fmt: skip
                narrow_turn += 1
                phase = (phase + (stage + num_steps) // STAGES) % 2
                stage = (stage + num_steps) % STAGES
            else:
                stage, phase = _make_tile(
                    ring, ends, scales, shape, strides, place, stage, phase, which, WAVE,
                    HAS_GROUPS, HAS_COLUMN_SCALES, IS_EXACT, ORDER,
                )  # fmt: skip
            place = place_of_unit(turn + EVERY, shape, ORDER, 4)
        elif ORDER.held:
            held, place, stage, phase = _make_held_tile(
                ring, ends, scales, shape, strides, place, turn + EVERY, stage, phase, held, which,
                HAS_GROUPS, HAS_COLUMN_SCALES, IS_EXACT, ORDER,
            )  # fmt: skip
        else:
            stage, phase = _make_tile(
                ring, ends, scales, shape, strides, place, stage, phase, which, BLOCK_N,
                HAS_GROUPS, HAS_COLUMN_SCALES, IS_EXACT, ORDER,
            )  # fmt: skip
            place = place_of_unit(turn + EVERY, shape, ORDER, 4)
    for number in gl.static_range(HELD):
        store_box_of_held(held, number, ends, which, ORDER)
    if ORDER.num_experts and which == 0:
        clear_padding(ends, shape)
    gdc_launch_dependents()  # no sooner: where the next one's programs find room they stay
    tma.store_wait(0)


@gluon.jit
def _make_tile(
    ring, ends, scales, shape, strides, place, stage, phase, which: gl.constexpr,
    COLUMNS: gl.constexpr, HAS_GROUPS: gl.constexpr, HAS_COLUMN_SCALES: gl.constexpr,
    IS_EXACT: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """A warpgroup's part of a tile, of COLUMNS columns. The ring's place after it."""
    staged, of_columns, _, _ = ends
    num_rows, num_columns, _, _, _, _ = shape
    _, _, bias_ptr = scales
    matrix, row, _, n, _, first_step, end_step = place
    row = row_of_wave(row, which, num_rows, ORDER)
    num_steps = end_step - first_step
    BLOCK_N: gl.constexpr = ORDER.columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    HAS_TWO: gl.constexpr = has_two(ORDER)
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    BOXES: gl.constexpr = staged.shape[0] // ORDER.groups
    OF_GROUP: gl.constexpr = of_columns.shape[0] // ORDER.groups
    OF_BOX: gl.constexpr = staged.shape[len(staged.shape) - 1]
    scale_a, scale_a_2, scale_b, bias = load_ends(
        scales, shape, strides, matrix, row, n, LAYOUT, HAS_GROUPS, HAS_COLUMN_SCALES, ORDER
    )
    acc = gl.zeros([WAVE, COLUMNS], gl.float32, LAYOUT)
    COLUMNS_2: gl.constexpr = COLUMNS if HAS_TWO else max(ORDER.extra, 8)
    LAYOUT_2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS_2, 32])
    acc_2 = gl.zeros([WAVE, COLUMNS_2], gl.float32, LAYOUT_2)
    if (HAS_GROUPS or IS_EXACT) and not has_two_products(ORDER):
        acc, stage, phase = sum_in_pairs(
            acc, ring, num_steps, stage, phase, which, HAS_GROUPS, ORDER
        )
    elif (HAS_GROUPS or IS_EXACT) and (COLUMNS == WAVE or ORDER.extra > 0):
        acc, acc_2, stage, phase = sum_under_products(
            acc, acc_2, ring, num_steps, stage, phase, which, HAS_GROUPS, ORDER
        )
    elif HAS_GROUPS or IS_EXACT:
        part, factors = begin_in_registers(acc, acc_2, ring, stage, phase, which, HAS_GROUPS, ORDER)
        acc, acc_2, stage, phase = sum_in_registers(
            part, factors, acc, acc_2, ring, num_steps, stage, phase, None, ends, which,
            HAS_GROUPS, ORDER,
        )  # fmt: skip
    else:
        acc, acc_2 = begin_in_tensor_core(acc, acc_2, ring, stage, phase, which, ORDER)
        acc, acc_2, stage, phase = sum_in_tensor_core(
            acc, acc_2, ring, num_steps, stage, phase, None, ends, which, ORDER
        )
        acc, acc_2, stage, phase = end_in_tensor_core(acc, acc_2, ring, stage, phase, which, ORDER)

    into = where_to(place, shape, ORDER)
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
    store_result(
        acc, ends, into, row, n * BLOCK_N, which, 0, 0, BOXES, HAS_COLUMN_SCALES,
        HAS_BIAS, OF_GROUP,
    )  # fmt: skip
    if HAS_TWO:
        store_result(
            acc_2, ends, into, row + WAVE, n * BLOCK_N, which,
            COLUMNS // OF_BOX, 0, BOXES, HAS_COLUMN_SCALES, HAS_BIAS, OF_GROUP,
        )  # fmt: skip
    if ORDER.extra:
        if not HAS_GROUPS:
            acc_2 *= gl.expand_dims(gl.convert_layout(scale_a, gl.SliceLayout(1, LAYOUT_2)), 1)
        store_extra(
            acc_2, ends, scales, shape, strides, matrix, row,
            first_extra_column(n, num_columns, ORDER), HAS_COLUMN_SCALES,
        )  # fmt: skip
    return stage, phase


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
    num_rows, _, _, _, _, _ = shape
    _, _, bias_ptr = scales
    matrix, row, _, n, _, first_step, end_step = place
    row = row_of_wave(row, which, num_rows, ORDER)
    num_steps = end_step - first_step
    COLUMNS: gl.constexpr = ORDER.columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    OF_COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    HAS_BIAS: gl.constexpr = bias_ptr is not None
    OF_GROUP: gl.constexpr = of_columns.shape[0] // ORDER.groups
    acc = gl.zeros([WAVE, COLUMNS], gl.float32, LAYOUT)
    acc_2 = acc
    if HAS_GROUPS or IS_EXACT:
        part, factors = begin_in_registers(acc, acc_2, ring, stage, phase, which, HAS_GROUPS, ORDER)
    else:
        acc, acc_2 = begin_in_tensor_core(acc, acc_2, ring, stage, phase, which, ORDER)
    place_after = place_of_unit(next_turn, shape, ORDER, 4)
    scale_a, scale_a_2, scale_b, bias = load_ends(
        scales, shape, strides, matrix, row, n, LAYOUT, HAS_GROUPS, HAS_COLUMN_SCALES, ORDER
    )
    if HAS_GROUPS or IS_EXACT:
        acc, acc_2, stage, phase = sum_in_registers(
            part, factors, acc, acc_2, ring, num_steps, stage, phase, held, ends, which,
            HAS_GROUPS, ORDER,
        )  # fmt: skip
    else:
        acc, acc_2, stage, phase = sum_in_tensor_core(
            acc, acc_2, ring, num_steps, stage, phase, held, ends, which, ORDER
        )
    if HAS_COLUMN_SCALES:  # loaded while the tensor core's last product is made
        of_columns.index(which * OF_GROUP).store(scale_b)
        scale_b = pin(of_columns.index(which * OF_GROUP).load(OF_COLUMN))
    if not (HAS_GROUPS or IS_EXACT):
        acc, acc_2, stage, phase = end_in_tensor_core(acc, acc_2, ring, stage, phase, which, ORDER)
    if HAS_BIAS:
        of_columns.index(which * OF_GROUP + OF_GROUP - 1).store(bias)
        bias = of_columns.index(which * OF_GROUP + OF_GROUP - 1).load(OF_COLUMN)
    of_ends = (scale_b, bias)
    first = pack(acc, scale_a, of_ends, staged.dtype, HAS_GROUPS, HAS_COLUMN_SCALES, HAS_BIAS)
    second = first
    if has_two(ORDER):
        second = pack(
            acc_2, scale_a_2, of_ends, staged.dtype, HAS_GROUPS, HAS_COLUMN_SCALES, HAS_BIAS
        )
    held = (first, second, where_to(place, shape, ORDER), row, n * COLUMNS)
    return held, place_after, stage, phase


@gluon.jit
def _make_transposed_tile(
    ring, ends, scales, shape, strides, place, stage, phase, which: gl.constexpr,
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
    into = where_to(place, shape, ORDER)
    column = n * ORDER.columns  # as many as a wide tile has
    ROWS: gl.constexpr = ORDER.columns
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    of_a = scale_a_ptr + matrix.to(gl.int64) * a_matrix
    of_b = scale_b_ptr + matrix.to(gl.int64) * b_matrix
    offs_m = row + gl.arange(0, WAVE, layout=THREADS)
    scale_0 = gl.load(of_a + gl.minimum(offs_m, num_rows - 1).to(gl.int64) * a_row)
    scale_1 = gl.load(of_a + gl.minimum(offs_m + WAVE, num_rows - 1).to(gl.int64) * a_row)
    scale_2 = gl.load(of_a + gl.minimum(offs_m + 2 * WAVE, num_rows - 1).to(gl.int64) * a_row)
    scale_3 = gl.load(of_a + gl.minimum(offs_m + 3 * WAVE, num_rows - 1).to(gl.int64) * a_row)
    offs_n = column + gl.arange(0, WAVE, layout=gl.SliceLayout(1, LAYOUT))
    offs_n = gl.minimum(offs_n, num_columns - 1)
    scale_b = gl.load(of_b + offs_n.to(gl.int64) * b_column)
    bias = gl.zeros([WAVE], gl.float32, gl.SliceLayout(1, LAYOUT))
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + matrix.to(gl.int64) * stride_bias + offs_n).to(gl.float32)

    acc = gl.zeros([WAVE, ROWS], gl.float32, LAYOUT)
    acc, acc_2 = begin_in_tensor_core(acc, acc, ring, stage, phase, which, ORDER)
    acc, acc_2, stage, phase = sum_in_tensor_core(
        acc, acc_2, ring, end_step - first_step, stage, phase, None, ends, which, ORDER
    )
    acc, acc_2, stage, phase = end_in_tensor_core(acc, acc_2, ring, stage, phase, which, ORDER)
    of_columns = (scale_b, bias)
    left, right = acc.reshape([WAVE, 2, ROWS // 2]).permute([0, 2, 1]).split()
    part_0, part_1 = left.reshape([WAVE, 2, WAVE]).permute([0, 2, 1]).split()
    part_2, part_3 = right.reshape([WAVE, 2, WAVE]).permute([0, 2, 1]).split()
    store_transposed(part_0, scale_0, of_columns, ends, into, row, column, which, 0)
    store_transposed(part_1, scale_1, of_columns, ends, into, row + WAVE, column, which, 1)
    store_transposed(part_2, scale_2, of_columns, ends, into, row + 2 * WAVE, column, which, 2)
    store_transposed(part_3, scale_3, of_columns, ends, into, row + 3 * WAVE, column, which, 3)


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
    factors_b = gl.allocate_shared_memory(gl.float32, [NUM_OF_B, copies_of_b(ORDER)], FLAT)
    extra = b
    if ORDER.extra:
        extra = gl.allocate_shared_memory(
            b_desc.dtype, _several(STAGES, extra_desc.block_type.shape), extra_desc.layout
        )
    BY_LANES: gl.constexpr = HAS_GROUPS and not IS_COLUMN_MAJOR
    gdc_wait()
    experts = (row_offsets_ptr,)
    if ORDER.num_experts:
        experts = share_out(row_offsets_ptr, num_rows, num_matrices, ORDER)
    shape = (num_rows, num_columns, depth, num_matrices, num_splits, experts)
    descs = (a_desc, b_desc, extra_desc)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    HAS_TURNS: gl.constexpr = ORDER.has_turns or is_transposed(ORDER)
    turns = make_barriers(2, 1) if HAS_TURNS else empty
    strides = (
        stride_scale_a_matrix, stride_scale_a_row, stride_scale_a_group, stride_scale_b_matrix,
        stride_scale_b_group, stride_scale_b_column, stride_bias,
    )  # fmt: skip
    ring = (a, b, extra, factors_a, factors_b, full, empty, turns)
    # what the end of a tile is made in, and goes to
    plain = (out_ptr, stride_out_matrix, stride_out_row)
    ends = (staged, of_columns, out_desc, plain)
    scales = (scale_a_ptr, scale_b_ptr, bias_ptr)
    first_place = place_of_unit(0, shape, ORDER, 4)
    rounds = num_rounds(shape, ORDER)
    begin_ring(
        ring, descs, scales, shape, strides, first_place, rounds, HAS_GROUPS, IS_COLUMN_MAJOR,
        ORDER,
    )  # fmt: skip
    if num_splits > 1:
        gdc_launch_dependents()  # their sum may start, which waits for all of this
    TO_FETCH: gl.constexpr = _registers_to_fetch(BY_LANES, ORDER)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, ring, ends, scales, shape, strides, first_place, rounds, HAS_GROUPS,
                    HAS_COLUMN_SCALES, IS_EXACT, ORDER,
                )),
                (_multiply, (
                    1, ring, ends, scales, shape, strides, first_place, rounds, HAS_GROUPS,
                    HAS_COLUMN_SCALES, IS_EXACT, ORDER,
                )),
                (fetch, (
                    ring, descs, scales, shape, strides, first_place, rounds, HAS_GROUPS,
                    IS_COLUMN_MAJOR, ORDER,
                )),
            ],
            [4, 1],
            [252 - TO_FETCH // 2, TO_FETCH],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, ring, ends, scales, shape, strides, first_place, rounds, HAS_GROUPS,
                    HAS_COLUMN_SCALES, IS_EXACT, ORDER,
                )),
                (fetch, (
                    ring, descs, scales, shape, strides, first_place, rounds, HAS_GROUPS,
                    IS_COLUMN_MAJOR, ORDER,
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
    """Grid, arguments and options of the launch."""
    num_matrices, depth, num_columns = b.shape
    num_rows = a.shape[1]

    def strides(name: str, x: Tensor, *dims: str) -> dict[str, int]:
        """0 along a dim that is no more than a scale long."""
        pairs = zip(dims, x.shape, x.stride(), strict=True)
        return {f"stride_{name}_{dim}": 0 if size == 1 else step for dim, size, step in pairs}

    of_k = 128 * tiles.steps
    num_parts = 1 if row_offsets is not None else num_parts_of_rows(num_rows, num_columns, tiles)
    arguments: dict[str, Any] = {
        "a_desc": matrix_descriptor(a, (rows_of_box(num_rows, tiles) // num_parts, of_k)),
        "b_desc": matrix_descriptor(b.mT, (tiles.columns, of_k)),
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
        **_scales_of_rows(
            scale_a, cell_a[1] > 0, row_offsets is not None, num_rows, num_parts, tiles
        ),
    }
    tiles_n = triton.cdiv(num_columns, tiles.columns + tiles.extra)
    num_units = triton.cdiv(num_rows, tiles.rows) * tiles_n * num_matrices * tiles.num_splits
    if tiles.is_few:
        arguments |= _rest_of_few(depth, out, tiles) | {"PARTS": num_parts}
        maxnreg = 168 if tiles.rows == 128 else 128  # sums of 128 rows are 64 of them
        return (num_units,), arguments, _options(maxnreg)
    arguments |= _rest_of_many(
        arguments, b, row_offsets, bias, out, tiles, tiles_n, num_parts, num_sms
    )
    num_programs = num_sms if row_offsets is not None else min(num_units, num_sms)
    return (num_programs,), arguments, _options(168)


def _options(maxnreg: int) -> dict[str, Any]:
    return {"num_warps": 4, "maxnreg": maxnreg, "enable_fp_fusion": True, **EARLY_START}


def _scales_of_rows(
    scale_a: Tensor,
    has_groups: bool,
    is_grouped: bool,
    num_rows: int,
    num_parts: int,
    tiles: Tiles,
) -> dict[str, Any]:
    """Where they are, or boxes of them.

    The TMA takes boxes that begin at multiples of 16 bytes, as rows of an expert need not; of 8
    rows or fewer they are sooner copied.
    """
    is_sooner_copied = tiles.is_few and num_rows <= 8
    if not has_groups or is_grouped or is_sooner_copied or not _is_column_major(scale_a):
        return {"scale_a_ptr": scale_a, "IS_COLUMN_MAJOR": False}
    rows = rows_of_box(num_rows, tiles) if tiles.is_few else tiles.rows
    box = (1, rows // num_parts) if num_parts > 1 else (tiles.steps, num_scales(rows))
    of_steps = matrix_descriptor(scale_a.mT, box, is_swizzled=False)
    return {"scale_a_ptr": of_steps, "IS_COLUMN_MAJOR": True}


def _rest_of_few(depth: int, out: Tensor, tiles: Tiles) -> dict[str, Any]:
    """Arguments that only the kernel of few rows has."""
    stride_part, stride_row = out.flatten(0, -3).stride()[:2]
    fills = triton.cdiv(triton.cdiv(depth, 128 * tiles.steps), tiles.num_splits)
    return {
        "MOST_STEPS": power_of_two(max(fills * tiles.steps, 128)),
        "out_ptr": out,
        "stride_out_part": stride_part,
        "stride_out_row": stride_row,
    }


def _rest_of_many(
    common: Mapping[str, Any],
    b: Tensor,
    row_offsets: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    tiles_n: int,
    num_parts: int,
    num_sms: int,
) -> dict[str, Any]:
    """Arguments that only the other kernel has, or has otherwise."""
    num_matrices, depth, num_columns = b.shape
    parts = out.flatten(0, -3)  # [S * G, M, N]
    of_k = 128 * tiles.steps
    box = (WAVE.value, min(128 // out.element_size(), tiles.columns))
    is_grouped = row_offsets is not None
    of_class = triton.cdiv(size_class(common["num_rows"]), tiles.rows)  # row tiles, at most
    of_class = of_class + num_matrices if is_grouped else of_class * num_matrices
    units_of_class = of_class * tiles_n * tiles.num_splits
    num_experts = max(power_of_two(num_matrices), 128) if is_grouped else 0
    has_groups = common["HAS_GROUPS"]
    has_column_scales = not has_groups and common["scale_b_ptr"].shape[2] > 1
    sums_in_tensor_core = not common["IS_EXACT"] and not has_groups
    boxes = num_boxes(
        tiles,
        num_experts=num_experts,
        has_groups=has_groups,
        num_of_columns=int(has_column_scales) + int(bias is not None),
    )
    is_narrow = not is_grouped and has_narrow(
        num_columns, tiles, sums_in_tensor_core=sums_in_tensor_core
    )
    if tiles.rows == 128:  # transposed ones stage all of their columns at once
        is_narrow = is_narrow and boxes * box[1] >= WAVE.value
    held = num_held(
        tiles,
        triton.cdiv(depth, 128),
        rounds=triton.cdiv(units_of_class, num_sms),
        bytes_of_value=out.element_size(),
        is_narrow=is_narrow,
        is_grouped=is_grouped,
        sums_in_tensor_core=sums_in_tensor_core,
    )
    shifts = _SHIFTS if _has_long_loop(tiles, held, has_groups) else {}
    order = Order(
        rows=tiles.rows,
        columns=tiles.columns,
        steps=tiles.steps,
        band=band_of(tiles, tiles_n, depth, num_sms),
        kept=tiles.kept,
        extra=tiles.extra,
        has_narrow=is_narrow,
        has_splits=tiles.num_splits > 1,
        has_matrices=not is_grouped and num_matrices > 1,
        groups=num_groups(tiles),
        has_turns=tiles.has_turns,
        num_experts=num_experts,
        adds_both=has_groups and depth < 16 * 128 and num_groups(tiles) == 2,
        ahead=0 if is_narrow else 2,
        # where a's rows are kept products take 1% longer with inverses
        divides=tiles.kept > 0 or units_of_class >= HUGE,
        held=held,
        shift=shifts.get((common["IS_COLUMN_MAJOR"], bias is not None), 0),
        parts=num_parts,
    )
    rest: dict[str, Any] = {
        "out_desc": (slices_descriptor if is_grouped else matrix_descriptor)(parts, box),
        "extra_desc": None,
        "out_ptr": None,
        "stride_out_matrix": 0,
        "stride_out_row": 0,
        "row_offsets_ptr": row_offsets,
        "HAS_COLUMN_SCALES": has_column_scales,
        "BOXES": boxes,
        "ORDER": order,
    }
    if is_narrow:
        rest["b_desc"] = matrix_descriptor(b.mT, (WAVE.value, of_k))
    if tiles.extra:
        rest["extra_desc"] = matrix_descriptor(b.mT, (tiles.extra, of_k))
        rest["out_ptr"] = out
        rest["stride_out_matrix"], rest["stride_out_row"] = parts.stride()[:2]
    return rest


def _has_long_loop(tiles: Tiles, held: int, has_groups: bool) -> bool:
    """Of which it matters where it ends (``_shift_code``)."""
    return held > 0 and has_groups and not tiles.kept


# by whether scales are column-major and there is a bias
_SHIFTS = {(True, False): 1, (False, False): 7}
_LOOP_ENDS = (0x70, 0, 0x10, 0x30)  # bytes into 128 where such a loop draws little power

_BUDGET = spills("128 registers of few rows; looking for one of 1024 experts", 0, newer=32)
# few registers are left beside what is held; none of these is in a loop over K
_OF_KEPT = spills("once a tile, beside what is held and a's steps are kept", 160, newer=288)
_OF_EXPERTS = spills("looking for one of 1024 experts beside what is held", 768, newer=1040)
_ONCE = spills("once a tile, by the warp that fetches", 0, newer=128)
_PARTS = spills("before the warps part, one number a step by the warp that fetches", 0, newer=64)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each kind of sum, both dtypes of an operand, tiles of each size, split and not."""
    if capability != 90:
        return
    fp16, fp32, bias = torch.float16, torch.float32, {"has_bias": True}
    calls: list[tuple[str, int, int, int, dict[str, Any]]] = [
        ("fast", 4096, 4096, 7168, {}),
        ("fast-narrow", 4096, 2112, 7168, {}),
        ("fast-short", 4096, 24576, 512, {}),
        ("fast-fp32", 1024, 24576, 1536, {"dtype": fp32, "has_bias": True}),
        ("fast-turns", 2048, 7168, 2048, {}),
        ("fast-turns-fp32", 2048, 7168, 2048, {"dtype": fp32, "has_bias": True}),
        ("fast-bias", 4096, 24576, 1536, {"dtype": fp16, "has_bias": True}),
        ("fast", 16, 4096, 7168, {"a_dtype": torch.float8_e5m2, "dtype": fp16, "has_bias": True}),
        ("exact", 4096, 4096, 7168, {"is_exact": True, "has_bias": True}),
        ("exact", 128, 4096, 7168, {"is_exact": True, "dtype": fp16}),
        ("fast-once", 1024, 4096, 7168, {"has_bias": True}),
        ("exact-once", 1024, 4096, 7168, {"is_exact": True, "has_bias": True}),
        ("groups-once", 1024, 4096, 7168, {"of_groups": "row", "has_bias": True}),
        ("groups", 4096, 4096, 7168, {"of_groups": "column"}),
        ("groups-bias", 4096, 4096, 7168, {"of_groups": "column", "has_bias": True}),
        ("groups-row", 4096, 4096, 7168, {"of_groups": "row"}),
        ("groups-row-bias", 4096, 4096, 7168, {"of_groups": "row", "has_bias": True}),
        ("groups-short", 4096, 32768, 512, {"of_groups": "column"}),
        ("groups-short", 128, 32768, 512, {"of_groups": "row"}),
        ("groups-once", 256, 14336, 4096, {"of_groups": "column", "has_bias": True}),
        ("fast-once", 256, 14336, 4096, {"has_bias": True}),
        ("groups-short-row", 4096, 32768, 512, {"of_groups": "row", "budget": _OF_KEPT}),
        ("groups-narrow", 4096, 2112, 7168, {"of_groups": "row"}),
        ("groups-fp32", 4096, 24576, 7168, {"of_groups": "row", "dtype": fp32, "has_bias": True}),
        ("groups", 128, 24576, 1536, {"of_groups": "row"}),
        ("fast-extra", 128, 36864, 7168, {}),
        ("fast-extra", 2048, 2112, 7168, {"has_bias": True}),
        ("exact-extra", 256, 36864, 7168, {"is_exact": True, "dtype": fp32, "has_bias": True}),
        ("groups-extra", 128, 36864, 7168, {"of_groups": "column", "budget": _PARTS} | bias),
        ("groups-extra", 256, 36864, 7168, {"of_groups": "row"}),
        ("fast-narrow-fp32", 4096, 2112, 7168, {"dtype": fp32}),
        ("fast", 128, 7168, 16384, {"has_bias": True}),
        ("fast-short", 128, 7168, 2048, {}),
        ("exact-long", 128, 7168, 16384, {"is_exact": True, "dtype": fp32}),
        ("groups", 64, 24576, 1536, {"of_groups": "row"}),
        ("groups-column", 64, 7168, 2048, {"of_groups": "column"}),
        ("exact", 64, 24576, 1536, {"is_exact": True}),
        ("groups-long", 64, 7168, 16384, {"of_groups": "row"}),
        ("groups-half", 64, 4096, 7168, {"of_groups": "column"}),
        ("groups-64", 128, 4096, 7168, {"of_groups": "row"}),
        ("experts", 4096, 4096, 7168, {"of_groups": "column", "num_experts": 256}),
        ("experts", 4096, 4096, 7168, {"of_groups": "row", "num_experts": 32}),
        ("experts", 4096, 4096, 7168, {"of_groups": "row", "num_experts": 1024}),
        ("experts", 32768, 4096, 7168, {"of_groups": "column", "num_experts": 32, "budget": _ONCE}),
        ("experts-fast", 4096, 7168, 2048, {"num_experts": 64, "has_bias": True}),
        ("experts-fast", 8192, 7168, 2048, {"num_experts": 64, "dtype": fp32}),
        ("experts-fast", 32768, 4096, 7168, {"num_experts": 32, "has_bias": True}),
        ("experts-fast", 131072, 4096, 7168, {"num_experts": 1024, "budget": _OF_EXPERTS}),
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
    budget: dict[str, Any] = _BUDGET,
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
    is_long = not tiles.is_few and _has_long_loop(tiles, arguments["ORDER"].held, bool(of_groups))
    ends = _LOOP_ENDS if is_long and triton.__version__.startswith("3.6.") else ()
    return config_of_call(
        kernel, f"{label}-M{num_rows}", arguments, options, **budget, product=FP8_PRODUCT,
        loop_ends=ends,
    )  # fmt: skip
