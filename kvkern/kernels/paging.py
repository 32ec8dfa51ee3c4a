"""Device side of the paged layout: which request a token is in, and what a stored row holds.

``slot = page * page_size + offset`` is int64 from the page id on.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.kernels.device import Gpu
from kvkern.kernels.numerics import decode_e4m3
from kvkern.layout import GROUP_SIZE

NO_KEY: tl.constexpr = tl.constexpr(2**31 - 1)  # a key index that no query sees


def row_fields(pages: LayerPages, gpu: Gpu) -> dict[str, Any]:
    """Kernel arguments that say where a row's fields are and how they are stored."""
    fmt = pages.format
    return {
        "latent_ptr": codes(pages.latent),
        "rope_ptr": codes(pages.rope),
        "group_scales_ptr": pages.group_scales,
        "layer_scales_ptr": pages.layer_scales,
        "stride_latent": pages.latent.stride(1),
        "stride_rope": pages.rope.stride(1),
        "stride_scales": 0 if pages.group_scales is None else pages.group_scales.stride(1),
        "PAGE_SIZE": pages.page_size,
        "LATENT_DIM": fmt.kv_lora_rank,
        "ROPE_DIM": fmt.rope_dim,
        "BLOCK_L": triton.next_power_of_2(fmt.kv_lora_rank),
        "BLOCK_R": max(triton.next_power_of_2(fmt.rope_dim), 2),
        "GROUP": GROUP_SIZE,
        "NATIVE_FP8": gpu.has_fp8 and fmt.latent_dtype == torch.float8_e4m3fn,
    }


def batch_fields(batch: PagedBatch) -> dict[str, Any]:
    """Kernel arguments that say whose tokens there are and where their pages."""
    return {
        "offsets_ptr": batch.input_row_offsets,
        "cache_lengths_ptr": batch.cache_lengths,
        "page_table_ptr": batch.page_table,
        "max_pages": batch.page_table.shape[1],
    }


def codes(field: Tensor) -> Tensor:
    """fp8 as uint8: a card without fp8 has no such pointer type, and decodes integers."""
    return field.view(torch.uint8) if field.dtype == torch.float8_e4m3fn else field


@triton.jit
def find_request(offsets_ptr, num_requests, token):
    """The request that owns ``token``, or ``num_requests`` for padding."""
    low = num_requests * 0
    high = num_requests
    while low < high:
        middle = (low + high) // 2
        starts_later = tl.load(offsets_ptr + middle + 1) > token
        high = tl.where(starts_later, middle, high)
        low = tl.where(starts_later, low, middle + 1)
    return low


@triton.jit
def find_tile(offsets_ptr, num_requests, num_tokens, tile, BLOCK_T: tl.constexpr):
    """Tile ``tile`` of the ragged batch: its request, the request's tokens, its first token.

    Request b's tiles start at index ``offsets[b] // BLOCK_T + b``, which leaves room for every
    request's partial tile without a prefix sum; a tile past its request's end starts at or after
    that end. Padding tokens are one more request, ``num_requests``.
    """
    low = num_requests * 0
    high = num_requests
    while low < high:  # the last b with first_tile(b) <= tile
        middle = (low + high + 1) // 2
        starts_later = tl.load(offsets_ptr + middle) // BLOCK_T + middle > tile
        high = tl.where(starts_later, middle - 1, high)
        low = tl.where(starts_later, low, middle)
    start = tl.load(offsets_ptr + low)
    is_request = low < num_requests
    end = tl.load(offsets_ptr + low + 1, mask=is_request, other=0)
    end = tl.where(is_request, end, num_tokens)
    return low, start, end, start + (tile - start // BLOCK_T - low) * BLOCK_T


def num_tiles(num_tokens: int, num_requests: int, block_t: int) -> int:
    """Tiles that ``find_tile`` may be asked for."""
    return num_tokens // block_t + num_requests + 1


@triton.jit
def load_pages(table_ptr, positions, mask, max_pages, PAGE_SIZE: tl.constexpr):
    """Page ids of ``positions`` in one request's table row; -1 where masked or past the table.

    The page size is a constant: dividing by a variable, for every key in every layout that keys
    come in, took a quarter of attention's time on an H100.
    """
    columns = positions // PAGE_SIZE
    return tl.load(table_ptr + columns, mask=mask & (columns < max_pages), other=-1)


@triton.jit
def load_block_pages(
    table_ptr, first, end, max_pages, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Page ids of positions ``[first, first + BLOCK_N)``, ``first`` a multiple of BLOCK_N.

    One id for the whole block where it lies in one page, else BLOCK_N; -1 from ``end`` on.
    """
    if PAGE_SIZE % BLOCK_N == 0:
        return load_pages(table_ptr, first, first < end, max_pages, PAGE_SIZE)
    else:
        positions = first + tl.arange(0, BLOCK_N)
        return load_pages(table_ptr, positions, positions < end, max_pages, PAGE_SIZE)


@triton.jit
def load_latent(
    latent_ptr,
    group_scales_ptr,
    slots,  # int64 [N]
    is_there,  # [N]; rows that are not are zero, and their memory is not read
    stride_latent,
    stride_scales,
    LATENT_DIM: tl.constexpr,
    BLOCK_L: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Latent rows ``[N, BLOCK_L]`` in DTYPE, with group scales applied but not layer scales."""
    offs_l = tl.arange(0, BLOCK_L)
    mask = is_there[:, None]
    if BLOCK_L != LATENT_DIM:
        mask = mask & (offs_l < LATENT_DIM)[None, :]
    stored = tl.load(latent_ptr + slots[:, None] * stride_latent + offs_l, mask=mask, other=0)
    if group_scales_ptr is not None:
        values = decode_e4m3(stored, tl.float32, NATIVE_FP8)
        offs_g = tl.arange(0, BLOCK_L // GROUP)
        mask_g = is_there[:, None] & (offs_g < LATENT_DIM // GROUP)[None, :]
        scales = tl.load(
            group_scales_ptr + slots[:, None] * stride_scales + offs_g, mask=mask_g, other=0.0
        )
        groups = tl.reshape(values, [BLOCK_N, BLOCK_L // GROUP, GROUP])
        return tl.reshape(groups * scales[:, :, None], [BLOCK_N, BLOCK_L]).to(DTYPE)
    if stored.dtype == tl.uint8:
        return decode_e4m3(stored, DTYPE, NATIVE_FP8)
    return stored.to(DTYPE)


@triton.jit
def load_rope(
    rope_ptr,
    slots,  # int64 [N]
    is_there,  # [N]
    stride_rope,
    ROPE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DTYPE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Rope keys ``[N, BLOCK_R]`` in DTYPE, layer scale not applied."""
    offs_r = tl.arange(0, BLOCK_R)
    mask = is_there[:, None] & (offs_r < ROPE_DIM)[None, :]
    stored = tl.load(rope_ptr + slots[:, None] * stride_rope + offs_r, mask=mask, other=0)
    if stored.dtype == tl.uint8:
        return decode_e4m3(stored, DTYPE, NATIVE_FP8)
    return stored.to(DTYPE)
