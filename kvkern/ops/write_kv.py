"""write_kv: what fills the paged cache."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from kvkern.backends import choose
from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import CacheView, LayerPages
from kvkern.errors import ArgumentError, LayoutError
from kvkern.ops._known import KnownCalls, addresses_and_kinds
from kvkern.ops._sizes import FLOATS64, Sizes

_E4M3 = torch.float8_e4m3fn


def write_kv(
    cache: CacheView | LayerPages,
    kv: Tensor,
    freqs: Tensor | None,
    gamma: Tensor,
    *,
    q_rope: Tensor | None = None,
    q_rope_out: Tensor | None = None,
    q_nope: Tensor | None = None,
    q_nope_out: Tensor | None = None,
    q_latent: Tensor | None = None,
    q_gamma: Tensor | None = None,
    q_latent_out: Tensor | None = None,
    kv_out: Tensor | None = None,
    q_scale: Tensor | None = None,
    positions: Tensor | None = None,
    slot_mapping: Tensor | None = None,
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
    or past ``input_row_offsets[-1]``, or whose page or slot is not in the cache (-1), is padding:
    nothing of it is stored and its rows of every output become zero.

    Args:
        cache: ``PagedKVCache.view(layer, batch)``; or, with ``slot_mapping``,
            ``PagedKVCache.layer(layer)``. L and R below are its format's dims.
        kv: ``[T, L+R]``, bf16, fp16 or fp32 (fp64: reference only), last dim contiguous: latent,
            then the unrotated rope key, as ``kv_a_proj_with_mqa`` gives them.
        freqs: ``[max_positions, R]``, any float dtype, contiguous: rows ``cos0, sin0, cos1, ...``,
            one cos, sin for each rotated pair; None only if R is 0. Read in fp32.
        gamma: ``[L]``, RMSNorm weight, bf16, fp16, fp32 (or fp64), contiguous.
        q_rope: ``[T, H, R]`` in kv's dtype, last dim contiguous, other strides free: the query's
            unrotated rope columns, rotated by the same positions into ``q_rope_out``.
        q_rope_out: like ``q_rope``, with strides of its own, for example columns ``[L, L+R)`` of
            the packed query, in kv's dtype, or e4m3 with a ``q_scale``. May be ``q_rope`` itself;
            must not overlap it otherwise. Of this and other outputs, each element has a place of
            its own.
        q_nope, q_nope_out: ``[T, H, N]``, any N, the same in all else: copied (or quantised), for
            example the absorbed query into columns ``[0, L)`` of the packed one.
        q_latent, q_gamma, q_latent_out: ``[T, Q]``, ``[Q]``, ``[T, Q]``: RMSNorm of the query's
            LoRA latent, with the same ``eps`` and ``rounding``; dtypes and strides as ``kv``,
            ``gamma`` and ``kv_out``. ``q_latent_out`` may be ``q_latent`` itself.
        kv_out: ``[T, L+R]`` in kv's dtype, last dim contiguous: the same row before quantisation,
            which a prefill expands into keys and values. May be ``kv`` itself.
        q_scale: fp32 ``[1]``, with e4m3 query outputs and only then: real = stored * q_scale.
            Finite and > 0; not checked.
        positions: int32 or int64 ``[T]``: RoPE positions in place of the above; where a token is
            stored does not depend on them. Must be in ``[0, max_positions)``; not checked: a
            position outside gets NaN instead of a rotation.
        slot_mapping: int32 or int64 ``[T]``: the slot of each token, ``page * page_size + offset``,
            in place of a batch; -1 skips the token. Needs ``positions`` unless R is 0.
        eps: added to the mean square, fp32.
        rope_style: which columns make pair i: ``"interleaved"`` ``(2i, 2i+1)``, or ``"half"``
            ``(i, i + R/2)``.
        rounding: ``"once"``: fp32 up to the one rounding into the cache. ``"hf"``: also rounds to
            gamma's dtype before and after the multiplication by gamma, as published models do.
        sanitize: store 0 for NaN and the largest finite value for an infinity, so that a bad
            token cannot spread through the pool.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    e4m3 saturates at +-448 and e2m1 at +-6, infinities included; NaN stays NaN (in nvfp4 the
    group's scale is one). Stored bytes are the same on every backend.

    Arguments are checked once per combination of shapes, strides, dtypes and options; further
    calls of the kind only look whether they are of it.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError, ArgumentError: an
            argument is not as above; nothing is written.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: RMSNorm, arXiv:1910.07467; RoPE, arXiv:2104.09864, section 3.2; MLA's latent and
    decoupled rope key, arXiv:2405.04434, section 2.1.
    """
    if isinstance(cache, CacheView):
        pages, batch = cache.pages, cache.batch
    else:
        pages, batch = cache, None
    observer = pages.observer
    if observer is not None and kv_out is None and isinstance(kv, Tensor):
        kv_out = torch.empty_like(kv)
    tensors = (
        kv, freqs, gamma, q_rope, q_rope_out, q_nope, q_nope_out,
        q_latent, q_gamma, q_latent_out, kv_out, q_scale, positions, slot_mapping,
    )  # fmt: skip
    options = (eps, rope_style, rounding, sanitize, backend)
    try:
        addresses, kinds = _addresses_and_kinds(tensors)
    except (AttributeError, RuntimeError):  # not all have an address
        _check(pages, batch, *tensors, eps, rope_style, rounding)
        raise
    key = (pages.kind, batch is None, options, kinds)
    again = _KNOWN.get(key)
    if again is None:
        _check(pages, batch, *tensors, eps, rope_style, rounding)
    if batch is not None:
        _check_bounds(batch, kv, freqs, positions)
    if again is not None:
        again(pages, batch, addresses)
    else:
        again = choose("write_kv", backend, pages.device, kv.dtype)(
            pages,
            batch,
            *tensors,
            eps=eps,
            interleaved=rope_style == "interleaved",
            round_hf=rounding == "hf",
            sanitize=sanitize,
        )
        _KNOWN.remember(key, again)
    if observer is not None and kv_out is not None:
        observer(kv_out)


_KNOWN = KnownCalls(most=16_384)


def _addresses_and_kinds(
    tensors: Sequence[Tensor | None],
) -> tuple[list[int | None], tuple[Any, ...]]:
    """Of the tensors, and which outputs are in place."""
    addresses, kinds = addresses_and_kinds(tensors)
    kv, _, _, q_rope, q_rope_out, q_nope, q_nope_out, q_latent, _, q_latent_out, kv_out, *_ = (
        addresses
    )
    kinds += (q_rope == q_rope_out, q_nope == q_nope_out, q_latent == q_latent_out, kv == kv_out)
    return addresses, tuple(kinds)


def _check_bounds(
    batch: PagedBatch, kv: Tensor, freqs: Tensor | None, positions: Tensor | None
) -> None:
    """What changes from step to step."""
    longest = batch.max_seq_len
    num_rows, rope_dim = (0, 0) if freqs is None or positions is not None else freqs.shape
    if rope_dim and longest is not None and num_rows < longest:
        raise ArgumentError(
            f"freqs: want at least {longest} rows for the longest sequence, got {num_rows}"
        )
    batch.check_num_tokens("kv", kv.shape[0])


def _check(
    pages: LayerPages,
    batch: PagedBatch | None,
    kv: Tensor,
    freqs: Tensor | None,
    gamma: Tensor,
    q_rope: Tensor | None,
    q_rope_out: Tensor | None,
    q_nope: Tensor | None,
    q_nope_out: Tensor | None,
    q_latent: Tensor | None,
    q_gamma: Tensor | None,
    q_latent_out: Tensor | None,
    kv_out: Tensor | None,
    q_scale: Tensor | None,
    positions: Tensor | None,
    slot_mapping: Tensor | None,
    eps: float,
    rope_style: str,
    rounding: str,
) -> None:
    """What the docstring of ``write_kv`` asks."""
    fmt = pages.format
    dims = {"L": fmt.kv_lora_rank, "R": fmt.rope_dim, "K": fmt.row_dim, "1": 1}
    sizes = Sizes(pages.device, **dims)
    sizes.match("kv", kv, "T K", *FLOATS64, strides="rows")
    sizes.match("gamma", gamma, "L", *FLOATS64)
    if freqs is not None:
        sizes.match("freqs", freqs, "N R", *FLOATS64)
    elif fmt.rope_dim:
        raise ArgumentError(f"freqs: want [any, R={fmt.rope_dim}], got None")
    if kv_out is not None:
        sizes.match("kv_out", kv_out, "T K", kv.dtype, strides="written")
        _check_in_place_or_apart("kv_out", kv_out, kv)
    has_fp8_out = False
    for name, q, out, q_dims in (
        ("q_rope", q_rope, q_rope_out, "T H R"),
        ("q_nope", q_nope, q_nope_out, "T H M"),
    ):
        if (q is None) != (out is None):
            raise ArgumentError(f"{name}, {name}_out: want both or neither")
        if q is not None and out is not None:
            out_dtypes = (kv.dtype,) if q_scale is None else (_E4M3,)
            sizes.match(name, q, q_dims, kv.dtype, strides="rows")
            sizes.match(f"{name}_out", out, q_dims, *out_dtypes, strides="written")
            _check_in_place_or_apart(f"{name}_out", out, q)
            has_fp8_out |= out.dtype == _E4M3
    if q_scale is not None:
        sizes.match("q_scale", q_scale, "1", torch.float32)
        if not has_fp8_out:
            raise ArgumentError("q_scale: want None without an e4m3 q_rope_out or q_nope_out")
    if q_latent is not None and q_gamma is not None and q_latent_out is not None:
        sizes.match("q_latent", q_latent, "T Q", kv.dtype, strides="rows")
        sizes.match("q_gamma", q_gamma, "Q", *FLOATS64)
        sizes.match("q_latent_out", q_latent_out, "T Q", kv.dtype, strides="written")
        _check_in_place_or_apart("q_latent_out", q_latent_out, q_latent)
    elif not q_latent is q_gamma is q_latent_out is None:
        raise ArgumentError("q_latent, q_gamma, q_latent_out: want all or none")
    if positions is not None:
        sizes.match("positions", positions, "T", torch.int32, torch.int64)
    if (slot_mapping is None) != (batch is not None):
        raise ArgumentError(
            "slot_mapping: want it with PagedKVCache.layer(...) and without a batch, or neither"
        )
    if slot_mapping is not None:
        sizes.match("slot_mapping", slot_mapping, "T", torch.int32, torch.int64)
        if positions is None and fmt.rope_dim:
            raise ArgumentError("positions: want [T] with slot_mapping, got None")
    if rope_style not in ("interleaved", "half"):
        raise ArgumentError(f"rope_style: want interleaved or half, got {rope_style!r}")
    if rounding not in ("once", "hf"):
        raise ArgumentError(f"rounding: want once or hf, got {rounding!r}")
    if not 0 <= eps < float("inf"):
        raise ArgumentError(f"eps: want finite and >= 0, got {eps}")


def _check_in_place_or_apart(name: str, out: Tensor, source: Tensor) -> None:
    """``out`` is exactly its source, or does not start inside it.

    A packed buffer's own columns may be interleaved with the source's, so only the same first
    element with other strides is certain to be a mistake.
    """
    is_same = out.stride() == source.stride() and out.dtype == source.dtype
    if out.data_ptr() == source.data_ptr() and out.numel() and not is_same:
        raise LayoutError(
            f"{name}: want the input's strides {list(source.stride())} and dtype in place, "
            f"got {list(out.stride())} and {out.dtype}"
        )
