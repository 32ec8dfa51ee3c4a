"""write_kv on random calls and on batches of every size: all bytes, also around the outputs."""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from kvkern import CacheFormat, PagedBatch, PagedKVCache, write_kv
from kvkern.layout import FORMAT_NAMES
from kvkern.testing.inputs import rope_freqs, shuffled_table
from tests.ops.steps import (
    BF16,
    CANARY,
    E4M3,
    FP16,
    FP32,
    bits,
    make_step,
    offsets_of,
    same,
    written,
)

ON_A_CARD = torch.cuda.is_available()
FLOATS = [BF16, FP16, FP32]


class Arguments:
    """Tensors as views of wider ones, which hold CANARY in all other places."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.bases: list[Tensor] = []
        self.views: dict[str, tuple] = {}  # name -> base, shape, strides, start

    def __repr__(self) -> str:
        return repr(self.views)

    def place(self, columns: dict[str, int], rows: tuple[int, ...], dtype: torch.dtype) -> None:
        """Lay ``[*rows, width]`` tensors side by side in a wider one, tokens or heads first."""
        gaps = [self.rng.choice([0, 1, 8]) for _ in columns]
        pitch = sum(columns.values()) + sum(gaps)
        strides = [pitch, 1] if len(rows) == 1 else [rows[1] * pitch, pitch, 1]
        if len(rows) == 2 and self.rng.random() < 0.4:
            strides = [pitch, rows[0] * pitch, 1]
        start = self.rng.choice([0, 0, 1, 8])
        base = torch.empty(start + math.prod(rows) * pitch + 8, dtype=dtype)
        base.view(torch.uint8).fill_(CANARY)
        for (name, width), gap in zip(columns.items(), gaps, strict=True):
            start += gap
            self.views[name] = (len(self.bases), (*rows, width), strides, start)
            start += width
        self.bases.append(base)

    def place_values(self, name: str, values: Tensor) -> None:
        """Lay a contiguous tensor at any alignment."""
        start = self.rng.choice([0, 0, 1, 8])
        base = torch.empty(start + values.numel(), dtype=values.dtype)
        self.views[name] = (len(self.bases), values.shape, values.stride(), start)
        self.bases.append(base)
        self.fill(name, values)

    def fill(self, name: str, values: Tensor) -> None:
        _view(self.bases, self.views[name]).copy_(values)

    def on(self, device: str) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Copies of the wide tensors, and the arguments in them."""
        bases = [base.to(device, copy=True) for base in self.bases]
        return bases, {name: _view(bases, view) for name, view in self.views.items()}


def _view(bases, view):
    index, shape, strides, start = view
    return bases[index].as_strided(shape, strides, start)


def random_values(rng, shape, dtype, is_wide):
    """Normal numbers, some rows with a few that are extreme; ``is_wide``: as far as dtype goes."""
    info = torch.finfo(dtype)
    extremes = [math.nan, math.inf, -math.inf, 1e4, 448.0, -0.0]
    if is_wide:
        extremes += [info.max, -info.max, info.tiny]
    if is_wide and (ON_A_CARD or dtype != BF16):  # see RandomCall
        extremes += [info.tiny / 8, -info.tiny / 4]
    values = (torch.randn(shape) * rng.choice([1.0, 1e-3, 30.0])).to(dtype)
    if values.numel():
        for row in values.view(-1, shape[-1]):
            while rng.random() < 0.4:
                row[rng.randrange(len(row))] = rng.choice(extremes)
    return values


def random_batch(rng, page_size):
    """Requests of 0 to 3 new tokens on shuffled pages, some of them -1; its number of pages."""
    query_lens = [rng.choice([0, 1, 2, 3]) for _ in range(rng.choice([0, 2, 2, 3, 3, 4, 4]))]
    if rng.random() < 0.2:
        query_lens = [1] * 5
    cached = [rng.choice([0, 1, page_size - 1, page_size, 5]) for _ in query_lens]
    seq_lens = [c + q for c, q in zip(cached, query_lens, strict=True)]
    num_pages = sum(-(-n // page_size) for n in seq_lens) + 2
    table = shuffled_table(seq_lens, page_size, num_pages)
    for row in table:
        if rng.random() < 0.3:
            row[rng.randrange(len(row))] = -1
    return (offsets_of(query_lens), cached, table), num_pages


def random_slots(rng, num_tokens, num_slots):
    slots = rng.sample(range(num_slots), min(num_tokens, num_slots))
    slots += [-1] * (num_tokens - len(slots))
    for token in range(num_tokens):
        if rng.random() < 0.3:
            slots[token] = rng.choice([-1, -7, num_slots, num_slots + 40, 2**31 - 1])
    return torch.tensor(slots, dtype=rng.choice([torch.int32, torch.int64]))


class RandomCall:
    """One call drawn from all that the contract allows."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        torch.manual_seed(seed)
        choice = self.rng.choice
        name = FORMAT_NAMES[seed % len(FORMAT_NAMES)]  # no format is left to luck
        self.format = CacheFormat(name, choice([128, 256, 512]), choice([0, 32, 64]))
        self.scales = choice([(1.0, 1.0), (0.013, 0.7)]) if self.format.layer_scaled else (1.0, 1.0)
        self.page_size = choice([1, 3, 16, 64])
        self.dtype, self.gamma_dtype, self.q_gamma_dtype = (choice(FLOATS) for _ in range(3))
        self.options = {
            "eps": choice([0.0, 1e-6, 1.0]),
            "rope_style": choice(["interleaved", "half"]),
            "rounding": choice(["once", "hf"]),
            "sanitize": choice([True, False]),
        }
        # The interpreter cannot read bf16 subnormals, which this rounding makes of huge ratios.
        is_bf16 = BF16 in (self.gamma_dtype, self.q_gamma_dtype)
        self.is_wide = ON_A_CARD or not (is_bf16 and self.options["rounding"] == "hf")
        self.arguments = Arguments(self.rng)
        self.in_place: dict[str, str] = {}  # output -> input
        self.batch, self.num_pages = random_batch(self.rng, self.page_size)
        self.num_tokens = self.batch[0][-1] + choice([0, 0, 1, 3])
        self._draw_places()
        self._draw_row()
        self._draw_query()
        self._draw_query_latent()

    def __str__(self) -> str:
        drawn = {name: value for name, value in vars(self).items() if name != "rng"}
        return ", ".join(f"{name}={value}" for name, value in drawn.items())

    def write(self, device, backend):
        """Every byte that the call could reach, on the CPU, by name."""
        cache = PagedKVCache(
            self.format, num_layers=2, num_pages=self.num_pages, page_size=self.page_size,
            device=device, latent_scale=self.scales[0], rope_scale=self.scales[1],
        )  # fmt: skip
        cache.buffer.fill_(CANARY)
        bases, arguments = self.arguments.on(device)
        for output, source in self.in_place.items():
            arguments[output] = arguments[source]
        target = cache.layer(1)
        if self.batch is not None:
            target = cache.view(1, PagedBatch(*self.batch, device=device))
        arguments.setdefault("freqs", None)
        write_kv(target, **arguments, **self.options, backend=backend)
        reached = {"cache": cache.buffer}
        for index, base in enumerate(bases):
            names = [name for name, view in self.arguments.views.items() if view[0] == index]
            reached["+".join(names)] = base
        return {name: bits(base.cpu()) for name, base in reached.items()}

    def _draw_places(self):
        """By pages or by slots, at the batch's positions or others, with a table for them."""
        rng, rope_dim = self.rng, self.format.rope_dim
        num_positions = max([0, *(cached + 3 for cached in self.batch[1])])
        by_slots = rng.random() < 0.3
        if by_slots:
            slots = random_slots(rng, self.num_tokens, self.num_pages * self.page_size)
            self.arguments.place_values("slot_mapping", slots)
            self.batch = None
        if rng.random() < 0.3 or (by_slots and rope_dim):
            positions = torch.randint(-1, num_positions + 2, (self.num_tokens,))
            dtype = rng.choice([torch.int32, torch.int64])
            self.arguments.place_values("positions", positions.to(dtype))
        if rope_dim:
            freqs = rope_freqs(num_positions, rope_dim)
            dtype = rng.choice([*FLOATS, torch.float64])
            self.arguments.place_values("freqs", freqs.to(dtype))

    def _draw_row(self):
        self._place("kv", (self.num_tokens,), self.format.row_dim)
        self._place_gamma("gamma", self.format.kv_lora_rank, self.gamma_dtype)
        kv_out = self.rng.choice(["none", "apart", "in place"])
        if kv_out == "apart":
            columns = {"kv_out": self.format.row_dim}
            self.arguments.place(columns, (self.num_tokens,), self.dtype)
        elif kv_out == "in place":
            self.in_place["kv_out"] = "kv"

    def _draw_query(self):
        """Rope columns, nope columns or both: in place, or packed in either order, or in e4m3."""
        rng, rows = self.rng, (self.num_tokens, self.rng.randrange(6))
        widths = {"q_rope": self.format.rope_dim, "q_nope": rng.choice([5, 24, 64, 512])}
        names = rng.choice([["q_rope", "q_nope"], ["q_nope", "q_rope"], ["q_rope"], ["q_nope"], []])
        for name in names:
            self._place(name, rows, widths[name])
        how = rng.choice(["packed", "in place", "e4m3"]) if names else "absent"
        if how == "in place":
            self.in_place.update({f"{name}_out": name for name in names})
        elif how != "absent":
            packed = {f"{name}_out": widths[name] for name in names}
            self.arguments.place(packed, rows, E4M3 if how == "e4m3" else self.dtype)
        if how == "e4m3":
            q_scale = torch.tensor([rng.choice([1.0, 0.02, 3.7, 2.0**-10])])
            self.arguments.place_values("q_scale", q_scale)

    def _draw_query_latent(self):
        dim = self.rng.choice([0, 0, 40, 128, 200])
        if not dim:
            return
        self._place("q_latent", (self.num_tokens,), dim)
        self._place_gamma("q_gamma", dim, self.q_gamma_dtype)
        if self.rng.random() < 0.5:
            self.in_place["q_latent_out"] = "q_latent"
        else:
            self.arguments.place({"q_latent_out": dim}, (self.num_tokens,), self.dtype)

    def _place(self, name, rows, width):
        self.arguments.place({name: width}, rows, self.dtype)
        values = random_values(self.rng, (*rows, width), self.dtype, self.is_wide)
        self.arguments.fill(name, values)

    def _place_gamma(self, name, dim, dtype):
        gamma = random_values(self.rng, (dim,), dtype, self.is_wide)
        self.arguments.place_values(name, gamma)


SEEDS = 6 * len(FORMAT_NAMES)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_bytes_equal_the_reference_on_random_calls(device, seed):
    """Whole tensors, so that one byte beside an output, or of an input, would show."""
    call = RandomCall(seed)
    expected, got = call.write("cpu", "reference"), call.write(device, "triton")
    for name in expected:
        differs = (expected[name] != got[name]).nonzero().flatten().tolist()
        assert not differs, f"{name} differs in {len(differs)} bytes, first {differs[:4]}: {call}"


# ---- batches of every size: more requests than are looked at together, and more than their square


def busy_requests(num_requests):
    """Requests that have tokens: each end of the batch and of every block, and some between."""
    ends = {size * n + k for size in (32, 1024, 32768) for n in (0, 1, 2) for k in (-1, 0, 1)}
    ends |= {num_requests - 1, *torch.randint(num_requests, (8,)).tolist()}
    return sorted(ends & set(range(num_requests)))


def step_of(query_lens, num_padding=2):
    """A step of these requests at random lengths; those without tokens have no page."""
    num_tokens = sum(query_lens) + num_padding
    step = make_step("fp8_token", (128, 32), num_tokens=num_tokens, num_heads=1)
    cached = torch.randint(6, (len(query_lens),)).tolist()
    seq_lens = [c + q if q else 0 for c, q in zip(cached, query_lens, strict=True)]
    step.num_pages = sum(-(-n // step.page_size) for n in seq_lens) + 1
    table = shuffled_table(seq_lens, step.page_size, step.num_pages)
    table = [[*row, -1][:2] for row in table]
    step.batch = (offsets_of(query_lens), cached, table)
    return step


def slots_of(step):
    """Where the step's tokens belong, by going through its requests."""
    offsets, cached, table = step.batch
    return [
        table[request][position // step.page_size] * step.page_size + position % step.page_size
        for request, (start, end) in enumerate(itertools.pairwise(offsets))
        for position in range(cached[request], cached[request] + end - start)
    ]


def assert_every_token_is_in_its_place(step, device):
    expected, got = step.write("cpu", "reference"), step.write(device, "triton")
    same(got, expected)
    is_written = (got.storage[1] != CANARY).any(-1).flatten()
    assert is_written.nonzero().flatten().tolist() == sorted(slots_of(step))


NUM_REQUESTS = [1, 31, 32, 33, 200, 1024, 1100, 33_000]


@pytest.mark.parametrize("num_requests", NUM_REQUESTS)
def test_tokens_find_their_requests_among_any_number(device, num_requests):
    query_lens = [0] * num_requests
    for request in busy_requests(num_requests):
        query_lens[request] = int(torch.randint(1, 3, ()))
    query_lens[0] = 2  # else no request might have more than one
    assert_every_token_is_in_its_place(step_of(query_lens), device)


@pytest.mark.parametrize("num_requests", [1, 33, pytest.param(1100, marks=pytest.mark.gpu)])
def test_tokens_find_their_requests_when_each_has_one(device, num_requests):
    assert_every_token_is_in_its_place(step_of([1] * num_requests), device)


@pytest.mark.parametrize("num_requests", NUM_REQUESTS)
def test_tokens_find_their_requests_when_some_have_one_and_others_none(device, num_requests):
    query_lens = [0] * num_requests
    for request in busy_requests(num_requests):
        query_lens[request] = 1
    assert_every_token_is_in_its_place(step_of(query_lens), device)


@pytest.mark.gpu
@pytest.mark.parametrize("num_requests", [200, 1100, 33_000])
def test_tokens_find_their_requests_when_most_have_some(device, num_requests):
    query_lens = torch.randint(3, (num_requests,)).tolist()
    assert_every_token_is_in_its_place(step_of(query_lens), device)


@pytest.mark.parametrize("num_requests, max_query_len", [(0, 1), (40, 1), (1, 3), (20, 3)])
def test_static_batch_is_written_as_the_same_batch_and_its_padding_is_not(
    device, num_requests, max_query_len
):
    """Room for 40 requests and 44 tokens: what is not used has to look like padding."""
    query_lens = torch.randint(1, max_query_len + 1, (num_requests,)).tolist()
    while sum(query_lens) > 40:
        query_lens[query_lens.index(max(query_lens))] -= 1
    num_tokens = sum(query_lens)
    step = step_of(query_lens, num_padding=44 - num_tokens)
    batch = PagedBatch.static(
        max_requests=40, max_tokens=44, max_pages=2, max_query_len=max_query_len, max_seq_len=8,
        device=device,
    )  # fmt: skip
    cache, arguments = step.new_cache(device), step.arguments(device)
    view = cache.view(1, batch)
    batch.refill(*step.batch)
    write_kv(view, **arguments, backend="triton")
    same(written(cache, arguments), step.write("cpu", "reference"))
    assert (arguments["kv_out"][num_tokens:] == 0).all()
