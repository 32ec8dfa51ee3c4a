"""gather_kv: out[b, i] = dequantised row of position start + i, 0 past the end."""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages, PagedKVCache
from kvkern.kernels.config import SMALL_SPILLS, KernelConfig, config_of_call
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.numerics import round_to
from kvkern.kernels.paging import (
    ANY_ALIGNMENT,
    batch_fields,
    load_latent,
    load_pages,
    load_rope,
    row_fields,
)
from kvkern.layout import FORMAT_NAMES, CacheFormat

_BLOCK_N = 16  # rows a program: a page's worth, and 8 KiB to keep in registers at L = 512


@triton.jit(
    do_not_specialize=["max_pages", "start", "length"],
    do_not_specialize_on_alignment=ANY_ALIGNMENT,
)
def _gather_kv_kernel(
    out_ptr,  # [B, length, L+R]
    latent_ptr,  # [slots, L]; packed: bytes [slots, L / 2]
    rope_ptr,  # [slots, R]
    group_scales_ptr,  # fp32 or e4m3 [slots, G]
    layer_scales_ptr,  # fp32 [2]
    offsets_ptr,  # int32 [B+1]
    cache_lengths_ptr,  # int32 [B]
    page_table_ptr,  # int32 [B, max_pages]
    max_pages,
    start,
    length,
    stride_latent,
    stride_rope,
    stride_scales,
    INCLUDE_NEW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Program (request, block) reads BLOCK_N positions."""
    request = tl.program_id(0).to(tl.int64)
    end = tl.load(cache_lengths_ptr + request)
    if INCLUDE_NEW:
        end += tl.load(offsets_ptr + request + 1) - tl.load(offsets_ptr + request)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    positions = start + offs_n
    table_ptr = page_table_ptr + request * max_pages
    page = load_pages(table_ptr, positions, positions < end, max_pages, PAGE_SIZE).to(tl.int64)
    is_there = page >= 0
    slots = page * PAGE_SIZE + positions % PAGE_SIZE

    latent = load_latent(
        latent_ptr, group_scales_ptr, slots, is_there, stride_latent, stride_scales,
        LATENT_DIM, BLOCK_L, GROUP, BLOCK_N, tl.float32, NATIVE_FP8, PACKED,
    )  # fmt: skip
    if layer_scales_ptr is not None:
        latent *= tl.load(layer_scales_ptr)
    mask_n = (offs_n < length)[:, None]
    out_rows_ptr = out_ptr + (request * length + offs_n)[:, None] * (LATENT_DIM + ROPE_DIM)
    offs_l = tl.arange(0, BLOCK_L)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_rows_ptr + offs_l, round_to(latent, dtype), mask=mask_n & (offs_l < LATENT_DIM))
    if ROPE_DIM > 0:
        rope = load_rope(
            rope_ptr, slots, is_there, stride_rope, ROPE_DIM, BLOCK_R, tl.float32, NATIVE_FP8
        )
        if layer_scales_ptr is not None:
            rope *= tl.load(layer_scales_ptr + 1)
        offs_r = tl.arange(0, BLOCK_R)
        mask = mask_n & (offs_r < ROPE_DIM)
        tl.store(out_rows_ptr + LATENT_DIM + offs_r, round_to(rope, dtype), mask=mask)


def _call(
    pages: LayerPages, batch: PagedBatch, start: int, include_new: bool, out: Tensor, gpu: Gpu
) -> tuple[tuple[int, int], dict[str, Any], dict[str, Any]]:
    num_requests, length, _ = out.shape
    arguments = {
        **row_fields(pages, gpu),
        **batch_fields(batch),
        "out_ptr": out,
        "start": start,
        "length": length,
        "INCLUDE_NEW": include_new,
        "BLOCK_N": _BLOCK_N,
    }
    return (
        (num_requests, triton.cdiv(length, _BLOCK_N)),
        arguments,
        {"num_warps": 4, "enable_fp_fusion": True},
    )


def gather_kv(
    pages: LayerPages, batch: PagedBatch, start: int, include_new: bool, out: Tensor
) -> None:
    """Launch once. ``kvkern.gather_kv`` has checked the arguments."""
    if out.numel() == 0:
        return
    grid, arguments, options = _call(pages, batch, start, include_new, out, gpu_of(out.device))
    _gather_kv_kernel[grid](**arguments, **options)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Every format into bf16, and one into each other dtype."""
    variants = [(name, torch.bfloat16, 512, 64) for name in FORMAT_NAMES]
    variants += [("fp8", torch.float16, 128, 0)]
    variants += [(name, torch.float32, 384, 48) for name in ("fp8_token", "fp8_ds_mla", "nvfp4")]
    for name, dtype, latent_dim, rope_dim in variants:
        cache = PagedKVCache(
            CacheFormat(name, latent_dim, rope_dim), num_layers=1, num_pages=1, page_size=64
        )
        out = torch.empty(1, 16, latent_dim + rope_dim, dtype=dtype)
        batch = PagedBatch([0, 1], [0], [[0]])
        gpu = Gpu(capability, num_sms=108)
        _, arguments, options = _call(cache.layer(0), batch, 0, True, out, gpu)
        label = f"{name}-{dtype}-L{latent_dim}-R{rope_dim}".replace("torch.", "")
        yield config_of_call(_gather_kv_kernel, label, arguments, options, **SMALL_SPILLS)
