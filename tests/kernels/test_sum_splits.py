"""Splits of a product are added in their order, whatever a program takes on of them."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kvkern.kernels.device import INTERPRETED
from kvkern.kernels.sum_splits import MOST_SPLITS, sum_splits_call, sum_splits_kernel

BF16, FP32 = torch.bfloat16, torch.float32


def sum_of(partials, bias, out, **scales):
    grid, arguments, options = sum_splits_call(partials, bias, out, INTERPRETED, **scales)
    sum_splits_kernel[grid](**arguments, **options)
    return out, arguments["BLOCK_S"], options["num_warps"]


@pytest.mark.parametrize(
    ("num_splits", "num_rows", "num_columns", "block_s", "num_warps"),
    [
        (2, 3, 130, MOST_SPLITS, 1),
        (16, 7, 257, MOST_SPLITS, 1),
        (2, 60, 2049, 4, 4),  # as of 64 rows, the size class
        (4, 128, 1100, 4, 4),
        (3, 128, 2000, 4, 8),
        (5, 256, 1024, 8, 8),
        (16, 128, 1023, 16, 4),
    ],
)
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
def test_sum_is_that_of_splits_in_their_order(
    num_splits, num_rows, num_columns, block_s, num_warps, out_dtype
):
    partials = torch.randn(num_splits, num_rows, num_columns)
    bias = torch.randn(num_columns)
    out = torch.empty(num_rows, num_columns, dtype=out_dtype)
    out, *kind = sum_of(partials, bias, out)
    assert kind == [block_s, num_warps]
    exact = partials.double().sum(0) + bias.double()
    largest = partials.abs().sum(0) + bias.abs()
    eps = torch.finfo(out_dtype).eps
    assert ((out.double() - exact).abs() <= exact.abs() * eps + largest * 2**-21).all()


def test_matrices_and_scales_keep_their_places_where_a_program_takes_more():
    partials = torch.randint(-9, 9, (3, 4, 40, 1030), dtype=torch.int32)
    row_scale, column_scale = torch.rand(160), torch.rand(1030)
    bias = torch.randn(4, 1030)
    out = torch.full((4, 50, 1040), float("nan"))[:, :40, :1030]
    out, _, num_warps = sum_of(partials, bias, out, row_scale=row_scale, column_scale=column_scale)
    total = partials.sum(0) * column_scale * row_scale.view(4, 40, 1) + bias[:, None]
    assert num_warps == 8
    torch.testing.assert_close(out, total)
