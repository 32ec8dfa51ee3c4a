"""FP8Linear alone: it is scaled_mm of both sides quantised, in 8 bits, and trains."""

import pytest
import torch
from torch import nn

import kvkern
from kvkern import quantize_fp8
from kvkern.nn import FP8Linear, fp8_linear

BF16, FP32 = torch.bfloat16, torch.float32
every_scaling = pytest.mark.parametrize("scaling", ["block", "row"])


@every_scaling
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32], ids=str)
def test_result_is_scaled_mm_of_both_sides_quantised(scaling, dtype, device):
    layer = FP8Linear(260, 200, scaling=scaling, device=device, dtype=dtype)
    x = torch.randn(7, 260, device=device).to(dtype)
    a = quantize_fp8(x, granularity="group" if scaling == "block" else "row")
    w = quantize_fp8(layer.weight.detach(), granularity=scaling)
    product = kvkern.scaled_mm(
        a.values, w.values.T, a.scale, w.scale.T, bias=layer.bias.detach(), out_dtype=dtype
    )
    assert torch.equal(layer(x), product)


def test_scales_of_groups_lie_as_products_fetch_them(monkeypatch, device):
    met = []

    def multiply(a, b, scale_a, scale_b, **options):
        met.append(scale_a.stride())
        return kvkern.scaled_mm(a, b, scale_a, scale_b, **options)

    monkeypatch.setattr(fp8_linear, "scaled_mm", multiply)
    FP8Linear(260, 200, device=device, dtype=BF16)(torch.randn(7, 260, device=device, dtype=BF16))
    assert met == [(1, 8)]


@every_scaling
def test_the_copy_is_of_8_bits_and_all_that_is_left_without_a_master(scaling, device):
    layer = FP8Linear(260, 200, scaling=scaling, device=device, dtype=BF16)
    values, scale = layer.quantized_weight()
    assert values.dtype == torch.float8_e4m3fn and values.shape == (200, 260)
    assert scale.shape == ((2, 3) if scaling == "block" else (200, 1))
    layer.release_master()
    held = sum(tensor.nbytes for tensor in layer.state_dict().values())
    assert held == 200 * 260 + 4 * scale.numel() + 2 * 200


def test_training_follows_the_weight(device):
    torch.manual_seed(1)
    layer = FP8Linear(64, 32, device=device)
    target, x = torch.randn(64, 32, device=device) / 8, torch.randn(256, 64, device=device)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = (layer(x) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


def test_mistakes_say_what_to_change(device):
    for make in (
        lambda **options: FP8Linear(4, 4, **options),
        lambda **options: FP8Linear.from_linear(nn.Linear(4, 4), **options),
    ):
        with pytest.raises(kvkern.ArgumentError, match="scaling: want block or row, got 'tensor'"):
            make(scaling="tensor")
    with pytest.raises(
        kvkern.UnsupportedDtypeError, match="x: want bfloat16 or float16 or float32"
    ):
        FP8Linear(4, 6, device=device)(torch.zeros(2, 4, device=device, dtype=torch.float64))
    assert repr(FP8Linear(4, 6)) == (
        "FP8Linear(in_features=4, out_features=6, bias=True, scaling='block', keep_master=True)"
    )
