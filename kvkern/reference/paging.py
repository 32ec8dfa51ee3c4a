"""Where a token is stored, and what a stored row means: the specification that readers share."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from kvkern.cache.batch import PagedBatch
from kvkern.cache.storage import LayerPages
from kvkern.layout import (
    E2M1_MAX,
    E4M3_MAX,
    MAX_GROUP_SCALE,
    MIN_E4M3,
    MIN_GROUP_SCALE,
    MIN_TOKEN_SCALE,
)

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class TokenPlaces(NamedTuple):
    """For each packed token: its position in its request, its slot, and whether it is real."""

    positions: Tensor  # int64 [T]
    slots: Tensor  # int64 [T], page * page_size + offset
    is_real: Tensor  # bool [T]; False: padding, position and slot mean nothing


def place_tokens(batch: PagedBatch, page_size: int, num_tokens: int) -> TokenPlaces:
    """Find the request of each packed token, its position, and the slot it is stored in."""
    tokens = torch.arange(num_tokens, device=batch.device)
    if batch.num_requests == 0 or batch.max_pages == 0:
        return TokenPlaces(tokens * 0, tokens * 0, tokens < 0)
    offsets = batch.input_row_offsets.long()
    request = torch.searchsorted(offsets[1:].contiguous(), tokens, right=True)
    is_real = request < batch.num_requests
    request = request.clamp(max=batch.num_requests - 1)
    positions = batch.cache_lengths.long()[request] + tokens - offsets[request]
    column = positions // page_size
    is_real &= column < batch.max_pages
    column = column.clamp(max=batch.max_pages - 1)
    page = batch.page_table.long()[request, column]
    return TokenPlaces(positions, page * page_size + positions % page_size, is_real & (page >= 0))


def read_rows(pages: LayerPages, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise the rows at ``slots`` [N] into ``[N, L+R]``."""
    fmt = pages.format
    latent, rope = _at(pages.latent, slots), _at(pages.rope, slots).to(dtype)
    latent = unpack_e2m1(latent.view(torch.uint8), dtype) if fmt.is_packed else latent.to(dtype)
    if pages.group_scales is not None:
        scales = _at(pages.group_scales, slots).to(dtype)
        latent = latent * scales.repeat_interleave(fmt.group_size, dim=-1)
    if pages.layer_scales is not None:
        latent_scale, rope_scale = pages.layer_scales.to(dtype)
        latent, rope = latent * latent_scale, rope * rope_scale
    return torch.cat([latent, rope], dim=-1)


def write_rows(
    pages: LayerPages, slots: Tensor, latent: Tensor, rope: Tensor, sanitize: bool
) -> None:
    """Quantise rows ``[N, L]`` and ``[N, R]`` and store them at ``slots`` [N].

    A value is divided by its scale by multiplying with 1 / scale in fp32: one division a scale.
    """
    fmt = pages.format
    if pages.layer_scales is not None:
        latent_factor, rope_factor = 1.0 / pages.layer_scales
        latent, rope = latent * latent_factor, rope * rope_factor
    if pages.group_scales is not None:
        groups = latent.unflatten(-1, (-1, fmt.group_size))
        if fmt.is_packed:
            scales = e2m1_scales(groups)
            # e2m1 has no NaN: the group's scale is one
            has_nan = groups.isnan().any(-1) if not sanitize else torch.tensor(False)
            stored_scales = round_to(torch.where(has_nan, torch.nan, scales), fmt.scale_dtype)
        elif fmt.token_scaled:
            stored_scales = scales = token_scales(groups)
        else:
            stored_scales = scales = power_of_two_scales(groups)
        _put(pages.group_scales, slots, stored_scales)
        latent = (groups * (1.0 / scales)[..., None]).flatten(-2)
    if fmt.is_packed:
        _put(pages.latent, slots, pack_e2m1(latent).view(torch.float4_e2m1fn_x2))
    else:
        _put(pages.latent, slots, round_to(latent, fmt.latent_dtype, sanitize))
    _put(pages.rope, slots, round_to(rope, fmt.rope_dtype, sanitize))


def power_of_two_scales(groups: Tensor) -> Tensor:
    """fp32 scale of groups ``[..., group_size]``: amax / 448, at least 1e-4, rounded up to 2**n.

    NaN does not count; an infinity counts as 448 * 2**119, which a row can hold.
    """
    ratio = _amax_over(groups, E4M3_MAX).clamp(MIN_GROUP_SCALE, MAX_GROUP_SCALE)
    return power_of_two_above(ratio)


def power_of_two_above(ratio: Tensor) -> Tensor:
    """2**n >= ratio > 2**(n-1)."""
    mantissa, exponent = torch.frexp(ratio)
    exponent = exponent - (mantissa == 0.5).int()  # already a power of two: 2**e is 0.5 * 2**(e+1)
    return torch.ldexp(torch.ones_like(ratio), exponent)


def token_scales(groups: Tensor) -> Tensor:
    """fp32 scale of groups ``[..., group_size]``: amax / 448. NaN and infinity as above."""
    return _amax_over(groups, E4M3_MAX).clamp(MIN_TOKEN_SCALE, MAX_GROUP_SCALE)


def e2m1_scales(groups: Tensor) -> Tensor:
    """fp32 scale of groups ``[..., group_size]``: the e4m3 nearest to amax / 6, but not 0."""
    ratio = _amax_over(groups, E2M1_MAX).clamp(MIN_E4M3, E4M3_MAX)
    return round_to(ratio, torch.float8_e4m3fn).float()


def pack_e2m1(values: Tensor) -> Tensor:
    """Columns ``[..., 2n]`` as e2m1, two a byte ``[..., n]``, the even one in the low bits.

    Nearest, ties to the even code; saturates at 6; NaN becomes 0.
    """
    magnitude = values.float().abs().nan_to_num(nan=0.0)
    middles = [(a + b) / 2 for a, b in itertools.pairwise(_E2M1_VALUES)]
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for code, middle in enumerate(middles):  # a tie between an odd code and the next goes up
        codes += (magnitude >= middle) if code % 2 else (magnitude > middle)
    codes |= (values.signbit() & ~values.isnan()).to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes ``[..., n]`` as the columns ``[..., 2n]`` that they hold."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).int()
    table = torch.tensor([*_E2M1_VALUES, *(-x for x in _E2M1_VALUES)], dtype=dtype)
    return table.to(packed.device)[codes]


def _amax_over(groups: Tensor, divisor: float) -> Tensor:
    return over(groups.float().abs().nan_to_num(nan=0.0).amax(-1), divisor)


def over(values: Tensor, divisor: float) -> Tensor:
    """values / divisor by a tensor: a GPU's torch multiplies by a number's inverse, rounded."""
    return values / torch.full_like(values, divisor)


def round_to(values: Tensor, dtype: torch.dtype, sanitize: bool = False) -> Tensor:
    """Cast to a stored dtype: nearest, ties to even; fp8 saturates; every NaN has the same bits.

    ``sanitize``: NaN becomes 0 and what would overflow the largest finite value.
    """
    if sanitize:
        largest = torch.finfo(dtype).max
        values = values.nan_to_num(nan=0.0).clamp(-largest, largest)
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        largest = torch.finfo(dtype).max
        stored = values.float().clamp(-largest, largest).to(dtype)
        canonical_nan = torch.tensor(0x7F, dtype=torch.uint8, device=values.device)
        return torch.where(values.isnan(), canonical_nan, stored.view(torch.uint8)).view(dtype)
    if dtype.itemsize == 2:
        canonical_nan = torch.tensor(0x7FFF, dtype=torch.int16, device=values.device).view(dtype)
        return torch.where(values.isnan(), canonical_nan, values.to(dtype))
    return torch.where(values.isnan(), torch.nan, values.to(dtype))


def _flat(field: Tensor) -> Tensor:
    """A field's rows ``[P * page_size, columns]``; a view, as pages lie one behind another."""
    return field.flatten(0, 1)


def _at(field: Tensor, slots: Tensor) -> Tensor:
    return _bytes_if_small(_flat(field))[slots].view(field.dtype)


def _put(field: Tensor, slots: Tensor, rows: Tensor) -> None:
    _bytes_if_small(_flat(field))[slots] = _bytes_if_small(rows)


def _bytes_if_small(field: Tensor) -> Tensor:
    """torch indexes nothing of 8 bits or fewer on the CPU but bytes."""
    return field.view(torch.uint8) if field.dtype.itemsize == 1 else field
