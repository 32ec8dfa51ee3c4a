"""scaled_mm by torch._scaled_mm, which is cuBLASLt or CUTLASS: a backend by name."""

import torch
from torch import Tensor

from kvkern.backends.again import TakesTensors
from kvkern.errors import UnsupportedError


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    cell_a: tuple[int, int],
    cell_b: tuple[int, int],
    row_offsets: None,
    bias: Tensor | None,
    is_exact: bool,
    out: Tensor,
) -> TakesTensors:
    """One matrix. ``kvkern.scaled_mm`` states the contract, the table what torch refuses.

    Scales are copied where torch wants them laid out in another way, ``out`` where it is strided.
    Returns how to repeat it with tensors that differ in nothing but addresses.
    """

    def run(
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        row_offsets: None,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        """Of the op's own arguments, or of those that it made ``[1, ...]`` of them."""
        a, b, out = _matrix(a), _matrix(b), _matrix(out)
        shape = (*out.shape, a.shape[1])
        scales = _as_torch_wants(_matrix(scale_a), _matrix(scale_b), cell_a, cell_b, shape)
        bias = bias[0] if bias is not None and bias.ndim == 2 else bias
        _multiply(a, b, *scales, bias, is_exact, out)

    run(a, b, scale_a, scale_b, row_offsets, bias, out)
    return TakesTensors(run)


def _multiply(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    is_exact: bool,
    out: Tensor,
) -> None:
    result = out if out.is_contiguous() else torch.empty_like(out)
    try:
        torch._scaled_mm(
            a,
            b,
            scale_a,
            scale_b,
            bias=bias,
            out_dtype=out.dtype,
            use_fast_accum=not is_exact,
            out=result,
        )
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:  # what it takes depends on its release and the card
        raise UnsupportedError(f"scaled_mm: backend 'torch' refuses: {error}") from error
    if result is not out:
        out.copy_(result)


def _matrix(x: Tensor) -> Tensor:
    return x[0] if x.ndim == 3 else x


def _as_torch_wants(
    scale_a: Tensor,
    scale_b: Tensor,
    cell_a: tuple[int, int],
    cell_b: tuple[int, int],
    shape: tuple[int, int, int],  # M, N, K
) -> tuple[Tensor, Tensor]:
    """The same tensors, where there is nothing to do."""
    num_rows, num_columns, depth = shape
    if cell_a == cell_b == (0, 0):
        return scale_a, scale_b
    if cell_a[1] == 0:  # rows and columns, or nothing
        of_a, of_b = _expanded(scale_a, num_rows, 1), _expanded(scale_b, 1, num_columns)
        return of_a.contiguous(), of_b.contiguous()
    groups = -(-depth // 128)
    of_a = _expanded(scale_a, num_rows, groups).T.contiguous().T
    of_b = _expanded(scale_b, groups, -(-num_columns // cell_b[1]))
    return of_a, of_b.contiguous() if cell_b == (128, 1) else of_b.T.contiguous().T


def _expanded(scale: Tensor, *shape: int) -> Tensor:
    return scale if scale.shape == shape else scale.expand(shape)
