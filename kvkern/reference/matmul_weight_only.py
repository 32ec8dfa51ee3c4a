"""matmul_w8a16, matmul_w4a16: out = x @ ((stored - zero) * scale).T + bias."""

import torch
from torch import Tensor

from kvkern.reference.quantize_int import dequantize_int


def matmul_weight_only(
    x: Tensor,  # [M, K]
    values: Tensor,  # [chunks, N, 128]
    scale: Tensor,  # [groups, N]
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    out: Tensor,  # [M, N]
) -> None:
    """The specification; ``kvkern.matmul_w8a16`` and ``matmul_w4a16`` state the contract."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    weight = torch.empty(out.shape[1], x.shape[1], device=x.device)
    dequantize_int(values, scale, zero, group_size, weight)
    result = x.to(dtype) @ weight.to(dtype).T
    out.copy_(result if bias is None else result + bias.to(dtype))
