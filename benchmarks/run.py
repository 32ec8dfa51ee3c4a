"""Check each case's result, then time it, beside other libraries if asked.

    python benchmarks/run.py [--op OP ...] [--case TEXT] [--peers] [--in-a-row N] [--out FILE.jsonl]

Prints a table and appends one JSON line per case and implementation to FILE. GPU times are of a
CUDA graph's replay with a cold L2, implementations taking turns; host times are of the eager call.
With --in-a-row a graph has N calls, each with tensors of its own as a model's layers have, and the
times are of one of them.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout that is not installed

import torch

from benchmarks.absorb import ABSORB_CASES, AbsorbCase, AbsorbStep
from benchmarks.cases import CASES, Case, Implementation, Step, make_step
from benchmarks.linear import LINEAR_CASES, LinearCase, LinearStep
from benchmarks.matmul import MATMUL_CASES, MatmulCase, MatmulStep
from benchmarks.peers import peers_of
from benchmarks.quantize_cases import QUANTIZE_CASES, QuantizeCase, QuantizeStep
from kvkern.testing.timing import (
    Call,
    Timing,
    capture,
    copy_bandwidth,
    host_us,
    matmul_rate,
    time_interleaved_us,
)

AnyCase = Case | QuantizeCase | MatmulCase | LinearCase | AbsorbCase
ALL_CASES: tuple[AnyCase, ...] = (
    *CASES,
    *QUANTIZE_CASES,
    *MATMUL_CASES,
    *LINEAR_CASES,
    *ABSORB_CASES,
)


class Measured(NamedTuple):
    """Microseconds, and what was timed: ``cuda-graph``, ``cuda-eager`` or ``host``."""

    run: Timing
    host: Timing
    clock: str


Clock = Callable[[Sequence[Implementation]], list[Measured]]


def gpu_clock(implementations: Sequence[Implementation]) -> list[Measured]:
    """Graph replays, in turns; a peer that no graph captures is timed eagerly."""
    calls, clocks = {}, []
    for implementation in implementations:
        calls[implementation.name] = implementation.call
        clocks.append("cuda-eager")
        try:
            calls[implementation.name] = capture(implementation.call, implementation.first)
            clocks[-1] = "cuda-graph"
        except RuntimeError:
            if implementation.name == "kvkern":
                raise
    runs = time_interleaved_us(calls)
    hosts = [host_us(implementation.call) for implementation in implementations]
    return list(map(Measured, runs.values(), hosts, clocks))


def host_clock(implementations: Sequence[Implementation]) -> list[Measured]:
    """On a CPU the call's own time, which is no measurement of a kernel."""
    timings = [host_us(implementation.call) for implementation in implementations]
    return [Measured(timing, timing, "host") for timing in timings]


def measure(
    case: AnyCase,
    machine: dict[str, Any],
    clock: Clock,
    *,
    device: torch.device | str,
    with_peers: bool = False,
    in_a_row: int = 1,
    tell: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """A row per implementation; if kvkern's result is wrong, one row with ``error`` and no time."""
    tell(case.name)
    kvkern, peers = _on_new_tensors(case, device)
    error = _error(kvkern)
    if error is not None:
        tell(f"  kvkern is wrong and not timed: {error}")
        return [_row(case, machine, kvkern, error, None, None)]
    implementations = _beside(kvkern, peers if with_peers else (), case, device, tell)
    timed = implementations
    if in_a_row > 1:
        further = []
        for _ in range(in_a_row - 1):
            another, others = _on_new_tensors(case, device)
            others = others if with_peers else iter(())
            further.append(_beside(another, others, case, device, lambda _: None))
        timed = [_as_one(same) for same in zip(implementations, *further, strict=True)]
    measured = [_of_one(time, in_a_row) for time in clock(timed)]
    rows = []
    for implementation, time in zip(implementations, measured, strict=True):
        error = None if implementation is kvkern else _error(implementation)
        rows.append(_row(case, machine, implementation, error, time, measured[0]))
        tell(f"  {_line(rows[-1])}")
    return rows


def _on_new_tensors(
    case: AnyCase, device: torch.device | str
) -> tuple[Implementation, Iterator[Implementation | str]]:
    """kvkern and its peers."""
    if isinstance(case, QuantizeCase):  # no other library has these alone
        return QuantizeStep(case, device).kvkern(), iter(())
    step = _step_of(case, device)
    return step.kvkern(), peers_of(step)


def _beside(
    kvkern: Implementation,
    peers: Iterable[Implementation | str],
    case: AnyCase,
    device: torch.device | str,
    tell: Callable[[str], None],
) -> list[Implementation]:
    """kvkern, its limits, and those of the peers that are here."""
    implementations = [kvkern, *limits_of(case, torch.device(device))]
    for peer in peers:
        if isinstance(peer, str):
            tell(f"  {peer}")
        else:
            implementations.append(peer)
    return implementations


def _as_one(same: Sequence[Implementation]) -> Implementation:
    """An implementation's calls, each on tensors of its own, one after the other."""
    names = [one.name for one in same]
    assert len(set(names)) == 1, f"want one implementation, got {names}"
    firsts = [one.first for one in same if one.first is not None]
    return same[0]._replace(
        call=partial(_call_all, [one.call for one in same]),
        first=partial(_call_all, firsts) if firsts else None,
    )


def _call_all(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _of_one(measured: Measured, num_calls: int) -> Measured:
    """Of as many in a row."""
    if num_calls == 1:
        return measured
    run, host = (Timing(*(us / num_calls for us in time)) for time in measured[:2])
    return Measured(run, host, f"{measured.clock}, {num_calls} in a row")


def _step_of(
    case: Case | MatmulCase | LinearCase | AbsorbCase, device: torch.device
) -> Step | MatmulStep | LinearStep | AbsorbStep:
    if isinstance(case, MatmulCase):
        return MatmulStep(case, device)
    if isinstance(case, AbsorbCase):
        return AbsorbStep(case, device)
    return LinearStep(case, device) if isinstance(case, LinearCase) else make_step(case, device)


def limits_of(case: AnyCase, device: torch.device) -> list[Implementation]:
    """What to hold a time without products against: nothing at all, and moving as many bytes."""
    if case.num_flops > 0 or device.type != "cuda":
        return []
    num_bytes = case.num_bytes // 2 // 4096 * 4096  # whole pages: others are copied more slowly
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return [
        Implementation("empty_kernel", lambda: torch.cuda._sleep(0), None),
        Implementation("copy", lambda: target.copy_(source), None, "torch's, of as many bytes"),
    ]


def _error(implementation: Implementation) -> str | None:
    """What is wrong with its result, if anything is, or can be told."""
    if implementation.check is None:
        return None
    try:
        implementation.check()
    except AssertionError as error:
        return str(error) or "wrong"
    return None


def _row(
    case: AnyCase,
    machine: dict[str, Any],
    implementation: Implementation,
    error: str | None,
    measured: Measured | None,
    kvkern: Measured | None,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "op": case.op,
        "case": case.name,
        "model": case.model.name,
        "format": case.format,
        "implementation": implementation.name,
        "checked": implementation.check is not None,
        "error": error,
        "note": implementation.note,
        "bytes": case.num_bytes,
        "flops": case.num_flops,
    }
    figures = ("clock", "us", "p10_us", "p90_us", "host_us", "gb_s", "tflop_s")
    row |= dict.fromkeys((*figures, "percent_of_copy", "percent_of_matmul", "times_kvkern"))
    if measured is not None and kvkern is not None:
        us, p10, p90 = measured.run
        gb_s, tflop_s = case.num_bytes / us / 1e3, case.num_flops / us / 1e6
        row |= {
            "clock": measured.clock,
            "us": us,
            "p10_us": p10,
            "p90_us": p90,
            "host_us": measured.host.median,
            "gb_s": gb_s,
            "tflop_s": tflop_s,
            "percent_of_copy": 100 * gb_s / machine["copy_gb_s"],
            "percent_of_matmul": 100 * tflop_s / machine["matmul_tflop_s"],
            "times_kvkern": us / kvkern.run.median,
        }
    return row | machine


def _line(row: dict[str, Any]) -> str:
    remark = "; ".join(filter(None, [row["note"], row["error"] and f"WRONG: {row['error']}"]))
    return (
        f"{row['implementation']:18}{row['us']:10.1f} us"
        f" ({row['p10_us']:.1f} to {row['p90_us']:.1f})  host {row['host_us']:.1f} us "
        f"{row['gb_s']:7.0f} GB/s ({row['percent_of_copy']:3.0f}%)"
        f"{row['tflop_s']:8.1f} TFLOP/s ({row['percent_of_matmul']:3.0f}%)"
        f"{row['times_kvkern']:7.2f}x  {remark or row['clock']}"
    )


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Card, its measured limits, versions, commit and date: the same in every row of a run."""
    is_gpu = device.type == "cuda"
    limits = {
        "copy_gb_s": copy_bandwidth(device, num_bytes=2**30 if is_gpu else 2**24),
        "matmul_tflop_s": matmul_rate(device, size=8192 if is_gpu else 128),
    }
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm", "--format=csv,noheader,nounits"]
    driver, sm_mhz = (_output(query) if is_gpu else "").partition(", ")[::2]  # warm from the limits
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        from triton import __version__ as triton_version
    except ImportError:
        triton_version = None
    return limits | {
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "driver": driver or None,
        "sm_mhz": int(sm_mhz) if sm_mhz.isdigit() else None,
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": os.environ.get("KVKERN_COMMIT") or _output([*git, "--abbrev=40"]) or "unknown",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _output(command: list[str]) -> str:
    """The first line that a program prints; nothing if it fails or is not here."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def main(arguments: Sequence[str] | None = None, cases: Sequence[AnyCase] = ALL_CASES) -> int:
    """Returns 1 if a result was wrong, 2 if no case was chosen."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--op", nargs="*", choices=sorted({case.op for case in cases}))
    parser.add_argument("--case", default="", metavar="TEXT", help="cases with TEXT in their name")
    parser.add_argument("--peers", action="store_true", help="also time the libraries found here")
    parser.add_argument("--in-a-row", type=int, default=1, metavar="N", help="calls in one graph")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    settings = parser.parse_args(arguments)
    if settings.in_a_row < 1:
        parser.error(f"--in-a-row: want at least 1, got {settings.in_a_row}")
    ops = settings.op or {case.op for case in cases}
    chosen = [case for case in cases if case.op in ops and settings.case in case.name]
    device = torch.device(settings.device)
    machine = describe_machine(device)
    print(json.dumps(machine))
    clock = gpu_clock if device.type == "cuda" else host_clock
    is_wrong = False
    for case in chosen:
        rows = measure(
            case,
            machine,
            clock,
            device=device,
            with_peers=settings.peers,
            in_a_row=settings.in_a_row,
        )
        is_wrong |= rows[0]["error"] is not None
        if settings.out is not None:
            settings.out.parent.mkdir(parents=True, exist_ok=True)
            with settings.out.open("a") as lines:
                lines.writelines(json.dumps(row) + "\n" for row in rows)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 1 if is_wrong else 0 if chosen else 2


if __name__ == "__main__":
    sys.exit(main())
