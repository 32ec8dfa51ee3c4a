"""mla_decode: out_t = softmax(scale * q_t . rows[0..pos_t]) . latents[0..pos_t], by online softmax.

A program takes a tile of BLOCK_T tokens of one request x BLOCK_H heads, and one split of that
request's keys. Splits write fp32 partial results, which merge_states puts together. Key blocks are
cut by position, never by page, so neither page size nor page order changes a bit.

Some branches of the loop are taken every time, which Triton does not know (and LLVM does: machine
code has none of them). Where Triton sees one matrix product follow from another, it has each
warpgroup compute all of the first; a branch between them hides that, and halves the scores' cost.
It also keeps what is in a branch behind the next block's fetch, so that the fetch goes first.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages, PagedKVCache
from kvkern.kernels.config import KernelConfig, config_of_call, spills
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
_LONG = 8192  # keys that a program takes at most, while there are splits


@triton.jit(
    do_not_specialize=[
        "num_requests",
        "num_tokens",
        "num_heads",
        "max_pages",
        "num_equal",
        "max_split_len",
    ],
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
    num_equal,  # parts that a request is cut in
    max_split_len,  # keys; in more if one were longer, as far as there are splits
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
    NUM_STAGES: tl.constexpr,
    SHARE_SCORES: tl.constexpr,
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

    # this split's keys, in whole blocks
    split_len = tl.minimum(tl.cdiv(seq_len, num_equal), max_split_len)
    split_len = tl.maximum(split_len, tl.cdiv(seq_len, num_splits))
    split_len = tl.cdiv(split_len, BLOCK_N) * BLOCK_N
    last_visible = cached + tl.minimum(first_token + BLOCK_T, q_end) - q_start
    begin = split * split_len
    end = tl.minimum(tl.minimum(begin + split_len, seq_len), last_visible)
    if (begin >= end) & (num_splits > 1):  # merge_states reads no more of it
        out_row = (split.to(tl.int64) * num_tokens + token) * num_heads + head
        tl.store(lse_ptr + out_row, tl.full([BLOCK_M], -float("inf"), tl.float32), mask=mask_m)
        return

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

    num_seen_by_all = tl.min(tl.where(mask_m, num_visible, NO_KEY), axis=0)
    max_score = tl.full([BLOCK_M], -float("inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    page = load_block_pages(table_ptr, begin, end, max_pages, PAGE_SIZE, BLOCK_N)
    for first_key in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        offs_n = first_key + tl.arange(0, BLOCK_N)
        is_there = offs_n < tl.where(page >= 0, end, 0)
        if SHARE_SCORES and PAGE_SIZE % BLOCK_N == 0:  # fewer instructions for addresses
            first_slot = page.to(tl.int64) * PAGE_SIZE + first_key % PAGE_SIZE
            slots = tl.arange(0, BLOCK_N)
            may_hide = (page < 0) | (first_key + BLOCK_N > num_seen_by_all)
        else:
            first_slot = 0
            slots = page.to(tl.int64) * PAGE_SIZE + offs_n % PAGE_SIZE
            may_hide = first_key < end  # always: looking at all pages takes longer than masking
        # the next block's pages, a block early: rows cannot be fetched before they are known
        page = load_block_pages(table_ptr, first_key + BLOCK_N, end, max_pages, PAGE_SIZE, BLOCK_N)
        scales_ptr = group_scales_ptr
        if group_scales_ptr is not None:
            scales_ptr += first_slot * stride_scales
        latent = load_latent(
            latent_ptr + first_slot * stride_latent, scales_ptr, slots, is_there, stride_latent,
            stride_scales, LATENT_DIM, BLOCK_L, GROUP, BLOCK_N, dtype, NATIVE_FP8, PACKED,
        )  # fmt: skip
        latent_t = tl.trans(latent)
        if not SHARE_SCORES or first_key < end:  # always
            scores = tl.dot(q_latent, latent_t, input_precision="ieee") * latent_scale
        else:
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if ROPE_DIM > 0:
            rope = load_rope(
                rope_ptr + first_slot * stride_rope, slots, is_there, stride_rope, ROPE_DIM,
                BLOCK_R, dtype, NATIVE_FP8,
            )  # fmt: skip
            rope_t = tl.trans(rope)
        if not SHARE_SCORES or begin < end:  # always
            if ROPE_DIM > 0:
                rope_scores = tl.dot(q_rope, rope_t, input_precision="ieee")
                if layer_scales_ptr is None:
                    scores += rope_scores
                else:  # left to a compiler, which product is rounded depends on the page size
                    scores = tl.fma(rope_scores, rope_scale, scores)
            if not SHARE_SCORES or may_hide:
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
    share_scores: bool  # whether warpgroups compute parts of the scores, not each all of them
    num_resident: int  # programs that an SM holds at a time, with 512 latent dims


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
    rows = block_t * block_h
    if gpu.capability >= 90 and max_rows == 64 and rows > 16:
        # its fast matrix instructions take 64 rows: on an H100, 16 requests of 8192 tokens and 32
        # heads take 85 us in half-empty tiles, 118 us in tiles of 32 rows (bf16); 72 and 106 (fp8)
        block_h, rows = 64 // block_t, 64
    # On an H100, 128 requests of 4096 tokens and 128 heads take 410 us instead of 732 (bf16), 469
    # of 911 (fp8), 569 of 918 (fp8_ds_mla). Unmeasured elsewhere; on sm_80 it spills 12 KB.
    share_scores = gpu.capability == 90 and rows == 64
    if share_scores:  # a block is fetched during all of the one before
        block_n, num_stages = 64, 2
    elif max_rows == 64 and rows == 16 and gpu.capability >= 90:
        block_n = 64  # few rows leave room for more keys in flight
    num_resident = 2 if gpu.capability == 80 and rows == 16 and not converts else 1
    return Tiles(block_t, block_h, block_n, 8, num_stages, share_scores, num_resident)


def choose_splits(num_programs: int, max_seq_len: int, tiles: Tiles, gpu: Gpu) -> tuple[int, int]:
    """The most splits of a request, and in how many one is cut that is not long.

    In as many as the card holds at a time of ``num_programs`` each, of at least 4 blocks: one too
    many is another round for all. On an H100, 128 requests of 4096 tokens and 16 heads take 215 us
    whole, 230 us in 2 splits; 16 of 8192 tokens and 32 heads 109 us in 8, 118 us in 16.

    But a much longer request would be alone in the end: 128 of 4096 tokens on average (log-normal)
    and 128 heads took 2122 us whole, 1234 us in 2, 663 us so. None takes over ``_LONG`` keys at
    once, which makes at most 16 rounds, as each adds fp32 results. ``max_seq_len`` is a bound, and
    may be loose (a CUDA graph's): it adds splits that shorter requests leave empty, which costs
    little.
    """
    num_places = gpu.num_sms * tiles.num_resident
    num_programs = max(num_programs, 1)
    num_equal = min(num_places // num_programs, max_seq_len // (4 * tiles.block_n), 128)
    num_equal = max(num_equal, 1)
    num_long = min(triton.cdiv(max_seq_len, _LONG), 16 * num_places // num_programs, 128)
    return max(num_equal, num_long), num_equal


def _call(
    q: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
    gpu: Gpu,
    num_equal: int = 1,
    max_split_len: int = _LONG,
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
        "num_equal": num_equal,
        "max_split_len": max_split_len,
        "stride_q_token": q.stride(0),
        "stride_q_head": q.stride(1),
        "BLOCK_T": tiles.block_t,
        "BLOCK_H": tiles.block_h,
        "BLOCK_N": tiles.block_n,
        "NUM_STAGES": tiles.num_stages,
        "SHARE_SCORES": tiles.share_scores,
        "LN_2": LN_2,
    }
    return arguments, {"num_warps": tiles.num_warps, "enable_fp_fusion": True}


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
    max_split_len = _LONG
    if is_batch_invariant:
        max_split_len = _FIXED_SPLIT_LEN
        num_splits, num_equal = max(triton.cdiv(max_seq_len, max_split_len), 1), 1
    elif num_splits is None:
        # no tile has tokens of two requests
        busy_tiles = max(
            triton.cdiv(num_tokens, tiles.block_t), min(batch.num_requests, num_tokens)
        )
        num_splits, num_equal = choose_splits(busy_tiles * head_blocks, max_seq_len, tiles, gpu)
    else:
        num_equal = num_splits
    if num_splits == 1:
        outs, lses = out[None], lse[None]
    else:
        outs = out.new_empty(num_splits, *out.shape, dtype=torch.float32)
        lses = lse.new_empty(num_splits, *lse.shape)
    arguments, options = _call(
        q, pages, batch, softmax_scale, outs, lses, tiles, gpu, num_equal, max_split_len
    )
    grid = (token_tiles * head_blocks, num_splits)
    _mla_decode_kernel[grid](**arguments, **options)
    if num_splits > 1:
        merge_states(outs, lses, out, lse)


def _spills(fmt: CacheFormat) -> dict[str, Any]:
    """Measured on an H100, 128 heads, 128 requests of 4096 tokens: spilling is the faster way.

    That was before warpgroups shared scores; since then most is spilled on sm_100 (quantised) and
    by tiles of several tokens. fp8_token and nvfp4 have fp8_ds_mla's tiles, unmeasured.
    """
    if fmt.is_quantised:
        why = "64 rows are 2 (fp8) and 4 times (fp8_ds_mla) as fast as what does not spill"
        return spills(why, 520)
    return spills("64 rows are 1.5 times as fast as 32", 144, newer=200)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Every format and q dtype that meet in serving, whole and split; each tile; odd dims."""
    gpu = Gpu(capability, num_sms=108)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    variants: list[tuple[FormatName, torch.dtype, int, int, int, int]] = [
        ("bf16", bf16, 512, 64, 128, 1),
        ("bf16", bf16, 512, 64, 16, 1),
        ("bf16", bf16, 512, 64, 16, 4),
        ("bf16", bf16, 512, 64, 32, 1),
        ("bf16", bf16, 256, 32, 40, 1),
        ("bf16", fp16, 512, 64, 128, 1),
        ("fp16", fp16, 512, 64, 128, 1),
        ("fp16", bf16, 512, 64, 128, 1),
        ("fp32", fp32, 512, 64, 16, 1),
        ("fp32", bf16, 512, 64, 16, 1),
        ("bf16", fp32, 512, 64, 16, 1),
        ("fp8", bf16, 512, 64, 128, 1),
        ("fp8", bf16, 512, 64, 16, 1),
        ("fp8", bf16, 512, 64, 32, 1),
        ("fp8", fp16, 512, 64, 128, 1),
        ("fp8", bf16, 128, 0, 5, 2),
        ("fp8", fp32, 512, 64, 16, 1),
    ]
    grouped: tuple[FormatName, ...] = ("fp8_token", "fp8_ds_mla", "nvfp4")
    for name in grouped:
        variants += [
            (name, bf16, 512, 64, 128, 1),
            (name, bf16, 512, 64, 16, 1),
            (name, bf16, 512, 64, 32, 1),
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
