from contextlib import contextmanager

import pytest
import torch

from kvkern import (
    ArgumentError,
    CacheFormat,
    KvkernError,
    PagedBatch,
    PagedKVCache,
    copy_pages,
    gather_kv,
    write_kv,
)
from kvkern.layout import FORMAT_NAMES
from kvkern.testing.inputs import rope_freqs

BACKENDS = pytest.mark.parametrize("backend", ["triton", "reference"])


def make_cache(device, name="bf16", dims=(128, 32), *, num_pages=6, page_size=3, **options):
    options = {"num_layers": 3} | options
    cache = PagedKVCache(
        CacheFormat(name, *dims),
        num_pages=num_pages,
        page_size=page_size,
        device=device,
        **options,
    )
    cache.buffer.copy_(torch.randint(256, cache.buffer.shape, dtype=torch.uint8))
    return cache


def bytes_by_page(cache):
    """A copy of all there is, ``[layers, pages, bytes]``: rows, then the scales beside them."""
    rows = cache.storage.flatten(2)
    if cache.token_scales is None:
        return rows.clone()
    return torch.cat([rows, cache.token_scales.view(torch.uint8)], -1)


@BACKENDS
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("page_size", [1, 3, 4])  # scales that do not fill 8 bytes, and that do
def test_exactly_the_named_pages_change_in_all_layers(device, backend, name, page_size):
    # rows with padding bytes, which are copied too
    cache = make_cache(device, name, (384, 48), page_size=page_size)
    expected = bytes_by_page(cache)
    assert expected.numel() == cache.num_bytes
    expected[:, 4], expected[:, 0] = expected[:, 1].clone(), expected[:, 5].clone()
    copy_pages(cache, cache, [1, 5], [4, 0], backend=backend).wait()
    assert torch.equal(bytes_by_page(cache), expected)


@BACKENDS
def test_page_longer_than_one_program_is_copied_whole(device, backend):
    """16 KiB a program: 48 rows of 656 bytes are nearly two."""
    cache = make_cache(device, "fp8_ds_mla", (512, 64), page_size=48, num_pages=2, num_layers=2)
    source = bytes_by_page(cache)[:, 0]
    copy_pages(cache, cache, [0], [1], backend=backend)
    for page in [0, 1]:
        assert torch.equal(bytes_by_page(cache)[:, page], source)


@BACKENDS
def test_scales_of_a_page_longer_than_one_program_are_copied_whole(device, backend):
    """2048 words a program."""
    cache = make_cache(device, "fp8_token", (16, 0), page_size=2501, num_pages=2, num_layers=2)
    source = bytes_by_page(cache)[:, 0]
    copy_pages(cache, cache, [0], [1], backend=backend)
    for page in [0, 1]:
        assert torch.equal(bytes_by_page(cache)[:, page], source)


@BACKENDS
def test_one_page_may_be_copied_to_many(device, backend):
    cache = make_cache(device)
    source = bytes_by_page(cache)[:, 2]
    copy_pages(cache, cache, [2, 2, 2], [0, 1, 5], backend=backend)
    for page in [0, 1, 2, 5]:
        assert torch.equal(bytes_by_page(cache)[:, page], source)


@BACKENDS
@pytest.mark.parametrize("name", ["bf16", "fp8_token"])
def test_between_two_caches_page_ids_are_each_caches_own(device, backend, name):
    src, dst = make_cache(device, name), make_cache(device, name, num_pages=9)
    kept, expected = bytes_by_page(src), bytes_by_page(dst)
    expected[:, [8, 1]] = kept[:, [1, 4]]
    copy_pages(src, dst, torch.tensor([1, 4]), torch.tensor([8, 1]), backend=backend)
    assert torch.equal(bytes_by_page(dst), expected) and torch.equal(bytes_by_page(src), kept)


@BACKENDS
def test_no_pages_copy_nothing(device, backend):
    cache = make_cache(device, "fp8_token")
    before = cache.buffer.clone()
    copy_pages(cache, cache, [], [], backend=backend).wait()
    assert torch.equal(cache.buffer, before)


@BACKENDS
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_copy_on_write_gives_equal_rows_and_leaves_the_shared_page(device, backend, name):
    cache = make_cache(device, name)
    batch = PagedBatch([0, 2], [0], [[3]], device=device)
    kv, gamma = torch.randn(2, 160, device=device), torch.ones(128, device=device)
    freqs = rope_freqs(3, 32, device=device)
    write_kv(cache.view(1, batch), kv, freqs, gamma)
    shared = bytes_by_page(cache)[:, 3]
    whole = cache.view(1, PagedBatch([0, 0, 0], [2, 2], [[3], [0]], device=device))
    copy_pages(cache, cache, [3], [0], backend=backend)
    write_kv(cache.view(1, PagedBatch([0, 1], [2], [[0]], device=device)), kv[:1], freqs, gamma)
    assert torch.equal(bytes_by_page(cache)[:, 3], shared)
    assert not torch.equal(bytes_by_page(cache)[:, 0], shared)
    original, copied = gather_kv(whole, dtype=torch.float32)
    assert original.isfinite().all() and original.any() and torch.equal(copied, original)


# ---- what is refused


BAD_PAGES = {
    "unequal": ([0, 1], [2], "dst_pages: want 2 ids, got 1"),
    "past the source": ([6], [0], r"src_pages: want ids in \[0, 6\), got 6"),
    "past the target": ([0], [6], r"dst_pages: want ids in \[0, 6\), got 6"),
    "negative": ([-1], [0], r"src_pages: want ids in \[0, 6\), got -1"),
    "negative target": ([1, 0], [2, -1], r"dst_pages: want ids in \[0, 6\), got -1"),
    "twice": ([0, 1], [2, 2], "dst_pages: want distinct ids, got a page twice"),
    "source and target": ([0, 1], [1, 2], r"dst_pages: want none of src_pages, got \[1\]"),
    "itself": ([3], [3], r"dst_pages: want none of src_pages, got \[3\]"),
}


@pytest.mark.parametrize("case", BAD_PAGES)
def test_bad_page_is_named_and_nothing_is_copied(device, case):
    sources, targets, message = BAD_PAGES[case]
    cache = make_cache(device, "fp8_token")
    before = cache.buffer.clone()
    with pytest.raises(ArgumentError, match=message):
        copy_pages(cache, cache, sources, targets)
    assert torch.equal(cache.buffer, before)


@pytest.mark.parametrize(
    "other, message",
    [
        ({"name": "fp16"}, "dst: want src's format, num_layers and page_size .*got .*fp16"),
        ({"dims": (256, 32)}, "dst: want src's format, num_layers and page_size"),
        ({"num_layers": 2}, r"dst: want src's format, .*, 3, 3\), got .*, 2, 3\)"),
        ({"page_size": 4}, r"dst: want src's format, .*, 3, 3\), got .*, 3, 4\)"),
        ({"latent_scale": 0.5}, "dst: want src's scales, or its bytes would mean other values"),
        ({"rope_scale": [1.0, 1.0, 2.0]}, "dst: want src's scales"),
    ],
    ids=str,
)
def test_caches_that_differ_are_refused(device, other, message):
    src, dst = make_cache(device, "fp8"), make_cache(device, **({"name": "fp8"} | other))
    before = dst.buffer.clone()
    with pytest.raises(ArgumentError, match=message) as raised:
        copy_pages(src, dst, [0], [1])
    assert isinstance(raised.value, KvkernError)
    assert torch.equal(dst.buffer, before)


def test_unknown_backend_is_named(device):
    cache = make_cache(device)
    before = cache.buffer.clone()
    with pytest.raises(
        ArgumentError, match="backend: want one of auto, triton, reference; got 'x'"
    ):
        copy_pages(cache, cache, [0], [1], backend="x")
    assert torch.equal(cache.buffer, before)


# ---- on the card, to the host and back


@contextmanager
def synchronisation_is_an_error():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_pages_come_back_from_pinned_memory_byte_for_byte(name):
    gpu = make_cache("cuda", name)
    host = make_cache("cpu", name, num_pages=4, pin_memory=True)
    assert host.buffer.is_pinned()
    original, other_pages = bytes_by_page(gpu), bytes_by_page(host)[:, [0, 2]]
    out = copy_pages(gpu, host, [5, 0], [3, 1])
    out.wait()
    assert torch.equal(bytes_by_page(host)[:, [3, 1]], original[:, [5, 0]].cpu())
    assert torch.equal(bytes_by_page(host)[:, [0, 2]], other_pages)
    for field in (gpu.storage, gpu.token_scales):
        if field is not None:
            field[:, [5, 0]] = 0
    copy_pages(host, gpu, [1, 3], [0, 5])
    assert torch.equal(bytes_by_page(gpu), original)


@pytest.mark.gpu
def test_transfer_neither_waits_nor_overtakes_the_write_before_it():
    gpu = make_cache("cuda", "bf16", (512, 64), page_size=64)
    host = make_cache("cpu", "bf16", (512, 64), page_size=64, pin_memory=True)
    batch = PagedBatch([0, 64], [0], [[2]], device="cuda")
    kv, gamma = torch.randn(64, 576, device="cuda"), torch.ones(512, device="cuda")
    freqs = rope_freqs(64, 64, device="cuda")
    write_kv(gpu.view(1, batch), kv, freqs, gamma)  # compiles
    torch.cuda.synchronize()
    gpu.storage.zero_()
    torch.cuda.synchronize()
    with synchronisation_is_an_error():
        torch.cuda._sleep(100_000_000)  # the write stays queued for tens of milliseconds
        write_kv(gpu.view(1, batch), kv, freqs, gamma)
        copied = copy_pages(gpu, host, [2], [0])
        is_queued = not copied._event.query()
    copied.wait()
    assert is_queued
    assert torch.equal(host.storage[:, 0], gpu.storage[:, 2].cpu())
    assert host.storage[1, 0].any()


@pytest.mark.gpu
def test_another_stream_can_wait_for_the_pages():
    gpu = make_cache("cuda")
    expected = gpu.storage[:, 1].clone()
    target = torch.zeros_like(expected)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(100_000_000)
    with synchronisation_is_an_error():
        copied = copy_pages(gpu, gpu, [1], [4])
        copied.wait_on_stream(side)
    with torch.cuda.stream(side):
        target.copy_(gpu.storage[:, 4])
    torch.cuda.synchronize()
    assert torch.equal(target, expected)


@pytest.mark.gpu
def test_more_pages_than_a_grid_axis_holds():
    """65 536 pairs: only the first axis of a CUDA grid goes past 65 535."""
    cache = make_cache("cuda", "fp8_token", num_pages=2 * 65536, page_size=1, num_layers=1)
    copy_pages(cache, cache, range(65536), range(65536, 2 * 65536))
    sources, targets = bytes_by_page(cache).chunk(2, 1)
    assert torch.equal(targets, sources)
