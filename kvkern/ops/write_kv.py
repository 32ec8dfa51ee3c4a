"""write_kv: what fills the paged cache."""

from typing import Literal

import torch
from torch import Tensor

from kvkern.backends import choose
from kvkern.cache.storage import CacheView
from kvkern.errors import ArgumentError, LayoutError
from kvkern.ops._sizes import FLOATS64, Sizes


def write_kv(
    cache: CacheView,
    kv: Tensor,
    freqs: Tensor | None,
    gamma: Tensor,
    *,
    q_rope: Tensor | None = None,
    q_rope_out: Tensor | None = None,
    kv_out: Tensor | None = None,
    positions: Tensor | None = None,
    eps: float = 1e-6,
    rope_style: Literal["interleaved", "half"] = "interleaved",
    rounding: Literal["once", "hf"] = "once",
    sanitize: bool = False,
    backend: str = "auto",
) -> None:
    """Store a step's compressed keys and values in the pages, normalised, rotated and quantised.

    RMSNorm of the latent columns, RoPE of the rope key (and of the query), quantisation to the
    cache's format and the paged store are one launch. Token t of request b goes to position
    ``cache_lengths[b] + t - input_row_offsets[b]``; ``cache_lengths`` is not advanced. A token at
    or past ``input_row_offsets[-1]``, or whose page is -1, is padding: nothing of it is stored and
    its rows of ``q_rope_out`` and ``kv_out`` become zero.

    Args:
        cache: ``PagedKVCache.view(layer, batch)``; L and R below are its format's dims.
        kv: ``[T, L+R]``, bf16, fp16 or fp32 (fp64: reference only), last dim contiguous: latent,
            then the unrotated rope key, as ``kv_a_proj_with_mqa`` gives them.
        freqs: ``[max_positions, R]``, any float dtype, contiguous: rows ``cos0, sin0, cos1, ...``,
            one cos, sin for each rotated pair; None only if R is 0. Read in fp32.
        gamma: ``[L]``, RMSNorm weight, bf16, fp16, fp32 (or fp64), contiguous.
        q_rope: ``[T, H, R]`` in kv's dtype, last dim contiguous, other strides free: the query's
            unrotated rope columns, rotated by the same positions into ``q_rope_out``.
        q_rope_out: like ``q_rope``, with strides of its own, for example columns ``[L, L+R)`` of
            the packed query. May be ``q_rope`` itself; must not overlap it otherwise.
        kv_out: ``[T, L+R]`` in kv's dtype, last dim contiguous: the same row before quantisation,
            which a prefill expands into keys and values. May be ``kv`` itself.
        positions: int32 or int64 ``[T]``: RoPE positions in place of the above; where a token is
            stored does not depend on them. Must be in ``[0, max_positions)``; not checked: a
            position outside gets NaN instead of a rotation.
        eps: added to the mean square, fp32.
        rope_style: which columns make pair i: ``"interleaved"`` ``(2i, 2i+1)``, or ``"half"``
            ``(i, i + R/2)``.
        rounding: ``"once"``: fp32 up to the one rounding into the cache. ``"hf"``: also rounds to
            gamma's dtype before and after the multiplication by gamma, as published models do.
        sanitize: store 0 for NaN and the largest finite value for an infinity, so that a bad
            token cannot spread through the pool.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    e4m3 saturates at +-448, infinities included; NaN stays NaN. Stored bytes are the same on
    every backend.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError, ArgumentError: an
            argument is not as above; nothing is written.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: RMSNorm, arXiv:1910.07467; RoPE, arXiv:2104.09864, section 3.2; MLA's latent and
    decoupled rope key, arXiv:2405.04434, section 2.1.
    """
    fmt, batch = cache.format, cache.batch
    sizes = Sizes(cache.pages.device, L=fmt.kv_lora_rank, R=fmt.rope_dim, K=fmt.row_dim)
    sizes.match("kv", kv, "T K", *FLOATS64, strides="rows")
    sizes.match("gamma", gamma, "L", *FLOATS64)
    if freqs is not None:
        sizes.match("freqs", freqs, "N R", *FLOATS64)
    elif fmt.rope_dim:
        raise ArgumentError(f"freqs: want [any, R={fmt.rope_dim}], got None")
    if kv_out is not None:
        sizes.match("kv_out", kv_out, "T K", kv.dtype, strides="rows")
    if (q_rope is None) != (q_rope_out is None):
        raise ArgumentError("q_rope, q_rope_out: want both or neither")
    if q_rope is not None and q_rope_out is not None:
        sizes.match("q_rope", q_rope, "T H R", kv.dtype, strides="rows")
        sizes.match("q_rope_out", q_rope_out, "T H R", kv.dtype, strides="rows")
        _check_in_place_or_apart("q_rope_out", q_rope_out, q_rope)
    if kv_out is not None:
        _check_in_place_or_apart("kv_out", kv_out, kv)
    if positions is not None:
        sizes.match("positions", positions, "T", torch.int32, torch.int64)
    elif freqs is not None and batch.max_seq_len is not None and len(freqs) < batch.max_seq_len:
        raise ArgumentError(
            f"freqs: want at least {batch.max_seq_len} rows for the longest sequence, "
            f"got {len(freqs)}"
        )
    batch.check_num_tokens("kv", len(kv))
    if rope_style not in ("interleaved", "half"):
        raise ArgumentError(f"rope_style: want interleaved or half, got {rope_style!r}")
    if rounding not in ("once", "hf"):
        raise ArgumentError(f"rounding: want once or hf, got {rounding!r}")
    if not 0 <= eps < float("inf"):
        raise ArgumentError(f"eps: want finite and >= 0, got {eps}")
    choose("write_kv", backend, sizes.device, kv.dtype)(
        cache.pages,
        batch,
        kv,
        freqs,
        gamma,
        q_rope,
        q_rope_out,
        kv_out,
        positions,
        eps,
        rope_style == "interleaved",
        rounding == "hf",
        sanitize,
    )


def _check_in_place_or_apart(name: str, out: Tensor, source: Tensor) -> None:
    """``out`` is exactly its source, or does not start inside it.

    A packed buffer's own columns may be interleaved with the source's, so only the same first
    element with other strides is certain to be a mistake.
    """
    if out.data_ptr() == source.data_ptr() and out.stride() != source.stride() and out.numel():
        raise LayoutError(
            f"{name}: want the input's strides {list(source.stride())} in place, "
            f"got {list(out.stride())}"
        )
