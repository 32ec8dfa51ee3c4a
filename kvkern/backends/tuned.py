"""Which backend was the fastest for a call, as ``python -m kvkern tune`` measured it on a card.

A table is a JSON file: the card, the versions that it was measured with, and a row for each layer,
kind of scales and number of rows. Those in ``kvkern/tuned`` are shipped; ``KVKERN_TUNED`` names one
more, which goes first. Only a table of this card and these versions is read, once; nothing is
measured while serving.
"""

import json
import os
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvkern.errors import ArgumentError
from kvkern.warm_up import size_class

SHIPPED = Path(__file__).parent.parent / "tuned"
_SCALES = {  # by cells of a and b
    ((0, 0), (0, 0)): "tensor",
    ((1, 0), (0, 1)): "row",
    ((1, 128), (128, 128)): "block",
}


class Kind(NamedTuple):
    """What a row of a table is for; of ``scaled_mm`` so far."""

    op: str
    scales: str
    accumulation: str
    dtype: str  # of the inputs
    out_dtype: str
    rows: int  # their size class; a row of a table stands for lower ones too, down to half of it
    columns: int
    depth: int


def kind_of(op: str, call: Any) -> Kind | None:
    """None for what no table tells: other ops, many matrices, scales of other kinds."""
    cells = (getattr(call, "cell_a", None), getattr(call, "cell_b", None))
    if cells not in _SCALES or call.is_grouped or call.num_matrices != 1:
        return None
    if call.a_dtype != call.b_dtype:
        return None
    return Kind(
        op,
        _SCALES[cells],
        "exact" if call.is_exact else "fast",
        str(call.a_dtype).removeprefix("torch."),
        str(call.out_dtype).removeprefix("torch."),
        size_class(call.num_rows),
        call.num_columns,
        call.depth,
    )


def ranking(op: str, device: torch.device, call: Any) -> tuple[str, ...]:
    """Backends, the fastest first, if a table of this card has a row for the call; or none."""
    kind = kind_of(op, call)
    if kind is None or device.type != "cuda":
        return ()
    measured = _rows(torch.cuda.get_device_name(device)).get(kind._replace(rows=0), {})
    near = [rows for rows in measured if kind.rows <= rows < 2 * kind.rows]
    return measured[min(near)] if near else ()


def versions() -> dict[str, str]:
    """What a table is good for: releases of what compiles and multiplies."""
    found = {"torch": torch.__version__.partition("+")[0]}
    try:
        found["triton"] = metadata.version("triton")
    except metadata.PackageNotFoundError:
        found["triton"] = "none"
    return found


def file_name(card: str) -> str:
    return "_".join(card.lower().split()) + ".json"


@lru_cache
def _rows(card: str) -> dict[Kind, dict[int, tuple[str, ...]]]:
    """Rankings by number of rows, by kind with that left out, of all tables of the card.

    Those of ``KVKERN_TUNED`` go before those that are shipped.
    """
    shipped, own = SHIPPED / file_name(card), os.environ.get("KVKERN_TUNED")
    tables = [read(shipped, card)] if shipped.exists() else []
    if own:
        try:
            tables.append(read(Path(own), card))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"KVKERN_TUNED: want a file that python -m kvkern tune wrote, got {own}: {error!r}"
            ) from error
    rankings: dict[Kind, dict[int, tuple[str, ...]]] = {}
    for table in tables:
        for kind, names in table.items():
            rankings.setdefault(kind._replace(rows=0), {})[kind.rows] = names
    return rankings


def read(file: Path, card: str) -> dict[Kind, tuple[str, ...]]:
    """A table's rankings; none if it is of another card or of other versions."""
    table = json.loads(file.read_text())
    if table["card"] != card or table["versions"] != versions():
        return {}
    return {Kind(*(row[name] for name in Kind._fields)): _ranked(row) for row in table["rows"]}


def _ranked(row: dict[str, Any]) -> tuple[str, ...]:
    """``fastest``, which may be so by less than counts, then the others by their time."""
    return tuple(sorted(row["us"], key=lambda name: (name != row["fastest"], row["us"][name])))


def write(file: Path, card: str, rows: list[dict[str, Any]]) -> None:
    """A row: the fields of a ``Kind``, ``us`` by backend, ``fastest``."""
    table = {"card": card, "versions": versions(), "rows": rows}
    lines = ",\n".join("    " + json.dumps(row) for row in table.pop("rows"))
    head = json.dumps(table, indent=2).removesuffix("\n}")
    file.write_text(f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n')
