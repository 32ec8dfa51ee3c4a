"""quantize_fp8: values = fp8(x / scale), scale = amax(cell) / max; dequantize_fp8: values * scale.

A cell, the rows and columns that share a scale, lies in one tile, and x is read once. Only where
cells are larger, tensors and rows of more than ``_LONGEST_ROW``, are their maxima found before.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkern.kernels.config import KernelConfig, config_of_call
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.numerics import (
    decode_e4m3,
    decode_e5m2,
    encode_e4m3,
    encode_e5m2,
    power_of_two_scale,
    round_to,
)
from kvkern.layout import MIN_TOKEN_SCALE

_LONGEST_ROW = 32768  # columns of a row that a program keeps in registers
_MOST_PARTIALS = 1024  # maxima of a tensor's parts: each program of the second launch reads them
_MOST_PARTIALS_OF_ROW = 8
_MIN_SCALE: tl.constexpr = tl.constexpr(MIN_TOKEN_SCALE)
# columns and strides are a layer's own, rows a step's: those compile nothing new


@triton.jit(do_not_specialize=["num_rows", "num_partials"])
def _quantize_fp8_kernel(
    x_ptr,  # [M, K]
    values_ptr,  # fp8 codes in uint8 [M, K]
    scale_ptr,  # fp32 [cells of M, cells of K]
    partials_ptr,  # fp32 [cells, num_partials], or None: cells lie in tiles
    num_rows,
    num_columns,
    stride_x,
    stride_values,
    scale_columns,
    num_partials,
    CELL_M: tl.constexpr,  # rows and columns of a scale; 0: all
    CELL_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    IS_STATIC: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """One tile. A scale is stored by the program that has its cell's first element."""
    row, column, mask = _tile(num_rows, num_columns, BLOCK_M, BLOCK_K)
    x = tl.load(x_ptr + _offsets(row, column, stride_x), mask=mask, other=0.0).to(tl.float32)
    x = _by_cell(x, CELL_M, CELL_K)
    offs, is_cell = _cell_offsets(row, column, num_rows, scale_columns, CELL_M, CELL_K)
    if IS_STATIC:
        scale = tl.load(scale_ptr + offs, mask=is_cell, other=1.0)
    elif partials_ptr is not None:  # of the one cell that the tile lies in
        offs_p = tl.arange(0, BLOCK_P)
        partial_ptrs = partials_ptr + tl.min(offs) * num_partials + offs_p
        partials = tl.load(partial_ptrs, mask=offs_p < num_partials, other=0.0)
        amax = tl.max(partials, axis=0) + tl.zeros([1, 1], tl.float32)
        scale = _scale_for(amax, POWER_OF_TWO, LIMIT)
        is_first = (tl.min(column) == 0) & ((CELL_M == 1) | (tl.min(row) == 0))
        tl.store(scale_ptr + offs, scale, mask=is_cell & is_first)
    else:
        scale = _scale_for(tl.max(tl.max(_finite(x), axis=3), axis=1), POWER_OF_TWO, LIMIT)
        tl.store(scale_ptr + offs, scale, mask=is_cell)
    y = tl.reshape(x * tl.div_rn(1.0, scale)[:, None, :, None], [BLOCK_M, BLOCK_K])
    codes = encode_e5m2(y) if LIMIT > 448.0 else encode_e4m3(y, NATIVE_FP8)
    tl.store(values_ptr + _offsets(row, column, stride_values), codes, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_partials"])
def _partial_maxima_kernel(
    x_ptr,  # [M, K]
    partials_ptr,  # fp32 [cells, num_partials]
    num_rows,  # of a cell
    num_columns,
    stride_x,
    num_partials,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """max |x| of every ``num_partials``-th tile of a cell of whole rows, where that is finite."""
    cell, first_tile = tl.program_id(0) // num_partials, tl.program_id(0) % num_partials
    tiles_k = tl.cdiv(num_columns, BLOCK_K)
    amax = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for tile in range(first_tile, tl.cdiv(num_rows, BLOCK_M) * tiles_k, num_partials):
        row = tile // tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tile % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
        offs = _offsets(cell.to(tl.int64) * num_rows + row, column, stride_x)
        x = tl.load(x_ptr + offs, mask=mask, other=0.0)
        amax = tl.maximum(amax, _finite(x.to(tl.float32)))
    amax = tl.max(tl.max(amax, axis=1), axis=0)
    tl.store(partials_ptr + tl.program_id(0), amax)


@triton.jit(do_not_specialize=["num_rows"])
def _dequantize_fp8_kernel(
    values_ptr,  # fp8 codes in uint8 [M, K]
    scale_ptr,  # fp32 [cells of M, cells of K]
    out_ptr,  # [M, K]
    num_rows,
    num_columns,
    stride_x,  # of out
    stride_values,
    scale_columns,
    CELL_M: tl.constexpr,  # rows and columns of a scale; 0: all
    CELL_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_E5M2: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """One tile."""
    row, column, mask = _tile(num_rows, num_columns, BLOCK_M, BLOCK_K)
    codes = tl.load(values_ptr + _offsets(row, column, stride_values), mask=mask, other=0)
    x = decode_e5m2(codes) if IS_E5M2 else decode_e4m3(codes, tl.float32, NATIVE_FP8)
    offs, is_cell = _cell_offsets(row, column, num_rows, scale_columns, CELL_M, CELL_K)
    scale = tl.load(scale_ptr + offs, mask=is_cell, other=1.0)
    x = tl.reshape(_by_cell(x, CELL_M, CELL_K) * scale[:, None, :, None], [BLOCK_M, BLOCK_K])
    out = round_to(x, out_ptr.dtype.element_ty)
    tl.store(out_ptr + _offsets(row, column, stride_x), out, mask=mask)


@triton.jit
def _tile(num_rows, num_columns, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Rows and columns of a program's tile, and which elements are there."""
    tiles_k = tl.cdiv(num_columns, BLOCK_K)
    row = tl.program_id(0) // tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    return row, column, (row < num_rows)[:, None] & (column < num_columns)[None, :]


@triton.jit
def _offsets(row, column, stride):
    return row.to(tl.int64)[:, None] * stride + column[None, :]


@triton.constexpr_function
def _cells_of(block, cell):
    """Cells of a tile along one dim; 1 where the tile lies in one."""
    return max(block // cell, 1) if cell > 0 else 1


@triton.jit
def _by_cell(x, CELL_M: tl.constexpr, CELL_K: tl.constexpr):
    """A tile as ``[cells, rows, cells, columns]``."""
    ROWS: tl.constexpr = _cells_of(x.shape[0], CELL_M)
    COLUMNS: tl.constexpr = _cells_of(x.shape[1], CELL_K)
    return tl.reshape(x, [ROWS, x.shape[0] // ROWS, COLUMNS, x.shape[1] // COLUMNS])


@triton.jit
def _cell_offsets(row, column, num_rows, scale_columns, CELL_M: tl.constexpr, CELL_K: tl.constexpr):
    """Where the scales of a tile's cells lie, and which are there."""
    cell_row = tl.arange(0, _cells_of(row.shape[0], CELL_M))
    cell_column = tl.arange(0, _cells_of(column.shape[0], CELL_K))
    if CELL_M > 0:
        cell_row += tl.min(row) // CELL_M
    if CELL_K > 0:
        cell_column += tl.min(column) // CELL_K
    mask = (cell_row * CELL_M < num_rows)[:, None] & (cell_column < scale_columns)[None, :]
    return cell_row.to(tl.int64)[:, None] * scale_columns + cell_column[None, :], mask


@triton.jit
def _finite(x):
    """Magnitudes; 0 of what is infinite or NaN, which has no say in a scale."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def _scale_for(amax, POWER_OF_TWO: tl.constexpr, LIMIT: tl.constexpr):
    if POWER_OF_TWO:
        return power_of_two_scale(amax, LIMIT, _MIN_SCALE)
    else:
        return tl.maximum(tl.div_rn(amax, LIMIT), _MIN_SCALE)


class _Tile(NamedTuple):
    rows: int
    columns: int

    @property
    def num_warps(self) -> int:
        """A thread has 16 elements, of tiles that are not small or long."""
        return min(max(self.rows * self.columns // 512, 1), 16)


_LONG = _Tile(1, 4096)  # of a row that has several


def _choose_tile(num_columns: int, cell: tuple[int, int], in_tile: bool) -> _Tile:
    """Whole cells if they are to lie in a tile; else some 4096 elements."""
    if in_tile and cell == (128, 128):
        return _Tile(128, 128)
    columns = triton.next_power_of_2(num_columns)
    if not in_tile or cell[1] == 128:
        columns = min(max(columns, 128), 1024)
    return _Tile(max(4096 // columns, 1), columns)


def quantize_fp8(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    cell: tuple[int, int],
    is_static: bool,
    power_of_two: bool,
) -> None:
    """One launch, or two where cells are larger than a tile.

    ``kvkern.quantize_fp8`` has checked the arguments; none is empty.
    """
    gpu = gpu_of(x.device)
    partials = None
    if not is_static and not _fits_tile(x, cell):
        grid, arguments, options = _maxima_call(x, cell)
        partials = arguments["partials_ptr"]
        _partial_maxima_kernel[grid](**arguments, **options)
    grid, arguments, options = _quantize_call(
        x, values, scale, partials, cell, is_static, power_of_two, gpu
    )
    _quantize_fp8_kernel[grid](**arguments, **options)


def dequantize_fp8(values: Tensor, scale: Tensor, cell: tuple[int, int], out: Tensor) -> None:
    """Launch once. ``kvkern.dequantize_fp8`` has checked the arguments; none is empty."""
    grid, arguments, options = _dequantize_call(values, scale, cell, out, gpu_of(out.device))
    _dequantize_fp8_kernel[grid](**arguments, **options)


def _fits_tile(x: Tensor, cell: tuple[int, int]) -> bool:
    """Whether a program has whole cells: all but tensors, and rows that are too long."""
    return cell in ((1, 128), (128, 128)) or (cell[0] == 1 and x.shape[1] <= _LONGEST_ROW)


def _most_partials(cell: tuple[int, int]) -> int:
    return _MOST_PARTIALS_OF_ROW if cell[0] == 1 else _MOST_PARTIALS


def _maxima_call(x: Tensor, cell: tuple[int, int]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    num_rows, num_columns = cell
    tile = _LONG if num_rows == 1 else _choose_tile(num_columns, cell, in_tile=False)
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    num_cells = triton.cdiv(x.shape[0], num_rows)
    num_partials = min(num_tiles, _most_partials(cell))
    arguments = {
        "x_ptr": x,
        "partials_ptr": torch.empty(num_cells, num_partials, device=x.device),
        "num_rows": num_rows,
        "num_columns": num_columns,
        "stride_x": x.stride(0),
        "num_partials": num_partials,
        "BLOCK_M": tile.rows,
        "BLOCK_K": tile.columns,
    }
    return (num_partials * num_cells,), arguments, {"num_warps": tile.num_warps}


def _quantize_call(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    partials: Tensor | None,
    cell: tuple[int, int],
    is_static: bool,
    power_of_two: bool,
    gpu: Gpu,
) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
    num_rows, num_columns = x.shape
    in_tile = not is_static and partials is None
    is_long_row = partials is not None and cell[0] == 1
    tile = _LONG if is_long_row else _choose_tile(num_columns, cell, in_tile)
    arguments = {
        "x_ptr": x,
        "values_ptr": values.view(torch.uint8),
        "scale_ptr": scale,
        "partials_ptr": partials,
        **_shared_fields(x, values, scale, cell, tile),
        "num_partials": 0 if partials is None else partials.shape[1],
        "BLOCK_P": _most_partials(cell),
        "IS_STATIC": is_static,
        "POWER_OF_TWO": power_of_two,
        "LIMIT": torch.finfo(values.dtype).max,
        "NATIVE_FP8": gpu.has_fp8,
    }
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    return (num_tiles,), arguments, {"num_warps": tile.num_warps}


def _dequantize_call(
    values: Tensor, scale: Tensor, cell: tuple[int, int], out: Tensor, gpu: Gpu
) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
    num_rows, num_columns = out.shape
    tile = _choose_tile(num_columns, cell, in_tile=False)
    arguments = {
        "values_ptr": values.view(torch.uint8),
        "scale_ptr": scale,
        "out_ptr": out,
        **_shared_fields(out, values, scale, cell, tile),
        "IS_E5M2": values.dtype == torch.float8_e5m2,
        "NATIVE_FP8": gpu.has_fp8,
    }
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    return (num_tiles,), arguments, {"num_warps": tile.num_warps}


def _shared_fields(
    x: Tensor, values: Tensor, scale: Tensor, cell: tuple[int, int], tile: _Tile
) -> dict[str, Any]:
    num_rows, num_columns = x.shape
    return {
        "num_rows": num_rows,
        "num_columns": num_columns,
        "stride_x": x.stride(0),
        "stride_values": values.stride(0),
        "scale_columns": scale.shape[1],
        "CELL_M": cell[0] if cell[0] in (1, 128) else 0,
        "CELL_K": 128 if cell[1] == 128 else 0,
        "BLOCK_M": tile.rows,
        "BLOCK_K": tile.columns,
    }


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each granularity and dtype; long rows; static scales and powers of two."""
    gpu = Gpu(capability, num_sms=132)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for name, cell, num_columns, dtype, fp8, is_static, power_of_two in (
        ("tensor", (256, 7168), 7168, bf16, e4m3, False, False),
        ("tensor", (256, 7168), 7168, bf16, e4m3, True, False),
        ("row", (1, 7168), 7168, bf16, e4m3, False, False),
        ("row", (1, 18432), 18432, fp32, e4m3, False, False),
        ("row", (1, 65536), 65536, bf16, e4m3, False, False),
        ("group", (1, 128), 7168, bf16, e4m3, False, False),
        ("group", (1, 128), 7168, fp16, e5m2, False, True),
        ("group", (1, 128), 7168, fp32, e4m3, True, False),
        ("block", (128, 128), 7168, bf16, e4m3, False, True),
        ("block", (128, 128), 7168, fp32, e5m2, False, False),
    ):
        x = torch.empty(256, num_columns, dtype=dtype, device="meta")
        values = torch.empty_like(x, dtype=fp8)
        scale = torch.empty(
            triton.cdiv(256, cell[0]), triton.cdiv(num_columns, cell[1]), device="meta"
        )
        label = f"{name}-{dtype}-{fp8}-K{num_columns}".replace("torch.", "")
        label += "-static" * is_static + "-pow2" * power_of_two
        partials = None
        if not is_static and not _fits_tile(x, cell):
            _, arguments, options = _maxima_call(x, cell)
            partials = arguments["partials_ptr"]
            yield config_of_call(_partial_maxima_kernel, f"maxima-{label}", arguments, options)
        _, arguments, options = _quantize_call(
            x, values, scale, partials, cell, is_static, power_of_two, gpu
        )
        yield config_of_call(_quantize_fp8_kernel, label, arguments, options)
        if not is_static:
            _, arguments, options = _dequantize_call(values, scale, cell, x, gpu)
            yield config_of_call(_dequantize_fp8_kernel, f"dequantize-{label}", arguments, options)
