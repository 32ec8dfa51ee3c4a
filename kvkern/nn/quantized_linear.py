"""QuantizedLinear: a linear layer that multiplies by a quantised weight, and never by a stale one.

With a master, ``weight`` is what ``nn.Linear`` has, and a quantised copy of it is made when it is
first needed and after each change. Without one, ``weight`` and the buffers beside it are the
quantised weight. A subclass says how a weight is quantised, dequantised and multiplied by.
"""

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from kvkern.errors import ArgumentError, ShapeMismatchError
from kvkern.ops._sizes import FLOATS64, check_is_tensor

Quantized = TypeVar("Quantized", bound=tuple[Any, ...])  # a quantiser's result: its tensors first
_Layer = TypeVar("_Layer", bound="QuantizedLinear[Any]")
_A_FLOAT = "a float of 16 bits or more"  # FLOATS64, in messages


class QuantizedLinear(nn.Module, ABC, Generic[Quantized]):
    """``x @ weight.T + bias`` by a weight that is quantised anew whenever its master changes."""

    weight: Tensor
    bias: nn.Parameter | None
    _stored: ClassVar[torch.dtype]  # of a quantised weight's first tensor; the others are fp32
    _names: ClassVar[tuple[str, ...]]  # of all, here and in the state dict; the first is "weight"
    _options: ClassVar[tuple[str, ...]]  # a subclass's own arguments; it sets them, then calls this

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        keep_master: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        for name in self._names[1:]:
            self.register_buffer(name, None)
        self._copy: Quantized | None = None  # stays where it is: CUDA graphs read it
        self._made_of: _Master | None = None  # the copy; None: stale, or none
        with torch.inference_mode(False):  # its tensors take no gradients, nor count their changes
            if keep_master:
                weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
                self.weight = nn.Parameter(weight)
                nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear has it
            else:
                self._take(self._zeros(device))
            self.register_parameter("bias", None)
            if bias:
                self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
                bound = 1 / math.sqrt(in_features) if in_features > 0 else 0.0
                nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def _sharing(cls: type[_Layer], linear: nn.Linear, keep_master: bool, **options: Any) -> _Layer:
        """A layer with the parameters of ``linear``, none of them copied."""
        if not isinstance(linear, nn.Linear):
            raise ArgumentError(f"linear: want an nn.Linear, got {type(linear).__name__}")
        if nn.parameter.is_lazy(linear.weight):
            raise ArgumentError("linear: want one with a weight, got a lazy one: call it first")
        layer = cls(linear.in_features, linear.out_features, device="meta", **options)
        layer.weight, layer.bias = linear.weight, linear.bias
        if not keep_master:
            layer.release_master()
        return layer.train(linear.training)

    @abstractmethod
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Of a quantised weight's tensors, by those of ``_names`` that it has."""

    @abstractmethod
    def _as_quantized(self, tensors: dict[str, Tensor]) -> Quantized:
        """A quantised weight, of its tensors."""

    @abstractmethod
    def _quantize(self, weight: Tensor) -> Quantized: ...

    @abstractmethod
    def _dequantize(self, weight: Quantized, dtype: torch.dtype) -> Tensor: ...

    @abstractmethod
    def _multiply(self, x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
        """Rows ``[M, in_features]`` to ``[M, out_features]`` in the same dtype."""

    @property
    def has_master(self) -> bool:
        return getattr(self, self._names[1]) is None

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]`` in the same dtype."""
        check_is_tensor("x", x)
        if x.shape[-1:] != (self.in_features,):
            raise ShapeMismatchError(
                f"x: want [..., in_features={self.in_features}], got {list(x.shape)}"
            )
        master = self.weight if self.has_master else None  # once: it may be computed each time
        weight = self._stored_weight() if master is None else self._copy_of(master)
        rows = x.reshape(x.shape[:-1].numel(), self.in_features).contiguous()
        if torch.is_grad_enabled():
            out: Tensor = _Linear.apply(rows, master, self.bias, self, weight)  # type: ignore[no-untyped-call]
        else:
            out = self._multiply(rows, weight, self.bias)
        return out.view(*x.shape[:-1], self.out_features)

    def quantized_weight(self) -> Quantized:
        """What the layer multiplies by: up to date."""
        return self._copy_of(self.weight) if self.has_master else self._stored_weight()

    def refresh(self) -> None:
        """Quantise the master again, where the last copy lies, so that CUDA graphs see it."""
        if self.has_master:
            self._copy_anew(self.weight)

    def _stored_weight(self) -> Quantized:
        return self._as_quantized({n: getattr(self, n).detach() for n in self._shapes()})

    def _copy_of(self, master: Tensor) -> Quantized:
        if self._made_of is None or not self._made_of.is_unchanged(master):
            self._copy_anew(master)
        assert self._copy is not None
        return self._copy

    def _copy_anew(self, master: Tensor) -> None:
        wanted = [self.out_features, self.in_features]
        if list(master.shape) != wanted:
            raise ShapeMismatchError(f"weight: want {wanted}, got {list(master.shape)}")
        made = self._made(master)
        if self._copy is not None and self._copy[0].device == made[0].device:
            tensors = self._tensors(self._copy)
            for name, tensor in self._tensors(made).items():
                tensors[name].copy_(tensor)
            made = self._as_quantized(tensors)  # another tuple: it tells this copy from the last
        self._copy = made
        # what is captured runs at each replay, and has not yet: eager calls cannot rely on it
        is_captured = master.is_cuda and torch.cuda.is_current_stream_capturing()
        # nor on what is made of a tensor of inference mode, whose changes are not counted
        is_known = not is_captured and not master.is_inference()
        self._made_of = _Master.of(master) if is_known else None

    def _made(self, weight: Tensor) -> Quantized:
        """A float weight quantised, even in inference mode as what can be saved for gradients."""
        with torch.inference_mode(False), torch.no_grad():
            weight = weight.detach().contiguous()
            return self._quantize(weight.float() if weight.dtype == torch.float64 else weight)

    def _multiplied_by(self, master: Tensor, copy: Quantized) -> Quantized:
        """What a call took: its copy of the master, made again if it has been written over."""
        return copy if copy is self._copy else self._made(master)

    def release_master(self) -> None:
        """Keep the quantised weight alone."""
        if self.has_master:
            self._take(self.quantized_weight())

    def _take(self, weight: Quantized) -> None:
        """Have no master but this weight."""
        self._copy = self._made_of = None
        for name, tensor in self._tensors(weight).items():
            is_first = name == "weight"
            setattr(self, name, nn.Parameter(tensor, requires_grad=False) if is_first else tensor)

    def _tensors(self, weight: Quantized) -> dict[str, Tensor]:
        named = zip(self._names, weight, strict=False)  # beyond its tensors it has numbers
        return {name: tensor for name, tensor in named if tensor is not None}

    def _zeros(self, device: torch.device | str | None) -> Quantized:
        def zeros(name: str, shape: tuple[int, ...]) -> Tensor:
            dtype = self._stored if name == "weight" else torch.float32
            return torch.zeros(shape, dtype=dtype, device=device)

        return self._as_quantized({name: zeros(name, s) for name, s in self._shapes().items()})

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
        if weight is not None:
            mistakes = list(self._mistakes(state_dict, prefix))
            if mistakes:
                error_msgs += mistakes
                return
            if weight.dtype == self._stored and self.has_master:
                with torch.inference_mode(False):
                    device = self.weight.device
                    self._take(self._zeros(device) if self._copy is None else self._copy)
            elif weight.dtype != self._stored and not self.has_master:
                device = weight.device if self.weight.is_meta else self.weight.device
                made = self._tensors(self._made(weight.to(device)))
                state_dict.update({prefix + name: tensor for name, tensor in made.items()})
        self._made_of = None
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _mistakes(self, state_dict: dict[str, Any], prefix: str) -> Iterator[str]:
        """What keeps a state dict, its weight float or quantised, from being this layer's."""
        dtype = _kind(state_dict[prefix + "weight"])
        if dtype != self._stored and dtype not in FLOATS64:
            yield f"{prefix}weight: want {self._stored} or {_A_FLOAT}, got {dtype}"
            return
        is_stored = dtype == self._stored
        wanted = self._shapes() if is_stored else {"weight": (self.out_features, self.in_features)}
        for name in self._names if is_stored else ["weight"]:
            want = list(wanted[name]) if name in wanted else "none"
            got = _shape(state_dict.get(prefix + name))
            if want != got:
                yield f"{prefix}{name}: want {want} for a weight of {dtype}, got {got}"
        if self.bias is not None and prefix + "bias" in state_dict:
            bias = state_dict[prefix + "bias"]
            if _kind(bias) not in FLOATS64:
                yield f"{prefix}bias: want {_A_FLOAT}, got {_kind(bias)}"
            elif bias.shape != self.bias.shape:
                yield f"{prefix}bias: want {_shape(self.bias)}, got {_shape(bias)}"

    def _apply(self: _Layer, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Layer:
        """As ``nn.Module`` has it; but a quantised weight's tensors only move, as bytes: ``half()``
        would round scales, or make floats of fp8."""
        kept = [] if self.has_master else [getattr(self, name) for name in self._shapes()]

        def move(tensor: Tensor) -> Tensor:
            if not any(tensor is other for other in kept):
                return fn(tensor)
            bits = torch.uint8 if tensor.itemsize == 1 else torch.int32
            return fn(tensor.view(bits)).view(tensor.dtype)

        self._made_of = None  # before: a tensor with a weak reference cannot be swapped for another
        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        if self._copy is not None and self._copy[0].device != self.weight.device:
            self._copy = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Of what is copied or unpickled a copy is made anew."""
        return {**self.__dict__, "_copy": None, "_made_of": None}

    def extra_repr(self) -> str:
        options = "".join(f"{name}={getattr(self, name)!r}, " for name in self._options)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {options}keep_master={self.has_master}"
        )


def _kind(given: Any) -> torch.dtype | str:
    """As messages have it: of a tensor its dtype."""
    return given.dtype if isinstance(given, Tensor) else type(given).__name__


def _shape(given: Any) -> list[int] | str:
    """As messages have it, of a tensor or of what is there in its place."""
    if given is None:
        return "none"
    return list(given.shape) if isinstance(given, Tensor) else type(given).__name__


_num_steps = 0  # of all optimizers: fused ones change a weight, and PyTorch does not count it


def _count_step(*_: Any) -> None:
    global _num_steps
    _num_steps += 1


register_optimizer_step_post_hook(_count_step)


class _Master(NamedTuple):
    """The state of a weight that something was made of."""

    tensor: "weakref.ref[Tensor]"
    version: int  # how often PyTorch has changed it
    address: int
    num_steps: int | None  # None: no optimizer changes it

    @classmethod
    def of(cls, tensor: Tensor) -> "_Master":
        num_steps = _num_steps if tensor.requires_grad else None
        return cls(weakref.ref(tensor), tensor._version, tensor.data_ptr(), num_steps)

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether it is the same tensor, and nothing has counted a change of it."""
        return self.tensor() is tensor and self[1:] == _Master.of(tensor)[1:]


class _Linear(torch.autograd.Function):
    """The product; backwards by what the weight means, in the gradient's dtype.

    A master is saved, as ``nn.Linear`` has it, and not its copy, which the next change overwrites.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor | None,
        bias: Tensor | None,
        layer: QuantizedLinear[Quantized],
        weight: Quantized,
    ) -> Tensor:
        needs_x, needs_master, *_ = ctx.needs_input_grad
        saved: list[Tensor] = []
        if needs_x and master is None:
            saved = list(layer._tensors(weight).values())
        elif needs_x and master is not None:  # of inference mode it cannot be saved
            saved = [master.clone() if master.is_inference() else master]
        ctx.save_for_backward(x if needs_master else None, *saved)
        ctx.layer, ctx.copy = layer, None if master is None else weight
        return layer._multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        layer = ctx.layer
        of_x = of_master = of_bias = None  # autograd casts each to the dtype of what it is for
        if ctx.needs_input_grad[0]:
            if ctx.copy is None:
                weight = layer._as_quantized(dict(zip(layer._shapes(), saved, strict=True)))
            else:
                weight = layer._multiplied_by(*saved, ctx.copy)
            of_x = grad @ layer._dequantize(weight, grad.dtype)
        if ctx.needs_input_grad[1]:
            of_master = grad.T @ x
        if ctx.needs_input_grad[2]:
            of_bias = grad.sum(0, dtype=torch.float32)
        return of_x, of_master, of_bias, None, None
