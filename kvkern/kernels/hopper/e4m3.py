"""What 64-row decode needs to multiply in e4m3: queries, weights and values as wgmma wants them.

wgmma reads 8-bit operands only along rows, and the rows of V^T are not in the cache: a warpgroup
writes the transpose, 4 x 4 bytes at a time. What it leaves out of order (keys within 16, columns of
the output) is put right where that costs nothing, in the weights and at the end.

wgmma keeps about 13 bits of a sum of 8-bit products, and drops the rest. So a block's output is
summed alone and added to the others in fp32. Left in the tensor core it is faster, and values that
have a mean come out too small, the more so the more keys there are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kvkern.kernels.hopper.compat import view_tile
from kvkern.kernels.hopper.paging import BLOCK_N, ROWS, WIDE_128, WIDE_256

SHARE_ROWS: gl.constexpr = gl.constexpr(32)  # query rows that a warpgroup quantises
_E4M3_MAX: gl.constexpr = gl.constexpr(448.0)
_MIN_SCALE: gl.constexpr = gl.constexpr(2.0**-60)  # of a query row; its product is not to vanish


@gluon.jit
def _view_words(tile, NUM_ROWS: gl.constexpr, WORDS: gl.constexpr, SWIZZLE: gl.constexpr):
    """A tile's bytes as int32; its swizzle moves 16 bytes at once, and stays what it is."""
    return view_tile(tile, gl.int32, [NUM_ROWS, WORDS], gl.NVMMASharedLayout(SWIZZLE, 32, 2))


@gluon.jit
def _load_columns(q_ptr, first_row, row, mask, column, WIDTH: gl.constexpr, ROW_DIM: gl.constexpr,
                  LAYOUT: gl.constexpr):  # fmt: skip
    """fp32 [rows, WIDTH] of queries from ``column`` on; beyond a row's end are zeros."""
    offs_c = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    offs = gl.expand_dims(row * ROW_DIM, 1) + gl.expand_dims(offs_c, 0)
    is_there = gl.expand_dims(mask, 1) & gl.expand_dims(offs_c < ROW_DIM, 0)
    return gl.load(q_ptr + first_row * ROW_DIM + offs, mask=is_there, other=0.0).to(gl.float32)


@gluon.jit
def _store_terms(values, tile, zero, FIRST: gl.constexpr):
    """Rows of a tile of queries as e4m3; with two terms the first is cut, the second is the rest.

    Cut by its bits: ptxas 12.8 miscompiles the conversion back of what was just converted.
    """
    if tile.shape[0] == 2:
        high = (values.to(gl.int32, bitcast=True) & -1048576).to(gl.float32, bitcast=True)
        low = (values - high).to(tile.dtype)
        tile.index(zero).slice(FIRST, SHARE_ROWS, dim=0).store(high.to(tile.dtype))
        tile.index(zero + 1).slice(FIRST, SHARE_ROWS, dim=0).store(low)
    else:
        tile.index(zero).slice(FIRST, SHARE_ROWS, dim=0).store(values.to(tile.dtype))


@gluon.jit
def quantise_query(
    q_ptr,
    q,
    q_scales,
    layer_scales_ptr,
    first_row,
    num_left,
    zero,
    FIRST: gl.constexpr,
    ROW_DIM: gl.constexpr,
    ROPE_DIM: gl.constexpr,
):
    """Half of a tile's rows from memory to shared memory, in e4m3 with a scale each.

    Rope columns are in units of the latent's scale, which then is that of the whole score.
    """
    q_left, q_right, q_rope = q
    HALF: gl.constexpr = q_left.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    row = FIRST + gl.arange(0, SHARE_ROWS, layout=gl.SliceLayout(1, LAYOUT))
    mask = row < num_left
    left = _load_columns(q_ptr, first_row, row, mask, 0, HALF, ROW_DIM, LAYOUT)
    right = _load_columns(q_ptr, first_row, row, mask, HALF, HALF, ROW_DIM, LAYOUT)
    amax = gl.maximum(gl.max(gl.abs(left), 1), gl.max(gl.abs(right), 1))
    if ROPE_DIM > 0:
        ratio = gl.load(layer_scales_ptr + 1) / gl.load(layer_scales_ptr)
        rope = _load_columns(q_ptr, first_row, row, mask, 2 * HALF, 64, ROW_DIM, LAYOUT) * ratio
        amax = gl.maximum(amax, gl.max(gl.abs(rope), 1))
    # the power of two from amax / 448 up, and its inverse, by their bits
    word = gl.maximum(amax * (1.0 / _E4M3_MAX), _MIN_SCALE).to(gl.int32, bitcast=True)
    word = (word + 0x7FFFFF) & 0x7F800000
    inverse = gl.expand_dims((0x7F000000 - word).to(gl.float32, bitcast=True), 1)
    q_scales.slice(FIRST, SHARE_ROWS, dim=0).store(word.to(gl.float32, bitcast=True))
    _store_terms(left * inverse, q_left, zero, FIRST)
    _store_terms(right * inverse, q_right, zero, FIRST)
    if ROPE_DIM > 0:
        _store_terms(rope * inverse, q_rope, zero, FIRST)
    fence_async_shared()


@gluon.jit
def pack_weights(weights, OPERAND: gl.constexpr):
    """e4m3 weights in the order of keys that ``transpose_half`` gives V^T.

    A thread then holds four neighbouring bytes, where it had computed two and two: of 16 keys,
    place 4t + 2h + e has key 8h + 2t + e.
    """
    packed = weights.to(gl.float8e4nv)
    packed = packed.reshape([64, 4, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, 64])
    return gl.convert_layout(packed, OPERAND, assert_trivial=True)


@gluon.jit
def add_values(weights, values, acc, rescale, no_values, EXACT: gl.constexpr):
    """acc_j * rescale + weights V_j of a block; quarter j is a fourth of the rows of V^T."""
    acc0, acc1, acc2, acc3 = acc
    WIDTH: gl.constexpr = acc0.shape[1]
    rescale = gl.expand_dims(rescale, 1)
    values0 = values.slice(0, WIDTH, dim=0).permute((1, 0))
    values1 = values.slice(WIDTH, WIDTH, dim=0).permute((1, 0))
    values2 = values.slice(2 * WIDTH, WIDTH, dim=0).permute((1, 0))
    values3 = values.slice(3 * WIDTH, WIDTH, dim=0).permute((1, 0))
    if EXACT:  # two quarters under way, while a third is added in fp32
        even = warpgroup_mma(weights, values0, no_values, use_acc=False, is_async=True)
        odd = warpgroup_mma(weights, values1, no_values, use_acc=False, is_async=True)
        acc0 = acc0 * rescale + warpgroup_mma_wait(1, deps=(even,))
        even = warpgroup_mma(weights, values2, no_values, use_acc=False, is_async=True)
        acc1 = acc1 * rescale + warpgroup_mma_wait(1, deps=(odd,))
        odd = warpgroup_mma(weights, values3, no_values, use_acc=False, is_async=True)
        acc2 = acc2 * rescale + warpgroup_mma_wait(1, deps=(even,))
        acc3 = acc3 * rescale + warpgroup_mma_wait(0, deps=(odd,))
    else:
        acc0 = warpgroup_mma(weights, values0, acc0 * rescale, is_async=True)
        acc1 = warpgroup_mma(weights, values1, acc1 * rescale, is_async=True)
        acc2 = warpgroup_mma(weights, values2, acc2 * rescale, is_async=True)
        acc3 = warpgroup_mma(weights, values3, acc3 * rescale, is_async=True)
        acc0, acc1, acc2, acc3 = warpgroup_mma_wait(0, deps=(acc0, acc1, acc2, acc3))
    return acc0, acc1, acc2, acc3


@gluon.jit
def join_quarters(acc, factor):
    """Half of the output, times ``factor`` a row: column 4g + j is quarter j's g."""
    acc0, acc1, acc2, acc3 = acc
    HALF: gl.constexpr = 4 * acc0.shape[1]
    WIDE: gl.constexpr = WIDE_256 if HALF == 256 else WIDE_128
    joined = gl.join(gl.join(acc0, acc1), gl.join(acc2, acc3)).permute([0, 1, 3, 2])
    joined = gl.convert_layout(joined.reshape([ROWS, HALF]), WIDE, assert_trivial=True)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, WIDE), assert_trivial=True)
    factor = gl.expand_dims(factor, 1)
    return gl.where(factor != 0.0, joined * factor, 0.0)  # 0 times a NaN that was not to be seen


@gluon.jit
def transpose_half(tile, values, num_left):
    """Half of the latents of a block, ``[64, HALF]``, as V^T ``[HALF, 64]`` with 4 bytes a word.

    Row j * HALF / 4 + g is column 4g + j, and the keys are in the order of ``pack_weights``. Rows
    of the block from ``num_left`` on are zero: memory may hold NaN there.
    """
    NUM_WORDS: gl.constexpr = tile.shape[1] // 4
    LAYOUT: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [4, 1], [0, 1])
    x = _view_words(tile, 64, NUM_WORDS, 128).load(LAYOUT)
    if num_left < BLOCK_N:
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
        x = gl.where(gl.expand_dims(row, 1) < num_left, x, 0)
    # key 16a + 8h + 2t + e -> [a, t, word, h, e]
    x = x.reshape([4, 2, 4, 2, NUM_WORDS]).permute([0, 2, 4, 1, 3])
    even, odd = gl.split(x)
    x00, x10 = gl.split(even)
    x01, x11 = gl.split(odd)
    y0, y1, y2, y3 = gl.inline_asm_elementwise(
        """{ .reg .b32 t0, t1, u0, u1;
             prmt.b32 t0, $4, $5, 0x5140; prmt.b32 t1, $4, $5, 0x7362;
             prmt.b32 u0, $6, $7, 0x5140; prmt.b32 u1, $6, $7, 0x7362;
             prmt.b32 $0, t0, u0, 0x5410; prmt.b32 $1, t0, u0, 0x7632;
             prmt.b32 $2, t1, u1, 0x5410; prmt.b32 $3, t1, u1, 0x7632; }""",
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [
            x00.reshape([16, NUM_WORDS]), x01.reshape([16, NUM_WORDS]),
            x10.reshape([16, NUM_WORDS]), x11.reshape([16, NUM_WORDS]),
        ],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    y = gl.join(gl.join(y0, y1), gl.join(y2, y3)).permute([3, 2, 1, 0])
    _view_words(values, 4 * NUM_WORDS, 16, 64).store(y.reshape([4 * NUM_WORDS, 16]))
