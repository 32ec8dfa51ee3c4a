"""The host's side of Hopper's decode kernels: their arguments, and how to launch them again."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.kernels.config import KernelConfig, config_of_call
from kvkern.kernels.hopper.compat import Address, MovedDescriptor
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

    Returns how to do it again, for ``(q, q_scale, pages, batch, out, lse, schedule)`` of the same
    kinds: ``out`` and ``lse`` by their addresses, ``schedule`` by its own. None if there is no way.
    """
    query = kernel.query_fields(q, q_scale, pages.format)
    arguments = _arguments(kernel, query, q, pages, batch, softmax_scale, out, lse, schedule)
    grid = (schedule.work.num_parts * schedule.work.gang,)
    num_varying = list(kernel.function.arg_names).index("scale_log2")
    again = launch(
        kernel.function, grid, arguments, kernel.options, q.device, num_varying=num_varying
    )
    takes_scale = "q_scale_ptr" in query
    query.pop("q_scale_ptr", None)
    bases = [getattr(value, "base", value) for value in query.values()]
    if again is None or any(base.data_ptr() != q.data_ptr() for base in bases):  # of a copy
        return None
    return DecodeAgain(kernel, again, list(query.values()), takes_scale=takes_scale)


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

    def __init__(
        self, kernel: Kernel, again: Launch, query: Sequence[Any], *, takes_scale: bool
    ) -> None:
        self._again, self._page_fields, self._takes_scale = again, kernel.page_fields, takes_scale
        self._query = [_without_tensor(value) for value in query]
        self._known_layers: dict[Any, list[Any]] = {}  # what their page fields are, by address

    def __call__(
        self,
        q: Tensor,
        q_scale: Tensor | None,
        pages: LayerPages,
        batch: PagedBatch,
        out: int,
        lse: int,
        schedule: Sequence[int],
    ) -> None:
        bounds, _, _, outs, lses = schedule
        key = pages.addresses[0]
        layer = self._known_layers.get(key)
        if layer is None:
            layer = [_without_tensor(value) for value in self._page_fields(pages).values()]
            self._known_layers[key] = layer
        query = [
            MovedDescriptor(value, q) if isinstance(value, MovedDescriptor) else q.data_ptr()
            for value in self._query
        ]
        if self._takes_scale:
            query.append(_without_tensor(q_scale))
        common = (out, lse, outs, lses, bounds, *batch.addresses)
        self._again((*query, *layer, *common), ())


def _without_tensor(value: Tensor | TensorDescriptor | None) -> Any:
    """The same to a launch, and keeps no memory alive."""
    if isinstance(value, TensorDescriptor):
        return MovedDescriptor(value, Address(value.base.data_ptr()))
    return None if value is None else value.data_ptr()


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
    schedule = make_schedule(batch, num_heads, 1, latent_dim, work)
    query = kernel.query_fields(q, q_scale, pages.format)
    arguments = _arguments(kernel, query, q, pages, batch, 0.1, out, lse, schedule)
    return config_of_call(kernel.function, label, arguments, kernel.options, **budget)
