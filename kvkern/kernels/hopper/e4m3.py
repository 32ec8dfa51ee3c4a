"""What 64-row decode needs to multiply in e4m3: queries, weights and values as wgmma wants them.

wgmma reads 8-bit operands from shared memory only along rows, and the rows of V^T are not in the
cache. So V^T is the first operand, which may be in registers: ldmatrix transposes pairs of bytes.
What that leaves out of order (keys within 16, even and odd columns) is put right where it costs
nothing, in the weights and at the end.

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
from kvkern.kernels.hopper.paging import BLOCK_N, ROWS

_OF_PAIRS: gl.constexpr = gl.constexpr(
    gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2)
)
_WORDS: gl.constexpr = gl.constexpr(
    gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 8]), 1)
)
SHARE_ROWS: gl.constexpr = gl.constexpr(32)  # query rows that a warpgroup quantises
# eight rows of queries by four warps, a row in 16 lanes
_QUERY: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_QUERY_ROPE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
_E4M3_MAX: gl.constexpr = gl.constexpr(448.0)
_MIN_SCALE: gl.constexpr = gl.constexpr(2.0**-60)  # of a query row; its product is not to vanish


@gluon.jit
def _load_columns(q_ptr, first_row, row, mask, column, WIDTH: gl.constexpr, ROW_DIM: gl.constexpr,
                  LAYOUT: gl.constexpr):  # fmt: skip
    """[rows, WIDTH] of queries from ``column`` on; beyond a row's end are zeros."""
    offs_c = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    offs = gl.expand_dims(row * ROW_DIM, 1) + gl.expand_dims(offs_c, 0)
    is_there = gl.expand_dims(mask, 1) & gl.expand_dims(offs_c < ROW_DIM, 0)
    return gl.load(q_ptr + first_row * ROW_DIM + offs, mask=is_there, other=0.0)


@gluon.jit
def _load_group(q_ptr, first_row, group, num_left, LATENT_DIM: gl.constexpr,
                ROW_DIM: gl.constexpr):  # fmt: skip
    """Latent and rope columns of eight rows."""
    row = group * 8 + gl.arange(0, 8, layout=gl.SliceLayout(1, _QUERY))
    latent = _load_columns(q_ptr, first_row, row, row < num_left, 0, LATENT_DIM, ROW_DIM, _QUERY)
    row = gl.convert_layout(row, gl.SliceLayout(1, _QUERY_ROPE), assert_trivial=True)
    rope = _load_columns(
        q_ptr, first_row, row, row < num_left, LATENT_DIM, 64, ROW_DIM, _QUERY_ROPE
    )
    return latent, rope


@gluon.jit
def _store_terms(values, tile, group):
    """Eight rows of queries as e4m3; with two terms the first is cut, the second is the rest.

    Cut by its bits: ptxas 12.8 miscompiles the conversion back of what was just converted.
    ``group``: of the tile's eights of rows, of columns that lie together.
    """
    COLUMNS: gl.constexpr = values.shape[1]
    OF_TERM: gl.constexpr = tile.shape[2] // COLUMNS * (ROWS // 8)
    groups = view_tile(
        tile, tile.dtype, [tile.shape[0] * OF_TERM, 8, COLUMNS],
        gl.NVMMASharedLayout(COLUMNS, 8, 2),
    )  # fmt: skip
    if tile.shape[0] == 2:
        high = (values.to(gl.int32, bitcast=True) & -1048576).to(gl.float32, bitcast=True)
        groups.index(group).store(high.to(tile.dtype))
        groups.index(group + OF_TERM).store((values - high).to(tile.dtype))
    else:
        groups.index(group).store(values.to(tile.dtype))


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

    Rope columns are in units of the latent's scale, which then is that of the whole score. Eight
    rows at a time, in a loop: when a kernel starts its instructions have to be fetched as well.
    """
    q_left, q_right, q_rope = q
    HALF: gl.constexpr = q_left.shape[2]
    END: gl.constexpr = (FIRST + SHARE_ROWS) // 8
    latent, rope = _load_group(q_ptr, first_row, zero + FIRST // 8, num_left, 2 * HALF, ROW_DIM)
    ratio = 1.0
    if ROPE_DIM > 0:
        ratio = gl.load(layer_scales_ptr + 1) / gl.load(layer_scales_ptr)
    for group in range(zero + FIRST // 8, END):
        end = gl.where(group + 1 < END, num_left, 0)
        next_latent, next_rope = _load_group(q_ptr, first_row, group + 1, end, 2 * HALF, ROW_DIM)
        latent, rope = latent.to(gl.float32), rope.to(gl.float32) * ratio
        amax = gl.max(gl.abs(latent), 1)
        rope_amax = gl.max(gl.abs(rope), 1)
        amax = gl.maximum(amax, gl.convert_layout(rope_amax, amax.type.layout, assert_trivial=True))
        # the power of two from amax / 448 up, and its inverse, by their bits
        word = gl.maximum(amax * (1.0 / _E4M3_MAX), _MIN_SCALE).to(gl.int32, bitcast=True)
        word = (word + 0x7FFFFF) & 0x7F800000
        inverse = (0x7F000000 - word).to(gl.float32, bitcast=True)
        q_scales.index(group).store(word.to(gl.float32, bitcast=True))
        left, right = halves(latent * gl.expand_dims(inverse, 1))
        _store_half(left, q_left, group)
        _store_half(right, q_right, group)
        if ROPE_DIM > 0:
            inverse = gl.convert_layout(inverse, rope_amax.type.layout, assert_trivial=True)
            _store_terms(rope * gl.expand_dims(inverse, 1), q_rope, group)
        latent, rope = next_latent, next_rope
    fence_async_shared()


@gluon.jit
def halves(rows):
    """Of the columns."""
    HALF: gl.constexpr = rows.shape[1] // 2
    return gl.split(rows.reshape([rows.shape[0], 2, HALF]).permute([0, 2, 1]))


@gluon.jit
def _store_half(values, tile, group):
    if values.shape[1] == 256:
        first, second = halves(values)
        _store_terms(first, tile, group)
        _store_terms(second, tile, ROWS // 8 + group)
    else:
        _store_terms(values, tile, group)


@gluon.jit
def pack_weights(weights, OPERAND: gl.constexpr):
    """e4m3 weights in the order of keys that ``split_pairs`` gives V^T.

    A thread then holds four neighbouring bytes, where it had computed two and two: of 16 keys,
    place 4t + 2h + e has key 8h + 2t + e.
    """
    packed = weights.to(gl.float8e4nv)
    packed = packed.reshape([64, 4, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, 64])
    return gl.convert_layout(packed, OPERAND, assert_trivial=True)


@gluon.jit
def no_pairs():
    return gl.zeros([64, 16], gl.int32, _WORDS)


@gluon.jit
def load_pairs(values, GROUP: gl.constexpr, FIRST: gl.constexpr):
    """128 columns of half latents of 32 keys, transposed in pairs: a word is 2 columns of 2 keys.

    Words, as a loop would carry values of 16 bits in a register each.
    """
    tile = _view_pairs(values).index(GROUP).slice(FIRST, 32, dim=0)
    pairs = tile.permute((1, 0)).load(_OF_PAIRS)
    words = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, $2;", "=r,=r,r", [pairs],
        dtype=gl.int32, is_pure=True, pack=2,
    )  # fmt: skip
    words, _same = gl.split(words.reshape([64, 16, 2]))
    return gl.convert_layout(words, _WORDS, assert_trivial=True)


@gluon.jit
def split_pairs(first, second, ACC: gl.constexpr):
    """V^T: even and odd columns, ``[64, 64]`` each, of two times 32 keys that were loaded.

    Of 2 + 2 keys a thread takes the bytes of the even column, and of the odd one. That gives its
    four neighbouring keys in the order of ``pack_weights``.
    """
    words = gl.join(first, second).permute([0, 2, 1]).reshape([64, 32])
    twice = gl.join(words, words).reshape([64, 64])
    even, odd = gl.inline_asm_elementwise(
        """prmt.b32 $0, $4, $8, 0x6420; prmt.b32 $1, $6, $10, 0x6420;
           prmt.b32 $2, $4, $8, 0x7531; prmt.b32 $3, $6, $10, 0x7531;""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [gl.convert_layout(twice, _OF_PAIRS, assert_trivial=True)],
        dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=8,
    )  # fmt: skip
    return _as_operand(even, ACC), _as_operand(odd, ACC)


@gluon.jit
def _as_operand(values, ACC: gl.constexpr):
    """Where the layout has pair 8b of 16 and key 8c of 16, the bytes are of pair 8c and key 8b."""
    values = values.reshape([4, 2, 8, 4, 2, 4, 2]).permute([0, 4, 2, 3, 5, 1, 6])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    return gl.convert_layout(values.reshape([64, 64]), OPERAND, assert_trivial=True)


@gluon.jit
def _view_pairs(tile):
    """Half of the latents of a block, ``[64, HALF]``, as pairs of columns, 64 of them at once."""
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return view_tile(tile, gl.int16, [tile.shape[1] // 128, BLOCK_N, 64], PAIRS)


@gluon.jit
def start_sum(values, weights, acc, EXACT: gl.constexpr):
    """V^T weights^T of a block, for 64 columns, or acc and that; not waited for."""
    if EXACT:
        acc = gl.zeros_like(acc)
    return warpgroup_mma(values, weights, acc, use_acc=not EXACT, is_async=True)


@gluon.jit
def end_sum(added, acc, EXACT: gl.constexpr):
    """acc and what ``start_sum`` started."""
    added = warpgroup_mma_wait(0, deps=(added,))
    return acc + added if EXACT else added


@gluon.jit
def join_columns(acc, factor, HALF: gl.constexpr):
    """Half of the output, ``[ROWS, HALF]``, times ``factor`` a row."""
    acc0, acc1, acc2, acc3 = acc  # even and odd columns of 128, and of the next 128
    if HALF == 256:
        joined = gl.join(gl.join(acc0, acc2), gl.join(acc1, acc3)).permute([1, 2, 0, 3])
    else:
        joined = gl.join(acc0, acc1).permute([1, 0, 2])
    joined = joined.reshape([ROWS, HALF])
    factor = gl.convert_layout(factor, gl.SliceLayout(1, joined.type.layout), assert_trivial=True)
    factor = gl.expand_dims(factor, 1)
    return gl.where(factor != 0.0, joined * factor, 0.0)  # 0 times a NaN that was not to be seen
