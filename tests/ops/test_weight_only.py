"""Weights in 8 and 4 bits: the reference's bytes, errors as theory has them, products by budget."""

import itertools
import math
import re
from functools import partial

import pytest
import torch

import kvkern
from kvkern import (
    dequantize_int4,
    dequantize_int8,
    matmul_w4a16,
    matmul_w8a8,
    matmul_w8a16,
    quantize_int4,
    quantize_int8,
)
from kvkern.backends import TABLE, WeightOnlyCall
from kvkern.ops import weight_only
from kvkern.reference.quantize_int import pack, unpack
from kvkern.testing.budget import assert_within_budget

BACKENDS = ["triton", "reference"]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
QUANTISERS = {  # how to quantise, to dequantise, to multiply
    "w8": (quantize_int8, dequantize_int8, matmul_w8a16),
    "w8 zero": (partial(quantize_int8, symmetric=False), dequantize_int8, matmul_w8a16),
    "w4": (quantize_int4, dequantize_int4, matmul_w4a16),
    "w4 zero": (partial(quantize_int4, symmetric=False), dequantize_int4, matmul_w4a16),
    "w4 g64": (partial(quantize_int4, group_size=64), dequantize_int4, matmul_w4a16),
    "w4 g64 zero": (
        partial(quantize_int4, group_size=64, symmetric=False), dequantize_int4, matmul_w4a16,
    ),
    "w4 g32 zero": (
        partial(quantize_int4, group_size=32, symmetric=False), dequantize_int4, matmul_w4a16,
    ),
    "w4 gK zero": (
        partial(quantize_int4, group_size=None, symmetric=False), dequantize_int4, matmul_w4a16,
    ),
}  # fmt: skip
every_quantiser = pytest.mark.parametrize("name", QUANTISERS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def randn(*shape, dtype=FP32, device="cpu", mean=0.0):
    return torch.randn(shape).add(mean).to(dtype).to(device)


def assert_same_bytes(one, other):
    assert torch.equal(one.values, other.values) and torch.equal(one.scale, other.scale)
    assert (one.zero is None) == (other.zero is None)
    assert one.zero is None or torch.equal(one.zero, other.zero)
    assert one[3:] == other[3:]


def scale_of(name, quantized):
    """A scale for each element, ``[N, K]``."""
    group_size = quantized.group_size if name.startswith("w4") else quantized.num_columns
    return quantized.scale.T.repeat_interleave(group_size, 1)[:, : quantized.num_columns]


SHAPES = ((33, 390), (1, 7), (7, 1), (16, 256), (7, 127), (7, 129), (7, 1023))


@pytest.mark.parametrize(
    "name, dtype, shape",
    [
        *((name, BF16, shape) for name in QUANTISERS for shape in SHAPES),
        *((name, dtype, (17, 63)) for name in QUANTISERS for dtype in (FP16, FP32)),
        *((name, BF16, (rows, 7)) for name in ("w8 zero", "w4 zero") for rows in (127, 129, 1023)),
    ],
    ids=str,
)
def test_bytes_are_the_references(name, dtype, shape, device):
    """Tails of a chunk, of a group, of a program's rows; and none."""
    quantize, dequantize, _ = QUANTISERS[name]
    weight = randn(*shape, dtype=dtype, device=device, mean=0.2)
    quantized = quantize(weight, backend="triton")
    assert_same_bytes(quantized, quantize(weight, backend="reference"))
    real = dequantize(quantized, dtype=dtype, backend="triton")
    assert torch.equal(real, dequantize(quantized, dtype=dtype, backend="reference"))


@every_quantiser
@every_backend
def test_error_of_an_element_is_half_a_scale(name, backend, device):
    quantize, dequantize, _ = QUANTISERS[name]
    weight = randn(40, 300, device=device, mean=0.5)
    quantized = quantize(weight, backend=backend)
    error = (dequantize(quantized, dtype=FP32, backend=backend) - weight).abs()
    allowed = scale_of(name, quantized) / 2 * 1.0001
    assert (error <= allowed).all()
    assert error.max() > 0.4 * allowed.max()  # and no less: all codes are used


@every_quantiser
def test_error_of_a_sum_is_as_theory_has_it(name, device):
    """Errors are spread evenly over a scale: K of them have deviation scale * sqrt(K / 12)."""
    quantize, dequantize, _ = QUANTISERS[name]
    weight = randn(256, 1024, device=device)
    quantized = quantize(weight)
    errors = (dequantize(quantized, dtype=FP32) - weight) / scale_of(name, quantized)
    sums = errors.sum(1) / math.sqrt(1024 / 12)
    assert abs(sums.mean()) < 4 / 16 and 0.8 < sums.std() < 1.2  # 16 = sqrt(256)


@every_quantiser
@every_backend
def test_one_sided_constant_and_zero_rows(name, backend, device):
    """A range without 0 in it has a zero point that no code is, and one of no width no scale."""
    quantize, dequantize, _ = QUANTISERS[name]
    weight = torch.rand(6, 200, device=device).add_(5.0)
    weight[1], weight[2], weight[3] = -weight[1], 3.0, -3.0
    weight[4], weight[5] = 0.0, 2.0**-140
    quantized = quantize(weight, backend=backend)
    real = dequantize(quantized, dtype=FP32, backend=backend)
    assert real.isfinite().all()
    assert ((real - weight).abs() <= scale_of(name, quantized) / 2 * 1.0001).all()
    assert (real[4] == 0).all() and (real[5] == 0).all()
    assert (quantized.scale[:, 4:] == 2.0**-100).all()


@every_quantiser
@every_backend
def test_infinities_saturate_nan_is_zero_and_neither_is_in_a_scale(name, backend, device):
    quantize, dequantize, _ = QUANTISERS[name]
    weight = randn(5, 140, device=device)
    weight[2, 5:8] = 0
    clean = quantize(weight, backend=backend)
    weight[2, 5], weight[2, 6], weight[2, 7] = math.nan, math.inf, -math.inf
    quantized = quantize(weight, backend=backend)
    assert torch.equal(quantized.scale, clean.scale)
    real = dequantize(quantized, dtype=FP32, backend=backend)
    assert real[2, 5] == 0
    same_group = real[2, :32]
    assert real[2, 6] >= same_group.max() and real[2, 7] <= same_group.min()
    assert torch.equal(real[:, 8:], dequantize(clean, dtype=FP32, backend=backend)[:, 8:])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_columns", [1, 31, 128, 257, 600])
def test_packing_undone_gives_the_codes(bits, num_columns):
    low, high = (-128, 128) if bits == 8 else (0, 16)
    codes = torch.randint(low, high, (5, num_columns), dtype=torch.int32)
    stored = pack(codes, torch.full((5,), 3, dtype=torch.int32), bits)
    assert torch.equal(unpack(stored, bits, num_columns), codes)
    beyond = unpack(stored, bits, stored.shape[0] * 1024 // bits)[:, num_columns:]
    assert (beyond == 3).all()


def test_layout_is_as_documented():
    """A second formulation: byte by byte."""
    codes = torch.randint(0, 16, (3, 300), dtype=torch.int32)
    stored = pack(codes, torch.zeros(3, dtype=torch.int32), 4)
    codes = torch.nn.functional.pad(codes, (0, 212))
    for i in range(4):
        for j in range(32):
            for chunk, first in enumerate((0, 256)):
                lower, upper = (codes[:, first + 64 * i + half + j] for half in (0, 32))
                assert torch.equal(stored[chunk, :, 4 * j + i].int(), lower | upper << 4)
    codes = torch.randint(-128, 128, (3, 200), dtype=torch.int32)
    stored = pack(codes, torch.zeros(3, dtype=torch.int32), 8)
    for i in range(4):
        for j in range(32):
            assert torch.equal(stored[0, :, 4 * j + i].int(), codes[:, 32 * i + j])


@every_quantiser
@every_backend
def test_strided_weights(name, backend, device):
    quantize, _, _ = QUANTISERS[name]
    wide = randn(40, 500, device=device)
    expected = quantize(wide[::2, 100:400].contiguous(), backend=backend)
    assert_same_bytes(quantize(wide[::2, 100:400], backend=backend), expected)


def exact_product(x, real, bias=None):
    product = x.double() @ real.double().T
    return product if bias is None else product + bias.double()


ROWS = (1, 3, 16, 17, 63, 64, 65, 127, 129)


@pytest.mark.parametrize(
    "name, num_rows, dtype",
    [
        *((name, rows, BF16) for name in QUANTISERS for rows in (1, 65)),
        *((name, rows, BF16) for name in ("w8", "w4") for rows in ROWS),
        *((name, 17, FP16) for name in QUANTISERS),
    ],
    ids=str,
)
def test_product_matches_fp64(name, dtype, num_rows, device):
    """Every number of rows from 1, of numbers with a mean; odd N, and a K that ends in a chunk."""
    quantize, dequantize, matmul = QUANTISERS[name]
    weight = quantize(randn(131, 390, device=device, mean=0.1))
    x = randn(num_rows, 390, dtype=dtype, device=device, mean=0.3)
    exact = exact_product(x, dequantize(weight, dtype=FP32))
    rounded = matmul(x, weight, backend="reference")
    assert_within_budget(matmul(x, weight, backend="triton"), exact, rounded)


@every_quantiser
@pytest.mark.parametrize(
    "num_columns, depth", [(1, 1), (7, 127), (255, 33), (128, 512), (129, 1023)], ids=str
)
def test_odd_sizes(name, num_columns, depth, device):
    quantize, dequantize, matmul = QUANTISERS[name]
    weight = quantize(randn(num_columns, depth, device=device, mean=0.1))
    x, bias = randn(3, depth, dtype=BF16, device=device), randn(num_columns, device=device)
    for bias_dtype, out_dtype in ((BF16, BF16), (FP32, FP32)):
        exact = exact_product(x, dequantize(weight, dtype=FP32), bias.to(bias_dtype))
        options = {"bias": bias.to(bias_dtype), "out_dtype": out_dtype}
        got = matmul(x, weight, **options, backend="triton")
        assert got.dtype == out_dtype
        rounded = matmul(x, weight, **options, backend="reference")
        assert_within_budget(got, exact, rounded, eps_of=BF16 if out_dtype == BF16 else FP16)


@pytest.mark.parametrize("name", ["w8 zero", "w4 zero"])
def test_long_sums_with_a_mean(name, device):
    """All products have one sign: a sum in fewer bits than fp32's would be short of it."""
    quantize, dequantize, matmul = QUANTISERS[name]
    weight = quantize(torch.rand(3, 16384, device=device))
    x = torch.rand(2, 16384, device=device).to(BF16)
    exact = exact_product(x, dequantize(weight, dtype=FP32))
    got = matmul(x, weight, out_dtype=FP32, backend="triton")
    assert ((got.double() - exact).abs() / exact).max() < 2**-20 * 16


@pytest.mark.parametrize("num_splits", [1, 2, 5, 16])
@pytest.mark.parametrize("name", ["w8 zero", "w4 g32 zero"])
def test_splits_stay_in_budget_and_repeat(name, num_splits, device, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvkern.kernels import matmul_weight_only as module

    choose_tiles = module.choose_tiles
    quantize, dequantize, matmul = QUANTISERS[name]
    weight = quantize(randn(70, 4200, device=device))
    x, bias = (randn(*shape, dtype=FP16, device=device) for shape in ((5, 4200), (70,)))
    monkeypatch.setattr(
        module, "choose_tiles", lambda *shape: choose_tiles(*shape)._replace(num_splits=num_splits)
    )
    got = matmul(x, weight, bias=bias, backend="triton")
    exact = exact_product(x, dequantize(weight, dtype=FP32), bias)
    assert_within_budget(got, exact, matmul(x, weight, bias=bias, backend="reference"))
    assert torch.equal(got, matmul(x, weight, bias=bias, backend="triton"))


MATMULS = {
    "w8a16": (quantize_int8, matmul_w8a16),
    "w4a16": (quantize_int4, matmul_w4a16),
    "w8a8": (quantize_int8, matmul_w8a8),
}
every_matmul = pytest.mark.parametrize("name", MATMULS)


@every_matmul
@every_backend
def test_strided_rows_leading_dims_and_given_outputs(name, backend, device):
    quantize, matmul = MATMULS[name]
    weight = quantize(randn(40, 200, device=device))
    wide = randn(6, 500, dtype=BF16, device=device)
    x = wide[:, 100:300]
    expected = matmul(x.contiguous(), weight, backend=backend)
    assert torch.equal(matmul(x, weight, backend=backend), expected)
    out = torch.zeros(2, 3, 40, dtype=BF16, device=device)
    folded = matmul(x.unflatten(0, (2, 3)), weight, out=out, backend=backend)
    assert folded is out and torch.equal(out.flatten(0, 1), expected)
    assert torch.equal(matmul(x[2], weight, backend=backend)[None], expected[2:3])


@every_matmul
@every_backend
def test_empty_dims(name, backend, device):
    quantize, matmul = MATMULS[name]
    bias = randn(5, dtype=BF16, device=device)
    for shape, weight_shape in (((0, 7), (5, 7)), ((2, 3, 7), (0, 7)), ((2, 0, 7), (5, 7))):
        weight = quantize(torch.zeros(weight_shape, device=device), backend=backend)
        x = torch.zeros(shape, dtype=BF16, device=device)
        assert matmul(x, weight, backend=backend).shape == (*shape[:-1], weight_shape[0])
    nothing = quantize(torch.zeros(5, 0, device=device), backend=backend)
    x = torch.zeros(3, 0, dtype=BF16, device=device)
    assert torch.equal(matmul(x, nothing, backend=backend), torch.zeros_like(x.new_empty(3, 5)))
    assert torch.equal(matmul(x, nothing, bias=bias, backend=backend), bias.expand(3, 5))


@pytest.mark.parametrize("name", ["w8a16", "w4a16"])
@every_backend
def test_nan_and_infinity_go_where_fp64_takes_them(name, backend, device):
    quantize, matmul = MATMULS[name]
    weight = randn(33, 300, device=device)
    weight[3, 7] = weight[4, 299] = 0.0  # 0 * inf is NaN
    quantized = quantize(weight)
    dequantize = dequantize_int8 if name == "w8a16" else dequantize_int4
    x = randn(5, 300, dtype=BF16, device=device)
    x[1, 7], x[2, 299], x[3, 8] = math.inf, -math.inf, math.nan
    exact = exact_product(x, dequantize(quantized, dtype=FP32))
    rounded = matmul(x, quantized, backend="reference")
    assert_within_budget(matmul(x, quantized, backend=backend), exact, rounded)


@every_matmul
@every_backend
def test_nan_in_a_scale_is_in_its_column_alone(name, backend, device):
    quantize, matmul = MATMULS[name]
    weight, x = quantize(randn(33, 300, device=device)), randn(5, 300, dtype=BF16, device=device)
    clean = matmul(x, weight, backend=backend)
    scale = weight.scale.clone()
    scale[-1, 3] = math.nan
    got = matmul(x, weight._replace(scale=scale), backend=backend)
    others = [column for column in range(33) if column != 3]
    assert got[:, 3].isnan().all() and torch.equal(got[:, others], clean[:, others])


def exact_w8a8(x, weight):
    """In int64, row by row and column by column of the codes."""
    x = x.float()
    scale = x.abs().amax(1, keepdim=True) / torch.full_like(x[:, :1], 127)
    codes = torch.round(x * (1 / scale)).long().cpu()
    stored = unpack(weight.values, 8, weight.num_columns).long().cpu()
    if weight.zero is not None:
        stored = stored - weight.zero.long().cpu().T
    total = (codes[:, None] * stored[None]).sum(-1).to(x.device)
    return total.double() * weight.scale.double() * scale.double()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "num_rows, num_columns, depth, dtype",
    [(1, 7, 390, BF16), (3, 129, 127, FP16), (17, 131, 1023, BF16), (33, 63, 129, BF16)],
    ids=str,
)
def test_w8a8_is_exact_in_integers(symmetric, num_rows, num_columns, depth, dtype, device):
    weight = quantize_int8(randn(num_columns, depth, device=device, mean=0.2), symmetric=symmetric)
    x = randn(num_rows, depth, dtype=dtype, device=device, mean=0.3)
    bias = randn(num_columns, dtype=dtype, device=device)
    for backend in BACKENDS:
        exact = exact_w8a8(x, weight)
        got = matmul_w8a8(x, weight, out_dtype=FP32, backend=backend)
        torch.testing.assert_close(got.double(), exact, rtol=2**-22, atol=0)
    got, exact = matmul_w8a8(x, weight, bias=bias, backend="triton"), exact + bias.double()
    assert_within_budget(got, exact, exact.to(dtype))


@pytest.mark.parametrize("num_splits", [1, 3, 16])
def test_w8a8_splits_change_no_bit(num_splits, device, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvkern.kernels import matmul_w8a8 as module

    choose_tiles = module.choose_tiles
    weight = quantize_int8(randn(70, 2100, device=device), symmetric=False)
    x, bias = (randn(*shape, dtype=BF16, device=device) for shape in ((3, 2100), (70,)))
    monkeypatch.setattr(
        module,
        "choose_tiles",
        lambda *shape: choose_tiles(*shape)._replace(num_splits=num_splits),
    )
    got = matmul_w8a8(x, weight, bias=bias, out_dtype=FP32, backend="triton")
    exact = exact_w8a8(x, weight) + bias.double()
    torch.testing.assert_close(got.double(), exact, rtol=2**-20, atol=1e-6)


@every_backend
def test_w8a8_sums_of_the_largest_codes_do_not_wrap(backend, device):
    """Over 65536 columns, with a zero point at the end of the range."""
    weight = quantize_int8(torch.ones(1, 65536, device=device), symmetric=False)
    x = torch.ones(1, 65536, dtype=BF16, device=device)
    got = matmul_w8a8(x, weight, out_dtype=FP32, backend=backend)
    torch.testing.assert_close(got, torch.full_like(got, 65536), rtol=1e-6, atol=0)


@every_backend
def test_w8a8_row_that_is_not_finite_is_nan_and_others_are_not(backend, device):
    weight = quantize_int8(randn(33, 200, device=device))
    x = randn(5, 200, dtype=BF16, device=device)
    clean = matmul_w8a8(x, weight, backend=backend)
    x[1, 3], x[3, 199] = math.nan, -math.inf
    got = matmul_w8a8(x, weight, backend=backend)
    assert got[[1, 3]].isnan().all()
    assert torch.equal(got[[0, 2, 4]], clean[[0, 2, 4]])


@every_matmul
def test_rows_of_zeros_are_zeros(name, device):
    quantize, matmul = MATMULS[name]
    weight = quantize(randn(33, 200, device=device))
    x = torch.zeros(2, 200, dtype=BF16, device=device)
    assert (matmul(x, weight, backend="triton") == 0).all()


@pytest.mark.gpu
@every_matmul
def test_graph_replay_reads_new_numbers_without_the_host(name):
    quantize, matmul = MATMULS[name]
    weight = quantize(randn(512, 4096, device="cuda"))
    x = randn(8, 4096, dtype=BF16, device="cuda")
    matmul(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = matmul(x, weight)
    x.copy_(randn(8, 4096, dtype=BF16, device="cuda"))
    graph.replay()
    assert torch.equal(out, matmul(x, weight))


@pytest.mark.gpu
@every_matmul
def test_more_rows_of_a_size_compile_nothing(name):
    from kvkern.kernels import matmul_w8a8 as a8
    from kvkern.kernels import matmul_weight_only as a16
    from kvkern.kernels.sum_splits import sum_splits_kernel

    quantize, matmul = MATMULS[name]
    weight = quantize(randn(512, 4096, device="cuda"))
    kernels = (a16._matmul_kernel, a8._matmul_w8a8_kernel, a8._quantize_rows_kernel)

    def run(*sizes):
        for size in sizes:
            matmul(randn(size, 4096, dtype=BF16, device="cuda"), weight)
        kinds = (*kernels, sum_splits_kernel)
        return [sum(len(cache[0]) for cache in k.device_caches.values()) for k in kinds]

    assert run(1, 9, 17, 33, 128) == run(2, 7, 8, 16, 32, 31, 64, 65, 100)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["w8a16", "w4a16"])
def test_weights_past_two_to_the_31_elements(name):
    """Words are addressed in 64 bits; by rows that repeat, but for the last, so quickly told."""
    quantize, matmul = MATMULS[name]
    some, last = (randn(rows, 8192, dtype=BF16, device="cuda") for rows in (1, 128))
    rows = some.expand(2**18 + 2**17, -1).contiguous()
    rows[-128:] = last
    x = randn(1, 8192, dtype=BF16, device="cuda")
    out, of_last = matmul(x, quantize(rows)), matmul(x, quantize(last))
    assert (out[:, :-128] == out[0, 0]).all()
    assert (out[:, -128:] - of_last).abs().max() < 0.02 * of_last.abs().max()  # other tiles


W8 = quantize_int8(torch.ones(8, 256), backend="reference")
W4 = quantize_int4(torch.ones(8, 256), backend="reference")
MANY = WeightOnlyCall(
    bits=4, num_rows=17, num_columns=131, depth=390, group_size=128, has_zero=True, is_aligned=True
)
FEW = MANY._replace(num_rows=16, num_columns=4096, depth=11008, has_zero=False)


@pytest.mark.parametrize(
    "call, reason",
    [
        (MANY._replace(group_size=32), "takes groups of 64 columns, of 128 or all, got 32$"),
        (MANY._replace(is_aligned=False), "takes rows of x, .* begin at multiples of 16 bytes"),
        (FEW._replace(is_aligned=False), "takes rows of x, .* begin at multiples of 16 bytes"),
        (FEW._replace(bits=8, group_size=0, has_zero=True), "without zero points, got all with"),
        (FEW._replace(bits=8, group_size=0, depth=11072), "K that is one of 128, .* and 11072"),
        (FEW._replace(group_size=64), "takes up to 16 rows of x with groups of 128 .*, got 64$"),
        (FEW._replace(group_size=0, has_zero=True), "without zero points, got all with zero"),
        (FEW._replace(num_columns=4098), "N that is a multiple of 4 .*, got 4098 and 11008"),
        (FEW._replace(depth=11136), "K that is one of 256, got 4096 and 11136"),
    ],
)
def test_call_that_hopper_does_not_take_is_refused_with_the_reason(call, reason):
    assert re.search(reason, hopper_row().refuses_call(call))


def hopper_row():
    return next(row for row in TABLE["matmul_w4a16"] if row.name == "hopper")


def test_call_that_hopper_takes_is_left_to_another_where_it_is_no_faster():
    hopper = hopper_row()
    for call in (MANY, MANY._replace(bits=8, group_size=0), FEW, FEW._replace(group_size=0)):
        assert hopper.refuses_call(call) is None and hopper.yields_call(call) is None
    for has_zero in (True, False):
        assert hopper.refuses_call(MANY._replace(group_size=64, has_zero=has_zero)) is None
    long = FEW._replace(depth=16384)
    for call in (FEW._replace(num_columns=4, depth=8192), long, FEW._replace(num_columns=28672)):
        assert hopper.refuses_call(call) is None and hopper.yields_call(call) is None
    call = long._replace(num_columns=2108)
    assert hopper.refuses_call(call) is None
    assert hopper.yields_call(call).endswith("got 2108 and 16384")
    of_8_bits = FEW._replace(bits=8, group_size=0)
    assert hopper.yields_call(of_8_bits._replace(num_columns=22016)) is None
    for num_columns in (4, 2108, 22020):
        call = of_8_bits._replace(num_columns=num_columns)
        assert hopper.refuses_call(call) is None
        assert hopper.yields_call(call).endswith(f"got {num_columns}")


@pytest.mark.parametrize(
    "x, call",
    [
        (torch.zeros(3, 6, 256, dtype=BF16), (4, 18, 8, 256, 128, False, True)),
        (torch.zeros(4, 264, dtype=BF16)[:, :256], (4, 4, 8, 256, 128, False, True)),
        (torch.zeros(4, 260, dtype=BF16)[:, :256], (4, 4, 8, 256, 128, False, False)),
        (torch.zeros(4, 264, dtype=BF16)[:, 4:260], (4, 4, 8, 256, 128, False, False)),
    ],
)
def test_backends_are_told_of_the_call(x, call, monkeypatch):
    told = []

    def choose(op, backend, device, dtype, call):
        told.append(call)
        return lambda *arguments: None

    monkeypatch.setattr(weight_only, "choose", choose)
    matmul_w4a16(x, W4)
    matmul_w8a16(x, W8._replace(zero=torch.zeros_like(W8.scale)))
    assert told == [call, (8, *call[1:4], 0, True, call[6])]
    matmul_w4a16(x, W4._replace(scale=torch.zeros(17)[1:].view(2, 8)))
    assert not told[-1].is_aligned


@pytest.mark.parametrize("name", ["w8a16", "w4a16"])
def test_call_like_one_before_is_repeated_with_its_own_addresses(name, monkeypatch):
    """And one that differs in anything but addresses is checked as the first was."""
    runs, repeats = [], []

    def run(*arguments):
        runs.append(arguments)
        return lambda addresses: repeats.append(addresses)

    monkeypatch.setattr(weight_only, "choose", lambda *_: run)
    monkeypatch.setattr(weight_only, "_KNOWN", type(weight_only._KNOWN)(most=9))
    weight, matmul = (W8, matmul_w8a16) if name == "w8a16" else (W4, matmul_w4a16)
    x, bias = torch.zeros(20, 256, dtype=BF16), torch.zeros(8)
    first = matmul(x, weight, bias=bias)
    other = weight._replace(values=weight.values.clone(), scale=weight.scale.clone())
    others = (torch.ones(20, 256, dtype=BF16), other.values, other.scale, None, torch.ones(8))
    out = matmul(others[0], other, bias=others[4])
    assert len(runs) == 1 and out.shape == first.shape and out.dtype == first.dtype
    assert repeats == [[x if x is None else x.data_ptr() for x in (*others, out)]]
    matmul(x[:19], weight, bias=bias)
    matmul(x, weight, bias=bias.to(BF16))
    matmul(x, weight, bias=bias, out_dtype=FP32)
    assert len(runs) == 4 and len(repeats) == 1
    with pytest.raises(kvkern.ShapeMismatchError):
        matmul(x, weight, bias=torch.zeros(9))


def is_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


on_hopper = pytest.mark.skipif(not is_hopper(), reason="needs a card of compute capability 9.0")
HOPPER = [name for name in QUANTISERS if name != "w4 g32 zero"]
every_of_hoppers = pytest.mark.parametrize("name", HOPPER)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("num_rows", [2, 16, 100])
@pytest.mark.parametrize("name", ["w8", "w4"])
def test_long_sums_with_a_mean_on_hopper(name, num_rows):
    """The tensor core adds 16 products at a time and cuts off what fp32 does not hold."""
    quantize, dequantize, matmul = QUANTISERS[name]
    weight = quantize(torch.rand(4096, 16384, device="cuda"))
    x = torch.rand(num_rows, 16384, device="cuda").to(BF16)
    exact = exact_product(x, dequantize(weight, dtype=FP32))
    got = matmul(x, weight, out_dtype=FP32, backend="hopper")
    assert ((got.double() - exact).abs() / exact).max() < 2**-12


@pytest.mark.gpu
@on_hopper
@every_of_hoppers
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("num_rows", [17, 33, 127, 129, 600])
def test_hopper_product_of_more_rows_matches_fp64_and_repeats(name, dtype, num_rows):
    """Tiles of each size, with some left over; N that ends in a tile; K in a chunk; and splits."""
    quantize, dequantize, matmul = QUANTISERS[name]
    for num_columns, depth in ((131, 392), (264, 4104)):
        weight = quantize(randn(num_columns, depth, device="cuda", mean=0.1))
        x = randn(num_rows, depth, dtype=dtype, device="cuda", mean=0.3)
        bias = randn(num_columns, device="cuda")
        exact = exact_product(x, dequantize(weight, dtype=FP32), bias)
        for out_dtype in (dtype, FP32):
            options = {"bias": bias, "out_dtype": out_dtype}
            rounded = matmul(x, weight, **options, backend="reference")
            got = matmul(x, weight, **options, backend="hopper")
            eps_of = dtype if out_dtype == dtype else FP16
            assert_within_budget(got, exact, rounded, eps_of=eps_of)
            assert torch.equal(got, matmul(x, weight, **options, backend="hopper"))


@pytest.mark.gpu
@on_hopper
@every_of_hoppers
@pytest.mark.parametrize(
    ("num_rows", "more"), [(17, 32), (33, 64), (65, 128), (129, 256), (250, 256), (700, 768)]
)
@pytest.mark.parametrize(("num_columns", "depth"), [(4096, 2048), (264, 4104)])
def test_hopper_makes_of_rows_the_same_where_there_are_more(
    num_columns, depth, num_rows, more, name
):
    """Where a tile has fewer rows than room, parts of it have some of them again."""
    quantize, _, matmul = QUANTISERS[name]
    weight = quantize(randn(num_columns, depth, device="cuda", mean=0.1))
    x = randn(more, depth, dtype=BF16, device="cuda", mean=0.3)
    expected = matmul(x, weight, backend="hopper")
    out = torch.full((num_rows + 70, num_columns), 7.0, dtype=BF16, device="cuda")
    matmul(x[:num_rows], weight, out=out[:num_rows], backend="hopper")
    assert torch.equal(out[:num_rows], expected[:num_rows])
    assert (out[num_rows:] == 7).all()


OF_FEW_ROWS = {
    "w8": QUANTISERS["w8"],
    "w4": QUANTISERS["w4"],
    "w4 gK": (partial(quantize_int4, group_size=None), dequantize_int4, matmul_w4a16),
}
every_of_few_rows = pytest.mark.parametrize("name", OF_FEW_ROWS)


@pytest.mark.gpu
@on_hopper
@every_of_few_rows
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 8, 9, 16])
def test_hopper_product_of_few_rows_matches_fp64_and_repeats(num_rows, dtype, name):
    """Tiles of 32 and 64 columns; N and K that end in one; K in a step, and in more than fit."""
    quantize, dequantize, matmul = OF_FEW_ROWS[name]
    for num_columns, depth in ((132, 256), (4112, 6400), (4300, 4864), (4096, 12032)):
        weight = quantize(randn(num_columns, depth, device="cuda", mean=0.1))
        x = randn(num_rows, depth + 8, dtype=dtype, device="cuda", mean=0.3)[:, :depth]
        bias = randn(num_columns, device="cuda")
        exact = exact_product(x, dequantize(weight, dtype=FP32), bias)
        for out_dtype in (dtype, FP32):
            options = {"bias": bias, "out_dtype": out_dtype}
            rounded = matmul(x, weight, **options, backend="reference")
            got = matmul(x, weight, **options, backend="hopper")
            eps_of = dtype if out_dtype == dtype else FP16
            assert_within_budget(got, exact, rounded, eps_of=eps_of)
            assert torch.equal(got, matmul(x, weight, **options, backend="hopper"))


@pytest.mark.gpu
@on_hopper
@every_of_few_rows
@pytest.mark.parametrize("num_rows", [1, 7, 16])
def test_hopper_product_of_few_rows_and_several_tiles_a_program(num_rows, name):
    """K of one step, of two, of an odd number, and of more than fit; the last tile ends early."""
    quantize, dequantize, matmul = OF_FEW_ROWS[name]
    num_columns = 2 * 64 * 132 + 64 * 100 + 20
    for depth in (256, 1024, 1280, 1536, 6912):
        weight = quantize(randn(num_columns, depth, device="cuda", mean=0.1))
        x = randn(num_rows, depth, dtype=BF16, device="cuda", mean=0.3)
        exact = exact_product(x, dequantize(weight, dtype=FP32))
        rounded = matmul(x, weight, backend="reference")
        got = matmul(x, weight, backend="hopper")
        assert_within_budget(got, exact, rounded, eps_of=BF16)
        for _ in range(20):
            assert torch.equal(got, matmul(x, weight, backend="hopper"))


@pytest.mark.gpu
@on_hopper
@every_of_few_rows
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_hopper_takes_every_weight_to_its_place_in_few_rows(dtype, name):
    """Rows of the unit matrix pick out columns of the weight, whose numbers are exact."""
    quantize, dequantize, matmul = OF_FEW_ROWS[name]
    weight = quantize(randn(4300, 512, device="cuda", mean=0.1))
    real, units = dequantize(weight, dtype=FP32), torch.eye(512, dtype=dtype, device="cuda")
    for num_columns in (4300, 132):
        some = weight._replace(
            values=weight.values[:, :num_columns].contiguous(),
            scale=weight.scale[:, :num_columns].contiguous(),
        )
        some_units = [units.split(size)[number::8] for number, size in enumerate((16, 8, 4, 2))]
        for rows in itertools.chain(*some_units, units[::37].split(1)):
            got = matmul(rows, some, out_dtype=FP32, backend="hopper")
            assert torch.equal(got, rows.float() @ real[:num_columns].T)


@pytest.mark.gpu
@on_hopper
@every_of_hoppers
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_hopper_takes_every_weight_to_its_place(name, dtype):
    """Rows of the unit matrix pick out columns of the weight, whose numbers are exact."""
    quantize, dequantize, matmul = QUANTISERS[name]
    weight = quantize(randn(200, 520, device="cuda", mean=0.1))
    got = matmul(
        torch.eye(520, dtype=dtype, device="cuda"), weight, out_dtype=FP32, backend="hopper"
    )
    assert torch.equal(got, dequantize(weight, dtype=FP32).T)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_hopper_product_in_tiles_of_256_rows_matches_fp64_and_repeats(dtype, zero):
    from kvkern.kernels.device import gpu_of
    from kvkern.kernels.hopper.matmul_weight_only import choose_tiles

    num_rows, num_columns, depth = 3999, 4099, 1032
    gpu = gpu_of(torch.device("cuda"))
    assert choose_tiles(num_rows, num_columns, depth, 8, depth, zero, gpu).rows == 256
    weight = quantize_int8(randn(num_columns, depth, device="cuda", mean=0.1), symmetric=not zero)
    x = randn(num_rows, depth, dtype=dtype, device="cuda", mean=0.3)
    exact = exact_product(x, dequantize_int8(weight, dtype=FP32))
    for out_dtype in (dtype, FP32):
        rounded = matmul_w8a16(x, weight, out_dtype=out_dtype, backend="reference")
        got = matmul_w8a16(x, weight, out_dtype=out_dtype, backend="hopper")
        assert_within_budget(got, exact, rounded, eps_of=dtype if out_dtype == dtype else FP16)
        again = matmul_w8a16(x, weight, out_dtype=out_dtype, backend="hopper")
        assert torch.equal(got, again)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "name, num_rows",
    [*((name, 64) for name in HOPPER), ("w4", 1), ("w4", 3), ("w4", 16), ("w8", 1), ("w8", 16)],
    ids=str,
)
def test_hopper_reads_new_numbers_in_repeats_and_graphs(name, num_rows):
    quantize, dequantize, matmul = QUANTISERS[name]
    sets = [
        (quantize(randn(512, 2048, device="cuda")), randn(num_rows, 2048).to("cuda", BF16))
        for _ in range(3)
    ]
    for weight, x in sets:
        exact = exact_product(x, dequantize(weight, dtype=FP32))
        rounded = matmul(x, weight, backend="reference")
        assert_within_budget(matmul(x, weight, backend="hopper"), exact, rounded, eps_of=BF16)
    weight, x = sets[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = matmul(x, weight, backend="hopper")
    x.copy_(sets[1][1])
    graph.replay()
    assert torch.equal(out, matmul(x, weight, backend="hopper"))


X = torch.zeros(4, 256, dtype=BF16)
MISTAKES = {
    "a vector to quantise": (
        lambda: quantize_int8(torch.ones(8)),
        kvkern.ShapeMismatchError,
        r"weight: want \[N=any, K=any\], got \[8\]",
    ),
    "columns, not rows": (
        lambda: quantize_int4(torch.ones(8, 4).T),
        kvkern.LayoutError,
        r"weight: want a contiguous last dim",
    ),
    "no such group": (
        lambda: quantize_int4(torch.ones(8, 256), group_size=100),
        kvkern.ArgumentError,
        r"group_size: want 32, 64, 128 or None, got 100",
    ),
    "a group of a fraction": (
        lambda: quantize_int4(torch.ones(8, 256), group_size=128.0),
        kvkern.ArgumentError,
        r"group_size: want 32, 64, 128 or None, got 128.0",
    ),
    "no such dtype": (
        lambda: dequantize_int8(W8, dtype=torch.int8),
        kvkern.ArgumentError,
        r"dtype: want bfloat16, float16 or float32, got torch.int8",
    ),
    "a plain weight": (
        lambda: matmul_w8a16(X, torch.ones(8, 256)),
        kvkern.ArgumentError,
        r"weight: want a QuantizedInt8, got Tensor",
    ),
    "8 bits for 4": (
        lambda: matmul_w4a16(X, W8),
        kvkern.ArgumentError,
        r"weight: want a QuantizedInt4, got QuantizedInt8",
    ),
    "another K": (
        lambda: matmul_w8a16(X[:, :255], W8),
        kvkern.ShapeMismatchError,
        r"x: want \[D0=4, K=256\], got \[4, 255\]",
    ),
    "values of another weight": (
        lambda: matmul_w8a16(X, W8._replace(values=W8.values[:1])),
        kvkern.ShapeMismatchError,
        r"weight.values: want \[C=2, N=any, B=128\], got \[1, 8, 128\]",
    ),
    "scales of other groups": (
        lambda: matmul_w4a16(X, W4._replace(group_size=64)),
        kvkern.ShapeMismatchError,
        r"weight.scale: want \[G=4, N=8\], got \[2, 8\]",
    ),
    "zeros in int8": (
        lambda: matmul_w8a16(X, W8._replace(zero=torch.zeros(1, 8, dtype=torch.int8))),
        kvkern.UnsupportedDtypeError,
        r"weight.zero: want float32, got torch.int8",
    ),
    "x in fp32": (
        lambda: matmul_w8a16(X.float(), W8),
        kvkern.UnsupportedDtypeError,
        r"x: want bfloat16 or float16, got torch.float32",
    ),
    "x with zeros left out": (
        lambda: matmul_w8a16(X.to_sparse(), W8),
        kvkern.LayoutError,
        r"x: want strided, got torch.sparse_coo",
    ),
    "x in fp64 by a kernel": (
        lambda: matmul_w8a16(X.double(), W8, backend="triton"),
        kvkern.UnsupportedError,
        r"fp64 is for the reference",
    ),
    "rows at two distances": (
        lambda: matmul_w4a16(torch.zeros(4, 8, 256, dtype=BF16)[:, :3], W4),
        kvkern.LayoutError,
        r"x: want contiguous rows at one distance",
    ),
    "a result in another 16-bit dtype": (
        lambda: matmul_w8a16(X, W8, out_dtype=FP16),
        kvkern.ArgumentError,
        r"out_dtype: want torch.bfloat16 or torch.float32, got torch.float16",
    ),
    "an output of another shape": (
        lambda: matmul_w8a8(X, W8, out=torch.zeros(4, 9, dtype=BF16)),
        kvkern.ShapeMismatchError,
        r"out: want \[D0=4, N=8\], got \[4, 9\]",
    ),
    "an output of one row for all": (
        lambda: matmul_w8a16(X, W8, out=torch.zeros(1, 8, dtype=BF16).expand(4, -1)),
        kvkern.LayoutError,
        r"out: want contiguous, got strides \[0, 1\]",
    ),
    "a bias of another size": (
        lambda: matmul_w4a16(X, W4, bias=torch.zeros(9)),
        kvkern.ShapeMismatchError,
        r"bias: want \[N=8\], got \[9\]",
    ),
    "more columns than int32 sums": (
        lambda: matmul_w8a8(
            torch.zeros(1, 65537, dtype=BF16),
            quantize_int8(torch.ones(1, 65537), backend="reference"),
        ),
        kvkern.ArgumentError,
        r"weight: want at most 65536 columns, got 65537",
    ),
    "nothing to quantise to 8 bits": (
        lambda: quantize_int8(None),
        kvkern.UnsupportedDtypeError,
        r"weight: want a tensor, got NoneType",
    ),
    "nothing to quantise to 4 bits": (
        lambda: quantize_int4(None),
        kvkern.UnsupportedDtypeError,
        r"weight: want a tensor, got NoneType",
    ),
    "a weight of no values": (
        lambda: dequantize_int8(W8._replace(values=None)),
        kvkern.UnsupportedDtypeError,
        r"weight.values: want a tensor, got NoneType",
    ),
    "a weight of no scales": (
        lambda: dequantize_int4(W4._replace(scale=None)),
        kvkern.UnsupportedDtypeError,
        r"weight.scale: want a tensor, got NoneType",
    ),
    "a number for zeros": (
        lambda: matmul_w8a16(X, W8._replace(zero=0.0)),
        kvkern.UnsupportedDtypeError,
        r"weight.zero: want a tensor, got float",
    ),
    "no x for 8 bits": (
        lambda: matmul_w8a16(None, W8),
        kvkern.UnsupportedDtypeError,
        r"x: want a tensor, got NoneType",
    ),
    "no x for 4 bits": (
        lambda: matmul_w4a16(None, W4),
        kvkern.UnsupportedDtypeError,
        r"x: want a tensor, got NoneType",
    ),
    "no x to round": (
        lambda: matmul_w8a8(None, W8),
        kvkern.UnsupportedDtypeError,
        r"x: want a tensor, got NoneType",
    ),
    "no weight": (
        lambda: matmul_w8a8(X, None),
        kvkern.ArgumentError,
        r"weight: want a QuantizedInt8, got NoneType",
    ),
    "a number for a bias": (
        lambda: matmul_w4a16(X, W4, bias=1.0),
        kvkern.UnsupportedDtypeError,
        r"bias: want a tensor, got float",
    ),
    "x on another device": (
        lambda: matmul_w8a16(X.to("meta"), W8),
        kvkern.DeviceError,
        r"x: want device cpu, got meta",
    ),
    "x to round on another device": (
        lambda: matmul_w8a8(X.to("meta"), W8),
        kvkern.DeviceError,
        r"x: want device cpu, got meta",
    ),
    "scales on another device": (
        lambda: matmul_w4a16(X, W4._replace(scale=W4.scale.to("meta"))),
        kvkern.DeviceError,
        r"weight.scale: want device cpu, got meta",
    ),
    "zeros on another device": (
        lambda: dequantize_int8(W8._replace(zero=W8.scale.to("meta"))),
        kvkern.DeviceError,
        r"weight.zero: want device cpu, got meta",
    ),
    "a bias on another device": (
        lambda: matmul_w8a16(X, W8, bias=torch.zeros(8, device="meta")),
        kvkern.DeviceError,
        r"bias: want device cpu, got meta",
    ),
    "an output on another device": (
        lambda: matmul_w4a16(X, W4, out=torch.zeros(4, 8, dtype=BF16, device="meta")),
        kvkern.DeviceError,
        r"out: want device cpu, got meta",
    ),
}


@pytest.mark.parametrize("call, error, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_say_what_to_change(call, error, message):
    with pytest.raises(error, match=message):
        call()
