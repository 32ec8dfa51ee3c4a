"""Requests on a terminal while they run: a live table where rich is installed, else plain lines."""

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from kvkern.engine import EngineStats, FinishReason, TokenEvent

try:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import track
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    HAS_RICH = True
except ModuleNotFoundError:
    HAS_RICH = False

_SECONDS_BETWEEN_FRAMES = 0.1
_PROMPT_CHARS = 20  # of each prompt, its end: the beginnings are often alike
_TEXT_CHARS = 30  # of each text while it runs


@dataclass
class Stream:
    """One prompt and what has come of it so far."""

    prompt: str
    prompt_ids: list[int]
    max_tokens: int
    arrived: bool = False
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    def add(self, event: TokenEvent) -> None:
        self.token_ids.append(event.token)
        self.text += event.text or ""
        self.finish_reason = event.finish_reason

    @property
    def state(self) -> str:
        if self.finish_reason is not None:
            return f"done ({self.finish_reason})"
        if not self.arrived:
            return "to come"
        return "decode" if self.token_ids else "prefill"


class Display(Protocol):
    """What the serving loop tells after every step."""

    def update(self, stats: EngineStats) -> None: ...


def open_display(streams: Sequence[Stream], num_pages: int) -> AbstractContextManager[Display]:
    """Show these streams until the context ends; then every text stands there in full."""
    return _LiveTable(streams, num_pages) if HAS_RICH else _PlainLines(streams)


def tracked(streams: Sequence[Stream], what: str) -> Iterable[Stream]:
    """The same streams, with a progress bar (where rich is installed) while they are used."""
    return track(streams, what, transient=True) if HAS_RICH else streams


def show_summary(lines: Sequence[tuple[str, str]]) -> None:
    """Print what the run came to: a name and a value a line."""
    if not HAS_RICH:
        for name, value in lines:
            print(f"{name:>22}  {value}")
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", style="bold")
    for name, value in lines:
        grid.add_row(name, Text(value))
    Console().print("", grid, sep="\n")


class _LiveTable:
    def __init__(self, streams: Sequence[Stream], num_pages: int) -> None:
        self._streams = streams
        self._num_pages = num_pages
        self._stats = EngineStats()
        self._next_frame = 0.0
        self._live = Live(auto_refresh=False)

    def __enter__(self) -> "_LiveTable":
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._live.update(self._frame(is_last=kind is None))
        self._live.stop()

    def update(self, stats: EngineStats) -> None:
        self._stats = stats
        if time.monotonic() >= self._next_frame:
            self._next_frame = time.monotonic() + _SECONDS_BETWEEN_FRAMES
            self._live.update(self._frame(is_last=False), refresh=True)

    def _frame(self, is_last: bool) -> Group:
        table = Table("prompt", "state", "", box=None, header_style="dim")
        table.add_column("tokens", justify="right")
        table.add_column("text", overflow="fold", min_width=20)
        for stream in self._streams:
            num_tokens = len(stream.token_ids)
            text = stream.text if is_last else stream.text[-_TEXT_CHARS:]
            table.add_row(
                Text(_end(stream.prompt), no_wrap=True),
                Text(stream.state, no_wrap=True),
                ProgressBar(stream.max_tokens, num_tokens, width=10),
                f"{num_tokens}",
                Text(_printable(text), style="cyan"),
            )
        stats, pages = self._stats, Table.grid(padding=(0, 1))
        pages.add_row(
            f"step {stats.num_steps}",
            ProgressBar(self._num_pages, stats.num_pages_in_use, width=16),
            f"{stats.num_pages_in_use} of {self._num_pages} pages in use, "
            f"{stats.num_preemptions} preemptions",
        )
        return Group(table, "", pages)


class _PlainLines:
    """A line whenever a request changes its state."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._shown = [stream.state for stream in streams]

    def __enter__(self) -> "_PlainLines":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in self._streams:
            print(f"{_end(stream.prompt)!r} -> {_printable(stream.text)}")

    def update(self, stats: EngineStats) -> None:
        for number, stream in enumerate(self._streams):
            if stream.state != self._shown[number]:
                self._shown[number] = stream.state
                print(f"step {stats.num_steps:4}: prompt {number}: {stream.state}", flush=True)


def _end(prompt: str) -> str:
    text = _printable(prompt)
    return text if len(text) <= _PROMPT_CHARS else "…" + text[1 - _PROMPT_CHARS :]


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "·" for char in text)
