"""silu_and_mul_quant_fp8: values = fp8(y / scale), y = silu(gate) * up, in one pass."""

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
    load_chunks,
    quantizing_fields,
    scale_shape,
    store_quantized,
    tile_at,
)
from kvkern.kernels.numerics import sigmoid


@triton.jit(do_not_specialize=OF_A_STEP)
def _silu_and_mul_quant_fp8_kernel(
    x_ptr,  # [M, 2I]: gate, up
    values_ptr,  # fp8 codes in uint8 [M, I]
    scale_ptr,  # fp32 [cells of M, cells of I]
    num_rows,
    stride_x,
    stride_values,
    stride_scale_row,
    stride_scale_column,
    NUM_COLUMNS: tl.constexpr,  # I
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
    """One tile."""
    first_row, first_column = tile_at(tl.program_id(0), NUM_COLUMNS, ROWS, COLUMNS, CHUNKS)
    if IS_EARLY:
        gdc_wait()
    gates = load_chunks(
        x_ptr, first_row, first_column, num_rows, stride_x, NUM_COLUMNS, ROWS, COLUMNS, CHUNKS,
        CELL,
    )  # fmt: skip
    ups = load_chunks(
        x_ptr + NUM_COLUMNS, first_row, first_column, num_rows, stride_x, NUM_COLUMNS, ROWS,
        COLUMNS, CHUNKS, CELL,
    )  # fmt: skip
    if IS_EARLY:
        gdc_launch_dependents()
    products = ()
    for i in tl.static_range(CHUNKS):
        gate, up = gates[i].to(tl.float32), ups[i].to(tl.float32)
        y = gate * sigmoid(gate) * up
        products = products + (y,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no other)
    store_quantized(
        products, first_row, first_column, num_rows, values_ptr, stride_values, scale_ptr,
        stride_scale_row, stride_scale_column, NUM_COLUMNS, ROWS, COLUMNS, CHUNKS, CELL, IS_STATIC,
        POWER_OF_TWO, LIMIT, NATIVE_FP8,
    )  # fmt: skip


def silu_and_mul_quant_fp8(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    granularity: Cell,
    is_static: bool,
    power_of_two: bool,
) -> None:
    """Launch once. ``kvkern.silu_and_mul_quant_fp8`` has checked the arguments; none is empty."""
    grid, arguments, options = _call(
        x, values, scale, granularity, is_static, power_of_two, gpu_of(x.device)
    )
    _silu_and_mul_quant_fp8_kernel[grid](**arguments, **options)


def _call(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    granularity: Cell,
    is_static: bool,
    power_of_two: bool,
    gpu: Gpu,
) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
    tile = choose_tile(values.shape[1], "tensor" if is_static else granularity)
    arguments = {
        "x_ptr": x,
        "num_rows": x.shape[0],
        "stride_x": x.stride(0),
        **quantizing_fields(values, scale, granularity, tile, is_static, power_of_two, gpu),
    }
    return (tile.num_tiles(*values.shape),), arguments, tile.options(gpu)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each granularity and dtype; experts' widths and dense layers'."""
    gpu = Gpu(capability, num_sms=132)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    variants: tuple[tuple[Cell, int, torch.dtype, torch.dtype, bool], ...] = (
        ("tensor", 7168, bf16, e4m3, True),
        ("row", 2048, bf16, e4m3, False),
        ("row", 18432, bf16, e4m3, False),
        ("row", 7168, fp32, e5m2, False),
        ("group", 2048, bf16, e4m3, False),
        ("group", 18432, fp16, e4m3, False),
    )
    for granularity, num_columns, dtype, fp8, is_static in variants:
        x = torch.empty(256, 2 * num_columns, dtype=dtype, device="meta")
        values = torch.empty(256, num_columns, dtype=fp8, device="meta")
        scale = torch.empty(scale_shape(granularity, 256, num_columns), device="meta")
        label = f"{granularity}-{dtype}-{fp8}-I{num_columns}".replace("torch.", "")
        _, arguments, options = _call(x, values, scale, granularity, is_static, False, gpu)
        yield config_of_call(_silu_and_mul_quant_fp8_kernel, label, arguments, options)
