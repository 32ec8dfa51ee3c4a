"""mla_decode: absorbed attention over pages. Every test runs the public op."""

import importlib

import numpy as np
import pytest
import torch

import kvkern
from kvkern import CacheFormat, PagedBatch, mla_decode
from kvkern.layout import FORMAT_NAMES
from kvkern.testing.budget import assert_within_budget, decode_by_e4m3_weights
from kvkern.testing.inputs import POISON, make_paged_case, rope_freqs

BACKENDS = ["triton", "reference"]
SCALE = 0.07

# (format, q dtype, L, R, heads, page size): every format and q dtype, each odd dim once, head
# counts on both sides of the 16 rows that tl.dot wants
CASES = [
    ("bf16", torch.bfloat16, 256, 32, 5, 16),
    ("fp16", torch.float16, 128, 64, 16, 3),
    ("fp32", torch.float32, 128, 32, 20, 64),
    ("fp8", torch.bfloat16, 512, 64, 4, 16),
    ("fp8", torch.float16, 128, 0, 17, 1),
    ("fp8_token", torch.bfloat16, 384, 48, 5, 3),
    ("fp8_token", torch.float16, 128, 64, 17, 16),
    ("fp8_ds_mla", torch.bfloat16, 384, 48, 3, 7),
    ("nvfp4", torch.bfloat16, 384, 48, 5, 7),
    ("nvfp4", torch.float16, 512, 64, 16, 64),
    ("nvfp4", torch.float32, 128, 0, 3, 16),
]
# one decode, one speculative, one empty request, one with nothing cached, one on a block's edge
LENGTHS = ([37, 16, 9, 0, 31], [1, 3, 0, 2, 1])


def make(fmt, dtype, num_heads, device, lengths=LENGTHS, num_padding=2, **options):
    case = make_paged_case(fmt, *lengths, device=device, **options)
    num_tokens = case.batch.num_tokens + num_padding
    q = torch.randn(num_tokens, num_heads, fmt.row_dim).to(device=device, dtype=dtype)
    return case, q


def exact_and_rounded(q, view):
    exact = mla_decode(q.double(), view, softmax_scale=SCALE, backend="reference")
    return exact, mla_decode(q, view, softmax_scale=SCALE, backend="reference")


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize(("name", "dtype", "latent", "rope", "heads", "page_size"), CASES)
def test_matches_fp64(name, dtype, latent, rope, heads, page_size, num_splits, device):
    fmt = CacheFormat(name, latent, rope)
    case, q = make(fmt, dtype, heads, device, page_size=page_size)
    exact, rounded = exact_and_rounded(q, case.view)
    result = mla_decode(q, case.view, softmax_scale=SCALE, num_splits=num_splits, backend="triton")
    # in fp32 the card's exp2, good to 2 ulp, shows: in each weight and in each rescaling
    ulps = 4 if dtype == torch.float32 else 1
    assert_within_budget(result.out, exact.out, rounded.out, ulps=ulps)
    assert_within_budget(result.lse, exact.lse, rounded.lse, eps_of=dtype)


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_values_with_a_mean_are_not_biased(name, device):
    # truncating accumulators show only where terms do not cancel
    case, q = make(CacheFormat(name, 128, 32), torch.bfloat16, 4, device, ([700], [1]), 0, mean=1.0)
    exact, rounded = exact_and_rounded(q, case.view)
    result = mla_decode(q, case.view, softmax_scale=SCALE, backend="triton")
    assert_within_budget(result.out, exact.out, rounded.out)
    bias = (result.out.double() - exact.out).mean() / exact.out.abs().mean()
    assert abs(bias) < 1e-3


@pytest.mark.parametrize("page_size", [3, 32])  # blocks of several pages, and within one
@pytest.mark.parametrize("name", ["bf16", "fp8_token"])
def test_scores_that_warpgroups_share_match_fp64(name, page_size, device, monkeypatch):
    """Only on sm_90 and with 64 rows; here with any, so that the interpreter takes the branches."""
    kernels = importlib.import_module("kvkern.kernels.mla_decode")
    choose = kernels.choose_tiles
    monkeypatch.setattr(
        kernels, "choose_tiles", lambda *args: choose(*args)._replace(share_scores=True)
    )
    case, q = make(CacheFormat(name, 128, 32), torch.bfloat16, 16, device, page_size=page_size)
    batch = case.batch
    table = batch.page_table.tolist()
    table[0][0] = -1  # a block that all see, but for one page
    starts, lengths = batch.input_row_offsets.tolist(), batch.cache_lengths.tolist()
    holed = PagedBatch(starts, lengths, table, device=device)
    for view in (case.view, case.cache.view(0, holed)):
        exact, rounded = exact_and_rounded(q, view)
        result = mla_decode(q, view, softmax_scale=SCALE, backend="triton")
        assert_within_budget(result.out, exact.out, rounded.out)
        assert_within_budget(result.lse, exact.lse, rounded.lse, eps_of=q.dtype)


@pytest.mark.parametrize("max_split_len", [32, 64])
def test_a_loose_bound_of_the_longest_request_changes_no_bit(max_split_len, device, monkeypatch):
    """Its further splits stay empty, and what they do not write is not read."""
    kernels = importlib.import_module("kvkern.kernels.mla_decode")
    monkeypatch.setattr(kernels, "_LONG", max_split_len)
    lengths = ([150, 40, 0, 20, 3], [1, 3, 0, 2, 1])
    case, q = make(CacheFormat("bf16", 128, 32), torch.bfloat16, 16, device, lengths, 0)
    exact, rounded = exact_and_rounded(q, case.view)
    expected = mla_decode(q, case.view, softmax_scale=SCALE, backend="triton")
    assert_within_budget(expected.out, exact.out, rounded.out)
    assert_within_budget(expected.lse, exact.lse, rounded.lse, eps_of=q.dtype)
    case.batch.max_seq_len = 1000
    loose = mla_decode(q, case.view, softmax_scale=SCALE, backend="triton")
    assert torch.equal(loose.out, expected.out) and torch.equal(loose.lse, expected.lse)


def test_reference_equals_plain_unabsorbed_attention():
    """A second formulation: expand every cached row, then softmax over whole sequences."""
    fmt, num_heads, nope_dim, v_dim = CacheFormat("fp32", 128, 32), 3, 24, 20
    case = make_paged_case(fmt, [5, 0], [2, 3])
    w_uk, w_uv = kvkern.absorb_weights(
        torch.randn(num_heads * (nope_dim + v_dim), 128).double(),
        num_heads=num_heads,
        nope_dim=nope_dim,
        v_dim=v_dim,
    )
    q_nope, q_rope = torch.randn(5, num_heads, nope_dim + 32).double().split([nope_dim, 32], -1)
    absorbed = torch.cat([torch.einsum("thn,hnl->thl", q_nope, w_uk), q_rope], -1)
    result = mla_decode(absorbed, case.view, softmax_scale=0.1, backend="reference")
    for request, (start, stop) in enumerate([(0, 2), (2, 5)]):
        latent, rope = case.rows[request].split([128, 32], -1)
        keys = torch.einsum("sl,hnl->hsn", latent, w_uk)
        values = torch.einsum("sl,hlv->hsv", latent, w_uv)
        q = torch.cat([q_nope, q_rope], -1)[start:stop].transpose(0, 1)
        keys = torch.cat([keys, rope.expand(num_heads, -1, -1)], -1)
        num_new, num_keys = stop - start, len(latent)
        causal = torch.ones(num_new, num_keys, dtype=torch.bool).tril(num_keys - num_new)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=causal, scale=0.1
        )
        heads_out = torch.einsum("thl,hlv->htv", result.out[start:stop], w_uv)
        torch.testing.assert_close(heads_out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["bf16", "fp8_token", "fp8_ds_mla", "nvfp4"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])
def test_bits_do_not_depend_on_page_size_or_page_order(name, page_size, device):
    case, q = make(CacheFormat(name, 128, 32), torch.bfloat16, 4, device, page_size=32)
    expected = mla_decode(q, case.view, softmax_scale=SCALE, backend="triton")
    other = case.repaged(page_size)
    result = mla_decode(q, other.view, softmax_scale=SCALE, backend="triton")
    assert torch.equal(result.out, expected.out) and torch.equal(result.lse, expected.lse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_nothing_outside_a_request_is_read(name, backend, device):
    """The cache is poisoned with NaN wherever nothing was written: tails, spare pages."""
    case, q = make(CacheFormat(name, 128, 32), torch.bfloat16, 4, device, page_size=64)
    poisoned = mla_decode(q, case.view, softmax_scale=SCALE, backend=backend)
    assert (case.cache.buffer == POISON).float().mean() > 0.5
    assert poisoned.out.isfinite().all() and not poisoned.lse.isnan().any()
    case.fill_unwritten(0)
    clean = mla_decode(q, case.view, softmax_scale=SCALE, backend=backend)
    assert torch.equal(clean.out, poisoned.out) and torch.equal(clean.lse, poisoned.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_tokens_give_zero_and_minus_inf(backend, device):
    case, q = make(CacheFormat("bf16", 128, 32), torch.bfloat16, 4, device, num_padding=3)
    q[-3:] = torch.nan
    result = mla_decode(q, case.view, softmax_scale=SCALE, backend=backend)
    assert (result.out[-3:] == 0).all() and (result.lse[-3:] == -torch.inf).all()
    assert result.out.isfinite().all() and result.lse[:-3].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_whose_pages_are_minus_one_see_nothing(backend, device):
    """A graph's padding rows: length 0 and no pages, or a length and no pages."""
    case, q = make(CacheFormat("bf16", 128, 32), torch.bfloat16, 4, device, ([20, 5], [1, 2]), 0)
    expected = mla_decode(q, case.view, softmax_scale=SCALE, backend=backend)
    table = case.batch.page_table.tolist()
    blank = [-1] * len(table[0])
    batch = PagedBatch([0, 1, 2, 4, 5], [20, 0, 5, 9], [table[0], blank, table[1], blank])
    padded = q[[0, 0, 1, 2, 0]]
    view = case.cache.view(0, PagedBatch(*_host(batch), device=device))
    result = mla_decode(padded, view, softmax_scale=SCALE, backend=backend)
    assert (result.out[[1, 4]] == 0).all() and (result.lse[[1, 4]] == -torch.inf).all()
    assert_same_rows(result, [0, 2, 3], expected, [0, 1, 2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_on_a_page_of_minus_one_are_absent(backend, device):
    """Equal to a sequence that never had them, as attention itself knows no positions."""
    fmt = CacheFormat("fp32", 128, 0)
    case, q = make(fmt, torch.float32, 4, device, ([15], [1]), 0, page_size=4)
    table = case.batch.page_table.tolist()[0]
    with_hole = PagedBatch([0, 1], [15], [[table[0], -1, table[2], table[3]]], device=device)
    without = PagedBatch([0, 1], [11], [[table[0], table[2], table[3]]], device=device)
    results = [
        mla_decode(q, case.cache.view(0, b), softmax_scale=SCALE, backend=backend)
        for b in (with_hole, without)
    ]
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_queries_than_keys_is_impossible_and_the_mask_is_bottom_right(backend, device):
    """Each new token of a request sees what it would have seen alone."""
    fmt = CacheFormat("fp32", 128, 32)
    case, q = make(fmt, torch.float32, 4, device, ([6], [5]), 0, page_size=4)
    together = mla_decode(q, case.view, softmax_scale=SCALE, backend=backend)
    table = case.batch.page_table.tolist()
    for token in range(5):
        alone = case.cache.view(0, PagedBatch([0, 1], [6 + token], table, device=device))
        result = mla_decode(q[token : token + 1], alone, softmax_scale=SCALE, backend=backend)
        torch.testing.assert_close(result.out[0], together.out[token])
        torch.testing.assert_close(result.lse[0], together.lse[token])


def test_a_request_does_not_depend_on_its_neighbours(device):
    """Bit for bit at the same number of splits, which is what the batch size changes."""
    fmt = CacheFormat("bf16", 128, 32)
    case, q = make(fmt, torch.bfloat16, 4, device, ([40, 90, 3], [1, 1, 1]), 0)
    together = mla_decode(q, case.view, softmax_scale=SCALE, num_splits=2, backend="triton")
    _, lengths, table = _host(case.batch)
    for request in range(3):
        alone = PagedBatch([0, 1], [lengths[request]], [table[request]], device=device)
        result = mla_decode(
            q[request : request + 1],
            case.cache.view(0, alone),
            softmax_scale=SCALE,
            num_splits=2,
            backend="triton",
        )
        assert_same_rows(result, [0], together, [request])


@pytest.fixture
def exact_products(monkeypatch):
    """In the interpreter: BLAS sums a row in an order that depends on how many rows there are."""
    matmul = np.matmul

    def multiply(a, b, dtype):
        return matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    monkeypatch.setattr(np, "matmul", multiply)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("split_len", [64, 2048])
@pytest.mark.parametrize("name", ["bf16", "fp8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_invariant_bits_are_those_of_each_token_alone(
    backend, name, split_len, device, monkeypatch
):
    kernels = importlib.import_module("kvkern.kernels.mla_decode")
    monkeypatch.setattr(kernels, "_FIXED_SPLIT_LEN", split_len)
    options = {"softmax_scale": SCALE, "backend": backend, "deterministic": "batch_invariant"}
    lengths = ([200, 0, 63, 130], [1, 3, 1, 4])
    case, q = make(CacheFormat(name, 128, 32), torch.bfloat16, 5, device, lengths, page_size=16)
    together = mla_decode(q, case.view, **options)
    exact, rounded = exact_and_rounded(q, case.view)
    assert_within_budget(together.out, exact.out, rounded.out)
    offsets, cached, table = _host(case.batch)
    for request in range(4):
        for token in range(offsets[request], offsets[request + 1]):
            before = cached[request] + token - offsets[request]
            alone = PagedBatch([0, 1], [before], [table[request]], device=device)
            result = mla_decode(q[token : token + 1], case.cache.view(0, alone), **options)
            assert_same_rows(result, [0], together, [token])


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_nan_in_one_request_harms_only_that_request(name, device):
    fmt = CacheFormat(name, 128, 32)
    case, q = make(fmt, torch.bfloat16, 4, device, ([20, 20], [1, 1]), 0)
    expected = mla_decode(q, case.view, softmax_scale=SCALE, backend="triton")
    first_page = case.batch.page_table[0, 0]
    case.cache.storage[0, first_page, 3] = POISON
    result = mla_decode(q, case.view, softmax_scale=SCALE, backend="triton")
    assert result.out[0].isnan().all() and result.lse[0].isnan().all()
    assert_same_rows(result, [1], expected, [1])


def test_repeated_runs_give_the_same_bits(device):
    case, q = make(CacheFormat("fp8", 128, 32), torch.bfloat16, 4, device)
    runs = [mla_decode(q, case.view, softmax_scale=SCALE, backend="triton") for _ in range(3)]
    for run in runs[1:]:
        assert torch.equal(run.out, runs[0].out) and torch.equal(run.lse, runs[0].lse)


@pytest.mark.parametrize("scale", [0.01, 0.5, 4.0])
@pytest.mark.parametrize("name, allowed", [("fp8", 0.08), ("nvfp4", 0.15)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_output_does_not_depend_on_the_layers_scales(scale, name, allowed, backend, device):
    """Powers-of-two aside, only rounding may differ: a scale dropped anywhere is far off."""
    fmt, kv = CacheFormat(name, 128, 32), torch.randn(12, 160).to(device)
    freqs, gamma = rope_freqs(12, 32, device=device), torch.ones(128, device=device)
    q = torch.randn(1, 2, 160).to(device)
    table, results = [[0, 1, 2]], []
    for latent_scale, rope_scale in [(scale, 1.0), (1.0, scale), (1.0, 1.0)]:
        cache = kvkern.PagedKVCache(
            fmt, num_layers=1, num_pages=3, page_size=4, device=device,
            latent_scale=latent_scale, rope_scale=rope_scale,
        )  # fmt: skip
        kvkern.write_kv(
            cache.view(0, PagedBatch([0, 12], [0], table, device=device)), kv, freqs, gamma
        )
        view = cache.view(0, PagedBatch([0, 1], [11], table, device=device))
        results.append(mla_decode(q, view, softmax_scale=0.05, backend=backend).out)
    for result in results[:2]:
        assert (result - results[2]).norm() < allowed * results[2].norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_queries_and_given_out(backend, device):
    case, q = make(CacheFormat("bf16", 128, 32), torch.bfloat16, 4, device)
    expected = mla_decode(q, case.view, softmax_scale=SCALE, backend=backend)
    wide = torch.full((len(q), 6, 200), torch.nan, dtype=q.dtype, device=device)
    wide[:, 1:5, :160] = q
    out = torch.empty_like(expected.out)
    result = mla_decode(
        wide[:, 1:5, :160], case.view, softmax_scale=SCALE, out=out, backend=backend
    )
    assert result.out is out
    assert torch.equal(out, expected.out) and torch.equal(result.lse, expected.lse)


@pytest.mark.parametrize("num_heads", [1, 5, 17])
def test_nothing_but_the_given_out_is_written(num_heads, device):
    """Heads and tokens that tiles round up to stay in the tile."""
    case, q = make(CacheFormat("bf16", 128, 32), torch.bfloat16, num_heads, device)
    buffer = torch.full((len(q) + 2, num_heads, 128), 7.0, dtype=q.dtype, device=device)
    mla_decode(q, case.view, softmax_scale=SCALE, out=buffer[1:-1], backend="triton")
    assert (buffer[0] == 7).all() and (buffer[-1] == 7).all()
    assert not (buffer[1:-1] == 7).all(-1).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_padding", [0, 3])
def test_empty_batches_are_fine(backend, num_padding, device):
    cache = kvkern.PagedKVCache(
        CacheFormat("bf16", 128, 32), num_layers=1, num_pages=1, page_size=4, device=device
    )
    q = torch.randn(num_padding, 4, 160, dtype=torch.bfloat16, device=device)
    view = cache.view(0, PagedBatch([0], [], [], device=device))
    result = mla_decode(q, view, softmax_scale=SCALE, backend=backend)
    assert result.out.shape == (num_padding, 4, 128) and (result.out == 0).all()
    assert (result.lse == -torch.inf).all()


def spoiled(**changes):
    return lambda arguments: arguments | {k: f(arguments) for k, f in changes.items()}


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            spoiled(q=lambda a: a["q"][..., :-1]),
            kvkern.ShapeMismatchError,
            r"q: want \[T=any, H=any, K=160\], got \[8, 4, 159\]",
        ),
        (
            spoiled(q=lambda a: a["q"].int()),
            kvkern.UnsupportedDtypeError,
            r"q: want bfloat16 or float16 or float32 or float64 or float8_e4m3fn, got torch.int32",
        ),
        (
            spoiled(q=lambda a: a["q"].mT.contiguous().mT),
            kvkern.LayoutError,
            r"q: want a contiguous last dim, got strides \[640, 1, 4\]",
        ),
        (
            spoiled(q=lambda a: a["q"].to_sparse()),
            kvkern.LayoutError,
            r"q: want strided, got torch.sparse_coo",
        ),
        (
            spoiled(q=lambda a: a["q"].to("meta")),
            kvkern.DeviceError,
            r"q: want device (cpu|cuda:0), got meta",
        ),
        (
            spoiled(q=lambda a: a["q"][:6]),
            kvkern.ArgumentError,
            r"q: want at least 7 tokens, got 6",
        ),
        (
            spoiled(
                out=lambda a: torch.empty(8, 3, 128, dtype=torch.bfloat16, device=a["q"].device)
            ),
            kvkern.ShapeMismatchError,
            r"out: want \[T=8, H=4, L=128\], got \[8, 3, 128\]",
        ),
        (
            spoiled(out=lambda a: a["q"][:1, :, :128].expand(8, -1, -1)),
            kvkern.LayoutError,
            r"out: want contiguous, got strides \[0, 160, 1\]",
        ),
        (
            spoiled(softmax_scale=lambda a: float("nan")),
            kvkern.ArgumentError,
            r"softmax_scale: want finite and > 0, got nan",
        ),
        (spoiled(num_splits=lambda a: 0), kvkern.ArgumentError, r"num_splits: want >= 1, got 0"),
        (
            spoiled(backend=lambda a: "fast"),
            kvkern.ArgumentError,
            r"backend: want one of auto, hopper, triton, .*; got 'fast'",
        ),
        (
            spoiled(deterministic=lambda a: "always"),
            kvkern.ArgumentError,
            "deterministic: want run_to_run or batch_invariant, got 'always'",
        ),
        (
            spoiled(deterministic=lambda a: "batch_invariant", num_splits=lambda a: 2),
            kvkern.ArgumentError,
            "num_splits: want None with batch_invariant, got 2",
        ),
        (
            spoiled(q=lambda a: a["q"].to(torch.float8_e4m3fn)),
            kvkern.ArgumentError,
            r"q_scale: want it with e4m3 q and no other, got q in torch.float8_e4m3fn",
        ),
        (
            spoiled(q_scale=lambda a: torch.ones(1, device=a["q"].device)),
            kvkern.ArgumentError,
            r"q_scale: want it with e4m3 q and no other, got q in torch.bfloat16",
        ),
        (
            spoiled(
                q=lambda a: a["q"].to(torch.float8_e4m3fn),
                q_scale=lambda a: torch.ones(2, device=a["q"].device),
            ),
            kvkern.ShapeMismatchError,
            r"q_scale: want \[1=1\], got \[2\]",
        ),
        (
            spoiled(q=lambda a: a["q"].double(), backend=lambda a: "triton"),
            kvkern.UnsupportedError,
            r"mla_decode: backend 'triton' refuses: fp64 is for the reference",
        ),
    ],
)
def test_refused_argument_is_named_with_wanted_and_got(spoil, error, message, device):
    case, q = make(CacheFormat("bf16", 128, 32), torch.bfloat16, 4, device, num_padding=1)
    arguments = spoil({"q": q, "softmax_scale": SCALE})
    q = arguments.pop("q")
    with pytest.raises(error, match=message):
        mla_decode(q, case.view, **arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fast_sums_change_nothing_where_no_kernel_has_any(backend, device):
    case, q = make(CacheFormat("fp8", 128, 32), torch.bfloat16, 4, device)
    options = {"softmax_scale": SCALE, "backend": backend}
    fast, exact = (mla_decode(q, case.view, use_fast_accum=x, **options) for x in (True, False))
    assert torch.equal(fast.out, exact.out) and torch.equal(fast.lse, exact.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_e4m3_query_is_its_scale_times_what_is_stored(backend, device):
    """Dequantised to bf16, which holds it, and rounded there if the scale is no power of two."""
    case, q = make(CacheFormat("fp8", 128, 32), torch.bfloat16, 4, device, num_padding=1)
    stored, q_scale = (2 * q).to(torch.float8_e4m3fn), torch.tensor([0.4], device=device)
    result = mla_decode(stored, case.view, q_scale=q_scale, softmax_scale=SCALE, backend=backend)
    assert result.out.dtype == torch.bfloat16
    real = (stored.float() * q_scale).bfloat16()
    expected = mla_decode(real, case.view, softmax_scale=SCALE, backend=backend)
    assert torch.equal(result.out, expected.out) and torch.equal(result.lse, expected.lse)
    out = torch.empty_like(result.out)
    mla_decode(stored, case.view, q_scale=q_scale, softmax_scale=SCALE, out=out, backend=backend)
    assert torch.equal(out, expected.out)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "fp8_token", "fp8_ds_mla", "nvfp4"])
def test_captured_graph_replays_right_after_lengths_and_pages_change(name, device):
    fmt, num_heads = CacheFormat(name, 512, 64), 16
    case = make_paged_case(fmt, [4000, 37, 900, 0], [1, 2, 1, 3], device=device)
    static = PagedBatch.static(
        max_requests=6, max_tokens=12, max_pages=600, max_query_len=4, max_seq_len=8192,
        device=device,
    )  # fmt: skip
    view = case.cache.view(0, static)
    q = torch.randn(12, num_heads, fmt.row_dim, dtype=torch.bfloat16, device=device)
    out = torch.empty(12, num_heads, 512, dtype=torch.bfloat16, device=device)

    def run():
        return mla_decode(q, view, softmax_scale=SCALE, out=out)

    static.refill([0, 1], [15], case.batch.page_table[:1, :1].cpu())
    run()  # compile
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            result = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    offsets, lengths, table = _host(case.batch)
    for order in ([0, 1, 2, 3], [3, 1], [2], []):
        picked = [offsets[i + 1] - offsets[i] for i in order]
        new_offsets = torch.tensor([0, *picked]).cumsum(0)
        rows = [table[i] for i in order]
        static.refill(new_offsets, [lengths[i] for i in order], rows)
        out.fill_(torch.nan)
        graph.replay()
        eager = PagedBatch(new_offsets, [lengths[i] for i in order], rows, device=device)
        exact, rounded = exact_and_rounded(q, case.cache.view(0, eager))
        assert_within_budget(result.out, exact.out, rounded.out)
        assert_within_budget(result.lse, exact.lse, rounded.lse, eps_of=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8_token", "nvfp4"])
def test_pages_past_2_31_bytes_are_read_right(name, device):
    """The last pages of a pool of 6 million tokens: an int32 slot offset would wrap."""
    fmt, num_pages = CacheFormat(name), 100_000
    case, q = make(fmt, torch.bfloat16, 16, device, ([300], [1]), 0, page_size=64)
    expected = mla_decode(q, case.view, softmax_scale=SCALE)
    scales = case.cache.host_scales[0]
    pool = kvkern.PagedKVCache(
        fmt, num_layers=1, num_pages=num_pages, page_size=64, device=device,
        latent_scale=scales[0], rope_scale=scales[1],
    )  # fmt: skip
    assert pool.num_bytes > 2**31
    targets = [num_pages - 1 - i for i in range(case.batch.page_table.shape[1])]
    kvkern.copy_pages(case.cache, pool, case.batch.page_table[0].tolist(), targets)
    view = pool.view(0, PagedBatch([0, 1], [300], [targets], device=device))
    result = mla_decode(q, view, softmax_scale=SCALE)
    assert torch.equal(result.out, expected.out) and torch.equal(result.lse, expected.lse)


@pytest.mark.gpu
def test_two_streams_at_once_do_not_disturb_each_other(device):
    """Workspaces belong to the call: nothing is shared between launches in flight."""
    cases = [
        make(CacheFormat("bf16"), torch.bfloat16, 16, device, ([3000 + n], [1]), 0) for n in (0, 9)
    ]
    expected = [mla_decode(q, c.view, softmax_scale=SCALE, num_splits=8) for c, q in cases]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for (case, q), stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(mla_decode(q, case.view, softmax_scale=SCALE, num_splits=8))
    torch.cuda.synchronize()
    for index, result in enumerate(results):
        assert torch.equal(result.out, expected[index % 2].out)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("num_heads", [16, 128])
def test_every_format_at_full_dims(num_heads, name, device):
    """In the tiles that serve; the first request is long enough to be split."""
    lengths = ([3000, 64, 3], [1, 2, 1])
    case, q = make(CacheFormat(name), torch.bfloat16, num_heads, device, lengths)
    exact, rounded = exact_and_rounded(q, case.view)
    rounded_out = rounded.out
    if name == "fp8" and num_heads == 128 and torch.cuda.get_device_capability() == (9, 0):
        rounded_out = decode_by_e4m3_weights(q, case.view, softmax_scale=SCALE)
    result = mla_decode(q, case.view, softmax_scale=SCALE)
    assert_within_budget(result.out, exact.out, rounded_out)
    assert_within_budget(result.lse, exact.lse, rounded.lse, eps_of=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [4, 6, 8, 12, 16, 20, 24, 48, 96, 128])
def test_any_head_count_at_full_dims(num_heads, device):
    case, q = make(
        CacheFormat("bf16"), torch.bfloat16, num_heads, device, ([1000, 64, 3], [1, 2, 1])
    )
    exact, rounded = exact_and_rounded(q, case.view)
    result = mla_decode(q, case.view, softmax_scale=SCALE)
    assert_within_budget(result.out, exact.out, rounded.out)
    assert_within_budget(result.lse, exact.lse, rounded.lse, eps_of=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_portable_kernel_at_full_dims_gives_one_result_for_every_page_size(name, device):
    """In tiles of 64 rows, which nothing small has; ``auto`` may take another kernel for them."""
    lengths = ([3000, 64, 3], [1, 2, 1])
    case, q = make(CacheFormat(name), torch.bfloat16, 128, device, lengths, page_size=64)
    exact, rounded = exact_and_rounded(q, case.view)
    expected = mla_decode(q, case.view, softmax_scale=SCALE, backend="triton")
    assert_within_budget(expected.out, exact.out, rounded.out)
    assert_within_budget(expected.lse, exact.lse, rounded.lse, eps_of=torch.bfloat16)
    for page_size in (1, 16, 128):
        other = case.repaged(page_size).view
        result = mla_decode(q, other, softmax_scale=SCALE, backend="triton")
        assert torch.equal(result.out, expected.out) and torch.equal(result.lse, expected.lse)


def _host(batch):
    tensors = (batch.input_row_offsets, batch.cache_lengths, batch.page_table)
    return [tensor.tolist() for tensor in tensors]


def assert_same_rows(result, rows, expected, expected_rows):
    assert torch.equal(result.out[rows], expected.out[expected_rows])
    assert torch.equal(result.lse[rows], expected.lse[expected_rows])
