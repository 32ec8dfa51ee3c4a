"""The one place that knows what Gluon's releases (Triton 3.6 to 3.9) call the same thing."""

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core as gl_core
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_values = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

GLUON_TYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


@gl_core.builtin
def view_tile(tile, dtype, shape, layout, _semantic=None):
    """The same bytes of shared memory as another type, shape and layout."""
    unwrap = gl_core._unwrap_if_constexpr
    return _semantic.memdesc_reinterpret(
        tile, unwrap(dtype), [unwrap(size) for size in unwrap(shape)], unwrap(layout)
    )


class MovedDescriptor:
    """What a launch reads of a ``TensorDescriptor``, at another base that has a ``data_ptr()``."""

    __slots__ = ("base", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, descriptor: TensorDescriptor, base: Any) -> None:
        self.base = base
        self.shape, self.strides = descriptor.shape, descriptor.strides
        self.padding, self.round_f32_to_tf32 = "zero", False


class Address:
    """A base that keeps no tensor alive."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def tile_descriptor(rows: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """What the TMA needs to know to fetch blocks of ``rows`` ``[N, K]``; outside them are zeros."""
    shape = list(block)
    layout = gl.NVMMASharedLayout.get_default_for(shape, GLUON_TYPES[rows.dtype])
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), shape, layout)
