"""matmul_w8a16 and matmul_w4a16 on Hopper: launches, and how to repeat them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvkern.kernels.config import KernelConfig, config_of_call, spills
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.hopper.matmul_weight_only_many import (
    _many_kernel,
    choose_tiles,
    multiply_call,
)
from kvkern.kernels.launch import Launch, launch, moved
from kvkern.kernels.packed_ints import chunk_columns
from kvkern.kernels.sum_splits import (
    NUM_VARYING,
    new_partials,
    sum_splits_call,
    sum_splits_kernel,
)


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
    bits = 8 if values.dtype == torch.int8 else 4
    tiles = choose_tiles(
        out.shape[0], out.shape[1], x.shape[1], bits, group_size, zero is not None, gpu
    )
    parts = out if tiles.num_splits == 1 else new_partials(tiles.num_splits, out, torch.float32)
    grid, arguments, options = multiply_call(x, values, scale, zero, bias, group_size, parts, tiles)
    num_varying = list(_many_kernel.arg_names).index("num_rows")
    multiply = launch(_many_kernel, grid, arguments, options, device, num_varying=num_varying)
    add = None
    if parts is not out:
        sum_grid, of_sum, options = sum_splits_call(parts, bias, out, gpu)
        add = launch(sum_splits_kernel, sum_grid, of_sum, options, device, num_varying=NUM_VARYING)
    return multiply and _Again(multiply, arguments, add, parts)


class _Again:
    """Launches the same variants for other addresses."""

    def __init__(
        self,
        multiply: Launch,
        arguments: dict[str, Any],
        add: Launch | None,
        parts: Tensor,  # partial sums, where ``add`` adds them
    ) -> None:
        self._multiply, self._add = multiply, add
        self._shape, self._device = parts.shape, parts.device
        self._descriptors = [moved(arguments[name], 0) for name in ("words_desc", "x_desc")]
        self._encoded: dict[tuple[int, int], list[Any]] = {}  # by parameter and address

    def __call__(self, addresses: Sequence[int | None]) -> None:
        x, values, scale, zero, bias, out = addresses
        operands = (*self._at(0, values), *self._at(1, x), scale, zero)
        if self._add is None:
            self._multiply((*operands, bias, out))
            return
        partials = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        into = partials.data_ptr()
        self._multiply((*operands, None, into))
        self._add((into, bias, out))

    def _at(self, number: int, address: Any) -> list[Any]:
        """The descriptor of a tensor there; an allocator comes back to the same few addresses."""
        encoded = self._encoded.get((number, address))
        if encoded is None:
            if len(self._encoded) >= _MOST_DESCRIPTORS:
                self._encoded.clear()
            encoded = self._multiply.encoded(number, [moved(self._descriptors[number], address)])
            self._encoded[number, address] = encoded
        return encoded


_MOST_DESCRIPTORS = 512  # of a kind of call: each layer's weight, and a step's buffers


_BUDGET = spills("around a group's end, where its sums meet those of all", 192)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """Each number of bits and size of group, zeros, both dtypes, tiles of each size."""
    if capability != 90:
        return
    gpu = Gpu(capability, num_sms=132)
    bf16, fp16 = torch.bfloat16, torch.float16
    for bits, group_size, dtype, has_zero, num_rows in (
        (8, 11008, bf16, False, 128),
        (8, 11008, fp16, True, 4096),
        (4, 128, bf16, False, 128),
        (4, 128, bf16, True, 4096),
        (4, 64, bf16, False, 32),
        (4, 11008, fp16, False, 64),
    ):
        x = torch.empty(num_rows, 11008, dtype=dtype, device="meta")
        out = torch.empty(num_rows, 4096, dtype=dtype, device="meta")
        stored = torch.int8 if bits == 8 else torch.uint8
        num_chunks = 11008 // chunk_columns(bits)
        values = torch.empty(num_chunks, 4096, 128, dtype=stored, device="meta")
        scale = torch.empty(11008 // group_size, 4096, device="meta")
        zero = torch.empty_like(scale) if has_zero else None
        tiles = choose_tiles(num_rows, 4096, 11008, bits, group_size, has_zero, gpu)
        parts = out if tiles.num_splits == 1 else new_partials(tiles.num_splits, out, torch.float32)
        _, arguments, options = multiply_call(
            x, values, scale, zero, out[0], group_size, parts, tiles
        )
        label = f"w{bits}-g{group_size}-M{num_rows}-{dtype}".replace("torch.", "")
        label += "-zero" * has_zero
        yield config_of_call(_many_kernel, label, arguments, options, **_BUDGET)
