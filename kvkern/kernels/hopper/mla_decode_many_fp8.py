"""mla_decode for 64 rows and more of an fp8 cache: out = softmax(scale Q K^T) V, all of it in e4m3.

As in ``mla_decode_many``, two warpgroups hold half of the output's columns each, and the first
passes the weights on to the second. A third fetches blocks of 64 keys by TMA into a ring, and
writes their transpose beside it: ``e4m3.py`` says why, and what ``exact`` means.

Queries become e4m3 here, ``2^e (high + low)``, a power of two a row: two terms hold a bf16 query,
and the scores are the sum over both. One term has 4 bits, and the scores cost half as much.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages, PagedKVCache
from kvkern.kernels.config import SMALL_SPILLS, KernelConfig, config_of_call
from kvkern.kernels.hopper.compat import load_tile, tile_descriptor
from kvkern.kernels.hopper.e4m3 import (
    SHARE_ROWS,
    add_values,
    join_quarters,
    pack_weights,
    quantise_query,
    transpose_half,
)
from kvkern.kernels.hopper.paging import (
    BLOCK_N,
    NO_MAXIMUM,
    ROWS,
    box_keys,
    clear_padding,
    decode_fields,
    hole_word,
    hole_words,
    make_barriers,
    mask_scores,
    part_bounds,
    piece_of,
    put,
    request_share,
    slot_of_box,
    store_half,
    table_row,
    visible_keys,
)
from kvkern.kernels.paging import ANY_ALIGNMENT
from kvkern.kernels.schedule import Schedule, Work, make_schedule
from kvkern.layout import CacheFormat

# weights are at most 2^8, so that the small ones are normal numbers of e4m3
_WEIGHT_LOG2: gl.constexpr = gl.constexpr(8.0)


@gluon.jit
def _start_scores(q, keys, full_keys, block, no_scores, ROPE_DIM: gl.constexpr):
    """Scores of the ring's ``block``-th block, not waited for.

    The low term first: then its sums are small, and lose nothing to those of the high one.
    """
    q_left, q_right, q_rope = q
    left, right, rope = keys
    STAGES: gl.constexpr = left.shape[0]
    TERMS: gl.constexpr = q_left.shape[0]
    stage = block % STAGES
    mbarrier.wait(full_keys.index(stage), (block // STAGES) & 1)
    scores = no_scores
    for step in gl.static_range(TERMS):
        # plus a zero that the compiler cannot see: addresses known from before would be kept in
        # registers, and moved for each wgmma
        zero = block >> (28 + step)
        term = zero + (TERMS - 1 - step)
        scores = warpgroup_mma(
            q_left.index(term), left.index(stage + zero).permute((1, 0)), scores,
            use_acc=step > 0, is_async=True,
        )  # fmt: skip
        scores = warpgroup_mma(
            q_right.index(term), right.index(stage + zero).permute((1, 0)), scores, is_async=True
        )
        if ROPE_DIM > 0:
            scores = warpgroup_mma(
                q_rope.index(term), rope.index(stage + zero).permute((1, 0)), scores, is_async=True
            )
    return scores


@gluon.jit
def _attend_left(
    q_ptr,
    q,
    q_scales,
    keys,
    values,
    weights_tile,
    factors,
    holes,
    barriers,
    out_ptr,
    lse_ptr,
    pieces_ptr,
    piece_lses_ptr,
    layer_scales_ptr,
    bounds_ptr,
    offsets_ptr,
    cache_lengths_ptr,
    page_table_ptr,
    scale_log2,
    max_pages,
    num_heads,
    slot_rows,
    GANG: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    ROW_DIM: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    EXACT: gl.constexpr,
    LN_2: gl.constexpr,
):
    """Scores, softmax and the left half of the output."""
    q_full, full_keys, empty_keys, full_values, empty_values, passed, taken = barriers
    HALF: gl.constexpr = values.type.shape[1]
    STAGES: gl.constexpr = holes.type.shape[0] // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF // 4, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 4)
    OF_SCORE: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_ACC: gl.constexpr = gl.SliceLayout(1, ACC)
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    no_values = gl.zeros([ROWS, HALF // 4], gl.float32, ACC)
    latent_scale = gl.load(layer_scales_ptr)
    part = part_bounds(bounds_ptr, GANG)
    done = 0  # blocks of the ring
    sent = 0  # weights and factors that were passed on
    tiles = 0  # of query rows, that had keys
    for request in range(part[0], part[2] + gl.where(part[3] > 0, 1, 0)):
        start, num_tokens, cached, begin, stop = request_share(
            offsets_ptr, cache_lengths_ptr, request, part
        )
        seq_len = cached + num_tokens
        num_rows = num_tokens * num_heads
        table_ptr = table_row(page_table_ptr, request, max_pages)
        is_piece, piece = piece_of(part, request, GANG)
        for tile in range(gl.program_id(0) % GANG, gl.cdiv(num_rows, ROWS), GANG):
            first_row = start.to(gl.int64) * num_heads + tile * ROWS
            num_left = num_rows - tile * ROWS
            row = tile * ROWS + gl.arange(0, ROWS, layout=OF_SCORE)
            mask_row = row < num_rows
            max_score = gl.full([ROWS], NO_MAXIMUM, gl.float32, OF_SCORE)
            weight_sum = gl.zeros([ROWS], gl.float32, OF_SCORE)
            acc0 = gl.zeros([ROWS, HALF // 4], gl.float32, ACC)
            acc1 = gl.zeros([ROWS, HALF // 4], gl.float32, ACC)
            acc2 = gl.zeros([ROWS, HALF // 4], gl.float32, ACC)
            acc3 = gl.zeros([ROWS, HALF // 4], gl.float32, ACC)
            if begin < stop:
                quantise_query(
                    q_ptr, q, q_scales, layer_scales_ptr, first_row, num_left, done >> 30,
                    0, ROW_DIM, ROPE_DIM,
                )  # fmt: skip
                num_visible, min_visible = visible_keys(
                    table_ptr, cached + row // num_heads, mask_row, seq_len, max_pages, PAGE_SIZE
                )
                mbarrier.wait(q_full, tiles & 1)
                row_scale = q_scales.load(OF_SCORE) * (scale_log2 * latent_scale)
                for block in range(begin, stop):
                    stage = done % STAGES
                    half = done & 1
                    slot = sent & 1
                    scores = _start_scores(q, keys, full_keys, done, no_scores, ROPE_DIM)
                    scores = warpgroup_mma_wait(0, deps=(scores,))
                    words = hole_words(holes, stage, BOX)
                    mbarrier.arrive(empty_keys.index(stage), count=1)
                    scores = mask_scores(scores, words, block, num_visible, min_visible, BOX)
                    new_max = gl.maximum(max_score, gl.max(scores, 1) * row_scale)
                    rescale = gl.exp2(max_score - new_max)
                    max_score = new_max
                    weights = gl.exp2(
                        scores * gl.expand_dims(row_scale, 1)
                        - gl.expand_dims(max_score - _WEIGHT_LOG2, 1)
                    )
                    mbarrier.wait(taken.index(slot), ((sent >> 1) & 1) ^ 1)
                    weights_tile.index(slot).store(pack_weights(weights, OPERAND))
                    factors.index(slot).store(rescale)
                    fence_async_shared()
                    mbarrier.arrive(passed.index(slot), count=1)
                    weight_sum = weight_sum * rescale + gl.sum(weights, 1)
                    mbarrier.wait(full_values.index(half), (done >> 1) & 1)
                    acc0, acc1, acc2, acc3 = add_values(
                        weights_tile.index(slot), values.index(half), (acc0, acc1, acc2, acc3),
                        gl.convert_layout(rescale, OF_ACC, assert_trivial=True), no_values, EXACT,
                    )  # fmt: skip
                    mbarrier.arrive(empty_values.index(half), count=1)
                    sent += 1
                    done += 1
                tiles += 1

            saw_none = weight_sum == 0.0
            weight_sum = gl.where(saw_none, 1.0, weight_sum)
            factor = gl.where(saw_none, 0.0, latent_scale / weight_sum)
            mbarrier.wait(taken.index(sent & 1), ((sent >> 1) & 1) ^ 1)
            factors.index(sent & 1).store(factor)
            mbarrier.arrive(passed.index(sent & 1), count=1)
            sent += 1
            lse = max_score + gl.log2(weight_sum) - _WEIGHT_LOG2
            lse = gl.where(saw_none, -float("inf"), lse)
            out = join_quarters((acc0, acc1, acc2, acc3), factor)
            if is_piece:
                piece_row = piece.to(gl.int64) * slot_rows + tile * ROWS
                store_half(out, pieces_ptr, piece_row, num_left, 0, 2 * HALF)
                gl.store(piece_lses_ptr + piece.to(gl.int64) * slot_rows + row, lse, mask=mask_row)
            else:
                store_half(out, out_ptr, first_row, num_left, 0, 2 * HALF)
                gl.store(lse_ptr + start.to(gl.int64) * num_heads + row, lse * LN_2, mask=mask_row)


@gluon.jit
def _attend_right(
    q_ptr,
    q,
    q_scales,
    values,
    weights_tile,
    factors,
    barriers,
    out_ptr,
    pieces_ptr,
    layer_scales_ptr,
    bounds_ptr,
    offsets_ptr,
    cache_lengths_ptr,
    num_heads,
    slot_rows,
    GANG: gl.constexpr,
    ROW_DIM: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    EXACT: gl.constexpr,
):
    """The right half of the output, from weights and factors that ``_attend_left`` passes on.

    Half of the next queries too: those before were last read for scores that have arrived here.
    """
    q_full, full_values, empty_values, passed, taken = barriers
    HALF: gl.constexpr = values.type.shape[1]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF // 4, 32])
    OF_ACC: gl.constexpr = gl.SliceLayout(1, ACC)
    no_values = gl.zeros([ROWS, HALF // 4], gl.float32, ACC)
    part = part_bounds(bounds_ptr, GANG)
    done = 0
    received = 0
    for request in range(part[0], part[2] + gl.where(part[3] > 0, 1, 0)):
        start, num_tokens, _cached, begin, stop = request_share(
            offsets_ptr, cache_lengths_ptr, request, part
        )
        num_rows = num_tokens * num_heads
        is_piece, piece = piece_of(part, request, GANG)
        for tile in range(gl.program_id(0) % GANG, gl.cdiv(num_rows, ROWS), GANG):
            first_row = start.to(gl.int64) * num_heads + tile * ROWS
            num_left = num_rows - tile * ROWS
            if begin < stop:
                quantise_query(
                    q_ptr, q, q_scales, layer_scales_ptr, first_row, num_left, done >> 30,
                    SHARE_ROWS, ROW_DIM, ROPE_DIM,
                )  # fmt: skip
                mbarrier.arrive(q_full, count=1)
            acc0 = gl.zeros([ROWS, HALF // 4], gl.float32, ACC)
            acc1 = gl.zeros([ROWS, HALF // 4], gl.float32, ACC)
            acc2 = gl.zeros([ROWS, HALF // 4], gl.float32, ACC)
            acc3 = gl.zeros([ROWS, HALF // 4], gl.float32, ACC)
            for _ in range(begin, stop):
                half = done & 1
                slot = received & 1
                mbarrier.wait(passed.index(slot), (received >> 1) & 1)
                rescale = factors.index(slot).load(OF_ACC)
                mbarrier.wait(full_values.index(half), (done >> 1) & 1)
                acc0, acc1, acc2, acc3 = add_values(
                    weights_tile.index(slot), values.index(half), (acc0, acc1, acc2, acc3),
                    rescale, no_values, EXACT,
                )  # fmt: skip
                mbarrier.arrive(taken.index(slot), count=1)
                mbarrier.arrive(empty_values.index(half), count=1)
                received += 1
                done += 1
            mbarrier.wait(passed.index(received & 1), (received >> 1) & 1)
            factor = factors.index(received & 1).load(OF_ACC)
            mbarrier.arrive(taken.index(received & 1), count=1)
            received += 1
            out = join_quarters((acc0, acc1, acc2, acc3), factor)
            if is_piece:
                piece_row = piece.to(gl.int64) * slot_rows + tile * ROWS
                store_half(out, pieces_ptr, piece_row, num_left, HALF, 2 * HALF)
            else:
                store_half(out, out_ptr, first_row, num_left, HALF, 2 * HALF)


@gluon.jit
def _load_pages(
    table_ptr, block, seq_len, max_pages, lanes, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr
):
    """The page of each of a block's boxes; -1 where there is none."""
    key = block * BLOCK_N + lanes * BOX
    column = key // PAGE_SIZE
    mask = (lanes < BLOCK_N // BOX) & (key < seq_len) & (column < max_pages)
    return gl.load(table_ptr + column, mask=mask, other=-1)


@gluon.jit
def _fetch_block(
    half_desc,
    rope_desc,
    keys,
    holes,
    full_keys,
    empty_keys,
    page,
    block,
    fetched,
    seq_len,
    lanes,
    PAGE_SIZE: gl.constexpr,
    ROPE_DIM: gl.constexpr,
):
    """Start to fetch a block as the ring's ``fetched``-th; page -1 is where the TMA finds zeros."""
    left, right, rope = keys
    STAGES: gl.constexpr = left.shape[0]
    HALF: gl.constexpr = left.shape[2]
    BOX: gl.constexpr = half_desc.block_type.shape[0]
    NUM_BYTES: gl.constexpr = BLOCK_N * (2 * HALF + (64 if ROPE_DIM > 0 else 0))
    key = block * BLOCK_N + lanes * BOX
    is_hole = (lanes < BLOCK_N // BOX) & (key < seq_len) & (page < 0)
    holes_low = hole_word(is_hole, lanes, 0)
    first_slot = page * PAGE_SIZE + key % PAGE_SIZE
    stage = fetched % STAGES
    mbarrier.wait(empty_keys.index(stage), ((fetched // STAGES) & 1) ^ 1)
    full = full_keys.index(stage)
    put(holes.index(stage * 2), holes_low)
    mbarrier.expect(full, NUM_BYTES)
    for box in gl.static_range(BLOCK_N // BOX):
        slot = slot_of_box(first_slot, lanes, box)
        load_tile(half_desc, [slot, 0], full, left.index(stage).slice(box * BOX, BOX, dim=0))
        load_tile(half_desc, [slot, HALF], full, right.index(stage).slice(box * BOX, BOX, dim=0))
        if ROPE_DIM > 0:
            load_tile(
                rope_desc, [slot, 2 * HALF], full, rope.index(stage).slice(box * BOX, BOX, dim=0)
            )


@gluon.jit
def _fetch(
    half_desc,
    rope_desc,
    keys,
    values,
    holes,
    barriers,
    bounds_ptr,
    offsets_ptr,
    cache_lengths_ptr,
    page_table_ptr,
    max_pages,
    num_heads,
    GANG: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROPE_DIM: gl.constexpr,
):
    """Keys and their transpose, by a warpgroup. Page ids are looked up a block before their use."""
    left, right, _rope = keys
    values_left, values_right = values
    full_keys, empty_keys, full_values, empty_values = barriers
    STAGES: gl.constexpr = left.type.shape[0]
    BOX: gl.constexpr = half_desc.block_type.shape[0]
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    part = part_bounds(bounds_ptr, GANG)
    fetched = 0
    done = 0  # of them, transposed
    for request in range(part[0], part[2] + gl.where(part[3] > 0, 1, 0)):
        _, num_tokens, cached, begin, stop = request_share(
            offsets_ptr, cache_lengths_ptr, request, part
        )
        seq_len = cached + num_tokens
        table_ptr = table_row(page_table_ptr, request, max_pages)
        num_tiles = gl.cdiv(num_tokens * num_heads, ROWS)
        if begin == stop:
            num_tiles = 0
        for _ in range(gl.program_id(0) % GANG, num_tiles, GANG):
            page = _load_pages(table_ptr, begin, seq_len, max_pages, lanes, PAGE_SIZE, BOX)
            for block in range(begin + 1 - STAGES, stop):
                ahead = block + STAGES - 1
                if ahead < stop:
                    _fetch_block(
                        half_desc, rope_desc, keys, holes, full_keys, empty_keys, page, ahead,
                        fetched, seq_len, lanes, PAGE_SIZE, ROPE_DIM,
                    )  # fmt: skip
                    fetched += 1
                page = _load_pages(table_ptr, ahead + 1, seq_len, max_pages, lanes, PAGE_SIZE, BOX)
                if block >= begin:
                    stage = done % STAGES
                    half = done & 1
                    num_left = seq_len - block * BLOCK_N
                    mbarrier.wait(full_keys.index(stage), (done // STAGES) & 1)
                    mbarrier.wait(empty_values.index(half), ((done >> 1) & 1) ^ 1)
                    transpose_half(left.index(stage), values_left.index(half), num_left)
                    transpose_half(right.index(stage), values_right.index(half), num_left)
                    fence_async_shared()
                    mbarrier.arrive(full_values.index(half), count=1)
                    mbarrier.arrive(empty_keys.index(stage), count=1)
                    done += 1


@gluon.jit(
    do_not_specialize=["num_requests", "num_tokens", "num_heads", "max_pages", "slot_rows"],
    do_not_specialize_on_alignment=ANY_ALIGNMENT,
)
def _mla_decode_many_fp8_kernel(
    q_ptr,  # [T * H, L+R]
    half_desc,  # e4m3 [slots, L+R] in boxes [min(page size, 64), L / 2]
    rope_desc,  # the same in boxes [min(page size, 64), 64]
    layer_scales_ptr,  # fp32 [2]
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
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,  # keys of a box
    LATENT_DIM: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    GANG: gl.constexpr,
    STAGES: gl.constexpr,
    Q_TERMS: gl.constexpr,
    EXACT: gl.constexpr,
    LN_2: gl.constexpr,
):
    E4M3: gl.constexpr = half_desc.dtype
    HALF: gl.constexpr = LATENT_DIM // 2
    ROW_DIM: gl.constexpr = LATENT_DIM + ROPE_DIM
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    short_rows: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    q_left = gl.allocate_shared_memory(E4M3, [Q_TERMS, ROWS, HALF], half_desc.layout)
    q_right = gl.allocate_shared_memory(E4M3, [Q_TERMS, ROWS, HALF], half_desc.layout)
    q_rope = gl.allocate_shared_memory(E4M3, [Q_TERMS, ROWS, 64], short_rows)
    left = gl.allocate_shared_memory(E4M3, [STAGES, BLOCK_N, HALF], half_desc.layout)
    right = gl.allocate_shared_memory(E4M3, [STAGES, BLOCK_N, HALF], half_desc.layout)
    rope = gl.allocate_shared_memory(E4M3, [STAGES, BLOCK_N, 64], rope_desc.layout)
    values_left = gl.allocate_shared_memory(E4M3, [2, HALF, BLOCK_N], short_rows)
    values_right = gl.allocate_shared_memory(E4M3, [2, HALF, BLOCK_N], short_rows)
    weights_tile = gl.allocate_shared_memory(E4M3, [2, ROWS, BLOCK_N], short_rows)
    q_scales = gl.allocate_shared_memory(gl.float32, [ROWS], one)
    factors = gl.allocate_shared_memory(gl.float32, [2, ROWS], one)
    holes = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 1], one)
    q_full = make_barriers(1, 1)
    full_keys = make_barriers(STAGES, 1)
    empty_keys = make_barriers(STAGES, 2)
    full_values = make_barriers(2, 1)
    empty_values = make_barriers(2, 2)
    passed = make_barriers(2, 1)
    taken = make_barriers(2, 1)
    fence_async_shared()
    q = (q_left, q_right, q_rope)
    keys = (left, right, rope)
    first_padding = gl.load(offsets_ptr + num_requests) * num_heads
    clear_padding(out_ptr, lse_ptr, first_padding, num_tokens * num_heads, LATENT_DIM)
    gl.warp_specialize(
        [
            (
                _attend_left,
                (
                    q_ptr, q, q_scales, keys, values_left, weights_tile, factors, holes,
                    (q_full.index(0), full_keys, empty_keys, full_values, empty_values, passed,
                     taken),
                    out_ptr, lse_ptr, pieces_ptr, piece_lses_ptr, layer_scales_ptr, bounds_ptr,
                    offsets_ptr, cache_lengths_ptr, page_table_ptr, scale_log2, max_pages,
                    num_heads, slot_rows, GANG, PAGE_SIZE, BOX, ROW_DIM, ROPE_DIM,
                    EXACT, LN_2,
                ),
            ),
            (
                _attend_right,
                (
                    q_ptr, q, q_scales, values_right, weights_tile, factors,
                    (q_full.index(0), full_values, empty_values, passed, taken),
                    out_ptr, pieces_ptr, layer_scales_ptr, bounds_ptr, offsets_ptr,
                    cache_lengths_ptr, num_heads, slot_rows, GANG, ROW_DIM, ROPE_DIM, EXACT,
                ),
            ),
            (
                _fetch,
                (
                    half_desc, rope_desc, keys, (values_left, values_right), holes,
                    (full_keys, empty_keys, full_values, empty_values),
                    bounds_ptr, offsets_ptr, cache_lengths_ptr, page_table_ptr, max_pages,
                    num_heads, GANG, PAGE_SIZE, ROPE_DIM,
                ),
            ),
        ],
        [4, 4],
        [208, 72],
    )  # fmt: skip


def mla_decode_many_fp8(
    q: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    schedule: Schedule,
    *,
    q_terms: int = 2,
    exact: bool = True,
) -> None:
    """Fill the rows of requests that are not cut, the pieces of those that are, and padding."""
    grid, arguments, options = _call(
        q, pages, batch, softmax_scale, out, lse, schedule, q_terms, exact
    )
    _mla_decode_many_fp8_kernel[grid](**arguments, **options)


def _call(
    q: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    schedule: Schedule,
    q_terms: int,
    exact: bool,
) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
    """The launch's grid, arguments and options."""
    fmt, work = pages.format, schedule.work
    rows = pages.latent.as_strided((pages.num_slots, fmt.row_dim), (pages.latent.stride(1), 1))
    box = box_keys(pages.page_size)
    arguments = {
        **decode_fields(pages, batch, softmax_scale, out, lse, schedule),
        "q_ptr": q.reshape(-1, fmt.row_dim),  # a copy where heads are not one behind another
        "half_desc": tile_descriptor(rows, (box, fmt.kv_lora_rank // 2)),
        "rope_desc": tile_descriptor(rows, (box, 64)),
        "layer_scales_ptr": pages.layer_scales,
        # a second term of queries takes the place of a third block of keys
        "STAGES": 2 if q_terms == 2 and fmt.kv_lora_rank == 512 else 3,
        "Q_TERMS": q_terms,
        "EXACT": exact,
    }
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return (work.num_parts * work.gang,), arguments, options


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Gangs, dims, page sizes and query dtypes; the faster ways with one term and inexact sums."""
    if capability != 90:
        return
    for gang, latent_dim, rope_dim, page_size, dtype, q_terms, exact in (
        (1, 512, 64, 64, torch.bfloat16, 2, True),
        (2, 512, 64, 64, torch.bfloat16, 2, True),
        (2, 512, 64, 64, torch.bfloat16, 1, True),
        (2, 512, 64, 64, torch.bfloat16, 2, False),
        (2, 512, 64, 64, torch.bfloat16, 1, False),
        (2, 512, 64, 64, torch.float16, 2, True),
        (2, 512, 64, 16, torch.bfloat16, 2, True),
        (2, 512, 64, 128, torch.bfloat16, 2, True),
        (2, 512, 0, 64, torch.bfloat16, 2, True),
        (2, 256, 64, 64, torch.bfloat16, 2, True),
        (2, 256, 32, 64, torch.bfloat16, 2, True),
    ):
        fmt = CacheFormat("fp8", latent_dim, rope_dim)
        pages = PagedKVCache(fmt, num_layers=1, num_pages=1, page_size=page_size).layer(0)
        q = torch.empty(1, 64 * gang, fmt.row_dim, dtype=dtype)
        out, lse = q[..., :latent_dim].contiguous(), torch.empty(1, 64 * gang)
        batch = PagedBatch([0, 1], [0], [[0]])
        work = Work(132 // gang, gang, 64, 64)
        schedule = make_schedule(batch, 64 * gang, 1, latent_dim, work)
        _, arguments, options = _call(q, pages, batch, 0.1, out, lse, schedule, q_terms, exact)
        terms = f"q{q_terms}-{'exact' if exact else 'fast'}"
        label = f"{dtype}-L{latent_dim}-R{rope_dim}-gang{gang}-page{page_size}-{terms}"
        label = label.replace("torch.", "")
        yield config_of_call(_mla_decode_many_fp8_kernel, label, arguments, options, **SMALL_SPILLS)
