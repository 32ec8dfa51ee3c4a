"""The conditions that conftest.py promises to every other test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_uninitialised_memory_is_nan(device, dtype):
    some = torch.zeros(3, 4, dtype=dtype, device=device)
    for tensor in [
        torch.empty(3, 4, dtype=dtype, device=device),
        torch.empty_like(some),
        torch.empty_strided((3, 4), (4, 1), dtype=dtype, device=device),
        some.new_empty(3, 4),
        some.new_empty_strided((3, 4), (4, 1)),
    ]:
        assert tensor.shape == (3, 4) and tensor.float().isnan().all()


def test_uninitialised_bytes_are_nan_in_every_float_format():
    raw = torch.empty(8, dtype=torch.uint8)
    for dtype in DTYPES:
        assert raw.view(dtype).float().isnan().all()


@pytest.mark.parametrize("run", [1, 2])
def test_each_test_starts_from_the_same_seed(run):
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))


def test_kernels_run_on_this_machine():
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    assert torch.cuda.is_available() or triton.knobs.runtime.interpret


def test_recorded_run_is_appended_with_its_counts_card_and_versions(tmp_path):
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    some = tmp_path / "test_some.py"
    some.write_text("def test_a(): pass\ndef test_b(): assert False\n")
    file = tmp_path / "runs.jsonl"
    file.write_text("an earlier run\n")
    subprocess.run([sys.executable, "-m", "pytest", "--record", file, some], cwd=tmp_path)
    earlier, line = file.read_text().splitlines()
    run = json.loads(line)
    assert earlier == "an earlier run"
    assert (run["passed"], run["failed"], run["torch"]) == (1, 1, torch.__version__)
    assert run["device"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
