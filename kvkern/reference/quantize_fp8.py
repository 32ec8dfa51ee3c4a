"""quantize_fp8: values = fp8(x / scale), scale = amax(cell) / max; dequantize_fp8: its inverse."""

import torch
from torch import Tensor

from kvkern.layout import MIN_TOKEN_SCALE
from kvkern.reference.paging import over, power_of_two_above, round_to


def quantize_fp8(
    x: Tensor,  # [M, K]
    values: Tensor,  # [M, K]
    scale: Tensor,  # fp32 [cells of M, cells of K]
    granularity: str,
    is_static: bool,
    power_of_two: bool,
) -> None:
    """The specification; ``kvkern.quantize_fp8`` states the contract."""
    x, cell = x.float(), _cell_of(x, granularity)
    if not is_static:
        amax = _cells(x.abs().where(x.isfinite(), 0.0), cell).amax(dim=(2, 3))
        found = over(amax, torch.finfo(values.dtype).max).clamp(min=MIN_TOKEN_SCALE)
        scale.copy_(power_of_two_above(found) if power_of_two else found)
    values.copy_(round_to(x * _spread(1.0 / scale, cell, x), values.dtype))


def dequantize_fp8(values: Tensor, scale: Tensor, granularity: str, out: Tensor) -> None:
    """The specification; ``kvkern.dequantize_fp8`` states the contract."""
    out.copy_(values.float() * _spread(scale, _cell_of(values, granularity), values))


def _cell_of(x: Tensor, granularity: str) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    num_rows, num_columns = x.shape
    return {
        "tensor": (num_rows, num_columns),
        "row": (1, num_columns),
        "group": (1, 128),
        "block": (128, 128),
    }[granularity]


def _cells(x: Tensor, cell: tuple[int, int]) -> Tensor:
    """``[cells of M, cells of K, rows, columns]``; what is beyond the edge is 0."""
    (num_rows, num_columns), (rows, columns) = x.shape, cell
    x = torch.nn.functional.pad(x, (0, -num_columns % columns, 0, -num_rows % rows))
    cells: Tensor = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)
    return cells


def _spread(scale: Tensor, cell: tuple[int, int], x: Tensor) -> Tensor:
    """A scale for each element."""
    rows, columns = cell
    spread = scale.repeat_interleave(rows, 0)[: x.shape[0]]
    return spread.repeat_interleave(columns, 1)[:, : x.shape[1]]
