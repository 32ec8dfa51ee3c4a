import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvkern.kernels.device import gpu_of
from kvkern.kernels.numerics import (
    cast_to,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    encode_e5m2,
    inverse_of,
    over_constant,
    power_of_two_scale,
    round_to,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(params=[pytest.param(True, marks=pytest.mark.gpu, id="native"), False])
def native(request, device):
    """By the card's own conversion, and by integer operations."""
    if request.param and not gpu_of(torch.device(device)).has_fp8:
        pytest.skip("this card does not convert e4m3")
    return request.param


@triton.jit
def _cast_kernel(src_ptr, dst_ptr, SIZE: tl.constexpr):
    offs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(dst_ptr + offs, cast_to(tl.load(src_ptr + offs), dst_ptr.dtype.element_ty))


@triton.jit
def _round_kernel(src_ptr, dst_ptr, SIZE: tl.constexpr):
    offs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(dst_ptr + offs, round_to(tl.load(src_ptr + offs), dst_ptr.dtype.element_ty))


@triton.jit
def _encode_kernel(src_ptr, dst_ptr, SIZE: tl.constexpr, NATIVE: tl.constexpr):
    offs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(dst_ptr + offs, encode_e4m3(tl.load(src_ptr + offs), NATIVE))


@triton.jit
def _encode_e5m2_kernel(src_ptr, dst_ptr, SIZE: tl.constexpr, NATIVE: tl.constexpr):
    offs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(dst_ptr + offs, encode_e5m2(tl.load(src_ptr + offs), NATIVE))


@triton.jit
def _decode_kernel(src_ptr, dst_ptr, SIZE: tl.constexpr, NATIVE: tl.constexpr):
    offs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    dtype: tl.constexpr = dst_ptr.dtype.element_ty
    tl.store(dst_ptr + offs, decode_e4m3(tl.load(src_ptr + offs), dtype, NATIVE))


@triton.jit
def _encode_e2m1_kernel(src_ptr, dst_ptr, SIZE: tl.constexpr):
    offs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(dst_ptr + offs, encode_e2m1(tl.load(src_ptr + offs)))


@triton.jit
def _decode_e2m1_kernel(src_ptr, dst_ptr, SIZE: tl.constexpr):
    offs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(dst_ptr + offs, decode_e2m1(tl.load(src_ptr + offs)))


@triton.jit
def _quotient_kernel(src_ptr, dst_ptr, SIZE: tl.constexpr, DIVISOR: tl.constexpr):
    offs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(src_ptr + offs)
    tl.store(dst_ptr + offs, over_constant(x, DIVISOR) if DIVISOR > 0 else inverse_of(x))


@triton.jit
def _scale_kernel(src_ptr, dst_ptr, SIZE: tl.constexpr):
    offs = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(dst_ptr + offs, power_of_two_scale(tl.load(src_ptr + offs), 448.0, 1e-4))


def run(kernel, values, dtype, device, size=1024, **constexprs):
    """One value in, one value out, on the CPU; padded to whole programs."""
    size = size if device == "cuda" else triton.next_power_of_2(len(values))
    num_programs = triton.cdiv(len(values), size)
    padded = values.new_zeros(num_programs * size)
    padded[: len(values)] = values
    dst = torch.zeros(len(padded), dtype=dtype, device=device)
    kernel[(num_programs,)](padded.to(device), dst, SIZE=size, **constexprs)
    return dst[: len(values)].cpu()


def hard_floats():
    """fp32 words: every upper half with lower halves around a bf16 midpoint; random ones."""
    upper = torch.arange(65536, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    random = torch.randint(2**32, (50_000,))
    words = torch.cat([(upper[:, None] | lower).flatten(), random])
    return (words - (words >= 2**31) * 2**32).int().view(FP32)


def midpoints(codes):
    """Neighbours' midpoints in fp32, exactly, and what lies on either side of them."""
    values = codes.double()
    values = values[values.isfinite()].unique()
    middle = ((values[1:] + values[:-1]) / 2).float()
    sides = [torch.nextafter(middle, torch.tensor(to)) for to in (math.inf, -math.inf)]
    return torch.cat([middle, *sides, values.float()])


def canonical(x):
    """As bytes, with the one NaN of the type that a card's own cast gives."""
    nan = torch.tensor(torch.nan)
    if x.dtype != FP32:
        nan = torch.tensor(0x7FFF, dtype=torch.int16).view(x.dtype)
    return torch.where(x.isnan(), nan, x).view(torch.uint8)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_cast_equals_torch_on_midpoints_subnormals_and_random_bits(device, dtype):
    values = hard_floats()
    if dtype == FP16:
        codes = torch.arange(65536).to(torch.uint16).view(FP16)
        values = torch.cat([values, midpoints(codes), torch.tensor([65519.99, 65520.0, -65520.0])])
    cast = run(_cast_kernel, values, dtype, device)
    assert torch.equal(cast.view(torch.uint8), canonical(values.to(dtype)))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_round_equals_torch_but_for_the_bits_of_nan(device, dtype):
    values = hard_floats()
    rounded = run(_round_kernel, values, dtype, device)
    assert torch.equal(rounded.isnan(), values.isnan())
    assert torch.equal(canonical(rounded), canonical(values.to(dtype)))


def test_encode_equals_torch_on_midpoints_subnormals_and_random_bits(device, native):
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    values = torch.cat([hard_floats(), midpoints(codes.float())])
    encoded = run(_encode_kernel, values, torch.uint8, device, NATIVE=native)
    expected = values.clamp(-448, 448).to(E4M3).view(torch.uint8)
    assert torch.equal(encoded, torch.where(values.isnan(), 0x7F, expected))


def test_encode_takes_the_nearest_code_and_the_even_one_of_two(device, native):
    """Against distances to all codes in fp64, independent of anybody's cast."""
    codes = torch.arange(127, dtype=torch.uint8)  # without NaN; signs are checked apart
    decoded = codes.view(E4M3).double()
    values = midpoints(codes.view(E4M3).float())
    values = torch.cat([values[values >= 0], torch.rand(2000) * 500, torch.rand(2000) * 0.02])
    distance = (values.double()[:, None] - decoded).abs()
    nearest = distance.argmin(1)
    is_tie = (distance == distance.min(1, keepdim=True).values).sum(1) == 2
    assert is_tie.sum() == 126  # argmin takes the lower of two
    nearest += is_tie & (nearest % 2 == 1)
    for sign, bit in [(1, 0), (-1, 0x80)]:
        encoded = run(_encode_kernel, sign * values, torch.uint8, device, NATIVE=native)
        assert torch.equal(encoded.long(), nearest | bit)


def test_encode_saturates_and_has_one_nan(device, native):
    words = torch.tensor([0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
    specials = torch.cat([words, words | -(2**31)]).view(FP32)
    large = torch.tensor([448.0, 464.0, 465.0, 1e4, 3.4e38, -449.0])
    values = torch.cat([specials, large])
    encoded = run(_encode_kernel, values, torch.uint8, device, NATIVE=native).tolist()
    assert encoded == [0x7E, 0x7F, 0x7F, 0x7F, 0xFE, 0x7F, 0x7F, 0x7F, *[0x7E] * 5, 0xFE]


def test_e5m2_takes_the_nearest_code_and_the_even_one_of_two(device, native):
    """Against distances to all codes in fp64, independent of anybody's cast; one NaN."""
    codes = torch.arange(124, dtype=torch.uint8)  # without infinity and NaN
    decoded = codes.view(E5M2).double()
    values = torch.cat([hard_floats(), midpoints(codes.view(E5M2).float())])
    magnitude = values.double().abs().nan_to_num(0.0, 57344.0).clamp(max=57344.0)
    upper = torch.searchsorted(decoded, magnitude).clamp(min=1)
    up, down = decoded[upper] - magnitude, magnitude - decoded[upper - 1]
    nearest = torch.where((up < down) | ((up == down) & (upper % 2 == 0)), upper, upper - 1)
    assert (up == down).sum() >= 2 * 123
    expected = torch.where(values.isnan(), 0x7F, nearest + 0x80 * values.signbit())
    encoded = run(_encode_e5m2_kernel, values, torch.uint8, device, NATIVE=native)
    assert torch.equal(encoded.long(), expected)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_decode_is_exact_on_all_256_codes(device, native, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = run(_decode_kernel, codes, dtype, device, NATIVE=native)
    expected = codes.view(E4M3).to(dtype)
    assert decoded.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(canonical(decoded), canonical(expected))


def test_encode_undoes_decode(device, native):
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = run(_decode_kernel, codes, FP32, device, NATIVE=native)
    encoded = run(_encode_kernel, decoded, torch.uint8, device, NATIVE=native)
    assert torch.equal(encoded, torch.where(codes == 0xFF, 0x7F, codes))


# sign, two bits of exponent with bias 1, one of mantissa; no infinity and no NaN
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def test_e2m1_takes_the_nearest_code_and_the_even_one_of_two(device):
    """Against distances to all codes in fp64; NaN gives 0, as the format has none."""
    values = torch.cat([hard_floats(), midpoints(E2M1), -midpoints(E2M1)])
    # past 6 all that matters is that 6 is nearest
    magnitude = values.double().abs().nan_to_num(0.0).clamp(max=7.0)
    distance = (magnitude[:, None] - E2M1).abs()
    nearest = distance.argmin(1)
    is_tie = (distance == distance.min(1, keepdim=True).values).sum(1) == 2
    assert magnitude[is_tie].unique().tolist() == [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    nearest += is_tie & (nearest % 2 == 1)  # argmin takes the lower of two
    nearest += 8 * values.signbit()
    expected = torch.where(values.isnan(), 0, nearest)
    assert torch.equal(run(_encode_e2m1_kernel, values, torch.int32, device).long(), expected)


def test_e2m1_saturates_and_keeps_the_sign_of_zero(device):
    values = torch.tensor([math.inf, -math.inf, 6.1, -448.0, 0.0, -0.0, -1e-45, math.nan])
    encoded = run(_encode_e2m1_kernel, values, torch.int32, device).tolist()
    assert encoded == [7, 15, 7, 15, 0, 8, 8, 0]


def test_e2m1_decode_is_exact_on_all_16_codes(device):
    decoded = run(_decode_e2m1_kernel, torch.arange(16, dtype=torch.uint8), FP32, device)
    expected = torch.cat([E2M1, -E2M1]).float()
    assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32))  # -0 too


def power_of_two_at_least(ratio: np.float32) -> float:
    return min(2.0**n for n in range(-13, 128) if 2.0**n >= float(ratio))


def test_scale_is_the_smallest_power_of_two_that_is_large_enough(device):
    exact = np.float32(448.0) * np.float32(2.0) ** np.arange(-20, 119, dtype=np.float32)
    amax = np.concatenate(
        [[0.0, 1e-40, 336.0], exact, np.nextafter(exact, np.inf), np.nextafter(exact, 0.0)]
    ).astype(np.float32)
    scales = run(_scale_kernel, torch.from_numpy(amax), FP32, device).tolist()
    floor = np.float32(1e-4)
    expected = [power_of_two_at_least(max(a / np.float32(448.0), floor)) for a in amax]
    assert scales == expected and scales[:3] == [2.0**-13, 2.0**-13, 1.0]


@pytest.mark.gpu
@pytest.mark.parametrize("divisor", [448.0, 57344.0, 0.0], ids=["448", "57344", "inverse"])
def test_short_divisions_round_once(divisor):
    """Every mantissa; exponents at both ends of the range, where the quotient is smaller too."""
    mantissas = torch.arange(2**23, device="cuda", dtype=torch.int32)
    for exponent in (-84, 0, 1, 119) if divisor else (-100, 0, 1, 119):
        x = (mantissas + ((127 + exponent) << 23)).view(FP32)
        expected = (x.double() / divisor if divisor else 1.0 / x.double()).float()
        dst = torch.empty_like(x)
        _quotient_kernel[(2**23 // 1024,)](x, dst, SIZE=1024, DIVISOR=divisor)
        assert torch.equal(dst, expected)
