"""Products from the host: what a launch is given, first and again."""

from functools import partial

import pytest
import torch

from kvkern import quantize_fp8, quantize_int4, quantize_int8

pytest.importorskip("triton", reason="Triton is not installed")

from kvkern.kernels import scaled_mm, sum_splits
from kvkern.kernels.device import Gpu
from kvkern.kernels.hopper import matmul_weight_only
from kvkern.kernels.hopper import scaled_mm as hopper_scaled_mm


class Again:
    """What can be launched again: takes down what it is given, by name."""

    def __init__(self, kernel, num_varying, calls):
        self.kernel, self.num_varying, self.calls = kernel, num_varying, calls
        self.encoded_numbers = []

    def __call__(self, varying):
        assert len(varying) == self.num_varying
        names = list(self.kernel.arg_names)
        self.calls.append((self.kernel.__name__, dict(zip(names, varying, strict=False))))

    def encoded(self, first, values):
        self.encoded_numbers.append(first)
        return list(values)


def address_of(value):
    """Of a tensor, a descriptor or what stands for it."""
    value = getattr(value, "base", value)
    return value.data_ptr() if hasattr(value, "data_ptr") else value


def check_repeat(module, run, tensors, monkeypatch):
    """Launches of ``run(*tensors())``, and of its like for other tensors: first, or again.

    Returns the first ones, and which parameters' descriptors were encoded.
    """
    calls, agains = [], []

    def launch(kernel, grid, arguments, options, device, *, num_varying):
        assert set(arguments) == set(kernel.arg_names)
        calls.append((kernel.__name__, arguments))
        agains.append(Again(kernel, num_varying, calls))
        return agains[-1]

    for patched in (module, sum_splits):
        monkeypatch.setattr(patched, "launch", launch)
        monkeypatch.setattr(patched, "gpu_of", lambda device: Gpu(90, 132))
    again = run(*tensors())
    first = list(calls)
    given = tensors()
    addresses, out = [None if x is None else x.data_ptr() for x in given], given[-1]
    calls.clear()
    again(addresses)
    repeated = list(calls)
    again(addresses)  # what comes again is not encoded again
    calls.clear()
    run(*given)
    for (kernel, some), (first_kernel, of_first) in zip(repeated, calls, strict=True):
        assert kernel == first_kernel
        for name, value in some.items():
            if len(calls) == 1 or name not in ("out_ptr", "out_desc", "partials_ptr"):
                assert address_of(value) == address_of(of_first[name]), name
            if hasattr(value, "strides"):
                assert list(value.shape) == list(of_first[name].shape)
                assert list(value.strides) == list(of_first[name].strides)
    if len(calls) == 2:
        product, of_sum = repeated[0][1], repeated[1][1]
        into = product["out_desc"] if "out_desc" in product else product["out_ptr"]
        assert address_of(into) == of_sum["partials_ptr"]
        assert product["bias_ptr"] is None
        assert of_sum["bias_ptr"] == addresses[-2] and of_sum["out_ptr"] == out.data_ptr()
    return first, sorted(agains[0].encoded_numbers)


@pytest.mark.parametrize(
    "bits, num_rows, num_columns, group_size, num_launches",
    [
        (8, 64, 128, 1024, 2), (8, 64, 128 * 132, 1024, 1),  # cut along K, and not
        (4, 64, 128, 128, 2), (4, 64, 128 * 132, 128, 1),
        (4, 16, 128, 128, 1), (4, 1, 128, 1024, 1),
    ],
)  # fmt: skip
def test_weight_only(bits, num_rows, num_columns, group_size, num_launches, monkeypatch):
    def tensors():
        quantize = partial(quantize_int4, group_size=group_size if group_size < 1024 else None)
        quantize = quantize_int8 if bits == 8 else quantize
        style = {"symmetric": num_rows <= 16, "backend": "reference"}
        weight = quantize(torch.ones(num_columns, 1024), **style)
        x, out = torch.zeros(num_rows, 1024).half(), torch.empty(num_rows, num_columns).half()
        return x, weight.values, weight.scale, weight.zero, torch.ones(num_columns), out

    def run(*given):
        return matmul_weight_only.matmul_weight_only(*given[:-1], group_size, given[-1])

    launches, encoded = check_repeat(matmul_weight_only, run, tensors, monkeypatch)
    assert len(launches) == num_launches
    has_scale = num_rows <= 16 and group_size < 1024  # as a descriptor
    assert encoded == [0, 1, 2][: 2 + has_scale]


SCALES = [("row", False), ("group", False), ("group", True)]  # and whether column-major


def scaled_mm_tensors(num_rows, num_columns, granularity, column_major, num_experts=0, depth=4096):
    a, scale_a = quantize_fp8(
        torch.ones(num_rows, depth),
        granularity=granularity,
        column_major_scales=column_major,
        backend="reference",
    )
    b = torch.zeros(num_experts or 1, num_columns, depth, dtype=a.dtype).mT
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32) if num_experts else None
    cells = (depth // 128, -(-num_columns // 128)) if granularity == "group" else (1, num_columns)
    bias, out = torch.ones(1, num_columns), torch.empty(1, num_rows, num_columns).half()
    scale_b = torch.ones(num_experts or 1, *cells)
    return a[None], b, scale_a[None], scale_b, offsets, bias.expand(len(b), -1), out


def check_scaled_mm(module, *shape, monkeypatch):
    """Shape as ``scaled_mm_tensors`` takes it."""
    granularity = shape[2]
    cells = ((1, 128), (128, 128)) if granularity == "group" else ((1, 0), (0, 1))

    def run(a, b, scale_a, scale_b, row_offsets, bias, out):
        return module.scaled_mm(a, b, scale_a, scale_b, *cells, row_offsets, bias, True, out)

    return check_repeat(module, run, partial(scaled_mm_tensors, *shape), monkeypatch)


@pytest.mark.parametrize("granularity, column_major", SCALES)
@pytest.mark.parametrize(
    "num_rows, num_columns, depth, kernel, num_launches, shares_columns",
    [
        (5, 8192, 4096, "scaled_mm_few_kernel", 1, False),
        (64, 512, 4096, "scaled_mm_few_kernel", 2, False),
        (100, 256, 4096, "scaled_mm_few_kernel", 2, False),
        (500, 640, 16384, "_scaled_mm_kernel", 2, False),
        (300, 8192, 1024, "_scaled_mm_kernel", 1, False),
        (300, 8192, 4096, "_scaled_mm_kernel", 1, True),
        (100, 19000, 2048, "_scaled_mm_kernel", 1, True),
    ],  # few rows and more, K cut or not, the last columns shared out or not
)
def test_scaled_mm(
    num_rows,
    num_columns,
    depth,
    kernel,
    num_launches,
    shares_columns,
    granularity,
    column_major,
    monkeypatch,
):
    launches, encoded = check_scaled_mm(
        hopper_scaled_mm, num_rows, num_columns, granularity, column_major, 0, depth,
        monkeypatch=monkeypatch,
    )  # fmt: skip
    assert len(launches) == num_launches and launches[0][0] == kernel
    if kernel == "scaled_mm_few_kernel":  # of 8 rows or fewer scales are copied
        assert encoded == [0, 1, *([2] if column_major and num_rows > 8 else [])]
    else:  # parts of out may lie elsewhere the next time
        kept = [number for number in encoded if number < 6]
        extra = [2] if shares_columns else []
        assert kept == [0, 1, *extra, *([3] if column_major else [])] and 6 in encoded


@pytest.mark.parametrize("granularity, column_major", SCALES)
@pytest.mark.parametrize("module", [scaled_mm, hopper_scaled_mm], ids=["triton", "hopper"])
def test_scaled_mm_of_experts(module, granularity, column_major, monkeypatch):
    shape = 300, 512, granularity, column_major, 3
    launches, encoded = check_scaled_mm(module, *shape, monkeypatch=monkeypatch)
    ((_, arguments),) = launches
    assert arguments["row_offsets_ptr"] is not None
    assert encoded == ([0, 1, 6] if module is hopper_scaled_mm else [])


@pytest.mark.parametrize("granularity, column_major", SCALES)
@pytest.mark.parametrize("num_rows, num_columns, num_launches", [(5, 512, 2), (300, 8192, 1)])
def test_portable_scaled_mm(
    num_rows, num_columns, num_launches, granularity, column_major, monkeypatch
):
    launches, encoded = check_scaled_mm(
        scaled_mm, num_rows, num_columns, granularity, column_major, monkeypatch=monkeypatch
    )
    assert len(launches) == num_launches and encoded == []
