"""What Gluon's decode kernels share: their part of the schedule, and rows that are not there."""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.kernels.hopper.compat import copy_values
from kvkern.kernels.numerics import LN_2
from kvkern.kernels.schedule import Schedule

BLOCK_N: gl.constexpr = gl.constexpr(64)  # keys a block
ROWS: gl.constexpr = gl.constexpr(64)  # query rows of a program, where there are many
NO_MAXIMUM: gl.constexpr = gl.constexpr(-1e30)  # of no scores; finite, as -inf - -inf is NaN
# a thread holds 8 neighbouring columns of a row, which it can store at once; by half of a latent
WIDE_128: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
WIDE_256: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 256],
    )
)


def box_keys(page_size: int) -> int:
    """Keys that the TMA fetches at once: of one page, and whole rows of a swizzle; 0: it cannot."""
    if page_size % 64 == 0:
        return 64
    return page_size if page_size in (16, 32) else 0


def decode_fields(
    pages: LayerPages,
    batch: PagedBatch,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    schedule: Schedule,
) -> dict[str, Any]:
    """Arguments that each decode kernel has: all but the query and the pages themselves."""
    return {
        "out_ptr": out,
        "lse_ptr": lse,
        "pieces_ptr": schedule.outs,
        "piece_lses_ptr": schedule.lses,
        "bounds_ptr": schedule.bounds,
        "offsets_ptr": batch.input_row_offsets,
        "cache_lengths_ptr": batch.cache_lengths,
        "page_table_ptr": batch.page_table,
        "scale_log2": softmax_scale / LN_2,
        "num_requests": batch.num_requests,
        "num_tokens": out.shape[0],
        "num_heads": out.shape[1],
        "max_pages": batch.max_pages,
        "slot_rows": schedule.outs.shape[1],
        "PAGE_SIZE": pages.page_size,
        "BOX": max(box_keys(pages.page_size), 1),
        "LATENT_DIM": pages.format.kv_lora_rank,
        "ROPE_DIM": pages.format.rope_dim,
        "GANG": schedule.work.gang,
        "LN_2": LN_2,
    }


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def part_bounds(bounds_ptr, GANG: gl.constexpr):
    """First request and block of a part, and those of the next."""
    bound = bounds_ptr + gl.program_id(0) // GANG * 2
    return gl.load(bound), gl.load(bound + 1), gl.load(bound + 2), gl.load(bound + 3)


@gluon.jit
def request_share(offsets_ptr, cache_lengths_ptr, request, part):
    """Its tokens, cached length, and the blocks of it that this part takes."""
    first_request, first_block, last_request, last_block = part
    start = gl.load(offsets_ptr + request)
    end = gl.load(offsets_ptr + request + 1)
    cached = gl.load(cache_lengths_ptr + request)
    num_blocks = gl.cdiv(cached + end - start, BLOCK_N)
    begin = gl.where(request == first_request, first_block, 0)
    stop = gl.where(request == last_request, gl.minimum(last_block, num_blocks), num_blocks)
    return start, end - start, cached, gl.minimum(begin, stop), stop


@gluon.jit
def table_row(page_table_ptr, request, max_pages):
    """Where a request's page ids are."""
    return page_table_ptr + request.to(gl.int64) * max_pages


@gluon.jit
def piece_of(part, request, GANG: gl.constexpr):
    """Whether a part's blocks of a request are not all of it, and then the slot for its piece."""
    starts_inside = (request == part[0]) & (part[1] > 0)
    is_piece = starts_inside | ((request == part[2]) & (part[3] > 0))
    return is_piece, 2 * (gl.program_id(0) // GANG) + (1 - starts_inside.to(gl.int32))


@gluon.jit
def visible_keys(table_ptr, position, mask_row, seq_len, max_pages, PAGE_SIZE: gl.constexpr):
    """How many keys each row sees, and the fewest of a row that is there; padding sees none."""
    column = position // PAGE_SIZE
    own_page = gl.load(table_ptr + column, mask=mask_row & (column < max_pages), other=-1)
    num_visible = gl.where(own_page >= 0, position + 1, 0)
    return num_visible, gl.min(gl.where(mask_row, num_visible, seq_len), 0)


@gluon.jit
def find_boxes(
    table_ptr, block, seq_len, max_pages, lanes, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr
):
    """First slot of each of a block's boxes, a lane each, and the word of its holes.

    A page of -1 is outside the cache, where the TMA finds zeros.
    """
    key = block * BLOCK_N + lanes * BOX
    column = key // PAGE_SIZE
    is_there = (lanes < BLOCK_N // BOX) & (key < seq_len)
    page = gl.load(table_ptr + column, mask=is_there & (column < max_pages), other=-1)
    return page * PAGE_SIZE + key % PAGE_SIZE, hole_word(is_there & (page < 0), lanes, 0)


@gluon.jit
def slot_of_box(first_slot, lanes, box):
    return gl.max(gl.where(lanes == box, first_slot, -2147483648), 0)


@gluon.jit
def find_holes(table_ptr, block, seq_len, max_pages, PAGE_SIZE: gl.constexpr):
    """Both words of a block's holes, a bit a key."""
    KEYS: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    offs_n = gl.arange(0, BLOCK_N, layout=KEYS)
    key = block * BLOCK_N + offs_n
    column = key // PAGE_SIZE
    is_there = key < seq_len
    page = gl.load(table_ptr + column, mask=is_there & (column < max_pages), other=-1)
    is_hole = is_there & (page < 0)
    return hole_word(is_hole, offs_n, 0), hole_word(is_hole, offs_n, 32)


@gluon.jit
def hole_word(is_hole, index, FIRST: gl.constexpr):
    """A bit for each of 32 boxes of a block that lies on a page of -1."""
    is_mine = is_hole & (index >= FIRST) & (index < FIRST + 32)
    return gl.sum(gl.where(is_mine, 1 << (index - FIRST), 0), 0)


@gluon.jit
def put(cell, value):
    """An int32 into shared memory."""
    cell.store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) + value)


@gluon.jit
def are_keys(low, high, offs_n, BOX: gl.constexpr):
    """Which keys of a block are on a page, by the words of ``hole_word``."""
    box = offs_n // BOX
    word = gl.where(box < 32, low, high)
    return ((word >> (box % 32)) & 1) == 0


@gluon.jit
def hole_words(holes, stage, BOX: gl.constexpr):
    """What ``hole_word`` found in a block of the ring; the second word only where BOX is 1."""
    high = 0
    if BOX == 1:
        high = scalar(holes.index(stage * 2 + 1))
    return scalar(holes.index(stage * 2)), high


@gluon.jit
def mask_scores(scores, holes, block, num_visible, min_visible, BOX: gl.constexpr):
    """-inf for keys that a row must not see; rows are scores' first axis."""
    first_key = block * BLOCK_N
    low, high = holes
    if (first_key + BLOCK_N > min_visible) | ((low | high) != 0):
        offs_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores.type.layout))
        is_key = are_keys(low, high, offs_n, BOX)
        key = gl.where(is_key, first_key + offs_n, 2147483647)
        is_visible = gl.expand_dims(key, 0) < gl.expand_dims(num_visible, 1)
        scores = gl.where(is_visible, scores, -float("inf"))
    return scores


@gluon.jit
def copy_rows(
    tile,
    rows_ptr,
    table_ptr,
    first_key,
    seq_len,
    max_pages,
    column,
    num_columns,
    PAGE_SIZE: gl.constexpr,
    ROW_DIM: gl.constexpr,
):
    """Start to copy columns of a block's rows from any pages; zeros where there is none.

    Each row starts at a multiple of 16 bytes, which is what a copy takes.
    """
    THREADS: gl.constexpr = min(tile.shape[1] // 8, 32)
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // THREADS, THREADS], [gl.num_warps(), 1], [1, 0]
    )
    key = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    page_column = key // PAGE_SIZE
    is_there = (key < seq_len) & (page_column < max_pages)
    page = gl.load(table_ptr + page_column, mask=is_there, other=-1)
    slot = page.to(gl.int64) * PAGE_SIZE + key % PAGE_SIZE
    offs = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    ptrs = rows_ptr + gl.expand_dims(slot * ROW_DIM, 1) + gl.expand_dims(column + offs, 0)
    mask = gl.expand_dims(page >= 0, 1) & gl.expand_dims(offs < num_columns, 0)
    copy_values(tile, ptrs, mask=mask)


@gluon.jit
def pass_on_copies(full, stage, NUM_UNDER_WAY: gl.constexpr):
    """Wait for all but the last copies, and arrive for a stage that they filled."""
    async_copy.wait_group(NUM_UNDER_WAY)
    fence_async_shared()
    mbarrier.arrive(full.index(stage), count=1)


@gluon.jit
def clear_rows(tile, num_rows):
    """Zero the rows of a tile from ``num_rows`` on: 0 times what memory holds there may be NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, LAYOUT)), 1)
    for column in gl.static_range(tile.shape[1] // 64):
        columns = tile.slice(column * 64, 64, dim=1)
        values = columns.load(LAYOUT)
        columns.store(gl.where(row < num_rows, values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def scalar(cell):
    """The one int32 in shared memory."""
    return gl.max(cell.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def clear_padding(out_ptr, lse_ptr, first_row, num_rows, LATENT_DIM: gl.constexpr):
    """Rows of tokens past the last request's."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    offs_l = gl.arange(0, LATENT_DIM, layout=gl.SliceLayout(0, LAYOUT))
    zeros = gl.zeros([8, LATENT_DIM], out_ptr.dtype.element_ty, LAYOUT)
    nothing = gl.full([8], -float("inf"), gl.float32, OF_ROW)
    for first in range(first_row + gl.program_id(0) * 8, num_rows, gl.num_programs(0) * 8):
        row = first + gl.arange(0, 8, layout=OF_ROW).to(gl.int64)
        offs = gl.expand_dims(row * LATENT_DIM, 1) + gl.expand_dims(offs_l, 0)
        gl.store(out_ptr + offs, zeros, mask=gl.expand_dims(row < num_rows, 1))
        gl.store(lse_ptr + row, nothing, mask=row < num_rows)


@gluon.jit
def store_half(acc, out_ptr, first_row, num_rows, columns, STRIDE: gl.constexpr):
    """Rows of half of the latent as they lie in registers."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc.type.layout))
    offs_l = columns + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    offs = gl.expand_dims(row * STRIDE, 1) + gl.expand_dims(offs_l, 0)
    values = acc.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + first_row * STRIDE + offs, values, mask=gl.expand_dims(row < num_rows, 1))
