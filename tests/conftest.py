"""What every test runs under: a fixed seed, NaN in uninitialised memory, kernels that always run.

Without a GPU the Triton kernels run in Triton's interpreter, which has to be asked for before
Triton is imported.

``pytest --record FILE`` appends the outcome to FILE as one JSON line, with card, versions and
commit: a run on a GPU is recorded, not assumed.
"""

import importlib.metadata
import json
import os
import subprocess
from functools import wraps
from pathlib import Path

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # one thread a worker, and for the processes it starts
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption("--record", type=Path, metavar="FILE", help="append the outcome as JSON")


def pytest_terminal_summary(terminalreporter, config):
    file = config.getoption("--record")
    if file is None or hasattr(config, "workerinput"):  # xdist: the controller has all counts
        return
    git = ["git", "-C", str(config.rootpath), "describe", "--always", "--dirty", "--abbrev=40"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    run = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": _installed_version("triton"),
        "commit": os.environ.get("KVKERN_COMMIT") or commit or "unknown",
        **{
            outcome: len(terminalreporter.stats.get(outcome, []))
            for outcome in ("passed", "failed", "error", "skipped")
        },
    }
    with file.open("a") as lines:
        lines.write(json.dumps(run) + "\n")


def _installed_version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pytest_collection_modifyitems(items):
    # the longest first: one worker has them, while others share the rest
    items.sort(key=lambda item: "test_compile_gate" not in item.nodeid)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def uninitialised_memory_is_nan():
    """Reading what was never written shows. Patched rather than had from PyTorch's deterministic
    mode, which also changes which algorithms run and refuses some of them in a CUDA graph."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (Tensor, "new_empty"),
            (Tensor, "new_empty_strided"),
        ]:
            patch.setattr(owner, name, _then_poison(getattr(owner, name)))
        yield


def _then_poison(allocate):
    @wraps(allocate)
    def allocate_poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.detach().fill_(torch.nan)
        elif tensor.dtype == torch.uint8:  # raw bytes: NaN in every float format
            tensor.fill_(0xFF)
        return tensor

    return allocate_poisoned
