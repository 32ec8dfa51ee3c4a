"""out = sum of a product's splits in their order, times scales, plus bias."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from kvkern.kernels.device import Gpu
from kvkern.kernels.numerics import round_to

MOST_SPLITS = 16


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def sum_splits_kernel(
    partials_ptr,  # fp32 or int32 [S, M, N]
    row_scale_ptr,  # fp32 [M], or None
    column_scale_ptr,  # fp32 [N], or None
    bias_ptr,  # [N], or None
    out_ptr,  # [M, N]
    num_rows,
    num_columns,
    num_splits,
    BLOCK_S: tl.constexpr,  # >= num_splits: all are read at once
    BLOCK_N: tl.constexpr,
    IS_EARLY: tl.constexpr,  # whether it may start while splits are still being written
):
    """Part of a row."""
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_s = tl.arange(0, BLOCK_S)
    mask_n = offs_n < num_columns
    mask = (offs_s < num_splits)[:, None] & mask_n[None, :]
    offs = (offs_s.to(tl.int64) * num_rows + row)[:, None] * num_columns + offs_n[None, :]
    if IS_EARLY:
        gdc_wait()
    total = tl.sum(tl.load(partials_ptr + offs, mask=mask, other=0), axis=0).to(tl.float32)
    if column_scale_ptr is not None:
        total *= tl.load(column_scale_ptr + offs_n, mask=mask_n, other=0.0)
    if row_scale_ptr is not None:
        total *= tl.load(row_scale_ptr + row)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    out = round_to(total, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_columns + offs_n, out, mask=mask_n)


def sum_splits_call(
    partials: Tensor,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    gpu: Gpu,
) -> tuple[tuple[int, int], dict[str, Any], dict[str, Any]]:
    """Grid, arguments and options of the launch."""
    num_splits, num_rows, num_columns = partials.shape
    arguments = {
        "partials_ptr": partials,
        "row_scale_ptr": row_scale,
        "column_scale_ptr": column_scale,
        "bias_ptr": bias,
        "out_ptr": out,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "num_splits": num_splits,
        "BLOCK_S": MOST_SPLITS,
        "BLOCK_N": 128,  # of one warp, which needs no shared memory and finds room beside others
        "IS_EARLY": can_start_early(gpu),
    }
    options: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": True}
    if can_start_early(gpu):
        options["launch_pdl"] = True
    return (num_rows, triton.cdiv(num_columns, 128)), arguments, options


def can_start_early(gpu: Gpu) -> bool:
    """Whether a launch may begin before the one before it has ended, and wait in the kernel."""
    return gpu.capability >= 90


def new_partials(num_splits: int, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for the splits of ``out`` [M, N]."""
    return torch.empty(num_splits, *out.shape, dtype=dtype, device=out.device)
