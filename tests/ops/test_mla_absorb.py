"""mla_absorb and absorb_weights: each head by its own matrix, into views of packed buffers."""

import math

import numpy as np
import pytest
import torch

import kvkern
from kvkern import UnsupportedError, absorb_weights, mla_absorb, quantize_fp8
from kvkern.backends import TABLE
from kvkern.testing.budget import assert_within_budget, matmul_in_order

BACKENDS = [backend.name for backend in TABLE["mla_absorb"]]
E4M3 = torch.float8_e4m3fn
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CELLS = {"tensor": (0, 0), "row": (1, 0), "group": (1, 128), "block": (128, 128)}


def randn(*shape, dtype=BF16, device="cpu", mean=0.0):
    return (torch.randn(shape) + mean).to(device, dtype)


def weights(heads, depth, columns, layout="rows", **options):
    """[H, K, N], contiguous along N as ``w_uk``, or along K as ``w_uv``."""
    if layout == "rows":
        return randn(heads, depth, columns, **options)
    return randn(heads, columns, depth, **options).mT


def quantized(w, granularity):
    """w [H, K, N] in e4m3, its scale, and what both mean, in fp64."""
    values, scale = quantize_fp8(
        w.mT.contiguous(), granularity=granularity, dtype=E4M3, backend="reference"
    )
    real = scale.double()
    for dim, size in zip((-2, -1), CELLS[granularity], strict=True):
        if size > 1:
            real = real.repeat_interleave(size, dim).narrow(dim, 0, values.shape[dim])
    return values.mT, scale if granularity == "tensor" else scale.mT, (values.double() * real).mT


def assert_right(result, x, w, real=None, scale=None):
    exact = torch.einsum("thk,hkn->thn", x.double(), w.double() if real is None else real)
    if x.dtype == FP32:
        rounded = matmul_in_order(x.transpose(0, 1), w).transpose(0, 1)
    else:
        rounded = mla_absorb(x, w, scale=scale, backend="reference")
    assert_within_budget(result, exact, rounded)


def absorb_or_skip(*arguments, backend, **options):
    """By the backend, or skip with its reason; the portable ones refuse nothing."""
    try:
        return mla_absorb(*arguments, backend=backend, **options)
    except UnsupportedError as error:
        if backend in ("triton", "reference"):
            raise
        pytest.skip(str(error))


SHAPES = [  # T, H, K, N
    (1, 128, 64, 32),  # as many heads as a model has
    (7, 16, 128, 256),
    (16, 1, 512, 64),  # a whole tile of few tokens
    (63, 2, 192, 512),  # a K that is no power of two
    (129, 1, 512, 128),
    (5, 3, 100, 72),
    (33, 1, 1, 1),
    (70, 2, 129, 63),
    (127, 1, 1023, 7),
    (1023, 1, 7, 127),
    (7, 1, 127, 1023),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(shape, layout, dtype, backend, device):
    tokens, heads, depth, columns = shape
    x = randn(tokens, heads, depth, dtype=dtype, device=device)
    w = weights(heads, depth, columns, layout, dtype=dtype, device=device)
    result = absorb_or_skip(x, w, backend=backend)
    assert result.dtype == dtype and result.is_contiguous()
    assert_right(result, x, w)


def test_budget_of_fp32_takes_sums_in_any_order_and_no_tf32():
    def tf32(x):
        return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(FP32)

    x, w = torch.randn(33, 1, 512), torch.randn(1, 512, 64)
    backwards = matmul_in_order(x.flip(-1).transpose(0, 1), w.flip(1)).transpose(0, 1)
    assert_right(backwards, x, w)
    with pytest.raises(AssertionError, match="over the budget"):
        assert_right(torch.einsum("thk,hkn->thn", tf32(x), tf32(w)), x, w)


def test_absorbed_weights_are_views_that_factor_the_projection():
    weight = torch.randn(3 * (5 + 4), 7)
    w_uk, w_uv = absorb_weights(weight, num_heads=3, nope_dim=5, v_dim=4)
    latent = torch.randn(7)
    heads = (weight @ latent).view(3, 9)
    torch.testing.assert_close(torch.einsum("hnl,l->hn", w_uk, latent), heads[:, :5])
    torch.testing.assert_close(torch.einsum("hlv,l->hv", w_uv, latent), heads[:, 5:])
    assert w_uk.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert w_uv.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    with pytest.raises(
        kvkern.ShapeMismatchError, match=r"kv_b_weight: want \[H\*\(nope\+v\)=30, L=any\]"
    ):
        absorb_weights(weight, num_heads=3, nope_dim=5, v_dim=5)
    with pytest.raises(kvkern.UnsupportedDtypeError, match="kv_b_weight: want a tensor, got list"):
        absorb_weights([1.0], num_heads=3, nope_dim=5, v_dim=4)


def test_absorbed_attention_is_plain_attention():
    """Scores in latent space, and outputs from it, by the reference in fp64."""
    tokens, keys, heads, latent, nope, v_dim = 3, 5, 2, 16, 8, 4
    kv_b = torch.randn(heads * (nope + v_dim), latent, dtype=FP64)
    w_uk, w_uv = absorb_weights(kv_b, num_heads=heads, nope_dim=nope, v_dim=v_dim)
    q, cached = torch.randn(tokens, heads, nope, dtype=FP64), torch.randn(keys, latent, dtype=FP64)
    expanded = (cached @ kv_b.T).view(keys, heads, nope + v_dim)  # as kv_b_proj makes them
    k, v = expanded.split([nope, v_dim], dim=-1)
    scores = torch.einsum("thl,sl->ths", mla_absorb(q, w_uk), cached)
    torch.testing.assert_close(scores, torch.einsum("thn,shn->ths", q, k))
    attended = torch.einsum("ths,sl->thl", scores.softmax(-1), cached)
    expected = torch.einsum("ths,shv->thv", scores.softmax(-1), v)
    torch.testing.assert_close(mla_absorb(attended, w_uv), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 7, 63, 129])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_packed_queries_keep_their_rope_columns(is_fp8, tokens, backend, device):
    heads, nope, latent, rope = 2, 128, 256, 32
    q = randn(tokens, heads, nope + rope, device=device)
    w, scale, real = weights(heads, nope, latent, device=device), None, None
    if is_fp8:
        w, scale, real = quantized(w, "block")
    packed = torch.full((tokens, heads, latent + rope), math.nan, dtype=BF16, device=device)
    packed.view(torch.int16)[..., latent:] = 0x7FA5  # a NaN that no arithmetic makes
    before = q.clone()
    out = packed[..., :latent]
    assert absorb_or_skip(q[..., :nope], w, scale=scale, out=out, backend=backend) is out
    assert (packed.view(torch.int16)[..., latent:] == 0x7FA5).all()
    assert torch.equal(q, before)
    assert_right(out, q[..., :nope], w, real, scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_of_heads_lie_side_by_side(backend, device):
    attended = randn(5, 3, 96, device=device)
    w = weights(3, 96, 64, "columns", device=device)
    values = torch.full((9, 3, 64), 7.0, dtype=BF16, device=device)
    absorb_or_skip(attended, w, out=values[2:7], backend=backend)  # a step's tokens that decode
    assert (values[:2] == 7).all() and (values[7:] == 7).all()
    assert_right(values[2:7], attended, w)
    row = torch.cat([attended[1, head].float() @ w[head].float() for head in range(3)])
    torch.testing.assert_close(values.view(9, -1)[3].float(), row, rtol=2**-7, atol=0.02)


def spread(x, gaps, first=0):
    """The same numbers with gaps around them: ``gaps`` more of each dim, ``first`` before."""
    shape = [size + gap for size, gap in zip(x.shape, gaps, strict=True)]
    wide = torch.zeros(shape, dtype=torch.uint8, device=x.device).to(x.dtype)
    view = wide[tuple(slice(first, first + size) for size in x.shape)]
    view.view(torch.uint8).copy_(x.contiguous().view(torch.uint8))
    return view


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [7, 40])
@pytest.mark.parametrize("gaps", [(1, 2, 16), (1, 1, 3)], ids=["aligned", "odd"])
def test_strides_change_nothing(gaps, tokens, backend, device):
    x, w = randn(tokens, 3, 128, device=device), weights(3, 128, 80, device=device)
    x_by_heads = spread(x.transpose(0, 1), gaps, first=1).transpose(0, 1)
    w_by_columns = spread(w.mT, gaps, first=1).mT
    out = torch.full((3, tokens, 80 + gaps[2]), 7.0, dtype=BF16, device=device).transpose(0, 1)
    result = absorb_or_skip(x_by_heads, w_by_columns, out=out[..., 1:81], backend=backend)
    assert_right(result, x, w)
    assert (out[..., :1] == 7).all() and (out[..., 81:] == 7).all()
    every_other = weights(3, 256, 160, device=device)[:, ::2, ::2]  # contiguous along nothing
    assert_right(absorb_or_skip(x, every_other, backend=backend), x, every_other)
    shared = w[:1].expand(3, -1, -1)
    assert_right(absorb_or_skip(x, shared, backend=backend), x, shared)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("granularity", CELLS)
@pytest.mark.parametrize("shape", [(1, 2, 128, 512), (7, 1, 328, 256), (65, 1, 200, 128)], ids=str)
def test_fp8_weights_are_multiplied_by_what_x_is(shape, granularity, dtype, backend, device):
    tokens, heads, depth, columns = shape
    x = randn(tokens, heads, depth, dtype=dtype, device=device)
    sizes = torch.ldexp(torch.ones(heads, 1, columns), torch.randint(-3, 4, (heads, 1, columns)))
    w, scale, real = quantized((torch.randn(heads, depth, columns) * sizes).to(device), granularity)
    result = absorb_or_skip(x, w, scale=scale, backend=backend)
    assert_right(result, x, w, real, scale)
    rows = w.view(torch.uint8).contiguous().view(E4M3)  # contiguous along N
    assert_right(
        absorb_or_skip(x, rows, scale=scale.contiguous(), backend=backend), x, w, real, scale
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_scale_for_each_matrix(backend, device):
    x = randn(5, 3, 64, device=device)
    w, _, _ = quantized(weights(3, 64, 40, device=device), "tensor")
    scale = torch.tensor([0.5, 3.0, 1e-3], device=device)[:, None, None]
    result = absorb_or_skip(x, w, scale=scale, backend=backend)
    assert_right(result, x, w, w.double() * scale, scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_quantised_projection_is_split_with_its_blocks(backend, device):
    """DeepSeek-V3's ``kv_b_proj``, with its scales, each taken apart by ``absorb_weights``."""
    heads, latent = 2, 256
    weight = randn(heads * 256, latent, device=device)
    values, scale = quantize_fp8(weight, granularity="block", backend="reference")
    w_uk, w_uv = absorb_weights(values, num_heads=heads, nope_dim=128, v_dim=128)
    of_uk, of_uv = absorb_weights(scale, num_heads=heads, nope_dim=1, v_dim=1)
    real = values.double() * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    for x, w, of_w, part in zip(
        (randn(3, heads, 128, device=device), randn(3, heads, latent, device=device)),
        (w_uk, w_uv),
        (of_uk, of_uv),
        absorb_weights(real, num_heads=heads, nope_dim=128, v_dim=128),
        strict=True,
    ):
        assert_right(absorb_or_skip(x, w, scale=of_w, backend=backend), x, w, part, of_w)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 3, 5, 7), (3, 0, 5, 7), (3, 2, 0, 7), (3, 2, 5, 0)], ids=str)
def test_empty_dims(shape, backend, device):
    tokens, heads, depth, columns = shape
    x = torch.zeros(tokens, heads, depth, dtype=BF16, device=device)
    w = torch.zeros(heads, depth, columns, dtype=BF16, device=device)
    result = absorb_or_skip(x, w, backend=backend)
    assert result.shape == (tokens, heads, columns) and (result == 0).all()
    stored, scale = w.to(E4M3), torch.ones(1, device=device)
    assert (absorb_or_skip(x, stored, scale=scale, backend=backend) == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [6, 70])
@pytest.mark.parametrize("depth", [128, 100])
def test_nan_and_infinity_are_those_of_the_real_sum(depth, tokens, backend, device):
    x, w = randn(tokens, 3, depth, device=device), weights(3, depth, 40, device=device)
    x[0, 0, 3], x[1, 1, depth - 1], x[2, 2, 0], x[3, 0, 9] = math.nan, math.inf, -math.inf, math.inf
    w[0, 9, 4] = 0  # inf * 0 is NaN
    w[1, 5, 6], w[2, depth - 1, 39] = math.nan, math.inf
    result = absorb_or_skip(x, w, backend=backend)
    assert result.isnan().any() and result.isinf().any()
    assert result[5].isfinite().sum() == 3 * 40 - 2
    assert_right(result, x, w)
    stored, scale, _ = quantized(weights(3, depth, 40, device=device), "row")
    stored.view(torch.uint8)[1, 5, 6] = 0x7F  # NaN
    scale[2, 0, 8] = math.nan
    result = absorb_or_skip(x, stored, scale=scale, backend=backend)
    assert_right(result, x, stored, stored.double() * scale, scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_long_sums_of_numbers_with_a_mean_have_no_bias(tokens, backend, device):
    x = randn(tokens, 1, 4096, mean=1.0, dtype=FP32, device=device).bfloat16()
    w = weights(1, 4096, 32, "columns", mean=1.0, device=device)
    result = absorb_or_skip(x, w, backend=backend)
    exact = torch.einsum("thk,hkn->thn", x.double(), w.double())
    assert abs(((result.double() - exact) / exact).mean()) < 1e-3
    assert_right(result, x, w)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_fits_fp32_and_not_fp16_is_infinite_once(backend, device):
    x = torch.full((2, 1, 64), 100.0, dtype=FP16, device=device)
    w = torch.full((1, 64, 16), 100.0, dtype=FP16, device=device)
    w[:, 32:] = -100  # halves that would overflow, of a sum that does not
    assert (absorb_or_skip(x, w, backend=backend) == 0).all()
    assert absorb_or_skip(x, w.abs(), backend=backend).isposinf().all()


def test_far_apart_is_addressed_in_64_bits(device):
    num_words = 2**31 + 2**12
    if device == "cuda":
        far = torch.zeros(num_words, dtype=BF16, device=device)
    else:  # takes memory where it is written to
        far = torch.from_numpy(np.zeros(num_words, np.int16)).view(BF16)
    x, w = randn(5, 1, 129, device=device), weights(1, 129, 16, device=device)
    apart = 2**29  # fits 32 bits, four times it does not
    far_x = far.as_strided((5, 1, 129), (apart, 1, 1))
    out = far[1024:].as_strided((5, 1, 16), (apart, 1, 1))
    far_x.copy_(x)
    assert_right(mla_absorb(far_x, w, out=out, backend="triton"), x, w)
    heads = far.as_strided((5, 129, 16), (apart, 16, 1))
    heads.copy_(weights(5, 129, 16, device=device))
    x = randn(3, 5, 129, device=device)
    assert_right(mla_absorb(x, heads, backend="triton"), x, heads)


def test_another_number_of_tokens_compiles_nothing_new():
    """But for the tile, which has a few sizes: integers that vary are not specialised on."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvkern.kernels import mla_absorb as kernels
    from kvkern.kernels.device import Gpu

    def variant(num_tokens, heads, depth, columns, by_heads):
        shapes = (num_tokens, heads, depth + 64), (num_tokens, heads, columns + 64)
        if by_heads:  # whose strides grow with the tokens
            shapes = (heads, num_tokens, depth), (heads, num_tokens, columns)
        x, out = (torch.empty(shape, dtype=BF16, device="meta") for shape in shapes)
        if by_heads:
            x, out = x.transpose(0, 1), out.transpose(0, 1)
        w = torch.empty(heads, depth, columns, dtype=BF16, device="meta")
        _, arguments, options = kernels._call(
            x[..., :depth], w, None, (0, 0), out[..., :columns], Gpu(90, 132)
        )
        numbers = {
            name: value
            for name, value in arguments.items()
            if name not in kernels._OF_A_STEP and not isinstance(value, torch.Tensor)
        }
        return repr((numbers, options))

    for heads, depth, columns in ((128, 128, 512), (16, 512, 128)):
        for by_heads in (False, True):
            sizes = [*range(1, 300), 1023, 1024, 4096, 5000]
            met = {variant(size, heads, depth, columns, by_heads) for size in sizes}
            assert len(met) <= 5, met


def test_few_tokens_have_programs_enough_to_fill_the_card():
    pytest.importorskip("triton", reason="Triton is not installed")
    from kvkern.kernels.device import Gpu
    from kvkern.kernels.mla_absorb import Tiles, choose_tiles

    gpu = Gpu(90, 132)
    for tokens in (1, 16, 32, 64, 128):
        for heads, depth, columns in ((128, 128, 512), (128, 512, 128), (16, 128, 512)):
            tiles = choose_tiles(tokens, heads, depth, columns, 2, gpu)
            programs = -(-tokens // tiles.tokens) * heads * -(-columns // tiles.columns)
            assert programs >= 128
            if tokens <= 32:  # all of K is asked for before anything is multiplied
                assert tiles.depth * (tiles.num_stages - 1) >= depth
    assert choose_tiles(4096, 16, 128, 512, 2, gpu) == Tiles(128, 128, 64, 8, 3)
    assert choose_tiles(4096, 16, 128, 512, 2, gpu, is_aligned=False).tokens == 32


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 40, 200])
def test_calls_again_and_graph_replays_read_new_numbers(tokens, is_fp8, backend):
    def inputs():
        x, w = randn(tokens, 16, 192, device="cuda"), weights(16, 128, 256, device="cuda")
        return x, *(quantized(w, "block") if is_fp8 else (w, None, None))

    def call(x, w, scale, out=None):
        return absorb_or_skip(x[..., :128], w, scale=scale, out=out, backend=backend)

    sets = [inputs() for _ in range(3)]
    for x, w, scale, real in sets:
        assert_right(call(x, w, scale), x[..., :128], w, real, scale)
        packed = torch.full((tokens, 16, 320), 7.0, dtype=BF16, device="cuda")
        assert torch.equal(call(x, w, scale, packed[..., :256]), call(x, w, scale))
        assert (packed[..., 256:] == 7).all()
    mine, other = sets[:2]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(*mine[:3])
    for one, another in zip(mine[:3], other[:3], strict=True):
        if one is not None:
            one.copy_(another)
    graph.replay()
    assert torch.equal(result, call(*other[:3]))


X, W = torch.zeros(4, 3, 64, dtype=BF16), torch.zeros(3, 64, 200, dtype=BF16)
STORED, ONE = W.to(E4M3), torch.ones(1)
MISTAKES = {
    "rows without heads": (
        lambda: mla_absorb(X[:, 0], W),
        kvkern.ShapeMismatchError,
        r"x: want \[T=any, H=any, K=any\], got \[4, 64\]",
    ),
    "no tensor": (
        lambda: mla_absorb(X, None),
        kvkern.UnsupportedDtypeError,
        r"w: want a tensor, got NoneType",
    ),
    "x in fp8": (
        lambda: mla_absorb(X.to(E4M3), STORED, scale=ONE),
        kvkern.UnsupportedDtypeError,
        r"x: want bfloat16 or float16 or float32 or float64, got torch.float8_e4m3fn",
    ),
    "another number of heads": (
        lambda: mla_absorb(X[:, :2], W),
        kvkern.ShapeMismatchError,
        r"w: want \[H=2, K=64, N=any\], got \[3, 64, 200\]",
    ),
    "weights that are not transposed": (
        lambda: mla_absorb(X, W.mT),
        kvkern.ShapeMismatchError,
        r"w: want \[H=3, K=64, N=any\], got \[3, 200, 64\]",
    ),
    "weights in another dtype": (
        lambda: mla_absorb(X, W.half()),
        kvkern.UnsupportedDtypeError,
        r"w: want bfloat16 or float8_e4m3fn, got torch.float16",
    ),
    "x in columns": (
        lambda: mla_absorb(X.mT.contiguous().mT, W),
        kvkern.LayoutError,
        r"x: want a contiguous last dim, got strides \[192, 1, 3\]",
    ),
    "weights with zeros left out": (
        lambda: mla_absorb(X, W.to_sparse()),
        kvkern.LayoutError,
        r"w: want strided, got torch.sparse_coo",
    ),
    "fp8 without a scale": (
        lambda: mla_absorb(X, STORED),
        kvkern.ArgumentError,
        r"scale: want a tensor for w in torch.float8_e4m3fn",
    ),
    "a scale of bf16": (
        lambda: mla_absorb(X, W, scale=ONE),
        kvkern.ArgumentError,
        r"scale: want None for w in torch.bfloat16",
    ),
    "scales in bf16": (
        lambda: mla_absorb(X, STORED, scale=ONE.bfloat16()),
        kvkern.UnsupportedDtypeError,
        r"scale: want float32, got torch.bfloat16",
    ),
    "scales that are not transposed": (
        lambda: mla_absorb(X, STORED, scale=torch.ones(3, 200, 1)),
        kvkern.ShapeMismatchError,
        r"scale: want \[1\] or \[3, 1, 1\] or \[3, 1, 200\] or \[3, 1, 2\], got \[3, 200, 1\]",
    ),
    "an output of other columns": (
        lambda: mla_absorb(X, W, out=X),
        kvkern.ShapeMismatchError,
        r"out: want \[T=4, H=3, N=200\], got \[4, 3, 64\]",
    ),
    "an output in another dtype": (
        lambda: mla_absorb(X, W, out=torch.zeros(4, 3, 200)),
        kvkern.UnsupportedDtypeError,
        r"out: want bfloat16, got torch.float32",
    ),
    "an output in columns": (
        lambda: mla_absorb(X, W, out=torch.zeros(4, 200, 3, dtype=BF16).mT),
        kvkern.LayoutError,
        r"out: want a contiguous last dim, got strides \[600, 1, 3\]",
    ),
    "an output of one head for all": (
        lambda: mla_absorb(X, W, out=torch.zeros(4, 1, 200, dtype=BF16).expand(-1, 3, -1)),
        kvkern.LayoutError,
        r"out: want each element at a place of its own, got strides \[200, 0, 1\]",
    ),
    "fp64 by a kernel": (
        lambda: mla_absorb(X.double(), W.double(), backend="triton"),
        UnsupportedError,
        r"fp64 is for the reference",
    ),
}


@pytest.mark.parametrize("call, error, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_say_what_to_change(call, error, message):
    with pytest.raises(error, match=message):
        call()
