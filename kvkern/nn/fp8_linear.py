"""FP8Linear: a linear layer that multiplies in fp8, and never by a weight of before a change."""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from kvkern.errors import ArgumentError
from kvkern.nn.quantized_linear import QuantizedLinear
from kvkern.ops.matmul import scaled_mm
from kvkern.ops.quantize import QuantizedFP8, dequantize_fp8, quantize_fp8

Scaling = Literal["block", "row"]
_OF_INPUT: dict[Scaling, Literal["group", "row"]] = {"block": "group", "row": "row"}


class FP8Linear(QuantizedLinear[QuantizedFP8]):
    """``x @ weight.T + bias``, both sides rounded to e4m3, sums exact.

    The weight has a scale for each block of 128 x 128 and the input one for each 128 columns of a
    row (``scaling="block"``, as DeepSeek-V3's checkpoints have it), or each row of either has one
    (``scaling="row"``).

    With its master weight the layer's parameters and state dict are those of ``nn.Linear``. The
    fp8 copy that it multiplies by is made at the first call, and anew when the master has changed:
    by an optimizer, in place, replaced, moved or loaded. What PyTorch does not count as a change,
    writing through ``weight.data`` or replaying a CUDA graph, needs ``refresh()``. It counts none
    of a tensor of inference mode: such a weight is quantised at each call. The call that makes the
    copy writes it on its stream: those on other streams are to be ordered after it, as after
    whatever writes a tensor.

    Without it (``keep_master=False``, ``release_master()``) ``weight`` is e4m3 and
    ``weight_scale_inv`` its fp32 descales; both are in the state dict, under the names that
    DeepSeek-V3's checkpoints give them. A state dict of either kind can be loaded into either:
    fp8 is taken as it is, and replaces a master; a float weight is quantised where there is none.

    Gradients reach the input as if it had not been rounded, and the master and the bias too.

    Args:
        in_features, out_features, bias, device, dtype: as in ``nn.Linear``.
        scaling: ``"block"`` or ``"row"``.
        keep_master: whether there is a weight in ``dtype`` beside the one in fp8.

    Raises:
        ArgumentError: no such scaling.
        ShapeMismatchError: an input whose last dim is not ``in_features``; a master replaced by one
            of another shape.
        UnsupportedDtypeError: an input that is not bf16, fp16 or fp32.

    Source: arXiv:2412.19437, section 3.3.
    """

    weight_scale_inv: Tensor | None
    _stored = torch.float8_e4m3fn
    _names = ("weight", "weight_scale_inv")
    _options = ("scaling",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        scaling: Scaling = "block",
        keep_master: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if scaling not in get_args(Scaling):
            raise ArgumentError(f"scaling: want block or row, got {scaling!r}")
        self.scaling = scaling
        super().__init__(in_features, out_features, bias, keep_master, device, dtype)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, scaling: Scaling = "block", keep_master: bool = True
    ) -> "FP8Linear":
        """The same layer in fp8: it shares the parameters of ``linear``, none is copied."""
        return cls._sharing(linear, keep_master, scaling=scaling)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        rows, columns = self.out_features, self.in_features
        scales = (rows, 1) if self.scaling == "row" else (-(-rows // 128), -(-columns // 128))
        return {"weight": (rows, columns), "weight_scale_inv": scales}

    def _as_quantized(self, tensors: dict[str, Tensor]) -> QuantizedFP8:
        return QuantizedFP8(tensors["weight"], tensors["weight_scale_inv"])

    def _quantize(self, weight: Tensor) -> QuantizedFP8:
        return quantize_fp8(weight, granularity=self.scaling)

    def _dequantize(self, weight: QuantizedFP8, dtype: torch.dtype) -> Tensor:
        return dequantize_fp8(*weight, dtype=dtype)

    def _multiply(self, x: Tensor, weight: QuantizedFP8, bias: Tensor | None) -> Tensor:
        granularity = _OF_INPUT[self.scaling]
        has_groups = granularity == "group"
        a, scale = quantize_fp8(x, granularity=granularity, column_major_scales=has_groups)
        return scaled_mm(a, weight.values.T, scale, weight.scale.T, bias=bias, out_dtype=x.dtype)
