"""Tiles of the quantising kernels: they hold what must lie in one, and rows choose no variant."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kvkern.kernels import quantize_fp8, rms_norm_quant_fp8, silu_and_mul_quant_fp8
from kvkern.kernels.device import Gpu
from kvkern.kernels.fp8_tiles import LONGEST_ROW, choose_tile, scale_shape
from tests.kernels.variants import launches_on

H100 = Gpu(90, num_sms=132)
SIZES = [1, 7, 127, 128, 129, 576, 1023, 1536, 2048, 2049, 5120, 7168, 9217, 18432, LONGEST_ROW]


@pytest.mark.parametrize("num_columns", SIZES)
@pytest.mark.parametrize("thread", [4, 8])
def test_tiles_hold_cells_whole_and_little_else(num_columns, thread):
    for within in ("tensor", "row", "group"):
        tile = choose_tile(num_columns, within, thread)
        width = tile.columns * tile.chunks
        if within == "row":
            assert width >= num_columns and tile.num_tiles(3 * tile.rows, num_columns) == 3
        if within == "group":
            assert tile.columns % 128 == 0
        assert tile.rows == 1 or width >= num_columns  # rows lie in one tile, or are alone in it
        assert 128 % tile.rows == 0  # a tile's rows lie in one block
        num_tiles = -(-num_columns // width)
        assert num_tiles * width < num_columns + max(tile.columns, 128) * num_tiles
        if num_columns > 128:  # a thread has as many elements as its registers can hold
            assert tile.rows * width <= 96 * 32 * tile.num_warps
    assert choose_tile(num_columns, "block").rows == 128


def variants(num_rows, granularity, column_major):
    """Of each kernel that is launched."""
    x, values, scale = (
        torch.empty(num_rows, 1200, dtype=torch.bfloat16, device="meta"),
        torch.empty(num_rows, 1200, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty(scale_shape(granularity, num_rows, 1200), device="meta"),
    )
    if column_major:
        scale = torch.empty_strided(scale.shape, (1, -(-num_rows // 4) * 4), device="meta")
    with launches_on(H100) as met:
        quantize_fp8.quantize_fp8(x, values, scale, granularity, False, False)
        quantize_fp8.dequantize_fp8(values, scale, granularity, x)
        if granularity != "block":
            style = (values, scale, granularity, True, False)
            rms_norm_quant_fp8.rms_norm_quant_fp8(x, x[0], x, *style, 1e-6)
            gate_and_up = torch.empty(num_rows, 2400, dtype=torch.bfloat16, device="meta")
            silu_and_mul_quant_fp8.silu_and_mul_quant_fp8(gate_and_up, *style)
    return met


@pytest.mark.parametrize(
    "granularity, column_major",
    [("tensor", False), ("row", False), ("group", False), ("group", True), ("block", False)],
)
def test_number_of_rows_changes_no_variant(granularity, column_major):
    """Nothing is compiled while serving."""
    met = variants(100, granularity, column_major)
    assert len(met) == {"tensor": 5, "block": 2}.get(granularity, 4)
    for num_rows in (1, 2, 16, 127, 128, 4096):
        assert variants(num_rows, granularity, column_major) == met
