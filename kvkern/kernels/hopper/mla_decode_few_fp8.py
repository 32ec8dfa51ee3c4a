"""mla_decode for few rows of an 8-bit cache: e4m3 S^T = K Q^T, fp16 O^T = V^T softmax(scale S)^T.

As in mla_decode_few, operands are swapped: keys, and the columns of the latent, are the 64 rows
that a wgmma wants, and query rows its N. Two warpgroups take a tile's blocks of 64 keys in turn,
each with a maximum, a sum and an output of its own, and finish half of the columns each.

- Scores. A query row is 2^e (high + low / 16), both e4m3, side by side on N: 8 significant bits, as
  bf16 has, or 2^-17 of the row's largest; fp16 loses 3 of its 11. A query that comes in e4m3 is
  multiplied as it is. fp8 wgmma keeps about 13 bits of a sum, which here goes over the columns of
  one key; sums over keys are fp32. A bf16 rope key has a wgmma of its own, with two bf16 terms.
- Output. 8-bit wgmma takes no transposed operand, so V^T goes through registers as fp16, where e4m3
  is exact. Weights are fp16 up to 2^8: 11 bits, down to 2^-22 of a row's largest.
- Scales of tokens, or of 128 columns of them, multiply scores in fp32, and weights before they are
  rounded. So what must stay below 1 is weight * scale, and the running maximum is that of
  score + log2(scale): whatever the scales are, from 2^-100 to 2^119, the largest term of a row is
  near 2^8. Weights alone then reach 2^100 and their sum 2^124, in fp32. Scales of a group are
  divided by a power of two that grows with the largest share that they have of their key's largest:
  128 columns of tiny scales beside others keep their 11 bits.
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
from kvkern.kernels.hopper.e4m3 import QUERY, QUERY_ROPE, halves
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

_SPILLS = spills("with four boxes a block, what a tile needs once is parked", 96)
_GAIN: gl.constexpr = gl.constexpr(256.0)  # of weights in fp16
_MIN_SCALE: gl.constexpr = gl.constexpr(2.0**-100)  # smaller ones, which nobody writes, count as it
_ROPE_RANGE: gl.constexpr = gl.constexpr(2.0**-40)
_E4M3_BITS: gl.constexpr = gl.constexpr(-(2**20))  # of an fp32: sign, exponent, 3 of the fraction
_BF16_BITS: gl.constexpr = gl.constexpr(-(2**16))
# a row each, and not what the threads of its columns share
_ROW_EACH: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# [columns, query rows] of the output: a thread holds two neighbouring columns, which go together
_COLUMNS_8: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [0, 1], [16, 0]],
        [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        [[32, 0], [64, 0]],
        [],
        [128, 8],
    )
)
_COLUMNS_16: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1, 0], [0, 1], [0, 8], [16, 0]],
        [[0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        [[32, 0], [64, 0]],
        [],
        [128, 16],
    )
)


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
    """Fill the ring with the blocks that the warpgroups take, in their order. One warp.

    A block is fetched in boxes that lie in one page each; a page of -1 is outside the cache, where
    the TMA finds zeros. Scales lie 4 or 656 bytes apart: each lane copies those of two keys, and
    arrives when they have; those of keys that are not there are 0.
    """
    latents, ropes, scales, holes = keys
    full, empty, _meeting = barriers
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
    LATENT_DIM: gl.constexpr, ROPE_DIM: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Eight rows of a tile from ``FIRST`` on, latent and rope columns; zeros if not there."""
    OF_NARROW: gl.constexpr = gl.SliceLayout(1, QUERY_ROPE)
    row = FIRST + gl.arange(0, 8, layout=gl.SliceLayout(1, QUERY))
    offs_row = query_offsets(first_row + row, start, num_heads, stride_q_token, stride_q_head)
    offs_l = gl.arange(0, LATENT_DIM, layout=gl.SliceLayout(0, QUERY))
    offs = gl.expand_dims(offs_row, 1) + gl.expand_dims(offs_l, 0)
    latent = gl.load(q_ptr + offs, mask=gl.expand_dims(row < num_left, 1), other=0.0)
    offs_r = gl.arange(0, 64, layout=gl.SliceLayout(0, QUERY_ROPE))
    offs_row = gl.convert_layout(offs_row, OF_NARROW, assert_trivial=True)
    mask = gl.expand_dims(gl.convert_layout(row < num_left, OF_NARROW, assert_trivial=True), 1)
    mask = mask & gl.expand_dims(offs_r < ROPE_DIM, 0)
    offs = gl.expand_dims(offs_row, 1) + gl.expand_dims(offs_r, 0)
    return latent, gl.load(q_ptr + LATENT_DIM + offs, mask=mask, other=0.0)


@gluon.jit
def _store_query(rows, query, rope_factor, zero, ROPE_DIM: gl.constexpr, FIRST: gl.constexpr):
    """What ``_load_query`` loaded, in e4m3."""
    if rows[0].dtype.primitive_bitwidth == 8:
        query[0].index(0).slice(FIRST, 8, dim=0).store(rows[0])
        if ROPE_DIM > 0:
            query[1].index(0).slice(FIRST, 8, dim=0).store(rows[1])
    else:
        _store_terms(rows, query, rope_factor, zero, ROPE_DIM, FIRST)
    fence_async_shared()


@gluon.jit
def _store_terms(rows, query, rope_factor, zero, ROPE_DIM: gl.constexpr, FIRST: gl.constexpr):
    """What ``_load_query`` loaded: both terms of each row over its power of two, and that.

    The latent in a loop over its halves, whose length ``zero`` hides: when a kernel starts its
    instructions have to be fetched as well.
    """
    q_latent, q_rope, powers = query[0].index(0), query[1].index(0), query[2]
    ROWS: gl.constexpr = powers.shape[0]
    HALF: gl.constexpr = q_latent.shape[1] // 2
    latent, rope = rows[0].to(gl.float32), rows[1].to(gl.float32) * rope_factor
    # the largest comes to lie in [128, 256), below e4m3's 448; in bf16, rope columns have the range
    # to lie far above, and leave the bits to latents whose scales are large
    IS_NARROW: gl.constexpr = q_rope.dtype.primitive_bitwidth == 8
    amax = gl.max(gl.abs(latent), 1)
    rope_amax = gl.max(gl.abs(rope), 1)
    rope_amax = rope_amax if IS_NARROW else rope_amax * _ROPE_RANGE
    amax = gl.maximum(amax, gl.convert_layout(rope_amax, amax.type.layout, assert_trivial=True))
    power = _power_below(gl.maximum(amax, _MIN_SCALE)) * 0.0078125
    powers.slice(FIRST, 8, dim=0).store(power)
    inverse = gl.expand_dims(_inverse_of(power), 1)
    if ROPE_DIM > 0:
        rope = rope * gl.convert_layout(inverse, QUERY_ROPE, assert_trivial=True)
        BITS: gl.constexpr = _E4M3_BITS if IS_NARROW else _BF16_BITS
        for term in gl.static_range(2):
            of_term = q_rope.slice(term * ROWS + FIRST, 8, dim=0)
            of_term.store(_term(rope, BITS, term).to(q_rope.dtype))
    tiles = view_tile(
        q_latent, q_latent.dtype, [2, 2 * ROWS, HALF], gl.NVMMASharedLayout(128, 8, 2)
    )
    half, next_half = halves(latent)
    for index in range(zero, 2):
        half = half * gl.convert_layout(inverse, half.type.layout, assert_trivial=True)
        for term in gl.static_range(2):
            tile = tiles.index(index).slice(term * ROWS + FIRST, 8, dim=0)
            tile.store(_term(half, _E4M3_BITS, term).to(q_latent.dtype))
        half = next_half


@gluon.jit
def _join_terms(products, MMA: gl.constexpr):
    """[64, 2 ROWS] to [64, ROWS]: both terms of a row lie in one thread."""
    ROWS: gl.constexpr = products.shape[1] // 2
    high, low = gl.split(products.reshape([BLOCK_N, 2, ROWS]).permute([0, 2, 1]))
    return gl.convert_layout(high + low * 0.0625, MMA, assert_trivial=True)


@gluon.jit
def _scale_of(scales, cell, OF_KEY: gl.constexpr):
    return gl.expand_dims(scales.index(cell).load(OF_KEY), 1)


@gluon.jit
def _start_group(latent, q_latent, group: gl.constexpr, none):
    """Products over one group of 128 columns."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    keys = view_tile(latent, latent.dtype, [4, BLOCK_N, 128], LAYOUT).index(group)
    rows = view_tile(q_latent, latent.dtype, [4, q_latent.shape[0], 128], LAYOUT).index(group)
    return warpgroup_mma(keys, rows.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _scores(
    keys, query, pairs, stage, zero, rope_factor, MMA: gl.constexpr, ROPE_DIM: gl.constexpr
):
    """Scores [64, ROWS] of a block, over the rows' powers of two; and the first of its values.

    The values are loaded meanwhile; with scales beside them they would not have registers.
    """
    q_latent, q_rope = query[0].index(zero), query[1].index(zero)
    NUM_TERMS: gl.constexpr = q_latent.shape[0]
    OF_PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NUM_TERMS, 32])
    latent, rope = keys[0].index(stage), keys[1].index(stage)
    none = gl.zeros([BLOCK_N, NUM_TERMS], gl.float32, OF_PRODUCT)
    products = warpgroup_mma(latent, q_latent.permute((1, 0)), none, use_acc=False, is_async=True)
    if NUM_TERMS == MMA.instr_shape[1]:  # queries came in e4m3
        of_rope = none
        if ROPE_DIM > 0:
            of_rope = warpgroup_mma(
                rope, q_rope.permute((1, 0)), none, use_acc=False, is_async=True
            )
        values = _values(pairs, MMA)
        products, of_rope, values = warpgroup_mma_wait(0, deps=(products, of_rope, values))
        scores = gl.convert_layout(products + of_rope * rope_factor, MMA, assert_trivial=True)
        return scores, values
    else:
        if ROPE_DIM > 0:
            products = warpgroup_mma(rope, q_rope.permute((1, 0)), products, is_async=True)
        values = _values(pairs, MMA)
        products, values = warpgroup_mma_wait(0, deps=(products, values))
        return _join_terms(products, MMA), values


@gluon.jit
def _scaled_scores(keys, query, stage, zero, MMA: gl.constexpr, NUM_GROUPS: gl.constexpr):
    """Scores [64, ROWS] of a block of keys with scales, over the rows' powers of two."""
    latents, ropes, scales, _holes = keys
    q_latent, q_rope = query[0].index(zero), query[1].index(zero)
    NUM_TERMS: gl.constexpr = q_latent.shape[0]
    OF_LATENT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NUM_TERMS, 32])
    OF_ROPE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, NUM_TERMS, 16])
    OF_KEY: gl.constexpr = gl.SliceLayout(1, MMA)
    latent, rope = latents.index(stage), ropes.index(stage)
    none = gl.zeros([BLOCK_N, NUM_TERMS], gl.float32, OF_LATENT)
    if NUM_GROUPS == 1:
        products = warpgroup_mma(
            latent, q_latent.permute((1, 0)), none, use_acc=False, is_async=True
        )
    of_rope = warpgroup_mma(
        rope, q_rope.permute((1, 0)), gl.zeros([BLOCK_N, NUM_TERMS], gl.float32, OF_ROPE),
        use_acc=False, is_async=True,
    )  # fmt: skip
    if NUM_GROUPS == 1:
        products, of_rope = warpgroup_mma_wait(0, deps=(products, of_rope))
        scores = _join_terms(products, MMA) * _scale_of(scales, stage, OF_KEY)
        return scores + _join_terms(of_rope, MMA)
    else:
        group0 = _start_group(latent, q_latent, 0, none)
        group1 = _start_group(latent, q_latent, 1, none)
        of_rope, group0 = warpgroup_mma_wait(1, deps=(of_rope, group0))
        group2 = _start_group(latent, q_latent, 2, none)
        scores = _join_terms(of_rope, MMA)
        scores += _join_terms(group0, MMA) * _scale_of(scales, stage * 4, OF_KEY)
        group1 = warpgroup_mma_wait(1, deps=(group1,))
        group3 = _start_group(latent, q_latent, 3, none)
        scores += _join_terms(group1, MMA) * _scale_of(scales, stage * 4 + 1, OF_KEY)
        group2 = warpgroup_mma_wait(1, deps=(group2,))
        scores += _join_terms(group2, MMA) * _scale_of(scales, stage * 4 + 2, OF_KEY)
        group3 = warpgroup_mma_wait(0, deps=(group3,))
        return scores + _join_terms(group3, MMA) * _scale_of(scales, stage * 4 + 3, OF_KEY)


@gluon.jit
def _largest_scale(scales, stage, LAYOUT: gl.constexpr, NUM_GROUPS: gl.constexpr):
    """Of each key [64]."""
    largest = scales.index(stage * NUM_GROUPS).load(LAYOUT)
    for group in gl.static_range(1, NUM_GROUPS):
        largest = gl.maximum(largest, scales.index(stage * NUM_GROUPS + group).load(LAYOUT))
    return largest


@gluon.jit
def _group_units(units, scales, stage):
    """Powers of two: the largest share yet that a group's scale has of its key's largest.

    Each warp finds them all.
    """
    BY_WARP: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    largest = _largest_scale(scales, stage, BY_WARP, 4)
    inverse = gl.where(largest > 0.0, 1.0 / gl.where(largest > 0.0, largest, 1.0), 0.0)
    share0 = gl.max(scales.index(stage * 4).load(BY_WARP) * inverse, 0)
    share1 = gl.max(scales.index(stage * 4 + 1).load(BY_WARP) * inverse, 0)
    share2 = gl.max(scales.index(stage * 4 + 2).load(BY_WARP) * inverse, 0)
    share3 = gl.max(scales.index(stage * 4 + 3).load(BY_WARP) * inverse, 0)
    return (
        gl.maximum(units[0], _power_below(share0)),
        gl.maximum(units[1], _power_below(share1)),
        gl.maximum(units[2], _power_below(share2)),
        gl.maximum(units[3], _power_below(share3)),
    )


@gluon.jit
def _without_units(acc, units):
    return acc[0] * units[0], acc[1] * units[1], acc[2] * units[2], acc[3] * units[3]


@gluon.jit
def _values(pairs, MMA: gl.constexpr):
    """V^T: 128 columns of 64 keys, as fp16 in the registers of wgmma's first operand.

    ``pairs`` is a tile of e4m3 seen as pairs of columns [64, 64], which ldmatrix transposes. Row
    b * 64 + w * 16 + half * 8 + g holds column 2 * (w * 16 + b * 8 + g) + half; ``_store_columns``
    undoes it.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    even, odd = gl.inline_asm_elementwise(
        """{ .reg .b32 both; .reg .b16 low, high; prmt.b32 both, $2, $2, 0x3120;
        mov.b32 {low, high}, both; cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }""",
        "=r,=r,r",
        [pairs.permute((1, 0)).load(OPERAND)],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
    values = gl.join(even, odd).reshape([4, 2, 8, BLOCK_N, 2]).permute([1, 0, 4, 2, 3])
    return gl.convert_layout(values.reshape([128, BLOCK_N]), OPERAND, assert_trivial=True)


@gluon.jit
def _start_values(acc, rescale, pairs, tile, MMA: gl.constexpr):
    return warpgroup_mma(_values(pairs, MMA), tile, acc * rescale, is_async=True)


@gluon.jit
def _add_values(acc, rescales, first, pairs, tiles, MMA: gl.constexpr):
    """acc * rescale + V^T weights, 128 columns of the latent each; ``first``: values of those.

    The registers of an operand are free when its wgmma has been waited for: two are on their way.
    """
    acc0 = warpgroup_mma(first, tiles[0], acc[0] * rescales[0], is_async=True)
    acc1 = _start_values(acc[1], rescales[1], pairs.index(1), tiles[1], MMA)
    if len(acc) == 2:
        acc0, acc1 = warpgroup_mma_wait(0, deps=(acc0, acc1))
        return acc0, acc1
    else:
        acc0 = warpgroup_mma_wait(1, deps=(acc0,))
        acc2 = _start_values(acc[2], rescales[2], pairs.index(2), tiles[2], MMA)
        acc1 = warpgroup_mma_wait(1, deps=(acc1,))
        acc3 = _start_values(acc[3], rescales[3], pairs.index(3), tiles[3], MMA)
        acc2, acc3 = warpgroup_mma_wait(0, deps=(acc2, acc3))
        return acc0, acc1, acc2, acc3


@gluon.jit
def _store_columns(acc, out_ptr, offs_row, mask_row, chunk):
    """128 columns of the latent, which come in the order of ``_values``."""
    ROWS: gl.constexpr = acc.shape[1]
    LAYOUT: gl.constexpr = _COLUMNS_16 if ROWS == 16 else _COLUMNS_8
    acc = acc.to(out_ptr.dtype.element_ty)
    acc = acc.reshape([2, 4, 2, 8, ROWS]).permute([1, 0, 3, 2, 4]).reshape([128, ROWS])
    acc = gl.convert_layout(acc, LAYOUT)  # the same values in each thread
    OF_ROW: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    offs_l = chunk * 128 + gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT))
    offs = gl.expand_dims(gl.convert_layout(offs_row, OF_ROW), 0) + gl.expand_dims(offs_l, 1)
    mask = gl.expand_dims(gl.convert_layout(mask_row, OF_ROW), 0)
    gl.store(out_ptr + offs, acc, mask=mask)


@gluon.jit
def _join_sums(row_cells, unit, W: gl.constexpr):
    """Rows' lse, base 2, from both warpgroups' maxima and sums; a thread has one row.

    Leaves in cells what the output of this one, and of the other, and both together are times.
    """
    own_max = row_cells.index(2 * W).load(_ROW_EACH)
    other_max = row_cells.index(2 - 2 * W).load(_ROW_EACH)
    new_max = gl.maximum(own_max, other_max)
    shift = gl.where(new_max == -float("inf"), 0.0, new_max)
    own_factor = gl.exp2(own_max - shift)
    other_factor = gl.exp2(other_max - shift)
    weight_sum = row_cells.index(2 * W + 1).load(_ROW_EACH) * own_factor
    weight_sum += row_cells.index(3 - 2 * W).load(_ROW_EACH) * other_factor
    saw_none = weight_sum == 0.0
    weight_sum = gl.where(saw_none, 1.0, weight_sum)
    row_cells.index(4 + 3 * W).store(own_factor)
    row_cells.index(5 + 3 * W).store(other_factor)
    row_cells.index(6 + 3 * W).store(gl.where(saw_none, 0.0, unit / weight_sum))
    return new_max + gl.log2(weight_sum)


@gluon.jit
def _attend(
    q_ptr,
    query,
    keys,
    weights_tiles,
    exchange,
    row_cells,
    barriers,
    results,
    work,
    scale_log2,
    layer_scales_ptr,
    q_scale_ptr,
    stride_q_token,
    stride_q_head,
    W: gl.constexpr,  # which of the two warpgroups
    GANG: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    NUM_GROUPS: gl.constexpr,
    LN_2: gl.constexpr,
):
    """Online softmax of each tile of query rows over every other block in the ring. Four warps.

    Of a tile's blocks, the first, third, ... are warpgroup 0's. Both meet when both terms of the
    query are there, and for each 128 columns when what they pass on is there and when it has been
    read, which for the last is when the next query is there. So the meetings of a tile are an even
    number, the first in phase 0, and neither writes what the other still reads: a query is written
    after the scores of the last, which come before its exchange.
    """
    latents, _ropes, scales, holes = keys
    full, empty, meeting = barriers
    bounds_ptr, offsets_ptr, cache_lengths_ptr, page_table_ptr, max_pages, num_heads = work
    STAGES: gl.constexpr = latents.type.shape[0]
    LATENT_DIM: gl.constexpr = latents.type.shape[2]
    IS_E4M3: gl.constexpr = q_ptr.dtype.element_ty.primitive_bitwidth == 8
    ROWS: gl.constexpr = query[2].shape[0]
    HALF: gl.constexpr = LATENT_DIM // 256  # chunks of 128 columns that one warpgroup finishes
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    OF_ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    OF_KEY: gl.constexpr = gl.SliceLayout(1, MMA)
    no_values = gl.zeros([128, ROWS], gl.float32, MMA)
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
    taken = 0  # blocks of the ring, by both
    for request in range(part[0], end):
        start, num_tokens, cached, begin, stop = share_of(lengths, request, part)
        lengths = load_lengths(offsets_ptr, cache_lengths_ptr, request + 1, end)
        seq_len = cached + num_tokens
        num_rows = num_tokens * num_heads
        table_ptr = table_row(page_table_ptr, request, max_pages)
        is_piece, piece = piece_of(part, request, GANG)
        for tile in range(gl.program_id(0) % GANG, gl.cdiv(num_rows, ROWS), GANG):
            row = tile * ROWS + gl.arange(0, ROWS, layout=OF_ROW)
            mask_row = row < num_rows
            if W * 8 < ROWS:
                query_rows = _load_query(
                    q_ptr, tile * ROWS, num_rows - tile * ROWS, start, num_heads, stride_q_token,
                    stride_q_head, LATENT_DIM, ROPE_DIM, W * 8,
                )  # fmt: skip
            num_visible, min_visible = visible_keys(
                table_ptr, row, mask_row, num_heads, cached, seq_len, max_pages, PAGE_SIZE
            )
            if W * 8 < ROWS:
                _store_query(query_rows, query, rope_factor, taken >> 30, ROPE_DIM, W * 8)
            mbarrier.arrive(meeting, count=1)
            mbarrier.wait(meeting, 0)
            row_scale = gl.full([ROWS], 1.0, gl.float32, OF_ROW)
            if not IS_E4M3:
                row_scale = query[2].load(OF_ROW)
            row_scale = row_scale * scale_log2

            max_score = gl.full([ROWS], -float("inf"), gl.float32, OF_ROW)
            weight_sums = gl.zeros([BLOCK_N, ROWS], gl.float32, MMA)  # a thread's own keys
            pair = (no_values, no_values)
            acc = pair + pair if HALF == 2 else pair
            if NUM_GROUPS == 4:
                least = gl.to_tensor(_MIN_SCALE)
                units = (least, least, least, least)
            for index in range(W, stop - begin, 2):
                stage = (taken + index) % STAGES
                first_key = (begin + index) * BLOCK_N
                mbarrier.wait(full.index(stage), ((taken + index) // STAGES) & 1)
                # a constant address would be kept in registers, and moved for each wgmma
                zero = (taken + index) >> 30
                pairs = view_tile(latents.index(stage), gl.int16, [2 * HALF, BLOCK_N, 64], PAIRS)
                if first_key + BLOCK_N > seq_len:
                    for chunk in gl.static_range(2 * HALF):
                        clear_rows(pairs.index(chunk), seq_len - first_key)
                if NUM_GROUPS == 0:
                    scores, values = _scores(
                        keys, query, pairs.index(0), stage, zero, rope_factor, MMA, ROPE_DIM
                    )
                else:
                    scores = _scaled_scores(keys, query, stage, zero, MMA, NUM_GROUPS)
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
                    new_max = gl.max(scores + gl.expand_dims(log_scale, 1), 0)
                else:
                    new_max = gl.max(scores, 0)
                new_max = gl.maximum(max_score, new_max)
                shift = gl.where(new_max == -float("inf"), 0.0, new_max)
                weights = gl.exp2(scores - gl.expand_dims(shift, 0))
                rescale = gl.expand_dims(gl.exp2(max_score - shift), 0)
                weight_sums = weight_sums * rescale + weights
                max_score = new_max
                weights = weights * _GAIN
                if NUM_GROUPS == 4:
                    new_units = _group_units(units, scales, stage)
                    for group in gl.static_range(4):
                        scale = _scale_of(scales, stage * 4 + group, OF_KEY)
                        scale = scale * _inverse_of(new_units[group])
                        weights_tiles.index(zero + group).store((weights * scale).to(gl.float16))
                    tiles = (
                        weights_tiles.index(zero), weights_tiles.index(zero + 1),
                        weights_tiles.index(zero + 2), weights_tiles.index(zero + 3),
                    )  # fmt: skip
                    rescales = (
                        rescale * (units[0] * _inverse_of(new_units[0])),
                        rescale * (units[1] * _inverse_of(new_units[1])),
                        rescale * (units[2] * _inverse_of(new_units[2])),
                        rescale * (units[3] * _inverse_of(new_units[3])),
                    )
                    units = new_units
                else:
                    if NUM_GROUPS == 1:
                        weights *= _scale_of(scales, stage, OF_KEY)
                    tile_of_all = weights_tiles.index(zero)
                    tile_of_all.store(weights.to(gl.float16))
                    tiles = (tile_of_all, tile_of_all, tile_of_all, tile_of_all)
                    rescales = (rescale, rescale, rescale, rescale)
                fence_async_shared()
                if NUM_GROUPS > 0:
                    values = _values(pairs.index(0), MMA)
                acc = _add_values(acc, rescales, values, pairs, tiles, MMA)
                mbarrier.arrive(empty.index(stage), count=1)
            taken += stop - begin

            if NUM_GROUPS == 4:
                acc = _without_units(acc, units)
            _finish(
                acc, max_score, weight_sums, exchange, row_cells, meeting, results, is_piece, piece,
                start, num_heads, tile, num_rows, mask_row, latent_scale, taken, W, LN_2,
            )  # fmt: skip


@gluon.jit
def _finish(
    acc, max_score, weight_sums, exchange, row_cells, meeting, results, is_piece, piece, start,
    num_heads, tile, num_rows, mask_row, latent_scale, taken, W: gl.constexpr, LN_2: gl.constexpr,
):  # fmt: skip
    """A tile's lse, and half of its columns, from what both warpgroups have of it."""
    out_ptr, lse_ptr, pieces_ptr, piece_lses_ptr, slot_rows = results
    HALF: gl.constexpr = len(acc) // 2
    LATENT_DIM: gl.constexpr = len(acc) * 128
    ROWS: gl.constexpr = row_cells.shape[1]
    MMA: gl.constexpr = weight_sums.type.layout
    OF_ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    weight_sum = gl.sum(weight_sums, 0)
    row_cells.index(2 * W).store(max_score)
    row_cells.index(2 * W + 1).store(weight_sum)
    exchange.index(W).store(acc[(1 - W) * HALF])
    mbarrier.arrive(meeting, count=1)
    mbarrier.wait(meeting, 1)
    lse = _join_sums(row_cells, latent_scale / _GAIN, W)
    row = tile * ROWS + gl.arange(0, ROWS, layout=_ROW_EACH)
    if W == 0:
        if is_piece:
            lse_ptrs = piece_lses_ptr + piece.to(gl.int64) * slot_rows + row
        else:
            lse_ptrs = lse_ptr + start.to(gl.int64) * num_heads + row
            lse *= LN_2
        gl.store(lse_ptrs, lse, mask=row < num_rows)
    row = tile * ROWS + gl.arange(0, ROWS, layout=OF_ROW)
    piece_row = piece.to(gl.int64) * slot_rows + row
    out_row = start.to(gl.int64) * num_heads + row
    own_factor = gl.expand_dims(row_cells.index(4 + 3 * W).load(OF_ROW), 0)
    other_factor = gl.expand_dims(row_cells.index(5 + 3 * W).load(OF_ROW), 0)
    inverse = gl.expand_dims(row_cells.index(6 + 3 * W).load(OF_ROW), 0)
    mine, next_mine = acc[W * HALF], acc[W * HALF + HALF - 1]
    # a loop, as the instructions of what comes once have to be fetched
    for chunk in range(taken >> 30, HALF):
        other = exchange.index(1 - W).load(MMA)
        merged = mine * own_factor + other * other_factor
        merged = gl.where(inverse == 0, 0.0, merged * inverse)  # saw none: 0 times what may be NaN
        if is_piece:
            _store_columns(merged, pieces_ptr, piece_row * LATENT_DIM, mask_row, W * HALF + chunk)
        else:
            _store_columns(merged, out_ptr, out_row * LATENT_DIM, mask_row, W * HALF + chunk)
        if chunk + 1 < HALF:
            mbarrier.arrive(meeting, count=1)
            mbarrier.wait(meeting, 0)
            exchange.index(W).store(acc[(1 - W) * HALF + HALF - 1])
            mbarrier.arrive(meeting, count=1)
            mbarrier.wait(meeting, 1)
        mine = next_mine


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
    pieces_ptr,  # fp32 [2 * num_parts, slot_rows, L]
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
    NUM_TILES: gl.constexpr = 4 if NUM_GROUPS == 4 else 1  # of weights, a warpgroup
    NUM_SCALES: gl.constexpr = STAGES * max(NUM_GROUPS, 1)
    latent_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, LATENT_DIM], E4M3)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], ROPE_TYPE)
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROWS], gl.float16)
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    exchange_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
    latents = gl.allocate_shared_memory(E4M3, [STAGES, BLOCK_N, LATENT_DIM], latent_desc.layout)
    ropes = gl.allocate_shared_memory(ROPE_TYPE, [STAGES, BLOCK_N, 64], rope_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [NUM_SCALES, BLOCK_N], one)
    holes = gl.allocate_shared_memory(gl.int32, [STAGES, 1], one)
    Q_TERMS: gl.constexpr = 2 if q_scale_ptr is None else 1
    q_latent = gl.allocate_shared_memory(E4M3, [1, Q_TERMS * ROWS, LATENT_DIM], latent_layout)
    q_rope = gl.allocate_shared_memory(ROPE_TYPE, [1, Q_TERMS * ROWS, 64], rope_layout)
    powers = gl.allocate_shared_memory(gl.float32, [ROWS], one)
    tiles0 = gl.allocate_shared_memory(gl.float16, [NUM_TILES, BLOCK_N, ROWS], tile_layout)
    tiles1 = gl.allocate_shared_memory(gl.float16, [NUM_TILES, BLOCK_N, ROWS], tile_layout)
    exchange = gl.allocate_shared_memory(gl.float32, [2, 128, ROWS], exchange_layout)
    row_cells = gl.allocate_shared_memory(gl.float32, [10, ROWS], one)
    # each lane of the fetching warp arrives with its scales, and one with the bytes of the TMA
    full = make_barriers(STAGES, 33 if NUM_GROUPS > 0 else 1)
    empty = make_barriers(STAGES, 1)
    meeting = make_barriers(1, 2).index(0)
    fence_async_shared()
    keys = (latents, ropes, scales, holes)
    query = (q_latent, q_rope, powers)
    barriers = (full, empty, meeting)
    results = (out_ptr, lse_ptr, pieces_ptr, piece_lses_ptr, slot_rows)
    work = (bounds_ptr, offsets_ptr, cache_lengths_ptr, page_table_ptr, max_pages, num_heads)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    q_ptr, query, keys, tiles0, exchange, row_cells, barriers, results, work,
                    scale_log2, layer_scales_ptr, q_scale_ptr, stride_q_token, stride_q_head, 0,
                    GANG, PAGE_SIZE, BOX, ROPE_DIM, NUM_GROUPS, LN_2,
                ),
            ),
            (
                _attend,
                (
                    q_ptr, query, keys, tiles1, exchange, row_cells, barriers, results, work,
                    scale_log2, layer_scales_ptr, q_scale_ptr, stride_q_token, stride_q_head, 1,
                    GANG, PAGE_SIZE, BOX, ROPE_DIM, NUM_GROUPS, LN_2,
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
        [4, 1],
        [232, 40],
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
        "STAGES": 4,
    }


KERNEL = Kernel(
    _mla_decode_few_fp8_kernel,
    _query_fields,
    _page_fields,
    _constants,
    {"num_warps": 4, "enable_fp_fusion": True},
)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each format, q dtype, tile of rows, dims and page size."""
    if capability != 90:
        return
    bf16, fp16, e4m3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    variants: list[tuple[FormatName, torch.dtype, int, int, int, int]] = [
        ("fp8", bf16, 8, 512, 64, 64), ("fp8", bf16, 16, 512, 64, 64),
        ("fp8", fp16, 16, 512, 64, 64), ("fp8", bf16, 16, 512, 64, 16),
        ("fp8", bf16, 16, 512, 64, 256), ("fp8", bf16, 16, 256, 64, 64),
        ("fp8", bf16, 16, 256, 32, 64), ("fp8", bf16, 16, 512, 0, 64),
        ("fp8_token", bf16, 8, 512, 64, 64), ("fp8_token", bf16, 16, 512, 64, 64),
        ("fp8_token", bf16, 16, 512, 64, 16), ("fp8_ds_mla", bf16, 8, 512, 64, 64),
        ("fp8_ds_mla", bf16, 16, 512, 64, 64), ("fp8_ds_mla", fp16, 16, 512, 64, 64),
        ("fp8_ds_mla", bf16, 16, 512, 64, 16), ("fp8", e4m3, 8, 512, 64, 64),
        ("fp8", e4m3, 16, 512, 64, 64), ("fp8", e4m3, 16, 256, 0, 64),
    ]  # fmt: skip
    for name, q_dtype, rows, latent_dim, rope_dim, page_size in variants:
        fmt = CacheFormat(name, latent_dim, rope_dim)
        pages = PagedKVCache(fmt, num_layers=1, num_pages=1, page_size=page_size).layer(0)
        q = torch.empty(1, rows, fmt.row_dim, dtype=q_dtype)
        label = f"{name}-{q_dtype}-L{latent_dim}-R{rope_dim}-rows{rows}-page{page_size}"
        label = label.replace("torch.", "")
        q_scale = torch.empty(1) if q_dtype == e4m3 else None
        yield shipped_config(KERNEL, label, q, pages, Work(132, 1, rows, 64), q_scale, **_SPILLS)
