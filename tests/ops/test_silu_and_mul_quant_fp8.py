"""silu_and_mul_quant_fp8: it quantises silu(gate) * up, and does it as quantize_fp8 does."""

import math

import pytest
import torch

import kvkern
from kvkern import dequantize_fp8, silu_and_mul_quant_fp8
from tests.ops.test_quantize_fp8 import assert_column_major, assert_same_bytes
from tests.ops.test_rms_norm_quant_fp8 import BACKENDS, E4M3, E5M2, assert_quantizes


def make_input(*shape, dtype=torch.bfloat16, device="cpu"):
    """Gates that are open, shut and between; a mean, which sums of products would keep."""
    gate = torch.randn(shape) * 2.0 ** torch.randint(-4, 5, shape)
    up = (torch.randn(shape) + 0.5) * 2.0 ** torch.randint(-6, 6, (*shape[:-1], 1))
    return torch.cat([gate, up], dim=-1).to(dtype).to(device)


def exact_product(x):
    """silu by the logarithm of the sigmoid, which no backend takes."""
    gate, up = x.double().chunk(2, dim=-1)
    return gate * torch.nn.functional.logsigmoid(gate).exp() * up


@pytest.mark.parametrize("granularity", ["row", "group"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_product_is_quantized_once(x_dtype, dtype, granularity, device):
    x = make_input(13, 390, dtype=x_dtype, device=device)
    quantized = silu_and_mul_quant_fp8(x, granularity=granularity, dtype=dtype, backend="triton")
    assert_quantizes(quantized, exact_product(x), granularity)


# one column, a cell and its neighbours, two programs' rows, several warps, several of their chunks
@pytest.mark.parametrize(
    "shape", [(7, 1), (63, 7), (1, 127), (129, 129), (3, 1023), (2, 2100), (1, 9300)], ids=str
)
@pytest.mark.parametrize("granularity", ["row", "group"])
def test_odd_sizes(shape, granularity, device):
    x = make_input(*shape, device=device)
    quantized = silu_and_mul_quant_fp8(x, granularity=granularity, backend="triton")
    assert_quantizes(quantized, exact_product(x), granularity)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", ["tensor", "row", "group"])
def test_scales_that_are_given_are_taken_as_they_are(granularity, backend, device):
    x = make_input(5, 300, device=device)
    shape = {"tensor": (1,), "row": (5, 1), "group": (5, 3)}[granularity]
    scale = (torch.rand(shape, device=device) + 0.5) / 16
    quantized = silu_and_mul_quant_fp8(x, granularity=granularity, scale=scale, backend=backend)
    assert quantized.scale is scale
    cells = dequantize_fp8(torch.ones(5, 300).to(E4M3).to(device), scale, dtype=torch.float32)
    limit = 448 * cells.double()
    assert_quantizes(quantized, exact_product(x).clamp(-limit, limit), "tensor")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", ["row", "group"])
def test_powers_of_two_are_the_next_ones_up(granularity, backend, device):
    x = make_input(4, 200, device=device)
    options = {"granularity": granularity, "backend": backend}
    found = silu_and_mul_quant_fp8(x, **options)
    rounded = silu_and_mul_quant_fp8(x, **options, power_of_two=True)
    assert_quantizes(rounded, exact_product(x), "tensor")
    assert (torch.frexp(rounded.scale).mantissa == 0.5).all()
    assert ((rounded.scale >= found.scale) & (rounded.scale < 2 * found.scale)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_that_are_shut_and_numbers_that_are_not(backend, device):
    x = torch.ones(1, 2 * 130, device=device)
    x[0, :6] = torch.tensor([-1e30, -90.0, 1e30, -math.inf, math.nan, math.inf], device=device)
    x[0, 130 + 6] = math.nan
    values, scale = silu_and_mul_quant_fp8(x, granularity="group", backend=backend)
    values = values.float()
    assert (values[0, :2] == 0).all() and values[0, 2] == 448 == values[0, 5]
    assert values[0, [3, 4, 6]].isnan().all() and values.isnan().sum() == 3
    # of the finite, the largest is the one of its cell
    torch.testing.assert_close(scale[0, 0] * 448, torch.tensor(1e30, device=device))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_leading_dims_and_outputs(backend, device):
    wide = make_input(2 * 6, 400, device=device)
    x = wide[:, 100:500]
    expected = silu_and_mul_quant_fp8(x.contiguous(), backend=backend)
    out = torch.empty(2, 6, 200, dtype=torch.uint8, device=device).view(E4M3)
    quantized = silu_and_mul_quant_fp8(x.unflatten(0, (2, 6)), out=out, backend=backend)
    assert quantized.values is out and quantized.scale.shape == (2, 6, 1)
    assert torch.equal(out.view(12, 200).view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(quantized.scale.flatten(), expected.scale.flatten())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 300), (7, 256), (129, 129), (2, 3, 200)], ids=str)
def test_column_major_scales_are_the_same_numbers_in_another_order(shape, backend, device):
    x = make_input(*shape, device=device)
    options = {"granularity": "group", "backend": backend}
    by_row = silu_and_mul_quant_fp8(x, **options)
    by_column = silu_and_mul_quant_fp8(x, **options, column_major_scales=True)
    assert_same_bytes(by_column, by_row)
    assert_column_major(by_column.scale, by_row.scale.shape, math.prod(shape[:-1]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 256), (5, 0), (2, 0, 14)], ids=str)
def test_empty_dims(shape, backend, device):
    values, scale = silu_and_mul_quant_fp8(
        torch.empty(shape, device=device), granularity="group", backend=backend
    )
    assert values.shape == (*shape[:-1], shape[-1] // 2)
    assert scale.shape == (*shape[:-1], -(-shape[-1] // 256))


@pytest.mark.gpu
def test_graph_replay_reads_new_numbers():
    x = make_input(200, 300, device="cuda")
    silu_and_mul_quant_fp8(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantized = silu_and_mul_quant_fp8(x)
    x.copy_(make_input(200, 300))
    graph.replay()
    assert_quantizes(quantized, exact_product(x), "row")


X = torch.zeros(4, 256)
MISTAKES = {
    "an odd number of columns": (
        lambda: silu_and_mul_quant_fp8(X[:, :255]),
        kvkern.ShapeMismatchError,
        r"x: want \[..., 2I\], gate then up; got \[4, 255\]",
    ),
    "column-major scales of a tensor": (
        lambda: silu_and_mul_quant_fp8(X, granularity="tensor", column_major_scales=True),
        kvkern.ArgumentError,
        r"column_major_scales: want it with granularity 'group', got 'tensor'",
    ),
    "blocks": (
        lambda: silu_and_mul_quant_fp8(X, granularity="block"),
        kvkern.ArgumentError,
        r"granularity: want one of tensor, row, group; got 'block'",
    ),
    "a tensor's scale is to be found": (
        lambda: silu_and_mul_quant_fp8(X, granularity="tensor"),
        kvkern.ArgumentError,
        r"scale: want one for a tensor, whose rows are not all known; got None",
    ),
    "scales of gate and up": (
        lambda: silu_and_mul_quant_fp8(X, granularity="group", scale=torch.ones(4, 2)),
        kvkern.ShapeMismatchError,
        r"scale: want \[D0=4, D1=1\], got \[4, 2\]",
    ),
    "an output as wide as x": (
        lambda: silu_and_mul_quant_fp8(X, out=X.to(E4M3)),
        kvkern.ShapeMismatchError,
        r"out: want \[D0=4, D1=128\], got \[4, 256\]",
    ),
    "no tensor": (
        lambda: silu_and_mul_quant_fp8(None),
        kvkern.UnsupportedDtypeError,
        r"x: want a tensor, got NoneType",
    ),
    "a scale on another device": (
        lambda: silu_and_mul_quant_fp8(X, scale=torch.ones(4, 1, device="meta")),
        kvkern.DeviceError,
        r"scale: want device cpu, got meta",
    ),
    "an output on another device": (
        lambda: silu_and_mul_quant_fp8(X, out=X[:, :128].to("meta", E4M3)),
        kvkern.DeviceError,
        r"out: want device cpu, got meta",
    ),
}


@pytest.mark.parametrize("call, error, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_say_what_to_change(call, error, message):
    with pytest.raises(error, match=message):
        call()
