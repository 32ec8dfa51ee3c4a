"""mla_decode by the Hopper kernels: the contract of mla_decode, on a card of capability 9.0."""

import gc
import weakref

import pytest
import torch

import kvkern
from kvkern import ArgumentError, CacheFormat, PagedBatch, UnsupportedError, mla_decode
from kvkern.backends import DecodeCall, table
from kvkern.kernels.device import Gpu
from kvkern.ops import attention
from kvkern.ops._known import KnownCalls
from kvkern.testing.budget import assert_within_budget, decode_by_e4m3_weights
from kvkern.testing.inputs import POISON, make_paged_case

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SCALE = 0.07
H100 = Gpu(capability=90, num_sms=132)
FULL = CacheFormat("bf16")
EIGHT_BITS = ("fp8", "fp8_token", "fp8_ds_mla")


def is_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


on_hopper = pytest.mark.skipif(not is_hopper(), reason="needs a card of compute capability 9.0")


def make(fmt, num_heads, lengths, num_padding=0, **options):
    case = make_paged_case(fmt, *lengths, device="cuda", **{"page_size": 64, **options})
    num_tokens = case.batch.num_tokens + num_padding
    dtype = BF16 if fmt.is_quantised else fmt.latent_dtype
    q = torch.randn(num_tokens, num_heads, fmt.row_dim, dtype=dtype, device="cuda")
    return case, q


def decode(q, view, **options):
    return mla_decode(q, view, softmax_scale=SCALE, backend="hopper", **options)


def assert_right(result, q, view):
    exact = mla_decode(q.double(), view, softmax_scale=SCALE, backend="reference")
    rounded = mla_decode(q, view, softmax_scale=SCALE, backend="reference")
    assert_within_budget(result.out, exact.out, rounded.out)
    assert_within_budget(result.lse, exact.lse, rounded.lse, eps_of=q.dtype)


# ---- what is refused, and how work is cut: without a card

CALL = DecodeCall(BF16, FULL, 64, None, False, 128)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": CacheFormat("nvfp4")}, "takes formats bf16, fp16 and those of 8 bits, got nvf"),
        (
            {"format": CacheFormat("fp8"), "q_dtype": torch.float32},
            "takes bfloat16 and float16, got torch.float32",
        ),
        (
            {"format": CacheFormat("fp8_token", 256, 64)},
            "takes (512,) latent and (64,) rope columns of fp8_token, got 256 and 64",
        ),
        (
            {"format": CacheFormat("fp8"), "page_size": 8},
            "takes pages of 16, 32 or a multiple of 64 tokens of 8 bits, got 8",
        ),
        (
            {"format": CacheFormat("fp8_token"), "q_dtype": E4M3},
            "takes e4m3 queries with an fp8 cache, got fp8_token",
        ),
        ({"q_dtype": torch.float16}, "takes q in the cache's dtype torch.bfloat16, got torch.flo"),
        ({"format": CacheFormat("bf16", 384, 64)}, "takes (128, 256, 512) latent and (0, 8,"),
        ({"format": CacheFormat("bf16", 512, 128)}, "64) rope columns of bf16, got 512 and 128"),
        ({"format": CacheFormat("bf16", 512, 36)}, "64) rope columns of bf16, got 512 and 36"),
        ({"num_splits": 2}, "cuts keys by its own schedule: leave num_splits out, got 2"),
        ({"is_batch_invariant": True}, "cuts keys where it balances the batch"),
        ({"max_rows": None}, "needs to know max_query_len: build the batch from host data"),
        ({"max_rows": 513}, "takes up to 512 rows (new tokens x heads) a request, got 513"),
    ],
)
def test_call_that_it_does_not_take_is_refused_with_the_reason(change, reason):
    assert table._hopper_refuses_call(CALL) is None
    e4m3 = CALL._replace(format=CacheFormat("fp8"), q_dtype=E4M3)
    assert table._hopper_refuses_call(e4m3) is None
    assert table._hopper_refuses_call(e4m3._replace(max_rows=16)) is None
    refused = table._hopper_refuses_call(CALL._replace(**change))
    assert refused is not None and reason in refused


def test_device_without_it_is_refused(device):
    if not is_hopper():
        case = make_paged_case(CacheFormat("bf16", 128, 32), [5], [1], device=device)
        q = torch.randn(1, 4, 160, dtype=BF16, device=device)
        with pytest.raises(UnsupportedError, match="backend 'hopper' refuses: needs"):
            mla_decode(q, case.view, softmax_scale=SCALE, backend="hopper")


def test_tiles_are_no_larger_than_rows_and_gangs_hold_all_of_a_request():
    from kvkern.kernels.hopper.mla_decode import choose_work

    for num_heads in (1, 5, 8, 16, 17, 32, 33, 64, 100, 128):
        for query_len in (1, 2, 4):
            for fmt in (CacheFormat("bf16", 128, 64), FULL, *map(CacheFormat, EIGHT_BITS)):
                work = choose_work(num_heads, query_len, fmt, H100)
                rows = num_heads * query_len
                assert work.gang * work.tile_rows >= rows
                least = 16 if fmt.is_quantised else 8
                assert least <= work.tile_rows and work.gang * work.tile_rows < 2 * max(rows, least)
                assert work.num_parts * work.gang <= 132 < (work.num_parts + 1) * work.gang
                has_64 = fmt.name in ("bf16", "fp8") and fmt.kv_lora_rank > 128
                assert (work.tile_rows == 64) == (rows > 32 and has_64)


# ---- on the card


@on_hopper
@pytest.mark.parametrize("num_heads", [1, 5, 8, 12, 16, 20, 32, 40, 48, 64, 96, 128])
@pytest.mark.parametrize("query_lens", [[1, 1, 1, 1], [2, 0, 4, 1]])
def test_any_head_count_and_query_length(num_heads, query_lens):
    case, q = make(FULL, num_heads, ([1000, 64, 3, 2500], query_lens), num_padding=2)
    assert_right(decode(q, case.view), q, case.view)


@on_hopper
@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 64, 96, 256])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize(
    ("name", "latent", "rope"),
    [("bf16", 512, 64), ("bf16", 256, 64), ("bf16", 256, 32), ("bf16", 512, 0), ("fp16", 512, 64),
     ("bf16", 128, 48)],
)  # fmt: skip
def test_dims_dtypes_and_page_sizes(name, latent, rope, num_heads, page_size):
    lengths = ([1000, 63, 64, 65, 0, 127], [1, 1, 2, 1, 3, 1])
    case, q = make(CacheFormat(name, latent, rope), num_heads, lengths, page_size=page_size)
    assert_right(decode(q, case.view), q, case.view)


@on_hopper
@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("num_heads", [5, 8, 10, 16, 32, 64, 128])
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_caches_of_8_bits(name, num_heads, page_size, mean):
    """Against fp64 on the stored values; weights of many heads in fp8 are rounded to e4m3."""
    lengths = ([1000, 64, 3, 2500, 0, 8190], [1, 2, 0, 1, 3, 1])
    case, q = make(CacheFormat(name), num_heads, lengths, 2, page_size=page_size, mean=mean)
    result = decode(q, case.view)
    exact = mla_decode(q.double(), case.view, softmax_scale=SCALE, backend="reference")
    assert (result.out[-2:] == 0).all() and (result.lse[-2:] == -torch.inf).all()
    error = (result.out.double() - exact.out).norm() / exact.out.norm()
    is_many = name == "fp8" and num_heads * 3 > 32
    assert error < (2e-2 if is_many else 4e-3)
    bias = (result.out.double() - exact.out).mean() / exact.out.abs().mean()
    assert abs(bias) < 2e-3
    assert (result.lse[:-2] - exact.lse[:-2]).abs().max() < 1e-2


@on_hopper
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.02, 0.3), (0.5, 0.01)])
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (512, 0), (256, 32)])
@pytest.mark.parametrize("num_heads", [2, 5, 10, 16, 40, 64, 128])
def test_queries_in_e4m3_lose_nothing_more(num_heads, latent, rope, scales):
    """Whatever the scales of latents and rope keys are, which one of queries has to span.

    Scores stay as large as ever: fp8 tensor cores keep 13 bits of them.
    """
    fmt = CacheFormat("fp8", latent, rope)
    case, q = make(fmt, num_heads, ([1000, 64, 3, 2500, 0], [1, 2, 0, 1, 3]), num_padding=1)
    case.view.pages.layer_scales.copy_(torch.tensor(scales))
    stored = (50 * q).to(E4M3)
    for value in (0.02, 0.05):  # the second is launched as the first was
        q_scale = torch.tensor([value * 0.01 / max(scales)], device="cuda")
        result = decode(stored, case.view, q_scale=q_scale)
        real = stored.double() * q_scale.double()
        exact = mla_decode(real, case.view, softmax_scale=SCALE, backend="reference")
        if num_heads * 3 > 32:
            rounded = decode_by_e4m3_weights(real, case.view, softmax_scale=SCALE)
        else:
            q = real.to(BF16)
            rounded, _ = mla_decode(q, case.view, softmax_scale=SCALE, backend="reference")
        assert_within_budget(result.out, exact.out, rounded)
        assert (result.lse[:-1] - exact.lse[:-1]).abs().max() < 1e-2
        assert (result.out[-1] == 0).all() and (result.lse[-1] == -torch.inf).all()


@on_hopper
@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("num_tokens", [300, 8191])
def test_fast_sums_are_near_and_differ(num_tokens, mean):
    case, q = make(CacheFormat("fp8"), 128, ([num_tokens], [1]), mean=mean)
    exact = mla_decode(q.double(), case.view, softmax_scale=SCALE, backend="reference")
    fast = decode(q, case.view, use_fast_accum=True)
    assert (fast.out.double() - exact.out).norm() < 6e-2 * exact.out.norm()
    assert not torch.equal(fast.out, decode(q, case.view).out)


@on_hopper
@pytest.mark.parametrize(("name", "num_heads"), [("bf16", 16), ("bf16", 128), ("fp8", 16)])
def test_fast_sums_are_exact_where_no_kernel_has_any(name, num_heads):
    case, q = make(CacheFormat(name), num_heads, ([700], [1]))
    assert torch.equal(decode(q, case.view, use_fast_accum=True).out, decode(q, case.view).out)


@on_hopper
@pytest.mark.parametrize("num_heads", [10, 16, 128])
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_caches_of_8_bits_are_read_within_their_requests(name, num_heads):
    lengths = ([37, 16, 9, 0, 131], [1, 3, 1, 2, 1])
    case, q = make(CacheFormat(name), num_heads, lengths, page_size=64)
    poisoned = decode(q, case.view)
    assert poisoned.out.isfinite().all() and not poisoned.lse.isnan().any()
    case.fill_unwritten(0)
    clean = decode(q, case.view)
    assert torch.equal(clean.out, poisoned.out) and torch.equal(clean.lse, poisoned.lse)
    for _ in range(20):
        again = decode(q, case.view)
        assert torch.equal(again.out, clean.out) and torch.equal(again.lse, clean.lse)


@on_hopper
@pytest.mark.parametrize("num_heads", [16, 32])
@pytest.mark.parametrize("exponents", [(40,) * 4, (-40,) * 4, (0, -14, 0, 0), (-7, 3, 0, -11)])
def test_scales_of_groups_may_be_of_any_size(exponents, num_heads):
    """Columns whose scales are tiny beside others keep their own precision."""
    case, q = make(CacheFormat("fp8_ds_mla"), num_heads, ([1000, 64, 3], [1, 1, 1]))
    case.view.pages.group_scales.mul_(2.0 ** torch.tensor(exponents, device="cuda"))
    q[..., :512] *= 2.0 ** -max(exponents)
    result = decode(q, case.view)
    exact = mla_decode(q.double(), case.view, softmax_scale=SCALE, backend="reference")
    for group, out in enumerate(exact.out.split(128, dim=-1)):
        error = result.out[..., group * 128 : (group + 1) * 128].double() - out
        assert error.norm() < 4e-3 * out.norm()
    assert (result.lse - exact.lse).abs().max() < 1e-2


@on_hopper
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("lengths", [[1], [64], [4096] * 8, [131071], [20000, 1, 1, 700] * 10])
def test_lengths_from_one_key_to_many(num_heads, lengths):
    case, q = make(FULL, num_heads, (lengths, [1] * len(lengths)))
    assert_right(decode(q, case.view), q, case.view)


@on_hopper
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("num_tokens", [8191, 131071])
@pytest.mark.parametrize("name", ["bf16", *EIGHT_BITS])
def test_values_with_a_mean_are_not_biased(name, num_tokens, num_heads, mean):
    """Sums that lose their low bits come out too small, the more so the more keys there are."""
    case, q = make(CacheFormat(name), num_heads, ([num_tokens], [1]), mean=mean)
    result = decode(q, case.view)
    if name == "bf16":
        assert_right(result, q, case.view)
    exact = mla_decode(q.double(), case.view, softmax_scale=SCALE, backend="reference")
    error = result.out.double() - exact.out
    limit = 2e-2 if name == "fp8" and num_heads == 128 else 4e-3  # of weights in e4m3, and not
    assert error.norm() < limit * exact.out.norm()
    assert abs(error.mean()) < 2e-3 * exact.out.abs().mean()


@on_hopper
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_nothing_outside_a_request_is_read(num_heads, page_size):
    lengths = ([37, 16, 9, 0, 131], [1, 3, 0, 2, 1])
    case, q = make(FULL, num_heads, lengths, page_size=page_size)
    poisoned = decode(q, case.view)
    assert poisoned.out.isfinite().all() and not poisoned.lse.isnan().any()
    case.fill_unwritten(0)
    clean = decode(q, case.view)
    assert torch.equal(clean.out, poisoned.out) and torch.equal(clean.lse, poisoned.lse)


@on_hopper
@pytest.mark.parametrize("num_heads", [16, 128])
def test_padding_tokens_give_zero_and_minus_inf(num_heads):
    case, q = make(FULL, num_heads, ([300, 5], [1, 2]), num_padding=3)
    q[-3:] = torch.nan
    result = decode(q, case.view)
    assert (result.out[-3:] == 0).all() and (result.lse[-3:] == -torch.inf).all()
    assert_right(mla_result(result, slice(0, -3)), q[:-3], case.view)


def mla_result(result, rows):
    return type(result)(result.out[rows], result.lse[rows])


@on_hopper
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages_of_minus_one_are_absent(num_heads, page_size):
    """In the middle of a request; or all of a request's, whose tokens then are padding."""
    case, q = make(FULL, num_heads, ([500, 400], [1, 1]), page_size=page_size)
    page_table = case.batch.page_table.cpu()
    page_table[0, 2] = -1
    page_table[1] = -1
    batch = PagedBatch([0, 1, 2], [500, 400], page_table, device="cuda")
    view = case.cache.view(0, batch)
    result = decode(q, view)
    assert (result.out[1] == 0).all() and (result.lse[1] == -torch.inf).all()
    assert_right(result, q, view)


@on_hopper
@pytest.mark.parametrize("num_heads", [16, 128])
def test_nan_in_one_request_harms_only_that_request(num_heads):
    case, q = make(FULL, num_heads, ([200, 200], [1, 1]))
    expected = decode(q, case.view)
    case.cache.storage[0, case.batch.page_table[0, 0], 3] = POISON
    result = decode(q, case.view)
    assert result.out[0].isnan().all() and result.lse[0].isnan().all()
    assert torch.equal(result.out[1], expected.out[1])
    assert torch.equal(result.lse[1], expected.lse[1])


@on_hopper
@pytest.mark.parametrize("num_heads", [16, 128])
def test_bits_do_not_depend_on_page_size_or_page_order(num_heads):
    case, q = make(FULL, num_heads, ([1000, 64, 3000], [1, 2, 1]), page_size=64)
    expected = decode(q, case.view)
    for page_size in (1, 7, 16, 32, 64, 128):
        result = decode(q, case.repaged(page_size).view)
        assert torch.equal(result.out, expected.out) and torch.equal(result.lse, expected.lse)


@on_hopper
@pytest.mark.parametrize("num_heads", [16, 128])
def test_200_runs_give_the_same_bits(num_heads):
    case, q = make(FULL, num_heads, ([5000, 64, 3000, 1], [1, 1, 1, 1]))
    expected = decode(q, case.view)
    for _ in range(200):
        result = decode(q, case.view)
        assert torch.equal(result.out, expected.out) and torch.equal(result.lse, expected.lse)


@on_hopper
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize(("name", "q_dtype"), [("bf16", BF16), ("fp8", BF16), ("fp8", E4M3)])
def test_strided_queries_and_given_out(name, q_dtype, num_heads):
    case, q = make(CacheFormat(name), num_heads, ([1000, 64], [1, 1]))
    q = q.to(q_dtype)
    scale = {"q_scale": torch.ones(1, device="cuda")} if q_dtype == E4M3 else {}
    expected = decode(q, case.view, **scale)
    wide = torch.full((2, num_heads + 2, 640), torch.nan, device="cuda").to(q_dtype)
    wide[:, 1:-1, 8:584] = q
    buffer = torch.full((4, num_heads, 512), 7.0, dtype=BF16, device="cuda")
    result = decode(wide[:, 1:-1, 8:584], case.view, out=buffer[1:-1], **scale)
    assert torch.equal(result.out, expected.out) and torch.equal(result.lse, expected.lse)
    assert (buffer[0] == 7).all() and (buffer[-1] == 7).all()


@on_hopper
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("num_padding", [0, 3])
def test_empty_batches_are_fine(num_heads, num_padding):
    cache = kvkern.PagedKVCache(FULL, num_layers=1, num_pages=1, page_size=64, device="cuda")
    q = torch.randn(num_padding, num_heads, 576, dtype=BF16, device="cuda")
    result = decode(q, cache.view(0, PagedBatch([0], [], [], device="cuda")))
    assert (result.out == 0).all() and (result.lse == -torch.inf).all()


@on_hopper
@pytest.mark.parametrize("num_heads", [16, 128])
def test_captured_graph_replays_right_after_lengths_and_pages_change(num_heads):
    case, _ = make(FULL, num_heads, ([4000, 37, 900, 0], [1, 2, 1, 3]))
    static = PagedBatch.static(
        max_requests=6, max_tokens=12, max_pages=80, max_query_len=4, max_seq_len=5120,
        device="cuda",
    )  # fmt: skip
    view = case.cache.view(0, static)
    q = torch.randn(12, num_heads, 576, dtype=BF16, device="cuda")
    out = torch.empty(12, num_heads, 512, dtype=BF16, device="cuda")
    static.refill([0, 1], [15], case.batch.page_table[:1, :1].cpu())
    decode(q, view, out=out)  # compile
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            result = decode(q, view, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    batch = case.batch
    offsets, lengths = batch.input_row_offsets.tolist(), batch.cache_lengths.tolist()
    table = batch.page_table.tolist()
    for order in ([0, 1, 2, 3], [3, 1], [2], []):
        picked = [offsets[i + 1] - offsets[i] for i in order]
        step = (
            torch.tensor([0, *picked]).cumsum(0),
            [lengths[i] for i in order],
            [table[i] for i in order],
        )
        static.refill(*step)
        out.fill_(torch.nan)
        graph.replay()
        assert_right(result, q, case.cache.view(0, PagedBatch(*step, device="cuda")))


@on_hopper
def test_layers_of_a_step_share_one_schedule_and_the_next_step_makes_its_own():
    batch = PagedBatch([0, 1, 2], [3000, 100], [list(range(47)), list(range(47))], device="cuda")
    cache = kvkern.PagedKVCache(FULL, num_layers=3, num_pages=47, page_size=64, device="cuda")
    cache.buffer.zero_()
    q = torch.randn(2, 16, 576, dtype=BF16, device="cuda")
    for layer in range(3):
        decode(q, cache.view(layer, batch))
    (made,) = batch.workspaces.values()
    before = made.schedule.bounds.clone()
    batch.cache_lengths.copy_(torch.tensor([100, 2900], dtype=torch.int32))
    decode(q, cache.view(1, batch))
    assert torch.equal(made.schedule.bounds, before)  # out of date, and used
    decode(q, cache.view(0, batch))
    assert not torch.equal(made.schedule.bounds, before)
    assert list(batch.workspaces.values()) == [made]


@pytest.fixture
def only_repeats(monkeypatch):
    """After its call the kernels may only be launched by what is remembered."""
    monkeypatch.setattr(attention, "_KNOWN", KnownCalls(100))

    def choose_reference(op, name, *facts):
        assert name == "reference", f"{name} was chosen anew"
        return table.choose(op, name, *facts)

    return lambda: monkeypatch.setattr(attention, "choose", choose_reference)


@on_hopper
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8_token"])
def test_repeated_calls_take_their_own_tensors(name, num_heads, only_repeats):
    lengths = ([700, 64, 3000], [1, 2, 1])
    cases = [make(CacheFormat(name), num_heads, lengths) for _ in range(3)]
    for case, _ in cases[1:]:  # as layers of one cache, which differ in nothing but addresses
        object.__setattr__(case.view.pages, "kind", cases[0][0].view.pages.kind)
    decode(cases[0][1], cases[0][0].view)
    only_repeats()
    for case, q in cases:
        assert_near(decode(q, case.view), q, case.view)
    case, _ = cases[1]
    q = torch.randn_like(cases[1][1])
    assert_near(decode(q, case.view), q, case.view)
    other = PagedBatch([0, 2, 3, 4], [62, 699, 2999], case.batch.page_table[[1, 0, 2]].cpu(),
                       device="cuda")  # fmt: skip
    view = kvkern.CacheView(case.view.pages, other)
    assert_near(decode(q, view), q, view)


def assert_near(result, q, view):
    exact = mla_decode(q.double(), view, softmax_scale=SCALE, backend="reference")
    assert (result.out.double() - exact.out).norm() < 2e-2 * exact.out.norm()
    assert (result.lse - exact.lse).abs().max() < 1e-2


@on_hopper
@pytest.mark.parametrize("num_heads", [16, 128])
def test_repeated_calls_take_other_streams_and_strided_queries(num_heads, monkeypatch):
    monkeypatch.setattr(attention, "_KNOWN", KnownCalls(100))
    case, q = make(FULL, num_heads, ([1000, 64], [1, 1]))
    for seed in range(3):
        torch.manual_seed(seed)
        wide = torch.randn(2, num_heads + 2, 640, dtype=BF16, device="cuda")
        strided = wide[:, 1:-1, 8:584]
        assert_near(decode(strided, case.view), strided, case.view)
        with torch.cuda.stream(torch.cuda.Stream()):
            result = decode(q, case.view)
        torch.cuda.synchronize()
        assert_near(result, q, case.view)


@on_hopper
def test_repeated_call_is_still_checked_for_its_tokens(only_repeats):
    case, q = make(FULL, 16, ([100, 64], [2, 1]))
    decode(q, case.view)
    only_repeats()
    table = case.batch.page_table.cpu()
    view = case.cache.view(0, PagedBatch([0, 2, 4], [98, 62], table, device="cuda"))
    with pytest.raises(ArgumentError, match="q: want at least 4 tokens, got 3"):
        decode(q, view)


@on_hopper
def test_what_is_remembered_keeps_no_tensor_alive(monkeypatch):
    monkeypatch.setattr(attention, "_KNOWN", KnownCalls(100))
    for num_heads in (16, 128):
        case, q = make(FULL, num_heads, ([100, 64], [2, 1]))
        for _ in range(2):
            decode(q, case.view)
        alive = [weakref.ref(tensor) for tensor in (q, case.cache.buffer, case.batch.page_table)]
        del case, q
        gc.collect()
        assert attention._KNOWN and all(ref() is None for ref in alive)


@on_hopper
def test_two_streams_at_once_do_not_disturb_each_other():
    cases = [make(FULL, 16, ([3000 + n, 5], [1, 1])) for n in (0, 9)]
    expected = [decode(q, case.view) for case, q in cases]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream in streams:  # the same batch on both
            for case, q in cases:
                with torch.cuda.stream(stream):
                    results.append(decode(q, case.view))
    torch.cuda.synchronize()
    for index, result in enumerate(results):
        assert torch.equal(result.out, expected[index % 2].out)
