"""What Gluon's decode kernels share: their part of the schedule, and rows that are not there."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kvkern.kernels.hopper.compat import copy_values, load_tile, view_tile

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
# of four warps that copy rows: the 16 of a warp, two lanes a row; and all keys in each warp
ROWS_OF_WARP: gl.constexpr = gl.constexpr(
    gl.SliceLayout(1, gl.BlockedLayout([1, 1], [16, 2], [4, 1], [0, 1]))
)
KEYS_OF_BLOCK: gl.constexpr = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))


def box_keys(page_size: int) -> int:
    """Keys that the TMA fetches at once: of one page, and whole rows of a swizzle; 0: it cannot."""
    if page_size % 64 == 0:
        return 64
    return page_size if page_size in (16, 32) else 0


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The next of a ring, and the phase of its barriers."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), phase ^ wraps.to(gl.int32)


@gluon.jit
def pin(x):
    """``x``, computed here: LLVM would put it off, and hold what it is made of in registers."""
    return gl.inline_asm_elementwise(
        "// pinned", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def fence_products(count):
    """A way out, never taken: ptxas begins no product above it that it lacks the registers for."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $1, 2147483647; @p exit; mov.u32 $0, $1; }",
        "=r,r",
        [count],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def part_bounds(bounds_ptr, GANG: gl.constexpr):
    """First request and block of a part, and those of the next."""
    bound = bounds_ptr + gl.program_id(0) // GANG * 2
    return gl.load(bound), gl.load(bound + 1), gl.load(bound + 2), gl.load(bound + 3)


@gluon.jit
def end_request(part):
    """One past the last request that a part may have blocks of."""
    return part[2] + gl.where(part[3] > 0, 1, 0)


@gluon.jit
def load_lengths(offsets_ptr, cache_lengths_ptr, request, end):
    """A request's first token, the next request's, and its cached length; 0 from ``end`` on."""
    is_there = request < end
    start = gl.load(offsets_ptr + request, mask=is_there, other=0)
    next_start = gl.load(offsets_ptr + request + 1, mask=is_there, other=0)
    return start, next_start, gl.load(cache_lengths_ptr + request, mask=is_there, other=0)


@gluon.jit
def share_of(lengths, request, part):
    """Its tokens, cached length, and the blocks of it that this part takes."""
    first_request, first_block, last_request, last_block = part
    start, next_start, cached = lengths
    num_tokens = next_start - start
    num_blocks = gl.cdiv(cached + num_tokens, BLOCK_N)
    begin = gl.where(request == first_request, first_block, 0)
    stop = gl.where(request == last_request, gl.minimum(last_block, num_blocks), num_blocks)
    return start, num_tokens, cached, gl.minimum(begin, stop), stop


@gluon.jit
def request_share(offsets_ptr, cache_lengths_ptr, request, part):
    start, next_start = gl.load(offsets_ptr + request), gl.load(offsets_ptr + request + 1)
    return share_of((start, next_start, gl.load(cache_lengths_ptr + request)), request, part)


@gluon.jit
def table_row(page_table_ptr, request, max_pages):
    """Where a request's page ids are."""
    return page_table_ptr + request.to(gl.int64) * max_pages


@gluon.jit
def token_of(row, num_heads):
    """row // num_heads, for fewer than 2^20 rows: as floats, as integers take 20 instructions."""
    return ((row.to(gl.float32) + 0.5) * (1.0 / num_heads.to(gl.float32))).to(gl.int32)


@gluon.jit
def piece_of(part, request, GANG: gl.constexpr):
    """Whether a part's blocks of a request are not all of it, and then the slot for its piece."""
    starts_inside = (request == part[0]) & (part[1] > 0)
    is_piece = starts_inside | ((request == part[2]) & (part[3] > 0))
    return is_piece, 2 * (gl.program_id(0) // GANG) + (1 - starts_inside.to(gl.int32))


@gluon.jit
def visible_keys(
    table_ptr, row, mask_row, num_heads, cached, seq_len, max_pages, PAGE_SIZE: gl.constexpr
):
    """How many keys each row sees, and the fewest of a row that is there; padding sees none."""
    position = cached + token_of(row, num_heads)
    num_keys = gl.where(mask_row, seq_len, 0)
    own_page = find_pages(table_ptr, position, num_keys, max_pages, PAGE_SIZE)
    num_visible = gl.where(own_page >= 0, position + 1, 0)
    return num_visible, gl.min(gl.where(mask_row, num_visible, seq_len), 0)


@gluon.jit
def find_pages(table_ptr, key, num_keys, max_pages, PAGE_SIZE: gl.constexpr):
    """The page of each key; -1, which is outside the cache, from ``num_keys`` on."""
    column = key // PAGE_SIZE
    is_there = (key < num_keys) & (column < max_pages)
    return gl.load(table_ptr + column, mask=is_there, other=-1)


@gluon.jit
def find_box_pages(
    table_ptr, block, num_keys, max_pages, lanes, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr
):
    """The page of each of a block's boxes, a lane each; -1 in lanes that have none."""
    num_keys = gl.where(lanes < BLOCK_N // BOX, num_keys, 0)
    return find_pages(table_ptr, block * BLOCK_N + lanes * BOX, num_keys, max_pages, PAGE_SIZE)


@gluon.jit
def slots_of(pages, key, PAGE_SIZE: gl.constexpr):
    """Where keys on these pages are. On a page of -1 it is negative: there the TMA finds zeros."""
    return pages * PAGE_SIZE + key % PAGE_SIZE


@gluon.jit
def slot_of_box(first_slot, lanes, box):
    return gl.max(gl.where(lanes == box, first_slot, -2147483648), 0)


@gluon.jit
def fetch_block(wide_desc, narrow_desc, ring, stage, first_slot, lanes, column, barrier, zero):
    """Columns of a block from ``column`` on, in boxes as wide as the tile or of 64. One warp.

    Several boxes a block are fetched in a loop, which ``zero`` hides the length of: unrolled, they
    would take more registers than there are. 64 columns of a tile lie together in shared memory.
    """
    BOX: gl.constexpr = narrow_desc.block_type.shape[0]
    NUM_BOXES: gl.constexpr = BLOCK_N // BOX
    NUM_CHUNKS: gl.constexpr = ring.type.shape[2] // 64
    if NUM_BOXES == 1:
        slot = slot_of_box(first_slot, lanes, 0)
        load_tile(wide_desc, [slot, column], barrier, ring.index(stage))
    else:
        NUM_TILES: gl.constexpr = ring.type.shape[0] * NUM_CHUNKS * NUM_BOXES
        tiles = view_tile(ring, ring.dtype, [NUM_TILES, BOX, 64], narrow_desc.layout)
        for chunk in range(zero, NUM_CHUNKS):
            for box in gl.static_range(NUM_BOXES):
                slot = slot_of_box(first_slot, lanes, box)
                tile = tiles.index((stage * NUM_CHUNKS + chunk) * NUM_BOXES + box)
                load_tile(narrow_desc, [slot, column + chunk * 64], barrier, tile)


@gluon.jit
def hole_word(is_hole, index, FIRST: gl.constexpr):
    """A bit for each of 32 boxes of a block that lies on a page of -1.

    It may be set for boxes past a request's end too: no row sees those.
    """
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
def find_row_pages(table_ptr, block, num_keys, max_pages, PAGE_SIZE: gl.constexpr):
    """Pages of a block's keys: of the rows that a warp copies, and of all in each warp."""
    first_key = block * BLOCK_N
    key = first_key + gl.arange(0, BLOCK_N, layout=ROWS_OF_WARP)
    any_key = first_key + gl.arange(0, BLOCK_N, layout=KEYS_OF_BLOCK)
    return (
        find_pages(table_ptr, key, num_keys, max_pages, PAGE_SIZE),
        find_pages(table_ptr, any_key, num_keys, max_pages, PAGE_SIZE),
    )


@gluon.jit
def put_holes(holes, stage, pages):
    """Both words of a block's holes, a bit a key."""
    offs_n = gl.arange(0, BLOCK_N, layout=KEYS_OF_BLOCK)
    put(holes.index(stage * 2), hole_word(pages < 0, offs_n, 0))
    put(holes.index(stage * 2 + 1), hole_word(pages < 0, offs_n, 32))


@gluon.jit
def row_slots(pages, block, PAGE_SIZE: gl.constexpr):
    """Where the rows are that a warp copies."""
    key = block * BLOCK_N + gl.arange(0, BLOCK_N, layout=ROWS_OF_WARP)
    return slots_of(pages, key, PAGE_SIZE)


@gluon.jit
def copy_rows(tile, rows_ptr, slots, column, NUM_COLUMNS: gl.constexpr, ROW_DIM: gl.constexpr):
    """Start to copy columns of a block's rows; zeros where a slot is negative. Four warps.

    Each row starts at a multiple of 16 bytes, which is what a thread copies.
    """
    THREADS: gl.constexpr = min(tile.shape[1] // 8, 32)  # a row
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [THREADS // 2, 8], [32 // THREADS, THREADS], [4, 1], [1, 0]
    )
    slots = gl.expand_dims(gl.convert_layout(slots, gl.SliceLayout(1, LAYOUT)), 1)
    offs = gl.expand_dims(gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
    ptrs = rows_ptr + slots.to(gl.int64) * ROW_DIM + (column + offs)
    copy_values(tile, ptrs, mask=(slots >= 0) & (offs < NUM_COLUMNS))


@gluon.jit
def query_offsets(row, start, num_heads, stride_q_token, stride_q_head):
    """Where a request's rows (token-major) are; its first token is ``start``."""
    token = token_of(row, num_heads)
    head = row - token * num_heads
    return (start + token).to(gl.int64) * stride_q_token + head.to(gl.int64) * stride_q_head


@gluon.jit
def prefetch(address, num_bytes):
    """Ask the L2 for memory, by an instruction of each thread; 0 bytes: for nothing.

    Both are multiples of 16.
    """
    gl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.u32 p, $2, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }""",
        "=r,l,r",
        [address, num_bytes],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch_step(
    bounds_ptr, offsets_ptr, cache_lengths_ptr, page_table_ptr, num_requests, max_pages,
    GANG: gl.constexpr,
):  # fmt: skip
    """Ask the L2 for all that says where the first keys are, at once: each is found by the last.

    The row of the page table is a guess: of requests that are alike, as many parts or whole
    requests as fit go to each.
    """
    lane = gl.arange(
        0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    )
    part = gl.program_id(0) // GANG
    num_parts = gl.num_programs(0) // GANG
    index = gl.minimum(lane * 32, num_requests - 1)
    parts_each = gl.maximum(token_of(num_parts, gl.maximum(num_requests, 1)), 1)
    request = token_of(part, parts_each) * gl.cdiv(num_requests, num_parts)
    row = table_row(page_table_ptr, gl.minimum(request, num_requests - 1), max_pages)
    is_there = num_requests > 0
    _prefetch_line(bounds_ptr + (2 * part + lane * 0), is_there)
    _prefetch_line(offsets_ptr + index, is_there)
    _prefetch_line(cache_lengths_ptr + index, is_there)
    _prefetch_line(row + gl.minimum(lane * 32, max_pages - 1), is_there & (max_pages > 0))


@gluon.jit
def _prefetch_line(ptr, is_wanted):
    gl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }""",
        "=r,l,r",
        [ptr.to(gl.int64), is_wanted.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def prefetch_query(
    q_ptr,
    lengths,
    num_heads,
    stride_q_token,
    stride_q_head,
    GANG: gl.constexpr,
    ROWS: gl.constexpr,
    Q_DIM: gl.constexpr,
):
    """Ask the L2 for a request's first tile of query rows, where they are one run of memory."""
    NUM_THREADS: gl.constexpr = 32 * gl.num_warps()
    thread = gl.arange(0, NUM_THREADS, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    start, next_start, _cached = lengths
    tile_row = gl.program_id(0) % GANG * ROWS
    num_rows = gl.minimum((next_start - start) * num_heads - tile_row, ROWS)
    is_run = (stride_q_head == Q_DIM) & (stride_q_token == num_heads * Q_DIM)
    is_wanted = is_run & (num_rows > 0) & (thread == 0)
    first_row = start.to(gl.int64) * num_heads + tile_row
    address = (q_ptr + first_row * Q_DIM).to(gl.int64) & -16
    ROW_BYTES: gl.constexpr = Q_DIM * q_ptr.dtype.element_ty.primitive_bitwidth // 8
    prefetch(gl.where(is_wanted, address, 0), gl.where(is_wanted, num_rows * ROW_BYTES, 0))


@gluon.jit
def prefetch_rows(rows_ptr, slots, member, GANG: gl.constexpr, NUM_BYTES, ROW_DIM: gl.constexpr):
    """Ask the L2 for this member's share of a block's rows."""
    row = gl.expand_dims(gl.arange(0, BLOCK_N, layout=ROWS_OF_WARP), 1)
    slots = gl.expand_dims(slots, 1)
    is_first = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(0, slots.type.layout)) == 0, 0)
    is_mine = (slots >= 0) & (row % GANG == member) & is_first  # both lanes of a row hold it
    address = (rows_ptr + slots.to(gl.int64) * ROW_DIM).to(gl.int64)
    prefetch(gl.where(is_mine, address, 0), gl.where(is_mine, NUM_BYTES, 0))


@gluon.jit
def clear_rows(tile, num_rows):
    """Zero the rows of a tile from ``num_rows`` on: 0 times what memory holds there may be NaN.

    128 bytes of a row at a time, in a loop whose length is hidden: seldom run, it is to be short.
    """
    NUM_TILES: gl.constexpr = tile.shape[1] * tile.dtype.primitive_bitwidth // 1024
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    row = gl.expand_dims(gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, LAYOUT)), 1)
    tiles = view_tile(tile, gl.int16, [NUM_TILES, tile.shape[0], 64], WORDS)
    for index in range(num_rows >> 30, NUM_TILES):
        words = tiles.index(index).load(LAYOUT)
        tiles.index(index).store(gl.where(row < num_rows, words, gl.zeros_like(words)))
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
    """Rows of half of the latent as they lie in registers; ``num_rows`` None: a piece has all."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, acc.type.layout))
    offs_l = columns + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    # of 64 bits: what a thread's addresses differ by is then part of its instructions
    offs_row = (first_row + row.to(gl.int64)) * STRIDE
    ptrs = out_ptr + (gl.expand_dims(offs_row, 1) + gl.expand_dims(offs_l, 0))
    mask = None if num_rows is None else gl.expand_dims(row < num_rows, 1)
    gl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)
