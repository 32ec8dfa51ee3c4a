"""Nothing is compiled while serving: what a warm-up has met is all that any step needs."""

import sys
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton

import kvkern
import kvkern.nn
from kvkern import ArgumentError, CacheFormat, PagedBatch, PagedKVCache, warm_up_sizes
from kvkern.kernels import (
    matmul_w8a8,
    matmul_weight_only,
    mla_absorb,
    mla_decode,
    mla_prefill,
    quantize_fp8,
    rms_norm_quant_fp8,
    scaled_mm,
    silu_and_mul_quant_fp8,
    write_kv,
)
from kvkern.kernels.device import Gpu
from kvkern.kernels.hopper import decode_call
from kvkern.kernels.hopper import matmul_weight_only as hopper_weight_only
from kvkern.kernels.hopper import mla_absorb as hopper_mla_absorb
from kvkern.kernels.hopper import mla_decode as hopper_mla_decode
from kvkern.kernels.hopper import scaled_mm as hopper_scaled_mm
from kvkern.kernels.packed_ints import chunk_columns
from kvkern.kernels.schedule import fill_schedule, make_schedule, merge_cuts
from kvkern.warm_up import size_class
from tests.kernels.variants import launches_on

E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
H100 = Gpu(90, 132)
MOST = 8192
SIZES = warm_up_sizes(MOST)
# each up to where tiles are many, then some of every remainder; and where classes begin and end
EVERY = sorted(
    {*range(1, 1100), *range(1100, MOST, 31), *SIZES, *(size + 1 for size in SIZES[:-1])}
)
SOME = sorted({*range(1, 150), *range(150, MOST, 997), *(size + 1 for size in SIZES[:-1])})
LAYERS = (  # N, K: DeepSeek-V3's
    (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048),
)  # fmt: skip


def test_sizes_are_classes_up_to_the_most_tokens():
    assert warm_up_sizes(1) == [1] and warm_up_sizes(5) == [1, 2, 4, 5]
    assert warm_up_sizes(300) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert [len(warm_up_sizes(most)) for most in (128, 2048, 8192)] == [8, 23, 71]
    with pytest.raises(ArgumentError, match="max_tokens: want >= 1, got 0"):
        warm_up_sizes(0)


@pytest.mark.parametrize("most", [1, 7, 128, 129, 1000, MOST])
def test_every_number_of_tokens_is_in_the_class_of_a_size(most):
    met = {size_class(size) for size in warm_up_sizes(most)}
    assert all(size_class(num_tokens) in met for num_tokens in range(1, most + 1))
    assert all(n <= size_class(n) < max(2 * n, 2) for n in range(1, most + 1))


# ---- variants, by what each launch is specialised on; no GPU needed


def empty(*shape, dtype=FP32):
    return torch.empty(shape, dtype=dtype, device="meta")


def multiply(run, num_columns, depth, kind, is_exact, has_bias, num_tokens):
    groups, blocks = -(-depth // 128), -(-num_columns // 128)
    scales = {
        "row": (empty(1, num_tokens, 1), empty(1, 1, num_columns), (1, 0), (0, 1)),
        "block": (
            empty(1, num_tokens, groups), empty(1, blocks, groups).mT, (1, 128), (128, 128),
        ),
        "column-major block": (
            empty(1, groups, -(-num_tokens // 4) * 4).mT[:, :num_tokens],
            empty(1, blocks, groups).mT, (1, 128), (128, 128),
        ),
    }  # fmt: skip
    a, b = empty(1, num_tokens, depth, dtype=E4M3), empty(1, num_columns, depth, dtype=E4M3).mT
    bias = empty(1, num_columns, dtype=BF16) if has_bias else None
    out = empty(1, num_tokens, num_columns, dtype=BF16)
    run(a, b, *scales[kind], None, bias, is_exact, out)


def multiply_many(num_matrices, is_grouped, num_tokens):
    """Rows shared out among experts, or for each of some matrices."""
    lead = 1 if is_grouped else num_matrices
    a, out = (
        empty(lead, num_tokens, size, dtype=dtype) for size, dtype in ((7168, E4M3), (4096, BF16))
    )
    b = empty(num_matrices, 4096, 7168, dtype=E4M3).mT
    scales = empty(lead, num_tokens, 56), empty(num_matrices, 32, 56).mT
    row_offsets = empty(num_matrices + 1, dtype=torch.int32) if is_grouped else None
    scaled_mm.scaled_mm(a, b, *scales, (1, 128), (128, 128), row_offsets, None, True, out)


def multiply_weight_only(kernels, bits, num_columns, depth, num_tokens):
    if kernels is hopper_weight_only and bits == 8 and num_tokens <= 16:
        return  # refused
    codes = chunk_columns(bits)
    dtype = torch.int8 if bits == 8 else torch.uint8
    values = empty(-(-depth // codes), num_columns, codes * bits // 8, dtype=dtype)
    x, out = empty(num_tokens, depth, dtype=BF16), empty(num_tokens, num_columns, dtype=BF16)
    group_size = 128 if bits == 4 else depth
    scale = empty(-(-depth // group_size), num_columns)
    if kernels is matmul_w8a8:
        matmul_w8a8.matmul_w8a8(x, values, scale, None, None, out)
    else:
        kernels.matmul_weight_only(x, values, scale, None, None, group_size, out)


def absorb(kernels, num_heads, num_tokens):
    """Into the packed query, and out of latent space."""
    x, packed, values = (
        empty(num_tokens, num_heads, columns, dtype=BF16) for columns in (192, 576, 128)
    )
    w_uk, w_uv = (empty(num_heads, *shape, dtype=BF16) for shape in ((128, 512), (512, 128)))
    kernels.mla_absorb(x[..., :128], w_uk, None, (0, 0), packed[..., :512])
    kernels.mla_absorb(packed[..., :512], w_uv, None, (0, 0), values)


def quantize(granularity, column_major, num_tokens):
    x, gamma = empty(num_tokens, 7168, dtype=BF16), empty(7168, dtype=BF16)
    values = empty(num_tokens, 7168, dtype=E4M3)
    cells = {"tensor": (1, 1), "row": (num_tokens, 1), "group": (num_tokens, 56)}
    scale = empty(*cells[granularity])
    if column_major:
        scale = torch.empty_strided(scale.shape, (1, -(-num_tokens // 4) * 4), device="meta")
    for is_static in (False, True):
        style = (values, scale, granularity, is_static, False)
        quantize_fp8.quantize_fp8(x, *style)
        rms_norm_quant_fp8.rms_norm_quant_fp8(x, gamma, x, *style, 1e-6)
        silu_and_mul_quant_fp8.silu_and_mul_quant_fp8(empty(num_tokens, 14336, dtype=BF16), *style)
    quantize_fp8.dequantize_fp8(values, scale, granularity, x)


def step_of(lengths, num_tokens):
    """A cache in fp8 and requests that share ``num_tokens`` new ones; ``lengths`` are cached."""
    num_requests = len(lengths)
    cuts = [number * num_tokens // num_requests for number in range(num_requests + 1)]
    cache = PagedKVCache(CacheFormat("fp8"), num_layers=1, num_pages=1, page_size=1024)
    num_pages = -(-(max(lengths) + -(-num_tokens // num_requests)) // 1024)
    return cache.layer(0), PagedBatch(cuts, lengths, [[0] * num_pages] * num_requests)


def write(num_heads, num_tokens):
    pages, batch = step_of([5], num_tokens)
    kv = empty(num_tokens, 2112, dtype=BF16)[:, 1536:]
    q = empty(num_tokens, num_heads, 192, dtype=BF16)
    query = empty(num_tokens, num_heads, 576, dtype=BF16)
    rotated = (q[..., 128:], query[..., 512:])
    gamma, freqs = empty(512, dtype=BF16), empty(4096, 64)
    style = {"eps": 1e-6, "interleaved": True, "round_hf": False, "sanitize": False}
    write_kv.write_kv(
        pages, batch, kv, freqs, gamma, *rotated, *[None] * 5, kv, None, None, None, **style
    )


def prefill(num_heads, num_tokens):
    """A prompt from its beginning, after one chunk of context, after more."""
    q = empty(num_tokens, num_heads, 192, dtype=BF16)
    keys_values = empty(num_tokens, num_heads, 256, dtype=BF16)
    kv = empty(num_tokens, 576, dtype=BF16)
    w_uk = empty(num_heads, 128, 512, dtype=BF16)
    out, lse = empty(num_tokens, num_heads, 128, dtype=BF16), empty(num_tokens, num_heads)
    for cached in (0, 50, 150):
        pages, batch = step_of([cached], num_tokens)
        mla_prefill.mla_prefill(
            q, keys_values[..., :128], kv[:, 512:], keys_values[..., 128:], pages, batch, 0.1,
            w_uk, w_uk.mT, 100, out, lse,
        )  # fmt: skip


def decode(num_heads, num_tokens):
    """A new token of each request, of short contexts and of one that is split."""
    q = empty(num_tokens, num_heads, 576, dtype=BF16)
    out, lse = empty(num_tokens, num_heads, 512, dtype=BF16), empty(num_tokens, num_heads)
    for longest in (7, 20_000):
        pages, batch = step_of([longest] + [7] * (num_tokens - 1), num_tokens)
        mla_decode.mla_decode(q, pages, batch, 0.1, None, False, False, out, lse)


def decode_on_hopper(num_heads, num_tokens):
    q = empty(num_tokens, num_heads, 576, dtype=BF16)
    out, lse = empty(num_tokens, num_heads, 512, dtype=BF16), empty(num_tokens, num_heads)
    pages, batch = step_of([7] * num_tokens, num_tokens)
    work = hopper_mla_decode.choose_work(num_heads, 1, pages.format, H100)
    kernel = hopper_mla_decode._kernel_for(work, pages.format, False)
    dtype = decode_call.piece_dtype(pages.format)
    schedule = make_schedule(batch, num_heads, 1, 512, work, dtype)
    fill_schedule(schedule, batch, num_heads)
    decode_call.launch_decode(kernel, q, None, pages, batch, 0.1, out, lse, schedule)
    merge_cuts(schedule, batch, out, lse, pages.layer_scales)


KINDS = (("row", False, True), ("row", True, False), ("block", True, False))
PRODUCTS = {
    f"{backend} {n} x {k}, {kind}, {'exact' if exact else 'fast'}": partial(
        multiply, kernels.scaled_mm, n, k, kind, exact, has_bias
    )
    for backend, kernels in (("triton", scaled_mm), ("hopper", hopper_scaled_mm))
    for n, k in (*LAYERS, (512, 1536))  # the last: cut along K up to 96 tokens, not from there on
    for kind, exact, has_bias in KINDS
}
PRODUCTS |= {
    f"hopper {n} x {k}, column-major blocks": partial(
        multiply, hopper_scaled_mm.scaled_mm, n, k, "column-major block", True, False
    )
    for n, k in LAYERS
}
PRODUCTS |= {
    "triton, 8 experts": partial(multiply_many, 8, True),
    "triton, 160 experts": partial(multiply_many, 160, True),
    "triton, 16 matrices": partial(multiply_many, 16, False),
}
PRODUCTS |= {
    f"{name} {n} x {k}": partial(multiply_weight_only, kernels, bits, n, k)
    for name, kernels, bits in (
        ("w8a16", matmul_weight_only, 8), ("w4a16", matmul_weight_only, 4),
        ("w8a8", matmul_w8a8, 8),
        ("w8a16 on Hopper", hopper_weight_only, 8), ("w4a16 on Hopper", hopper_weight_only, 4),
    )
    for n, k in LAYERS
}  # fmt: skip
PRODUCTS |= {
    f"quantize {granularity}{', column-major' * column_major}": partial(
        quantize, granularity, column_major
    )
    for granularity, column_major in (
        ("tensor", False),
        ("row", False),
        ("group", False),
        ("group", True),
    )
}
OF_REQUESTS = {
    f"{name} {num_heads} heads": partial(run, num_heads)
    for name, run in {
        "write_kv": write, "mla_absorb": partial(absorb, mla_absorb), "mla_prefill": prefill,
        "mla_decode": decode, "mla_decode on Hopper": decode_on_hopper,
        "mla_absorb on Hopper": partial(absorb, hopper_mla_absorb),
    }.items()
    for num_heads in (1, 8, 16, 128)
}  # fmt: skip


def variants(run, sizes):
    with launches_on(H100) as met:
        for size in sizes:
            run(size)
    return met


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_number_of_tokens_finds_what_the_warm_up_compiled(name):
    assert variants(PRODUCTS[name], EVERY) <= variants(PRODUCTS[name], SIZES)


@pytest.mark.parametrize("name", OF_REQUESTS)
def test_every_number_of_requests_finds_what_the_warm_up_compiled(name):
    assert variants(OF_REQUESTS[name], SOME) <= variants(OF_REQUESTS[name], SIZES)


def test_variant_that_the_warm_up_did_not_meet_is_found(monkeypatch):
    """Tiles that are chosen for the number itself, not for its class."""
    monkeypatch.setattr(scaled_mm, "size_class", lambda num_tokens: num_tokens)
    run = PRODUCTS["triton 512 x 1536, row, exact"]
    missed = variants(run, EVERY) - variants(run, SIZES)
    assert len(missed) == 1 and missed.pop()[0] == "_scaled_mm_kernel"


# ---- on the card, by Triton's own word


@pytest.fixture
def compiled(monkeypatch):
    """Names of kernels as Triton begins to compile or to load them; it has none at first."""
    for module in [module for name, module in sys.modules.items() if name.startswith("kvkern.")]:
        for value in list(vars(module).values()):
            if isinstance(value, triton.runtime.jit.JITFunction):
                value.device_caches.clear()
        if hasattr(module, "_KNOWN"):
            module._KNOWN.clear()
    names = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda *, fn, **_: names.append(fn.name)
    )
    return names


MOST_ON_CARD = 640
OTHERS = (3, 5, 12, 17, 31, 33, 63, 65, 100, 127, 129, 200, 257, 300, 385, 511, 513, 600, 639)


def randn(*shape, dtype=BF16):
    return torch.randn(shape, dtype=dtype, device="cuda")


def layer(make, num_columns=2112, depth=7168):
    """A linear layer of kvkern, as a step calls it."""
    linear = make(torch.nn.Linear(depth, num_columns, bias=False, device="cuda", dtype=BF16))
    return lambda num_tokens: linear(randn(num_tokens, depth))


def product(backend, scaling, accumulation):
    granularities = {"row": ("row", "row"), "block": ("group", "block")}[scaling]
    b = kvkern.quantize_fp8(randn(2112, 7168), granularity=granularities[1])

    def run(num_tokens):
        a = kvkern.quantize_fp8(randn(num_tokens, 7168), granularity=granularities[0])
        kvkern.scaled_mm(
            a.values, b.values.T, a.scale, b.scale.T, accumulation=accumulation, backend=backend
        )

    return run


def fused():
    gamma, weight = randn(7168), randn(256, 7168)

    def run(num_tokens):
        x = randn(num_tokens, 7168)
        for granularity in ("row", "group"):
            kvkern.rms_norm_quant_fp8(x, gamma, residual=x.clone(), granularity=granularity)
            kvkern.silu_and_mul_quant_fp8(x, granularity=granularity)
        groups = {"granularity": "group", "column_major_scales": True}
        kvkern.rms_norm_quant_fp8(x, gamma, **groups)
        kvkern.dequantize_fp8(*kvkern.silu_and_mul_quant_fp8(x, **groups))
        kvkern.fp8_gemm(x, weight.T)

    return run


def attention(num_heads, backend):
    """A decoding step of as many requests, and a prompt of as many tokens, after a context too."""
    fmt = CacheFormat("bf16")
    cache = PagedKVCache(fmt, num_layers=1, num_pages=700, page_size=64, device="cuda")
    freqs, gamma = randn(4096, 64, dtype=FP32), randn(512)
    w_uk, w_uv = randn(num_heads, 128, 512), randn(num_heads, 512, 128)

    def run(num_tokens):
        kv, q = randn(num_tokens, 576), randn(num_tokens, num_heads, 192)
        packed = torch.empty(num_tokens, num_heads, 576, dtype=BF16, device="cuda")
        for longest in (7, 3000):
            tables = [list(range(50)), *([page] for page in range(50, 49 + num_tokens))]
            tables = [table + [-1] * (50 - len(table)) for table in tables]
            lengths = [longest, *[7] * (num_tokens - 1)]
            batch = PagedBatch(range(num_tokens + 1), lengths, tables, device="cuda")
            view = cache.view(0, batch)
            rotated = {"q_rope": q[..., 128:], "q_rope_out": packed[..., 512:]}
            kvkern.write_kv(view, kv, freqs, gamma, **rotated)
            kvkern.mla_absorb(q[..., :128], w_uk, out=packed[..., :512])
            out = kvkern.mla_decode(packed, view, softmax_scale=0.1, backend=backend).out
            kvkern.mla_absorb(out, w_uv)
        for cached in (0, 50, 150):
            batch = PagedBatch([0, num_tokens], [cached], [list(range(50))], device="cuda")
            kvkern.mla_prefill(
                q, q[..., :128], kv[:, 512:], q[..., 64:], cache.view(0, batch),
                softmax_scale=0.1, w_uk=w_uk, w_uv=w_uv, context_chunk=100,
            )  # fmt: skip

    return run


ON_CARD = {
    "FP8Linear by blocks": lambda: layer(kvkern.nn.FP8Linear.from_linear),
    "FP8Linear by rows": lambda: layer(partial(kvkern.nn.FP8Linear.from_linear, scaling="row")),
    "W8A16Linear": lambda: layer(kvkern.nn.W8A16Linear.from_linear),
    "W4A16Linear": lambda: layer(kvkern.nn.W4A16Linear.from_linear),
    "scaled_mm, fast": lambda: product("auto", "row", "fast"),
    "scaled_mm by Triton": lambda: product("triton", "block", "exact"),
    "fused": fused,
    "attention": lambda: attention(16, "auto"),
    "attention by Triton": lambda: attention(8, "triton"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_CARD)
def test_no_kernel_is_compiled_after_the_warm_up(name, compiled):
    run = ON_CARD[name]()
    for num_tokens in warm_up_sizes(MOST_ON_CARD):
        run(num_tokens)
    assert compiled  # or the hook is not called
    compiled.clear()
    for num_tokens in OTHERS:
        run(num_tokens)
    assert not compiled
