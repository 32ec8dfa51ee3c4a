"""scaled_mm and fp8_gemm: the product of what the fp8 numbers mean, whatever is scaled by what."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch

import kvkern
from kvkern import UnsupportedError, fp8_gemm, quantize_fp8, scaled_mm
from kvkern.backends import TABLE
from kvkern.testing.budget import assert_within_budget

BACKENDS = [backend.name for backend in TABLE["scaled_mm"]]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CELLS = {"tensor": (0, 0), "row": (1, 0), "group": (1, 128), "block": (128, 128)}
SCALINGS = [
    ("tensor", "tensor"),
    ("row", "row"),
    ("group", "block"),
    ("group", "group"),
    ("tensor", "row"),
    ("row", "block"),
]


class Operand:
    """Rows of fp8 numbers with their scale, and what they mean, in fp64."""

    def __init__(self, x, granularity, dtype=E4M3):
        self.values, self.scale = quantize_fp8(
            x, granularity=granularity, dtype=dtype, backend="reference"
        )
        self.granularity = granularity

    @property
    def real(self):
        scale = self.scale.double()
        for dim, size in zip((-2, -1), CELLS[self.granularity], strict=True):
            if size > 1:
                scale = scale.repeat_interleave(size, dim).narrow(dim, 0, self.values.shape[dim])
        return self.values.double() * scale

    @property
    def scale_of_columns(self):
        return self.scale if self.granularity == "tensor" else self.scale.mT

    def to(self, device):
        self.values, self.scale = self.values.to(device), self.scale.to(device)
        return self


def operands(m, n, k, scaling, dtypes=(E4M3, E4M3), *, mean=0.0, device="cpu", lead=()):
    """Rows [*lead, m, k] and weights [*lead, n, k]; rows differ in size, so scales do."""
    sizes = torch.randint(-3, 4, (*lead, m, 1))
    x = torch.ldexp(torch.randn(*lead, m, k) + mean, sizes if mean == 0 else torch.zeros(1))
    w = torch.randn(*lead, n, k) + mean
    a, b = (
        Operand(values, granularity, dtype).to(device)
        for values, granularity, dtype in zip((x, w), scaling, dtypes, strict=True)
    )
    return a, b


def column_major(scale):
    """The same scales with rows next to each other, and NaN where none is between two columns."""
    *lead, num_rows, groups = scale.shape
    columns = torch.full((*lead, groups, -(-num_rows // 4) * 4), math.nan, device=scale.device)
    return columns.mT[..., :num_rows, :].copy_(scale)


def multiply(a, b, backend, **options):
    """By the backend, or skip with its reason; those of this project's that it refuses nothing."""
    try:
        return scaled_mm(
            a.values, b.values.mT, a.scale, b.scale_of_columns, backend=backend, **options
        )
    except UnsupportedError as error:
        if backend in ("triton", "reference"):
            raise
        pytest.skip(str(error))


def assert_right(result, a, b, *, bias=None, **options):
    exact = a.real @ b.real.mT
    if bias is not None:
        exact += bias.double() if bias.ndim == 1 else bias.double()[:, None]
    rounded = multiply(a, b, "reference", bias=bias, out_dtype=result.dtype, **options)
    # sums of 128 products are made by the tensor core, which in fp8 keeps some 13 bits
    by_tensor_core = result.is_cuda and result.dtype == FP32
    assert_within_budget(result, exact, rounded, eps_of=FP16 if by_tensor_core else None)


def assert_nearly_right(result, a, b, bias):
    """As fast sums are, in each row and, where a column has many, each column."""
    exact = a.real @ b.real.mT + bias.double().unsqueeze(-2)
    error = result.double() - exact
    m, k = a.values.shape[-2:]
    bound = 5e-3 if k > 1200 else 4e-3 if result.dtype == BF16 else 1e-3
    for dim in (-2, -1) if m > 64 else (-1,):
        assert (error.norm(dim=dim) <= bound * exact.norm(dim=dim)).all()


def assert_right_of_tiles(
    m, n, k, scaling, dtypes, out_dtype, accumulation, of_matrices, is_of_them
):
    """Of Hopper's kernel, once ``is_of_them`` says that it is the tiles that are meant."""
    from kvkern.kernels.hopper import scaled_mm_tiles
    from kvkern.warm_up import size_class

    has_groups = scaling[0] == "group"
    is_fast = accumulation == "fast" and not has_groups
    tiles = scaled_mm_tiles.choose_tiles(
        size_class(m), n, k, of_matrices, sums_in_tensor_core=is_fast,
        has_groups=has_groups, num_sms=132,
    )  # fmt: skip
    assert is_of_them(scaled_mm_tiles, tiles, is_fast), tiles
    lead = (of_matrices,) if of_matrices > 1 else ()
    made = ("group", "group") if has_groups else scaling
    a, b = operands(m, n, k, made, dtypes, device="cuda", lead=lead)
    if has_groups:
        b.granularity = "block"
        b.scale = torch.rand(*lead, -(-n // 128), -(-k // 128), device="cuda") + 0.5
    bias = torch.randn(*lead, n, device="cuda", dtype=BF16)
    options = {"bias": bias, "accumulation": accumulation, "out_dtype": out_dtype}
    result = multiply(a, b, "hopper", **options)
    if is_fast:
        assert_nearly_right(result, a, b, bias)
    else:
        assert_right(result, a, b, bias=bias)
    if has_groups:
        a.scale = column_major(a.scale)
    for _ in range(3):  # by launch, and again
        assert torch.equal(multiply(a, b, "hopper", **options), result)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaling", SCALINGS, ids=" x ".join)
@pytest.mark.parametrize("out_dtype", [BF16, FP16, FP32], ids=str)
def test_matches_fp64(scaling, out_dtype, backend, device):
    a, b = operands(48, 192, 640, scaling, device=device)
    result = multiply(a, b, backend, out_dtype=out_dtype)
    assert result.dtype == out_dtype and result.shape == (48, 192)
    assert_right(result, a, b)
    bias = torch.randn(192, device=device, dtype=out_dtype)
    assert_right(multiply(a, b, backend, bias=bias, out_dtype=out_dtype), a, b, bias=bias)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)], ids=str)
@pytest.mark.parametrize("scaling", [("row", "row"), ("group", "block")], ids=" x ".join)
def test_both_fp8_dtypes_in_any_mix(dtypes, scaling, backend, device):
    a, b = operands(20, 64, 256, scaling, dtypes, device=device)
    assert_right(multiply(a, b, backend), a, b)


ODD = [  # each of 1, 7, 63, 127, 129, 1023 as M, as N and as K
    (1, 7, 129),
    (7, 63, 1023),
    (63, 129, 127),
    (127, 1023, 1),
    (129, 127, 63),
    (1023, 1, 7),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "scaling", [("row", "row"), ("group", "block"), ("group", "group")], ids=" x ".join
)
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_odd_sizes(shape, scaling, backend, device):
    a, b = operands(*shape, scaling, device=device)
    assert_right(multiply(a, b, backend, out_dtype=FP32), a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaling", SCALINGS[:4], ids=" x ".join)
@pytest.mark.parametrize("m", [1, 16, 130])  # less than a tile, one, more; with few, K is split
def test_long_sums_with_few_rows_are_right_and_repeat(m, scaling, backend, device):
    a, b = operands(m, 144, 1280, scaling, device=device)
    first = multiply(a, b, backend, out_dtype=FP32)
    assert_right(first, a, b)
    for _ in range(5 if first.is_cuda else 1):
        assert torch.equal(multiply(a, b, backend, out_dtype=FP32), first)


def test_few_rows_of_a_long_sum_are_split(device):
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvkern.kernels.device import Gpu
    from kvkern.kernels.scaled_mm import choose_tiles

    gpu = Gpu(90, 132)
    assert choose_tiles(1, 2112, 7168, 1, gpu).num_splits > 4
    assert choose_tiles(64, 7168, 16384, 1, gpu).num_splits > 1
    assert choose_tiles(16, 24576, 1536, 1, gpu).num_splits == 1  # tiles fill the card
    assert choose_tiles(4096, 2112, 7168, 1, gpu).num_splits == 1
    assert choose_tiles(1, 2112, 100, 1, gpu).num_splits == 1
    assert choose_tiles(1, 128, 7168, 1, gpu, can_split=False).num_splits == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaling", [("row", "row"), ("group", "block")], ids=" x ".join)
def test_exact_sums_of_numbers_with_a_mean_have_no_bias(scaling, backend, device):
    """A tensor core's fp8 accumulator would lose some percent of such sums."""
    a, b = operands(16, 64, 16384, scaling, mean=0.25, device=device)
    result = multiply(a, b, backend, out_dtype=FP32)
    exact = a.real @ b.real.mT
    assert abs(((result.double() - exact) / exact).mean()) < 1e-3
    assert_right(multiply(a, b, backend), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS[:3], ids=" x ".join)
@pytest.mark.parametrize("m", [16, 64, 300])
def test_hopper_loses_of_whole_sums_what_is_stated(m, scaling):
    """K in one part: 16384 products of a sign, in fp32 or in what a tensor core keeps of them."""
    from kvkern.kernels.hopper.scaled_mm_tiles import choose_tiles

    a, b = (
        Operand(torch.randn(rows, 16384, device="cuda") + 0.25, granularity)
        for rows, granularity in zip((m, 8448), scaling, strict=True)
    )
    exact = a.real @ b.real.mT
    for accumulation in ("exact", "fast"):
        is_fast = accumulation == "fast" and scaling[0] != "group"
        tiles = choose_tiles(
            m, 8448, 16384, 1, sums_in_tensor_core=is_fast, has_groups=scaling[0] == "group",
            num_sms=132,
        )  # fmt: skip
        assert tiles.num_splits == 1
        result = multiply(a, b, "hopper", accumulation=accumulation, out_dtype=FP32)
        bias = ((result.double().mean() - exact.mean()) / exact.mean()).item()
        assert -0.015 < bias < -0.002 if is_fast else abs(bias) < 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaling", [("tensor", "tensor"), ("row", "row")], ids=" x ".join)
def test_fast_sums_are_close(scaling, backend, device):
    a, b = operands(40, 192, 1024, scaling, device=device)
    result = multiply(a, b, backend, accumulation="fast", out_dtype=FP32)
    exact = a.real @ b.real.mT
    assert (result.double() - exact).abs().max() < 0.01 * exact.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_are_exact_even_if_fast_would_do(backend, device):
    a, b = operands(40, 192, 1024, ("group", "block"), device=device)
    assert_right(multiply(a, b, backend, accumulation="fast"), a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaling", [("tensor", "tensor"), ("group", "block")], ids=" x ".join)
def test_results_beyond_fp16_are_fp32_all_the_way(scaling, backend, device):
    a, b = operands(33, 64, 128, scaling, device=device)
    a.scale *= 2.0**30
    result = multiply(a, b, backend, out_dtype=FP32)
    assert result.abs().max() > 1e9 and result.isfinite().all()
    assert_right(result, a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [128, 100, 384])
def test_every_scale_goes_with_every_other(k, backend, device):
    """With K <= 128 most shapes read in two ways."""
    for m, n in ((32, 144), (1, 144), (32, 1)):
        for scaling in [(one, other) for one in list(CELLS)[:3] for other in CELLS]:
            a, b = operands(m, n, k, scaling, device=device)
            assert_right(multiply(a, b, backend, out_dtype=FP32), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS[:3], ids=" x ".join)
@pytest.mark.parametrize(("n", "k"), [(8, 144), (136, 1040), (1016, 272)])
@pytest.mark.parametrize("m", [1, 7, 63, 127, 129, 1023])
def test_hopper_takes_odd_rows_tails_and_rows_apart(m, n, k, scaling):
    """All that it takes: rows of any number, which begin at multiples of 16 bytes."""
    a, b = operands(m, n, k, scaling, device="cuda")
    for operand in (a, b):
        wide = torch.full((len(operand.values), k + 48), 0x7F, dtype=torch.uint8, device="cuda")
        operand.values = wide.view(E4M3)[:, 16 : k + 16].copy_(operand.values)  # NaN around it
    out = torch.full((m, n + 24), 7.0, dtype=BF16, device="cuda")
    result = multiply(a, b, "hopper", out=out[:, 8 : n + 8])
    assert_right(result, a, b)
    assert (out[:, :8] == 7).all() and (out[:, n + 8 :] == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", ["exact", "fast"])
@pytest.mark.parametrize("scaling", SCALINGS[:3], ids=" x ".join)
@pytest.mark.parametrize(
    ("n", "k"), [(7168, 2048), (4096, 7168), (2112, 1152), (14336, 4096), (18432, 2048)]
)
@pytest.mark.parametrize(
    ("m", "more"),
    [(33, 64), (47, 64), (65, 128), (100, 128), (129, 160), (230, 256), (257, 320), (330, 384)],
)
def test_hopper_makes_of_rows_the_same_where_there_are_more(m, more, n, k, scaling, accumulation):
    """Where a tile has fewer rows than room, parts of it have some of them again."""
    a, b = operands(more, n, k, scaling, device="cuda")
    options = {"accumulation": accumulation}
    for layout in (column_major, torch.clone) if scaling[0] == "group" else (torch.clone,):
        a.scale = layout(a.scale)
        expected = multiply(a, b, "hopper", **options)
        some = copy.copy(a)
        some.values, out = a.values[:m], torch.full((m + 70, n), 7.0, dtype=BF16, device="cuda")
        some.scale = a.scale if scaling[0] == "tensor" else a.scale[:m]
        multiply(some, b, "hopper", **options, out=out[:m])
        assert torch.equal(out[:m], expected[:m])
        assert (out[m:] == 7).all()


EMPTY = [(0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaling", SCALINGS, ids=" x ".join)
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty_dims(shape, scaling, backend, device):
    m, n, k = shape
    a, b = operands(m, n, k, scaling, device=device)
    result = multiply(a, b, backend)
    assert result.shape == (m, n) and (result == 0).all()
    bias = torch.randn(n, device=device)
    result = multiply(a, b, backend, bias=bias, out_dtype=FP32)
    assert torch.equal(result, bias.expand(m, n))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaling", [("row", "row"), ("group", "block")], ids=" x ".join)
@pytest.mark.parametrize(("m", "k"), [(40, 256), (40, 250), (300, 272)])
def test_nan_and_infinity_are_those_of_the_real_sum(m, k, scaling, backend, device):
    a, b = operands(m, 32, k, scaling, (E5M2, E4M3), device=device)
    codes_a, codes_b = a.values.view(torch.uint8), b.values.view(torch.uint8)
    codes_a[3, 7], codes_a[4, k - 1], codes_a[5, 0] = 0x7C, 0xFC, 0x7F  # inf, -inf, NaN
    codes_a[6, 9], codes_b[2, 9], codes_b[9, 1] = 0x7C, 0, 0xFF  # inf * 0 is NaN
    exact = a.real @ b.real.mT
    assert exact.isinf().any() and exact.isnan().any() and exact.isfinite().any()
    assert_right(multiply(a, b, backend), a, b)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaling", [("row", "row"), ("group", "block")], ids=" x ".join)
@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize("m", [7, 130])
def test_nan_in_a_scale_is_in_all_that_it_scales(m, which, scaling, backend, device):
    a, b = operands(m, 144, 256, scaling, device=device)
    (a if which == "a" else b).scale[-1, -1] = math.nan
    result = multiply(a, b, backend)
    assert result[-1].isnan().any() and result[0, 0].isfinite()
    assert_right(result, a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS, ids=" x ".join)
@pytest.mark.parametrize(("m", "k"), [(16, 1280), (130, 250)])
def test_products_as_cards_without_fp8_make_them(m, k, scaling, monkeypatch):
    """The same numbers in fp16."""
    from kvkern.kernels import scaled_mm as kernel
    from kvkern.kernels.device import Gpu

    monkeypatch.setattr(kernel, "gpu_of", lambda device: Gpu(80, 132))
    a, b = operands(m, 144, k, scaling, (E5M2, E4M3), device="cuda")
    codes = a.values.view(torch.uint8)
    codes[3, 7], codes[4, k - 1], codes[5, 0] = 0x7C, 0xFC, 0x7F  # inf, -inf, NaN
    assert_right(multiply(a, b, "triton", bias=None), a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batched_matrices(backend, device):
    a, b = operands(10, 128, 256, ("group", "block"), lead=(3,), device=device)
    bias = torch.randn(3, 128, device=device)
    assert_right(multiply(a, b, backend), a, b)
    assert_right(multiply(a, b, backend, bias=bias, out_dtype=FP32), a, b, bias=bias)
    a, b = operands(10, 96, 250, ("row", "row"), lead=(3,), device=device)
    assert_right(multiply(a, b, backend, bias=bias[0, :96]), a, b, bias=bias[0, :96])
    a, b = operands(10, 96, 250, ("tensor", "row"), lead=(3,), device=device)
    assert_right(multiply(a, b, backend), a, b)
    of_each = torch.rand(3, 1, 1, device=device) + 0.5
    result = scaled_mm_or_skip(a.values, b.values.mT, of_each, b.scale.mT, backend=backend)
    exact = (a.values.double() * of_each) @ b.real.mT
    assert_within_budget(result, exact, exact.to(BF16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_are_absorbed_into_a_packed_query(backend, device):
    """[T, H, D] by [H, D, L] into the first columns of [T, H, L + R]."""
    tokens, heads, depth, latent, rope = 5, 4, 128, 96, 32
    a, b = operands(tokens, latent, depth, ("row", "row"), lead=(heads,), device=device)
    q = a.values.view(torch.uint8).transpose(0, 1).contiguous().view(E4M3).transpose(0, 1)
    packed = torch.full((tokens, heads, latent + rope), 7.0, dtype=BF16, device=device)
    out = packed[..., :latent].transpose(0, 1)
    result = scaled_mm_or_skip(q, b.values.mT, a.scale, b.scale.mT, out=out, backend=backend)
    assert result is out and (packed[..., latent:] == 7).all()
    assert_right(result, a, b)


def scaled_mm_or_skip(*arguments, backend, **options):
    try:
        return scaled_mm(*arguments, backend=backend, **options)
    except UnsupportedError as error:
        if backend in ("triton", "reference"):
            raise
        pytest.skip(str(error))


COUNTS = [0, 5, 0, 1, 130, 0, 24, 0]  # rows of experts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaling", [*SCALINGS[1:4], ("tensor", "row")], ids=" x ".join)
@pytest.mark.parametrize("padding", [0, 3, 140])
def test_rows_go_to_their_experts_and_padding_is_zero(scaling, padding, backend, device):
    num_rows, n, k = sum(COUNTS) + padding, 128, 200
    a = Operand(torch.randn(num_rows, k), scaling[0]).to(device)
    b = Operand(torch.randn(len(COUNTS), n, k), scaling[1]).to(device)
    a.values.view(torch.uint8)[sum(COUNTS) :] = 0x7F  # NaN
    if scaling[0] != "tensor":
        a.scale[sum(COUNTS) :] = math.nan
    bias = torch.randn(len(COUNTS), n, device=device)
    ends = torch.tensor([0, *COUNTS]).cumsum(0)
    offsets = ends.to(torch.int32).to(device)
    result = scaled_mm_or_skip(
        a.values, b.values.mT, a.scale, b.scale.mT,
        row_offsets=offsets, bias=bias, out_dtype=FP32, backend=backend,
    )  # fmt: skip
    exact = torch.zeros(num_rows, n, dtype=torch.float64, device=device)
    for expert, (start, end) in enumerate(itertools.pairwise(ends)):
        exact[start:end] = a.real[start:end] @ b.real[expert].mT + bias[expert].double()
    assert (result[ends[-1] :] == 0).all()
    assert_within_budget(result, exact, exact.float(), eps_of=FP16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_go_to_256_experts(backend, device):
    """More than a program looks at one by one; most have no row."""
    counts = torch.zeros(256, dtype=torch.int64)
    counts[[0, 3, 127, 128, 200, 255]] = torch.tensor([1, 20, 2, 17, 1, 3])
    a = Operand(torch.randn(44, 128), "group").to(device)
    b = Operand(torch.randn(256, 128, 128), "block").to(device)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    result = scaled_mm_or_skip(
        a.values, b.values.mT, a.scale, b.scale.mT, row_offsets=ends.int().to(device),
        out_dtype=FP32, backend=backend,
    )  # fmt: skip
    of_rows = torch.arange(256).repeat_interleave(counts).to(device)
    exact = (a.real[:, None] @ b.real.mT[of_rows])[:, 0]
    assert_within_budget(result, exact, exact.float(), eps_of=FP16)


def weights_of_experts(num_experts, n, k, granularity):
    """On the GPU; by blocks also where n is no multiple of 128."""
    weights = torch.randn(num_experts, n, k, device="cuda")
    b = Operand(weights, "tensor" if granularity == "block" else granularity)
    if granularity == "block":
        b.granularity = granularity
        b.scale = torch.rand(num_experts, -(-n // 128), -(-k // 128), device="cuda") + 0.5
    return b


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", ["exact", "fast"])
@pytest.mark.parametrize("scaling", [*SCALINGS[:3], ("tensor", "row")], ids=" x ".join)
@pytest.mark.parametrize(("n", "k", "out_dtype"), [(136, 144, FP32), (2112, 1040, BF16)])
@pytest.mark.parametrize(
    ("counts", "padding"),  # tiles of 64, 128 and 256 rows, by the mean of what there is
    [
        ([0, 5, 0, 1, 130, 0, 24, 0], 140),
        ([0] * 255 + [64], 0),
        ([64] * 130, 1),
        ([0, 1, 2] * 230, 0),
        ([300, 1, 63, 64, 65, 127, 128, 129], 200),
        ([1, 1000, 0, 511], 3),
    ],
    ids=["few", "256", "130", "690", "middle", "many"],
)
def test_hopper_gives_rows_to_experts(counts, padding, n, k, out_dtype, scaling, accumulation):
    """No row of another expert is written, or has a part in a sum; NaN is in what is padding."""
    used = sum(counts)
    n = n if len(counts) < 100 else min(n, 264)
    a = Operand(torch.randn(used + padding, k, device="cuda"), scaling[0])
    b = weights_of_experts(len(counts), n, k, scaling[1])
    rows, weights = a.real, b.real
    a.values.view(torch.uint8)[used:] = 0x7F
    if scaling[0] != "tensor":
        a.scale[used:] = math.nan
    if scaling[0] == "group" and k == 1040:
        a.scale = column_major(a.scale)
    bias = torch.randn(len(counts), n, device="cuda") if k == 144 else None
    offsets = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    wide = torch.full((used + padding + 1, n + 24), 7.0, dtype=out_dtype, device="cuda")
    given = (a.values, b.values.mT, a.scale, b.scale_of_columns)
    options = {"row_offsets": offsets, "bias": bias, "accumulation": accumulation}
    options |= {"out_dtype": out_dtype, "backend": "hopper"}
    result = scaled_mm(*given, **options, out=wide[:-1, 8 : n + 8])
    exact = torch.zeros(result.shape, dtype=torch.float64, device="cuda")
    for expert, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        exact[start:end] = rows[start:end] @ weights[expert].mT
        if bias is not None:
            exact[start:end] += bias[expert].double()
    assert (result[used:] == 0).all()
    assert (wide[-1] == 7).all() and (wide[:, :8] == 7).all() and (wide[:, n + 8 :] == 7).all()
    rounded = exact.to(out_dtype)
    assert_within_budget(result, exact, rounded, eps_of=FP16 if out_dtype == FP32 else None)
    for _ in range(3):
        assert torch.equal(scaled_mm(*given, **options), result)


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", [[-5, 3, 3, 900], [50, 20, 90, 70], [0, 2**31 - 1, -1, 7]])
def test_hopper_stays_in_out_whatever_the_offsets_are(offsets):
    """They are not checked; nothing else may be written."""
    a = Operand(torch.randn(100, 256), "group").to("cuda")
    b = weights_of_experts(3, 144, 256, "block")
    wide = torch.full((300, 144), 7.0, dtype=BF16, device="cuda")
    scaled_mm(
        a.values, b.values.mT, a.scale, b.scale.mT, out=wide[100:200], backend="hopper",
        row_offsets=torch.tensor(offsets, dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    torch.cuda.synchronize()
    assert (wide[:100] == 7).all() and (wide[200:] == 7).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_experts", [3, 0])
def test_no_expert_has_rows(num_experts, backend, device):
    a = Operand(torch.randn(5, 64), "row").to(device)
    weights = torch.zeros(num_experts, 16, 64, dtype=torch.uint8, device=device).view(E4M3)
    scales = torch.ones(num_experts, 16, 1, device=device)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    result = scaled_mm_or_skip(
        a.values, weights.mT, a.scale, scales.mT, row_offsets=offsets, backend=backend
    )
    assert result.shape == (5, 16) and (result == 0).all()


def laid_out(x, layout):
    """The same numbers at other strides."""
    if layout == "rows":
        return x.contiguous()
    if layout == "columns":
        return x.T.contiguous().T
    wide = torch.zeros(2 * x.shape[0], 3 * x.shape[1], dtype=torch.uint8, device=x.device)
    view = wide[1::2, 1::3]
    view.copy_(x.view(torch.uint8))
    return view.view(x.dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout_a", ["rows", "columns", "spread"])
@pytest.mark.parametrize("layout_b", ["rows", "columns", "spread"])
def test_strides_change_nothing(layout_a, layout_b, backend, device):
    a, b = operands(18, 80, 208, ("group", "group"), device=device)
    scales = a.scale.T.contiguous().T, b.scale.mT.contiguous()
    out = torch.full((18, 100), 7.0, dtype=FP16, device=device)[:, 3:83]
    result = scaled_mm_or_skip(
        laid_out(a.values, layout_a), laid_out(b.values.mT, layout_b), *scales,
        out=out, out_dtype=FP16, backend=backend,
    )  # fmt: skip
    assert result is out
    assert_right(result, a, b)
    assert (out._base[:, :3] == 7).all() and (out._base[:, 83:] == 7).all()


@pytest.mark.parametrize("strides", [(2**31, 1), (1, 2**24)], ids=str)  # of rows and of K
def test_far_apart_is_addressed_in_64_bits(strides, device):
    num_bytes = 2**31 + 2**25
    far = torch.from_numpy(np.zeros(num_bytes, np.uint8))  # takes memory where it is written to
    if device == "cuda":
        far = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    a, b = operands(2, 16, 129, ("tensor", "tensor"), device=device)
    rows = far.view(E4M3).as_strided((2, 129), strides)
    rows.view(torch.uint8).copy_(a.values.view(torch.uint8))
    a.values = rows
    assert_right(multiply(a, b, "triton"), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("which", ["a", "b", "out"])
def test_rows_far_apart_are_addressed_in_64_bits(which, backend):
    """The last row lies 4 GiB behind the first, and no other has its numbers."""
    a, b = operands(130, 144, 256, ("row", "row"), device="cuda")
    far = 2**25  # 130 rows: 4.06 GiB
    out = torch.empty(130, 144, dtype=BF16, device="cuda")
    if which == "out":
        out = torch.empty(130 * far // 2, dtype=BF16, device="cuda").as_strided(
            (130, 144), (far // 2, 1)
        )
    else:
        operand = a if which == "a" else b
        rows = len(operand.values)
        codes = torch.empty(rows * far, dtype=torch.uint8, device="cuda").as_strided(
            (rows, 256), (far, 1)
        )
        operand.values = codes.copy_(operand.values.view(torch.uint8)).view(E4M3)
    assert_right(multiply(a, b, backend, out=out), a, b)


def test_another_number_of_rows_compiles_nothing_new():
    """But for the tile, which has a few sizes: integers that vary are not specialised on."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvkern.kernels import scaled_mm as kernels
    from kvkern.kernels import sum_splits
    from kvkern.kernels.device import Gpu

    gpu = Gpu(90, 132)
    of_a_step = {*kernels._OF_A_STEP, *sum_splits._OF_A_STEP}

    def empty(*shape, dtype=FP32):
        return torch.empty(shape, dtype=dtype, device="meta")

    def variant(call):
        _, arguments, options = call
        numbers = {
            name: value
            for name, value in arguments.items()
            if name not in of_a_step and not isinstance(value, torch.Tensor)
        }
        return repr((numbers, options))

    def variants(num_rows, cells, num_matrices, depth):
        a, b = empty(num_matrices, num_rows, depth, dtype=E4M3), empty(1, 512, depth, dtype=E4M3)
        b = b.expand(num_matrices, -1, -1).mT
        scales = empty(num_matrices, num_rows, 4), empty(num_matrices, 4, 512)
        out = empty(num_matrices, num_rows, 512, dtype=BF16)
        tiles = kernels._tiles_for(a, b, cells[1], None, gpu)
        if tiles.num_splits > 1:
            out = empty(tiles.num_splits, *out.shape)
            yield variant(kernels.sum_splits_call(out, None, out[0], gpu))
        yield variant(
            kernels._product_call(a, b, *scales, *cells, None, None, True, out, tiles, gpu)
        )

    for cells in (((1, 0), (0, 1)), ((1, 128), (128, 128))):
        for num_matrices, depth in ((1, 4096), (1, 500), (16, 512)):
            met = set()
            for num_rows in [*range(1, 300), 1023, 1024, 4096, 5000]:
                met |= set(variants(num_rows, cells, num_matrices, depth))
            assert len(met) <= 6, met  # 16, 32, 64 and 128 rows; sums of splits, few or many


FEW_OF_LARGE = [
    *((m, n, k) for m in (1, 7, 16, 33, 64) for n, k in (
        (8448, 3200),  # a ring goes round, and ends with half a stage
        (25344, 1536), (2112, 7040),  # three programs an SM; parts of K
    )),
    (100, 8448, 2048), (129, 4160, 3200), (250, 2112, 1920),  # several times 64 rows
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS[:3], ids=" x ".join)
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), FEW_OF_LARGE)
def test_few_rows_of_large_matrices(m, n, k, out_dtype, scaling):
    a, b = operands(m, n, k, scaling, device="cuda")
    bias = torch.randn(n, device="cuda", dtype=BF16)
    options = {"bias": bias, "out_dtype": out_dtype}
    result = multiply(a, b, "hopper", **options)
    assert_right(result, a, b, bias=bias)
    if scaling[0] == "group":  # of more than 8 rows by TMA
        a.scale = column_major(a.scale)
    for _ in range(3):
        assert torch.equal(multiply(a, b, "hopper", **options), result)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS[:2], ids=" x ".join)
@pytest.mark.parametrize(("m", "n", "k"), FEW_OF_LARGE)
def test_fast_sums_of_few_rows_of_large_matrices(m, n, k, scaling):
    a, b = operands(m, n, k, scaling, device="cuda")
    bias = torch.randn(n, device="cuda", dtype=BF16)
    result = multiply(a, b, "hopper", bias=bias, accumulation="fast", out_dtype=FP32)
    assert_nearly_right(result, a, b, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("is_column_major", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k", "columns"),
    [
        (100, 2112, 4480, 32),
        (128, 2080, 4352, 32),
        (100, 4096, 4480, 64),
        (128, 4160, 4400, 64),
        (100, 24576, 1664, 128),
        (128, 24584, 1400, 128),
    ],
)
def test_groups_in_stages_of_two_steps(m, n, k, columns, is_column_major):
    """One warpgroup; the last stage is whole or half full."""
    from kvkern.kernels.hopper.scaled_mm_tiles import choose_tiles

    tiles = choose_tiles(m, n, k, 1, sums_in_tensor_core=False, has_groups=True, num_sms=132)
    assert (tiles.columns, tiles.steps, tiles.is_few) == (columns, 2, False)
    a, b = operands(m, n, k, ("group", "block"), device="cuda")
    if is_column_major:
        a.scale = column_major(a.scale)
    result = multiply(a, b, "hopper")
    assert_right(result, a, b)
    for _ in range(3):
        assert torch.equal(multiply(a, b, "hopper"), result)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", ["exact", "fast"])
@pytest.mark.parametrize("scaling", SCALINGS[:3], ids=" x ".join)
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "of_matrices"),
    [(128, 24584, 1664, 1), (100, 24576, 1536, 1), (70, 9000, 1296, 2)],
)
def test_64_rows_by_one_warpgroup(m, n, k, of_matrices, out_dtype, scaling, accumulation):
    """Of 128 columns, two or three tiles a program; an even and an odd number of steps."""
    assert_right_of_tiles(
        m, n, k, scaling, (E4M3, E4M3), out_dtype, accumulation, of_matrices,
        lambda _, tiles, is_fast: tiles[:2] == (64, 128) and tiles.steps == (1 if is_fast else 2),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS[:3], ids=" x ".join)
@pytest.mark.parametrize(
    ("m", "n", "k", "of_matrices"),
    [(128, 24576, 1536, 1), (500, 640, 16384, 1), (4000, 2112, 640, 1), (4200, 2048, 1200, 2)],
)  # one band of rows; K cut; narrow tiles; a band that is not whole
def test_numbers_of_units_are_the_same_by_an_inverse(m, n, k, of_matrices, scaling, monkeypatch):
    from kvkern.kernels.hopper import scaled_mm as kernel
    from kvkern.ops import matmul

    launch, divides = kernel.launch, []

    def noted(called, grid, arguments, *rest, **options):
        divides.append(arguments["ORDER"].divides)
        return launch(called, grid, arguments, *rest, **options)

    lead = (of_matrices,) if of_matrices > 1 else ()
    a, b = operands(m, n, k, scaling, device="cuda", lead=lead)
    matmul._KNOWN.clear()
    monkeypatch.setattr(kernel, "launch", noted)
    by_inverse = multiply(a, b, "hopper")
    matmul._KNOWN.clear()
    monkeypatch.setattr(kernel, "HUGE", 1)
    assert torch.equal(multiply(a, b, "hopper"), by_inverse)
    assert divides == [False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("m", [3, 64, 128])
def test_what_lies_past_the_last_scale_is_not_read(m):
    """Stages have two groups, of which K of an odd number leaves one."""
    a, b = operands(m, 4096, 4480, ("group", "block"), device="cuda")
    result = multiply(a, b, "hopper")
    for operand in (a, b):
        rows, groups = operand.scale.shape
        poisoned = torch.full((rows + 1, groups + 1), float("nan"), device="cuda")
        operand.scale = poisoned[:rows, :groups].copy_(operand.scale)
    assert torch.equal(multiply(a, b, "hopper"), result)
    a.scale[0, -1] = float("inf")
    assert multiply(a, b, "hopper")[0].isinf().all()  # not NaN, as with zeros past it
    assert torch.equal(multiply(a, b, "hopper")[1:], result[1:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("m", [1, 7, 16, 33, 70, 200])
def test_order_of_scales_in_memory_changes_nothing(m, backend, device):
    a, b = operands(m, 192, 640, ("group", "block"), device=device)
    result = multiply(a, b, backend)
    a.scale = quantize_fp8(
        a.real.float(), granularity="group", column_major_scales=True
    ).scale.copy_(a.scale)
    assert m == 1 or a.scale.stride()[0] == 1
    assert torch.equal(multiply(a, b, backend), result)


@pytest.mark.gpu
@pytest.mark.parametrize("of_matrices", [1, 3])
@pytest.mark.parametrize("m", [11, 64, 65, 129, 300, 1000])
@pytest.mark.parametrize(("n", "k"), [(2112, 640), (512, 512), (520, 1500)])
def test_column_major_scales_by_tma(n, k, m, of_matrices):
    lead = (of_matrices,) if of_matrices > 1 else ()
    a, b = operands(m, n, k, ("group", "group"), device="cuda", lead=lead)
    b.granularity, blocks = "block", -(-n // 128)
    b.scale = torch.rand(*lead, blocks, -(-k // 128), device="cuda") + 0.5
    result = multiply(a, b, "hopper")
    assert_right(result, a, b)
    a.scale = column_major(a.scale)
    for _ in range(3):  # by launch, and again
        assert torch.equal(multiply(a, b, "hopper"), result)
    a.scale = column_major(a.scale.mul(2))
    assert_right(multiply(a, b, "hopper"), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", ["exact", "fast"])
@pytest.mark.parametrize("scaling", SCALINGS[:3], ids=" x ".join)
@pytest.mark.parametrize("k", [384, 400, 512])
@pytest.mark.parametrize(
    ("m", "n", "of_matrices"), [(1000, 16512, 1), (520, 4096, 3), (100, 24576, 1)]
)
def test_rows_that_stay_where_sums_are_short(m, n, of_matrices, k, scaling, accumulation):
    """A program keeps a's rows for tiles next to each other; most have the next rows' tiles too."""
    lead = (of_matrices,) if of_matrices > 1 else ()
    a, b = operands(m, n, k, scaling, device="cuda", lead=lead)
    result = multiply(a, b, "hopper", accumulation=accumulation)
    assert_right(result, a, b)
    if scaling[0] == "group":
        a.scale = column_major(a.scale)
    for _ in range(3):  # by launch, and again
        assert torch.equal(multiply(a, b, "hopper", accumulation=accumulation), result)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS[:2], ids=" x ".join)
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "of_matrices"),  # of 132 programs each has 1 or 2, 6 or 7, 1 or 2 tiles
    [(512, 7168, 784, 1), (512, 9000, 640, 3), (600, 1160, 768, 4)],
)
def test_warpgroups_that_take_turns(m, n, k, of_matrices, out_dtype, scaling):
    assert_right_of_tiles(
        m, n, k, scaling, (E4M3, E4M3), out_dtype, "fast", of_matrices,
        lambda _, tiles, is_fast: tiles.has_turns,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", ["exact", "fast"])
@pytest.mark.parametrize(
    ("scaling", "out_dtype"), zip(SCALINGS[:3], [FP16, BF16, BF16], strict=True), ids=str
)
@pytest.mark.parametrize(
    ("m", "n", "k", "of_matrices"),  # 4 or 5, 8 or 9, 1 or 2 tiles a program
    [(1500, 4600, 512, 3), (3999, 9208, 640, 1), (3999, 2040, 2496, 1)],
)
def test_results_held_until_the_next_tiles_products(
    m, n, k, of_matrices, out_dtype, scaling, accumulation
):
    assert_right_of_tiles(
        m, n, k, scaling, (E4M3, E4M3), out_dtype, accumulation, of_matrices,
        lambda of, tiles, is_fast: of.num_held(
            tiles, -(-k // 128),
            rounds=-(-of_matrices * -(-m // tiles.rows) * -(-n // tiles.columns) // 132),
            is_narrow=of.has_narrow(n, tiles, sums_in_tensor_core=is_fast),
            sums_in_tensor_core=is_fast,
        ),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", ["exact", "fast"])
@pytest.mark.parametrize("scaling", SCALINGS[:3], ids=" x ".join)
def test_results_that_are_held_stay_in_out(scaling, accumulation):
    """The first of a program holds nothing yet, and the last tiles are not whole."""
    a, b = operands(3999, 4600, 512, scaling, device="cuda")
    result = multiply(a, b, "hopper", accumulation=accumulation)
    wide = torch.full((4001, 4624), 7.0, dtype=BF16, device="cuda")
    options = {"accumulation": accumulation, "out": wide[1:-1, 8:-16]}
    for _ in range(3):
        multiply(a, b, "hopper", **options)
        assert torch.equal(wide[1:-1, 8:-16], result)
        wide[1:-1, 8:-16] = 7
        assert (wide == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", ["exact", "fast"])
@pytest.mark.parametrize("scaling", SCALINGS[:3], ids=" x ".join)
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(4096, 576, 4096), (3999, 560, 4208)])
def test_tiles_that_share_the_last_columns_out(m, n, k, out_dtype, scaling, accumulation):
    """Each has 16 of them beside its own 128, so that all SMs have one tile."""
    assert_right_of_tiles(
        m, n, k, scaling, (E4M3, E4M3), out_dtype, accumulation, 1,
        lambda _, tiles, is_fast: tiles.extra == 16,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", ["exact", "fast"])
@pytest.mark.parametrize("scaling", SCALINGS[:3], ids=" x ".join)
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("n", [2112, 2056])  # 64 and 8 columns are left
@pytest.mark.parametrize(
    ("m", "of_matrices", "dtypes"), [(2000, 1, (E4M3, E4M3)), (1000, 2, (E5M2, E4M3))], ids=str
)
def test_last_columns_that_are_few(m, of_matrices, dtypes, n, out_dtype, scaling, accumulation):
    """They have tiles of their own, some made transposed; other columns must not notice."""
    assert_right_of_tiles(
        m, n, 1200, scaling, dtypes, out_dtype, accumulation, of_matrices,
        lambda of, tiles, is_fast: of.has_narrow(n, tiles, sums_in_tensor_core=is_fast),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scaling", SCALINGS[:4], ids=" x ".join)
@pytest.mark.parametrize("m", [4, 200])
def test_calls_again_and_graph_replays_read_new_numbers(m, scaling, backend):
    sets = [operands(m, 256, 2048, scaling, device="cuda") for _ in range(3)]
    bias = torch.randn(256, device="cuda", dtype=BF16)
    for a, b in sets:
        assert_right(multiply(a, b, backend, bias=bias), a, b, bias=bias)
    a, b = sets[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = multiply(a, b, backend, bias=bias)
    for mine, other in zip((a, b), sets[1], strict=True):
        mine.values.copy_(other.values)
        mine.scale.copy_(other.scale)
    graph.replay()
    assert torch.equal(result, multiply(a, b, backend, bias=bias))
    assert_right(result, a, b, bias=bias)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("scaling", SCALINGS[1:3], ids=" x ".join)
def test_two_streams_share_nothing(scaling, backend):
    """K is cut: sums of parts belong to a call, also of two calls alike that run at once."""
    sets = [operands(64, 512, 8192, scaling, device="cuda") for _ in range(2)]
    expected = [multiply(a, b, backend) for a, b in sets]
    streams = [torch.cuda.Stream() for _ in sets]
    torch.cuda.synchronize()
    results = [[], []]
    for _ in range(50):
        for (a, b), stream, mine in zip(sets, streams, results, strict=True):
            with torch.cuda.stream(stream):
                mine.append(multiply(a, b, backend))
    torch.cuda.synchronize()
    for mine, right in zip(results, expected, strict=True):
        assert all(torch.equal(result, right) for result in mine)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_grouped_calls_replay_with_other_counts(backend):
    a = Operand(torch.randn(100, 256), "group").to("cuda")
    b = Operand(torch.randn(4, 128, 256), "block").to("cuda")
    offsets = torch.tensor([0, 25, 50, 75, 100], dtype=torch.int32, device="cuda")
    given = (a.values, b.values.mT, a.scale, b.scale.mT)
    scaled_mm_or_skip(*given, row_offsets=offsets, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = scaled_mm(*given, row_offsets=offsets, backend=backend)
    offsets.copy_(torch.tensor([0, 0, 3, 90, 91]))
    graph.replay()
    expected = scaled_mm(*given, row_offsets=offsets, backend="reference")
    assert (result[91:] == 0).all()
    assert_within_budget(result, expected.double(), expected)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("x_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(1, 24, 100), (33, 70, 129)], ids=str)
def test_fp8_gemm_quantises_floats_itself(shape, x_dtype, backend, device):
    m, n, k = shape
    a, b = (torch.randn(size, device=device).to(x_dtype) for size in ((m, k), (k, n)))
    result = fp8_gemm(a, b, backend=backend)
    exact = a.double() @ b.double()
    assert result.dtype == FP16 and result.shape == (m, n)
    error = (result.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 0.06  # two roundings to 4 bits of mantissa
    right = Operand(b.T.contiguous(), "row").to(device)
    mixed = fp8_gemm(a, right.values.T, b_scale=right.scale.T, backend=backend)
    assert_within_budget(mixed, result.double(), result)
    unscaled = fp8_gemm(right.values, right.values.T, output_dtype=FP32, backend=backend)
    exact = right.values.double() @ right.values.double().T
    assert_within_budget(unscaled, exact, exact.float(), eps_of=FP16)


by_each_and_auto = pytest.mark.parametrize("backend", ["triton", "reference", "auto"])


@by_each_and_auto
@pytest.mark.parametrize(
    "scaling, lead",
    [
        (("tensor", "row"), ()),
        (("row", "tensor"), ()),
        (("group", "block"), ()),
        (("row", "row"), (3,)),
        (("group", "group"), (3,)),
    ],
    ids=str,
)
def test_fp8_gemm_takes_scales_and_a_dtype_in_order_and_by_name(scaling, lead, backend, device):
    a, b = operands(5, 40, 200, scaling, device=device, lead=lead)
    scales = {"a_scale": a.scale, "b_scale": b.scale_of_columns}
    for out_dtype in (BF16, FP16, FP32):
        given = a.values, b.values.mT, *scales.values(), out_dtype
        result = fp8_gemm(*given, backend=backend)
        assert result.dtype == out_dtype and result.shape == (*lead, 5, 40)
        assert_right(result, a, b)
        named = fp8_gemm(*given[:2], **scales, output_dtype=out_dtype, backend=backend)
        assert torch.equal(named, result)


@by_each_and_auto
def test_fp8_gemm_has_scales_of_one_that_are_left_out(backend, device):
    a, b = operands(5, 40, 200, ("row", "row"), device=device)
    ones = torch.ones(1, device=device)
    for scales in ((a.scale, None), (None, b.scale.mT)):
        result = fp8_gemm(a.values, b.values.mT, *scales, FP32, backend=backend)
        scales = [ones if scale is None else scale for scale in scales]
        assert torch.equal(result, fp8_gemm(a.values, b.values.mT, *scales, FP32, backend=backend))


@by_each_and_auto
@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
@pytest.mark.parametrize("x_dtype", [BF16, FP16, FP32], ids=str)
def test_fp8_gemm_of_floats_of_any_strides_is_that_of_their_rows_quantised(
    x_dtype, lead, backend, device
):
    x, w = (torch.randn(*lead, rows, 200).to(device, x_dtype) for rows in (5, 40))
    a, b = (Operand(values, "row") for values in (x, w))
    wide = torch.zeros(*lead, 2 * 5, 3 * 200, dtype=x_dtype, device=device)
    spread = wide[..., 1::2, 1::3].copy_(x)
    for left, right in ((x, w.mT.contiguous()), (spread, w.mT)):
        for out_dtype in (BF16, FP32):
            result = fp8_gemm(left, right, output_dtype=out_dtype, backend=backend)
            assert result.dtype == out_dtype
            assert_right(result, a, b)


@by_each_and_auto
@pytest.mark.parametrize("layout", ["rows", "columns", "spread"])
def test_fp8_gemm_of_fp8_takes_any_strides(layout, backend, device):
    a, b = operands(5, 40, 200, ("row", "row"), device=device)
    given = laid_out(a.values, layout), laid_out(b.values.mT, layout)
    result = fp8_gemm(*given, a.scale, b.scale.mT, BF16, backend=backend)
    assert_right(result, a, b)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_fp8_gemm_of_nothing_is_zero(backend, device):
    a, b = torch.zeros(3, 0, device=device), torch.zeros(0, 5, device=device)
    assert torch.equal(fp8_gemm(a, b, backend=backend).cpu(), torch.zeros(3, 5, dtype=FP16))
    a, b = a.to(E4M3), b.to(E4M3)
    assert torch.equal(fp8_gemm(a, b, backend=backend).cpu(), torch.zeros(3, 5, dtype=FP16))


A, B = torch.zeros(4, 256).to(E4M3), torch.zeros(300, 256).to(E4M3).T
ONE = torch.ones(1)
EXPERTS, OFFSETS = B.expand(3, -1, -1), torch.zeros(4, dtype=torch.int32)
MISTAKES = {
    "numbers that are not fp8": (
        lambda: scaled_mm(A.float(), B, ONE, ONE),
        kvkern.UnsupportedDtypeError,
        r"a: want float8_e4m3fn or float8_e5m2, got torch.float32",
    ),
    "weights that are not transposed": (
        lambda: scaled_mm(A, B.T, ONE, ONE),
        kvkern.ShapeMismatchError,
        r"b: want \[K=256, N=any\], got \[300, 256\]",
    ),
    "no tensor": (
        lambda: scaled_mm(A, None, ONE, ONE),
        kvkern.UnsupportedDtypeError,
        r"b: want a tensor, got NoneType",
    ),
    "a number for a scale": (
        lambda: scaled_mm(A, B, 1.0, ONE),
        kvkern.UnsupportedDtypeError,
        r"scale_a: want a tensor, got float",
    ),
    "scales in bf16": (
        lambda: scaled_mm(A, B, ONE.bfloat16(), ONE),
        kvkern.UnsupportedDtypeError,
        r"scale_a: want float32, got torch.bfloat16",
    ),
    "scales of a that fit nothing": (
        lambda: scaled_mm(A, B, torch.ones(4, 3), ONE),
        kvkern.ShapeMismatchError,
        r"scale_a: want \[1\] or \[1, 1\] or \[4, 1\] or \[4, 2\], got \[4, 3\]",
    ),
    "scales of b that are not transposed": (
        lambda: scaled_mm(A, B, ONE, torch.ones(3, 2)),
        kvkern.ShapeMismatchError,
        r"scale_b: want \[1\] or \[1, 1\] or \[1, 300\] or \[2, 3\] or \[2, 300\], got \[3, 2\]",
    ),
    "one matrix for several": (
        lambda: scaled_mm(A.expand(2, -1, -1), B, ONE, ONE),
        kvkern.ShapeMismatchError,
        r"b: want \[G=2, K=256, N=any\], got \[256, 300\]",
    ),
    "scales of another number of matrices": (
        lambda: scaled_mm(A.expand(2, -1, -1), B.expand(2, -1, -1), ONE, torch.ones(3, 1, 300)),
        kvkern.ShapeMismatchError,
        r"scale_b: want \[1\] or \[2, 1, 1\] or \[2, 1, 300\] or .*, got \[3, 1, 300\]",
    ),
    "offsets of another number of experts": (
        lambda: scaled_mm(A, EXPERTS, ONE, ONE, row_offsets=OFFSETS[:3]),
        kvkern.ShapeMismatchError,
        r"row_offsets: want \[E\+1=4\], got \[3\]",
    ),
    "offsets in int64": (
        lambda: scaled_mm(A, EXPERTS, ONE, ONE, row_offsets=OFFSETS.long()),
        kvkern.UnsupportedDtypeError,
        r"row_offsets: want int32, got torch.int64",
    ),
    "offsets for one matrix": (
        lambda: scaled_mm(A, B, ONE, ONE, row_offsets=OFFSETS),
        kvkern.ShapeMismatchError,
        r"b: want \[E=any, K=256, N=any\], got \[256, 300\]",
    ),
    "a bias of rows": (
        lambda: scaled_mm(A, B, ONE, ONE, bias=torch.ones(4)),
        kvkern.ShapeMismatchError,
        r"bias: want \[N=300\], got \[4\]",
    ),
    "a result in fp8": (
        lambda: scaled_mm(A, B, ONE, ONE, out_dtype=E4M3),
        kvkern.ArgumentError,
        r"out_dtype: want bfloat16, float16 or float32, got torch.float8_e4m3fn",
    ),
    "no such accumulation": (
        lambda: scaled_mm(A, B, ONE, ONE, accumulation="slow"),
        kvkern.ArgumentError,
        r"accumulation: want exact or fast, got 'slow'",
    ),
    "an output of another dtype": (
        lambda: scaled_mm(A, B, ONE, ONE, out=torch.zeros(4, 300)),
        kvkern.UnsupportedDtypeError,
        r"out: want bfloat16, got torch.float32",
    ),
    "an output of columns": (
        lambda: scaled_mm(A, B, ONE, ONE, out=torch.zeros(300, 4, dtype=BF16).T),
        kvkern.LayoutError,
        r"out: want a contiguous last dim, got strides \[1, 4\]",
    ),
    "an output of one row for all": (
        lambda: scaled_mm(A, B, ONE, ONE, out=torch.zeros(1, 300, dtype=BF16).expand(4, -1)),
        kvkern.LayoutError,
        r"out: want each element at a place of its own, got strides \[0, 1\]",
    ),
    "an output of rows that overlap": (
        lambda: scaled_mm(
            A, B, ONE, ONE, out=torch.zeros(1200, dtype=BF16).as_strided((4, 300), (299, 1))
        ),
        kvkern.LayoutError,
        r"out: want each element at a place of its own, got strides \[299, 1\]",
    ),
    "an output of one matrix for several": (
        lambda: scaled_mm(
            A.expand(2, -1, -1),
            B.expand(2, -1, -1),
            ONE,
            ONE,
            out=torch.zeros(4, 300, dtype=BF16).expand(2, -1, -1),
        ),
        kvkern.LayoutError,
        r"out: want each element at a place of its own, got strides \[0, 300, 1\]",
    ),
    "fp64 by a kernel": (
        lambda: scaled_mm(A, B, ONE, ONE, out_dtype=torch.float64, backend="triton"),
        UnsupportedError,
        r"fp64 is for the reference",
    ),
    "integers to quantise": (
        lambda: fp8_gemm(A, B.float().int()),
        kvkern.UnsupportedDtypeError,
        r"b: want bfloat16 or float16 or float32 or float8_e4m3fn or float8_e5m2, got torch.int32",
    ),
    "a scale of what is quantised": (
        lambda: fp8_gemm(A.float(), B, a_scale=ONE),
        kvkern.ArgumentError,
        r"a_scale: want None for a in torch.float32, quantised here",
    ),
    "nothing to multiply": (
        lambda: fp8_gemm(None, B),
        kvkern.UnsupportedDtypeError,
        r"a: want a tensor, got NoneType",
    ),
    "nothing to multiply by": (
        lambda: fp8_gemm(A, None),
        kvkern.UnsupportedDtypeError,
        r"b: want a tensor, got NoneType",
    ),
    "fp64 of fp8_gemm by a kernel": (
        lambda: fp8_gemm(A, B, output_dtype=torch.float64, backend="triton"),
        UnsupportedError,
        r"fp64 is for the reference",
    ),
    "a vector to multiply by": (
        lambda: fp8_gemm(A.float(), torch.ones(256)),
        kvkern.ShapeMismatchError,
        r"b: want \[K=256, N=any\], got \[256\]",
    ),
    "matrices to quantise on two devices": (
        lambda: fp8_gemm(A.float(), B.float().to("meta")),
        kvkern.DeviceError,
        r"b: want device cpu, got meta",
    ),
    "a scale of b on another device": (
        lambda: fp8_gemm(A, B, ONE, ONE.to("meta")),
        kvkern.DeviceError,
        r"^b_scale: want device cpu, got meta",
    ),
    "a scale of a that fits nothing": (
        lambda: fp8_gemm(A, B, torch.ones(3), ONE),
        kvkern.ShapeMismatchError,
        r"^a_scale: want \[1\] or \[1, 1\] or \[4, 1\] or \[4, 2\], got \[3\]",
    ),
    "a result of fp8_gemm in fp8": (
        lambda: fp8_gemm(A, B, output_dtype=E4M3),
        kvkern.ArgumentError,
        r"^output_dtype: want bfloat16, float16 or float32, got torch.float8_e4m3fn",
    ),
    "numbers with zeros left out": (
        lambda: scaled_mm(A.float().to_sparse().to(E4M3), B, ONE, ONE),
        kvkern.LayoutError,
        r"a: want strided, got torch.sparse_coo",
    ),
    "scales with zeros left out": (
        lambda: scaled_mm(A, B, ONE, ONE.to_sparse()),
        kvkern.LayoutError,
        r"scale_b: want strided, got torch.sparse_coo",
    ),
}


@pytest.mark.parametrize("call, error, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_say_what_to_change(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_reference_in_fp64_is_the_sum_in_loops():
    a, b = operands(3, 5, 140, ("group", "block"))
    result = multiply(a, b, "reference", out_dtype=torch.float64)
    for row in range(3):
        for column in range(5):
            terms = [
                float(a.values[row, k].float()) * float(a.scale[row, k // 128])
                * float(b.values[column, k].float()) * float(b.scale[0, k // 128])
                for k in range(140)
            ]  # fmt: skip
            assert result[row, column].item() == pytest.approx(math.fsum(terms), rel=1e-6)
