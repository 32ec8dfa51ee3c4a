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
    """``round_to`` for bytes that are compared: every NaN has the same bits."""
    is_nan = x != x
    if DTYPE == tl.bfloat16:
        bits = round_to(x, tl.bfloat16).to(tl.int16, bitcast=True)
        return tl.where(is_nan, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif DTYPE == tl.float16:
        bits = x.to(tl.float16).to(tl.int16, bitcast=True)
        return tl.where(is_nan, 0x7E00, bits).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        word = x.to(tl.int32, bitcast=True)
        return tl.where(is_nan, 0x7FC00000, word).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(x, NATIVE: tl.constexpr):
    """fp32 to e4m3 codes in uint8: nearest, ties to even, saturating at 448; NaN is 0x7F."""
    if NATIVE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    word = x.to(tl.int32, bitcast=True)
    sign = (word >> 24) & 0x80
    magnitude = word & 0x7FFFFFFF
    # normal: round the mantissa to 3 bits, move the exponent bias from 127 to 7
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    normal = tl.minimum(normal, 0x7E)
    # below 2^-6: adding 2^14 leaves the value in units of 2^-9 in the low mantissa bits
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(magnitude < (121 << 23), subnormal, normal) | sign
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
def power_of_two_scale(amax, E4M3_MAX: tl.constexpr, MIN_SCALE: tl.constexpr):
    """amax / 448, at least MIN_SCALE, rounded up to a power of two; exact, as fp32."""
    ratio = tl.maximum(tl.div_rn(amax, E4M3_MAX), MIN_SCALE)
    word = (ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return word.to(tl.float32, bitcast=True)


@triton.constexpr_function
def compute_dtype(ptr):
    """What a tensor's elements are multiplied in: their own dtype; fp32 in the interpreter.

    The interpreter's bf16 products are garbage.
    """
    return tl.float32 if INTERPRET.value else ptr.dtype.element_ty
