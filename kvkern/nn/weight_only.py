"""W8A16Linear, W4A16Linear: linear layers whose weight is read in 8 or 4 bits, and never stale."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from kvkern.nn.quantized_linear import Quantized, QuantizedLinear
from kvkern.ops.weight_only import (
    QuantizedInt4,
    QuantizedInt8,
    check_group_size,
    dequantize_int4,
    dequantize_int8,
    matmul_w4a16,
    matmul_w8a16,
    quantize_int4,
    quantize_int8,
    stored_shapes,
)


class _WeightOnlyLinear(QuantizedLinear[Quantized]):
    """With codes, their scales, and zero points if it is not symmetric."""

    weight_scale: Tensor | None
    weight_zero: Tensor | None
    _names = ("weight", "weight_scale", "weight_zero")
    _options: ClassVar[tuple[str, ...]] = ("symmetric",)
    _bits: ClassVar[int]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        symmetric: bool = True,
        keep_master: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.symmetric = symmetric
        super().__init__(in_features, out_features, bias, keep_master, device, dtype)

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.in_features

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        values, scale = stored_shapes(
            self.out_features, self.in_features, self._bits, self.group_size
        )
        shapes = {"weight": values, "weight_scale": scale}
        return shapes if self.symmetric else {**shapes, "weight_zero": scale}


class W8A16Linear(_WeightOnlyLinear[QuantizedInt8]):
    """``x @ weight.T + bias`` with a weight in 8 bits, by a scale for each output.

    With its master weight the layer's parameters and state dict are those of ``nn.Linear``. The
    quantised copy that it multiplies by is made at the first call, and anew when the master has
    changed: by an optimizer, in place, replaced, moved or loaded. What PyTorch does not count as
    a change, writing through ``weight.data`` or replaying a CUDA graph, needs ``refresh()``. It
    counts none of a tensor of inference mode: such a weight is quantised at each call. The call
    that makes the copy writes it on its stream: those on other streams are to be ordered after it,
    as after whatever writes a tensor.

    Without it (``keep_master=False``, ``release_master()``) ``weight`` is what ``quantize_int8``
    stores, ``weight_scale`` its fp32 descales and ``weight_zero`` its zero points, if it is not
    symmetric; all are in the state dict. A state dict of either kind can be loaded into either:
    stored weights are taken as they are, and replace a master; a float weight is quantised where
    there is none.

    Gradients reach the input by the weight that was multiplied by, and the master and the bias too.

    Args:
        in_features, out_features, bias, device, dtype: as in ``nn.Linear``.
        symmetric: whether zero points are 0.
        keep_master: whether there is a weight in ``dtype`` beside the quantised one.

    Raises:
        ShapeMismatchError: an input whose last dim is not ``in_features``; a master replaced by one
            of another shape.
        UnsupportedDtypeError: an input that is neither bf16 nor fp16.

    Source: arXiv:2208.07339, section 2.
    """

    _stored, _bits = torch.int8, 8

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, symmetric: bool = True, keep_master: bool = True
    ) -> "W8A16Linear":
        """The same layer in 8 bits: it shares the parameters of ``linear``, none is copied."""
        return cls._sharing(linear, keep_master, symmetric=symmetric)

    def _as_quantized(self, tensors: dict[str, Tensor]) -> QuantizedInt8:
        values, scale = tensors["weight"], tensors["weight_scale"]
        return QuantizedInt8(values, scale, tensors.get("weight_zero"), self.in_features)

    def _quantize(self, weight: Tensor) -> QuantizedInt8:
        return quantize_int8(weight, symmetric=self.symmetric)

    def _dequantize(self, weight: QuantizedInt8, dtype: torch.dtype) -> Tensor:
        return dequantize_int8(weight, dtype=dtype)

    def _multiply(self, x: Tensor, weight: QuantizedInt8, bias: Tensor | None) -> Tensor:
        return matmul_w8a16(x, weight, bias=bias)


class W4A16Linear(_WeightOnlyLinear[QuantizedInt4]):
    """``x @ weight.T + bias`` with a weight in 4 bits, by a scale for each group of inputs.

    All else is as with ``W8A16Linear``; ``weight`` is what ``quantize_int4`` stores where there
    is no master.

    Args:
        in_features, out_features, bias, device, dtype: as in ``nn.Linear``.
        group_size: 32, 64 or 128 inputs that share a scale, or None: all.
        symmetric: whether zero points are 8, the middle of the codes.
        keep_master: whether there is a weight in ``dtype`` beside the quantised one.

    Raises:
        ArgumentError: no such ``group_size``.
        ShapeMismatchError: an input whose last dim is not ``in_features``; a master replaced by one
            of another shape.
        UnsupportedDtypeError: an input that is neither bf16 nor fp16.

    Source: arXiv:2210.17323, section 4.
    """

    _stored, _bits = torch.uint8, 4
    _options = ("symmetric", "group_size")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group_size: int | None = 128,
        symmetric: bool = True,
        keep_master: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_group_size(group_size)
        self._group_size = group_size
        super().__init__(
            in_features,
            out_features,
            bias,
            symmetric=symmetric,
            keep_master=keep_master,
            device=device,
            dtype=dtype,
        )

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group_size: int | None = 128,
        symmetric: bool = True,
        keep_master: bool = True,
    ) -> "W4A16Linear":
        """The same layer in 4 bits: it shares the parameters of ``linear``, none is copied."""
        return cls._sharing(linear, keep_master, group_size=group_size, symmetric=symmetric)

    @property
    def group_size(self) -> int:
        return max(self.in_features, 1) if self._group_size is None else self._group_size

    def _as_quantized(self, tensors: dict[str, Tensor]) -> QuantizedInt4:
        values, scale = tensors["weight"], tensors["weight_scale"]
        return QuantizedInt4(
            values, scale, tensors.get("weight_zero"), self.in_features, self.group_size
        )

    def _quantize(self, weight: Tensor) -> QuantizedInt4:
        return quantize_int4(weight, group_size=self._group_size, symmetric=self.symmetric)

    def _dequantize(self, weight: QuantizedInt4, dtype: torch.dtype) -> Tensor:
        return dequantize_int4(weight, dtype=dtype)

    def _multiply(self, x: Tensor, weight: QuantizedInt4, bias: Tensor | None) -> Tensor:
        return matmul_w4a16(x, weight, bias=bias)
