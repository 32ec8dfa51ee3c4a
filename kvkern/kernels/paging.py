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
from kvkern.kernels.numerics import decode_e2m1, decode_e4m3

NO_KEY: tl.constexpr = tl.constexpr(2**31 - 1)  # a key index that no query sees

# Where these begin depends on the batch and the layer: each alignment would compile one more
# variant of a kernel, in the midst of serving, and no load of theirs is wide.
ANY_ALIGNMENT = ["offsets_ptr", "cache_lengths_ptr", "page_table_ptr", "layer_scales_ptr"]


def row_fields(pages: LayerPages, gpu: Gpu) -> dict[str, Any]:
    """Kernel arguments that say where a row's fields are and how they are stored."""
    fmt = pages.format
    block_l = power_of_two(fmt.kv_lora_rank)
    return {
        "latent_ptr": codes(pages.latent),
        "rope_ptr": codes(pages.rope),
        "group_scales_ptr": None if pages.group_scales is None else codes(pages.group_scales),
        "layer_scales_ptr": pages.layer_scales,
        "stride_latent": pages.latent.stride(1),
        "stride_rope": pages.rope.stride(1),
        "stride_scales": 0 if pages.group_scales is None else pages.group_scales.stride(1),
        "PAGE_SIZE": pages.page_size,
        "LATENT_DIM": fmt.kv_lora_rank,
        "ROPE_DIM": fmt.rope_dim,
        "BLOCK_L": block_l,
        "BLOCK_R": max(power_of_two(fmt.rope_dim), 2),
        "GROUP": block_l if fmt.token_scaled else fmt.group_size,
        "PACKED": fmt.is_packed,
        "NATIVE_FP8": gpu.has_fp8,
    }


def batch_fields(batch: PagedBatch) -> dict[str, Any]:
    """Kernel arguments that say whose tokens there are and where their pages."""
    return {
        "offsets_ptr": batch.input_row_offsets,
        "cache_lengths_ptr": batch.cache_lengths,
        "page_table_ptr": batch.page_table,
        "max_pages": batch.max_pages,
    }


def codes(field: Tensor) -> Tensor:
    """8 bits and fewer as uint8: a card without fp8 has no such pointer type."""
    return field.view(torch.uint8) if field.dtype.itemsize == 1 else field


def power_of_two(count: int) -> int:
    """The smallest power of two that is not below ``count``; a tenth of triton's own price."""
    return 1 << max(count - 1, 0).bit_length()


@triton.jit
def load_guess(offsets_ptr, cache_lengths_ptr, num_requests, token, expect_decode):
    """First token, end and cached length of request number ``token``.

    Where every request has one token, that is the one that owns it; -1 if it is not worth a look.
    """
    mask = token < num_requests * expect_decode
    start = tl.load(offsets_ptr + token, mask=mask, other=-1)
    end = tl.load(offsets_ptr + token + 1, mask=mask, other=-1)
    cached = tl.load(cache_lengths_ptr + token, mask=mask, other=0)
    return start, end, cached


@triton.jit
def load_requests(offsets_ptr, cache_lengths_ptr, first, num_requests, PROBES: tl.constexpr):
    """First token and cached length ``[PROBES]`` of requests from ``first`` on.

    Padding is one more request, ``num_requests``; behind it none starts.
    """
    request = first + tl.arange(0, PROBES)
    starts = tl.load(offsets_ptr + request, mask=request <= num_requests, other=2147483647)
    cached = tl.load(cache_lengths_ptr + request, mask=request < num_requests, other=0)
    return starts, cached


@triton.jit
def find_token(
    offsets_ptr,
    cache_lengths_ptr,
    num_requests,
    token,
    guess,  # of load_guess
    starts,
    cached,  # of load_requests from 0 on
    are_loaded,  # whether these two are
    PROBES: tl.constexpr,
):
    """The request that owns ``token`` and its position there; request -1 for padding.

    A right guess costs one round trip to memory. Else PROBES requests are looked at together, one
    more round trip, where halving would take five; of more, evenly spaced ones first.
    """
    guessed_start, guessed_end, position = guess
    request = token
    if (guessed_start != token) | (guessed_end != token + 1):
        lanes = tl.arange(0, PROBES)
        first = num_requests * 0  # the request is this one or later
        stride = num_requests * 0 + 1
        while stride * PROBES <= num_requests:
            stride *= PROBES
        while stride > 1:
            probe = first + (lanes + 1) * stride
            begins = tl.load(offsets_ptr + probe, mask=probe <= num_requests, other=2147483647)
            first += tl.sum((begins <= token).to(tl.int32), axis=0) * stride
            stride //= PROBES
        if (first > 0) | (not are_loaded):
            starts, cached = load_requests(
                offsets_ptr, cache_lengths_ptr, first, num_requests, PROBES
            )
        # the last that starts no later
        request = tl.max(tl.where(starts <= token, first + lanes, 0), axis=0)
        is_it = first + lanes == request
        position = token + tl.sum(tl.where(is_it, cached - starts, 0), axis=0)
        request = tl.where(request < num_requests, request, -1)
    return request, position


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
    PACKED: tl.constexpr,
):
    """Latent rows ``[N, BLOCK_L]`` in DTYPE, with group scales applied but not layer scales."""
    PER_ELEMENT: tl.constexpr = 2 if PACKED else 1
    offs_l = tl.arange(0, BLOCK_L // PER_ELEMENT)
    mask = is_there[:, None]
    if BLOCK_L != LATENT_DIM:
        mask = mask & (offs_l < LATENT_DIM // PER_ELEMENT)[None, :]
    stored = tl.load(latent_ptr + slots[:, None] * stride_latent + offs_l, mask=mask, other=0)
    if group_scales_ptr is not None:
        if PACKED:
            pairs = tl.join(decode_e2m1(stored & 0xF), decode_e2m1(stored >> 4))
            values = tl.reshape(pairs, [BLOCK_N, BLOCK_L])
        else:
            values = decode_e4m3(stored, tl.float32, NATIVE_FP8)
        offs_g = tl.arange(0, BLOCK_L // GROUP)
        mask_g = is_there[:, None] & (offs_g * GROUP < LATENT_DIM)[None, :]
        scales = tl.load(
            group_scales_ptr + slots[:, None] * stride_scales + offs_g, mask=mask_g, other=0
        )
        if PACKED:
            scales = decode_e4m3(scales, tl.float32, NATIVE_FP8)
        groups = tl.reshape(values, [BLOCK_N, BLOCK_L // GROUP, GROUP])
        return tl.reshape(groups * scales[:, :, None], [BLOCK_N, BLOCK_L]).to(DTYPE)
    # elif: what follows a return is compiled too, and here has another shape
    elif stored.dtype == tl.uint8:
        return decode_e4m3(stored, DTYPE, NATIVE_FP8)
    else:
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
