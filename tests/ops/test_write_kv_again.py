"""Calls like one before: what is remembered of a call, what makes it another, what a card does.

A backend that can be launched again stands in for the kernel where only the remembering is looked
at; the bytes are tested with the real ones.
"""

import gc
import importlib
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from kvkern import (
    ArgumentError,
    DeviceError,
    LayoutError,
    PagedBatch,
    ShapeMismatchError,
    UnsupportedDtypeError,
    write_kv,
)
from kvkern.layout import FORMAT_NAMES
from kvkern.ops._known import KnownCalls
from tests.ops.steps import (
    BF16,
    CANARY,
    FP16,
    FP32,
    LENGTHS,
    NUM_TOKENS,
    OFFSETS,
    OUTPUTS,
    TABLE,
    by_slots,
    make_query_step,
    same,
    synchronisation_is_an_error,
    written,
)

op = importlib.import_module("kvkern.ops.write_kv")  # its package has the function by this name

OTHER_BATCH = ([0, 2, 3, 3], [5, 0, 1], [[4, 3, -1], [6, -1, -1], [0, -1, -1]])


@pytest.fixture
def backend(monkeypatch):
    """Takes down its first calls and the repeated ones, and computes nothing."""
    calls = SimpleNamespace(first=[], again=[])

    def run(pages, batch, *tensors, **settings):
        calls.first.append(tensors)
        return lambda *arguments: calls.again.append(arguments)

    monkeypatch.setattr(op, "_KNOWN", KnownCalls(100))
    monkeypatch.setattr(op, "choose", lambda *_: run)
    return calls


@pytest.fixture
def checks(monkeypatch):
    """The cache of each call whose arguments were checked; nothing is remembered yet."""
    done, check = [], op._check

    def counted(pages, *arguments):
        done.append(pages.kind)
        check(pages, *arguments)

    monkeypatch.setattr(op, "_KNOWN", KnownCalls(100))
    monkeypatch.setattr(op, "_check", counted)
    return done


# ---- what is remembered


def test_call_of_the_same_kind_is_repeated_with_its_own_addresses(device, backend):
    step = make_query_step("fp8_token", q_scale=0.5)
    step.positions = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    cache, arguments = step.new_cache(device), step.arguments(device)
    write_kv(step.target(cache, 0), **arguments)
    name_of = {id(x): name for name, x in arguments.items() if x is not None}
    order = [None if x is None else name_of[id(x)] for x in backend.first[0]]
    assert set(order) == {*name_of.values(), None}
    others = fresh(arguments)
    target = replace(step, batch=OTHER_BATCH).target(cache, 1)
    write_kv(target, **others)
    assert len(backend.first) == 1
    (pages, batch, addresses) = backend.again[0]
    assert pages is target.pages and batch is target.batch
    assert addresses == [None if name is None else others[name].data_ptr() for name in order]


def test_call_by_slots_is_repeated_without_a_batch(device, backend):
    step = by_slots(make_query_step())
    cache = step.new_cache(device)
    for layer in (0, 1):
        write_kv(cache.layer(layer), **step.arguments(device))
    assert len(backend.first) == 1
    assert backend.again[0][:2] == (cache.layer(1), None)


def test_backend_with_nothing_to_repeat_is_asked_each_time(device, monkeypatch, checks):
    calls = []
    monkeypatch.setattr(op, "choose", lambda *_: lambda *_, **settings: calls.append(settings))
    step = make_query_step()
    cache = step.new_cache(device)
    for _ in range(2):
        write_kv(step.target(cache), **step.arguments(device))
    assert len(calls) == len(checks) == 2 and not op._KNOWN


def test_what_is_remembered_has_a_bound(device, backend, monkeypatch):
    monkeypatch.setattr(op._KNOWN, "most", 3)
    step = make_query_step()
    target, arguments = step.target(step.new_cache(device)), step.arguments(device)
    for eps in (0.0, 0.1, 0.2, 0.3, 0.4, 0.3):
        write_kv(target, **arguments, eps=eps)
        assert len(op._KNOWN) <= 3
    assert len(backend.first) == 5 and len(backend.again) == 1


# ---- what makes a call another one


def wider(tensor):
    """The same values in a row-major tensor with one more column, which is not contiguous."""
    wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 1)
    wide[..., :-1] = tensor
    return wide[..., :-1]


def later(tensor, by):
    """The same values in memory that starts ``by`` elements after an aligned address."""
    memory = tensor.new_zeros(tensor.numel() + by)
    return memory[by:].view(tensor.shape).copy_(tensor)


def change(**makers):
    """Arguments made from a call's own, by name."""
    return lambda arguments: {n: make(arguments[n]) for n, make in makers.items()}


def in_place(output, source):
    return lambda arguments: {output: arguments[source]}


# what leaves the result as it is
LAYOUTS = {
    "rows of a wider kv": change(kv=wider),
    "rows of a wider kv_out": change(kv_out=wider),
    "heads of a wider q_rope_out": change(q_rope_out=wider),
    "heads of a wider q_nope": change(q_nope=wider),
    "rows of a wider q_latent_out": change(q_latent_out=wider),
    "heads first": change(q_nope_out=lambda q: q.transpose(0, 1).contiguous().transpose(0, 1)),
    "kv 2 bytes later": change(kv=lambda x: later(x, 1)),
    "kv 4 bytes later": change(kv=lambda x: later(x, 2)),
    "gamma 4 bytes later": change(gamma=lambda x: later(x, 1)),
    "q_nope_out 8 bytes later": change(q_nope_out=lambda x: later(x, 4)),
    "q_rope 2 bytes later": change(q_rope=lambda x: later(x, 1)),
    "kv_out in place": in_place("kv_out", "kv"),
    "q_rope in place": in_place("q_rope_out", "q_rope"),
    "q_nope in place": in_place("q_nope_out", "q_nope"),
    "q_latent in place": in_place("q_latent_out", "q_latent"),
    "longer freqs": change(freqs=lambda x: torch.cat([x, x])),
    "no kv_out": change(kv_out=lambda _: None),
    "no nope": change(q_nope=lambda _: None, q_nope_out=lambda _: None),
    "gamma fp64": change(gamma=lambda x: x.double()),
}

OPTIONS = [{"eps": 0.5}, {"rope_style": "half"}, {"rounding": "hf"}, {"sanitize": True}]


def fresh(arguments):
    """Copies: nothing that one call writes is read by another."""
    return {name: None if x is None else x.clone() for name, x in arguments.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_call_with_another_layout_is_checked_anew(device, backend, checks, layout):
    step = make_query_step()
    target, arguments = step.target(step.new_cache(device)), fresh(step.arguments(device))
    write_kv(target, **arguments)
    write_kv(target, **{**arguments, **LAYOUTS[layout](arguments)})
    assert len(checks) == len(backend.first) == 2 and not backend.again
    write_kv(target, **arguments)
    assert len(checks) == 2 and len(backend.again) == 1  # the first is still known


@pytest.mark.parametrize("options", [*OPTIONS, {"backend": "triton"}], ids=str)
def test_call_with_another_option_is_checked_anew(device, backend, checks, options):
    step = make_query_step()
    target, arguments = step.target(step.new_cache(device)), step.arguments(device)
    write_kv(target, **arguments)
    write_kv(target, **arguments, **options)
    assert len(checks) == len(backend.first) == 2 and not backend.again


@pytest.mark.parametrize(
    "other",
    [
        make_query_step(dtype=FP16),
        make_query_step(num_heads=2),
        make_query_step(nope_dim=25),
        make_query_step(q_latent_dim=41),
        make_query_step(q_scale=1.0),
        make_query_step(num_tokens=3),
        by_slots(make_query_step()),
        replace(make_query_step(), positions=torch.zeros(NUM_TOKENS, dtype=torch.int32)),
    ],
    ids=["dtype", "heads", "nope", "latent", "e4m3", "tokens", "slots", "positions"],
)
def test_call_of_other_tensors_is_checked_anew(device, backend, checks, other):
    step = make_query_step()
    cache = step.new_cache(device)
    for given in (step, other):
        write_kv(given.target(cache), **given.arguments(device))
    assert len(checks) == len(backend.first) == 2 and not backend.again


def test_call_on_another_cache_is_checked_anew(device, backend, checks):
    step = make_query_step()
    for page_size in (4, 4, 8):
        cache = replace(step, page_size=page_size).new_cache(device)
        write_kv(step.target(cache), **step.arguments(device))
    assert len(checks) == len(backend.first) == 3 and not backend.again


@pytest.mark.parametrize("shift", range(16))
def test_every_alignment_below_16_bytes_is_a_kind_of_its_own(shift):
    memory = torch.zeros(64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    tensors = [memory[start + k : start + k + 8] for k in range(32)]
    kinds = [op._addresses_and_kinds([tensors[shift], None] + [tensors[0]] * 12)[1]]
    kinds += [op._addresses_and_kinds([t, None] + [tensors[0]] * 12)[1] for t in tensors]
    alike = [k for k, kind in enumerate(kinds[1:]) if kind == kinds[0]]
    # a tensor in place of another is a kind too: (0, 10) are kv and kv_out
    assert alike == ([0] if shift == 0 else [shift, shift + 16])


def test_same_tensor_on_another_card_is_a_kind_of_its_own():
    class OnCard:
        def __init__(self, card):
            self.get_device = lambda: card

        def __getattr__(self, name):
            return getattr(tensor, name)

    tensor = torch.zeros(64)
    kinds = [op._addresses_and_kinds([OnCard(card)] * 14)[1] for card in (0, 1, 1)]
    assert kinds[0] != kinds[1] == kinds[2]


# ---- what is refused after a right call


def test_wrong_shape_after_a_right_one_is_refused(device, backend):
    step = make_query_step()
    target, arguments = step.target(step.new_cache(device)), step.arguments(device)
    write_kv(target, **arguments)
    for name, message in [
        ("gamma", r"gamma: want \[L=128\], got \[127\]"),
        ("q_nope_out", r"q_nope_out: want \[T=9, H=3, .*=24\], got \[9, 3, 23\]"),
        ("q_gamma", r"q_gamma: want \[Q=40\], got \[39\]"),
    ]:
        spoilt = {**arguments, name: arguments[name][..., :-1]}
        for _ in range(2):  # nor is a wrong call remembered
            with pytest.raises(ShapeMismatchError, match=message):
                write_kv(target, **spoilt)
    assert len(backend.first) == 1 and not backend.again


def test_what_has_no_address_is_refused_after_a_right_call(device, backend):
    step = make_query_step()
    target, arguments = step.target(step.new_cache(device)), step.arguments(device)
    write_kv(target, **arguments)
    with pytest.raises(UnsupportedDtypeError, match="gamma: want a tensor, got list"):
        write_kv(target, **{**arguments, "gamma": [1.0]})
    with pytest.raises(LayoutError, match=r"gamma: want strided, got torch.sparse_coo"):
        write_kv(target, **{**arguments, "gamma": arguments["gamma"].to_sparse()})


def test_longer_batch_of_the_same_shapes_is_held_against_freqs(device, backend):
    step = make_query_step()
    step.freqs = step.freqs[:9]  # just enough
    cache, arguments = step.new_cache(device), step.arguments(device)
    write_kv(step.target(cache), **arguments)
    batch = PagedBatch(OFFSETS, [LENGTHS[0], 10, LENGTHS[2]], TABLE, device=device)
    with pytest.raises(ArgumentError, match=r"freqs: want at least 10 rows for .* got 9"):
        write_kv(cache.view(0, batch), **arguments)
    assert not backend.again
    write_kv(cache.view(0, batch), **arguments | {"freqs": torch.ones(10, 32, device=device)})


def test_batch_of_more_tokens_than_were_given_is_refused_after_a_right_call(device, backend):
    step = make_query_step()
    cache, arguments = step.new_cache(device), step.arguments(device)
    write_kv(step.target(cache), **arguments)
    batch = PagedBatch([0, 10], [0], [[0, 1, 2]], device=device)
    with pytest.raises(ArgumentError, match="kv: want at least 10 tokens, got 9"):
        write_kv(cache.view(0, batch), **arguments)
    assert not backend.again


def test_batch_beside_slots_is_refused_after_a_call_without(device, backend):
    step = by_slots(make_query_step())
    cache, arguments = step.new_cache(device), step.arguments(device)
    write_kv(step.target(cache), **arguments)
    with pytest.raises(ArgumentError, match=r"slot_mapping: want it .* without a batch"):
        write_kv(cache.view(0, PagedBatch(*step.batch, device=device)), **arguments)
    assert not backend.again


@pytest.mark.parametrize("name", ["gamma", "q_scale", "q_rope_out", "positions"])
def test_tensor_on_another_device_is_refused_after_a_right_call(device, checks, name):
    step = make_query_step(q_scale=1.0)
    step.positions = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    target, arguments = step.target(step.new_cache(device)), step.arguments(device)
    write_kv(target, **arguments)
    elsewhere = torch.empty_like(arguments[name], device="cpu" if device == "cuda" else "meta")
    with pytest.raises(DeviceError, match=f"{name}: want device {device}.*, got "):
        write_kv(target, **{**arguments, name: elsewhere})


# ---- its bytes


def assert_checked_once(checks, cache, num_calls, device):
    """On a card; the interpreter repeats nothing."""
    assert checks.count(cache.layer(0).kind) == (1 if device == "cuda" else num_calls)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_repeated_call_writes_its_own_tensors_to_its_own_places(device, checks, name):
    step = make_query_step(name, num_tokens=3)
    cache = step.new_cache(device)
    write_kv(step.target(cache, 0), **step.arguments(device), backend="triton")
    for layer, batch in [(1, OTHER_BATCH), (0, step.batch), (1, step.batch)]:
        step = replace(make_query_step(name, num_tokens=3), batch=batch)
        cache.buffer.fill_(CANARY)
        arguments = step.arguments(device)
        write_kv(step.target(cache, layer), **arguments, backend="triton")
        same(written(cache, arguments), step.write("cpu", "reference", layer=layer))
    assert_checked_once(checks, cache, 4, device)


def test_repeated_decode_whose_requests_no_longer_have_one_token_each_is_right(device, checks):
    """And back: what the host expects of a batch is not remembered."""
    step = make_query_step("fp8", num_tokens=4)
    one_each = ([0, 1, 2, 3, 4], [3, 5, 0, 2], [[5, -1], [2, 1], [3, -1], [0, -1]])
    ragged = ([0, 2, 2, 3, 4], [3, 5, 0, 2], [[5, 4], [2, 1], [3, -1], [0, -1]])
    fewer = ([0, 1, 3], [0, 1], [[4], [6]])
    cache = step.new_cache(device)
    for batch in (one_each, ragged, fewer, one_each):
        step, arguments = replace(step, batch=batch), step.arguments(device)
        cache.buffer.fill_(CANARY)
        write_kv(step.target(cache), **arguments, backend="triton")
        same(written(cache, arguments), step.write("cpu", "reference"))
    assert_checked_once(checks, cache, 4, device)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_call_with_another_layout_has_the_same_bytes(device, layout):
    step = make_query_step("fp8_ds_mla", num_tokens=3)
    cache, arguments = step.new_cache(device), step.arguments(device)
    write_kv(step.target(cache), **arguments, backend="triton")
    arguments = fresh(arguments)
    arguments |= LAYOUTS[layout](arguments)
    cache.buffer.fill_(CANARY)
    write_kv(step.target(cache), **arguments, backend="triton")
    got, expected = written(cache, arguments), step.write("cpu", "reference")
    for name in expected.outs.keys() - got.outs.keys():
        del expected.outs[name]
    same(got, expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_call_with_another_option_has_its_own_bytes(device, options):
    step = make_query_step("fp8_ds_mla", num_tokens=3)
    step.gamma, step.kv[1, 3] = step.gamma.to(BF16), torch.nan
    cache, arguments = step.new_cache(device), step.arguments(device)
    write_kv(step.target(cache), **arguments, backend="triton")
    plain = written(cache, arguments)
    write_kv(step.target(cache), **arguments, **options, backend="triton")
    got = written(cache, arguments)
    same(got, step.write("cpu", "reference", **options))
    assert not torch.equal(got.storage, plain.storage)


# ---- on the card


def gpu_step(name, num_heads=16):
    """A whole query, quantised where the cache is."""
    q_scale = None if name in ("bf16", "fp16", "fp32") else 0.05
    dtype = {"fp16": FP16, "fp32": FP32}.get(name, BF16)
    return make_query_step(
        name, dtype, num_heads=num_heads, nope_dim=128, q_latent_dim=1536, q_scale=q_scale
    )


@pytest.mark.gpu
@pytest.mark.parametrize("addressing", ["pages", "slots"])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_call_is_one_kernel_launch_and_allocates_nothing(name, addressing, checks):
    step = gpu_step(name)
    if addressing == "slots":
        step = by_slots(step)
    cache, arguments = step.new_cache("cuda"), step.arguments("cuda")
    target = step.target(cache, 0)
    write_kv(target, **arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with synchronisation_is_an_error():
            write_kv(target, **arguments)
        torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    launched = [e.name for e in profiler.events() if e.device_type == DeviceType.CUDA]
    assert len(launched) == 1 and "_write_kv_kernel" in launched[0]
    assert len(checks) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_replayed_graph_equals_eager_after_lengths_and_pages_change(name):
    step = gpu_step(name)
    cache, arguments = step.new_cache("cuda"), step.arguments("cuda")
    batch = PagedBatch.static(
        max_requests=5, max_tokens=9, max_pages=3, max_query_len=4, max_seq_len=12, device="cuda"
    )
    batch.refill([0, 1], [0], [[0]])
    view = cache.view(1, batch)
    graph = captured(view, arguments)
    for offsets, lengths, table in [step.batch, ([0, 4, 5], [0, 11], [[6, 0, -1], [4, 1, 5]])]:
        clear(cache, arguments)
        batch.refill(offsets, lengths, table)
        graph.replay()
        expected = replace(step, batch=(offsets, lengths, table)).write("cpu", "reference")
        same(written(cache, arguments), expected)


@pytest.mark.gpu
def test_replayed_graph_equals_eager_after_slots_and_positions_change():
    step = by_slots(gpu_step("fp8_token"))
    cache, arguments = step.new_cache("cuda"), step.arguments("cuda")
    graph = captured(cache.layer(1), arguments)
    others = torch.tensor([27, -1, 0, 28, 3, 4, -1, 5, 6]), torch.arange(9)
    for slots, positions in [(step.slot_mapping, step.positions), others]:
        clear(cache, arguments)
        arguments["slot_mapping"].copy_(slots)
        arguments["positions"].copy_(positions)
        graph.replay()
        changed = replace(step, slot_mapping=slots, positions=positions)
        same(written(cache, arguments), changed.write("cpu", "reference"))


def captured(target, arguments):
    write_kv(target, **arguments)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), synchronisation_is_an_error():
        write_kv(target, **arguments)
    return graph


def clear(cache, arguments):
    cache.buffer.fill_(CANARY)
    for name in OUTPUTS:
        arguments[name].fill_(torch.nan)


@pytest.mark.gpu
def test_batch_that_only_the_device_knows_is_written_alike():
    step = gpu_step("fp8_ds_mla")
    cache, arguments = step.new_cache("cuda"), step.arguments("cuda")
    tensors = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in step.batch]
    for _ in range(2):
        clear(cache, arguments)
        with synchronisation_is_an_error():
            write_kv(cache.view(1, PagedBatch(*tensors)), **arguments)
        same(written(cache, arguments), step.write("cpu", "reference"))


@pytest.mark.gpu
def test_repeated_call_runs_on_the_stream_that_is_current(checks):
    step = gpu_step("bf16")
    cache, arguments = step.new_cache("cuda"), step.arguments("cuda")
    target = step.target(cache)
    write_kv(target, **arguments)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # on any other stream the write would be first
        clear(cache, arguments)
        write_kv(target, **arguments)
    torch.cuda.synchronize()
    same(written(cache, arguments), step.write("cpu", "reference"))
    assert checks.count(target.pages.kind) == 1


@pytest.mark.gpu
def test_what_is_remembered_keeps_no_tensor_alive():
    step = gpu_step("fp8_token")
    cache, arguments = step.new_cache("cuda"), step.arguments("cuda")
    target = step.target(cache)
    for _ in range(2):
        write_kv(target, **arguments)
    tensors = [x for x in (*arguments.values(), cache.buffer) if x is not None]
    alive = [weakref.ref(x) for x in tensors]
    del cache, arguments, target, tensors
    gc.collect()
    assert not any(reference() is not None for reference in alive)
