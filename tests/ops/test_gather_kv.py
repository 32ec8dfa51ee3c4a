import pytest
import torch

from kvkern import (
    ArgumentError,
    CacheFormat,
    DeviceError,
    KvkernError,
    LayoutError,
    PagedBatch,
    PagedKVCache,
    ShapeMismatchError,
    UnsupportedDtypeError,
    UnsupportedError,
    gather_kv,
    write_kv,
)
from kvkern.layout import FORMAT_NAMES
from kvkern.testing.inputs import POISON, make_paged_case, rope_freqs

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BACKENDS = pytest.mark.parametrize("backend", ["triton", "reference"])

# Longer than one program's 16 rows; empty; ending on a page's last slot; all cached, none new.
LENGTHS, NEW = [17, 0, 4, 6], [2, 0, 4, 0]
DIMS = (128, 32)


def make_case(device, name="bf16", dims=DIMS, **options):
    options = {"page_size": 4} | options
    return make_paged_case(CacheFormat(name, *dims), LENGTHS, NEW, device=device, **options)


@BACKENDS
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("dims", [(512, 64), (128, 0), (384, 48)])  # the last: no powers of two
def test_gathers_what_was_written(device, backend, name, dims):
    case = make_case(device, name, dims)
    dense = gather_kv(case.view, dtype=FP32, backend=backend)
    assert dense.shape == (4, 19, sum(dims))
    for request, rows in enumerate(case.rows):
        # a product of two stored numbers is exact in fp64 and rounds once into fp32
        assert torch.equal(dense[request, : len(rows)], rows.float())
        assert (dense[request, len(rows) :] == 0).all()


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rounds_to_the_asked_dtype_like_the_reference(device, name, dtype):
    view = make_case(device, name).view
    dense = gather_kv(view, dtype=dtype, backend="triton")
    assert dense.dtype == dtype
    assert torch.equal(dense, gather_kv(view, dtype=dtype, backend="reference"))
    exact = gather_kv(view, dtype=FP64, backend="reference")
    assert torch.equal(dense, exact.float().to(dtype))


def rows_to_fill(device, name, latent_dim, num_rows):
    """One page, its latents to be filled by hand, its rope keys a ramp; its fields and a view."""
    fmt = CacheFormat(name, latent_dim, 32)
    scales = {"latent_scale": 0.3, "rope_scale": 7.0} if fmt.layer_scaled else {}
    cache = PagedKVCache(
        fmt, num_layers=1, num_pages=1, page_size=num_rows, device=device, **scales
    )
    pages = cache.layer(0)
    ramp = torch.linspace(-3, 3, 32, device=device).to(fmt.rope_dtype)
    pages.rope.copy_(ramp.expand_as(pages.rope))
    return pages, cache.view(0, PagedBatch([0, num_rows], [0], [[0]], device=device))


def read_by_both(view):
    """The rows; checked to be the same by both backends, NaN included."""
    got, expected = (gather_kv(view, dtype=FP32, backend=b)[0] for b in ["triton", "reference"])
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(0), expected.nan_to_num(0))
    return got


@pytest.mark.parametrize("name", ["fp8", "fp8_token", "fp8_ds_mla"])
def test_every_e4m3_code_means_the_same_on_every_backend(device, name):
    """All 256, NaN among them."""
    pages, view = rows_to_fill(device, name, 256, 1)
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    pages.latent.view(torch.uint8)[0, 0] = codes
    groups = {"fp8": [0.3] * 2, "fp8_token": [0.7] * 2, "fp8_ds_mla": [0.25, 2.0**-13]}[name]
    if pages.group_scales is not None:
        num_groups = pages.group_scales.shape[-1]
        pages.group_scales[0, 0] = torch.tensor(groups[:num_groups], device=device)
    read = read_by_both(view)[0]
    assert read.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    scales = torch.tensor(groups, device=device).repeat_interleave(128)
    expected = (codes.view(torch.float8_e4m3fn).double() * scales.double()).float()
    assert torch.equal(read[:256].nan_to_num(0), expected.nan_to_num(0))


def test_every_e2m1_code_under_every_scale_means_the_same_on_every_backend(device):
    """All 16 with each of the 256 e4m3 group scales, NaN among them: a group of NaN."""
    pages, view = rows_to_fill(device, "nvfp4", 512, 8)
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    pages.latent.view(torch.uint8)[0] = (codes[0::2] | codes[1::2] << 4).repeat(32)
    scale_codes = torch.arange(256, dtype=torch.uint8, device=device)
    pages.group_scales.view(torch.uint8)[0] = scale_codes.view(8, 32)
    read = read_by_both(view)[:, :512].reshape(256, 16)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=FP64, device=device)
    values = torch.cat([values, -values]) * torch.tensor(0.3, device=device).double()
    expected = scale_codes.view(torch.float8_e4m3fn).double()[:, None] * values
    assert read.isnan().any(1).nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(read.isnan(), expected.isnan())
    assert torch.equal(read.nan_to_num(0), expected.float().nan_to_num(0))


@BACKENDS
@pytest.mark.parametrize(
    "start, length", [(0, None), (3, 5), (16, 3), (18, 40), (5, None), (40, None), (0, 0)]
)
@pytest.mark.parametrize("include_new", [True, False])
def test_range_is_a_slice_of_the_whole(device, backend, start, length, include_new):
    case = make_case(device)
    ends = [c + n * include_new for c, n in zip(LENGTHS, NEW, strict=True)]
    dense = gather_kv(
        case.view,
        start=start,
        length=length,
        include_new=include_new,
        dtype=FP32,
        backend=backend,
    )
    width = max(max(ends) - start, 0) if length is None else length
    expected = torch.zeros(4, width, sum(DIMS), device=device)
    for request, (rows, end) in enumerate(zip(case.rows, ends, strict=True)):
        part = rows[start : min(end, start + width)]
        expected[request, : len(part)] = part
    assert torch.equal(dense, expected)


@BACKENDS
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_rows_do_not_depend_on_pages_or_page_size(device, backend, name):
    case = make_case(device, name)
    dense = gather_kv(case.view, dtype=FP32, backend=backend)
    for page_size in [1, 3, 16, 64, 128]:
        other = case.repaged(page_size)
        assert torch.equal(gather_kv(other.view, dtype=FP32, backend=backend), dense)


@BACKENDS
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_nan_outside_the_requests_rows_changes_nothing(device, backend, name):
    """Free pages and page tails are poisoned in the first case and zero in the second."""
    case = make_case(device, name)
    dense = gather_kv(case.view, backend=backend)
    poisoned = case.cache.buffer.clone()
    case.fill_unwritten(0)
    assert not torch.equal(case.cache.buffer, poisoned)
    assert dense.isfinite().all() and torch.equal(gather_kv(case.view, backend=backend), dense)


@BACKENDS
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_nan_row_stays_in_its_own_request_and_position(device, backend, name):
    case = make_case(device, name)
    dense = gather_kv(case.view, backend=backend)
    page = case.batch.page_table[2, 1]
    case.cache.storage[0, page, 1] = POISON  # where codes have no NaN, the scales of groups have
    harmed = gather_kv(case.view, backend=backend)
    assert harmed[2, 5].isnan().all()
    harmed[2, 5] = dense[2, 5]
    assert torch.equal(harmed, dense)


@BACKENDS
def test_page_of_minus_one_gives_zeros(device, backend):
    case = make_case(device)
    dense = gather_kv(case.view, backend=backend)
    table = case.batch.page_table.cpu()
    table[0, 1] = table[2, 0] = -1
    batch = PagedBatch(case.batch.input_row_offsets.cpu(), LENGTHS, table, device=device)
    holed = gather_kv(case.cache.view(0, batch), backend=backend)
    dense[0, 4:8] = dense[2, 0:4] = 0
    assert torch.equal(holed, dense)


@BACKENDS
def test_out_is_filled_and_returned(device, backend):
    case = make_case(device)
    dense = gather_kv(case.view, dtype=FP32, backend=backend)
    out = torch.full_like(dense, torch.nan)
    assert gather_kv(case.view, out=out, backend=backend) is out
    assert torch.equal(out, dense)


@pytest.mark.parametrize(
    "name, dtype",
    [(name, {"fp16": FP16, "fp32": FP32}.get(name, BF16)) for name in FORMAT_NAMES],
)
def test_default_dtype_is_the_caches_own_or_bf16(device, name, dtype):
    assert gather_kv(make_case(device, name).view).dtype == dtype


@BACKENDS
def test_batch_without_requests_gives_no_rows(device, backend):
    cache = make_case(device).cache
    view = cache.view(0, PagedBatch([0], [], [], device=device))
    assert gather_kv(view, backend=backend).shape == (0, 0, sum(DIMS))
    assert gather_kv(view, length=3, backend=backend).shape == (0, 3, sum(DIMS))


@BACKENDS
@pytest.mark.parametrize("name", ["fp8", "fp8_token", "nvfp4"])
def test_each_layer_has_rows_and_scales_of_its_own(device, backend, name):
    fmt = CacheFormat(name, *DIMS)
    scales = {"latent_scale": [0.5, 1.0, 2.0], "rope_scale": [4.0, 0.25, 1.0]}
    cache = PagedKVCache(
        fmt, num_layers=3, num_pages=2, page_size=4, device=device,
        **(scales if fmt.layer_scaled else {}),
    )  # fmt: skip
    batch = PagedBatch([0, 3], [1], [[1]], device=device)
    freqs, gamma = rope_freqs(4, 32, device=device), torch.ones(128, device=device)
    kv = torch.randn(3, 3, 160, device=device)
    kv_out = torch.empty_like(kv)
    for layer in range(3):
        write_kv(cache.view(layer, batch), kv[layer], freqs, gamma, kv_out=kv_out[layer])
    # half a step of e4m3's 3-bit mantissa, and of its subnormals at the largest scale
    rounding = {"rtol": 1 / 15, "atol": 4.0 * 2**-10}
    # half of e2m1's widest step, from 4 to 6, where 6 stands for the group's largest
    of_latent = {"rtol": 0, "atol": kv_out.abs().max().item() / 5} if name == "nvfp4" else rounding
    for layer in range(3):
        dense = gather_kv(cache.view(layer, batch), start=1, dtype=FP32, backend=backend)[0]
        torch.testing.assert_close(dense[:, :128], kv_out[layer, :, :128], **of_latent)
        torch.testing.assert_close(dense[:, 128:], kv_out[layer, :, 128:], **rounding)


# ---- what is refused


BAD_ARGUMENTS = {
    "start": ({"start": -1}, ArgumentError, "start, length: want >= 0, got -1, "),
    "length": ({"length": -2}, ArgumentError, "start, length: want >= 0, got 0, -2"),
    "dtype": (
        {"dtype": torch.int32},
        ArgumentError,
        "dtype: want bfloat16, float16 or float32, got torch.int32",
    ),
    "out dims": (
        {"out": torch.ones(4, 18, 160)},
        ShapeMismatchError,
        r"out: want \[B=4, N=19, K=160\], got \[4, 18, 160\]",
    ),
    "out dtype": (
        {"out": torch.ones(4, 19, 160), "dtype": BF16},
        UnsupportedDtypeError,
        "out: want bfloat16, got torch.float32",
    ),
    "out strides": (
        {"out": torch.ones(4, 160, 19).mT},
        LayoutError,
        r"out: want contiguous, got strides \[3040, 1, 19\]",
    ),
    "out device": (
        {"out": torch.ones(4, 19, 160, device="meta")},
        DeviceError,
        r"out: want device .*, got meta",
    ),
    "backend": (
        {"backend": "cutlass", "out": torch.ones(4, 19, 160)},
        ArgumentError,
        "backend: want one of auto, triton, reference; got 'cutlass'",
    ),
    "fp64": (
        {"backend": "triton", "dtype": FP64},
        UnsupportedError,
        "gather_kv: backend 'triton' refuses: fp64 is for the reference",
    ),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_argument_is_named_and_changes_nothing(device, case):
    spoilt, error, message = BAD_ARGUMENTS[case]
    paged = make_case(device)
    stored = paged.cache.buffer.clone()
    out = spoilt.get("out")
    if out is not None and out.device.type == "cpu":
        spoilt = spoilt | {"out": out.to(device)}
    with pytest.raises(error, match=message) as raised:
        gather_kv(paged.view, **spoilt)
    assert isinstance(raised.value, KvkernError)
    assert torch.equal(paged.cache.buffer, stored)
    if out is not None and out.device.type == "cpu":
        assert (spoilt["out"] == 1).all()


def device_only_batch(device):
    """A batch whose values only the device knows; ``meta`` stands in for one without a GPU."""
    device = device if device == "cuda" else "meta"
    empty = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in [2, 1, (1, 1)]]
    return PagedBatch(*empty)


def test_length_is_asked_for_when_only_the_device_knows_it(device):
    batch = device_only_batch(device)
    cache = PagedKVCache(
        CacheFormat("bf16", *DIMS), num_layers=1, num_pages=1, page_size=4, device=batch.device
    )
    with pytest.raises(ArgumentError, match="length: want a number, the batch's lengths are on"):
        gather_kv(cache.view(0, batch))


# ---- on the card


@pytest.mark.gpu
def test_graph_replay_reads_the_new_lengths_and_pages():
    case = make_case("cuda", "fp8_ds_mla")
    table = case.batch.page_table.cpu()
    batch = PagedBatch.static(
        max_requests=4,
        max_tokens=8,
        max_pages=table.shape[1],
        max_query_len=4,
        max_seq_len=4 * table.shape[1],
        device="cuda",
    )
    view = case.cache.view(0, batch)
    out = torch.empty(4, 19, sum(DIMS), dtype=FP32, device="cuda")
    gather_kv(view, out=out, length=19)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    gather_kv(view, out=out, length=19)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.set_sync_debug_mode("error")
        gather_kv(view, out=out, length=19)
        torch.cuda.set_sync_debug_mode("default")
    offsets = case.batch.input_row_offsets.cpu()
    for step in [(offsets, LENGTHS, table), ([0, 1, 1], [5, 2], table[[3, 2]])]:
        batch.refill(*step)
        out.fill_(torch.nan)
        graph.replay()
        eager = gather_kv(
            case.cache.view(0, PagedBatch(*step, device="cuda")),
            length=19,
            dtype=FP32,
            backend="reference",
        )
        assert torch.equal(out[: len(eager)], eager) and (out[len(eager) :] == 0).all()
