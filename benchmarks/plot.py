"""Draw results as a roofline: FLOP/s against FLOPs a byte, under what the card itself reached.

    python benchmarks/plot.py RESULTS.jsonl [--op mla_decode] --out FILE.png

The only file that needs matplotlib (``pip install kvkern[bench]``).
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Point(NamedTuple):
    """One case."""

    flops_per_byte: float
    tflop_s: float


class Roofline(NamedTuple):
    """What is drawn; the roof is ``min(copy_tb_s * flops_per_byte, matmul_tflop_s)``."""

    device: str
    copy_tb_s: float
    matmul_tflop_s: float
    points: dict[str, list[Point]]  # by implementation


def roofline(rows: Iterable[Mapping[str, Any]], op: str) -> Roofline:
    """Of each case's and implementation's last row, where it has FLOPs, a time and no error.

    The limits are the best that these rows' runs measured. Raises ``ValueError`` if there is
    nothing to draw, or more than one card.
    """
    last = {(row["case"], row["implementation"]): row for row in rows if row["op"] == op}
    drawn = [row for row in last.values() if row["flops"] and row["us"] and not row["error"]]
    devices = sorted({row["device"] for row in drawn})
    if len(devices) != 1:
        raise ValueError(f"{op}: want right, timed rows with FLOPs of one device, got {devices}")
    points = defaultdict(list)
    for row in drawn:
        point = Point(row["flops"] / row["bytes"], row["flops"] / row["us"] / 1e6)
        points[row["implementation"]].append(point)
    copy_tb_s = max(row["copy_gb_s"] for row in drawn) / 1e3
    matmul_tflop_s = max(row["matmul_tflop_s"] for row in drawn)
    return Roofline(devices[0], copy_tb_s, matmul_tflop_s, dict(points))


def draw(line: Roofline, title: str) -> "Figure":
    """A marker for each implementation, kvkern's on top."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    axes.set(title=f"{title}, {line.device}", xlabel="FLOPs per byte", ylabel="TFLOP/s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    intensities = [point.flops_per_byte for points in line.points.values() for point in points]
    ridge = line.matmul_tflop_s / line.copy_tb_s
    left, right = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    memory, compute = f"copy, {line.copy_tb_s:.2f} TB/s", f"bf16 matmul, {line.matmul_tflop_s:.0f}"
    axes.plot([left, ridge], [left * line.copy_tb_s, line.matmul_tflop_s], "k--", label=memory)
    axes.plot([ridge, right], [line.matmul_tflop_s] * 2, "k-", label=f"{compute} TFLOP/s")
    names = sorted(line.points, key=lambda name: (name == "kvkern", name))
    for name, marker in zip(names, cycle("svD^P<X>o"), strict=False):
        axes.plot(*zip(*line.points[name], strict=True), marker, label=name, alpha=0.8)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, metavar="RESULTS.jsonl", help="of benchmarks/run.py")
    parser.add_argument("--op", default="mla_decode", choices=["mla_decode", "mla_prefill"])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    settings = parser.parse_args(arguments)
    rows = map(json.loads, settings.results.read_text().splitlines())
    try:
        line = roofline(rows, settings.op)
    except ValueError as error:
        sys.exit(str(error))
    draw(line, settings.op).savefig(settings.out, dpi=150)


if __name__ == "__main__":
    main()
