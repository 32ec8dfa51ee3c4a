"""Which compiled variants calls would launch: launches are taken down, and not made."""

from contextlib import contextmanager

import pytest
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from kvkern.kernels import device
from kvkern.kernels.config import config_of_call


@contextmanager
def launches_on(gpu):
    """A set of variants, which fills as kernels are launched on tensors that are not on a card."""
    met = set()

    def run(kernel, *, grid, warmup, **given):
        met.add(_variant(kernel, given))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "INTERPRETED", gpu)
        patch.setattr(InterpretedFunction, "run", run)
        patch.setattr(JITFunction, "run", run)
        device.gpu_of.cache_clear()
        yield met
    device.gpu_of.cache_clear()


def _variant(kernel, given):
    """All that Triton tells variants apart by, and the kernel's name."""
    arguments = {name: given.pop(name) for name in kernel.arg_names}
    if kernel not in _COMPILABLE:
        is_interpreted = isinstance(kernel, InterpretedFunction)
        _COMPILABLE[kernel] = JITFunction(kernel.fn, **kernel.kwargs) if is_interpreted else kernel
    config = config_of_call(_COMPILABLE[kernel], "", arguments, given)
    fields = (config.signature, config.constexprs, config.options)
    return (kernel.fn.__name__, *(tuple(field.items()) for field in fields), config.aligned)


_COMPILABLE = {}  # kernels by themselves, or by what would be interpreted
