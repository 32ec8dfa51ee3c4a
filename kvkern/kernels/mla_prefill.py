"""mla_prefill: keys = [cached rows expanded by w_uk, w_uv | new keys]; online softmax over both.

One kernel serves both parts. A program takes BLOCK_T tokens of one request and one head. Cached
rows come chunk by chunk as a dense ``[B, chunk]`` block, each launch going on from the fp32 state
that the one before left; the new tokens, causal, come last and write the result.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.kernels.config import SMALL_SPILLS, KernelConfig, config_of_call, spills
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.gather_kv import gather_kv
from kvkern.kernels.numerics import LN_2, compute_dtype, round_to
from kvkern.kernels.paging import (
    ANY_ALIGNMENT,
    NO_KEY,
    batch_fields,
    find_tile,
    load_pages,
    num_tiles,
)


@triton.jit
def _load_rows(
    ptr, offs_row, mask_row, DIM: tl.constexpr, BLOCK_D: tl.constexpr, DTYPE: tl.constexpr
):
    """``[N, BLOCK_D]`` in DTYPE; rows masked out and columns past DIM are 0."""
    offs_d = tl.arange(0, BLOCK_D)
    mask = mask_row[:, None]
    if BLOCK_D != DIM:
        mask = mask & (offs_d < DIM)[None, :]
    return tl.load(ptr + offs_row[:, None] + offs_d, mask=mask, other=0.0).to(DTYPE)


@triton.jit(
    do_not_specialize=[
        "num_requests", "num_tokens", "num_heads", "max_pages", "chunk_start",
        "chunk_len",
    ],
    do_not_specialize_on_alignment=ANY_ALIGNMENT,
)  # fmt: skip
def _mla_prefill_kernel(
    q_ptr,  # [T, H, N+R]
    k_nope_ptr,  # [keys, H, N]
    k_rope_ptr,  # [keys, R]
    v_ptr,  # [keys, H, V]
    out_ptr,  # [T, H, V]
    state_ptr,  # fp32 [T, H, V], the result so far
    lse_ptr,  # fp32 [T, H]
    offsets_ptr,  # int32 [B+1]
    cache_lengths_ptr,  # int32 [B]
    page_table_ptr,  # int32 [B, max_pages]
    softmax_scale,
    num_requests,
    num_tokens,
    num_heads,
    max_pages,
    chunk_start,  # CONTEXT: first position of the chunk
    chunk_len,  # CONTEXT: rows a request has in k_nope, k_rope and v
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_k_rope,
    stride_v_token,
    stride_v_head,
    CONTEXT: tl.constexpr,  # keys are a chunk of cached tokens, all visible; else the new tokens
    RESUME: tl.constexpr,  # go on from state_ptr and lse_ptr
    PAGE_SIZE: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LN_2: tl.constexpr,
):
    head = tl.program_id(0)
    # the last tiles see the most keys: they start first, so that none is left running alone
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    request, q_start, q_end, first_token = find_tile(
        offsets_ptr, num_requests, num_tokens, tile, BLOCK_T
    )
    if first_token >= q_end:
        return
    is_request = request < num_requests
    cached = tl.load(cache_lengths_ptr + request, mask=is_request, other=0)
    table_ptr = page_table_ptr + request.to(tl.int64) * max_pages

    dtype: tl.constexpr = compute_dtype(q_ptr)
    token = first_token + tl.arange(0, BLOCK_T)
    mask_t = token < q_end
    position = cached + token - q_start
    mask_real = token < tl.where(is_request, q_end, 0)
    own_page = load_pages(table_ptr, position, mask_real, max_pages, PAGE_SIZE)
    last_key = token - q_start
    if CONTEXT:
        last_key = tl.full([BLOCK_T], NO_KEY - 1, tl.int32)
    last_key = tl.where(own_page >= 0, last_key, -1)  # a padding token sees nothing
    q_row = token.to(tl.int64) * stride_q_token + head * stride_q_head
    q_nope = _load_rows(q_ptr, q_row, mask_t, NOPE_DIM, BLOCK_D, dtype)
    if ROPE_DIM > 0:
        q_rope = _load_rows(q_ptr + NOPE_DIM, q_row, mask_t, ROPE_DIM, BLOCK_R, dtype)

    if CONTEXT:
        first_row = request.to(tl.int64) * chunk_len
        first_position = chunk_start
        num_keys = tl.minimum(tl.maximum(cached - chunk_start, 0), chunk_len)
    else:
        first_row = q_start.to(tl.int64)
        first_position = cached
        num_keys = tl.minimum(first_token + BLOCK_T, q_end) - q_start
    num_keys = tl.where(is_request, num_keys, 0)
    scale_log2 = softmax_scale / LN_2

    offs_v = tl.arange(0, BLOCK_V)
    out_row = token.to(tl.int64) * num_heads + head
    mask_out = mask_t[:, None] & (offs_v < VALUE_DIM)[None, :]
    if RESUME:
        max_score = tl.load(lse_ptr + out_row, mask=mask_t, other=-float("inf")) / LN_2
        weight_sum = tl.where(max_score == -float("inf"), 0.0, 1.0)
        state_ptrs = state_ptr + out_row[:, None] * VALUE_DIM + offs_v
        acc = tl.load(state_ptrs, mask=mask_out, other=0.0)
    else:
        max_score = tl.full([BLOCK_T], -float("inf"), tl.float32)
        weight_sum = tl.zeros([BLOCK_T], tl.float32)
        acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)

    key = tl.arange(0, BLOCK_N)
    page = load_pages(table_ptr, first_position + key, key < num_keys, max_pages, PAGE_SIZE)
    for first_key in range(0, num_keys, BLOCK_N):
        key = first_key + tl.arange(0, BLOCK_N)
        is_key = key < num_keys
        is_there = page >= 0  # hides the scores and the values of a key on a page of -1
        # the next block's pages, a block early: what is fetched waits for them
        later = key + BLOCK_N
        page = load_pages(table_ptr, first_position + later, later < num_keys, max_pages, PAGE_SIZE)
        row = first_row + key
        k_row = row * stride_k_token + head * stride_k_head
        k_nope = _load_rows(k_nope_ptr, k_row, is_key, NOPE_DIM, BLOCK_D, dtype)
        scores = tl.dot(q_nope, tl.trans(k_nope), input_precision="ieee")
        if ROPE_DIM > 0:
            k_rope = _load_rows(k_rope_ptr, row * stride_k_rope, is_key, ROPE_DIM, BLOCK_R, dtype)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        key = tl.where(is_there, key, NO_KEY)
        scores = tl.where(key[None, :] <= last_key[:, None], scores, -float("inf"))

        new_max = tl.maximum(max_score, tl.max(scores, axis=1) * scale_log2)
        # a row that has seen no key yet keeps -inf, and must not subtract it from itself
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(scores * scale_log2 - shift[:, None])
        rescale = tl.exp2(max_score - shift)
        weight_sum = weight_sum * rescale + tl.sum(weights, axis=1)
        v_row = row * stride_v_token + head * stride_v_head
        values = _load_rows(v_ptr, v_row, is_there, VALUE_DIM, BLOCK_V, dtype)
        acc = tl.dot(weights.to(dtype), values, acc * rescale[:, None], input_precision="ieee")
        max_score = new_max

    weight_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)  # saw none: max_score is -inf
    out = round_to(acc / weight_sum[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_row[:, None] * VALUE_DIM + offs_v, out, mask=mask_out)
    tl.store(lse_ptr + out_row, (max_score + tl.log2(weight_sum)) * LN_2, mask=mask_t)


class Tiles(NamedTuple):
    """How a launch is cut up."""

    block_t: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tiles(max_query_len: int, widest_dim: int, itemsize: int, gpu: Gpu) -> Tiles:
    """Tokens and keys of a program: the most that neither spill nor pass shared memory.

    Args: the most new tokens of a request; the larger of nope and value dim; bytes of a q element.
    """
    if gpu.capability == 0:  # interpreted: a block costs milliseconds whatever its size
        return Tiles(32, 32, 4, 1)
    if itemsize == 4:  # to check models with, not to serve: fp32 products take no tensor cores
        return Tiles(16, 16, 8, 1)
    if widest_dim > 128 or not gpu.has_large_shared:
        return Tiles(64, 32, 8, 2)
    if max_query_len <= 64 or gpu.capability < 90:
        return Tiles(64, 64, 8, 2)
    if gpu.capability == 90:
        # two programs an SM: 1.2 times as fast on an H100, though some registers spill, as
        # (128, 64, 8, 3), which fills the SM and spills nothing
        return Tiles(128, 32, 4, 3)
    return Tiles(128, 64, 8, 2)


def _call(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor | None,
    v: Tensor,
    batch: PagedBatch,
    page_size: int,
    softmax_scale: float,
    chunk: tuple[int, int] | None,
    state: Tensor | None,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
) -> tuple[tuple[int, int], dict[str, Any], dict[str, Any]]:
    """The launch over the new tokens, or over ``chunk`` (start, length) of the cached ones.

    Keys and values are ``[rows, H, N]``, ``[rows, R]`` and ``[rows, H, V]``. With ``state`` the
    kernel goes on from it and from ``lse``.
    """
    num_tokens, num_heads, qk_dim = q.shape
    rope_dim = 0 if k_rope is None else k_rope.shape[-1]
    nope_dim, value_dim = qk_dim - rope_dim, v.shape[-1]
    arguments = {
        **batch_fields(batch),
        "q_ptr": q,
        "k_nope_ptr": k_nope,
        "k_rope_ptr": k_rope,
        "v_ptr": v,
        "out_ptr": out,
        "state_ptr": state,
        "lse_ptr": lse,
        "softmax_scale": softmax_scale,
        "num_requests": batch.num_requests,
        "num_tokens": num_tokens,
        "num_heads": num_heads,
        "PAGE_SIZE": page_size,
        "chunk_start": chunk[0] if chunk else 0,
        "chunk_len": chunk[1] if chunk else 0,
        "stride_q_token": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_k_token": k_nope.stride(0),
        "stride_k_head": k_nope.stride(1),
        "stride_k_rope": 0 if k_rope is None else k_rope.stride(0),
        "stride_v_token": v.stride(0),
        "stride_v_head": v.stride(1),
        "CONTEXT": chunk is not None,
        "RESUME": state is not None,
        "NOPE_DIM": nope_dim,
        "ROPE_DIM": rope_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": triton.next_power_of_2(nope_dim),
        "BLOCK_R": max(triton.next_power_of_2(rope_dim), 16),
        "BLOCK_V": triton.next_power_of_2(value_dim),
        "BLOCK_T": tiles.block_t,
        "BLOCK_N": tiles.block_n,
        "LN_2": LN_2,
    }
    grid = (num_heads, num_tiles(num_tokens, batch.num_requests, tiles.block_t))
    return (
        grid,
        arguments,
        {
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
            "enable_fp_fusion": True,
        },
    )


def mla_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor | None,
    v: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    softmax_scale: float,
    w_uk: Tensor | None,
    w_uv: Tensor | None,
    context_chunk: int,
    out: Tensor,
    lse: Tensor,
) -> None:
    """One launch a chunk of context, then one for the new tokens. Arguments are checked."""
    num_tokens, num_heads, _ = q.shape
    if num_tokens * num_heads == 0:
        return
    gpu = gpu_of(q.device)
    max_query_len = num_tokens if batch.max_query_len is None else batch.max_query_len
    widest_dim = max(k_nope.shape[-1], v.shape[-1])
    tiles = choose_tiles(max_query_len, widest_dim, q.element_size(), gpu)

    def attend(
        keys: tuple[Tensor, Tensor | None, Tensor],
        chunk: tuple[int, int] | None,
        state: Tensor | None,
        result: Tensor,
    ) -> None:
        grid, arguments, options = _call(
            q, *keys, batch, pages.page_size, softmax_scale, chunk, state, result, lse, tiles
        )
        _mla_prefill_kernel[grid](**arguments, **options)

    state = None
    bound = batch.max_pages * pages.page_size
    max_cache_len = bound if batch.max_cache_len is None else batch.max_cache_len
    if w_uk is not None and w_uv is not None and max_cache_len and batch.num_requests:
        chunk_len = min(max(context_chunk // batch.num_requests, 1), max_cache_len)
        result = torch.empty_like(out, dtype=torch.float32)
        rows = q.new_empty(batch.num_requests, chunk_len, pages.format.row_dim)
        for start in range(0, max_cache_len, chunk_len):
            gather_kv(pages, batch, start, False, rows)
            attend(_expand(rows, w_uk, w_uv), (start, chunk_len), state, result)
            state = result
    attend((k_nope, k_rope, v), None, state, out)


def _expand(rows: Tensor, w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Cached rows ``[B, chunk, L+R]`` as keys and values of every head."""
    latent, rope = rows.flatten(0, 1).split([w_uk.shape[-1], rows.shape[-1] - w_uk.shape[-1]], -1)
    k_nope = torch.matmul(latent, w_uk.mT).transpose(0, 1)  # [H, rows, N] seen as [rows, H, N]
    v = torch.matmul(latent, w_uv).transpose(0, 1)
    return k_nope, rope if rope.shape[-1] else None, v


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """The dims of every model family; both ways to start and to end; each dtype."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for nope_dim, rope_dim, value_dim, dtype, max_query_len in [
        (128, 64, 128, bf16, 32),
        (128, 64, 128, bf16, 4096),
        (192, 64, 256, bf16, 4096),
        (64, 32, 64, bf16, 4096),
        (256, 0, 256, bf16, 4096),
        (96, 48, 128, bf16, 4096),
        (128, 64, 128, fp16, 4096),
        (128, 64, 128, fp32, 4096),
        (192, 64, 256, fp32, 4096),
    ]:
        batch = PagedBatch([0, 1], [0], [[0]])
        q = torch.empty(1, 16, nope_dim + rope_dim, dtype=dtype)
        k_nope = torch.empty(1, 16, nope_dim, dtype=dtype)
        k_rope = torch.empty(1, rope_dim, dtype=dtype) if rope_dim else None
        v = torch.empty(1, 16, value_dim, dtype=dtype)
        state, lse = torch.empty(1, 16, value_dim), torch.empty(1, 16)
        widest_dim, gpu = max(nope_dim, value_dim), Gpu(capability, num_sms=108)
        tiles = choose_tiles(max_query_len, widest_dim, dtype.itemsize, gpu)
        budget = SMALL_SPILLS
        if dtype == fp32:
            budget = spills("fp32 checks models, serves none", 1024)
        elif capability == 90:
            budget = spills("see choose_tiles: faster all the same", 640, newer=656)
        for kind, chunk, resumed, out in [
            ("alone", None, None, v),
            ("context", (0, 64), state, state),
            ("after-context", None, state, v),
        ]:
            _, arguments, options = _call(
                q, k_nope, k_rope, v, batch, 64, 0.1, chunk, resumed, out, lse, tiles
            )
            dims = f"N{nope_dim}-R{rope_dim}-V{value_dim}-q{max_query_len}"
            label = f"{dtype}-{dims}-{kind}".replace("torch.", "")
            yield config_of_call(_mla_prefill_kernel, label, arguments, options, **budget)
