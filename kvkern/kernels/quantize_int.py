"""quantize_int8, quantize_int4: stored = round(w / scale) + zero; dequantize: the inverse.

Weights are quantised once: two launches, for the scales of groups of any size, then for the codes.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkern.kernels.config import SMALL_SPILLS, KernelConfig, config_of_call
from kvkern.kernels.numerics import round_to
from kvkern.kernels.packed_ints import CHUNK_WORDS, chunk_columns, round_to_int
from kvkern.layout import MIN_TOKEN_SCALE

_MIN_SCALE: tl.constexpr = tl.constexpr(MIN_TOKEN_SCALE)
_ROWS = 16  # of a program
_MOST_COLUMNS = 256  # read together
_NO_FUSION = {"num_warps": 4, "enable_fp_fusion": False}  # a product is rounded before it is added


@triton.jit
def _scales_kernel(
    weight_ptr,  # [N, K]
    scale_ptr,  # fp32 [groups, N]
    zero_ptr,  # fp32 [groups, N], or None
    num_rows,
    num_columns,
    stride_weight,
    group_size,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows of one group."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(1)
    mask_n = offs_n < num_rows
    row_ptrs = weight_ptr + offs_n.to(tl.int64)[:, None] * stride_weight
    low = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    high = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    first = group * group_size
    last = tl.minimum(first + group_size, num_columns)
    for start in range(first, last, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        mask = mask_n[:, None] & (column < last)[None, :]
        weight = tl.load(row_ptrs + column[None, :], mask=mask, other=0.0).to(tl.float32)
        weight = tl.where(tl.abs(weight) < float("inf"), weight, 0.0)
        low, high = tl.minimum(low, weight), tl.maximum(high, weight)
    low, high = tl.min(low, axis=1), tl.max(high, axis=1)
    offs = group.to(tl.int64) * num_rows + offs_n
    if zero_ptr is None:
        amax = tl.maximum(high, -low)
        scale = tl.maximum(tl.div_rn(amax, 2.0 ** (BITS - 1) - 1), _MIN_SCALE)
    else:
        TOP: tl.constexpr = 2.0**BITS - 1
        scale = tl.maximum(tl.div_rn(high, TOP) - tl.div_rn(low, TOP), _MIN_SCALE)
        zero = round_to_int(-low * tl.div_rn(1.0, scale)) - (128 if BITS == 8 else 0)
        tl.store(zero_ptr + offs, zero.to(tl.float32), mask=mask_n)
    tl.store(scale_ptr + offs, scale, mask=mask_n)


@triton.jit
def _pack_kernel(
    weight_ptr,  # [N, K]
    words_ptr,  # int32 [chunks, N, CHUNK_WORDS]
    scale_ptr,  # fp32 [groups, N]
    zero_ptr,  # fp32 [groups, N], or None
    num_rows,
    num_columns,
    stride_weight,
    group_size,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows of one chunk, whose planes are put together in words."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_w = tl.arange(0, CHUNK_WORDS)
    chunk = tl.program_id(1)
    mask_n = offs_n < num_rows
    row_ptrs = weight_ptr + offs_n.to(tl.int64)[:, None] * stride_weight
    words = tl.zeros([BLOCK_N, CHUNK_WORDS], tl.int32)
    LEAST: tl.constexpr = (1 if zero_ptr is None else 0) - (128 if BITS == 8 else 0)
    TOP: tl.constexpr = 127 if BITS == 8 else 15
    for plane in tl.static_range(32 // BITS):
        first = chunk * chunk_columns(BITS) + plane * CHUNK_WORDS
        column = first + offs_w
        mask = mask_n[:, None] & (column < num_columns)[None, :]
        weight = tl.load(row_ptrs + column[None, :], mask=mask, other=0.0).to(tl.float32)
        scale, zero = _scale_and_zero(
            scale_ptr, zero_ptr, first, offs_n, num_rows, num_columns, group_size, BITS
        )
        # clamped before it is an integer; NaN is 0
        steps = tl.where(weight == weight, weight * tl.div_rn(1.0, scale)[:, None], 0.0)
        code = round_to_int(tl.minimum(tl.maximum(steps, -512.0), 512.0)) + zero[:, None]
        code = tl.minimum(tl.maximum(code, LEAST), TOP)
        words |= (code & (2**BITS - 1)) << (BITS * plane)
    offs = (chunk.to(tl.int64) * num_rows + offs_n)[:, None] * CHUNK_WORDS + offs_w[None, :]
    tl.store(words_ptr + offs, words, mask=mask_n[:, None])


@triton.jit
def _dequantize_kernel(
    words_ptr,  # int32 [chunks, N, CHUNK_WORDS]
    scale_ptr,  # fp32 [groups, N]
    zero_ptr,  # fp32 [groups, N], or None
    out_ptr,  # [N, K]
    num_rows,
    num_columns,
    group_size,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows of one chunk, plane by plane."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_w = tl.arange(0, CHUNK_WORDS)
    chunk = tl.program_id(1)
    mask_n = offs_n < num_rows
    offs = (chunk.to(tl.int64) * num_rows + offs_n)[:, None] * CHUNK_WORDS + offs_w[None, :]
    words = tl.load(words_ptr + offs, mask=mask_n[:, None], other=0)
    row_ptrs = out_ptr + offs_n.to(tl.int64)[:, None] * num_columns
    for plane in tl.static_range(32 // BITS):
        first = chunk * chunk_columns(BITS) + plane * CHUNK_WORDS
        scale, zero = _scale_and_zero(
            scale_ptr, zero_ptr, first, offs_n, num_rows, num_columns, group_size, BITS
        )
        code = (words >> (BITS * plane)) & (2**BITS - 1)
        if BITS == 8:
            code = (code ^ 128) - 128
        real = (code - zero[:, None]).to(tl.float32) * scale[:, None]
        column = first + offs_w
        mask = mask_n[:, None] & (column < num_columns)[None, :]
        out = round_to(real, out_ptr.dtype.element_ty)
        tl.store(row_ptrs + column[None, :], out, mask=mask)


@triton.jit
def _scale_and_zero(
    scale_ptr, zero_ptr, column, offs_n, num_rows, num_columns, group_size, BITS: tl.constexpr
):
    """Of the group that a column is in, ``[N]``; of the last where it is beyond the last."""
    group = tl.minimum(column, num_columns - 1) // group_size
    offs = group.to(tl.int64) * num_rows + offs_n
    mask = offs_n < num_rows
    scale = tl.load(scale_ptr + offs, mask=mask, other=1.0)
    if zero_ptr is None:
        zero = tl.full(offs_n.shape, 0 if BITS == 8 else 8, tl.int32)
    else:
        zero = tl.load(zero_ptr + offs, mask=mask, other=0).to(tl.int32)
    return scale, zero


def quantize_int(
    weight: Tensor, values: Tensor, scale: Tensor, zero: Tensor | None, group_size: int
) -> None:
    """Launch twice. ``kvkern.ops`` has checked the arguments; none is empty."""
    for kernel, (grid, arguments) in _quantize_calls(weight, values, scale, zero, group_size):
        kernel[grid](**arguments, **_NO_FUSION)


def dequantize_int(
    values: Tensor, scale: Tensor, zero: Tensor | None, group_size: int, out: Tensor
) -> None:
    """Launch once. ``kvkern.ops`` has checked the arguments; none is empty."""
    grid, arguments = _dequantize_call(values, scale, zero, group_size, out)
    _dequantize_kernel[grid](**arguments, **_NO_FUSION)


_Call = tuple[tuple[int, int], dict[str, Any]]


def _quantize_calls(
    weight: Tensor, values: Tensor, scale: Tensor, zero: Tensor | None, group_size: int
) -> Iterator[tuple[Any, _Call]]:
    num_rows, num_columns = weight.shape
    shared = {
        "weight_ptr": weight,
        "scale_ptr": scale,
        "zero_ptr": zero,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "stride_weight": weight.stride(0),
        "group_size": group_size,
        "BITS": 8 if values.dtype == torch.int8 else 4,
        "BLOCK_N": _ROWS,
    }
    blocks = triton.cdiv(num_rows, _ROWS)
    columns = min(triton.next_power_of_2(group_size), _MOST_COLUMNS)
    yield _scales_kernel, ((blocks, scale.shape[0]), shared | {"BLOCK_K": columns})
    words = {"words_ptr": values.view(torch.int32)}
    yield _pack_kernel, ((blocks, values.shape[0]), shared | words)


def _dequantize_call(
    values: Tensor, scale: Tensor, zero: Tensor | None, group_size: int, out: Tensor
) -> _Call:
    num_rows, num_columns = out.shape
    arguments = {
        "words_ptr": values.view(torch.int32),
        "scale_ptr": scale,
        "zero_ptr": zero,
        "out_ptr": out,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "group_size": group_size,
        "BITS": 8 if values.dtype == torch.int8 else 4,
        "BLOCK_N": _ROWS,
    }
    return (triton.cdiv(num_rows, _ROWS), values.shape[0]), arguments


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each number of bits, with zeros and without, in each dtype."""
    for bits, group_size, has_zero, dtype in (
        (8, 7168, False, torch.bfloat16),
        (8, 7168, True, torch.float32),
        (4, 128, False, torch.bfloat16),
        (4, 128, True, torch.float16),
    ):
        weight = torch.empty(256, 7168, dtype=dtype, device="meta")
        stored = torch.int8 if bits == 8 else torch.uint8
        chunks = 7168 // chunk_columns(bits)
        values = torch.empty(chunks, 256, 128, dtype=stored, device="meta")
        scale = torch.empty(7168 // group_size, 256, device="meta")
        zero = torch.empty_like(scale) if has_zero else None
        label = f"w{bits}-{dtype}".replace("torch.", "") + "-zero" * has_zero
        calls = list(_quantize_calls(weight, values, scale, zero, group_size))
        calls += [(_dequantize_kernel, _dequantize_call(values, scale, zero, group_size, weight))]
        for kernel, (_, arguments) in calls:
            name = f"{kernel.__name__.strip('_')}-{label}"
            yield config_of_call(kernel, name, arguments, _NO_FUSION, **SMALL_SPILLS)
