"""mla_prefill: ragged causal attention of new tokens, and cached context in chunks."""

import pytest
import torch

import kvkern
from kvkern import CacheFormat, PagedBatch, mla_prefill
from kvkern.layout import FORMAT_NAMES
from kvkern.testing.budget import assert_within_budget
from kvkern.testing.inputs import POISON, make_paged_case

BACKENDS = ["triton", "reference"]
SCALE = 0.07

# (format, dtype, L, R, nope, v, heads): each format; the head dims of every model family, which
# HOPPER-class cards run unpadded, and one between powers of two
CASES = [
    ("bf16", torch.bfloat16, 256, 32, 64, 64, 3),
    ("fp16", torch.float16, 128, 64, 128, 128, 2),
    ("fp32", torch.float32, 128, 32, 96, 80, 2),
    ("fp8", torch.bfloat16, 128, 0, 256, 64, 2),
    ("fp8_token", torch.bfloat16, 384, 48, 64, 64, 2),
    ("fp8_ds_mla", torch.bfloat16, 128, 64, 192, 256, 1),
    ("nvfp4", torch.float16, 128, 32, 64, 128, 2),
]
# context and new tokens across blocks of 32, an empty request, no context, one new token
LENGTHS = ([45, 7, 0, 20], [40, 0, 9, 1])


def make(fmt, dtype, nope_dim, v_dim, num_heads, device, lengths=LENGTHS, num_padding=2, **options):
    """A case and the op's arguments. New tokens' keys need not be those in the cache."""
    case = make_paged_case(fmt, *lengths, device=device, **options)
    num_tokens = case.batch.num_tokens + num_padding

    def random(*shape):
        return torch.randn(*shape).to(device=device, dtype=dtype)

    rope_dim = fmt.rope_dim
    weight = random(num_heads * (nope_dim + v_dim), fmt.kv_lora_rank) * 0.1
    w_uk, w_uv = kvkern.absorb_weights(weight, num_heads=num_heads, nope_dim=nope_dim, v_dim=v_dim)
    return case, {
        "q": random(num_tokens, num_heads, nope_dim + rope_dim),
        "k_nope": random(num_tokens, num_heads, nope_dim),
        "k_rope": random(num_tokens, rope_dim) if rope_dim else None,
        "v": random(num_tokens, num_heads, v_dim),
        "w_uk": w_uk,
        "w_uv": w_uv,
    }


def run(arguments, view, **options):
    return mla_prefill(cache=view, softmax_scale=SCALE, **arguments, **options)


def exact_and_rounded(arguments, view):
    double = {k: None if x is None else x.double() for k, x in arguments.items()}
    exact = run(double, view, backend="reference")
    return exact, run(arguments, view, backend="reference")


@pytest.mark.parametrize("context_chunk", [8192, 40])
@pytest.mark.parametrize(("name", "dtype", "latent", "rope", "nope", "v", "heads"), CASES)
def test_matches_fp64(name, dtype, latent, rope, nope, v, heads, context_chunk, device):
    fmt = CacheFormat(name, latent, rope)
    case, arguments = make(fmt, dtype, nope, v, heads, device)
    exact, rounded = exact_and_rounded(arguments, case.view)
    result = run(arguments, case.view, context_chunk=context_chunk, backend="triton")
    # the context's keys and values pass through the dtype on their way out of the projection
    assert_within_budget(result.out, exact.out, rounded.out)
    assert_within_budget(result.lse, exact.lse, rounded.lse, eps_of=dtype)


def test_reference_equals_the_absorbed_form():
    """A second formulation: the new tokens' rows are in the cache, so mla_decode sees the same."""
    fmt, num_heads, nope_dim, v_dim = CacheFormat("fp32", 128, 32), 3, 24, 20
    case, arguments = make(fmt, torch.float64, nope_dim, v_dim, num_heads, "cpu", num_padding=0)
    new_rows = [rows[n:] for rows, n in zip(case.rows, LENGTHS[0], strict=True)]
    latent, rope = torch.cat(new_rows).split([128, 32], -1)
    arguments["k_nope"] = torch.einsum("tl,hnl->thn", latent, arguments["w_uk"])
    arguments["v"] = torch.einsum("tl,hlv->thv", latent, arguments["w_uv"])
    arguments["k_rope"] = rope
    q_nope, q_rope = arguments["q"].split([nope_dim, 32], -1)
    absorbed = torch.cat([torch.einsum("thn,hnl->thl", q_nope, arguments["w_uk"]), q_rope], -1)
    decoded = kvkern.mla_decode(absorbed, case.view, softmax_scale=SCALE, backend="reference")
    result = run(arguments, case.view, backend="reference")
    expected = torch.einsum("thl,hlv->thv", decoded.out, arguments["w_uv"])
    torch.testing.assert_close(result.out, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(result.lse, decoded.lse)


def test_every_chunk_of_a_long_context_counts(device):
    """Chunks of one token a request still reach every key: nothing is dropped past a buffer."""
    fmt = CacheFormat("fp32", 128, 32)
    case, arguments = make(fmt, torch.float32, 64, 64, 1, device, ([9, 3], [2, 1]), 0)
    whole = run(arguments, case.view, backend="triton")
    for context_chunk in (1, 4, 7):
        chunked = run(arguments, case.view, context_chunk=context_chunk, backend="triton")
        torch.testing.assert_close(chunked, whole)


@pytest.mark.parametrize(
    ("name", "page_size"),
    [*(("fp8", size) for size in (1, 3, 16, 64, 128)), ("fp8_token", 3), ("nvfp4", 3)],
)
def test_bits_do_not_depend_on_page_size_or_page_order(name, page_size, device):
    fmt = CacheFormat(name, 128, 32)
    case, arguments = make(fmt, torch.bfloat16, 64, 64, 2, device, page_size=32)
    expected = run(arguments, case.view, backend="triton")
    result = run(arguments, case.repaged(page_size).view, backend="triton")
    assert torch.equal(result.out, expected.out) and torch.equal(result.lse, expected.lse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_neither_poisoned_pages_nor_new_tokens_in_the_cache_are_read(name, backend, device):
    fmt = CacheFormat(name, 128, 32)
    case, arguments = make(fmt, torch.bfloat16, 64, 64, 2, device)
    expected = run(arguments, case.view, backend=backend)
    assert expected.out.isfinite().all()
    offsets, lengths, table = _host(case.batch)
    for request, length in enumerate(lengths):
        for position in range(length, length + offsets[request + 1] - offsets[request]):
            page = table[request][position // case.cache.page_size]
            case.cache.storage[0, page, position % case.cache.page_size] = POISON
    result = run(arguments, case.view, backend=backend)
    assert torch.equal(result.out, expected.out) and torch.equal(result.lse, expected.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_gives_zero_and_is_no_key(backend, device):
    """Past the offsets, or on a page of -1: NaN there changes nothing else."""
    fmt = CacheFormat("fp32", 128, 32)
    case, arguments = make(fmt, torch.float32, 64, 64, 2, device, ([6], [6]), 2, page_size=4)
    table = case.batch.page_table.tolist()[0]
    holed = PagedBatch([0, 6], [6], [[table[0], table[1], -1]], device=device)  # 8..11 are padding
    for name in ("q", "k_nope", "k_rope", "v"):
        arguments[name][2:] = torch.nan
    result = run(arguments, case.cache.view(0, holed), backend=backend)
    assert (result.out[2:] == 0).all() and (result.lse[2:] == -torch.inf).all()
    real = {k: x if k.startswith("w_") else x[:2] for k, x in arguments.items()}
    only_real = PagedBatch([0, 2], [6], [[table[0], table[1]]], device=device)
    expected = run(real, case.cache.view(0, only_real), backend=backend)
    torch.testing.assert_close(result.out[:2], expected.out)
    torch.testing.assert_close(result.lse[:2], expected.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_context_needs_no_weights(backend, device):
    fmt = CacheFormat("bf16", 128, 32)
    case, arguments = make(fmt, torch.bfloat16, 64, 64, 2, device, ([0, 0], [5, 33]))
    expected = run(arguments, case.view, backend=backend)
    del arguments["w_uk"], arguments["w_uv"]
    result = run(arguments, case.view, backend=backend)
    assert torch.equal(result.out, expected.out) and torch.equal(result.lse, expected.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_arguments_and_given_out(backend, device):
    """k_nope and v as kv_b_proj leaves them side by side; k_rope a slice of kv."""
    fmt = CacheFormat("bf16", 128, 32)
    case, arguments = make(fmt, torch.bfloat16, 64, 48, 2, device)
    expected = run(arguments, case.view, backend=backend)
    packed = torch.cat([arguments["k_nope"], arguments["v"]], -1)
    arguments["k_nope"], arguments["v"] = packed.split([64, 48], -1)
    arguments["k_rope"] = torch.cat([arguments["k_rope"]] * 2, -1)[:, 32:]
    out = torch.empty_like(expected.out)
    result = run(arguments, case.view, out=out, backend=backend)
    assert result.out is out
    assert torch.equal(out, expected.out) and torch.equal(result.lse, expected.lse)


def test_a_request_does_not_depend_on_its_neighbours(device):
    fmt = CacheFormat("bf16", 128, 32)
    case, arguments = make(fmt, torch.bfloat16, 64, 64, 2, device, num_padding=0)
    together = run(arguments, case.view, context_chunk=10_000, backend="triton")
    offsets, lengths, table = _host(case.batch)
    for request, length in enumerate(lengths):
        rows = slice(offsets[request], offsets[request + 1])
        alone = PagedBatch([0, rows.stop - rows.start], [length], [table[request]], device=device)
        mine = {k: x if k.startswith("w_") else x[rows] for k, x in arguments.items()}
        result = run(mine, case.cache.view(0, alone), context_chunk=10_000, backend="triton")
        assert torch.equal(result.out, together.out[rows])
        assert torch.equal(result.lse, together.lse[rows])


def test_repeated_runs_give_the_same_bits(device):
    case, arguments = make(CacheFormat("fp8", 128, 32), torch.bfloat16, 64, 64, 2, device)
    runs = [run(arguments, case.view, backend="triton") for _ in range(3)]
    for again in runs[1:]:
        assert torch.equal(again.out, runs[0].out) and torch.equal(again.lse, runs[0].lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batches_are_fine(backend, device):
    fmt = CacheFormat("bf16", 128, 32)
    _, arguments = make(fmt, torch.bfloat16, 64, 64, 2, device, ([0], [1]), 2)
    cache = kvkern.PagedKVCache(fmt, num_layers=1, num_pages=1, page_size=4, device=device)
    view = cache.view(0, PagedBatch([0], [], [], device=device))
    result = run(arguments, view, backend=backend)
    assert (result.out == 0).all() and (result.lse == -torch.inf).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"q": lambda a: a["q"][..., 1:]},
            kvkern.ShapeMismatchError,
            r"q: want \[T=52, H=2, K=96\], got \[52, 2, 95\]",
        ),
        (
            {"v": lambda a: a["v"][:, :1]},
            kvkern.ShapeMismatchError,
            r"v: want \[T=52, H=2, V=any\], got \[52, 1, 64\]",
        ),
        (
            {"k_nope": lambda a: a["k_nope"].half()},
            kvkern.UnsupportedDtypeError,
            r"v: want float16, got torch.bfloat16",
        ),
        (
            {"k_rope": lambda a: None},
            kvkern.ArgumentError,
            r"k_rope: want \[T=52, R=32\], got None",
        ),
        (
            {"w_uk": lambda a: None, "w_uv": lambda a: None},
            kvkern.ArgumentError,
            r"w_uk, w_uv: want both, to expand the cached tokens; got None with cache_lengths up "
            r"to 45",
        ),
        ({"w_uv": lambda a: None}, kvkern.ArgumentError, r"w_uk, w_uv: want both or neither"),
        (
            {"w_uk": lambda a: a["w_uk"][..., 1:]},
            kvkern.ShapeMismatchError,
            r"w_uk: want \[H=2, N=64, L=128\], got \[2, 64, 127\]",
        ),
        (
            {"context_chunk": lambda a: 0},
            kvkern.ArgumentError,
            r"context_chunk: want >= 1, got 0",
        ),
        (
            {"out": lambda a: a["v"][:1]},
            kvkern.ShapeMismatchError,
            r"out: want \[T=52, H=2, V=64\], got \[1, 2, 64\]",
        ),
        (
            {"out": lambda a: a["v"][:1].expand(52, -1, -1)},
            kvkern.LayoutError,
            r"out: want contiguous, got strides \[0, 64, 1\]",
        ),
    ],
)
def test_refused_argument_is_named_with_wanted_and_got(changes, error, message, device):
    fmt = CacheFormat("bf16", 128, 32)
    case, arguments = make(fmt, torch.bfloat16, 64, 64, 2, device)
    arguments |= {name: change(arguments) for name, change in changes.items()}
    with pytest.raises(error, match=message):
        run(arguments, case.view)


def test_softmax_scale_is_checked(device):
    case, arguments = make(CacheFormat("bf16", 128, 32), torch.bfloat16, 64, 64, 2, device)
    with pytest.raises(kvkern.ArgumentError, match=r"softmax_scale: want finite and > 0, got 0"):
        mla_prefill(cache=case.view, softmax_scale=0, **arguments)


@pytest.mark.gpu
def test_captured_graph_replays_right_after_lengths_and_pages_change(device):
    fmt = CacheFormat("bf16", 512, 64)
    lengths = ([300, 0, 90], [70, 129, 1])
    case, arguments = make(fmt, torch.bfloat16, 128, 128, 16, device, lengths, 56)
    static = PagedBatch.static(
        max_requests=4, max_tokens=256, max_pages=64, max_query_len=256, max_seq_len=512,
        device=device,
    )  # fmt: skip
    view = case.cache.view(0, static)

    def run_static():
        return run(arguments, view, context_chunk=512)

    run_static()  # compile
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            result = run_static()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    offsets, cached, table = _host(case.batch)
    for order in ([0, 1, 2], [2, 0], [1], []):
        new_lens = torch.tensor([0] + [offsets[i + 1] - offsets[i] for i in order])
        refilled = (new_lens.cumsum(0), [cached[i] for i in order], [table[i] for i in order])
        static.refill(*refilled)
        result.out.fill_(torch.nan)
        graph.replay()
        eager = case.cache.view(0, PagedBatch(*refilled, device=device))
        exact, rounded = exact_and_rounded(arguments, eager)
        assert_within_budget(result.out, exact.out, rounded.out)
        assert_within_budget(result.lse, exact.lse, rounded.lse, eps_of=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "nope", "v"),
    [("fp8_ds_mla", 128, 128), ("fp8_token", 192, 256), ("nvfp4", 64, 64)],
)
def test_full_dims_match_fp64(name, nope, v, device):
    fmt = CacheFormat(name, 512, 64)
    lengths = ([1000, 0, 3], [130, 513, 1])
    case, arguments = make(fmt, torch.bfloat16, nope, v, 4, device, lengths)
    exact, rounded = exact_and_rounded(arguments, case.view)
    result = run(arguments, case.view, context_chunk=700)
    assert_within_budget(result.out, exact.out, rounded.out)
    assert_within_budget(result.lse, exact.lse, rounded.lse, eps_of=torch.bfloat16)


def _host(batch):
    tensors = (batch.input_row_offsets, batch.cache_lengths, batch.page_table)
    return [tensor.tolist() for tensor in tensors]
