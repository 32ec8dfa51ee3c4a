"""Weights in 8 and 4 bits: quantisers, and products with 16-bit or 8-bit activations."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvkern.backends import WeightOnlyCall, choose
from kvkern.errors import ArgumentError, ShapeMismatchError
from kvkern.layout import MIN_TOKEN_SCALE
from kvkern.ops._known import KnownCalls, addresses_and_kinds
from kvkern.ops._sizes import FLOATS, Sizes, as_rows, check_is_tensor

_CHUNK_BYTES = 128  # of a row: 32 words of 32 bits
_GROUP_SIZES = (32, 64, 128)
_MOST_COLUMNS_W8A8 = 65536  # products of 8 bits whose sum int32 holds
_HALVES = (torch.bfloat16, torch.float16)


class QuantizedInt8(NamedTuple):
    """What ``quantize_int8`` returns: the real numbers are ``(stored - zero) * scale``."""

    values: Tensor  # int8 [ceil(K / 128), N, 128]
    scale: Tensor  # fp32 [1, N]
    zero: Tensor | None  # fp32 [1, N], an integer; None: 0
    num_columns: int  # K


class QuantizedInt4(NamedTuple):
    """What ``quantize_int4`` returns: the real numbers are ``(stored - zero) * scale``."""

    values: Tensor  # uint8 [ceil(K / 256), N, 128], two numbers a byte
    scale: Tensor  # fp32 [ceil(K / group_size), N]
    zero: Tensor | None  # fp32, as scale, an integer; None: 8
    num_columns: int  # K
    group_size: int


def quantize_int8(
    weight: Tensor, *, symmetric: bool = True, backend: str = "auto"
) -> QuantizedInt8:
    """Round a layer's weight to 8 bits, by a scale for each column of the layer's output.

    Args:
        weight: ``[N, K]`` as ``nn.Linear`` has it (out = x @ weight.T), bf16, fp16 or fp32, rows
            contiguous, at any distance.
        symmetric: whether the zero point is 0, and codes are -127 to 127; otherwise codes are -128
            to 127, over the row's range with 0 in it.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``values``, int8 ``[ceil(K / 128), N, 128]``: byte 4 j + i of a row's chunk is its column
        32 i + j, so that kernels take 32 words of it apart in four. What is beyond K is the zero
        point. ``scale``, fp32 ``[1, N]``, a descale (real = (stored - zero) * scale), at least
        2^-100; ``zero``, an integer in fp32, ``[1, N]``, or None if symmetric.
        stored = round(w * (1 / scale)) + zero in fp32, ties to even: an error of scale / 2 at most.
        Infinities saturate, NaN becomes 0, and neither has a say in a scale. Bytes are equal on
        every backend.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, LayoutError: ``weight`` is not as above.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: arXiv:1712.05877, section 2.1.
    """
    check_is_tensor("weight", weight)
    sizes = Sizes(weight.device)
    sizes.match("weight", weight, "N K", *FLOATS, strides="rows")
    values, scale, zero = _quantize("quantize_int8", weight, 8, sizes["K"], symmetric, backend)
    return QuantizedInt8(values, scale, zero, sizes["K"])


def quantize_int4(
    weight: Tensor,
    *,
    group_size: int | None = 128,
    symmetric: bool = True,
    backend: str = "auto",
) -> QuantizedInt4:
    """Round a layer's weight to 4 bits, by a scale for each ``group_size`` columns of a row.

    Args:
        weight: ``[N, K]`` as ``nn.Linear`` has it (out = x @ weight.T), bf16, fp16 or fp32, rows
            contiguous, at any distance.
        group_size: 32, 64 or 128 columns, or None: all K. The last group of a row may be smaller.
        symmetric: whether the zero point is 8, and codes are 1 to 15; otherwise codes are 0 to 15,
            over the group's range with 0 in it.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``values``, uint8 ``[ceil(K / 256), N, 128]``: of byte 4 j + i of a row's chunk the lower
        half is column 64 i + j and the upper one column 64 i + 32 + j, so that kernels take 32
        words of it apart in eight. What is beyond K is the zero point. ``scale``, fp32
        ``[ceil(K / group_size), N]``, a descale (real = (stored - zero) * scale), at least 2^-100;
        ``zero``, an integer in fp32, as ``scale``, or None if symmetric. Rounding, infinities and
        NaN are as in ``quantize_int8``. Bytes are equal on every backend.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, LayoutError: ``weight`` is not as above.
        ArgumentError: no such ``group_size``.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: arXiv:2210.17323, section 4 (groups along K).
    """
    check_is_tensor("weight", weight)
    sizes = Sizes(weight.device)
    sizes.match("weight", weight, "N K", *FLOATS, strides="rows")
    check_group_size(group_size)
    group_size = max(sizes["K"], 1) if group_size is None else group_size
    quantized = _quantize("quantize_int4", weight, 4, group_size, symmetric, backend)
    return QuantizedInt4(*quantized, sizes["K"], group_size)


def dequantize_int8(
    weight: QuantizedInt8, *, dtype: torch.dtype = torch.bfloat16, backend: str = "auto"
) -> Tensor:
    """The real numbers of what ``quantize_int8`` stored.

    Args:
        weight: from ``quantize_int8``.
        dtype: of the result: bf16, fp16 or fp32.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``[N, K]`` in ``dtype``: (stored - zero) * scale in fp32, rounded once.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError: a tensor of ``weight``
            is not as ``quantize_int8`` returns it.
        ArgumentError: no such dtype.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: arXiv:1712.05877, section 2.1.
    """
    num_rows = _match_int8(weight)
    return _dequantize("dequantize_int8", weight, num_rows, weight.num_columns, dtype, backend)


def dequantize_int4(
    weight: QuantizedInt4, *, dtype: torch.dtype = torch.bfloat16, backend: str = "auto"
) -> Tensor:
    """The real numbers of what ``quantize_int4`` stored.

    Args:
        weight: from ``quantize_int4``.
        dtype: of the result: bf16, fp16 or fp32.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``[N, K]`` in ``dtype``: (stored - zero) * scale in fp32, rounded once.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError: a tensor of ``weight``
            is not as ``quantize_int4`` returns it.
        ArgumentError: no such dtype.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: arXiv:2210.17323, section 4.
    """
    num_rows = _match_int4(weight)
    return _dequantize("dequantize_int4", weight, num_rows, weight.group_size, dtype, backend)


def matmul_w8a16(
    x: Tensor,
    weight: QuantizedInt8,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """A linear layer with a weight in 8 bits: ``x @ dequantised.T + bias``.

    Args:
        x: ``[..., K]``, bf16 or fp16 (fp64: reference only), one row behind the other at any
            distance, rows contiguous.
        weight: from ``quantize_int8``, on the same device. A scale of NaN makes NaN of what it
            scales, an infinite one infinities or NaN.
        bias: ``[N]`` in ``x.dtype`` or fp32, contiguous.
        out_dtype: ``x.dtype``, the default, or fp32.
        out: ``[..., N]`` in ``out_dtype``, contiguous, filled if given; must not overlap inputs.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``[..., N]`` in ``out_dtype``. stored - zero is exact in 16 bits, products are summed in
        fp32, then scaled and rounded once. With K = 0 it is the bias, or zeros. How sums are
        grouped depends on the number of rows, not on what is in them, and repeats.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError: an argument is not as
            above.
        ArgumentError: no such ``out_dtype``.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: arXiv:2208.07339, section 2 (scales of output columns).
    """
    return _matmul_a16("matmul_w8a16", _match_int8, x, weight, bias, out_dtype, out, backend)


def matmul_w4a16(
    x: Tensor,
    weight: QuantizedInt4,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """A linear layer with a weight in 4 bits: ``x @ dequantised.T + bias``.

    Args:
        x: ``[..., K]``, bf16 or fp16 (fp64: reference only), one row behind the other at any
            distance, rows contiguous.
        weight: from ``quantize_int4``, on the same device. A scale of NaN makes NaN of what it
            scales, an infinite one infinities or NaN.
        bias: ``[N]`` in ``x.dtype`` or fp32, contiguous.
        out_dtype: ``x.dtype``, the default, or fp32.
        out: ``[..., N]`` in ``out_dtype``, contiguous, filled if given; must not overlap inputs.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``[..., N]`` in ``out_dtype``. stored - zero is exact in 16 bits, products of a group are
        summed in fp32 and scaled, and the sum of groups is rounded once. With K = 0 it is the
        bias, or zeros. How sums are grouped depends on the number of rows, not on what is in them,
        and repeats.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError: an argument is not as
            above.
        ArgumentError: no such ``out_dtype``.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: arXiv:2408.11743, section 3 (weights in 4 bits, activations in 16).
    """
    return _matmul_a16("matmul_w4a16", _match_int4, x, weight, bias, out_dtype, out, backend)


def matmul_w8a8(
    x: Tensor,
    weight: QuantizedInt8,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """A linear layer in 8-bit integers: rows of ``x`` are rounded to 8 bits as they come.

    Args:
        x: ``[..., K]``, bf16 or fp16 (fp64: reference only), K <= 65536, one row behind the other
            at any distance, rows contiguous.
        weight: from ``quantize_int8``, on the same device. A scale of NaN makes NaN of what it
            scales, an infinite one infinities or NaN.
        bias: ``[N]`` in ``x.dtype`` or fp32, contiguous.
        out_dtype: ``x.dtype``, the default, or fp32.
        out: ``[..., N]`` in ``out_dtype``, contiguous, filled if given; must not overlap inputs.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``[..., N]`` in ``out_dtype``: codes of ``x`` are round(x * (1 / s)), s a row's largest
        magnitude over 127, at least 2^-100; integers are summed exactly, then scaled in fp32. A
        row with NaN or an infinity is NaN. With K = 0 it is the bias, or zeros.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError: an argument is not as
            above.
        ArgumentError: no such ``out_dtype``; or K is too large for sums in int32.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: arXiv:2208.07339, section 2 (a scale a row and a scale a column).
    """
    num_columns = _match_int8(weight)
    if weight.num_columns > _MOST_COLUMNS_W8A8:
        raise ArgumentError(
            f"weight: want at most {_MOST_COLUMNS_W8A8} columns, got {weight.num_columns}"
        )
    return _matmul("matmul_w8a8", x, weight, num_columns, None, bias, out_dtype, out, backend)


def check_group_size(group_size: int | None) -> None:
    is_whole = hasattr(group_size, "__index__")  # 128.0 is equal to 128
    if group_size is not None and not (is_whole and group_size in _GROUP_SIZES):
        raise ArgumentError(f"group_size: want 32, 64, 128 or None, got {group_size}")


def _quantize(
    op: str, weight: Tensor, bits: int, group_size: int, symmetric: bool, backend: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    num_rows, num_columns = weight.shape
    dtype = torch.int8 if bits == 8 else torch.uint8
    values_shape, scale_shape = stored_shapes(num_rows, num_columns, bits, group_size)
    values = torch.empty(values_shape, dtype=dtype, device=weight.device)
    scale = torch.empty(scale_shape, dtype=torch.float32, device=weight.device)
    zero = None if symmetric else torch.empty_like(scale)
    run = choose(op, backend, weight.device, weight.dtype)
    if weight.numel() > 0:
        run(weight, values, scale, zero, group_size)
    else:  # a row of nothing has no magnitude
        scale.fill_(MIN_TOKEN_SCALE)
        if zero is not None:
            zero.zero_()
    return values, scale, zero


def stored_shapes(
    num_rows: int, num_columns: int, bits: int, group_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the values and the scale of a weight ``[N, K]``."""
    num_chunks = -(-num_columns * bits // (8 * _CHUNK_BYTES))
    num_groups = 1 if group_size >= num_columns else -(-num_columns // group_size)
    return (num_chunks, num_rows, _CHUNK_BYTES), (num_groups, num_rows)


def _match_int8(weight: QuantizedInt8) -> int:
    """Rows of a weight that is as ``quantize_int8`` returns it."""
    if not isinstance(weight, QuantizedInt8):
        raise ArgumentError(f"weight: want a QuantizedInt8, got {type(weight).__name__}")
    return _match_stored(weight, 8, weight.num_columns, torch.int8)


def _match_int4(weight: QuantizedInt4) -> int:
    """Rows of a weight that is as ``quantize_int4`` returns it."""
    if not isinstance(weight, QuantizedInt4):
        raise ArgumentError(f"weight: want a QuantizedInt4, got {type(weight).__name__}")
    if weight.group_size not in (*_GROUP_SIZES, max(weight.num_columns, 1)):
        raise ArgumentError(
            f"weight.group_size: want 32, 64, 128 or K = {weight.num_columns}, "
            f"got {weight.group_size}"
        )
    return _match_stored(weight, 4, weight.group_size, torch.uint8)


def _match_stored(
    weight: QuantizedInt8 | QuantizedInt4, bits: int, group_size: int, dtype: torch.dtype
) -> int:
    (chunks, _, num_bytes), (groups, _) = stored_shapes(0, weight.num_columns, bits, group_size)
    check_is_tensor("weight.values", weight.values)
    sizes = Sizes(weight.values.device, G=groups, C=chunks, B=num_bytes)
    sizes.match("weight.values", weight.values, "C N B", dtype)
    sizes.match("weight.scale", weight.scale, "G N", torch.float32)
    if weight.zero is not None:
        sizes.match("weight.zero", weight.zero, "G N", torch.float32)
    return sizes["N"]


def _dequantize(
    op: str,
    weight: QuantizedInt8 | QuantizedInt4,
    num_rows: int,
    group_size: int,
    dtype: torch.dtype,
    backend: str,
) -> Tensor:
    if dtype not in FLOATS:
        raise ArgumentError(f"dtype: want bfloat16, float16 or float32, got {dtype}")
    out = torch.empty(num_rows, weight.num_columns, dtype=dtype, device=weight.values.device)
    run = choose(op, backend, out.device, dtype)
    if out.numel() > 0:
        run(weight.values, weight.scale, weight.zero, group_size, out)
    return out


def _matmul_a16(
    op: str,
    match: Callable[[Any], int],  # checks the weight, and says how many rows it has
    x: Tensor,
    weight: QuantizedInt8 | QuantizedInt4,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    backend: str,
) -> Tensor:
    """A call like one before is repeated as that was."""
    try:
        addresses, kinds = addresses_and_kinds(
            (x, weight.values, weight.scale, weight.zero, bias, out)
        )
        key: Any = (op, type(weight), weight[3:], out_dtype, backend, *kinds)
    except (AttributeError, RuntimeError):  # not all are what they should be: the checks say which
        key = None
    again = _KNOWN.get(key)
    if again is None:
        num_columns = match(weight)
        group_size = getattr(weight, "group_size", weight.num_columns)
        return _matmul(op, x, weight, num_columns, group_size, bias, out_dtype, out, backend, key)
    if out is None:
        shape, dtype = (*x.shape[:-1], weight.scale.shape[1]), out_dtype or x.dtype
        out = torch.empty(shape, dtype=dtype, device=x.device)
        addresses[-1] = out.data_ptr()
    again(addresses)
    return out


_KNOWN = KnownCalls(most=16_384)


def _matmul(
    op: str,
    x: Tensor,
    weight: QuantizedInt8 | QuantizedInt4,
    num_columns: int,
    group_size: int | None,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
    backend: str,
    key: Any = None,
) -> Tensor:
    """``group_size``: of products of 16 bits, or None; ``key``: what to remember the call by."""
    check_is_tensor("x", x)
    if x.dim() == 0:
        raise ShapeMismatchError("x: want [..., K], got []")
    lead = {f"D{number}": size for number, size in enumerate(x.shape[:-1])}
    sizes = Sizes(weight.values.device, **lead, K=weight.num_columns, N=num_columns)
    dtypes = (torch.float64,) if x.dtype == torch.float64 else _HALVES  # fp64: the reference only
    sizes.match("x", x, " ".join((*lead, "K")), *dtypes, strides="any")
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if out_dtype not in (x.dtype, torch.float32):
        raise ArgumentError(f"out_dtype: want {x.dtype} or torch.float32, got {out_dtype}")
    if bias is not None:
        sizes.match("bias", bias, "N", x.dtype, torch.float32)
    if out is None:
        out = torch.empty(*x.shape[:-1], num_columns, dtype=out_dtype, device=x.device)
    else:
        sizes.match("out", out, " ".join((*lead, "N")), out_dtype)
    call = None if group_size is None or x.numel() == 0 else _call_of(x, weight, group_size)
    run = choose(op, backend, x.device, x.dtype, call)
    if out.numel() == 0:
        return out
    rows = out.view(-1, num_columns)
    if x.shape[-1] == 0:
        with torch.no_grad():
            rows.copy_(torch.zeros_like(rows) if bias is None else bias.expand_as(rows))
        return out
    group = () if group_size is None else (group_size,)
    again = run(as_rows("x", x), weight.values, weight.scale, weight.zero, bias, *group, rows)
    _KNOWN.remember(key, again)
    return out


def _call_of(x: Tensor, weight: QuantizedInt8 | QuantizedInt4, group_size: int) -> WeightOnlyCall:
    rows = as_rows("x", x)
    low_bits = rows.data_ptr() | rows.stride(0) * rows.element_size()
    low_bits |= weight.values.data_ptr() | weight.scale.data_ptr()
    return WeightOnlyCall(
        bits=4 if isinstance(weight, QuantizedInt4) else 8,
        num_rows=rows.shape[0],
        num_columns=weight.scale.shape[1],
        depth=weight.num_columns,
        group_size=group_size if group_size < weight.num_columns else 0,
        has_zero=weight.zero is not None,
        is_aligned=not low_bits & 15,
    )
