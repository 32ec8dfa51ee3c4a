import math
import random
import struct
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from kvkern import CacheFormat, PagedBatch, PagedKVCache
from kvkern.layout import FORMAT_NAMES
from kvkern.reference.paging import (
    e2m1_scales,
    pack_e2m1,
    place_tokens,
    power_of_two_scales,
    read_rows,
    round_to,
    token_scales,
    unpack_e2m1,
    write_rows,
)

E4M3 = torch.float8_e4m3fn
DTYPES = [E4M3, torch.bfloat16, torch.float16, torch.float32]


def places_one_by_one(offsets, lengths, table, page_size, num_tokens):
    """(position, slot) of each token, or None for padding; by walking over the requests."""
    places = [None] * num_tokens
    for request, length in enumerate(lengths):
        for token in range(offsets[request], offsets[request + 1]):
            position = length + token - offsets[request]
            column, within = divmod(position, page_size)
            page = table[request][column] if column < len(table[request]) else -1
            if page >= 0:
                places[token] = (position, page * page_size + within)
    return places


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_placed_as_by_walking_over_the_requests(device, seed):
    """Random steps: empty requests, none at all, pages of -1, padding behind."""
    rng = random.Random(seed)
    num_requests, page_size = rng.randint(0, 6), rng.choice([1, 3, 4, 16])
    offsets, lengths, table = [0], [], []
    for _ in range(num_requests):
        offsets.append(offsets[-1] + rng.choice([0, 1, rng.randint(1, 9)]))
        lengths.append(rng.choice([0, page_size - 1, rng.randint(0, 40)]))
        table.append([rng.choice([-1, rng.randint(0, 2**20)]) for _ in range(60)])
    num_tokens = offsets[-1] + rng.randint(0, 3)
    expected = places_one_by_one(offsets, lengths, table, page_size, num_tokens)
    batch = PagedBatch(offsets, lengths, table, device=device)
    positions, slots, is_real = place_tokens(batch, page_size, num_tokens)
    got = zip(positions.tolist(), slots.tolist(), is_real.tolist(), strict=True)
    assert [(p, s) if real else None for p, s, real in got] == expected


def test_slots_are_counted_in_64_bits(device):
    batch = PagedBatch([0, 1], [16383], [[2**20]], device=device)
    assert place_tokens(batch, 16384, 1).slots.item() == 2**34 + 16383


@lru_cache
def e4m3_values():
    """The values of codes 0..126, from the format's definition."""
    subnormal = [Fraction(m, 2**9) for m in range(8)]
    normal = [Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)]
    return [*subnormal, *normal][:127]


def test_e4m3_is_the_nearest_of_its_codes_ties_to_even():
    values = e4m3_values()
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    exact = torch.tensor([float(x) for x in values + middles])  # each fits fp32
    up = torch.nextafter(exact, torch.tensor(math.inf))
    down = torch.nextafter(exact, torch.tensor(0.0))
    x = torch.cat([exact, up, down, torch.rand(500) * 460])
    distance = (x.double()[:, None] - torch.tensor([float(v) for v in values]).double()).abs()
    is_nearest = distance == distance.min(dim=1, keepdim=True).values
    assert (is_nearest.sum(1) == 2).sum() == len(middles)
    code = torch.where(is_nearest.sum(1) == 2, is_nearest[:, 0::2].int().argmax(1) * 2, -1)
    code = torch.where(code < 0, is_nearest.int().argmax(1), code)
    for sign, bit in [(1.0, 0), (-1.0, 0x80)]:
        assert torch.equal(round_to(sign * x, E4M3).view(torch.uint8).long(), code | bit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_nan_is_rounded_to_the_same_bits(device, dtype):
    words = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -(2**22), -(2**23) + 1])
    nans = words.int().view(torch.float32).to(device)
    assert nans.isnan().all()
    stored = round_to(nans, dtype)
    assert stored.float().isnan().all()
    rows = stored.view(torch.uint8).view(len(words), -1)
    assert (rows == rows[0]).all() and rows[0, -1] < 0x80  # the sign is plus


def test_e4m3_saturates_and_others_overflow(device):
    x = torch.tensor([448.0, 464.0, 465.0, 1e4, torch.inf, -torch.inf], device=device)
    assert round_to(x, E4M3).float().tolist() == [448.0] * 5 + [-448.0]
    assert round_to(x * 200, torch.float16).tolist()[-3:] == [torch.inf, torch.inf, -torch.inf]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sanitize_leaves_nothing_but_finite_numbers(device, dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.5, 3.4e38], device=device)
    assert round_to(x, dtype, sanitize=True).double().tolist() == pytest.approx(
        [0.0, largest, -largest, 1.5, min(3.4e38, largest)]
    )


@lru_cache
def e2m1_values():
    """The values of codes 0..7, from the definition: two bits of exponent, one of mantissa."""
    return [
        Fraction(code & 1, 2) if code < 2 else Fraction(2 + (code & 1), 2) * 2 ** ((code >> 1) - 1)
        for code in range(8)
    ]


def e2m1_code(x: float) -> int:
    """The nearest of the codes; of two, the even one."""
    if math.isnan(x):
        return 0
    magnitude = Fraction(min(abs(x), 6.0))
    distances = [abs(value - magnitude) for value in e2m1_values()]
    nearest = [code for code in range(8) if distances[code] == min(distances)]
    code = next(c for c in nearest if len(nearest) == 1 or c % 2 == 0)
    return code | (8 if math.copysign(1.0, x) < 0 else 0)


def hard_e2m1_floats():
    """All values, the middles between them, the floats beside both; extremes; random ones."""
    values = e2m1_values()
    exact = [float(x) for x in values + [(a + b) / 2 for a, b in pairwise(values)]]
    beside = [np.nextafter(np.float32(exact), np.float32(to)).tolist() for to in (-9, 9)]
    extremes = [math.nan, math.inf, 448.0, 3.4e38, 2.0**-149, 2.0**-126]
    found = [*exact, *beside[0], *beside[1], *extremes, *torch.rand(300).mul(7).tolist()]
    return found + [-x for x in found]


def test_e2m1_is_the_nearest_of_its_codes_ties_to_even(device):
    floats = hard_e2m1_floats()
    packed = pack_e2m1(torch.tensor(floats, device=device)).tolist()
    codes = [e2m1_code(np.float32(x).item()) for x in floats]
    assert packed == [low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True)]


def test_e2m1_saturates_keeps_the_sign_of_zero_and_has_no_nan(device):
    x = torch.tensor([torch.inf, -torch.inf, -0.0, 0.0, -torch.nan, torch.nan], device=device)
    assert pack_e2m1(x).tolist() == [0xF7, 0x08, 0x00]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_each_byte_holds_two_e2m1_columns_the_even_one_low(device, dtype):
    columns = unpack_e2m1(torch.arange(256, dtype=torch.uint8, device=device)[:, None], dtype)
    assert columns.dtype == dtype and columns.shape == (256, 2)
    values = [float(x) for x in e2m1_values()]
    values += [-x for x in values]
    expected = [[values[byte % 16], values[byte // 16]] for byte in range(256)]
    assert columns.tolist() == expected
    signs = [[nibble >= 8 for nibble in (byte % 16, byte // 16)] for byte in range(256)]
    assert columns.signbit().tolist() == signs  # of zeros too


def test_packing_undoes_unpacking(device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    assert torch.equal(pack_e2m1(unpack_e2m1(codes, torch.float32)), codes)


def test_e2m1_group_scale_is_the_e4m3_nearest_to_amax_over_6_and_never_0(device):
    values = e4m3_values()[1:]
    amax = [0.0, 2.0**-149, 1e-5, 2700.0, 1e30, *(10 ** torch.empty(300).uniform_(-4, 4)).tolist()]
    amax += [float(6 * v) for v in values]
    groups = torch.zeros(len(amax), 16, device=device)
    groups[:, 5] = -torch.tensor(amax, device=device)
    groups[:, 9] = torch.nan
    ratios = [Fraction(float(np.float32(a) / np.float32(6.0))) for a in amax]
    expected = [float(min(values, key=lambda v: (abs(v - ratio), v))) for ratio in ratios]
    assert e2m1_scales(groups).tolist() == expected
    assert expected[:5] == [2.0**-9, 2.0**-9, 2.0**-9, 448.0, 448.0]


def test_e2m1_group_scale_ignores_nan_and_holds_infinity_as_the_largest(device):
    groups = torch.full((2, 16), torch.nan, device=device)
    groups[0, 3] = -torch.inf
    assert e2m1_scales(groups).tolist() == [448.0, 2.0**-9]


def test_token_scale_is_amax_over_448(device):
    amax = np.float32([448.0, 1.0, 0.002, 2.9e38, 1e-25, *np.random.default_rng(0).random(300)])
    groups = torch.zeros(len(amax), 1, 128, device=device)
    groups[:, 0, 77] = -torch.from_numpy(amax).to(device)
    groups[:, 0, 3] = torch.nan
    assert token_scales(groups).flatten().tolist() == (amax / np.float32(448.0)).tolist()


def test_token_scale_of_nothing_is_tiny_and_of_infinity_keeps_the_row_finite(device):
    groups = torch.tensor([[0.0, 2.0**-149], [torch.nan] * 2, [1.0, -torch.inf]], device=device)
    assert token_scales(groups).tolist() == [2.0**-100, 2.0**-100, 2.0**119]


def scale_by_fractions(amax: float) -> float:
    ratio = max(Fraction(float(np.float32(amax) / np.float32(448.0))), Fraction(1e-4))
    exponent = -13
    while Fraction(2) ** exponent < ratio:
        exponent += 1
    return float(Fraction(2) ** exponent)


def test_group_scale_is_the_smallest_power_of_two_at_least_amax_over_448(device):
    cases = [0.0, 2.0**-149, 0.0447, 0.0448, 336.0, 448.0, 449.0, 2.9e38]
    cases += [448.0 * 2.0**n for n in range(-14, 119)]
    cases += np.nextafter(np.float32(cases), np.float32(np.inf)).tolist()
    cases += (10 ** torch.empty(500).uniform_(-6, 38)).tolist()
    groups = torch.zeros(len(cases), 128, device=device)
    groups[:, 77] = -torch.tensor(cases, device=device)
    expected = [min(scale_by_fractions(amax), 2.0**119) for amax in cases]
    scales = power_of_two_scales(groups).tolist()
    assert scales == expected
    assert scales[0] == 2.0**-13 and scales[cases.index(336.0)] == 1.0


def test_group_scale_ignores_nan_and_keeps_a_row_of_infinity_finite(device):
    groups = torch.full((3, 128), 448.0, device=device)
    groups[0, 5], groups[1, 5], groups[2] = torch.nan, -torch.inf, torch.nan
    scales = power_of_two_scales(groups)
    assert scales.tolist() == [1.0, 2.0**119, 2.0**-13]
    assert (scales * 448).isfinite().all()


def e4m3_number(code: int) -> Fraction:
    return e4m3_values()[code & 0x7F] * (-1 if code & 0x80 else 1)


def decode_nvfp4(row: bytes, latent_scale: Fraction, rope_scale: Fraction) -> list[Fraction]:
    """352 bytes: 512 columns of 4 bits, 32 scales of 16 columns, 64 rope columns."""
    columns = []
    for column in range(512):
        code = row[column // 2] >> 4 * (column % 2) & 0xF
        value = e2m1_values()[code & 7] * (-1 if code & 8 else 1)
        columns.append(value * e4m3_number(row[256 + column // 16]) * latent_scale)
    return columns + [e4m3_number(code) * rope_scale for code in row[288:352]]


def test_nvfp4_bytes_mean_what_an_independent_decoder_says(device):
    cache = PagedKVCache(
        CacheFormat("nvfp4"), num_layers=2, num_pages=2, page_size=3, device=device,
        latent_scale=[1.0, 0.3], rope_scale=[1.0, 0.7],
    )  # fmt: skip
    codes = torch.randint(256, (cache.num_bytes,), dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN in a scale and in a rope column
    cache.buffer.copy_(codes)
    layer_1 = bytes(codes.tolist())[6 * 352 :]
    scales = [Fraction(x) for x in cache.host_scales[1]]
    slots = [5, 0, 3]
    expected = [
        [float(x) for x in decode_nvfp4(layer_1[352 * slot : 352 * (slot + 1)], *scales)]
        for slot in slots
    ]
    rows = read_rows(cache.layer(1), torch.tensor(slots, device=device), torch.float64)
    assert rows.tolist() == expected


def decode_fp8_token(row: bytes, scale: bytes) -> list[Fraction]:
    """640 bytes: 512 columns of e4m3, 64 of bf16; the fp32 scale is of the former."""
    columns = [e4m3_number(code) * Fraction(*struct.unpack("<f", scale)) for code in row[:512]]
    for start in range(512, 640, 2):
        columns.append(Fraction(*struct.unpack("<f", bytes(2) + row[start : start + 2])))
    return columns


def test_fp8_token_bytes_mean_what_an_independent_decoder_says(device):
    """Rows of all layers first, then a scale for each."""
    cache = PagedKVCache(
        CacheFormat("fp8_token"), num_layers=2, num_pages=2, page_size=3, device=device
    )
    codes = torch.randint(256, (12, 640), dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    codes[:, 513::2] &= 0xBF  # no exponent of all ones
    scales = torch.rand(12).view(torch.uint8)
    cache.buffer.copy_(torch.cat([codes.flatten(), scales]))
    stored = bytes(cache.buffer.tolist())
    slots = [5, 0, 3]
    expected = []
    for place in (6 + slot for slot in slots):  # of layer 1
        row, scale = stored[640 * place :][:640], stored[12 * 640 + 4 * place :][:4]
        expected.append([float(x) for x in decode_fp8_token(row, scale)])
    rows = read_rows(cache.layer(1), torch.tensor(slots, device=device), torch.float64)
    assert rows.tolist() == expected


@pytest.mark.parametrize("sanitize", [False, True])
def test_nan_in_an_nvfp4_group_is_its_scale_unless_sanitized(device, sanitize):
    cache = PagedKVCache(
        CacheFormat("nvfp4", 64, 4), num_layers=1, num_pages=1, page_size=2, device=device
    )
    latent, rope = torch.full((2, 64), 3.0, device=device), torch.ones(2, 4, device=device)
    latent[0, 20] = torch.nan
    slots = torch.tensor([0, 1], device=device)
    write_rows(cache.layer(0), slots, latent, rope, sanitize)
    rows = read_rows(cache.layer(0), slots, torch.float32)
    expected = torch.cat([latent, rope], -1)
    if sanitize:
        expected[0, 20] = 0.0
    else:
        expected[0, 16:32] = torch.nan
    assert torch.equal(rows.isnan(), expected.isnan())
    assert torch.equal(rows.nan_to_num(9.0), expected.nan_to_num(9.0))
    assert cache.non_finite_pages([0]) == ([] if sanitize else [0])


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_rows_that_a_format_can_hold_come_back_exactly(device, name):
    """Powers of two times small integers: no format and no scale rounds them."""
    fmt = CacheFormat(name, 256, 32)
    scales = {"latent_scale": 0.5, "rope_scale": 4.0} if fmt.layer_scaled else {}
    cache = PagedKVCache(fmt, num_layers=1, num_pages=3, page_size=2, device=device, **scales)
    latent = torch.randint(-14, 15, (2, 256), device=device).float()
    latent[:, 0] = 14.0  # 448 * 2**-5: the scale of a token is a power of two
    if name == "nvfp4":
        held = torch.tensor([float(x) for x in e2m1_values()], device=device)
        latent = held[latent.abs().long() % 8] * latent.sign()
        latent[:, ::16] = -6.0  # the scale of a group is a power of two
    rope = torch.randint(-15, 16, (2, 32), device=device).float() * 4
    slots = torch.tensor([5, 2], device=device)
    write_rows(cache.layer(0), slots, latent, rope, sanitize=False)
    for dtype in [torch.float32, torch.float64]:
        rows = read_rows(cache.layer(0), slots, dtype)
        assert rows.dtype == dtype and torch.equal(rows, torch.cat([latent, rope], -1).to(dtype))
    for field in (cache.storage, cache.token_scales):
        if field is not None:
            untouched = field[0].flatten(0, 1)[[0, 1, 3, 4]]
            assert (untouched.view(torch.uint8) == 0xFF).all()
