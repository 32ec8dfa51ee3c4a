"""matmul_w8a16 and matmul_w4a16 of few tokens, in one launch: a program's warps share K.

Each warp multiplies another chunk of the same rows of the weight, and their sums are added at the
end: no partial sum leaves the program. Every program reads all of x, so tokens have to be few.
"""

import triton
import triton.language as tl

from kvkern.kernels.numerics import compute_dtype, round_to
from kvkern.kernels.packed_ints import CHUNK_WORDS, chunk_columns, float_plane, planes_per_group


@triton.jit(do_not_specialize=["num_rows"])
def matmul_few_kernel(
    x_ptr,  # [M, K]
    words_ptr,  # int32 [chunks, N, CHUNK_WORDS]
    scale_ptr,  # fp32 [groups, N]
    zero_ptr,  # fp32 [groups, N], or None
    bias_ptr,  # [N], or None
    out_ptr,  # [M, N]
    num_rows,
    num_columns,
    depth,  # K
    stride_x,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # columns of x that share a scale; 0: all
    HAS_TAIL: tl.constexpr,  # whether the last chunk has columns that x has not
    BLOCK_C: tl.constexpr,  # chunks that are multiplied together, a warp each
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """A tile, and all of K."""
    CHUNK: tl.constexpr = chunk_columns(BITS)
    PLANES_PER_GROUP: tl.constexpr = planes_per_group(GROUP)
    dtype: tl.constexpr = compute_dtype(x_ptr)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_c, offs_w = tl.arange(0, BLOCK_C), tl.arange(0, CHUNK_WORDS)
    mask_n, mask_m = offs_n < num_columns, offs_m < num_rows
    row_offs = offs_c.to(tl.int64)[:, None] * num_columns + offs_n[None, :]
    word_offs = row_offs[:, :, None] * CHUNK_WORDS + offs_w[None, None, :]
    x_offs = offs_m.to(tl.int64)[None, None, :] * stride_x + offs_w[None, :, None]
    x_ptrs = x_ptr + x_offs + offs_c[:, None, None] * CHUNK

    acc = tl.zeros([BLOCK_C, BLOCK_N, BLOCK_M], tl.float32)
    chunk_ptr = words_ptr
    if GROUP == 0:
        scale = tl.load(scale_ptr + offs_n, mask=mask_n, other=0.0)
        zero = None
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + offs_n, mask=mask_n, other=0.0)[None, :, None]
    num_chunks = tl.cdiv(depth, CHUNK)
    for first in tl.range(0, num_chunks, BLOCK_C, num_stages=NUM_STAGES):
        mask_c = first + offs_c < num_chunks
        mask_words = mask_c[:, None, None] & mask_n[None, :, None]
        words = tl.load(chunk_ptr + word_offs, mask=mask_words, other=0)
        chunk_ptr += num_columns.to(tl.int64) * (BLOCK_C * CHUNK_WORDS)
        for plane in tl.static_range(32 // BITS):
            column = first * CHUNK + plane * CHUNK_WORDS
            if GROUP > 0 and plane % PLANES_PER_GROUP == 0:
                group = (column + offs_c * CHUNK) // GROUP
                mask_group = mask_c[:, None] & mask_n[None, :]
                if HAS_TAIL:
                    mask_group &= (column + offs_c * CHUNK < depth)[:, None]
                group_offs = group[:, None] * num_columns + offs_n[None, :]
                scale = tl.load(scale_ptr + group_offs, mask=mask_group, other=0.0)
                zero = None
                if zero_ptr is not None:
                    zero = tl.load(zero_ptr + group_offs, mask=mask_group, other=0.0)[:, :, None]
            weight = float_plane(words, zero, plane, BITS, dtype)
            mask_x = mask_c[:, None, None] & mask_m[None, None, :]
            if HAS_TAIL:
                place = column + offs_c[:, None, None] * CHUNK + offs_w[None, :, None]
                mask_x &= place < depth
            x = tl.load(x_ptrs + column, mask=mask_x, other=0.0).to(dtype)
            if GROUP == 0:
                acc = tl.dot(weight, x, acc)
            else:
                if plane % PLANES_PER_GROUP == 0:
                    part = tl.dot(weight, x)
                else:
                    part = tl.dot(weight, x, part)
                if plane % PLANES_PER_GROUP == PLANES_PER_GROUP - 1:
                    acc += part * scale[:, :, None]
    total = tl.sum(acc, axis=0)
    if GROUP == 0:
        total *= scale[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    out = round_to(total, out_ptr.dtype.element_ty)
    out_ptrs = out_ptr + offs_m.to(tl.int64)[None, :] * num_columns + offs_n[:, None]
    tl.store(out_ptrs, out, mask=mask_n[:, None] & mask_m[None, :])
