"""Cache formats as data: dims, bytes and field offsets of one token's row. Their one home.

Writers, readers, the reference and the docs take every offset from here.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch

from kvkern.errors import ArgumentError

FormatName = Literal["bf16", "fp16", "fp32", "fp8", "fp8_token", "fp8_ds_mla", "nvfp4"]
E4M3_MAX = 448.0
E2M1_MAX = 6.0
MIN_GROUP_SCALE = 1e-4  # FlashMLA's floor, before rounding up to a power of two: 2**-13 is stored
MAX_GROUP_SCALE = 2.0**119  # with the next one a stored 448 would mean infinity
MIN_TOKEN_SCALE = 2.0**-100  # what a row of zeros gets; no row that matters has so small a scale
MIN_E4M3 = 2.0**-9  # the smallest scale that nvfp4 can store
_ROW_ALIGN_BYTES = 16  # what a TMA descriptor asks of a row pitch
_WHOLE_ROW = -1


class _Kind(NamedTuple):
    latent: torch.dtype  # float4_e2m1fn_x2: two columns a byte, the even one in the low bits
    rope: torch.dtype
    layer_scaled: bool = False  # one fp32 scale for the latent and one for the rope key, per layer
    group_size: int = 0  # latent columns that share a scale; 0: no such scale
    scale: torch.dtype = torch.float32  # of a group


_KINDS: dict[str, _Kind] = {
    "bf16": _Kind(torch.bfloat16, torch.bfloat16),
    "fp16": _Kind(torch.float16, torch.float16),
    # not for serving: lets an fp32 model reproduce its own tokens through the cache
    "fp32": _Kind(torch.float32, torch.float32),
    "fp8": _Kind(torch.float8_e4m3fn, torch.float8_e4m3fn, layer_scaled=True),
    "fp8_token": _Kind(torch.float8_e4m3fn, torch.bfloat16, group_size=_WHOLE_ROW),
    "fp8_ds_mla": _Kind(torch.float8_e4m3fn, torch.bfloat16, group_size=128),
    "nvfp4": _Kind(
        torch.float4_e2m1fn_x2, torch.float8_e4m3fn, True, group_size=16, scale=torch.float8_e4m3fn
    ),
}


@dataclass(frozen=True)
class CacheFormat:
    """How one token is stored: ``[latent | group scales | rope key | pad to 16 bytes]``.

    Args:
        name: ``"bf16"``, ``"fp16"``, ``"fp32"``;
            ``"fp8"``: e4m3 latent and rope key, two fp32 scales per layer;
            ``"fp8_token"``: e4m3 latent, bf16 rope key, one fp32 scale per token, beside the rows;
            ``"fp8_ds_mla"``: e4m3 latent, one fp32 power-of-two scale per 128 columns, bf16 rope
            key: the 656-byte rows of FlashMLA and vLLM at 512 + 64;
            ``"nvfp4"``: e2m1 latent, one e4m3 scale per 16 columns, e4m3 rope key, two fp32 scales
            per layer.
        kv_lora_rank: latent columns, L >= 1; a multiple of 128 for ``fp8_ds_mla``, of 16 for
            ``nvfp4``.
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
        if self.group_scaled and self.kv_lora_rank % self.group_size:
            raise ArgumentError(
                f"kv_lora_rank: want a multiple of {self.group_size} for {self.name}, "
                f"got {self.kv_lora_rank}"
            )
        scales_offset = self.latent_width * self.latent_dtype.itemsize
        scales_bytes = 0 if self.token_scaled else self.num_groups * self.scale_dtype.itemsize
        rope_offset = _round_up(scales_offset + scales_bytes, self.rope_dtype.itemsize)
        end = rope_offset + self.rope_dim * self.rope_dtype.itemsize
        object.__setattr__(self, "scales_offset", scales_offset)
        object.__setattr__(self, "rope_offset", rope_offset)
        object.__setattr__(self, "row_bytes", _round_up(end, _ROW_ALIGN_BYTES))

    @property
    def row_dim(self) -> int:
        """Columns of one row before storage: latent then rope key."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def bytes_per_token(self) -> int:
        """Of the row, and of the scale beside it where there is one."""
        return self.row_bytes + (self.scale_dtype.itemsize if self.token_scaled else 0)

    @property
    def latent_dtype(self) -> torch.dtype:
        return _KINDS[self.name].latent

    @property
    def latent_width(self) -> int:
        """Stored elements of a latent: half as many as columns where a byte holds two."""
        return self.kv_lora_rank // 2 if self.is_packed else self.kv_lora_rank

    @property
    def latent_max(self) -> float:
        """The largest finite value of a stored latent column, before scales."""
        return E2M1_MAX if self.is_packed else torch.finfo(self.latent_dtype).max

    @property
    def latent_reach(self) -> float:
        """The largest finite latent that a row holds, before the layer's scale."""
        return self.latent_max * (torch.finfo(self.scale_dtype).max if self.group_scaled else 1.0)

    @property
    def rope_dtype(self) -> torch.dtype:
        return _KINDS[self.name].rope

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds two latent columns."""
        return self.latent_dtype == torch.float4_e2m1fn_x2

    @property
    def is_quantised(self) -> bool:
        """Whether a latent is stored in 8 bits or fewer, with scales."""
        return self.layer_scaled or self.group_scaled

    @property
    def layer_scaled(self) -> bool:
        """Whether each layer has an fp32 scale for the latent and one for the rope key."""
        return _KINDS[self.name].layer_scaled

    @property
    def group_scaled(self) -> bool:
        """Whether groups of a token's latent columns have scales of their own."""
        return _KINDS[self.name].group_size != 0

    @property
    def token_scaled(self) -> bool:
        """Whether the one group is the whole latent, its scale stored beside the rows."""
        return _KINDS[self.name].group_size == _WHOLE_ROW

    @property
    def group_size(self) -> int:
        """Latent columns that share a scale; 0 where none do."""
        return self.kv_lora_rank if self.token_scaled else _KINDS[self.name].group_size

    @property
    def num_groups(self) -> int:
        return self.kv_lora_rank // self.group_size if self.group_scaled else 0

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of a group's scale."""
        return _KINDS[self.name].scale


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


FORMAT_NAMES: tuple[FormatName, ...] = get_args(FormatName)
