"""``python -m kvkern quality``: its figures are right and repeat; the docs' are the same."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

from kvkern import ArgumentError, CacheFormat, CacheScales
from kvkern.layout import FORMAT_NAMES

pytest.importorskip("transformers")

from kvkern.__main__ import main
from kvkern._cli import display, quality
from kvkern.integrations.transformers import PagedModel
from kvkern.testing.models import tiny_model
from tests.test_cli import byte_level_tokenizer

DOCS = Path(__file__).parents[1] / "docs" / "formats.md"
SHORT = ["quality", "--device", "cpu", "--prompt", "a page", "or two pages of text"]


@pytest.fixture(autouse=True)
def many_threads_again():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def storage():
    """Storage errors by format and how it is scaled, then by gammas."""
    found = {}
    for error in quality.storage_errors(quality._variants(FORMAT_NAMES), "cpu"):
        found.setdefault((error.format, error.scales), {})[error.gamma] = error
    return found


def report_of(tmp_path, *arguments):
    path = tmp_path / "report.json"
    assert main([*SHORT, "--out", str(path), *arguments]) == 0
    return json.loads(path.read_text())


def test_report_has_every_format_in_a_sane_order(tmp_path):
    report = report_of(tmp_path)
    wanted = {(v.format_name, v.scales) for v in quality._variants(FORMAT_NAMES)}
    assert len(wanted) == len(FORMAT_NAMES) + 2  # fp8 and nvfp4 twice
    logits = {(row["format"], row["scales"]): row for row in report["logits"]}
    assert set(logits) == wanted and len(report["logits"]) == len(wanted)
    assert len(report["storage"]) == 3 * len(wanted)
    for gamma in quality._GAMMAS:
        rows = [row for row in report["storage"] if row["gamma"] == gamma]
        latent = {row["format"]: row["latent_error"] for row in rows if row["scales"] != "unit"}
        in_order = [latent[name] for name in ("fp32", "fp16", "bf16", "fp8_ds_mla", "nvfp4")]
        assert in_order == sorted(in_order) and in_order[3] > 10 * in_order[2]
        assert latent["fp8"] < latent["nvfp4"] and latent["fp8_token"] < latent["nvfp4"]
    for figure in ("error", "kl_mean"):
        ds_mla = logits["fp8_ds_mla", None][figure]
        assert 0 < logits["bf16", None][figure] < ds_mla < logits["nvfp4", "calibrated"][figure]
    assert (report["baseline"], report["num_tokens"]) == ("fp32", 6 + 20)


def test_models_own_format_has_no_error_against_itself(tmp_path):
    (row,) = report_of(tmp_path, "--formats", "bf16", "--dtype", "bf16")["logits"]
    assert (row["error"], row["kl_max"], row["top1_agreement"]) == (0.0, 0.0, 1.0)
    assert row["cosine"] == pytest.approx(1.0)


def test_calibrated_scales_beat_unit_scales_where_gammas_are_small(storage):
    for name, factor in (("fp8", 10.0), ("nvfp4", 1.5)):
        calibrated, unit = (storage[name, way]["near 0.002"] for way in ("calibrated", "unit"))
        assert unit.latent_error > factor * calibrated.latent_error
        assert unit.latent_cosine < calibrated.latent_cosine
        assert calibrated.latent_error == pytest.approx(
            storage[name, "calibrated"]["near 1"].latent_error, rel=0.01
        )


def test_storage_error_is_what_rounding_to_the_format_must_cost(storage):
    """Values spread over a binade that is cut in 2**m: steps / sqrt(12), and 1.5 in the mean."""
    for name, mantissa_bits in (("bf16", 7), ("fp16", 10), ("fp8_ds_mla", 3)):
        want = 2.0**-mantissa_bits / math.sqrt(12) / 1.5
        for error in storage[name, None].values():
            assert error.latent_error == pytest.approx(want, rel=0.2)
            assert 1 - error.latent_cosine < 2 * error.latent_error**2
    for error in storage["fp32", None].values():
        assert 0 < error.latent_error < 1e-7 and 0 < error.rope_error < 1e-7


def test_every_token_reads_the_cache_alone_and_gets_the_logits_of_transformers(monkeypatch):
    """In one chunk and in several; prefill, which attends to tokens before they are stored, not."""
    monkeypatch.delattr("kvkern.integrations.transformers.mla_prefill")
    model = tiny_model("deepseek_v3", vocab_size=256)
    quality._spread_gammas(model, seed=0)
    paged = PagedModel(model)
    for length in (quality._CHUNK + 20, 5):
        prompt = torch.randint(256, (length,)).tolist()
        with torch.no_grad():
            want = model(torch.tensor([prompt])).logits[0]
        cache = quality._new_cache(paged.format, None, 2, length, paged.device)
        got = quality._logits(paged, cache, prompt)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_logit_figures_are_those_of_their_formulas():
    want = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 4.0]])
    got = torch.tensor([[6.0, 1.0, 2.0], [5.0, 5.0, 9.0]])  # second row: as it was, and 5 more
    difference, size, cosine, kl, agrees = quality._compare(got, want).tolist()
    assert difference == pytest.approx([16 + 9 + 1, 0.0]) and size == pytest.approx([2.0, 32 / 3])
    assert cosine == pytest.approx([-5 / math.sqrt(2 * 14), 1.0]) and agrees == [0.0, 1.0]
    p, q = want[0].softmax(0), got[0].softmax(0)
    assert kl == pytest.approx([float((p * (p / q).log()).sum()), 0.0], abs=1e-6)


def test_error_is_over_all_tokens_of_all_prompts_and_the_worst_token_counts():
    model = tiny_model("deepseek_v3", vocab_size=256)
    prompts = [list(b"first of two"), list(b"second")]
    paged = [PagedModel(model), PagedModel(model, cache_format="fp8_ds_mla")]
    caches = [quality._new_cache(one.format, None, 2, 12, one.device) for one in paged]
    want, got = (
        torch.cat([quality._logits(one, cache, prompt) for prompt in prompts])
        for one, cache in zip(paged, caches, strict=True)
    )
    comparison = quality.Comparison(model, prompts)
    error = comparison.measure(quality.Variant("fp8_ds_mla", None))
    assert comparison.num_tokens == len(want) == 18
    want, got = (x - x.mean(-1, keepdim=True) for x in (want, got))
    assert error.error == pytest.approx(float((got - want).norm() / want.norm()), rel=1e-4)
    cosine = torch.cosine_similarity(got.double(), want.double(), dim=-1)
    assert 1 - error.cosine == pytest.approx(float(1 - cosine.min()), rel=1e-3)
    log_p, log_q = want.log_softmax(-1), got.log_softmax(-1)
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    assert error.kl_mean == pytest.approx(float(kl.mean()), rel=1e-3)
    assert error.kl_max == pytest.approx(float(kl.max()), rel=1e-3)
    same = (got.argmax(-1) == want.argmax(-1)).float().mean()
    assert error.top1_agreement == pytest.approx(float(same))


def test_report_repeats_itself_for_a_seed(tmp_path):
    first = report_of(tmp_path, "--formats", "fp8_token", "fp8")
    assert report_of(tmp_path, "--formats", "fp8_token", "fp8") == first
    other = report_of(tmp_path, "--formats", "fp8_token", "fp8", "--seed", "1")
    assert other["storage"] == first["storage"] and other["logits"] != first["logits"]


@torch.no_grad()
def test_gammas_spread_and_the_model_attends_as_strongly_as_before():
    model = tiny_model("deepseek_v3", vocab_size=256)
    attention = model.base_model.layers[0].self_attn
    before = attention.kv_b_proj.weight * attention.kv_a_layernorm.weight
    quality._spread_gammas(model, seed=0)
    gamma = attention.kv_a_layernorm.weight
    assert float(gamma.median()) == pytest.approx(0.05, rel=0.2)
    assert float(gamma.log().std()) == pytest.approx(1.0, rel=0.1)
    after = attention.kv_b_proj.weight * gamma
    assert float(after.norm() / before.norm()) == pytest.approx(1.0, rel=0.1)
    gamma = gamma.clone()
    quality._spread_gammas(model, seed=7)
    assert not torch.equal(attention.kv_a_layernorm.weight, gamma)


def test_small_model_gets_spread_gammas_and_a_checkpoint_keeps_its_own(
    tmp_path, monkeypatch, capsys
):
    medians = []

    class Observed(quality.Comparison):
        def __init__(self, hf_model, prompts):
            norm = hf_model.base_model.layers[0].self_attn.kv_a_layernorm
            medians.append(float(norm.weight.detach().median()))
            super().__init__(hf_model, prompts)

    monkeypatch.setattr(quality, "Comparison", Observed)
    tiny_model("deepseek_v2_lite").save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    for arguments in ([], ["--model", str(tmp_path)]):
        assert main([*SHORT, "--formats", "bf16", *arguments]) == 0
    assert medians == [pytest.approx(0.05, rel=0.2), pytest.approx(1.0, rel=0.2)]
    assert f"\n{tmp_path}: logits of 26 tokens against a cache in fp32" in capsys.readouterr().out


def test_saved_scales_serve_the_format_they_are_for(tmp_path, capsys):
    path = tmp_path / "scales.safetensors"
    report_of(tmp_path, "--formats", "bf16", "fp8", "--save-scales", str(path))
    scales = CacheScales.load(path)
    assert scales.format_name == "fp8" and len(scales.latent) == 2
    assert 0 < scales.latent.max() < 0.1  # 2 * 22 (the most that a normed column can be) / 448
    generate = ["generate", "--device", "cpu", "--max-tokens", "3", "--prompt", "a page"]
    generate += ["--no-verify", "--scales", str(path)]
    assert main([*generate, "--cache-format", "fp8"]) == 0
    capsys.readouterr()
    assert main([*generate, "--cache-format", "nvfp4"]) == 2
    assert re.search(
        r"kvkern generate: scales: want .* \('nvfp4', 2\), got \('fp8', 2\)",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize("formats", [["bf16"], ["fp8", "nvfp4"]])
def test_save_scales_wants_the_one_format_they_are_for(tmp_path, capsys, formats):
    path = tmp_path / "scales"
    assert main([*SHORT, "--save-scales", str(path), "--formats", *formats]) == 2
    assert "--save-scales: want one format with layer scales" in capsys.readouterr().err
    assert not path.exists()


def test_figures_that_are_not_finite_end_in_status_1(monkeypatch):
    right = PagedModel.forward
    monkeypatch.setattr(PagedModel, "forward", lambda *args: right(*args) * torch.nan)
    assert main([*SHORT, "--formats", "bf16"]) == 1


@pytest.mark.parametrize("has_rich", [True, False])
def test_tables_name_formats_gammas_and_the_model(monkeypatch, capsys, has_rich):
    if not has_rich:
        monkeypatch.setattr(display, "HAS_RICH", False)
        monkeypatch.setitem(sys.modules, "rich.table", None)
    assert main([*SHORT, "--formats", "fp8", "fp8_token"]) == 0
    output = capsys.readouterr().out
    for gamma in quality._GAMMAS:
        assert f"\n1024 rows of 512 + 64 columns, gammas {gamma};" in output
    model = "the small model, seed 0, gammas log-normal, median 0.05, sigma 1"
    assert f"\n{model}: logits of 26 tokens against a cache in fp32" in output
    for label in ("fp8", "fp8, scales 1", "fp8_token"):
        assert len(re.findall(rf"^ *{label} +\d", output, re.MULTILINE)) == 4
    assert re.search(r"^ *fp8_token +644 +2\.62% +0\.\d+ +0\.166% +0\.\d+ *$", output, re.MULTILINE)


def test_empty_prompt_is_refused(capsys):
    assert main(["quality", "--device", "cpu", "--formats", "bf16", "--prompt", ""]) == 2
    assert "kvkern quality: prompt: want at least 1 token each, got 0" in capsys.readouterr().err
    with pytest.raises(ArgumentError, match="prompt: want at least 1 token"):
        quality.Comparison(None, [[1], []])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["quality", "--formats", "int4"], "argument --formats: invalid choice: 'int4'"),
        (["quality", "--out", "no/such/folder.json"], "argument --out: want a file in a folder"),
        (["quality", "--save-scales", "."], "argument --save-scales: want a file in a folder"),
        (["generate", "--scales", "no-such-file"], "argument --scales: want a file, got"),
    ],
)
def test_bad_argument_is_named(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def table_below(heading):
    """Cells of each row of the first table below a heading of the docs, by the first cell."""
    text = DOCS.read_text().partition(f"## {heading}\n")[2]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE).group(0).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {row[0]: row[1:] for row in rows}


def test_docs_give_every_formats_bytes_as_the_layout_has_them():
    for names, (num_bytes, _) in table_below("Which one").items():
        for name in re.findall(r"`(\w+)`", names):
            assert CacheFormat(name).bytes_per_token == int(num_bytes)
    rows = table_below("Rows, in bytes at 512 + 64")
    assert set(rows) == {f"`{name}`" for name in FORMAT_NAMES}
    for name in FORMAT_NAMES:
        fmt, (latent, scales, rope, row_bytes, _) = CacheFormat(name), rows[f"`{name}`"]
        assert latent.startswith(f"0 to {fmt.scales_offset - 1}, ")
        assert rope.startswith(f"{fmt.rope_offset} to {fmt.row_bytes - 1}, ")
        assert int(row_bytes) == fmt.row_bytes
        if fmt.rope_offset > fmt.scales_offset:
            assert scales.startswith(f"{fmt.scales_offset} to {fmt.rope_offset - 1}, ")
        else:
            assert scales == ""


def test_docs_give_the_errors_that_the_command_measures(storage):
    rows = table_below("Measured error")
    assert len(rows) == len(storage)
    for (name, way), by_gamma in storage.items():
        suffix = {"calibrated": ", calibrated", "unit": ", scales 1", None: ""}[way]
        *latent, rope = (float(cell.rstrip("%")) / 100 for cell in rows[f"`{name}`{suffix}"])
        assert latent == pytest.approx([e.latent_error for e in by_gamma.values()], rel=0.01)
        assert rope == pytest.approx(by_gamma["near 1"].rope_error, rel=0.02)


def test_docs_example_of_calibration_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL).group(1)
    names = {}
    exec(compile(code, "formats.md", "exec"), names)
    cache, scales = names["cache"], names["scales"]
    assert cache.format.name == "fp8"
    assert cache.layer_scales[:, 0].tolist() == scales.latent.tolist()
    assert (scales.latent < 1e-3).all()  # for gammas of 0.002
