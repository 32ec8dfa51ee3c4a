"""Tiles of the quantising kernels: they hold what must lie in one, and rows choose no variant."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kvkern.kernels import quantize_fp8, rms_norm_quant_fp8, silu_and_mul_quant_fp8
from kvkern.kernels.device import Gpu
from kvkern.kernels.fp8_tiles import LONGEST_ROW, choose_tile, scale_shape

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


def calls(num_rows, granularity):
    """Grid, arguments and options of each kernel that is launched."""
    x, values, scale = (
        torch.empty(num_rows, 1200, dtype=torch.bfloat16, device="meta"),
        torch.empty(num_rows, 1200, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty(scale_shape(granularity, num_rows, 1200), device="meta"),
    )
    partials = None
    if granularity == "tensor":
        yield (maxima := quantize_fp8._maxima_call(x, granularity))
        partials = maxima[1]["partials_ptr"]
    yield quantize_fp8._quantize_call(x, values, scale, partials, granularity, False, False, H100)
    yield quantize_fp8._dequantize_call(values, scale, granularity, x, H100)
    if granularity != "block":
        style = (values, scale, granularity, True, False)
        yield rms_norm_quant_fp8._call(x, x[0], x, *style, 1e-6, H100)
        gate_and_up = torch.empty(num_rows, 2400, dtype=torch.bfloat16, device="meta")
        yield silu_and_mul_quant_fp8._call(gate_and_up, *style, H100)


@pytest.mark.parametrize("granularity", ["tensor", "row", "group", "block"])
def test_number_of_rows_changes_no_variant(granularity):
    """Nothing is compiled while serving."""

    def variants(num_rows):
        """All that is specialised on, but addresses."""
        for _, arguments, options in calls(num_rows, granularity):
            yield options | {
                name: value.dtype if isinstance(value, torch.Tensor) else value
                for name, value in arguments.items()
                if name not in ("num_rows", "num_partials")
            }

    for num_rows in (1, 2, 16, 127, 128, 4096):
        assert list(variants(num_rows)) == list(variants(100))
