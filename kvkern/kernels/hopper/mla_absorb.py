"""mla_absorb: out[t, h] = x[t, h] @ (w[h] * scale[h]); many tokens, by wgmma.

A program keeps its part of a head's matrix in shared memory, in 16 bits, and takes tile after tile
of tokens past it: all that then is read and written once is x and out. One warp fetches steps of 64
of K by TMA into a ring; two warpgroups multiply, each 64 of a tile's 128 tokens, and store by TMA.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvkern.kernels.config import KernelConfig, config_of_call, spills
from kvkern.kernels.device import EARLY_START, gpu_of
from kvkern.kernels.hopper.compat import (
    as_matrix,
    load_tile,
    matrix_descriptor,
    store_tile,
)
from kvkern.kernels.hopper.paging import make_barriers, pin
from kvkern.kernels.launch import Descriptors, Launch, launch

BLOCK_T: gl.constexpr = gl.constexpr(128)
BLOCK_K: gl.constexpr = gl.constexpr(64)
_WAVE: gl.constexpr = gl.constexpr(64)  # rows that wgmma takes
_GROUP: gl.constexpr = gl.constexpr(2)  # steps of K that share a scale
# sizes of a layer are specialised on; a step's are not
_OF_A_STEP = ["num_tokens", "num_shares"]


@gluon.jit
def _place(num_tokens, num_heads, num_shares, PARTS: gl.constexpr):
    """Head, part of its columns, first tile of tokens; and how many tiles, num_shares apart."""
    program = gl.program_id(0)
    share = program // (PARTS * num_heads)
    head = program // PARTS % num_heads
    num_tiles = gl.cdiv(gl.cdiv(num_tokens, BLOCK_T) - share, num_shares)
    return head, program % PARTS, share, num_tiles


@gluon.jit
def _fetch(
    x, w, full, empty, w_full, x_desc, w_desc, num_tokens, num_heads, num_shares,
    PARTS: gl.constexpr, SPANS: gl.constexpr, ALONG_K: gl.constexpr,
):  # fmt: skip
    """The warp that fills the ring; before it has to wait it has asked for all of w."""
    STAGES: gl.constexpr = x.shape[0]
    PIECES: gl.constexpr = w.shape[0]
    STEPS: gl.constexpr = PIECES // SPANS
    head, part, first_tile, num_tiles = _place(num_tokens, num_heads, num_shares, PARTS)
    num_steps = num_tiles * STEPS
    num_free = gl.minimum(num_steps, STAGES)
    for step in range(num_free):
        _fetch_x(x, full, x_desc, head, first_tile, num_shares, step, STEPS)
        if w_desc is not None:
            if step < PIECES:
                _fetch_w(w, w_full, w_desc, head, part, step, SPANS, ALONG_K)
    if w_desc is not None:
        for piece in range(num_free, PIECES):
            _fetch_w(w, w_full, w_desc, head, part, piece, SPANS, ALONG_K)
    for step in range(num_free, num_steps):
        mbarrier.wait(empty.index(step % STAGES), (step // STAGES & 1) ^ 1)
        _fetch_x(x, full, x_desc, head, first_tile, num_shares, step, STEPS)


@gluon.jit
def _fetch_x(x, full, x_desc, head, first_tile, num_shares, step, STEPS: gl.constexpr):
    stage = step % x.shape[0]
    tile = first_tile + step // STEPS * num_shares
    bar = full.index(stage)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    load_tile(x_desc, [head, tile * BLOCK_T, step % STEPS * BLOCK_K], bar, x.index(stage))


@gluon.jit
def _fetch_w(
    w, w_full, w_desc, head, part, piece, SPANS: gl.constexpr, ALONG_K: gl.constexpr
):  # fmt: skip
    row, offset = _corner(w, part, piece, SPANS, ALONG_K)
    bar = w_full.index(piece)
    mbarrier.expect(bar, w_desc.block_type.nbytes)
    load_tile(w_desc, [head, row, offset], bar, w.index(piece))


@gluon.jit
def _corner(w, part, piece, SPANS: gl.constexpr, ALONG_K: gl.constexpr):
    """Where a piece of a part's columns begins, as w lies in memory."""
    STEPS: gl.constexpr = w.shape[0] // SPANS
    span = part * SPANS + piece // STEPS
    k = piece % STEPS * BLOCK_K
    if ALONG_K:
        return span * w.shape[2], k
    else:
        return k, span * w.shape[3]


@gluon.jit
def _decode_weights(
    w, w_full, w_ptr, head, part, stride_w_head, stride_w_row, DEPTH: gl.constexpr,
    NUM_COLUMNS: gl.constexpr, SPANS: gl.constexpr, ALONG_K: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Every second piece of w from e4m3 to 16 bits, exactly; two are on their way at once."""
    PIECES: gl.constexpr = w.shape[0]
    w_ptr += head.to(gl.int64) * stride_w_head
    for first in gl.static_range(WHICH, PIECES, 4):
        codes = _load_codes(w, w_ptr, part, stride_w_row, DEPTH, NUM_COLUMNS, SPANS, ALONG_K, first)
        if first + 2 < PIECES:
            more = _load_codes(
                w, w_ptr, part, stride_w_row, DEPTH, NUM_COLUMNS, SPANS, ALONG_K, first + 2
            )
        _put_weights(codes, w, w_full, first)
        if first + 2 < PIECES:
            _put_weights(more, w, w_full, first + 2)


@gluon.jit
def _load_codes(
    w, w_ptr, part, stride_w_row, DEPTH: gl.constexpr, NUM_COLUMNS: gl.constexpr,
    SPANS: gl.constexpr, ALONG_K: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    """[64 of K, columns], or the transposed where w is contiguous along K."""
    ROWS: gl.constexpr = w.shape[2]
    COLUMNS: gl.constexpr = w.shape[3]
    LANES: gl.constexpr = COLUMNS // 16  # each has 16 bytes of a row
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [32 // LANES, LANES], [4, 1], [1, 0])
    first_row, first_offset = _corner(w, part, PIECE, SPANS, ALONG_K)
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    offs = first_offset + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    ptrs = w_ptr + (gl.expand_dims(row.to(gl.int64) * stride_w_row, 1) + gl.expand_dims(offs, 0))
    BLOCK_N: gl.constexpr = ROWS if ALONG_K else COLUMNS
    if DEPTH % BLOCK_K == 0 and NUM_COLUMNS % (SPANS * BLOCK_N) == 0:
        return gl.load(ptrs)
    NUM_ROWS: gl.constexpr = NUM_COLUMNS if ALONG_K else DEPTH
    ROW_LEN: gl.constexpr = DEPTH if ALONG_K else NUM_COLUMNS
    mask = gl.expand_dims(row < NUM_ROWS, 1) & gl.expand_dims(offs < ROW_LEN, 0)
    return gl.load(ptrs, mask=mask, other=0)


@gluon.jit
def _put_weights(codes, w, w_full, PIECE: gl.constexpr):
    half = codes.to(gl.float8e4nv, bitcast=True).to(gl.float16)
    as_matrix(w.index(PIECE)).store(half.to(gl.float32).to(w.dtype))
    fence_async_shared()
    mbarrier.arrive(w_full.index(PIECE), count=1)


@gluon.jit
def _start_step(
    acc, x, w, full, w_full, done, SPAN: gl.constexpr, STEP: gl.constexpr, SPANS: gl.constexpr,
    FIRST: gl.constexpr, ALONG_K: gl.constexpr, IS_FIRST: gl.constexpr,
):  # fmt: skip
    """The product of 64 tokens' step of K, or acc and that; not waited for."""
    STAGES: gl.constexpr = x.shape[0]
    stage = (done + STEP) % STAGES
    STEPS: gl.constexpr = w.shape[0] // SPANS
    piece = SPAN * STEPS + STEP + (done >> 30)  # an address that the compiler does not know
    if SPAN == 0:
        mbarrier.wait(full.index(stage), (done + STEP) // STAGES & 1)
    mbarrier.wait(w_full.index(piece), 0)
    rows = as_matrix(x.index(stage)).slice(FIRST, _WAVE, dim=0)
    columns = as_matrix(w.index(piece))
    if ALONG_K:
        columns = columns.permute((1, 0))
    return warpgroup_mma(rows, columns, acc, use_acc=not IS_FIRST, is_async=True)


@gluon.jit
def _let_go(empty, step):
    mbarrier.arrive(empty.index(step % empty.shape[0]), count=1)


@gluon.jit
def _start_span(
    acc, x, w, full, w_full, done, SPAN: gl.constexpr, SPANS: gl.constexpr, FIRST: gl.constexpr,
    ALONG_K: gl.constexpr,
):  # fmt: skip
    """The product of all of K, for as many columns as acc has, which is 0; not waited for."""
    for step in gl.static_range(w.shape[0] // SPANS):
        acc = _start_step(
            acc, x, w, full, w_full, done, SPAN, step, SPANS, FIRST, ALONG_K, step == 0
        )
    return acc


@gluon.jit
def _sum(
    acc, x, w, full, empty, w_full, done, FIRST: gl.constexpr, ALONG_K: gl.constexpr
):  # fmt: skip
    """The same, of a program's only columns: a step is let go when the next is under way."""
    STEPS: gl.constexpr = w.shape[0]
    for step in gl.static_range(STEPS):
        acc = _start_step(acc, x, w, full, w_full, done, 0, step, 1, FIRST, ALONG_K, step == 0)
        if step > 0:
            acc = warpgroup_mma_wait(1, deps=(acc,))
            _let_go(empty, done + step - 1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    _let_go(empty, done + STEPS - 1)
    return acc


@gluon.jit
def _sum_groups(
    zero, x, w, full, empty, w_full, done, scale_ptr, stride_scale_depth, stride_scale_column,
    column, SPAN: gl.constexpr, SPANS: gl.constexpr, FIRST: gl.constexpr, ALONG_K: gl.constexpr,
    CELL_N: gl.constexpr, NUM_COLUMNS: gl.constexpr,
):  # fmt: skip
    """128 of K at a time, each times its scales."""
    STEPS: gl.constexpr = w.shape[0] // SPANS
    acc = zero
    for first in gl.static_range(0, STEPS, _GROUP):
        scale = _load_scale(
            acc, scale_ptr + first // _GROUP * stride_scale_depth, stride_scale_column, column,
            CELL_N, NUM_COLUMNS,
        )  # fmt: skip
        part = zero
        for step in gl.static_range(first, first + _GROUP):
            if step < STEPS:
                part = _start_step(
                    part, x, w, full, w_full, done, SPAN, step, SPANS, FIRST, ALONG_K,
                    step == first,
                )  # fmt: skip
        part = warpgroup_mma_wait(0, deps=(part,))
        for step in gl.static_range(first, first + _GROUP):
            if step < STEPS and SPAN == SPANS - 1:
                _let_go(empty, done + step)
        acc = pin(acc + part * scale)
    return acc


@gluon.jit
def _load_scale(
    acc, scale_ptr, stride_scale_column, column, CELL_N: gl.constexpr, NUM_COLUMNS: gl.constexpr
):  # fmt: skip
    """One for each column of acc, or one for all."""
    if CELL_N == 1:
        offs = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
        offs = gl.minimum(offs, NUM_COLUMNS - 1).to(gl.int64)
        return gl.expand_dims(gl.load(scale_ptr + offs * stride_scale_column), 0)
    elif CELL_N > 0:  # a part's last products may lie past all columns
        cell = gl.minimum(column, NUM_COLUMNS - 1) // CELL_N
        return gl.load(scale_ptr + cell.to(gl.int64) * stride_scale_column)
    else:
        return gl.load(scale_ptr)


@gluon.jit
def _store(acc, staged, out_desc, head, token, column, BOX: gl.constexpr, BOXES: gl.constexpr):
    """Round and store by boxes; each of a sum's boxes is staged in a place of its own."""
    COLUMNS: gl.constexpr = acc.shape[1]
    BOX_N: gl.constexpr = staged.shape[3]
    if COLUMNS > BOX_N:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = acc.reshape([_WAVE, 2, HALF]).permute([0, 2, 1]).split()
        _store(left, staged, out_desc, head, token, column, BOX, BOXES)
        _store(right, staged, out_desc, head, token, column + HALF, BOX + HALF // BOX_N, BOXES)
    else:
        tma.store_wait(BOXES - 1)  # what was staged here last has been read
        box = staged.index(BOX)
        as_matrix(box).store(acc.to(staged.dtype))
        fence_async_shared()
        store_tile(out_desc, [head, token, column], box)


@gluon.jit
def _multiply(
    which: gl.constexpr, x, w, staged, full, empty, w_full, w_ptr, scale_ptr, out_desc,
    num_tokens, num_heads, num_shares, stride_w_head, stride_w_row, stride_scale_head,
    stride_scale_depth, stride_scale_column, DEPTH: gl.constexpr, NUM_COLUMNS: gl.constexpr,
    CELL_K: gl.constexpr, CELL_N: gl.constexpr, PARTS: gl.constexpr, SPANS: gl.constexpr,
    ALONG_K: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 of each tile's tokens."""
    BLOCK_N: gl.constexpr = w.shape[2] if ALONG_K else w.shape[3]
    STEPS: gl.constexpr = w.shape[0] // SPANS
    FIRST: gl.constexpr = which * _WAVE
    BOXES: gl.constexpr = staged.shape[0] // 2
    HAS_GROUPS: gl.constexpr = CELL_K > 0 and STEPS > _GROUP
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zero = gl.zeros([_WAVE, BLOCK_N], gl.float32, LAYOUT)
    head, part, tile, num_tiles = _place(num_tokens, num_heads, num_shares, PARTS)
    if w_ptr is not None:
        _decode_weights(
            w, w_full, w_ptr, head, part, stride_w_head, stride_w_row, DEPTH, NUM_COLUMNS, SPANS,
            ALONG_K, which,
        )  # fmt: skip
        scale_ptr += head.to(gl.int64) * stride_scale_head
    done = 0  # steps of the ring
    for _ in range(num_tiles):
        for span in gl.static_range(SPANS):
            column = (part * SPANS + span) * BLOCK_N
            if HAS_GROUPS:
                acc = _sum_groups(
                    zero, x, w, full, empty, w_full, done, scale_ptr, stride_scale_depth,
                    stride_scale_column, column, span, SPANS, FIRST, ALONG_K, CELL_N, NUM_COLUMNS,
                )  # fmt: skip
            elif SPANS == 1:
                acc = _sum(zero, x, w, full, empty, w_full, done, FIRST, ALONG_K)
            else:
                if span == 0:
                    started = _start_span(zero, x, w, full, w_full, done, 0, SPANS, FIRST, ALONG_K)
                acc = warpgroup_mma_wait(0, deps=(started,))
                if span + 1 < SPANS:  # goes on while this is stored
                    started = _start_span(
                        zero, x, w, full, w_full, done, span + 1, SPANS, FIRST, ALONG_K
                    )
                else:
                    for step in gl.static_range(STEPS):
                        _let_go(empty, done + step)
            if w_ptr is not None and not HAS_GROUPS:
                acc *= _load_scale(acc, scale_ptr, stride_scale_column, column, CELL_N, NUM_COLUMNS)
            token = tile * BLOCK_T + FIRST
            _store(acc, staged, out_desc, head, token, column, which * BOXES, BOXES)
        done += STEPS
        tile += num_shares
    gdc_launch_dependents()
    tma.store_wait(0)


@gluon.jit(do_not_specialize=_OF_A_STEP)
def _mla_absorb_kernel(
    x_desc,  # [H, T, K] in boxes [1, 128, 64]
    w_desc,  # [H, K, N] in boxes [1, 64, BLOCK_N], or [H, N, K] in [1, BLOCK_N, 64]; or None
    w_ptr,  # the same as codes of e4m3 in uint8, or None
    scale_ptr,  # fp32 [H, cells of K, cells of N], or None
    out_desc,  # [H, T, N] in boxes [1, 64, 64]
    num_tokens,
    num_shares,  # programs that share the tokens of a head's columns
    num_heads,
    stride_w_head,
    stride_w_row,
    stride_scale_head,
    stride_scale_depth,
    stride_scale_column,
    DEPTH: gl.constexpr,
    NUM_COLUMNS: gl.constexpr,
    CELL_K: gl.constexpr,  # 128 rows of w that share a scale, 0: all
    CELL_N: gl.constexpr,  # its columns, 1 or 128, 0: all
    BLOCK_N: gl.constexpr,  # columns of a product
    SPANS: gl.constexpr,  # products' columns that a program has
    STAGES: gl.constexpr,
    ALONG_K: gl.constexpr,  # w is contiguous along K
):
    PARTS: gl.constexpr = (NUM_COLUMNS + SPANS * BLOCK_N - 1) // (SPANS * BLOCK_N)
    PIECES: gl.constexpr = SPANS * ((DEPTH + BLOCK_K - 1) // BLOCK_K)
    W_ROWS: gl.constexpr = BLOCK_N if ALONG_K else BLOCK_K
    W_COLUMNS: gl.constexpr = BLOCK_K if ALONG_K else BLOCK_N
    DTYPE: gl.constexpr = x_desc.dtype
    W_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, W_ROWS, W_COLUMNS], DTYPE)
    BOX_N: gl.constexpr = out_desc.block_type.shape[2]
    BOXES: gl.constexpr = BLOCK_N // BOX_N
    x = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 1, BLOCK_T, BLOCK_K], x_desc.layout)
    w = gl.allocate_shared_memory(DTYPE, [PIECES, 1, W_ROWS, W_COLUMNS], W_LAYOUT)
    staged = gl.allocate_shared_memory(
        out_desc.dtype, [2 * BOXES, 1, _WAVE, BOX_N], out_desc.layout
    )
    full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    w_full = make_barriers(PIECES, 1)
    fence_async_shared()
    gdc_wait()
    gl.warp_specialize(
        [
            (_multiply, (
                0, x, w, staged, full, empty, w_full, w_ptr, scale_ptr, out_desc, num_tokens,
                num_heads, num_shares, stride_w_head, stride_w_row, stride_scale_head,
                stride_scale_depth, stride_scale_column, DEPTH, NUM_COLUMNS, CELL_K, CELL_N,
                PARTS, SPANS, ALONG_K,
            )),
            (_multiply, (
                1, x, w, staged, full, empty, w_full, w_ptr, scale_ptr, out_desc, num_tokens,
                num_heads, num_shares, stride_w_head, stride_w_row, stride_scale_head,
                stride_scale_depth, stride_scale_column, DEPTH, NUM_COLUMNS, CELL_K, CELL_N,
                PARTS, SPANS, ALONG_K,
            )),
            (_fetch, (
                x, w, full, empty, w_full, x_desc, w_desc, num_tokens, num_heads, num_shares,
                PARTS, SPANS, ALONG_K,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


class Tiles(NamedTuple):
    """What a program keeps."""

    columns: int  # of a product
    spans: int  # of as many columns
    stages: int


_SHARED_BYTES = 232_448 - 3072  # what is left over is for barriers, and what warps are passed


def choose_tiles(
    num_tokens: int, num_heads: int, depth: int, num_columns: int, num_sms: int
) -> Tiles:
    """The most columns of a head that have room and leave few SMs idle.

    A part is taken if three quarters of the SMs have one, or if the programs that share one take
    eight tiles of tokens each: with fewer, they read w again for little. Of 16 heads' 4096 tokens
    (K = 128, N = 512) parts of 256 columns take 25.5 us, of 512 26.6; of 512 tokens parts of 64
    columns take 9.6, of 256 10.3 (an H200).
    """
    steps, num_tiles = -(-depth // 64), -(-num_tokens // 128)
    for columns, spans in ((128, 4), (128, 2), (128, 1), (64, 1)):
        width = columns * spans
        num_programs = num_heads * -(-num_columns // width)
        is_busy = num_programs >= 0.75 * num_sms or num_tiles >= 8 * (num_sms // num_programs)
        has_room = width * steps <= 1024 and (spans == 1 or steps <= 4)
        if has_room and is_busy and width < 2 * num_columns:
            break
    kept = 128 * width * steps + 256 * columns  # of w, and what is staged of out
    return Tiles(columns, spans, min((_SHARED_BYTES - kept) // (128 * 64 * 2), 8))


def mla_absorb(
    x: Tensor,
    w: Tensor,
    scale: Tensor | None,
    cell: tuple[int, int],
    out: Tensor,
) -> Callable[[Sequence[int | None]], None] | None:
    """One launch. ``kvkern.mla_absorb`` has checked the arguments; ``out`` is not empty.

    Returns how to repeat it with tensors that differ in nothing but addresses.
    """
    num_sms = gpu_of(out.device).num_sms
    grid, arguments, options = _call(x, w, scale, cell, out, num_sms)
    again = launch(_mla_absorb_kernel, grid, arguments, options, out.device, num_varying=5)
    return again and _Again(again, arguments)


class _Again:
    """Launches the same variant for other addresses."""

    def __init__(self, launch: Launch, arguments: dict[str, Any]) -> None:
        self._launch = launch
        numbers = {0: "x_desc", 1: "w_desc", 4: "out_desc"}
        self._descriptors = Descriptors(launch, {n: arguments[numbers[n]] for n in numbers})
        self._is_fp8 = arguments["w_desc"] is None

    def __call__(self, addresses: Sequence[int | None]) -> None:
        x, w, scale, out = addresses
        at = self._descriptors.at
        of_w = (None, w) if self._is_fp8 else (*at(1, w), None)
        self._launch((*at(0, x), *of_w, scale, *at(4, out)))


def _call(
    x: Tensor,
    w: Tensor,
    scale: Tensor | None,
    cell: tuple[int, int],
    out: Tensor,
    num_sms: int,
) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
    num_tokens, num_heads, depth = x.shape
    num_columns = w.shape[2]
    tiles = choose_tiles(num_tokens, num_heads, depth, num_columns, num_sms)
    along_k = w.stride(1) == 1 and depth > 1
    rows = w.mT if along_k else w
    box = (tiles.columns, 64) if along_k else (64, tiles.columns)
    parts = -(-num_columns // (tiles.columns * tiles.spans))
    num_shares = max(min(-(-num_tokens // 128), num_sms // (num_heads * parts)), 1)
    of_scale = (0, 0, 0) if scale is None else scale.stride()
    arguments = {
        "x_desc": matrix_descriptor(x.transpose(0, 1), (128, 64)),
        "w_desc": matrix_descriptor(rows, box) if scale is None else None,
        "w_ptr": None if scale is None else rows.view(torch.uint8),
        "scale_ptr": scale,
        "out_desc": matrix_descriptor(out.transpose(0, 1), (64, 64)),
        "num_tokens": num_tokens,
        "num_shares": num_shares,
        "num_heads": num_heads,
        "stride_w_head": rows.stride(0),
        "stride_w_row": rows.stride(1),
        "stride_scale_head": of_scale[0],
        "stride_scale_depth": of_scale[1],
        "stride_scale_column": of_scale[2],
        "DEPTH": depth,
        "NUM_COLUMNS": num_columns,
        "CELL_K": cell[0],
        "CELL_N": cell[1],
        "BLOCK_N": tiles.columns,
        "SPANS": tiles.spans,
        "STAGES": tiles.stages,
        "ALONG_K": along_k,
    }
    options = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True, **EARLY_START}
    return (num_heads * parts * num_shares,), arguments, options


_BUDGET = spills("32 scales of columns beside two sums, once in 128 of K", 512)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Both sides of a layer, many heads and few, dtypes, each way to sum and to scale."""
    if capability != 90:
        return
    bf16, fp16 = torch.bfloat16, torch.float16
    for label, num_heads, dtype, cell, is_output in (
        ("bf16", 128, bf16, None, False),
        ("fp16", 16, fp16, None, True),
        ("fp8-block", 16, bf16, (128, 128), False),
        ("fp8-block", 128, bf16, (128, 128), True),
        ("fp8-column", 128, bf16, (0, 1), False),
        ("fp8-group", 128, bf16, (128, 1), True),
    ):
        depth, num_columns = (512, 128) if is_output else (128, 512)
        x, out = (
            torch.empty(4096, num_heads, size + 64, dtype=dtype, device="meta")[..., :size]
            for size in (depth, num_columns)
        )
        w_dtype = dtype if cell is None else torch.float8_e4m3fn
        w = torch.empty(num_heads, 128, 512, dtype=w_dtype, device="meta")
        scale = None if cell is None else torch.empty(num_heads, 4, 512, device="meta")
        _, arguments, options = _call(x, w.mT if is_output else w, scale, cell or (0, 0), out, 132)
        name = f"{label}-H{num_heads}-{'output' if is_output else 'query'}"
        budget = _BUDGET if cell == (128, 1) else {}
        yield config_of_call(_mla_absorb_kernel, name, arguments, options, **budget)
