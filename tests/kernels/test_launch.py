"""Launching again: the arguments' order and the place, with Triton's driver and compiler stood in.

Of Triton's launcher only what is compiled is stood in, so that these tests tell whether another
release's is built otherwise.

What a card makes of it is tested in tests/ops/test_write_kv_again.py.
"""

import inspect
import weakref
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from kvkern.kernels import launch as launching
from kvkern.kernels import write_kv
from kvkern.kernels.launch import Launch, launch
from tests.kernels.standing import stand_on

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
    """Where the host stands: its current card, how often it went to another, what it encoded."""
    host = SimpleNamespace(card=1, visits=[], encoded=[])

    def encode(address, swizzle, elem_size, elem_type, block, shape, strides, padding):
        host.encoded.append(address)
        return address, swizzle, elem_size, elem_type, *block, *shape, *strides, padding

    driver = SimpleNamespace(
        get_current_device=lambda: host.card,
        get_current_stream=lambda card: f"stream of card {card}",
        utils=SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode),
    )
    monkeypatch.setattr(launching, "device_finder", lambda: driver.get_current_device)
    runtime = SimpleNamespace(driver=SimpleNamespace(active=driver))
    monkeypatch.setattr(launching.triton, "runtime", runtime)

    monkeypatch.setattr(launching.torch.cuda, "device", stand_on(host))
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


def test_again_gives_what_varies_then_what_was_fixed(host):
    again, kernel, compiled = launched()
    again([1024, None, 9])
    again((2048, 4096, 0))
    head = (5, 1, 1, "stream of card 1", "function", "metadata", None, None, None)
    assert compiled.runs == [(*head, 1024, None, 9, 576, 64), (*head, 2048, 4096, 0, 576, 64)]
    assert len(kernel.calls) == 1  # nobody looked for a variant


@pytest.mark.parametrize(
    "grid, whole", [((5,), (5, 1, 1)), ((5, 6), (5, 6, 1)), ((5, 6, 7), (5, 6, 7))]
)
def test_grid_has_three_dimensions(host, grid, whole):
    again, _, compiled = launched(grid=grid)
    again([1, 2, 3])
    assert compiled.runs[0][:3] == whole


def test_stream_is_the_one_that_is_current_at_each_launch(host, monkeypatch):
    names = iter(["first", "second"])
    driver = launching.triton.runtime.driver.active
    monkeypatch.setattr(driver, "get_current_stream", lambda card: next(names))
    again, _, compiled = launched()
    again([1, 2, 3])
    again([1, 2, 3])
    assert [run[3] for run in compiled.runs] == ["first", "second"]


def test_host_goes_to_the_variants_card_and_comes_back(host):
    again, _, compiled = launched()
    host.card = 0
    again([1, 2, 3])
    assert host.visits == [1] and host.card == 0
    assert compiled.runs[0][3] == "stream of card 1" and len(compiled.runs) == 1
    host.card = 1
    again([1, 2, 3])
    assert host.visits == [1]  # it was there already


def test_device_without_a_number_is_the_card_that_was_current(host):
    host.card = 3
    again, _, compiled = launched(torch.device("cuda"))
    host.card = 0
    again([1, 2, 3])
    assert host.visits == [3] and compiled.runs[0][3] == "stream of card 3"


def test_interpreter_has_nothing_to_launch_again(host):
    kernel = Kernel(None)
    assert launch(kernel, (5,), ARGUMENTS, OPTIONS, CARD, num_varying=3) is None
    assert len(kernel.calls) == 1


class InC:
    """What Triton's launcher calls in the end."""

    def __init__(self):
        self.calls = []

    def __call__(self, *arguments):
        self.calls.append(tuple(tuple(a) if isinstance(a, list) else a for a in arguments))


SIGNATURE = {"q": "tensordesc<bf16[64, 64],L>", "p": "*bf16", "k": "tensordesc<bf16[8, 32],L>",
             "n": "i32", "SIZE": "constexpr"}  # fmt: skip
META = [
    {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False},
    {"swizzle": 2, "elem_size": 2, "elem_type": 10, "block_size": [8, 32], "fp4_padded": False},
]


def compiled_by_triton(signature, meta):
    launcher = object.__new__(driver.CudaLauncher)
    in_c = InC()
    launcher.__dict__ |= {
        "launch": driver.wrap_handle_tensordesc(in_c, signature, meta),
        "num_ctas": 1, "global_scratch_size": 0, "global_scratch_align": 1,
        "profile_scratch_size": 0, "profile_scratch_align": 1, "launch_cooperative_grid": False,
        "launch_pdl": True, "gsan_enabled": False, "arg_annotations": "all", "kernel_signature": "",
    }  # fmt: skip
    compiled = SimpleNamespace(
        run=launcher,
        function="function",
        packed_metadata=(4, 1, 0),
        src=SimpleNamespace(signature=signature),
        metadata=SimpleNamespace(tensordesc_meta=meta),
    )
    return compiled, in_c


def descriptor(rows, columns):
    tensor = torch.empty(rows, columns, dtype=torch.bfloat16)
    return TensorDescriptor.from_tensor(tensor, [8, 32])


def launch_by_triton(compiled, grid, stream, *arguments):
    head = (compiled.function, compiled.packed_metadata, None, None, None)
    compiled.run(*grid, stream, *head, *arguments)


@pytest.mark.parametrize("has_descriptors", [False, True])
def test_function_in_c_is_given_what_tritons_launcher_gives_it(host, has_descriptors):
    signature = dict(SIGNATURE) if has_descriptors else {**SIGNATURE, "q": "*bf16", "k": "*bf16"}
    compiled, in_c = compiled_by_triton(signature, META if has_descriptors else [])
    q, p, k = descriptor(5, 64), torch.empty(3, dtype=torch.bfloat16), descriptor(100, 40)
    if not has_descriptors:
        q, k = q.base, k.base
    launch_by_triton(compiled, (7, 1, 1), "stream of card 1", q, p.data_ptr(), k, 9, 64)
    again = Launch(compiled, (7,), CARD, [64])
    varying = [*again.encoded(0, [q, p]), *again.encoded(2, [k]), 9]
    if not has_descriptors:
        varying = [q, p.data_ptr(), k, 9]
    compiled.run.launch = pytest.fail
    again(varying)
    assert in_c.calls[0] == in_c.calls[1]


def test_descriptors_are_encoded_once_and_keep_no_tensor_alive(host):
    compiled, in_c = compiled_by_triton(SIGNATURE, META)
    again = Launch(compiled, (7,), CARD, [64])
    q = descriptor(5, 64)
    encoded = again.encoded(0, [q, None])
    alive = weakref.ref(q.base)
    host.encoded.clear()
    del q
    assert alive() is None
    for _ in range(2):
        again([*encoded, *encoded[:-1], 9])
    assert not host.encoded and len(in_c.calls) == 2


def with_scratch(launcher):
    launcher.global_scratch_size = 16


def with_more_arguments(launcher):
    launch = launcher.launch
    launcher.launch = lambda *arguments: launch(*arguments)


def without_encoding(launcher):
    launcher.launch = InC()
    launcher.__class__ = type("Launcher", (driver.CudaLauncher,), {"__module__": __name__})


def that_looks_at_arguments(launcher):
    def look(self, *arguments):
        return self.launch(int(arguments[0]), *arguments[1:])

    launcher.__class__ = type("Launcher", (driver.CudaLauncher,), {"__call__": look})


@pytest.mark.parametrize(
    "change", [with_scratch, with_more_arguments, without_encoding, that_looks_at_arguments]
)
def test_launcher_of_another_kind_is_taken_as_it_is(host, change):
    compiled, _ = compiled_by_triton(SIGNATURE, META)
    change(compiled.run)
    again = Launch(compiled, (7,), CARD, [64])
    runs = []
    assert again._run is compiled.run
    again._run = lambda *arguments: runs.append(arguments)
    q = descriptor(5, 64)
    alive, address = weakref.ref(q.base), q.base.data_ptr()
    encoded = again.encoded(0, [q, None])
    del q
    assert alive() is None
    again([*encoded, *encoded[:1], 9])
    ((*head, moved, none, _, n, size),) = runs
    assert head == [7, 1, 1, "stream of card 1", "function", (4, 1, 0), None, None, None]
    assert (none, n, size) == (None, 9, 64)
    assert (moved.base.data_ptr(), list(moved.shape)) == (address, [5, 64])
    assert (list(moved.strides), moved.padding) == ([64, 1], "zero")


def test_stand_in_for_a_descriptor_has_all_that_triton_reads(host):
    compiled, in_c = compiled_by_triton(SIGNATURE, META)
    q, k = descriptor(5, 64), descriptor(100, 40)
    for one, two in ((q, k), tuple(launching.moved(x, x.base.data_ptr()) for x in (q, k))):
        launch_by_triton(compiled, (7, 1, 1), "stream", one, 1024, two, 9, 64)
    assert in_c.calls[0] == in_c.calls[1]


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
    assert inspect.isbuiltin(again._run)
    expected = torch.full_like(src, 1000)
    assert torch.equal(dst, expected)  # src[0] is 0
    other, out = src + 7, torch.zeros_like(dst)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # what the other streams would not wait for
        other += 1
        again([other.data_ptr(), out.data_ptr(), 64])
    stream.synchronize()
    assert torch.equal(out, src + 1008)
