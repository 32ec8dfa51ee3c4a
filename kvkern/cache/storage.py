"""PagedKVCache: one allocation for all layers, and the typed views of it that ops take."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.pages import PageAllocator
from kvkern.errors import ArgumentError, DeviceError
from kvkern.layout import CacheFormat


@dataclass(frozen=True)
class LayerPages:
    """One layer's pages as typed views of the same bytes (P pages, G scale groups)."""

    format: CacheFormat
    latent: Tensor  # [P, page_size, L]; nvfp4: [P, page_size, L / 2]
    rope: Tensor  # [P, page_size, R]
    group_scales: Tensor | None  # [P, page_size, G], fp32 or e4m3; where format.group_scaled
    layer_scales: Tensor | None  # fp32 [2] (latent, rope); where format.layer_scaled
    # the same object for all layers of a cache, which differ in nothing but addresses
    kind: object = field(default_factory=object, compare=False)
    # within kvkern.calibrate: is given the rows [T, L+R] of each write, unquantised
    observer: Callable[[Tensor], None] | None = field(default=None, compare=False)

    @property
    def num_pages(self) -> int:
        return self.latent.shape[0]

    @property
    def page_size(self) -> int:
        return self.latent.shape[1]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @cached_property
    def device(self) -> torch.device:
        return self.latent.device

    @cached_property
    def addresses(self) -> tuple[int | None, ...]:
        """Of the four fields, in the order above."""
        fields = (self.latent, self.rope, self.group_scales, self.layer_scales)
        return tuple(None if values is None else values.data_ptr() for values in fields)


class CacheView(NamedTuple):
    """One layer's pages as one step's requests see them: what every op calls ``cache``."""

    pages: LayerPages
    batch: PagedBatch

    @property
    def format(self) -> CacheFormat:
        return self.pages.format


class CacheUsage(NamedTuple):
    """Bytes of the pages that somebody holds, and of the others."""

    used_bytes: int
    free_bytes: int


class PagedKVCache:
    """Paged storage of compressed keys and values, for all layers of a model.

    Args:
        format: what a token's row looks like.
        num_layers, num_pages, page_size: geometry, each >= 1; any page size.
        device: where the pages live. With ``pin_memory`` (CPU only) they are page-locked, as a
            target for ``copy_pages`` from a GPU.
        latent_scale, rope_scale: fp8 and nvfp4 only: real value = stored value * scale; one value,
            or one per layer (a tensor too); finite, > 0 and with a finite inverse.
            ``kvkern.calibrate`` finds them. Other formats refuse anything but 1.

    ``storage`` is ``uint8 [num_layers, num_pages, page_size, row_bytes]``; ``token_scales``, for
    fp8_token, fp32 ``[num_layers, num_pages, page_size]``. Both lie in ``buffer``, the one
    allocation, uninitialised: no op lets the contents of an unwritten slot reach a result.

    Raises:
        ArgumentError: a size, a scale, or ``pin_memory`` off the CPU.
    """

    def __init__(
        self,
        format: CacheFormat,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
        latent_scale: float | Sequence[float] | Tensor = 1.0,
        rope_scale: float | Sequence[float] | Tensor = 1.0,
        pin_memory: bool = False,
    ) -> None:
        sizes = {"num_layers": num_layers, "num_pages": num_pages, "page_size": page_size}
        for name, size in sizes.items():
            if size < 1:
                raise ArgumentError(f"{name}: want >= 1, got {size}")
        if pin_memory and torch.device(device).type != "cpu":
            raise ArgumentError(f"pin_memory: want device cpu, got {device}")
        scales = torch.stack(
            [
                _per_layer("latent_scale", latent_scale, num_layers),
                _per_layer("rope_scale", rope_scale, num_layers),
            ],
            dim=1,
        )
        if not format.layer_scaled and (scales != 1).any():
            raise ArgumentError(
                f"latent_scale, rope_scale: want 1 for format {format.name}, "
                f"which has no layer scales; got {latent_scale}, {rope_scale}"
            )
        self.format = format
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        slots = (num_layers, num_pages, page_size)
        num_slots = math.prod(slots)
        self.buffer = torch.empty(
            num_slots * format.bytes_per_token,
            dtype=torch.uint8,
            device=device,
            pin_memory=pin_memory,
        )
        rows, scales_beside = self.buffer.tensor_split([num_slots * format.row_bytes])
        self.device = self.buffer.device
        self.storage = rows.view(*slots, format.row_bytes)
        self.token_scales: Tensor | None = None
        if format.token_scaled:
            self.token_scales = scales_beside.view(torch.float32).view(slots)
        self.host_scales: list[list[float]] = scales.tolist()  # [layer][latent, rope]
        self.layer_scales = scales.to(device) if format.layer_scaled else None  # fp32 [layers, 2]
        kind = object()
        self._layers = [self._typed_views(layer, kind) for layer in range(num_layers)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole allocation."""
        return self.buffer.numel()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers: what one more page costs."""
        return self.num_layers * self.page_size * self.format.bytes_per_token

    def usage(self, allocator: PageAllocator) -> CacheUsage:
        """Bytes in use and free, by the allocator that hands out this cache's pages."""
        geometry = (self.num_pages, self.page_size)
        if (allocator.num_pages, allocator.page_size) != geometry:
            raise ArgumentError(
                f"allocator: want (num_pages, page_size) {geometry}, "
                f"got {(allocator.num_pages, allocator.page_size)}"
            )
        free_bytes = allocator.num_free_pages * self.page_bytes
        return CacheUsage(self.num_bytes - free_bytes, free_bytes)

    def non_finite_pages(self, pages: Sequence[int]) -> list[int]:
        """Which of these pages hold NaN or an infinity, in any layer. Waits for the device.

        Every slot counts, so ask only for pages that are full: what was never written is
        anything. ``write_kv(..., sanitize=True)`` keeps such values out in the first place.
        """
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ArgumentError(f"pages: want ids in [0, {self.num_pages}), got {page}")
        wanted = list(pages)
        is_bad = torch.zeros(len(wanted), dtype=torch.bool, device=self.device)
        for layer in self._layers:
            for values in (layer.latent, layer.rope, layer.group_scales):
                if values is not None:
                    is_bad |= _is_non_finite(values, wanted).flatten(1).any(1)
        return [page for page, bad in zip(wanted, is_bad.tolist(), strict=True) if bad]

    def layer(self, layer: int) -> LayerPages:
        """One layer's typed views."""
        if not 0 <= layer < self.num_layers:
            raise ArgumentError(f"layer: want in [0, {self.num_layers}), got {layer}")
        return self._layers[layer]

    def view(self, layer: int, batch: PagedBatch) -> CacheView:
        """One layer as ``batch`` sees it. Changes nothing; checks the page table once a batch."""
        pages = self.layer(layer)
        if batch.device != self.device:
            raise DeviceError(f"batch: want device {self.device}, got {batch.device}")
        batch.check_pages(self.page_size, self.num_pages)
        return CacheView(pages, batch)

    def _typed_views(self, layer: int, kind: object) -> LayerPages:
        fmt, rows = self.format, self.storage[layer]

        def columns(start: int, count: int, dtype: torch.dtype) -> Tensor:
            return rows[..., start : start + count * dtype.itemsize].view(dtype)

        group_scales = None
        if self.token_scales is not None:
            group_scales = self.token_scales[layer, ..., None]
        elif fmt.group_scaled:
            group_scales = columns(fmt.scales_offset, fmt.num_groups, fmt.scale_dtype)
        return LayerPages(
            format=fmt,
            latent=columns(0, fmt.latent_width, fmt.latent_dtype),
            rope=columns(fmt.rope_offset, fmt.rope_dim, fmt.rope_dtype),
            group_scales=group_scales,
            layer_scales=None if self.layer_scales is None else self.layer_scales[layer],
            kind=kind,
        )


def _is_non_finite(field: Tensor, pages: list[int]) -> Tensor:
    if field.dtype == torch.float8_e4m3fn:  # has no infinity, and torch no isfinite for it
        return (field.view(torch.uint8)[pages] & 0x7F) == 0x7F
    if field.dtype == torch.float4_e2m1fn_x2:  # has neither: a NaN is in the group's scale
        return torch.zeros(len(pages), 1, dtype=torch.bool, device=field.device)
    return ~field[pages].isfinite()


def _per_layer(name: str, scale: float | Sequence[float] | Tensor, num_layers: int) -> Tensor:
    values = torch.as_tensor(scale, dtype=torch.float32, device="cpu")
    if values.ndim > 1 or (values.ndim == 1 and len(values) != num_layers):
        raise ArgumentError(
            f"{name}: want one value or one per layer ({num_layers}), got {list(values.shape)}"
        )
    if not (values.isfinite() & (values > 0) & (1 / values).isfinite()).all():
        raise ArgumentError(f"{name}: want finite and > 0, with a finite inverse, got {scale}")
    return values.expand(num_layers)
