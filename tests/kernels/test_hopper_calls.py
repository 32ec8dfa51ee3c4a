"""Hopper's decode from the host: what each launch is given, first and again; without a card."""

from types import SimpleNamespace

import pytest
import torch

from kvkern import CacheFormat, PagedBatch, PagedKVCache
from kvkern.kernels import schedule
from kvkern.kernels.device import Gpu
from kvkern.kernels.hopper import decode_call
from kvkern.kernels.hopper import mla_decode as hopper
from tests.kernels.standing import stand_on

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
KINDS = [
    ("bf16", 16, BF16), ("bf16", 128, BF16), ("fp8", 16, BF16), ("fp8", 128, BF16),
    ("fp8", 16, E4M3), ("fp8", 128, E4M3), ("fp8_token", 16, BF16), ("fp8_ds_mla", 128, BF16),
]  # fmt: skip


class Again:
    """What can be launched again: takes down what varies, by name."""

    def __init__(self, kernel, num_varying, calls):
        self.kernel, self.names, self.num_varying = kernel, list(kernel.arg_names), num_varying
        self.calls = calls
        self.num_encoded = 0

    def encoded(self, first, values):
        self.num_encoded += 1
        return [SimpleNamespace(name=self.names[n], value=v) for n, v in enumerate(values, first)]

    def on(self, stream, varying):
        assert stream == STREAM and len(varying) == self.num_varying
        given = dict(zip(self.names, varying, strict=False))
        for name, value in given.items():
            if isinstance(value, SimpleNamespace):
                assert value.name == name
                given[name] = value.value
        self.calls.append((self.kernel.__name__, given))


STREAM = 77


@pytest.fixture
def host(monkeypatch):
    """Where the host stands, and where it went."""
    host = SimpleNamespace(card=0, visits=[], agains=[])

    cuda = SimpleNamespace(
        current_device=lambda: host.card,
        is_current_stream_capturing=lambda: False,
        device=stand_on(host),
    )
    monkeypatch.setattr(hopper.torch, "cuda", cuda)
    monkeypatch.setattr(hopper, "device_finder", lambda: cuda.current_device)
    monkeypatch.setattr(hopper, "stream_finder", lambda: lambda card: STREAM)
    return host


@pytest.fixture
def launched(monkeypatch, host):
    """Names of kernels with what they were given: all arguments at first, then what varies."""
    calls = []

    def launch(kernel, grid, arguments, options, device, *, num_varying):
        assert host.card == 0
        names = list(kernel.arg_names)
        assert set(arguments) == set(names)
        calls.append((kernel.__name__, {name: arguments[name] for name in names}))
        host.agains.append(Again(kernel, num_varying, calls))
        return host.agains[-1]

    for module in (decode_call, schedule):
        monkeypatch.setattr(module, "launch", launch)
    for module in (hopper, schedule):
        monkeypatch.setattr(module, "gpu_of", lambda device: Gpu(90, 132))
    return calls


def address_of(value):
    """Of a tensor, a descriptor or what stands for it."""
    value = getattr(value, "base", value)
    return value.data_ptr() if hasattr(value, "data_ptr") else value


def make(name, num_heads, dtype, num_layers=2):
    fmt = CacheFormat(name)
    cache = PagedKVCache(fmt, num_layers=num_layers, num_pages=4, page_size=64)
    batch = PagedBatch([0, 1, 3], [100, 62], [[0, 1], [2, -1]])

    def tensors():
        q = torch.zeros(3, num_heads, fmt.row_dim, dtype=dtype)
        q_scale = torch.ones(1) if dtype == E4M3 else None
        out = torch.empty(3, num_heads, fmt.kv_lora_rank, dtype=BF16)
        return q, q_scale, out, torch.empty(3, num_heads)

    return cache, batch, tensors


@pytest.mark.parametrize(("name", "num_heads", "dtype"), KINDS)
def test_repeated_launch_is_given_what_a_first_one_would_be(name, num_heads, dtype, launched):
    cache, batch, tensors = make(name, num_heads, dtype)
    other_batch = PagedBatch([0, 2, 3], [3, 120], [[0, -1], [2, 3]])
    q, q_scale, out, lse = tensors()
    arguments = (0.1, None, False, False, out, lse, q_scale)
    calls = hopper.mla_decode(q, cache.layer(0), batch, *arguments)
    for layer, step in ((0, batch), (1, batch), (0, other_batch), (1, other_batch)):
        q, q_scale, out, lse = tensors()
        pages = cache.layer(layer)
        launched.clear()
        hopper.mla_decode(q, pages, step, 0.1, None, False, False, out, lse, q_scale)
        first = list(launched)
        launched.clear()
        calls(q, pages, step, out, lse, q_scale)
        assert [kernel for kernel, _ in launched] == [kernel for kernel, _ in first]
        for (kernel, given), (_, at_first) in zip(launched, first, strict=True):
            for argument, value in given.items():
                want = address_of(at_first[argument])
                assert address_of(value) == want, (kernel, argument)
                if hasattr(value, "strides"):
                    assert list(value.shape) == list(at_first[argument].shape)
                    assert list(value.strides) == list(at_first[argument].strides)


@pytest.mark.parametrize("num_heads", [16, 128])
def test_layers_and_queries_that_come_again_are_not_encoded_again(num_heads, launched, host):
    cache, batch, tensors = make("bf16", num_heads, BF16)
    q, _, out, lse = tensors()
    calls = hopper.mla_decode(q, cache.layer(0), batch, 0.1, None, False, False, out, lse)
    (again,) = [again for again in host.agains if "decode" in again.kernel.__name__]
    counts = []
    for layer, query in ((0, q), (1, q), (0, q), (1, q.clone()), (1, q)):
        calls(query, cache.layer(layer), batch, out, lse, None)
        counts.append(again.num_encoded)
    assert counts == [2, 3, 3, 4, 4]


def test_same_query_may_come_with_another_scale(launched, host):
    cache, batch, tensors = make("fp8", 128, E4M3)
    q, q_scale, out, lse = tensors()
    calls = hopper.mla_decode(q, cache.layer(0), batch, 0.1, None, False, False, out, lse, q_scale)
    for scale in [torch.ones(1) for _ in range(3)]:
        calls(q, cache.layer(0), batch, out, lse, scale)
        (given,) = [given for kernel, given in launched[-2:] if "decode" in kernel]
        assert given["q_scale_ptr"] is scale


def test_encoded_queries_are_forgotten_when_they_are_many(launched, host, monkeypatch):
    monkeypatch.setattr(decode_call, "_MOST_QUERIES", 2)
    cache, batch, tensors = make("bf16", 16, BF16)
    q, _, out, lse = tensors()
    calls = hopper.mla_decode(q, cache.layer(0), batch, 0.1, None, False, False, out, lse)
    for query in [torch.zeros_like(q) for _ in range(5)]:
        calls(query, cache.layer(0), batch, out, lse, None)
        assert len(calls.__self__._decode._queries) <= 2
        (given,) = [given for kernel, given in launched[-2:] if "decode" in kernel]
        assert given["q_ptr"] is query


def test_host_goes_to_the_batchs_card_once_and_comes_back(launched, host):
    cache, batch, tensors = make("bf16", 16, BF16)
    q, _, out, lse = tensors()
    calls = hopper.mla_decode(q, cache.layer(0), batch, 0.1, None, False, False, out, lse)
    assert host.visits == []
    host.card = 3
    launched.clear()
    calls(q, cache.layer(0), batch, out, lse, None)
    assert host.visits == [0] and host.card == 3 and len(launched) == 3


@pytest.mark.parametrize("num_heads", [16, 128])
def test_schedule_is_made_for_the_first_layer_of_a_step_only(num_heads, launched):
    cache, batch, tensors = make("bf16", num_heads, BF16, num_layers=3)
    counts = []
    for layer in (0, 1, 2, 0):
        q, _, out, lse = tensors()
        launched.clear()
        hopper.mla_decode(q, cache.layer(layer), batch, 0.1, None, False, False, out, lse)
        counts.append(sum(kernel == "_schedule_kernel" for kernel, _ in launched))
    assert counts == [1, 0, 0, 1]


def test_queries_that_are_copied_are_never_launched_again_as_they_were(launched):
    cache, batch, _ = make("bf16", 128, BF16)
    wide = torch.zeros(3, 130, 576, dtype=BF16)
    q, out, lse = wide[:, 1:-1], torch.empty(3, 128, 512, dtype=BF16), torch.empty(3, 128)
    calls = hopper.mla_decode(q, cache.layer(0), batch, 0.1, None, False, False, out, lse)
    launched.clear()
    calls(q, cache.layer(0), batch, out, lse, None)
    (given,) = [given for kernel, given in launched if "decode" in kernel]
    assert "scale_log2" in given  # all arguments, so a launch from the beginning


def test_fast_sums_and_e4m3_queries_have_one_term(launched):
    for dtype, is_fast, terms, exact in (
        (BF16, False, 2, True), (BF16, True, 1, False), (E4M3, False, 1, True),
    ):  # fmt: skip
        cache, batch, tensors = make("fp8", 128, dtype)
        q, q_scale, out, lse = tensors()
        launched.clear()
        hopper.mla_decode(q, cache.layer(0), batch, 0.1, None, False, is_fast, out, lse, q_scale)
        (given,) = [given for kernel, given in launched if "many_fp8" in kernel]
        assert (given["Q_TERMS"], given["EXACT"]) == (terms, exact)
