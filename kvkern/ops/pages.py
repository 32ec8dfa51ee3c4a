"""Moving pages: out as dense latents, or from page to page."""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from kvkern.backends import choose
from kvkern.cache.storage import CacheView, PagedKVCache
from kvkern.errors import ArgumentError, DeviceError
from kvkern.layout import CacheFormat
from kvkern.ops._sizes import FLOATS64, Sizes

_DENSE_DTYPE = {"fp16": torch.float16, "fp32": torch.float32}


def gather_kv(
    cache: CacheView,
    *,
    start: int = 0,
    length: int | None = None,
    include_new: bool = True,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Read a range of each request's cached rows out of the pages, dequantised.

    Args:
        cache: ``PagedKVCache.view(layer, batch)``.
        start: first position, >= 0, the same for all requests.
        length: how many positions; default: up to the longest sequence, which must then be known
            on the host.
        include_new: whether a request ends with this step's tokens, or before them.
        dtype: bf16, fp16 or fp32 (fp64: reference only); default the cache's own, bf16 where it
            stores 8 bits or fewer.
        out: ``[B, length, L+R]`` in that dtype, contiguous, filled if given.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``[B, length, L+R]``: latent, then rope key. Zeros past a request's end and where its page
        is -1.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError, ArgumentError: an
            argument is not as above.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: the formats of ``kvkern.layout``; fp8_ds_mla as FlashMLA and vLLM publish it.
    """
    fmt, batch = cache.format, cache.batch
    if length is None:
        longest = batch.max_seq_len if include_new else batch.max_cache_len
        if longest is None:
            raise ArgumentError("length: want a number, the batch's lengths are on the device only")
        length = max(longest - start, 0)
    if start < 0 or length < 0:
        raise ArgumentError(f"start, length: want >= 0, got {start}, {length}")
    if dtype is None:
        dtype = out.dtype if out is not None else _DENSE_DTYPE.get(fmt.name, torch.bfloat16)
    device = cache.pages.device
    sizes = Sizes(device, B=batch.num_requests, N=length, K=fmt.row_dim)
    if dtype not in FLOATS64:
        raise ArgumentError(f"dtype: want bfloat16, float16 or float32, got {dtype}")
    if out is None:
        out = torch.empty(batch.num_requests, length, fmt.row_dim, dtype=dtype, device=device)
    sizes.match("out", out, "B N K", dtype)
    run = choose("gather_kv", backend, device, dtype)
    run(cache.pages, batch, start, include_new, out)
    return out


class PageCopy:
    """A copy of pages that may still be under way on a device.

    Work on the stream that issued it is ordered behind it; anything else calls ``wait`` first.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._event: torch.cuda.Event | None = None
        if device is not None:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Block the host until the bytes have arrived."""
        if self._event is not None:
            self._event.synchronize()

    def wait_on_stream(self, stream: torch.cuda.Stream) -> None:
        """Make ``stream`` wait for the bytes, not the host."""
        if self._event is not None:
            stream.wait_event(self._event)


def copy_pages(
    src: PagedKVCache,
    dst: PagedKVCache,
    src_pages: Sequence[int],
    dst_pages: Sequence[int],
    *,
    backend: str = "auto",
) -> PageCopy:
    """Copy whole pages, in all layers: copy-on-write, defragmentation, swap to host and back.

    Page ``src_pages[i]`` of ``src`` goes to page ``dst_pages[i]`` of ``dst``: its rows, and the
    scales beside them where the format has such; every other byte stays. The copy is ordered on
    the current stream of the accelerator involved, behind the writes that were issued there.

    Args:
        src, dst: caches with the same format, scales, page size and number of layers; may be the
            same cache, or on different devices.
        src_pages, dst_pages: page ids on the host, equally many. Destinations are distinct; within
            one cache no page is both source and destination.
        backend: ``"auto"``, or a name; between devices the copy engine does the work.

    Returns:
        A ``PageCopy``: ``wait()`` blocks until the bytes have arrived, ``wait_on_stream(stream)``
        makes another stream wait. Pages on the host must not be read before.

    Raises:
        ArgumentError, DeviceError: an argument is not as above; nothing is copied.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: copy-on-write of shared pages, arXiv:2309.06180, section 4.4.
    """
    _check_same_geometry(src, dst)
    sources = [operator.index(page) for page in src_pages]
    targets = [operator.index(page) for page in dst_pages]
    _check_page_lists(src, dst, sources, targets)
    accelerator = next((c.device for c in (src, dst) if c.device.type != "cpu"), None)
    run = choose("copy_pages", backend, accelerator or src.device, torch.uint8)
    if not sources:
        return PageCopy(accelerator)
    copy = run if src.device == dst.device else _copy_between_devices
    copy(src.storage, dst.storage, sources, targets)
    if src.token_scales is not None and dst.token_scales is not None:
        copy(src.token_scales, dst.token_scales, sources, targets)
    return PageCopy(accelerator)


def _copy_between_devices(
    src: Tensor, dst: Tensor, sources: Sequence[int], targets: Sequence[int]
) -> None:
    """One copy per page and layer; asynchronous, when the host side is page-locked."""
    for source, target in zip(sources, targets, strict=True):
        for layer in range(src.shape[0]):
            dst[layer, target].copy_(src[layer, source], non_blocking=True)


def _check_same_geometry(src: PagedKVCache, dst: PagedKVCache) -> None:
    def geometry(cache: PagedKVCache) -> tuple[CacheFormat, int, int]:
        return cache.format, cache.num_layers, cache.page_size

    if geometry(src) != geometry(dst):
        raise ArgumentError(
            f"dst: want src's format, num_layers and page_size {geometry(src)}, got {geometry(dst)}"
        )
    if src.host_scales != dst.host_scales:
        raise ArgumentError("dst: want src's scales, or its bytes would mean other values")
    if src.device != dst.device and "cpu" not in (src.device.type, dst.device.type):
        raise DeviceError(f"dst: want {src.device} or the CPU, got {dst.device}")


def _check_page_lists(
    src: PagedKVCache, dst: PagedKVCache, sources: list[int], targets: list[int]
) -> None:
    if len(sources) != len(targets):
        raise ArgumentError(f"dst_pages: want {len(sources)} ids, got {len(targets)}")
    for name, pages, cache in (("src_pages", sources, src), ("dst_pages", targets, dst)):
        for page in pages:
            if not 0 <= page < cache.num_pages:
                raise ArgumentError(f"{name}: want ids in [0, {cache.num_pages}), got {page}")
    if len(set(targets)) != len(targets):
        raise ArgumentError("dst_pages: want distinct ids, got a page twice")
    if src.buffer.data_ptr() == dst.buffer.data_ptr() and not set(sources).isdisjoint(targets):
        both = sorted(set(sources) & set(targets))
        raise ArgumentError(f"dst_pages: want none of src_pages, got {both}")
