"""Launching a compiled kernel again, for what its arguments are and no more.

``kernel[grid](...)`` looks at every argument, every time, to find which compiled variant it needs.
A caller that knows that nothing but addresses and a few counts has changed since the last call
keeps a ``Launch``, which looks at none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton


class Launch:
    """One compiled variant with its grid, and all of its arguments that do not vary.

    The kernel's parameters are ``addresses`` (or descriptors of a TMA), ``counts`` (which must not
    be specialised on) and the fixed rest, in this order. Triton's launch hooks are not called.
    """

    def __init__(
        self,
        compiled: Any,  # what kernel[grid](...) returned
        grid: tuple[int, ...],
        device: torch.device,
        fixed: Sequence[Any],
    ) -> None:
        driver = triton.runtime.driver.active
        self._current_device: Callable[[], int] = driver.get_current_device
        self._current_stream: Callable[[int], int] = driver.get_current_stream
        self._device = self._current_device() if device.index is None else device.index
        self._run = compiled.run
        self._grid = (*grid, 1, 1)[:3]
        self._kernel = (compiled.function, compiled.packed_metadata, None, None, None)
        self._fixed = tuple(fixed)

    def __call__(self, addresses: Sequence[Any], counts: Sequence[int]) -> None:
        """Launch on the current stream of the variant's card."""
        if self._current_device() != self._device:  # Triton launches where the host stands
            with torch.cuda.device(self._device):
                return self(addresses, counts)
        stream = self._current_stream(self._device)
        self._run(*self._grid, stream, *self._kernel, *addresses, *counts, *self._fixed)


def current_stream(device: int) -> int:
    """Of a card, by its index."""
    stream: int = triton.runtime.driver.active.get_current_stream(device)
    return stream


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

    ``num_varying`` counts the kernel's first parameters, the addresses and counts that a
    ``Launch`` is given. None in the interpreter, where there is nothing to keep.
    """
    compiled = kernel[grid](**arguments, **options)
    if compiled is None:
        return None
    fixed = [arguments[parameter.name] for parameter in kernel.params[num_varying:]]
    return Launch(compiled, grid, device, fixed)
