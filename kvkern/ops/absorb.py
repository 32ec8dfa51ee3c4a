"""mla_absorb and absorb_weights: what goes into MLA's latent space, and comes back from it."""

import torch
from torch import Tensor

from kvkern.backends import AbsorbCall, choose
from kvkern.errors import ArgumentError, ShapeMismatchError
from kvkern.ops._known import KnownCalls, addresses_and_kinds
from kvkern.ops._sizes import FLOATS64, Sizes, check_is_tensor
from kvkern.ops.matmul import is_aligned, read_weight_scale


def mla_absorb(
    x: Tensor,
    w: Tensor,
    *,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Each head by its own matrix: ``out[t, h] = x[t, h] @ (w[h] * scale[h])``, rounded once.

    Both sides of absorbed attention, written where they are wanted:
    ``mla_absorb(q_nope, w_uk, out=q[..., :L])`` makes the latent columns of a packed query
    ``[T, H, L+R]``, ``mla_absorb(attended, w_uv)`` the heads' outputs, contiguous for ``o_proj``.

    Args:
        x: ``[T, H, K]``, bf16, fp16 or fp32 (fp64: reference only), last dim contiguous, other
            strides any. For an x in fp8, ``scaled_mm`` has a batched form.
        w: ``[H, K, N]``, x's dtype or e4m3, any strides, as ``absorb_weights`` gives them.
        scale: fp32 descales of an e4m3 ``w`` (real = stored * scale), any strides, as
            ``quantize_fp8`` finds them for ``w.mT``, transposed: ``[1]``, for each matrix
            ``[H, 1, 1]``, for each column ``[H, 1, N]``, for each block of 128 x 128
            ``[H, ceil(K / 128), ceil(N / 128)]``, or for each 128 rows ``[H, ceil(K / 128), N]``.
            One that is NaN makes NaN of what it scales, an infinite one infinities or NaN.
        out: ``[T, H, N]`` in x's dtype, last dim contiguous, other strides any that leave each
            element a place of its own, filled if given; must not overlap an input.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``out``; zeros where K is 0. Sums are fp32, ``x`` is never rounded. NaN and infinities are
        those of the real sum. The same call gives the same bits; T may decide in which order a
        row is summed.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError: an argument is not as
            above.
        ArgumentError: a ``scale`` beside a ``w`` that is not e4m3, or none beside one that is.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: arXiv:2405.04434, section 2.1.2 and appendix C.
    """
    tensors = (x, w, scale, out)
    try:
        addresses, kinds = addresses_and_kinds(tensors)
    except (AttributeError, RuntimeError):  # not all have an address: the checks say which
        addresses, kinds = [], []
    key = (backend, *kinds)
    again = _KNOWN.get(key)
    if again is not None:
        if out is None:
            out = torch.empty(*x.shape[:2], w.shape[2], dtype=x.dtype, device=x.device)
            addresses[-1] = out.data_ptr()
        again(addresses)
        return out
    sizes = Sizes(getattr(x, "device", torch.device("cpu")))
    sizes.match("x", x, "T H K", *FLOATS64, strides="rows")
    sizes.match("w", w, "H K N", x.dtype, torch.float8_e4m3fn, strides="any")
    of_w, cell = None, (0, 0)
    if (scale is not None) != (w.dtype == torch.float8_e4m3fn):
        raise ArgumentError(
            f"scale: want {'None' if scale is not None else 'a tensor'} for w in {w.dtype}"
        )
    if scale is not None:
        of_w, cell = read_weight_scale("scale", scale, w)
    if out is None:
        out = torch.empty(*x.shape[:2], w.shape[2], dtype=x.dtype, device=x.device)
    else:
        sizes.match("out", out, "T H N", x.dtype, strides="written")
    call = AbsorbCall(
        x_dtype=x.dtype,
        num_tokens=x.shape[0],
        num_heads=x.shape[1],
        depth=x.shape[2],
        x_is_aligned=is_aligned(x.transpose(0, 1)),
        w_is_aligned=is_aligned(w) or is_aligned(w.mT),
        out_is_aligned=is_aligned(out.transpose(0, 1)),
    )
    run = choose("mla_absorb", backend, x.device, x.dtype, call)
    if out.numel() > 0:
        _KNOWN.remember(key, run(x, w, of_w, cell, out))
    return out


_KNOWN = KnownCalls(most=16_384)


def absorb_weights(
    kv_b_weight: Tensor, *, num_heads: int, nope_dim: int, v_dim: int
) -> tuple[Tensor, Tensor]:
    """Split ``kv_b_proj``'s weight into the two factors that the absorbed form multiplies by.

    ``q_nope @ w_uk`` is the absorbed query, ``out @ w_uv`` the head's output.

    Args:
        kv_b_weight: ``[H * (nope_dim + v_dim), L]``, any dtype and device.
        num_heads, nope_dim, v_dim: H and the head dims.

    Returns:
        ``w_uk`` ``[H, nope_dim, L]`` and ``w_uv`` ``[H, L, v_dim]``: views, nothing is copied.

    Raises:
        ShapeMismatchError: the weight has other dims.
        UnsupportedDtypeError: it is no tensor.

    Source: arXiv:2405.04434, section 2.1.2 and appendix C.
    """
    check_is_tensor("kv_b_weight", kv_b_weight)
    rows = num_heads * (nope_dim + v_dim)
    if kv_b_weight.ndim != 2 or kv_b_weight.shape[0] != rows:
        raise ShapeMismatchError(
            f"kv_b_weight: want [H*(nope+v)={rows}, L=any], got {list(kv_b_weight.shape)}"
        )
    heads = kv_b_weight.unflatten(0, (num_heads, nope_dim + v_dim))
    w_uk, w_uv = heads.split([nope_dim, v_dim], dim=1)
    return w_uk, w_uv.mT
