"""matmul_w8a16, matmul_w4a16 of few tokens: weights stream through a ring that fills the SM.

As in the portable kernel weights are the MMA's rows and tokens its columns. One warp fetches a
chunk's words, the tokens' columns that they meet and the scales of its groups into a ring; warps
that multiply take words from there as the MMA wants them. They are several teams, each with its
part of a chunk's columns, where a program has so few rows of weights that it need not share K.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from kvkern.kernels.device import gpu_of
from kvkern.kernels.hopper.compat import copy_values, load_tile, tile_descriptor
from kvkern.kernels.hopper.paging import make_barriers
from kvkern.kernels.packed_ints import chunk_columns
from kvkern.kernels.sum_splits import new_partials, sum_splits_call, sum_splits_kernel

PART: gl.constexpr = gl.constexpr(64)  # columns of x in a box: two planes of words


@gluon.constexpr_function
def _words_layout(rows, warps):
    """An MMA's rows, of which a lane's follow one another by 2: so no two meet in a bank."""
    warp_bases = []
    while 2 ** len(warp_bases) < warps:
        warp_bases.append([16 * 2 ** len(warp_bases), 0])
    reg_bases = [[0, 1], [8, 0], [0, 8], [0, 16]]
    row = 16 * warps
    while row < rows:
        reg_bases.append([row, 0])
        row *= 2
    lane_bases = [[0, 2], [0, 4], [2, 0], [4, 0], [1, 0]]
    return gl.DistributedLinearLayout(reg_bases, lane_bases, warp_bases, [], [rows, 32])


@gluon.jit
def _stored_row(row):
    """Which row of a tile of words is the MMA's ``row``."""
    return row // 8 * 8 + row % 4 * 2 + row // 4 % 2


@gluon.constexpr_function
def _part_asm(part, bits, is_bf16, has_zero):
    """PTX from two words ($2, $3), and twice a zero ($4), to two floats of two planes ($0, $1).

    A byte is beside another's in 16 bits. bf16 has 7 bits below a power of two: where a code has a
    bit above them the whole is a denormal, 2^-133 times an integer, which a product brings back.
    """
    fma = "fma.rn.bf16x2" if is_bf16 else "fma.rn.f16x2"

    def twice(number):
        if is_bf16:
            import struct

            half = struct.unpack("<I", struct.pack("<f", number))[0] >> 16
        else:
            import struct

            half = struct.unpack("<H", struct.pack("<e", number))[0]
        return f"{half << 16 | half:#x}"

    # float = code * step + offset; times step a zero is taken off
    step = (2.0**-6 if bits == 8 else 2.0**-2) if is_bf16 else 1.0
    lines = [".reg .b32 a, b, m, o, z;"]
    for output in range(2):
        byte = 2 * part + output if bits == 8 else part
        if bits == 8 or output == 0:
            selector = (4 + byte) * 0x1100 + byte * 0x11
            lines.append(f"prmt.b32 a, $2, $3, {selector:#x};")
        if bits == 8:
            above = 0 if is_bf16 else 0x64006400
            lines.append(f"lop3.b32 b, a, 0x00ff00ff, {0x00800080 | above:#x}, 0x6a;")
            times, base, middle = (2.0**127, 0.0, 128) if is_bf16 else (1.0, 1024.0, 128)
        elif output == 0:
            above = 0x43004300 if is_bf16 else 0x64006400
            lines.append(f"lop3.b32 b, a, 0x000f000f, {above:#x}, 0xea;")
            times, base, middle = (2.0**-2, 32.0, 8) if is_bf16 else (1.0, 1024.0, 8)
        elif is_bf16:
            lines.append("and.b32 b, a, 0x00f000f0;")
            times, base, middle = 2.0**127, 0.0, 8
        else:
            lines.append("lop3.b32 b, a, 0x00f000f0, 0x64006400, 0xea;")
            times, base, middle = 2.0**-4, 64.0, 8
        less = -base - middle * step
        if has_zero:
            less = -base - (middle * step if bits == 8 else 0)
        lines.append(f"mov.b32 m, {twice(times)};")
        lines.append(f"mov.b32 o, {twice(less)};")
        if has_zero:
            lines.append(f"mov.b32 z, {twice(-step)};")
            lines.append(f"{fma} o, $4, z, o;")
        lines.append(f"{fma} ${output}, b, m, o;")
    return "{" + " ".join(lines) + "}"


@gluon.constexpr_function
def _inverse_step(bits, is_bf16):
    return (64.0 if bits == 8 else 4.0) if is_bf16 else 1.0


@gluon.jit
def _weights(
    words, zero, PART_INDEX: gl.constexpr, BITS: gl.constexpr, DTYPE: gl.constexpr, A: gl.constexpr
):
    """64 columns of a chunk as an operand, times ``1 / _inverse_step``."""
    ROWS: gl.constexpr = words.shape[0]
    ASM: gl.constexpr = _part_asm(PART_INDEX, BITS, DTYPE == gl.bfloat16, zero is not None)
    if zero is None:
        low, high = gl.inline_asm_elementwise(
            ASM, "=&r,=&r,r,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=2
        )
    else:
        low, high = gl.inline_asm_elementwise(
            ASM, "=&r,=&r,r,r,r", [words, zero], dtype=(gl.int16, gl.int16), is_pure=True, pack=2
        )
    both = gl.join(low, high).permute([0, 2, 1]).reshape([ROWS // 8, 2, 2, 2, PART])
    ordered = both.permute([0, 3, 1, 2, 4]).reshape([ROWS, PART])  # as ``_stored_row``
    return gl.convert_layout(ordered.to(DTYPE, bitcast=True), A, assert_trivial=True)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), phase ^ wraps.to(gl.int32)


@gluon.jit
def _fetch(
    words,
    xs,
    scales,
    zeros,
    full,
    empty,
    ready,
    words_desc,
    x_desc,
    scale_ptr,
    zero_ptr,
    num_columns,
    num_groups,
    first,
    last,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
    TEAMS: gl.constexpr,
):
    """The warp that fills the ring."""
    STAGES: gl.constexpr = words.shape[0]
    ROWS: gl.constexpr = words.shape[1]
    CHUNK: gl.constexpr = chunk_columns(BITS)
    PARTS: gl.constexpr = CHUNK // PART
    NUM_BYTES: gl.constexpr = words_desc.block_type.nbytes + PARTS * x_desc.block_type.nbytes
    GROUPS: gl.constexpr = CHUNK // GROUP if GROUP > 0 else 1
    n0 = gl.program_id(0) * ROWS
    m0 = gl.program_id(2) * x_desc.block_type.shape[0]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = gl.arange(0, ROWS, layout=LANES)
    # here, as a barrier of one warp between one and the next costs less than one of all
    for index in gl.static_range(STAGES):
        mbarrier.init(full.index(index), count=1 + 32 * gl.num_warps() if GROUP > 0 else 1)
        mbarrier.init(empty.index(index), count=TEAMS)
    fence_async_shared()
    mbarrier.arrive(ready.index(0), count=1)
    stage = 0
    phase = 1
    for chunk in range(first, last):
        mbarrier.wait(empty.index(stage), phase)
        bar = full.index(stage)
        mbarrier.expect(bar, NUM_BYTES)
        load_tile(words_desc, [chunk * num_columns + n0, 0], bar, words.index(stage))
        for part in gl.static_range(PARTS):
            load_tile(
                x_desc, [m0, chunk * CHUNK + part * PART], bar, xs.index(stage * PARTS + part)
            )
        if GROUP > 0:
            column = n0 + _stored_row(row)
            for index in gl.static_range(GROUPS):
                group = chunk * GROUPS + index
                mask = (column < num_columns) & (group < num_groups)
                ptrs = scale_ptr + group * num_columns + column
                copy_values(scales.index(stage * GROUPS + index), ptrs, mask=mask)
                if zero_ptr is not None:
                    mask = (n0 + row < num_columns) & (group < num_groups)
                    ptrs = zero_ptr + group * num_columns + n0 + row
                    copy_values(zeros.index(stage * GROUPS + index), ptrs, mask=mask)
            async_copy.mbarrier_arrive(bar, increment_count=False)
        stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _multiply(
    TEAM: gl.constexpr,
    words,
    xs,
    scales,
    zeros,
    sums,
    full,
    empty,
    done,
    ready,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    num_columns,
    first,
    last,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
    TEAMS: gl.constexpr,
):
    """A team: its parts of each chunk; the first one adds what all found, and stores it."""
    STAGES: gl.constexpr = words.shape[0]
    ROWS: gl.constexpr = words.shape[1]
    TOKENS: gl.constexpr = xs.shape[1]
    DTYPE: gl.constexpr = xs.dtype
    WARPS: gl.constexpr = gl.num_warps()
    PARTS: gl.constexpr = chunk_columns(BITS) // PART
    FIRST: gl.constexpr = PARTS // TEAMS * TEAM
    END: gl.constexpr = PARTS // TEAMS * (TEAM + 1)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    WORDS: gl.constexpr = _words_layout(ROWS, WARPS)
    OF_WORDS: gl.constexpr = gl.SliceLayout(1, WORDS)
    OF_ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    BACK: gl.constexpr = _inverse_step(BITS, DTYPE == gl.bfloat16)
    n0 = gl.program_id(0) * ROWS
    column = n0 + _stored_row(gl.arange(0, ROWS, layout=OF_ROW))
    acc = gl.zeros([ROWS, TOKENS], gl.float32, MMA)
    zero_of_all = None
    if GROUP == 0:
        if zero_ptr is not None:
            of_word = n0 + gl.arange(0, ROWS, layout=OF_WORDS)
            zero_row = gl.load(zero_ptr + of_word, mask=of_word < num_columns, other=0.0)
            zero_of_all = _spread(zero_row, DTYPE, WORDS)
        scale = gl.load(scale_ptr + column, mask=column < num_columns, other=0.0)
    mbarrier.wait(ready.index(0), 0)
    stage = 0
    phase = 0
    for _ in range(first, last):
        mbarrier.wait(full.index(stage), phase)
        tile = words.index(stage).load(WORDS)
        for which in gl.static_range(FIRST, END):
            if GROUP > 0 and (which == FIRST or which * PART % GROUP == 0):
                of_group = stage * (PARTS * PART // GROUP) + which * PART // GROUP
                part_sum = gl.zeros([ROWS, TOKENS], gl.float32, MMA)
                if zero_ptr is None:
                    zero = None
                else:
                    zero = _spread(zeros.index(of_group).load(OF_WORDS), DTYPE, WORDS)
            if GROUP == 0:
                zero = zero_of_all
            weights = _weights(tile, zero, which, BITS, DTYPE, A)
            x = xs.index(stage * PARTS + which).permute((1, 0)).load(B)
            if GROUP == 0:
                acc = mma_v2(weights, x, acc)
            else:
                part_sum = mma_v2(weights, x, part_sum)
                if which == END - 1 or (which + 1) * PART % GROUP == 0:
                    factor = gl.expand_dims(scales.index(of_group).load(OF_ROW), 1)
                    acc += part_sum * BACK * factor
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = _next(stage, phase, STAGES)
    if GROUP == 0:
        acc = acc * BACK * gl.expand_dims(scale, 1)
    if TEAM > 0:
        sums.index(TEAM - 1).store(acc)
        mbarrier.arrive(done.index(0), count=1)
    else:
        if TEAMS > 1:
            mbarrier.wait(done.index(0), 0)
            for other in gl.static_range(TEAMS - 1):
                acc += sums.index(other).load(MMA)
        if bias_ptr is not None:
            bias = gl.load(bias_ptr + column, mask=column < num_columns, other=0.0)
            acc += gl.expand_dims(bias.to(gl.float32), 1)
        token = gl.program_id(2) * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(0, MMA))
        into = (gl.program_id(1) * num_rows + token).to(gl.int64) * num_columns
        mask = gl.expand_dims(column < num_columns, 1) & gl.expand_dims(token < num_rows, 0)
        ptrs = out_ptr + gl.expand_dims(into, 0) + gl.expand_dims(column, 1)
        gl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _spread(zero, DTYPE: gl.constexpr, WORDS: gl.constexpr):
    """A row's zero beside each of its words."""
    zero = gl.expand_dims(zero.to(DTYPE), 1)
    return gl.convert_layout(zero.broadcast_to([zero.shape[0], 32]), WORDS, assert_trivial=True)


@gluon.jit(do_not_specialize=["num_rows", "chunks_per_split"])
def _few_kernel(
    words_desc,  # int32 [chunks * N, 32] in boxes [BLOCK_N, 32]
    x_desc,  # [M, K] in boxes [BLOCK_M, 64]
    scale_ptr,  # fp32 [groups, N]
    zero_ptr,  # fp32 [groups, N], or None
    bias_ptr,  # [N], or None
    out_ptr,  # [S, M, N]: fp32 parts of the sum if S > 1
    num_rows,
    num_columns,
    num_groups,
    num_chunks,
    chunks_per_split,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,  # columns of x that share a scale; 0: all
    STAGES: gl.constexpr,
    TEAMS: gl.constexpr,
    LETS_NEXT_START: gl.constexpr,
):
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS: gl.constexpr = words_desc.block_type.shape[0]
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    PARTS: gl.constexpr = chunk_columns(BITS) // PART
    GROUPS: gl.constexpr = PARTS * PART // GROUP if GROUP > 0 else 1
    NUM_SCALES: gl.constexpr = STAGES * GROUPS if GROUP > 0 else 1
    NUM_ZEROS: gl.constexpr = NUM_SCALES if zero_ptr is not None else 1
    words = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, 32], words_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * PARTS, TOKENS, PART], x_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [NUM_SCALES, ROWS], FLAT)
    zeros = gl.allocate_shared_memory(gl.float32, [NUM_ZEROS, ROWS], FLAT)
    sums = gl.allocate_shared_memory(
        gl.float32, [max(TEAMS - 1, 1), ROWS, TOKENS if TEAMS > 1 else 1],
        gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
    )  # fmt: skip
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = make_barriers(1, 1)
    done = make_barriers(1, max(TEAMS - 1, 1))
    fence_async_shared()
    if LETS_NEXT_START:
        gdc_launch_dependents()
    first = gl.program_id(1) * chunks_per_split
    last = gl.minimum(first + chunks_per_split, num_chunks)
    if TEAMS == 1:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, words, xs, scales, zeros, sums, full, empty, done, ready, scale_ptr,
                    zero_ptr, bias_ptr, out_ptr, num_rows, num_columns, first, last, BITS, GROUP, TEAMS,
                )),
                (_fetch, (
                    words, xs, scales, zeros, full, empty, ready, words_desc, x_desc, scale_ptr,
                    zero_ptr, num_columns, num_groups, first, last, BITS, GROUP, TEAMS,
                )),
            ],
            [1],
            [40],
        )  # fmt: skip
    elif TEAMS == 2:
        gl.warp_specialize(
            [
                (_multiply, (
                    0, words, xs, scales, zeros, sums, full, empty, done, ready, scale_ptr,
                    zero_ptr, bias_ptr, out_ptr, num_rows, num_columns, first, last, BITS, GROUP, TEAMS,
                )),
                (_multiply, (
                    1, words, xs, scales, zeros, sums, full, empty, done, ready, scale_ptr,
                    zero_ptr, bias_ptr, out_ptr, num_rows, num_columns, first, last, BITS, GROUP, TEAMS,
                )),
                (_fetch, (
                    words, xs, scales, zeros, full, empty, ready, words_desc, x_desc, scale_ptr,
                    zero_ptr, num_columns, num_groups, first, last, BITS, GROUP, TEAMS,
                )),
            ],
            [gl.num_warps(), 1],
            [232, 40],
        )  # fmt: skip
    else:  # of two warps each, which the first partition must not have
        gl.warp_specialize(
            [
                (_fetch, (
                    words, xs, scales, zeros, full, empty, ready, words_desc, x_desc, scale_ptr,
                    zero_ptr, num_columns, num_groups, first, last, BITS, GROUP, TEAMS,
                )),
                (_multiply, (
                    0, words, xs, scales, zeros, sums, full, empty, done, ready, scale_ptr,
                    zero_ptr, bias_ptr, out_ptr, num_rows, num_columns, first, last, BITS, GROUP,
                    TEAMS,
                )),
                (_multiply, (
                    1, words, xs, scales, zeros, sums, full, empty, done, ready, scale_ptr,
                    zero_ptr, bias_ptr, out_ptr, num_rows, num_columns, first, last, BITS, GROUP,
                    TEAMS,
                )),
                (_multiply, (
                    2, words, xs, scales, zeros, sums, full, empty, done, ready, scale_ptr,
                    zero_ptr, bias_ptr, out_ptr, num_rows, num_columns, first, last, BITS, GROUP,
                    TEAMS,
                )),
                (_multiply, (
                    3, words, xs, scales, zeros, sums, full, empty, done, ready, scale_ptr,
                    zero_ptr, bias_ptr, out_ptr, num_rows, num_columns, first, last, BITS, GROUP,
                    TEAMS,
                )),
            ],
            [2, 2, 2, 2],
            [168, 168, 168, 168],
        )  # fmt: skip


class Tiles(NamedTuple):
    rows: int  # of x
    columns: int  # of out
    teams: int
    warps: int  # of a team
    num_splits: int
    stages: int


def tiles_for(
    num_rows: int, num_columns: int, depth: int, bits: int, group_size: int, has_zero: bool,
    columns: int, teams: int, num_sms: int, warps: int = 0, splits: int = 0, most_stages: int = 16,
) -> Tiles:  # fmt: skip
    rows = 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32
    num_chunks = triton.cdiv(depth, chunk_columns(bits))
    num_tiles = triton.cdiv(num_columns, columns) * triton.cdiv(num_rows, rows)
    splits = splits or max(1, min(num_sms // num_tiles, num_chunks, 16))
    per_split = triton.cdiv(num_chunks, splits)
    splits = triton.cdiv(num_chunks, per_split)
    chunk = chunk_columns(bits)
    groups = chunk // group_size if group_size < depth else 0
    stage_bytes = columns * 128 + chunk * rows * 2 + (1 + has_zero) * groups * columns * 4
    fixed = 2048 + (teams - 1) * columns * rows * 4 + 1024
    stages = min((_SHARED_BYTES - fixed) // stage_bytes, most_stages, max(per_split, 2))
    return Tiles(rows, columns, teams, warps or min(columns // 16, 8 // teams), splits, stages)


_SHARED_BYTES = 232_448


def matmul_few(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    out: Tensor,
    tiles: Tiles,
) -> None:
    parts = out if tiles.num_splits == 1 else new_partials(tiles.num_splits, out, torch.float32)
    grid, arguments, options = call(x, values, scale, zero, bias, group_size, parts, tiles)
    _few_kernel[grid](**arguments, **options)
    if tiles.num_splits > 1:
        sum_grid, arguments, options = sum_splits_call(parts, bias, out, gpu_of(out.device))
        sum_splits_kernel[sum_grid](**arguments, **options)


def call(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    parts: Tensor,
    tiles: Tiles,
) -> tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]:
    num_rows, depth = x.shape
    num_chunks, num_columns, _ = values.shape
    is_cut = tiles.num_splits > 1
    words = values.view(torch.int32).view(num_chunks * num_columns, 32)
    arguments = {
        "words_desc": tile_descriptor(words, (tiles.columns, 32)),
        "x_desc": tile_descriptor(x, (tiles.rows, 64)),
        "scale_ptr": scale,
        "zero_ptr": zero,
        "bias_ptr": None if is_cut else bias,
        "out_ptr": parts,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "num_groups": scale.shape[0],
        "num_chunks": num_chunks,
        "chunks_per_split": triton.cdiv(num_chunks, tiles.num_splits),
        "BITS": 8 if values.dtype == torch.int8 else 4,
        "GROUP": 0 if group_size >= depth else group_size,
        "STAGES": tiles.stages,
        "TEAMS": tiles.teams,
        "LETS_NEXT_START": is_cut,
    }
    options: dict[str, Any] = {
        "num_warps": tiles.warps if tiles.teams < 4 else 4,
        "maxnreg": 128 if tiles.teams == 1 and tiles.warps == 4 else 168,  # two fit an SM
        "enable_fp_fusion": True,
    }
    grid = (
        triton.cdiv(num_columns, tiles.columns),
        tiles.num_splits,
        triton.cdiv(num_rows, tiles.rows),
    )
    return grid, arguments, options
