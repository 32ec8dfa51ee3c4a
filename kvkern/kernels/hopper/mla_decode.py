"""mla_decode on compute capability 9.0: which kernel, on what schedule.

The kernels follow a schedule that is made on the device, once a step, in the batch's own memory.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.hopper.mla_decode_few import mla_decode_few
from kvkern.kernels.hopper.mla_decode_few_fp8 import mla_decode_few_fp8
from kvkern.kernels.hopper.mla_decode_many import mla_decode_many
from kvkern.kernels.hopper.mla_decode_many_fp8 import mla_decode_many_fp8
from kvkern.kernels.paging import power_of_two
from kvkern.kernels.schedule import Schedule, Work, fill_schedule, make_schedule, merge_cuts
from kvkern.layout import CacheFormat


def choose_work(num_heads: int, max_query_len: int, fmt: CacheFormat, gpu: Gpu) -> Work:
    """Tiles of rows (tokens x heads of a request), and the gangs that share a read of the keys.

    32 rows or fewer: memory is the limit, and the tile is no larger than it must be. More: 64 a
    program, as many programs side by side as a request has tiles. Smaller tiles where 64 rows have
    no kernel: the latent is too narrow to be halved, or tokens of 8 bits have scales.
    """
    num_rows = num_heads * max_query_len
    has_64 = not fmt.group_scaled and fmt.kv_lora_rank >= 256
    most = 64 if num_rows > 32 and has_64 else 16 if fmt.is_quantised else 32
    tile_rows = min(max(power_of_two(num_rows), 8), most)
    gang = -(-num_rows // tile_rows)  # 32 at most: more rows are refused
    return Work(gpu.num_sms // gang, gang, tile_rows, 64)


def mla_decode(
    q: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    softmax_scale: float,
    num_splits: None,
    is_batch_invariant: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Launch, and merge what the schedule cut. ``kvkern.mla_decode`` has checked the arguments."""
    num_tokens, num_heads, _ = q.shape
    if num_tokens * num_heads == 0:
        return
    schedule = _schedule_of(batch, pages, num_heads)
    is_many = schedule.work.tile_rows == 64
    if pages.format.is_quantised:
        run = mla_decode_many_fp8 if is_many else mla_decode_few_fp8
    else:
        run = mla_decode_many if is_many else mla_decode_few
    run(q, pages, batch, softmax_scale, out, lse, schedule)
    merge_cuts(schedule, batch, out, lse)


class _Made(NamedTuple):
    schedule: Schedule
    maker: LayerPages  # the layer that it was made for


def _schedule_of(batch: PagedBatch, pages: LayerPages, num_heads: int) -> Schedule:
    """The batch's schedule for this cache and number of heads, on this stream.

    The layer that it was made for makes it anew when it comes round again, which is the next step;
    so does a captured graph at each replay. Another layer's is used as it is.
    """
    stream = torch.cuda.current_stream(batch.device)
    is_capturing = torch.cuda.is_current_stream_capturing()
    key = (pages.kind, num_heads, stream.cuda_stream, is_capturing)
    made = batch.workspaces.get(key)
    if made is None:
        fmt = pages.format
        max_query_len = max(batch.max_query_len or 0, 1)  # known: the table of backends refuses
        work = choose_work(num_heads, max_query_len, fmt, gpu_of(batch.device))
        schedule = make_schedule(batch, num_heads, max_query_len, fmt.kv_lora_rank, work)
        batch.workspaces[key] = made = _Made(schedule, pages)
    if made.maker is pages:
        fill_schedule(made.schedule, batch, num_heads)
    return made.schedule
