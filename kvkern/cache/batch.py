"""PagedBatch: which new tokens belong to which request, and where each request's pages are."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kvkern.errors import (
    ArgumentError,
    LayoutError,
    ShapeMismatchError,
    UnsupportedDtypeError,
)

IntArray: TypeAlias = Sequence[int] | Sequence[Sequence[int]] | np.ndarray | Tensor

_INT32_MAX = 2**31 - 1


class _HostData(NamedTuple):
    """The values on the host, for checks and for splitting; unpadded."""

    input_row_offsets: np.ndarray  # [B+1]
    cache_lengths: np.ndarray  # [B]
    page_table: np.ndarray  # [B, max_pages]

    @property
    def query_lens(self) -> np.ndarray:
        return np.diff(self.input_row_offsets.astype(np.int64))  # int32 could wrap around

    @property
    def seq_lens(self) -> np.ndarray:
        lens: np.ndarray = self.cache_lengths + self.query_lens
        return lens


class PagedBatch:
    """One step's requests. Built once a step, shared by all layers and ops.

    Args:
        input_row_offsets: int ``[B+1]``, starts at 0, never falls; request b owns tokens
            ``[offsets[b], offsets[b+1])``. Tokens from ``offsets[B]`` on are padding.
        cache_lengths: int ``[B]``, tokens in the cache before this step.
        page_table: int ``[B, max_pages]``, page ids in order; -1 where unused. A token whose own
            page is -1 is padding.
        device: where the int32 tensors go; default: the arguments' device, or the CPU.
        check: also check tensors that are already on an accelerator, at the cost of a
            synchronisation. Host data (lists, numpy, CPU tensors) is always checked.

    Device tensors that are not checked have no host bounds: ops then assume the most that
    shapes allow. Such a batch cannot be split.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, LayoutError: a shape, dtype or stride disagrees.
        ArgumentError: a value is out of range; nothing is built.
    """

    input_row_offsets: Tensor  # int32 [B+1]
    cache_lengths: Tensor  # int32 [B]
    page_table: Tensor  # int32 [B, max_pages]
    addresses: tuple[int, int, int]  # of the three
    num_requests: int  # B: for a static batch its capacity
    max_pages: int
    device: torch.device
    max_tokens: int | None  # bounds known on the host; None when only the device knows
    max_query_len: int | None
    max_cache_len: int | None
    max_seq_len: int | None
    workspaces: dict[Any, Any]  # what kernels keep for this batch, by keys of their own
    _host: _HostData | None  # None: values are on the device only
    _split: "tuple[PagedBatch, PagedBatch] | None"

    def __init__(
        self,
        input_row_offsets: IntArray,
        cache_lengths: IntArray,
        page_table: IntArray,
        *,
        device: torch.device | str | None = None,
        check: bool = False,
    ) -> None:
        arrays = (input_row_offsets, cache_lengths, page_table)
        on_device = [a for a in arrays if isinstance(a, Tensor) and a.device.type != "cpu"]
        if device is None and on_device:
            device = on_device[0].device
        if len(on_device) == len(arrays) and not check:
            named = zip(_NAMES, arrays, strict=True)
            self._adopt(*(_as_int32_tensor(n, a, device) for n, a in named))
            return
        host = _checked(*arrays)
        self._adopt_packed(_to_device(_pack(host), torch.device(device or "cpu")), host)
        self._host = host
        self.max_tokens = int(host.input_row_offsets[-1])
        self.max_query_len = _largest(host.query_lens)
        self.max_cache_len = _largest(host.cache_lengths)
        self.max_seq_len = _largest(host.seq_lens)

    @classmethod
    def static(
        cls,
        *,
        max_requests: int,
        max_tokens: int,
        max_pages: int,
        max_query_len: int,
        max_seq_len: int,
        device: torch.device | str,
    ) -> "PagedBatch":
        """A batch of fixed shape whose buffers ``refill`` overwrites in place, for CUDA graphs.

        Starts with no request. Kernels are launched for the bounds given here, whatever the
        batch holds when the graph is replayed.
        """
        for name, bound in {
            "max_requests": max_requests,
            "max_tokens": max_tokens,
            "max_pages": max_pages,
            "max_query_len": max_query_len,
            "max_seq_len": max_seq_len,
        }.items():
            if bound < 1:
                raise ArgumentError(f"{name}: want >= 1, got {bound}")
        batch = cls.__new__(cls)
        padded = _padded(_checked([0], [], []), max_requests, max_pages)
        batch._adopt_packed(_to_device(_pack(padded), torch.device(device)), padded)
        batch._is_static = True
        batch.max_tokens = max_tokens
        batch.max_query_len = max_query_len
        batch.max_seq_len = batch.max_cache_len = max_seq_len
        batch._host = _checked([0], [], [])
        return batch

    def refill(
        self, input_row_offsets: IntArray, cache_lengths: IntArray, page_table: IntArray
    ) -> None:
        """Overwrite a static batch in place with at most ``max_requests`` requests of host data.

        The copy is ordered on the current stream, before whatever is launched next. Raises as the
        constructor does, or ``ArgumentError`` where a bound of ``static`` is passed; then nothing
        has changed.
        """
        if not self._is_static:
            raise ArgumentError("refill: want a batch made by PagedBatch.static")
        host = _checked(input_row_offsets, cache_lengths, page_table)
        num, width = host.page_table.shape
        for name, got, bound in [
            ("requests", num, self.num_requests),
            ("tokens", int(host.input_row_offsets[-1]), self.max_tokens),
            ("new tokens of one request", _largest(host.query_lens), self.max_query_len),
            ("tokens of one sequence", _largest(host.seq_lens), self.max_seq_len),
            ("page table columns", width, self.max_pages),
        ]:
            if got > bound:
                raise ArgumentError(f"refill: want at most {bound} {name}, got {got}")
        for page_size, num_pages in self._checked_caches:
            _check_pages(host, page_size, num_pages)
        padded = _padded(host, self.num_requests, self.max_pages)
        self._packed.copy_(_staged(_pack(padded), self.device), non_blocking=True)
        self._host = host

    @property
    def num_tokens(self) -> int:
        """Real tokens in the step. ``ArgumentError`` when only the device knows."""
        return int(self._known_on_host("num_tokens").input_row_offsets[-1])

    @property
    def host_values(self) -> _HostData | None:
        """The step's values, if the host knows them; another object after each ``refill``."""
        return self._host

    @property
    def can_split(self) -> bool:
        """Whether ``split_decode`` is possible: values known on the host, buffers not reused."""
        return self._host is not None and not self._is_static

    def split_decode(self) -> "tuple[PagedBatch, PagedBatch]":
        """The leading requests with exactly one new token each, and the rest; made once.

        Either may be empty. With ``n = decode.num_tokens``, tokens ``[0, n)`` are the first
        part's and ``[n, num_tokens)`` the second's.
        """
        if not self.can_split:
            raise ArgumentError("split_decode: want a batch built from host data, not refilled")
        if self._split is None:
            host = self._known_on_host("split_decode")
            longer = np.flatnonzero(host.query_lens != 1)
            num = int(longer[0]) if longer.size else len(host.cache_lengths)
            if num in (0, self.num_requests):
                empty = self._requests(host, 0, 0)
                self._split = (self, empty) if num else (empty, self)
            else:
                rest = self._requests(host, num, self.num_requests)
                self._split = (self._requests(host, 0, num), rest)
        return self._split

    def check_num_tokens(self, name: str, num_tokens: int) -> None:
        """Raise ``ArgumentError`` if a tensor of packed tokens is shorter than the step may be."""
        if self.max_tokens is not None and num_tokens < self.max_tokens:
            raise ArgumentError(f"{name}: want at least {self.max_tokens} tokens, got {num_tokens}")

    def check_pages(self, page_size: int, num_pages: int) -> None:
        """Check the page table against a cache's geometry, the first time it meets that cache.

        Raises:
            ArgumentError: a page id is not in ``[-1, num_pages)``, or the table is too narrow for
                the longest sequence. Values only the device knows are not checked.
        """
        if (page_size, num_pages) in self._checked_caches:
            return
        if self._host is not None:
            _check_pages(self._host, page_size, num_pages)
        bound = self.max_seq_len if self._is_static else None
        if bound is not None and self.max_pages * page_size < bound:
            raise ArgumentError(
                f"page_table: want at least {-(-bound // page_size)} columns for "
                f"max_seq_len={bound} at page_size={page_size}, got {self.max_pages}"
            )
        self._checked_caches.add((page_size, num_pages))

    def _requests(self, host: _HostData, start: int, stop: int) -> "PagedBatch":
        offsets = host.input_row_offsets[start : stop + 1]
        return PagedBatch(
            offsets - offsets[0],
            host.cache_lengths[start:stop],
            host.page_table[start:stop],
            device=self.device,
        )

    def _known_on_host(self, what: str) -> _HostData:
        if self._host is None:
            raise ArgumentError(f"{what}: want a batch built from host data or with check=True")
        return self._host

    def _adopt(self, offsets: Tensor, lengths: Tensor, table: Tensor) -> None:
        num = table.shape[:1]
        if table.ndim != 2 or lengths.shape != num or offsets.shape != (num[0] + 1,):
            raise ShapeMismatchError(
                "PagedBatch: want input_row_offsets [B+1], cache_lengths [B], page_table "
                f"[B, max_pages]; got {list(offsets.shape)}, {list(lengths.shape)}, "
                f"{list(table.shape)}"
            )
        self.input_row_offsets, self.cache_lengths, self.page_table = offsets, lengths, table
        self.addresses = (offsets.data_ptr(), lengths.data_ptr(), table.data_ptr())
        self.num_requests, self.max_pages = table.shape
        self.device = table.device
        self.max_tokens = self.max_query_len = self.max_cache_len = self.max_seq_len = None
        self._host = self._split = None
        self.workspaces = {}
        self._is_static = False
        self._checked_caches: set[tuple[int, int]] = set()

    def _adopt_packed(self, packed: Tensor, shapes: _HostData) -> None:
        self._packed = packed  # one buffer, so that a step costs one copy to the device
        parts = packed.split([a.size for a in shapes])
        self._adopt(*(part.view(a.shape) for part, a in zip(parts, shapes, strict=True)))


_NAMES = ("input_row_offsets", "cache_lengths", "page_table")


def _largest(values: np.ndarray) -> int:
    return int(values.max()) if values.size else 0


def _pack(host: _HostData) -> Tensor:
    return torch.from_numpy(np.concatenate([a.ravel() for a in host]))


def _staged(packed: Tensor, device: torch.device) -> Tensor:
    """Page-locked where that spares a synchronisation; torch keeps it until the copy is done."""
    return packed.pin_memory() if device.type == "cuda" else packed


def _to_device(packed: Tensor, device: torch.device) -> Tensor:
    return _staged(packed, device).to(device, non_blocking=True)


def _padded(host: _HostData, num_requests: int, width: int) -> _HostData:
    """The same step with empty requests behind it, up to a static batch's shape."""
    num, columns = host.page_table.shape
    offsets = np.full(num_requests + 1, host.input_row_offsets[-1], np.int32)
    lengths = np.zeros(num_requests, np.int32)
    table = np.full((num_requests, width), -1, np.int32)
    offsets[: num + 1] = host.input_row_offsets
    lengths[:num] = host.cache_lengths
    table[:num, :columns] = host.page_table
    return _HostData(offsets, lengths, table)


def _as_int32_tensor(name: str, array: IntArray, device: torch.device | str | None) -> Tensor:
    assert isinstance(array, Tensor)
    if array.dtype != torch.int32:
        raise UnsupportedDtypeError(f"{name}: want int32 on a device, got {array.dtype}")
    if not array.is_contiguous():
        raise LayoutError(f"{name}: want contiguous, got strides {list(array.stride())}")
    return array if array.device == torch.device(device or array.device) else array.to(device)


def _as_int32_array(name: str, array: IntArray, ndim: int) -> np.ndarray:
    try:
        values = np.asarray(array.cpu() if isinstance(array, Tensor) else array)
    except ValueError as error:  # rows of unequal length
        raise ShapeMismatchError(f"{name}: want {ndim}-D, got a ragged list") from error
    if values.size == 0:  # numpy makes [] a 1-D float array
        values = values.reshape(values.shape + (0,) * (ndim - values.ndim)).astype(np.int32)
    if values.ndim != ndim:
        raise ShapeMismatchError(f"{name}: want {ndim}-D, got shape {list(values.shape)}")
    if not np.issubdtype(values.dtype, np.integer):
        raise UnsupportedDtypeError(f"{name}: want integers, got {values.dtype}")
    if values.size and (values.max() > _INT32_MAX or values.min() < -_INT32_MAX):
        got = values.max() if values.max() > _INT32_MAX else values.min()
        raise ArgumentError(f"{name}: want values within int32, got {got}")
    return np.array(values, dtype=np.int32, order="C")  # a copy: the caller may reuse its buffer


def _checked(offsets: IntArray, lengths: IntArray, table: IntArray) -> _HostData:
    host = _HostData(
        _as_int32_array("input_row_offsets", offsets, 1),
        _as_int32_array("cache_lengths", lengths, 1),
        _as_int32_array("page_table", table, 2),
    )
    num = len(host.cache_lengths)
    if len(host.input_row_offsets) != num + 1:
        raise ShapeMismatchError(
            f"input_row_offsets: want [B+1={num + 1}], got [{len(host.input_row_offsets)}]"
        )
    if len(host.page_table) != num:
        raise ShapeMismatchError(
            f"page_table: want [B={num}, any], got {list(host.page_table.shape)}"
        )
    if host.input_row_offsets[0] != 0:
        raise ArgumentError(
            f"input_row_offsets: want to start at 0, got {host.input_row_offsets[0]}"
        )
    if (host.query_lens < 0).any():
        where = int(np.argmax(host.query_lens < 0))
        pair = host.input_row_offsets[where : where + 2].tolist()
        raise ArgumentError(f"input_row_offsets: want non-decreasing, got {pair} at {where}")
    if (host.cache_lengths < 0).any():
        where = int(np.argmax(host.cache_lengths < 0))
        raise ArgumentError(f"cache_lengths: want >= 0, got {host.cache_lengths[where]} at {where}")
    if (host.page_table < -1).any():
        raise ArgumentError(f"page_table: want ids >= -1, got {host.page_table.min()}")
    return host


def _check_pages(host: _HostData, page_size: int, num_pages: int) -> None:
    needed = -(-_largest(host.seq_lens) // page_size)
    if host.page_table.shape[1] < needed:
        raise ArgumentError(
            f"page_table: want at least {needed} columns for a sequence of "
            f"{_largest(host.seq_lens)} tokens at page_size={page_size}, "
            f"got {host.page_table.shape[1]}"
        )
    if host.page_table.size and host.page_table.max() >= num_pages:
        raise ArgumentError(
            f"page_table: want page ids below num_pages={num_pages}, got {host.page_table.max()}"
        )
