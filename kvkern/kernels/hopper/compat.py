"""The one place that knows what Gluon's releases (Triton 3.6 to 3.9) call the same thing."""

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core as gl_core
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
copy_values = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

GLUON_TYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


@gl_core.builtin
def view_tile(tile, dtype, shape, layout, _semantic=None):
    """The same bytes of shared memory as another type, shape and layout."""
    unwrap = gl_core._unwrap_if_constexpr
    return _semantic.memdesc_reinterpret(
        tile, unwrap(dtype), [unwrap(size) for size in unwrap(shape)], unwrap(layout)
    )


@gluon.jit
def as_matrix(tile):
    """A box of one matrix, as ``matrix_descriptor`` has them, without its first dim."""
    SWIZZLE: gl.constexpr = tile.type.layout.swizzle_byte_width
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(SWIZZLE, tile.dtype.primitive_bitwidth, 2)
    return view_tile(tile, tile.dtype, [tile.shape[1], tile.shape[2]], LAYOUT)


def tile_descriptor(tensor: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """What the TMA needs to know to fetch boxes of ``tensor``; outside it are zeros.

    A box has as many dims; the last is contiguous.
    """
    layout = _default_layout(box, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(box), layout)


def matrix_descriptor(
    matrices: Tensor, block: tuple[int, int], *, is_swizzled: bool = True
) -> TensorDescriptor:
    """The same of ``[G, N, K]``, whose rows begin at multiples of 16 bytes: boxes of one matrix."""
    strides = [*matrices.stride()[:2], 1]
    for dim in (1, 0):  # of a dim of one it may be anything, but for the TMA
        if matrices.shape[dim] == 1:
            strides[dim] = strides[dim + 1] * matrices.shape[dim + 1] + 15 & ~15
    box = (1, *block)
    layout = _default_layout(box, matrices.dtype)
    if not is_swizzled:
        layout = gl.NVMMASharedLayout(0, layout.element_bitwidth, len(box))
    return TensorDescriptor(matrices, list(matrices.shape), strides, list(box), layout)


def slices_descriptor(matrices: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """Of ``[1, T, N]``: boxes of rows that end where a slice of T does, wherever that is.

    The TMA leaves out what is past the end of a dim, but a slice is no dim. Here rows end at 2^30:
    that is where a slice's last row is put, by two more dims which together move it back. Row r of
    the slice that ends at e is at ``[2^30, e, 2^30 - e + r]``, that is, with s bytes a row, at
    2^30 (2^k - s) + e s + (2^30 - e + r) s = 2^(30 + k) + r s, and addresses have 64 bits.
    """
    of_row = matrices.stride(1) if matrices.shape[1] > 1 else matrices.shape[2] + 15 & ~15
    far = 2**31 - 1
    return TensorDescriptor(
        matrices,
        [far, far, 2**30, matrices.shape[2]],
        [2**34 - of_row, of_row, of_row, 1],
        [1, 1, *block],
        _default_layout((1, 1, *block), matrices.dtype),
    )


@lru_cache
def _default_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """A tile's in shared memory; remembered, as to find it takes longer than the rest does."""
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_TYPES[dtype])
