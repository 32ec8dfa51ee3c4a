"""Ops only compute forwards: no backend sees autograd or autocast, whatever its caller is under."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import kvkern
from kvkern import CacheFormat, PagedBatch, PagedKVCache
from kvkern.backends import TABLE, table
from kvkern.testing.inputs import rope_freqs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BACKENDS = ["triton", "reference"]
KERNELS = ("hopper", "triton")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


class Given(NamedTuple):
    """What a call is made of; its tensors are leaves that require grad, or do not."""

    device: str
    backend: str
    requires_grad: bool

    def randn(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape).to(self.device, dtype).requires_grad_(self.requires_grad)

    def fp8(self, *shape: int) -> kvkern.QuantizedFP8:
        values, scale = kvkern.quantize_fp8(torch.randn(shape).to(self.device))
        return kvkern.QuantizedFP8(values, scale.requires_grad_(self.requires_grad))

    def cache(self) -> PagedKVCache:
        fmt = CacheFormat("bf16", kv_lora_rank=64, rope_dim=32)
        return PagedKVCache(fmt, num_layers=1, num_pages=4, page_size=4, device=self.device)

    def filled(self) -> tuple[PagedKVCache, PagedBatch]:
        """Two tokens beside three that are cached."""
        cache, options = self.cache(), {"device": self.device}
        freqs = rope_freqs(16, 32).to(self.device)
        for batch, num_tokens in (
            (PagedBatch([0, 3], [0], [[2, 1]], **options), 3),
            (PagedBatch([0, 2], [3], [[2, 1]], **options), 2),
        ):
            kvkern.write_kv(
                cache.view(0, batch), self.randn(num_tokens, 96), freqs, self.randn(64),
                backend=self.backend,
            )  # fmt: skip
        return cache, batch


def scaled_mm(given):
    a, b = given.fp8(5, 192), given.fp8(24, 192)
    bias = given.randn(24)
    return [
        kvkern.scaled_mm(
            a.values, b.values.T, a.scale, b.scale.T, bias=bias, out_dtype=FP32,
            backend=given.backend,
        )
    ]  # fmt: skip


def fp8_gemm(given):
    a, b = given.randn(5, 192, dtype=FP32), given.randn(192, 24, dtype=FP32)
    return [kvkern.fp8_gemm(a, b, output_dtype=FP32, backend=given.backend)]


def mla_absorb(given):
    return [
        kvkern.mla_absorb(
            given.randn(5, 2, 192, dtype=dtype), given.randn(2, 192, 24, dtype=dtype),
            backend=given.backend,
        )
        for dtype in (FP16, FP32)
    ]  # fmt: skip


def quantize_fp8(given):
    quantized = kvkern.quantize_fp8(given.randn(5, 192), backend=given.backend)
    scale = quantized.scale.detach().requires_grad_(given.requires_grad)
    return [*quantized, kvkern.dequantize_fp8(quantized.values, scale, backend=given.backend)]


def rms_norm_quant_fp8(given):
    x, gamma, residual = given.randn(5, 192), given.randn(192), given.randn(5, 192)
    return kvkern.rms_norm_quant_fp8(x, gamma, residual=residual, backend=given.backend)


def silu_and_mul_quant_fp8(given):
    return kvkern.silu_and_mul_quant_fp8(given.randn(5, 192), backend=given.backend)


def quantize_int8(given):
    quantized = kvkern.quantize_int8(given.randn(24, 192), symmetric=False, backend=given.backend)
    return [*quantized[:3], kvkern.dequantize_int8(quantized, backend=given.backend)]


def quantize_int4(given):
    quantized = kvkern.quantize_int4(given.randn(24, 192), symmetric=False, backend=given.backend)
    return [*quantized[:3], kvkern.dequantize_int4(quantized, backend=given.backend)]


def products_of_int8(given, depth=192):
    weight = kvkern.quantize_int8(given.randn(24, depth), backend=given.backend)
    scale = weight.scale.detach().requires_grad_(given.requires_grad)
    weight = weight._replace(scale=scale)
    return [
        matmul(
            given.randn(5, depth), weight, bias=given.randn(24), out_dtype=FP32,
            backend=given.backend,
        )
        for matmul in (kvkern.matmul_w8a16, kvkern.matmul_w8a8)
    ]  # fmt: skip


def products_of_int8_of_no_columns(given):
    return products_of_int8(given, depth=0)


def matmul_w4a16(given):
    weight = kvkern.quantize_int4(given.randn(24, 192), backend=given.backend)
    x, bias = given.randn(5, 192), given.randn(24)
    return [kvkern.matmul_w4a16(x, weight, bias=bias, out_dtype=FP32, backend=given.backend)]


def paged(given):
    """write_kv, mla_decode, gather_kv."""
    cache, batch = given.filled()
    view, q = cache.view(0, batch), given.randn(2, 3, 96)
    attended = kvkern.mla_decode(q, view, softmax_scale=0.1, backend=given.backend)
    rows = kvkern.gather_kv(view, backend=given.backend)
    return [cache.buffer, *attended, rows]


def mla_prefill(given):
    cache, batch = given.filled()
    return kvkern.mla_prefill(
        given.randn(2, 3, 80), given.randn(2, 3, 48), given.randn(2, 32), given.randn(2, 3, 48),
        cache.view(0, batch), softmax_scale=0.1, w_uk=given.randn(3, 48, 64),
        w_uv=given.randn(3, 64, 48), backend=given.backend,
    )  # fmt: skip


def merge_states(given):
    outs, lses = given.randn(2, 5, 3, 32), given.randn(2, 5, 3, dtype=FP32)
    return kvkern.merge_states(outs, lses, backend=given.backend)


CALLS: list[Callable[[Given], list[Tensor]]] = [
    scaled_mm, fp8_gemm, mla_absorb, quantize_fp8, rms_norm_quant_fp8, silu_and_mul_quant_fp8,
    quantize_int8, quantize_int4, products_of_int8, products_of_int8_of_no_columns, matmul_w4a16,
    paged, mla_prefill, merge_states,
]  # fmt: skip
every_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)


def results(call, device, backend, requires_grad=False):
    torch.manual_seed(0)
    return [x for x in call(Given(device, backend, requires_grad)) if x is not None]


def assert_same_bits(some, others):
    for one, other in zip(some, others, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.detach().view(torch.uint8), other.detach().view(torch.uint8))


@every_call
@every_backend
def test_results_require_no_gradient(call, backend, device):
    got = results(call, device, backend, requires_grad=True)
    assert not any(x.requires_grad for x in got)
    assert_same_bits(got, results(call, device, backend))


@every_call
@every_backend
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_autocast_changes_no_bit(dtype, call, backend, device):
    expected = results(call, device, backend)
    with torch.autocast(device, dtype):
        assert_same_bits(results(call, device, backend), expected)


def leaf(x):
    return torch.zeros_like(x).requires_grad_()


FILLS = {  # what is filled, of what is returned without it
    "scaled_mm": lambda given, **out: kvkern.scaled_mm(
        given.fp8(5, 192).values, given.fp8(24, 192).values.T,
        torch.ones(1, device=given.device), torch.ones(1, device=given.device), **out,
    ),
    "mla_absorb": lambda given, **out: kvkern.mla_absorb(
        given.randn(5, 2, 192), given.randn(2, 192, 24), **out
    ),
    "quantize_fp8": lambda given, **out: kvkern.quantize_fp8(given.randn(5, 192), **out).values,
    "dequantize_fp8": lambda given, **out: kvkern.dequantize_fp8(*given.fp8(5, 192), **out),
    "rms_norm_quant_fp8": lambda given, **out: kvkern.rms_norm_quant_fp8(
        given.randn(5, 192), given.randn(192), **out
    ).values,
    "silu_and_mul_quant_fp8": lambda given, **out: kvkern.silu_and_mul_quant_fp8(
        given.randn(5, 192), **out
    ).values,
    "matmul_w8a16": lambda given, **out: kvkern.matmul_w8a16(
        given.randn(5, 192), kvkern.quantize_int8(given.randn(24, 192)), **out
    ),
    "matmul_w8a16 of no columns": lambda given, **out: kvkern.matmul_w8a16(
        given.randn(5, 0), kvkern.quantize_int8(given.randn(24, 0)), **out
    ),
    "mla_decode": lambda given, **out: kvkern.mla_decode(
        given.randn(0, 3, 96), given.cache().view(0, PagedBatch([0], [], [], device=given.device)),
        softmax_scale=0.1, **out,
    ).out,
    "merge_states": lambda given, **out: kvkern.merge_states(
        given.randn(2, 5, 3, 32), given.randn(2, 5, 3, dtype=FP32), **out
    ).out,
}  # fmt: skip


@every_backend
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_parameter_is_filled(fill, backend, device):
    def filled(**out):
        torch.manual_seed(0)
        return fill(Given(device, backend, requires_grad=False), backend=backend, **out)

    expected = filled()
    out = leaf(expected)
    assert filled(out=out) is out and out.is_leaf
    assert_same_bits([out], [expected])


@every_backend
def test_parameter_is_added_to(backend, device):
    given = Given(device, backend, requires_grad=False)
    x, gamma = given.randn(5, 192), given.randn(192)
    residual = leaf(x)
    kvkern.rms_norm_quant_fp8(x, gamma, residual=residual, backend=backend)
    assert residual.is_leaf and torch.equal(residual, x)


def test_gradient_of_a_product_is_refused_not_wrong(device):
    x, w = (torch.randn(64, 64, device=device) for _ in range(2))
    total = kvkern.fp8_gemm(x.requires_grad_(), w, output_dtype=FP32).sum()
    with pytest.raises(RuntimeError, match="does not require grad"):
        total.backward()


@pytest.mark.parametrize(
    "quantize", [kvkern.quantize_fp8, kvkern.quantize_int8, kvkern.quantize_int4]
)
@every_backend
def test_quantised_parameter_can_be_copied(quantize, backend, device):
    weight = torch.nn.Linear(256, 8, device=device).weight
    quantized = quantize(weight, backend=backend)
    assert_same_bits(copy.deepcopy(quantized)[:2], quantized[:2])


@pytest.mark.parametrize("op", TABLE)
def test_all_that_is_no_kernel_is_called_without_autograd_and_autocast(op, monkeypatch):
    """A kernel sees neither, and is not made to wait for that."""

    def modes():
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    monkeypatch.setattr(table.Backend, "load", lambda backend: modes)
    for backend in TABLE[op]:
        run = table._implementation(backend, torch.device("cpu"))
        with torch.autocast("cpu", BF16):
            assert run() == ((True, True) if backend.name in KERNELS else (False, False))
