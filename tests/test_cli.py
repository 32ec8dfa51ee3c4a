"""``python -m kvkern``: what each command prints, and the exit status a script would act on."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import kvkern
from kvkern.__main__ import main
from kvkern._cli import check, info
from kvkern.backends import TABLE, Backend, choose
from kvkern.layout import FORMAT_NAMES

pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvkern._cli import display, generate
from kvkern.integrations.transformers import PagedModel
from kvkern.testing.models import tiny_model

ROOT = Path(__file__).parent.parent
CPU = ["--device", "cpu"]
SMALL = ["generate", *CPU, "--max-tokens", "6", "--prompt", "a page", "a page or two"]


@pytest.fixture(autouse=True)
def many_threads_again():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def only_the_reference(monkeypatch):
    for op, backends in TABLE.items():
        monkeypatch.setitem(TABLE, op, tuple(b for b in backends if b.name == "reference"))


@pytest.fixture
def plant(monkeypatch):
    """Adds a backend named "planted" to an op."""

    def add(op, function):
        module = ModuleType("planted")
        module.function = function
        monkeypatch.setitem(sys.modules, "planted", module)
        backend = Backend("planted", "planted:function", lambda device, dtype: None, ())
        monkeypatch.setitem(TABLE, op, (*TABLE[op], backend))
        choose.cache_clear()

    yield add
    choose.cache_clear()


def test_module_runs_as_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "kvkern", "info"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"kvkern {kvkern.__version__}" in done.stdout
    assert torch.__version__.partition("+")[0] in done.stdout  # some builds omit the suffix


def test_info_names_every_op_the_backend_it_runs_and_why_not_the_others(capsys, monkeypatch):
    monkeypatch.setattr(info, "_PACKAGES", ("torch", "no-such-package"))
    assert main(["info", *CPU]) == 0
    output = capsys.readouterr().out
    assert all(op in output for op in TABLE)
    assert "runs reference" in output
    for name, reason in kvkern.explain("mla_decode", "cpu"):
        assert reason is None or f"not  {name}: {reason}" in output
    assert re.search(r"no-such-package +not installed", output)


def test_check_covers_every_op_and_finds_the_reference_right(only_the_reference, capsys):
    assert main(["check", *CPU]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("ok")] == list(TABLE)
    assert lines[-1] == "all right on cpu"


@pytest.mark.parametrize("op", TABLE)
def test_check_finds_a_reference_that_is_wrong(only_the_reference, monkeypatch, capsys, op):
    right = check._OPS[op]
    monkeypatch.setitem(check._OPS, op, lambda case, backend: right(case, backend) * (1 + 1e-4))
    assert main(["check", *CPU]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith("WRONG")]
    assert line.startswith(f"{op} ")


@pytest.mark.parametrize("factor, status", [(1.0, 0), (1.1, 1), (float("nan"), 1)])
def test_check_runs_every_backend_that_does_not_refuse(
    only_the_reference, plant, capsys, factor, status
):
    def merge_states(outs, lses, out, lse):
        TABLE["merge_states"][0].load()(outs, lses, out, lse)
        out *= factor

    plant("merge_states", merge_states)
    assert main(["check", *CPU]) == status
    assert re.search(
        rf"merge_states +planted .* {['ok', 'WRONG'][status]}\n", capsys.readouterr().out
    )


@pytest.mark.parametrize("op", TABLE)
def test_check_asks_every_format_of_a_kernel(only_the_reference, plant, op):
    plant(op, TABLE[op][0].load())
    results = list(check._check_kernel(op, "planted", torch.device("cpu")))
    assert all(result.is_right for result in results)
    asked = [result.case.split()[0] for result in results]
    assert asked == (["bf16"] if op in check._WITHOUT_CACHE else list(FORMAT_NAMES))


def test_check_passes_over_what_a_kernel_refuses_by_format(only_the_reference, plant):
    def gather_kv(pages, *arguments):
        if pages.format.name != "bf16":
            raise kvkern.UnsupportedError("want bf16")
        TABLE["gather_kv"][0].load()(pages, *arguments)

    plant("gather_kv", gather_kv)
    results = list(check._check_kernel("gather_kv", "planted", torch.device("cpu")))
    assert [(result.case, result.is_right) for result in results] == [("bf16 cache", True)]


def write_kv_that_spoils_the_scales(pages, *arguments, **options):
    TABLE["write_kv"][0].load()(pages, *arguments, **options)
    if pages.format.token_scaled:
        pages.group_scales[0, 0] += 1


def copy_pages_that_forgets_the_scales(src, dst, sources, targets):
    if src.dtype == torch.uint8:
        dst[:, targets] = src[:, sources]


@pytest.mark.parametrize(
    "op, function",
    [
        ("write_kv", write_kv_that_spoils_the_scales),
        ("copy_pages", copy_pages_that_forgets_the_scales),
    ],
)
def test_check_sees_scales_that_are_stored_beside_the_rows(only_the_reference, plant, op, function):
    plant(op, function)
    results = list(check._check_kernel(op, "planted", torch.device("cpu")))
    assert [r.case for r in results if not r.is_right] == ["fp8_token cache"]


@pytest.mark.parametrize("dropped", [0, 1])
def test_check_sees_a_layer_scale_that_is_dropped(only_the_reference, plant, dropped):
    def gather_kv(pages, *arguments):
        if pages.layer_scales is not None:
            scales = pages.layer_scales.clone()
            scales[dropped] = 1.0
            pages = replace(pages, layer_scales=scales)
        TABLE["gather_kv"][0].load()(pages, *arguments)

    plant("gather_kv", gather_kv)
    results = list(check._check_kernel("gather_kv", "planted", torch.device("cpu")))
    assert [r.case for r in results if not r.is_right] == ["fp8 cache", "nvfp4 cache"]


def summary_of(output: str) -> dict[str, str]:
    """The lines after the live part, by name."""
    pairs = re.findall(r"^ *([a-z][a-z ]*[a-z])  +(\S.*?) *$", output, flags=re.MULTILINE)
    return dict(pairs)


def test_generate_serves_six_prompts_with_reuse_and_preemption_as_transformers_would(capsys):
    assert main(["generate", *CPU]) == 0
    summary = summary_of(capsys.readouterr().out)
    assert summary["verified"] == "tokens of all 6 equal transformers' own greedy output"
    assert int(summary["prefix hits"].split()[0]) > 0
    assert int(summary["preemptions"]) > 0
    assert re.fullmatch(r"[\d,]+ KiB at most \(\d+ bytes a token, fp32\)", summary["cache in use"])
    assert re.fullmatch(
        r"[\d,]+ KiB for these \d+ tokens \(\d+ bytes a token\)", summary["cache of transformers"]
    )
    assert "tokens/s" in summary["speed"]


def test_generate_repeats_itself_for_a_seed(capsys):
    def texts(*arguments):
        assert main([*SMALL, "--no-verify", *arguments]) == 0
        return re.findall(r"^.*done \(length\).*$", capsys.readouterr().out, flags=re.MULTILINE)

    first = texts()
    assert len(first) == 2
    assert texts("--seed", "0") == first
    assert texts("--seed", "1") != first


def spoil_logits(monkeypatch):
    """Make kvkern's model prefer another token from the fifth on."""
    right = PagedModel.forward
    count = iter(range(10**6))

    def forward(self, *args):
        logits = right(self, *args)
        return logits.roll(1, dims=-1) if next(count) > 4 else logits

    monkeypatch.setattr(PagedModel, "forward", forward)


def test_tokens_that_differ_in_fp32_are_an_error_that_says_where(monkeypatch, capsys):
    spoil_logits(monkeypatch)
    assert main(SMALL) == 1
    output = capsys.readouterr().out
    assert summary_of(output)["verified"].startswith(
        "2 of 2 differ from transformers' own greedy output"
    )
    assert re.search(
        r"^prompt 0: token 5 is \d+ here and \d+ there, "
        r"where transformers' logits for them are \d\S* apart$",
        output,
        flags=re.MULTILINE,
    )


@pytest.mark.parametrize("inexact", [["--dtype", "bf16"], ["--cache-format", "fp8_ds_mla"]])
def test_tokens_that_differ_in_lower_precision_are_reported_only(monkeypatch, capsys, inexact):
    spoil_logits(monkeypatch)
    assert main([*SMALL, *inexact]) == 0
    output = capsys.readouterr().out
    assert "2 of 2 differ" in output
    assert "logits for them are" in output
    assert "Near ties may fall either way" in output


def test_no_verify_leaves_transformers_alone(monkeypatch, capsys):
    monkeypatch.delattr(generate, "_differences_from_transformers")
    assert main([*SMALL, "--no-verify"]) == 0
    assert "verified" not in summary_of(capsys.readouterr().out)


def test_without_rich_there_are_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr(display, "HAS_RICH", False)
    assert main(SMALL) == 0
    output = capsys.readouterr().out
    assert re.search(r"step +\d+: prompt 1: decode\n", output)
    assert re.search(r"step +\d+: prompt 0: done \(length\)\n", output)
    assert re.search(r"'a page or two' -> \S{6}\n", output)
    assert summary_of(output)["verified"].startswith("tokens of all 2 equal")


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A local folder such as ``save_pretrained`` writes, of a model that stops by itself."""
    model = tiny_model("deepseek_v2_lite")
    tokenizer = byte_level_tokenizer()
    prompt = torch.tensor([tokenizer("a page")["input_ids"]])
    tokens = model.generate(prompt, max_new_tokens=6)[0, prompt.shape[1] :].tolist()
    model.generation_config.eos_token_id = [tokens[3], 319]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_checkpoint_of_ones_own_is_served_and_stops_at_its_end_of_sequence(checkpoint, capsys):
    assert main([*SMALL, "--model", str(checkpoint)]) == 0
    output = capsys.readouterr().out
    assert "done (eos)" in output
    assert summary_of(output)["verified"].startswith("tokens of all 2 equal")
    assert summary_of(output)["preemptions"] == "0"


def test_checkpoint_that_is_not_covered_is_refused_with_the_reason(checkpoint, capsys):
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace("{", '{"sliding_window": 8,', 1))
    assert main([*SMALL, "--model", str(checkpoint)]) == 2
    assert "kvkern generate: hf_model: want full attention" in capsys.readouterr().err


def test_request_that_cannot_fit_is_an_error(capsys):
    assert main([*SMALL, "--num-pages", "1"]) == 2
    assert re.search(
        r"^kvkern generate: prompt_ids: want .* within the 16 tokens of the cache, got 13 \+ 6$",
        capsys.readouterr().err,
        flags=re.MULTILINE,
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required: command"),
        (["serve"], "invalid choice: 'serve'"),
        (["info", "--device", "toaster"], "argument --device: want cpu, cuda or cuda:N, got"),
        (["check", "--device", "cuda:99"], r"argument --device: want one of \d+ CUDA devices"),
        (["generate", "--model", "."], "argument --model: want a folder with a config.json"),
        (["generate", "--max-tokens", "0"], "argument --max-tokens: want a number >= 1, got '0'"),
        (["generate", "--cache-format", "fp4"], "argument --cache-format: invalid choice: 'fp4'"),
    ],
)
def test_bad_argument_is_named(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_generate_without_transformers_says_what_to_install(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "kvkern._cli.generate")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(SMALL) == 2
    assert "needs transformers: pip install 'kvkern[transformers]'" in capsys.readouterr().err


@pytest.mark.gpu
def test_generate_on_a_gpu_equals_transformers_in_fp32(capsys):
    assert main(["generate", "--device", "cuda", "--dtype", "fp32"]) == 0
    assert "tokens of all 6 equal" in summary_of(capsys.readouterr().out)["verified"]


@pytest.mark.gpu
def test_check_finds_every_kernel_right_on_a_gpu(capsys):
    assert main(["check", "--device", "cuda"]) == 0
    assert "triton" in capsys.readouterr().out


def test_checkpoint_is_loaded_as_the_class_it_names(tmp_path):
    """transformers' own choice of a causal LM does not know Mistral 4."""
    tiny_model("mistral4").save_pretrained(tmp_path)
    assert generate._model_class(str(tmp_path)).__name__ == "Mistral4ForCausalLM"
