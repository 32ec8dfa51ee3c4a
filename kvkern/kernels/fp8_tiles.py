"""Rows in registers, in chunks, and how they are rounded to fp8: what the quantising kernels share.

A chunk is ``[rows, cells, columns of a cell]``, its width a power of two; a row takes as many as it
needs, where one that is wide enough might be half empty. What shares a scale, CELL, is
``"tensor"``, ``"row"``, ``"group"`` (128 columns of a row) or ``"block"`` (128 x 128).
"""

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkern.kernels.device import Gpu
from kvkern.kernels.numerics import (
    encode_e4m3,
    encode_e5m2,
    finite_magnitude,
    inverse_of,
    over_constant,
    power_of_two_above,
)
from kvkern.layout import MIN_TOKEN_SCALE

Cell = Literal["tensor", "row", "group", "block"]
LONGEST_ROW = 32768  # columns of a row that a program keeps in registers
# columns and other strides are a layer's own; these are a step's, and compile nothing new
OF_A_STEP = ("num_rows", "stride_scale_row", "stride_scale_column")
_MOST_CHUNKS = 9  # of a row, before it takes more warps
_EVEN_CHUNKS = 8  # of what may be cut anywhere
_MIN_SCALE: tl.constexpr = tl.constexpr(MIN_TOKEN_SCALE)
_NO_EVICTION: tl.constexpr = tl.constexpr("")  # "evict_first": nobody reads it again


class Tile(NamedTuple):
    """What a program has."""

    rows: int
    columns: int  # of a chunk
    chunks: int
    num_warps: int

    def num_tiles(self, num_rows: int, num_columns: int) -> int:
        """With those that are partly there."""
        tiles_k = -(-num_columns // (self.columns * self.chunks))
        return -(-num_rows // self.rows) * tiles_k

    def fields(self, num_columns: int) -> dict[str, int]:
        """What a kernel has to know of it."""
        return {
            "NUM_COLUMNS": num_columns,
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "CHUNKS": self.chunks,
        }

    def options(self, gpu: Gpu) -> dict[str, Any]:
        """What it is compiled with; a sum that a compiler fuses would not be the reference's."""
        return {"num_warps": self.num_warps, "enable_fp_fusion": False, **gpu.early_start}


def choose_tile(num_columns: int, within: Cell, thread: int = 8) -> Tile:
    """``within``: what must lie in a tile whole; nothing of a ``"tensor"``.

    A row of more than ``LONGEST_ROW`` spills, where it has to be whole nevertheless. ``thread``:
    consecutive elements of a thread, 16 bytes of what has most.
    """
    if within == "block":
        return Tile(128, 128, 1, 16)
    is_short = within == "row" and num_columns <= _EVEN_CHUNKS * 32 * thread
    if within == "group" or is_short:  # a warp: nobody waits for others to find a scale
        return _narrow_tile(num_columns, 1, thread)
    if within == "row":
        fitting = (n for n in (4, 8) if num_columns <= _MOST_CHUNKS * 32 * n * thread)
        num_warps = next(fitting, 16)
        columns = 32 * num_warps * thread
        return Tile(1, columns, triton.cdiv(num_columns, columns), num_warps)
    return _narrow_tile(num_columns, 4, thread)


def _narrow_tile(num_columns: int, num_warps: int, thread: int) -> Tile:
    """Up to eight chunks, as evenly as a row takes them; or as many short rows."""
    width = 32 * num_warps * thread
    columns = min(max(triton.next_power_of_2(num_columns), 128), width)
    num_chunks = triton.cdiv(num_columns, columns)
    chunks = triton.cdiv(num_chunks, triton.cdiv(num_chunks, _EVEN_CHUNKS))
    rows = _EVEN_CHUNKS * width // (columns * triton.next_power_of_2(chunks))
    return Tile(rows, columns, chunks, num_warps)


def quantizing_fields(
    values: Tensor,
    scale: Tensor,
    granularity: Cell,
    tile: Tile,
    is_static: bool,
    power_of_two: bool,
    gpu: Gpu,
) -> dict[str, Any]:
    """The arguments of every kernel that quantises."""
    return {
        "values_ptr": values.view(torch.uint8),
        "scale_ptr": scale,
        "stride_values": values.stride(0),
        "stride_scale_row": scale.stride(0),
        "stride_scale_column": scale.stride(1),
        **tile.fields(values.shape[1]),
        "CELL": granularity,
        "IS_STATIC": is_static,
        "POWER_OF_TWO": power_of_two,
        "LIMIT": torch.finfo(values.dtype).max,
        "NATIVE_FP8": gpu.has_fp8,
        "IS_EARLY": gpu.has_early_start,
    }


def scale_shape(granularity: Cell, num_rows: int, num_columns: int) -> tuple[int, int]:
    """Of the variants that are compiled without a tensor."""
    return {
        "tensor": (1, 1),
        "row": (num_rows, 1),
        "group": (num_rows, -(-num_columns // 128)),
        "block": (-(-num_rows // 128), -(-num_columns // 128)),
    }[granularity]


@triton.jit
def tile_at(
    tile,
    NUM_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Its first row and first column."""
    TILES_K: tl.constexpr = (NUM_COLUMNS + COLUMNS * CHUNKS - 1) // (COLUMNS * CHUNKS)
    return tile // TILES_K * ROWS, tile % TILES_K * (COLUMNS * CHUNKS)


@triton.jit
def rows_from(first_row, ROWS: tl.constexpr):
    """``[rows, 1, 1]``, in int64."""
    return (first_row + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]


@triton.jit
def columns_from(first_column, COLUMNS: tl.constexpr, CELL: tl.constexpr):
    """Of a chunk, ``[1, cells, columns of a cell]``."""
    CELLS: tl.constexpr = _cells_of(COLUMNS, CELL)
    cell, column = tl.arange(0, CELLS), tl.arange(0, COLUMNS // CELLS)
    return first_column + cell[None, :, None] * (COLUMNS // CELLS) + column[None, None, :]


@triton.constexpr_function
def _cells_of(columns, cell):
    return columns // 128 if cell in ("group", "block") else 1


@triton.jit
def load_chunks(
    ptr,
    first_row,
    first_column,
    num_rows,
    stride,
    NUM_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CELL: tl.constexpr,
    EVICTION: tl.constexpr = _NO_EVICTION,
):
    """A tile as a tuple of chunks, in the dtype that it has; 0 where nothing is."""
    row = rows_from(first_row, ROWS)
    chunks = ()
    for i in tl.static_range(CHUNKS):
        column = columns_from(first_column + i * COLUMNS, COLUMNS, CELL)
        mask = (row < num_rows) & (column < NUM_COLUMNS)
        x = tl.load(ptr + row * stride + column, mask=mask, other=0, eviction_policy=EVICTION)
        chunks = chunks + (x,)  # type: ignore[assignment]  # noqa: RUF005 (Triton has no other)
    return chunks


@triton.jit
def store_quantized(
    chunks,  # fp32, or what fp32 holds exactly
    first_row,
    first_column,
    num_rows,
    values_ptr,  # fp8 codes in uint8
    stride,
    scale_ptr,  # fp32 [cells of M, cells of K]
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
):
    """Round a tile by scales that are there, or are found and stored: then it has its cells whole.

    A scale is found once, by the program that has its cell.
    """
    if CELL == "tensor" or CELL == "row":
        inverse = _inverse_scale(
            chunks, first_row, first_column, num_rows, scale_ptr, stride_scale_row,
            stride_scale_column, NUM_COLUMNS, ROWS, COLUMNS, CHUNKS, CELL, IS_STATIC, POWER_OF_TWO,
            LIMIT,
        )  # fmt: skip
    for i in tl.static_range(CHUNKS):
        at = first_column + i * COLUMNS
        if CELL == "group" or CELL == "block":
            inverse = _inverse_scale(
                (chunks[i],), first_row, at, num_rows, scale_ptr, stride_scale_row,
                stride_scale_column, NUM_COLUMNS, ROWS, COLUMNS, 1, CELL, IS_STATIC, POWER_OF_TWO,
                LIMIT,
            )  # fmt: skip
        store_codes(
            chunks[i].to(tl.float32) * inverse, first_row, at, num_rows, values_ptr, stride,
            NUM_COLUMNS, ROWS, COLUMNS, CELL, LIMIT, NATIVE_FP8,
        )  # fmt: skip


@triton.jit
def store_codes(
    x,
    first_row,
    first_column,
    num_rows,
    values_ptr,
    stride,
    NUM_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CELL: tl.constexpr,
    LIMIT: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """A chunk, in units of its scales."""
    row, column = rows_from(first_row, ROWS), columns_from(first_column, COLUMNS, CELL)
    codes = encode_e5m2(x, NATIVE_FP8) if LIMIT > 448.0 else encode_e4m3(x, NATIVE_FP8)
    mask = (row < num_rows) & (column < NUM_COLUMNS)
    tl.store(values_ptr + row * stride + column, codes, mask=mask)


@triton.jit
def _inverse_scale(
    chunks,
    first_row,
    first_column,
    num_rows,
    scale_ptr,
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
):
    """1 / scale of the cells of chunks, by which an element is multiplied."""
    if IS_STATIC:  # of any size
        scale = load_scale(
            scale_ptr, first_row, first_column, num_rows, stride_scale_row, stride_scale_column,
            NUM_COLUMNS, ROWS, COLUMNS, CELL,
        )  # fmt: skip
        return tl.div_rn(1.0, scale)
    else:
        largest = tl.max(largest_of(chunks, CHUNKS), axis=2, keep_dims=True)
        if CELL == "block":
            largest = tl.max(largest, axis=0, keep_dims=True)
        scale = scale_for(largest, POWER_OF_TWO, LIMIT)
        offs, mask = _scale_at(
            first_row, first_column, num_rows, stride_scale_row, stride_scale_column, NUM_COLUMNS,
            ROWS, COLUMNS, CELL,
        )  # fmt: skip
        tl.store(scale_ptr + offs, scale, mask=mask)
        return inverse_of(scale)


@triton.jit
def largest_of(chunks, CHUNKS: tl.constexpr):
    """Finite magnitudes, element by element: a thread's own."""
    largest = finite_magnitude(chunks[0].to(tl.float32))
    for i in tl.static_range(1, CHUNKS):
        largest = tl.maximum(largest, finite_magnitude(chunks[i].to(tl.float32)))
    return largest


@triton.jit
def scale_for(amax, POWER_OF_TWO: tl.constexpr, LIMIT: tl.constexpr):
    """At least the smallest, also where nothing is finite."""
    scale = tl.maximum(over_constant(amax, LIMIT), _MIN_SCALE)
    return power_of_two_above(scale) if POWER_OF_TWO else scale


@triton.jit
def load_scale(
    scale_ptr,
    first_row,
    first_column,
    num_rows,
    stride_scale_row,
    stride_scale_column,
    NUM_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CELL: tl.constexpr,
):
    """Of a chunk's cells; of any of a row's chunks where a cell is a row or more."""
    offs, mask = _scale_at(
        first_row, first_column, num_rows, stride_scale_row, stride_scale_column, NUM_COLUMNS, ROWS,
        COLUMNS, CELL,
    )  # fmt: skip
    return tl.load(scale_ptr + offs, mask=mask, other=1.0)


@triton.jit
def _scale_at(
    first_row,
    first_column,
    num_rows,
    stride_row,
    stride_column,
    NUM_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CELL: tl.constexpr,
):
    """Where the scales of a chunk lie, ``[rows or 1, cells, 1]``, and which are there."""
    SCALES_K: tl.constexpr = (NUM_COLUMNS + 127) // 128
    row = rows_from(first_row, ROWS)
    first_cell = first_column // 128
    offs_cell = tl.arange(0, _cells_of(COLUMNS, CELL))[None, :, None]
    cell = first_cell + offs_cell
    # the first cell apart: the rest is the same for all chunks, and this for all threads
    first, offs_k = first_cell.to(tl.int64) * stride_column, offs_cell.to(tl.int64) * stride_column
    if CELL == "group":
        return row * stride_row + offs_k + first, (row < num_rows) & (cell < SCALES_K)
    elif CELL == "block":  # a tile's rows are in one
        return first_row // 128 * stride_row + offs_k + first, cell < SCALES_K
    elif CELL == "row":
        return row, row < num_rows
    else:
        return cell * 0, cell >= 0
