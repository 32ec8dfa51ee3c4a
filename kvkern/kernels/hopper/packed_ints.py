"""Weights of 8 and 4 bits in shared memory as operands in registers, and where a part of them is.

As ``kvkern.kernels.packed_ints`` has them: a tile is loaded once as words, and each 64 columns
of it are made of those by instructions of their own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PART: gl.constexpr = gl.constexpr(64)  # columns of x in a box: two planes of words


@gluon.constexpr_function
def _doublings(first, end):
    """``first`` and what is twice as much each time, below ``end``: bases of a layout's dim."""
    found = []
    while first < end:
        found.append(first)
        first *= 2
    return found


@gluon.constexpr_function
def words_layout(rows, warps):
    """An MMA's rows, of which a lane's follow one another by 2: so no two meet in a bank."""
    reg_bases = [[0, 1], [8, 0], [0, 8], [0, 16]]
    reg_bases += [[row, 0] for row in _doublings(16 * warps, rows)]
    lane_bases = [[0, 2], [0, 4], [2, 0], [4, 0], [1, 0]]
    warp_bases = [[row, 0] for row in _doublings(16, 16 * warps)]
    return gl.DistributedLinearLayout(reg_bases, lane_bases, warp_bases, [], [rows, 32])


@gluon.jit
def prefetch_words(
    words_ptr, first_chunk, first_column, num_chunks, num_columns, CHUNKS: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Have a program's first words on their way to the L2 before there are barriers to ask with.

    That is no reading: what a launch before this one has still to store there is not missed. More
    words than the first 16 KB would keep those that are asked for next from coming.
    """
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    number = gl.arange(0, CHUNKS * COLUMNS, layout=LANES)
    chunk = gl.minimum(first_chunk + number // COLUMNS, num_chunks - 1)
    column = gl.minimum(first_column + number % COLUMNS, num_columns - 1)
    line = chunk.to(gl.int64) * num_columns + column  # of 128 bytes
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [words_ptr.to(gl.int64) + line * 128],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def stored_row(row):
    """Which row of a tile of words is the MMA's ``row``."""
    return row // 8 * 8 + row % 4 * 2 + row // 4 % 2


@gluon.constexpr_function
def _part_asm(part, bits, is_bf16, has_zero):
    """PTX from two words ($2, $3), and twice a zero ($4), to two floats of two planes ($0, $1).

    A byte is beside another's in 16 bits. bf16 has 7 bits below a power of two: where a code has a
    bit above them the whole is a denormal, 2^-133 times an integer, which a product brings back.
    """
    import struct  # Triton refuses functions of a module that stand outside

    def twice(number):
        if is_bf16:
            half = struct.unpack("<I", struct.pack("<f", number))[0] >> 16
        else:
            half = struct.unpack("<H", struct.pack("<e", number))[0]
        return f"{half << 16 | half:#x}"

    fma = "fma.rn.bf16x2" if is_bf16 else "fma.rn.f16x2"

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
def inverse_step(bits, is_bf16):
    return (64.0 if bits == 8 else 4.0) if is_bf16 else 1.0


@gluon.jit
def weights_of_part(
    words, zero, PART_INDEX: gl.constexpr, BITS: gl.constexpr, DTYPE: gl.constexpr, A: gl.constexpr
):
    """64 columns of a chunk as an operand, times ``1 / inverse_step``."""
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
    ordered = both.permute([0, 3, 1, 2, 4]).reshape([ROWS, PART])  # as ``stored_row``
    return gl.convert_layout(ordered.to(DTYPE, bitcast=True), A, assert_trivial=True)


@gluon.jit
def spread_zero(zero, DTYPE: gl.constexpr, WORDS: gl.constexpr):
    """A row's zero beside each of its words."""
    zero = gl.expand_dims(zero.to(DTYPE), 1)
    return gl.convert_layout(zero.broadcast_to([zero.shape[0], 32]), WORDS, assert_trivial=True)


@gluon.constexpr_function
def step_words_layout(chunks, rows, warps):
    """An MMA's rows of several chunks, of which each has ``warps`` of its own.

    A lane has eight words next to each other, so 64 columns of x are to it eight next to each
    other, twice: which is where an MMA has them does not matter, if tokens have them there too.
    """
    reg_bases = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0]]
    reg_bases += [[0, row, 0] for row in _doublings(16 * warps, rows)]
    lane_bases = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warp_bases = [[0, row, 0] for row in _doublings(16, 16 * warps)]
    warp_bases += [[chunk, 0, 0] for chunk in _doublings(1, chunks)]
    return gl.DistributedLinearLayout(reg_bases, lane_bases, warp_bases, [], [chunks, rows, 32])


@gluon.constexpr_function
def step_scales_layout(chunks, rows, warps):
    """Two groups' scales of rows of those words, each where its words are."""
    words = step_words_layout(chunks, rows, warps)

    def bases(of_words):
        return [[0, chunk, row] for chunk, row, word in of_words]

    regs = [[1, 0, 0], *bases([base for base in words.reg_bases if base[1] > 0])]
    lanes, warp_bases = bases(words.lane_bases), bases(words.warp_bases)
    return gl.DistributedLinearLayout(regs, lanes, warp_bases, [], [2, chunks, rows])


@gluon.jit
def weights_of_step(
    words, PART_INDEX: gl.constexpr, BITS: gl.constexpr, DTYPE: gl.constexpr, A: gl.constexpr
):
    """64 columns of each chunk as an operand, times ``1 / inverse_step``; without a zero."""
    CHUNKS: gl.constexpr = words.shape[0]
    ROWS: gl.constexpr = words.shape[1]
    ASM: gl.constexpr = _part_asm(PART_INDEX, BITS, DTYPE == gl.bfloat16, False)
    low, high = gl.inline_asm_elementwise(
        ASM, "=&r,=&r,r,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=2
    )
    # lane, 16 of the MMA's columns, half of them, column; plane
    apart = gl.join(low, high).reshape([CHUNKS, ROWS, 4, 2, 2, 2, 2])
    ordered = apart.permute([0, 1, 6, 3, 4, 2, 5]).reshape([CHUNKS, ROWS, PART])
    return gl.convert_layout(ordered.to(DTYPE, bitcast=True), A, assert_trivial=True)


@gluon.constexpr_function
def step_tokens_layout(parts, chunks, rows, warps):
    """Tokens of those chunks, where ``weights_of_step`` has their columns.

    Lanes next to each other have rows that are not in the same banks; see ``stored_token``.
    """
    reg_bases = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 32]]
    reg_bases += [[0, 0, row, 0] for row in _doublings(8, rows)]
    reg_bases += [[part, 0, 0, 0] for part in _doublings(1, parts)]
    lane_bases = [[0, 0, 0, 8], [0, 0, 0, 16]]
    lane_bases += [[0, 0, row if row < rows else 0, 0] for row in (4, 1, 2)]
    warp_bases = [[0, 0, 0, 0] for _ in _doublings(1, warps)]  # each has all of its chunk's
    warp_bases += [[0, chunk, 0, 0] for chunk in _doublings(1, chunks)]
    shape = [parts, chunks, rows, 64]
    return gl.DistributedLinearLayout(reg_bases, lane_bases, warp_bases, [], shape)


@gluon.jit
def tokens_of_step(x, B: gl.constexpr):
    """Parts ``[PARTS, CHUNKS, ROWS, 64]``, two or four, as operands; one row is repeated."""
    CHUNKS: gl.constexpr = x.shape[1]
    ROWS: gl.constexpr = x.shape[2]
    if x.shape[0] == 2:
        part_0, part_1 = x.permute([1, 2, 3, 0]).split()
        return _as_operand(part_0, B), _as_operand(part_1, B)
    else:
        even, odd = x.reshape([2, 2, CHUNKS, ROWS, PART]).permute([0, 2, 3, 4, 1]).split()
        part_0, part_2 = even.permute([1, 2, 3, 0]).split()
        part_1, part_3 = odd.permute([1, 2, 3, 0]).split()
        return (
            _as_operand(part_0, B), _as_operand(part_1, B), _as_operand(part_2, B),
            _as_operand(part_3, B),
        )  # fmt: skip


@gluon.jit
def _as_operand(x, B: gl.constexpr):
    """Columns of the MMA are twos of rows, ones, fours; fewer rows than eight are repeated."""
    CHUNKS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    if ROWS == 1:  # plane, lane, 16 of the MMA's columns, half of them, column
        apart = x.reshape([CHUNKS, 2, 4, 2, 2, 2]).permute([0, 1, 3, 4, 2, 5])
        OF_COLUMNS: gl.constexpr = gl.SliceLayout(2, B)
        row = gl.convert_layout(apart.reshape([CHUNKS, PART]), OF_COLUMNS, assert_trivial=True)
        return gl.expand_dims(row, 2).broadcast_to([CHUNKS, PART, 8])
    elif ROWS < 8:  # twos, ones; the same
        whole = gl.zeros([CHUNKS, PART, 8], x.dtype, B).reshape([CHUNKS, PART, 2, 2, 2])
        OF_TWOS: gl.constexpr = gl.SliceLayout(4, whole.type.layout)
        apart = x.reshape([CHUNKS, ROWS // 2, 2, 2, 4, 2, 2, 2]).permute([0, 3, 5, 6, 4, 7, 1, 2])
        if ROWS == 4:
            rows = gl.convert_layout(
                apart.reshape([CHUNKS, PART, 2, 2]), OF_TWOS, assert_trivial=True
            )
        else:
            OF_ONES: gl.constexpr = gl.SliceLayout(2, OF_TWOS)
            rows = gl.convert_layout(apart.reshape([CHUNKS, PART, 2]), OF_ONES, assert_trivial=True)
            rows = gl.expand_dims(rows, 2)
        all_rows = gl.expand_dims(rows, 4).broadcast_to([CHUNKS, PART, 2, 2, 2])
        return gl.convert_layout(all_rows.reshape([CHUNKS, PART, 8]), B, assert_trivial=True)
    else:  # eight rows, fours, twos, ones; the same
        apart = x.reshape([CHUNKS, ROWS // 8, 2, 2, 2, 2, 4, 2, 2, 2])
        ordered = apart.permute([0, 5, 7, 8, 6, 9, 1, 3, 4, 2]).reshape([CHUNKS, PART, ROWS])
        return gl.convert_layout(ordered, B, assert_trivial=True)


@gluon.jit
def stored_token(column):
    """Which row of x is the MMA's ``column``; of one row, repeated, the first column's is 0."""
    return column // 8 * 8 + column % 2 * 4 + column // 2 % 2 + column // 4 % 2 * 2
