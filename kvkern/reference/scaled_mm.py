"""scaled_mm: out = (a * scale_a) @ (b * scale_b) + bias, each element by the scale of its cell."""

import itertools

import torch
from torch import Tensor


def scaled_mm(
    a: Tensor,  # [G, M, K]; grouped: [1, T, K]
    b: Tensor,  # [G, K, N]
    scale_a: Tensor,  # fp32 [G, cells of M, cells of K]; grouped: [1, ...]
    scale_b: Tensor,  # fp32 [G, cells of K, cells of N]
    cell_a: tuple[int, int],  # rows and columns of a scale; 0: all
    cell_b: tuple[int, int],
    row_offsets: Tensor | None,  # int32 [G + 1]
    bias: Tensor | None,  # [G, N]
    is_exact: bool,
    out: Tensor,  # [G, M, N]; grouped: [1, T, N]
) -> None:
    """The specification; ``kvkern.scaled_mm`` states the contract."""
    dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    a = a.to(dtype) * spread(scale_a, cell_a, a)
    if row_offsets is None:
        experts = [(index, slice(None)) for index in range(len(a))]
    else:
        ends = row_offsets.tolist()
        experts = [(0, slice(start, end)) for start, end in itertools.pairwise(ends)]
        out.zero_()
    for expert, (index, rows) in enumerate(experts):
        weight = b[expert].to(dtype) * spread(scale_b[expert], cell_b, b[expert])
        product = a[index, rows] @ weight
        if bias is not None:
            product += bias[expert].to(dtype)
        out[index, rows] = product.to(out.dtype)


def spread(scale: Tensor, cell: tuple[int, int], x: Tensor) -> Tensor:
    """A scale for each element, or one for all of a dim."""
    for dim, size in zip((-2, -1), cell, strict=True):
        if size > 1:
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, x.shape[dim])
    return scale
