"""scaled_mm of few rows: out^T = sum over groups of 128 of K of (b^T @ a^T) * scale_b * scale_a.

Reading b is all the work. Its columns are the 64 rows that a wgmma wants, and rows of a its 8 to
128 columns, so that none are made for nothing. A program makes 64 columns of as many rows of
``out``, or part of K of them, and asks for as much of b as it has room for before it multiplies.
All warps do the same: to start one that only fetches takes 1 us, of 10. To ask for two steps of K
takes them as long as for one, so a stage of the ring has two where there is room.
Scales of columns come for all of K at once, those of rows beside a: by TMA, if column-major.
"""

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

from kvkern.kernels.hopper.compat import (
    as_matrix,
    copy_values,
    load_tile,
    thread_barrier,
    view_tile,
)
from kvkern.kernels.hopper.paging import next_stage, pin
from kvkern.kernels.hopper.tile_rows import first_row_of_part, rows_of_tile

BLOCK_K: gl.constexpr = gl.constexpr(128)
BLOCK_N: gl.constexpr = gl.constexpr(64)  # columns of out, rows of a wgmma
# sizes of a layer are specialised on; a step's, and strides that hold them, are not
OF_A_STEP = [
    "num_rows", "num_matrices", "num_splits", "stride_scale_a_matrix", "stride_scale_a_row",
    "stride_scale_a_group", "stride_scale_b_matrix", "stride_scale_b_group",
    "stride_scale_b_column", "stride_bias",
]  # fmt: skip


@gluon.constexpr_function
def num_scales(rows):
    """Of a step that a stage has room for: the TMA writes at multiples of 128 bytes."""
    return max(rows, 32)


@gluon.jit
def _fetch(
    ring, place, of_a, stride_of_a, step, stage, HAS_GROUPS: gl.constexpr,
    IS_COLUMN_MAJOR: gl.constexpr,
):  # fmt: skip
    """A stage's operands, scales of rows beside them. Where those of the next stage are."""
    a, b, factors_a, _, full = ring
    a_desc, b_desc, scale_a, matrix, row, column, num_rows, end_step = place
    STEPS: gl.constexpr = a.shape[3] // BLOCK_K
    ROWS: gl.constexpr = a.shape[2]
    OF_PART: gl.constexpr = a_desc.block_type.shape[1]
    PARTS: gl.constexpr = ROWS // OF_PART
    OF_SCALES: gl.constexpr = 4 * STEPS * num_scales(ROWS) if IS_COLUMN_MAJOR else 0
    bar = full.index(stage)
    mbarrier.expect(bar, PARTS * a_desc.block_type.nbytes + b_desc.block_type.nbytes + OF_SCALES)
    load_tile(b_desc, [matrix, column, step * BLOCK_K], bar, b.index(stage))
    if IS_COLUMN_MAJOR:
        OF_STEPS: gl.constexpr = scale_a.block_type.shape[1]
        OF_ROWS: gl.constexpr = scale_a.block_type.shape[2]
        COUNT: gl.constexpr = STEPS * num_scales(ROWS) // (OF_STEPS * OF_ROWS)
        boxes = view_tile(
            factors_a.index(stage), gl.float32, [COUNT, 1, OF_STEPS, OF_ROWS], scale_a.layout
        )
    for part in gl.static_range(PARTS):
        row_of_part = first_row_of_part(row, part, num_rows, OF_PART)
        rows = a.index(stage).slice(part * OF_PART, OF_PART, dim=1)
        load_tile(a_desc, [matrix, row_of_part, step * BLOCK_K], bar, rows)
        if IS_COLUMN_MAJOR:  # one box, or one of each step and part
            for number in gl.static_range(COUNT // PARTS):
                box = boxes.index(number * PARTS + part)
                load_tile(scale_a, [matrix, step + number, row_of_part], bar, box)
    if HAS_GROUPS and not IS_COLUMN_MAJOR:
        copy_values(factors_a.index(stage).slice(0, ROWS), of_a)
        if STEPS == 2:  # that of a step past the last is zero
            has_a = gl.full(of_a.shape, step + 1, gl.int32, of_a.type.layout) < end_step
            second = factors_a.index(stage).slice(num_scales(ROWS), ROWS)
            copy_values(second, of_a + stride_of_a, has_a)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        of_a += STEPS * stride_of_a
    return of_a


@gluon.jit
def _refill(
    ring, place, of_a, stride_of_a, first_step, fill, num_fills, stage, HAS_GROUPS: gl.constexpr,
    IS_COLUMN_MAJOR: gl.constexpr,
):  # fmt: skip
    """A stage whose products are done, if K has more for it."""
    a, _, _, _, _ = ring
    STAGES: gl.constexpr = a.shape[0]
    if (fill >= STAGES) & (fill < num_fills):
        thread_barrier()  # all have read it
        step = first_step + fill * (a.shape[3] // BLOCK_K)
        of_a = _fetch(ring, place, of_a, stride_of_a, step, stage, HAS_GROUPS, IS_COLUMN_MAJOR)
    return of_a


@gluon.jit
def _begin(acc, ring, stage, NUMBER: gl.constexpr):
    """The product of one of a stage's steps, under way."""
    a, b, _, _, _ = ring
    ACC: gl.constexpr = acc.type.layout
    columns = as_matrix(b.index(stage)).slice(NUMBER * BLOCK_K, BLOCK_K, dim=1)
    rows = as_matrix(a.index(stage)).slice(NUMBER * BLOCK_K, BLOCK_K, dim=1).permute((1, 0))
    zero = gl.zeros(acc.shape, gl.float32, ACC)
    return warpgroup_mma(columns, rows, zero, use_acc=False, is_async=True)


@gluon.jit
def _scale(ring, stage, step, ACC: gl.constexpr, HAS_GROUPS: gl.constexpr, NUMBER: gl.constexpr):
    """What that product is multiplied by; ``step`` counts the program's."""
    a, _, factors_a, factors_b, _ = ring
    if HAS_GROUPS:
        STEPS: gl.constexpr = a.shape[3] // BLOCK_K
        ROWS: gl.constexpr = a.shape[2]
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        COUNT: gl.constexpr = num_scales(ROWS)
        flat = view_tile(factors_a.index(stage), gl.float32, [STEPS * COUNT], FLAT)
        of_rows = flat.slice(NUMBER * COUNT, ROWS).load(gl.SliceLayout(0, ACC))
        of_columns = factors_b.index(step).load(gl.SliceLayout(1, ACC))
        return gl.expand_dims(of_rows, 0) * gl.expand_dims(of_columns, 1)
    else:
        return 1.0


@gluon.jit(do_not_specialize=[*OF_A_STEP, "stride_out_part"])
def scaled_mm_few_kernel(
    a_desc,  # fp8 [G, M, K] in boxes of a stage's part, [1, ROWS / PARTS, 128 or 256]
    b_desc,  # fp8 [G, N, K] in boxes of a stage, [1, 64, 128 or 256]
    scale_a_ptr,  # fp32 [G, cells of M, cells of K]; or [G, cells of K, M] in boxes
    scale_b_ptr,  # fp32 [G, cells of K, cells of N]
    bias_ptr,  # [G, N], or None
    out_ptr,  # [S * G, M, N]
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
    stride_out_part,
    stride_out_row,
    STAGES: gl.constexpr,
    HAS_GROUPS: gl.constexpr,  # scales of 1 x 128 and 128 x 128
    IS_EXACT: gl.constexpr,
    IS_COLUMN_MAJOR: gl.constexpr,  # whether scales of groups of rows have boxes
    MOST_STEPS: gl.constexpr,  # that a program may have; a power of two
    PARTS: gl.constexpr,  # of a tile's rows
):
    """Programs that follow each other have parts of a tile, then of other rows, then columns."""
    ROWS: gl.constexpr = PARTS * a_desc.block_type.shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    OF_ROW: gl.constexpr = gl.SliceLayout(0, ACC)
    OF_COLUMN: gl.constexpr = gl.SliceLayout(1, ACC)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    OF_K: gl.constexpr = a_desc.block_type.shape[2]
    STEPS: gl.constexpr = OF_K // BLOCK_K
    gl.static_assert(STAGES > 1, "a stage is asked for while another is multiplied")
    BY_THREADS: gl.constexpr = HAS_GROUPS and not IS_COLUMN_MAJOR
    # stages that are asked for before all barriers are made; of many scales to copy that is slower
    AHEAD: gl.constexpr = 0 if BY_THREADS and ROWS > 32 else 2
    ARRIVALS: gl.constexpr = 129 if BY_THREADS else 1  # threads' copies, and TMA
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 1, ROWS, OF_K], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 1, BLOCK_N, OF_K], b_desc.layout)
    if IS_COLUMN_MAJOR:
        factors_a = gl.allocate_shared_memory(
            gl.float32, [STAGES, 1, STEPS, num_scales(ROWS)], scale_a_ptr.layout
        )
    else:
        NUM_FACTORS: gl.constexpr = STAGES if HAS_GROUPS else 1
        factors_a = gl.allocate_shared_memory(
            gl.float32, [NUM_FACTORS, STEPS * num_scales(ROWS)], FLAT
        )
    NUM_OF_B: gl.constexpr = MOST_STEPS if HAS_GROUPS else 1
    factors_b = gl.allocate_shared_memory(gl.float32, [NUM_OF_B, 1], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())

    split = gl.program_id(0) % num_splits
    tiles_m = gl.cdiv(num_rows, ROWS)
    tiles_n = gl.cdiv(num_columns, BLOCK_N)
    tile = gl.program_id(0) // num_splits
    first_row = tile % tiles_m * ROWS
    tile = tile // tiles_m
    matrix = tile // tiles_n
    column = tile % tiles_n * BLOCK_N
    end_step = gl.cdiv(depth, BLOCK_K)
    fills = gl.cdiv(depth, OF_K)  # of a stage
    first_fill = split * fills // num_splits
    num_fills = (split + 1) * fills // num_splits - first_fill
    first_step = STEPS * first_fill

    for fill in gl.static_range(AHEAD):
        mbarrier.init(full.index(fill), count=ARRIVALS)
    gdc_wait()
    of_b = scale_b_ptr + matrix.to(gl.int64) * stride_scale_b_matrix
    of_step_a = 0  # of boxes
    if not IS_COLUMN_MAJOR:
        of_a = scale_a_ptr + matrix.to(gl.int64) * stride_scale_a_matrix
        of_step_a = of_a
    if HAS_GROUPS:  # columns' for all steps at once, under way while barriers are made
        step_of_b = gl.arange(0, MOST_STEPS, layout=THREADS)
        of_steps = of_b + (column // 128).to(gl.int64) * stride_scale_b_column
        of_steps += (first_step + step_of_b).to(gl.int64) * stride_scale_b_group
        has_step = (step_of_b < STEPS * num_fills) & (first_step + step_of_b < end_step)
        scales_of_b = gl.load(of_steps, mask=has_step, other=0)
    if BY_THREADS:
        lane_row = rows_of_tile(first_row, num_rows, ROWS, PARTS, THREADS)
        lane_row = gl.minimum(lane_row, num_rows - 1)
        of_step_a += first_step.to(gl.int64) * stride_scale_a_group
        of_step_a += lane_row.to(gl.int64) * stride_scale_a_row
    ring = (a, b, factors_a, factors_b, full)
    place = (a_desc, b_desc, scale_a_ptr, matrix, first_row, column, num_rows, end_step)
    fence_async_shared()
    for fill in gl.static_range(AHEAD):
        if fill < num_fills:
            of_step_a = _fetch(
                ring, place, of_step_a, stride_scale_a_group, first_step + STEPS * fill, fill,
                HAS_GROUPS, IS_COLUMN_MAJOR,
            )  # fmt: skip
    for fill in gl.static_range(AHEAD, STAGES):
        mbarrier.init(full.index(fill), count=ARRIVALS)
    fence_async_shared()
    # a sum of splits may start at once, another launch when all of K has been asked for; or at the
    # end, where it matters how programs are spread: where they share b, or memory is the limit
    is_short = (tiles_m == 1) & (num_fills <= 4 * STAGES)
    last_fill = gl.where(is_short, num_fills - 1, num_fills + STAGES)
    if (num_splits > 1) | (last_fill < STAGES):
        gdc_launch_dependents()
    for fill in range(AHEAD, gl.minimum(num_fills, STAGES)):
        of_step_a = _fetch(
            ring, place, of_step_a, stride_scale_a_group, first_step + STEPS * fill, fill,
            HAS_GROUPS, IS_COLUMN_MAJOR,
        )  # fmt: skip
    if HAS_GROUPS:
        view_tile(factors_b, gl.float32, [MOST_STEPS], FLAT).store(scales_of_b)
        thread_barrier()  # here, not before each load

    # what the end wants is under way while products are made
    row = rows_of_tile(first_row, num_rows, ROWS, PARTS, OF_ROW)
    offs_n = column + gl.arange(0, BLOCK_N, layout=OF_COLUMN)
    mask_n = offs_n < num_columns
    if not HAS_GROUPS:
        at_row = gl.minimum(row, num_rows - 1).to(gl.int64) * stride_scale_a_row
        scale_a = gl.load(of_a + at_row)
        scale_b = gl.load(of_b + offs_n.to(gl.int64) * stride_scale_b_column, mask=mask_n, other=0)
    if bias_ptr is not None:
        of_bias = bias_ptr + matrix.to(gl.int64) * stride_bias
        bias = gl.load(of_bias + offs_n, mask=mask_n, other=0).to(gl.float32)

    acc = gl.zeros([BLOCK_N, ROWS], gl.float32, ACC)
    stage = 0
    phase = 0
    IN_TENSOR_CORE: gl.constexpr = not HAS_GROUPS and not IS_EXACT
    for fill in range(num_fills):
        mbarrier.wait(full.index(stage), phase)
        if IN_TENSOR_CORE:
            rows = as_matrix(a.index(stage)).permute((1, 0))
            acc = warpgroup_mma(as_matrix(b.index(stage)), rows, acc, is_async=True)
            acc = warpgroup_mma_wait(STEPS - 1, deps=(acc,))
        else:
            part = _begin(acc, ring, stage, 0)
            part_2 = part
            if STEPS == 2:
                part_2 = _begin(acc, ring, stage, 1)
        if STEPS == 2:  # the stage before, while these products are made
            last = gl.where(stage == 0, STAGES - 1, stage - 1)
            of_step_a = _refill(
                ring, place, of_step_a, stride_scale_a_group, first_step, fill - 1 + STAGES,
                num_fills, last, HAS_GROUPS, IS_COLUMN_MAJOR,
            )  # fmt: skip
        if not IN_TENSOR_CORE:
            scale = _scale(ring, stage, STEPS * fill, ACC, HAS_GROUPS, 0)
            if STEPS == 1:
                part = warpgroup_mma_wait(0, deps=(part,))
                acc = pin(acc + part * scale)
            else:
                part, part_2 = warpgroup_mma_wait(1, deps=(part, part_2))
                acc = pin(acc + part * scale)
                scale = _scale(ring, stage, STEPS * fill + 1, ACC, HAS_GROUPS, 1)
                part_2 = warpgroup_mma_wait(0, deps=(part_2,))
                acc = pin(acc + part_2 * scale)
        if STEPS == 1:  # this stage, while other programs multiply
            of_step_a = _refill(
                ring, place, of_step_a, stride_scale_a_group, first_step, fill + STAGES, num_fills,
                stage, HAS_GROUPS, IS_COLUMN_MAJOR,
            )  # fmt: skip
        if fill + STAGES == last_fill:
            gdc_launch_dependents()
        stage, phase = next_stage(stage, phase, STAGES)
    if IN_TENSOR_CORE:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    gdc_launch_dependents()

    if not HAS_GROUPS:
        acc *= gl.expand_dims(scale_b, 1) * gl.expand_dims(scale_a, 0)
    if bias_ptr is not None:
        acc += gl.expand_dims(bias, 1)
    VEC: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    OUT: gl.constexpr = gl.BlockedLayout([VEC, 1], [64 // VEC, VEC // 2], [1, 4], [0, 1])
    out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), OUT)
    row_out = rows_of_tile(first_row, num_rows, ROWS, PARTS, gl.SliceLayout(0, OUT))
    column_out = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT))
    stride_out_part = stride_out_part // VEC * VEC  # all rows begin at multiples of 16 bytes
    stride_out_row = stride_out_row // VEC * VEC
    out_ptr += (split * num_matrices + matrix).to(gl.int64) * stride_out_part
    offs = gl.expand_dims(row_out.to(gl.int64) * stride_out_row, 0) + gl.expand_dims(column_out, 1)
    mask = gl.expand_dims(row_out < num_rows, 0) & gl.expand_dims(column_out < num_columns, 1)
    gl.store(out_ptr + offs, out, mask=mask)
