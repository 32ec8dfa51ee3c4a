"""scaled_mm's sums over the steps of K, of a warpgroup: in the tensor core, or out of it in fp32.

The tensor core's accumulator keeps some 13 bits, so where sums are exact, or scales change along K,
the product of a step is added in registers. Products go on while something else is done: another's
sum, or what was held of the tile before, which is stored under the first.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kvkern.kernels.hopper.compat import as_matrix, view_tile
from kvkern.kernels.hopper.paging import fence_products, next_stage, pin
from kvkern.kernels.hopper.scaled_mm_ends import store_box_of_held
from kvkern.kernels.hopper.scaled_mm_few import BLOCK_K
from kvkern.kernels.hopper.scaled_mm_order import (
    WAVE,
    first_row_of,
    has_two_products,
    is_transposed,
    makes_transposed,
)


@gluon.jit
def narrow_operands(a, b, ORDER: gl.constexpr):
    """Where stages have b's columns and rows of a for a narrow tile."""
    if is_transposed(ORDER):
        return view_tile(a, b.dtype, a.shape, b.layout), view_tile(b, a.dtype, b.shape, a.layout)
    else:
        return b, a


@gluon.jit
def begin_in_tensor_core(acc, acc_2, ring, stage, phase, WHICH: gl.constexpr, ORDER: gl.constexpr):
    """The first step's product, under way, or two of them."""
    _, _, _, _, _, full, _, _ = ring
    mbarrier.wait(full.index(stage), phase)
    rows, columns = _operands(ring, 0, stage, acc.shape[1], WHICH, 0, ORDER)
    acc = warpgroup_mma(rows, columns, acc, use_acc=False, is_async=True)
    if has_two_products(ORDER):
        rows, columns = _operands(ring, 0, stage, acc_2.shape[1], WHICH, 1, ORDER)
        acc_2 = warpgroup_mma(rows, columns, acc_2, use_acc=False, is_async=True)
    return _wait_for_older(acc, acc_2, ORDER)


@gluon.jit
def _wait_for_older(acc, acc_2, ORDER: gl.constexpr):
    """Products than those of the last step."""
    if has_two_products(ORDER):
        acc, acc_2 = warpgroup_mma_wait(2, deps=(acc, acc_2))
    else:
        acc = warpgroup_mma_wait(1, deps=(acc,))
    return acc, acc_2


@gluon.jit
def sum_in_tensor_core(
    acc, acc_2, ring, num_steps, stage, phase, held, ends, WHICH: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """The products of the other steps, the last under way.

    What is held, if that is anything, is stored under the first of them, a box each.
    """
    BOXES: gl.constexpr = ORDER.held
    for number in gl.static_range(BOXES):
        store_box_of_held(held, number, ends, WHICH, ORDER)
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
def end_in_tensor_core(acc, acc_2, ring, stage, phase, WHICH: gl.constexpr, ORDER: gl.constexpr):
    """The last step, whose stage is given, is made and let go."""
    _, b, _, _, _, _, empty, turns = ring
    STAGES: gl.constexpr = b.shape[0]
    ARRIVALS: gl.constexpr = 2 if makes_transposed(ORDER) else 1
    if ORDER.has_turns or makes_transposed(ORDER):
        mbarrier.arrive(turns.index(1 - WHICH), count=1)
    if has_two_products(ORDER):
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
    ARRIVALS: gl.constexpr = 2 if makes_transposed(ORDER) else 1
    after, phase = next_stage(stage, phase, STAGES)
    mbarrier.wait(full.index(after), phase)
    rows, columns = _operands(ring, step, after, acc.shape[1], WHICH, 0, ORDER)
    acc = warpgroup_mma(rows, columns, acc, is_async=True)
    if has_two_products(ORDER):
        rows, columns = _operands(ring, step, after, acc_2.shape[1], WHICH, 1, ORDER)
        acc_2 = warpgroup_mma(rows, columns, acc_2, is_async=True)
    acc, acc_2 = _wait_for_older(acc, acc_2, ORDER)
    mbarrier.arrive(empty.index(stage), count=ARRIVALS)
    return acc, acc_2, after, phase


@gluon.jit
def begin_in_registers(
    acc, acc_2, ring, stage, phase, WHICH: gl.constexpr, HAS_GROUPS: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """The first step's first product, under way, and that step's scales."""
    _, _, _, _, _, full, _, _ = ring
    mbarrier.wait(full.index(stage), phase)
    factors = _scales_of_step(acc, acc_2, ring, 0, stage, WHICH, HAS_GROUPS, ORDER)
    return _begin_product(ring, 0, stage, acc.shape[1], WHICH, 0, ORDER), factors


@gluon.jit
def sum_in_registers(
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
        part = _begin_product(ring, step, stage, acc.shape[1], WHICH, 0, ORDER)
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
        store_box_of_held(held, number, ends, WHICH, ORDER)
    fence_products(num_steps)
    part = warpgroup_mma_wait(0, deps=(part,))
    acc = _add(acc, part, pin(of_a) * of_b if HAS_GROUPS else 1.0, HAS_GROUPS, IS_FIRST)
    fence_products(num_steps)
    part_2 = _begin_product(ring, step, stage, COLUMNS, WHICH, 1, ORDER)
    for number in gl.static_range(BOXES // 2, BOXES):
        store_box_of_held(held, number, ends, WHICH, ORDER)
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
def sum_under_products(
    acc, acc_2, ring, num_steps, stage, phase, WHICH: gl.constexpr, HAS_GROUPS: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """The same of 64 columns, or of few beside a tile's own: each product under the other's sum.

    Registers allow that there. ptxas lets products overlap only if there are two ways to end, as of
    ``sum_in_pairs``.
    """
    _, b, _, _, _, full, empty, _ = ring
    STAGES: gl.constexpr = b.shape[0]
    mbarrier.wait(full.index(stage), phase)
    scale, scale_2 = _products_of_scales(acc, acc_2, ring, 0, stage, WHICH, HAS_GROUPS, ORDER)
    part = _begin_product(ring, 0, stage, acc.shape[1], WHICH, 0, ORDER)
    part = warpgroup_mma_wait(1, deps=(part,))  # none: it is of the type that it has in the loop
    for step in range(num_steps - 1):
        part_2 = _begin_product(ring, step, stage, acc.shape[1], WHICH, 1, ORDER)
        part, part_2 = warpgroup_mma_wait(1, deps=(part, part_2))
        acc = _add(acc, part, scale, HAS_GROUPS)
        after, phase_after = next_stage(stage, phase, STAGES)
        mbarrier.wait(full.index(after), phase_after)
        part = _begin_product(ring, step + 1, after, acc.shape[1], WHICH, 0, ORDER)
        part_2, part = warpgroup_mma_wait(1, deps=(part_2, part))
        mbarrier.arrive(empty.index(stage), count=1)
        acc_2 = _add(acc_2, part_2, scale_2, HAS_GROUPS)
        scale, scale_2 = _products_of_scales(
            acc, acc_2, ring, step + 1, after, WHICH, HAS_GROUPS, ORDER
        )
        stage = after
        phase = phase_after
    if stage < STAGES:  # always
        part_2 = _begin_product(ring, num_steps - 1, stage, acc.shape[1], WHICH, 1, ORDER)
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
    FIRST: gl.constexpr = first_row_of(WHICH, ORDER)
    FIRST_2: gl.constexpr = FIRST if ORDER.extra else FIRST + WAVE
    if HAS_GROUPS:
        place = step if ORDER.kept else stage
        of_a = _load_scales(factors_a, place, FIRST, OF_ROW)
        of_a_2 = _load_scales(factors_a, place, FIRST_2, OF_ROW_2)
        of_b = _load_scales(factors_b, stage, 0, OF_ROW)
        of_b_2 = of_b
        if ORDER.extra:
            of_b_2 = _load_scales(factors_b, stage, WAVE, OF_ROW_2)
        return of_a, of_b, of_a_2, of_b_2
    else:
        return 1.0, 1.0, 1.0, 1.0


@gluon.jit
def sum_in_pairs(
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
    FIRST: gl.constexpr = first_row_of(WHICH, ORDER)
    place = step if ORDER.kept else stage
    if NUMBER == 0:
        mbarrier.wait(full.index(stage), phase)
    scale = 1.0
    if HAS_GROUPS:
        scale = _load_scales(factors_a, place, NUMBER * ORDER.rows + FIRST, OF_ROW)
        scale *= _load_scales(factors_b, stage, NUMBER * WAVE, OF_ROW)
    rows, columns = _operands(ring, step, stage, acc.shape[1], WHICH, 0, ORDER)
    if ORDER.steps == 2:
        rows = rows.slice(NUMBER * BLOCK_K, BLOCK_K, dim=1)
        columns = columns.slice(NUMBER * BLOCK_K, BLOCK_K, dim=0)
    return _begin(rows, columns), scale


@gluon.jit
def _load_scales(factors, place, FIRST: gl.constexpr, OF_ROW: gl.constexpr):
    """Of 64 rows; loaded here."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    of_place = factors.index(place)
    COUNT: gl.constexpr = _size_of(of_place.shape)
    flat = view_tile(of_place, gl.float32, [COUNT], FLAT)
    return pin(flat.slice(FIRST, WAVE).load(OF_ROW))


@gluon.constexpr_function
def _size_of(shape):
    return math.prod(shape)


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
    zero = gl.zeros([WAVE, COLUMNS], gl.float32, LAYOUT)
    return warpgroup_mma(rows, columns, zero, use_acc=False, is_async=True)


@gluon.jit
def _begin_product(
    ring, step, stage, COLUMNS: gl.constexpr, WHICH: gl.constexpr, NUMBER: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """The same of a step's first product or second, by ``NUMBER``."""
    rows, columns = _operands(ring, step, stage, COLUMNS, WHICH, NUMBER, ORDER)
    return _begin(rows, columns)


@gluon.jit
def _operands(
    ring, step, stage, COLUMNS: gl.constexpr, WHICH: gl.constexpr,
    NUMBER: gl.constexpr,  # which of the products of the step
    ORDER: gl.constexpr,
):  # fmt: skip
    """64 rows of a and columns of b, as wgmma takes them."""
    a, b, extra, _, _, _, _, _ = ring
    FIRST: gl.constexpr = first_row_of(WHICH, ORDER)
    rows = as_matrix(a.index(step if ORDER.kept else stage))
    if NUMBER == 1 and ORDER.extra:
        columns = as_matrix(extra.index(stage)).permute((1, 0))
        return rows.slice(FIRST, WAVE, dim=0), columns
    else:
        columns = as_matrix(b.index(stage)).slice(0, COLUMNS, dim=0).permute((1, 0))
        return rows.slice(FIRST + NUMBER * WAVE, WAVE, dim=0), columns
