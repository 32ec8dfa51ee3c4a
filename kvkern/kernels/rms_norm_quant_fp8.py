"""rms_norm_quant_fp8: values = fp8(y / scale), y = x / sqrt(mean(x^2) + eps) * gamma, in one pass.

A program has whole rows. With a residual, x + residual takes x's place, and the residual's.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvkern.kernels.config import KernelConfig, config_of_call
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.fp8_tiles import (
    OF_A_STEP,
    Cell,
    choose_tile,
    columns_from,
    load_chunks,
    quantizing_fields,
    rows_from,
    scale_shape,
    store_quantized,
    tile_at,
)
from kvkern.kernels.numerics import round_to


@triton.jit(do_not_specialize=OF_A_STEP)
def _rms_norm_quant_fp8_kernel(
    x_ptr,  # [M, K]
    residual_ptr,  # [M, K] or None
    gamma_ptr,  # [K]
    values_ptr,  # fp8 codes in uint8 [M, K]
    scale_ptr,  # fp32 [cells of M, cells of K]
    num_rows,
    eps,
    stride_x,
    stride_residual,
    stride_values,
    stride_scale_row,
    stride_scale_column,
    NUM_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CELL: tl.constexpr,
    IS_STATIC: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    IS_EARLY: tl.constexpr,  # whether it may start before the launch before has ended
):
    """One tile of whole rows."""
    first_row, first_column = tile_at(tl.program_id(0), NUM_COLUMNS, ROWS, COLUMNS, CHUNKS)
    if IS_EARLY:
        gdc_wait()
    chunks = load_chunks(
        x_ptr, first_row, first_column, num_rows, stride_x, NUM_COLUMNS, ROWS, COLUMNS, CHUNKS,
        CELL, "evict_first",  # not gamma, which all programs read
    )  # fmt: skip
    if residual_ptr is not None:
        chunks = _add_residual(
            chunks, residual_ptr, first_row, num_rows, stride_residual, NUM_COLUMNS, ROWS, COLUMNS,
            CHUNKS, CELL,
        )  # fmt: skip
    if IS_EARLY:
        gdc_launch_dependents()
    inverse = tl.rsqrt(_mean_square(chunks, NUM_COLUMNS, CHUNKS) + eps)
    normed = ()
    for i in tl.static_range(CHUNKS):
        column = columns_from(i * COLUMNS, COLUMNS, CELL)
        gamma = tl.load(gamma_ptr + column, mask=column < NUM_COLUMNS, other=0.0)
        y = chunks[i].to(tl.float32) * inverse * gamma.to(tl.float32)
        normed = normed + (y,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no other)
    store_quantized(
        normed, first_row, first_column, num_rows, values_ptr, stride_values, scale_ptr,
        stride_scale_row, stride_scale_column, NUM_COLUMNS, ROWS, COLUMNS, CHUNKS, CELL, IS_STATIC,
        POWER_OF_TWO, LIMIT, NATIVE_FP8,
    )  # fmt: skip


@triton.jit
def _add_residual(
    chunks,
    residual_ptr,
    first_row,
    num_rows,
    stride,
    NUM_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CELL: tl.constexpr,
):
    """The sums as they are stored, in x's dtype."""
    residuals = load_chunks(
        residual_ptr, first_row, 0, num_rows, stride, NUM_COLUMNS, ROWS, COLUMNS, CHUNKS, CELL
    )
    row = rows_from(first_row, ROWS)
    sums = ()
    for i in tl.static_range(CHUNKS):
        column = columns_from(i * COLUMNS, COLUMNS, CELL)
        wide = chunks[i].to(tl.float32) + residuals[i].to(tl.float32)
        stored = round_to(wide, residual_ptr.dtype.element_ty)
        mask = (row < num_rows) & (column < NUM_COLUMNS)
        tl.store(residual_ptr + row * stride + column, stored, mask=mask)
        sums = sums + (stored,)  # type: ignore[assignment]  # noqa: RUF005 (as above)
    return sums


@triton.jit
def _mean_square(chunks, NUM_COLUMNS: tl.constexpr, CHUNKS: tl.constexpr):
    """Of each row, ``[rows, 1, 1]``, in fp32: a thread's few, then the threads'."""
    first = chunks[0].to(tl.float32)
    squares = first * first
    for i in tl.static_range(1, CHUNKS):
        x = chunks[i].to(tl.float32)
        squares = tl.fma(x, x, squares)
    of_cells = tl.sum(squares, axis=2, keep_dims=True)
    return tl.sum(of_cells, axis=1, keep_dims=True) * (1.0 / NUM_COLUMNS)


def rms_norm_quant_fp8(
    x: Tensor,
    gamma: Tensor,
    residual: Tensor | None,
    values: Tensor,
    scale: Tensor,
    granularity: Cell,
    is_static: bool,
    power_of_two: bool,
    eps: float,
) -> None:
    """Launch once. ``kvkern.rms_norm_quant_fp8`` has checked the arguments; none is empty."""
    grid, arguments, options = _call(
        x,
        gamma,
        residual,
        values,
        scale,
        granularity,
        is_static,
        power_of_two,
        eps,
        gpu_of(x.device),
    )
    _rms_norm_quant_fp8_kernel[grid](**arguments, **options)


def _call(
    x: Tensor,
    gamma: Tensor,
    residual: Tensor | None,
    values: Tensor,
    scale: Tensor,
    granularity: Cell,
    is_static: bool,
    power_of_two: bool,
    eps: float,
    gpu: Gpu,
) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
    tile = choose_tile(x.shape[1], "row", 16 // max(x.element_size(), 2))
    arguments = {
        "x_ptr": x,
        "residual_ptr": residual,
        "gamma_ptr": gamma,
        "num_rows": x.shape[0],
        "eps": eps,
        "stride_x": x.stride(0),
        "stride_residual": 0 if residual is None else residual.stride(0),
        **quantizing_fields(values, scale, granularity, tile, is_static, power_of_two, gpu),
    }
    return (tile.num_tiles(*x.shape),), arguments, tile.options(gpu)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each granularity and dtype, with and without a residual."""
    gpu = Gpu(capability, num_sms=132)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    variants: tuple[tuple[Cell, int, torch.dtype, torch.dtype, bool, bool], ...] = (
        ("tensor", 7168, bf16, e4m3, True, False),
        ("row", 7168, bf16, e4m3, False, True),
        ("row", 7168, bf16, e4m3, False, False),
        ("row", 1536, fp16, e5m2, False, False),
        ("row", 512, bf16, e4m3, False, False),
        ("group", 7168, bf16, e4m3, False, True),
        ("group", 7168, bf16, e4m3, False, False),
        ("row", 16384, fp32, e4m3, False, True),
    )
    for granularity, num_columns, dtype, fp8, is_static, has_residual in variants:
        x = torch.empty(256, num_columns, dtype=dtype, device="meta")
        values = torch.empty_like(x, dtype=fp8)
        scale = torch.empty(scale_shape(granularity, 256, num_columns), device="meta")
        label = f"{granularity}-{dtype}-{fp8}-K{num_columns}".replace("torch.", "")
        _, arguments, options = _call(
            x, x[0], x if has_residual else None, values, scale, granularity,
            is_static, False, 1e-6, gpu,
        )  # fmt: skip
        label += "-residual" * has_residual
        yield config_of_call(_rms_norm_quant_fp8_kernel, label, arguments, options)
