"""Weights of 8 and 4 bits as kernels read them: words of 32 bits, taken apart plane by plane.

A row's chunk is 32 words. Plane i of them, the i-th byte or nibble of each, holds 32 columns that
follow one another. So planes of a tile are tiles of MMA operands where the tile is in registers as
an operand is, and a plane costs few instructions: two words' bits are put beside each other, made
the mantissas of two 16-bit floats, and what that adds is subtracted. All of it is exact.
"""

import triton
import triton.language as tl

from kvkern.kernels.numerics import INTERPRET

CHUNK_WORDS: tl.constexpr = tl.constexpr(32)


@triton.constexpr_function
def chunk_columns(bits):
    """Columns of a chunk."""
    return 32 // bits * 32


@triton.constexpr_function
def planes_per_group(group_size):
    """Planes that share a scale; 1 where all do."""
    return max(group_size // 32, 1)


@triton.jit
def round_to_int(x):
    """To the nearest int32, ties to even; of |x| < 2^22, and not where products may be fused."""
    return ((x + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def float_plane(words, zero, PLANE: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Plane of int32 ``words`` ``[..., N, W]`` less ``zero`` fp32 ``[..., N, 1]``, in DTYPE.

    Without a zero (None) less the codes' middle: 0 of 8 bits, which are signed, 8 of 4 bits.
    """
    if INTERPRET:
        code = (words >> (BITS * PLANE)) & (2**BITS - 1)
        if BITS == 8:
            code = (code ^ 128) - 128
        if zero is not None:
            code -= zero.to(tl.int32)
        elif BITS == 4:
            code -= 8
        return code.to(DTYPE)
    else:
        asm: tl.constexpr = _plane_asm(PLANE, BITS, DTYPE == tl.bfloat16, zero is not None)
        if zero is None:
            bits = tl.inline_asm_elementwise(asm, "=r,r,r", [words], tl.int16, True, pack=2)
        else:
            less = tl.broadcast_to(zero.to(DTYPE), words.shape)
            bits = tl.inline_asm_elementwise(asm, "=r,r,r,r", [words, less], tl.int16, True, pack=2)
        return bits.to(DTYPE, bitcast=True)


@triton.constexpr_function
def _plane_asm(plane, bits, is_bf16, has_zero):
    """PTX from two words ($1, $2), and twice a zero ($3), to two floats ($0)."""
    half, place = divmod(plane, 16 // bits)
    fma = "fma.rn.bf16x2" if is_bf16 else "fma.rn.f16x2"
    one = 0x3F803F80 if is_bf16 else 0x3C003C00
    above = 0x43004300 if is_bf16 else 0x64006400  # 128 or 1024: its last bits count ones
    middle = 0x00800080 if bits == 8 else 0x00080008
    mask = 0x00FF00FF if bits == 8 else 0x000F000F
    lines = [
        ".reg .b32 a, b, one, less;",
        f"mov.b32 one, {one:#x};",
        f"mov.b32 less, {one ^ _SIGNS:#x};",  # minus one
        f"prmt.b32 a, $1, $2, {0x7632 if half else 0x5410:#x};",  # one half of each word
    ]
    if place:
        lines += [f"shr.u32 a, a, {bits * place};"]
    if bits == 8 and is_bf16:
        # 7 bits above 128, exactly; the sign tells whether that is 128 or 256 too much
        lines += [
            f"lop3.b32 b, a, {middle:#x}, {above | _SIGNS:#x}, 0xea;",
            f"lop3.b32 a, a, {mask ^ middle:#x}, {above:#x}, 0xea;",
        ]
    else:
        # of 8 bits the sign is flipped: they count from the least code on, as 4 bits do
        lines += [f"lop3.b32 a, a, {mask:#x}, {above | (middle if bits == 8 else 0):#x}, 0x6a;"]
        too_much = above | _SIGNS if bits == 4 and has_zero else above | middle | _SIGNS
        lines += [f"mov.b32 b, {too_much:#x};"]
        if has_zero:
            lines += [f"{fma} b, $3, less, b;"]
    if has_zero and bits == 8 and is_bf16:  # last: before, there are too few bits for it
        lines += [f"{fma} a, a, one, b;", f"{fma} $0, $3, less, a;"]
    else:
        lines += [f"{fma} $0, a, one, b;"]
    return "{" + " ".join(lines) + "}"


_SIGNS = 0x80008000
