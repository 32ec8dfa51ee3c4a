"""``python -m kvkern info``: what is here, and what each op would run on."""

import argparse
import importlib.metadata
import platform

import torch

import kvkern
from kvkern.backends import TABLE, explain

_PACKAGES = ("torch", "triton", "numpy", "transformers", "flashinfer-python")


def run(settings: argparse.Namespace) -> int:
    """Print device, versions, and each op's backends in the order in which they are tried."""
    print(f"kvkern {kvkern.__version__}, Python {platform.python_version()}, {platform.machine()}")
    for package in _PACKAGES:
        print(f"  {package:18} {_version(package)}")
    print(f"  {'device':18} {_describe(settings.device)}")
    print(f'\nbackend="auto" on {settings.device.type} tensors, in bf16:')
    ops_by_rows: dict[tuple[tuple[str, str | None], ...], list[str]] = {}
    for op in TABLE:
        ops_by_rows.setdefault(tuple(explain(op, settings.device)), []).append(op)
    for rows, ops in ops_by_rows.items():
        print(f"  {', '.join(ops)}")
        print(f"    runs {next((name for name, reason in rows if reason is None), 'nowhere')}")
        for name, reason in rows:
            if reason is not None:
                print(f"    not  {name}: {reason}")
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _describe(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device}, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    return (
        f"{device}: {properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB"
    )
