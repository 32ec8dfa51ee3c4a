"""mla_decode by FlashInfer. Without a GPU a stand-in computes what it was asked to plan."""

import ast
import importlib.util
import inspect
import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

import kvkern
from kvkern import CacheFormat, PagedBatch, UnsupportedError, mla_decode
from kvkern.backends import TABLE, choose, explain, flashinfer
from kvkern.layout import FORMAT_NAMES
from kvkern.testing.budget import assert_within_budget
from kvkern.testing.inputs import make_paged_case

BF16, FP16 = torch.bfloat16, torch.float16
SCALE = 0.05
# one decode, one speculative, one empty request, one with nothing cached, one on a page's end,
# one whose keys end with a key tile's first
LENGTHS = ([37, 16, 9, 0, 63, 62], [1, 3, 0, 2, 1, 3])
ROOT = Path(__file__).parents[2]


class StandIn:
    """FlashInfer's wrapper in plain torch, by its signatures (0.6.13).

    As in its kernels a causal tile of rows reads whole tiles of 64 keys, up to the one that holds
    key ``kv_len - q_len + (first row + rows) // heads - 1``.
    """

    made: ClassVar[list["StandIn"]] = []

    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None,
        kv_indices=None, kv_len_arr=None, backend="auto",
    ):  # fmt: skip
        self.workspace, self.backend = float_workspace_buffer, backend
        self.num_runs = 0
        StandIn.made.append(self)

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe,
        page_size, causal, sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ):  # fmt: skip
        arrays = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert all(a.dtype == torch.int32 and a.device.type == "cpu" for a in arrays)
        assert not hasattr(self, "planned"), "a plan may still be in use"
        self.planned = SimpleNamespace(**{k: v for k, v in locals().items() if k != "self"})

    def run(
        self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False,
        profiler_buffer=None, kv_len=None, page_table=None, return_lse_base_on_e=False,
    ):  # fmt: skip
        plan = self.planned
        self.num_runs += 1
        num_tokens = len(q_nope)
        assert q_nope.dtype == plan.q_data_type and ckv_cache.dtype == plan.kv_data_type
        assert ckv_cache.shape[1:] == (plan.page_size, plan.head_dim_ckv)
        assert kpe_cache.shape[1:] == (plan.page_size, plan.head_dim_kpe)
        assert q_nope.shape[1] == plan.num_heads and num_tokens == plan.qo_indptr[-1]
        assert out.shape == q_nope.shape and lse.shape == q_nope.shape[:2] and return_lse
        for q in (q_nope, q_pe):
            assert q.data_ptr() % 16 == 0 and all(s * 2 % 16 == 0 for s in q.stride()[:2])
        lens = plan.qo_indptr.diff()
        tile_rows = 128 if num_tokens * plan.num_heads // len(lens) > 64 else 64
        pairs = zip(lens.tolist(), plan.kv_len_arr.tolist(), strict=True)
        for i, (q_len, kv_len) in enumerate(pairs):
            assert 0 < q_len <= kv_len
            own = plan.kv_indices[plan.kv_indptr[i] : plan.kv_indptr[i + 1]]
            assert len(own) == -(-kv_len // plan.page_size) and (own >= 0).all()
            latent = ckv_cache[own].flatten(0, 1)[:kv_len].float()
            keys = torch.cat([latent, kpe_cache[own].flatten(0, 1)[:kv_len].float()], -1)
            rows = slice(int(plan.qo_indptr[i]), int(plan.qo_indptr[i + 1]))
            q = torch.cat([q_nope[rows], q_pe[rows]], -1).float()
            scores = torch.einsum("thd,sd->ths", q, keys) * plan.sm_scale
            if plan.causal:
                row = torch.arange(q_len * plan.num_heads).view(q_len, plan.num_heads, 1)
                key = torch.arange(kv_len)
                tile_end = kv_len - q_len + (row // tile_rows + 1) * tile_rows // plan.num_heads
                read = key < -(-tile_end // 64) * 64
                visible = key <= kv_len - q_len + row // plan.num_heads
                scores = scores.masked_fill(~(read & visible), -torch.inf)
            lse[rows] = torch.logsumexp(scores, -1) / math.log(2)
            out[rows] = torch.einsum("ths,sl->thl", scores.softmax(-1), latent).to(out.dtype)
        return out, lse


@pytest.fixture
def card(monkeypatch):
    """A card of the given compute capability, FlashInfer beside it, and tensors on the CPU."""
    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    package.__spec__, package.mla = ModuleSpec("flashinfer", None), module
    module.BatchMLAPagedAttentionWrapper = StandIn
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    monkeypatch.setattr(StandIn, "made", [])
    *others, row = TABLE["mla_decode"]
    never = row._replace(refuses=lambda device, dtype: None)
    monkeypatch.setitem(TABLE, "mla_decode", (*others, never))
    card = SimpleNamespace(
        capability=(9, 0), is_capturing=False, stream=7, num_waits=0, refuses=row.refuses
    )

    def wait():
        card.num_waits += 1

    for name, function in {
        "get_device_capability": lambda device: card.capability,
        "get_device_name": lambda device: "Some Card",
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: card.is_capturing,
        "current_stream": lambda device: SimpleNamespace(cuda_stream=card.stream, synchronize=wait),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    choose.cache_clear()
    yield card
    choose.cache_clear()


def make(name="bf16", *, heads=4, lengths=LENGTHS, num_padding=2, dims=(512, 64), **options):
    fmt = CacheFormat(name, *dims)
    case = make_paged_case(fmt, *lengths, **options)
    dtype = fmt.latent_dtype if name in ("bf16", "fp16", "fp32") else BF16
    q = torch.randn(case.batch.num_tokens + num_padding, heads, fmt.row_dim)
    return case, q.to(device=case.cache.device, dtype=dtype)


def run(q, view, **options):
    return mla_decode(q, view, softmax_scale=SCALE, backend="flashinfer", **options)


def assert_right(q, view, result):
    exact = mla_decode(q.double(), view, softmax_scale=SCALE, backend="reference")
    rounded = mla_decode(q, view, softmax_scale=SCALE, backend="reference")
    assert_within_budget(result.out, exact.out, rounded.out)
    assert_within_budget(result.lse, exact.lse, rounded.lse, eps_of=q.dtype)


def host_data(batch):
    return [x.tolist() for x in (batch.input_row_offsets, batch.cache_lengths, batch.page_table)]


# ---- what is planned


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_what_is_planned_is_the_attention_of_the_reference(name, page_size, card):
    case, q = make(name, page_size=page_size)
    q[-2:] = torch.nan  # padding
    result = run(q, case.view)
    assert_right(q, case.view, result)
    assert (result.out[-2:] == 0).all() and (result.lse[-2:] == -torch.inf).all()


def test_lse_is_a_natural_logarithm(card):
    """Of 32 equal scores of 0: ln 32, where base 2 says 5."""
    case, q = make(lengths=([31], [1]), num_padding=0)
    result = run(torch.zeros_like(q), case.view)
    torch.testing.assert_close(result.lse, torch.full((1, 4), math.log(32)))


def test_plan_has_pages_without_padding_and_no_request_without_new_tokens(card):
    batch = PagedBatch([0, 1, 1, 4], [4, 9, 2], [[7, 2, -1], [5, 3, 1], [4, 6, -1]])
    requests = flashinfer._busy_requests(batch, page_size=4)
    assert requests.qo_indptr.tolist() == [0, 1, 4]
    assert requests.kv_indptr.tolist() == [0, 2, 4]
    assert requests.kv_indices.tolist() == [7, 2, 4, 6]
    assert requests.kv_len_arr.tolist() == [5, 5]
    assert requests.max_query_len == 3


def test_pages_past_a_requests_tokens_are_not_planned(card):
    """They may hold anything: spare ones that the engine has taken already."""
    requests = flashinfer._busy_requests(PagedBatch([0, 1], [3], [[7, 2, -1]]), page_size=4)
    assert requests.kv_indices.tolist() == [7]


def test_request_without_new_tokens_may_have_no_pages(card):
    requests = flashinfer._busy_requests(PagedBatch([0, 0, 1], [6, 3], [[-1], [2]]), page_size=4)
    assert requests.kv_indices.tolist() == [2] and requests.kv_len_arr.tolist() == [4]


@pytest.mark.parametrize("new", [[2, 1, 40], [1, 1, 1]], ids=["causal", "decode"])
@pytest.mark.parametrize("heads", [1, 3, 12, 16, 20, 64, 96, 128, 192])
def test_any_head_count_is_right_or_refused(heads, new, card):
    """The kernels drop a key where a tile cuts a query in two; the stand-in does so too."""
    num_refused = 0
    for cached in range(61, 66):
        case, q = make(heads=heads, lengths=([cached, 128 + cached, cached], new))
        try:
            assert_right(q, case.view, run(q, case.view))
        except UnsupportedError as error:
            assert f"got 40 x {heads}" in str(error)
            num_refused += 1
    assert num_refused == (5 if max(new) > 1 and 128 % heads else 0)


def test_few_rows_of_odd_head_counts_are_not_refused(card):
    """Speculation on a rank with 20 heads: a request is one tile."""
    case, q = make(heads=20, lengths=([61, 63, 64], [3, 1, 2]))
    assert_right(q, case.view, run(q, case.view))


@pytest.mark.parametrize("capability, kernel", [((9, 0), "fa3"), ((8, 0), "fa2"), ((12, 0), "fa2")])
def test_the_kernel_for_hopper_runs_only_there(capability, kernel, card):
    card.capability = capability
    case, q = make()
    run(q, case.view)
    assert [wrapper.backend for wrapper in StandIn.made] == [kernel]


# ---- when it is planned


def test_all_layers_of_a_step_share_one_plan(card):
    case, q = make()
    results = [run(q, case.view) for _ in range(3)]
    (wrapper,) = StandIn.made
    assert wrapper.num_runs == 3 and card.num_waits == 1
    assert all(torch.equal(result.out, results[0].out) for result in results)


def test_each_layers_own_pages_are_read(card):
    cache = kvkern.PagedKVCache(CacheFormat("bf16"), num_layers=2, num_pages=2, page_size=4)
    for layer in range(2):
        for field in (cache.layer(layer).latent, cache.layer(layer).rope):
            field.copy_(torch.randn(field.shape))
    batch, q = PagedBatch([0, 1], [5], [[1, 0]]), torch.randn(1, 4, 576).to(BF16)
    for layer in range(2):
        view = cache.view(layer, batch)
        assert_right(q, view, run(q, view))
    assert len(StandIn.made) == 1


def test_another_batch_has_its_own_plan(card):
    case, q = make()
    others = [PagedBatch(*host_data(case.batch)) for _ in range(2)]
    for _ in range(2):
        for batch in others:
            run(q, case.cache.view(0, batch))
    assert [wrapper.num_runs for wrapper in StandIn.made] == [2, 2]


def test_plan_is_dropped_with_its_batch(card):
    case, q = make()
    batch = PagedBatch(*host_data(case.batch))
    run(q, case.cache.view(0, batch))
    before = len(flashinfer._PLANS)
    del batch
    assert len(flashinfer._PLANS) == before - 1


def test_refilled_batch_is_planned_again(card):
    case, q = make()
    bounds = dict(max_requests=8, max_tokens=12, max_pages=8, max_query_len=3, max_seq_len=100)
    batch = PagedBatch.static(**bounds, device="cpu")
    offsets, lengths, table = host_data(case.batch)
    results = []
    for step in range(2):  # the second step has one request less, so more padding
        kept = len(lengths) - step
        batch.refill(offsets[: kept + 1], lengths[:kept], table[:kept])
        view = case.cache.view(0, batch)
        results = [run(q, view), run(q, view)]
        assert_right(q, view, results[1])
    assert [wrapper.num_runs for wrapper in StandIn.made] == [2, 2]
    assert (results[1].out[offsets[-2] :] == 0).all()


def test_refused_refill_keeps_the_plan(card):
    case, q = make()
    bounds = dict(max_requests=8, max_tokens=12, max_pages=8, max_query_len=3, max_seq_len=100)
    batch = PagedBatch.static(**bounds, device="cpu")
    batch.refill(*host_data(case.batch))
    view = case.cache.view(0, batch)
    run(q, view)
    with pytest.raises(kvkern.ArgumentError):
        batch.refill([0, 1], [100], [[0] * 8])
    assert_right(q, view, run(q, view))
    assert len(StandIn.made) == 1


def test_what_a_plan_depends_on_is_planned_apart(card):
    """Heads, scale, page size; and the stream, as a wrapper has one workspace."""
    case, q = make()
    other = case.repaged(3)
    run(q, case.view)
    run(q[:, :2], case.view)
    mla_decode(q, case.view, softmax_scale=0.1, backend="flashinfer")
    card.stream = 8
    run(q, case.view)
    assert [wrapper.num_runs for wrapper in StandIn.made] == [1] * 4
    assert len({wrapper.workspace.data_ptr() for wrapper in StandIn.made}) == 4
    two_sizes = PagedBatch([0, 1], [1], [[0, 1]])
    one = make_paged_case(CacheFormat("bf16"), [1], [1], page_size=1)
    views = [one.cache.view(0, two_sizes), other.cache.view(0, two_sizes)]
    for view in views:
        run(q[:1], view)
    assert [wrapper.planned.page_size for wrapper in StandIn.made[4:]] == [1, 3]


# ---- what it is given


def test_rows_that_cannot_be_loaded_in_16_bytes_are_copied(card):
    case, q = make()
    expected = run(q, case.view)
    wide = torch.full((len(q), 6, 700), torch.nan, dtype=q.dtype)
    for first in (0, 4):  # the base is off; only the strides are
        wide[:, 1:5, first : first + 576] = q
        strided = wide[:, 1:5, first : first + 576]
        assert torch.equal(run(strided, case.view).out, expected.out)
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    assert shifted.is_contiguous()
    assert torch.equal(run(shifted, case.view).out, expected.out)


def test_rows_that_can_be_loaded_are_not_copied():
    q = torch.empty(5, 4, 640, dtype=BF16)[..., :576]
    assert flashinfer._loadable(q) is q


def test_given_out_is_filled(card):
    case, q = make()
    out = torch.empty(*q.shape[:2], 512, dtype=q.dtype)
    assert run(q, case.view, out=out).out is out
    assert_right(q, case.view, run(q, case.view, out=out))


@pytest.mark.parametrize("heads, num_padding", [(4, 0), (4, 3), (0, 2)])
def test_nothing_is_planned_where_there_is_nothing_to_do(heads, num_padding, card):
    case, q = make(heads=heads, lengths=([5], [0]), num_padding=num_padding)
    result = run(q, case.view)
    assert (result.out == 0).all() and (result.lse == -torch.inf).all()
    assert not StandIn.made


# ---- what is refused


def refusal(q, view, **options):
    out = torch.full((*q.shape[:2], view.format.kv_lora_rank), 5.0, dtype=q.dtype)
    with pytest.raises(UnsupportedError) as raised:
        run(q, view, **{"out": out, **options})
    assert (out == 5).all()
    text = str(raised.value)
    assert text.startswith("mla_decode: backend 'flashinfer' refuses: ")
    return text.partition("refuses: ")[2]


@pytest.mark.parametrize("name", [name for name in FORMAT_NAMES if name not in ("bf16", "fp16")])
def test_other_formats_are_refused(name, card):
    case, q = make(name)
    assert refusal(q, case.view) == (
        f'want a cache of format bf16 or fp16, got {name}, which backend="auto" reads'
    )


@pytest.mark.parametrize("dims", [(256, 64), (512, 0), (512, 32)])
def test_other_dims_are_refused(dims, card):
    case, q = make(dims=dims)
    assert refusal(q, case.view) == (
        f"want 512 latent and 64 rope columns, got {dims[0]} and {dims[1]}, which "
        'backend="auto" takes'
    )


def test_query_of_another_dtype_is_refused(card):
    case, q = make("fp16")
    assert refusal(q.to(BF16), case.view) == (
        "want q in the cache's dtype torch.float16, got torch.bfloat16: cast it"
    )


def test_batch_invariance_is_refused(card):
    case, q = make()
    assert refusal(q, case.view, deterministic="batch_invariant") == (
        'it cuts keys by the whole batch: backend="auto" can be batch_invariant'
    )


def test_num_splits_is_refused(card):
    case, q = make()
    assert refusal(q, case.view, num_splits=3) == (
        "it cuts keys by its own plan: leave num_splits out, got 3"
    )


def test_out_that_cannot_be_stored_in_16_bytes_is_refused(card):
    case, q = make()
    size = q.shape[0] * q.shape[1] * 512
    out = torch.full((size + 1,), 5.0, dtype=q.dtype)[1:].view(*q.shape[:2], 512)
    assert "start at a multiple of 16 bytes" in refusal(q, case.view, out=out)
    assert (out == 5).all()


def test_lengths_that_only_the_device_knows_are_refused(card):
    case, q = make()
    pages = case.cache.layer(0)
    unknown = PagedBatch(*(torch.tensor(x).int().to("meta") for x in host_data(case.batch)))
    out, lse = q.new_empty(*q.shape[:2], 512), torch.empty(q.shape[:2])
    with pytest.raises(UnsupportedError, match="only the device knows the lengths: build the "):
        flashinfer.mla_decode(q, pages, unknown, SCALE, None, False, False, out, lse)


def test_capture_is_refused_also_where_a_plan_is_there_already(card):
    case, q = make()
    run(q, case.view)
    card.is_capturing = True
    assert refusal(q, case.view) == (
        'it plans on the host, which a CUDA graph cannot capture: backend="auto" can be'
    )


def test_hole_among_a_requests_pages_is_refused(card):
    case, q = make(page_size=4)
    offsets, lengths, table = host_data(case.batch)
    table[3][0] = -1
    view = case.cache.view(0, PagedBatch(offsets, lengths, table))
    assert refusal(q, view) == (
        "request 3 has 2 tokens but page 0 of its row is -1, which no plan can express: "
        'backend="auto" takes it'
    )


def test_head_counts_that_would_lose_a_key_are_refused(card):
    case, q = make(heads=40)
    assert refusal(q, case.view) == (
        "with more than one new token in a request want 1, 2, 4, ... 64 or 128 heads, or at most "
        '64 tokens x heads, got 3 x 40: backend="auto" takes any'
    )
    assert not StandIn.made


@pytest.mark.parametrize("num_tokens, is_refused", [(7680, False), (7681, True)])
def test_more_work_than_a_plan_has_room_for_is_refused(num_tokens, is_refused):
    batch = PagedBatch([0, num_tokens], [0], [[0]])
    requests = flashinfer._busy_requests(batch, page_size=10_000)
    reason = flashinfer._unsupported_rows(requests, num_heads=128)
    if is_refused:
        assert reason == (
            "its plan has room for 15360 tiles of 64 tokens x heads, got 15362: cut the step"
        )
    else:
        assert reason is None


@pytest.mark.parametrize(
    "device, dtype, capability, reason",
    [
        ("cpu", BF16, (9, 0), "needs a CUDA device, got cpu"),
        ("cuda", torch.float32, (9, 0), "takes bfloat16 and float16, got torch.float32"),
        ("cuda", BF16, (7, 5), "needs compute capability 8.0, Some Card is older"),
        ("cuda", FP16, (8, 0), None),
    ],
)
def test_device_and_dtype_are_refused_by_the_table(device, dtype, capability, reason, card):
    card.capability = capability
    assert card.refuses(torch.device(device), dtype) == reason


def test_it_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    reason = "flashinfer is not installed (pip install 'kvkern[flashinfer]')"
    assert dict(explain("mla_decode", "cpu"))["flashinfer"] == reason
    case, q = make()
    assert refusal(q, case.view) == reason


def test_it_runs_only_by_name(card):
    rows = dict(explain("mla_decode", "cuda"))
    assert list(rows)[-1] == "flashinfer"
    assert rows["flashinfer"] == "runs on cuda only when named"


def imports_flashinfer(node):
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return any(name.split(".")[0] == "flashinfer" for name in names)


def test_no_other_file_imports_flashinfer_and_this_one_only_within_functions():
    for path in (ROOT / "kvkern").rglob("*.py"):
        tree = ast.parse(path.read_text())
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        within = sum(imports_flashinfer(node) for f in functions for node in ast.walk(f))
        assert sum(map(imports_flashinfer, ast.walk(tree))) == within, path
        assert within == (path.parts[-2:] == ("backends", "flashinfer.py")), path


# ---- the library itself

real = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
    ),
]


def on_card(test):
    for mark in real:
        test = mark(test)
    return test


@on_card
def test_the_stand_in_has_the_librarys_signatures():
    from flashinfer.mla import BatchMLAPagedAttentionWrapper as Wrapper

    for name in ("__init__", "plan", "run"):
        theirs = inspect.signature(getattr(Wrapper, name)).parameters
        ours = inspect.signature(getattr(StandIn, name)).parameters
        assert set(ours) <= set(theirs), name


@on_card
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [1, 16, 128])
def test_library_matches_fp64(heads, page_size, name):
    # lengths on both sides of a key tile, and one that is split
    lengths = ([62, 63, 64, 0, 5, 3000], [1, 3, 2, 2, 0, 4])
    case, q = make(name, heads=heads, lengths=lengths, page_size=page_size, device="cuda")
    q[-2:] = torch.nan
    assert_right(q, case.view, run(q, case.view))


@on_card
@pytest.mark.parametrize("heads", [5, 20, 96, 192])
def test_library_takes_any_head_count_for_single_tokens(heads):
    lengths = ([0, 62, 63, 64, 127, 128, 2000], [1] * 7)
    case, q = make(heads=heads, lengths=lengths, device="cuda")
    assert_right(q, case.view, run(q, case.view))


@on_card
def test_library_extends_by_many_tokens():
    case, q = make(heads=16, lengths=([100, 0, 40], [300, 129, 64]), device="cuda")
    assert_right(q, case.view, run(q, case.view))


@on_card
def test_library_reads_nothing_outside_a_request():
    case, q = make(page_size=64, device="cuda")
    poisoned = run(q, case.view)
    case.fill_unwritten(0)
    clean = run(q, case.view)
    assert poisoned.out.isfinite().all() and not poisoned.lse.isnan().any()
    assert torch.equal(clean.out, poisoned.out) and torch.equal(clean.lse, poisoned.lse)


@on_card
def test_library_takes_strided_queries():
    case, q = make(device="cuda")
    expected = run(q, case.view)
    for columns in (640, 700):
        wide = torch.full((len(q), 6, columns), torch.nan, dtype=q.dtype, device="cuda")
        wide[:, 1:5, :576] = q
        result = run(wide[:, 1:5, :576], case.view)
        assert torch.equal(result.out, expected.out) and torch.equal(result.lse, expected.lse)


@on_card
def test_library_is_right_on_steps_that_follow_one_another_without_waiting():
    case, q = make(device="cuda")
    bounds = dict(max_requests=8, max_tokens=12, max_pages=8, max_query_len=3, max_seq_len=100)
    batch = PagedBatch.static(**bounds, device="cuda")
    offsets, lengths, table = host_data(case.batch)
    results = []
    for num in range(len(lengths), 0, -1):
        batch.refill(offsets[: num + 1], lengths[:num], table[:num])
        results.append(run(q, case.cache.view(0, batch)))
    expected = run(q, case.view)
    for dropped, result in enumerate(results):
        end = offsets[len(lengths) - dropped]
        torch.testing.assert_close(result.out[:end], expected.out[:end], rtol=0.02, atol=0.02)
        assert (result.out[end:] == 0).all() and (result.lse[end:] == -torch.inf).all()


@on_card
def test_library_is_refused_in_a_capture():
    case, q = make(device="cuda")
    run(q, case.view)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(UnsupportedError, match="capture"):
        run(q, case.view)
