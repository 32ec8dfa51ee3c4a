"""Scales of the formats that have two for each layer: found on a run of writes, kept in a file."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvkern.cache.storage import PagedKVCache
from kvkern.errors import ArgumentError
from kvkern.layout import CacheFormat, FormatName

_FILE_LAYOUT = "1"  # of the metadata and the names of the tensors
_PARTS = ("latent", "rope key")


@dataclass(frozen=True, eq=False)
class CacheScales:
    """Scales of every layer, for caches of one format: real value = stored value * scale.

    Args:
        format_name: of a format that has layer scales: ``"fp8"`` or ``"nvfp4"``.
        latent, rope: fp32 ``[num_layers]`` on the CPU, finite and > 0: what ``PagedKVCache`` takes
            as ``latent_scale`` and ``rope_scale``.

    Raises:
        ArgumentError: an argument is not as above.
    """

    format_name: FormatName
    latent: Tensor
    rope: Tensor

    def __post_init__(self) -> None:
        if not CacheFormat(self.format_name).layer_scaled:
            raise ArgumentError(
                f"format_name: want a format with layer scales, fp8 or nvfp4; "
                f"got {self.format_name}"
            )
        for name, scales in (("latent", self.latent), ("rope", self.rope)):
            if scales.dtype != torch.float32 or scales.ndim != 1:
                raise ArgumentError(
                    f"{name}: want fp32 [num_layers], got {scales.dtype} {list(scales.shape)}"
                )
            if not (scales.isfinite() & (scales > 0)).all():
                raise ArgumentError(f"{name}: want finite and > 0, got {scales.tolist()}")
        if len(self.latent) != len(self.rope):
            raise ArgumentError(
                f"latent, rope: want one value each per layer, "
                f"got {len(self.latent)} and {len(self.rope)}"
            )

    def check(self, format: CacheFormat, num_layers: int) -> None:
        """Raise ``ArgumentError`` unless they are for a cache of this format and depth."""
        wanted, got = (format.name, num_layers), (self.format_name, len(self.latent))
        if got != wanted:
            raise ArgumentError(f"scales: want (format, num_layers) {wanted}, got {got}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: ``latent_scale``, ``rope_scale``, the format as metadata."""
        from safetensors.torch import save_file  # here: `import kvkern` needs torch and numpy only

        # clones: safetensors takes neither a column nor one tensor twice
        tensors = {"latent_scale": self.latent.clone(), "rope_scale": self.rope.clone()}
        save_file(tensors, path, {"kvkern_scales": _FILE_LAYOUT, "format": self.format_name})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "CacheScales":
        """Read what ``save`` wrote. Raises ``ArgumentError`` if the file is anything else."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                layout = metadata.get("kvkern_scales")
                if layout != _FILE_LAYOUT:
                    raise ArgumentError(
                        f"path: want scales in layout {_FILE_LAYOUT}, as CacheScales.save writes "
                        f"them, got layout {layout} in {path}"
                    )
                latent, rope = file.get_tensor("latent_scale"), file.get_tensor("rope_scale")
        except SafetensorError as error:
            raise ArgumentError(
                f"path: want a safetensors file of scales, got {path} ({error})"
            ) from error
        return cls(metadata["format"], latent, rope)


class ScaleObserver:
    """The largest finite magnitudes that were written while ``calibrate`` was open.

    ``amax``: fp32 ``[num_layers, 2]`` on the cache's device: of the latent and of the rope key,
    after norm and rotation, before quantisation; 0 for a layer that saw nothing.
    """

    def __init__(self, cache: PagedKVCache, headroom: float) -> None:
        self._format = cache.format
        self._headroom = headroom
        self.amax = torch.zeros(cache.num_layers, len(_PARTS), device=cache.device)

    def see(self, layer: int, rows: Tensor) -> None:
        """Take in rows ``[T, L+R]`` of one layer, without a synchronisation. Zeros do not count."""
        magnitudes = rows.detach().float().abs().nan_to_num(nan=0.0, posinf=0.0)
        parts = magnitudes.split([self._format.kv_lora_rank, self._format.rope_dim], dim=-1)
        for amax, part in zip(self.amax[layer].unbind(), parts, strict=True):
            if part.numel():
                torch.maximum(amax, part.amax(), out=amax)

    def scales(self, format_name: FormatName) -> CacheScales:
        """Scales for a format that has them, such that it holds ``headroom`` times what was seen.

        Waits for the device.

        Raises:
            ArgumentError: the format has no layer scales; or a layer saw nothing but zeros, NaN
                and infinities.
        """
        fmt = replace(self._format, name=format_name)
        largest = torch.tensor([fmt.latent_reach, torch.finfo(fmt.rope_dtype).max])
        amax = self.amax.cpu()
        if fmt.rope_dim == 0:  # nothing to scale: 1
            amax[:, 1] = largest[1] / self._headroom
        unseen = (amax == 0).nonzero().tolist()
        if unseen:
            layer, part = unseen[0]
            raise ArgumentError(
                f"cache: want finite values other than 0 written to layer {layer}, "
                f"got none for its {_PARTS[part]}"
            )
        latent, rope = (self._headroom * amax / largest).unbind(dim=1)
        return CacheScales(format_name, latent, rope)


@contextmanager
def calibrate(cache: PagedKVCache, headroom: float = 2.0) -> Iterator[ScaleObserver]:
    """Observe all that ``write_kv`` writes into ``cache`` while the context is open.

    ::

        with kvkern.calibrate(cache) as observer:
            ...  # serve prompts like those to come
        observer.scales("fp8").save("scales.safetensors")

    Args:
        cache: of any format; usually the model's dtype, so that errors of a format do not reach
            the layers above. What is stored in it does not change. Views and ``LayerPages`` of it
            that were made before are not observed, nor is a CUDA graph captured before, whose
            replay does not pass here; one that is captured inside observes whenever it is replayed.
        headroom: how many times the largest value seen a format must hold, >= 1. A value past
            that saturates; room costs nothing: a stored float is as precise at any scale, until
            the small values become subnormal, and e4m3 has 2**14 between its largest and its
            smallest normal value.

    Raises:
        ArgumentError: ``headroom`` is not as above, or the cache is being calibrated already.
    """
    if not 1 <= headroom < math.inf:
        raise ArgumentError(f"headroom: want finite and >= 1, got {headroom}")
    layers = cache._layers
    if layers[0].observer is not None:
        raise ArgumentError("cache: want one calibration at a time, got another one that is open")
    observer = ScaleObserver(cache, headroom)
    cache._layers = [
        replace(pages, observer=partial(observer.see, layer)) for layer, pages in enumerate(layers)
    ]
    try:
        yield observer
    finally:
        cache._layers = layers
