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


def test_fp8_ds_mla_row_is_the_published_656_bytes():
    fmt = CacheFormat("fp8_ds_mla", kv_lora_rank=512, rope_dim=64)
    assert (fmt.latent_dtype, fmt.rope_dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert (fmt.num_groups, fmt.scales_offset, fmt.rope_offset, fmt.row_bytes) == (4, 512, 528, 656)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("dims", DIMS)
def test_fields_follow_one_another_aligned_and_rows_end_on_16_bytes(name, dims):
    fmt = CacheFormat(name, *dims)
    assert fmt.scales_offset == fmt.kv_lora_rank * fmt.latent_dtype.itemsize
    assert fmt.rope_offset == fmt.scales_offset + 4 * fmt.num_groups
    assert fmt.scales_offset % 4 == 0 or not fmt.group_scaled
    assert fmt.rope_offset % fmt.rope_dtype.itemsize == 0
    unused = fmt.row_bytes - fmt.rope_offset - fmt.rope_dim * fmt.rope_dtype.itemsize
    assert fmt.row_bytes % 16 == 0 and 0 <= unused < 16


def test_only_fp8_formats_have_scales():
    kinds = {
        name: (CacheFormat(name).layer_scaled, CacheFormat(name).group_scaled)
        for name in FORMAT_NAMES
    }
    scaled = {name: kind for name, kind in kinds.items() if any(kind)}
    assert scaled == {"fp8": (True, False), "fp8_ds_mla": (False, True)}


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
        (("fp4",), "name: want one of bf16, fp16, fp32, fp8, fp8_ds_mla; got 'fp4'"),
        (("bf16", 0), "kv_lora_rank: want >= 1, got 0"),
        (("bf16", 512, -2), "rope_dim: want an even number >= 0, got -2"),
        (("bf16", 512, 63), "rope_dim: want an even number >= 0, got 63"),
        (("fp8_ds_mla", 192), "kv_lora_rank: want a multiple of 128 for fp8_ds_mla, got 192"),
    ],
)
def test_bad_argument_is_named(arguments, message):
    with pytest.raises(ArgumentError, match=message) as raised:
        CacheFormat(*arguments)
    assert isinstance(raised.value, KvkernError) and isinstance(raised.value, ValueError)
