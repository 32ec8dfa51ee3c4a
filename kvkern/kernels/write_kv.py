"""write_kv: y = x / sqrt(mean(x^2) + eps) * gamma; (a, d) -> (a cos - d sin, a sin + d cos).

One launch for the latent, the rope key and the query. Bytes equal the reference's: every step is
one IEEE operation, nothing is fused, and the sum of squares is taken in fp64, where its order
cannot change what is stored.

A token's work is cut into parts, a program each: its row of the cache, and blocks of its query.
Each part has a path of its own, and loads first what waits for nothing, so that finding the
token's place (two round trips to memory: lengths, then page id and cos, sin together) goes on
behind it.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages, PagedKVCache
from kvkern.kernels.config import KernelConfig, config_of_call
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.launch import launch
from kvkern.kernels.numerics import (
    INTERPRET,
    cast_to,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    power_of_two_scale,
)
from kvkern.kernels.paging import (
    ANY_ALIGNMENT,
    batch_fields,
    codes,
    find_token,
    load_guess,
    load_pages,
    load_requests,
    power_of_two,
    row_fields,
)
from kvkern.layout import (
    E2M1_MAX,
    E4M3_MAX,
    FORMAT_NAMES,
    MAX_GROUP_SCALE,
    MIN_E4M3,
    MIN_GROUP_SCALE,
    MIN_TOKEN_SCALE,
    CacheFormat,
)

_E4M3_MAX: tl.constexpr = tl.constexpr(E4M3_MAX)
_E2M1_MAX: tl.constexpr = tl.constexpr(E2M1_MAX)
_MIN_E4M3: tl.constexpr = tl.constexpr(MIN_E4M3)
_MIN_GROUP_SCALE: tl.constexpr = tl.constexpr(MIN_GROUP_SCALE)
_MIN_TOKEN_SCALE: tl.constexpr = tl.constexpr(MIN_TOKEN_SCALE)
_MAX_GROUP_AMAX: tl.constexpr = tl.constexpr(E4M3_MAX * MAX_GROUP_SCALE)
_PROBES: tl.constexpr = tl.constexpr(32)  # requests looked at together: one a lane of each warp


@triton.jit
def _start_to_locate(place):
    """The loads on the way to a token's place that wait for nothing."""
    offsets_ptr, cache_lengths_ptr, _, slot_mapping_ptr, positions_ptr = place[:5]
    num_requests, _, expect_decode, _, token = place[5:]
    position = 0
    if positions_ptr is not None:
        position = tl.load(positions_ptr + token)
    if slot_mapping_ptr is not None:
        return tl.load(slot_mapping_ptr + token), position
    else:
        guess = load_guess(offsets_ptr, cache_lengths_ptr, num_requests, token, expect_decode)
        num_looked_at = tl.where(expect_decode == 0, num_requests, -1)
        starts, cached = load_requests(offsets_ptr, cache_lengths_ptr, 0, num_looked_at, _PROBES)
        return guess, starts, cached, position


@triton.jit
def _locate(
    place, found, table, PAGE_SIZE: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_R: tl.constexpr
):
    """A token's slot (int64), whether it is real, cos and sin ``[1, BLOCK_R // 2]``."""
    offsets_ptr, cache_lengths_ptr, page_table_ptr, slot_mapping_ptr, positions_ptr = place[:5]
    num_requests, max_pages, expect_decode, num_slots, token = place[5:]
    rope_position = found[-1]
    if slot_mapping_ptr is not None:
        slot = found[0].to(tl.int64)
    else:
        request, position = find_token(
            offsets_ptr, cache_lengths_ptr, num_requests, token, found[0], found[1], found[2],
            expect_decode == 0, _PROBES,
        )  # fmt: skip
        table_ptr = page_table_ptr + request.to(tl.int64) * max_pages
        page = load_pages(table_ptr, position, request >= 0, max_pages, PAGE_SIZE).to(tl.int64)
        slot = tl.where(page >= 0, page * PAGE_SIZE + position % PAGE_SIZE, -1)
        if positions_ptr is None:
            rope_position = position
    is_real = (slot >= 0) & (slot < num_slots)
    cos, sin = _load_cos_sin(table, rope_position, ROPE_DIM, BLOCK_R)
    return slot, is_real, cos, sin


@triton.jit
def _load_cos_sin(table, position, ROPE_DIM: tl.constexpr, BLOCK_R: tl.constexpr):
    """cos and sin of a position; NaN if the table does not have it; nothing if ROPE_DIM is 0."""
    freqs_ptr, max_positions = table
    if ROPE_DIM == 0:
        nothing = tl.zeros([1, BLOCK_R // 2], tl.float32)
        return nothing, nothing
    else:
        position = position.to(tl.int64)
        offs_r = tl.arange(0, BLOCK_R)
        is_inside = (position >= 0) & (position < max_positions)
        mask = offs_r < tl.where(is_inside, ROPE_DIM, 0)
        row = tl.load(freqs_ptr + position * ROPE_DIM + offs_r, mask=mask, other=float("nan"))
        cos, sin = tl.split(tl.reshape(row.to(tl.float32), [BLOCK_R // 2, 2]))
        return cos[None, :], sin[None, :]


@triton.jit
def _load_row(x_row_ptr, gamma_ptr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_row_ptr + offs, mask=offs < DIM, other=0.0)
    return x, tl.load(gamma_ptr + offs, mask=offs < DIM, other=0.0)


@triton.jit
def _store_row(out_row_ptr, values, DIM: tl.constexpr):
    offs = tl.arange(0, values.shape[0])
    tl.store(out_row_ptr + offs, values, mask=offs < DIM)


@triton.jit
def _load_pairs(
    ptr,
    offs_row,  # int64 [N], where each row starts
    mask_row,  # [N]
    ROPE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rows as each pair's first and second members, ``[N, BLOCK_R // 2]``."""
    offs_pair = tl.arange(0, BLOCK_R // 2)
    if INTERLEAVED:
        offs_r = tl.arange(0, BLOCK_R)
        mask = mask_row[:, None] & (offs_r < ROPE_DIM)[None, :]
        x = tl.load(ptr + offs_row[:, None] + offs_r, mask=mask, other=0.0)
        a, d = tl.split(tl.reshape(x, [BLOCK_N, BLOCK_R // 2, 2]))
    else:
        mask = mask_row[:, None] & (offs_pair < ROPE_DIM // 2)[None, :]
        ptrs = ptr + offs_row[:, None] + offs_pair
        a = tl.load(ptrs, mask=mask, other=0.0)
        d = tl.load(ptrs + ROPE_DIM // 2, mask=mask, other=0.0)
    return a, d


@triton.jit
def _rotate(pairs, cos, sin):
    """First and second members in fp32."""
    a, d = pairs[0].to(tl.float32), pairs[1].to(tl.float32)
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
def _stored(x, ptr, LIMIT: tl.constexpr, SANITIZE: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """fp32 values as the elements that ``ptr`` points to."""
    if SANITIZE:
        x = tl.where(x != x, 0.0, tl.minimum(tl.maximum(x, -LIMIT), LIMIT))
    if ptr.dtype.element_ty == tl.uint8:
        return encode_e4m3(x, NATIVE_FP8)
    else:  # Triton compiles what follows a return, and would find two result types
        return cast_to(x, ptr.dtype.element_ty)


@triton.jit
def _output(x, is_real, ptr, NATIVE_FP8: tl.constexpr):
    """fp32 results as elements of an output tensor; padding is 0."""
    return _stored(tl.where(is_real, x, 0.0), ptr, 0.0, False, NATIVE_FP8)


@triton.jit
def _normalise(x, gamma, eps, DIM: tl.constexpr, ROUND_HF: tl.constexpr):
    """RMSNorm of one row of DIM columns, fp32 ``[BLOCK]``; columns past DIM are 0."""
    x = x.to(tl.float32)
    wide = x.to(tl.float64)
    square_sum = tl.sum(wide * wide, axis=0)
    if DIM & (DIM - 1) == 0:  # as exact, without a division in fp64
        mean_square = (square_sum * (1.0 / DIM)).to(tl.float32)
    else:
        mean_square = (square_sum / DIM).to(tl.float32)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    y = x * inverse
    if ROUND_HF:
        y = cast_to(y, gamma.dtype).to(tl.float32) * gamma.to(tl.float32)
        return cast_to(y, gamma.dtype).to(tl.float32)
    return y * gamma.to(tl.float32)


@triton.jit
def _largest(groups):
    """The largest magnitude of each row; NaN does not count."""
    magnitudes = tl.abs(groups)
    if INTERPRET:  # whose maximum would be NaN; a card's is the other operand
        magnitudes = tl.where(groups != groups, 0.0, magnitudes)
    largest = tl.max(magnitudes, axis=1)
    return tl.where(largest != largest, 0.0, largest)  # a row of nothing else


@triton.jit
def _store_latent(
    y,  # fp32 [BLOCK_L]
    latent_row_ptr,
    scales_row_ptr,  # of the groups, or None
    layer_scales_ptr,
    is_real,
    LATENT_DIM: tl.constexpr,
    BLOCK_L: tl.constexpr,
    GROUP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    LIMIT: tl.constexpr,
    SANITIZE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Quantise a latent row by the scales that its format has, and store both."""
    num_stored = tl.where(is_real, LATENT_DIM, 0)
    if layer_scales_ptr is not None:
        y *= tl.div_rn(1.0, tl.load(layer_scales_ptr))
    if scales_row_ptr is not None:
        offs_g = tl.arange(0, BLOCK_L // GROUP)
        scale_ptrs = scales_row_ptr + offs_g
        mask_g = offs_g * GROUP < num_stored
        groups = tl.reshape(y, [BLOCK_L // GROUP, GROUP])
        amax = _largest(groups)
        if PACKED:
            scales = tl.minimum(tl.maximum(tl.div_rn(amax, _E2M1_MAX), _MIN_E4M3), _E4M3_MAX)
            codes = encode_e4m3(scales, NATIVE_FP8)
            # not by the card: ptxas up to 12.9 reads a wrong register where it has just packed them
            scales = decode_e4m3(codes, tl.float32, False)
            if not SANITIZE:  # e2m1 has no NaN: the group's scale is one
                has_nan = tl.max((groups != groups).to(tl.int32), axis=1) > 0
                codes = tl.where(has_nan, 0x7F, codes)
            tl.store(scale_ptrs, codes.to(tl.uint8), mask=mask_g)
        else:
            amax = tl.minimum(amax, _MAX_GROUP_AMAX)
            if POWER_OF_TWO:
                scales = power_of_two_scale(amax, _E4M3_MAX, _MIN_GROUP_SCALE)
            else:
                scales = tl.maximum(tl.div_rn(amax, _E4M3_MAX), _MIN_TOKEN_SCALE)
            tl.store(scale_ptrs, scales, mask=mask_g)
        y = tl.reshape(groups * tl.div_rn(1.0, scales)[:, None], [BLOCK_L])
    if PACKED:
        low, high = tl.split(tl.reshape(encode_e2m1(y), [BLOCK_L // 2, 2]))
        offs_b = tl.arange(0, BLOCK_L // 2)
        packed = (low | (high << 4)).to(tl.uint8)
        tl.store(latent_row_ptr + offs_b, packed, mask=offs_b < num_stored // 2)
    else:
        offs_l = tl.arange(0, BLOCK_L)
        row = _stored(y, latent_row_ptr, LIMIT, SANITIZE, NATIVE_FP8)
        tl.store(latent_row_ptr + offs_l, row, mask=offs_l < num_stored)


@triton.jit
def _store_rope_key(
    rotated,  # pairs [1, BLOCK_R // 2]
    rope_row_ptr,
    layer_scales_ptr,
    is_real,
    ROPE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SANITIZE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Quantise the one rope key of a token and store it."""
    first, second = rotated
    if layer_scales_ptr is not None:
        factor = tl.div_rn(1.0, tl.load(layer_scales_ptr + 1))
        first *= factor
        second *= factor
    one_row = tl.zeros([1], tl.int64)
    _store_pairs(
        rope_row_ptr, one_row, one_row < is_real.to(tl.int64),
        _stored(first, rope_row_ptr, LIMIT, SANITIZE, NATIVE_FP8),
        _stored(second, rope_row_ptr, LIMIT, SANITIZE, NATIVE_FP8),
        ROPE_DIM, BLOCK_R, 1, INTERLEAVED,
    )  # fmt: skip


@triton.jit
def _normalise_query_latent(
    q_latent_ptr,
    q_gamma_ptr,
    q_latent_out_ptr,
    offs_in,
    offs_out,  # int64, where the token's rows start
    eps,
    place,
    found,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROUND_HF: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """RMSNorm of a token's query latent; nothing if there is none."""
    if q_latent_ptr is not None:
        x, gamma = _load_row(q_latent_ptr + offs_in, q_gamma_ptr, DIM, BLOCK)
        _, is_real, _, _ = _locate(place, found, (None, 0), PAGE_SIZE, 0, 2)
        y = _normalise(x, gamma, eps, DIM, ROUND_HF)
        row = _output(y, is_real, q_latent_out_ptr, NATIVE_FP8)
        _store_row(q_latent_out_ptr + offs_out, row, DIM)


@triton.jit
def _rotate_heads(
    q,  # pointer, stride of a token, stride of a head; pointer None: there is nothing to do
    q_out,
    q_scale_ptr,
    row,
    block,
    num_heads,
    place,
    found,
    table,
    PAGE_SIZE: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Rotate the rope columns of a block of heads, and quantise them if there is a scale."""
    if q[0] is not None:
        head = block * HEADS + tl.arange(0, HEADS)
        mask = head < num_heads
        head = head.to(tl.int64)
        pairs = _load_pairs(
            q[0], row * q[1] + head * q[2], mask, ROPE_DIM, BLOCK_R, HEADS, INTERLEAVED
        )
        _, is_real, cos, sin = _locate(place, found, table, PAGE_SIZE, ROPE_DIM, BLOCK_R)
        first, second = _rotate(pairs, cos, sin)
        if q_scale_ptr is not None:
            factor = tl.div_rn(1.0, tl.load(q_scale_ptr))
            first *= factor
            second *= factor
        offs_out = row * q_out[1] + head * q_out[2]
        if is_real:  # a branch costs less than a choice for each value
            _store_pairs(
                q_out[0], offs_out, mask,
                _stored(first, q_out[0], 0.0, False, NATIVE_FP8),
                _stored(second, q_out[0], 0.0, False, NATIVE_FP8),
                ROPE_DIM, BLOCK_R, HEADS, INTERLEAVED,
            )  # fmt: skip
        else:
            zeros = tl.zeros([HEADS, BLOCK_R // 2], q_out[0].dtype.element_ty)
            _store_pairs(
                q_out[0], offs_out, mask, zeros, zeros, ROPE_DIM, BLOCK_R, HEADS, INTERLEAVED
            )


@triton.jit
def _copy_heads(
    q,  # as in _rotate_heads
    q_out,
    q_scale_ptr,
    row,
    block,
    num_heads,
    place,
    found,
    PAGE_SIZE: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Copy the nope columns of a block of heads, or quantise them if there is a scale."""
    if q[0] is not None:
        head = block * HEADS + tl.arange(0, HEADS)
        offs_n = tl.arange(0, BLOCK_N)
        mask = (head < num_heads)[:, None] & (offs_n < NOPE_DIM)[None, :]
        head = head.to(tl.int64)[:, None]
        x = tl.load(q[0] + row * q[1] + head * q[2] + offs_n, mask=mask, other=0.0)
        _, is_real, _, _ = _locate(place, found, (None, 0), PAGE_SIZE, 0, 2)
        if q_scale_ptr is not None:
            factor = tl.div_rn(1.0, tl.load(q_scale_ptr))
            x = _stored(x.to(tl.float32) * factor, q_out[0], 0.0, False, NATIVE_FP8)
        out_ptrs = q_out[0] + row * q_out[1] + head * q_out[2] + offs_n
        if is_real:
            tl.store(out_ptrs, x, mask=mask)
        else:
            tl.store(out_ptrs, tl.zeros_like(x), mask=mask)


@triton.jit(
    do_not_specialize=[
        "num_requests", "max_pages", "expect_decode", "max_positions", "num_slots", "num_heads",
    ],
    do_not_specialize_on_alignment=[
        *ANY_ALIGNMENT, "group_scales_ptr", "q_scale_ptr", "positions_ptr", "slot_mapping_ptr",
    ],
)  # fmt: skip
def _write_kv_kernel(
    kv_ptr,  # [T, L+R]
    freqs_ptr,  # [max_positions, R]
    gamma_ptr,  # [L]
    q_rope_ptr,  # [T, H, R]
    q_rope_out_ptr,  # [T, H, R]
    q_nope_ptr,  # [T, H, N]
    q_nope_out_ptr,  # [T, H, N]
    q_latent_ptr,  # [T, Q]
    q_gamma_ptr,  # [Q]
    q_latent_out_ptr,  # [T, Q]
    kv_out_ptr,  # [T, L+R]
    q_scale_ptr,  # fp32 [1]
    positions_ptr,  # [T]
    slot_mapping_ptr,  # [T]
    latent_ptr,  # [slots, L]
    rope_ptr,  # [slots, R]
    group_scales_ptr,  # [slots, G]
    layer_scales_ptr,  # fp32 [2]
    offsets_ptr,  # int32 [B+1]
    cache_lengths_ptr,  # int32 [B]
    page_table_ptr,  # int32 [B, max_pages]
    num_requests,
    max_pages,
    expect_decode,  # 1: the host expects one token a request, else 0
    max_positions,
    num_slots,
    num_heads,
    eps,
    stride_kv,
    stride_q_rope_token,
    stride_q_rope_head,
    stride_q_rope_out_token,
    stride_q_rope_out_head,
    stride_q_nope_token,
    stride_q_nope_head,
    stride_q_nope_out_token,
    stride_q_nope_out_head,
    stride_q_latent,
    stride_q_latent_out,
    stride_kv_out,
    stride_latent,
    stride_rope,
    stride_scales,
    PAGE_SIZE: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    Q_LATENT_DIM: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # programs a token; known, so that no division is waited for
    ROPE_PARTS: tl.constexpr,  # how many of them rotate heads
    ROPE_HEADS: tl.constexpr,  # heads a part rotates
    NOPE_HEADS: tl.constexpr,  # heads whose nope columns a part copies
    GROUP: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,  # whether group scales are rounded up to one
    LATENT_LIMIT: tl.constexpr,
    ROPE_LIMIT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_HF: tl.constexpr,
    SANITIZE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Parts of a token: its row, blocks of rope heads, of nope heads, its query's latent."""
    token = tl.program_id(0) // NUM_PARTS
    part = tl.program_id(0) % NUM_PARTS
    row = token.to(tl.int64)
    place = (
        offsets_ptr, cache_lengths_ptr, page_table_ptr, slot_mapping_ptr, positions_ptr,
        num_requests, max_pages, expect_decode, num_slots, token,
    )  # fmt: skip
    found = _start_to_locate(place)
    table = (freqs_ptr, max_positions)

    if part == 0:
        kv_row_ptr = kv_ptr + row * stride_kv
        x, gamma = _load_row(kv_row_ptr, gamma_ptr, LATENT_DIM, BLOCK_L)
        one_row = tl.zeros([1], tl.int64)  # the pair helpers take rows, here a single one
        key = _load_pairs(
            kv_row_ptr + LATENT_DIM, one_row, one_row == 0, ROPE_DIM, BLOCK_R, 1, INTERLEAVED
        )
        slot, is_real, cos, sin = _locate(place, found, table, PAGE_SIZE, ROPE_DIM, BLOCK_R)
        y = _normalise(x, gamma, eps, LATENT_DIM, ROUND_HF)
        rotated = _rotate(key, cos, sin)
        if kv_out_ptr is not None:
            out_row_ptr = kv_out_ptr + row * stride_kv_out
            _store_row(out_row_ptr, _output(y, is_real, out_row_ptr, NATIVE_FP8), LATENT_DIM)
            _store_pairs(
                out_row_ptr + LATENT_DIM, one_row, one_row == 0,
                _output(rotated[0], is_real, out_row_ptr, NATIVE_FP8),
                _output(rotated[1], is_real, out_row_ptr, NATIVE_FP8),
                ROPE_DIM, BLOCK_R, 1, INTERLEAVED,
            )  # fmt: skip
        scales_row_ptr = group_scales_ptr
        if group_scales_ptr is not None:
            scales_row_ptr += slot * stride_scales
        _store_latent(
            y, latent_ptr + slot * stride_latent, scales_row_ptr, layer_scales_ptr, is_real,
            LATENT_DIM, BLOCK_L, GROUP, POWER_OF_TWO, LATENT_LIMIT, SANITIZE, NATIVE_FP8, PACKED,
        )  # fmt: skip
        _store_rope_key(
            rotated, rope_ptr + slot * stride_rope, layer_scales_ptr, is_real,
            ROPE_DIM, BLOCK_R, ROPE_LIMIT, INTERLEAVED, SANITIZE, NATIVE_FP8,
        )  # fmt: skip
    elif part <= ROPE_PARTS:
        _rotate_heads(
            (q_rope_ptr, stride_q_rope_token, stride_q_rope_head),
            (q_rope_out_ptr, stride_q_rope_out_token, stride_q_rope_out_head),
            q_scale_ptr, row, part - 1, num_heads, place, found, table,
            PAGE_SIZE, ROPE_DIM, BLOCK_R, ROPE_HEADS, INTERLEAVED, NATIVE_FP8,
        )  # fmt: skip
    elif (Q_LATENT_DIM > 0) & (part == NUM_PARTS - 1):
        _normalise_query_latent(
            q_latent_ptr, q_gamma_ptr, q_latent_out_ptr, row * stride_q_latent,
            row * stride_q_latent_out, eps, place, found, Q_LATENT_DIM, BLOCK_Q, PAGE_SIZE,
            ROUND_HF, NATIVE_FP8,
        )  # fmt: skip
    else:
        _copy_heads(
            (q_nope_ptr, stride_q_nope_token, stride_q_nope_head),
            (q_nope_out_ptr, stride_q_nope_out_token, stride_q_nope_out_head),
            q_scale_ptr, row, part - 1 - ROPE_PARTS, num_heads, place, found,
            PAGE_SIZE, NOPE_DIM, BLOCK_N, NOPE_HEADS, NATIVE_FP8,
        )  # fmt: skip


class Tiles(NamedTuple):
    """How the launch is cut up."""

    rope_heads: int
    nope_heads: int
    num_warps: int


def choose_tiles(
    num_tokens: int, num_heads: int, rope_dim: int, nope_dim: int, q_latent_dim: int, gpu: Gpu
) -> Tiles:
    """Short programs: what bounds the kernel is how many loads are under way.

    Few tokens: latency counts, and four warps share a part. Many: one warp each, which leaves the
    fewest instructions and, as warps need not wait for one another, the most parts in an SM. 2048
    rope values a part and 1024 nope values a warp were best, or near it, on an H100 with 16 to 128
    heads and 1 to 16384 tokens. A query latent, wider than the rest, is spread over more warps, or
    it would set the registers of every part.
    """
    num_warps = 4 if num_tokens <= 4 * gpu.num_sms else 1
    num_warps = max(num_warps, min(power_of_two(q_latent_dim) // 512, 8))

    def heads(num_values: int, dim: int) -> int:
        return min(max(num_values // power_of_two(dim), 1), power_of_two(num_heads))

    return Tiles(heads(2048, rope_dim), heads(1024 * num_warps, nope_dim), num_warps)


_NUM_VARYING = 24  # the kernel's first parameters: 21 addresses and the three counts of _counts


def _call(
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
    *,
    eps: float,
    interleaved: bool,
    round_hf: bool,
    sanitize: bool,
    gpu: Gpu,
) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
    """The launch's grid, arguments and options."""
    fmt = pages.format
    if fmt.rope_dim == 0:
        q_rope = q_rope_out = None
    queries = [q for q in (q_rope, q_nope) if q is not None]
    num_heads = queries[0].shape[1] if queries else 0
    nope_dim = 0 if q_nope is None else q_nope.shape[2]
    q_latent_dim = 0 if q_latent is None else q_latent.shape[1]
    tiles = choose_tiles(kv.shape[0], num_heads, fmt.rope_dim, nope_dim, q_latent_dim, gpu)
    rope_parts = 0 if q_rope is None else -(-num_heads // tiles.rope_heads)
    nope_parts = 0 if q_nope is None else -(-num_heads // tiles.nope_heads)
    num_parts = 1 + rope_parts + nope_parts + (q_latent is not None)
    arguments = {
        **row_fields(pages, gpu),
        **(_NO_BATCH if batch is None else batch_fields(batch)),
        "kv_ptr": kv,
        "freqs_ptr": freqs,
        "gamma_ptr": gamma,
        "q_rope_ptr": q_rope,
        "q_rope_out_ptr": None if q_rope_out is None else codes(q_rope_out),
        "q_nope_ptr": q_nope,
        "q_nope_out_ptr": None if q_nope_out is None else codes(q_nope_out),
        "q_latent_ptr": q_latent,
        "q_gamma_ptr": q_gamma,
        "q_latent_out_ptr": q_latent_out,
        "kv_out_ptr": kv_out,
        "q_scale_ptr": q_scale,
        "positions_ptr": positions,
        "slot_mapping_ptr": slot_mapping,
        **dict(zip(("num_requests", "max_pages", "expect_decode"), _counts(batch), strict=True)),
        "max_positions": 0 if freqs is None else len(freqs),
        "num_slots": pages.num_slots,
        "num_heads": num_heads,
        "eps": eps,
        "stride_kv": kv.stride(0),
        "stride_q_rope_token": _stride(q_rope, 0),
        "stride_q_rope_head": _stride(q_rope, 1),
        "stride_q_rope_out_token": _stride(q_rope_out, 0),
        "stride_q_rope_out_head": _stride(q_rope_out, 1),
        "stride_q_nope_token": _stride(q_nope, 0),
        "stride_q_nope_head": _stride(q_nope, 1),
        "stride_q_nope_out_token": _stride(q_nope_out, 0),
        "stride_q_nope_out_head": _stride(q_nope_out, 1),
        "stride_q_latent": _stride(q_latent, 0),
        "stride_q_latent_out": _stride(q_latent_out, 0),
        "stride_kv_out": _stride(kv_out, 0),
        "NOPE_DIM": nope_dim,
        "Q_LATENT_DIM": q_latent_dim,
        "BLOCK_N": power_of_two(nope_dim),
        "BLOCK_Q": power_of_two(q_latent_dim),
        "NUM_PARTS": num_parts,
        "ROPE_PARTS": rope_parts,
        "ROPE_HEADS": tiles.rope_heads,
        "NOPE_HEADS": tiles.nope_heads,
        "POWER_OF_TWO": not fmt.token_scaled,
        "LATENT_LIMIT": fmt.latent_max,
        "ROPE_LIMIT": torch.finfo(fmt.rope_dtype).max,
        "INTERLEAVED": interleaved,
        "ROUND_HF": round_hf,
        "SANITIZE": sanitize,
    }
    options = {"num_warps": tiles.num_warps, "enable_fp_fusion": False}
    return (kv.shape[0] * num_parts,), arguments, options


_NO_BATCH = {"offsets_ptr": None, "cache_lengths_ptr": None, "page_table_ptr": None}


def _counts(batch: PagedBatch | None) -> tuple[int, int, int]:
    """num_requests, max_pages and expect_decode."""
    if batch is None:
        return 0, 0, 0
    return batch.num_requests, batch.max_pages, int(batch.max_query_len == 1)


Again = Callable[[LayerPages, PagedBatch | None, list[int | None]], None]


def write_kv(
    pages: LayerPages, batch: PagedBatch | None, *tensors: Any, **settings: Any
) -> Again | None:
    """Launch once; the arguments are ``_call``'s, and ``kvkern.write_kv`` has checked them.

    Returns how to launch for the addresses of other tensors of the same kinds, if that is cheaper.
    """
    if len(tensors[0]) == 0:
        return None
    device = pages.device
    grid, arguments, options = _call(pages, batch, *tensors, gpu=gpu_of(device), **settings)
    again = launch(_write_kv_kernel, grid, arguments, options, device, num_varying=_NUM_VARYING)
    if again is None:
        return None

    def write_again(
        pages: LayerPages, batch: PagedBatch | None, addresses: list[int | None]
    ) -> None:
        of_batch = (None, None, None) if batch is None else batch.addresses
        again((*addresses, *pages.addresses, *of_batch, *_counts(batch)))

    return write_again


def _stride(tensor: Tensor | None, dim: int) -> int:
    return 0 if tensor is None else tensor.stride(dim)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Every format, rotated and rounded both ways; few tokens and many; odd dims; a whole query."""
    fields = [(name, 512, 64) for name in FORMAT_NAMES]
    fields += [(name, *dims) for name in ("bf16", "fp8_ds_mla") for dims in ((384, 48), (128, 0))]
    styles = [
        {"interleaved": True, "round_hf": False, "sanitize": False},
        {"interleaved": False, "round_hf": True, "sanitize": True},
    ]
    for (name, *dims), (style, num_tokens) in itertools.product(
        fields, zip(styles, (1, 4096), strict=True)
    ):
        yield _shipped(CacheFormat(name, *dims), num_tokens, style, capability)
    for name in ("bf16", "fp8", "fp8_token", "fp8_ds_mla", "nvfp4"):
        yield _shipped(CacheFormat(name), 4096, styles[0], capability)
    for name, q_dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        for num_tokens in (1, 4096):
            yield _shipped(CacheFormat(name), num_tokens, styles[0], capability, q_dtype)


def _shipped(
    fmt: CacheFormat,
    num_tokens: int,
    style: dict[str, Any],
    capability: int,
    q_dtype: torch.dtype | None = None,
) -> KernelConfig:
    """One variant; with ``q_dtype`` by slots, and with all of the query, packed in that dtype."""
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(fmt.name, torch.bfloat16)
    pages = PagedKVCache(fmt, num_layers=1, num_pages=1, page_size=64).layer(0)
    kv = torch.empty(num_tokens, fmt.row_dim, dtype=dtype)
    freqs = torch.empty(1, fmt.rope_dim) if fmt.rope_dim else None
    gamma = torch.empty(fmt.kv_lora_rank, dtype=dtype)
    q_rope = torch.empty(num_tokens, 16, fmt.rope_dim, dtype=dtype)
    query: Any = [q_rope, q_rope, None, None, None, None, None, kv, None]
    label = f"{fmt.name}-L{fmt.kv_lora_rank}-R{fmt.rope_dim}-T{num_tokens}"
    label += "-interleaved" if style["interleaved"] else "-half"
    if q_dtype is not None:
        nope = torch.empty(num_tokens, 16, 512, dtype=dtype)
        packed = torch.empty(num_tokens, 16, fmt.row_dim, dtype=q_dtype)
        q_latent, q_gamma = torch.empty(num_tokens, 1536, dtype=dtype), torch.empty(1536)
        q_scale = torch.empty(1) if q_dtype.itemsize == 1 else None
        query = [
            q_rope, packed[..., 512:], nope, packed[..., :512],
            q_latent, q_gamma, q_latent, None, q_scale,
        ]  # fmt: skip
        label += "-query"
    batch = PagedBatch([0, 1], [0], [[0]]) if q_dtype is None else None
    slots = None if q_dtype is None else torch.empty(num_tokens, dtype=torch.int64)
    tensors: Any = [kv, freqs, gamma, *query, slots, slots]  # as positions too
    gpu = Gpu(capability, num_sms=108)
    _, arguments, options = _call(pages, batch, *tensors, eps=1e-6, gpu=gpu, **style)
    return config_of_call(_write_kv_kernel, label, arguments, options)
