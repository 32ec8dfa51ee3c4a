"""matmul_w8a8: out = (x8 @ (stored - zero).T) * x_scale * scale + bias, x8 = round(x / x_scale)."""

import torch
from torch import Tensor

from kvkern.layout import MIN_TOKEN_SCALE
from kvkern.reference.paging import over
from kvkern.reference.quantize_int import unpack

_LARGEST = 127


def matmul_w8a8(
    x: Tensor, values: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, out: Tensor
) -> None:
    """The specification; ``kvkern.matmul_w8a8`` states the contract."""
    codes, x_scale = quantize_rows(x)
    weight = unpack(values, 8, x.shape[1]).double()
    if zero is not None:
        weight = weight - zero.double().T
    total = codes.double() @ weight.T  # integers, exact
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    result = total.to(dtype) * scale.to(dtype) * x_scale.to(dtype)
    out.copy_(result if bias is None else result + bias.to(dtype))


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of -127 to 127, and a scale a row: NaN for one that is not finite."""
    x = x.float()
    is_finite = x.isfinite()
    amax = x.abs().where(is_finite, 0.0).amax(dim=1, keepdim=True)
    scale = over(amax, _LARGEST).clamp(min=MIN_TOKEN_SCALE)
    codes = torch.round(x.where(is_finite, 0.0) * (1.0 / scale)).clamp(-_LARGEST, _LARGEST)
    return codes, scale.where(is_finite.all(dim=1, keepdim=True), torch.nan)
