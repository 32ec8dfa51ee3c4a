"""A launch may begin before the one before it has ended: it waits before it reads or writes.

Ops that need each other's results, one after the other without a pause, give the bits that they
give with one. In a graph nothing else is launched between them, and inputs are new for each replay,
so that what an earlier one has left in memory is not the result.
"""

import pytest
import torch

from kvkern import (
    matmul_w4a16,
    matmul_w8a16,
    mla_absorb,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    rms_norm_quant_fp8,
    scaled_mm,
    silu_and_mul_quant_fp8,
)
from kvkern.testing.timing import capture

BF16 = torch.bfloat16
GROUPS = {"granularity": "group", "column_major_scales": True}
HIDDEN = 2048
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a card of compute capability 9.0",
)


class Layer:
    """Linear layers whose ops each read what the one before has written."""

    def __init__(self, num_rows):
        self.x, self.residual = (randn(num_rows, HIDDEN) for _ in range(2))
        self.gamma = randn(HIDDEN)
        self.of_blocks = [fp8(n, k, "block") for n, k in ((6144, HIDDEN), (512, 3072), (4096, 512))]
        self.of_rows, self.of_tensor = fp8(HIDDEN, 4096, "row"), fp8(HIDDEN, 4096, "tensor")
        self.int8, self.int4 = quantize_int8(randn(4096, HIDDEN)), quantize_int4(randn(4096, 4096))
        self.heads = randn(32, 128, 512) / 11

    def __call__(self, between=lambda: None):
        """Results of each kind; ``between`` is called after each op."""

        def then(result):
            between()
            return result

        def multiply(quantized, weight, **options):
            (b, scale_b), (a, scale_a) = weight, (quantized.values, quantized.scale)
            return then(scaled_mm(a, b, scale_a, scale_b, backend="hopper", **options))

        residual = then(self.residual.clone())
        normed = then(rms_norm_quant_fp8(self.x, self.gamma, residual=residual, **GROUPS))
        gates = multiply(normed, self.of_blocks[0])
        down = multiply(then(silu_and_mul_quant_fp8(gates, **GROUPS)), self.of_blocks[1])
        y = multiply(then(quantize_fp8(down, **GROUPS)), self.of_blocks[2])
        by_rows = multiply(then(quantize_fp8(y, granularity="row")), self.of_rows)
        fast = {"accumulation": "fast"}
        # two launches, the second of which reads y before it waits for the first
        by_tensor = multiply(then(quantize_fp8(y, granularity="tensor")), self.of_tensor, **fast)
        # a weight that has just been made
        made = then(quantize_fp8(by_rows[:64].repeat(4, 1), granularity="block"))
        of_made = multiply(then(quantize_fp8(by_tensor, **GROUPS)), (made.values.T, made.scale.T))
        wide = then(matmul_w8a16(by_tensor, self.int8))
        narrow = then(matmul_w4a16(wide, self.int4))
        of_heads = narrow.view(-1, 32, 128)
        absorbed = then(mla_absorb(of_heads, self.heads, backend=absorb_backend(len(self.x))))
        return residual, y, by_rows, of_made, narrow, absorbed


def absorb_backend(num_rows):
    return "hopper" if num_rows > 64 else "auto"


def randn(*shape):
    return torch.randn(*shape, dtype=BF16, device="cuda")


def fp8(num_columns, depth, granularity):
    weight = quantize_fp8(randn(num_columns, depth), granularity=granularity)
    return weight.values.T, weight.scale if granularity == "tensor" else weight.scale.T


@on_hopper
@pytest.mark.parametrize("num_rows", [64, 80, 256, 1000, 4096])
def test_ops_in_a_row_are_those_with_a_pause_between(num_rows, monkeypatch):
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided")):
        plain = getattr(owner, name).__wrapped__  # to fill memory with NaN is a launch too
        monkeypatch.setattr(owner, name, plain)
    layer = Layer(num_rows)
    results = []
    replay = capture(lambda: results.append(layer()))
    for _ in range(8):
        layer.x.normal_()
        layer.residual.normal_()
        expected = layer(torch.cuda.synchronize)
        replay()
        for got, one in zip(results[-1], expected, strict=True):
            assert torch.equal(got, one)
