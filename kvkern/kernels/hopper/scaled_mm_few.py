"""scaled_mm of few rows: out^T = sum over groups of 128 of K of (b^T @ a^T) * scale_b * scale_a.

Reading b is all the work. Its columns are the 64 rows that a wgmma wants, and rows of a its 8 to
128 columns, so that none are made for nothing. A program makes 64 columns of as many rows of
``out``, or part of K of them, and asks for as much of b as it has room for before it multiplies.
All warps do the same: to start one that only fetches takes 1 us, of 10. To ask for two steps of K
takes them as long as for one, so a stage of the ring has two where there is room.
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
from triton.language.extra.cuda import gdc_launch_dependents

from kvkern.kernels.hopper.compat import (
    as_matrix,
    copy_values,
    load_tile,
    thread_barrier,
)
from kvkern.kernels.hopper.paging import next_stage, pin

BLOCK_K: gl.constexpr = gl.constexpr(128)
BLOCK_N: gl.constexpr = gl.constexpr(64)  # columns of out, rows of a wgmma
# sizes of a layer are specialised on; a step's, and strides that hold them, are not
OF_A_STEP = [
    "num_rows", "num_matrices", "num_splits", "stride_scale_a_matrix", "stride_scale_a_row",
    "stride_scale_a_group", "stride_scale_b_matrix", "stride_scale_b_group",
    "stride_scale_b_column", "stride_bias",
]  # fmt: skip


@gluon.jit
def _fetch(ring, place, of_a, of_b, strides, step, stage, HAS_GROUPS: gl.constexpr):
    """A stage's operands, their scales beside them. Where those of the next stage are."""
    a, b, factors_a, factors_b, full = ring
    a_desc, b_desc, matrix, row, column, end_step = place
    STEPS: gl.constexpr = a.shape[3] // BLOCK_K
    bar = full.index(stage)
    mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    load_tile(b_desc, [matrix, column, step * BLOCK_K], bar, b.index(stage))
    load_tile(a_desc, [matrix, row, step * BLOCK_K], bar, a.index(stage))
    if HAS_GROUPS:
        copy_values(factors_a.index(STEPS * stage), of_a)
        copy_values(factors_b.index(STEPS * stage), of_b)
        if STEPS == 2:  # that of a step past the last is zero
            THREADS: gl.constexpr = of_a.type.layout
            has_a = gl.full(of_a.shape, step + 1, gl.int32, THREADS) < end_step
            has_b = gl.full(of_b.shape, step + 1, gl.int32, THREADS) < end_step
            copy_values(factors_a.index(2 * stage + 1), of_a + strides[0], has_a)
            copy_values(factors_b.index(2 * stage + 1), of_b + strides[1], has_b)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        of_a += STEPS * strides[0]
        of_b += STEPS * strides[1]
    return of_a, of_b


@gluon.jit
def _refill(
    ring, place, of_a, of_b, strides, first_step, fill, num_fills, stage,
    HAS_GROUPS: gl.constexpr,
):  # fmt: skip
    """A stage whose products are done, if K has more for it."""
    a, _, _, _, _ = ring
    STAGES: gl.constexpr = a.shape[0]
    if (fill >= STAGES) & (fill < num_fills):
        thread_barrier()  # all have read it
        step = first_step + fill * (a.shape[3] // BLOCK_K)
        of_a, of_b = _fetch(ring, place, of_a, of_b, strides, step, stage, HAS_GROUPS)
    return of_a, of_b


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
def _scale(ring, stage, ACC: gl.constexpr, HAS_GROUPS: gl.constexpr, NUMBER: gl.constexpr):
    """What that product is multiplied by."""
    a, _, factors_a, factors_b, _ = ring
    if HAS_GROUPS:
        step = stage * (a.shape[3] // BLOCK_K) + NUMBER
        of_rows = factors_a.index(step).load(gl.SliceLayout(0, ACC))
        of_columns = factors_b.index(step).slice(0, 1).load(gl.SliceLayout(1, ACC))
        return gl.expand_dims(of_rows, 0) * gl.expand_dims(of_columns, 1)
    else:
        return 1.0


@gluon.jit(do_not_specialize=[*OF_A_STEP, "stride_out_part"])
def scaled_mm_few_kernel(
    a_desc,  # fp8 [G, M, K] in boxes of a stage, [1, ROWS, 128 or 256]
    b_desc,  # fp8 [G, N, K] in boxes of a stage, [1, 64, 128 or 256]
    scale_a_ptr,  # fp32 [G, cells of M, cells of K]
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
):
    """Programs that follow each other have parts of a tile, then of other rows, then columns."""
    ROWS: gl.constexpr = a_desc.block_type.shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    OF_ROW: gl.constexpr = gl.SliceLayout(0, ACC)
    OF_COLUMN: gl.constexpr = gl.SliceLayout(1, ACC)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    COPIES: gl.constexpr = 32  # of a scale that all columns share
    OF_K: gl.constexpr = a_desc.block_type.shape[2]
    STEPS: gl.constexpr = OF_K // BLOCK_K
    gl.static_assert(STAGES > 1, "a stage is asked for while another is multiplied")
    NUM_FACTORS: gl.constexpr = STEPS * STAGES if HAS_GROUPS else 1
    # stages that are asked for before all barriers are made; of many scales to copy that is slower
    AHEAD: gl.constexpr = 0 if HAS_GROUPS and ROWS > 32 else 2
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 1, ROWS, OF_K], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 1, BLOCK_N, OF_K], b_desc.layout)
    factors_a = gl.allocate_shared_memory(gl.float32, [NUM_FACTORS, ROWS], FLAT)
    factors_b = gl.allocate_shared_memory(gl.float32, [NUM_FACTORS, COPIES], FLAT)
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

    of_a = scale_a_ptr + matrix.to(gl.int64) * stride_scale_a_matrix
    of_b = scale_b_ptr + matrix.to(gl.int64) * stride_scale_b_matrix
    of_step_a = of_a
    of_step_b = of_b
    if HAS_GROUPS:
        lane_row = gl.minimum(first_row + gl.arange(0, ROWS, layout=THREADS), num_rows - 1)
        of_step_a += first_step.to(gl.int64) * stride_scale_a_group
        of_step_a += lane_row.to(gl.int64) * stride_scale_a_row
        of_step_b += first_step.to(gl.int64) * stride_scale_b_group
        of_step_b += (column // 128).to(gl.int64) * stride_scale_b_column
        of_step_b += gl.zeros([COPIES], gl.int32, THREADS)
    ring = (a, b, factors_a, factors_b, full)
    place = (a_desc, b_desc, matrix, first_row, column, end_step)
    strides = (stride_scale_a_group, stride_scale_b_group)
    for fill in gl.static_range(STAGES):
        mbarrier.init(full.index(fill), count=129 if HAS_GROUPS else 1)  # threads' copies, and TMA
        if fill < AHEAD:
            fence_async_shared()
            if fill < num_fills:
                step = first_step + STEPS * fill
                of_step_a, of_step_b = _fetch(
                    ring, place, of_step_a, of_step_b, strides, step, fill, HAS_GROUPS
                )
    fence_async_shared()
    gdc_launch_dependents()  # a sum of splits that waits for all of this may start
    for fill in range(AHEAD, gl.minimum(num_fills, STAGES)):
        step = first_step + STEPS * fill
        of_step_a, of_step_b = _fetch(
            ring, place, of_step_a, of_step_b, strides, step, fill, HAS_GROUPS
        )

    # what the end wants is under way while products are made
    row = first_row + gl.arange(0, ROWS, layout=OF_ROW)
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
            of_step_a, of_step_b = _refill(
                ring, place, of_step_a, of_step_b, strides, first_step, fill - 1 + STAGES,
                num_fills, last, HAS_GROUPS,
            )  # fmt: skip
        if not IN_TENSOR_CORE:
            scale = _scale(ring, stage, ACC, HAS_GROUPS, 0)
            if STEPS == 1:
                part = warpgroup_mma_wait(0, deps=(part,))
                acc = pin(acc + part * scale)
            else:
                part, part_2 = warpgroup_mma_wait(1, deps=(part, part_2))
                acc = pin(acc + part * scale)
                scale = _scale(ring, stage, ACC, HAS_GROUPS, 1)
                part_2 = warpgroup_mma_wait(0, deps=(part_2,))
                acc = pin(acc + part_2 * scale)
        if STEPS == 1:  # this stage, while other programs multiply
            of_step_a, of_step_b = _refill(
                ring, place, of_step_a, of_step_b, strides, first_step, fill + STAGES, num_fills,
                stage, HAS_GROUPS,
            )  # fmt: skip
        stage, phase = next_stage(stage, phase, STAGES)
    if IN_TENSOR_CORE:
        acc = warpgroup_mma_wait(0, deps=(acc,))

    if not HAS_GROUPS:
        acc *= gl.expand_dims(scale_b, 1) * gl.expand_dims(scale_a, 0)
    if bias_ptr is not None:
        acc += gl.expand_dims(bias, 1)
    VEC: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    OUT: gl.constexpr = gl.BlockedLayout([VEC, 1], [64 // VEC, VEC // 2], [1, 4], [0, 1])
    out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), OUT)
    row_out = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    column_out = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT))
    stride_out_part = stride_out_part // VEC * VEC  # all rows begin at multiples of 16 bytes
    stride_out_row = stride_out_row // VEC * VEC
    out_ptr += (split * num_matrices + matrix).to(gl.int64) * stride_out_part
    offs = gl.expand_dims(row_out.to(gl.int64) * stride_out_row, 0) + gl.expand_dims(column_out, 1)
    mask = gl.expand_dims(row_out < num_rows, 0) & gl.expand_dims(column_out < num_columns, 1)
    gl.store(out_ptr + offs, out, mask=mask)
