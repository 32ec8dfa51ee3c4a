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

SHARE_ROWS: gl.constexpr = gl.constexpr(32)  # query rows that a warpgroup quantises
_E4M3_MAX: gl.constexpr = gl.constexpr(448.0)
_MIN_SCALE: gl.constexpr = gl.constexpr(2.0**-60)  # of a query row; its product is not to vanish


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
    """e4m3 weights in the order of keys that ``load_values`` gives V^T.

    A thread then holds four neighbouring bytes, where it had computed two and two: of 16 keys,
    place 4t + 2h + e has key 8h + 2t + e.
    """
    packed = weights.to(gl.float8e4nv)
    packed = packed.reshape([64, 4, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, 64])
    return gl.convert_layout(packed, OPERAND, assert_trivial=True)


@gluon.jit
def load_values(pairs, ACC: gl.constexpr):
    """V^T: even and odd columns, ``[64, 64]`` each, of 128 that ``pairs`` has as two-byte pairs.

    ldmatrix transposes pairs; of 2 + 2 keys a thread then takes the even bytes, and the odd ones.
    That gives its four neighbouring keys in the order of ``pack_weights``.
    """
    OF_PAIRS: gl.constexpr = gl.DotOperandLayout(
        0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2
    )
    even, odd = gl.inline_asm_elementwise(
        """prmt.b32 $0, $4, $6, 0x6420; prmt.b32 $1, $5, $7, 0x6420;
           prmt.b32 $2, $4, $6, 0x7531; prmt.b32 $3, $5, $7, 0x7531;""",
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [pairs.permute((1, 0)).load(OF_PAIRS)],
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
def view_pairs(tile):
    """Half of the latents of a block, ``[64, HALF]``, as pairs of columns, 64 of them at once."""
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return view_tile(tile, gl.int16, [tile.shape[1] // 128, BLOCK_N, 64], PAIRS)


@gluon.jit
def add_values(values, weights, acc, EXACT: gl.constexpr):
    """acc + V^T weights^T of a block, for 64 columns."""
    if EXACT:
        added = warpgroup_mma(values, weights, gl.zeros_like(acc), use_acc=False, is_async=True)
        acc = acc + warpgroup_mma_wait(0, deps=(added,))
    else:
        acc = warpgroup_mma(values, weights, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc


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
