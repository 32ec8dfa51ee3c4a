"""A launch may begin before the one before it has ended: it waits before it reads or writes."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kvkern import (
    QuantizedInt4,
    QuantizedInt8,
    dequantize_fp8,
    matmul_w4a16,
    matmul_w8a16,
    mla_absorb,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    rms_norm_quant_fp8,
    scaled_mm,
    silu_and_mul_quant_fp8,
)
from kvkern.testing.timing import capture

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HIDDEN = 2048
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a card of compute capability 9.0",
)


@pytest.fixture(autouse=True)
def memory_as_it_is(monkeypatch):
    """Where filling it with NaN would be a launch of its own, between those that are meant."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, getattr(torch, name).__wrapped__)


@triton.jit(do_not_specialize=["size", "out_size"])
def _copy_late(source, target, size, out, seen, out_size, BLOCK: tl.constexpr):
    """What is next may start at once, but is only right if it waits for this, for a millisecond."""
    gdc_launch_dependents()
    program = tl.program_id(0)
    for _ in range(1000):
        tl.inline_asm_elementwise(
            "nanosleep.u32 1000; mov.u32 $0, $1;", "=r,r", [program], tl.int32, False, 1
        )
    for first in range(program * BLOCK, size, tl.num_programs(0) * BLOCK):
        offs = first + tl.arange(0, BLOCK)
        tl.store(target + offs, tl.load(source + offs, mask=offs < size), mask=offs < size)
    for first in range(program * BLOCK, out_size, tl.num_programs(0) * BLOCK):
        offs = first + tl.arange(0, BLOCK)
        tl.store(seen + offs, tl.load(out + offs, mask=offs < out_size), mask=offs < out_size)


def randn(*shape):
    return torch.randn(*shape, dtype=BF16, device="cuda")


def operands(num_rows, num_columns, depth, granularity):
    """Of scaled_mm, scales of groups column-major; all contiguous."""
    of_weight = "block" if granularity == "group" else granularity
    a = quantize_fp8(randn(num_rows, depth), granularity=granularity)
    weight = quantize_fp8(randn(num_columns, depth), granularity=of_weight)
    scale_a = a.scale.T.contiguous() if granularity == "group" else a.scale
    return [a.values, weight.values, scale_a, weight.scale]


def by_groups(a, weight, scale_a, scale_b, out, **options):
    scaled_mm(a, weight.mT, scale_a.T, scale_b.mT, out=out, backend="hopper", **options)


def by_tensors(a, weight, scale_a, scale_b, out):
    fast = {"accumulation": "fast", "backend": "hopper"}
    scaled_mm(a, weight.T, scale_a, scale_b, out=out, **fast)


def of_experts():
    a, weight, scale_a, scale_b = operands(640, 4 * 512, HIDDEN, "group")
    ends = torch.randint(640, (3,)).sort().values
    offsets = torch.tensor([0, *ends, 640], dtype=torch.int32, device="cuda")
    return [a, weight.view(4, 512, HIDDEN), scale_a, scale_b.view(4, 4, -1), offsets]


def multiply_experts(a, weight, scale_a, scale_b, offsets, out):
    by_groups(a, weight, scale_a, scale_b, out, row_offsets=offsets)


def multiply_w4(x, values, scale, out):
    depth = x.shape[1]
    weight = QuantizedInt4(values, scale, None, depth, depth // len(scale))
    matmul_w4a16(x, weight, out=out, backend="hopper")


def multiply_w8(x, values, scale, out):
    weight = QuantizedInt8(values, scale, None, x.shape[1])
    matmul_w8a16(x, weight, out=out, backend="hopper")


def of_weight_only(quantize, num_rows, num_columns):
    weight = quantize(randn(num_columns, HIDDEN))
    return [randn(num_rows, HIDDEN), weight.values, weight.scale]


OPS = {  # inputs; the op, which fills out; out's dtype and shape
    "norm": (
        lambda: [randn(64, HIDDEN), randn(HIDDEN), randn(64, HIDDEN)],
        lambda x, gamma, residual, out: rms_norm_quant_fp8(x, gamma, residual=residual, out=out),
        (E4M3, 64, HIDDEN),
    ),
    "silu": (
        lambda: [randn(64, 2 * HIDDEN)],
        lambda x, out: silu_and_mul_quant_fp8(x, granularity="group", out=out),
        (E4M3, 64, HIDDEN),
    ),
    "dequantize": (
        lambda: [*quantize_fp8(randn(64, HIDDEN), granularity="group")],
        lambda values, scale, out: dequantize_fp8(values, scale, out=out),
        (BF16, 64, HIDDEN),
    ),
    "few rows": (lambda: operands(64, 4096, HIDDEN, "tensor"), by_tensors, (BF16, 64, 4096)),
    "few rows, groups": (lambda: operands(4, 512, 7168, "group"), by_groups, (BF16, 4, 512)),
    "rows": (lambda: operands(512, 4096, HIDDEN, "tensor"), by_tensors, (BF16, 512, 4096)),
    "rows, groups": (lambda: operands(2048, 2112, HIDDEN, "group"), by_groups, (BF16, 2048, 2112)),
    "experts": (of_experts, multiply_experts, (BF16, 640, 512)),
    "w4": (lambda: of_weight_only(quantize_int4, 8, 4096), multiply_w4, (BF16, 8, 4096)),
    "w8": (lambda: of_weight_only(quantize_int8, 8, 512), multiply_w8, (BF16, 8, 512)),
    "w4, rows": (lambda: of_weight_only(quantize_int4, 512, 4096), multiply_w4, (BF16, 512, 4096)),
    "w8, rows": (lambda: of_weight_only(quantize_int8, 128, 512), multiply_w8, (BF16, 128, 512)),
    "absorb": (
        lambda: [randn(512, 32, 128), randn(32, 128, 512)],
        lambda x, w, out: mla_absorb(x, w, out=out, backend="hopper"),
        (BF16, 512, 32, 512),
    ),
} | {
    f"quantize by {granularity}": (
        lambda: [randn(256, HIDDEN)],
        lambda x, out, of=granularity: quantize_fp8(x, granularity=of, out=out),
        (E4M3, 256, HIDDEN),
    )
    for granularity in ("tensor", "row", "group", "block")
}


def in_one_piece(tensors):
    """Copies next to each other, each at a multiple of 256 bytes; and all of their bytes."""
    sizes = [x.numel() * x.element_size() for x in tensors]
    starts = [0]
    for size in sizes:
        starts.append((starts[-1] + size + 255) // 256 * 256)
    all_bytes = torch.zeros(starts[-1], dtype=torch.uint8, device="cuda")
    views = [
        all_bytes[start : start + size].view(x.dtype).view(x.shape)
        for start, size, x in zip(starts, sizes, tensors, strict=False)
    ]
    for view, x in zip(views, tensors, strict=True):
        view.view(torch.uint8).copy_(x.view(torch.uint8))
    return all_bytes, views


class Late:
    """An op whose inputs are there late, and whose out is read late."""

    def __init__(self, name):
        make, self.call, (dtype, *shape) = OPS[name]
        self.given, self.inputs = in_one_piece(make())
        fresh, fresh_inputs = in_one_piece(make())
        self.fresh = fresh.clone()
        self.out = torch.empty(*shape, dtype=dtype, device="cuda")
        expected = torch.empty_like(self.out)
        self.call(*fresh_inputs, expected)  # may change inputs, as a norm its residual
        self.call(*self.inputs, self.out)  # all is compiled now, and repeated calls are known
        self.bytes, self.expected = (x.view(torch.uint8).flatten() for x in (self.out, expected))
        assert not torch.equal(self.bytes, self.expected)
        self.before = self.bytes.fill_(0x3B).clone()
        self.seen = torch.zeros_like(self.before)
        torch.cuda.synchronize()

    def copy(self, first, end):
        """Inputs' bytes from one to another, and what out has."""
        sizes = end - first, len(self.bytes)
        fresh, given = self.fresh[first:end], self.given[first:end]
        _copy_late[(16,)](fresh, given, sizes[0], self.bytes, self.seen, sizes[1], BLOCK=4096)

    def check(self):
        torch.cuda.synchronize()
        assert torch.equal(self.seen, self.before), "out: want it written after it was read"
        assert torch.equal(self.bytes, self.expected), "inputs: want them read after written"


@pytest.mark.parametrize("name", OPS)
def test_op_waits_for_what_is_before_it(name):
    late = Late(name)
    late.copy(0, len(late.given))
    late.call(*late.inputs, late.out)
    late.check()


@pytest.mark.parametrize("is_captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", ["few rows", "rows", "w4", "quantize by row"])
def test_op_waits_for_both_streams_that_join(name, is_captured):
    late, side = Late(name), torch.cuda.Stream()
    half = len(late.given) // 512 * 256

    def call():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            late.copy(half, len(late.given))
        late.copy(0, half)
        torch.cuda.current_stream().wait_stream(side)
        late.call(*late.inputs, late.out)

    if is_captured:
        late.copy(0, 256)  # is compiled now
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        late.given.zero_()
        torch.cuda.synchronize()
        graph.replay()
    else:
        call()
    late.check()


def chain(x, weights, between=lambda: None):
    """Launches that each read what the one before has written, and some results.

    ``between`` is called after each op.
    """
    gamma, wide, down, up, of_rows, of_tensor = weights
    groups = {"granularity": "group", "column_major_scales": True}

    def then(result):
        between()
        return result

    def multiply(a, weight, **options):
        b, scale_b = weight
        return then(scaled_mm(a.values, b, a.scale, scale_b, backend="hopper", **options))

    gates = multiply(then(rms_norm_quant_fp8(x, gamma, **groups)), wide)
    y = multiply(then(silu_and_mul_quant_fp8(gates, **groups)), down)
    y = multiply(then(quantize_fp8(y, **groups)), up)
    by_tensor = multiply(
        then(quantize_fp8(y, granularity="tensor")), of_tensor, accumulation="fast"
    )
    by_rows = multiply(then(quantize_fp8(y, granularity="row")), of_rows)
    made = then(quantize_fp8(by_rows[:64].repeat(4, 1), granularity="block"))  # a weight
    of_made = multiply(then(quantize_fp8(by_tensor, **groups)), (made.values.T, made.scale.T))
    return y, by_rows, by_tensor, of_made


@pytest.mark.parametrize("num_rows", [64, 80, 256, 1000, 4096])
def test_ops_in_a_row_are_those_with_a_pause_between(num_rows):
    """In a graph, and of new inputs each time: what is left in memory is not the result."""

    def fp8(num_columns, depth, granularity):
        weight = quantize_fp8(randn(num_columns, depth), granularity=granularity)
        return weight.values.T, weight.scale if granularity == "tensor" else weight.scale.T

    x = randn(num_rows, HIDDEN)
    of_blocks = [fp8(n, k, "block") for n, k in ((6144, HIDDEN), (512, 3072), (4096, 512))]
    weights = randn(HIDDEN), *of_blocks, fp8(HIDDEN, 4096, "row"), fp8(HIDDEN, 4096, "tensor")
    results = []
    replay = capture(lambda: results.append(chain(x, weights)))
    for _ in range(8):
        x.normal_()
        expected = chain(x, weights, torch.cuda.synchronize)
        replay()
        for got, one in zip(results[-1], expected, strict=True):
            assert torch.equal(got, one)
