"""quantize_fp8: values = fp8(x / scale), scale = amax(cell) / max; dequantize_fp8: values * scale.

A cell, what shares a scale, lies in one tile, and x is read once. Only where cells are larger,
tensors and rows of more than ``LONGEST_ROW``, are their maxima found before.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvkern.kernels.config import SMALL_SPILLS, KernelConfig, config_of_call
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.fp8_tiles import (
    LONGEST_ROW,
    OF_A_STEP,
    Cell,
    choose_tile,
    columns_from,
    largest_of,
    load_chunks,
    load_scale,
    quantizing_fields,
    rows_from,
    scale_for,
    scale_shape,
    store_codes,
    store_quantized,
    tile_at,
)
from kvkern.kernels.numerics import (
    decode_e4m3,
    decode_e5m2,
    inverse_of,
    round_to,
)

_MOST_PARTIALS = 1024  # maxima of a tensor's parts: each program of the second launch reads them
_MOST_PARTIALS_OF_ROW = 8


@triton.jit(do_not_specialize=[*OF_A_STEP, "num_partials"])
def _quantize_fp8_kernel(
    x_ptr,  # [M, K]
    values_ptr,  # fp8 codes in uint8 [M, K]
    scale_ptr,  # fp32 [cells of M, cells of K]
    partials_ptr,  # fp32 [cells, num_partials], or None: cells lie in tiles
    num_rows,
    num_partials,
    stride_x,
    stride_values,
    stride_scale_row,
    stride_scale_column,
    NUM_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CELL: tl.constexpr,
    IS_STATIC: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    IS_EARLY: tl.constexpr,  # whether it may start before the launch before has ended
):
    """One tile."""
    tile = tl.program_id(0)
    if partials_ptr is not None:  # first what was read last, and is in the L2 still
        tile = tl.num_programs(0) - 1 - tile
    elif IS_EARLY:
        gdc_wait()
    first_row, first_column = tile_at(tile, NUM_COLUMNS, ROWS, COLUMNS, CHUNKS)
    chunks = load_chunks(
        x_ptr, first_row, first_column, num_rows, stride_x, NUM_COLUMNS, ROWS, COLUMNS, CHUNKS,
        CELL,
    )  # fmt: skip
    if partials_ptr is None:
        if IS_EARLY:
            gdc_launch_dependents()
        store_quantized(
            chunks, first_row, first_column, num_rows, values_ptr, stride_values, scale_ptr,
            stride_scale_row, stride_scale_column, NUM_COLUMNS, ROWS, COLUMNS, CHUNKS, CELL,
            IS_STATIC, POWER_OF_TWO, LIMIT, NATIVE_FP8,
        )  # fmt: skip
    else:
        cell = first_row if CELL == "row" else first_row * 0  # a long row has its tiles for itself
        offs = tl.arange(0, BLOCK_P)
        if IS_EARLY:
            gdc_wait()
            gdc_launch_dependents()
        partial_ptrs = partials_ptr + cell * num_partials + offs
        partials = tl.load(partial_ptrs, mask=offs < num_partials, other=0.0)
        scale = scale_for(tl.max(partials, axis=0), POWER_OF_TWO, LIMIT)
        is_first = (first_column == 0) & ((CELL == "row") | (first_row == 0))
        tl.store(scale_ptr + cell, scale, mask=is_first)
        inverse = inverse_of(scale)
        for i in tl.static_range(CHUNKS):
            store_codes(
                chunks[i].to(tl.float32) * inverse, first_row, first_column + i * COLUMNS,
                num_rows, values_ptr, stride_values, NUM_COLUMNS, ROWS, COLUMNS, CELL, LIMIT,
                NATIVE_FP8,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_partials"])
def _partial_maxima_kernel(
    x_ptr,  # [M, K]
    partials_ptr,  # fp32 [cells, num_partials]
    num_rows,  # of a cell
    num_partials,
    stride_x,
    NUM_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """max |x| of every ``num_partials``-th tile of a cell of whole rows, where that is finite."""
    if IS_EARLY:
        gdc_wait()
        gdc_launch_dependents()  # x is there: the second launch reads it before it waits
    cell, first_tile = tl.program_id(0) // num_partials, tl.program_id(0) % num_partials
    x_ptr += cell.to(tl.int64) * num_rows * stride_x
    TILES_K: tl.constexpr = (NUM_COLUMNS + COLUMNS * CHUNKS - 1) // (COLUMNS * CHUNKS)
    amax = tl.zeros([ROWS, 1, COLUMNS], tl.float32)
    for tile in range(first_tile, tl.cdiv(num_rows, ROWS) * TILES_K, num_partials):
        first_row, first_column = tile_at(tile, NUM_COLUMNS, ROWS, COLUMNS, CHUNKS)
        chunks = load_chunks(
            x_ptr, first_row, first_column, num_rows, stride_x, NUM_COLUMNS, ROWS, COLUMNS, CHUNKS,
            "tensor",
        )  # fmt: skip
        amax = tl.maximum(amax, largest_of(chunks, CHUNKS))
    amax = tl.max(tl.max(tl.max(amax, axis=2), axis=1), axis=0)
    tl.store(partials_ptr + tl.program_id(0), amax)


@triton.jit(do_not_specialize=OF_A_STEP)
def _dequantize_fp8_kernel(
    values_ptr,  # fp8 codes in uint8 [M, K]
    scale_ptr,  # fp32 [cells of M, cells of K]
    out_ptr,  # [M, K]
    num_rows,
    stride_values,
    stride_scale_row,
    stride_scale_column,
    stride_out,
    NUM_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CELL: tl.constexpr,
    IS_E5M2: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """One tile."""
    first_row, first_column = tile_at(tl.program_id(0), NUM_COLUMNS, ROWS, COLUMNS, CHUNKS)
    if IS_EARLY:
        gdc_wait()
    chunks = load_chunks(
        values_ptr, first_row, first_column, num_rows, stride_values, NUM_COLUMNS, ROWS, COLUMNS,
        CHUNKS, CELL,
    )  # fmt: skip
    if IS_EARLY:
        gdc_launch_dependents()
    row = rows_from(first_row, ROWS)
    if CELL == "tensor" or CELL == "row":
        scale = load_scale(
            scale_ptr, first_row, first_column, num_rows, stride_scale_row, stride_scale_column,
            NUM_COLUMNS, ROWS, COLUMNS, CELL,
        )  # fmt: skip
    for i in tl.static_range(CHUNKS):
        at = first_column + i * COLUMNS
        codes, column = chunks[i], columns_from(at, COLUMNS, CELL)
        x = decode_e5m2(codes) if IS_E5M2 else decode_e4m3(codes, tl.float32, NATIVE_FP8)
        if CELL == "group" or CELL == "block":
            scale = load_scale(
                scale_ptr, first_row, at, num_rows, stride_scale_row, stride_scale_column,
                NUM_COLUMNS, ROWS, COLUMNS, CELL,
            )  # fmt: skip
        out = round_to(x * scale, out_ptr.dtype.element_ty)
        mask = (row < num_rows) & (column < NUM_COLUMNS)
        tl.store(out_ptr + row * stride_out + column, out, mask=mask)


def quantize_fp8(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    granularity: Cell,
    is_static: bool,
    power_of_two: bool,
) -> None:
    """One launch, or two where cells are larger than a tile.

    ``kvkern.quantize_fp8`` has checked the arguments; none is empty.
    """
    gpu = gpu_of(x.device)
    partials = None
    if not is_static and _is_larger_than_tile(x, granularity):
        grid, arguments, options = _maxima_call(x, granularity, gpu)
        partials = arguments["partials_ptr"]
        _partial_maxima_kernel[grid](**arguments, **options)
    grid, arguments, options = _quantize_call(
        x, values, scale, partials, granularity, is_static, power_of_two, gpu
    )
    _quantize_fp8_kernel[grid](**arguments, **options)


def dequantize_fp8(values: Tensor, scale: Tensor, granularity: Cell, out: Tensor) -> None:
    """Launch once. ``kvkern.dequantize_fp8`` has checked the arguments; none is empty."""
    grid, arguments, options = _dequantize_call(values, scale, granularity, out, gpu_of(out.device))
    _dequantize_fp8_kernel[grid](**arguments, **options)


def _is_larger_than_tile(x: Tensor, granularity: Cell) -> bool:
    """Whether no program has a whole cell: tensors, and rows that are too long."""
    return granularity == "tensor" or (granularity == "row" and x.shape[1] > LONGEST_ROW)


def _most_partials(granularity: Cell) -> int:
    return _MOST_PARTIALS_OF_ROW if granularity == "row" else _MOST_PARTIALS


def _maxima_call(
    x: Tensor, granularity: Cell, gpu: Gpu
) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
    num_columns = x.shape[1]
    num_rows, num_cells = (1, x.shape[0]) if granularity == "row" else (x.shape[0], 1)
    tile = choose_tile(num_columns, "tensor")
    num_partials = min(tile.num_tiles(num_rows, num_columns), _most_partials(granularity))
    arguments = {
        "x_ptr": x,
        "partials_ptr": torch.empty(num_cells, num_partials, device=x.device),
        "num_rows": num_rows,
        "num_partials": num_partials,
        "stride_x": x.stride(0),
        **tile.fields(num_columns),
        "IS_EARLY": gpu.has_early_start,
    }
    return (num_partials * num_cells,), arguments, tile.options(gpu)


def _quantize_call(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    partials: Tensor | None,
    granularity: Cell,
    is_static: bool,
    power_of_two: bool,
    gpu: Gpu,
) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
    has_scales = is_static or partials is not None
    is_free = has_scales and granularity != "group"  # narrow tiles are the faster there
    tile = choose_tile(x.shape[1], "tensor" if is_free else granularity)
    arguments = {
        "x_ptr": x,
        "partials_ptr": partials,
        "num_rows": x.shape[0],
        "num_partials": 0 if partials is None else partials.shape[1],
        "stride_x": x.stride(0),
        "BLOCK_P": _most_partials(granularity),
        **quantizing_fields(values, scale, granularity, tile, is_static, power_of_two, gpu),
    }
    return (tile.num_tiles(*x.shape),), arguments, tile.options(gpu)


def _dequantize_call(
    values: Tensor, scale: Tensor, granularity: Cell, out: Tensor, gpu: Gpu
) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
    tile = choose_tile(out.shape[1], "tensor", 16 // max(out.element_size(), 2))
    arguments = {
        "values_ptr": values.view(torch.uint8),
        "scale_ptr": scale,
        "out_ptr": out,
        "num_rows": out.shape[0],
        "stride_values": values.stride(0),
        "stride_scale_row": scale.stride(0),
        "stride_scale_column": scale.stride(1),
        "stride_out": out.stride(0),
        **tile.fields(out.shape[1]),
        "CELL": granularity,
        "IS_E5M2": values.dtype == torch.float8_e5m2,
        "NATIVE_FP8": gpu.has_fp8,
        "IS_EARLY": gpu.has_early_start,
    }
    return (tile.num_tiles(*out.shape),), arguments, tile.options(gpu)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each granularity and dtype; long rows; static scales and powers of two."""
    gpu = Gpu(capability, num_sms=132)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    variants: tuple[tuple[Cell, int, torch.dtype, torch.dtype, bool, bool], ...] = (
        ("tensor", 7168, bf16, e4m3, False, False),
        ("tensor", 7168, bf16, e4m3, True, False),
        ("row", 7168, bf16, e4m3, False, False),
        ("row", 18432, fp32, e4m3, False, False),
        ("row", 65536, bf16, e4m3, False, False),
        ("group", 7168, bf16, e4m3, False, False),
        ("group", 7168, fp16, e5m2, False, True),
        ("group", 7168, fp32, e4m3, True, False),
        ("block", 7168, bf16, e4m3, False, True),
        ("block", 7168, fp32, e5m2, False, False),
    )
    for granularity, num_columns, dtype, fp8, is_static, power_of_two in variants:
        x = torch.empty(256, num_columns, dtype=dtype, device="meta")
        values = torch.empty_like(x, dtype=fp8)
        scale = torch.empty(scale_shape(granularity, 256, num_columns), device="meta")
        label = f"{granularity}-{dtype}-{fp8}-K{num_columns}".replace("torch.", "")
        label += "-static" * is_static + "-pow2" * power_of_two
        partials = None
        if not is_static and _is_larger_than_tile(x, granularity):
            _, arguments, options = _maxima_call(x, granularity, gpu)
            partials = arguments["partials_ptr"]
            yield config_of_call(
                _partial_maxima_kernel, f"maxima-{label}", arguments, options, **SMALL_SPILLS
            )
        _, arguments, options = _quantize_call(
            x, values, scale, partials, granularity, is_static, power_of_two, gpu
        )
        yield config_of_call(_quantize_fp8_kernel, label, arguments, options)
        if not is_static and num_columns == 7168:
            _, arguments, options = _dequantize_call(values, scale, granularity, x, gpu)
            yield config_of_call(_dequantize_fp8_kernel, f"dequantize-{label}", arguments, options)
