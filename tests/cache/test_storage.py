import pytest
import torch

from kvkern import (
    ArgumentError,
    CacheFormat,
    DeviceError,
    KvkernError,
    PageAllocator,
    PagedBatch,
    PagedKVCache,
)
from kvkern.layout import FORMAT_NAMES

SIZES = {"num_layers": 3, "num_pages": 5, "page_size": 4}
LAYER_SCALED = [name for name in FORMAT_NAMES if CacheFormat(name).layer_scaled]
UNSCALED = [name for name in FORMAT_NAMES if name not in LAYER_SCALED]


def make_cache(device, name="fp8_ds_mla", dims=(384, 48), **options):
    return PagedKVCache(CacheFormat(name, *dims), device=device, **(SIZES | options))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_cache_is_one_allocation_of_rows_and_the_scales_beside_them(device, name):
    cache = make_cache(device, name, page_size=3)
    row_bytes, scale_bytes = cache.format.row_bytes, 4 if name == "fp8_token" else 0
    assert (cache.num_layers, cache.num_pages, cache.page_size) == (3, 5, 3)
    assert cache.storage.shape == (3, 5, 3, row_bytes) and cache.storage.is_contiguous()
    if scale_bytes:
        assert cache.token_scales.shape == (3, 5, 3) and cache.token_scales.is_contiguous()
        assert cache.token_scales.dtype == torch.float32
    else:
        assert cache.token_scales is None
    assert cache.num_bytes == cache.buffer.untyped_storage().nbytes()
    assert cache.num_bytes == 3 * 5 * 3 * (row_bytes + scale_bytes)
    assert cache.page_bytes == 3 * 3 * (row_bytes + scale_bytes)
    assert cache.device.type == device
    views = [cache.storage, cache.token_scales]
    for layer in map(cache.layer, range(3)):
        views += [layer.latent, layer.rope, layer.group_scales]
    whole = cache.buffer.untyped_storage().data_ptr()
    assert {v.untyped_storage().data_ptr() for v in views if v is not None} == {whole}


def test_every_byte_is_a_rows_or_a_scales_and_none_is_both(device):
    cache = make_cache(device, "fp8_token")
    cache.buffer.zero_()
    cache.storage.fill_(1)
    cache.token_scales.view(torch.uint8).add_(2)
    assert (cache.buffer[: cache.storage.numel()] == 1).all()
    assert (cache.buffer[cache.storage.numel() :] == 2).all()


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("dims", [(512, 64), (384, 48), (128, 0)])
def test_fields_are_the_bytes_that_the_format_says(device, name, dims):
    """Writing a field through its typed view changes its own bytes of its own slot, only."""
    cache = make_cache(device, name, dims)
    fmt, pages = cache.format, cache.layer(1)
    assert (pages.num_pages, pages.page_size, pages.device) == (5, 4, cache.device)
    assert pages.num_slots == 20
    latent_width = dims[0] // 2 if name == "nvfp4" else dims[0]
    assert pages.latent.shape == (5, 4, latent_width)
    assert pages.rope.shape == (5, 4, fmt.rope_dim)
    assert (pages.latent.dtype, pages.rope.dtype) == (fmt.latent_dtype, fmt.rope_dtype)
    slot = (1 * 5 + 3) * 4 + 2  # layer 1, page 3, row 2
    row = slot * fmt.row_bytes
    fields = [(pages.latent, row), (pages.rope, row + fmt.rope_offset)]
    if fmt.group_scaled:
        assert pages.group_scales.dtype == fmt.scale_dtype
        assert pages.group_scales.shape == (5, 4, fmt.num_groups)
        beside = cache.storage.numel() + slot * 4
        fields.append((pages.group_scales, beside if fmt.token_scaled else row + fmt.scales_offset))
    else:
        assert pages.group_scales is None
    for field, start in fields:
        cache.buffer.fill_(0xA5)
        expected = cache.buffer.clone()
        num_bytes = field.shape[-1] * field.element_size()
        values = torch.arange(num_bytes, device=device).to(torch.uint8)
        expected[start : start + num_bytes] = values
        field[3, 2].view(torch.uint8).copy_(values)
        assert torch.equal(cache.buffer, expected)


@pytest.mark.parametrize("name", LAYER_SCALED)
@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_layer_scales_are_one_per_layer_or_one_for_all(device, name, kind):
    cache = make_cache(device, name, latent_scale=0.5, rope_scale=kind([1.0, 2.0, 0.1]))
    tenth = torch.tensor(0.1).item()  # fp32
    assert cache.layer_scales.tolist() == [[0.5, 1.0], [0.5, 2.0], [0.5, tenth]]
    assert cache.host_scales == cache.layer_scales.tolist()
    for layer in range(3):
        scales = cache.layer(layer).layer_scales
        assert scales.dtype == torch.float32 and scales.device == cache.device
        assert scales.tolist() == cache.host_scales[layer]


@pytest.mark.parametrize("name", UNSCALED)
def test_formats_without_layer_scales_refuse_them(device, name):
    assert make_cache(device, name).layer(0).layer_scales is None
    for scales in [{"latent_scale": 0.5}, {"rope_scale": [1.0, 1.0, 2.0]}]:
        message = f"latent_scale, rope_scale: want 1 for format {name}, which has no layer scales"
        with pytest.raises(ArgumentError, match=message):
            make_cache(device, name, **scales)


@pytest.mark.parametrize(
    "scale, message",
    [
        (0.0, "want finite and > 0, with a finite inverse, got 0.0"),
        (-1.0, "want finite and > 0, with a finite inverse, got -1.0"),
        (float("nan"), "want finite and > 0, with a finite inverse, got nan"),
        (float("inf"), "want finite and > 0, with a finite inverse, got inf"),
        (1e-60, "want finite and > 0, with a finite inverse, got 1e-60"),  # 0 in fp32
        (1e-39, "want finite and > 0, with a finite inverse, got 1e-39"),  # 1 / 1e-39 is not
        ([1.0, 1.0, 0.0], r"want finite and > 0, with a finite inverse, got \[1.0, 1.0, 0.0\]"),
        ([1.0, 2.0], r"want one value or one per layer \(3\), got \[2\]"),
    ],
)
@pytest.mark.parametrize("name", ["latent_scale", "rope_scale"])
def test_bad_scale_is_named(device, name, scale, message):
    with pytest.raises(ArgumentError, match=f"{name}: {message}") as raised:
        make_cache(device, "fp8", **{name: scale})
    assert isinstance(raised.value, KvkernError)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -1])
def test_bad_size_is_named(device, name, size):
    with pytest.raises(ArgumentError, match=f"{name}: want >= 1, got {size}"):
        make_cache(device, **{name: size})


def test_pinned_memory_is_for_the_cpu():
    with pytest.raises(ArgumentError, match="pin_memory: want device cpu, got meta"):
        make_cache("meta", pin_memory=True)


@pytest.mark.parametrize("layer", [-1, 3])
def test_layer_outside_the_cache_is_named(device, layer):
    cache, batch = make_cache(device), PagedBatch([0], [], [], device=device)
    for use in [cache.layer, lambda index: cache.view(index, batch)]:
        with pytest.raises(ArgumentError, match=rf"layer: want in \[0, 3\), got {layer}"):
            use(layer)


def test_view_names_a_batch_on_another_device(device):
    batch = PagedBatch([0, 1], [0], [[0]], device="meta")
    with pytest.raises(DeviceError, match=r"batch: want device .*, got meta"):
        make_cache(device).view(0, batch)


def test_view_is_a_layer_as_a_batch_sees_it(device):
    cache, batch = make_cache(device), PagedBatch([0, 1], [3], [[4]], device=device)
    before = cache.buffer.clone()
    view = cache.view(2, batch)
    assert view.pages is cache.layer(2) and view.batch is batch and view.format is cache.format
    assert torch.equal(cache.buffer, before)


def test_view_refuses_pages_the_cache_has_not(device):
    cache = make_cache(device)
    for offsets, lengths, table, message in [
        ([0, 1], [3], [[5]], "page_table: want page ids below num_pages=5, got 5"),
        (
            [0, 1],
            [4],
            [[0]],
            "page_table: want at least 2 columns for a sequence of 5 tokens at page_size=4, got 1",
        ),
    ]:
        batch = PagedBatch(offsets, lengths, table, device=device)
        for _ in range(2):  # a refused batch is not remembered as sound
            with pytest.raises(ArgumentError, match=message):
                cache.view(0, batch)


def test_batch_is_checked_against_each_cache_that_it_meets(device):
    batch = PagedBatch([0, 1], [7], [[0, 4]], device=device)
    make_cache(device).view(0, batch)
    with pytest.raises(ArgumentError, match="want page ids below num_pages=4, got 4"):
        make_cache(device, num_pages=4).view(0, batch)
    with pytest.raises(ArgumentError, match="want at least 3 columns"):
        make_cache(device, page_size=3).view(0, batch)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_usage_counts_the_bytes_of_held_pages(device, name):
    cache = make_cache(device, name)
    allocator = PageAllocator(num_pages=5, page_size=4)
    assert cache.usage(allocator) == (0, cache.num_bytes)
    seq = allocator.new_sequence()
    allocator.append(seq, 5)  # two pages
    allocator.fork(seq)  # which two hold now
    usage = cache.usage(allocator)
    assert usage.used_bytes == 2 * 4 * 3 * cache.format.bytes_per_token
    assert usage.used_bytes + usage.free_bytes == cache.num_bytes
    other = PageAllocator(num_pages=5, page_size=8)
    with pytest.raises(ArgumentError, match=r"allocator: want \(num_pages, page_size\) \(5, 4\)"):
        cache.usage(other)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_non_finite_pages_are_named_whichever_field_and_layer_it_is_in(device, name):
    cache = make_cache(device, name)
    cache.buffer.zero_()
    assert cache.non_finite_pages(range(5)) == []
    bad = torch.tensor(torch.nan, device=device)
    latents = cache.layer(2)
    if name == "nvfp4":  # codes of 4 bits have no NaN, a group's scale has
        latents.latent.view(torch.uint8)[0] = 0xFF
        latents.group_scales[3, 1, 0] = bad
    else:
        latents.latent[3, 1, 7] = bad.to(cache.format.latent_dtype)
    cache.layer(0).rope[1, 3, 2] = -bad.to(cache.format.rope_dtype).float()
    assert cache.non_finite_pages([0, 1, 2, 3]) == [1, 3]
    assert cache.non_finite_pages([4, 3]) == [3]
    if cache.format.group_scaled:
        scales = cache.layer(1).group_scales
        scales[4, 0, -1] = torch.inf if scales.dtype == torch.float32 else torch.nan
        assert cache.non_finite_pages([4]) == [4]
    assert cache.non_finite_pages([]) == []
    with pytest.raises(ArgumentError, match=r"pages: want ids in \[0, 5\), got 5"):
        cache.non_finite_pages([5])
