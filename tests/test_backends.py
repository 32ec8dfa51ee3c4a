import importlib.util
import re

import pytest
import torch

import kvkern
from kvkern import ArgumentError, CacheFormat, PagedBatch, PagedKVCache, UnsupportedError, explain
from kvkern.backends import TABLE, AbsorbCall, DecodeCall, choose, table, takes_e4m3_queries
from kvkern.ops.pages import gather_kv

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16


@pytest.fixture
def card(monkeypatch):
    """A machine with a card of the given compute capability, as far as the table can see."""

    def has_card(major, minor):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card")
        choose.cache_clear()

    yield has_card
    choose.cache_clear()  # what a pretended card answered must not outlive the test


@pytest.fixture
def interpret(monkeypatch):
    """Sets whether Triton interprets, as far as the table can see."""
    import triton

    def set_interpret(value):
        monkeypatch.setattr(triton.knobs.runtime, "interpret", value)
        choose.cache_clear()

    yield set_interpret
    choose.cache_clear()


SHARED_MODULES = {  # of several ops, or of one and what undoes it
    "dequantize_fp8": "quantize_fp8",
    "quantize_int8": "quantize_int",
    "quantize_int4": "quantize_int",
    "dequantize_int8": "quantize_int",
    "dequantize_int4": "quantize_int",
    "matmul_w8a16": "matmul_weight_only",
    "matmul_w4a16": "matmul_weight_only",
}


HOPPER_OPS = ("mla_absorb", "mla_decode", "scaled_mm", "matmul_w8a16", "matmul_w4a16")


def module_of(op):
    return SHARED_MODULES.get(op, op)


@pytest.mark.parametrize("op", TABLE)
def test_auto_on_the_cpu_is_the_reference(op, interpret):
    for interpreted in [True, False]:
        interpret(interpreted)
        run = choose(op, "auto", CPU, BF16)
        assert run.__module__ == f"kvkern.reference.{module_of(op)}"
        assert choose(op, "reference", CPU, BF16) is run


@pytest.mark.parametrize("op", TABLE)
def test_auto_on_a_card_is_never_the_reference(op, card):
    card(9, 0)
    hopper = "hopper." if op in HOPPER_OPS else ""
    assert choose(op, "auto", CUDA, BF16).__module__ == f"kvkern.kernels.{hopper}{module_of(op)}"
    card(8, 0)
    assert choose(op, "auto", CUDA, BF16).__module__ == f"kvkern.kernels.{module_of(op)}"
    assert choose(op, "reference", CUDA, BF16).__module__ == f"kvkern.reference.{module_of(op)}"
    card(7, 5)
    with pytest.raises(UnsupportedError) as raised:
        choose(op, "auto", CUDA, BF16)
    text = str(raised.value)
    assert text.startswith(f"{op}: no backend runs this call (")
    assert (
        "triton: needs compute capability 8.0, Some Card is older; reference: runs on cuda only "
        "when named"
    ) in text
    named = [backend.name for backend in TABLE[op]]
    assert re.findall(r"[(;] ?(\w+): ", text) == named  # a reason for each
    assert isinstance(raised.value, RuntimeError)


@pytest.mark.parametrize("op", TABLE)
def test_named_backend_is_used_or_refused(op, interpret, card):
    interpret(True)
    assert choose(op, "triton", CPU, BF16).__module__ == f"kvkern.kernels.{module_of(op)}"
    interpret(False)
    with pytest.raises(UnsupportedError, match=f"{op}: backend 'triton' refuses: needs a CUDA"):
        choose(op, "triton", CPU, BF16)
    card(9, 0)
    for device in [CPU, CUDA]:
        with pytest.raises(UnsupportedError, match="'triton' refuses: fp64 is for the reference"):
            choose(op, "triton", device, torch.float64)
    with pytest.raises(UnsupportedError, match=r"no backend runs this call .*triton: fp64 is for"):
        choose(op, "auto", CUDA, torch.float64)


def test_triton_is_refused_where_it_is_not_installed(monkeypatch, card):
    card(9, 0)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find(name)
    )
    assert dict(explain("mla_decode", "cuda"))["triton"] == "triton is not installed"
    with pytest.raises(UnsupportedError, match="triton: triton is not installed"):
        choose("mla_decode", "auto", CUDA, BF16)
    assert choose("mla_decode", "auto", CPU, BF16).__module__ == "kvkern.reference.mla_decode"


def test_cuda_is_refused_with_a_reason_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert explain("write_kv", "cuda")[0] == ("triton", "this machine has no CUDA device")


def test_explain_says_what_auto_runs_and_why_not_the_others(interpret, card):
    interpret(False)
    needs = "needs a CUDA device, got cpu (TRITON_INTERPRET=1 runs it on the CPU)"
    assert explain("write_kv", device="cpu") == [("triton", needs), ("reference", None)]
    interpret(True)
    by_name = "runs on cpu only when named"
    assert explain("write_kv", device="cpu") == [("triton", by_name), ("reference", None)]
    card(8, 0)
    expected = [("triton", None), ("reference", "runs on cuda only when named")]
    assert explain("write_kv", device="cuda") == expected
    fp64 = explain("write_kv", device=CUDA, dtype=torch.float64)
    assert [reason is None for _, reason in fp64] == [False, False]


def test_auto_leaves_a_call_that_a_backend_yields_and_its_name_does_not(card):
    card(9, 0)
    few = AbsorbCall(BF16, 64, 16, 512, True, True, True)
    many = few._replace(num_tokens=4096)
    reasons = dict(explain("mla_absorb", CUDA, BF16, few))
    assert reasons["hopper"].startswith("is no faster up to 64") and reasons["triton"] is None
    assert explain("mla_absorb", CUDA, BF16, many)[0] == ("hopper", None)
    for name, call, module in (
        ("auto", few, "mla_absorb"),
        ("auto", many, "hopper.mla_absorb"),
        ("hopper", few, "hopper.mla_absorb"),
    ):
        run = choose("mla_absorb", name, CUDA, BF16, call)
        assert run.__module__ == f"kvkern.kernels.{module}"


@pytest.mark.parametrize("op", TABLE)
def test_every_row_of_the_table_names_a_function_that_exists(op):
    names = [backend.name for backend in TABLE[op]]
    assert len(set(names)) == len(names) and "auto" not in names
    assert all(callable(backend.load()) for backend in TABLE[op])


def test_unknown_names_are_refused_with_the_known_ones():
    known = "backend: want one of auto, triton, reference; got 'hopper2'"
    with pytest.raises(ArgumentError, match=known):
        choose("write_kv", "hopper2", CPU, BF16)
    with pytest.raises(ArgumentError, match=r"op: want one of write_kv, mla_decode, .*; got 'x'"):
        explain("x", "cpu")


def test_refused_op_computes_nothing(interpret):
    interpret(False)
    cache = PagedKVCache(CacheFormat("bf16", 128, 0), num_layers=1, num_pages=1, page_size=1)
    out = torch.full((1, 1, 128), 5.0, dtype=BF16)
    with pytest.raises(UnsupportedError, match="gather_kv: backend 'triton' refuses"):
        gather_kv(cache.view(0, PagedBatch([0, 1], [0], [[0]])), out=out, backend="triton")
    assert (out == 5).all()


def test_rocm_is_refused_as_nothing_has_run_there(card, monkeypatch):
    card(9, 4)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(UnsupportedError, match="needs an NVIDIA card, this is ROCm"):
        choose("mla_decode", "auto", CUDA, BF16)


def test_kernels_launch_with_the_tensors_own_card_current(monkeypatch):
    seen = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            seen.append(("enter", self.device))

        def __exit__(self, *error):
            seen.append(("exit", self.device))

    monkeypatch.setattr(torch.cuda, "device", Guard)
    second = torch.device("cuda:1")
    table._on_device(seen.append, second)("ran")
    assert seen == [("enter", second), "ran", ("exit", second)]
    assert table._on_device(seen.append, CPU) == seen.append


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_card_than_the_current_one_are_right():
    outs, lses = torch.randn(2, 3, 4, 64), torch.randn(2, 3, 4)
    expected = kvkern.merge_states(outs, lses)
    with torch.cuda.device(0):
        merged = kvkern.merge_states(outs.to("cuda:1"), lses.to("cuda:1"))
    torch.testing.assert_close(merged.out.cpu(), expected.out)


def test_only_hopper_is_given_queries_in_e4m3(card):
    call = DecodeCall(torch.float8_e4m3fn, CacheFormat("fp8"), 64, None, False, 128)

    def taking(call, device=CUDA):
        return {
            (op, name)
            for op, backends in TABLE.items()
            for name in ("auto", *(backend.name for backend in backends))
            if takes_e4m3_queries(op, name, device, call)
        }

    named = {("mla_decode", "hopper")}
    card(8, 0)
    assert taking(call) == named
    card(9, 0)
    assert taking(call) == named | {("mla_decode", "auto")}
    assert taking(call, CPU) == named
    assert taking(call._replace(max_rows=16)) == named | {("mla_decode", "auto")}
    assert taking(call._replace(format=CacheFormat("fp8_ds_mla"))) == named
