"""Nothing is compiled while serving: what a warm-up has met is all that any step needs."""

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

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

E4M3, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
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
    assert warm_up_sizes(300) == [1, 2, 4, 8, 16, 32, 64, 128, 160, 192, 224, 256, 300]
    assert [len(warm_up_sizes(most)) for most in (128, 2048, 8192)] == [8, 28, 76]
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


def multiply(run, num_columns, depth, kind, is_exact, has_bias, num_tokens, out_dtype=BF16):
    groups, blocks = -(-depth // 128), -(-num_columns // 128)
    one = empty(1).expand(1, 1, 1)
    scales = {
        "tensor": (one, one, (0, 0), (0, 0)),
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
    out = empty(1, num_tokens, num_columns, dtype=out_dtype)
    run(a, b, *scales[kind], None, bias, is_exact, out)


def multiply_many(run, num_matrices, is_grouped, num_tokens):
    """Rows shared out among experts, or for each of some matrices."""
    lead = 1 if is_grouped else num_matrices
    a, out = (
        empty(lead, num_tokens, size, dtype=dtype) for size, dtype in ((7168, E4M3), (4096, BF16))
    )
    b = empty(num_matrices, 4096, 7168, dtype=E4M3).mT
    scales = empty(lead, num_tokens, 56), empty(num_matrices, 32, 56).mT
    row_offsets = empty(num_matrices + 1, dtype=torch.int32) if is_grouped else None
    run(a, b, *scales, (1, 128), (128, 128), row_offsets, None, True, out)


def multiply_weight_only(kernels, bits, num_columns, depth, num_tokens, dtype=BF16, out_dtype=BF16):
    codes = chunk_columns(bits)
    stored = torch.int8 if bits == 8 else torch.uint8
    values = empty(-(-depth // codes), num_columns, codes * bits // 8, dtype=stored)
    x = empty(num_tokens, depth, dtype=dtype)
    out = empty(num_tokens, num_columns, dtype=out_dtype)
    group_size = 128 if bits == 4 else depth
    scale = empty(-(-depth // group_size), num_columns)
    if kernels is matmul_w8a8:
        matmul_w8a8.matmul_w8a8(x, values, scale, None, None, out)
    else:
        kernels.matmul_weight_only(x, values, scale, None, None, group_size, out)


def absorb(kernels, num_heads, num_tokens, dtype=BF16, cell=None):
    """Into the packed query, and out of latent space; by fp8 weights if there is a cell."""
    x, packed, values = (
        empty(num_tokens, num_heads, columns, dtype=dtype) for columns in (192, 576, 128)
    )
    for from_x, shape, out in (
        (x[..., :128], (128, 512), packed[..., :512]),
        (packed[..., :512], (512, 128), values),
    ):
        w, scale = empty(num_heads, *shape, dtype=dtype if cell is None else E4M3), None
        if cell is not None:
            cells = (size // step if step else 1 for size, step in zip(shape, cell, strict=True))
            scale = empty(num_heads, *cells)
        kernels.mla_absorb(from_x, w, scale, cell or (0, 0), out)


def quantize(granularity, column_major, num_tokens, dtype=BF16):
    x, gamma = empty(num_tokens, 7168, dtype=dtype), empty(7168, dtype=dtype)
    values = empty(num_tokens, 7168, dtype=E4M3)
    cells = {"tensor": (1, 1), "row": (num_tokens, 1), "group": (num_tokens, 56)}
    scale = empty(*cells[granularity])
    if column_major:
        scale = torch.empty_strided(scale.shape, (1, -(-num_tokens // 4) * 4), device="meta")
    for is_static in (False, True):
        style = (values, scale, granularity, is_static, False)
        quantize_fp8.quantize_fp8(x, *style)
        rms_norm_quant_fp8.rms_norm_quant_fp8(x, gamma, x, *style, 1e-6)
        silu_and_mul_quant_fp8.silu_and_mul_quant_fp8(empty(num_tokens, 14336, dtype=dtype), *style)
    quantize_fp8.dequantize_fp8(values, scale, granularity, x)


def step_of(lengths, num_tokens):
    """A cache in fp8 and requests that share ``num_tokens`` new ones; ``lengths`` are cached."""
    num_requests = len(lengths)
    cuts = [number * num_tokens // num_requests for number in range(num_requests + 1)]
    cache = PagedKVCache(CacheFormat("fp8"), num_layers=1, num_pages=1, page_size=1024)
    num_pages = -(-(max(lengths) + -(-num_tokens // num_requests)) // 1024)
    return cache.layer(0), PagedBatch(cuts, lengths, [[0] * num_pages] * num_requests)


def write(num_heads, num_tokens, dtype=BF16):
    pages, batch = step_of([5], num_tokens)
    kv = empty(num_tokens, 2112, dtype=dtype)[:, 1536:]
    q = empty(num_tokens, num_heads, 192, dtype=dtype)
    query = empty(num_tokens, num_heads, 576, dtype=dtype)
    rotated = (q[..., 128:], query[..., 512:])
    gamma, freqs = empty(512, dtype=dtype), empty(4096, 64)
    style = {"eps": 1e-6, "interleaved": True, "round_hf": False, "sanitize": False}
    write_kv.write_kv(
        pages, batch, kv, freqs, gamma, *rotated, *[None] * 5, kv, None, None, None, **style
    )


def prefill(num_heads, num_tokens, dtype=BF16):
    """A prompt from its beginning, after one chunk of context, after more."""
    q = empty(num_tokens, num_heads, 192, dtype=dtype)
    keys_values = empty(num_tokens, num_heads, 256, dtype=dtype)
    kv = empty(num_tokens, 576, dtype=dtype)
    w_uk = empty(num_heads, 128, 512, dtype=dtype)
    out, lse = empty(num_tokens, num_heads, 128, dtype=dtype), empty(num_tokens, num_heads)
    for cached in (0, 50, 150):
        pages, batch = step_of([cached], num_tokens)
        mla_prefill.mla_prefill(
            q, keys_values[..., :128], kv[:, 512:], keys_values[..., 128:], pages, batch, 0.1,
            w_uk, w_uk.mT, 100, out, lse,
        )  # fmt: skip


def decode(num_heads, num_tokens, dtype=BF16):
    """A new token of each request, of short contexts and of one that is split."""
    q = empty(num_tokens, num_heads, 576, dtype=dtype)
    out, lse = empty(num_tokens, num_heads, 512, dtype=dtype), empty(num_tokens, num_heads)
    for longest in (7, 20_000):
        pages, batch = step_of([longest] + [7] * (num_tokens - 1), num_tokens)
        mla_decode.mla_decode(q, pages, batch, 0.1, None, False, False, out, lse)


def decode_on_hopper(num_heads, num_tokens, dtype=BF16):
    q = empty(num_tokens, num_heads, 576, dtype=dtype)
    out, lse = empty(num_tokens, num_heads, 512, dtype=dtype), empty(num_tokens, num_heads)
    pages, batch = step_of([7] * num_tokens, num_tokens)
    work = hopper_mla_decode.choose_work(num_heads, 1, pages.format, H100)
    kernel = hopper_mla_decode._kernel_for(work, pages.format, False)
    of_pieces = decode_call.piece_dtype(pages.format)
    schedule = make_schedule(batch, num_heads, 1, 512, work, of_pieces)
    fill_schedule(schedule, batch, num_heads)
    decode_call.launch_decode(kernel, q, None, pages, batch, 0.1, out, lse, schedule)
    merge_cuts(schedule, batch, out, lse, pages.layer_scales)


KINDS = (
    ("tensor", False, False), ("tensor", True, True), ("row", False, True), ("row", True, False),
    ("block", True, False),
)  # fmt: skip
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
    f"{backend} {n} x {k}, {kind} to {out_dtype}": partial(
        multiply, kernels.scaled_mm, n, k, kind, True, False, out_dtype=out_dtype
    )
    for backend, kernels in (("triton", scaled_mm), ("hopper", hopper_scaled_mm))
    for n, k in ((2112, 7168), (32768, 512), (512, 1536))
    for kind in ("row", "block")
    for out_dtype in (FP16, FP32)
}
PRODUCTS |= {
    "triton, 8 experts": partial(multiply_many, scaled_mm.scaled_mm, 8, True),
    "triton, 160 experts": partial(multiply_many, scaled_mm.scaled_mm, 160, True),
    "triton, 16 matrices": partial(multiply_many, scaled_mm.scaled_mm, 16, False),
    "hopper, 8 experts": partial(multiply_many, hopper_scaled_mm.scaled_mm, 8, True),
    "hopper, 160 experts": partial(multiply_many, hopper_scaled_mm.scaled_mm, 160, True),
    "hopper, 16 matrices": partial(multiply_many, hopper_scaled_mm.scaled_mm, 16, False),
}
WEIGHT_ONLY = (
    ("w8a16", matmul_weight_only, 8), ("w4a16", matmul_weight_only, 4),
    ("w8a8", matmul_w8a8, 8),
    ("w8a16 on Hopper", hopper_weight_only, 8), ("w4a16 on Hopper", hopper_weight_only, 4),
)  # fmt: skip
PRODUCTS |= {
    f"{name} {n} x {k}": partial(multiply_weight_only, kernels, bits, n, k)
    for name, kernels, bits in WEIGHT_ONLY
    for n, k in (*LAYERS, (10240, 8192), (5120, 5120))
}
PRODUCTS |= {
    f"{name} 2112 x 7168, {dtype} to {out_dtype}": partial(
        multiply_weight_only, kernels, bits, 2112, 7168, dtype=dtype, out_dtype=out_dtype
    )
    for name, kernels, bits in WEIGHT_ONLY
    for dtype, out_dtype in ((BF16, FP32), (FP16, FP16), (FP16, FP32))
}
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
PRODUCTS |= {
    f"quantize {granularity}, {dtype}": partial(quantize, granularity, False, dtype=dtype)
    for granularity in ("tensor", "row", "group")
    for dtype in (FP16, FP32)
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
OF_REQUESTS |= {
    f"{name} 16 heads, {dtype}": partial(run, 16, dtype=dtype)
    for name, run, dtypes in (
        ("write_kv", write, (FP16, FP32)),
        ("mla_absorb", partial(absorb, mla_absorb), (FP16, FP32)),
        ("mla_prefill", prefill, (FP16, FP32)),
        ("mla_decode", decode, (FP16, FP32)),
        ("mla_decode on Hopper", decode_on_hopper, (FP16,)),
        ("mla_absorb on Hopper", partial(absorb, hopper_mla_absorb), (FP16,)),
    )
    for dtype in dtypes
}
OF_REQUESTS |= {
    f"{name} {num_heads} heads, fp8 by {cell}": partial(absorb, kernels, num_heads, cell=cell)
    for name, kernels in (("mla_absorb", mla_absorb), ("mla_absorb on Hopper", hopper_mla_absorb))
    for num_heads in (16, 128)
    for cell in ((0, 0), (0, 1), (128, 128), (128, 1))
}


def variants(run, sizes):
    with launches_on(H100) as met:
        for size in sizes:
            run(size)
    return met


def missed(run, numbers, most=MOST):
    """What a server of at most so many tokens compiles while it serves."""
    numbers = [number for number in numbers if number <= most]
    return variants(run, numbers) - variants(run, warm_up_sizes(most))


@pytest.mark.parametrize("most", [256, MOST])
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_number_of_tokens_finds_what_the_warm_up_compiled(name, most):
    assert not missed(PRODUCTS[name], EVERY, most)


@pytest.mark.parametrize("most", [256, MOST])
@pytest.mark.parametrize("name", OF_REQUESTS)
def test_every_number_of_requests_finds_what_the_warm_up_compiled(name, most):
    assert not missed(OF_REQUESTS[name], SOME, most)


def test_variant_that_the_warm_up_did_not_meet_is_found(monkeypatch):
    """Tiles that are chosen for the number itself, not for its class."""
    monkeypatch.setattr(scaled_mm, "size_class", lambda num_tokens: num_tokens)
    run = PRODUCTS["triton 512 x 1536, row, exact"]
    found = missed(run, EVERY)
    assert len(found) == 1 and found.pop()[0] == "_scaled_mm_kernel"


# ---- on the card, by Triton's own word


@pytest.fixture
def compiled(monkeypatch):
    """Kernels, by module and name, as Triton begins to compile or to load them; none at first."""
    for module in [module for name, module in sys.modules.items() if name.startswith("kvkern.")]:
        for value in list(vars(module).values()):
            if isinstance(value, triton.runtime.jit.JITFunction):
                value.device_caches.clear()
        if hasattr(module, "_KNOWN"):
            module._KNOWN.clear()
    names = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_cache_hook",
        lambda *, fn, **_: names.append(f"{fn.module}.{fn.name}"),
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


def products_of_experts():
    b = kvkern.quantize_fp8(randn(8, 1024, 2048), granularity="block")

    def run(num_tokens):
        a = kvkern.quantize_fp8(randn(num_tokens, 2048), granularity="group")
        ends = torch.arange(9, dtype=torch.int32) * num_tokens // 8
        kvkern.scaled_mm(
            a.values, b.values.mT, a.scale, b.scale.mT, row_offsets=ends.to(a.values.device)
        )

    return run


def products_side_by_side():
    b = kvkern.quantize_fp8(randn(16, 512, 1024), granularity="row")

    def run(num_tokens):
        a = kvkern.quantize_fp8(randn(16, num_tokens, 1024), granularity="row")
        kvkern.scaled_mm(a.values, b.values.mT, a.scale, b.scale.mT)

    return run


def product_w8a8():
    weight = kvkern.quantize_int8(randn(2112, 7168))
    return lambda num_tokens: kvkern.matmul_w8a8(randn(num_tokens, 7168), weight)


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


class Step(NamedTuple):
    make: Callable[[], Callable[[int], object]]
    modules: tuple[str, ...]  # whose kernels it needs; without "hopper." on other cards


ON_CARD = {
    "FP8Linear by blocks": Step(
        lambda: layer(kvkern.nn.FP8Linear.from_linear), ("hopper.scaled_mm",)
    ),
    "FP8Linear by rows": Step(
        lambda: layer(partial(kvkern.nn.FP8Linear.from_linear, scaling="row")),
        ("hopper.scaled_mm",),
    ),
    "W8A16Linear": Step(
        lambda: layer(kvkern.nn.W8A16Linear.from_linear), ("hopper.matmul_weight_only",)
    ),
    "W4A16Linear": Step(
        lambda: layer(kvkern.nn.W4A16Linear.from_linear), ("hopper.matmul_weight_only",)
    ),
    "matmul_w8a8": Step(product_w8a8, ("matmul_w8a8",)),
    "scaled_mm, fast": Step(lambda: product("auto", "row", "fast"), ("hopper.scaled_mm",)),
    "scaled_mm by Triton": Step(lambda: product("triton", "block", "exact"), ("scaled_mm",)),
    "scaled_mm, grouped": Step(products_of_experts, ("hopper.scaled_mm",)),
    "scaled_mm, batched": Step(products_side_by_side, ("hopper.scaled_mm",)),
    "fused": Step(
        fused, ("rms_norm_quant_fp8", "silu_and_mul_quant_fp8", "quantize_fp8", "hopper.scaled_mm")
    ),
    "attention": Step(
        lambda: attention(16, "auto"),
        ("write_kv", "hopper.mla_absorb", "hopper.mla_decode", "mla_prefill"),
    ),
    "attention by Triton": Step(
        lambda: attention(8, "triton"), ("write_kv", "mla_absorb", "mla_decode", "mla_prefill")
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_CARD)
def test_no_kernel_is_compiled_after_the_warm_up(name, compiled):
    step = ON_CARD[name]
    run = step.make()
    for num_tokens in warm_up_sizes(MOST_ON_CARD):
        run(num_tokens)
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    for module in step.modules:  # or the hook is not called, or not for Gluon's
        wanted = f"kvkern.kernels.{module if is_hopper else module.removeprefix('hopper.')}"
        assert any(kernel.startswith(wanted) for kernel in compiled), (wanted, compiled)
    compiled.clear()
    for num_tokens in OTHERS:
        run(num_tokens)
    assert not compiled
