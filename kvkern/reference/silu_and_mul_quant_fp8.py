"""silu_and_mul_quant_fp8: values = fp8(y / scale), y = silu(gate) * up."""

import torch
from torch import Tensor

from kvkern.reference.quantize_fp8 import quantize_fp8


def silu_and_mul_quant_fp8(
    x: Tensor,  # [M, 2I]
    values: Tensor,  # [M, I]
    scale: Tensor,  # fp32 [cells of M, cells of I]
    granularity: str,
    is_static: bool,
    power_of_two: bool,
) -> None:
    """The specification; ``kvkern.silu_and_mul_quant_fp8`` states the contract."""
    gate, up = x.float().chunk(2, dim=-1)
    y = torch.nn.functional.silu(gate) * up
    quantize_fp8(y, values, scale, granularity, is_static, power_of_two)
