"""rms_norm_quant_fp8: values = fp8(y / scale), y = x / sqrt(mean(x^2) + eps) * gamma."""

from torch import Tensor

from kvkern.reference.quantize_fp8 import quantize_fp8
from kvkern.reference.write_kv import rms_norm


def rms_norm_quant_fp8(
    x: Tensor,  # [M, K]
    gamma: Tensor,  # [K]
    residual: Tensor | None,  # [M, K]
    values: Tensor,  # [M, K]
    scale: Tensor,  # fp32 [cells of M, cells of K]
    granularity: str,
    is_static: bool,
    power_of_two: bool,
    eps: float,
) -> None:
    """The specification; ``kvkern.rms_norm_quant_fp8`` states the contract."""
    if residual is not None:
        residual.copy_(x.float() + residual.float())
        x = residual
    y = rms_norm(x.float(), gamma, eps, round_hf=False)
    quantize_fp8(y, values, scale, granularity, is_static, power_of_two)
