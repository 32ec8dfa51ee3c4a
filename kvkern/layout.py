"""Cache formats as data: dims, bytes and field offsets of one token's row. Their one home.

Writers, readers, the reference and the docs take every offset from here.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch

from kvkern.errors import ArgumentError

FormatName = Literal["bf16", "fp16", "fp32", "fp8", "fp8_ds_mla"]
E4M3_MAX = 448.0
GROUP_SIZE = 128  # columns that share a scale in fp8_ds_mla
MIN_GROUP_SCALE = 1e-4  # FlashMLA's floor, before rounding up to a power of two: 2**-13 is stored
MAX_GROUP_SCALE = 2.0**119  # with the next one a stored 448 would mean infinity
_ROW_ALIGN_BYTES = 16  # what a TMA descriptor asks of a row pitch


class _Kind(NamedTuple):
    latent: torch.dtype
    rope: torch.dtype
    layer_scaled: bool  # one fp32 scale for the latent and one for the rope key, per layer
    group_scaled: bool  # one fp32 scale per GROUP_SIZE latent columns, in the row


_KINDS: dict[str, _Kind] = {
    "bf16": _Kind(torch.bfloat16, torch.bfloat16, False, False),
    "fp16": _Kind(torch.float16, torch.float16, False, False),
    # not for serving: lets an fp32 model reproduce its own tokens through the cache
    "fp32": _Kind(torch.float32, torch.float32, False, False),
    "fp8": _Kind(torch.float8_e4m3fn, torch.float8_e4m3fn, True, False),
    "fp8_ds_mla": _Kind(torch.float8_e4m3fn, torch.bfloat16, False, True),
}


@dataclass(frozen=True)
class CacheFormat:
    """How one token is stored: ``[latent | group scales | rope key | pad to 16 bytes]``.

    Args:
        name: ``"bf16"``, ``"fp16"``, ``"fp32"``; ``"fp8"`` (e4m3 latent and rope key, two fp32
            scales per layer); ``"fp8_ds_mla"`` (e4m3 latent, one fp32 power-of-two scale per 128
            columns, bf16 rope key: the 656-byte rows of FlashMLA and vLLM at 512 + 64).
        kv_lora_rank: latent columns, L >= 1; a multiple of 128 for ``fp8_ds_mla``.
        rope_dim: rotated columns, R >= 0 and even; 0 for a model without RoPE.

    Raises:
        ArgumentError: a name or a dim outside the above.
    """

    name: FormatName
    kv_lora_rank: int = 512
    rope_dim: int = 64

    # derived, in bytes from the start of the row
    scales_offset: int = field(init=False)
    rope_offset: int = field(init=False)
    row_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if self.name not in _KINDS:
            raise ArgumentError(f"name: want one of {', '.join(_KINDS)}; got {self.name!r}")
        if self.kv_lora_rank < 1:
            raise ArgumentError(f"kv_lora_rank: want >= 1, got {self.kv_lora_rank}")
        if self.rope_dim < 0 or self.rope_dim % 2:
            raise ArgumentError(f"rope_dim: want an even number >= 0, got {self.rope_dim}")
        if self.group_scaled and self.kv_lora_rank % GROUP_SIZE:
            raise ArgumentError(
                f"kv_lora_rank: want a multiple of {GROUP_SIZE} for {self.name}, "
                f"got {self.kv_lora_rank}"
            )
        scales_offset = self.kv_lora_rank * self.latent_dtype.itemsize
        rope_offset = scales_offset + 4 * self.num_groups
        end = rope_offset + self.rope_dim * self.rope_dtype.itemsize
        object.__setattr__(self, "scales_offset", scales_offset)
        object.__setattr__(self, "rope_offset", rope_offset)
        object.__setattr__(self, "row_bytes", -(-end // _ROW_ALIGN_BYTES) * _ROW_ALIGN_BYTES)

    @property
    def row_dim(self) -> int:
        """Columns of one row before storage: latent then rope key."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def latent_dtype(self) -> torch.dtype:
        return _KINDS[self.name].latent

    @property
    def rope_dtype(self) -> torch.dtype:
        return _KINDS[self.name].rope

    @property
    def layer_scaled(self) -> bool:
        """Whether each layer has an fp32 scale for the latent and one for the rope key."""
        return _KINDS[self.name].layer_scaled

    @property
    def group_scaled(self) -> bool:
        """Whether each row holds one fp32 scale per 128 latent columns."""
        return _KINDS[self.name].group_scaled

    @property
    def num_groups(self) -> int:
        return self.kv_lora_rank // GROUP_SIZE if self.group_scaled else 0


FORMAT_NAMES: tuple[FormatName, ...] = get_args(FormatName)
