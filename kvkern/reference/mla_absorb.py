"""mla_absorb: out[t, h] = x[t, h] @ (w[h] * scale[h])."""

import torch
from torch import Tensor

from kvkern.reference.scaled_mm import spread


def mla_absorb(
    x: Tensor,  # [T, H, K]
    w: Tensor,  # [H, K, N]
    scale: Tensor | None,  # fp32 [H, cells of K, cells of N]; or [1, 1, 1]
    cell: tuple[int, int],  # rows and columns of a scale; 0: all
    out: Tensor,  # [T, H, N]
) -> None:
    """The specification; ``kvkern.mla_absorb`` states the contract."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = w.to(dtype)
    if scale is not None:
        weight = weight * spread(scale, cell, w)
    out.copy_(torch.einsum("thk,hkn->thn", x.to(dtype), weight))
