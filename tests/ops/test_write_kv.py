import itertools
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvkern import (
    ArgumentError,
    CacheFormat,
    DeviceError,
    LayoutError,
    PagedBatch,
    PagedKVCache,
    ShapeMismatchError,
    UnsupportedDtypeError,
    UnsupportedError,
    copy_pages,
    gather_kv,
    write_kv,
)
from kvkern.cache.storage import LayerPages
from kvkern.layout import FORMAT_NAMES, MAX_GROUP_SCALE
from kvkern.testing.inputs import rope_freqs, shuffled_table
from tests.ops.steps import (
    BACKENDS,
    BF16,
    CANARY,
    E2M1,
    FP16,
    FP32,
    LENGTHS,
    NUM_PAGES,
    NUM_TOKENS,
    OFFSETS,
    PADDING,
    PAGE_SIZE,
    POSITIONS,
    REAL,
    SLOTS,
    Step,
    assert_refused,
    by_slots,
    decoded,
    e4m3_edges,
    field_bytes,
    make_query_step,
    make_step,
    nearest_e4m3,
    rotated,
    rows_of,
    same,
    token_bytes,
    written,
)

# ---- what is stored


# Each format, pair of dims (512+64: DeepSeek; 256+32: MiniCPM3; 128+0: no RoPE; 384+48: no powers
# of two, and padded rows), dtype and option at least twice: pairs, not the product.
COVERING = [
    ("bf16", (512, 64), BF16, BF16, "interleaved", "once", False),
    ("bf16", (384, 48), FP32, FP32, "half", "hf", True),
    ("fp16", (256, 32), FP16, FP16, "half", "once", True),
    ("fp16", (128, 0), FP32, BF16, "interleaved", "hf", False),
    ("fp32", (384, 48), FP16, FP32, "interleaved", "once", False),
    ("fp32", (256, 32), BF16, FP16, "half", "hf", True),
    ("fp8", (512, 64), BF16, FP32, "half", "once", False),
    ("fp8", (384, 48), FP16, FP32, "interleaved", "hf", True),
    ("fp8", (128, 0), FP32, FP32, "interleaved", "once", False),
    ("fp8_token", (512, 64), BF16, FP32, "interleaved", "once", False),
    ("fp8_token", (384, 48), FP32, FP32, "half", "once", True),
    ("fp8_token", (128, 0), FP16, BF16, "interleaved", "hf", False),
    ("nvfp4", (512, 64), BF16, FP32, "half", "once", False),
    ("nvfp4", (384, 48), FP32, FP32, "interleaved", "once", True),
    ("nvfp4", (256, 32), FP16, BF16, "interleaved", "hf", False),
    ("fp8_ds_mla", (512, 64), FP32, FP32, "interleaved", "once", False),
    ("fp8_ds_mla", (384, 48), BF16, BF16, "half", "hf", False),
    ("fp8_ds_mla", (128, 0), FP16, FP32, "half", "once", True),
]


def extreme_step(name, dims, dtype, gamma_dtype) -> Step:
    """Latents that are stored as exactly gamma, which holds every edge; then rows that are not."""
    step = make_step(name, dims, dtype, gamma_dtype, num_heads=3)
    latent_dim, rope_dim = dims
    edges = e4m3_edges()
    if BF16 in (dtype, gamma_dtype):  # whose subnormals the interpreter reads as 0
        edges[edges.abs() < 2.0**-126] = 0.0
    edges = edges[torch.randperm(len(edges))]
    kv = step.kv
    kv[:2, :latent_dim] = torch.randn(2, latent_dim).sign()  # mean square 1, so y = +-gamma
    kv[2, 7] = torch.nan
    kv[3] *= 1e4
    kv[4, :latent_dim] = 0.0
    kv[4, 1] = 3e4  # all of the mean square in one column; zero tiles and -0 beside it
    if rope_dim:
        kv[0, latent_dim:] = edges[:rope_dim]
        kv[1, latent_dim:] = edges[-rope_dim:]
        kv[3, latent_dim], kv[4, latent_dim] = torch.inf, -torch.inf
        step.q_rope[0, 0] = edges[rope_dim : 2 * rope_dim]
        step.freqs[POSITIONS[0]] = torch.tensor([1.0, 0.0]).repeat(rope_dim // 2)  # no rotation
    gamma = torch.cat([edges, edges])[:latent_dim]
    gamma[: len(gamma) // 4] = step.gamma[: len(gamma) // 4].float()  # one group of plain numbers
    step.gamma = gamma.to(gamma_dtype)
    step.scales = (0.5, 0.25)  # keeps midpoints midpoints
    return step


@pytest.mark.parametrize(
    "name, dims, dtype, gamma_dtype, rope_style, rounding, sanitize", COVERING, ids=str
)
def test_stored_bytes_equal_the_reference_on_extreme_values(
    device, name, dims, dtype, gamma_dtype, rope_style, rounding, sanitize
):
    step = extreme_step(name, dims, dtype, gamma_dtype)
    options = {"rope_style": rope_style, "rounding": rounding, "sanitize": sanitize, "eps": 0.0}
    expected = step.write("cpu", "reference", **options)
    same(step.write(device, "triton", **options), expected)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_stored_bytes_equal_the_reference_on_plain_values(device, name):
    step = make_step(name, (256, 32), num_heads=2)
    same(step.write(device, "triton"), step.write("cpu", "reference"))


@BACKENDS
@pytest.mark.parametrize("name", ["fp8", "fp8_token", "fp8_ds_mla"])
def test_latent_is_stored_as_the_nearest_e4m3(device, backend, name):
    """Against the codes themselves: y is exactly gamma, and the group's scale exactly 1."""
    step = make_step(name, (512, 0), FP32, num_tokens=1)
    edges = e4m3_edges()
    edges = edges[edges.abs() <= 448]
    step.kv[:] = 1.0
    step.scales = (1.0, 1.0)
    for start in range(0, len(edges), 508):
        part = edges[start : start + 508]
        gamma = torch.zeros(4, 128)
        gamma.view(-1)[: len(part)] = part
        gamma[:, 127] = 448.0  # 508 edges would not need it; it fixes each group's scale
        step.gamma = gamma.flatten()
        stored = rows_of(step.write(device, backend, eps=0.0), [SLOTS[0]])[0][0, :512].long()
        magnitude, is_negative = nearest_e4m3(step.gamma)
        assert torch.equal(stored & 0x7F, magnitude)
        assert torch.equal(stored >= 0x80, is_negative)


@BACKENDS
def test_latent_is_stored_as_the_nearest_e2m1(device, backend):
    """Against the eight magnitudes: y is exactly gamma, scales exactly 1 or 2 and 0.5."""
    values = E2M1[:8].float()
    exact = torch.cat([values, (values[1:] + values[:-1]) / 2])
    up, down = (torch.nextafter(exact, torch.tensor(to)) for to in (9.0, -9.0))
    edges = torch.cat([exact, up, down])
    edges = torch.cat([edges, -edges])  # 6 itself too
    edges = edges[edges.abs() <= 6]
    groups = torch.zeros(8, 16)
    groups[:, 0] = 6.0  # fixes each group's scale
    padded = torch.zeros(8 * 15)
    padded[: len(edges)] = edges
    groups[:, 1:] = padded.view(8, 15)
    step = make_step("nvfp4", (128, 0), FP32, num_tokens=1)
    step.kv[:], step.scales = 1.0, (1.0, 1.0)
    for scale in [1.0, 2.0, 0.5]:
        step.gamma = groups.flatten() * scale
        latent, _ = decoded(step.write(device, backend, eps=0.0), [SLOTS[0]])
        distance = (groups.flatten().double().abs()[:, None] - E2M1[:8]).abs()
        nearest = distance.argmin(1)  # the lower of two
        is_tie = (distance == distance.min(1, keepdim=True).values).sum(1) == 2
        assert is_tie.sum() == 14
        nearest += is_tie & (nearest % 2 == 1)
        expected = E2M1[nearest].copysign(groups.flatten()) * scale
        assert torch.equal(latent[0], expected)
        assert torch.equal(latent[0].signbit(), expected.signbit())


@BACKENDS
@pytest.mark.parametrize("rope_style", ["interleaved", "half"])
def test_row_is_the_normalised_latent_and_the_rotated_key(device, backend, rope_style):
    """Against fp64: torch's rms_norm, and rotation as a complex product."""
    step = make_step("fp32", (128, 32), FP32, num_heads=3)
    written = step.write(device, backend, rope_style=rope_style, eps=1e-2)
    tokens, slots = list(SLOTS), list(SLOTS.values())
    latent, rope = decoded(written, slots)
    kv = step.kv[tokens].double()
    y = torch.nn.functional.rms_norm(kv[:, :128], (128,), step.gamma.double(), eps=1e-2)
    freqs = step.freqs[POSITIONS]
    key = rotated(kv[:, 128:], freqs, rope_style)
    query = rotated(step.q_rope[tokens], freqs, rope_style)
    near = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(latent, y, **near)
    torch.testing.assert_close(rope, key, **near)
    torch.testing.assert_close(written.q_rope[tokens].double(), query, **near)
    torch.testing.assert_close(written.kv_out[tokens].double(), torch.cat([y, key], -1), **near)


@BACKENDS
def test_hf_rounding_rounds_where_published_models_do(device, backend):
    step = make_step("bf16", (512, 64), BF16, BF16)
    tokens, slots = list(SLOTS), list(SLOTS.values())
    x = step.kv[tokens, :512].float()
    normalised = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    published = step.gamma * normalised.to(BF16)
    agree = {}
    for rounding in ["once", "hf"]:
        latent, _ = decoded(step.write(device, backend, rounding=rounding), slots)
        agree[rounding] = (latent == published.double()).double().mean()
    # the published statistics may differ in the last fp32 bit, and then seldom in bf16
    assert agree["hf"] > 0.99 and agree["once"] < 0.9


@BACKENDS
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_sanitize_makes_every_stored_value_finite(device, backend, name):
    step = extreme_step(name, (256, 32), FP32, FP32)
    slots = list(SLOTS.values())
    for sanitize in [False, True]:
        written = step.write(device, backend, sanitize=sanitize, eps=0.0)
        latent, rope = decoded(written, slots)
        is_finite = latent.float().isfinite().all() and rope.float().isfinite().all()
        assert is_finite == sanitize
    assert (latent[2] == 0).all()  # the row of a NaN


LARGEST = {
    "bf16": torch.finfo(BF16).max,
    "fp16": 65504.0,
    "fp32": torch.finfo(FP32).max,
    "fp8": 448 * 0.02,  # times the layer's scale
    "fp8_token": 448 * MAX_GROUP_SCALE,
    "fp8_ds_mla": 448 * MAX_GROUP_SCALE,
    "nvfp4": 6 * 448 * 0.02,
}


@BACKENDS
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_infinity_is_stored_as_the_largest_number_when_sanitized(device, backend, name):
    step = make_step(name, (128, 0), FP32)
    step.gamma[3], step.gamma[4] = torch.inf, torch.nan
    step.kv[0, 3] = -1.0
    latent, _ = decoded(step.write(device, backend, sanitize=True), [SLOTS[0]])
    assert latent[0, 3].item() == pytest.approx(-LARGEST[name]) and latent[0, 4] == 0


@BACKENDS
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_nan_row_harms_its_own_slot_only(device, backend, name):
    step = make_step(name, num_heads=2)
    sound = step.write(device, backend)
    step.kv[1] = torch.nan
    step.q_rope[1] = torch.nan
    harmed = step.write(device, backend)
    own, others = rows_of(harmed, [SLOTS[1]])
    assert torch.equal(others, rows_of(sound, [SLOTS[1]])[1])
    assert not torch.equal(own, rows_of(sound, [SLOTS[1]])[0])
    kept = [0, 2, 3, 4]
    assert torch.equal(harmed.kv_out[kept], sound.kv_out[kept])
    assert torch.equal(harmed.q_rope[kept], sound.q_rope[kept])


# ---- scales


@BACKENDS
def test_fp8_error_does_not_depend_on_the_scale(device, backend):
    step = make_step("fp8", (256, 32), FP32)
    slots, errors = list(SLOTS.values()), []
    step.kv[:, 256:].clamp_(min=0.25)  # away from 0, where e4m3 has only absolute precision
    for scale in [0.01, 0.5, 4.0]:
        step.scales = (scale, 2 * scale)
        # gamma is scaled along, so that the codes use the same part of e4m3's range
        scaled = replace(step, gamma=step.gamma * scale, kv=step.kv.clone())
        scaled.kv[:, 256:] *= scale
        written = scaled.write(device, backend)
        exact = written.kv_out[list(SLOTS)].double() / scale
        latent, rope = (part / scale for part in decoded(written, slots))
        error = torch.cat([latent, rope], -1) - exact
        errors.append((error.square().mean() / exact.square().mean()).sqrt().item())
    assert max(errors) < 0.04  # e4m3 has 3 mantissa bits: 2.7% is what rounding costs
    assert max(errors) < 1.1 * min(errors)


@BACKENDS
def test_fp8_latent_and_rope_key_have_scales_of_their_own(device, backend):
    step = make_step("fp8", (128, 32), FP32)
    slots = list(SLOTS.values())
    step.scales = (0.5, 4.0)
    written = step.write(device, backend)
    latent, rope = decoded(written, slots)
    exact = written.kv_out[list(SLOTS)].double()
    for part, x, scale in [(latent, exact[:, :128], 0.5), (rope, exact[:, 128:], 4.0)]:
        # half a step of a 3-bit mantissa, or of e4m3's subnormals
        assert ((part - x).abs() <= x.abs() / 16 + scale * 2.0**-10).all()
        assert (part / scale == (part / scale).to(torch.float8_e4m3fn).double()).all()


@BACKENDS
def test_fp8_ds_mla_scale_is_the_power_of_two_above_amax_over_448(device, backend):
    step = make_step("fp8_ds_mla", (512, 64), FP32)
    step.kv[:] = 1.0
    gamma = torch.full((4, 128), 0.5)
    gamma[0, 5], gamma[1], gamma[2, 7], gamma[3, 1] = 336.0, 0.0, -449.0, 448.0
    step.gamma = gamma.flatten()
    written = step.write(device, backend, eps=0.0)
    scales = written.cache.layer(1).group_scales.flatten(0, 1)[SLOTS[0]].tolist()
    assert scales == [1.0, 2.0**-13, 2.0, 1.0]


@BACKENDS
def test_fp8_token_scale_is_amax_over_448(device, backend):
    step, slots = make_step("fp8_token", (512, 64), FP32), list(SLOTS.values())
    step.kv[1, :512] = 0.0

    def scales_and_amax():
        written = step.write(device, backend)
        amax = written.kv_out[REAL, :512].abs().nan_to_num(nan=0.0).amax(-1).numpy()
        return written.cache.token_scales[1].flatten().cpu()[slots].tolist(), amax

    scales, amax = scales_and_amax()
    expected = np.maximum(amax / np.float32(448), np.float32(2.0**-100))
    assert scales == expected.tolist() and scales[1] == 2.0**-100  # a row of zeros
    step.gamma[3] = torch.nan  # does not count
    scales, amax = scales_and_amax()
    assert [scales[i] for i in (0, 2, 3, 4)] == (amax / np.float32(448))[[0, 2, 3, 4]].tolist()
    step.gamma[4] = torch.inf
    scales, _ = scales_and_amax()
    assert [scales[i] for i in (0, 2, 3, 4)] == [MAX_GROUP_SCALE] * 4


@BACKENDS
def test_nvfp4_scale_is_the_e4m3_nearest_to_amax_over_6(device, backend):
    edges = e4m3_edges()
    ratios = edges[(edges >= 2.0**-9) & (edges <= 448)]
    ratios = torch.cat([torch.tensor([0.0, 1e-6, 449.0, 1e9]), ratios])
    step = make_step("nvfp4", (512, 0), FP32, num_tokens=1)
    step.kv[:], step.scales = 1.0, (0.5, 1.0)
    for start in range(0, len(ratios), 32):
        gamma = torch.zeros(32, 16)
        part = ratios[start : start + 32]
        gamma[: len(part), 5] = -6 * part * 0.5
        step.gamma = gamma.flatten()
        written = step.write(device, backend, eps=0.0)
        stored = written.cache.layer(1).group_scales.view(torch.uint8).flatten(0, 1)[SLOTS[0]]
        amax = (gamma.abs().amax(-1) * 2).numpy()
        ratio = torch.from_numpy(np.clip(amax / np.float32(6), 2.0**-9, 448.0))
        assert torch.equal(stored.cpu().long(), nearest_e4m3(ratio)[0])


@BACKENDS
def test_nvfp4_error_is_half_a_step_of_its_groups_grid(device, backend):
    step = make_step("nvfp4", (512, 64), FP32)
    step.gamma *= torch.logspace(-2, 1, 32).repeat_interleave(16)  # each group its own scale
    written = step.write(device, backend)
    latent, rope = decoded(written, list(SLOTS.values()))
    exact, exact_rope = written.kv_out[REAL].double().split([512, 64], dim=-1)
    scales = written.cache.layer(1).group_scales.flatten(0, 1).cpu().double()[list(SLOTS.values())]
    scales = scales.repeat_interleave(16, dim=-1) * np.float32(0.02)
    size = exact.abs() / scales
    # 0.5, 1 and 2 apart up to 2, 4 and 6; a scale rounded down by 1/16 at most leaves up to 6.4
    half_step = 0.25 + 0.25 * (size > 2) + 0.5 * (size > 4)
    assert size.max() <= 6.4
    assert ((latent - exact).abs() <= scales * half_step * (1 + 1e-6)).all()
    amax = exact.unflatten(-1, (32, 16)).abs().amax(-1).repeat_interleave(16, dim=-1)
    assert (scales <= amax / 6 * (1 + 2.0**-4)).all()  # nor is the grid wider than need be
    assert ((rope - exact_rope).abs() <= exact_rope.abs() / 16 + 0.03 * 2.0**-10).all()


@BACKENDS
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_nan_column_harms_itself_or_its_group_where_codes_have_no_nan(device, backend, name):
    step, slots = make_step(name), list(SLOTS.values())
    harmed = range(32, 48) if name == "nvfp4" else range(37, 38)
    step.gamma[37] = 0.0
    sound, _ = decoded(step.write(device, backend), slots)
    step.gamma[37] = torch.nan
    latent, rope = decoded(step.write(device, backend), slots)
    is_harmed = torch.tensor([column in harmed for column in range(128)])
    assert latent[:, is_harmed].isnan().all() and rope.isfinite().all()
    assert torch.equal(latent[:, ~is_harmed], sound[:, ~is_harmed])
    sanitized, _ = decoded(step.write(device, backend, sanitize=True), slots)
    assert torch.equal(sanitized, sound)


def decode_e4m3(code: int) -> float:
    exponent, mantissa = (code >> 3) & 15, code & 7
    if (code & 0x7F) == 0x7F:
        return np.nan
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if code & 0x80 else value


def decode_e2m1(code: int) -> float:
    exponent, mantissa = (code >> 1) & 3, code & 1
    value = mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2)
    return -value if code & 8 else value


def decode_bf16(raw: bytes) -> list[float]:
    return (np.frombuffer(raw, dtype="<u2").astype("<u4") << 16).view("<f4").tolist()


def decode_656(row, beside, scales):
    """512 e4m3, 4 little-endian fp32 scales, 64 bf16, as FlashMLA publishes it."""
    group_scales = struct.unpack("<4f", row[512:528])
    latent = [decode_e4m3(code) * group_scales[i // 128] for i, code in enumerate(row[:512])]
    return latent + decode_bf16(row[528:656])


def decode_640(row, beside, scales):
    """512 e4m3, 64 bf16; one fp32 scale beside them."""
    (scale,) = struct.unpack("<f", beside)
    return [decode_e4m3(code) * scale for code in row[:512]] + decode_bf16(row[512:640])


def decode_352(row, beside, scales):
    """512 e2m1, the even column in the low half of a byte; 32 e4m3 scales; 64 e4m3."""
    latent_scale, rope_scale = (float(np.float32(scale)) for scale in scales)
    codes = [code for byte in row[:256] for code in (byte & 15, byte >> 4)]
    group_scales = [decode_e4m3(code) for code in row[256:288]]
    latent = [
        decode_e2m1(code) * group_scales[i // 16] * latent_scale for i, code in enumerate(codes)
    ]
    return latent + [decode_e4m3(code) * rope_scale for code in row[288:352]]


DECODERS = {"fp8_ds_mla": decode_656, "fp8_token": decode_640, "nvfp4": decode_352}


def raw_row(cache, layer, slot):
    """A token's bytes by their place in the one allocation: rows of all layers, then scales."""
    row_bytes = {"fp8_ds_mla": 656, "fp8_token": 640, "nvfp4": 352}[cache.format.name]
    slots_per_layer = cache.num_pages * cache.page_size
    index, num_rows = layer * slots_per_layer + slot, cache.num_layers * slots_per_layer
    raw = bytes(cache.buffer.tolist())
    start = num_rows * row_bytes + 4 * index
    return raw[index * row_bytes : (index + 1) * row_bytes], raw[start : start + 4]


@BACKENDS
@pytest.mark.parametrize("name", DECODERS)
def test_rows_decode_from_their_bytes_to_what_is_gathered(device, backend, name):
    step = make_step(name, (512, 64), BF16)
    step.gamma *= torch.logspace(-3, 2, 4).repeat_interleave(128)  # four different scales
    step.kv[2, 9] = torch.nan
    written = step.write(device, backend)
    batch = PagedBatch(*step.batch, device=device)
    gathered = gather_kv(written.cache.view(1, batch), dtype=FP32, backend=backend).cpu()
    places = [(0, 3), (0, 4), (0, 5), (2, 2), (2, 3)]
    for token, (request, position) in enumerate(places):
        raw = raw_row(written.cache, 1, SLOTS[token])
        expected = torch.tensor(DECODERS[name](*raw, step.scales), dtype=FP32)
        got = gathered[request, position]
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
        exact = written.kv_out[token].float()
        assert exact.isnan().any() == (token == 2) == expected.isnan().any()
        if token != 2 and name == "fp8_ds_mla":  # of the others errors are bounded above
            torch.testing.assert_close(expected[:512], exact[:512], rtol=1 / 15, atol=1e-4)
        if token != 2 and name != "nvfp4":
            assert torch.equal(expected[512:], exact[512:])  # bf16 in, bf16 out


# ---- where it is stored


@BACKENDS
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("dims", [(128, 32), (384, 48)], ids=["whole rows", "padded rows"])
def test_only_the_slots_of_new_tokens_change(device, backend, dims, name):
    step = make_step(name, dims)
    written = step.write(device, backend)
    own, others = rows_of(written, list(SLOTS.values()))
    assert (others == CANARY).all()
    end = field_bytes(step.fmt)
    assert (own[:, end : step.fmt.row_bytes] == CANARY).all()
    assert (own[:, :end] != CANARY).double().mean() > 0.95
    assert (own[:, step.fmt.row_bytes :] != CANARY).any(-1).all() or not step.fmt.token_scaled
    assert len({tuple(row.tolist()) for row in own}) == len(SLOTS)


@BACKENDS
def test_padding_gives_zero_rows_and_is_never_read_into_others(device, backend):
    step = make_step(num_heads=2)
    sound = step.write(device, backend)
    step.kv[PADDING] = torch.nan
    step.q_rope[PADDING] = torch.inf
    positions = torch.full((NUM_TOKENS,), 2**31 - 1, dtype=torch.int32)
    positions[REAL] = torch.tensor(POSITIONS, dtype=torch.int32)
    for given in (None, positions):
        padded = replace(step, positions=given).write(device, backend)
        same(padded, sound)
        assert (padded.kv_out[PADDING] == 0).all() and (padded.q_rope[PADDING] == 0).all()


@BACKENDS
@pytest.mark.parametrize("num_more", [9, 2**30])  # just behind the row, where the next one starts
def test_token_past_its_row_of_the_page_table_is_padding(device, backend, num_more):
    step = make_step(num_heads=1)
    cache, batch = step.new_cache(device), PagedBatch(*step.batch, device=device)
    view = cache.view(0, batch)
    batch.cache_lengths += num_more  # as lengths that only the device knows may be
    kv, q_rope = step.kv.to(device), step.q_rope.to(device)
    write_kv(
        view, kv, step.freqs.to(device), step.gamma.to(device),
        q_rope=q_rope, q_rope_out=q_rope, kv_out=kv, backend=backend,
    )  # fmt: skip
    assert (cache.buffer == CANARY).all() and (kv == 0).all() and (q_rope == 0).all()


@BACKENDS
@pytest.mark.parametrize(
    "batch",
    [([0], [], []), ([0, 0, 0], [5, 0], [[1, 2], [3, -1]]), ([0, 0], [0], [[]])],
    ids=["no requests", "empty requests", "no pages"],
)
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_step_without_tokens_writes_nothing(device, backend, batch, num_tokens):
    step = replace(make_step(num_heads=2, num_tokens=num_tokens), batch=batch)
    written = step.write(device, backend)
    assert (written.storage == CANARY).all()
    assert (written.kv_out == 0).all() and (written.q_rope == 0).all()
    if not any(batch[1]):  # no position at all: the table may be empty
        same(replace(step, freqs=step.freqs[:0]).write(device, backend), written)


@BACKENDS
@pytest.mark.parametrize("name", ["fp16", "fp8", "fp8_token", "fp8_ds_mla", "nvfp4"])
def test_rows_do_not_depend_on_pages_or_page_size(device, backend, name):
    """20 cached tokens and 3 new: pages that end before, within and after them."""
    step = make_step(name, num_tokens=5)
    step.freqs = rope_freqs(24, step.fmt.rope_dim)
    rows = []
    for page_size in [1, 3, 3, 16, 64, 128]:
        seq_lens, num_pages = [23, 2], 30
        table = shuffled_table(seq_lens, page_size, num_pages)
        step = replace(
            step, batch=([0, 3, 5], [20, 0], table), page_size=page_size, num_pages=num_pages
        )
        cache = step.write(device, backend).cache
        batch = PagedBatch(*step.batch, device=device)
        dense = gather_kv(cache.view(1, batch), dtype=FP32, backend=backend)
        rows.append(torch.cat([dense[0, 20:23], dense[1, :2]]))
        assert rows[-1].isfinite().all() and torch.equal(rows[-1], rows[0])


@BACKENDS
def test_row_does_not_depend_on_its_neighbours_and_repeats(device, backend):
    step = make_step("fp8_ds_mla", num_heads=2)
    together = step.write(device, backend)
    same(step.write(device, backend), together)
    alone = replace(
        step, kv=step.kv[1:2], q_rope=step.q_rope[1:2], batch=([0, 1], [POSITIONS[1]], [[6, 0]])
    ).write(device, backend)
    assert torch.equal(alone.storage[1, 0, 0], together.storage[1].flatten(0, 1)[SLOTS[1]])
    assert torch.equal(alone.q_rope[0], together.q_rope[1])


@BACKENDS
@pytest.mark.parametrize(
    "name, dtype", [*zip(FORMAT_NAMES, itertools.cycle([torch.int32, torch.int64]))], ids=str
)
def test_slot_mapping_gives_the_bytes_of_the_batch_that_it_stands_for(device, backend, name, dtype):
    step = make_query_step(name)
    paged = step.write(device, backend)
    by_slots(step)
    step.slot_mapping = step.slot_mapping.to(dtype)
    step.positions = step.positions.to(dtype)
    assert isinstance(step.target(paged.cache), LayerPages)
    same(step.write(device, backend), paged)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slot_outside_the_cache_is_padding(device, backend, dtype):
    """Just outside, and where an int32 product of slot and row would come back inside."""
    step, num_slots = make_query_step("fp8_token"), NUM_PAGES * PAGE_SIZE
    step.positions = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    outside = [-1, -2, num_slots, num_slots + 1, 2**31 - 1, -(2**31)]
    if dtype == torch.int64:
        outside[4:] = [2**32, -(2**32)]
    step.slot_mapping = torch.tensor([0, num_slots - 1, *outside, 5], dtype=dtype)
    written = step.write(device, backend)
    own, others = rows_of(written, [0, num_slots - 1, 5])
    assert (others == CANARY).all() and (own != CANARY).any(-1).all()
    for out in written.outs.values():
        assert (out[2:8] == 0).all() and (out[[0, 1, 8]] != 0).any(-1).all()


@BACKENDS
def test_slot_mapping_needs_no_positions_and_no_table_without_rope(device, backend):
    step = make_step("fp8", (128, 0))
    paged = step.write(device, backend)
    by_slots(step)
    step.positions = step.freqs = None
    same(step.write(device, backend), paged)


@BACKENDS
def test_step_of_slots_without_tokens_writes_nothing(device, backend):
    step = make_step(num_tokens=0, num_heads=2)
    step.slot_mapping = step.positions = torch.zeros(0, dtype=torch.int64)
    assert (step.write(device, backend).storage == CANARY).all()


BAD_SLOTS = {
    "positions missing": (
        {"positions": None},
        ArgumentError,
        r"positions: want \[T\] with slot_mapping, got None",
    ),
    "dims": (
        {"slot_mapping": torch.zeros(8).long()},
        ShapeMismatchError,
        r"slot_mapping: want \[T=9\], got \[8\]",
    ),
    "dtype": (
        {"slot_mapping": torch.zeros(9)},
        UnsupportedDtypeError,
        "slot_mapping: want int32 or int64, got torch.float32",
    ),
    "strides": (
        {"slot_mapping": torch.zeros(18).long()[::2]},
        LayoutError,
        r"slot_mapping: want contiguous, got strides \[2\]",
    ),
    "device": (
        {"slot_mapping": torch.zeros(9, device="meta").long()},
        DeviceError,
        "slot_mapping: want device .*, got meta",
    ),
    "neither slots nor batch": (
        {"slot_mapping": None},
        ArgumentError,
        r"slot_mapping: want it with PagedKVCache.layer\(...\) and without a batch, or neither",
    ),
    "freqs missing": ({"freqs": None}, ArgumentError, r"freqs: want \[any, R=32\], got None"),
}


@pytest.mark.parametrize("case", BAD_SLOTS)
def test_bad_slot_mapping_is_named_and_changes_nothing(device, case):
    assert_refused(by_slots(make_step("fp8", num_heads=2)), device, *BAD_SLOTS[case])


def test_slot_mapping_with_a_batch_is_refused(device):
    step = make_step("fp8")
    slots = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    message = r"slot_mapping: want it with PagedKVCache.layer\(...\) and without a batch"

    def view(cache):
        return cache.view(0, PagedBatch(*step.batch, device=device))

    assert_refused(step, device, {"slot_mapping": slots}, ArgumentError, message, target=view)


@pytest.fixture
def untouched_memory(monkeypatch):
    """``torch.empty`` as it comes: what nobody writes to costs nothing."""
    monkeypatch.setattr(torch, "empty", torch.empty.__wrapped__)


@pytest.mark.parametrize("name", ["fp8", "fp8_token", "fp8_ds_mla", "nvfp4"])
def test_addresses_past_two_to_the_31_bytes(device, untouched_memory, name):
    """4 million slots, or of nvfp4 6 million; the last pages are past what int32 counts."""
    fmt, page_size = CacheFormat(name), 64
    num_pages = max(4_000_000, 2**31 // fmt.row_bytes + 64_000) // page_size
    assert (num_pages - 100) * page_size * fmt.row_bytes > 2**31
    cache = PagedKVCache(fmt, num_layers=1, num_pages=num_pages, page_size=page_size, device=device)
    step = replace(make_step(name, (512, 64), num_tokens=2), scales=(1.0, 1.0))
    step.page_size, step.num_pages, step.batch = page_size, 1, ([0, 2], [62], [[0]])
    step.freqs = rope_freqs(64, 64)
    expected = step.write("cpu", "reference", layer=0)
    dense = gather_kv(step.target(expected.cache, 0), start=62, length=2, dtype=FP32)
    last, arguments = num_pages - 1, step.arguments(device)
    slots = torch.tensor([62, 63], dtype=torch.int32, device=device)

    def page_bytes(page):
        beside = [] if cache.token_scales is None else [cache.token_scales[0, page, :, None]]
        parts = [part.view(torch.uint8) for part in (cache.storage[0, page], *beside)]
        return torch.cat(parts, dim=-1).cpu()

    def clear(page):
        cache.storage[0, page] = CANARY
        if cache.token_scales is not None:
            cache.token_scales[0, page].view(torch.uint8).fill_(CANARY)

    for page, backend in [(last, "triton"), (last - 1, "reference")]:
        clear(page)
        view = cache.view(0, PagedBatch([0, 2], [62], [[page]], device=device))
        write_kv(view, **arguments, backend=backend)
        assert torch.equal(page_bytes(page), expected.storage[0, 0])
        gathered = gather_kv(view, start=62, length=2, dtype=FP32, backend=backend)
        assert torch.equal(gathered.cpu(), dense)
        for other in (0, last - 5):
            copy_pages(cache, cache, [page], [other], backend=backend)
            assert torch.equal(page_bytes(other), expected.storage[0, 0])
        clear(last - 2)
        by_slot = {"slot_mapping": (last - 2) * page_size + slots, "positions": slots}
        write_kv(cache.layer(0), **{**arguments, **by_slot}, backend=backend)
        assert torch.equal(page_bytes(last - 2), expected.storage[0, 0])


def spread(arguments, name, far, start, strides):
    """Put an argument into ``far`` with these strides; where the next may start."""
    near = arguments[name]
    arguments[name] = far.as_strided(near.shape, strides, start).copy_(near)
    return start + near.numel()


def test_rows_of_every_tensor_may_lie_past_two_to_the_31_elements(device, untouched_memory):
    """Three tokens or heads 2**30 elements apart: strides fit an int32, the last place does not."""
    step = make_query_step("bf16", num_tokens=3)
    expected = step.write("cpu", "reference")
    arguments = step.arguments(device)
    far, start = torch.empty(2**31 + 8192, dtype=BF16, device=device), 0
    for name in ("kv", "kv_out", "q_latent", "q_latent_out", "q_rope", "q_nope_out"):
        start = spread(arguments, name, far, start, (2**30, *arguments[name].stride()[1:]))
    for name in ("q_rope_out", "q_nope"):
        start = spread(arguments, name, far, start, (arguments[name].shape[-1], 2**30, 1))
    cache = step.new_cache(device)
    write_kv(step.target(cache), **arguments, backend="triton")
    same(written(cache, arguments), expected)


# ---- kv_out, positions


@BACKENDS
@pytest.mark.parametrize("rope_style", ["interleaved", "half"])
def test_kv_out_may_be_kv_itself_and_rows_of_a_wider_tensor(device, backend, rope_style):
    step = make_step("fp8_ds_mla", (128, 32))
    expected = step.write(device, backend, rope_style=rope_style)
    row_dim = step.fmt.row_dim
    wide = torch.full((NUM_TOKENS, 5 + row_dim + 3), 7.0, dtype=BF16, device=device)
    kv = wide[:, 5 : 5 + row_dim]
    kv.copy_(step.kv)
    cache = step.new_cache(device)
    write_kv(
        cache.view(1, PagedBatch(*step.batch, device=device)), kv, step.freqs.to(device),
        step.gamma.to(device), kv_out=kv, rope_style=rope_style, backend=backend,
    )  # fmt: skip
    assert torch.equal(token_bytes(cache), expected.storage)
    assert torch.equal(kv.cpu(), expected.kv_out)
    assert (wide[:, :5] == 7).all() and (wide[:, 5 + row_dim :] == 7).all()


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_change_the_rotation_and_not_the_slot(device, backend, dtype):
    step = make_step("fp32", num_heads=1)
    plain = step.write(device, backend)
    positions = torch.zeros(NUM_TOKENS, dtype=dtype)
    positions[REAL] = torch.tensor(POSITIONS, dtype=dtype) + 5  # no multiple of the page size
    later = replace(step, positions=positions)
    shifted = replace(later, freqs=torch.cat([torch.full((5, 32), torch.nan), step.freqs]))
    same(shifted.write(device, backend), plain)
    moved = later.write(device, backend)
    slots = list(SLOTS.values())
    assert torch.equal(decoded(moved, slots)[0], decoded(plain, slots)[0])
    assert not torch.equal(decoded(moved, slots)[1], decoded(plain, slots)[1])
    assert torch.equal(rows_of(moved, slots)[1], rows_of(plain, slots)[1])


@BACKENDS
def test_position_outside_the_table_gives_nan_and_reads_nothing(device, backend):
    step = make_step("fp32", num_heads=1)
    around = torch.ones(3 * 12, 32)  # finite before and after the table
    around[12:24] = step.freqs
    freqs = around.to(device)[12:24]
    positions = torch.zeros(NUM_TOKENS, dtype=torch.int64)
    positions[:5] = torch.tensor([-1, 12, 3, 2**31, -(2**40)])
    view = step.new_cache(device).view(0, PagedBatch(*step.batch, device=device))
    q_rope, kv_out = step.q_rope.to(device), torch.empty_like(step.kv).to(device)
    write_kv(
        view, step.kv.to(device), freqs, step.gamma.to(device), q_rope=q_rope, q_rope_out=q_rope,
        kv_out=kv_out, positions=positions.to(device), backend=backend,
    )  # fmt: skip
    latent, rope = kv_out.cpu().float().split([128, 32], dim=-1)
    assert latent.isfinite().all()
    outside = [0, 1, 3, 4]
    assert rope[outside].isnan().all() and q_rope[outside].isnan().all()
    inside = [2, *PADDING]
    assert rope[inside].isfinite().all() and q_rope[inside].isfinite().all()


def test_bare_call_is_complete(device):
    step = make_step("bf16")
    expected = step.write("cpu", "reference")
    cache = step.new_cache(device)
    view = cache.view(1, PagedBatch(*step.batch, device=device))
    assert write_kv(view, step.kv.to(device), step.freqs.to(device), step.gamma.to(device)) is None
    assert torch.equal(token_bytes(cache), expected.storage)


def test_reference_runs_in_fp64(device):
    step = make_step("fp32", dtype=torch.float64, gamma_dtype=torch.float64, num_heads=1)
    step.freqs = step.freqs.double()
    exact = step.write(device, "reference")
    y = torch.nn.functional.rms_norm(step.kv[:5, :128], (128,), step.gamma, eps=1e-6)
    torch.testing.assert_close(exact.kv_out[:5, :128], y, rtol=1e-14, atol=1e-14)
    with pytest.raises(UnsupportedError, match=r"triton.*fp64 is for the reference"):
        step.write(device, "triton")


@BACKENDS
@pytest.mark.parametrize("rounding", ["once", "hf"])
def test_gamma_in_fp64_rounds_nothing_more(device, backend, rounding):
    step = make_step("fp32", gamma_dtype=FP32)
    expected = step.write("cpu", "reference")
    step.gamma = step.gamma.double()
    same(step.write(device, backend, rounding=rounding), expected)


@BACKENDS
def test_latent_of_an_odd_width_leaves_the_rope_key_where_it_can_be_read(device, backend):
    step = make_step("fp8_token", (127, 32))
    expected = step.write("cpu", "reference")
    written = step.write(device, backend)
    same(written, expected)
    _, rope = decoded(written, list(SLOTS.values()))
    assert torch.equal(rope, written.kv_out[list(SLOTS), 127:].double())


@BACKENDS
def test_table_without_columns_may_be_of_any_length(device, backend):
    step = make_step("bf16", (128, 0))
    expected = step.write("cpu", "reference")
    step.freqs = torch.ones(1, 0)
    same(step.write(device, backend), expected)


# ---- what is refused


BAD_ARGUMENTS = {
    "kv dims": (
        {"kv": torch.randn(9, 161)},
        ShapeMismatchError,
        r"kv: want \[T=any, K=160\], got \[9, 161\]",
    ),
    "kv rank": (
        {"kv": torch.randn(160)},
        ShapeMismatchError,
        r"kv: want \[T=any, K=160\], got \[160\]",
    ),
    "kv dtype": (
        {"kv": torch.ones(9, 160, dtype=torch.int32)},
        UnsupportedDtypeError,
        "kv: want bfloat16 or float16 or float32 or float64, got torch.int32",
    ),
    "kv device": (
        {"kv": torch.ones(9, 160, device="meta")},
        DeviceError,
        "kv: want device .*, got meta",
    ),
    "kv strides": (
        {"kv": torch.randn(160, 9).T},
        LayoutError,
        r"kv: want a contiguous last dim, got strides \[1, 9\]",
    ),
    "kv type": ({"kv": [[1.0]]}, UnsupportedDtypeError, "kv: want a tensor, got list"),
    "too few tokens": (
        {"kv": torch.randn(6, 160), "kv_out": None, "q_rope": None, "q_rope_out": None},
        ArgumentError,
        "kv: want at least 7 tokens, got 6",
    ),
    "gamma dims": (
        {"gamma": torch.ones(64)},
        ShapeMismatchError,
        r"gamma: want \[L=128\], got \[64\]",
    ),
    "gamma dtype": (
        {"gamma": torch.ones(128).long()},
        UnsupportedDtypeError,
        "gamma: want .*, got torch.int64",
    ),
    "gamma device": (
        {"gamma": torch.ones(128, device="meta")},
        DeviceError,
        "gamma: want device .*, got meta",
    ),
    "gamma strides": (
        {"gamma": torch.ones(256)[::2]},
        LayoutError,
        r"gamma: want contiguous, got strides \[2\]",
    ),
    "freqs dims": (
        {"freqs": torch.ones(12, 16)},
        ShapeMismatchError,
        r"freqs: want \[N=any, R=32\], got \[12, 16\]",
    ),
    "freqs missing": ({"freqs": None}, ArgumentError, r"freqs: want \[any, R=32\], got None"),
    "freqs short": (
        {"freqs": torch.ones(8, 32)},
        ArgumentError,
        "freqs: want at least 9 rows for the longest sequence, got 8",
    ),
    "freqs strides": (
        {"freqs": torch.ones(12, 64)[:, :32]},
        LayoutError,
        r"freqs: want contiguous, got strides \[64, 1\]",
    ),
    "freqs device": (
        {"freqs": torch.ones(12, 32, device="meta")},
        DeviceError,
        "freqs: want device .*, got meta",
    ),
    "only q_rope": (
        {"q_rope_out": None},
        ArgumentError,
        "q_rope, q_rope_out: want both or neither",
    ),
    "only q_rope_out": (
        {"q_rope": None},
        ArgumentError,
        "q_rope, q_rope_out: want both or neither",
    ),
    "q_rope tokens": (
        {"q_rope": torch.ones(8, 2, 32)},
        ShapeMismatchError,
        r"q_rope: want \[T=9, H=any, R=32\], got \[8, 2, 32\]",
    ),
    "q_rope dims": (
        {"q_rope": torch.ones(9, 2, 64)},
        ShapeMismatchError,
        r"q_rope: want \[T=9, H=any, R=32\], got \[9, 2, 64\]",
    ),
    "q_rope dtype": (
        {"q_rope": torch.ones(9, 2, 32).half()},
        UnsupportedDtypeError,
        "q_rope: want float32, got torch.float16",
    ),
    "q_rope strides": (
        {"q_rope": torch.ones(9, 2, 64)[..., ::2]},
        LayoutError,
        r"q_rope: want a contiguous last dim, got strides \[128, 64, 2\]",
    ),
    "head count": (
        {"q_rope_out": torch.ones(9, 3, 32)},
        ShapeMismatchError,
        r"q_rope_out: want \[T=9, H=2, R=32\], got \[9, 3, 32\]",
    ),
    "q_rope_out dtype": (
        {"q_rope_out": torch.ones(9, 2, 32).bfloat16()},
        UnsupportedDtypeError,
        "q_rope_out: want float32, got torch.bfloat16",
    ),
    "q_rope_out device": (
        {"q_rope_out": torch.ones(9, 2, 32, device="meta")},
        DeviceError,
        "q_rope_out: want device .*, got meta",
    ),
    "kv_out dims": (
        {"kv_out": torch.ones(9, 128)},
        ShapeMismatchError,
        r"kv_out: want \[T=9, K=160\], got \[9, 128\]",
    ),
    "kv_out dtype": (
        {"kv_out": torch.ones(9, 160).half()},
        UnsupportedDtypeError,
        "kv_out: want float32, got torch.float16",
    ),
    "kv_out strides": (
        {"kv_out": torch.ones(160, 9).T},
        LayoutError,
        "kv_out: want a contiguous last dim",
    ),
    "positions dtype": (
        {"positions": torch.ones(9)},
        UnsupportedDtypeError,
        "positions: want int32 or int64, got torch.float32",
    ),
    "positions dims": (
        {"positions": torch.ones(7).int()},
        ShapeMismatchError,
        r"positions: want \[T=9\], got \[7\]",
    ),
    "eps negative": ({"eps": -1e-6}, ArgumentError, "eps: want finite and >= 0, got -1e-06"),
    "eps nan": ({"eps": float("nan")}, ArgumentError, "eps: want finite and >= 0, got nan"),
    "rope_style": (
        {"rope_style": "neox"},
        ArgumentError,
        "rope_style: want interleaved or half, got 'neox'",
    ),
    "rounding": ({"rounding": "twice"}, ArgumentError, "rounding: want once or hf, got 'twice'"),
    "backend": (
        {"backend": "cuda"},
        ArgumentError,
        "backend: want one of auto, triton, reference; got 'cuda'",
    ),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_argument_is_named_and_changes_nothing(device, case):
    assert_refused(make_step("fp8", dtype=FP32, num_heads=2), device, *BAD_ARGUMENTS[case])


def test_output_over_its_input_needs_the_same_strides(device):
    step = make_step("bf16")
    view = step.new_cache(device).view(0, PagedBatch(*step.batch, device=device))
    buffer = torch.ones(NUM_TOKENS, 4, 32, dtype=BF16, device=device)
    kv, freqs, gamma = step.kv.to(device), step.freqs.to(device), step.gamma.to(device)
    with pytest.raises(LayoutError, match=r"q_rope_out: want the input's strides .* in place"):
        write_kv(
            view, kv, freqs, gamma, q_rope=buffer[:, :2], q_rope_out=buffer.view(-1, 2, 32)[:9]
        )
    wide = torch.ones(2 * NUM_TOKENS, 160, dtype=BF16, device=device)
    with pytest.raises(LayoutError, match=r"kv_out: want the input's strides .* in place"):
        write_kv(view, wide[::2], freqs, gamma, kv_out=wide[:NUM_TOKENS])
    assert (buffer == 1).all() and (wide == 1).all()


@pytest.mark.parametrize(
    "table, message",
    [
        ([[5, 2, -1], [1, 4, 0], [3, 7, -1]], "page_table: want page ids below num_pages=7, got 7"),
        (
            [[5, 2], [1, 4], [3, -1]],
            "page_table: want at least 3 columns for a sequence of 9 tokens at page_size=4, got 2",
        ),
    ],
)
def test_page_table_that_does_not_fit_the_cache_is_refused(device, table, message):
    cache = make_step().new_cache(device)
    with pytest.raises(ArgumentError, match=message):
        cache.view(0, PagedBatch(OFFSETS, LENGTHS, table, device=device))
