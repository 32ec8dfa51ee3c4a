"""mla_decode for 64 rows and more of an fp8 cache: out = softmax(scale Q K^T) V, all of it in e4m3.

One warpgroup computes scores and softmax, the next scores under way meanwhile, and passes on the
weights. Two hold half of the output's columns each, as ``out^T = V^T weights^T`` with V^T in
registers: ``e4m3.py`` says why, and what ``exact`` means. One warp fetches blocks of 64 keys by TMA
into a ring.

Queries become e4m3 here, ``2^e (high + low)``, a power of two a row: two terms hold a bf16 query,
and the scores are the sum over both. One term has 4 bits, and the scores cost half as much: it is
all of a query that comes in e4m3.
"""

from collections.abc import Iterator
from functools import partial
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
from triton.language.extra.cuda import gdc_launch_dependents

from kvkern.cache.storage import LayerPages, PagedKVCache
from kvkern.kernels.config import KernelConfig, spills
from kvkern.kernels.hopper.compat import load_tile, tile_descriptor, view_tile
from kvkern.kernels.hopper.decode_call import Kernel, shipped_config
from kvkern.kernels.hopper.e4m3 import (
    SHARE_ROWS,
    end_sum,
    halves,
    join_columns,
    load_pairs,
    no_pairs,
    pack_weights,
    quantise_query,
    split_pairs,
    start_sum,
)
from kvkern.kernels.hopper.paging import (
    BLOCK_N,
    NO_MAXIMUM,
    ROWS,
    box_keys,
    clear_padding,
    clear_rows,
    end_request,
    find_box_pages,
    hole_word,
    hole_words,
    load_lengths,
    make_barriers,
    mask_scores,
    part_bounds,
    piece_of,
    prefetch_query,
    prefetch_step,
    put,
    share_of,
    slot_of_box,
    slots_of,
    store_half,
    table_row,
    visible_keys,
)
from kvkern.kernels.paging import ANY_ALIGNMENT
from kvkern.kernels.schedule import Work
from kvkern.layout import CacheFormat

_SPILLS = spills(
    "13 warps share an SM's registers; what is parked is needed once a tile", 1100, newer=1856
)
# weights are at most 2^8, so that the small ones are normal numbers of e4m3
_WEIGHT_LOG2: gl.constexpr = gl.constexpr(8.0)


@gluon.jit
def _start_scores(
    q, keys, full_keys, block, scores, PHASE: gl.constexpr, PHASES: gl.constexpr,
    ROPE_DIM: gl.constexpr,
):  # fmt: skip
    """A share of the products that the scores of the ring's ``block``-th block are the sum of.

    The low term first: then its sums are small, and lose nothing to those of the high one.
    """
    q_left, _q_right, q_rope = q
    left, _right, rope = keys
    STAGES: gl.constexpr = left.shape[0]
    TERMS: gl.constexpr = q_left.shape[0]
    HAS_MORE_ROPE: gl.constexpr = (q_rope.shape[0] > TERMS) & (ROPE_DIM > 0)
    STEPS: gl.constexpr = TERMS * (2 * left.shape[2] // 128 + (1 if ROPE_DIM > 0 else 0))
    if PHASE == 0:
        stage = block % STAGES
        mbarrier.wait(full_keys.index(stage), (block // STAGES) & 1)
        if HAS_MORE_ROPE:
            rope_keys = rope.index(stage).permute((1, 0))
            scores = warpgroup_mma(q_rope.index(1), rope_keys, scores, use_acc=False, is_async=True)
    for step in gl.static_range(
        (STEPS * PHASE + PHASES - 1) // PHASES, (STEPS * (PHASE + 1) + PHASES - 1) // PHASES
    ):
        scores = _start_step(q, keys, block, scores, step, HAS_MORE_ROPE, ROPE_DIM)
    return scores


@gluon.jit
def _start_step(
    q, keys, block, scores, STEP: gl.constexpr, HAS_SUM: gl.constexpr, ROPE_DIM: gl.constexpr
):
    """Scores of one term and 128 latent columns, or the rope columns."""
    q_left, q_right, q_rope = q
    left, right, rope = keys
    TERMS: gl.constexpr = q_left.shape[0]
    CHUNKS: gl.constexpr = left.shape[2] // 128
    OF_TERM: gl.constexpr = 2 * CHUNKS + (1 if ROPE_DIM > 0 else 0)
    OF_STEP: gl.constexpr = STEP % OF_TERM
    # plus a zero that the compiler cannot see: addresses known from before would be kept in
    # registers, and moved for each wgmma
    zero = block >> 30
    stage = block % left.shape[0] + zero
    term = TERMS - 1 - STEP // OF_TERM + zero
    if OF_STEP == 2 * CHUNKS:
        queries, columns = q_rope.index(term), rope.index(stage)
    elif OF_STEP < CHUNKS:
        queries = _view_chunks(q_left).index(term * CHUNKS + OF_STEP)
        columns = _view_chunks(left).index(stage * CHUNKS + OF_STEP)
    else:
        queries = _view_chunks(q_right).index(term * CHUNKS + OF_STEP - CHUNKS)
        columns = _view_chunks(right).index(stage * CHUNKS + OF_STEP - CHUNKS)
    return warpgroup_mma(
        queries, columns.permute((1, 0)), scores, use_acc=(STEP > 0) | HAS_SUM, is_async=True
    )


@gluon.jit
def _view_chunks(tile):
    COUNT: gl.constexpr = tile.shape[0] * tile.shape[2] // 128
    return view_tile(tile, tile.dtype, [COUNT, 64, 128], gl.NVMMASharedLayout(128, 8, 2))


@gluon.jit
def _weigh(
    scores,
    row_scale,
    max_score,
    weight_sum,
    weights_tile,
    factor,
    passed,
    started,
    q,
    keys,
    full_keys,
    following,
    HAS_NEXT: gl.constexpr,
    ROPE_DIM: gl.constexpr,
):
    """A block's softmax: passes on its weights, and what sums so far are times.

    It starts the next block's scores, a few products at a time: a warp that has started many has
    to wait until they have room.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, scores.type.layout, 4)
    SCORES: gl.constexpr = scores.type.layout
    if HAS_NEXT:
        started = _start_scores(q, keys, full_keys, following, started, 0, 6, ROPE_DIM)
    new_max = gl.maximum(max_score, gl.max(scores, 1) * row_scale)
    rescale = gl.exp2(max_score - new_max)
    factor.store(rescale)
    if HAS_NEXT:
        started = _start_scores(q, keys, full_keys, following, started, 1, 6, ROPE_DIM)
    scores0, scores1 = halves(scores)
    scores0, scores1, scores2, scores3 = halves(scores0) + halves(scores1)
    weights0 = _exponentials(scores0, row_scale, new_max)
    if HAS_NEXT:
        started = _start_scores(q, keys, full_keys, following, started, 2, 6, ROPE_DIM)
    weights1 = _exponentials(scores1, row_scale, new_max)
    if HAS_NEXT:
        started = _start_scores(q, keys, full_keys, following, started, 3, 6, ROPE_DIM)
    weights2 = _exponentials(scores2, row_scale, new_max)
    if HAS_NEXT:
        started = _start_scores(q, keys, full_keys, following, started, 4, 6, ROPE_DIM)
    weights3 = _exponentials(scores3, row_scale, new_max)
    weights = _joined(_joined(weights0, weights1), _joined(weights2, weights3))
    weights = gl.convert_layout(weights, SCORES, assert_trivial=True)
    weights_tile.store(pack_weights(weights, OPERAND))
    fence_async_shared()
    mbarrier.arrive(passed, count=1)
    if HAS_NEXT:
        started = _start_scores(q, keys, full_keys, following, started, 5, 6, ROPE_DIM)
    added = gl.sum((weights0 + weights1) + (weights2 + weights3), 1)
    added = gl.convert_layout(added, weight_sum.type.layout, assert_trivial=True)
    return started, new_max, weight_sum * rescale + added


@gluon.jit
def _joined(first, second):
    return gl.join(first, second).permute([0, 2, 1]).reshape([ROWS, 2 * first.shape[1]])


@gluon.jit
def _exponentials(scores, row_scale, new_max):
    OF_ROW: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    row_scale = gl.convert_layout(row_scale, OF_ROW, assert_trivial=True)
    shift = gl.convert_layout(new_max - _WEIGHT_LOG2, OF_ROW, assert_trivial=True)
    return gl.exp2(scores * gl.expand_dims(row_scale, 1) - gl.expand_dims(shift, 1))


@gluon.jit
def _find_weights(
    q,
    q_scales,
    keys,
    weights_tile,
    factors,
    holes,
    barriers,
    lse_ptr,
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
    ROPE_DIM: gl.constexpr,
    LN_2: gl.constexpr,
):
    """Scores and softmax: passes on a block's weights, and what a row's sums so far are times.

    A stage of keys is full only after those before in it were summed, with their weights.
    """
    q_full, full_keys, passed, ended, noted = barriers
    left, right, _rope = keys
    STAGES: gl.constexpr = left.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    OF_SCORE: gl.constexpr = gl.SliceLayout(1, SCORES)
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    latent_scale = gl.load(layer_scales_ptr)
    part = part_bounds(bounds_ptr, GANG)
    end = end_request(part)
    lengths = load_lengths(offsets_ptr, cache_lengths_ptr, part[0], end)
    done = 0  # blocks of the ring
    ends = 0  # of tiles of query rows
    tiles = 0  # those that had keys
    for request in range(part[0], end):
        start, num_tokens, cached, begin, stop = share_of(lengths, request, part)
        lengths = load_lengths(offsets_ptr, cache_lengths_ptr, request + 1, end)
        seq_len = cached + num_tokens
        num_rows = num_tokens * num_heads
        table_ptr = table_row(page_table_ptr, request, max_pages)
        is_piece, piece = piece_of(part, request, GANG)
        for tile in range(gl.program_id(0) % GANG, gl.cdiv(num_rows, ROWS), GANG):
            row = tile * ROWS + gl.arange(0, ROWS, layout=OF_SCORE)
            mask_row = row < num_rows
            max_score = gl.full([ROWS], NO_MAXIMUM, gl.float32, OF_SCORE)
            weight_sum = gl.zeros([ROWS], gl.float32, OF_SCORE)
            if begin < stop:
                num_visible, min_visible = visible_keys(
                    table_ptr, row, mask_row, num_heads, cached, seq_len, max_pages, PAGE_SIZE
                )
                mbarrier.wait(q_full, tiles & 1)
                tiles += 1
                row_scale = view_tile(q_scales, gl.float32, [ROWS], q_scales.type.layout).load(
                    OF_SCORE
                )
                row_scale = row_scale * (scale_log2 * latent_scale)
                scores = _start_scores(q, keys, full_keys, done, no_scores, 0, 1, ROPE_DIM)
                scores = warpgroup_mma_wait(0, deps=(scores,))
                for block in range(begin, stop - 1):
                    stage = done % STAGES
                    words = hole_words(holes, stage, BOX)
                    scores = mask_scores(scores, words, block, num_visible, min_visible, BOX)
                    started, max_score, weight_sum = _weigh(
                        scores, row_scale, max_score, weight_sum, weights_tile.index(stage),
                        factors.index(stage), passed.index(stage), no_scores, q, keys, full_keys,
                        done + 1, True, ROPE_DIM,
                    )  # fmt: skip
                    scores = warpgroup_mma_wait(0, deps=(started,))
                    done += 1
                stage = done % STAGES
                num_left = seq_len - (stop - 1) * BLOCK_N
                if num_left < BLOCK_N:
                    clear_rows(left.index(stage), num_left)
                    clear_rows(right.index(stage), num_left)
                words = hole_words(holes, stage, BOX)
                scores = mask_scores(scores, words, stop - 1, num_visible, min_visible, BOX)
                _, max_score, weight_sum = _weigh(
                    scores, row_scale, max_score, weight_sum, weights_tile.index(stage),
                    factors.index(stage), passed.index(stage), no_scores, q, keys, full_keys,
                    done, False, ROPE_DIM,
                )  # fmt: skip
                done += 1

            saw_none = weight_sum == 0.0
            weight_sum = gl.where(saw_none, 1.0, weight_sum)
            mbarrier.wait(noted, (ends & 1) ^ 1)
            unit = gl.where(is_piece, 1.0, latent_scale)  # pieces are multiplied when merged
            factors.index(STAGES).store(gl.where(saw_none, 0.0, unit / weight_sum))
            mbarrier.arrive(ended, count=1)
            ends += 1
            lse = max_score + gl.log2(weight_sum) - _WEIGHT_LOG2
            lse = gl.where(saw_none, -float("inf"), lse)
            if is_piece:
                gl.store(piece_lses_ptr + piece.to(gl.int64) * slot_rows + row, lse, mask=mask_row)
            else:
                gl.store(lse_ptr + start.to(gl.int64) * num_heads + row, lse * LN_2, mask=mask_row)


@gluon.jit
def _sum_values(
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
    SIDE: gl.constexpr,
    GANG: gl.constexpr,
    ROW_DIM: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    EXACT: gl.constexpr,
):
    """Half of the output, from weights and factors that ``_find_weights`` passes on.

    Half of the next queries too: those before were last read for scores that have arrived here.
    Values are loaded while others are multiplied, also those of the next block, unless some of it
    are yet to be cleared.
    """
    q_full, full_keys, empty_keys, passed, ended, noted = barriers
    STAGES: gl.constexpr = values.type.shape[0]
    HALF: gl.constexpr = values.type.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    OF_ROW: gl.constexpr = gl.SliceLayout(0, ACC)
    part = part_bounds(bounds_ptr, GANG)
    end = end_request(part)
    lengths = load_lengths(offsets_ptr, cache_lengths_ptr, part[0], end)
    done = 0
    ends = 0
    for request in range(part[0], end):
        start, num_tokens, cached, begin, stop = share_of(lengths, request, part)
        lengths = load_lengths(offsets_ptr, cache_lengths_ptr, request + 1, end)
        num_rows = num_tokens * num_heads
        num_whole = gl.minimum((cached + num_tokens) // BLOCK_N, stop) - begin
        is_piece, piece = piece_of(part, request, GANG)
        for tile in range(gl.program_id(0) % GANG, gl.cdiv(num_rows, ROWS), GANG):
            first_row = start.to(gl.int64) * num_heads + tile * ROWS
            num_left = num_rows - tile * ROWS
            if begin < stop:
                quantise_query(
                    q_ptr, q, q_scales, layer_scales_ptr, first_row, num_left, done >> 30,
                    SIDE * SHARE_ROWS, ROW_DIM, ROPE_DIM,
                )  # fmt: skip
                mbarrier.arrive(q_full, count=1)
            acc0 = gl.zeros([64, ROWS], gl.float32, ACC)
            acc1 = gl.zeros([64, ROWS], gl.float32, ACC)
            acc2 = gl.zeros([64, ROWS], gl.float32, ACC)
            acc3 = gl.zeros([64, ROWS], gl.float32, ACC)
            end_whole = done + num_whole
            early = no_pairs()
            if done < end_whole:
                mbarrier.wait(full_keys.index(done % STAGES), (done // STAGES) & 1)
                early = load_pairs(values.index(done % STAGES), 0, 0)
            for _ in range(begin, stop):
                stage = done % STAGES
                following = done + (done + 1 < end_whole).to(gl.int32)
                mbarrier.wait(full_keys.index(following % STAGES), (following // STAGES) & 1)
                mbarrier.wait(passed.index(stage), (done // STAGES) & 1)
                if done >= end_whole:
                    early = load_pairs(values.index(stage), 0, 0)
                even, odd = split_pairs(early, load_pairs(values.index(stage), 0, 32), ACC)
                weights = weights_tile.index(stage).permute((1, 0))
                rescale = factors.index(stage).load(OF_ROW)
                if gl.min(rescale, 0) < 1.0:
                    acc0 = acc0 * gl.expand_dims(rescale, 0)
                    acc1 = acc1 * gl.expand_dims(rescale, 0)
                    acc2 = acc2 * gl.expand_dims(rescale, 0)
                    acc3 = acc3 * gl.expand_dims(rescale, 0)
                acc0 = end_sum(start_sum(even, weights, acc0, EXACT), acc0, EXACT)
                if HALF == 256:
                    added = start_sum(odd, weights, acc1, EXACT)
                    early = load_pairs(values.index(stage), 1, 0)
                    acc1 = end_sum(added, acc1, EXACT)
                    even, odd = split_pairs(early, load_pairs(values.index(stage), 1, 32), ACC)
                    acc2 = end_sum(start_sum(even, weights, acc2, EXACT), acc2, EXACT)
                    added = start_sum(odd, weights, acc3, EXACT)
                else:
                    added = start_sum(odd, weights, acc1, EXACT)
                early = load_pairs(values.index(following % STAGES), 0, 0)
                if HALF == 256:
                    acc3 = end_sum(added, acc3, EXACT)
                else:
                    acc1 = end_sum(added, acc1, EXACT)
                mbarrier.arrive(empty_keys.index(stage), count=1)
                done += 1
            mbarrier.wait(ended, ends & 1)
            factor = factors.index(STAGES).load(OF_ROW)
            mbarrier.arrive(noted, count=1)
            ends += 1
            out = join_columns((acc0, acc1, acc2, acc3), factor, HALF)
            if is_piece:
                piece_row = piece.to(gl.int64) * slot_rows + tile * ROWS
                store_half(out, pieces_ptr, piece_row, None, SIDE * HALF, 2 * HALF)
            else:
                store_half(out, out_ptr, first_row, num_left, SIDE * HALF, 2 * HALF)


@gluon.jit
def _fetch(
    q_ptr,
    half_desc,
    rope_desc,
    keys,
    holes,
    full_keys,
    empty_keys,
    bounds_ptr,
    offsets_ptr,
    cache_lengths_ptr,
    page_table_ptr,
    max_pages,
    num_heads,
    GANG: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROW_DIM: gl.constexpr,
    ROPE_DIM: gl.constexpr,
):
    """Keys, by one warp. Page ids are looked up a block before their use, lengths a request."""
    left, right, rope = keys
    STAGES: gl.constexpr = left.type.shape[0]
    HALF: gl.constexpr = left.type.shape[2]
    BOX: gl.constexpr = half_desc.block_type.shape[0]
    NUM_BYTES: gl.constexpr = BLOCK_N * (2 * HALF + (64 if ROPE_DIM > 0 else 0))
    lanes = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    part = part_bounds(bounds_ptr, GANG)
    end = end_request(part)
    lengths = load_lengths(offsets_ptr, cache_lengths_ptr, part[0], end)
    # before keys fill the memory's queues
    prefetch_query(q_ptr, lengths, num_heads, num_heads * ROW_DIM, ROW_DIM, GANG, ROWS, ROW_DIM)
    fetched = 0
    for request in range(part[0], end):
        _, num_tokens, cached, begin, stop = share_of(lengths, request, part)
        lengths = load_lengths(offsets_ptr, cache_lengths_ptr, request + 1, end)
        num_keys = gl.minimum(cached + num_tokens, stop * BLOCK_N)
        table_ptr = table_row(page_table_ptr, request, max_pages)
        num_tiles = gl.cdiv(num_tokens * num_heads, ROWS)
        if begin == stop:
            num_tiles = 0
        for tile in range(gl.program_id(0) % GANG, num_tiles, GANG):
            pages = find_box_pages(table_ptr, begin, num_keys, max_pages, lanes, PAGE_SIZE, BOX)
            for block in range(begin, stop):
                next_pages = find_box_pages(
                    table_ptr, block + 1, num_keys, max_pages, lanes, PAGE_SIZE, BOX
                )
                first_slot = slots_of(pages, block * BLOCK_N + lanes * BOX, PAGE_SIZE)
                is_hole = (pages < 0) & (lanes < BLOCK_N // BOX)
                stage = fetched % STAGES
                full = full_keys.index(stage)
                mbarrier.wait(empty_keys.index(stage), ((fetched // STAGES) & 1) ^ 1)
                put(holes.index(stage * 2), hole_word(is_hole, lanes, 0))
                mbarrier.expect(full, NUM_BYTES)
                for box in gl.static_range(BLOCK_N // BOX):
                    slot = slot_of_box(first_slot, lanes, box)
                    rows = left.index(stage).slice(box * BOX, BOX, dim=0)
                    load_tile(half_desc, [slot, 0], full, rows)
                    rows = right.index(stage).slice(box * BOX, BOX, dim=0)
                    load_tile(half_desc, [slot, HALF], full, rows)
                    if ROPE_DIM > 0:
                        rows = rope.index(stage).slice(box * BOX, BOX, dim=0)
                        load_tile(rope_desc, [slot, 2 * HALF], full, rows)
                if (block == begin) & (tile < GANG):
                    prefetch_query(
                        q_ptr, lengths, num_heads, num_heads * ROW_DIM, ROW_DIM, GANG, ROWS, ROW_DIM
                    )
                pages = next_pages
                fetched += 1


@gluon.jit(
    do_not_specialize=["num_requests", "num_tokens", "num_heads", "max_pages", "slot_rows"],
    do_not_specialize_on_alignment=ANY_ALIGNMENT,
)
def _mla_decode_many_fp8_kernel(
    q_ptr,  # [T * H, L+R]
    q_scale_ptr,  # fp32 [1] with e4m3 queries, or None
    half_desc,  # e4m3 [slots, L+R] in boxes [min(page size, 64), L / 2]
    rope_desc,  # the same in boxes [min(page size, 64), 64]
    layer_scales_ptr,  # fp32 [2]
    out_ptr,  # [T, H, L]
    lse_ptr,  # fp32 [T, H]
    pieces_ptr,  # fp16 [2 * num_parts, slot_rows, L]
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
    gdc_launch_dependents()  # a merge that waits for all of this may start
    prefetch_step(
        bounds_ptr, offsets_ptr, cache_lengths_ptr, page_table_ptr, num_requests, max_pages, GANG
    )
    E4M3: gl.constexpr = half_desc.dtype
    HALF: gl.constexpr = LATENT_DIM // 2
    ROW_DIM: gl.constexpr = LATENT_DIM + ROPE_DIM
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    short_rows: gl.constexpr = gl.NVMMASharedLayout(64, 8, 2)
    # in units of the latent's scale, rope columns have more bits than they came with
    ROPE_TERMS: gl.constexpr = Q_TERMS if q_scale_ptr is None else 2
    if q_scale_ptr is not None:
        scale_log2 = scale_log2 * gl.load(q_scale_ptr)
    q_left = gl.allocate_shared_memory(E4M3, [Q_TERMS, ROWS, HALF], half_desc.layout)
    q_right = gl.allocate_shared_memory(E4M3, [Q_TERMS, ROWS, HALF], half_desc.layout)
    q_rope = gl.allocate_shared_memory(E4M3, [ROPE_TERMS, ROWS, 64], short_rows)
    left = gl.allocate_shared_memory(E4M3, [STAGES, BLOCK_N, HALF], half_desc.layout)
    right = gl.allocate_shared_memory(E4M3, [STAGES, BLOCK_N, HALF], half_desc.layout)
    rope = gl.allocate_shared_memory(E4M3, [STAGES, BLOCK_N, 64], rope_desc.layout)
    weights_tile = gl.allocate_shared_memory(E4M3, [STAGES, ROWS, BLOCK_N], short_rows)
    q_scales = gl.allocate_shared_memory(gl.float32, [ROWS // 8, 8], one)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES + 1, ROWS], one)
    holes = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 1], one)
    q_full = make_barriers(1, 2)
    full_keys = make_barriers(STAGES, 1)
    empty_keys = make_barriers(STAGES, 2)
    passed = make_barriers(STAGES, 1)
    ended = make_barriers(1, 1)
    noted = make_barriers(1, 2)
    fence_async_shared()
    q = (q_left, q_right, q_rope)
    keys = (left, right, rope)
    barriers = (
        q_full.index(0), full_keys, empty_keys, passed, ended.index(0), noted.index(0),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                _sum_values,
                (
                    q_ptr, q, q_scales, left, weights_tile, factors, barriers, out_ptr, pieces_ptr,
                    layer_scales_ptr, bounds_ptr, offsets_ptr, cache_lengths_ptr, num_heads,
                    slot_rows, 0, GANG, ROW_DIM, ROPE_DIM, EXACT,
                ),
            ),
            (
                _sum_values,
                (
                    q_ptr, q, q_scales, right, weights_tile, factors, barriers, out_ptr, pieces_ptr,
                    layer_scales_ptr, bounds_ptr, offsets_ptr, cache_lengths_ptr, num_heads,
                    slot_rows, 1, GANG, ROW_DIM, ROPE_DIM, EXACT,
                ),
            ),
            (
                _find_weights,
                (
                    q, q_scales, keys, weights_tile, factors, holes,
                    (q_full.index(0), full_keys, passed, ended.index(0), noted.index(0)), lse_ptr,
                    piece_lses_ptr, layer_scales_ptr, bounds_ptr, offsets_ptr, cache_lengths_ptr,
                    page_table_ptr, scale_log2, max_pages, num_heads, slot_rows, GANG, PAGE_SIZE,
                    BOX, ROPE_DIM, LN_2,
                ),
            ),
            (
                _fetch,
                (
                    q_ptr, half_desc, rope_desc, keys, holes, full_keys, empty_keys, bounds_ptr,
                    offsets_ptr, cache_lengths_ptr, page_table_ptr, max_pages, num_heads, GANG,
                    PAGE_SIZE, ROW_DIM, ROPE_DIM,
                ),
            ),
        ],
        [4, 4, 1],
        [192, 96, 32],
    )  # fmt: skip
    first_padding = gl.load(offsets_ptr + num_requests) * num_heads
    clear_padding(out_ptr, lse_ptr, first_padding, num_tokens * num_heads, LATENT_DIM)


def _query_fields(q: Tensor, q_scale: Tensor | None, fmt: CacheFormat) -> dict[str, Any]:
    rows = q.reshape(-1, fmt.row_dim)  # a copy where heads are not one behind another
    return {"q_ptr": rows, "q_scale_ptr": q_scale}


def _page_fields(pages: LayerPages) -> dict[str, Any]:
    fmt, box = pages.format, box_keys(pages.page_size)
    rows = pages.latent.as_strided((pages.num_slots, fmt.row_dim), (pages.latent.stride(1), 1))
    return {
        "half_desc": tile_descriptor(rows, (box, fmt.kv_lora_rank // 2)),
        "rope_desc": tile_descriptor(rows, (box, 64)),
        "layer_scales_ptr": pages.layer_scales,
    }


def _constants(
    q: Tensor, pages: LayerPages, work: Work, q_terms: int, exact: bool
) -> dict[str, Any]:
    if q.dtype == torch.float8_e4m3fn:
        q_terms = 1
    return {
        "STAGES": 4 if q_terms == 1 else 3,
        "Q_TERMS": q_terms,
        "EXACT": exact,
    }


def _kernel(q_terms: int, exact: bool) -> Kernel:
    return Kernel(
        _mla_decode_many_fp8_kernel,
        _query_fields,
        _page_fields,
        partial(_constants, q_terms=q_terms, exact=exact),
        {"num_warps": 4, "enable_fp_fusion": True},
    )


KERNEL = _kernel(q_terms=2, exact=True)
FAST_KERNEL = _kernel(q_terms=1, exact=False)


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
        (2, 512, 64, 64, torch.float8_e4m3fn, 1, True),
        (2, 256, 0, 64, torch.float8_e4m3fn, 1, True),
    ):
        fmt = CacheFormat("fp8", latent_dim, rope_dim)
        pages = PagedKVCache(fmt, num_layers=1, num_pages=1, page_size=page_size).layer(0)
        q = torch.empty(1, 64 * gang, fmt.row_dim, dtype=dtype)
        terms = f"q{q_terms}-{'exact' if exact else 'fast'}"
        label = f"{dtype}-L{latent_dim}-R{rope_dim}-gang{gang}-page{page_size}-{terms}"
        label = label.replace("torch.", "")
        kernel, work = _kernel(q_terms, exact), Work(132 // gang, gang, 64, 64)
        q_scale = torch.empty(1) if dtype == torch.float8_e4m3fn else None
        yield shipped_config(kernel, label, q, pages, work, q_scale, **_SPILLS)
