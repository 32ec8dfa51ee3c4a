"""quantize_fp8, alone and behind a norm or an activation, and dequantize_fp8: contracts, checks."""

import math
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from kvkern.backends import choose
from kvkern.errors import ArgumentError, LayoutError, ShapeMismatchError
from kvkern.layout import MIN_TOKEN_SCALE
from kvkern.ops._sizes import FLOATS, Sizes, as_rows, check_is_tensor, check_own_places

Granularity = Literal["tensor", "row", "group", "block"]
RowGranularity = Literal["tensor", "row", "group"]  # of what is made row by row
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CELL = 128  # columns of a group, rows and columns of a block
_ALIGNMENT = 4  # scales: 16 bytes, as a TMA wants strides


class QuantizedFP8(NamedTuple):
    """What ``quantize_fp8`` returns: the real numbers are ``values * scale``, cell by cell."""

    values: Tensor
    scale: Tensor


def quantize_fp8(
    x: Tensor,
    *,
    granularity: Granularity = "row",
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
    column_major_scales: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> QuantizedFP8:
    """Round to 8 bits, by a scale for each cell: found from what is in it, or given.

    Args:
        x: ``[..., K]``, bf16, fp16 or fp32, one row behind the other at any distance, rows
            contiguous.
        granularity: what shares a scale, and the shape of ``scale``: ``"tensor"``: all, ``[1]``;
            ``"row"``: a token, ``[..., 1]``; ``"group"``: 128 columns of a row,
            ``[..., ceil(K / 128)]``; ``"block"``: 128 rows x 128 columns of ``x``
            ``[..., N, K]``, ``[..., ceil(N / 128), ceil(K / 128)]``; with more than two dims N
            must be a multiple of 128. The last group and block of a row, and the last block of a
            column, may be smaller.
        scale: fp32, contiguous: a static descale (real = stored * scale), in the shape above; of
            groups also with other strides, rows at one distance. At least 2^-126, so that
            1 / scale is finite, which is not checked; NaN makes NaN of a cell. Left out, it is the
            largest finite magnitude of the cell over the dtype's largest value, at least 2^-100.
        dtype: ``torch.float8_e4m3fn`` (to 448) or ``torch.float8_e5m2`` (to 57344).
        power_of_two: round a scale that is found up to a power of two, as ue8m0 stores.
        column_major_scales: of groups only, where a scale that is found lies in memory; its shape
            and its numbers are the same, and one that is given stays as it is. False: contiguous.
            True: rows next to each other, stride 1 along them (all leading dims, folded) and the
            number of rows, rounded up to a multiple of 4 (16 bytes), along groups. A product
            wants the scales of many rows and one group at a time: next to each other they come in
            one piece. ``scaled_mm`` takes both; ``torch._scaled_mm`` and DeepGEMM want these, and
            are given a copy otherwise.
        out: ``x.shape`` in ``dtype``, contiguous, filled if given.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``values`` ``x.shape`` in ``dtype``: x * (1 / scale), in fp32, to the nearest, ties to even;
        what is too large, infinities too, saturates; NaN stays NaN and has no say in a scale.
        ``scale``, fp32. Bytes are equal on every backend.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError: an argument is not as
            above.
        ArgumentError: no such granularity or dtype; ``power_of_two`` beside a ``scale``; or
            ``column_major_scales`` of anything but groups.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: arXiv:2412.19437, section 3.3 (groups and blocks); OCP 8-bit floating point, 1.0.
    """
    _check_options(
        granularity, get_args(Granularity), scale, dtype, power_of_two, column_major_scales
    )
    _match_first("x", x, *FLOATS)
    if granularity == "block" and not _has_blocks(x.shape):
        raise ShapeMismatchError(
            f"x: want [N, K], or [..., N, K] with N a multiple of {_CELL}, for blocks; "
            f"got {list(x.shape)}"
        )
    quantized = _outputs(x.shape, granularity, scale, dtype, column_major_scales, out, x.device)
    run = choose("quantize_fp8", backend, x.device, x.dtype)
    if x.numel() == 0:
        return _empty(quantized, is_static=scale is not None)
    run(as_rows("x", x), *_by_row(quantized), granularity, scale is not None, power_of_two)
    return quantized


def rms_norm_quant_fp8(
    x: Tensor,
    gamma: Tensor,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    granularity: RowGranularity = "row",
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
    column_major_scales: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> QuantizedFP8:
    """RMSNorm of each row, quantised as ``quantize_fp8`` does; of x + residual if there is one.

    Args:
        x: ``[..., K]``, bf16, fp16 or fp32, one row behind the other at any distance, rows
            contiguous.
        gamma: ``[K]``, bf16, fp16 or fp32, contiguous.
        eps: added to the mean square, fp32.
        residual: ``x.shape`` in ``x.dtype``, strides as ``x``: x + residual, rounded to that dtype,
            takes its place and is what is normed, as in vLLM's, SGLang's and FlashInfer's fused
            add. ``x`` is only read. Each element has a place of its own, apart from ``x``.
        granularity: ``"row"``, ``"group"``, or ``"tensor"``, which needs a ``scale``: what is in
            all rows is not known while they are normed.
        scale, dtype, power_of_two, column_major_scales, out, backend: as in ``quantize_fp8``.

    Returns:
        ``values`` ``x.shape`` in ``dtype`` and ``scale``, as ``quantize_fp8`` has them of
        y = x * (1 / sqrt(mean(x^2) + eps)) * gamma, in fp32 and not rounded to x's dtype between.
        The mean is summed in fp32, so its last bits, and rarely a code, differ between backends.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError: an argument is not as
            above; nothing is written.
        ArgumentError: no such granularity or dtype, a ``scale`` that is missing or not wanted, or
            ``column_major_scales`` of anything but groups.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: RMSNorm, arXiv:1910.07467; arXiv:2412.19437, section 3.3.
    """
    _check_options(
        granularity, get_args(RowGranularity), scale, dtype, power_of_two, column_major_scales
    )
    _match_first("x", x, *FLOATS)
    Sizes(x.device, K=x.shape[-1]).match("gamma", gamma, "K", *FLOATS)
    if residual is not None:
        _match("residual", residual, x.shape, x.dtype, device=x.device, strides="any")
    quantized = _outputs(x.shape, granularity, scale, dtype, column_major_scales, out, x.device)
    run = choose("rms_norm_quant_fp8", backend, x.device, x.dtype)
    if x.numel() == 0:
        return _empty(quantized, is_static=scale is not None)
    rows, sums = as_rows("x", x), None
    if residual is not None:
        sums = as_rows("residual", residual)
        check_own_places("residual", sums)
        if sums.data_ptr() == rows.data_ptr():
            raise LayoutError("residual: want it apart from x, got both at one address")
    style = (granularity, scale is not None, power_of_two)
    run(rows, gamma, sums, *_by_row(quantized), *style, float(eps))
    return quantized


def silu_and_mul_quant_fp8(
    x: Tensor,
    *,
    granularity: RowGranularity = "row",
    scale: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
    column_major_scales: bool = False,
    out: Tensor | None = None,
    backend: str = "auto",
) -> QuantizedFP8:
    """silu(gate) * up of each row, quantised as ``quantize_fp8`` does.

    Args:
        x: ``[..., 2I]``: gate, then up; bf16, fp16 or fp32, one row behind the other at any
            distance, rows contiguous.
        granularity: ``"row"``, ``"group"``, or ``"tensor"``, which needs a ``scale``.
        scale, dtype, power_of_two, column_major_scales, out, backend: as in ``quantize_fp8``, of
            ``[..., I]``.

    Returns:
        ``values`` ``[..., I]`` in ``dtype`` and ``scale``, as ``quantize_fp8`` has them of
        gate / (1 + exp(-gate)) * up, in fp32 and not rounded to x's dtype between. Exponentials
        differ in their last bits, and rarely a code does, between backends.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError: an argument is not as
            above.
        ArgumentError: no such granularity or dtype, a ``scale`` that is missing or not wanted, or
            ``column_major_scales`` of anything but groups.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: SwiGLU, arXiv:2002.05202; arXiv:2412.19437, section 3.3.
    """
    _check_options(
        granularity, get_args(RowGranularity), scale, dtype, power_of_two, column_major_scales
    )
    _match_first("x", x, *FLOATS)
    if x.shape[-1] % 2:
        raise ShapeMismatchError(f"x: want [..., 2I], gate then up; got {list(x.shape)}")
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    quantized = _outputs(shape, granularity, scale, dtype, column_major_scales, out, x.device)
    run = choose("silu_and_mul_quant_fp8", backend, x.device, x.dtype)
    if x.numel() == 0:
        return _empty(quantized, is_static=scale is not None)
    run(as_rows("x", x), *_by_row(quantized), granularity, scale is not None, power_of_two)
    return quantized


def dequantize_fp8(
    values: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The real numbers of what ``quantize_fp8`` stored.

    Args:
        values: ``[..., K]``, ``float8_e4m3fn`` or ``float8_e5m2``, one row behind the other at any
            distance, rows contiguous.
        scale: fp32, in the shape of one of ``quantize_fp8``'s granularities, contiguous; of groups
            also with other strides, rows at one distance.
        dtype: of the result: bf16, fp16 or fp32.
        out: ``values.shape`` in ``dtype``, contiguous, filled if given.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``values.shape`` in ``dtype``: values * scale in fp32, rounded once.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError: an argument is not as
            above.
        ArgumentError: no such dtype.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: arXiv:2412.19437, section 3.3; OCP 8-bit floating point, 1.0.
    """
    _match_first("values", values, *_FP8)
    if dtype not in FLOATS:
        raise ArgumentError(f"dtype: want bfloat16, float16 or float32, got {dtype}")
    check_is_tensor("scale", scale)
    granularity = _granularity_of(values.shape, scale.shape)
    _match("scale", scale, scale.shape, torch.float32, device=values.device, strides="any")
    _check_strides(scale, granularity)
    if out is not None:
        _match("out", out, values.shape, dtype, device=values.device)
    result = torch.empty(values.shape, dtype=dtype, device=values.device) if out is None else out
    run = choose("dequantize_fp8", backend, values.device, dtype)
    if values.numel() > 0:
        rows = as_rows("values", values)
        run(rows, _as_cells(scale), granularity, result.view(rows.shape))
    return result


def _check_options(
    granularity: str,
    granularities: tuple[str, ...],
    scale: Tensor | None,
    dtype: torch.dtype,
    power_of_two: bool,
    column_major_scales: bool,
) -> None:
    if granularity not in granularities:
        names = ", ".join(granularities)
        raise ArgumentError(f"granularity: want one of {names}; got {granularity!r}")
    if dtype not in _FP8:
        raise ArgumentError(f"dtype: want float8_e4m3fn or float8_e5m2, got {dtype}")
    if power_of_two and scale is not None:
        raise ArgumentError("power_of_two: want it without scale, which is taken as it is")
    if column_major_scales and granularity != "group":
        raise ArgumentError(
            f"column_major_scales: want it with granularity 'group', got {granularity!r}"
        )
    if granularity == "tensor" and scale is None and granularities == get_args(RowGranularity):
        raise ArgumentError("scale: want one for a tensor, whose rows are not all known; got None")


def _outputs(
    shape: tuple[int, ...],
    granularity: Granularity,
    scale: Tensor | None,
    dtype: torch.dtype,
    column_major_scales: bool,
    out: Tensor | None,
    device: torch.device,
) -> QuantizedFP8:
    """What is given, checked, and what is not, allocated."""
    wanted = _scale_shape(shape, granularity)
    if scale is not None:
        _match("scale", scale, wanted, torch.float32, device=device, strides="any")
        _check_strides(scale, granularity)
    if out is not None:
        _match("out", out, shape, dtype, device=device)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
    if scale is None:
        new = _column_major if column_major_scales else torch.empty
        scale = new(wanted, dtype=torch.float32, device=device)
    return QuantizedFP8(out, scale)


def _column_major(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows next to each other, columns at multiples of 16 bytes."""
    leading = shape[:-1]
    distance = -(-math.prod(leading) // _ALIGNMENT) * _ALIGNMENT
    of_rows = (math.prod(leading[dim:]) for dim in range(1, len(shape)))
    return torch.empty_strided(shape, (*of_rows, distance), dtype=dtype, device=device)


def _empty(quantized: QuantizedFP8, is_static: bool) -> QuantizedFP8:
    """Nothing has no magnitude."""
    if not is_static:
        quantized.scale.fill_(MIN_TOKEN_SCALE)
    return quantized


def _by_row(quantized: QuantizedFP8) -> tuple[Tensor, Tensor]:
    """As backends take them; of what is not empty."""
    rows = quantized.values.view(-1, quantized.values.shape[-1])
    return rows, _as_cells(quantized.scale)


def _match_first(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Of the tensor whose shape and device the others have to fit."""
    check_is_tensor(name, tensor)
    _match(name, tensor, tensor.shape, *dtypes, device=tensor.device, strides="any")


def _match(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    *dtypes: torch.dtype,
    device: torch.device,
    strides: Literal["contiguous", "any"] = "contiguous",
) -> None:
    """``Sizes.match`` for any number of dims, but not none."""
    if len(shape) == 0:
        raise ShapeMismatchError(f"{name}: want [..., K], got []")
    dims = {f"D{number}": size for number, size in enumerate(shape)}
    Sizes(device, **dims).match(name, tensor, " ".join(dims), *dtypes, strides=strides)


def _check_strides(scale: Tensor, granularity: Granularity) -> None:
    """Kernels take those of groups, of rows that fold, and no others."""
    if scale.is_contiguous():
        return
    got = f"got strides {list(scale.stride())}"
    if granularity != "group":
        raise LayoutError(f"scale: want contiguous, {got}")
    try:
        _as_cells(scale)
    except RuntimeError:
        raise LayoutError(f"scale: want rows at one distance, {got}") from None


def _as_cells(scale: Tensor) -> Tensor:
    return scale.view(-1, scale.shape[-1])


def _has_blocks(shape: tuple[int, ...]) -> bool:
    """Whether no block lies in two matrices when their rows are folded."""
    return len(shape) == 2 or (len(shape) > 2 and shape[-2] % _CELL == 0)


def _scale_shape(shape: tuple[int, ...], granularity: Granularity) -> tuple[int, ...]:
    groups = -(-shape[-1] // _CELL)
    if granularity == "tensor":
        return (1,)
    if granularity == "row":
        return (*shape[:-1], 1)
    if granularity == "group":
        return (*shape[:-1], groups)
    return (*shape[:-2], -(-shape[-2] // _CELL), groups)


def _granularity_of(shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> Granularity:
    """Where two fit they mean the same."""
    granularities: tuple[Granularity, ...] = ("tensor", "row", "group")
    if _has_blocks(shape):
        granularities += ("block",)
    shapes = {granularity: _scale_shape(shape, granularity) for granularity in granularities}
    for granularity, wanted in shapes.items():
        if tuple(scale_shape) == wanted:
            return granularity
    wanted_shapes = " or ".join(str(list(wanted)) for wanted in dict.fromkeys(shapes.values()))
    raise ShapeMismatchError(f"scale: want {wanted_shapes}, got {list(scale_shape)}")
