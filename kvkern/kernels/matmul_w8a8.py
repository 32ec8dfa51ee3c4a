"""matmul_w8a8: out = (x8 @ (stored - zero).T) * x_scale * scale, x8 = round(x / x_scale).

Rows of x are quantised by a launch of their own, in the order of columns that weights are stored
in. Sums are int32 and exact, however K is cut.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from kvkern.kernels.config import KernelConfig, config_of_call
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.matmul_weight_only import Tiles, choose_tiles
from kvkern.kernels.numerics import round_to
from kvkern.kernels.packed_ints import CHUNK_WORDS, chunk_columns, round_to_int
from kvkern.kernels.sum_splits import (
    new_partials,
    sum_splits_call,
    sum_splits_kernel,
)
from kvkern.layout import MIN_TOKEN_SCALE
from kvkern.warm_up import size_class

_MIN_SCALE: tl.constexpr = tl.constexpr(MIN_TOKEN_SCALE)
_CHUNK: tl.constexpr = tl.constexpr(chunk_columns(8))
_NO_FUSION = {"num_warps": 4, "enable_fp_fusion": False}  # a product is rounded before it is added


@triton.jit
def _quantize_rows_kernel(
    x_ptr,  # [M, K]
    words_ptr,  # int32 [M, chunks, CHUNK_WORDS]: codes
    scale_ptr,  # fp32 [M]
    sum_ptr,  # int32 [M]: of a row's codes
    depth,  # K
    stride_x,
    num_chunks,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,  # chunks
):
    """A row."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = x_ptr + row * stride_x
    amax = tl.zeros([BLOCK_K], tl.float32)
    num_wrong = tl.zeros([BLOCK_K], tl.int32)
    for start in range(0, depth, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        x = tl.load(row_ptr + column, mask=column < depth, other=0.0).to(tl.float32)
        is_finite = tl.abs(x) < float("inf")
        amax = tl.maximum(amax, tl.where(is_finite, tl.abs(x), 0.0))
        num_wrong += tl.where(is_finite, 0, 1)
    scale = tl.maximum(tl.div_rn(tl.max(amax, axis=0), 127.0), _MIN_SCALE)
    inverse = tl.div_rn(1.0, scale)
    has_wrong = tl.sum(num_wrong, axis=0) > 0
    tl.store(scale_ptr + row, tl.where(has_wrong, float("nan"), scale))
    offs_w = tl.arange(0, CHUNK_WORDS)
    total = tl.zeros([BLOCK_C, CHUNK_WORDS], tl.int32)
    for first in range(0, num_chunks, BLOCK_C):
        chunk = first + tl.arange(0, BLOCK_C)
        words = tl.zeros([BLOCK_C, CHUNK_WORDS], tl.int32)
        for plane in tl.static_range(4):
            column = (chunk * _CHUNK + plane * CHUNK_WORDS)[:, None] + offs_w[None, :]
            x = tl.load(row_ptr + column, mask=column < depth, other=0.0).to(tl.float32)
            steps = tl.where(tl.abs(x) < float("inf"), x * inverse, 0.0)
            code = round_to_int(tl.minimum(tl.maximum(steps, -127.0), 127.0))
            total += code
            words |= (code & 255) << (8 * plane)
        offs = (row * num_chunks + chunk)[:, None] * CHUNK_WORDS + offs_w[None, :]
        tl.store(words_ptr + offs, words, mask=(chunk < num_chunks)[:, None])
    tl.store(sum_ptr + row, tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit(do_not_specialize=["num_rows", "chunks_per_split"])
def _matmul_w8a8_kernel(
    codes_ptr,  # int8 [M, chunks, 128]: of x
    x_scale_ptr,  # fp32 [M]
    x_sum_ptr,  # int32 [M]
    values_ptr,  # int8 [chunks, N, 128]
    scale_ptr,  # fp32 [1, N]
    zero_ptr,  # fp32 [1, N], or None
    bias_ptr,  # [N], or None
    out_ptr,  # [S, M, N]: int32 parts of the sum if IS_PART
    num_rows,
    num_columns,
    num_chunks,
    chunks_per_split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_PART: tl.constexpr,
    LETS_NEXT_START: tl.constexpr,
):
    """A tile of one split."""
    if LETS_NEXT_START:
        gdc_launch_dependents()
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, _CHUNK)
    split = tl.program_id(2)
    mask_n, mask_m = offs_n < num_columns, offs_m < num_rows
    code_ptrs = codes_ptr + offs_m.to(tl.int64)[None, :] * num_chunks * _CHUNK + offs_k[:, None]

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
    first = split * chunks_per_split
    last = tl.minimum(first + chunks_per_split, num_chunks)
    chunk_ptr = values_ptr + first.to(tl.int64) * num_columns * _CHUNK
    value_offs = offs_n[:, None] * _CHUNK + offs_k[None, :]
    for chunk in tl.range(first, last, num_stages=NUM_STAGES):
        weight = tl.load(chunk_ptr + value_offs, mask=mask_n[:, None], other=0)
        chunk_ptr += num_columns * _CHUNK
        codes = tl.load(code_ptrs + chunk * _CHUNK, mask=mask_m[None, :], other=0)
        acc = tl.dot(weight, codes, acc, out_dtype=tl.int32)
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + offs_n, mask=mask_n & (split == 0), other=0).to(tl.int32)
        acc -= zero[:, None] * tl.load(x_sum_ptr + offs_m, mask=mask_m, other=0)[None, :]
    row = (split * num_rows + offs_m).to(tl.int64)
    out_ptrs = out_ptr + row[None, :] * num_columns + offs_n[:, None]
    mask = mask_n[:, None] & mask_m[None, :]
    if IS_PART:
        tl.store(out_ptrs, acc, mask=mask)
    else:
        real = acc.to(tl.float32)
        real *= tl.load(scale_ptr + offs_n, mask=mask_n, other=0.0)[:, None]
        real *= tl.load(x_scale_ptr + offs_m, mask=mask_m, other=0.0)[None, :]
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0)
            real += bias.to(tl.float32)[:, None]
        tl.store(out_ptrs, round_to(real, out_ptr.dtype.element_ty), mask=mask)


class _Codes(NamedTuple):
    """Quantised rows of x."""

    values: Tensor  # int8 [M, chunks, 128]
    scale: Tensor  # fp32 [M]
    sums: Tensor  # int32 [M]


def matmul_w8a8(
    x: Tensor, values: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, out: Tensor
) -> None:
    """Two launches, or three where K is cut.

    ``kvkern.matmul_w8a8`` has checked the arguments; none is empty.
    """
    gpu = gpu_of(x.device)
    codes = _new_codes(x)
    _quantize_rows_kernel[x.shape[0],](**_quantize_arguments(x, codes), **_NO_FUSION)
    tiles = choose_tiles(size_class(out.shape[0]), out.shape[1], x.shape[1], 8, gpu)
    parts = out if tiles.num_splits == 1 else new_partials(tiles.num_splits, out, torch.int32)
    grid, arguments, options = _matmul_call(codes, values, scale, zero, bias, parts, tiles, gpu)
    _matmul_w8a8_kernel[grid](**arguments, **options)
    if tiles.num_splits > 1:
        sum_grid, arguments, options = sum_splits_call(
            parts, bias, out, gpu, row_scale=codes.scale, column_scale=scale
        )
        sum_splits_kernel[sum_grid](**arguments, **options)


def _new_codes(x: Tensor) -> _Codes:
    num_rows, num_chunks = x.shape[0], triton.cdiv(x.shape[1], chunk_columns(8))
    return _Codes(
        torch.empty(num_rows, num_chunks, 128, dtype=torch.int8, device=x.device),
        torch.empty(num_rows, dtype=torch.float32, device=x.device),
        torch.empty(num_rows, dtype=torch.int32, device=x.device),
    )


def _quantize_arguments(x: Tensor, codes: _Codes) -> dict[str, Any]:
    return {
        "x_ptr": x,
        "words_ptr": codes.values.view(torch.int32),
        "scale_ptr": codes.scale,
        "sum_ptr": codes.sums,
        "depth": x.shape[1],
        "stride_x": x.stride(0),
        "num_chunks": codes.values.shape[1],
        "BLOCK_K": 4096,
        "BLOCK_C": 32,
    }


def _matmul_call(
    codes: _Codes,
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    parts: Tensor,
    tiles: Tiles,
    gpu: Gpu,
) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
    num_rows, num_columns = parts.shape[-2:]
    num_chunks = values.shape[0]
    is_cut = tiles.num_splits > 1
    arguments = {
        "codes_ptr": codes.values,
        "x_scale_ptr": codes.scale,
        "x_sum_ptr": codes.sums,
        "values_ptr": values,
        "scale_ptr": scale,
        "zero_ptr": zero,
        "bias_ptr": None if is_cut else bias,
        "out_ptr": parts,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "num_chunks": num_chunks,
        "chunks_per_split": triton.cdiv(num_chunks, tiles.num_splits),
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.columns,
        "NUM_STAGES": tiles.num_stages,
        "IS_PART": is_cut,
        "LETS_NEXT_START": is_cut and gpu.has_early_start,
    }
    options = {"num_warps": tiles.num_warps, "enable_fp_fusion": True}
    grid = (
        triton.cdiv(num_columns, tiles.columns),
        triton.cdiv(num_rows, tiles.rows),
        tiles.num_splits,
    )
    return grid, arguments, options


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Few tokens and many, with zeros and without, whole and in parts."""
    gpu = Gpu(capability, num_sms=132)
    for dtype, num_rows, has_zero, num_splits in (
        (torch.bfloat16, 16, False, 8),
        (torch.bfloat16, 16, True, 1),
        (torch.float16, 32, True, 4),
        (torch.bfloat16, 128, True, 1),
        (torch.float16, 128, False, 1),
    ):
        x = torch.empty(num_rows, 7168, dtype=dtype, device="meta")
        out = torch.empty(num_rows, 4096, dtype=dtype, device="meta")
        values = torch.empty(56, 4096, 128, dtype=torch.int8, device="meta")
        scale = torch.empty(1, 4096, device="meta")
        zero = torch.empty_like(scale) if has_zero else None
        codes = _new_codes(x)
        label = f"M{num_rows}-{dtype}-S{num_splits}".replace("torch.", "") + "-zero" * has_zero
        if num_rows == 16 or dtype == torch.float16:
            arguments = _quantize_arguments(x, codes)
            yield config_of_call(_quantize_rows_kernel, f"rows-{label}", arguments, _NO_FUSION)
        tiles = choose_tiles(num_rows, 4096, 7168, 8, gpu)._replace(num_splits=num_splits)
        parts = out if num_splits == 1 else new_partials(num_splits, out, torch.int32)
        _, arguments, options = _matmul_call(codes, values, scale, zero, out[0], parts, tiles, gpu)
        yield config_of_call(_matmul_w8a8_kernel, label, arguments, options)
        if num_splits == 8:
            sum_call = sum_splits_call(
                parts, out[0], out, gpu, row_scale=codes.scale, column_scale=scale
            )
            yield config_of_call(sum_splits_kernel, f"sum-{label}", *sum_call[1:])
