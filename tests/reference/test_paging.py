import math
import random
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

from kvkern import CacheFormat, PagedBatch, PagedKVCache
from kvkern.layout import FORMAT_NAMES
from kvkern.reference.paging import (
    place_tokens,
    power_of_two_scales,
    read_rows,
    round_to,
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


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_rows_that_a_format_can_hold_come_back_exactly(device, name):
    """Powers of two times small integers: no format and no scale rounds them."""
    fmt = CacheFormat(name, 256, 32)
    scales = {"latent_scale": 0.5, "rope_scale": 4.0} if name == "fp8" else {}
    cache = PagedKVCache(fmt, num_layers=1, num_pages=3, page_size=2, device=device, **scales)
    latent = torch.randint(-15, 16, (2, 256), device=device).float()
    rope = torch.randint(-15, 16, (2, 32), device=device).float() * 4
    slots = torch.tensor([5, 2], device=device)
    write_rows(cache.layer(0), slots, latent, rope, sanitize=False)
    for dtype in [torch.float32, torch.float64]:
        rows = read_rows(cache.layer(0), slots, dtype)
        assert rows.dtype == dtype and torch.equal(rows, torch.cat([latent, rope], -1).to(dtype))
    untouched = cache.storage.flatten(1, 2)[0, [0, 1, 3, 4]]
    assert (untouched == 0xFF).all()
