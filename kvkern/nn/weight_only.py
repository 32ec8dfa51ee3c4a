"""W8A16Linear, W4A16Linear: linear layers whose weight is read in 8 or 4 bits, and never stale."""

import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from kvkern.errors import ShapeMismatchError
from kvkern.nn.quantized_linear import Copy
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

_Weight = QuantizedInt8 | QuantizedInt4
_Self = TypeVar("_Self", bound="_WeightOnlyLinear")


class _WeightOnlyLinear(nn.Module):
    """A linear layer with a quantised weight, made of a master that may be let go."""

    weight: Tensor
    weight_scale: Tensor | None
    weight_zero: Tensor | None
    _stored: ClassVar[torch.dtype]
    group_size: int  # inputs that share a scale

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        symmetric: bool,
        keep_master: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self._set_up(in_features, out_features, symmetric)
        if keep_master:
            weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
            self.weight = nn.Parameter(weight)
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear has it
        else:
            self._take(self._zeros(device))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
            bound = 1 / math.sqrt(in_features) if in_features > 0 else 0.0
            nn.init.uniform_(self.bias, -bound, bound)

    def _share(self: _Self, linear: nn.Linear, symmetric: bool, keep_master: bool) -> _Self:
        """Set up an instance that has not been, with the parameters of ``linear``."""
        nn.Module.__init__(self)
        self._set_up(linear.in_features, linear.out_features, symmetric)
        self.weight, self.bias = linear.weight, linear.bias
        if not keep_master:
            self.release_master()
        return self.train(linear.training)

    def _set_up(self, in_features: int, out_features: int, symmetric: bool) -> None:
        self.in_features, self.out_features = in_features, out_features
        self.symmetric = symmetric
        self.register_buffer("weight_scale", None)
        self.register_buffer("weight_zero", None)
        self._copy: Copy[_Weight] | None = None

    def _quantize(self, weight: Tensor) -> _Weight:
        raise NotImplementedError

    def _as_weight(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> _Weight:
        raise NotImplementedError

    def _zeros(self, device: torch.device | str | None) -> _Weight:
        bits = 8 if self._stored == torch.int8 else 4
        values, scale = stored_shapes(self.out_features, self.in_features, bits, self.group_size)
        return self._as_weight(
            torch.zeros(values, dtype=self._stored, device=device),
            torch.zeros(scale, device=device),
            None if self.symmetric else torch.zeros(scale, device=device),
        )

    @property
    def has_master(self) -> bool:
        return self.weight_scale is None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` in bf16 or fp16 to ``[..., out_features]`` in the same."""
        if x.shape[-1:] != (self.in_features,):
            raise ShapeMismatchError(
                f"x: want [..., in_features={self.in_features}], got {list(x.shape)}"
            )
        weight, master = self.quantized_weight(), self.weight if self.has_master else None
        rows = x.reshape(x.shape[:-1].numel(), self.in_features).contiguous()
        if torch.is_grad_enabled():
            out: Tensor = _Linear.apply(rows, master, self.bias, weight)  # type: ignore[no-untyped-call]
        else:
            out = _multiply(rows, self.bias, weight)
        return out.view(*x.shape[:-1], self.out_features)

    def quantized_weight(self) -> _Weight:
        """What the layer multiplies by: up to date."""
        if self.weight_scale is not None:
            return self._as_weight(self.weight.detach(), self.weight_scale, self.weight_zero)
        if self._copy is None or not self._copy.is_of(self.weight):
            self.refresh()
            assert self._copy is not None
        return self._copy.weight

    def refresh(self) -> None:
        """Quantise the master again, where the last copy lies, so that CUDA graphs see it."""
        if not self.has_master:
            return
        made = self._quantize(self.weight.detach().contiguous())
        old = None if self._copy is None else self._copy.weight
        if old is not None and old.values.device == made.values.device:
            for target, source in zip(old[:3], made[:3], strict=True):
                if target is not None and source is not None:
                    target.copy_(source)
            made = old
        self._copy = Copy(self.weight, made)

    def release_master(self) -> None:
        """Keep the quantised weight alone."""
        if self.has_master:
            self._take(self.quantized_weight())

    def _take(self, weight: _Weight) -> None:
        """Have no master but this weight."""
        self._copy = None
        self.weight = nn.Parameter(weight.values, requires_grad=False)
        self.weight_scale, self.weight_zero = weight.scale, weight.zero

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        weight = state_dict.get(prefix + "weight")
        is_stored = weight is not None and weight.dtype == self._stored
        if is_stored and prefix + "weight_scale" not in state_dict:
            error_msgs.append(f"{prefix}weight: want {prefix}weight_scale beside quantised weights")
            return
        if is_stored and self.has_master:
            self._take(self._zeros(self.weight.device))
        elif weight is not None and not is_stored and not self.has_master:
            made = self._quantize(weight.to(self.weight.device).contiguous())
            for name, tensor in zip(("", "_scale", "_zero"), made[:3], strict=True):
                if tensor is not None:
                    state_dict[f"{prefix}weight{name}"] = tensor
        self._copy = None
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self: _Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Self:
        """As ``nn.Module`` has it; but scales and zeros only move, as bytes: ``half()`` would
        round them."""
        self._copy = None
        scale, zero = self.weight_scale, self.weight_zero
        self.weight_scale = self.weight_zero = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.weight_scale, self.weight_zero = (
            None if given is None else fn(given.view(torch.int32)).view(torch.float32)
            for given in (scale, zero)
        )
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copy": None}  # made anew from what is copied or unpickled

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, symmetric={self.symmetric}, "
            f"keep_master={self.has_master}"
        )


class W8A16Linear(_WeightOnlyLinear):
    """``x @ weight.T + bias`` with a weight in 8 bits, by a scale for each output.

    With its master weight the layer's parameters and state dict are those of ``nn.Linear``. The
    quantised copy that it multiplies by is made at the first call, and anew when the master has
    changed: by an optimizer, in place, replaced, moved or loaded. What PyTorch does not count as
    a change, writing through ``weight.data`` or replaying a CUDA graph, needs ``refresh()``.

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
        ShapeMismatchError: an input whose last dim is not ``in_features``.
        UnsupportedDtypeError: an input that is neither bf16 nor fp16.

    Source: arXiv:2208.07339, section 2.
    """

    _stored = torch.int8

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
        super().__init__(in_features, out_features, bias, symmetric, keep_master, device, dtype)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, symmetric: bool = True, keep_master: bool = True
    ) -> "W8A16Linear":
        """The same layer in 8 bits: it shares the parameters of ``linear``, none is copied."""
        return cls.__new__(cls)._share(linear, symmetric, keep_master)

    @property
    def group_size(self) -> int:  # type: ignore[override]
        return self.in_features

    def _quantize(self, weight: Tensor) -> QuantizedInt8:
        return quantize_int8(weight, symmetric=self.symmetric)

    def _as_weight(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> QuantizedInt8:
        return QuantizedInt8(values, scale, zero, self.in_features)


class W4A16Linear(_WeightOnlyLinear):
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
        ShapeMismatchError: an input whose last dim is not ``in_features``.
        UnsupportedDtypeError: an input that is neither bf16 nor fp16.

    Source: arXiv:2210.17323, section 4.
    """

    _stored = torch.uint8

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
        super().__init__(in_features, out_features, bias, symmetric, keep_master, device, dtype)

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
        check_group_size(group_size)
        layer = cls.__new__(cls)
        layer._group_size = group_size
        return layer._share(linear, symmetric, keep_master)

    @property
    def group_size(self) -> int:  # type: ignore[override]
        return max(self.in_features, 1) if self._group_size is None else self._group_size

    def _quantize(self, weight: Tensor) -> QuantizedInt4:
        return quantize_int4(weight, group_size=self._group_size, symmetric=self.symmetric)

    def _as_weight(self, values: Tensor, scale: Tensor, zero: Tensor | None) -> QuantizedInt4:
        return QuantizedInt4(values, scale, zero, self.in_features, self.group_size)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group_size={self.group_size}"


def _multiply(x: Tensor, bias: Tensor | None, weight: _Weight) -> Tensor:
    if isinstance(weight, QuantizedInt8):
        return matmul_w8a16(x, weight, bias=bias)
    return matmul_w4a16(x, weight, bias=bias)


def _dequantized(weight: _Weight, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, QuantizedInt8):
        return dequantize_int8(weight, dtype=dtype)
    return dequantize_int4(weight, dtype=dtype)


class _Linear(torch.autograd.Function):
    """The product; backwards by what the weight means, in the gradient's dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, master: Tensor | None, bias: Tensor | None, weight: _Weight
    ) -> Tensor:
        needs_input = master is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(x if needs_input else None, *weight[:3])
        ctx.make_weight = lambda *tensors: weight._replace(
            values=tensors[0], scale=tensors[1], zero=tensors[2]
        )
        ctx.dtypes = [None if given is None else given.dtype for given in (master, bias)]
        return _multiply(x, bias, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *stored = ctx.saved_tensors
        of_x = of_master = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = grad @ _dequantized(ctx.make_weight(*stored), grad.dtype)
        if ctx.needs_input_grad[1]:
            of_master = (grad.T @ x).to(ctx.dtypes[0])
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(0, dtype=torch.float32).to(ctx.dtypes[1])
        return of_x, of_master, of_bias, None
