"""Where a token is stored, and what a stored row means: the specification that readers share."""

from typing import NamedTuple

import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.layout import E4M3_MAX, GROUP_SIZE, MAX_GROUP_SCALE, MIN_GROUP_SCALE


class TokenPlaces(NamedTuple):
    """For each packed token: its position in its request, its slot, and whether it is real."""

    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T], page * page_size + offset
    is_real: Tensor  # bool [T]; False: padding, position and slot mean nothing


def place_tokens(batch: PagedBatch, page_size: int, num_tokens: int) -> TokenPlaces:
    """Find the request of each packed token, its position, and the slot it is stored in."""
    tokens = torch.arange(num_tokens, device=batch.device)
    if batch.num_requests == 0 or batch.page_table.shape[1] == 0:
        return TokenPlaces(tokens * 0, tokens * 0, tokens < 0)
    offsets = batch.input_row_offsets.long()
    request = torch.searchsorted(offsets[1:].contiguous(), tokens, right=True)
    is_real = request < batch.num_requests
    request = request.clamp(max=batch.num_requests - 1)
    positions = batch.cache_lengths.long()[request] + tokens - offsets[request]
    column = positions // page_size
    is_real &= column < batch.page_table.shape[1]
    column = column.clamp(max=batch.page_table.shape[1] - 1)
    page = batch.page_table.long()[request, column]
    return TokenPlaces(positions, page * page_size + positions % page_size, is_real & (page >= 0))


def read_rows(pages: LayerPages, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise the rows at ``slots`` [N] into ``[N, L+R]``."""
    latent = _at(pages.latent, slots).to(dtype)
    rope = _at(pages.rope, slots).to(dtype)
    if pages.group_scales is not None:
        scales = _at(pages.group_scales, slots).to(dtype)
        latent = latent * scales.repeat_interleave(GROUP_SIZE, dim=-1)
    if pages.layer_scales is not None:
        latent_scale, rope_scale = pages.layer_scales.to(dtype)
        latent, rope = latent * latent_scale, rope * rope_scale
    return torch.cat([latent, rope], dim=-1)


def write_rows(
    pages: LayerPages, slots: Tensor, latent: Tensor, rope: Tensor, sanitize: bool
) -> None:
    """Quantise rows ``[N, L]`` and ``[N, R]`` and store them at ``slots`` [N]."""
    if pages.group_scales is not None:
        groups = latent.unflatten(-1, (-1, GROUP_SIZE))
        scales = power_of_two_scales(groups)
        _put(pages.group_scales, slots, scales, sanitize)
        latent = (groups / scales[..., None]).flatten(-2)
    if pages.layer_scales is not None:
        latent_scale, rope_scale = pages.layer_scales
        latent, rope = latent / latent_scale, rope / rope_scale
    _put(pages.latent, slots, latent, sanitize)
    _put(pages.rope, slots, rope, sanitize)


def power_of_two_scales(groups: Tensor) -> Tensor:
    """fp32 scale of groups ``[..., GROUP_SIZE]``: amax / 448, at least 1e-4, rounded up to 2**n.

    NaN does not count; an infinity counts as 448 * 2**119, which a row can hold.
    """
    amax = groups.float().abs().nan_to_num(nan=0.0).amax(-1)
    ratio = (amax / E4M3_MAX).clamp(MIN_GROUP_SCALE, MAX_GROUP_SCALE)
    mantissa, exponent = torch.frexp(ratio)
    exponent = exponent - (mantissa == 0.5).int()  # already a power of two: 2**e is 0.5 * 2**(e+1)
    return torch.ldexp(torch.ones_like(amax), exponent)


def round_to(values: Tensor, dtype: torch.dtype, sanitize: bool = False) -> Tensor:
    """Cast to a stored dtype: nearest, ties to even; e4m3 saturates; every NaN has the same bits.

    ``sanitize``: NaN becomes 0 and what would overflow the largest finite value.
    """
    if sanitize:
        largest = torch.finfo(dtype).max
        values = values.nan_to_num(nan=0.0).clamp(-largest, largest)
    if dtype == torch.float8_e4m3fn:
        stored = values.float().clamp(-E4M3_MAX, E4M3_MAX).to(dtype)
        canonical_nan = torch.tensor(0x7F, dtype=torch.uint8, device=values.device)
        return torch.where(values.isnan(), canonical_nan, stored.view(torch.uint8)).view(dtype)
    return torch.where(values.isnan(), torch.nan, values.to(dtype))


def _flat(field: Tensor) -> Tensor:
    """A field's rows ``[P * page_size, columns]``; a view, as pages lie one behind another."""
    return field.flatten(0, 1)


def _at(field: Tensor, slots: Tensor) -> Tensor:
    if field.dtype == torch.float8_e4m3fn:  # torch indexes no fp8 on the CPU
        return _flat(field.view(torch.uint8))[slots].view(field.dtype)
    return _flat(field)[slots]


def _put(field: Tensor, slots: Tensor, values: Tensor, sanitize: bool) -> None:
    rows = round_to(values, field.dtype, sanitize)
    if field.dtype == torch.float8_e4m3fn:
        field, rows = field.view(torch.uint8), rows.view(torch.uint8)
    _flat(field)[slots] = rows
