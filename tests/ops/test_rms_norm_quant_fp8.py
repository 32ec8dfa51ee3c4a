"""rms_norm_quant_fp8: it quantises the norm, and does it as quantize_fp8 does."""

import math

import pytest
import torch

import kvkern
from kvkern import dequantize_fp8, quantize_fp8, rms_norm_quant_fp8
from tests.ops.test_quantize_fp8 import assert_column_major, assert_same_bytes

BACKENDS = ["triton", "reference"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPS = 1e-6


def make_inputs(*shape, dtype=torch.bfloat16, device="cpu"):
    """Rows with means, columns of other sizes."""
    x = (torch.randn(shape) + 0.5) * 2.0 ** torch.randint(-6, 6, (*shape[:-1], 1))
    gamma = torch.randn(shape[-1]) * 2.0 ** torch.randint(-8, 8, shape[-1:])
    return x.to(dtype).to(device), gamma.to(dtype).to(device)


def exact_norm(x, gamma, eps=EPS):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma.double()


def assert_quantizes(quantized, exact, granularity, backend="triton"):
    """Every number of fp64 is within half a step of fp8, or a little more; so are the scales."""
    values, scale = quantized
    bits, smallest = (3, 2.0**-9) if values.dtype == E4M3 else (2, 2.0**-16)
    real = dequantize_fp8(values, scale, dtype=torch.float32, backend=backend).double()
    ones = torch.full_like(values.float(), 1.0).to(values.dtype)
    spread = dequantize_fp8(ones, scale, dtype=torch.float32, backend=backend).double()
    allowed = torch.maximum(exact.abs() * 2.0 ** -(bits + 1), spread * smallest / 2)
    assert ((real - exact).abs() <= allowed * 1.0001).all()
    if granularity != "tensor":
        found = quantize_fp8(exact.float(), granularity=granularity, dtype=values.dtype).scale
        torch.testing.assert_close(scale, found, rtol=1e-5, atol=0)


@pytest.mark.parametrize("granularity", ["row", "group"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_norm_is_quantized_once(x_dtype, dtype, granularity, device):
    x, gamma = make_inputs(13, 390, dtype=x_dtype, device=device)
    quantized = rms_norm_quant_fp8(x, gamma, granularity=granularity, dtype=dtype, backend="triton")
    assert_quantizes(quantized, exact_norm(x, gamma), granularity)


# one column, a cell and its neighbours, two programs' rows, several warps, several of their chunks
@pytest.mark.parametrize(
    "shape", [(7, 1), (63, 7), (1, 127), (129, 129), (3, 1023), (2, 2100), (1, 9300)], ids=str
)
@pytest.mark.parametrize("granularity", ["row", "group"])
def test_odd_sizes(shape, granularity, device):
    x, gamma = make_inputs(*shape, device=device)
    quantized = rms_norm_quant_fp8(x, gamma, granularity=granularity, backend="triton")
    assert_quantizes(quantized, exact_norm(x, gamma), granularity)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mean_of_a_long_row_is_not_biased(backend, device):
    """Values with a mean, whose sums are large: in 16 bits they would be off by percents."""
    x = (torch.randn(2, 16384) * 0.1 + 3).bfloat16().to(device)
    gamma = torch.ones(16384, device=device)
    ones = torch.full((1,), 2.0**-6, device=device)
    values, _ = rms_norm_quant_fp8(x, gamma, granularity="tensor", scale=ones, backend=backend)
    exact = exact_norm(x, gamma) * 64
    assert (values.double().mean() / exact.mean() - 1).abs() < 0.01
    assert ((values.double() - exact).abs() <= exact * 2**-4 * 1.0001).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", ["tensor", "row", "group"])
def test_scales_that_are_given_are_taken_as_they_are(granularity, backend, device):
    x, gamma = make_inputs(5, 300, device=device)
    shape = {"tensor": (1,), "row": (5, 1), "group": (5, 3)}[granularity]
    scale = torch.rand(shape, device=device) + 0.5
    quantized = rms_norm_quant_fp8(x, gamma, granularity=granularity, scale=scale, backend=backend)
    assert quantized.scale is scale
    exact = exact_norm(x, gamma)
    cells = dequantize_fp8(torch.ones(5, 300).to(E4M3).to(device), scale, dtype=torch.float32)
    assert_quantizes(quantized, exact.clamp(-448 * cells.double(), 448 * cells.double()), "tensor")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("granularity", ["row", "group"])
def test_residual_is_added_rounded_kept_and_normed(granularity, dtype, backend, device):
    x, gamma = make_inputs(9, 260, dtype=dtype, device=device)
    residual, _ = make_inputs(9, 260, dtype=dtype, device=device)
    before, expected = x.clone(), x + residual
    quantized = rms_norm_quant_fp8(
        x, gamma, residual=residual, granularity=granularity, backend=backend
    )
    assert torch.equal(residual, expected) and torch.equal(x, before)
    assert_quantizes(quantized, exact_norm(expected, gamma), granularity)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", ["row", "group"])
def test_powers_of_two_and_other_epsilons(granularity, backend, device):
    x, gamma = make_inputs(4, 200, device=device)
    options = {"eps": 4.0, "granularity": granularity, "backend": backend}
    found = rms_norm_quant_fp8(x, gamma, **options)
    assert_quantizes(found, exact_norm(x, gamma, 4.0), granularity)
    rounded = rms_norm_quant_fp8(x, gamma, **options, power_of_two=True)
    assert_quantizes(rounded, exact_norm(x, gamma, 4.0), "tensor")
    assert (torch.frexp(rounded.scale).mantissa == 0.5).all()
    assert ((rounded.scale >= found.scale) & (rounded.scale < 2 * found.scale)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_rows_are_bad_alone(backend, device):
    x, gamma = make_inputs(40, 140, device=device)
    clean = rms_norm_quant_fp8(x, gamma, backend=backend)
    x[3, 5], x[7, 8] = math.nan, math.inf
    values, scale = rms_norm_quant_fp8(x, gamma, backend=backend)
    assert values[3].float().isnan().all() and scale[3] == 2.0**-100
    assert values[7, 8].float().isnan() and (values[7].float().nan_to_num() == 0).all()
    others = [row for row in range(40) if row not in (3, 7)]
    assert torch.equal(values[others].view(torch.uint8), clean.values[others].view(torch.uint8))
    assert torch.equal(scale[others], clean.scale[others])


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_leading_dims_and_outputs(backend, device):
    wide, gamma = make_inputs(2 * 6, 400, device=device)
    x, gamma = wide[:, 100:300], gamma[:200].contiguous()
    expected = rms_norm_quant_fp8(x.contiguous(), gamma, backend=backend)
    residual = torch.zeros(12, 300, dtype=x.dtype, device=device)[:, 40:240]
    out = torch.empty(2, 6, 200, dtype=torch.uint8, device=device).view(E4M3)
    quantized = rms_norm_quant_fp8(
        x.unflatten(0, (2, 6)), gamma, residual=residual.unflatten(0, (2, 6)), out=out,
        backend=backend,
    )  # fmt: skip
    assert quantized.values is out and quantized.scale.shape == (2, 6, 1)
    assert torch.equal(out.view(12, 200).view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(quantized.scale.flatten(), expected.scale.flatten())
    assert torch.equal(residual, x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 300), (7, 256), (129, 129), (2, 3, 200)], ids=str)
def test_column_major_scales_are_the_same_numbers_in_another_order(shape, backend, device):
    x, gamma = make_inputs(*shape, device=device)
    options = {"granularity": "group", "backend": backend}
    by_row = rms_norm_quant_fp8(x, gamma, **options)
    by_column = rms_norm_quant_fp8(x, gamma, **options, column_major_scales=True)
    assert_same_bytes(by_column, by_row)
    assert_column_major(by_column.scale, by_row.scale.shape, math.prod(shape[:-1]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 256), (5, 0), (2, 0, 7)], ids=str)
def test_empty_dims(shape, backend, device):
    x, gamma = torch.empty(shape, device=device), torch.ones(shape[-1], device=device)
    values, scale = rms_norm_quant_fp8(x, gamma, granularity="group", backend=backend)
    assert values.shape == x.shape and scale.shape == (*shape[:-1], -(-shape[-1] // 128))


@pytest.mark.gpu
def test_graph_replay_reads_new_numbers():
    x, gamma = make_inputs(200, 300, device="cuda")
    rms_norm_quant_fp8(x, gamma)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantized = rms_norm_quant_fp8(x, gamma)
    x.copy_(make_inputs(200, 300)[0])
    graph.replay()
    assert_quantizes(quantized, exact_norm(x, gamma), "row")


X, GAMMA = torch.zeros(4, 256), torch.ones(256)
MISTAKES = {
    "column-major scales of a tensor": (
        lambda: rms_norm_quant_fp8(X, GAMMA, granularity="tensor", column_major_scales=True),
        kvkern.ArgumentError,
        r"column_major_scales: want it with granularity 'group', got 'tensor'",
    ),
    "blocks": (
        lambda: rms_norm_quant_fp8(X, GAMMA, granularity="block"),
        kvkern.ArgumentError,
        r"granularity: want one of tensor, row, group; got 'block'",
    ),
    "a tensor's scale is to be found": (
        lambda: rms_norm_quant_fp8(X, GAMMA, granularity="tensor"),
        kvkern.ArgumentError,
        r"scale: want one for a tensor, whose rows are not all known; got None",
    ),
    "gamma of another size": (
        lambda: rms_norm_quant_fp8(X, GAMMA[:255]),
        kvkern.ShapeMismatchError,
        r"gamma: want \[K=256\], got \[255\]",
    ),
    "gamma with strides": (
        lambda: rms_norm_quant_fp8(X, torch.ones(512)[::2]),
        kvkern.LayoutError,
        r"gamma: want contiguous, got strides \[2\]",
    ),
    "a residual in another dtype": (
        lambda: rms_norm_quant_fp8(X, GAMMA, residual=X.bfloat16()),
        kvkern.UnsupportedDtypeError,
        r"residual: want float32, got torch.bfloat16",
    ),
    "a residual of another shape": (
        lambda: rms_norm_quant_fp8(X, GAMMA, residual=X[:3]),
        kvkern.ShapeMismatchError,
        r"residual: want \[D0=4, D1=256\], got \[3, 256\]",
    ),
    "a residual of columns": (
        lambda: rms_norm_quant_fp8(X, GAMMA, residual=torch.zeros(256, 4).T),
        kvkern.LayoutError,
        r"residual: want contiguous rows at one distance, got strides \[1, 4\]",
    ),
    "a residual of one row for all": (
        lambda: rms_norm_quant_fp8(X, GAMMA, residual=torch.zeros(1, 256).expand(4, -1)),
        kvkern.LayoutError,
        r"residual: want each element at a place of its own, got strides \[0, 1\]",
    ),
    "x for a residual": (
        lambda: rms_norm_quant_fp8(X, GAMMA, residual=X),
        kvkern.LayoutError,
        r"residual: want it apart from x, got both at one address",
    ),
    "rounding a scale that is given": (
        lambda: rms_norm_quant_fp8(X, GAMMA, scale=torch.ones(4, 1), power_of_two=True),
        kvkern.ArgumentError,
        r"power_of_two: want it without scale",
    ),
    "no tensor": (
        lambda: rms_norm_quant_fp8(None, GAMMA),
        kvkern.UnsupportedDtypeError,
        r"x: want a tensor, got NoneType",
    ),
    "no gamma": (
        lambda: rms_norm_quant_fp8(X, None),
        kvkern.UnsupportedDtypeError,
        r"gamma: want a tensor, got NoneType",
    ),
    "a number for a residual": (
        lambda: rms_norm_quant_fp8(X, GAMMA, residual=1.0),
        kvkern.UnsupportedDtypeError,
        r"residual: want a tensor, got float",
    ),
    "gamma on another device": (
        lambda: rms_norm_quant_fp8(X, GAMMA.to("meta")),
        kvkern.DeviceError,
        r"gamma: want device cpu, got meta",
    ),
    "a residual on another device": (
        lambda: rms_norm_quant_fp8(X, GAMMA, residual=X.to("meta")),
        kvkern.DeviceError,
        r"residual: want device cpu, got meta",
    ),
    "a scale on another device": (
        lambda: rms_norm_quant_fp8(X, GAMMA, scale=torch.ones(4, 1, device="meta")),
        kvkern.DeviceError,
        r"scale: want device cpu, got meta",
    ),
    "an output on another device": (
        lambda: rms_norm_quant_fp8(X, GAMMA, out=X.to("meta", E4M3)),
        kvkern.DeviceError,
        r"out: want device cpu, got meta",
    ),
}


@pytest.mark.parametrize("call, error, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_say_what_to_change(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_residual_that_is_refused_is_not_written(device):
    x, gamma = torch.ones(4, 256, device=device), torch.ones(256, device=device)
    for residual in (x, torch.ones(1, 256, device=device).expand(4, -1)):
        with pytest.raises(kvkern.LayoutError, match="residual"):
            rms_norm_quant_fp8(x, gamma, residual=residual)
        assert (residual == 1).all()
