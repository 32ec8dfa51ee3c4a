"""mla_decode: out_t = softmax(scale * q_t . rows[0..pos_t]) . latents[0..pos_t], by online softmax.

A program takes a tile of BLOCK_T tokens of one request x BLOCK_H heads, and one split of that
request's keys. Splits write fp32 partial results, which merge_states puts together. Key blocks are
cut by position, never by page, so neither page size nor page order changes a bit.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages, PagedKVCache
from kvkern.kernels.config import KernelConfig, config_of_call
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.merge_states import merge_states
from kvkern.kernels.numerics import LN_2, compute_dtype, round_to
from kvkern.kernels.paging import (
    ANY_ALIGNMENT,
    NO_KEY,
    batch_fields,
    find_tile,
    load_block_pages,
    load_latent,
    load_pages,
    load_rope,
    num_tiles,
    row_fields,
)
from kvkern.layout import CacheFormat, FormatName

_FIXED_SPLIT_LEN = 2048  # keys, where a token's bits must not depend on its batch


@triton.jit(
    do_not_specialize=["num_requests", "num_tokens", "num_heads", "max_pages", "fixed_split_len"],
    do_not_specialize_on_alignment=ANY_ALIGNMENT,
)
def _mla_decode_kernel(
    q_ptr,  # [T, H, L+R]
    out_ptr,  # [num_splits, T, H, L]
    lse_ptr,  # fp32 [num_splits, T, H]
    latent_ptr,  # [slots, L]; packed: bytes [slots, L / 2]
    rope_ptr,  # [slots, R]
    group_scales_ptr,  # fp32 or e4m3 [slots, G]
    layer_scales_ptr,  # fp32 [2]
    offsets_ptr,  # int32 [B+1]
    cache_lengths_ptr,  # int32 [B]
    page_table_ptr,  # int32 [B, max_pages]
    softmax_scale,
    num_requests,
    num_tokens,
    num_heads,
    max_pages,
    fixed_split_len,  # keys; 0: every request cuts its own sequence evenly
    stride_q_token,
    stride_q_head,
    stride_latent,
    stride_rope,
    stride_scales,
    PAGE_SIZE: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    LN_2: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PACKED: tl.constexpr,
):
    # head blocks are neighbours, so that they share their keys in L2
    num_head_blocks = tl.cdiv(num_heads, BLOCK_H)
    tile = tl.program_id(0) // num_head_blocks
    head_block = tl.program_id(0) % num_head_blocks
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    request, q_start, q_end, first_token = find_tile(
        offsets_ptr, num_requests, num_tokens, tile, BLOCK_T
    )
    if first_token >= q_end:
        return
    is_request = request < num_requests
    cached = tl.load(cache_lengths_ptr + request, mask=is_request, other=0)
    seq_len = tl.where(is_request, cached + q_end - q_start, 0)
    table_ptr = page_table_ptr + request.to(tl.int64) * max_pages

    # rows of the tile: token-major, BLOCK_T x BLOCK_H of them
    BLOCK_M: tl.constexpr = BLOCK_T * BLOCK_H
    offs_m = tl.arange(0, BLOCK_M)
    token = first_token + offs_m // BLOCK_H
    head = head_block * BLOCK_H + offs_m % BLOCK_H
    mask_m = (token < q_end) & (head < num_heads)
    position = cached + token - q_start
    mask_real = mask_m & (token < tl.where(is_request, q_end, 0))
    own_page = load_pages(table_ptr, position, mask_real, max_pages, PAGE_SIZE)
    num_visible = tl.where(own_page >= 0, position + 1, 0)  # a padding token sees nothing

    dtype: tl.constexpr = compute_dtype(q_ptr)
    offs_l = tl.arange(0, BLOCK_L)
    row = token.to(tl.int64) * stride_q_token + head * stride_q_head
    mask_q = mask_m[:, None]
    if BLOCK_L != LATENT_DIM:
        mask_q = mask_q & (offs_l < LATENT_DIM)[None, :]
    q_latent = tl.load(q_ptr + row[:, None] + offs_l, mask=mask_q, other=0.0).to(dtype)
    if ROPE_DIM > 0:
        offs_r = tl.arange(0, BLOCK_R)
        mask_r = mask_m[:, None] & (offs_r < ROPE_DIM)[None, :]
        q_rope_ptrs = q_ptr + row[:, None] + LATENT_DIM + offs_r
        q_rope = tl.load(q_rope_ptrs, mask=mask_r, other=0.0).to(dtype)

    latent_scale = 1.0
    rope_scale = 1.0
    if layer_scales_ptr is not None:
        latent_scale = tl.load(layer_scales_ptr)
        rope_scale = tl.load(layer_scales_ptr + 1)
    scale_log2 = softmax_scale / LN_2

    # this split's keys, in whole blocks
    split_len = tl.cdiv(tl.cdiv(seq_len, num_splits), BLOCK_N) * BLOCK_N
    split_len = tl.where(fixed_split_len > 0, fixed_split_len, split_len)
    last_visible = cached + tl.minimum(first_token + BLOCK_T, q_end) - q_start
    begin = split * split_len
    end = tl.minimum(tl.minimum(begin + split_len, seq_len), last_visible)

    max_score = tl.full([BLOCK_M], -float("inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    page = load_block_pages(table_ptr, begin, end, max_pages, PAGE_SIZE, BLOCK_N)
    for first_key in range(begin, end, BLOCK_N):
        offs_n = first_key + tl.arange(0, BLOCK_N)
        is_there = offs_n < tl.where(page >= 0, end, 0)
        slots = page.to(tl.int64) * PAGE_SIZE + offs_n % PAGE_SIZE
        # the next block's pages, a block early: rows cannot be fetched before they are known
        page = load_block_pages(table_ptr, first_key + BLOCK_N, end, max_pages, PAGE_SIZE, BLOCK_N)
        latent = load_latent(
            latent_ptr, group_scales_ptr, slots, is_there, stride_latent, stride_scales,
            LATENT_DIM, BLOCK_L, GROUP, BLOCK_N, dtype, NATIVE_FP8, PACKED,
        )  # fmt: skip
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee") * latent_scale
        if ROPE_DIM > 0:
            rope = load_rope(
                rope_ptr, slots, is_there, stride_rope, ROPE_DIM, BLOCK_R, dtype, NATIVE_FP8
            )
            scores += tl.dot(q_rope, tl.trans(rope), input_precision="ieee") * rope_scale
        key = tl.where(is_there, offs_n, NO_KEY)
        scores = tl.where(key[None, :] < num_visible[:, None], scores, -float("inf"))

        new_max = tl.maximum(max_score, tl.max(scores, axis=1) * scale_log2)
        # a row that has seen no key yet keeps -inf, and must not subtract it from itself
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(scores * scale_log2 - shift[:, None])
        rescale = tl.exp2(max_score - shift)
        weight_sum = weight_sum * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(dtype), latent, acc, input_precision="ieee")
        max_score = new_max

    saw_none = weight_sum == 0.0
    weight_sum = tl.where(saw_none, 1.0, weight_sum)  # then max_score is -inf, and so is lse
    out = acc * (latent_scale / weight_sum)[:, None]
    lse = (max_score + tl.log2(weight_sum)) * LN_2
    out_row = (split.to(tl.int64) * num_tokens + token) * num_heads + head
    tl.store(
        out_ptr + out_row[:, None] * LATENT_DIM + offs_l,
        round_to(out, out_ptr.dtype.element_ty),
        mask=mask_q,
    )
    tl.store(lse_ptr + out_row, lse, mask=mask_m)


class Tiles(NamedTuple):
    """How a launch is cut up."""

    block_t: int
    block_h: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tiles(
    num_heads: int, max_query_len: int, fmt: CacheFormat, q_dtype: torch.dtype, gpu: Gpu
) -> Tiles:
    """Rows that share one read of the keys, and the keys of a block.

    The accumulator [rows, latent] is fp32 in registers: 64 x 512 is half of an SM's.
    """
    converts = fmt.latent_dtype != q_dtype
    if torch.float32 in (fmt.latent_dtype, q_dtype):  # no tensor cores: to check models with
        max_rows, block_n, num_stages = 16, 16, 1 if q_dtype == torch.float32 else 2
    elif not gpu.has_large_shared:
        max_rows, block_n, num_stages = 16, 32, 2
    elif gpu.capability < 90 or (converts and not fmt.is_quantised):
        # rows to be converted wait in registers, and take the place of query rows
        max_rows = (16 if fmt.group_scaled else 32) if converts else 64
        block_n, num_stages = 32, 2
    else:
        # see _spills for what 8 bits and fewer pay; sm_100 has not the shared memory for a third
        # bf16 stage
        max_rows, block_n = 64, 64 if fmt.is_quantised else 32
        num_stages = 3 if fmt.is_quantised or gpu.capability == 90 else 2
    block_h = min(triton.next_power_of_2(num_heads), max_rows)
    block_t = min(triton.next_power_of_2(max(max_query_len, 1)), max_rows // block_h)
    block_t = max(block_t, -(-16 // block_h))  # tl.dot wants 16 rows
    if max_rows == 64 and block_t * block_h == 16 and gpu.capability >= 90:
        block_n = 64  # few rows leave room for more keys in flight
    return Tiles(block_t, block_h, block_n, 8, num_stages)


def choose_num_splits(num_programs: int, max_seq_len: int, block_n: int, gpu: Gpu) -> int:
    """Enough splits that ``num_programs`` of them give every SM two, at least 4 blocks each.

    ``max_seq_len`` is a bound; a request cuts its own length, so a loose bound costs only programs
    that find nothing to do.
    """
    wanted = -(-2 * gpu.num_sms // max(num_programs, 1))
    return max(1, min(wanted, max_seq_len // (4 * block_n), 64))


def _call(
    q: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
    gpu: Gpu,
    fixed_split_len: int = 0,
) -> tuple[dict[str, Any], dict[str, Any]]:
    num_tokens, num_heads, _ = q.shape
    arguments = {
        **row_fields(pages, gpu),
        **batch_fields(batch),
        "q_ptr": q,
        "out_ptr": out,
        "lse_ptr": lse,
        "softmax_scale": softmax_scale,
        "num_requests": batch.num_requests,
        "num_tokens": num_tokens,
        "num_heads": num_heads,
        "fixed_split_len": fixed_split_len,
        "stride_q_token": q.stride(0),
        "stride_q_head": q.stride(1),
        "BLOCK_T": tiles.block_t,
        "BLOCK_H": tiles.block_h,
        "BLOCK_N": tiles.block_n,
        "LN_2": LN_2,
    }
    return arguments, {
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "enable_fp_fusion": True,
    }


def mla_decode(
    q: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    softmax_scale: float,
    num_splits: int | None,
    is_batch_invariant: bool,
    use_fast_accum: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Launch, and merge where keys were split. ``kvkern.mla_decode`` has checked the arguments."""
    num_tokens, num_heads, _ = q.shape
    if num_tokens * num_heads == 0:
        return
    gpu = gpu_of(q.device)
    max_query_len = num_tokens if batch.max_query_len is None else batch.max_query_len
    if is_batch_invariant:  # tiles are those of a token alone
        max_query_len = 1
    tiles = choose_tiles(num_heads, max_query_len, pages.format, q.dtype, gpu)
    head_blocks = triton.cdiv(num_heads, tiles.block_h)
    token_tiles = num_tiles(num_tokens, batch.num_requests, tiles.block_t)
    bound = batch.max_pages * pages.page_size
    max_seq_len = bound if batch.max_seq_len is None else batch.max_seq_len
    if is_batch_invariant:
        num_splits = max(triton.cdiv(max_seq_len, _FIXED_SPLIT_LEN), 1)
    elif num_splits is None:
        busy_tiles = triton.cdiv(num_tokens, tiles.block_t) * head_blocks
        num_splits = choose_num_splits(busy_tiles, max_seq_len, tiles.block_n, gpu)
    if num_splits == 1:
        outs, lses = out[None], lse[None]
    else:
        outs = out.new_empty(num_splits, *out.shape, dtype=torch.float32)
        lses = lse.new_empty(num_splits, *lse.shape)
    fixed_split_len = _FIXED_SPLIT_LEN if is_batch_invariant else 0
    arguments, options = _call(
        q, pages, batch, softmax_scale, outs, lses, tiles, gpu, fixed_split_len
    )
    grid = (token_tiles * head_blocks, num_splits)
    _mla_decode_kernel[grid](**arguments, **options)
    if num_splits > 1:
        merge_states(outs, lses, out, lse)


def _spills(fmt: CacheFormat) -> dict[str, Any]:
    """Measured on an H100, 128 heads, 128 requests of 4096 tokens: spilling is the faster way.

    fp8_token and nvfp4 have fp8_ds_mla's tiles, unmeasured.
    """
    if fmt.is_quantised:
        why = "64 rows are 2 (fp8) and 4 times (fp8_ds_mla) as fast as what does not spill"
        return {"spill_budget": 1280, "spill_reason": why}
    return {"spill_budget": 192, "spill_reason": "64 rows are 1.5 times as fast as 32"}


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Every format and q dtype that meet in serving, whole and split; each tile; odd dims."""
    gpu = Gpu(capability, num_sms=108)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    variants: list[tuple[FormatName, torch.dtype, int, int, int, int]] = [
        ("bf16", bf16, 512, 64, 128, 1),
        ("bf16", bf16, 512, 64, 16, 1),
        ("bf16", bf16, 512, 64, 16, 4),
        ("bf16", bf16, 256, 32, 40, 1),
        ("bf16", fp16, 512, 64, 128, 1),
        ("fp16", fp16, 512, 64, 128, 1),
        ("fp16", bf16, 512, 64, 128, 1),
        ("fp32", fp32, 512, 64, 16, 1),
        ("fp32", bf16, 512, 64, 16, 1),
        ("bf16", fp32, 512, 64, 16, 1),
        ("fp8", bf16, 512, 64, 128, 1),
        ("fp8", bf16, 512, 64, 16, 1),
        ("fp8", fp16, 512, 64, 128, 1),
        ("fp8", bf16, 128, 0, 5, 2),
        ("fp8", fp32, 512, 64, 16, 1),
    ]
    grouped: tuple[FormatName, ...] = ("fp8_token", "fp8_ds_mla", "nvfp4")
    for name in grouped:
        variants += [
            (name, bf16, 512, 64, 128, 1),
            (name, bf16, 512, 64, 16, 1),
            (name, bf16, 384, 48, 8, 1),
            (name, fp32, 512, 64, 16, 1),
        ]
    for name, q_dtype, latent_dim, rope_dim, num_heads, max_query_len in variants:
        fmt = CacheFormat(name, latent_dim, rope_dim)
        pages = PagedKVCache(fmt, num_layers=1, num_pages=1, page_size=64).layer(0)
        q = torch.empty(1, num_heads, fmt.row_dim, dtype=q_dtype)
        partial, lse = torch.empty(1, 1, num_heads, latent_dim), torch.empty(1, 1, num_heads)
        batch = PagedBatch([0, 1], [0], [[0]])
        tiles = choose_tiles(num_heads, max_query_len, fmt, q_dtype, gpu)
        for kind, out in (("split", partial), ("whole", partial.to(q_dtype))):
            if kind == "whole" and q_dtype == fp32:
                continue  # the same kernel
            arguments, options = _call(q, pages, batch, 0.1, out, lse, tiles, gpu)
            dims = f"L{latent_dim}-R{rope_dim}-H{num_heads}-q{max_query_len}"
            label = f"{name}-{q_dtype}-{dims}-{kind}".replace("torch.", "")
            yield config_of_call(_mla_decode_kernel, label, arguments, options, **_spills(fmt))
