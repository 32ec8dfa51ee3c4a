"""Launching again: the arguments' order and the place, with Triton's driver and compiler stood in.

What a card makes of it is tested in tests/ops/test_write_kv_again.py.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from kvkern.kernels import launch as launching
from kvkern.kernels import write_kv
from kvkern.kernels.launch import launch

CARD = torch.device("cuda", 1)


class Compiled:
    """What ``kernel[grid](...)`` gives: takes down how it is run."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.runs = []

    def run(self, *arguments):
        self.runs.append(arguments)


class Kernel:
    """A jitted function of parameters a, b, n, stride, SIZE."""

    params = tuple(SimpleNamespace(name=name) for name in ("a", "b", "n", "stride", "SIZE"))

    def __init__(self, compiled):
        self.compiled, self.calls = compiled, []

    def __getitem__(self, grid):
        def call(**arguments):
            self.calls.append((grid, arguments))
            return self.compiled

        return call


@pytest.fixture
def host(monkeypatch):
    """Where the host stands: its current card, and how often it went to another."""
    host = SimpleNamespace(card=1, visits=[])
    driver = SimpleNamespace(
        get_current_device=lambda: host.card,
        get_current_stream=lambda card: f"stream of card {card}",
    )
    runtime = SimpleNamespace(driver=SimpleNamespace(active=driver))
    monkeypatch.setattr(launching.triton, "runtime", runtime)

    class StandOn:
        def __init__(self, card):
            self.card = card

        def __enter__(self):
            self.before, host.card = host.card, self.card
            host.visits.append(self.card)

        def __exit__(self, *_):
            host.card = self.before

    monkeypatch.setattr(launching.torch.cuda, "device", StandOn)
    return host


ARGUMENTS = {"SIZE": 64, "n": 7, "a": "tensor a", "stride": 576, "b": None}  # in any order
OPTIONS = {"num_warps": 2}


def launched(device=CARD, grid=(5,)):
    compiled = Compiled()
    kernel = Kernel(compiled)
    again = launch(kernel, grid, ARGUMENTS, OPTIONS, device, num_varying=3)
    return again, kernel, compiled


def test_first_launch_is_by_name_with_the_options(host):
    _, kernel, compiled = launched()
    assert kernel.calls == [((5,), {**ARGUMENTS, **OPTIONS})]
    assert compiled.runs == []  # not a second time


def test_again_gives_the_new_addresses_and_counts_then_what_was_fixed(host):
    again, kernel, compiled = launched()
    again([1024, None], [9])
    again((2048, 4096), (0,))
    head = (5, 1, 1, "stream of card 1", "function", "metadata", None, None, None)
    assert compiled.runs == [(*head, 1024, None, 9, 576, 64), (*head, 2048, 4096, 0, 576, 64)]
    assert len(kernel.calls) == 1  # nobody looked for a variant


@pytest.mark.parametrize(
    "grid, whole", [((5,), (5, 1, 1)), ((5, 6), (5, 6, 1)), ((5, 6, 7), (5, 6, 7))]
)
def test_grid_has_three_dimensions(host, grid, whole):
    again, _, compiled = launched(grid=grid)
    again([1, 2], [3])
    assert compiled.runs[0][:3] == whole


def test_stream_is_the_one_that_is_current_at_each_launch(host, monkeypatch):
    names = iter(["first", "second"])
    driver = launching.triton.runtime.driver.active
    monkeypatch.setattr(driver, "get_current_stream", lambda card: next(names))
    again, _, compiled = launched()
    again([1, 2], [3])
    again([1, 2], [3])
    assert [run[3] for run in compiled.runs] == ["first", "second"]


def test_host_goes_to_the_variants_card_and_comes_back(host):
    again, _, compiled = launched()
    host.card = 0
    again([1, 2], [3])
    assert host.visits == [1] and host.card == 0
    assert compiled.runs[0][3] == "stream of card 1" and len(compiled.runs) == 1
    host.card = 1
    again([1, 2], [3])
    assert host.visits == [1]  # it was there already


def test_device_without_a_number_is_the_card_that_was_current(host):
    host.card = 3
    again, _, compiled = launched(torch.device("cuda"))
    host.card = 0
    again([1, 2], [3])
    assert host.visits == [3] and compiled.runs[0][3] == "stream of card 3"


def test_interpreter_has_nothing_to_launch_again(host):
    kernel = Kernel(None)
    assert launch(kernel, (5,), ARGUMENTS, OPTIONS, CARD, num_varying=3) is None
    assert len(kernel.calls) == 1


def test_what_write_kv_gives_anew_is_what_its_kernel_begins_with():
    """The order is nowhere else than in these three lists."""
    names = write_kv._write_kv_kernel.arg_names[: write_kv._NUM_VARYING]
    tensors = [
        f"{name}_ptr"
        for name, parameter in inspect.signature(write_kv._call).parameters.items()
        if parameter.kind != parameter.KEYWORD_ONLY and name not in ("pages", "batch")
    ]
    fields = ["latent_ptr", "rope_ptr", "group_scales_ptr", "layer_scales_ptr"]
    batch = ["offsets_ptr", "cache_lengths_ptr", "page_table_ptr"]
    counts = ["num_requests", "max_pages", "expect_decode"]
    assert names == [*tensors, *fields, *batch, *counts]


@triton.jit(do_not_specialize=["num_requests"])
def _add_kernel(src_ptr, dst_ptr, num_requests, stride, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    values = tl.load(src_ptr + offs, mask=offs < num_requests, other=0)
    tl.store(dst_ptr + offs, values + stride)


@pytest.mark.gpu
def test_again_computes_on_other_tensors_and_on_the_current_stream():
    src, dst = (torch.arange(64, dtype=torch.int32, device="cuda") for _ in range(2))
    arguments = {"src_ptr": src, "dst_ptr": dst, "num_requests": 1, "stride": 1000, "SIZE": 64}
    again = launch(_add_kernel, (1,), arguments, {}, src.device, num_varying=3)
    expected = torch.full_like(src, 1000)
    assert torch.equal(dst, expected)  # src[0] is 0
    other, out = src + 7, torch.zeros_like(dst)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # what the other streams would not wait for
        other += 1
        again([other.data_ptr(), out.data_ptr()], [64])
    stream.synchronize()
    assert torch.equal(out, src + 1008)
