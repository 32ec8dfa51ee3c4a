"""The arguments of one ``write_kv`` for any device and backend, and what the write left behind."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kvkern import CacheFormat, CacheView, KvkernError, PagedBatch, PagedKVCache, write_kv
from kvkern.cache.storage import LayerPages
from kvkern.testing.inputs import rope_freqs

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
BACKENDS = pytest.mark.parametrize("backend", ["triton", "reference"])
CANARY = 0xA5  # finite in every format, and nothing that these inputs are stored as
PAGE_SIZE = 4

# Request 0 ends in the middle of its second page; request 1 has no new token; request 2 crosses
# into a page of -1. Two tokens lie past the end.
OFFSETS, LENGTHS = [0, 3, 3, 7], [3, 9, 2]
TABLE = [[5, 2, -1], [1, 4, 0], [3, -1, -1]]
NUM_TOKENS, NUM_PAGES = 9, 7
SLOTS = {0: 5 * 4 + 3, 1: 2 * 4, 2: 2 * 4 + 1, 3: 3 * 4 + 2, 4: 3 * 4 + 3}  # token -> slot
REAL, PADDING = [*SLOTS], [5, 6, 7, 8]
POSITIONS = [3, 4, 5, 2, 3]  # of the tokens that are stored

INPUTS = ("kv", "freqs", "gamma", "q_rope", "q_nope", "q_latent", "q_gamma", "q_scale")
ADDRESSES = ("positions", "slot_mapping")
OUTPUTS = ("q_rope_out", "q_nope_out", "q_latent_out", "kv_out")


class Written(NamedTuple):
    """What a write left behind, on the CPU."""

    storage: Tensor  # uint8 [layers, pages, page_size, bytes_per_token]
    outs: dict[str, Tensor]  # those of OUTPUTS that there were
    cache: PagedKVCache

    @property
    def q_rope(self) -> Tensor:
        return self.outs["q_rope_out"]

    @property
    def q_nope(self) -> Tensor:
        return self.outs["q_nope_out"]

    @property
    def q_latent(self) -> Tensor:
        return self.outs["q_latent_out"]

    @property
    def kv_out(self) -> Tensor:
        return self.outs["kv_out"]


@dataclass
class Step:
    """The arguments of one write, on the CPU."""

    fmt: CacheFormat
    kv: Tensor
    freqs: Tensor | None
    gamma: Tensor
    q_rope: Tensor | None = None
    q_nope: Tensor | None = None
    q_latent: Tensor | None = None
    q_gamma: Tensor | None = None
    q_scale: Tensor | None = None  # makes the query's outputs e4m3
    positions: Tensor | None = None
    slot_mapping: Tensor | None = None  # in place of the batch
    batch: tuple = (OFFSETS, LENGTHS, TABLE)
    num_pages: int = NUM_PAGES
    page_size: int = PAGE_SIZE
    scales: tuple[float, float] = (1.0, 1.0)

    def new_cache(self, device: str, num_layers: int = 2) -> PagedKVCache:
        latent_scale, rope_scale = self.scales if self.fmt.layer_scaled else (1.0, 1.0)
        cache = PagedKVCache(
            self.fmt,
            num_layers=num_layers,
            num_pages=self.num_pages,
            page_size=self.page_size,
            device=device,
            latent_scale=latent_scale,
            rope_scale=rope_scale,
        )
        cache.buffer.fill_(CANARY)
        return cache

    def target(self, cache: PagedKVCache, layer: int = 1) -> CacheView | LayerPages:
        """What ``write_kv`` takes as ``cache``."""
        if self.slot_mapping is not None:
            return cache.layer(layer)
        return cache.view(layer, PagedBatch(*self.batch, device=cache.device))

    def arguments(self, device: str) -> dict[str, Tensor | None]:
        """Inputs, and outputs that hold NaN."""
        arguments: dict[str, Tensor | None] = {
            name: None if (value := getattr(self, name)) is None else value.to(device)
            for name in (*INPUTS, *ADDRESSES)
        }
        arguments["kv_out"] = torch.empty_like(self.kv).to(device)
        for name in ("q_rope", "q_nope"):
            if (q := getattr(self, name)) is not None:
                dtype = q.dtype if self.q_scale is None else E4M3
                arguments[f"{name}_out"] = torch.empty_like(q, dtype=dtype).to(device)
        if self.q_latent is not None:
            arguments["q_latent_out"] = torch.empty_like(self.q_latent).to(device)
        return arguments

    def write(self, device: str, backend: str, *, layer: int = 1, **options: Any) -> Written:
        cache, arguments = self.new_cache(device), self.arguments(device)
        write_kv(self.target(cache, layer), **arguments, backend=backend, **options)
        return written(cache, arguments)


def written(cache: PagedKVCache, arguments: dict[str, Tensor | None]) -> Written:
    outs = {name: out.cpu() for name in OUTPUTS if (out := arguments.get(name)) is not None}
    return Written(token_bytes(cache), outs, cache)


def token_bytes(cache: PagedKVCache) -> Tensor:
    """All that is stored of each slot, on the CPU: the row, and the scale beside it if any."""
    parts = [cache.storage]
    if cache.token_scales is not None:
        parts.append(cache.token_scales[..., None].view(torch.uint8))
    return torch.cat(parts, dim=-1).cpu()


def make_step(
    name="bf16", dims=(128, 32), dtype=BF16, gamma_dtype=FP32, num_heads=0, num_tokens=NUM_TOKENS
) -> Step:
    fmt = CacheFormat(name, *dims)
    kv = torch.randn(num_tokens, fmt.row_dim).to(dtype)
    gamma = (torch.rand(fmt.kv_lora_rank) + 0.5).to(gamma_dtype)
    q_rope = torch.randn(num_tokens, num_heads, fmt.rope_dim).to(dtype) if num_heads else None
    step = Step(fmt, kv, rope_freqs(12, fmt.rope_dim), gamma, q_rope, scales=(0.02, 0.03))
    if num_tokens < OFFSETS[-1]:  # one request, from the same position
        step.batch = ([0, num_tokens], LENGTHS[:1], TABLE[:1])
    return step


def make_query_step(
    name="bf16",
    dtype=BF16,
    num_heads=3,
    nope_dim=24,
    q_latent_dim=40,
    q_scale=None,
    num_tokens=NUM_TOKENS,
) -> Step:
    """A step with all of a query: rope and nope columns, latent."""
    step = make_step(name, dtype=dtype, num_heads=num_heads, num_tokens=num_tokens)
    step.q_nope = torch.randn(num_tokens, num_heads, nope_dim).to(dtype)
    step.q_latent = torch.randn(num_tokens, q_latent_dim).to(dtype)
    step.q_gamma = torch.rand(q_latent_dim) + 0.5
    step.q_scale = None if q_scale is None else torch.tensor([q_scale])
    return step


def by_slots(step: Step) -> Step:
    """The same tokens to the same places, by slot mapping."""
    slots = torch.full((NUM_TOKENS,), -1)
    slots[REAL] = torch.tensor(list(SLOTS.values()))
    positions = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    positions[REAL] = torch.tensor(POSITIONS)
    step.slot_mapping, step.positions = slots, positions
    return step


def bits(tensor: Tensor) -> Tensor:
    """Floats as integers, so that NaN equals NaN and 0 differs from -0."""
    return tensor.contiguous().view(torch.uint8)


def same(one: Written, other: Written) -> None:
    assert one.outs.keys() == other.outs.keys()
    for name, a, b in [
        ("storage", one.storage, other.storage),
        *((name, one.outs[name], other.outs[name]) for name in one.outs),
    ]:
        differs = (bits(a) != bits(b)).nonzero()
        assert not len(differs), f"{name} differs in {len(differs)} bytes: {differs[:4].tolist()}"


def field_bytes(fmt: CacheFormat) -> int:
    """Which bytes of a row hold a field; the rest is padding to 16 bytes."""
    return fmt.rope_offset + fmt.rope_dim * fmt.rope_dtype.itemsize


def rows_of(written: Written, slots, layer=1) -> tuple[Tensor, Tensor]:
    """Stored bytes of some slots ``[n, bytes_per_token]``, and of all others, together."""
    flat = written.storage.flatten(1, 2)
    is_other = torch.ones(flat.shape[:2], dtype=torch.bool)
    is_other[layer, slots] = False
    return flat[layer, slots], flat[is_other]


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
E2M1 = torch.cat([E2M1, -E2M1])  # the value of each code


def decoded(written: Written, slots, layer=1) -> tuple[Tensor, Tensor]:
    """Rows of some slots in fp64: latent, rope key."""
    pages = written.cache.layer(layer)
    if pages.format.is_packed:
        packed = pages.latent.view(torch.uint8).flatten(0, 1).cpu().long()[slots]
        latent = E2M1[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)]
    else:
        latent = pages.latent.flatten(0, 1).cpu().double()[slots]
    rope = pages.rope.flatten(0, 1).cpu().double()[slots]
    if pages.group_scales is not None:
        scales = pages.group_scales.flatten(0, 1).cpu().double()[slots]
        latent = (latent.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)
    if pages.layer_scales is not None:
        latent_scale, rope_scale = pages.layer_scales.cpu().double()
        latent, rope = latent * latent_scale, rope * rope_scale
    return latent, rope


def rotated(x: Tensor, freqs: Tensor, rope_style="interleaved") -> Tensor:
    """Rotation as a complex product, in fp64; ``freqs`` has a row for each row of ``x``."""
    turn = torch.view_as_complex(freqs.double().unflatten(-1, (-1, 2)))
    turn = turn.view(len(turn), *[1] * (x.ndim - 2), -1)
    x = x.double()
    if rope_style == "half":
        product = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat([product.real, product.imag], -1)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2)


def e4m3_edges() -> Tensor:
    """Every e4m3 value and midpoint, their fp32 neighbours, both signs, and what is no number."""
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    middles = (codes[1:] + codes[:-1]) / 2
    exact = torch.cat([codes, middles, torch.tensor([448.0, 464.0, 465.0, 480.0, 1e4, 3e38])])
    up, down = (torch.nextafter(exact, torch.tensor(to)) for to in (1e9, -1e9))
    numbers = torch.cat([exact, up, down])
    specials = torch.tensor([torch.nan, torch.inf, 1e-40, 2.0**-149, 0.0])
    return torch.cat([specials, -specials, numbers, -numbers])


def nearest_e4m3(values: Tensor) -> tuple[Tensor, Tensor]:
    """By distance to all 256 codes: magnitude bits of the nearest, the even one of two, and sign.

    Past 448 the nearest is 448; a NaN is 0x7F.
    """
    codes = torch.arange(127)
    magnitude = values.double().abs().nan_to_num(0.0).clamp(max=448)
    distance = (magnitude[:, None] - _E4M3_VALUES).abs()
    nearest = distance.argmin(1)  # the lower of two
    is_tie = (distance == distance.min(1, keepdim=True).values).sum(1) == 2
    nearest += is_tie & (codes[nearest] % 2 == 1)
    return torch.where(values.isnan(), 0x7F, nearest), values.signbit()


_E4M3_VALUES = torch.arange(127, dtype=torch.uint8).view(E4M3).double()


def moved(argument, device):
    """A tensor on another device with the strides that it had, which ``to`` would not keep."""
    if not isinstance(argument, Tensor) or argument.device.type == "meta":
        return argument
    like = {"dtype": argument.dtype, "device": device}
    return torch.empty_strided(argument.shape, argument.stride(), **like).copy_(argument)


def assert_refused(
    step: Step, device: str, spoilt: dict[str, Any], error: type, message: str, *, target=None
) -> None:
    """The step with some arguments replaced raises, and changes neither the cache nor a tensor.

    ``target`` makes the ``cache`` argument of a ``PagedKVCache``.
    """
    cache = step.new_cache(device)
    arguments = {**step.arguments("cpu"), **spoilt}
    arguments = {name: moved(value, device) for name, value in arguments.items()}
    tensors = [x for x in arguments.values() if isinstance(x, Tensor) and x.device.type != "meta"]
    before = [x.clone() for x in tensors]
    with pytest.raises(error, match=message) as raised:
        write_kv((target or step.target)(cache), **arguments)
    assert isinstance(raised.value, KvkernError)
    assert (cache.buffer == CANARY).all()
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(bits(tensor.reshape(-1)), bits(old.reshape(-1)))


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def offsets_of(query_lens) -> list[int]:
    return [0, *itertools.accumulate(query_lens)]
