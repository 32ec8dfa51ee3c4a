"""Benchmarks: work is counted right, a wrong result gets no time, every row is whole."""

import json
import time

import pytest
import torch

from benchmarks import cases, peers, run
from benchmarks.cases import CASES, Case, Model, make_step
from kvkern import mla_decode, mla_prefill, write_kv
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


def test_keys_behind_the_causal_mask_are_not_counted():
    assert Case("mla_decode", Model("v3", 1), 1, 3, 10).num_flops == (8 + 9 + 10) * 2 * 1088
    assert Case("mla_prefill", Model("v3", 1), 1, 3, 3).num_flops == (1 + 2 + 3) * 2 * (192 + 128)


def test_prefill_work_is_counted_by_hand():
    new = Case("mla_prefill", Model("v3", 16), 2, 10, 10)
    heads = 2 * 10 * 16
    assert new.num_bytes == heads * 2 * (192 + 128 + 128 + 128) + 2 * 10 * 64 * 2 + heads * 4
    cached = Case("mla_prefill", Model("v3", 16), 2, 10, 40)
    weights = 16 * 512 * (128 + 128)
    assert cached.num_bytes - new.num_bytes == 2 * 30 * 1152 + 2 * weights
    more_pairs = 2 * 10 * 30 * 16 * 2 * (192 + 128)
    assert cached.num_flops - new.num_flops == more_pairs + 2 * (2 * 30) * weights


def test_every_case_has_a_format_and_a_name_of_its_own():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.cache_format.row_bytes > 0 and case.num_bytes > 0
        assert case.cached_len >= 0 and case.num_requests >= 1
    assert {case.op for case in CASES} == set(peers._PEERS)


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
        (Case("mla_decode", TINY, 8, 1, 9), nan_where_nobody_samples),
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
    assert run.main(arguments, TINY_CASES) == 0
    assert run.main([*arguments, "--op", "mla_decode", "--case", "fp8"], TINY_CASES) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["case"] for row in rows] == [*(case.name for case in TINY_CASES), rows[3]["case"]]
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
    assert run.main(["--device", "cuda", "--out", str(file)], TINY_CASES) == 0
    assert {json.loads(line)["clock"] for line in file.read_text().splitlines()} == {"cuda-graph"}
