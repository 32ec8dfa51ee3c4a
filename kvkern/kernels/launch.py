"""Launching a compiled kernel again, for what its arguments are and no more.

``kernel[grid](...)`` looks at every argument, every time, to find which compiled variant it needs.
A caller that knows that nothing but addresses and a few counts has changed since the last call
keeps a ``Launch``, which looks at none.

Triton's own launcher is two layers of Python over a function in C: one looks for scratch memory to
allocate, the other encodes the descriptors of a TMA, every time. A ``Launch`` calls the function
in C, with descriptors that were encoded once, and takes the launcher as it is where that is not
built as in Triton 3.6 to 3.9.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton


class Launch:
    """One compiled variant with its grid, and all of its arguments that do not vary.

    The kernel's parameters are those that vary, whose integers must not be specialised on, then
    the fixed rest. Triton's launch hooks are not called.
    """

    def __init__(
        self,
        compiled: Any,  # what kernel[grid](...) returned
        grid: tuple[int, ...],
        device: torch.device,
        fixed: Sequence[Any],
    ) -> None:
        self._current_device, self._current_stream = device_finder(), stream_finder()
        self._device = self._current_device() if device.index is None else device.index
        between = (compiled.function, compiled.packed_metadata, None, None, None)
        launcher = _c_launcher(compiled, between) or _Launcher(compiled.run, between)
        self._run, self._between, self._takes_tuple, self._encode = launcher
        self._grid = (*grid, 1, 1)[:3]
        self._fixed = tuple(fixed)

    def __call__(self, varying: Sequence[Any]) -> None:
        """Launch on the current stream of the variant's card; ``varying`` as ``encoded``."""
        if self._current_device() != self._device:  # Triton launches where the host stands
            with torch.cuda.device(self._device):
                return self(varying)
        self.on(self._current_stream(self._device), varying)

    def on(self, stream: int, varying: Sequence[Any]) -> None:
        """The same on a stream of the variant's card, where the host must stand."""
        if self._takes_tuple:
            self._run(*self._grid, stream, *self._between, (*varying, *self._fixed))
        else:
            self._run(*self._grid, stream, *self._between, *varying, *self._fixed)

    def encoded(self, first: int, values: Iterable[Any]) -> list[Any]:
        """Values of parameters from number ``first`` on, as a launch takes them.

        Tensors by their addresses, descriptors of a TMA as the driver has them; nothing keeps
        memory alive, or needs to be done anew while the tensors stay where they are.
        """
        given: list[Any] = []
        for number, value in enumerate(values, first):
            if hasattr(value, "base"):
                given += self._encode(number, value)
            else:
                given.append(None if value is None else value.data_ptr())
        return given


def device_finder() -> Callable[[], int]:
    """What tells the current card, once CUDA has been started.

    PyTorch's public function looks first whether it has, which takes longer than the rest.
    """
    public = triton.runtime.driver.active.get_current_device
    find: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", public)
    return find


def stream_finder() -> Callable[[int], int]:
    """What tells a card's current stream, by the card's index."""
    find: Callable[[int], int] = triton.runtime.driver.active.get_current_stream
    return find


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    device: torch.device,
    *,
    num_varying: int,
) -> Launch | None:
    """Launch by name, compiling if need be, and return how to do it again.

    ``num_varying`` counts the kernel's first parameters, those that a ``Launch`` is given. None in
    the interpreter, where there is nothing to keep.
    """
    compiled = kernel[grid](**arguments, **options)
    if compiled is None:
        return None
    fixed = [arguments[parameter.name] for parameter in kernel.params[num_varying:]]
    return Launch(compiled, grid, device, fixed)


class _Address:
    """What is read of a descriptor's tensor."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


class _MovedDescriptor:
    """What Triton's launcher reads of a ``TensorDescriptor``; keeps no tensor alive."""

    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, descriptor: Any, address: int) -> None:
        self.base = _Address(address)
        self.shape, self.strides = descriptor.shape, descriptor.strides


def moved(descriptor: Any, address: int) -> Any:
    """The descriptor of a like tensor that begins at ``address``."""
    return _MovedDescriptor(descriptor, address)


def _without_tensor(number: int, descriptor: Any) -> list[Any]:
    return [moved(descriptor, descriptor.base.data_ptr())]


class Descriptors:
    """A launch's descriptors, encoded once for an address: allocators come back to the same few."""

    def __init__(self, launch: Launch, descriptors: Mapping[int, Any]) -> None:
        self._launch = launch
        self._descriptors = descriptors  # by the number of the parameter; None: it has none
        self._encoded: dict[tuple[int, int], list[Any]] = {}  # and by address

    def at(self, number: int, address: Any) -> list[Any]:
        """What a launch takes for the parameter where its tensor begins at ``address``."""
        if self._descriptors[number] is None:
            return [address]
        encoded = self._encoded.get((number, address))
        if encoded is None:
            if len(self._encoded) >= _MOST_DESCRIPTORS:
                self._encoded.clear()
            there = moved(self._descriptors[number], address)
            encoded = self._encoded[number, address] = self._launch.encoded(number, [there])
        return encoded


_MOST_DESCRIPTORS = 512  # of a kind of call: each layer's weight, and a step's buffers


class _Launcher(NamedTuple):
    """How ``run(*grid, stream, *between, *arguments)`` launches a kernel."""

    run: Callable[..., None]
    between: tuple[Any, ...]
    takes_tuple: bool = False  # the arguments as one
    encode: Callable[[int, Any], list[Any]] = _without_tensor  # a parameter's descriptor


def _c_launcher(compiled: Any, between: tuple[Any, ...]) -> _Launcher | None:
    """The function in C under Triton's launcher; None where that is built otherwise."""
    outer = compiled.run
    if any(getattr(outer, f"{kind}_scratch_size", 1) for kind in ("global", "profile")):
        return None  # allocates for each launch
    inner = getattr(outer, "launch", None)
    if inspect.isfunction(inner):  # encodes descriptors
        inner = inspect.getclosurevars(inner).nonlocals.get("launcher")
    signature = getattr(compiled.src, "signature", None)
    if not callable(inner) or not isinstance(signature, dict):
        return None
    # what it is given is seen from a launch of marks in place of everything that varies
    given: list[Any] = []
    probe = copy.copy(outer)
    probe.launch = lambda *arguments: given.extend(arguments)
    head = tuple(object() for _ in range(4))  # grid, stream
    marks = tuple(object() for _ in signature)
    try:
        probe(*head, *between, *marks)
    except (AttributeError, TypeError):  # looks at what it passes on
        return None
    takes_tuple = given[-1:] == [marks]
    end = len(given) - (1 if takes_tuple else len(marks))
    if tuple(given[:4]) != head or not (takes_tuple or tuple(given[end:]) == marks):
        return None
    encode = _descriptor_encoder(compiled, list(signature.values()))
    return encode and _Launcher(inner, tuple(given[4:end]), takes_tuple, encode)


def _descriptor_encoder(
    compiled: Any, types: Sequence[Any]
) -> Callable[[int, Any], list[Any]] | None:
    """What Triton's launcher does with a descriptor, by the number of the parameter."""
    numbers = [n for n, kind in enumerate(types) if str(kind).startswith("tensordesc")]
    if not numbers:
        return _without_tensor  # never called
    described = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    encode = getattr(sys.modules[type(compiled.run).__module__], "make_tensordesc_arg", None)
    if encode is None or len(described) != len(numbers):
        return None
    how = dict(zip(numbers, described, strict=True))
    # from Triton 3.8 on it has a third parameter, which it does not use
    others = (None,) * (len(inspect.signature(encode).parameters) - 2)
    return lambda number, descriptor: encode(descriptor, how[number], *others)
