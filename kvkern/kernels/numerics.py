"""Number formats on the device: e4m3 by the card or by integer operations, exact rounding anywhere.

Triton's interpreter truncates fp32 to bf16, loses carries on the way to fp8 and knows no fp8 NaN;
here is the one place that works around it, so that a kernel gives the same bits everywhere.
"""

import triton
import triton.language as tl

LN_2 = 0.6931471805599453
INTERPRET: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """fp32 to bf16, fp16 or fp32: nearest, ties to even; NaN stays NaN."""
    if INTERPRET and DTYPE == tl.bfloat16:
        word = x.to(tl.int32, bitcast=True)
        bits = ((word + 0x7FFF + ((word >> 16) & 1)) >> 16).to(tl.int16)
        return tl.where(x != x, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def cast_to(x, DTYPE: tl.constexpr):
    """``round_to`` for bytes that are compared: every NaN has the same bits.

    They are the card's own, which costs it nothing: 0x7FFF for bf16 and fp16.
    """
    if DTYPE == tl.float32:
        word = x.to(tl.int32, bitcast=True)
        return tl.where(x != x, 0x7FC00000, word).to(tl.int32).to(tl.float32, bitcast=True)
    elif INTERPRET and DTYPE != tl.float64:
        bits = round_to(x, DTYPE).to(tl.int16, bitcast=True)
        return tl.where(x != x, 0x7FFF, bits).to(tl.int16).to(DTYPE, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def encode_e4m3(x, NATIVE: tl.constexpr):
    """fp32 to e4m3 codes in uint8: nearest, ties to even, saturating at 448; NaN is 0x7F."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _encode_fp8(x, 3, 7, 0x7E)


@triton.jit
def encode_e5m2(x, NATIVE: tl.constexpr):
    """fp32 to e5m2 codes in uint8: nearest, ties to even, saturating at 57344; NaN is 0x7F."""
    if NATIVE:  # Triton 3.6 has sm_89 round twice, by way of fp16
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b16 low, high;
                cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
                cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
                mov.b32 $0, {low, high};
            }
            """,
            "=r,r,r,r,r",
            [x],
            dtype=tl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        return _encode_fp8(x, 2, 15, 0x7B)


@triton.jit
def _encode_fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    SHIFT: tl.constexpr = 23 - MANTISSA
    STEP: tl.constexpr = BIAS + MANTISSA - 1  # subnormal numbers are multiples of 2^-STEP
    word = x.to(tl.int32, bitcast=True)
    sign = (word >> 24) & 0x80
    magnitude = word & 0x7FFFFFFF
    # normal: round the mantissa, move the exponent bias from 127
    half = (1 << (SHIFT - 1)) - 1
    normal = (magnitude + half + ((magnitude >> SHIFT) & 1)) >> SHIFT
    normal = tl.minimum(normal - ((127 - BIAS) << MANTISSA), LARGEST)
    # below: adding 2^(23 - STEP) leaves the value in units of a step in the low mantissa bits
    shifted = magnitude.to(tl.float32, bitcast=True) + 2.0 ** (23 - STEP)
    subnormal = shifted.to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal) | sign
    return tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def decode_e4m3(codes, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """uint8 e4m3 codes to bf16, fp16 or fp32; exact."""
    if NATIVE:
        half = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        # bf16 by way of fp32: the card has no instruction from fp16, and sm_89 not even a sequence
        return half.to(tl.float32).to(DTYPE) if DTYPE == tl.bfloat16 else half.to(DTYPE)
    code = codes.to(tl.int32)
    # the same bits one exponent field higher are an fp16, 2^8 too small
    half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.int16)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(DTYPE)


@triton.jit
def decode_e5m2(codes):
    """uint8 e5m2 codes to fp32; exact. They are the upper bytes of fp16."""
    half = (codes.to(tl.int32) << 8).to(tl.int16)
    return half.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def power_of_two_scale(amax, E4M3_MAX: tl.constexpr, MIN_SCALE: tl.constexpr):
    """amax / 448, at least MIN_SCALE, rounded up to a power of two; exact, as fp32."""
    return power_of_two_above(tl.maximum(tl.div_rn(amax, E4M3_MAX), MIN_SCALE))


@triton.jit
def power_of_two_above(x):
    """The least that is not below ``x``, a normal number > 0."""
    word = (x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return word.to(tl.float32, bitcast=True)


@triton.jit
def finite_magnitude(x):
    """|x| for a maximum: of infinity and NaN what it passes over, as a card's does NaN."""
    if INTERPRET:
        return tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)
    else:  # one instruction, beside those that compare: infinity times 0 is NaN
        return tl.abs(tl.fma(x, 0.0, x))


@triton.jit
def over_constant(x, DIVISOR: tl.constexpr):
    """x / DIVISOR, rounded once where that is 2^-100 or more, and no more than that below.

    Three instructions, where a division that takes any number is ten and a branch. The divisors are
    e4m3's and e5m2's largest: of another, its own inverse might be too far off. Source: Markstein,
    IBM J. Res. Dev. 34(1), 1990.
    """
    if INTERPRET:  # has no fused product
        return tl.div_rn(x, DIVISOR)
    else:
        INVERSE: tl.constexpr = 1.0 / DIVISOR
        quotient = x * INVERSE
        return tl.fma(tl.fma(quotient, -DIVISOR, x), INVERSE, quotient)


@triton.jit
def inverse_of(x):
    """1 / x, rounded once; ``x`` is in 2^-100 to 2^120: the card's guess, a step of Newton's."""
    if INTERPRET:
        return tl.div_rn(1.0, x)
    else:
        near = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.fma(near, tl.fma(-x, near, 1.0), near)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), to 2^-20 of itself; below 2^-126 it may be 0.

    Four instructions: those that Triton makes of the formula are twelve.
    """
    if INTERPRET:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .f32 t;
                mul.f32 t, $1, 0fBFB8AA3B;  // -log2(e)
                ex2.approx.ftz.f32 t, t;
                add.f32 t, t, 0f3F800000;
                rcp.approx.ftz.f32 $0, t;
            }
            """,
            "=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def encode_e2m1(x):
    """fp32 to e2m1 codes 0 to 15 in int32: nearest, ties to even, saturating at 6; NaN is 0."""
    word = x.to(tl.int32, bitcast=True)
    magnitude = tl.where(x != x, 0.0, tl.abs(x))
    code = (magnitude > 0.25).to(tl.int32) + (magnitude >= 0.75).to(tl.int32)
    code += (magnitude > 1.25).to(tl.int32) + (magnitude >= 1.75).to(tl.int32)
    code += (magnitude > 2.5).to(tl.int32) + (magnitude >= 3.5).to(tl.int32)
    code += (magnitude > 5.0).to(tl.int32)
    return code | tl.where(x != x, 0, (word >> 28) & 8)


@triton.jit
def decode_e2m1(codes):
    """e2m1 codes 0 to 15 to fp32; exact."""
    code = codes.to(tl.int32)
    # the same bits as an fp16's lowest exponents and highest mantissa bit are 2^14 too small
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.constexpr_function
def compute_dtype(ptr):
    """What a tensor's elements are multiplied in: their own dtype; fp32 in the interpreter.

    The interpreter's bf16 products are garbage.
    """
    return tl.float32 if INTERPRET.value else ptr.dtype.element_ty
