"""mla_decode on compute capability 9.0: which kernel, on what schedule.

The kernels follow a schedule that is made on the device, once a step, in the batch's own memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.hopper import (
    mla_decode_few,
    mla_decode_few_fp8,
    mla_decode_many,
    mla_decode_many_fp8,
)
from kvkern.kernels.hopper.decode_call import (
    DecodeAgain,
    Kernel,
    launch_decode,
    piece_dtype,
    step_addresses,
)
from kvkern.kernels.launch import Launch, device_finder, stream_finder
from kvkern.kernels.paging import power_of_two
from kvkern.kernels.schedule import (
    Schedule,
    Work,
    fill_schedule,
    make_schedule,
    merge_addresses,
    merge_cuts,
    schedule_addresses,
)
from kvkern.layout import CacheFormat


def choose_work(num_heads: int, max_query_len: int, fmt: CacheFormat, gpu: Gpu) -> Work:
    """Tiles of rows (tokens x heads of a request), and the gangs that share a read of the keys.

    32 rows or fewer: memory is the limit, and the tile is no larger than it must be. More: 64 a
    program, as many programs side by side as a request has tiles. Smaller tiles where 64 rows have
    no kernel: the latent is too narrow to be halved, or tokens of 8 bits have scales.

    What a request's start costs, in blocks of keys, is what was best with ragged lengths.
    """
    num_rows = num_heads * max_query_len
    is_many = num_rows > 32 and not fmt.group_scaled and fmt.kv_lora_rank >= 256
    least = 16 if fmt.is_quantised else 8
    tile_rows = 64 if is_many else min(max(power_of_two(num_rows), least), 32)
    gang = -(-num_rows // tile_rows)  # 32 at most: more rows are refused
    overhead = 3 if not is_many else 8 if fmt.is_quantised else 5
    return Work(gpu.num_sms // gang, gang, tile_rows, 64, overhead)


def mla_decode(
    q: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    softmax_scale: float,
    num_splits: None,
    is_batch_invariant: bool,
    use_fast_accum: bool,
    out: Tensor,
    lse: Tensor,
    q_scale: Tensor | None = None,
) -> Callable[..., None] | None:
    """Launch, and merge what the schedule cut. ``kvkern.mla_decode`` has checked the arguments.

    Returns how to repeat it with tensors and batches that differ in nothing but addresses.
    """
    num_tokens, num_heads, _ = q.shape
    if num_tokens * num_heads == 0:
        return None
    max_query_len = max(batch.max_query_len or 0, 1)  # known: the table of backends refuses
    work = choose_work(num_heads, max_query_len, pages.format, gpu_of(batch.device))
    kernel = _kernel_for(work, pages.format, use_fast_accum)
    calls = _Calls(batch.device, num_heads, max_query_len, work, kernel, softmax_scale)
    calls.run(q, pages, batch, out, lse, q_scale)
    return calls.run


def _kernel_for(work: Work, fmt: CacheFormat, use_fast_accum: bool) -> Kernel:
    is_many = work.tile_rows == 64
    if fmt.is_quantised and is_many:
        return mla_decode_many_fp8.FAST_KERNEL if use_fast_accum else mla_decode_many_fp8.KERNEL
    if fmt.is_quantised:
        return mla_decode_few_fp8.KERNEL
    if is_many:
        return mla_decode_many.KERNEL
    return mla_decode_few.KERNEL_OF_32 if work.tile_rows == 32 else mla_decode_few.KERNEL


class _Made(NamedTuple):
    """A schedule, where it lies, and what kernels are given of it and of its batch."""

    schedule: Schedule
    fill: tuple[int, ...]
    step: tuple[int, ...]
    merge: tuple[int, ...]  # between the scale, and out and lse
    maker: LayerPages  # the layer that it was made for


class _Calls:
    """Calls of one kind. The first finds how each kernel is launched, the others repeat that."""

    def __init__(
        self,
        device: torch.device,
        num_heads: int,
        max_query_len: int,
        work: Work,
        kernel: Kernel,
        softmax_scale: float,
    ) -> None:
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._current_device, self._current_stream = device_finder(), stream_finder()
        self._num_heads, self._max_query_len = num_heads, max_query_len
        self._work, self._kernel, self._softmax_scale = work, kernel, softmax_scale
        self._fill: Launch | None = None
        self._decode: DecodeAgain | None = None
        self._merge: Launch | None = None

    def run(
        self,
        q: Tensor,
        pages: LayerPages,
        batch: PagedBatch,
        out: Tensor,
        lse: Tensor,
        q_scale: Tensor | None,
    ) -> None:
        if self._current_device() != self._device:
            with torch.cuda.device(self._device):
                return self.run(q, pages, batch, out, lse, q_scale)
        stream = self._current_stream(self._device)
        # a captured graph makes its own schedule, at each replay
        key = (pages.kind, self._num_heads, stream, torch.cuda.is_current_stream_capturing())
        made = batch.workspaces.get(key) or self._make(key, batch, pages)
        if made.maker is pages:
            self._fill_schedule(made, batch, stream)
        if self._decode is None:
            self._decode = launch_decode(
                self._kernel, q, q_scale, pages, batch, self._softmax_scale, out, lse, made.schedule
            )
            self._merge = merge_cuts(made.schedule, batch, out, lse, pages.layer_scales)
            return None
        addresses = (out.data_ptr(), lse.data_ptr())
        self._decode.on(stream, q, q_scale, pages, *addresses, made.step)
        if self._merge is not None:
            self._merge.on(stream, (pages.addresses[-1], *made.merge, *addresses))

    def _make(self, key: Any, batch: PagedBatch, pages: LayerPages) -> _Made:
        """The batch's schedule for this cache and number of heads, on this stream; not yet filled.

        The layer that it was made for fills it anew when it comes round again, which is the next
        step. Another layer's is used as it is.
        """
        fmt = pages.format
        schedule = make_schedule(
            batch, self._num_heads, self._max_query_len, fmt.kv_lora_rank, self._work,
            piece_dtype(fmt),
        )  # fmt: skip
        addresses = schedule.addresses
        batch.workspaces[key] = made = _Made(
            schedule,
            schedule_addresses(addresses, batch),
            step_addresses(addresses, batch),
            merge_addresses(addresses, batch),
            pages,
        )
        return made

    def _fill_schedule(self, made: _Made, batch: PagedBatch, stream: int) -> None:
        if self._fill is None:
            self._fill = fill_schedule(made.schedule, batch, self._num_heads)
        else:
            self._fill.on(stream, made.fill)
