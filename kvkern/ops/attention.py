"""Attention over the paged latent cache, and the merge of partial results."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kvkern.backends import DecodeCall, choose, takes_e4m3_queries
from kvkern.cache.storage import CacheView
from kvkern.errors import ArgumentError
from kvkern.ops._known import KnownCalls, kind_of
from kvkern.ops._sizes import FLOATS64, Sizes

_E4M3 = torch.float8_e4m3fn


class AttentionOutput(NamedTuple):
    """What every attention op returns."""

    out: Tensor
    lse: Tensor  # natural log, fp32


def mla_decode(
    q: Tensor,
    cache: CacheView,
    *,
    softmax_scale: float,
    q_scale: Tensor | None = None,
    out: Tensor | None = None,
    num_splits: int | None = None,
    deterministic: Literal["run_to_run", "batch_invariant"] = "run_to_run",
    use_fast_accum: bool = False,
    backend: str = "auto",
) -> AttentionOutput:
    """Attend each query to its request's cached tokens, up to and including its own position.

    The absorbed form: queries are projected into the latent space, so the cached rows are both
    keys (L+R columns) and values (L columns). Call it after ``write_kv`` has stored the step's
    tokens. A request may have any number of new tokens; the mask is causal, bottom right: the
    last one sees every token.

    Args:
        q: ``[T, H, L+R]``, bf16, fp16 or fp32 (fp64: reference only), last dim contiguous; any
            number of heads. Or e4m3 with ``q_scale``, as ``write_kv`` makes it: backend
            ``"hopper"`` multiplies it as it is on an fp8 cache; elsewhere it is dequantised to bf16
            first.
        cache: ``PagedKVCache.view(layer, batch)`` in any format. Cached values are dequantised
            and, if need be, rounded to q's dtype.
        softmax_scale: multiplies the scores; for MLA ``(nope + rope) ** -0.5`` of the model's
            head dims, times any YaRN correction: never ``(L + R) ** -0.5``.
        q_scale: fp32 ``[1]``, with e4m3 q only: real query = stored x ``q_scale``.
        out: ``[T, H, L]`` in q's dtype, bf16 for e4m3 q, contiguous, filled if given; must not
            overlap q.
        num_splits: into how many parts each request's keys are cut; the default fills the card.
            Another number regroups the sums: equal up to rounding.
        deterministic: ``"run_to_run"``: the same call gives the same bits. ``"batch_invariant"``:
            a token's bits are also the same alone and in any batch, as keys are cut at fixed
            positions, which costs time; not with ``num_splits``.
        use_fast_accum: a kernel that multiplies in fp8 may sum over keys in the tensor core, which
            keeps some 13 bits, and round queries to e4m3. Faster on an fp8 cache with many heads.
            Values with a mean come out too small, by 1% where a program sums 1000 keys, and more
            where it sums more. False: sums over keys are fp32, queries keep 8 bits or more.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``out`` ``[T, H, L]`` and ``lse`` ``[T, H]``, fp32, natural log. A query that sees no key,
        and a padding token (past ``input_row_offsets[-1]``, or whose page is -1), has ``out = 0``
        and ``lse = -inf``. Keys on a page of -1 are absent. Memory outside the requests' tokens
        is never read into a result. Backend ``"hopper"``, which ``"auto"`` takes on sm_90, rounds
        the attention weights of an fp8 cache to e4m3 if a request may have more than 32 rows
        (new tokens x heads): 1.2% of ``out``, below what storing e4m3 cost.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError, ArgumentError: an
            argument is not as above.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: arXiv:2405.04434, section 2.1.2 (the absorbed form); arXiv:2205.14135 (online softmax).
    """
    options = (softmax_scale, num_splits, deterministic, use_fast_accum, backend)
    key = _kind_of_decode(cache, q, q_scale, out, options)
    again = _KNOWN.get(key)
    if again is not None:
        num_tokens, num_heads, _ = q.shape
        pages, batch = cache
        batch.check_num_tokens("q", num_tokens)
        if out is None:  # torch.empty, and sizes one by one, as the cheapest of their kinds
            dtype = q.dtype if q_scale is None else torch.bfloat16
            latent_dim = pages.format.kv_lora_rank
            out = torch.empty(num_tokens, num_heads, latent_dim, dtype=dtype, device=pages.device)
        lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=pages.device)
        again(q, pages, batch, out, lse, q_scale)
        return AttentionOutput(out, lse)
    fmt = cache.format
    sizes = Sizes(cache.pages.device, L=fmt.kv_lora_rank, K=fmt.row_dim, **{"1": 1})
    sizes.match("q", q, "T H K", *FLOATS64, _E4M3, strides="rows")
    out_dtype = torch.bfloat16 if q.dtype == _E4M3 else q.dtype
    if (q_scale is None) == (q.dtype == _E4M3):
        raise ArgumentError(f"q_scale: want it with e4m3 q and no other, got q in {q.dtype}")
    if q_scale is not None:
        sizes.match("q_scale", q_scale, "1", torch.float32)
    cache.batch.check_num_tokens("q", len(q))
    _check_scale(softmax_scale)
    if num_splits is not None and num_splits < 1:
        raise ArgumentError(f"num_splits: want >= 1, got {num_splits}")
    if deterministic not in ("run_to_run", "batch_invariant"):
        raise ArgumentError(
            f"deterministic: want run_to_run or batch_invariant, got {deterministic!r}"
        )
    is_invariant = deterministic == "batch_invariant"
    if is_invariant and num_splits is not None:
        raise ArgumentError(f"num_splits: want None with batch_invariant, got {num_splits}")
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], fmt.kv_lora_rank, dtype=out_dtype)
    sizes.match("out", out, "T H L", out_dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    batch, pages = cache.batch, cache.pages
    max_rows = None if batch.max_query_len is None else batch.max_query_len * q.shape[1]
    call = DecodeCall(q.dtype, fmt, pages.page_size, num_splits, is_invariant, max_rows)
    scales: dict[str, Tensor] = {}
    if q_scale is not None:
        if takes_e4m3_queries("mla_decode", backend, q.device, call):
            scales["q_scale"] = q_scale
        else:
            q = (q.float() * q_scale).to(out_dtype)
            call = call._replace(q_dtype=out_dtype)
    run = choose("mla_decode", backend, q.device, q.dtype, call)
    again = run(
        q, pages, batch, softmax_scale, num_splits, is_invariant, use_fast_accum, out, lse, **scales
    )
    if q_scale is None or scales:
        _KNOWN.remember(key, again)
    return AttentionOutput(out, lse)


_KNOWN = KnownCalls(most=4096)


def _kind_of_decode(
    cache: CacheView,
    q: Tensor,
    q_scale: Tensor | None,
    out: Tensor | None,
    options: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Everything that a check, or the choice of a kernel, looks at; nothing without tensors."""
    pages, batch = cache
    bounds = (batch.num_requests, batch.max_query_len, batch.max_pages)
    try:
        kinds = (kind_of(q), q_scale is None or kind_of(q_scale), out is None or kind_of(out))
    except (AttributeError, RuntimeError):  # not all have an address: the checks say which
        return ()
    return (pages.kind, bounds, options, *kinds)


def mla_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor | None,
    v: Tensor,
    cache: CacheView,
    *,
    softmax_scale: float,
    w_uk: Tensor | None = None,
    w_uv: Tensor | None = None,
    context_chunk: int = 8192,
    out: Tensor | None = None,
    backend: str = "auto",
) -> AttentionOutput:
    """Attend a step's ragged new tokens to one another and to what was cached before the step.

    The unabsorbed form: each head has its own keys of N = nope columns and values of V columns,
    and all heads share the rope key. New tokens attend causally within their request. The tokens
    that were cached before the step are gathered from the pages chunk by chunk, expanded with
    ``w_uk`` and ``w_uv``, and merged in by log-sum-exp: every one of them, however many chunks
    that takes.

    Args:
        q: ``[T, H, N+R]``, bf16, fp16 or fp32 (fp64: reference only), rope columns rotated; last
            dim contiguous.
        k_nope: ``[T, H, N]`` in q's dtype, last dim contiguous.
        k_rope: ``[T, R]`` in q's dtype, rotated, last dim contiguous; None only if R is 0.
        v: ``[T, H, V]`` in q's dtype, last dim contiguous.
        cache: ``PagedKVCache.view(layer, batch)``; only tokens before this step are read from its
            pages, so ``write_kv`` may come before or after.
        softmax_scale: multiplies the scores, as in ``mla_decode``.
        w_uk: ``[H, N, L]``, w_uv: ``[H, L, V]``, in q's dtype, any strides
            (``kvkern.absorb_weights``); needed if a request may have cached tokens.
        context_chunk: how many cached tokens, over all requests, are expanded at a time; bounds
            the workspace.
        out: ``[T, H, V]`` in q's dtype, contiguous, filled if given; must not overlap an input.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``out`` ``[T, H, V]`` and ``lse`` ``[T, H]``, fp32, natural log. A padding token (past
        ``input_row_offsets[-1]``, or whose page is -1) has ``out = 0`` and ``lse = -inf``; as a
        key it is absent.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError, ArgumentError: an
            argument is not as above.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: arXiv:2405.04434, section 2.1.2; arXiv:2205.14135; merging: arXiv:1805.02867.
    """
    fmt, batch = cache.format, cache.batch
    sizes = Sizes(cache.pages.device, L=fmt.kv_lora_rank, R=fmt.rope_dim)
    sizes.match("k_nope", k_nope, "T H N", *FLOATS64, strides="rows")
    sizes.match("v", v, "T H V", k_nope.dtype, strides="rows")
    sizes.known["K"] = sizes["N"] + fmt.rope_dim
    sizes.match("q", q, "T H K", k_nope.dtype, strides="rows")
    if k_rope is not None:
        sizes.match("k_rope", k_rope, "T R", q.dtype, strides="rows")
    elif fmt.rope_dim:
        raise ArgumentError(f"k_rope: want [T={sizes['T']}, R={fmt.rope_dim}], got None")
    if w_uk is not None and w_uv is not None:
        sizes.match("w_uk", w_uk, "H N L", q.dtype, strides="any")
        sizes.match("w_uv", w_uv, "H L V", q.dtype, strides="any")
    elif w_uk is not None or w_uv is not None:
        raise ArgumentError("w_uk, w_uv: want both or neither")
    elif batch.max_cache_len != 0:
        raise ArgumentError(
            "w_uk, w_uv: want both, to expand the cached tokens; got None with cache_lengths "
            f"up to {'any' if batch.max_cache_len is None else batch.max_cache_len}"
        )
    batch.check_num_tokens("q", len(q))
    _check_scale(softmax_scale)
    if context_chunk < 1:
        raise ArgumentError(f"context_chunk: want >= 1, got {context_chunk}")
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    sizes.match("out", out, "T H V", q.dtype)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    run = choose("mla_prefill", backend, q.device, q.dtype)
    if torch.is_autocast_enabled(q.device.type):  # it would expand cached tokens in its own dtype
        run = torch.autocast(q.device.type, enabled=False)(run)
    run(
        q, k_nope, k_rope, v, cache.pages, batch, softmax_scale, w_uk, w_uv, context_chunk, out, lse
    )
    return AttentionOutput(out, lse)


def merge_states(
    outs: Tensor, lses: Tensor, *, out: Tensor | None = None, backend: str = "auto"
) -> AttentionOutput:
    """Merge attention over disjoint sets of keys into attention over all of them.

    Args:
        outs: ``[S, T, H, V]``, bf16, fp16 or fp32 (fp64: reference only), contiguous: S partial
            results.
        lses: ``[S, T, H]``, fp32, natural log, contiguous. ``-inf``, or ``+inf`` as some kernels
            mark it, is a part that saw no key; its ``outs`` are never read. Log-sum-exps in base
            2 must be multiplied by ln 2 first.
        out: ``[T, H, V]`` in ``outs.dtype``, contiguous, filled if given; must not overlap
            ``outs``.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``out``, and ``lse`` ``[T, H]``, fp32, natural log. A row for which no part saw a key has
        ``out = 0`` and ``lse = -inf``.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError: an argument is not as
            above.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: arXiv:1805.02867: the merge is associative, so parts may be grouped freely.
    """
    sizes = Sizes(outs.device)
    sizes.match("outs", outs, "S T H V", *FLOATS64)
    sizes.match("lses", lses, "S T H", torch.float32)
    if out is None:
        out = outs.new_empty(outs.shape[1:])
    sizes.match("out", out, "T H V", outs.dtype)
    lse = lses.new_empty(lses.shape[1:])
    choose("merge_states", backend, outs.device, outs.dtype)(outs, lses, out, lse)
    return AttentionOutput(out, lse)


def _check_scale(softmax_scale: float) -> None:
    if not 0 < softmax_scale < float("inf"):
        raise ArgumentError(f"softmax_scale: want finite and > 0, got {softmax_scale}")
