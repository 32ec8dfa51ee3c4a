"""out = sum of a product's splits in their order, times scales, plus bias."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvkern.kernels.device import Gpu, gpu_of
from kvkern.kernels.launch import Launch, launch
from kvkern.kernels.numerics import round_to
from kvkern.warm_up import size_class

MOST_SPLITS = 16
# sizes of a step, and strides that hold them, compile nothing new
_OF_A_STEP = ["num_rows", "num_all_rows", "num_splits", "stride_bias", "stride_out_matrix"]


@triton.jit(do_not_specialize=_OF_A_STEP)
def sum_splits_kernel(
    partials_ptr,  # fp32 or int32 [S, G, M, N]
    bias_ptr,  # [G, N], or None
    out_ptr,  # [G, M, N]
    row_scale_ptr,  # fp32 [G * M], or None
    column_scale_ptr,  # fp32 [N], or None
    num_rows,
    num_all_rows,  # G * M
    num_columns,
    num_splits,
    stride_bias,
    stride_out_matrix,
    stride_out_row,
    BLOCK_S: tl.constexpr,  # >= num_splits: all are read at once
    BLOCK_N: tl.constexpr,
    IS_EARLY: tl.constexpr,  # whether it may start while splits are still being written
):
    """Part of a row."""
    row = tl.program_id(0).to(tl.int64)  # of all matrices
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_s = tl.arange(0, BLOCK_S)
    mask_n = offs_n < num_columns
    mask = (offs_s < num_splits)[:, None] & mask_n[None, :]
    offs = (offs_s.to(tl.int64) * num_all_rows + row)[:, None] * num_columns + offs_n[None, :]
    if IS_EARLY:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.sum(tl.load(partials_ptr + offs, mask=mask, other=0), axis=0).to(tl.float32)
    if column_scale_ptr is not None:
        total *= tl.load(column_scale_ptr + offs_n, mask=mask_n, other=0.0)
    if row_scale_ptr is not None:
        total *= tl.load(row_scale_ptr + row)
    matrix, row_of_matrix = row // num_rows, row % num_rows
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + matrix * stride_bias + offs_n
        total += tl.load(bias_ptrs, mask=mask_n, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + matrix * stride_out_matrix + row_of_matrix * stride_out_row + offs_n
    tl.store(out_ptrs, round_to(total, out_ptr.dtype.element_ty), mask=mask_n)


def sum_splits_call(
    partials: Tensor,  # [S, M, N] or [S, G, M, N]
    bias: Tensor | None,
    out: Tensor,
    gpu: Gpu,
    *,
    row_scale: Tensor | None = None,
    column_scale: Tensor | None = None,
) -> tuple[tuple[int, int], dict[str, Any], dict[str, Any]]:
    """Grid, arguments and options of the launch, behind a kernel that lets it start early."""
    num_splits, *matrices, num_rows, num_columns = partials.shape
    num_matrices = matrices[0] if matrices else 1
    num_all_rows = num_matrices * num_rows
    block_s, num_warps = _shape_of(num_splits, num_matrices * size_class(num_rows), num_columns)
    arguments = {
        "partials_ptr": partials,
        "bias_ptr": bias,
        "out_ptr": out,
        "row_scale_ptr": row_scale,
        "column_scale_ptr": column_scale,
        "num_rows": num_rows,
        "num_all_rows": num_all_rows,
        "num_columns": num_columns,
        "num_splits": num_splits,
        "stride_bias": 0 if bias is None or bias.ndim == 1 else bias.stride(0),
        "stride_out_matrix": out.stride(0) if matrices else 0,
        "stride_out_row": out.stride(-2),
        "BLOCK_S": block_s,
        "BLOCK_N": 128 * num_warps,
        "IS_EARLY": gpu.has_early_start,
    }
    options = {"num_warps": num_warps, "enable_fp_fusion": True, **gpu.early_start}
    return (num_all_rows, triton.cdiv(num_columns, 128 * num_warps)), arguments, options


def _shape_of(num_splits: int, num_all_rows: int, num_columns: int) -> tuple[int, int]:
    """How many splits a program has room for, and its warps.

    One warp finds room beside other programs, but 1000 programs take 1.2 us to start.
    """
    num_programs = num_all_rows * triton.cdiv(num_columns, 128)
    if num_programs < 1024:
        return MOST_SPLITS, 1
    return max(triton.next_power_of_2(num_splits), 4), 8 if num_programs >= 2048 else 4


def launch_sum(partials: Tensor, bias: Tensor | None, out: Tensor) -> "SumAgain | None":
    """Fill ``out`` ``[M, N]`` or ``[G, M, N]`` from partial sums, fp32, of a launch before."""
    grid, arguments, options = sum_splits_call(partials, bias, out, gpu_of(out.device))
    # partials, bias and out vary
    add = launch(sum_splits_kernel, grid, arguments, options, out.device, num_varying=3)
    return None if add is None else SumAgain(add, partials)


class SumAgain:
    """A product cut along K, and the sum of its parts, at other addresses."""

    def __init__(self, add: Launch, partials: Tensor) -> None:
        self._add, self._shape, self._device = add, partials.shape, partials.device

    def __call__(self, multiply: Callable[[int], None], bias: int | None, out: int | None) -> None:
        """``multiply`` is given where its parts go."""
        partials = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        into = partials.data_ptr()
        multiply(into)
        self._add((into, bias, out))


def new_partials(num_splits: int, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for the splits of ``out``."""
    return torch.empty(num_splits, *out.shape, dtype=dtype, device=out.device)
