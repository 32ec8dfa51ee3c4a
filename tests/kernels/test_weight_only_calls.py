"""Hopper's weight-only products from the host: what a launch is given, first and again."""

from functools import partial

import pytest
import torch

from kvkern import quantize_int4, quantize_int8

pytest.importorskip("triton", reason="Triton is not installed")

from kvkern.kernels.device import Gpu
from kvkern.kernels.hopper import matmul_weight_only as hopper


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


@pytest.mark.parametrize(
    "bits, num_rows, num_columns, group_size, num_launches",
    [
        (8, 64, 128, 1024, 2), (8, 64, 128 * 132, 1024, 1),  # cut along K, and not
        (4, 64, 128, 128, 2), (4, 64, 128 * 132, 128, 1),
        (4, 16, 128, 128, 1), (4, 1, 128, 1024, 1),
    ],
)  # fmt: skip
def test_repeated_launch_is_given_what_a_first_one_would_be(
    bits, num_rows, num_columns, group_size, num_launches, monkeypatch
):
    calls, agains = [], []

    def launch(kernel, grid, arguments, options, device, *, num_varying):
        assert set(arguments) == set(kernel.arg_names)
        calls.append((kernel.__name__, arguments))
        agains.append(Again(kernel, num_varying, calls))
        return agains[-1]

    def tensors():
        quantize = partial(quantize_int4, group_size=group_size if group_size < 1024 else None)
        quantize = quantize_int8 if bits == 8 else quantize
        style = {"symmetric": num_rows <= 16, "backend": "reference"}
        weight = quantize(torch.ones(num_columns, 1024), **style)
        x, out = torch.zeros(num_rows, 1024).half(), torch.empty(num_rows, num_columns).half()
        return (x, weight.values, weight.scale, weight.zero, torch.ones(num_columns)), out

    monkeypatch.setattr(hopper, "launch", launch)
    monkeypatch.setattr(hopper, "gpu_of", lambda device: Gpu(90, 132))
    given, out = tensors()
    again = hopper.matmul_weight_only(*given, group_size, out)
    assert len(calls) == num_launches
    given, out = tensors()
    calls.clear()
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in (*given, out)]
    again(addresses)
    repeated = list(calls)
    again(addresses)
    has_scale = num_rows <= 16 and group_size < 1024  # as a descriptor
    # what comes again is not encoded again
    assert sorted(agains[0].encoded_numbers) == [0, 1, 2][: 2 + has_scale]
    calls.clear()
    hopper.matmul_weight_only(*given, group_size, out)
    for (kernel, some), (first_kernel, of_first) in zip(repeated, calls, strict=True):
        assert kernel == first_kernel
        for name, value in some.items():
            if len(calls) == 1 or name not in ("out_ptr", "partials_ptr") or value is out:
                assert address_of(value) == address_of(of_first[name]), name
            if hasattr(value, "strides"):
                assert list(value.shape) == list(of_first[name].shape)
                assert list(value.strides) == list(of_first[name].strides)
    if len(calls) == 2:
        assert repeated[0][1]["out_ptr"] == repeated[1][1]["partials_ptr"]
        assert repeated[1][1]["out_ptr"] == out.data_ptr()
