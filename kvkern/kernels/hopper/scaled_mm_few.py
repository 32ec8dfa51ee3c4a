"""scaled_mm of few rows: out^T = sum over groups of 128 of K of (b^T @ a^T) * scale_b * scale_a.

Reading b is all the work. Its columns are the 64 rows that a wgmma wants, and rows of a its 8 to
128 columns, so that none are made for nothing. A program makes 64 columns of ``out``, or part of K
of them, and asks for as much of b as it has room for before it multiplies. All warps do the same:
to start one that only fetches takes 1 us, of 10.
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
from kvkern.kernels.hopper.paging import make_barriers, next_stage, pin

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
    """A step's operands, and its scales beside them. Where those of the next step are."""
    a, b, factors_a, factors_b, full = ring
    a_desc, b_desc, matrix, column = place
    bar = full.index(stage)
    mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
    load_tile(b_desc, [matrix, column, step * BLOCK_K], bar, b.index(stage))
    load_tile(a_desc, [matrix, 0, step * BLOCK_K], bar, a.index(stage))
    if HAS_GROUPS:
        copy_values(factors_a.index(stage), of_a)
        copy_values(factors_b.index(stage), of_b)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        of_a += strides[0]
        of_b += strides[1]
    return of_a, of_b


@gluon.jit
def _begin(acc, ring, stage, phase):
    """A step's product, under way."""
    a, b, _, _, full = ring
    ACC: gl.constexpr = acc.type.layout
    mbarrier.wait(full.index(stage), phase)
    rows = as_matrix(a.index(stage)).permute((1, 0))
    zero = gl.zeros(acc.shape, gl.float32, ACC)
    return warpgroup_mma(as_matrix(b.index(stage)), rows, zero, use_acc=False, is_async=True)


@gluon.jit
def _scale(ring, stage, ACC: gl.constexpr, HAS_GROUPS: gl.constexpr):
    """What that product is multiplied by."""
    _, _, factors_a, factors_b, _ = ring
    if HAS_GROUPS:
        of_rows = factors_a.index(stage).load(gl.SliceLayout(0, ACC))
        of_columns = factors_b.index(stage).slice(0, 1).load(gl.SliceLayout(1, ACC))
        return gl.expand_dims(of_rows, 0) * gl.expand_dims(of_columns, 1)
    else:
        return 1.0


@gluon.jit(do_not_specialize=[*OF_A_STEP, "stride_out_part"])
def scaled_mm_few_kernel(
    a_desc,  # fp8 [G, M, K] in boxes [1, ROWS, 128]
    b_desc,  # fp8 [G, N, K] in boxes [1, 64, 128]
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
    """Programs that follow each other have the parts of a tile, then the next tile's."""
    ROWS: gl.constexpr = a_desc.block_type.shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    OF_ROW: gl.constexpr = gl.SliceLayout(0, ACC)
    OF_COLUMN: gl.constexpr = gl.SliceLayout(1, ACC)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    COPIES: gl.constexpr = 32  # of a scale that all columns share
    NUM_FACTORS: gl.constexpr = STAGES if HAS_GROUPS else 1
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 1, ROWS, BLOCK_K], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 1, BLOCK_N, BLOCK_K], b_desc.layout)
    factors_a = gl.allocate_shared_memory(gl.float32, [NUM_FACTORS, ROWS], FLAT)
    factors_b = gl.allocate_shared_memory(gl.float32, [NUM_FACTORS, COPIES], FLAT)
    full = make_barriers(STAGES, 129 if HAS_GROUPS else 1)  # threads' copies, and the TMA
    fence_async_shared()
    gdc_launch_dependents()  # a sum of splits that waits for all of this may start

    split = gl.program_id(0) % num_splits
    tiles_n = gl.cdiv(num_columns, BLOCK_N)
    tile = gl.program_id(0) // num_splits
    matrix = tile // tiles_n
    column = tile % tiles_n * BLOCK_N
    steps = gl.cdiv(depth, BLOCK_K)
    first_step = split * steps // num_splits
    num_steps = (split + 1) * steps // num_splits - first_step

    of_a = scale_a_ptr + matrix.to(gl.int64) * stride_scale_a_matrix
    of_b = scale_b_ptr + matrix.to(gl.int64) * stride_scale_b_matrix
    of_step_a = of_a
    of_step_b = of_b
    if HAS_GROUPS:
        lane_row = gl.minimum(gl.arange(0, ROWS, layout=THREADS), num_rows - 1)
        of_step_a += first_step.to(gl.int64) * stride_scale_a_group
        of_step_a += lane_row.to(gl.int64) * stride_scale_a_row
        of_step_b += first_step.to(gl.int64) * stride_scale_b_group
        of_step_b += (column // 128).to(gl.int64) * stride_scale_b_column
        of_step_b += gl.zeros([COPIES], gl.int32, THREADS)
    ring = (a, b, factors_a, factors_b, full)
    place = (a_desc, b_desc, matrix, column)
    strides = (stride_scale_a_group, stride_scale_b_group)
    for step in range(gl.minimum(num_steps, STAGES)):
        of_step_a, of_step_b = _fetch(
            ring, place, of_step_a, of_step_b, strides, first_step + step, step, HAS_GROUPS
        )

    # what the end wants is under way while products are made
    row = gl.arange(0, ROWS, layout=OF_ROW)
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
    if not HAS_GROUPS and not IS_EXACT:
        for step in range(num_steps):
            mbarrier.wait(full.index(stage), phase)
            columns = as_matrix(b.index(stage))
            rows = as_matrix(a.index(stage)).permute((1, 0))
            acc = warpgroup_mma(columns, rows, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            if step + STAGES < num_steps:
                thread_barrier()  # all have read the stage
                step += first_step + STAGES
                _fetch(ring, place, of_a, of_b, strides, step, stage, HAS_GROUPS)
            stage, phase = next_stage(stage, phase, STAGES)
    else:
        for pair in range(num_steps // 2):  # the second step's product is made under the first sum
            part = _begin(acc, ring, stage, phase)
            stage_2, phase_2 = next_stage(stage, phase, STAGES)
            part_2 = _begin(acc, ring, stage_2, phase_2)
            scale = _scale(ring, stage, ACC, HAS_GROUPS)
            part, part_2 = warpgroup_mma_wait(1, deps=(part, part_2))
            acc = pin(acc + part * scale)
            scale = _scale(ring, stage_2, ACC, HAS_GROUPS)
            part_2 = warpgroup_mma_wait(0, deps=(part_2,))
            acc = pin(acc + part_2 * scale)
            step = 2 * pair + STAGES
            if step < num_steps:
                thread_barrier()  # all have read both stages
                of_step_a, of_step_b = _fetch(
                    ring, place, of_step_a, of_step_b, strides, first_step + step, stage, HAS_GROUPS
                )
                if step + 1 < num_steps:
                    step += first_step + 1
                    of_step_a, of_step_b = _fetch(
                        ring, place, of_step_a, of_step_b, strides, step, stage_2, HAS_GROUPS
                    )
            stage, phase = next_stage(stage_2, phase_2, STAGES)
        if num_steps % 2 == 1:
            part = _begin(acc, ring, stage, phase)
            scale = _scale(ring, stage, ACC, HAS_GROUPS)
            part = warpgroup_mma_wait(0, deps=(part,))
            acc += part * scale

    if not HAS_GROUPS:
        acc *= gl.expand_dims(scale_b, 1) * gl.expand_dims(scale_a, 0)
    if bias_ptr is not None:
        acc += gl.expand_dims(bias, 1)
    VEC: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth
    OUT: gl.constexpr = gl.BlockedLayout([VEC, 1], [64 // VEC, VEC // 2], [1, 4], [0, 1])
    out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), OUT)
    row_out = gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    column_out = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT))
    stride_out_part = stride_out_part // VEC * VEC  # all rows begin at multiples of 16 bytes
    stride_out_row = stride_out_row // VEC * VEC
    out_ptr += (split * num_matrices + matrix).to(gl.int64) * stride_out_part
    offs = gl.expand_dims(row_out.to(gl.int64) * stride_out_row, 0) + gl.expand_dims(column_out, 1)
    mask = gl.expand_dims(row_out < num_rows, 0) & gl.expand_dims(column_out < num_columns, 1)
    gl.store(out_ptr + offs, out, mask=mask)
