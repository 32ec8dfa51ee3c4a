"""scaled_mm and fp8_gemm: contracts, checks, choice of backend."""

from typing import Literal

import torch
from torch import Tensor

from kvkern.backends import MatmulCall, TakesTensors, choose
from kvkern.errors import ArgumentError, KvkernError, ShapeMismatchError
from kvkern.ops._known import KnownCalls, addresses_and_kinds
from kvkern.ops._sizes import FLOATS, FLOATS64, Sizes, check_is_tensor
from kvkern.ops.quantize import quantize_fp8

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_CELL = 128  # of K in a group, of K and N in a block
_ALIGNMENT = 16  # bytes

Cell = tuple[int, int]  # rows and columns that share a scale; 0: all


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    row_offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulation: Literal["exact", "fast"] = "exact",
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``(a * scale_a) @ (b * scale_b) + bias`` of fp8 matrices, rounded once.

    Plain, batched (G products side by side) or grouped (rows of ``a`` shared out among E matrices,
    as a mixture of experts has them).

    Args:
        a: ``[M, K]``, batched ``[G, M, K]``, grouped ``[T, K]``; e4m3 or e5m2, any strides.
        b: ``[K, N]``, ``[G, K, N]`` or ``[E, K, N]``; e4m3 or e5m2, any strides. Fastest is a
            weight ``[N, K]`` given as ``weight.t()``.
        scale_a: fp32 descales (real = stored * scale) as ``quantize_fp8`` finds them for ``a``:
            ``[1]``, for each row ``[M, 1]``, or for each 128 columns ``[M, ceil(K / 128)]``.
            Batched ``[1]`` or with G before; there ``[G, 1, 1]`` is one for each matrix. Any
            strides; those of columns are fastest as ``column_major_scales=True`` makes them.
        scale_b: the same for the weight ``[N, K]``, transposed: ``[1]``, for each column
            ``[1, N]``, for each block of 128 x 128 ``[ceil(K / 128), ceil(N / 128)]``, or for each
            128 rows ``[ceil(K / 128), N]``. Batched and grouped ``[1]`` or with G or E before. Any
            of them goes with any ``scale_a``; where a shape reads in two ways they mean the same.
            A scale of NaN makes NaN of what it scales, an infinite one infinities or NaN.
        row_offsets: int32 ``[E + 1]``, contiguous, on the device, from 0, never falling: expert e
            has rows ``[row_offsets[e], row_offsets[e + 1])`` of ``a``. The values are not checked.
        bias: ``[N]``, or ``[G, N]`` or ``[E, N]``; bf16, fp16 or fp32, rows contiguous.
        out_dtype: bf16, fp16 or fp32 (fp64: reference only).
        accumulation: ``"exact"``: no more than 128 products are summed before they are added in
            fp32. ``"fast"``: a kernel may sum all of K in the tensor core, if no scale changes
            along K; Hopper's keeps some 13 bits of such a sum, so results of a sign are too small,
            by 0.8% at K = 16384.
        out: as returned, last dim contiguous, other strides any that leave each element a place
            of its own; must not overlap an input.
        backend: ``"auto"``, or a name: used or refused, never replaced.

    Returns:
        ``[M, N]``, ``[G, M, N]`` or ``[T, N]`` in ``out_dtype``; the bias alone where K is 0. Rows
        at or past ``row_offsets[E]`` are 0. NaN and infinities are those of the real sum. The same
        call gives the same bits; M may decide in which order a row is summed.

    Raises:
        ShapeMismatchError, UnsupportedDtypeError, DeviceError, LayoutError, ArgumentError: an
            argument is not as above.
        UnsupportedError: no backend takes the call; the message gives each one's reason.

    Source: arXiv:2412.19437, section 3.3 (scales and exact accumulation); arXiv:2401.06066
    (grouped).
    """
    tensors = (a, b, scale_a, scale_b, row_offsets, bias, out)
    try:
        addresses, kinds = addresses_and_kinds(tensors)
    except (AttributeError, RuntimeError):  # not all have an address: the checks say which
        addresses, kinds = [], []
    key = (out_dtype, accumulation, backend, *kinds)
    again = _KNOWN.get(key)
    if again is not None:
        if out is None:
            out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=out_dtype, device=a.device)
            addresses[-1] = out.data_ptr()
        if isinstance(again, TakesTensors):
            with torch.no_grad():
                again(a, b, scale_a, scale_b, row_offsets, bias, out)
        else:
            again(addresses)
        return out
    _check(a, b, row_offsets, bias, out_dtype, accumulation)
    of_a, cell_a, of_b, cell_b = _scales(a, b, scale_a, scale_b, row_offsets is not None)
    if out is None:
        out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=out_dtype, device=a.device)
    else:
        _match("out", out, (*a.shape[:-1], b.shape[-1]), out_dtype, a.device, strides="written")
    a, b, out_matrices = _as_matrices(a), _as_matrices(b), _as_matrices(out)
    call = MatmulCall(
        a_dtype=a.dtype,
        b_dtype=b.dtype,
        out_dtype=out_dtype,
        num_matrices=b.shape[0],
        is_grouped=row_offsets is not None,
        num_rows=a.shape[1],
        num_columns=b.shape[2],
        depth=a.shape[2],
        cell_a=cell_a,
        cell_b=cell_b,
        a_is_aligned=is_aligned(a),
        b_is_aligned=is_aligned(b.mT),
        out_is_aligned=is_aligned(out_matrices),
        bias_dtype=None if bias is None else bias.dtype,
        is_exact=accumulation == "exact",
    )
    run = choose("scaled_mm", backend, a.device, out_dtype, call)
    if out.numel() > 0:
        bias = None if bias is None else bias.expand(b.shape[0], -1)
        again = run(
            a, b, of_a, of_b, cell_a, cell_b, row_offsets, bias, call.is_exact, out_matrices
        )
        _KNOWN.remember(key, again)
    return out


_KNOWN = KnownCalls(most=16_384)


def fp8_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
    output_dtype: torch.dtype = torch.float16,
    *,
    backend: str = "auto",
) -> Tensor:
    """``a @ b`` by fp8 tensor cores; what is not fp8 yet is quantised to e4m3 first.

    Args:
        a: ``[M, K]`` or ``[G, M, K]``; bf16, fp16 or fp32, which is given a scale for each row, or
            e4m3 or e5m2 with ``a_scale``.
        b: ``[K, N]`` or ``[G, K, N]``; the same, a scale for each column.
        a_scale, b_scale: as in ``scaled_mm``, of an fp8 matrix only; 1 if left out.
        output_dtype: bf16, fp16 or fp32.
        backend: ``"auto"``, or a name, of ``scaled_mm``: used or refused, never replaced.

    Returns:
        ``[M, N]`` or ``[G, M, N]`` in ``output_dtype``; zeros where K is 0.

    Raises:
        As ``scaled_mm``; ArgumentError also for a scale of a matrix that is quantised here.

    Source: arXiv:2412.19437, section 3.3.
    """
    check_is_tensor("a", a)
    check_is_tensor("b", b)
    sizes = Sizes(a.device)
    matrices = "G " if a.ndim == 3 else ""
    for name, x, dims, scale in (("a", a, "M K", a_scale), ("b", b, "K N", b_scale)):
        if x.dtype in _FP8:  # scaled_mm checks it
            continue
        sizes.match(name, x, matrices + dims, *FLOATS, *_FP8, strides="any")
        if scale is not None:
            raise ArgumentError(f"{name}_scale: want None for {name} in {x.dtype}, quantised here")
    if a.dtype not in _FP8:
        a, a_scale = quantize_fp8(a.contiguous())
    elif a_scale is None:
        a_scale = torch.ones(1, device=a.device)
    if b.dtype not in _FP8:
        b, b_scale = (x.mT for x in quantize_fp8(b.mT.contiguous()))
    elif b_scale is None:
        b_scale = torch.ones(1, device=b.device)
    try:
        return scaled_mm(a, b, a_scale, b_scale, out_dtype=output_dtype, backend=backend)
    except KvkernError as error:
        name, _, mistake = str(error).partition(":")
        if name not in _OWN_NAMES:
            raise
        raise type(error)(f"{_OWN_NAMES[name]}:{mistake}") from None


_OWN_NAMES = {"scale_a": "a_scale", "scale_b": "b_scale", "out_dtype": "output_dtype"}


def _check(
    a: Tensor,
    b: Tensor,
    row_offsets: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulation: str,
) -> None:
    """What the docstring of ``scaled_mm`` asks, but for scales and ``out``."""
    of_a, of_b, of_bias = "M K", "K N", "N"
    if row_offsets is not None:
        of_a, of_b, of_bias = "T K", "E K N", "E N"
    elif getattr(a, "ndim", 2) == 3:
        of_a, of_b, of_bias = "G M K", "G K N", "G N"
    sizes = Sizes(getattr(a, "device", torch.device("cpu")))
    sizes.match("a", a, of_a, *_FP8, strides="any")
    sizes.match("b", b, of_b, *_FP8, strides="any")
    if row_offsets is not None:
        sizes.known["E+1"] = sizes["E"] + 1
        sizes.match("row_offsets", row_offsets, "E+1", torch.int32)
    if bias is not None:
        is_shared = getattr(bias, "ndim", 1) == 1
        sizes.match("bias", bias, "N" if is_shared else of_bias, *FLOATS, strides="rows")
    if out_dtype not in FLOATS64:
        raise ArgumentError(f"out_dtype: want bfloat16, float16 or float32, got {out_dtype}")
    if accumulation not in ("exact", "fast"):
        raise ArgumentError(f"accumulation: want exact or fast, got {accumulation!r}")


def _scales(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, is_grouped: bool
) -> tuple[Tensor, Cell, Tensor, Cell]:
    """Both as ``[G, cells, cells]``, with their cells; K is cut in both or in neither."""
    (num_rows, depth), num_columns = a.shape[-2:], b.shape[-1]
    groups, blocks = -(-depth // _CELL), -(-num_columns // _CELL)
    of_a, cell_a = _read_scale(
        "scale_a",
        scale_a,
        () if is_grouped else b.shape[:-2],
        {(0, 0): (1, 1), (1, 0): (num_rows, 1), (1, _CELL): (num_rows, groups)},
        a.device,
    )
    of_b, cell_b = read_weight_scale("scale_b", scale_b, b)
    if cell_a[1] < cell_b[0]:
        of_a, cell_a = of_a.expand(-1, num_rows, groups), (1, _CELL)
    elif cell_b == (0, 0) and cell_a[1]:
        of_b, cell_b = of_b.expand(-1, groups, blocks), (_CELL, _CELL)
    elif cell_b == (0, 1) and cell_a[1]:
        of_b, cell_b = of_b.expand(-1, groups, num_columns), (_CELL, 1)
    return of_a, cell_a, of_b, cell_b


def read_weight_scale(name: str, scale: Tensor, weight: Tensor) -> tuple[Tensor, Cell]:
    """Of ``[K, N]`` or ``[G, K, N]``: ``[G, cells, cells]``, a view, and its cell of K and N."""
    depth, num_columns = weight.shape[-2:]
    groups, blocks = -(-depth // _CELL), -(-num_columns // _CELL)
    readings = {
        (0, 0): (1, 1),
        (0, 1): (1, num_columns),
        (_CELL, _CELL): (groups, blocks),
        (_CELL, 1): (groups, num_columns),
    }
    return _read_scale(name, scale, weight.shape[:-2], readings, weight.device)


def _read_scale(
    name: str,
    scale: Tensor,
    matrices: tuple[int, ...],
    readings: dict[Cell, tuple[int, int]],
    device: torch.device,
) -> tuple[Tensor, Cell]:
    """``[G, cells, cells]``, a view, and the first cell whose shape fits."""
    shape = tuple(getattr(scale, "shape", ()))
    _match(name, scale, shape, torch.float32, device)
    if shape == (1,):
        return scale.expand(*(matrices or (1,)), 1, 1), (0, 0)
    for cell, wanted in readings.items():
        if shape == (*matrices, *wanted):
            return _as_matrices(scale), cell
    shapes = [(1,), *((*matrices, *wanted) for wanted in readings.values())]
    wanted_shapes = " or ".join(str(list(wanted)) for wanted in dict.fromkeys(shapes))
    raise ShapeMismatchError(f"{name}: want {wanted_shapes}, got {list(shape)}")


def _match(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    strides: Literal["written", "any"] = "any",
) -> None:
    """``Sizes.match`` for any number of dims."""
    dims = {f"D{number}": size for number, size in enumerate(shape)}
    Sizes(device, **dims).match(name, tensor, " ".join(dims), dtype, strides=strides)


def _as_matrices(x: Tensor) -> Tensor:
    return x if x.ndim == 3 else x[None]


def is_aligned(x: Tensor) -> bool:
    """Whether rows are contiguous, apart, and begin at multiples of 16 bytes."""
    num_matrices, num_rows, num_columns = x.shape
    of_matrix, of_row = (stride * x.element_size() for stride in x.stride()[:2])
    return (
        x.data_ptr() % _ALIGNMENT == 0
        and (num_columns == 1 or x.stride(2) == 1)
        and (num_rows == 1 or (of_row % _ALIGNMENT == 0 and x.stride(1) >= num_columns))
        and (num_matrices == 1 or (of_matrix % _ALIGNMENT == 0 and of_matrix > 0))
    )
