"""mla_decode for few rows of an 8-bit cache: e4m3 S^T = K Q^T, fp16 O^T = V^T softmax(scale S)^T.

As in mla_decode_few, operands are swapped: keys, and the columns of the latent, are the 64 rows
that a wgmma wants, and query rows its N. Eight warps compute: two warpgroups have half of the rows
each of a block's scores, and of its output half of the columns. The scores of the next block are
begun before the output of this one, so that weights are found while wgmma adds that up.

- Scores. A query row is 2^e (high + low / 16), both e4m3, side by side on N: 8 significant bits, as
  bf16 has, or 2^-17 of the row's largest; fp16 loses 3 of its 11. A query that comes in e4m3 is
  multiplied as it is. fp8 wgmma keeps about 13 bits of a sum, which here goes over the columns of
  one key; sums over keys are fp32. A bf16 rope key has a wgmma of its own, with two bf16 terms.
- Output. 8-bit wgmma takes no transposed operand, so V^T goes through registers as fp16, where e4m3
  is exact. Weights are fp16 up to 2^8: 11 bits, down to 2^-22 of a row's largest.
- Scales of tokens, or of 128 columns of them, multiply scores in fp32. A key's largest multiplies
  its weight before that is rounded. So what must stay below 1 is weight * scale, and the running
  maximum is that of score + log2(scale): whatever the scales are, from 2^-100 to 2^119, the largest
  term of a row is near 2^8. Weights alone then reach 2^100 and their sum 2^124, in fp32. A group's
  scale over its key's largest, a power of two, multiplies values in fp16: exact down to 2^-15.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from kvkern.cache.storage import LayerPages, PagedKVCache
from kvkern.kernels.config import KernelConfig, spills
from kvkern.kernels.hopper.compat import copy_values, load_tile, tile_descriptor, view_tile
from kvkern.kernels.hopper.decode_call import Kernel, shipped_config
from kvkern.kernels.hopper.e4m3 import halves
from kvkern.kernels.hopper.paging import (
    BLOCK_N,
    are_keys,
    box_keys,
    clear_padding,
    clear_rows,
    end_request,
    hole_word,
    load_lengths,
    make_barriers,
    part_bounds,
    piece_of,
    prefetch_query,
    prefetch_step,
    put,
    query_offsets,
    scalar,
    share_of,
    table_row,
    visible_keys,
)
from kvkern.kernels.paging import ANY_ALIGNMENT
from kvkern.kernels.schedule import Work
from kvkern.layout import CacheFormat, FormatName

_SPILLS = spills("what a tile needs once is parked while its keys are gone over", 96, newer=400)
_GAIN: gl.constexpr = gl.constexpr(256.0)  # of weights in fp16
_MIN_SCALE: gl.constexpr = gl.constexpr(2.0**-100)  # smaller ones, which nobody writes, count as it
_ROPE_RANGE: gl.constexpr = gl.constexpr(2.0**-40)
_E4M3_BITS: gl.constexpr = gl.constexpr(-(2**20))  # of an fp32: sign, exponent, 3 of the fraction
_BF16_BITS: gl.constexpr = gl.constexpr(-(2**16))
# 16 rows of queries by eight warps, a row in 16 lanes
_QUERY: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
_QUERY_ROPE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [8, 1], [1, 0]))
# a row each, and not what the threads of its columns share
_ROW_EACH: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
# [groups, pairs of columns, keys] as ``_values`` has them, whose warpgroups have a group each
_GROUP_VALUES: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 8, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]],
        [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 16, 0], [0, 32, 0], [1, 0, 0]],
        [],
        [2, 64, 64],
    )
)


def _columns(num_rows: int, more_rows: list[list[int]]) -> gl.constexpr:
    """[columns, query rows] of the output: neighbouring columns, which go together, in a thread."""
    return gl.constexpr(
        gl.DistributedLinearLayout(
            [[1, 0], [0, 1], *more_rows, [16, 0]],
            [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
            [[32, 0], [64, 0], [128, 0]],
            [],
            [256, num_rows],
        )
    )


_COLUMNS_16: gl.constexpr = _columns(16, [[0, 8]])
_COLUMNS_32: gl.constexpr = _columns(32, [[0, 8], [0, 16]])


@gluon.jit
def _fetch(
    q_ptr,
    latent_desc,
    rope_desc,
    scales_ptr,
    keys,
    barriers,
    work,
    stride_q_token,
    stride_q_head,
    GANG: gl.constexpr,
    ROWS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
    STRIDE_SCALES: gl.constexpr,
):
    """Fill the ring with the blocks that ``_attend`` takes, in its order. One warp.

    A block is fetched in boxes that lie in one page each; a page of -1 is outside the cache, where
    the TMA finds zeros. Scales lie 4 or 656 bytes apart: each lane copies those of two keys, and
    arrives when they have; those of keys that are not there are 0.
    """
    latents, ropes, scales, holes = keys
    full, empty = barriers
    bounds_ptr, offsets_ptr, cache_lengths_ptr, page_table_ptr, max_pages, num_heads = work
    STAGES: gl.constexpr = latents.type.shape[0]
    LATENT_DIM: gl.constexpr = latents.type.shape[2]
    BOX: gl.constexpr = latent_desc.block_type.shape[0]
    ROPE_BYTES: gl.constexpr = rope_desc.dtype.primitive_bitwidth // 8 * 64 if ROPE_DIM > 0 else 0
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    offs_n = gl.arange(0, BLOCK_N, layout=LANES)
    part = part_bounds(bounds_ptr, GANG)
    end = end_request(part)
    lengths = load_lengths(offsets_ptr, cache_lengths_ptr, part[0], end)
    # before keys fill the memory's queues
    prefetch_query(
        q_ptr, lengths, num_heads, stride_q_token, stride_q_head, GANG, ROWS, LATENT_DIM + ROPE_DIM
    )
    fetched = 0
    for request in range(part[0], end):
        _, num_tokens, cached, begin, stop = share_of(lengths, request, part)
        lengths = load_lengths(offsets_ptr, cache_lengths_ptr, request + 1, end)
        seq_len = cached + num_tokens
        table_ptr = table_row(page_table_ptr, request, max_pages)
        num_tiles = gl.cdiv(num_tokens * num_heads, ROWS)
        for _ in range(gl.program_id(0) % GANG, num_tiles, GANG):
            for block in range(begin, stop):
                key = block * BLOCK_N + offs_n
                column = key // PAGE_SIZE
                mask = (key < seq_len) & (column < max_pages)
                page = gl.load(table_ptr + column, mask=mask, other=-1)
                is_hole = (key < seq_len) & (page < 0) & (offs_n % BOX == 0)
                hole_bits = hole_word(is_hole, offs_n // BOX, 0)
                slots = page * PAGE_SIZE + key % PAGE_SIZE
                stage = fetched % STAGES
                arrived = full.index(stage)
                mbarrier.wait(empty.index(stage), ((fetched // STAGES) & 1) ^ 1)
                put(holes.index(stage), hole_bits)
                mbarrier.expect(arrived, BLOCK_N * (LATENT_DIM + ROPE_BYTES))
                for box in gl.static_range(BLOCK_N // BOX):
                    slot = gl.max(gl.where(offs_n == box * BOX, slots, -2147483648), 0)
                    load_tile(
                        latent_desc, [slot, 0], arrived,
                        latents.index(stage).slice(box * BOX, BOX, dim=0),
                    )  # fmt: skip
                    if ROPE_DIM > 0:
                        load_tile(
                            rope_desc, [slot, 0], arrived,
                            ropes.index(stage).slice(box * BOX, BOX, dim=0),
                        )  # fmt: skip
                if NUM_GROUPS > 0:
                    ptrs = scales_ptr + slots.to(gl.int64) * STRIDE_SCALES
                    for group in gl.static_range(NUM_GROUPS):
                        cell = scales.index(stage * NUM_GROUPS + group)
                        copy_values(cell, ptrs + group, mask=page >= 0)
                    async_copy.mbarrier_arrive(arrived, increment_count=False)
                fetched += 1
        prefetch_query(
            q_ptr, lengths, num_heads, stride_q_token, stride_q_head, GANG, ROWS,
            LATENT_DIM + ROPE_DIM,
        )  # fmt: skip


@gluon.jit
def _power_below(value):
    """The largest power of two that is not above a value > 0."""
    return (value.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def _inverse_of(power):
    """Exact, of a power of two."""
    return ((254 << 23) - power.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def _term(values, BITS: gl.constexpr, TERM: gl.constexpr):
    """Values are term 0 + term 1 / 16: rounded to some bits, and what that leaves.

    Term 0 is rounded by its bits, not converted and back: ptxas 12.8 and 12.9 miscompile the
    unpacking of what was packed just before.
    """
    bits = (values.to(gl.int32, bitcast=True) + (-BITS // 2)) & BITS
    high = bits.to(gl.float32, bitcast=True)
    return high if TERM == 0 else (values - high) * 16.0


@gluon.jit
def _load_query(
    q_ptr, first_row, num_left, start, num_heads, stride_q_token, stride_q_head,
    NUM_ROWS: gl.constexpr, LATENT_DIM: gl.constexpr, ROPE_DIM: gl.constexpr,
):  # fmt: skip
    """Latent and rope columns; zeros of rows that are not there."""
    OF_NARROW: gl.constexpr = gl.SliceLayout(1, _QUERY_ROPE)
    row = gl.arange(0, NUM_ROWS, layout=gl.SliceLayout(1, _QUERY))
    offs_row = query_offsets(first_row + row, start, num_heads, stride_q_token, stride_q_head)
    offs_l = gl.arange(0, LATENT_DIM, layout=gl.SliceLayout(0, _QUERY))
    offs = gl.expand_dims(offs_row, 1) + gl.expand_dims(offs_l, 0)
    latent = gl.load(q_ptr + offs, mask=gl.expand_dims(row < num_left, 1), other=0.0)
    offs_r = gl.arange(0, 64, layout=gl.SliceLayout(0, _QUERY_ROPE))
    offs_row = gl.convert_layout(offs_row, OF_NARROW, assert_trivial=True)
    mask = gl.expand_dims(gl.convert_layout(row < num_left, OF_NARROW, assert_trivial=True), 1)
    mask = mask & gl.expand_dims(offs_r < ROPE_DIM, 0)
    offs = gl.expand_dims(offs_row, 1) + gl.expand_dims(offs_r, 0)
    return latent, gl.load(q_ptr + LATENT_DIM + offs, mask=mask, other=0.0)


@gluon.jit
def _store_terms(rows, query, index, rope_factor, zero, ROPE_DIM: gl.constexpr):
    """The ``index``-th 16 rows of a tile: both terms of each over its power of two, and that.

    The latent in a loop over 128 columns each, whose length ``zero`` hides: when a kernel starts
    its instructions have to be fetched as well.
    """
    q_latent, q_rope, powers = query[0].index(0), query[1].index(0), query[2]
    NUM_PARTS: gl.constexpr = powers.shape[0] // 16
    CHUNKS: gl.constexpr = q_latent.shape[1] // 128
    BY_CHUNK: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    latent, rope = rows[0].to(gl.float32), rows[1].to(gl.float32) * rope_factor
    # the largest comes to lie in [128, 256), below e4m3's 448; in bf16, rope columns have the range
    # to lie far above, and leave the bits to latents whose scales are large
    IS_NARROW: gl.constexpr = q_rope.dtype.primitive_bitwidth == 8
    amax = gl.max(gl.abs(latent), 1)
    rope_amax = gl.max(gl.abs(rope), 1)
    rope_amax = rope_amax if IS_NARROW else rope_amax * _ROPE_RANGE
    amax = gl.maximum(amax, gl.convert_layout(rope_amax, amax.type.layout, assert_trivial=True))
    power = _power_below(gl.maximum(amax, _MIN_SCALE)) * 0.0078125
    powers = view_tile(powers, gl.float32, [NUM_PARTS, 16], powers.type.layout)
    powers.index(index).store(power)
    inverse = gl.expand_dims(_inverse_of(power), 1)
    if ROPE_DIM > 0:
        rope = rope * gl.convert_layout(inverse, _QUERY_ROPE, assert_trivial=True)
        parts = view_tile(q_rope, q_rope.dtype, [NUM_PARTS, 32, 64], q_rope.type.layout)
        BITS: gl.constexpr = _E4M3_BITS if IS_NARROW else _BF16_BITS
        parts.index(index).store(_both_terms(rope, BITS).to(q_rope.dtype))
    tiles = view_tile(q_latent, q_latent.dtype, [CHUNKS * NUM_PARTS, 32, 128], BY_CHUNK)
    chunks = halves(latent * inverse)
    if CHUNKS == 4:
        chunks = halves(chunks[0]) + halves(chunks[1])
    for chunk in range(zero, CHUNKS):
        terms = _both_terms(chunks[0], _E4M3_BITS)
        tiles.index(chunk * NUM_PARTS + index).store(terms.to(q_latent.dtype))
        if CHUNKS == 4:
            chunks = (chunks[1], chunks[2], chunks[3], chunks[0])
        else:
            chunks = (chunks[1], chunks[0])


@gluon.jit
def _both_terms(rows, BITS: gl.constexpr):
    """[16, C] to [32, C]: of eight rows the first terms, then the second, then of the next eight.

    A warpgroup has the products of neighbouring rows: both terms of a row are to be among them.
    """
    C: gl.constexpr = rows.shape[1]
    both = gl.join(_term(rows, BITS, 0), _term(rows, BITS, 1))
    return both.reshape([2, 8, C, 2]).permute([0, 3, 1, 2]).reshape([32, C])


@gluon.jit
def _join_terms(products, MMA: gl.constexpr):
    """Scores [64, ROWS] from products with ``_both_terms``, which of a row are in one thread."""
    ROWS: gl.constexpr = products.shape[1] // 2
    products = products.reshape([BLOCK_N, ROWS // 8, 2, 8]).permute([0, 1, 3, 2])
    high, low = gl.split(products)
    scores = (high + low * 0.0625).reshape([BLOCK_N, ROWS])
    return gl.convert_layout(scores, MMA, assert_trivial=True)


@gluon.jit
def _start_group(latent, q_latent, group: gl.constexpr, none):
    """Products over one group of 128 columns."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    keys = view_tile(latent, latent.dtype, [4, BLOCK_N, 128], LAYOUT).index(group)
    rows = view_tile(q_latent, latent.dtype, [4, q_latent.shape[0], 128], LAYOUT).index(group)
    return warpgroup_mma(keys, rows.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _group_scores(of_rope, latent, q_latent, scales, stage, none):
    """Scores of keys whose groups have scales. Two products at a time have registers."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, none.shape[1] // 4, 16])
    OF_KEY: gl.constexpr = gl.SliceLayout(1, MMA)
    group0 = _start_group(latent, q_latent, 0, none)
    of_rope, group0 = warpgroup_mma_wait(1, deps=(of_rope, group0))
    group1 = _start_group(latent, q_latent, 1, none)
    scores = _join_terms(of_rope, MMA)
    group0, group1 = warpgroup_mma_wait(1, deps=(group0, group1))
    group2 = _start_group(latent, q_latent, 2, none)
    scores += _join_terms(group0, MMA) * _scale_of(scales, stage * 4, OF_KEY)
    group1, group2 = warpgroup_mma_wait(1, deps=(group1, group2))
    group3 = _start_group(latent, q_latent, 3, none)
    scores += _join_terms(group1, MMA) * _scale_of(scales, stage * 4 + 1, OF_KEY)
    group2, group3 = warpgroup_mma_wait(1, deps=(group2, group3))
    scores += _join_terms(group2, MMA) * _scale_of(scales, stage * 4 + 2, OF_KEY)
    group3 = warpgroup_mma_wait(0, deps=(group3,))
    return scores + _join_terms(group3, MMA) * _scale_of(scales, stage * 4 + 3, OF_KEY)


@gluon.jit
def _scale_of(scales, cell, OF_KEY: gl.constexpr):
    return gl.expand_dims(scales.index(cell).load(OF_KEY), 1)


@gluon.jit
def _start_scores(keys, query, stage, zero, ROPE_DIM: gl.constexpr, NUM_GROUPS: gl.constexpr):
    """Products of a block's keys and the query, of which scores are made; not waited for.

    Over all columns, or over those of the latent and those of rope. Scores, if groups have scales.
    """
    q_latent, q_rope = query[0].index(zero), query[1].index(zero)
    latent, rope = keys[0].index(stage), keys[1].index(stage)
    N: gl.constexpr = q_latent.shape[0]
    K: gl.constexpr = 256 // rope.dtype.primitive_bitwidth
    OF_LATENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, N // 2, 32])
    OF_ROPE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, N // 2, K])
    HAS_TERMS: gl.constexpr = N > query[2].shape[0]
    none = gl.zeros([BLOCK_N, N], gl.float32, OF_LATENT)
    no_rope = gl.zeros([BLOCK_N, N], gl.float32, OF_ROPE)
    rope_rows = q_rope.permute((1, 0))
    if NUM_GROUPS == 4:
        of_rope = warpgroup_mma(rope, rope_rows, no_rope, use_acc=False, is_async=True)
        return (_group_scores(of_rope, latent, q_latent, keys[2], stage, none),)
    else:
        rows = q_latent.permute((1, 0))
        products = warpgroup_mma(latent, rows, none, use_acc=False, is_async=True)
        if ROPE_DIM == 0:
            return (products,)
        elif NUM_GROUPS == 0 and HAS_TERMS:
            return (warpgroup_mma(rope, rope_rows, products, is_async=True),)
        else:
            of_rope = warpgroup_mma(rope, rope_rows, no_rope, use_acc=False, is_async=True)
            return products, of_rope


@gluon.jit
def _wait(products, pending: gl.constexpr):
    """For all but the ``pending`` wgmmas that were started last."""
    if len(products) == 1:
        return (warpgroup_mma_wait(pending, deps=(products[0],)),)
    else:
        return warpgroup_mma_wait(pending, deps=products)


@gluon.jit
def _scores(products, scales, stage, rope_factor, MMA: gl.constexpr, NUM_GROUPS: gl.constexpr):
    """[64, ROWS] over the rows' powers of two, from what ``_start_scores`` started."""
    if NUM_GROUPS == 4:
        return products[0]
    elif NUM_GROUPS == 1:
        scale = _scale_of(scales, stage, gl.SliceLayout(1, MMA))
        return _join_terms(products[0], MMA) * scale + _join_terms(products[1], MMA)
    elif products[0].shape[1] > MMA.instr_shape[1] * 2:
        return _join_terms(products[0], MMA)
    else:  # queries came in e4m3
        scores = products[0]
        if len(products) == 2:
            scores += products[1] * rope_factor
        return gl.convert_layout(scores, MMA, assert_trivial=True)


@gluon.jit
def _largest_scale(scales, stage, LAYOUT: gl.constexpr, NUM_GROUPS: gl.constexpr):
    """Of each key [64]."""
    largest = scales.index(stage * NUM_GROUPS).load(LAYOUT)
    for group in gl.static_range(1, NUM_GROUPS):
        largest = gl.maximum(largest, scales.index(stage * NUM_GROUPS + group).load(LAYOUT))
    return largest


@gluon.jit
def _row_maxima(scores, cells):
    """Of [64, ROWS]. Each thread takes those of the warps' 16 keys together: once they meet."""
    ROWS: gl.constexpr = scores.shape[1]
    OF_ROW: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    of_warps = gl.max(scores.reshape([4, 16, ROWS]), 1)
    TOGETHER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    view_tile(cells, gl.float32, [4, ROWS], TOGETHER).store(of_warps)
    of_two = gl.maximum(cells.index(0).load(OF_ROW), cells.index(1).load(OF_ROW))
    of_other_two = gl.maximum(cells.index(2).load(OF_ROW), cells.index(3).load(OF_ROW))
    return gl.maximum(of_two, of_other_two)


@gluon.jit
def _weigh(
    products, keys, stage, passed, turn, rope_factor, row_scale, softmax, first_key, visible,
    MMA: gl.constexpr, BOX: gl.constexpr, NUM_GROUPS: gl.constexpr,
):  # fmt: skip
    """A block's weights, and what the output of earlier ones is to be multiplied by, are passed on.

    By turns in two places: the last ones are being read. Returns the rows' maxima, and sums over a
    thread's own keys, up to this block.
    """
    tiles, factors, shares, cells = passed
    OF_KEY: gl.constexpr = gl.SliceLayout(1, MMA)
    _latents, _ropes, scales, holes = keys
    max_score, weight_sums = softmax
    num_visible, min_visible = visible
    scores = _scores(products, scales, stage, rope_factor, MMA, NUM_GROUPS)
    scores = scores * gl.expand_dims(row_scale, 0)
    hole_bits = scalar(holes.index(stage))
    if (first_key + BLOCK_N > min_visible) | (hole_bits != 0):
        offs_n = gl.arange(0, BLOCK_N, layout=OF_KEY)
        is_key = are_keys(hole_bits, 0, offs_n, BOX)
        key = gl.where(is_key, first_key + offs_n, 2147483647)
        is_visible = gl.expand_dims(key, 1) < gl.expand_dims(num_visible, 0)
        scores = gl.where(is_visible, scores, -float("inf"))
    if NUM_GROUPS > 0:
        largest = _largest_scale(scales, stage, OF_KEY, NUM_GROUPS)
        log_scale = gl.log2(gl.maximum(largest, _MIN_SCALE))
        new_max = _row_maxima(scores + gl.expand_dims(log_scale, 1), cells)
    else:
        new_max = _row_maxima(scores, cells)
    new_max = gl.maximum(max_score, new_max)
    shift = gl.where(new_max == -float("inf"), 0.0, new_max)
    weights = gl.exp2(scores - gl.expand_dims(shift, 0))
    factor = gl.exp2(max_score - shift)
    factors.index(turn).store(factor)
    weight_sums = weight_sums * gl.expand_dims(factor, 0) + weights
    weights = weights * _GAIN
    if NUM_GROUPS > 0:
        weights *= gl.expand_dims(largest, 1)
    if NUM_GROUPS == 4:
        inverse = gl.where(largest > 0.0, 1.0 / gl.where(largest > 0.0, largest, 1.0), 0.0)
        for group in gl.static_range(4):
            share = scales.index(stage * 4 + group).load(OF_KEY) * inverse
            shares.index(turn * 4 + group).store(share.to(gl.float16))
    tiles.index(turn).store(weights.to(gl.float16))
    fence_async_shared()
    return new_max, weight_sums


@gluon.jit
def _values(pairs, shares, ACC: gl.constexpr, NUM_GROUPS: gl.constexpr):
    """V^T: 256 columns of 64 keys, as fp16 in the registers of wgmma's first operand.

    ``pairs`` is a tile of e4m3 seen as pairs of columns [64, 128], which ldmatrix transposes. Row
    b * 128 + w * 16 + half * 8 + g holds column 2 * (w * 16 + b * 8 + g) + half; ``_store_columns``
    undoes it. ``shares`` [2, 64]: what keys' 128 columns each are multiplied by, if groups have
    scales.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    even, odd = gl.inline_asm_elementwise(
        """{ .reg .b32 both; .reg .b16 low, high; prmt.b32 both, $2, $2, 0x3120;
        mov.b32 {low, high}, both; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }""",
        "=r,=r,r",
        [pairs.permute((1, 0)).load(OPERAND)],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
    if NUM_GROUPS == 4:
        share = gl.expand_dims(shares.load(gl.SliceLayout(1, _GROUP_VALUES)), 1)
        even = _times(even, share, OPERAND)
        odd = _times(odd, share, OPERAND)
    values = gl.join(even, odd).reshape([8, 2, 8, BLOCK_N, 2]).permute([1, 0, 4, 2, 3])
    return gl.convert_layout(values.reshape([256, BLOCK_N]), OPERAND, assert_trivial=True)


@gluon.jit
def _times(values, share, OPERAND: gl.constexpr):
    """values [128, 64] * share [2, 1, 64]: a share for the values of a warpgroup."""
    of_groups = gl.convert_layout(
        values.reshape([2, 64, BLOCK_N]), _GROUP_VALUES, assert_trivial=True
    )
    values = (of_groups * share).reshape([128, BLOCK_N])
    return gl.convert_layout(values, OPERAND, assert_trivial=True)


@gluon.jit
def _start_values(acc, latent, passed, turn, ACC: gl.constexpr, NUM_GROUPS: gl.constexpr):
    """acc + V^T weights, 256 columns of the latent each; not waited for."""
    tiles, _factors, shares, _cells = passed
    CHUNKS: gl.constexpr = len(acc)
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    OF_TWO: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tile = tiles.index(turn)
    pairs = view_tile(latent, gl.int16, [CHUNKS, BLOCK_N, 128], PAIRS)
    shares = view_tile(shares, gl.float16, [4, 2, BLOCK_N], OF_TWO)
    values = _values(pairs.index(0), shares.index(turn * 2), ACC, NUM_GROUPS)
    acc0 = warpgroup_mma(values, tile, acc[0], is_async=True)
    if CHUNKS == 1:
        return (acc0,)
    else:
        values = _values(pairs.index(1), shares.index(turn * 2 + 1), ACC, NUM_GROUPS)
        return acc0, warpgroup_mma(values, tile, acc[1], is_async=True)


@gluon.jit
def _times_factor(acc, cell, ACC: gl.constexpr):
    """The factor of a row is in a cell."""
    factor = gl.expand_dims(cell.load(gl.SliceLayout(0, ACC)), 0)
    if len(acc) == 1:
        return (acc[0] * factor,)
    else:
        return acc[0] * factor, acc[1] * factor


@gluon.jit
def _store_columns(acc, out_ptr, offs_row, mask_row, chunk):
    """256 columns of the latent, which come in the order of ``_values``."""
    ROWS: gl.constexpr = acc.shape[1]
    LAYOUT: gl.constexpr = _COLUMNS_16 if ROWS == 16 else _COLUMNS_32
    acc = acc.to(out_ptr.dtype.element_ty)
    acc = acc.reshape([2, 8, 2, 8, ROWS]).permute([1, 0, 3, 2, 4]).reshape([256, ROWS])
    acc = gl.convert_layout(acc, LAYOUT)  # the same values in each thread
    OF_ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    offs_l = chunk * 256 + gl.arange(0, 256, layout=gl.SliceLayout(1, LAYOUT))
    offs = gl.expand_dims(gl.convert_layout(offs_row, OF_ROW), 0) + gl.expand_dims(offs_l, 1)
    mask = gl.expand_dims(gl.convert_layout(mask_row, OF_ROW), 0)
    gl.store(out_ptr + offs, acc, mask=mask)


@gluon.jit
def _attend(
    q_ptr,
    query,
    keys,
    passed,
    barriers,
    results,
    work,
    scale_log2,
    layer_scales_ptr,
    q_scale_ptr,
    stride_q_token,
    stride_q_head,
    GANG: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
    LN_2: gl.constexpr,
):
    """Online softmax of each tile of query rows over the blocks in the ring. Eight warps."""
    latents, _ropes, _scales, _holes = keys
    full, empty = barriers
    bounds_ptr, offsets_ptr, cache_lengths_ptr, page_table_ptr, max_pages, num_heads = work
    _tiles, factors, _shares, cells = passed
    STAGES: gl.constexpr = latents.type.shape[0]
    LATENT_DIM: gl.constexpr = latents.type.shape[2]
    IS_E4M3: gl.constexpr = q_ptr.dtype.element_ty.primitive_bitwidth == 8
    ROWS: gl.constexpr = query[2].shape[0]
    CHUNKS: gl.constexpr = LATENT_DIM // 256
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, ROWS // 2, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16])
    OF_ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    no_values = gl.zeros([256, ROWS], gl.float32, ACC)
    latent_scale = 1.0
    rope_factor = 1.0
    if layer_scales_ptr is not None:
        latent_scale = gl.load(layer_scales_ptr)
        rope_factor = gl.load(layer_scales_ptr + 1) / latent_scale
        scale_log2 *= latent_scale
    if IS_E4M3:
        scale_log2 *= gl.load(q_scale_ptr)
    part = part_bounds(bounds_ptr, GANG)
    end = end_request(part)
    lengths = load_lengths(offsets_ptr, cache_lengths_ptr, part[0], end)
    taken = 0  # blocks of the ring
    for request in range(part[0], end):
        start, num_tokens, cached, begin, stop = share_of(lengths, request, part)
        lengths = load_lengths(offsets_ptr, cache_lengths_ptr, request + 1, end)
        seq_len = cached + num_tokens
        num_rows = num_tokens * num_heads
        table_ptr = table_row(page_table_ptr, request, max_pages)
        is_piece, piece = piece_of(part, request, GANG)
        for tile in range(gl.program_id(0) % GANG, gl.cdiv(num_rows, ROWS), GANG):
            row = tile * ROWS + gl.arange(0, ROWS, layout=OF_ROW)
            rows = _load_query(
                q_ptr, tile * ROWS, num_rows - tile * ROWS, start, num_heads, stride_q_token,
                stride_q_head, ROWS if IS_E4M3 else 16, LATENT_DIM, ROPE_DIM,
            )  # fmt: skip
            visible = visible_keys(
                table_ptr, row, row < num_rows, num_heads, cached, seq_len, max_pages, PAGE_SIZE
            )
            if IS_E4M3:
                query[0].index(0).store(rows[0])
                if ROPE_DIM > 0:
                    query[1].index(0).store(rows[1])
            elif ROWS == 16:
                _store_terms(rows, query, 0, rope_factor, taken >> 30, ROPE_DIM)
            else:
                for index in range(taken >> 30, ROWS // 16):
                    first_row = tile * ROWS + index * 16 + 16
                    end_row = gl.where(index * 16 + 16 < ROWS, num_rows, 0)
                    next_rows = _load_query(
                        q_ptr, first_row, end_row - first_row, start, num_heads, stride_q_token,
                        stride_q_head, 16, LATENT_DIM, ROPE_DIM,
                    )  # fmt: skip
                    _store_terms(rows, query, index, rope_factor, taken >> 30, ROPE_DIM)
                    rows = next_rows
            fence_async_shared()
            row_scale = gl.full([ROWS], 1.0, gl.float32, OF_ROW)
            if not IS_E4M3:
                row_scale = query[2].load(OF_ROW)
            row_scale = row_scale * scale_log2

            softmax = (
                gl.full([ROWS], -float("inf"), gl.float32, OF_ROW),
                gl.zeros([BLOCK_N, ROWS], gl.float32, MMA),
            )
            acc = (no_values, no_values) if CHUNKS == 2 else (no_values,)
            stage = taken % STAGES
            mbarrier.wait(full.index(stage), (taken // STAGES) & 1, pred=begin < stop)
            first = _start_scores(keys, query, stage, taken >> 30, ROPE_DIM, NUM_GROUPS)
            softmax = _weigh(
                _wait(first, 0), keys, stage, passed, taken & 1, rope_factor, row_scale, softmax,
                begin * BLOCK_N, visible, MMA, BOX, NUM_GROUPS,
            )  # fmt: skip
            for block in range(begin + 1, stop):
                zero = taken >> 30  # a constant address would be kept in registers, and moved
                turn = taken & 1
                next_stage = (taken + 1) % STAGES
                mbarrier.wait(full.index(next_stage), ((taken + 1) // STAGES) & 1)
                products = _start_scores(keys, query, next_stage, zero, ROPE_DIM, NUM_GROUPS)
                acc = _start_values(acc, latents.index(stage), passed, turn, ACC, NUM_GROUPS)
                softmax = _weigh(
                    _wait(products, CHUNKS), keys, next_stage, passed, turn ^ 1, rope_factor,
                    row_scale, softmax, block * BLOCK_N, visible, MMA, BOX, NUM_GROUPS,
                )  # fmt: skip
                acc = _times_factor(_wait(acc, 0), factors.index(turn ^ 1), ACC)
                mbarrier.arrive(empty.index(stage), count=1)
                stage = next_stage
                taken += 1
            if stop * BLOCK_N > seq_len:
                clear_rows(latents.index(stage), seq_len - (stop - 1) * BLOCK_N)
            acc = _start_values(acc, latents.index(stage), passed, taken & 1, ACC, NUM_GROUPS)
            acc = _wait(acc, 0)
            if begin < stop:
                mbarrier.arrive(empty.index(stage), count=1)
                taken += 1
            _finish(
                acc, softmax, cells, results, is_piece, piece, start, num_heads, tile, num_rows,
                latent_scale, taken >> 30, ACC, LN_2,
            )  # fmt: skip


@gluon.jit
def _finish(
    acc, softmax, cells, results, is_piece, piece, start, num_heads, tile, num_rows, latent_scale,
    zero, ACC: gl.constexpr, LN_2: gl.constexpr,
):  # fmt: skip
    """A tile's lse and output: of its requests, or as a piece of one that is cut."""
    out_ptr, lse_ptr, pieces_ptr, piece_lses_ptr, slot_rows = results
    LATENT_DIM: gl.constexpr = len(acc) * 256
    ROWS: gl.constexpr = cells.shape[1]
    OF_ROW: gl.constexpr = gl.SliceLayout(0, ACC)
    max_score, weight_sums = softmax
    cells.index(0).store(max_score)
    cells.index(1).store(gl.sum(weight_sums, 0))
    weight_sum = cells.index(1).load(_ROW_EACH)
    saw_none = weight_sum == 0.0
    weight_sum = gl.where(saw_none, 1.0, weight_sum)
    lse = cells.index(0).load(_ROW_EACH) + gl.log2(weight_sum)
    unit = gl.where(is_piece, 1.0, latent_scale)  # pieces are multiplied when merged
    cells.index(2).store(gl.where(saw_none, 0.0, unit / _GAIN / weight_sum))
    row = tile * ROWS + gl.arange(0, ROWS, layout=_ROW_EACH)
    if is_piece:
        lse_ptrs = piece_lses_ptr + piece.to(gl.int64) * slot_rows + row
    else:
        lse_ptrs = lse_ptr + start.to(gl.int64) * num_heads + row
        lse *= LN_2
    gl.store(lse_ptrs, lse, mask=row < num_rows)
    inverse = gl.expand_dims(cells.index(2).load(OF_ROW), 0)
    row = tile * ROWS + gl.arange(0, ROWS, layout=OF_ROW)
    piece_row = piece.to(gl.int64) * slot_rows + row
    out_row = start.to(gl.int64) * num_heads + row
    columns, next_columns = acc[0], acc[len(acc) - 1]
    # a loop, as the instructions of what comes once have to be fetched
    for chunk in range(zero, len(acc)):
        out = gl.where(inverse == 0, 0.0, columns * inverse)  # saw none: 0 times what may be NaN
        if is_piece:
            _store_columns(out, pieces_ptr, piece_row * LATENT_DIM, row < num_rows, chunk)
        else:
            _store_columns(out, out_ptr, out_row * LATENT_DIM, row < num_rows, chunk)
        columns = next_columns


@gluon.jit(
    do_not_specialize=["num_requests", "num_tokens", "num_heads", "max_pages", "slot_rows"],
    do_not_specialize_on_alignment=[*ANY_ALIGNMENT, "scales_ptr"],
)
def _mla_decode_few_fp8_kernel(
    q_ptr,  # [T, H, L+R]
    q_scale_ptr,  # fp32 [1] with e4m3 queries, or None
    latent_desc,  # [slots, L] in boxes [min(page size, 64), L]
    rope_desc,  # [slots, R] in boxes [min(page size, 64), 64]
    scales_ptr,  # fp32 [slots, G], or None
    layer_scales_ptr,  # fp32 [2], or None
    out_ptr,  # [T, H, L]
    lse_ptr,  # fp32 [T, H]
    pieces_ptr,  # fp16 with scales of a layer, or else fp32 [2 * num_parts, slot_rows, L]
    piece_lses_ptr,  # fp32 [2 * num_parts, slot_rows]
    bounds_ptr,  # int32 [num_parts + 1, 2]
    offsets_ptr,  # int32 [B+1]
    cache_lengths_ptr,  # int32 [B]
    page_table_ptr,  # int32 [B, max_pages]
    scale_log2,
    num_requests,
    num_tokens,
    num_heads,
    max_pages,
    slot_rows,
    stride_q_token,
    stride_q_head,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    LATENT_DIM: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
    STRIDE_SCALES: gl.constexpr,
    GANG: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    LN_2: gl.constexpr,
):
    gdc_launch_dependents()  # a merge that waits for all of this may start
    prefetch_step(
        bounds_ptr, offsets_ptr, cache_lengths_ptr, page_table_ptr, num_requests, max_pages, GANG
    )
    E4M3: gl.constexpr = latent_desc.dtype
    ROPE_TYPE: gl.constexpr = rope_desc.dtype
    NUM_SCALES: gl.constexpr = STAGES * max(NUM_GROUPS, 1)
    Q_ROWS: gl.constexpr = ROWS * (2 if q_scale_ptr is None else 1)  # of terms
    latent_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, LATENT_DIM], E4M3)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], ROPE_TYPE)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROWS], gl.float16)
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    latents = gl.allocate_shared_memory(E4M3, [STAGES, BLOCK_N, LATENT_DIM], latent_desc.layout)
    ropes = gl.allocate_shared_memory(ROPE_TYPE, [STAGES, BLOCK_N, 64], rope_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [NUM_SCALES, BLOCK_N], one)
    holes = gl.allocate_shared_memory(gl.int32, [STAGES, 1], one)
    q_latent = gl.allocate_shared_memory(E4M3, [1, Q_ROWS, LATENT_DIM], latent_layout)
    q_rope = gl.allocate_shared_memory(ROPE_TYPE, [1, Q_ROWS, 64], rope_layout)
    powers = gl.allocate_shared_memory(gl.float32, [ROWS], one)
    weights_tiles = gl.allocate_shared_memory(gl.float16, [2, BLOCK_N, ROWS], tile_layout)
    factors = gl.allocate_shared_memory(gl.float32, [2, ROWS], one)
    shares = gl.allocate_shared_memory(gl.float16, [8, BLOCK_N], one)
    cells = gl.allocate_shared_memory(gl.float32, [4, ROWS], one)
    # each lane of the fetching warp arrives with its scales, and one with the bytes of the TMA
    full = make_barriers(STAGES, 33 if NUM_GROUPS > 0 else 1)
    empty = make_barriers(STAGES, 1)
    fence_async_shared()
    keys = (latents, ropes, scales, holes)
    query = (q_latent, q_rope, powers)
    passed = (weights_tiles, factors, shares, cells)
    barriers = (full, empty)
    results = (out_ptr, lse_ptr, pieces_ptr, piece_lses_ptr, slot_rows)
    work = (bounds_ptr, offsets_ptr, cache_lengths_ptr, page_table_ptr, max_pages, num_heads)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    q_ptr, query, keys, passed, barriers, results, work, scale_log2,
                    layer_scales_ptr, q_scale_ptr, stride_q_token, stride_q_head, GANG, PAGE_SIZE,
                    BOX, ROPE_DIM, NUM_GROUPS, LN_2,
                ),
            ),
            (
                _fetch,
                (
                    q_ptr, latent_desc, rope_desc, scales_ptr, keys, barriers, work,
                    stride_q_token, stride_q_head, GANG, ROWS, PAGE_SIZE, ROPE_DIM, NUM_GROUPS,
                    STRIDE_SCALES,
                ),
            ),
        ],
        [1],
        [40],
    )  # fmt: skip
    first_padding = gl.load(offsets_ptr + num_requests) * num_heads
    clear_padding(out_ptr, lse_ptr, first_padding, num_tokens * num_heads, LATENT_DIM)


def _query_fields(q: Tensor, q_scale: Tensor | None, fmt: CacheFormat) -> dict[str, Any]:
    return {"q_ptr": q, "q_scale_ptr": q_scale}


def _page_fields(pages: LayerPages) -> dict[str, Any]:
    fmt, box = pages.format, box_keys(pages.page_size)
    latents = pages.latent.as_strided(
        (pages.num_slots, fmt.kv_lora_rank), (pages.latent.stride(1), 1)
    )
    ropes = latents  # stands in for what there is none of
    if fmt.rope_dim > 0:
        ropes = pages.rope.as_strided((pages.num_slots, fmt.rope_dim), (pages.rope.stride(1), 1))
    return {
        "latent_desc": tile_descriptor(latents, (box, fmt.kv_lora_rank)),
        "rope_desc": tile_descriptor(ropes, (box, 64)),
        "scales_ptr": pages.group_scales,
        "layer_scales_ptr": pages.layer_scales,
    }


def _constants(q: Tensor, pages: LayerPages, work: Work) -> dict[str, Any]:
    scales = pages.group_scales
    return {
        "stride_q_token": q.stride(0),
        "stride_q_head": q.stride(1),
        "NUM_GROUPS": pages.format.num_groups,
        "STRIDE_SCALES": 0 if scales is None else scales.stride(1),
        "ROWS": work.tile_rows,
        "STAGES": 3,  # with more in flight, the first ones come later
    }


KERNEL = Kernel(
    _mla_decode_few_fp8_kernel,
    _query_fields,
    _page_fields,
    _constants,
    {"num_warps": 8, "enable_fp_fusion": True},
)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each format, q dtype, tile of rows, dims and page size."""
    if capability != 90:
        return
    bf16, fp16, e4m3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    variants: list[tuple[FormatName, torch.dtype, int, int, int, int]] = [
        ("fp8", bf16, 16, 512, 64, 64), ("fp8", bf16, 32, 512, 64, 64),
        ("fp8", fp16, 16, 512, 64, 64), ("fp8", bf16, 16, 512, 64, 16),
        ("fp8", bf16, 16, 512, 64, 256), ("fp8", bf16, 16, 256, 64, 64),
        ("fp8", bf16, 32, 256, 32, 64), ("fp8", bf16, 16, 512, 0, 64),
        ("fp8_token", bf16, 16, 512, 64, 64), ("fp8_token", bf16, 32, 512, 64, 64),
        ("fp8_token", bf16, 16, 512, 64, 16), ("fp8_ds_mla", bf16, 16, 512, 64, 64),
        ("fp8_ds_mla", bf16, 32, 512, 64, 64), ("fp8_ds_mla", fp16, 16, 512, 64, 64),
        ("fp8_ds_mla", bf16, 16, 512, 64, 16), ("fp8", e4m3, 16, 512, 64, 64),
        ("fp8", e4m3, 32, 512, 64, 64), ("fp8", e4m3, 16, 256, 0, 64),
    ]  # fmt: skip
    for name, q_dtype, rows, latent_dim, rope_dim, page_size in variants:
        fmt = CacheFormat(name, latent_dim, rope_dim)
        pages = PagedKVCache(fmt, num_layers=1, num_pages=1, page_size=page_size).layer(0)
        q = torch.empty(1, rows, fmt.row_dim, dtype=q_dtype)
        label = f"{name}-{q_dtype}-L{latent_dim}-R{rope_dim}-rows{rows}-page{page_size}"
        label = label.replace("torch.", "")
        q_scale = torch.empty(1) if q_dtype == e4m3 else None
        yield shipped_config(KERNEL, label, q, pages, Work(132, 1, rows, 64), q_scale, **_SPILLS)
