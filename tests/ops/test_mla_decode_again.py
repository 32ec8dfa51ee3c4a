"""mla_decode's calls like one before: what is still checked, and what makes a call another one.

A backend that can be launched again stands in for the kernels; what a card makes of repeated calls
is tested in tests/ops/test_mla_decode_hopper.py.
"""

from types import SimpleNamespace

import pytest
import torch

from kvkern import ArgumentError, CacheFormat, KvkernError, PagedBatch, PagedKVCache, mla_decode
from kvkern.ops import attention
from kvkern.ops._known import KnownCalls, kind_of

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FORMAT = CacheFormat("fp8", 32, 16)


@pytest.fixture
def backend(monkeypatch):
    """Takes down its first calls and the repeated ones, and computes nothing."""
    calls = SimpleNamespace(first=[], again=[])

    def run(*arguments, **scales):
        calls.first.append(arguments)
        return lambda *arguments: calls.again.append(arguments)

    monkeypatch.setattr(attention, "_KNOWN", KnownCalls(100))
    monkeypatch.setattr(attention, "choose", lambda *_: run)
    monkeypatch.setattr(attention, "takes_e4m3_queries", lambda *_: True)
    return calls


def make_cache(device):
    return PagedKVCache(FORMAT, num_layers=2, num_pages=4, page_size=8, device=device)


def make_batch(device, lengths=(5, 9), width=3, offsets=(0, 1, 3)):
    table = torch.arange(2 * width).view(2, width) % 4
    return PagedBatch(offsets, lengths, table, device=device)


def make_q(device, dtype=BF16):
    return torch.zeros(3, 4, FORMAT.row_dim, device=device).to(dtype)


def decode(q, view, **options):
    return mla_decode(q, view, **{"softmax_scale": 0.1, **options})


@pytest.mark.parametrize("dtype", [BF16, torch.float16, E4M3])
def test_call_of_the_same_kind_is_repeated_with_its_own_tensors(device, backend, dtype):
    cache = make_cache(device)
    scales = [torch.ones(1, device=device) if dtype == E4M3 else None for _ in range(2)]
    first = decode(make_q(device, dtype), cache.view(0, make_batch(device)), q_scale=scales[0])
    q, view = make_q(device, dtype), cache.view(1, make_batch(device, (0, 20)))
    result = decode(q, view, q_scale=scales[1])
    assert len(backend.first) == 1
    (given,) = backend.again
    assert all(map(lambda a, b: a is b, given, (q, *view, *result, scales[1])))
    for again, before in zip(result, first, strict=True):
        assert again.data_ptr() != before.data_ptr()
        for fact in ("shape", "dtype", "device"):
            assert getattr(again, fact) == getattr(before, fact)
        assert again.is_contiguous()


def test_repeated_call_fills_the_out_that_it_is_given(device, backend):
    view = make_cache(device).view(0, make_batch(device))
    for _ in range(2):
        out = torch.empty(3, 4, 32, dtype=BF16, device=device)
        assert decode(make_q(device), view, out=out).out is out
    assert backend.again[0][3] is out


def test_repeated_call_is_still_checked_for_its_tokens(device, backend):
    cache = make_cache(device)
    decode(make_q(device), cache.view(0, make_batch(device)))
    longer = PagedBatch([0, 2, 4], [5, 9], [[0, 1, 2], [3, 0, 1]], device=device)
    with pytest.raises(ArgumentError, match="q: want at least 4 tokens, got 3"):
        decode(make_q(device), cache.view(0, longer))
    assert not backend.again


def strided(q):
    return torch.zeros(3, 6, q.shape[2], dtype=q.dtype, device=q.device)[:, 1:-1]


def unaligned(q):
    return torch.zeros(q.numel() + 1, dtype=q.dtype, device=q.device)[1:].view(q.shape)


def fewer_heads(q):
    return q[:, :2].contiguous()


@pytest.mark.parametrize("change", [strided, unaligned, fewer_heads, torch.Tensor.half])
def test_other_kind_of_query_is_another_call(device, backend, change):
    view = make_cache(device).view(0, make_batch(device))
    q = make_q(device)
    for query in (q, change(q), q.clone(), change(q)):
        decode(query, view)
    assert len(backend.first) == len(backend.again) == 2


def test_kind_of_a_tensor_tells_its_card():
    kinds = []
    for card in (0, 1, 1):
        tensor = make_q("cpu")
        facts = {"data_ptr": lambda: 1024, "stride": tensor.stride, "get_device": lambda c=card: c}
        kinds.append(kind_of(SimpleNamespace(shape=tensor.shape, dtype=tensor.dtype, **facts)))
    assert kinds[0] != kinds[1] and kinds[1] == kinds[2]


@pytest.mark.parametrize(
    "option",
    [
        {"softmax_scale": 0.2},
        {"num_splits": 2},
        {"deterministic": "batch_invariant"},
        {"use_fast_accum": True},
        {"backend": "reference"},
    ],
)
def test_other_option_is_another_call(device, backend, option):
    view = make_cache(device).view(0, make_batch(device))
    decode(make_q(device), view)
    decode(make_q(device), view, **option)
    assert len(backend.first) == 2 and not backend.again


@pytest.mark.parametrize(
    "other",
    [
        lambda cache, device: make_cache(device).view(0, make_batch(device)),
        lambda cache, device: cache.view(0, make_batch(device, width=4)),
        lambda cache, device: cache.view(0, PagedBatch([0, 3], [5], [[0, 1, 2]], device=device)),
        lambda cache, device: cache.view(0, make_batch(device, offsets=(0, 0, 3))),
    ],
)
def test_other_cache_or_bound_of_the_batch_is_another_call(device, backend, other):
    cache = make_cache(device)
    decode(make_q(device), cache.view(0, make_batch(device)))
    decode(make_q(device), other(cache, device))
    assert len(backend.first) == 2 and not backend.again


@pytest.mark.parametrize(
    "spoil",
    [
        {"out": torch.empty(3, 4, 31, dtype=BF16)},
        {"out": torch.empty(3, 4, 32)},
        {"q_scale": torch.ones(1)},
        {"softmax_scale": float("inf")},
        {"num_splits": 0},
        {"deterministic": "never"},
    ],
)
def test_mistake_after_a_known_call_is_refused(device, backend, spoil):
    view = make_cache(device).view(0, make_batch(device))
    decode(make_q(device), view)
    spoil = {key: x.to(device) if hasattr(x, "to") else x for key, x in spoil.items()}
    with pytest.raises(KvkernError):
        decode(make_q(device), view, **spoil)
    assert not backend.again


def test_what_is_no_tensor_is_known_as_nothing(device, backend):
    view = make_cache(device).view(0, make_batch(device))
    decode(make_q(device), view)
    for spoil in ({"q": None}, {"out": "here"}, {"q_scale": 1.0}):
        q = spoil.pop("q", make_q(device))
        with pytest.raises((KvkernError, AttributeError)):
            decode(q, view, **spoil)
    assert not backend.again
