"""Benchmarks: work is counted right, a wrong result gets no time, every row is whole."""

import json
import sys
import time
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import kvkern
from benchmarks import cases, linear, peers, plot, run
from benchmarks.absorb import ABSORB_CASES, AbsorbCase, AbsorbStep
from benchmarks.cases import CASES, Case, Model, log_normal_lens, make_step
from benchmarks.linear import LINEAR_CASES, Layer, LinearCase
from benchmarks.matmul import MATMUL_CASES, MatmulCase, MatmulStep
from benchmarks.quantize_cases import QUANTIZE_CASES, QuantizeCase
from kvkern import explain, mla_decode, mla_prefill, write_kv
from kvkern.reference.mla_decode import attend
from kvkern.testing.timing import Timing, copy_bandwidth, host_us, matmul_rate, time_us

TINY = Model("tiny", 2, kv_lora_rank=128, rope_dim=32, nope_dim=64, v_dim=64)
TINY_CASES = (
    Case("write_kv", TINY, 3, 1, 5),
    Case("write_kv", TINY, 2, 4, 70, "fp8"),
    Case("write_kv", TINY, 2, 1, 65, "fp8_ds_mla"),
    Case("mla_decode", TINY, 3, 2, 70, "fp8"),
    Case("mla_prefill", TINY, 2, 5, 5),
    Case("mla_prefill", TINY, 2, 5, 70),
    Case("write_kv", TINY, 2, 1, 65, "nvfp4"),
    Case("write_kv", TINY, 2, 2, 65, "fp8", packed_query=True),
    Case("mla_decode", TINY, 3, 1, 70, "fp8_token", page_size=16),
    Case("mla_decode", TINY, 3, 4, 70, page_size=1),
    Case("mla_decode", TINY, 5, 2, 70, ragged=True),
    Case("mla_decode", TINY, 5, 1, 70, "fp8_ds_mla", page_size=16, ragged=True),
    Case("mla_decode", TINY, 2, 20, 70, "fp8"),
)
TINY_QUANTIZE_CASES = (
    QuantizeCase("quantize_fp8", 5, 200, "group"),
    QuantizeCase("dequantize_fp8", 5, 200, "block", dtype=torch.float8_e5m2),
    QuantizeCase("rms_norm_quant_fp8", 5, 200, "tensor", is_static=True, has_residual=True),
    QuantizeCase("silu_and_mul_quant_fp8", 5, 200, "row"),
)
MACHINE = {"copy_gb_s": 1.0, "matmul_tflop_s": 1.0}


def fake_clock(implementations):
    return [
        run.Measured(Timing(10.0 * (i + 1), 9.0, 11.0), Timing(3.0, 2.0, 4.0), "fake")
        for i in range(len(implementations))
    ]


def test_write_bytes_are_counted_by_hand():
    # 128 decode tokens of 128 heads: bf16 row in, 576 bytes out, 64 rope columns of q in and out;
    # gamma, and one row of cos and sin as all are at one position
    per_token = 576 * 2 + 576 + 128 * 64 * 2 * 2
    case = Case("write_kv", Model("v3", 128), 128, 1, 1025, "fp8")
    assert case.num_bytes == 128 * per_token + 512 * 2 + 64 * 4
    assert case.num_flops == 0
    # all 576 columns of q, in bf16 and out in e4m3
    packed = Case("write_kv", Model("v3", 128), 128, 1, 1025, "fp8", packed_query=True)
    assert packed.num_bytes - case.num_bytes == 128 * 128 * (576 * 3 - 64 * 4)


def test_decode_work_is_counted_by_hand():
    case = Case("mla_decode", Model("v3", 128), 2, 1, 1000)
    assert case.num_bytes == 2 * 1000 * 1152 + 2 * 128 * (576 * 2 + 512 * 2 + 4)
    assert case.num_flops == 2 * 1000 * 128 * 2 * (576 + 512)
    grouped = Case("mla_decode", Model("v3", 128), 2, 1, 1000, "fp8_ds_mla")
    assert case.num_bytes - grouped.num_bytes == 2 * 1000 * (1152 - 656)


def test_bytes_of_quantizers_are_counted_by_hand():
    of = {case.op: case.num_bytes for case in TINY_QUANTIZE_CASES}
    assert of["quantize_fp8"] == 1000 * 3 + 5 * 2 * 4
    assert of["dequantize_fp8"] == 1000 * 3 + 2 * 4
    assert of["rms_norm_quant_fp8"] == 1000 * (2 + 2 + 2 + 1) + 200 * 2 + 4  # residual twice
    assert of["silu_and_mul_quant_fp8"] == 1000 * 5 + 5 * 4
    assert len({case.name for case in QUANTIZE_CASES}) == len(QUANTIZE_CASES)
    assert {case.op for case in QUANTIZE_CASES} == set(of)


@pytest.mark.parametrize("case", TINY_QUANTIZE_CASES, ids=lambda case: case.op)
def test_wrong_result_of_a_quantizer_is_told_and_never_timed(case, monkeypatch):
    (row,) = run.measure(case, MACHINE, fake_clock, device="cpu", with_peers=True)
    assert row["error"] is None and row["us"] == 10.0 and row["flops"] == 0
    right = getattr(kvkern, case.op)

    def sometimes_wrong(*args, backend, **options):
        result = right(*args, backend=backend, **options)
        if backend != "reference":
            values = result if isinstance(result, torch.Tensor) else result.values
            values[3, 70:90] = 0
        return result

    monkeypatch.setattr(kvkern, case.op, sometimes_wrong)
    (row,) = run.measure(case, MACHINE, pytest.fail, device="cpu")
    assert row["error"] and row["us"] is None


def test_keys_behind_the_causal_mask_are_not_counted():
    assert Case("mla_decode", Model("v3", 1), 1, 3, 10).num_flops == (8 + 9 + 10) * 2 * 1088
    assert Case("mla_prefill", Model("v3", 1), 1, 3, 3).num_flops == (1 + 2 + 3) * 2 * (192 + 128)


def test_ragged_work_is_counted_by_hand():
    case = Case("mla_decode", Model("v3", 16), 3, 2, 100, "fp8", ragged=True)
    # 98 cached tokens each, shared out as exp(-0.967) : 1 : exp(0.967); 2 new ones
    assert sorted(case.seq_lens) == [30, 75, 195]
    assert case.num_bytes == (30 + 75 + 195) * 576 + 3 * 2 * 16 * (576 * 2 + 512 * 2 + 4)
    pairs = (29 + 30) + (74 + 75) + (194 + 195)
    assert case.num_flops == pairs * 16 * 2 * (576 + 512)


def test_ragged_lengths_are_log_normal_in_no_order_and_have_the_total_of_equal_ones():
    lens = log_normal_lens(128, 4096)
    assert lens.sum() == 128 * 4096 and lens.min() >= 0
    logs = np.log(lens)
    assert np.std(logs) == pytest.approx(1.0, abs=0.02)
    # exp(sigma^2 / 2) below the mean; a little more, as quantiles have no far tail
    assert np.mean(logs) == pytest.approx(np.log(4096) - 0.5, abs=0.03)
    assert abs(np.corrcoef(np.arange(128), logs)[0, 1]) < 0.2
    assert log_normal_lens(3, 0).tolist() == [0, 0, 0]
    for case in CASES:
        equal = Case(case.op, case.model, case.num_requests, case.query_len, case.seq_len)
        if case.ragged:
            assert (case.num_flops, case.seq_lens.sum()) == (equal.num_flops, equal.seq_lens.sum())
            assert equal.name in {case.name for case in CASES}


def test_only_decode_is_ragged():
    with pytest.raises(ValueError, match="ragged: want mla_decode, got write_kv"):
        Case("write_kv", TINY, 3, 1, 5, ragged=True)


def test_prefill_work_is_counted_by_hand():
    new = Case("mla_prefill", Model("v3", 16), 2, 10, 10)
    heads = 2 * 10 * 16
    assert new.num_bytes == heads * 2 * (192 + 128 + 128 + 128) + 2 * 10 * 64 * 2 + heads * 4
    cached = Case("mla_prefill", Model("v3", 16), 2, 10, 40)
    weights = 16 * 512 * (128 + 128)
    assert cached.num_bytes - new.num_bytes == 2 * 30 * 1152 + 2 * weights
    more_pairs = 2 * 10 * 30 * 16 * 2 * (192 + 128)
    assert cached.num_flops - new.num_flops == more_pairs + 2 * (2 * 30) * weights


def test_linear_work_is_counted_by_hand():
    layer = Layer("layer", 512, 1024)
    rows = 2 * 3 * (512 + 1024)
    w8, w4 = (LinearCase(op, layer, 3) for op in ("matmul_w8a16", "matmul_w4a16"))
    assert w8.num_bytes == 512 * 1024 + 512 * 4 + rows
    assert w4.num_bytes == 512 * 512 + 512 * 8 * 4 + rows
    assert w8.num_flops == w4.num_flops == 2 * 3 * 512 * 1024


@pytest.mark.parametrize("op", ["matmul_w8a16", "matmul_w4a16", "matmul_w8a8"])
def test_linear_layers_are_checked_and_timed_beside_cublas(op, monkeypatch):
    case = LinearCase(op, Layer("tiny", 96, 256), 5)
    rows = run.measure(case, MACHINE, fake_clock, device="cpu", with_peers=True)
    assert [row["implementation"] for row in rows] == ["kvkern", "cublas"]
    assert [row["error"] for row in rows] == [None, None]
    right = linear._MATMULS[op]

    def sometimes_wrong(*args, **options):
        product = right(*args, **options)
        return product if options.get("backend") == "reference" else product * 1.1

    monkeypatch.setitem(linear._MATMULS, op, sometimes_wrong)
    (row,) = run.measure(case, MACHINE, pytest.fail, device="cpu")
    assert row["error"] and row["us"] is None


def test_only_fp8_with_many_rows_may_have_e4m3_weights():
    of = {case.name for case in TINY_CASES if case.may_have_e4m3_weights}
    assert of == {TINY_CASES[12].name}


def test_every_case_has_a_format_and_a_name_of_its_own():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.cache_format.row_bytes > 0 and case.num_bytes > 0
        assert case.seq_lens.shape == (case.num_requests,) and case.num_requests >= 1
        assert case.seq_lens.min() >= case.query_len
    with_peers = (*CASES, *MATMUL_CASES, *LINEAR_CASES, *ABSORB_CASES)
    assert len({case.name for case in with_peers}) == len(with_peers)
    assert {case.op for case in with_peers} == set(peers._PEERS)


def test_decode_cases_hold_each_kind_that_is_compared():
    decode = [case for case in CASES if case.op == "mla_decode"]
    shapes = {  # of one GPU in eight and of one alone, few requests and many
        (128, 128, 1, 4096), (64, 128, 1, 8192), (32, 128, 2, 8192), (128, 16, 1, 4096),
        (16, 16, 1, 8192), (1, 128, 1, 32768), (1, 16, 1, 131072), (4, 128, 1, 131072),
        (256, 128, 1, 1024), *((32, heads, q, 8192) for heads in (16, 128) for q in (2, 4)),
        *((b, heads, 1, s) for heads in (8, 32, 64) for b, s in ((128, 4096), (16, 8192))),
    }  # fmt: skip
    for name in ("bf16", "fp8"):
        of_format = [case for case in decode if case.format == name]
        plain = [case for case in of_format if case.page_size == 64 and not case.ragged]
        assert {
            (case.num_requests, case.model.num_heads, case.query_len, case.seq_len)
            for case in plain
        } == shapes
        others = [case for case in of_format if case not in plain]
        assert {(case.model.num_heads, case.page_size, case.ragged) for case in others} == {
            (heads, *kind) for heads in (16, 128) for kind in ((64, True), (16, False), (1, False))
        }
    for name in ("fp8_ds_mla", "fp8_token"):
        few_heads = [case for case in decode if case.format == name and case.model.num_heads == 16]
        assert len(few_heads) == 3


TINY_PRODUCTS = tuple(MatmulCase(scaling, 5, 272, 384) for scaling in ("tensor", "row", "block"))


def test_work_of_a_product_is_counted_by_hand():
    case = MatmulCase("block", 64, 2112, 7168)
    scales = 4 * 56 * (64 + 17)
    assert case.num_bytes == 64 * 7168 + 2112 * 7168 + 2 * 64 * 2112 + scales
    assert case.num_flops == 2 * 64 * 2112 * 7168
    assert case.name == "scaled_mm-deepseek_v3-block-M64-N2112-K7168"
    assert len({case.name for case in MATMUL_CASES}) == len(MATMUL_CASES)
    experts = MatmulCase("block", 64, 2112, 7168, num_experts=32)
    assert experts.num_bytes == 32 * case.num_bytes and experts.num_flops == 32 * case.num_flops
    assert experts.name == "scaled_mm-deepseek_v3-block-E32-M64-N2112-K7168"


@pytest.mark.parametrize("case", TINY_PRODUCTS, ids=lambda case: case.scaling)
def test_products_are_checked_and_stand_beside_torchs(case, monkeypatch):
    (row, *others) = run.measure(case, MACHINE, fake_clock, device="cpu", with_peers=True)
    assert row["error"] is None and row["us"] == 10.0 and row["checked"]
    names = {other["implementation"] for other in others}
    assert "torch_bf16" in names and (case.scaling == "block" or "torch_fast" in names)
    assert all(other["error"] is None for other in others)
    step = MatmulStep(case, "cpu")
    wrong = step.kvkern().call()
    wrong[4, 271] = 0
    with pytest.raises(AssertionError, match="budget"):
        step.check(wrong)


def test_products_of_experts_are_checked_and_stand_beside_torchs():
    case = MatmulCase("block", 5, 256, 384, num_experts=3)
    (row, *others) = run.measure(case, MACHINE, fake_clock, device="cpu", with_peers=True)
    assert row["error"] is None and row["us"] == 10.0 and row["checked"]
    assert [other["implementation"] for other in others] == ["torch_bf16"]
    step = MatmulStep(case, "cpu")
    assert step.row_offsets.tolist() == [0, 5, 10, 15]
    wrong = step.kvkern().call()
    wrong[:5] = wrong[5:10]  # another expert's
    with pytest.raises(AssertionError, match="budget"):
        step.check(wrong)


def test_bias_of_sums_that_are_cut_off_is_told():
    step = MatmulStep(TINY_PRODUCTS[0], "cpu")
    right = step.kvkern().call()
    assert abs(step.bias_of(right)) < 1e-3
    assert step.bias_of(right * 0.98) == pytest.approx(-0.02, abs=2e-3)


def test_work_of_absorbing_is_counted_by_hand():
    model = Model("deepseek_v3_tp8", 16)
    query, output = (AbsorbCase(model, side, 3) for side in ("query", "output"))
    assert query.num_bytes == output.num_bytes == 16 * 2 * (128 * 512 + 3 * (128 + 512))
    assert query.num_flops == 2 * 16 * 3 * 128 * 512
    fp8 = AbsorbCase(model, "output", 3, "fp8")
    assert fp8.num_bytes == 16 * (128 * 512 + 4 * 4 + 2 * 3 * (128 + 512))
    assert fp8.name == "mla_absorb-deepseek_v3_tp8-output-fp8-T3"
    assert len({case.name for case in ABSORB_CASES}) == len(ABSORB_CASES)


@pytest.mark.parametrize("side", ["query", "output"])
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_absorbing_is_checked_and_stands_beside_torchs(side, weights):
    case = AbsorbCase(Model("tiny", 2, kv_lora_rank=256, rope_dim=32), side, 5, weights)
    (row, *others) = run.measure(case, MACHINE, fake_clock, device="cpu", with_peers=True)
    assert row["error"] is None and row["us"] == 10.0 and row["checked"]
    assert [other["implementation"] for other in others] == ["torch_bmm", "torch_einsum"][
        : 2 if weights == "bf16" else 1
    ]
    assert all(other["error"] is None for other in others)
    step = AbsorbStep(case, "cpu")
    right = step.kvkern().call().clone()
    (peer, *_) = peers.peers_of(step)
    error = (peer.call().double() - right.double()).norm() / right.double().norm()
    assert error < 2**-8  # weights, sums: of bf16 each
    right[4, 1, -1] += 9
    with pytest.raises(AssertionError, match="budget"):
        step.check(right)
    if side == "query":
        step.packed[0, 0, -1] = 1
        with pytest.raises(AssertionError, match="rope columns"):
            step.check(step.out)


RIGHT = {"write_kv": write_kv, "mla_decode": mla_decode, "mla_prefill": mla_prefill}


def larger_eps(*args, **options):
    return write_kv(*args, eps=1e-2, **options)


def query_left_out(*args, q_rope_out, **options):
    return write_kv(*args, q_rope_out=q_rope_out.clone(), **options)


def larger_scale(*args, softmax_scale):
    return mla_decode(*args, softmax_scale=1.2 * softmax_scale)


def nan_where_nobody_samples(*args, **options):
    result = mla_decode(*args, **options)
    result.out[2] = torch.nan
    return result


def last_key_unseen_by_the_longest(q, cache, *, softmax_scale, backend=None):
    result = mla_decode(q, cache, softmax_scale=softmax_scale)
    longest = int(cache.batch.cache_lengths.argmax())
    last = int(cache.batch.input_row_offsets[longest + 1]) - 1
    result.out[last] = result.out[last - 1]
    return result


def shuffled_rope_keys(q, k_nope, k_rope, *args, **options):
    return mla_prefill(q, k_nope, k_rope.flip(0), *args, **options)


def cached_context_of_other_weights(*args, w_uk, **options):
    return mla_prefill(*args, w_uk=w_uk.flip(0), **options)


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        (TINY_CASES[0], larger_eps),
        (TINY_CASES[1], query_left_out),
        (TINY_CASES[3], larger_scale),
        (TINY_CASES[12], larger_scale),
        (Case("mla_decode", TINY, 8, 1, 9), nan_where_nobody_samples),
        (TINY_CASES[10], last_key_unseen_by_the_longest),
        (TINY_CASES[4], shuffled_rope_keys),
        (TINY_CASES[5], cached_context_of_other_weights),
    ],
)
def test_wrong_result_is_told_and_never_timed(case, wrong, monkeypatch):
    def sometimes_wrong(*args, **options):
        is_reference = options.get("backend") == "reference"
        return (RIGHT[case.op] if is_reference else wrong)(*args, **options)

    (row,) = run.measure(case, MACHINE, fake_clock, device="cpu")
    assert row["error"] is None and row["us"] == 10.0
    monkeypatch.setattr(cases, case.op, sometimes_wrong)
    told = []
    no_clock = pytest.fail  # with the implementations for its reason, should it be called
    (row,) = run.measure(case, MACHINE, no_clock, device="cpu", tell=told.append)
    assert row["error"] and row["us"] is None and "wrong and not timed" in told[-1]


def test_calls_in_a_row_have_tensors_of_their_own_and_the_time_of_one(monkeypatch):
    case = LinearCase("matmul_w4a16", Layer("tiny", 96, 256), 5)
    weights = []

    def matmul(x, weight, **options):
        weights.append(weight.values.data_ptr())
        return kvkern.matmul_w4a16(x, weight, **options)

    def clock(implementations):
        weights.clear()
        for implementation in implementations:
            implementation.call()
        return fake_clock(implementations)

    monkeypatch.setitem(linear._MATMULS, case.op, matmul)
    rows = run.measure(case, MACHINE, clock, device="cpu", with_peers=True, in_a_row=4)
    assert len(weights) == len(set(weights)) == 4
    assert [row["us"] for row in rows] == [2.5, 5.0] and rows[0]["host_us"] == 0.75
    assert {row["clock"] for row in rows} == {"fake, 4 in a row"}


def test_calls_in_a_row_are_all_of_one_implementation_or_none(monkeypatch, capsys):
    case = LinearCase("matmul_w4a16", Layer("tiny", 96, 256), 5)
    steps = []

    def here_once(step):
        steps.append(step)
        return linear.cublas(step) if len(steps) == 1 else None

    monkeypatch.setitem(peers._PEERS, case.op, (here_once,))
    with pytest.raises(ValueError, match="shorter"):
        run.measure(case, MACHINE, pytest.fail, device="cpu", with_peers=True, in_a_row=3)
    assert len(steps) == 3
    with pytest.raises(SystemExit):
        run.main(["--in-a-row", "0", "--device", "cpu"])
    assert "--in-a-row: want at least 1, got 0" in capsys.readouterr().err


def test_calls_in_a_row_make_no_peer_that_is_not_asked_for(monkeypatch):
    case = LinearCase("matmul_w4a16", Layer("tiny", 96, 256), 5)
    monkeypatch.setitem(peers._PEERS, case.op, (pytest.fail,))
    (row,) = run.measure(case, MACHINE, fake_clock, device="cpu", in_a_row=2)
    assert row["us"] == 5.0


def test_missing_peers_are_lines_and_present_ones_rows(monkeypatch):
    monkeypatch.setenv("PEERS", "/nonexistent")
    told = []
    for case in [TINY_CASES[0], Case("mla_decode", TINY, 3, 2, 70), TINY_CASES[4]]:
        monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
        rows = run.measure(
            case, MACHINE, fake_clock, device="cpu", with_peers=True, tell=told.append
        )
        expected = ["kvkern", "separate_launches"] if case.op == "write_kv" else ["kvkern"]
        assert [row["implementation"] for row in rows] == expected
        assert [row["times_kvkern"] for row in rows] == [1.0, 2.0][: len(rows)]
    missing = [line for line in told if "not here" in line]
    assert len(missing) >= 5 and any("flash_mla" in line for line in missing)


def attend_pages(q, pages, tables, lengths, rank, scale):
    """Queries [B, q, H, L+R] on the first ``lengths[b]`` rows of the pages ``tables[b]``."""
    outs = []
    for queries, page_ids, length in zip(q.double(), tables, lengths.tolist(), strict=True):
        assert page_ids.min() >= 0
        rows = pages[page_ids.long()].flatten(0, 1)[:length].double()
        positions = torch.arange(length)
        visible = positions <= positions[-len(queries) :, None]
        outs.append(attend(queries, rows, rows[:, :rank], visible, scale)[0])
    return torch.stack(outs).to(q.dtype)


class FakeFlashMLA(ModuleType):
    def get_mla_metadata(self):
        return None, None

    def flash_mla_with_kvcache(
        self, q, pages, table, lengths, rank, schedule, *, softmax_scale, causal
    ):
        assert causal and pages.shape[1] == 64
        return attend_pages(q, pages[:, :, 0], table, lengths, rank, softmax_scale), None


class FakeFlashInfer:
    def __init__(self, workspace, backend):
        pass

    def plan(self, q_indptr, indptr, indices, lengths, *dims_and_options):
        _, rank, _, page_size, causal, scale = dims_and_options[:6]
        assert causal and indptr[-1] == len(indices)
        tables = [indices[a:b] for a, b in pairwise(indptr)]
        assert [len(table) for table in tables] == (-(-lengths // page_size)).tolist()
        self.given = tables, lengths, rank, scale

    def run(self, q_nope, q_rope, latent, rope):
        q = torch.cat([q_nope, q_rope], dim=-1).unflatten(0, (len(self.given[0]), -1))
        return attend_pages(q, torch.cat([latent, rope], dim=-1), *self.given).flatten(0, 1)


class FakeFA3:
    def get_scheduler_metadata(self, num_requests, max_q, max_k, *others):
        return max_k

    def fwd(self, q_rope, rope, latent, _k, _v, q_nope, _out, q_indptr, *others):
        lengths, max_q, max_k, table = others[3:7]
        scale, causal, schedule = others[15], others[16], others[21]
        assert causal and max_k == schedule == lengths.max()
        q = torch.cat([q_nope, q_rope], dim=-1).unflatten(0, (-1, max_q))
        pages = torch.cat([latent, rope], dim=-1)[:, :, 0]
        return [attend_pages(q, pages, table, lengths, q_nope.shape[-1], scale).flatten(0, 1)]


@pytest.mark.parametrize("page_size", [64, 16, 1])
@pytest.mark.parametrize("ragged", [False, True])
def test_peers_are_given_what_their_calls_define(ragged, page_size, monkeypatch):
    flashinfer = SimpleNamespace(BatchMLAPagedAttentionWrapper=FakeFlashInfer)
    monkeypatch.setitem(sys.modules, "flash_mla", FakeFlashMLA("flash_mla"))
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", flashinfer)
    monkeypatch.setattr(peers, "_load", lambda library: FakeFA3())
    case = Case("mla_decode", TINY, 5, 2, 150, page_size=page_size, ragged=ragged)
    found = list(peers.peers_of(make_step(case, "cpu")))
    only_of_64 = ["flash_mla"] if page_size == 64 else []
    assert [peer.name for peer in found] == [*only_of_64, "flashinfer", "fa3"]
    for peer in found:
        peer.check()


@pytest.mark.gpu
def test_kernels_that_auto_does_not_take_stand_beside_the_one_that_it_takes(device):
    step = make_step(Case("mla_decode", TINY, 2, 1, 40), device)
    rows = explain("mla_decode", device)
    auto = next(name for name, reason in rows if reason is None)
    for name in ("triton", "hopper"):
        beside = getattr(peers, f"kvkern_{name}")(step)
        assert (beside is None) == (name == auto)
        if beside is not None:
            assert beside.name == f"kvkern_{name}"


def test_flash_mla_and_its_fork_take_pages_of_64_only(monkeypatch):
    monkeypatch.setattr(peers, "_load", pytest.fail)
    for name, peer in {"bf16": peers.flash_mla, "fp8": peers.flash_mla_fp8}.items():
        assert (
            peer(make_step(Case("mla_decode", TINY, 2, 1, 40, name, page_size=16), "cpu")) is None
        )


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8_ds_mla"])
def test_separate_launches_are_checked(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    step = make_step(Case("write_kv", TINY, 2, 4, 70, name), "cpu")
    peers.separate_launches(step).check()
    monkeypatch.setattr(peers, "_norm", lambda latent, gamma: latent)
    with pytest.raises(AssertionError, match="budget"):
        peers.separate_launches(step).check()


def test_runner_writes_whole_json_lines(tmp_path, capsys):
    file = tmp_path / "results" / "cpu.jsonl"
    arguments = ["--device", "cpu", "--out", str(file)]
    assert run.main(arguments, [*TINY_CASES, *TINY_QUANTIZE_CASES]) == 0
    assert run.main([*arguments, "--op", "mla_decode", "--case", "fp8-B3"], TINY_CASES) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    names = [case.name for case in (*TINY_CASES, *TINY_QUANTIZE_CASES)]
    assert [row["case"] for row in rows] == [*names, rows[3]["case"]]
    for row in rows:
        assert row.keys() == rows[0].keys()
        assert row["clock"] == "host" and row["device"] == "cpu" and row["error"] is None
        assert 0 < row["p10_us"] <= row["us"] <= row["p90_us"]
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        assert row["percent_of_copy"] == pytest.approx(100 * row["gb_s"] / row["copy_gb_s"])
        assert {"driver", "torch", "triton", "commit", "date"} <= row.keys()
    printed = capsys.readouterr().out
    assert all(case.name in printed for case in TINY_CASES) and "TFLOP/s" in printed
    assert run.main([*arguments, "--case", "no such case"], TINY_CASES) == 2


def result_row(implementation="kvkern", case="a", **others):
    row = dict(op="mla_decode", case=case, implementation=implementation, error=None, us=2.0)
    row |= dict(bytes=1_000_000, flops=30_000_000, device="card", copy_gb_s=3000.0)
    return row | dict(matmul_tflop_s=700.0) | others


def test_roofline_holds_right_timed_rows_of_the_op_by_implementation():
    rows = [
        result_row(),
        result_row(case="b", bytes=500_000, us=1.0, copy_gb_s=3050.0),
        result_row("peer", flops=60_000_000, us=4.0, matmul_tflop_s=710.0),
        result_row("wrong peer", error="over the budget", copy_gb_s=9999.0),
        result_row("late", us=None, matmul_tflop_s=9999.0),
        result_row("prefill", op="mla_prefill"),
        result_row("copy", flops=0),
    ]
    assert plot.roofline(rows, "mla_decode") == (
        "card", 3.05, 710.0, {"kvkern": [(30.0, 15.0), (60.0, 30.0)], "peer": [(60.0, 15.0)]},
    )  # fmt: skip


def test_roofline_shows_the_last_row_of_a_case_and_implementation():
    rows = [result_row(us=8.0), result_row("peer"), result_row(), result_row("peer", error="wrong")]
    assert plot.roofline(rows, "mla_decode").points == {"kvkern": [(30.0, 15.0)]}


def test_roofline_is_of_one_device():
    with pytest.raises(ValueError, match=r"of one device, got \['card', 'other'\]"):
        plot.roofline([result_row(), result_row("peer", device="other")], "mla_decode")
    with pytest.raises(ValueError, match=r"mla_prefill: .* got \[\]"):
        plot.roofline([result_row()], "mla_prefill")


def test_roofline_is_drawn_as_counted():
    pytest.importorskip("matplotlib", reason="pip install kvkern[bench]")
    points = {
        "kvkern": [plot.Point(30.0, 60.0), plot.Point(500.0, 600.0)],
        "peer": [plot.Point(40.0, 70.0)],
    }
    (axes,) = plot.draw(plot.Roofline("card", 3.0, 750.0, points), "mla_decode").axes
    lines = {line.get_label(): line for line in axes.lines}
    drawn = {name: line.get_xydata().tolist() for name, line in lines.items()}
    assert drawn["kvkern"] == [[30, 60], [500, 600]] and drawn["peer"] == [[40, 70]]
    assert drawn["copy, 3.00 TB/s"] == [[15, 45], [250, 750]]
    assert drawn["bf16 matmul, 750 TFLOP/s"] == [[250, 750], [1000, 750]]
    assert lines["kvkern"].get_marker() != lines["peer"].get_marker()
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert {text.get_text() for text in axes.get_legend().texts} == drawn.keys()


def test_one_command_makes_a_png_of_recorded_rows(tmp_path):
    pytest.importorskip("matplotlib", reason="pip install kvkern[bench]")
    results, png = tmp_path / "results.jsonl", tmp_path / "decode.png"
    arguments = ["--device", "cpu", "--op", "mla_decode", "--out", str(results)]
    assert run.main(arguments, TINY_CASES) == 0
    plot.main([str(results), "--out", str(png)])
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and png.stat().st_size > 10_000
    with pytest.raises(SystemExit, match="mla_prefill: want right"):
        plot.main([str(results), "--op", "mla_prefill", "--out", str(png)])


def test_wrong_result_fails_the_run(monkeypatch):
    monkeypatch.setattr(cases.WriteStep, "kvkern", lambda self: wrong_implementation())
    assert run.main(["--device", "cpu"], TINY_CASES[:1]) == 1


def wrong_implementation():
    def check():
        raise AssertionError("bytes differ")

    return cases.Implementation("kvkern", pytest.fail, check)


def test_commit_comes_from_the_environment_before_git(monkeypatch):
    monkeypatch.setenv("KVKERN_COMMIT", "abc123")
    assert run.describe_machine(torch.device("cpu"))["commit"] == "abc123"


def test_host_time_is_that_of_the_call():
    timing = host_us(lambda: time.sleep(2e-3), repeats=10)
    assert 2000 <= timing.p10 <= timing.median <= timing.p90
    naps = iter([0, 0, 0, *[1e-3] * 8, 0.1, 0.1])  # three to warm up
    timing = host_us(lambda: time.sleep(next(naps)), repeats=10)
    assert timing.median < 50_000 < timing.p90


def test_limits_of_the_machine_have_the_right_order_of_magnitude():
    assert 0.1 < copy_bandwidth("cpu", num_bytes=2**22) < 1000
    assert 1e-5 < matmul_rate("cpu", size=64) < 10


@pytest.mark.gpu
def test_gpu_time_leaves_the_host_out():
    x = torch.zeros(1, device="cuda")

    def call():
        time.sleep(1e-3)
        x.add_(1)

    assert time_us(call, graph=True).median < 100 < 1000 <= host_us(call).median


@pytest.mark.gpu
def test_gpu_time_grows_with_the_work():
    small, large = (torch.zeros(n << 20, dtype=torch.uint8, device="cuda") for n in (64, 256))
    for graph in (False, True):
        times = [time_us(x.zero_, graph=graph).median for x in (small, large)]
        assert 1.5 < times[1] / times[0] < 6
    assert 200 < copy_bandwidth() < 20_000 and 10 < matmul_rate() < 10_000


@pytest.mark.gpu
def test_every_op_is_timed_as_a_graph_on_a_gpu(tmp_path):
    file = tmp_path / "gpu.jsonl"
    every = [*TINY_CASES, *TINY_QUANTIZE_CASES]
    assert run.main(["--device", "cuda", "--out", str(file)], every) == 0
    assert {json.loads(line)["clock"] for line in file.read_text().splitlines()} == {"cuda-graph"}
