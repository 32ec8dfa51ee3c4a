"""Time a call on the GPU or on the host, and measure what the card can do at most."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

Call = Callable[[], object]

_WARM_UPS = 3
_AHEAD_CYCLES = 400_000  # some 0.2 ms on the GPU, in which the host queues what is timed


class Timing(NamedTuple):
    """Microseconds."""

    median: float
    p10: float
    p90: float


def time_us(fn: Call, *, graph: bool, repeats: int = 30, cold_l2: bool = True) -> Timing:
    """GPU time of ``fn()``, or of the replay of a CUDA graph that holds it.

    CUDA events around it take in what starting it costs the GPU: a few microseconds, the least
    that can be measured.

    Args:
        fn: works on the current stream, without synchronising.
        graph: whether to capture ``fn`` first.
        repeats: how often it is timed, >= 2.
        cold_l2: whether to read other memory through the L2 cache before each time.
    """
    call = capture(fn) if graph else fn
    return time_interleaved_us({"": call}, repeats=repeats, cold_l2=cold_l2)[""]


def time_interleaved_us(
    fns: Mapping[str, Call], *, repeats: int = 30, cold_l2: bool = True
) -> dict[str, Timing]:
    """GPU time of several calls, taken in turns, so that the card's clocks are the same for all.

    The L2 is made cold by reading: had it been written to, each call would also be charged for
    writing that back, 6 us of 60 on an H100.
    """
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    scratch = torch.zeros(4 * l2_bytes // 8 if cold_l2 else 1, dtype=torch.int64, device="cuda")
    largest = torch.empty((), dtype=torch.int64, device="cuda")
    for fn in fns.values():
        _warm_up(fn)
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in fns}
    for _ in range(repeats):
        for name, fn in fns.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_AHEAD_CYCLES)
            if cold_l2:
                torch.amax(scratch, dim=0, out=largest)
            start.record()
            fn()
            end.record()
            spans[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: _summary([1e3 * start.elapsed_time(end) for start, end in pairs])
        for name, pairs in spans.items()
    }


def host_us(fn: Call, *, repeats: int = 30) -> Timing:
    """Time until ``fn()`` returns: on a GPU what it costs to queue it, on a CPU all of it."""
    _warm_up(fn)
    samples = []
    for _ in range(repeats):
        _synchronize()
        start = time.perf_counter_ns()
        fn()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    _synchronize()
    return _summary(samples)


def capture(fn: Call, first: Call | None = None) -> Call:
    """A CUDA graph of one ``fn()`` as a call that replays it; it keeps ``fn``'s tensors alive.

    ``first``, if given, is captured before, on the same stream in a graph of its own, and replayed.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # restores the stream even where capturing fails
        if first is not None:
            _warm_up(first)
            first_graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(first_graph, stream=stream):
                first()
            first_graph.replay()
        _warm_up(fn)
        with torch.cuda.graph(graph, stream=stream):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    return partial(_replay, graph, fn)


def copy_bandwidth(device: torch.device | str = "cuda", *, num_bytes: int = 2**30) -> float:
    """GB/s, read and written, of copying ``num_bytes`` within the device."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * num_bytes / _time(lambda: target.copy_(source), source.device).median / 1e3


def matmul_rate(device: torch.device | str = "cuda", *, size: int = 8192) -> float:
    """TFLOP/s of a bf16 product of two square matrices with random elements."""
    a, b = torch.randn(2, size, size, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    return 2 * size**3 / _time(lambda: torch.mm(a, b, out=out), a.device).median / 1e6


def _time(fn: Call, device: torch.device) -> Timing:
    return time_us(fn, graph=False) if device.type == "cuda" else host_us(fn)


def _replay(graph: torch.cuda.CUDAGraph, fn: Call) -> None:
    graph.replay()


def _warm_up(fn: Call) -> None:
    for _ in range(_WARM_UPS):
        fn()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _summary(samples: Sequence[float]) -> Timing:
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(deciles[4], deciles[0], deciles[8])
