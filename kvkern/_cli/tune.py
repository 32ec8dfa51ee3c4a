"""``python -m kvkern tune``: time each backend of ``scaled_mm`` on this card, write a table."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import kvkern
from kvkern.backends import TABLE, tuned
from kvkern.errors import UnsupportedError
from kvkern.ops.quantize import Granularity
from kvkern.testing.budget import assert_within_budget
from kvkern.testing.timing import capture, host_us, time_interleaved_us
from kvkern.warm_up import size_class

LAYERS = (  # N, K: DeepSeek-V3's, and a square
    (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048),
    (36864, 7168), (7168, 18432), (8192, 8192),
)  # fmt: skip
ROWS = (  # closer where tiles change with them: a row of the table stands for fewer rows too
    1, 2, 4, 8, 16, 32, 64, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1536, 2048, 3072,
    4096, 8192,
)  # fmt: skip
# DeepGEMM compiles where it meets another number of rows, also while serving: only by name
BACKENDS = tuple(b.name for b in TABLE["scaled_mm"] if b.name not in ("reference", "deepgemm"))
_NEARLY = 0.99  # of the time of the first backend: for less gain its place in the table counts
_FAST_ERROR = 0.02  # relative; at K = 16384 with a mean an H200's is 0.009
_EXACT_BIAS = 1e-3  # relative, of the mean; at K = 16384 fast sums lose 0.008 of it
_CHECKED_ROWS = 16  # of a result, in fp64: all columns, from the first row to the last


class _Measured(NamedTuple):
    row: dict[str, Any] | None  # of the table
    wrong: dict[str, str]  # backends that are not in it, and what is wrong with their results
    refused: dict[str, str]  # and what they say


class _Scales(NamedTuple):
    name: str
    of_a: Granularity
    of_b: Granularity
    accumulation: Literal["exact", "fast"]


_KINDS = (
    _Scales("tensor", "tensor", "tensor", "fast"),
    _Scales("tensor", "tensor", "tensor", "exact"),
    _Scales("row", "row", "row", "fast"),
    _Scales("row", "row", "row", "exact"),
    _Scales("block", "group", "block", "exact"),
)


def run(settings: argparse.Namespace) -> int:
    """Returns 1 if a result was wrong, and so is not in the table, or no backend took a call."""
    device, is_right, rows = settings.device, True, []
    backends = settings.backends or BACKENDS
    for columns, depth in settings.layers or LAYERS:
        for scales in _KINDS:
            told: set[str] = set()  # backends whose refusal has been printed
            for num_rows in settings.rows or ROWS:
                row, wrong, refused = _measure(num_rows, columns, depth, scales, backends, device)
                for name, reason in wrong.items():
                    is_right = False
                    print(f"{name} is WRONG, and left out: {reason}")
                for name, reason in refused.items():
                    if name not in told:
                        print(f"{_words(num_rows, columns, depth, scales)}: {reason}", flush=True)
                told.update(refused)
                if row is not None:
                    rows.append(row)
                    print(_line(row), flush=True)
        tuned.write(settings.out, _card(device), rows)  # what there is, should a layer fail
    print(f"{settings.out}: {len(rows)} rows. KVKERN_TUNED={settings.out} has it read.")
    return 0 if is_right and rows else 1


def _measure(
    num_rows: int,
    columns: int,
    depth: int,
    scales: _Scales,
    backends: Sequence[str],
    device: torch.device,
) -> _Measured:
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((num_rows, depth), (columns, depth))
    # with a mean, so that sums in too few bits show
    a, b = (torch.randn(*shape, generator=generator, device=device) + 0.25 for shape in shapes)
    left = kvkern.quantize_fp8(
        a, granularity=scales.of_a, column_major_scales=scales.of_a == "group"
    )
    right = kvkern.quantize_fp8(b, granularity=scales.of_b)
    given = (left.values, right.values.mT, left.scale, _transposed(right.scale))
    calls: dict[str, Callable[[], Tensor]] = {}
    wrong: dict[str, str] = {}
    refused: dict[str, str] = {}
    checked = _spread_rows(num_rows, device)
    exact, rounded = _expected(left, right, scales, checked)
    for backend in TABLE["scaled_mm"]:
        if backend.name not in backends:
            continue
        call = partial(
            kvkern.scaled_mm, *given, accumulation=scales.accumulation, backend=backend.name
        )
        try:
            result = call()[checked]
        except UnsupportedError as error:
            refused[backend.name] = str(error)
            continue
        try:
            _check(result, exact, rounded, scales.accumulation)
        except AssertionError as error:
            wrong[backend.name] = f"{_words(num_rows, columns, depth, scales)}: {error}"
            continue
        calls[backend.name] = call
    if not calls:
        return _Measured(None, wrong, refused)
    us = _times(calls, device)
    first, best = next(iter(us)), min(us, key=us.__getitem__)
    kind = tuned.Kind(
        "scaled_mm", scales.name, scales.accumulation, "float8_e4m3fn", "bfloat16",
        size_class(num_rows), columns, depth,
    )  # fmt: skip
    chosen = best if us[best] < _NEARLY * us[first] else first
    return _Measured({**kind._asdict(), "fastest": chosen, "us": us}, wrong, refused)


def _check(
    result: Tensor, exact: Tensor, rounded: Tensor, accumulation: Literal["exact", "fast"]
) -> None:
    """Raises ``AssertionError``. Fast sums may lose what the tensor core's accumulator does.

    What loses as much may pass the budget of 16 bits, but loses by truncation: the mean, which
    that of the inputs keeps far from 0, shows it. Of few results roundings show too, and are
    allowed for as in the budget.
    """
    if accumulation == "fast":
        error = ((result.double() - exact).norm() / exact.norm()).item()
        assert error <= _FAST_ERROR, f"relative error: want <= {_FAST_ERROR}, got {error:.3e}"
        return
    assert_within_budget(result, exact, rounded)
    mean = exact.mean()
    bias, of_rounding = (
        ((x.double().mean() - mean) / mean).abs().item() for x in (result, rounded)
    )
    allowed = _EXACT_BIAS + 2 * of_rounding
    assert bias <= allowed, f"relative bias: want <= {allowed:.3e}, got {bias:.3e}"


def _spread_rows(num_rows: int, device: torch.device) -> Tensor:
    """Indices of those that are checked."""
    count = min(num_rows, _CHECKED_ROWS)
    return torch.arange(count, device=device) * (num_rows - 1) // max(count - 1, 1)


def _expected(
    left: kvkern.QuantizedFP8, right: kvkern.QuantizedFP8, scales: _Scales, checked: Tensor
) -> tuple[Tensor, Tensor]:
    """The checked rows, in fp64 and by the reference."""
    values = left.values.view(torch.uint8)[checked].view(left.values.dtype)
    of_a = left.scale if scales.of_a == "tensor" else left.scale[checked]
    rounded = kvkern.scaled_mm(
        values, right.values.mT, of_a, _transposed(right.scale), backend="reference"
    )
    reals = [
        kvkern.dequantize_fp8(x, scale, dtype=torch.float32, backend="reference").double()
        for x, scale in ((values, of_a), (right.values, right.scale))
    ]
    return reals[0] @ reals[1].mT, rounded


def _transposed(scale: Tensor) -> Tensor:
    return scale if scale.ndim == 1 else scale.mT


def _times(calls: dict[str, Callable[[], Tensor]], device: torch.device) -> dict[str, float]:
    """Microseconds on the GPU, in turns, by CUDA graphs; of a CPU the host's."""
    if device.type != "cuda":
        return {name: round(host_us(call, repeats=3).median, 1) for name, call in calls.items()}
    graphs = {name: capture(call) for name, call in calls.items()}
    return {name: round(time.median, 1) for name, time in time_interleaved_us(graphs).items()}


def _words(num_rows: int, columns: int, depth: int, scales: _Scales) -> str:
    return f"{scales.name} {scales.accumulation} {num_rows} x {columns} x {depth}"


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _line(row: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {us}" for name, us in row["us"].items())
    return (
        f"{row['scales']} {row['accumulation']} {row['rows']} x {row['columns']} x {row['depth']}: "
        f"{row['fastest']} ({times} us)"
    )
