"""scaled_mm by torch._scaled_mm, which is cuBLASLt or CUTLASS: a backend by name."""

import torch
from torch import Tensor

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
) -> None:
    """One matrix. ``kvkern.scaled_mm`` states the contract, the table what torch refuses.

    Scales are copied where torch wants them laid out in another way, ``out`` where it is strided.
    """
    result = out[0] if out.is_contiguous() else torch.empty_like(out[0])
    given_a, given_b = _as_torch_wants(scale_a[0], scale_b[0], cell_a, cell_b, out)
    try:
        torch._scaled_mm(
            a[0],
            b[0],
            given_a,
            given_b,
            bias=None if bias is None else bias[0],
            out_dtype=out.dtype,
            use_fast_accum=not is_exact,
            out=result,
        )
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:  # what it takes depends on its release and the card
        raise UnsupportedError(f"scaled_mm: backend 'torch' refuses: {error}") from error
    if result.data_ptr() != out.data_ptr():
        out[0].copy_(result)


def _as_torch_wants(
    scale_a: Tensor, scale_b: Tensor, cell_a: tuple[int, int], cell_b: tuple[int, int], out: Tensor
) -> tuple[Tensor, Tensor]:
    _, num_rows, num_columns = out.shape
    if cell_a == cell_b == (0, 0):
        return scale_a[0, 0], scale_b[0, 0]
    if cell_a[1] == 0:  # rows and columns, or nothing
        return scale_a.expand(num_rows, 1).contiguous(), scale_b.expand(1, num_columns).contiguous()
    scale_a = scale_a.T.contiguous().T
    return scale_a, scale_b.contiguous() if cell_b == (128, 1) else scale_b.T.contiguous().T
