"""write_kv: y = x / sqrt(mean(x^2) + eps) * gamma; (a, d) -> (a cos - d sin, a sin + d cos)."""

import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.reference.paging import place_tokens, round_to, write_rows


def write_kv(
    pages: LayerPages,
    batch: PagedBatch | None,
    kv: Tensor,
    freqs: Tensor | None,
    gamma: Tensor,
    q_rope: Tensor | None,
    q_rope_out: Tensor | None,
    q_nope: Tensor | None,
    q_nope_out: Tensor | None,
    q_latent: Tensor | None,
    q_gamma: Tensor | None,
    q_latent_out: Tensor | None,
    kv_out: Tensor | None,
    q_scale: Tensor | None,
    positions: Tensor | None,
    slot_mapping: Tensor | None,
    *,
    eps: float,
    interleaved: bool,
    round_hf: bool,
    sanitize: bool,
) -> None:
    """The specification; ``kvkern.write_kv`` states the contract."""
    fmt = pages.format
    compute = torch.float64 if kv.dtype == torch.float64 else torch.float32
    if slot_mapping is not None:
        slots = slot_mapping.long()
        is_real = slots >= 0
    else:
        assert batch is not None
        rope_positions, slots, is_real = place_tokens(batch, pages.page_size, kv.shape[0])
    is_real &= slots < pages.num_pages * pages.page_size
    if positions is not None:
        rope_positions = positions.long()
    inverse_scale = 1.0 if q_scale is None else 1.0 / q_scale.to(compute)

    def padded(values: Tensor) -> Tensor:
        return torch.where(is_real.view(-1, *[1] * (values.ndim - 1)), values, 0.0)

    def fill(out: Tensor, values: Tensor) -> None:
        out.copy_(round_to(padded(values), out.dtype))

    latent, rope = kv.to(compute).split([fmt.kv_lora_rank, fmt.rope_dim], dim=-1)
    latent = rms_norm(latent, gamma, eps, round_hf)
    if freqs is not None and fmt.rope_dim:
        cos, sin = _cos_sin(freqs, rope_positions, compute)
        rope = rotate(rope, cos, sin, interleaved)
        if q_rope is not None and q_rope_out is not None:
            rotated = rotate(q_rope.to(compute), cos[:, None], sin[:, None], interleaved)
            fill(q_rope_out, rotated * inverse_scale)
    if q_nope is not None and q_nope_out is not None:
        if q_scale is None:
            q_nope_out.copy_(padded(q_nope))
        else:
            fill(q_nope_out, q_nope.to(compute) * inverse_scale)
    if q_latent is not None and q_gamma is not None and q_latent_out is not None:
        fill(q_latent_out, rms_norm(q_latent.to(compute), q_gamma, eps, round_hf))
    row = torch.cat([latent, rope], dim=-1)
    if kv_out is not None:
        fill(kv_out, row)
    latent, rope = row[is_real].split([fmt.kv_lora_rank, fmt.rope_dim], dim=-1)
    write_rows(pages, slots[is_real], latent, rope, sanitize)


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
