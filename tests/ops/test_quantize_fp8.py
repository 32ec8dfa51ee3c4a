"""quantize_fp8 and dequantize_fp8: the reference's bytes everywhere, and what those are."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import kvkern
from kvkern import dequantize_fp8, quantize_fp8

BACKENDS = ["triton", "reference"]
GRANULARITIES = ["tensor", "row", "group", "block"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIN_SCALE = 2.0**-100


def heavy_tailed(*shape, dtype=torch.bfloat16, device="cpu"):
    """Normal numbers over many powers of two, so that cells differ."""
    exponents = torch.randint(-12, 12, shape)
    return torch.ldexp(torch.randn(shape), exponents).to(dtype).to(device)


def assert_same_bytes(one, other):
    assert torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
    assert torch.equal(one.scale, other.scale)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bytes_are_the_references(granularity, dtype, power_of_two, x_dtype, device):
    x = heavy_tailed(131, 390, dtype=x_dtype, device=device)
    options = {"granularity": granularity, "dtype": dtype, "power_of_two": power_of_two}
    expected = quantize_fp8(x, **options, backend="reference")
    assert_same_bytes(quantize_fp8(x, **options, backend="triton"), expected)
    on_cpu = quantize_fp8(x.cpu(), **options, backend="reference")
    assert_same_bytes(on_cpu, kvkern.QuantizedFP8(*(tensor.cpu() for tensor in expected)))


SIZES = [1, 7, 63, 127, 128, 129, 1023]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    "shape", [*itertools.pairwise(SIZES), *itertools.pairwise(SIZES[::-1])], ids=str
)
def test_odd_sizes(granularity, shape, device):
    x = heavy_tailed(*shape, device=device)
    quantized = quantize_fp8(x, granularity=granularity, backend="triton")
    assert_same_bytes(quantized, quantize_fp8(x, granularity=granularity, backend="reference"))
    real = dequantize_fp8(*quantized, backend="triton")
    assert torch.equal(real, dequantize_fp8(*quantized, backend="reference"))


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_rows_longer_than_a_tile(granularity, device):
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvkern.kernels.fp8_tiles import LONGEST_ROW

    x = heavy_tailed(3, LONGEST_ROW + 4097, device=device)
    x[1, -1] = 1e6  # in the last of a row's tiles
    expected = quantize_fp8(x, granularity=granularity, backend="reference")
    assert_same_bytes(quantize_fp8(x, granularity=granularity, backend="triton"), expected)


def test_reference_is_what_its_loops_would_be():
    """A second formulation: cell by cell, element by element."""
    x = heavy_tailed(130, 200, dtype=torch.float32)
    cells = {"tensor": (130, 200), "row": (1, 200), "group": (1, 128), "block": (128, 128)}
    for granularity, (rows, columns) in cells.items():
        values, scale = quantize_fp8(x, granularity=granularity, backend="reference")
        for i, top in enumerate(range(0, 130, rows)):
            for j, left in enumerate(range(0, 200, columns)):
                cell = x[top : top + rows, left : left + columns]
                found = (cell.abs().max() / 448).item()
                assert scale.view(-1, math.ceil(200 / columns))[i, j].item() == found
                stored = (cell * (1 / torch.tensor(found))).clamp(-448, 448).to(E4M3)
                at = values[top : top + rows, left : left + columns]
                assert torch.equal(at.float(), stored.float())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype, bits", [(E4M3, 3), (E5M2, 2)], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_error_is_half_a_step_of_the_format(granularity, dtype, bits, backend, device):
    x = heavy_tailed(200, 300, dtype=torch.float32, device=device)
    quantized = quantize_fp8(x, granularity=granularity, dtype=dtype, backend=backend)
    real = dequantize_fp8(*quantized, dtype=torch.float32, backend=backend)
    ones = torch.full_like(quantized.values.float(), 1.0).to(dtype)
    scale = dequantize_fp8(ones, quantized.scale, dtype=torch.float32, backend=backend)
    smallest = torch.finfo(dtype).smallest_normal * 2.0**-bits  # a step of the subnormal numbers
    allowed = torch.maximum(x.abs() * 2.0 ** -(bits + 1), scale * smallest / 2) * 1.0001
    assert ((real - x).abs() <= allowed).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_power_of_two_scales_are_the_next_ones_up(granularity, backend, device):
    x = heavy_tailed(140, 140, device=device)
    x[0, 0] = 448 * 2.0**20  # exactly: nothing to round up
    exact = quantize_fp8(x, granularity=granularity, backend=backend).scale
    scale = quantize_fp8(x, granularity=granularity, power_of_two=True, backend=backend).scale
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert ((scale >= exact) & (scale < 2 * exact)).all()
    assert scale.flatten()[0] == 2.0**20


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_static_scales_are_taken_as_they_are(granularity, dtype, backend, device):
    x = heavy_tailed(150, 260, device=device)
    options = {"granularity": granularity, "dtype": dtype, "backend": backend}
    found = quantize_fp8(x, **options)
    again = quantize_fp8(x, **options, scale=found.scale)
    assert_same_bytes(again, found)
    assert again.scale is found.scale
    small = quantize_fp8(x, **options, scale=found.scale / 4)
    assert small.values.float().abs().max() == torch.finfo(dtype).max  # saturated, no NaN
    assert not small.values.float().isnan().any()


LAST_CELL = {  # of 150 rows and 260 columns
    "tensor": (slice(None), slice(None)),
    "row": (slice(149, None), slice(None)),
    "group": (slice(149, None), slice(256, None)),
    "block": (slice(128, None), slice(256, None)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nan_in_a_scale_is_in_all_of_its_cell(granularity, dtype, backend, device):
    x = heavy_tailed(150, 260, device=device)
    options = {"granularity": granularity, "dtype": dtype, "backend": backend}
    clean = quantize_fp8(x, **options)
    scale = clean.scale.clone()
    scale.view(-1)[-1] = math.nan
    expected = clean.values.float()
    expected[LAST_CELL[granularity]] = math.nan
    values = quantize_fp8(x, **options, scale=scale).values
    assert torch.equal(values.float().nan_to_num(7e7), expected.nan_to_num(7e7))
    real = dequantize_fp8(clean.values, scale, backend=backend)
    assert torch.equal(real.isnan(), expected.isnan())


@pytest.mark.parametrize("backend", BACKENDS)
def test_least_static_scale_has_an_inverse(backend, device):
    x = torch.tensor([[0.0, 2.0**-126, -(2.0**-125), 1.0]], device=device)
    scale = torch.full((1, 1), 2.0**-126, device=device)
    values = quantize_fp8(x, scale=scale, backend=backend).values
    assert values.tolist() == [[0, 1, -2, 448]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nan_stays_and_infinity_saturates_and_neither_is_in_a_scale(
    granularity, dtype, backend, device
):
    x = heavy_tailed(130, 140, device=device)
    x[3, 5:8], x[4, 0] = 0, 0
    options = {"granularity": granularity, "dtype": dtype, "backend": backend}
    clean = quantize_fp8(x, **options)
    x[3, 5], x[3, 6], x[3, 7], x[4, 0] = math.nan, math.inf, -math.inf, -math.nan
    quantized = quantize_fp8(x, **options)
    assert torch.equal(quantized.scale, clean.scale)
    values, limit = quantized.values.float(), torch.finfo(dtype).max
    assert values[3, 5].isnan() and values[4, 0].isnan() and values.isnan().sum() == 2
    assert (quantized.values.view(torch.uint8)[values.isnan()] == 0x7F).all()
    assert (values[3, 6], values[3, 7]) == (limit, -limit)
    is_finite = x.isfinite()
    assert torch.equal(values[is_finite], clean.values.float()[is_finite])
    assert torch.equal(dequantize_fp8(*quantized, backend=backend).isnan(), values.isnan())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_and_tiny_numbers_have_the_smallest_scale(granularity, backend, device):
    x = torch.zeros(3, 129, device=device)
    values, scale = quantize_fp8(x, granularity=granularity, backend=backend)
    assert (scale == MIN_SCALE).all() and (values.float() == 0).all()
    x[1, 3] = 2.0**-140
    values, scale = quantize_fp8(x, granularity=granularity, backend=backend)
    assert (scale == MIN_SCALE).all() and (values.float() == 0).all()


EMPTY = [(0, 256), (5, 0), (2, 0, 7), (2, 128, 0), (0,)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "shape, granularity", [*itertools.product(EMPTY, GRANULARITIES)][:-1], ids=str
)  # a row has no blocks
def test_empty_dims(shape, granularity, backend, device):
    x = torch.empty(shape, device=device)
    values, scale = quantize_fp8(x, granularity=granularity, backend=backend)
    assert values.shape == x.shape and (scale == MIN_SCALE).all()
    assert dequantize_fp8(values, scale, backend=backend).shape == x.shape


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_strided_rows_and_leading_dims(granularity, backend, device):
    wide = heavy_tailed(2 * 128, 2 * 200, device=device)
    x = wide[:, 100:300]
    expected = quantize_fp8(x.contiguous(), granularity=granularity, backend=backend)
    wide_values = torch.zeros(256, 400, dtype=torch.uint8, device=device).view(E4M3)
    assert_same_bytes(quantize_fp8(x, granularity=granularity, backend=backend), expected)
    folded = quantize_fp8(x.unflatten(0, (2, 128)), granularity=granularity, backend=backend)
    assert folded.values.shape == (2, 128, 200)
    if granularity == "tensor":
        assert folded.scale.shape == (1,)
    elif granularity == "block":
        assert folded.scale.shape == (2, 1, 2)
    else:
        assert folded.scale.shape[:2] == (2, 128)
    assert torch.equal(folded.scale.flatten(), expected.scale.flatten())
    wide_values[:, 100:300] = expected.values
    real = dequantize_fp8(wide_values[:, 100:300], expected.scale, backend=backend)
    assert torch.equal(real, dequantize_fp8(*expected, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_given_outputs_are_filled(backend, device):
    x = heavy_tailed(5, 300, device=device)
    values = torch.zeros(5, 300, dtype=torch.uint8, device=device).view(E4M3)
    quantized = quantize_fp8(x, out=values, backend=backend)
    assert quantized.values is values
    assert_same_bytes(quantized, quantize_fp8(x, backend=backend))
    real = torch.zeros(5, 300, dtype=torch.float16, device=device)
    assert dequantize_fp8(*quantized, dtype=torch.float16, out=real, backend=backend) is real
    assert torch.equal(real, dequantize_fp8(*quantized, dtype=torch.float16, backend=backend))


# one row, one of the next 16 bytes, a row more than a tile of a product; no tails, tails of both
@pytest.mark.parametrize("shape", [(1, 300), (7, 1), (7, 256), (129, 390), (2, 3, 200), (130,)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_column_major_scales_are_the_same_numbers_in_another_order(shape, backend, device):
    x = heavy_tailed(*shape, device=device)
    groups, num_rows = -(-shape[-1] // 128), math.prod(shape[:-1])
    options = {"granularity": "group", "backend": backend}
    by_row = quantize_fp8(x, **options)
    by_column = quantize_fp8(x, **options, column_major_scales=True)
    assert_same_bytes(by_column, by_row)
    assert_column_major(by_column.scale, (*shape[:-1], groups), num_rows)
    assert torch.equal(
        dequantize_fp8(*by_column, backend=backend), dequantize_fp8(*by_row, backend=backend)
    )
    again = quantize_fp8(x, **options, scale=by_column.scale)  # static, as it lies
    assert again.scale is by_column.scale and again.scale.stride() == by_column.scale.stride()
    assert_same_bytes(again, by_row)


def assert_column_major(scale, shape, num_rows):
    """Folded rows next to each other, groups a multiple of 16 bytes apart."""
    assert scale.shape == shape
    of_rows = torch.empty(shape[:-1], device="meta").stride()
    assert scale.stride() == (*of_rows, -(-num_rows // 4) * 4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_given_scales_keep_their_strides(backend, device):
    x = heavy_tailed(2, 5, 260, device=device)
    columns = torch.full((3, 12), 7.0, device=device)
    contiguous = quantize_fp8(x, granularity="group", backend=backend).scale
    scale = columns[:, :10].T.view(2, 5, 3)
    scale.copy_(contiguous)
    values, given = quantize_fp8(x, granularity="group", scale=scale, backend=backend)
    assert given is scale and (columns[:, 10:] == 7).all()
    real = dequantize_fp8(values, scale, backend=backend)
    assert torch.equal(real, dequantize_fp8(values, contiguous, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 256), (5, 0), (2, 0, 7), (0,)], ids=str)
def test_column_major_scales_of_nothing(shape, backend, device):
    x = torch.empty(shape, device=device)
    quantized = quantize_fp8(x, granularity="group", column_major_scales=True, backend=backend)
    assert quantized.scale.shape == (*shape[:-1], -(-shape[-1] // 128))
    assert dequantize_fp8(*quantized, backend=backend).shape == x.shape


def test_heavy_tails_keep_their_relative_precision(device):
    """A uniform grid of 8 bits, which some call fp8, is off by half on such numbers."""
    x = heavy_tailed(64, 1024, dtype=torch.float32, device=device)
    real = dequantize_fp8(*quantize_fp8(x, granularity="group"), dtype=torch.float32)
    large = x.abs() > x.abs().unflatten(1, (-1, 128)).amax(-1).repeat_interleave(128, 1) * 2**-13
    assert ((real - x).abs() / x.abs())[large].max() <= 2**-4 * 1.0001


@pytest.mark.gpu
@pytest.mark.parametrize(
    "granularity, column_major", [*itertools.product(GRANULARITIES, [False]), ("group", True)]
)
def test_graph_replay_reads_new_numbers_without_the_host(granularity, column_major):
    x = heavy_tailed(201, 300, device="cuda")
    quantize_fp8(x, granularity=granularity, column_major_scales=column_major)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantized = quantize_fp8(x, granularity=granularity, column_major_scales=column_major)
        real = dequantize_fp8(*quantized)
    x.copy_(heavy_tailed(201, 300, device="cuda") * 3)
    graph.replay()
    assert_same_bytes(quantized, quantize_fp8(x, granularity=granularity, backend="reference"))
    assert torch.equal(real, dequantize_fp8(*quantized, backend="reference"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "granularity, num_kernels", [("row", 1), ("group", 1), ("block", 1), ("tensor", 2)]
)
def test_x_is_read_by_one_kernel_where_cells_lie_in_tiles(granularity, num_kernels):
    x, gamma = (torch.ones(*shape, 7168, device="cuda") for shape in ((300,), ()))
    calls = [(partial(quantize_fp8, x, granularity=granularity), num_kernels)]
    calls += [(partial(quantize_fp8, x, granularity="tensor", scale=x.new_ones(1)), 1)]
    if granularity in ("row", "group"):
        fused = (kvkern.silu_and_mul_quant_fp8, partial(kvkern.rms_norm_quant_fp8, gamma=gamma))
        calls += [(partial(run, x, granularity=granularity), 1) for run in fused]
    for call, expected in calls:
        call()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        names = [e.name for e in profiler.events() if e.device_type == DeviceType.CUDA]
        assert len([name for name in names if name.startswith("_")]) == expected  # Triton's


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", ["row", "group"])
def test_rows_past_2_to_the_31_elements(granularity):
    distance = 2**30 + 128
    x = torch.empty_strided((3, 256), (distance, 1), dtype=torch.bfloat16, device="cuda")
    x.copy_(heavy_tailed(3, 256))
    gamma = torch.ones(256, device="cuda")
    for run in (
        quantize_fp8,
        kvkern.silu_and_mul_quant_fp8,
        lambda x, **options: kvkern.rms_norm_quant_fp8(x, gamma, **options),
    ):
        quantized = run(x, granularity=granularity)
        assert_same_bytes(quantized, run(x.contiguous(), granularity=granularity))
    quantized = quantize_fp8(x, granularity=granularity)
    values = torch.empty_strided((3, 256), (distance, 1), dtype=torch.uint8, device="cuda")
    values.copy_(quantized.values.view(torch.uint8))
    real = dequantize_fp8(values.view(E4M3), quantized.scale)
    assert torch.equal(real, dequantize_fp8(*quantized))


X = torch.zeros(4, 256)
MISTAKES = {
    "no such granularity": (
        lambda: quantize_fp8(X, granularity="column"),
        kvkern.ArgumentError,
        r"granularity: want one of tensor, row, group, block; got 'column'",
    ),
    "no such dtype": (
        lambda: quantize_fp8(X, dtype=torch.int8),
        kvkern.ArgumentError,
        r"dtype: want float8_e4m3fn or float8_e5m2, got torch.int8",
    ),
    "rounding a scale that is given": (
        lambda: quantize_fp8(X, scale=torch.ones(4, 1), power_of_two=True),
        kvkern.ArgumentError,
        r"power_of_two: want it without scale",
    ),
    "integers": (
        lambda: quantize_fp8(X.int()),
        kvkern.UnsupportedDtypeError,
        r"x: want bfloat16 or float16 or float32, got torch.int32",
    ),
    "a number": (
        lambda: quantize_fp8(X[0, 0]),
        kvkern.ShapeMismatchError,
        r"x: want \[..., K\], got \[\]",
    ),
    "a scale of another granularity": (
        lambda: quantize_fp8(X, granularity="group", scale=torch.ones(4, 1)),
        kvkern.ShapeMismatchError,
        r"scale: want \[D0=4, D1=2\], got \[4, 1\]",
    ),
    "a scale in bf16": (
        lambda: quantize_fp8(X, scale=torch.ones(4, 1).bfloat16()),
        kvkern.UnsupportedDtypeError,
        r"scale: want float32, got torch.bfloat16",
    ),
    "columns, not rows": (
        lambda: quantize_fp8(X.T),
        kvkern.LayoutError,
        r"x: want contiguous rows at one distance, got strides \[1, 256\]",
    ),
    "rows at two distances": (
        lambda: quantize_fp8(torch.zeros(4, 8, 16)[:, :3]),
        kvkern.LayoutError,
        r"x: want contiguous rows at one distance, got strides \[128, 16, 1\]",
    ),
    "blocks over two matrices": (
        lambda: quantize_fp8(torch.zeros(2, 100, 128), granularity="block"),
        kvkern.ShapeMismatchError,
        r"x: want \[N, K\], or \[..., N, K\] with N a multiple of 128, for blocks; got",
    ),
    "an output of another dtype": (
        lambda: quantize_fp8(X, out=torch.zeros(4, 256)),
        kvkern.UnsupportedDtypeError,
        r"out: want float8_e4m3fn, got torch.float32",
    ),
    "an output of another shape": (
        lambda: quantize_fp8(X, out=torch.zeros(4, 255).to(E4M3)),
        kvkern.ShapeMismatchError,
        r"out: want \[D0=4, D1=256\], got \[4, 255\]",
    ),
    "an output of one row for all": (
        lambda: quantize_fp8(X, out=X[:1].to(E4M3).expand(4, -1)),
        kvkern.LayoutError,
        r"out: want contiguous, got strides \[0, 1\]",
    ),
    "real numbers of one row for all": (
        lambda: dequantize_fp8(X.to(E4M3), torch.ones(1), out=X[:1].bfloat16().expand(4, -1)),
        kvkern.LayoutError,
        r"out: want contiguous, got strides \[0, 1\]",
    ),
    "real numbers to dequantise": (
        lambda: dequantize_fp8(X, torch.ones(1)),
        kvkern.UnsupportedDtypeError,
        r"values: want float8_e4m3fn or float8_e5m2, got torch.float32",
    ),
    "scales that fit nothing": (
        lambda: dequantize_fp8(X.to(E4M3), torch.ones(3)),
        kvkern.ShapeMismatchError,
        r"scale: want \[1\] or \[4, 1\] or \[4, 2\] or \[1, 2\], got \[3\]",
    ),
    "a scale without dims": (
        lambda: dequantize_fp8(X.to(E4M3), torch.tensor(1.0)),
        kvkern.ShapeMismatchError,
        r"scale: want \[1\] or \[4, 1\] or \[4, 2\] or \[1, 2\], got \[\]",
    ),
    "numbers with zeros left out": (
        lambda: quantize_fp8(X.to_sparse()),
        kvkern.LayoutError,
        r"x: want strided, got torch.sparse_coo",
    ),
    "scales of blocks, transposed": (
        lambda: dequantize_fp8(torch.zeros(256, 384).to(E4M3), torch.ones(3, 2).T),
        kvkern.LayoutError,
        r"scale: want contiguous, got strides \[1, 2\]",
    ),
    "scales of rows with gaps": (
        lambda: quantize_fp8(X, scale=torch.ones(8, 1)[::2]),
        kvkern.LayoutError,
        r"scale: want contiguous, got strides \[2, 1\]",
    ),
    "scales of rows at two distances": (
        lambda: quantize_fp8(
            torch.zeros(4, 2, 256), granularity="group", scale=torch.ones(4, 3, 2)[:, :2]
        ),
        kvkern.LayoutError,
        r"scale: want rows at one distance, got strides \[6, 2, 1\]",
    ),
    "column-major scales of rows": (
        lambda: quantize_fp8(X, column_major_scales=True),
        kvkern.ArgumentError,
        r"column_major_scales: want it with granularity 'group', got 'row'",
    ),
    "a result in fp8": (
        lambda: dequantize_fp8(X.to(E4M3), torch.ones(1), dtype=E4M3),
        kvkern.ArgumentError,
        r"dtype: want bfloat16, float16 or float32, got torch.float8_e4m3fn",
    ),
    "no tensor to quantise": (
        lambda: quantize_fp8(None),
        kvkern.UnsupportedDtypeError,
        r"x: want a tensor, got NoneType",
    ),
    "a number for a scale": (
        lambda: quantize_fp8(X, scale=2.0),
        kvkern.UnsupportedDtypeError,
        r"scale: want a tensor, got float",
    ),
    "a scale on another device": (
        lambda: quantize_fp8(X, scale=torch.ones(4, 1, device="meta")),
        kvkern.DeviceError,
        r"scale: want device cpu, got meta",
    ),
    "an output on another device": (
        lambda: quantize_fp8(X, out=X.to("meta", E4M3)),
        kvkern.DeviceError,
        r"out: want device cpu, got meta",
    ),
    "no tensor to dequantise": (
        lambda: dequantize_fp8(None, torch.ones(1)),
        kvkern.UnsupportedDtypeError,
        r"values: want a tensor, got NoneType",
    ),
    "no scale to dequantise by": (
        lambda: dequantize_fp8(X.to(E4M3), None),
        kvkern.UnsupportedDtypeError,
        r"scale: want a tensor, got NoneType",
    ),
    "a scale to dequantise by on another device": (
        lambda: dequantize_fp8(X.to(E4M3), torch.ones(1, device="meta")),
        kvkern.DeviceError,
        r"scale: want device cpu, got meta",
    ),
    "real numbers on another device": (
        lambda: dequantize_fp8(X.to(E4M3), torch.ones(1), out=X.to("meta", torch.bfloat16)),
        kvkern.DeviceError,
        r"out: want device cpu, got meta",
    ),
}


@pytest.mark.parametrize("call, error, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_say_what_to_change(call, error, message):
    with pytest.raises(error, match=message):
        call()
