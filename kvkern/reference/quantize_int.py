"""quantize_int8, quantize_int4: stored = round(w / scale) + zero; dequantize: the inverse."""

import torch
from torch import Tensor

from kvkern.layout import MIN_TOKEN_SCALE
from kvkern.reference.paging import over

_WORDS = 32  # of a row's chunk, 4 bytes each


def quantize_int(
    weight: Tensor,  # [N, K]
    values: Tensor,  # [chunks, N, 128], int8: 8 bits, uint8: 4 bits
    scale: Tensor,  # fp32 [groups, N]
    zero: Tensor | None,  # fp32 [groups, N]
    group_size: int,
) -> None:
    """The specification; ``kvkern.quantize_int8`` and ``quantize_int4`` state the contract."""
    bits = bits_of(values)
    groups = _groups(weight.float(), group_size)
    finite = groups.where(groups.isfinite(), 0.0)
    if zero is None:
        top = 2 ** (bits - 1) - 1
        found = over(finite.abs().amax(-1), top)
    else:
        top = 2**bits - 1
        low, high = finite.amin(-1).clamp(max=0), finite.amax(-1).clamp(min=0)
        found = over(high, top) - over(low, top)
    found = found.clamp(min=MIN_TOKEN_SCALE)
    inverse = (1.0 / found)[..., None]
    steps = torch.round(groups.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf) * inverse)
    least = least_code(bits)
    if zero is None:
        codes = steps.clamp(-top, top) + (0 if bits == 8 else 8)
    else:
        above_least = torch.round(-low[..., None] * inverse)
        codes = (steps + above_least).clamp(0, top) + least
        zero.copy_((above_least[..., 0] + least).T)
    scale.copy_(found.T)
    codes = codes.flatten(1)[:, : weight.shape[1]].int()
    values.copy_(pack(codes, _zeros(zero, scale, bits)[-1].int(), bits))


def dequantize_int(
    values: Tensor, scale: Tensor, zero: Tensor | None, group_size: int, out: Tensor
) -> None:
    """The specification; ``kvkern.dequantize_int8`` and ``dequantize_int4`` state the contract."""
    bits = bits_of(values)
    codes = unpack(values, bits, out.shape[1])
    steps = _groups(codes.float(), group_size) - _zeros(zero, scale, bits).T[..., None]
    real = steps * scale.T[..., None]
    out.copy_(real.flatten(1)[:, : out.shape[1]])


def bits_of(values: Tensor) -> int:
    return 8 if values.dtype == torch.int8 else 4


def least_code(bits: int) -> int:
    return -128 if bits == 8 else 0


def pack(codes: Tensor, zero: Tensor, bits: int) -> Tensor:
    """``[N, K]`` int32 as ``[chunks, N, 128]`` bytes: as many columns as fit, 32 at a time.

    Byte 4 j + i of a row's chunk of 128 columns in 8 bits is column 32 i + j; the lower half of
    byte 4 j + i of one of 256 columns in 4 bits is column 64 i + j, the upper one 64 i + 32 + j.
    What is beyond the last column of a row is its ``zero`` ``[N]``.
    """
    num_rows, num_columns = codes.shape
    columns = 32 // bits * _WORDS
    rest = zero[:, None].expand(-1, -num_columns % columns)
    planes = torch.cat([codes, rest], dim=1).view(num_rows, -1, 32 // bits, _WORDS)
    if bits == 4:
        planes = planes[:, :, 0::2] | planes[:, :, 1::2] << 4
    stored = planes.transpose(2, 3).flatten(2).transpose(0, 1)
    return stored.to(torch.int8 if bits == 8 else torch.uint8).contiguous()


def unpack(values: Tensor, bits: int, num_columns: int) -> Tensor:
    """What ``pack`` was given, as int32."""
    planes = values.int().transpose(0, 1).unflatten(2, (_WORDS, 4)).transpose(2, 3)
    if bits == 4:
        planes = torch.stack([planes & 15, planes >> 4], dim=3)
    codes: Tensor = planes.flatten(1)[:, :num_columns]
    return codes


def _zeros(zero: Tensor | None, scale: Tensor, bits: int) -> Tensor:
    if zero is None:
        return torch.full_like(scale, 0 if bits == 8 else 8)
    return zero


def _groups(x: Tensor, group_size: int) -> Tensor:
    """``[N, groups, group_size]``; what is beyond the last column is 0."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % group_size))
    groups: Tensor = x.unflatten(1, (-1, group_size))
    return groups
