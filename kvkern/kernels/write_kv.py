"""write_kv: y = x / sqrt(mean(x^2) + eps) * gamma; (a, d) -> (a cos - d sin, a sin + d cos).

One launch for the latent, the rope key and the query. Bytes equal the reference's: every step is
one IEEE operation, nothing is fused, and the sum of squares is taken in fp64, where its order
cannot change what is stored.
"""

import itertools
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
from kvkern.kernels.numerics import cast_to, encode_e4m3, power_of_two_scale
from kvkern.kernels.paging import batch_fields, find_request, load_pages, row_fields
from kvkern.layout import E4M3_MAX, FORMAT_NAMES, MAX_GROUP_SCALE, MIN_GROUP_SCALE, CacheFormat

_MAX_GROUP_AMAX: tl.constexpr = tl.constexpr(E4M3_MAX * MAX_GROUP_SCALE)


@triton.jit
def _clamped(x, LIMIT: tl.constexpr):
    """0 for NaN, and nothing beyond the largest finite value."""
    return tl.where(x != x, 0.0, tl.minimum(tl.maximum(x, -LIMIT), LIMIT))


@triton.jit
def _stored(x, ptr, LIMIT: tl.constexpr, SANITIZE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """fp32 values as the elements that ``ptr`` points to."""
    if SANITIZE:
        x = _clamped(x, LIMIT)
    if ptr.dtype.element_ty == tl.uint8:
        return encode_e4m3(x, NATIVE_FP8)
    else:  # Triton compiles what follows a return, and would find two result types
        return cast_to(x, ptr.dtype.element_ty)


@triton.jit
def _load_cos_sin(
    freqs_ptr, position, max_positions, ROPE_DIM: tl.constexpr, BLOCK_R: tl.constexpr
):
    """cos and sin ``[BLOCK_R // 2]`` of a position; NaN if the table does not have it."""
    offs_r = tl.arange(0, BLOCK_R)
    is_inside = (position >= 0) & (position < max_positions)
    mask = offs_r < tl.where(is_inside, ROPE_DIM, 0)
    row = tl.load(freqs_ptr + position * ROPE_DIM + offs_r, mask=mask, other=float("nan"))
    return tl.split(tl.reshape(row.to(tl.float32), [BLOCK_R // 2, 2]))


@triton.jit
def _rotate_rows(
    ptr,
    offs_row,  # int64 [N], where each row starts
    mask_row,  # [N]
    cos,
    sin,  # [BLOCK_R // 2]
    ROPE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Load rows and rotate them: each pair's first and second members, ``[N, BLOCK_R // 2]``."""
    offs_pair = tl.arange(0, BLOCK_R // 2)
    if INTERLEAVED:
        offs_r = tl.arange(0, BLOCK_R)
        mask = mask_row[:, None] & (offs_r < ROPE_DIM)[None, :]
        x = tl.load(ptr + offs_row[:, None] + offs_r, mask=mask, other=0.0).to(tl.float32)
        a, d = tl.split(tl.reshape(x, [BLOCK_N, BLOCK_R // 2, 2]))
    else:
        mask = mask_row[:, None] & (offs_pair < ROPE_DIM // 2)[None, :]
        ptrs = ptr + offs_row[:, None] + offs_pair
        a = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(ptrs + ROPE_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    return a * cos - d * sin, a * sin + d * cos


@triton.jit
def _store_pairs(
    ptr,
    offs_row,  # int64 [N]
    mask_row,  # [N]
    first,
    second,  # [N, BLOCK_R // 2], already in the stored type
    ROPE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    offs_pair = tl.arange(0, BLOCK_R // 2)
    if INTERLEAVED:
        offs_r = tl.arange(0, BLOCK_R)
        mask = mask_row[:, None] & (offs_r < ROPE_DIM)[None, :]
        row = tl.reshape(tl.join(first, second), [BLOCK_N, BLOCK_R])
        tl.store(ptr + offs_row[:, None] + offs_r, row, mask=mask)
    else:
        mask = mask_row[:, None] & (offs_pair < ROPE_DIM // 2)[None, :]
        ptrs = ptr + offs_row[:, None] + offs_pair
        tl.store(ptrs, first, mask=mask)
        tl.store(ptrs + ROPE_DIM // 2, second, mask=mask)


@triton.jit
def _normalise(
    kv_row_ptr,
    gamma_ptr,
    eps,
    LATENT_DIM: tl.constexpr,
    BLOCK_L: tl.constexpr,
    ROUND_HF: tl.constexpr,
):
    """RMSNorm of one latent row, fp32 ``[BLOCK_L]``; columns past LATENT_DIM are 0."""
    offs_l = tl.arange(0, BLOCK_L)
    mask = offs_l < LATENT_DIM
    x = tl.load(kv_row_ptr + offs_l, mask=mask, other=0.0).to(tl.float32)
    gamma = tl.load(gamma_ptr + offs_l, mask=mask, other=0.0)
    wide = x.to(tl.float64)
    mean_square = (tl.sum(wide * wide, axis=0) / LATENT_DIM).to(tl.float32)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    y = x * inverse
    if ROUND_HF:
        y = cast_to(y, gamma.dtype).to(tl.float32) * gamma.to(tl.float32)
        return cast_to(y, gamma.dtype).to(tl.float32)
    return y * gamma.to(tl.float32)


@triton.jit
def _output(x, is_real, ptr):
    """fp32 results as elements of an output tensor; padding is 0."""
    return cast_to(tl.where(is_real, x, 0.0), ptr.dtype.element_ty)


@triton.jit
def _write_latent(
    kv_row_ptr,
    gamma_ptr,
    out_row_ptr,  # kv_out's row, or None
    latent_row_ptr,
    group_scales_ptr,
    offs_scales,  # int64, where the slot's group scales start
    layer_scales_ptr,
    is_real,
    eps,
    LATENT_DIM: tl.constexpr,
    BLOCK_L: tl.constexpr,
    GROUP: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    LIMIT: tl.constexpr,
    ROUND_HF: tl.constexpr,
    SANITIZE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Normalise a latent row, quantise it (with group scales if the format has them), store it."""
    offs_l = tl.arange(0, BLOCK_L)
    y = _normalise(kv_row_ptr, gamma_ptr, eps, LATENT_DIM, BLOCK_L, ROUND_HF)
    if out_row_ptr is not None:
        tl.store(out_row_ptr + offs_l, _output(y, is_real, out_row_ptr), mask=offs_l < LATENT_DIM)
    num_stored = tl.where(is_real, LATENT_DIM, 0)
    if group_scales_ptr is not None:
        groups = tl.reshape(y, [BLOCK_L // GROUP, GROUP])
        amax = tl.max(tl.where(groups == groups, tl.abs(groups), 0.0), axis=1)
        amax = tl.minimum(amax, _MAX_GROUP_AMAX)
        scales = power_of_two_scale(amax, E4M3_MAX, MIN_SCALE)
        offs_g = tl.arange(0, BLOCK_L // GROUP)
        mask_g = offs_g < num_stored // GROUP
        tl.store(group_scales_ptr + offs_scales + offs_g, scales, mask=mask_g)
        inverse = tl.div_rn(1.0, scales)  # exact: powers of two
        y = tl.reshape(groups * inverse[:, None], [BLOCK_L])
    if layer_scales_ptr is not None:
        y = tl.div_rn(y, tl.load(layer_scales_ptr))
    row = _stored(y, latent_row_ptr, LIMIT, SANITIZE, NATIVE_FP8)
    tl.store(latent_row_ptr + offs_l, row, mask=offs_l < num_stored)


@triton.jit
def _write_rope_key(
    kv_row_ptr,
    out_row_ptr,  # kv_out's row, or None
    rope_ptr,
    offs_slot,  # int64, where the slot's rope key starts
    layer_scales_ptr,
    is_real,
    cos,
    sin,  # [1, BLOCK_R // 2]
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SANITIZE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Rotate the one rope key of a token, quantise it and store it."""
    zero = tl.zeros([1], tl.int64)  # the pair helpers take rows, here a single one
    always = zero == 0
    first, second = _rotate_rows(
        kv_row_ptr + LATENT_DIM, zero, always, cos, sin, ROPE_DIM, BLOCK_R, 1, INTERLEAVED
    )
    if out_row_ptr is not None:
        _store_pairs(
            out_row_ptr + LATENT_DIM, zero, always,
            _output(first, is_real, out_row_ptr), _output(second, is_real, out_row_ptr),
            ROPE_DIM, BLOCK_R, 1, INTERLEAVED,
        )  # fmt: skip
    if layer_scales_ptr is not None:
        scale = tl.load(layer_scales_ptr + 1)
        first = tl.div_rn(first, scale)
        second = tl.div_rn(second, scale)
    _store_pairs(
        rope_ptr, zero + offs_slot, zero < is_real.to(tl.int64),
        _stored(first, rope_ptr, LIMIT, SANITIZE, NATIVE_FP8),
        _stored(second, rope_ptr, LIMIT, SANITIZE, NATIVE_FP8),
        ROPE_DIM, BLOCK_R, 1, INTERLEAVED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_requests", "max_pages", "max_positions", "num_heads"])
def _write_kv_kernel(
    kv_ptr,  # [T, L+R]
    freqs_ptr,  # [max_positions, R]
    gamma_ptr,  # [L]
    q_rope_ptr,  # [T, H, R]
    q_rope_out_ptr,  # [T, H, R]
    kv_out_ptr,  # [T, L+R]
    positions_ptr,  # [T]
    latent_ptr,  # [slots, L]
    rope_ptr,  # [slots, R]
    group_scales_ptr,  # fp32 [slots, G]
    layer_scales_ptr,  # fp32 [2]
    offsets_ptr,  # int32 [B+1]
    cache_lengths_ptr,  # int32 [B]
    page_table_ptr,  # int32 [B, max_pages]
    num_requests,
    max_pages,
    max_positions,
    num_heads,
    eps,
    stride_kv,
    stride_kv_out,
    stride_q_token,
    stride_q_head,
    stride_q_out_token,
    stride_q_out_head,
    stride_latent,
    stride_rope,
    stride_scales,
    PAGE_SIZE: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    LATENT_LIMIT: tl.constexpr,
    ROPE_LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_HF: tl.constexpr,
    SANITIZE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Program (token, 0) writes the token's row; program (token, i) rotates BLOCK_H query heads."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    request = find_request(offsets_ptr, num_requests, token)
    is_request = request < num_requests
    start = tl.load(offsets_ptr + request, mask=is_request, other=0)
    cached = tl.load(cache_lengths_ptr + request, mask=is_request, other=0)
    position = cached + token - start
    table_ptr = page_table_ptr + request.to(tl.int64) * max_pages
    page = load_pages(table_ptr, position, is_request, max_pages, PAGE_SIZE).to(tl.int64)
    is_real = page >= 0
    slot = page * PAGE_SIZE + position % PAGE_SIZE

    if ROPE_DIM > 0:
        if positions_ptr is not None:
            position = tl.load(positions_ptr + token).to(tl.int64)
        position = tl.where(is_real, position, 0)
        cos, sin = _load_cos_sin(freqs_ptr, position, max_positions, ROPE_DIM, BLOCK_R)
        cos, sin = cos[None, :], sin[None, :]

    if part == 0:
        kv_row_ptr = kv_ptr + token * stride_kv
        out_row_ptr = kv_out_ptr
        if kv_out_ptr is not None:
            out_row_ptr += token * stride_kv_out
        _write_latent(
            kv_row_ptr, gamma_ptr, out_row_ptr, latent_ptr + slot * stride_latent,
            group_scales_ptr, slot * stride_scales, layer_scales_ptr, is_real, eps,
            LATENT_DIM, BLOCK_L, GROUP, E4M3_MAX, MIN_SCALE, LATENT_LIMIT, ROUND_HF, SANITIZE,
            NATIVE_FP8,
        )  # fmt: skip
        if ROPE_DIM > 0:
            _write_rope_key(
                kv_row_ptr, out_row_ptr, rope_ptr, slot * stride_rope, layer_scales_ptr, is_real,
                cos, sin,
                LATENT_DIM, ROPE_DIM, BLOCK_R, ROPE_LIMIT, INTERLEAVED, SANITIZE, NATIVE_FP8,
            )  # fmt: skip
    else:
        if q_rope_ptr is not None:
            offs_h = (part - 1) * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64)
            mask_h = offs_h < num_heads
            first, second = _rotate_rows(
                q_rope_ptr, token * stride_q_token + offs_h * stride_q_head, mask_h, cos, sin,
                ROPE_DIM, BLOCK_R, BLOCK_H, INTERLEAVED,
            )  # fmt: skip
            _store_pairs(
                q_rope_out_ptr, token * stride_q_out_token + offs_h * stride_q_out_head, mask_h,
                _output(first, is_real, q_rope_out_ptr), _output(second, is_real, q_rope_out_ptr),
                ROPE_DIM, BLOCK_R, BLOCK_H, INTERLEAVED,
            )  # fmt: skip


class Tiles(NamedTuple):
    """How the launch is cut up."""

    block_h: int
    num_warps: int


def choose_tiles(num_heads: int, rope_dim: int) -> Tiles:
    """2048 query values a program: 16 bytes for each of 128 threads in bf16, and again."""
    block_h = max(1, 2048 // max(triton.next_power_of_2(rope_dim), 2))
    return Tiles(min(block_h, triton.next_power_of_2(max(num_heads, 1))), num_warps=4)


def _call(
    pages: LayerPages,
    batch: PagedBatch,
    kv: Tensor,
    freqs: Tensor | None,
    gamma: Tensor,
    q_rope: Tensor | None,
    q_rope_out: Tensor | None,
    kv_out: Tensor | None,
    positions: Tensor | None,
    eps: float,
    interleaved: bool,
    round_hf: bool,
    sanitize: bool,
    *,
    gpu: Gpu,
) -> tuple[tuple[int, int], dict[str, Any], dict[str, Any]]:
    """The launch's grid, arguments and options."""
    fmt = pages.format
    num_heads = 0 if q_rope is None else q_rope.shape[1]
    if fmt.rope_dim == 0:
        q_rope = q_rope_out = None
        num_heads = 0
    tiles = choose_tiles(num_heads, fmt.rope_dim)
    arguments = {
        **row_fields(pages, gpu),
        **batch_fields(batch),
        "kv_ptr": kv,
        "freqs_ptr": freqs,
        "gamma_ptr": gamma,
        "q_rope_ptr": q_rope,
        "q_rope_out_ptr": q_rope_out,
        "kv_out_ptr": kv_out,
        "positions_ptr": positions,
        "num_requests": batch.num_requests,
        "max_positions": 0 if freqs is None else len(freqs),
        "num_heads": num_heads,
        "eps": eps,
        "stride_kv": kv.stride(0),
        "stride_kv_out": 0 if kv_out is None else kv_out.stride(0),
        "stride_q_token": 0 if q_rope is None else q_rope.stride(0),
        "stride_q_head": 0 if q_rope is None else q_rope.stride(1),
        "stride_q_out_token": 0 if q_rope_out is None else q_rope_out.stride(0),
        "stride_q_out_head": 0 if q_rope_out is None else q_rope_out.stride(1),
        "BLOCK_H": tiles.block_h,
        "E4M3_MAX": E4M3_MAX,
        "MIN_SCALE": MIN_GROUP_SCALE,
        "LATENT_LIMIT": torch.finfo(fmt.latent_dtype).max,
        "ROPE_LIMIT": torch.finfo(fmt.rope_dtype).max,
        "INTERLEAVED": interleaved,
        "ROUND_HF": round_hf,
        "SANITIZE": sanitize,
    }
    grid = (kv.shape[0], 1 + triton.cdiv(num_heads, tiles.block_h))
    return grid, arguments, {"num_warps": tiles.num_warps, "enable_fp_fusion": False}


def write_kv(pages: LayerPages, batch: PagedBatch, kv: Tensor, *others: Any) -> None:
    """Launch once; ``others`` as ``_call`` names them. ``kvkern.write_kv`` has checked them all."""
    if kv.shape[0] == 0:
        return
    grid, arguments, options = _call(pages, batch, kv, *others, gpu=gpu_of(kv.device))
    _write_kv_kernel[grid](**arguments, **options)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Every format in each rotation and rounding at DeepSeek's dims; odd dims and no rope."""
    fields = [(name, 512, 64) for name in FORMAT_NAMES]
    fields += [(name, *dims) for name in ("bf16", "fp8_ds_mla") for dims in ((384, 48), (128, 0))]
    styles = [(True, False, False), (False, True, True)]  # interleaved, rounded as HF, sanitised
    for (name, latent_dim, rope_dim), style in itertools.product(fields, styles):
        dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(name, torch.bfloat16)
        fmt = CacheFormat(name, latent_dim, rope_dim)
        cache = PagedKVCache(fmt, num_layers=1, num_pages=1, page_size=64)
        batch = PagedBatch([0, 1], [0], [[0]])
        kv = torch.empty(1, fmt.row_dim, dtype=dtype)
        freqs = torch.empty(1, rope_dim) if rope_dim else None
        gamma = torch.empty(latent_dim, dtype=dtype)
        q_rope = torch.empty(1, 16, rope_dim, dtype=dtype)
        _, arguments, options = _call(
            cache.layer(0), batch, kv, freqs, gamma, q_rope, q_rope, kv, None, 1e-6, *style,
            gpu=Gpu(capability, num_sms=108),
        )  # fmt: skip
        label = f"{name}-L{latent_dim}-R{rope_dim}-{'interleaved' if style[0] else 'half'}"
        yield config_of_call(_write_kv_kernel, label, arguments, options)
