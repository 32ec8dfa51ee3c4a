"""mla_decode for few rows: S^T = K Q^T, O^T = V^T softmax(scale S)^T; heads on wgmma's N.

With 64 rows or more the tensor cores are busy; with 8 to 32 memory is, and a tile padded to 64 rows
would take their time for nothing. So operands are swapped: keys, and the columns of the latent, are
the 64 rows that a wgmma wants, and query rows its N.

A program is one of a gang that shares a part of the schedule, and takes every gang-th tile of ROWS
rows of each request there. One warp fetches blocks of 64 keys by TMA into a ring of STAGES; four
warps compute. For a tile of 32 rows they are eight: two warpgroups have half of the rows each of a
block's scores, and of its output half of the columns.
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
from kvkern.kernels.hopper.compat import tile_descriptor
from kvkern.kernels.hopper.decode_call import Kernel, shipped_config
from kvkern.kernels.hopper.paging import (
    BLOCK_N,
    are_keys,
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
    part_bounds,
    piece_of,
    prefetch_query,
    prefetch_step,
    put,
    put_holes,
    query_offsets,
    row_slots,
    share_of,
    slots_of,
    table_row,
    visible_keys,
)
from kvkern.kernels.paging import ANY_ALIGNMENT
from kvkern.kernels.schedule import Work
from kvkern.layout import CacheFormat

_SPILLS = spills("with rows that are gathered, what a tile needs once is parked", 0, newer=300)


@gluon.jit
def _fetch(
    q_ptr,
    latent_desc,
    rope_desc,
    rows_ptr,
    latents,
    ropes,
    holes,
    full,
    empty,
    bounds_ptr,
    offsets_ptr,
    cache_lengths_ptr,
    page_table_ptr,
    max_pages,
    num_heads,
    stride_q_token,
    stride_q_head,
    GANG: gl.constexpr,
    ROWS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    ROW_DIM: gl.constexpr,
):
    """Fill the ring with the blocks that ``_attend`` takes, in its order. One warp.

    A block is fetched in boxes that lie in one page each.
    """
    STAGES: gl.constexpr = latents.type.shape[0]
    LATENT_DIM: gl.constexpr = latents.type.shape[2]
    BOX: gl.constexpr = latent_desc.block_type.shape[0]
    NUM_BOXES: gl.constexpr = BLOCK_N // BOX
    NUM_BYTES: gl.constexpr = BLOCK_N * (LATENT_DIM + (64 if ROPE_DIM > 0 else 0)) * 2
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lanes = gl.arange(0, 32, layout=LANES)
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
        num_keys = gl.minimum(cached + num_tokens, stop * BLOCK_N)
        table_ptr = table_row(page_table_ptr, request, max_pages)
        num_tiles = gl.cdiv(num_tokens * num_heads, ROWS)
        for _ in range(gl.program_id(0) % GANG, num_tiles, GANG):
            pages = find_box_pages(table_ptr, begin, num_keys, max_pages, lanes, PAGE_SIZE, BOX)
            for block in range(begin, stop):
                next_pages = find_box_pages(
                    table_ptr, block + 1, num_keys, max_pages, lanes, PAGE_SIZE, BOX
                )
                first_slot = slots_of(pages, block * BLOCK_N + lanes * BOX, PAGE_SIZE)
                is_hole = (pages < 0) & (lanes < NUM_BOXES)
                stage = fetched % STAGES
                mbarrier.wait(empty.index(stage), ((fetched // STAGES) & 1) ^ 1)
                put(holes.index(stage * 2), hole_word(is_hole, lanes, 0))
                mbarrier.expect(full.index(stage), NUM_BYTES)
                fetch_block(
                    latent_desc, rope_desc, latents, stage, first_slot, lanes, 0,
                    full.index(stage), fetched >> 30,
                )  # fmt: skip
                if ROPE_DIM > 0:
                    fetch_block(
                        rope_desc, rope_desc, ropes, stage, first_slot, lanes, LATENT_DIM,
                        full.index(stage), fetched >> 30,
                    )  # fmt: skip
                pages = next_pages
                fetched += 1
        prefetch_query(
            q_ptr, lengths, num_heads, stride_q_token, stride_q_head, GANG, ROWS,
            LATENT_DIM + ROPE_DIM,
        )  # fmt: skip


@gluon.jit
def _gather(
    q_ptr,
    latent_desc,
    rope_desc,
    rows_ptr,
    latents,
    ropes,
    holes,
    full,
    empty,
    bounds_ptr,
    offsets_ptr,
    cache_lengths_ptr,
    page_table_ptr,
    max_pages,
    num_heads,
    stride_q_token,
    stride_q_head,
    GANG: gl.constexpr,
    ROWS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    ROW_DIM: gl.constexpr,
):
    """``_fetch`` for pages that no box fits: each thread copies 16 bytes. Four warps.

    Copies arrive at ``full`` themselves, beside the one arrival that passes on the holes.
    """
    STAGES: gl.constexpr = latents.type.shape[0]
    LATENT_DIM: gl.constexpr = latents.type.shape[2]
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
        num_keys = gl.minimum(cached + num_tokens, stop * BLOCK_N)
        table_ptr = table_row(page_table_ptr, request, max_pages)
        num_tiles = gl.cdiv(num_tokens * num_heads, ROWS)
        for _ in range(gl.program_id(0) % GANG, num_tiles, GANG):
            pages, all_pages = find_row_pages(table_ptr, begin, num_keys, max_pages, PAGE_SIZE)
            for block in range(begin, stop):
                next_pages, next_all_pages = find_row_pages(
                    table_ptr, block + 1, num_keys, max_pages, PAGE_SIZE
                )
                slots = row_slots(pages, block, PAGE_SIZE)
                stage = fetched % STAGES
                mbarrier.wait(empty.index(stage), ((fetched // STAGES) & 1) ^ 1)
                put_holes(holes, stage, all_pages)
                mbarrier.arrive(full.index(stage), count=1)
                copy_rows(latents.index(stage), rows_ptr, slots, 0, LATENT_DIM, ROW_DIM)
                if ROPE_DIM > 0:
                    copy_rows(ropes.index(stage), rows_ptr, slots, LATENT_DIM, ROPE_DIM, ROW_DIM)
                async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
                pages = next_pages
                all_pages = next_all_pages
                fetched += 1
        prefetch_query(
            q_ptr, lengths, num_heads, stride_q_token, stride_q_head, GANG, ROWS,
            LATENT_DIM + ROPE_DIM,
        )  # fmt: skip


@gluon.jit
def _load_query(
    q_ptr, q_latent, q_rope, first_row, num_left, start, num_heads, stride_q_token, stride_q_head,
    ROPE_DIM: gl.constexpr,
):  # fmt: skip
    """A tile of query rows into shared memory; rows that are not there are zero."""
    LATENT_DIM: gl.constexpr = q_latent.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    OF_NARROW: gl.constexpr = gl.SliceLayout(1, NARROW)
    row = gl.arange(0, q_latent.shape[0], layout=gl.SliceLayout(1, WIDE))
    offs_row = query_offsets(first_row + row, start, num_heads, stride_q_token, stride_q_head)
    mask_row = row < num_left
    if ROPE_DIM > 0:
        offs_r = gl.arange(0, 64, layout=gl.SliceLayout(0, NARROW))
        offs = gl.expand_dims(gl.convert_layout(offs_row, OF_NARROW, assert_trivial=True), 1)
        mask = gl.expand_dims(gl.convert_layout(mask_row, OF_NARROW, assert_trivial=True), 1)
        mask = mask & gl.expand_dims(offs_r < ROPE_DIM, 0)
        offs += LATENT_DIM + gl.expand_dims(offs_r, 0)
        rope = gl.load(q_ptr + offs, mask=mask, other=0.0)
    offs_l = gl.arange(0, LATENT_DIM, layout=gl.SliceLayout(0, WIDE))
    offs = gl.expand_dims(offs_row, 1) + gl.expand_dims(offs_l, 0)
    q_latent.store(gl.load(q_ptr + offs, mask=gl.expand_dims(mask_row, 1), other=0.0))
    if ROPE_DIM > 0:
        q_rope.store(rope)
    fence_async_shared()


@gluon.jit
def _attend(
    q_ptr,
    q_latent,
    q_rope,
    latents,
    ropes,
    weights_tile,
    holes,
    full,
    empty,
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
    stride_q_token,
    stride_q_head,
    GANG: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    LN_2: gl.constexpr,
):
    """Online softmax of each tile of query rows over the blocks in the ring. 4 or 8 warps."""
    STAGES: gl.constexpr = latents.type.shape[0]
    LATENT_DIM: gl.constexpr = latents.type.shape[2]
    ROWS: gl.constexpr = q_latent.shape[0]
    GROUPS: gl.constexpr = gl.num_warps() // 4
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, ROWS // GROUPS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * GROUPS, 1], [16, ROWS, 16])
    OF_ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    OF_OUT_ROW: gl.constexpr = gl.SliceLayout(0, ACC)
    OF_KEY: gl.constexpr = gl.SliceLayout(1, MMA)
    no_scores = gl.zeros([BLOCK_N, ROWS], gl.float32, MMA)
    offs_l = gl.arange(0, LATENT_DIM, layout=gl.SliceLayout(1, ACC))
    part = part_bounds(bounds_ptr, GANG)
    end = end_request(part)
    lengths = load_lengths(offsets_ptr, cache_lengths_ptr, part[0], end)
    taken = 0
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
            _load_query(
                q_ptr, q_latent, q_rope, tile * ROWS, num_rows - tile * ROWS, start, num_heads,
                stride_q_token, stride_q_head, ROPE_DIM,
            )  # fmt: skip
            num_visible, min_visible = visible_keys(
                table_ptr, row, mask_row, num_heads, cached, seq_len, max_pages, PAGE_SIZE
            )

            max_score = gl.full([ROWS], -float("inf"), gl.float32, OF_ROW)
            weight_sums = gl.zeros([BLOCK_N, ROWS], gl.float32, MMA)  # a thread's own keys
            acc = gl.zeros([LATENT_DIM, ROWS], gl.float32, ACC)
            for block in range(begin, stop):
                stage = taken % STAGES
                mbarrier.wait(full.index(stage), (taken // STAGES) & 1)
                if BOX == 1:  # threads wrote keys, and wgmma reads them by another way
                    fence_async_shared()
                latent = latents.index(stage)
                scores = warpgroup_mma(
                    latent, q_latent.permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                if ROPE_DIM > 0:
                    scores = warpgroup_mma(
                        ropes.index(stage), q_rope.permute((1, 0)), scores, is_async=True
                    )
                holes_low, holes_high = hole_words(holes, stage, BOX)
                scores = warpgroup_mma_wait(0, deps=(scores,))
                first_key = block * BLOCK_N
                if (first_key + BLOCK_N > min_visible) | ((holes_low | holes_high) != 0):
                    offs_n = gl.arange(0, BLOCK_N, layout=OF_KEY)
                    is_key = are_keys(holes_low, holes_high, offs_n, BOX)
                    key = gl.where(is_key, first_key + offs_n, 2147483647)
                    is_visible = gl.expand_dims(key, 1) < gl.expand_dims(num_visible, 0)
                    scores = gl.where(is_visible, scores, -float("inf"))
                if BOX > 1:  # else nothing was fetched there
                    if first_key + BLOCK_N > seq_len:
                        clear_rows(latent, seq_len - first_key)
                new_max = gl.maximum(max_score, gl.max(scores, 0) * scale_log2)
                shift = gl.where(new_max == -float("inf"), 0.0, new_max)
                weights = gl.exp2(scores * scale_log2 - gl.expand_dims(shift, 0))
                rescale = gl.exp2(max_score - shift)
                weight_sums = weight_sums * gl.expand_dims(rescale, 0) + weights
                rescale = gl.expand_dims(gl.convert_layout(rescale, OF_OUT_ROW), 0)
                max_score = new_max
                weights_tile.store(weights.to(weights_tile.dtype))
                fence_async_shared()
                acc = warpgroup_mma(
                    latent.permute((1, 0)), weights_tile, acc * rescale, is_async=True
                )
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index(stage), count=1)
                taken += 1

            weight_sum = gl.sum(weight_sums, 0)
            saw_none = weight_sum == 0.0
            lse = max_score + gl.log2(gl.where(saw_none, 1.0, weight_sum))
            inverse = gl.where(saw_none, 0.0, 1.0 / gl.where(saw_none, 1.0, weight_sum))
            inverse = gl.expand_dims(gl.convert_layout(inverse, OF_OUT_ROW), 0)
            acc = gl.where(inverse == 0, 0.0, acc * inverse)  # saw none: 0 times what may be NaN
            out_row = tile * ROWS + gl.arange(0, ROWS, layout=OF_OUT_ROW)
            mask = gl.expand_dims(out_row < num_rows, 0)
            if is_piece:
                first_row = piece.to(gl.int64) * slot_rows
                offs = gl.expand_dims((first_row + out_row) * LATENT_DIM, 0)
                gl.store(pieces_ptr + offs + gl.expand_dims(offs_l, 1), acc, mask=mask)
                gl.store(piece_lses_ptr + first_row + row, lse, mask=mask_row)
            else:
                first_row = start.to(gl.int64) * num_heads
                offs = gl.expand_dims((first_row + out_row) * LATENT_DIM, 0)
                out = acc.to(out_ptr.dtype.element_ty)
                gl.store(out_ptr + offs + gl.expand_dims(offs_l, 1), out, mask=mask)
                gl.store(lse_ptr + first_row + row, lse * LN_2, mask=mask_row)


@gluon.jit(
    do_not_specialize=["num_requests", "num_tokens", "num_heads", "max_pages", "slot_rows"],
    do_not_specialize_on_alignment=ANY_ALIGNMENT,
)
def _mla_decode_few_kernel(
    q_ptr,  # [T, H, L+R]
    latent_desc,  # [slots, L+R] in boxes [min(page size, 64), L]
    rope_desc,  # the same rows in boxes [min(page size, 64), 64]
    rows_ptr,  # the same rows
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
    LATENT_DIM: gl.constexpr,
    ROPE_DIM: gl.constexpr,
    GANG: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    BOX: gl.constexpr,  # keys of a box; 1: rows are gathered
    ROW_DIM: gl.constexpr,  # elements from row to row
    LN_2: gl.constexpr,
):
    gdc_launch_dependents()  # a merge that waits for all of this may start
    prefetch_step(
        bounds_ptr, offsets_ptr, cache_lengths_ptr, page_table_ptr, num_requests, max_pages, GANG
    )
    DTYPE: gl.constexpr = latent_desc.dtype
    q_latent_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, LATENT_DIM], DTYPE)
    rope_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, 64], DTYPE)
    weights_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, ROWS], DTYPE)
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    latents = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, LATENT_DIM], latent_desc.layout)
    ropes = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK_N, 64], rope_desc.layout)
    q_latent = gl.allocate_shared_memory(DTYPE, [ROWS, LATENT_DIM], q_latent_layout)
    q_rope = gl.allocate_shared_memory(DTYPE, [ROWS, 64], rope_layout)
    weights_tile = gl.allocate_shared_memory(DTYPE, [BLOCK_N, ROWS], weights_layout)
    holes = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 1], one)
    full = make_barriers(STAGES, 1 if BOX > 1 else 1 + 128)  # copies of 128 threads arrive
    empty = make_barriers(STAGES, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    q_ptr, q_latent, q_rope, latents, ropes, weights_tile, holes, full, empty,
                    out_ptr, lse_ptr, pieces_ptr, piece_lses_ptr, bounds_ptr, offsets_ptr,
                    cache_lengths_ptr, page_table_ptr, scale_log2, max_pages, num_heads, slot_rows,
                    stride_q_token, stride_q_head, GANG, PAGE_SIZE, BOX, ROPE_DIM, LN_2,
                ),
            ),
            (
                _fetch if BOX > 1 else _gather,
                (
                    q_ptr, latent_desc, rope_desc, rows_ptr, latents, ropes, holes, full, empty,
                    bounds_ptr, offsets_ptr, cache_lengths_ptr, page_table_ptr, max_pages,
                    num_heads, stride_q_token, stride_q_head, GANG, ROWS, PAGE_SIZE, ROPE_DIM,
                    ROW_DIM,
                ),
            ),
        ],
        [1 if BOX > 1 else 4],
        [56 if BOX > 1 else 152],
    )  # fmt: skip
    first_padding = gl.load(offsets_ptr + num_requests) * num_heads
    clear_padding(out_ptr, lse_ptr, first_padding, num_tokens * num_heads, LATENT_DIM)


def _query_fields(q: Tensor, q_scale: None, fmt: CacheFormat) -> dict[str, Any]:
    return {"q_ptr": q}


def _page_fields(pages: LayerPages) -> dict[str, Any]:
    fmt = pages.format
    rows = pages.latent.as_strided((pages.num_slots, fmt.row_dim), (pages.latent.stride(1), 1))
    box = box_keys(pages.page_size) or 64
    return {
        "latent_desc": tile_descriptor(rows, (box, fmt.kv_lora_rank)),
        "rope_desc": tile_descriptor(rows, (box, 64)),
        "rows_ptr": rows,
    }


def _constants(q: Tensor, pages: LayerPages, work: Work) -> dict[str, Any]:
    return {
        "stride_q_token": q.stride(0),
        "stride_q_head": q.stride(1),
        "ROWS": work.tile_rows,
        "STAGES": 2,
        "ROW_DIM": pages.latent.stride(1),
    }


KERNEL = Kernel(
    _mla_decode_few_kernel,
    _query_fields,
    _page_fields,
    _constants,
    {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True},
)
KERNEL_OF_32 = KERNEL._replace(options={**KERNEL.options, "num_warps": 8})  # rows a tile


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each tile of rows, dims and page size."""
    if capability != 90:
        return
    for rows, latent_dim, rope_dim, page_size in (
        (8, 512, 64, 64), (16, 512, 64, 64), (32, 512, 64, 64), (16, 512, 64, 16),
        (16, 256, 64, 64), (16, 256, 32, 64), (16, 512, 0, 64), (16, 512, 64, 256),
        (16, 512, 64, 1), (16, 256, 32, 3),
    ):  # fmt: skip
        fmt = CacheFormat("bf16", latent_dim, rope_dim)
        pages = PagedKVCache(fmt, num_layers=1, num_pages=1, page_size=page_size).layer(0)
        q = torch.empty(1, rows, fmt.row_dim, dtype=torch.bfloat16)
        label = f"L{latent_dim}-R{rope_dim}-rows{rows}-page{page_size}"
        work = Work(132, 1, rows, 64)
        kernel = KERNEL_OF_32 if rows == 32 else KERNEL
        yield shipped_config(kernel, label, q, pages, work, **_SPILLS)
