"""Calls of scaled_mm like one before, by a library: what they cost, what makes a call another."""

import gc
import importlib
import weakref

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from kvkern import UnsupportedError, quantize_fp8, scaled_mm
from kvkern.backends import choose, torch_scaled_mm
from kvkern.ops._known import KnownCalls

op = importlib.import_module("kvkern.ops.matmul")
BF16 = torch.bfloat16
KINDS = [
    ("tensor", "tensor"), ("row", "row"), ("tensor", "row"), ("row", "tensor"),
    ("group", "block"), ("tensor", "block"), ("row", "block"), ("group", "row"),
    ("group", "tensor"),
]  # fmt: skip


@pytest.fixture
def firsts(monkeypatch):
    """Calls that were not repeated, of those that ``"auto"`` gives to torch: on any device."""
    calls = []

    def first(*arguments):
        again = torch_scaled_mm.scaled_mm(*arguments)
        calls.append(again)
        return again

    def chosen(name, backend, *rest):
        return first if backend == "auto" else choose(name, backend, *rest)

    monkeypatch.setattr(op, "_KNOWN", KnownCalls(100))
    monkeypatch.setattr(op, "choose", chosen)
    return calls


@pytest.fixture
def library(monkeypatch):
    """In place of torch._scaled_mm, which takes less than this on a CPU."""

    def product(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum, out):
        for x in (scale_a, scale_b):
            assert x.is_contiguous() or x.T.is_contiguous()
        scale_a, scale_b = (x.reshape(1) if x.numel() == 1 else x for x in (scale_a, scale_b))
        out.copy_(reference(a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype))

    monkeypatch.setattr(torch, "_scaled_mm", product)


def reference(*given, **options):
    return scaled_mm(*given, **options, backend="reference")


def operands(of_a, of_b):
    a = quantize_fp8(torch.randn(20, 512), granularity=of_a)
    b = quantize_fp8(torch.randn(256, 512), granularity=of_b)
    return a.values, b.values.T, a.scale, b.scale if of_b == "tensor" else b.scale.T


@pytest.mark.parametrize("lead", [(), (1,)], ids=["plain", "one of a batch"])
@pytest.mark.parametrize("of_a, of_b", KINDS)
def test_repeated_call_has_its_own_numbers(of_a, of_b, lead, firsts, library):
    for _ in range(3):
        given = [x if x.ndim == 1 else x.expand(*lead, *x.shape) for x in operands(of_a, of_b)]
        bias = torch.randn(256).to(BF16)
        wide = torch.full((*lead, 20, 300), 7.0, dtype=BF16)
        result = scaled_mm(*given, bias=bias, out=wide[..., :256])
        assert torch.equal(result, reference(*given, bias=bias))
        assert (wide[..., 256:] == 7).all()
    assert len(firsts) == 1


def test_call_with_another_layout_is_another(firsts, library):
    a, b, scale_a, scale_b = operands("row", "row")
    others = [
        (a, b, scale_a, scale_b),
        (a, b, scale_a.repeat(1, 2)[:, :1], scale_b),  # strided
        (a[:17], b, scale_a[:17], scale_b),
        (a, b, scale_a, scale_b[0, :1]),
    ]
    for number, given in enumerate(others, 1):
        for _ in range(2):
            assert torch.equal(scaled_mm(*given), reference(*given))
        assert len(firsts) == number


class Asked(TorchDispatchMode):
    """What PyTorch is asked to do."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function.__name__)
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_repeated_call_asks_torch_for_the_product_and_nothing_else(kind, firsts, monkeypatch):
    """Where scales and ``out`` are laid out as it wants them."""
    products = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *given, **options: products.append(given))
    given, out = operands(kind, kind), torch.zeros(20, 256, dtype=BF16)
    scaled_mm(*given, out=out)
    with Asked() as asked:
        scaled_mm(*given, out=out)
    assert asked.names == [] and len(firsts) == 1
    assert all(mine is its for mine, its in zip(given, products[1], strict=True))


def test_repeated_call_asks_for_no_gradient(firsts, monkeypatch):
    """torch._scaled_mm takes no ``out`` with a bias that requires one."""
    modes = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *_, **__: modes.append(torch.is_grad_enabled()))
    bias = torch.nn.Parameter(torch.randn(256))
    for _ in range(3):
        scaled_mm(*operands("row", "row"), bias=bias)
    assert modes[1:] == [False, False] and len(firsts) == 1


def test_what_is_remembered_keeps_no_tensor_alive(firsts, library):
    given = list(operands("tensor", "tensor"))
    for _ in range(2):
        scaled_mm(*given)
    alive = [weakref.ref(x) for x in given]
    del given
    gc.collect()
    assert len(firsts) == 1 and not any(reference() is not None for reference in alive)


def test_refusal_is_not_remembered(firsts, monkeypatch):
    def raising(*arguments, **options):
        raise RuntimeError("not on this card")

    monkeypatch.setattr(torch, "_scaled_mm", raising)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="backend 'torch' refuses: not on this card"):
            scaled_mm(*operands("row", "row"))
    assert not op._KNOWN


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_repeated_call_launches_what_torch_does(kind):
    a, b, scale_a, scale_b = (x.cuda() for x in operands(kind, kind))
    b, out = b.T.contiguous().T, torch.empty(20, 256, dtype=BF16, device="cuda")

    def launched(call):
        call()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        return [e.name for e in profiler.events() if e.device_type == DeviceType.CUDA]

    by_kvkern = launched(
        lambda: scaled_mm(a, b, scale_a, scale_b, out=out, accumulation="fast", backend="torch")
    )
    by_torch = launched(
        lambda: torch._scaled_mm(
            a, b, scale_a, scale_b, out_dtype=BF16, use_fast_accum=True, out=out
        )
    )
    assert by_kvkern == by_torch
