"""matmul_w8a16 and matmul_w4a16 on Hopper: launches, and how to repeat them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvkern.kernels.config import KernelConfig, config_of_call
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.hopper.matmul_weight_only_few import MOST_ROWS, few_call, matmul_few_kernel
from kvkern.kernels.hopper.matmul_weight_only_many import (
    choose_tiles,
    many_call,
    matmul_many_kernel,
)
from kvkern.kernels.launch import Descriptors, Launch, launch
from kvkern.kernels.packed_ints import chunk_columns
from kvkern.kernels.sum_splits import SumAgain, launch_sum, new_partials


def matmul_weight_only(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    out: Tensor,
) -> Callable[[Sequence[int | None]], None] | None:
    """One launch, or two where K is cut. ``kvkern.ops`` has checked the arguments; M, N > 0.

    Returns how to repeat it with tensors that differ in nothing but addresses.
    """
    gpu, device = gpu_of(out.device), out.device
    if out.shape[0] <= MOST_ROWS:
        few = few_call(x, values, scale, bias, group_size, out, gpu)
        multiply = launch(matmul_few_kernel, *few, device, num_varying=_NUM_VARYING)
        return None if multiply is None else _FewAgain(multiply, few[1])
    bits = 8 if values.dtype == torch.int8 else 4
    tiles = choose_tiles(
        out.shape[0], out.shape[1], x.shape[1], bits, group_size, zero is not None, gpu
    )
    parts = out if tiles.num_splits == 1 else new_partials(tiles.num_splits, out, torch.float32)
    many = many_call(x, values, scale, zero, bias, group_size, parts, tiles)
    multiply = launch(matmul_many_kernel, *many, device, num_varying=_NUM_VARYING)
    add = None if parts is out else launch_sum(parts, bias, out)
    if multiply is None or (add is None and parts is not out):
        return None
    return _ManyAgain(multiply, many[1], add)


_NUM_VARYING = 7  # both kernels' parameters before num_rows


class _FewAgain:
    """Launches the same variant for other addresses."""

    def __init__(self, multiply: Launch, arguments: dict[str, Any]) -> None:
        self._multiply = multiply
        names = ("words_desc", "x_desc", "scale_desc")
        self._descriptors = Descriptors(multiply, {n: arguments[names[n]] for n in range(3)})
        self._has_groups = arguments["scale_ptr"] is None

    def __call__(self, addresses: Sequence[int | None]) -> None:
        x, values, scale, _, bias, out = addresses
        at = self._descriptors.at
        of_scale = (*at(2, scale), None) if self._has_groups else (None, scale)
        self._multiply((*at(0, values), *at(1, x), *of_scale, bias, out, values))


class _ManyAgain:
    """Launches the same variants for other addresses."""

    def __init__(
        self,
        multiply: Launch,
        arguments: dict[str, Any],
        add: SumAgain | None,  # where K is cut
    ) -> None:
        self._multiply, self._add = multiply, add
        names = ("words_desc", "x_desc")
        self._descriptors = Descriptors(multiply, {n: arguments[names[n]] for n in range(2)})

    def __call__(self, addresses: Sequence[int | None]) -> None:
        x, values, scale, zero, bias, out = addresses
        at = self._descriptors.at
        operands = (*at(0, values), *at(1, x), scale, zero)
        if self._add is None:
            self._multiply((*operands, bias, out, values))
        else:
            self._add(lambda into: self._multiply((*operands, None, into, values)), bias, out)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each number of bits and size of group, zeros, both dtypes, tiles of each size."""
    if capability != 90:
        return
    gpu = Gpu(capability, num_sms=132)
    bf16, fp16 = torch.bfloat16, torch.float16
    for bits, group_size, dtype, has_zero, num_rows, num_columns in (
        (4, 128, bf16, False, 8, 4096),
        (4, 128, bf16, False, 1, 28672),
        (4, 128, bf16, False, 2, 4096),
        (4, 128, fp16, False, 16, 8192),
        (4, 11008, bf16, False, 1, 4096),
        (8, 11008, bf16, False, 1, 4096),
        (8, 11008, bf16, False, 4, 8192),
        (8, 11008, fp16, False, 16, 8192),
        (8, 11008, bf16, False, 128, 4096),
        (8, 11008, bf16, False, 256, 8192),
        (8, 11008, fp16, True, 4096, 4096),
        (4, 128, bf16, False, 128, 4096),
        (4, 128, bf16, True, 4096, 4096),
        (4, 64, bf16, False, 32, 4096),
        (4, 64, bf16, True, 128, 4096),
        (4, 11008, fp16, False, 32, 4096),
    ):
        x = torch.empty(num_rows, 11008, dtype=dtype, device="meta")
        out = torch.empty(num_rows, num_columns, dtype=dtype, device="meta")
        stored = torch.int8 if bits == 8 else torch.uint8
        num_chunks = 11008 // chunk_columns(bits)
        values = torch.empty(num_chunks, num_columns, 128, dtype=stored, device="meta")
        scale = torch.empty(11008 // group_size, num_columns, device="meta")
        zero = torch.empty_like(scale) if has_zero else None
        label = f"w{bits}-g{group_size}-M{num_rows}-{dtype}".replace("torch.", "")
        label += "-zero" * has_zero
        if num_rows <= MOST_ROWS:
            _, *call = few_call(x, values, scale, out[0], group_size, out, gpu)
            yield config_of_call(matmul_few_kernel, label, *call)
            continue
        tiles = choose_tiles(num_rows, num_columns, 11008, bits, group_size, has_zero, gpu)
        parts = out if tiles.num_splits == 1 else new_partials(tiles.num_splits, out, torch.float32)
        _, *call = many_call(x, values, scale, zero, out[0], group_size, parts, tiles)
        yield config_of_call(matmul_many_kernel, label, *call)
