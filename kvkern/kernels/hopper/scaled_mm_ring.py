"""How scaled_mm's operands come: a ring of stages in shared memory, each with steps of 128 of K.

One warp fetches them by TMA, scales of groups beside them, and waits for a stage until the products
of what it had are done. The first stages are filled before that warp has begun.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kvkern.kernels.hopper.compat import copy_values, load_tile, thread_barrier, view_tile
from kvkern.kernels.hopper.paging import next_stage
from kvkern.kernels.hopper.scaled_mm_few import BLOCK_K
from kvkern.kernels.hopper.scaled_mm_order import (
    NARROW_ROWS,
    WAVE,
    first_extra_column,
    place_of_unit,
)
from kvkern.kernels.hopper.scaled_mm_sums import narrow_operands
from kvkern.kernels.hopper.tile_rows import first_row_of_part, row_in_matrix


@gluon.jit
def begin_ring(
    ring, descs, scales, shape, strides, place, rounds, HAS_GROUPS: gl.constexpr,
    IS_COLUMN_MAJOR: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """Make its barriers, and fill the first stages as soon as they have theirs.

    The warp that fetches begins 1500 cycles later, of 15000 that a small product takes.
    """
    _, b, _, factors_a, factors_b, full, empty, _ = ring
    scale_a_ptr, scale_b_ptr, _ = scales
    num_rows, num_columns, _, _, _, _ = shape
    STAGES: gl.constexpr = b.shape[0]
    STEPS: gl.constexpr = ORDER.steps
    BY_LANES: gl.constexpr = HAS_GROUPS and not IS_COLUMN_MAJOR
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    AHEAD: gl.constexpr = ORDER.ahead
    gl.static_assert(AHEAD <= STAGES)
    matrix, first_row, _, n, _, first_step, end_step = place
    of_rows = _matrix_of_rows(matrix, ORDER)
    at = (of_rows, matrix, first_row, n, num_rows, num_columns)
    end_step = gl.where(rounds > 0, end_step, first_step)
    num_steps = end_step - first_step
    if AHEAD and HAS_GROUPS:  # under way while barriers are made
        of_b, step_of_b = _cells_of_b(
            scale_b_ptr, matrix, n, first_step, num_columns, strides, THREADS, AHEAD, ORDER
        )
        scale_b = gl.load(of_b, mask=step_of_b < num_steps, other=0)
        if BY_LANES:
            of_a, step_of_a = _cells_of_a(
                scale_a_ptr, of_rows, first_row, first_step, num_rows, strides, THREADS, AHEAD,
                ORDER,
            )  # fmt: skip
            scale_a = gl.load(of_a, mask=step_of_a < num_steps, other=0)
    for stage in gl.static_range(STAGES):
        # lanes of the warp that fetches, and that warp, which tells what the TMA will bring
        mbarrier.init(full.index(stage), count=33 if BY_LANES else 1)
        mbarrier.init(empty.index(stage), count=1 if ORDER.has_turns else ORDER.groups)
        if stage < AHEAD:
            fence_async_shared()
            step = first_step + stage * STEPS
            if step < end_step:
                _load_stage(
                    ring, descs, scale_a_ptr, at, step, stage, False, IS_COLUMN_MAJOR, ORDER
                )
    if AHEAD and HAS_GROUPS:
        _first_of_all(factors_b, step_of_b.shape[0]).store(scale_b)
        if BY_LANES:
            _first_of_all(factors_a, step_of_a.shape[0]).store(scale_a)
            thread_barrier()
            for stage in gl.static_range(AHEAD):
                if stage * STEPS < num_steps:
                    mbarrier.arrive(full.index(stage), count=32)
    fence_async_shared()


@gluon.jit
def _first_of_all(factors, COUNT: gl.constexpr):
    """Scales of the first stages, one after the other's."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return view_tile(factors, gl.float32, [COUNT], FLAT)


@gluon.jit
def fetch(
    ring, descs, scales, shape, strides, first_place, rounds, HAS_GROUPS: gl.constexpr,
    IS_COLUMN_MAJOR: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """The warp that fills the ring once it is begun; scales of a step come beside its operands.

    Where a is kept its steps have a place each, and are there still for the next tile of its rows.
    """
    _, b, _, _, _, _, _, _ = ring
    scale_a_ptr, scale_b_ptr, _ = scales
    STAGES: gl.constexpr = b.shape[0]
    STEPS: gl.constexpr = ORDER.steps
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    num_rows, num_columns, _, _, _, _ = shape
    _, _, a_group, _, b_group, _, _ = strides
    matrix_before = -1
    row_before = -1
    place = first_place
    stage = 0
    phase = 1
    if ORDER.ahead:
        fills = gl.minimum(gl.cdiv(first_place[6] - first_place[5], STEPS), ORDER.ahead)
        stage = gl.where(fills == STAGES, 0, fills)
        phase = gl.where(fills == STAGES, 0, 1)
    for turn in range(rounds):
        matrix, first_row, _, n, _, first_step, end_step = place
        first_due = first_step
        if ORDER.ahead:  # by the turn: Triton 3.6 loses a carried value that only bounds a loop
            end_ahead = gl.minimum(first_step + ORDER.ahead * STEPS, end_step)
            first_due = gl.where(turn == 0, end_ahead, first_step)
        of_rows = _matrix_of_rows(matrix, ORDER)
        of_a = 0
        of_b = 0
        scale_b = 0
        step_of_a = 0
        step_of_b = 0
        if HAS_GROUPS and not IS_COLUMN_MAJOR:
            of_a, step_of_a = _cells_of_a(
                scale_a_ptr, of_rows, first_row, first_due, num_rows, strides, LANES, 1, ORDER
            )
        if HAS_GROUPS:
            of_b, step_of_b = _cells_of_b(
                scale_b_ptr, matrix, n, first_due, num_columns, strides, LANES, 1, ORDER
            )
            scale_b = gl.load(of_b, mask=step_of_b < end_step - first_due, other=0)
        has_rows = (matrix == matrix_before) & (first_row == row_before) & (ORDER.kept > 0)
        matrix_before = matrix
        row_before = first_row
        at = (of_rows, matrix, first_row, n, num_rows, num_columns)
        for step in range(first_due, end_step, STEPS):
            cells = (of_a, of_b, scale_b, step_of_a, step_of_b, a_group, b_group)
            of_a, of_b, scale_b = _fetch_stage(
                ring, descs, scale_a_ptr, at, cells, step, end_step, stage, phase, has_rows,
                HAS_GROUPS, IS_COLUMN_MAJOR, ORDER,
            )  # fmt: skip
            stage, phase = next_stage(stage, phase, STAGES)
        place = place_of_unit(turn + 1, shape, ORDER, 1)


@gluon.jit
def _matrix_of_rows(matrix, ORDER: gl.constexpr):
    """Which of a's: experts share one."""
    return 0 * matrix if ORDER.num_experts else matrix


@gluon.jit
def _fetch_stage(
    ring, descs, scale_a, at, cells, step, end_step, stage, phase, has_rows,
    HAS_GROUPS: gl.constexpr, IS_COLUMN_MAJOR: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """Fill a stage. ``cells`` are the scales' places, which come back as the next stage's."""
    _, _, _, factors_a, factors_b, full, empty, _ = ring
    of_a, of_b, scale_b, step_of_a, step_of_b, a_group, b_group = cells
    _, _, _, n, _, num_columns = at
    STEPS: gl.constexpr = ORDER.steps
    mbarrier.wait(empty.index(stage), phase)
    bar = full.index(stage)
    if HAS_GROUPS:  # before this warp arrives at the barrier; the next's are on their way
        factors_b.index(stage).store(scale_b)
        of_b += STEPS * b_group
        scale_b = gl.load(of_b, mask=step_of_b < end_step - step - STEPS, other=0)
    if ORDER.has_narrow and n == num_columns // ORDER.columns:
        _load_narrow_stage(ring, descs, scale_a, at, step, stage, IS_COLUMN_MAJOR, ORDER)
    else:
        _load_stage(ring, descs, scale_a, at, step, stage, has_rows, IS_COLUMN_MAJOR, ORDER)
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
def _load_stage(
    ring, descs, scale_a, at, step, stage, has_rows, IS_COLUMN_MAJOR: gl.constexpr,
    ORDER: gl.constexpr,
):  # fmt: skip
    """What the TMA fetches for a tile that is not narrow, and how much that is."""
    a, b, extra, factors_a, _, full, _, _ = ring
    a_desc, b_desc, extra_desc = descs
    of_rows, matrix, first_row, n, num_rows, num_columns = at
    PARTS: gl.constexpr = ORDER.parts
    OF_PART: gl.constexpr = ORDER.rows // PARTS
    BOX_M: gl.constexpr = a_desc.block_type.shape[1]
    OF_SCALES: gl.constexpr = _bytes_of_scales(IS_COLUMN_MAJOR, ORDER)
    OF_A: gl.constexpr = PARTS * a_desc.block_type.nbytes + OF_SCALES
    OF_B: gl.constexpr = (ORDER.columns + ORDER.extra) * ORDER.steps * BLOCK_K
    bar = full.index(stage)
    place = step if ORDER.kept else stage
    k = step * BLOCK_K
    if has_rows:
        mbarrier.expect(bar, OF_B)
    else:
        mbarrier.expect(bar, OF_A + OF_B)
    if not has_rows:
        for part in gl.static_range(PARTS):
            row = first_row_of_part(first_row, part, num_rows, BOX_M) if part else first_row
            box = a.index(place).slice(part * BOX_M, BOX_M, dim=1)  # no more rows are ever stored
            load_tile(a_desc, [of_rows, row, k], bar, box)
            if IS_COLUMN_MAJOR:
                factors = factors_a.index(place).slice(part * OF_PART, OF_PART, dim=2)
                load_tile(scale_a, [of_rows, step, row], bar, factors)
    _load_boxes(b_desc, matrix, n * ORDER.columns, k, bar, b.index(stage))
    if ORDER.extra:
        at_extra = [matrix, first_extra_column(n, num_columns, ORDER), k]
        load_tile(extra_desc, at_extra, bar, extra.index(stage))


@gluon.jit
def _load_narrow_stage(
    ring, descs, scale_a, at, step, stage, IS_COLUMN_MAJOR: gl.constexpr, ORDER: gl.constexpr
):
    """The same for one that is."""
    a, b, _, factors_a, _, full, _, _ = ring
    a_desc, b_desc, _ = descs
    of_rows, matrix, first_row, n, _, _ = at
    OF_SCALES: gl.constexpr = _bytes_of_scales(IS_COLUMN_MAJOR, ORDER)
    OF_NARROW: gl.constexpr = (NARROW_ROWS + WAVE) * BLOCK_K + OF_SCALES
    bar = full.index(stage)
    k = step * BLOCK_K
    mbarrier.expect(bar, OF_NARROW)
    columns, rows = narrow_operands(a, b, ORDER)
    columns = columns.index(stage).slice(0, WAVE, dim=1)
    _load_boxes(b_desc, matrix, n * ORDER.columns, k, bar, columns)
    _load_boxes(a_desc, of_rows, first_row, k, bar, rows.index(stage))
    if IS_COLUMN_MAJOR:
        load_tile(scale_a, [of_rows, step, first_row], bar, factors_a.index(stage))


@gluon.jit
def _load_boxes(desc, matrix, row, k, bar, tile):
    """As many, one below the other, as there is room for."""
    BOX: gl.constexpr = desc.block_type.shape[1]
    for part in gl.static_range(tile.shape[1] // BOX):
        load_tile(desc, [matrix, row + part * BOX, k], bar, tile.slice(part * BOX, BOX, dim=1))


@gluon.constexpr_function
def _bytes_of_scales(is_column_major, order):
    """Of a, that the TMA brings."""
    return 4 * order.steps * order.rows if is_column_major else 0


@gluon.constexpr_function
def copies_of_b(order):
    """Of the scales that a stage has of b's columns: one for each row of a warpgroup."""
    return (2 if order.extra else order.steps) * WAVE.value


@gluon.jit
def _cells_of_a(
    scale_a_ptr, of_rows, first_row, first_step, num_rows, strides, LAYOUT: gl.constexpr,
    STAGES: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """Where the scales of stages are, by lanes, and which of their steps each is of."""
    a_matrix, a_row, a_group, _, _, _, _ = strides
    lane = gl.arange(0, STAGES * ORDER.steps * ORDER.rows, layout=LAYOUT)
    row = lane % ORDER.rows
    if ORDER.parts > 1:
        row = row_in_matrix(first_row, row, num_rows, ORDER.rows // ORDER.parts)
    else:
        row = first_row + row
    row = gl.minimum(row, num_rows - 1)
    step_of_a = lane // ORDER.rows
    of_a = scale_a_ptr + of_rows.to(gl.int64) * a_matrix
    of_a += (first_step + step_of_a).to(gl.int64) * a_group
    return of_a + row.to(gl.int64) * a_row, step_of_a


@gluon.jit
def _cells_of_b(
    scale_b_ptr, matrix, n, first_step, num_columns, strides, LAYOUT: gl.constexpr,
    STAGES: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """The same of b, with a copy for each row of a warpgroup."""
    _, _, _, b_matrix, b_group, b_column, _ = strides
    COUNT: gl.constexpr = copies_of_b(ORDER)
    lane = gl.arange(0, STAGES * COUNT, layout=LAYOUT)
    step_of_b = lane // (COUNT // ORDER.steps)
    column = n * ORDER.columns
    if ORDER.extra:
        first_extra = gl.minimum(first_extra_column(n, num_columns, ORDER), num_columns - 1)
        column = gl.where(lane % COUNT < WAVE, column, first_extra)
    of_b = scale_b_ptr + matrix.to(gl.int64) * b_matrix
    of_b += (column // 128).to(gl.int64) * b_column
    return of_b + (first_step + step_of_b).to(gl.int64) * b_group, step_of_b
