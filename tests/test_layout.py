import pytest
import torch

from kvkern import ArgumentError, CacheFormat, KvkernError
from kvkern.layout import FORMAT_NAMES

DIMS = [(512, 64), (256, 32), (128, 0), (384, 48)]


@pytest.mark.parametrize(
    "name, row_bytes", [("bf16", 1152), ("fp16", 1152), ("fp32", 2304), ("fp8", 576)]
)
def test_row_is_latent_then_rope_key(name, row_bytes):
    fmt = CacheFormat(name)
    assert (fmt.kv_lora_rank, fmt.rope_dim, fmt.row_dim) == (512, 64, 576)
    assert fmt.rope_offset == 512 * fmt.latent_dtype.itemsize
    assert fmt.row_bytes == row_bytes and fmt.num_groups == 0


def test_fp8_token_row_has_its_scale_beside_it():
    fmt = CacheFormat("fp8_token", kv_lora_rank=512, rope_dim=64)
    assert (fmt.latent_dtype, fmt.rope_dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert (fmt.rope_offset, fmt.row_bytes, fmt.bytes_per_token) == (512, 640, 644)
    assert (fmt.group_size, fmt.num_groups, fmt.scale_dtype) == (512, 1, torch.float32)


def test_nvfp4_row_is_two_columns_a_byte_then_a_scale_per_16_then_the_rope_key():
    fmt = CacheFormat("nvfp4", kv_lora_rank=512, rope_dim=64)
    assert (fmt.latent_width, fmt.scales_offset, fmt.rope_offset) == (256, 256, 288)
    assert (fmt.row_bytes, fmt.bytes_per_token) == (352, 352)
    assert (fmt.group_size, fmt.num_groups) == (16, 32)
    assert fmt.scale_dtype == fmt.rope_dtype == torch.float8_e4m3fn


def test_fp8_ds_mla_row_is_the_published_656_bytes():
    fmt = CacheFormat("fp8_ds_mla", kv_lora_rank=512, rope_dim=64)
    assert (fmt.latent_dtype, fmt.rope_dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert (fmt.num_groups, fmt.scales_offset, fmt.rope_offset, fmt.row_bytes) == (4, 512, 528, 656)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("dims", DIMS)
def test_fields_follow_one_another_aligned_and_rows_end_on_16_bytes(name, dims):
    fmt = CacheFormat(name, *dims)
    bits = {"bf16": 16, "fp16": 16, "fp32": 32, "nvfp4": 4}.get(name, 8)
    scale_bytes = {"fp8_ds_mla": 4 * dims[0] // 128, "nvfp4": dims[0] // 16}.get(name, 0)
    assert fmt.scales_offset == dims[0] * bits // 8
    assert fmt.rope_offset == fmt.scales_offset + scale_bytes
    assert fmt.scales_offset % fmt.scale_dtype.itemsize == 0 or not fmt.group_scaled
    assert fmt.rope_offset % fmt.rope_dtype.itemsize == 0
    unused = fmt.row_bytes - fmt.rope_offset - fmt.rope_dim * fmt.rope_dtype.itemsize
    assert fmt.row_bytes % 16 == 0 and 0 <= unused < 16


def test_formats_of_8_bits_and_fewer_have_scales_of_layers_groups_or_both():
    kinds = {}
    for fmt in map(CacheFormat, FORMAT_NAMES):
        assert fmt.is_quantised == (fmt.layer_scaled or fmt.group_scaled)
        if fmt.is_quantised:
            kinds[fmt.name] = (fmt.layer_scaled, fmt.group_size, fmt.num_groups)
    assert kinds == {
        "fp8": (True, 0, 0),
        "fp8_token": (False, 512, 1),
        "fp8_ds_mla": (False, 128, 4),
        "nvfp4": (True, 16, 32),
    }


def test_largest_latent_is_what_the_stored_type_can_hold():
    largest = {name: CacheFormat(name).latent_max for name in FORMAT_NAMES}
    assert largest == {
        "bf16": 255 * 2.0**120,
        "fp16": 65504.0,
        "fp32": (2 - 2.0**-23) * 2.0**127,
        "nvfp4": 6.0,
        **dict.fromkeys(["fp8", "fp8_token", "fp8_ds_mla"], 448.0),
    }


def test_equal_arguments_make_equal_formats_that_cannot_change():
    fmt = CacheFormat("fp8", 256, 32)
    assert fmt == CacheFormat("fp8", kv_lora_rank=256, rope_dim=32) and hash(fmt) == hash(
        CacheFormat("fp8", 256, 32)
    )
    assert fmt != CacheFormat("fp8", 256, 64) and fmt != CacheFormat("fp16", 256, 32)
    with pytest.raises(AttributeError):
        fmt.rope_dim = 64


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("fp4",), f"name: want one of {', '.join(FORMAT_NAMES)}; got 'fp4'"),
        (("bf16", 0), "kv_lora_rank: want >= 1, got 0"),
        (("bf16", 512, -2), "rope_dim: want an even number >= 0, got -2"),
        (("bf16", 512, 63), "rope_dim: want an even number >= 0, got 63"),
        (("fp8_ds_mla", 192), "kv_lora_rank: want a multiple of 128 for fp8_ds_mla, got 192"),
        (("nvfp4", 200), "kv_lora_rank: want a multiple of 16 for nvfp4, got 200"),
    ],
)
def test_bad_argument_is_named(arguments, message):
    with pytest.raises(ArgumentError, match=message) as raised:
        CacheFormat(*arguments)
    assert isinstance(raised.value, KvkernError) and isinstance(raised.value, ValueError)
