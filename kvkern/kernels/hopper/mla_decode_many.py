"""mla_decode for 64 rows and more: out = softmax(scale Q K^T) V, 64 rows a program, both on wgmma.

The accumulator, 64 rows of the latent in fp32, is half of an SM's registers, so two warpgroups hold
a half of its columns each. The first computes scores and softmax, and passes on the weights; its
next scores are under way while the second still multiplies. One warp fetches blocks of 64 keys by
TMA, each half by a barrier of its own, into a ring of two. Row tiles of a request are a gang: they
run side by side on the same keys, and each asks the L2 for its share of the next page.
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
from kvkern.kernels.hopper.compat import load_tile, tile_descriptor
from kvkern.kernels.hopper.decode_call import Kernel, shipped_config
from kvkern.kernels.hopper.paging import (
    BLOCK_N,
    NO_MAXIMUM,
    ROWS,
    WIDE_128,
    WIDE_256,
    box_keys,
    clear_padding,
    clear_rows,
    copy_rows,
    end_request,
    fetch_block,
    find_box_pages,
    find_row_pages,
    hole_word,
    hole_words,
    load_lengths,
    make_barriers,
    mask_scores,
    part_bounds,
    piece_of,
    prefetch,
    prefetch_rows,
    prefetch_step,
    put,
    put_holes,
    request_share,
    row_slots,
    scalar,
    share_of,
    slots_of,
    store_half,
    table_row,
    visible_keys,
)
from kvkern.kernels.paging import ANY_ALIGNMENT
from kvkern.kernels.schedule import Work
from kvkern.layout import CacheFormat

_LAG: gl.constexpr = gl.constexpr(8.0)  # log2 of what a maximum may lag behind


@gluon.jit
def _wait_for_keys(full, stage, phase, BOX: gl.constexpr):
    mbarrier.wait(full.index(stage), phase)
    if BOX == 1:  # threads wrote them, and wgmma reads them by another way than a thread
        fence_async_shared()


@gluon.jit
def _start_scores(
    q,
    keys,
    full_left,
    full_right,
    block,
    no_scores,
    BOX: gl.constexpr,
    ROPE_DIM: gl.constexpr,
):
    """Scores of the ring's ``block``-th block: two or three wgmma groups, not waited for."""
    q_left, q_right, q_rope = q
    left, right, rope = keys
    stage = block & 1
    phase = (block >> 1) & 1
    zero = block >> 30  # a constant address would be kept in registers, and moved for each wgmma
    _wait_for_keys(full_left, stage, phase, BOX)
    scores = warpgroup_mma(
        q_left.index(zero), left.index(stage).permute((1, 0)), no_scores, use_acc=False,
        is_async=True,
    )  # fmt: skip
    if ROPE_DIM > 0:
        scores = warpgroup_mma(
            q_rope.index(zero), rope.index(stage).permute((1, 0)), scores, is_async=True
        )
    _wait_for_keys(full_right, stage, phase, BOX)
    return warpgroup_mma(
        q_right.index(zero), right.index(stage).permute((1, 0)), scores, is_async=True
    )


@gluon.jit
def _store_half_wide(acc, tile, out_ptr, first_row, num_rows, columns, STRIDE: gl.constexpr):
    """The same by 16 bytes a thread, through a tile [64, 64] of shared memory."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    NUM_CHUNKS: gl.constexpr = acc.shape[1] // 64
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    offs_l = columns + gl.arange(0, 64, layout=gl.SliceLayout(0, WIDE))
    ptrs = out_ptr + first_row * STRIDE + gl.expand_dims(row * STRIDE, 1)
    ptrs = ptrs + gl.expand_dims(offs_l, 0)
    mask = gl.expand_dims(row < num_rows, 1)
    values = acc.to(tile.dtype)
    if NUM_CHUNKS == 4:
        halves = values.reshape([64, 4, 64]).permute([0, 2, 1]).reshape([64, 64, 2, 2])
        even, odd = gl.split(halves)
        chunk0, chunk2 = gl.split(even)
        chunk1, chunk3 = gl.split(odd)
        tile.store(chunk0)
        gl.store(ptrs, tile.load(WIDE), mask=mask)
        tile.store(chunk1)
        gl.store(ptrs + 64, tile.load(WIDE), mask=mask)
        tile.store(chunk2)
        gl.store(ptrs + 128, tile.load(WIDE), mask=mask)
        tile.store(chunk3)
        gl.store(ptrs + 192, tile.load(WIDE), mask=mask)
    else:
        chunk0, chunk1 = gl.split(values.reshape([64, 2, 64]).permute([0, 2, 1]))
        tile.store(chunk0)
        gl.store(ptrs, tile.load(WIDE), mask=mask)
        tile.store(chunk1)
        gl.store(ptrs + 64, tile.load(WIDE), mask=mask)


@gluon.jit
def _pass_inverse(weight_sum, factors, passed, taken, sent):
    """Pass on what a tile's rows are multiplied by in the end, and return it; 0: saw no key."""
    saw_none = weight_sum == 0.0
    inverse = gl.where(saw_none, 0.0, 1.0 / gl.where(saw_none, 1.0, weight_sum))
    mbarrier.wait(taken, (sent & 1) ^ 1)
    factors.store(inverse)
    mbarrier.arrive(passed, count=1)
    return inverse


@gluon.jit
def _attend_left(
    q,
    keys,
    weights_tile,
    factors,
    flag,
    holes,
    barriers,
    out_ptr,
    lse_ptr,
    pieces_ptr,
    piece_lses_ptr,
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
    """Scores, softmax and the left half of the output."""
    left, right, _rope = keys
    q_full, q_empty, full_left, full_right, empty_left, passed, taken = barriers
    HALF: gl.constexpr = left.type.shape[2]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    OF_SCORE: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_ACC: gl.constexpr = gl.SliceLayout(1, ACC)
    NUM_GROUPS: gl.constexpr = 3 if ROPE_DIM > 0 else 2
    no_scores = gl.zeros([ROWS, BLOCK_N], gl.float32, SCORES)
    part = part_bounds(bounds_ptr, GANG)
    done = 0  # blocks of the ring
    sent = 0  # weights and factors that were passed on
    tiles = 0  # of query rows, that had keys
    end = end_request(part)
    lengths = load_lengths(offsets_ptr, cache_lengths_ptr, part[0], end)
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
            acc = gl.zeros([ROWS, HALF], gl.float32, ACC)
            if begin < stop:
                mbarrier.wait(q_full, tiles & 1)
                scores = _start_scores(
                    q, keys, full_left, full_right, done, no_scores, BOX, ROPE_DIM
                )
                num_visible, min_visible = visible_keys(
                    table_ptr, row, mask_row, num_heads, cached, seq_len, max_pages, PAGE_SIZE
                )
                scores = warpgroup_mma_wait(0, deps=(scores,))
                for block in range(begin, stop - 1):
                    scores = mask_scores(
                        scores, hole_words(holes, done & 1, BOX), block, num_visible, min_visible,
                        BOX,
                    )  # fmt: skip
                    new_max = gl.max(scores, 1) * scale_log2
                    is_far = new_max > max_score + _LAG
                    new_max = gl.where(is_far, new_max, max_score)
                    is_any_far = gl.max(is_far.to(gl.int32), 0)
                    rescale = gl.exp2(max_score - new_max)
                    max_score = new_max
                    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(max_score, 1))
                    if is_any_far > 0:
                        factor = gl.convert_layout(rescale, OF_ACC, assert_trivial=True)
                        acc = acc * gl.expand_dims(factor, 1)
                    rounded = weights.to(weights_tile.dtype)
                    acc_started = warpgroup_mma(
                        gl.convert_layout(rounded, OPERAND, assert_trivial=True),
                        left.index(done & 1), acc, is_async=True,
                    )  # fmt: skip
                    scores_started = _start_scores(
                        q, keys, full_left, full_right, done + 1, no_scores, BOX, ROPE_DIM
                    )
                    mbarrier.wait(taken, (sent & 1) ^ 1)
                    weights_tile.store(rounded)
                    factors.store(rescale)
                    put(flag, is_any_far)
                    mbarrier.arrive(passed, count=1)
                    sent += 1
                    weight_sum = weight_sum * rescale + gl.sum(weights, 1)
                    acc = warpgroup_mma_wait(NUM_GROUPS, deps=(acc_started,))
                    mbarrier.arrive(empty_left.index(done & 1), count=1)
                    scores = warpgroup_mma_wait(0, deps=(scores_started,))
                    done += 1
                mbarrier.arrive(q_empty, count=1)
                scores = mask_scores(
                    scores, hole_words(holes, done & 1, BOX), stop - 1, num_visible, min_visible,
                    BOX,
                )  # fmt: skip
                if BOX > 1:  # else nothing was fetched there
                    num_left = seq_len - (stop - 1) * BLOCK_N
                    if num_left < BLOCK_N:
                        clear_rows(left.index(done & 1), num_left)
                        clear_rows(right.index(done & 1), num_left)
                new_max = gl.maximum(max_score, gl.max(scores, 1) * scale_log2)
                rescale = gl.exp2(max_score - new_max)
                max_score = new_max
                weights = gl.exp2(scores * scale_log2 - gl.expand_dims(max_score, 1))
                weight_sum = weight_sum * rescale + gl.sum(weights, 1)
                rounded = weights.to(weights_tile.dtype)
                factor = gl.convert_layout(rescale, OF_ACC, assert_trivial=True)
                acc = acc * gl.expand_dims(factor, 1)
                acc_started = warpgroup_mma(
                    gl.convert_layout(rounded, OPERAND, assert_trivial=True),
                    left.index(done & 1), acc, is_async=True,
                )  # fmt: skip
                mbarrier.wait(taken, (sent & 1) ^ 1)
                weights_tile.store(rounded)
                factors.store(rescale)
                put(flag, 1)
                mbarrier.arrive(passed, count=1)
                sent += 1
                inverse = _pass_inverse(weight_sum, factors, passed, taken, sent)
                acc = warpgroup_mma_wait(0, deps=(acc_started,))
                mbarrier.arrive(empty_left.index(done & 1), count=1)
                done += 1
                tiles += 1
            else:
                inverse = _pass_inverse(weight_sum, factors, passed, taken, sent)
            sent += 1

            saw_none = weight_sum == 0.0
            lse = max_score + gl.log2(gl.where(saw_none, 1.0, weight_sum))
            lse = gl.where(saw_none, -float("inf"), lse)
            factor = gl.expand_dims(gl.convert_layout(inverse, OF_ACC, assert_trivial=True), 1)
            acc = gl.where(factor == 0, 0.0, acc * factor)  # saw none: 0 times what may be NaN
            num_left = num_rows - tile * ROWS
            if is_piece:
                first_row = piece.to(gl.int64) * slot_rows + tile * ROWS
                store_half(acc, pieces_ptr, first_row, None, 0, 2 * HALF)
                gl.store(piece_lses_ptr + piece.to(gl.int64) * slot_rows + row, lse, mask=mask_row)
            else:
                first_row = start.to(gl.int64) * num_heads + tile * ROWS
                _store_half_wide(acc, weights_tile, out_ptr, first_row, num_left, 0, 2 * HALF)
                gl.store(lse_ptr + start.to(gl.int64) * num_heads + row, lse * LN_2, mask=mask_row)


@gluon.jit
def _attend_right(
    right,
    weights_tile,
    factors,
    flag,
    barriers,
    out_ptr,
    pieces_ptr,
    bounds_ptr,
    offsets_ptr,
    cache_lengths_ptr,
    num_heads,
    slot_rows,
    GANG: gl.constexpr,
    BOX: gl.constexpr,
):
    """The right half of the output, from weights and factors that ``_attend_left`` passes on."""
    full_right, empty_right, passed, taken = barriers
    HALF: gl.constexpr = right.type.shape[2]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    OF_ACC: gl.constexpr = gl.SliceLayout(1, ACC)
    part = part_bounds(bounds_ptr, GANG)
    done = 0
    received = 0
    for request in range(part[0], end_request(part)):
        # not carried from request to request, as elsewhere: Triton 3.6 drops what is carried and
        # only bounds an inner loop
        start, num_tokens, _cached, begin, stop = request_share(
            offsets_ptr, cache_lengths_ptr, request, part
        )
        num_rows = num_tokens * num_heads
        is_piece, piece = piece_of(part, request, GANG)
        for tile in range(gl.program_id(0) % GANG, gl.cdiv(num_rows, ROWS), GANG):
            acc = gl.zeros([ROWS, HALF], gl.float32, ACC)
            for _ in range(begin, stop):
                mbarrier.wait(passed, received & 1)
                weights = weights_tile.load(OPERAND)
                rescale = factors.load(OF_ACC)
                is_any_far = scalar(flag)
                mbarrier.arrive(taken, count=1)
                received += 1
                if is_any_far > 0:
                    acc = acc * gl.expand_dims(rescale, 1)
                if BOX == 1:  # else what the scores have waited for is there for all
                    _wait_for_keys(full_right, done & 1, (done >> 1) & 1, BOX)
                acc = warpgroup_mma(weights, right.index(done & 1), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty_right.index(done & 1), count=1)
                done += 1
            mbarrier.wait(passed, received & 1)
            inverse = factors.load(OF_ACC)
            mbarrier.arrive(taken, count=1)
            received += 1
            factor = gl.expand_dims(inverse, 1)
            acc = gl.where(factor == 0, 0.0, acc * factor)
            num_left = num_rows - tile * ROWS
            if is_piece:
                first_row = piece.to(gl.int64) * slot_rows + tile * ROWS
                store_half(acc, pieces_ptr, first_row, None, HALF, 2 * HALF)
            else:
                first_row = start.to(gl.int64) * num_heads + tile * ROWS
                WIDE: gl.constexpr = WIDE_256 if HALF == 256 else WIDE_128
                out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), WIDE)
                store_half(out, out_ptr, first_row, num_left, HALF, 2 * HALF)


@gluon.jit
def _load_query(q_half_desc, q_rope_desc, q, q_full, q_empty, q_row, tiles, ROPE_DIM: gl.constexpr):
    """Fetch the next tile of query rows, when the last one's scores are done."""
    q_left, q_right, q_rope = q
    HALF: gl.constexpr = q_left.type.shape[2]
    ROPE_WIDTH: gl.constexpr = 64 if ROPE_DIM > 0 else 0
    mbarrier.wait(q_empty, (tiles & 1) ^ 1)
    mbarrier.expect(q_full, ROWS * (2 * HALF + ROPE_WIDTH) * 2)
    load_tile(q_half_desc, [q_row, 0], q_full, q_left.index(0))
    load_tile(q_half_desc, [q_row, HALF], q_full, q_right.index(0))
    if ROPE_DIM > 0:
        load_tile(q_rope_desc, [q_row, 2 * HALF], q_full, q_rope.index(0))


@gluon.jit
def _prefetch_boxes(
    rows_ptr,
    pages,
    block,
    lanes,
    member,
    GANG: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    ROW_DIM: gl.constexpr,
):
    """Ask the L2 for this member's share of each of a block's boxes; a box's rows are one run."""
    SHARE: gl.constexpr = BOX * ROW_DIM * 2 // GANG // 128 * 128  # bytes
    slots = slots_of(pages, block * BLOCK_N + lanes * BOX, PAGE_SIZE)
    address = (rows_ptr + slots.to(gl.int64) * ROW_DIM).to(gl.int64) + member * SHARE
    prefetch(address, gl.where(pages >= 0, SHARE, 0))


@gluon.jit
def _fetch(
    q_half_desc,
    q_rope_desc,
    half_desc,
    rope_desc,
    rows_ptr,
    q,
    keys,
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
    ROW_DIM: gl.constexpr,
):
    """Queries, and the keys of a block as left half and rope key, then right half. One warp.

    A tile's first keys come into the L2 while the last tile's query is still in use.
    """
    left, right, rope = keys
    q_full, q_empty, full_left, full_right, empty_left, empty_right = barriers
    HALF: gl.constexpr = left.type.shape[2]
    BOX: gl.constexpr = half_desc.block_type.shape[0]
    NUM_BOXES: gl.constexpr = BLOCK_N // BOX
    ROPE_WIDTH: gl.constexpr = 64 if ROPE_DIM > 0 else 0
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lanes = gl.arange(0, 32, layout=LANES)
    member = gl.program_id(0) % GANG
    part = part_bounds(bounds_ptr, GANG)
    end = end_request(part)
    lengths = load_lengths(offsets_ptr, cache_lengths_ptr, part[0], end)
    fetched = 0
    tiles = 0
    for request in range(part[0], end):
        start, num_tokens, cached, begin, stop = share_of(lengths, request, part)
        lengths = load_lengths(offsets_ptr, cache_lengths_ptr, request + 1, end)
        num_keys = gl.minimum(cached + num_tokens, stop * BLOCK_N)
        table_ptr = table_row(page_table_ptr, request, max_pages)
        num_tiles = gl.cdiv(num_tokens * num_heads, ROWS)
        if begin == stop:
            num_tiles = 0
        for tile in range(member, num_tiles, GANG):
            pages = find_box_pages(table_ptr, begin, num_keys, max_pages, lanes, PAGE_SIZE, BOX)
            soon = gl.where(fetched > 0, pages, -1)  # what is fetched at once needs no L2
            _prefetch_boxes(rows_ptr, soon, begin, lanes, member, GANG, PAGE_SIZE, BOX, ROW_DIM)
            q_row = start * num_heads + tile * ROWS
            _load_query(q_half_desc, q_rope_desc, q, q_full, q_empty, q_row, tiles, ROPE_DIM)
            tiles += 1
            for block in range(begin, stop):
                next_pages = find_box_pages(
                    table_ptr, block + 1, num_keys, max_pages, lanes, PAGE_SIZE, BOX
                )
                _prefetch_boxes(
                    rows_ptr, next_pages, block + 1, lanes, member, GANG, PAGE_SIZE, BOX, ROW_DIM
                )
                first_slot = slots_of(pages, block * BLOCK_N + lanes * BOX, PAGE_SIZE)
                is_hole = (pages < 0) & (lanes < NUM_BOXES)
                stage = fetched & 1
                zero = fetched >> 30
                is_ready = ((fetched >> 1) & 1) ^ 1
                mbarrier.wait(empty_left.index(stage), is_ready)
                put(holes.index(stage * 2), hole_word(is_hole, lanes, 0))
                mbarrier.expect(full_left.index(stage), BLOCK_N * (HALF + ROPE_WIDTH) * 2)
                fetch_block(
                    half_desc, rope_desc, left, stage, first_slot, lanes, 0,
                    full_left.index(stage), zero,
                )  # fmt: skip
                if ROPE_DIM > 0:
                    fetch_block(
                        rope_desc, rope_desc, rope, stage, first_slot, lanes, 2 * HALF,
                        full_left.index(stage), zero,
                    )  # fmt: skip
                mbarrier.wait(empty_right.index(stage), is_ready)
                mbarrier.expect(full_right.index(stage), BLOCK_N * HALF * 2)
                fetch_block(
                    half_desc, rope_desc, right, stage, first_slot, lanes, HALF,
                    full_right.index(stage), zero,
                )  # fmt: skip
                pages = next_pages
                fetched += 1


@gluon.jit
def _gather(
    q_half_desc,
    q_rope_desc,
    half_desc,
    rope_desc,
    rows_ptr,
    q,
    keys,
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
    ROW_DIM: gl.constexpr,
):
    """``_fetch`` for pages that no box fits: each thread copies 16 bytes. Four warps.

    Copies arrive at ``full`` themselves, beside the one arrival that passes on the holes.
    """
    left, right, rope = keys
    q_full, q_empty, full_left, full_right, empty_left, empty_right = barriers
    HALF: gl.constexpr = left.type.shape[2]
    ROW_BYTES: gl.constexpr = (2 * HALF + ROPE_DIM) * 2
    member = gl.program_id(0) % GANG
    part = part_bounds(bounds_ptr, GANG)
    end = end_request(part)
    lengths = load_lengths(offsets_ptr, cache_lengths_ptr, part[0], end)
    fetched = 0
    tiles = 0
    for request in range(part[0], end):
        start, num_tokens, cached, begin, stop = share_of(lengths, request, part)
        lengths = load_lengths(offsets_ptr, cache_lengths_ptr, request + 1, end)
        num_keys = gl.minimum(cached + num_tokens, stop * BLOCK_N)
        table_ptr = table_row(page_table_ptr, request, max_pages)
        num_tiles = gl.cdiv(num_tokens * num_heads, ROWS)
        if begin == stop:
            num_tiles = 0
        for tile in range(member, num_tiles, GANG):
            pages, all_pages = find_row_pages(table_ptr, begin, num_keys, max_pages, PAGE_SIZE)
            soon = row_slots(gl.where(fetched > 0, pages, -1), begin, PAGE_SIZE)
            prefetch_rows(rows_ptr, soon, member, GANG, ROW_BYTES, ROW_DIM)
            q_row = start * num_heads + tile * ROWS
            _load_query(q_half_desc, q_rope_desc, q, q_full, q_empty, q_row, tiles, ROPE_DIM)
            tiles += 1
            for block in range(begin, stop):
                next_pages, next_all_pages = find_row_pages(
                    table_ptr, block + 1, num_keys, max_pages, PAGE_SIZE
                )
                slots = row_slots(pages, block, PAGE_SIZE)
                stage = fetched & 1
                is_ready = ((fetched >> 1) & 1) ^ 1
                mbarrier.wait(empty_left.index(stage), is_ready)
                put_holes(holes, stage, all_pages)
                mbarrier.arrive(full_left.index(stage), count=1)
                copy_rows(left.index(stage), rows_ptr, slots, 0, HALF, ROW_DIM)
                if ROPE_DIM > 0:
                    copy_rows(rope.index(stage), rows_ptr, slots, 2 * HALF, ROPE_DIM, ROW_DIM)
                async_copy.mbarrier_arrive(full_left.index(stage), increment_count=False)
                next_slots = row_slots(next_pages, block + 1, PAGE_SIZE)
                prefetch_rows(rows_ptr, next_slots, member, GANG, ROW_BYTES, ROW_DIM)
                mbarrier.wait(empty_right.index(stage), is_ready)
                copy_rows(right.index(stage), rows_ptr, slots, HALF, HALF, ROW_DIM)
                async_copy.mbarrier_arrive(full_right.index(stage), increment_count=False)
                pages = next_pages
                all_pages = next_all_pages
                fetched += 1


@gluon.jit(
    do_not_specialize=["num_requests", "num_tokens", "num_heads", "max_pages", "slot_rows"],
    do_not_specialize_on_alignment=ANY_ALIGNMENT,
)
def _mla_decode_many_kernel(
    q_half_desc,  # [T * H, L+R] in boxes [64, L / 2]
    q_rope_desc,  # the same in boxes [64, 64]
    half_desc,  # [slots, L+R] in boxes [min(page size, 64), L / 2]
    rope_desc,  # the same in boxes [min(page size, 64), 64]
    rows_ptr,  # the same
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
    LATENT_DIM: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    ROW_DIM: gl.constexpr,  # elements from row to row
    BOX: gl.constexpr,  # keys of a box; 1: rows are gathered
    GANG: gl.constexpr,
    LN_2: gl.constexpr,
):
    DTYPE: gl.constexpr = half_desc.dtype
    HALF: gl.constexpr = LATENT_DIM // 2
    gdc_launch_dependents()  # a merge that waits for all of this may start
    prefetch_step(
        bounds_ptr, offsets_ptr, cache_lengths_ptr, page_table_ptr, num_requests, max_pages, GANG
    )
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], q_half_desc.layout)
    q_right = gl.allocate_shared_memory(DTYPE, [1, ROWS, HALF], q_half_desc.layout)
    q_rope = gl.allocate_shared_memory(DTYPE, [1, ROWS, 64], q_rope_desc.layout)
    left = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, HALF], half_desc.layout)
    right = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, HALF], half_desc.layout)
    rope = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, 64], rope_desc.layout)
    weights_tile = gl.allocate_shared_memory(DTYPE, [ROWS, BLOCK_N], rope_desc.layout)
    factors = gl.allocate_shared_memory(gl.float32, [ROWS], one)
    flag = gl.allocate_shared_memory(gl.int32, [1], one)
    holes = gl.allocate_shared_memory(gl.int32, [4, 1], one)
    full_left = make_barriers(2, 1 if BOX > 1 else 1 + 128)  # copies of 128 threads arrive
    full_right = make_barriers(2, 1 if BOX > 1 else 128)
    empty_left = make_barriers(2, 1)
    empty_right = make_barriers(2, 1)
    single = make_barriers(4, 1)
    fence_async_shared()
    q = (q_left, q_right, q_rope)
    keys = (left, right, rope)
    q_full = single.index(0)
    q_empty = single.index(1)
    passed = single.index(2)
    taken = single.index(3)
    gl.warp_specialize(
        [
            (
                _attend_left,
                (
                    q, keys, weights_tile, factors, flag, holes,
                    (q_full, q_empty, full_left, full_right, empty_left, passed, taken),
                    out_ptr, lse_ptr, pieces_ptr, piece_lses_ptr, bounds_ptr, offsets_ptr,
                    cache_lengths_ptr, page_table_ptr, scale_log2, max_pages, num_heads,
                    slot_rows, GANG, PAGE_SIZE, BOX,
                    ROPE_DIM, LN_2,
                ),
            ),
            (
                _attend_right,
                (
                    right, weights_tile, factors, flag,
                    (full_right, empty_right, passed, taken),
                    out_ptr, pieces_ptr, bounds_ptr, offsets_ptr, cache_lengths_ptr, num_heads,
                    slot_rows, GANG, BOX,
                ),
            ),
            (
                _fetch if BOX > 1 else _gather,
                (
                    q_half_desc, q_rope_desc, half_desc, rope_desc, rows_ptr, q, keys, holes,
                    (q_full, q_empty, full_left, full_right, empty_left, empty_right),
                    bounds_ptr, offsets_ptr, cache_lengths_ptr, page_table_ptr,
                    max_pages, num_heads, GANG, PAGE_SIZE, ROPE_DIM, ROW_DIM,
                ),
            ),
        ],
        [4, 1 if BOX > 1 else 4],
        [208 if BOX > 1 else 184, 40 if BOX > 1 else 80],
    )  # fmt: skip
    first_padding = gl.load(offsets_ptr + num_requests) * num_heads
    clear_padding(out_ptr, lse_ptr, first_padding, num_tokens * num_heads, LATENT_DIM)


def _query_fields(q: Tensor, q_scale: None, fmt: CacheFormat) -> dict[str, Any]:
    rows = q.reshape(-1, fmt.row_dim)  # a copy where heads are not one behind another
    if rows.data_ptr() % 16:
        rows = rows.clone()
    return {
        "q_half_desc": tile_descriptor(rows, (64, fmt.kv_lora_rank // 2)),
        "q_rope_desc": tile_descriptor(rows, (64, 64)),
    }


def _page_fields(pages: LayerPages) -> dict[str, Any]:
    fmt = pages.format
    rows = pages.latent.as_strided((pages.num_slots, fmt.row_dim), (pages.latent.stride(1), 1))
    box = box_keys(pages.page_size) or 64
    return {
        "half_desc": tile_descriptor(rows, (box, fmt.kv_lora_rank // 2)),
        "rope_desc": tile_descriptor(rows, (box, 64)),
        "rows_ptr": rows,
    }


def _constants(q: Tensor, pages: LayerPages, work: Work) -> dict[str, Any]:
    return {"ROW_DIM": pages.latent.stride(1)}


KERNEL = Kernel(
    _mla_decode_many_kernel,
    _query_fields,
    _page_fields,
    _constants,
    {"num_warps": 4, "enable_fp_fusion": True},
)

_PARKED = "three roles share an SM's registers; what is parked is parked around loops"
_SPILLS = spills(_PARKED, 64, newer=256)
_MORE_SPILLS = spills(_PARKED, 192, newer=976)  # where pages are not whole boxes


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Gangs, dims and page sizes."""
    if capability != 90:
        return
    for gang, latent_dim, rope_dim, page_size in (
        (1, 512, 64, 64), (2, 512, 64, 64), (2, 512, 64, 16), (2, 256, 64, 64), (2, 256, 32, 64),
        (2, 512, 0, 64), (2, 512, 64, 1), (2, 256, 32, 3),
    ):  # fmt: skip
        fmt = CacheFormat("bf16", latent_dim, rope_dim)
        pages = PagedKVCache(fmt, num_layers=1, num_pages=1, page_size=page_size).layer(0)
        q = torch.empty(1, 64 * gang, fmt.row_dim, dtype=torch.bfloat16)
        label = f"L{latent_dim}-R{rope_dim}-gang{gang}-page{page_size}"
        budget = _SPILLS if box_keys(page_size) == 64 else _MORE_SPILLS
        yield shipped_config(KERNEL, label, q, pages, Work(132 // gang, gang, 64, 64), **budget)
