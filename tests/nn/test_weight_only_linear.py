"""W8A16Linear and W4A16Linear alone: the product with what the stored weight means."""

import pytest
import torch
from torch import nn

import kvkern
from kvkern import dequantize_int4, dequantize_int8
from kvkern.nn import W4A16Linear, W8A16Linear

BF16 = torch.bfloat16


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "kind, dequantize, options",
    [
        (W8A16Linear, dequantize_int8, {}),
        (W4A16Linear, dequantize_int4, {}),
        (W4A16Linear, dequantize_int4, {"group_size": 32}),
        (W4A16Linear, dequantize_int4, {"group_size": None}),
    ],
)
def test_result_is_the_product_with_the_dequantised_weight(
    kind, dequantize, options, symmetric, device
):
    layer = kind(300, 40, symmetric=symmetric, **options, device=device, dtype=BF16)
    x = torch.randn(3, 5, 300, device=device).to(BF16)
    weight = layer.quantized_weight()
    assert (weight.zero is None) == symmetric
    product = x.float() @ dequantize(weight, dtype=torch.float32).T + layer.bias
    torch.testing.assert_close(layer(x), product.to(BF16), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind, bits", [(W8A16Linear, 8), (W4A16Linear, 4)])
def test_without_a_master_a_weight_takes_its_bits(kind, bits, device):
    layer = kind(512, 40, keep_master=False, device=device, dtype=BF16)
    assert layer.weight.nbytes == 512 * 40 * bits // 8


def test_mistakes_say_what_to_change(device):
    with pytest.raises(kvkern.ArgumentError, match="group_size: want 32, 64, 128 or None, got 100"):
        W4A16Linear(4, 4, group_size=100)
    with pytest.raises(kvkern.ArgumentError, match="group_size: want 32, 64, 128 or None, got 5"):
        W4A16Linear.from_linear(nn.Linear(4, 4), group_size=5)
    for kind in (W8A16Linear, W4A16Linear):
        with pytest.raises(kvkern.UnsupportedDtypeError, match="x: want bfloat16 or float16"):
            kind(4, 6, device=device)(torch.zeros(2, 4, device=device))
    assert repr(W8A16Linear(4, 6)) == (
        "W8A16Linear(in_features=4, out_features=6, bias=True, symmetric=True, keep_master=True)"
    )
    assert repr(W4A16Linear(4, 6)) == (
        "W4A16Linear(in_features=4, out_features=6, bias=True, symmetric=True, group_size=128, "
        "keep_master=True)"
    )
