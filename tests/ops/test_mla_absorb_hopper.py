"""mla_absorb by wgmma on sm_90: what it takes, how it is cut up, and its edges on a card."""

import math

import pytest
import torch

from kvkern import mla_absorb, quantize_fp8
from kvkern.backends import AbsorbCall, table
from kvkern.ops.matmul import read_weight_scale
from kvkern.testing.budget import assert_within_budget

BF16, FP16 = torch.bfloat16, torch.float16
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a card of compute capability 9.0",
)
CALL = AbsorbCall(BF16, 128, 128, 512, True, True, True)
LAYERS = [(128, 128, 512), (128, 512, 128), (16, 128, 512), (16, 512, 128)]  # H, K, N


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, None),
        ({"x_dtype": torch.float32}, "takes bfloat16 and float16, got torch.float32"),
        ({"depth": 0}, "takes K from 1 to 1024, got 0"),
        ({"depth": 1025}, "takes K from 1 to 1024, got 1025"),
        ({"w_is_aligned": False}, "takes x, out and w of contiguous rows"),
        ({"out_is_aligned": False}, "takes x, out and w of contiguous rows"),
    ],
)
def test_hopper_says_why_it_refuses(change, reason):
    got = table._hopper_absorb_refuses_call(CALL._replace(**change))
    assert got is None if reason is None else got.startswith(reason)


@pytest.mark.parametrize(
    "tokens, heads, depth, is_faster",
    [
        (128, 128, 128, True),
        (128, 128, 512, False),
        (512, 128, 512, True),
        (128, 16, 128, False),
        (512, 16, 128, True),
        (512, 16, 512, False),
        (4096, 16, 512, True),
        (65, 128, 128, True),  # of 128's size class
        (64, 1024, 128, False),
    ],
)
def test_it_yields_what_was_measured_to_be_no_faster(tokens, heads, depth, is_faster):
    call = CALL._replace(num_tokens=tokens, num_heads=heads, depth=depth)
    got = table._hopper_absorb_yields_call(call)
    assert (got is None) == is_faster
    if not is_faster:
        fewest = {128: 8192, 512: 32768}[depth]
        assert got == (
            f"is no faster up to 64 tokens, and below {fewest} tokens x heads, got {tokens} x "
            f"{heads}"
        )


def test_whatever_it_takes_has_room_in_shared_memory():
    kernels = pytest.importorskip("kvkern.kernels.hopper.mla_absorb", reason="needs Triton")
    for depth in (1, 64, 100, 128, 192, 256, 257, 512, 513, 1024):
        for num_columns in (1, 64, 65, 128, 200, 512, 4096):
            for num_tokens, num_heads in ((1, 1), (129, 16), (4096, 128)):
                tiles = kernels.choose_tiles(num_tokens, num_heads, depth, num_columns, 132)
                kept = -(-depth // 64) * 64 * tiles.columns * tiles.spans * 2
                staged = 2 * 64 * tiles.columns * 2
                assert kept + tiles.stages * 128 * 64 * 2 + staged <= 232_448 - 3072
                assert tiles.stages >= 4
                # a tile's x stays in the ring until all products have had it
                assert tiles.spans == 1 or -(-depth // 64) <= tiles.stages


@pytest.mark.parametrize(
    "tokens, layer, tiles",
    [
        (128, LAYERS[0], (128, 4)),
        (4096, LAYERS[0], (128, 4)),
        (4096, LAYERS[1], (128, 1)),
        (512, LAYERS[2], (64, 1)),
        (4096, LAYERS[2], (128, 2)),
        (512, LAYERS[3], (64, 1)),
        (4096, LAYERS[3], (64, 1)),
    ],
)
def test_tiles_are_those_that_were_fastest_and_leave_no_sm_idle(tokens, layer, tiles):
    kernels = pytest.importorskip("kvkern.kernels.hopper.mla_absorb", reason="needs Triton")
    assert kernels.choose_tiles(tokens, *layer, 132)[:2] == tiles
    assert num_programs(kernels, tokens, *layer) == 128


def num_programs(kernels, *sizes):
    return on_meta(kernels, *sizes)[0][0]


def on_meta(kernels, tokens, heads, depth, columns):
    x = torch.empty(tokens, heads, depth + 64, dtype=BF16, device="meta")[..., :depth]
    out = torch.empty(tokens, heads, columns + 64, dtype=BF16, device="meta")[..., :columns]
    w = torch.empty(heads, depth, columns, dtype=BF16, device="meta")
    return kernels._call(x, w, None, (0, 0), out, 132)


def test_another_number_of_tokens_compiles_nothing_new():
    """But for the tile, which has a few sizes: integers that vary are not specialised on."""
    kernels = pytest.importorskip("kvkern.kernels.hopper.mla_absorb", reason="needs Triton")
    for layer in LAYERS:
        met = set()
        for tokens in [*range(1, 700, 5), 1023, 1024, 4096, 5000]:
            _, arguments, options = on_meta(kernels, tokens, *layer)
            numbers = {
                name: getattr(value, "block_shape", value)
                for name, value in arguments.items()
                if name not in kernels._OF_A_STEP and not isinstance(value, torch.Tensor)
            }
            met.add(repr((numbers, options)))
        assert len(met) <= 4, met


def randn(*shape, dtype=BF16, mean=0.0):
    return (torch.randn(shape) + mean).to("cuda", dtype)


def absorb_on(num_sms, x, w, out, scale=None):
    """As on so many SMs: on few, a program has many columns and many tiles of tokens."""
    from kvkern.kernels.hopper import mla_absorb as kernels

    of_w, cell = (None, (0, 0)) if scale is None else read_weight_scale("scale", scale, w)
    grid, arguments, options = kernels._call(x, w, of_w, cell, out, num_sms)
    kernels._mla_absorb_kernel[grid](**arguments, **options)
    return out


def assert_right(result, x, w, scale=None, real=None):
    exact = torch.einsum("thk,hkn->thn", x.double(), w.double() if real is None else real)
    rounded = mla_absorb(x, w, scale=scale, backend="reference")
    assert_within_budget(result, exact, rounded)


SHAPES = [  # T, H, K, N, SMs
    (1, 1, 64, 128, 132),
    (33, 3, 8, 8, 132),  # less of everything than a box has
    (63, 2, 72, 200, 2),  # ends inside a step of K, and inside a box of columns
    (127, 140, 128, 64, 132),  # more heads than SMs
    (129, 1, 192, 512, 132),
    (300, 3, 128, 512, 3),  # four products of three tiles, the last one not full
    (300, 3, 128, 384, 3),  # the fourth product has no columns
    (1023, 1, 512, 128, 1),
    (700, 30, 520, 136, 30),  # the ring comes round within a tile
    (65, 2, 1024, 72, 132),
]
FP8_SHAPES = [
    (70, 3, 96, 48, 132),
    (300, 3, 128, 512, 3),
    (300, 3, 128, 384, 3),
    (300, 2, 192, 512, 2),  # groups of K in two products of a tile
    (300, 70, 512, 128, 70),
    (65, 1, 336, 208, 132),
]


def test_shapes_have_tiles_of_every_kind():
    kernels = pytest.importorskip("kvkern.kernels.hopper.mla_absorb", reason="needs Triton")
    for shapes in (SHAPES, FP8_SHAPES):
        met = {kernels.choose_tiles(*shape)[:2] for shape in shapes}
        assert met == {(128, 4), (128, 2), (128, 1), (64, 1)}


@on_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64_in_packed_buffers(shape, layout, dtype):
    tokens, heads, depth, columns, num_sms = shape
    x = randn(tokens, heads, depth + 64, dtype=dtype)[..., :depth]
    w = randn(heads, depth, columns, dtype=dtype)
    if layout == "columns":
        w = randn(heads, columns, depth, dtype=dtype).mT
    packed = torch.full((tokens, heads, columns + 64), 7.0, dtype=dtype, device="cuda")
    out = absorb_on(num_sms, x, w, packed[..., :columns])
    assert_right(out, x, w)
    assert (packed[..., columns:] == 7).all()
    again = absorb_on(num_sms, x, w, torch.empty_like(out).contiguous())
    assert torch.equal(again, out)


@on_hopper
@pytest.mark.parametrize("granularity", ["tensor", "row", "group", "block"])
@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
def test_fp8_weights(shape, layout, granularity):
    tokens, heads, depth, columns, num_sms = shape
    x = randn(tokens, heads, depth, mean=0.5)
    of_blocks = randn(heads, -(-columns // 128) * 128, depth, mean=0.5)  # which have to be whole
    values, scale = quantize_fp8(of_blocks, granularity=granularity)
    values = values[:, :columns]
    if granularity in ("row", "group"):
        scale = scale[:, :columns]
    w, real = values.mT, scale.double()
    if granularity != "tensor":
        scale, real = scale.mT, real.mT
    if granularity in ("group", "block"):
        real = real.repeat_interleave(128, 1)[:, :depth]
    if granularity == "block":
        real = real.repeat_interleave(128, 2)[..., :columns]
    if layout == "rows":
        w = w.contiguous()
    out = torch.empty(tokens, heads, columns, dtype=BF16, device="cuda")
    absorb_on(num_sms, x, w, out, scale)
    assert_right(out, x, w, scale, w.double() * real)


@on_hopper
def test_strides_and_neighbours_change_nothing():
    x, w = randn(200, 3, 128), randn(3, 128, 80)
    expected = mla_absorb(x, w, backend="hopper")
    assert_right(expected, x, w)
    by_heads = randn(3, 203, 144)[:, 1:201, 8:136].transpose(0, 1)
    by_heads.copy_(x)
    out = torch.full((3, 202, 96), 7.0, dtype=BF16, device="cuda")
    result = out[:, 1:201, 8:88].transpose(0, 1)
    mla_absorb(by_heads, w, out=result, backend="hopper")
    assert torch.equal(result, expected)
    assert (out[:, 0] == 7).all() and (out[:, 201] == 7).all()
    assert (out[..., :8] == 7).all() and (out[..., 88:] == 7).all()
    x[100, 1], x[7, 2, 5] = math.nan, math.inf
    spoilt = mla_absorb(x, w, backend="hopper")
    assert spoilt[100, 1].isnan().all() and not spoilt[7, 2].isfinite().any()
    spoilt[100, 1], spoilt[7, 2] = expected[100, 1], expected[7, 2]
    assert torch.equal(spoilt, expected)


@on_hopper
def test_long_sums_of_numbers_with_a_mean_have_no_bias():
    x, w = randn(130, 1, 1024, mean=1.0), randn(1, 32, 1024, mean=1.0).mT
    result = mla_absorb(x, w, backend="hopper")
    exact = torch.einsum("thk,hkn->thn", x.double(), w.double())
    assert abs(((result.double() - exact) / exact).mean()) < 1e-3
    assert_right(result, x, w)
