"""write_kv: y = x / sqrt(mean(x^2) + eps) * gamma; (a, d) -> (a cos - d sin, a sin + d cos)."""

import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.reference.paging import place_tokens, round_to, write_rows


def write_kv(
    pages: LayerPages,
    batch: PagedBatch,
    kv: Tensor,
    freqs: Tensor | None,
    gamma: Tensor,
    q_rope: Tensor | None,
    q_rope_out: Tensor | None,
    kv_out: Tensor | None,
    positions: Tensor | None,
    eps: float,
    interleaved: bool,
    round_hf: bool,
    sanitize: bool,
) -> None:
    """The specification; ``kvkern.write_kv`` states the contract."""
    fmt = pages.format
    compute = torch.float64 if kv.dtype == torch.float64 else torch.float32
    places = place_tokens(batch, pages.page_size, kv.shape[0])
    is_real = places.is_real
    rope_positions = places.positions if positions is None else positions.long()

    latent, rope = kv.to(compute).split([fmt.kv_lora_rank, fmt.rope_dim], dim=-1)
    latent = rms_norm(latent, gamma, eps, round_hf)
    if freqs is not None and fmt.rope_dim:
        cos, sin = _cos_sin(freqs, rope_positions, compute)
        rope = rotate(rope, cos, sin, interleaved)
        if q_rope is not None and q_rope_out is not None:
            rotated = rotate(q_rope.to(compute), cos[:, None], sin[:, None], interleaved)
            q_rope_out.copy_(round_to(_zero_padding(rotated, is_real), kv.dtype))
    row = torch.cat([latent, rope], dim=-1)
    if kv_out is not None:
        kv_out.copy_(round_to(_zero_padding(row, is_real), kv.dtype))
    latent, rope = row[is_real].split([fmt.kv_lora_rank, fmt.rope_dim], dim=-1)
    write_rows(pages, places.slots[is_real], latent, rope, sanitize)


def rms_norm(x: Tensor, gamma: Tensor, eps: float, round_hf: bool) -> Tensor:
    """Normalise the last dim; the sum of squares is taken in fp64, so its order cannot matter."""
    mean_square = x.double().square().mean(-1, keepdim=True).to(x.dtype)
    # fp64 for the root as well: torch's fp32 root on a CPU is not the nearest
    root = torch.sqrt((mean_square + eps).double()).to(x.dtype)
    y = x * (1.0 / root)
    if not round_hf:
        return y * gamma.to(x.dtype)
    y = y.to(gamma.dtype).to(x.dtype) * gamma.to(x.dtype)
    return y.to(gamma.dtype).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate each pair of the last dim; ``cos`` and ``sin`` have one column per pair."""
    if interleaved:
        a, d = x[..., 0::2], x[..., 1::2]
    else:
        a, d = x.chunk(2, dim=-1)
    first, second = a * cos - d * sin, a * sin + d * cos
    if interleaved:
        return torch.stack([first, second], dim=-1).flatten(-2)
    return torch.cat([first, second], dim=-1)


def _cos_sin(freqs: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of the table; NaN for a position outside it."""
    inside = (positions >= 0) & (positions < len(freqs))
    rows = torch.full((len(positions), freqs.shape[1]), torch.nan, dtype=dtype, device=freqs.device)
    rows[inside] = freqs[positions[inside]].to(dtype)
    return rows[:, 0::2], rows[:, 1::2]


def _zero_padding(values: Tensor, is_real: Tensor) -> Tensor:
    return torch.where(is_real.view(-1, *[1] * (values.ndim - 1)), values, 0.0)
