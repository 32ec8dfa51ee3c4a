"""The host's side of Hopper's decode kernels: their arguments, and how to launch them again."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.kernels.config import KernelConfig, config_of_call
from kvkern.kernels.hopper.paging import box_keys
from kvkern.kernels.launch import Launch, launch
from kvkern.kernels.numerics import LN_2
from kvkern.kernels.schedule import Schedule, Work, make_schedule
from kvkern.layout import CacheFormat


class Kernel(NamedTuple):
    """One of the decode kernels.

    Its parameters are those of ``query_fields``, ``page_fields`` and ``decode_fields`` in their
    order, up to ``scale_log2``, which is the first that is no address; then the rest.
    """

    function: Any  # jitted
    query_fields: Callable[[Tensor, Any, CacheFormat], dict[str, Any]]  # q, q_scale
    page_fields: Callable[[LayerPages], dict[str, Any]]
    constants: Callable[[Tensor, LayerPages, Work], dict[str, Any]]
    options: dict[str, Any]


def piece_dtype(fmt: CacheFormat) -> torch.dtype:
    """Of what a part leaves of a request that is cut.

    fp16 in units of the layer's latent scale, where there is one: means of e4m3 values, of at most
    448, with four times the bits of a bf16 result. Others may be of any size.
    """
    return torch.float16 if fmt.layer_scaled else torch.float32


def decode_fields(
    pages: LayerPages,
    batch: PagedBatch,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    schedule: Schedule,
) -> dict[str, Any]:
    """Arguments that each kernel has: all but the query and the pages themselves."""
    return {
        "out_ptr": out,
        "lse_ptr": lse,
        "pieces_ptr": schedule.outs,
        "piece_lses_ptr": schedule.lses,
        "bounds_ptr": schedule.bounds,
        "offsets_ptr": batch.input_row_offsets,
        "cache_lengths_ptr": batch.cache_lengths,
        "page_table_ptr": batch.page_table,
        "scale_log2": softmax_scale / LN_2,
        "num_requests": batch.num_requests,
        "num_tokens": out.shape[0],
        "num_heads": out.shape[1],
        "max_pages": batch.max_pages,
        "slot_rows": schedule.outs.shape[1],
        "PAGE_SIZE": pages.page_size,
        "BOX": max(box_keys(pages.page_size), 1),
        "LATENT_DIM": pages.format.kv_lora_rank,
        "ROPE_DIM": pages.format.rope_dim,
        "GANG": schedule.work.gang,
        "LN_2": LN_2,
    }


def launch_decode(
    kernel: Kernel,
    q: Tensor,
    q_scale: Tensor | None,
    pages: LayerPages,
    batch: PagedBatch,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    schedule: Schedule,
) -> "DecodeAgain | None":
    """Fill the rows of requests that are not cut, the pieces of those that are, and padding.

    Returns how to do it again, with tensors, a batch and a schedule of the same kinds; None if
    there is no way.
    """
    query = kernel.query_fields(q, q_scale, pages.format)
    arguments = _arguments(kernel, query, q, pages, batch, softmax_scale, out, lse, schedule)
    grid = (schedule.work.num_parts * schedule.work.gang,)
    num_varying = list(kernel.function.arg_names).index("scale_log2")
    again = launch(
        kernel.function, grid, arguments, kernel.options, q.device, num_varying=num_varying
    )
    bases = [getattr(value, "base", value) for value in query.values() if value is not q_scale]
    if again is None or any(base.data_ptr() != q.data_ptr() for base in bases):  # of a copy
        return None
    return DecodeAgain(kernel, again, len(query))


def _arguments(
    kernel: Kernel,
    query: dict[str, Any],
    q: Tensor,
    pages: LayerPages,
    batch: PagedBatch,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
    schedule: Schedule,
) -> dict[str, Any]:
    """All that a kernel is given; ``query``: its ``query_fields``."""
    common = decode_fields(pages, batch, softmax_scale, out, lse, schedule)
    constants = kernel.constants(q, pages, schedule.work)
    return {**query, **kernel.page_fields(pages), **common, **constants}


class DecodeAgain:
    """Launches the same variant for other addresses."""

    def __init__(self, kernel: Kernel, again: Launch, num_query_fields: int) -> None:
        self._kernel, self._again, self._num_query_fields = kernel, again, num_query_fields
        self._queries: dict[Any, list[Any]] = {}  # query and page fields, encoded, by address
        self._layers: dict[Any, list[Any]] = {}

    def on(
        self,
        stream: int,
        q: Tensor,
        q_scale: Tensor | None,
        pages: LayerPages,
        out: int,
        lse: int,
        step: Sequence[int],
    ) -> None:
        """Launch on a stream of the tensors' card, where the host must stand.

        ``out``, ``lse``: their addresses; ``step``: the ``step_addresses``.
        """
        q_address = q.data_ptr() if q_scale is None else (q.data_ptr(), q_scale.data_ptr())
        query = self._queries.get(q_address)
        if query is None:
            query = self._encode_query(q_address, q, q_scale, pages.format)
        layer = self._layers.get(pages.addresses[0])
        if layer is None:
            fields = self._kernel.page_fields(pages)
            layer = self._again.encoded(self._num_query_fields, fields.values())
            self._layers[pages.addresses[0]] = layer
        self._again.on(stream, (*query, *layer, out, lse, *step))

    def _encode_query(
        self, q_address: Any, q: Tensor, q_scale: Tensor | None, fmt: CacheFormat
    ) -> list[Any]:
        """A server's allocator comes back to the same few addresses, step after step."""
        fields = self._kernel.query_fields(q, q_scale, fmt)
        if len(self._queries) >= _MOST_QUERIES:
            self._queries.clear()
        self._queries[q_address] = query = self._again.encoded(0, fields.values())
        return query


_MOST_QUERIES = 128


def step_addresses(schedule: Sequence[int], batch: PagedBatch) -> tuple[int, ...]:
    """What a kernel is given after ``out`` and ``lse``; ``schedule``: its addresses."""
    bounds, _, _, outs, lses = schedule
    return outs, lses, bounds, *batch.addresses


def shipped_config(
    kernel: Kernel,
    label: str,
    q: Tensor,
    pages: LayerPages,
    work: Work,
    q_scale: Tensor | None = None,
    **budget: Any,
) -> KernelConfig:
    """A variant of a kernel for one token a request."""
    num_heads, latent_dim = q.shape[1], pages.format.kv_lora_rank
    out_dtype = torch.bfloat16 if q_scale is not None else q.dtype
    out = torch.empty(1, num_heads, latent_dim, dtype=out_dtype)
    lse = torch.empty(1, num_heads)
    batch = PagedBatch([0, 1], [0], [[0]])
    schedule = make_schedule(batch, num_heads, 1, latent_dim, work, piece_dtype(pages.format))
    query = kernel.query_fields(q, q_scale, pages.format)
    arguments = _arguments(kernel, query, q, pages, batch, 0.1, out, lse, schedule)
    return config_of_call(kernel.function, label, arguments, kernel.options, **budget)
