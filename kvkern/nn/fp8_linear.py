"""FP8Linear: a linear layer that multiplies in fp8, and never by a weight of before a change."""

import math
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from kvkern.errors import ArgumentError, ShapeMismatchError
from kvkern.ops.matmul import scaled_mm
from kvkern.ops.quantize import QuantizedFP8, dequantize_fp8, quantize_fp8

Scaling = Literal["block", "row"]
_E4M3 = torch.float8_e4m3fn
_OF_INPUT: dict[Scaling, Literal["group", "row"]] = {"block": "group", "row": "row"}


class FP8Linear(nn.Module):
    """``x @ weight.T + bias``, both sides rounded to e4m3, sums exact.

    The weight has a scale for each block of 128 x 128 and the input one for each 128 columns of a
    row (``scaling="block"``, as DeepSeek-V3's checkpoints have it), or each row of either has one
    (``scaling="row"``).

    With its master weight the layer's parameters and state dict are those of ``nn.Linear``. The
    fp8 copy that it multiplies by is made at the first call, and anew when the master has changed:
    by an optimizer, in place, replaced, moved or loaded. What PyTorch does not count as a change,
    writing through ``weight.data`` or replaying a CUDA graph, needs ``refresh()``.

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
        ShapeMismatchError: an input whose last dim is not ``in_features``.

    Source: arXiv:2412.19437, section 3.3.
    """

    weight: Tensor
    weight_scale_inv: Tensor | None

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
        super().__init__()
        self._set_up(in_features, out_features, scaling)
        if keep_master:
            weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
            self.weight = nn.Parameter(weight)
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear has it
        else:
            self._take(self._empty_fp8(device))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
            bound = 1 / math.sqrt(in_features) if in_features > 0 else 0.0
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, scaling: Scaling = "block", keep_master: bool = True
    ) -> "FP8Linear":
        """The same layer in fp8: it shares the parameters of ``linear``, none is copied."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._set_up(linear.in_features, linear.out_features, scaling)
        layer.weight, layer.bias = linear.weight, linear.bias
        if not keep_master:
            layer.release_master()
        return layer.train(linear.training)

    def _set_up(self, in_features: int, out_features: int, scaling: Scaling) -> None:
        if scaling not in get_args(Scaling):
            raise ArgumentError(f"scaling: want block or row, got {scaling!r}")
        self.in_features, self.out_features, self.scaling = in_features, out_features, scaling
        self.register_buffer("weight_scale_inv", None)
        self._copy: _Copy | None = None

    @property
    def has_master(self) -> bool:
        return self.weight_scale_inv is None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` in bf16, fp16 or fp32 to ``[..., out_features]``, the same."""
        if x.shape[-1:] != (self.in_features,):
            raise ShapeMismatchError(
                f"x: want [..., in_features={self.in_features}], got {list(x.shape)}"
            )
        weight, master = self.quantized_weight(), self.weight if self.has_master else None
        rows = x.reshape(-1, self.in_features).contiguous()
        given = (master, self.bias, weight, _OF_INPUT[self.scaling])
        if torch.is_grad_enabled():
            out: Tensor = _Linear.apply(rows, *given)  # type: ignore[no-untyped-call]
        else:
            out = _multiply(rows, *given[1:])
        return out.view(*x.shape[:-1], self.out_features)

    def quantized_weight(self) -> QuantizedFP8:
        """What the layer multiplies by: up to date."""
        if self.weight_scale_inv is not None:
            return QuantizedFP8(self.weight.detach(), self.weight_scale_inv)
        if self._copy is None or not self._copy.is_of(self.weight):
            self.refresh()
            assert self._copy is not None
        return self._copy.weight

    def refresh(self) -> None:
        """Quantise the master again, where the last copy lies, so that CUDA graphs see it."""
        if not self.has_master:
            return
        made = quantize_fp8(self.weight.detach().contiguous(), granularity=self.scaling)
        old = self._copy
        if old is not None and _are_alike(old.weight.values, made.values):
            old.weight.values.copy_(made.values)
            old.weight.scale.copy_(made.scale)
            made = old.weight
        self._copy = _Copy.of(self.weight, made)

    def release_master(self) -> None:
        """Keep the weight in fp8 alone."""
        if self.has_master:
            self._take(self.quantized_weight())

    def _take(self, weight: QuantizedFP8) -> None:
        """Have no master but this weight."""
        self._copy = None
        self.weight = nn.Parameter(weight.values, requires_grad=False)
        self.weight_scale_inv = weight.scale

    def _empty_fp8(self, device: torch.device | str | None) -> QuantizedFP8:
        rows, columns = self.out_features, self.in_features
        scales = (rows, 1) if self.scaling == "row" else (-(-rows // 128), -(-columns // 128))
        zeros = torch.zeros(rows, columns, dtype=torch.uint8, device=device)
        return QuantizedFP8(zeros.view(_E4M3), torch.ones(scales, device=device))

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
        weight, scale = (state_dict.get(prefix + name) for name in ("weight", "weight_scale_inv"))
        if weight is not None and weight.dtype == _E4M3 and self.has_master:
            if scale is None:
                error_msgs.append(f"{prefix}weight: want {prefix}weight_scale_inv beside fp8")
                return
            self._take(self._empty_fp8(self.weight.device))
        elif weight is not None and weight.dtype != _E4M3 and not self.has_master:
            made = quantize_fp8(weight.contiguous(), granularity=self.scaling)
            state_dict[prefix + "weight"] = made.values
            state_dict[prefix + "weight_scale_inv"] = made.scale
        self._copy = None
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FP8Linear":
        """As ``nn.Module`` has it; but fp8 and its scales only move, as bytes: ``to(dtype)``, or
        ``half()``, would make floats of them."""
        if self.has_master:
            self._copy = None
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return self
        values, scale = self.weight.detach().view(torch.uint8), self.weight_scale_inv
        assert scale is not None
        del self.weight
        self.weight_scale_inv = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = fn(scale.view(torch.int32)).view(torch.float32)
        self._take(QuantizedFP8(fn(values).view(_E4M3), moved))
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copy": None}  # made anew from what is copied or unpickled

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scaling={self.scaling!r}, "
            f"keep_master={self.has_master}"
        )


class _Copy(NamedTuple):
    """A master in fp8, and the state of the master that it was made of."""

    weight: QuantizedFP8
    master: "weakref.ref[Tensor]"
    version: int
    address: int

    @classmethod
    def of(cls, master: Tensor, weight: QuantizedFP8) -> "_Copy":
        return cls(weight, weakref.ref(master), _version(master), master.data_ptr())

    def is_of(self, master: Tensor) -> bool:
        return (
            self.master() is master
            and self.version == _version(master)
            and self.address == master.data_ptr()
        )


def _version(tensor: Tensor) -> int:
    """How often PyTorch has changed it; it does not count for tensors made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.device == other.device


def _multiply(
    x: Tensor, bias: Tensor | None, weight: QuantizedFP8, of_input: Literal["group", "row"]
) -> Tensor:
    a, scale = quantize_fp8(x, granularity=of_input)
    return scaled_mm(a, weight.values.T, scale, weight.scale.T, bias=bias, out_dtype=x.dtype)


class _Linear(torch.autograd.Function):
    """The product; backwards by what the weight means, in the gradient's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor | None,
        bias: Tensor | None,
        weight: QuantizedFP8,
        of_input: Literal["group", "row"],
    ) -> Tensor:
        needs_input = master is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(x if needs_input else None, *weight)
        ctx.dtypes = [None if given is None else given.dtype for given in (x, master, bias)]
        return _multiply(x, bias, weight, of_input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, values, scale = ctx.saved_tensors
        of_x = of_master = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = grad @ dequantize_fp8(values, scale, dtype=grad.dtype)
        if ctx.needs_input_grad[1]:
            of_master = (grad.T @ x).to(ctx.dtypes[1])
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(0, dtype=torch.float32).to(ctx.dtypes[2])
        return of_x, of_master, of_bias, None, None
