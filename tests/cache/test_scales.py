"""kvkern.calibrate: scales come from what was written, and observing changes nothing of it."""

from contextlib import nullcontext

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvkern
from kvkern import ArgumentError, CacheFormat, CacheScales, PagedBatch, PagedKVCache, calibrate
from kvkern.layout import FORMAT_NAMES
from kvkern.testing.inputs import rope_freqs

BACKENDS = pytest.mark.parametrize("backend", ["triton", "reference"])
LAYER_SCALED = pytest.mark.parametrize("name", ["fp8", "nvfp4"])
L, R, LAYERS, PAGE_SIZE, NUM_PAGES = 128, 32, 3, 4, 8
NUM_TOKENS = PAGE_SIZE * NUM_PAGES
LARGEST = {"fp8": (448.0, 448.0), "nvfp4": (6.0 * 448.0, 448.0)}  # of a latent, of a rope key


def make_cache(device, name="fp32", dims=(L, R), num_layers=LAYERS, **options):
    cache = PagedKVCache(
        CacheFormat(name, *dims),
        num_layers=num_layers,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        device=device,
        **options,
    )
    cache.buffer.fill_(0xFF)
    return cache


def full_batch(device):
    return PagedBatch([0, NUM_TOKENS], [0], [torch.randperm(NUM_PAGES).tolist()], device=device)


def make_kv(device, dims=(L, R), dtype=torch.float32):
    return torch.randn(NUM_TOKENS, sum(dims)).to(device, dtype)


def write(cache, layer, kv, *, gamma=1.0, batch=None, backend="auto", **options):
    """Write to a layer with the same gamma in every column."""
    fmt, device = cache.format, cache.device
    freqs = rope_freqs(NUM_TOKENS, fmt.rope_dim, device=device)
    gammas = torch.full((fmt.kv_lora_rank,), gamma, device=device)
    view = cache.view(layer, batch or full_batch(device))
    kvkern.write_kv(view, kv, freqs, gammas, backend=backend, **options)


def scaled_cache(device, scales, dims=(L, R)):
    options = {"latent_scale": scales.latent, "rope_scale": scales.rope}
    return make_cache(device, scales.format_name, dims, len(scales.latent), **options)


def read(cache, layer, batch):
    return kvkern.gather_kv(cache.view(layer, batch), dtype=torch.float32)[0]


def largest(rows):
    """Of the latent and of the rope key."""
    return [float(part.abs().max()) for part in rows.split([L, R], dim=-1)]


def relative_error(got, want):
    return float((got - want).norm() / want.norm())


def written_error(cache, kv, gamma):
    """Of latent and rope key after storage, against an fp32 cache."""
    exact, batch = make_cache(cache.device), full_batch(cache.device)
    for one in (cache, exact):
        write(one, 0, kv, gamma=gamma, batch=batch)
    parts = zip(*(read(c, 0, batch).split([L, R], dim=-1) for c in (cache, exact)), strict=True)
    return [relative_error(got, want) for got, want in parts]


def fill_every_layer(cache, kv, gamma=1.0):
    for layer in range(cache.num_layers):
        write(cache, layer, kv * (layer + 1), gamma=gamma * 4**layer)


@BACKENDS
@LAYER_SCALED
def test_scale_is_the_largest_of_all_writes_to_a_layer_times_headroom(device, backend, name):
    cache, batch = make_cache(device), full_batch(device)
    amax = torch.zeros(LAYERS, 2)
    with calibrate(cache, headroom=3.0) as observer:
        for gamma in (0.5, 4.0, 2.0):
            for layer in range(LAYERS):
                kv = make_kv(device) * (layer + 1)
                write(cache, layer, kv, gamma=gamma, batch=batch, backend=backend)
                amax[layer] = amax[layer].maximum(torch.tensor(largest(read(cache, layer, batch))))
    scales = observer.scales(name)
    assert (scales.format_name, scales.latent.dtype) == (name, torch.float32)
    for column, got in enumerate((scales.latent, scales.rope)):
        torch.testing.assert_close(got, 3 * amax[:, column] / LARGEST[name][column])


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_count_as_they_are_after_norm_and_rotation_and_before_quantisation(
    device, backend, dtype
):
    """Also those beyond what the observed cache itself can hold, and in any addressing."""
    cache, kv = make_cache(device, "fp8"), make_kv(device, dtype=dtype)
    kv_out = torch.empty_like(kv)
    slots = torch.randperm(NUM_TOKENS, device=device)
    freqs, gamma = rope_freqs(NUM_TOKENS, R, device=device), torch.full((L,), 900.0, device=device)
    with calibrate(cache) as observer:
        kvkern.write_kv(
            cache.layer(1),
            kv,
            freqs,
            gamma,
            kv_out=kv_out,
            positions=slots,
            slot_mapping=slots,
            backend=backend,
        )
    assert largest(kv_out)[0] > 448
    assert observer.amax[1].tolist() == largest(kv_out)


@BACKENDS
def test_padding_and_what_is_not_finite_do_not_count(device, backend):
    cache, kv = make_cache(device), make_kv(device)
    kv[0, :L], kv[1, L:] = torch.nan, torch.inf
    kv[4:, :L], kv[4:, L:] = torch.eye(L, device=device)[0], 1e6  # normed, a 1 becomes sqrt(L)
    batch = PagedBatch([0, 6], [0], [[3, -1]], device=device)  # tokens 4 and 5 have no page
    with calibrate(cache) as observer:
        write(cache, 0, kv, batch=batch, backend=backend)
    rows = read(cache, 0, PagedBatch([0, 4], [0], [[3]], device=device))
    assert rows[0, :L].isnan().all() and not rows[1, L:].isfinite().any()
    want = [float(rows[1:, :L].abs().max()), float(rows[[0, 2, 3], L:].abs().max())]
    assert observer.amax.tolist() == [want, [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_observing_changes_no_stored_byte_no_argument_and_no_output(device, name):
    kv, q_rope = make_kv(device), torch.randn(NUM_TOKENS, 2, R, device=device)
    kv[3] = torch.nan
    batch = full_batch(device)
    seen = []
    for observe in (False, True):
        cache, out = make_cache(device, name), torch.empty_like(q_rope)
        with calibrate(cache) if observe else nullcontext():
            before = kv.clone()
            write(cache, 1, kv, batch=batch, q_rope=q_rope, q_rope_out=out)
            assert torch.equal(kv.nan_to_num(), before.nan_to_num())
        seen.append((cache.buffer, out.nan_to_num()))
    assert torch.equal(seen[0][0], seen[1][0]) and torch.equal(seen[0][1], seen[1][1])


def test_after_the_context_the_cache_is_as_before(device):
    cache, kv = make_cache(device), make_kv(device)
    before = [cache.layer(layer) for layer in range(LAYERS)]
    with pytest.raises(RuntimeError, match="out of prompts"), calibrate(cache) as observer:
        write(cache, 0, kv)
        raise RuntimeError("out of prompts")
    assert all(cache.layer(layer) is pages for layer, pages in enumerate(before))
    seen = observer.amax.clone()
    write(cache, 0, kv * 100, gamma=100.0)
    assert seen[0].all() and torch.equal(observer.amax, seen)


def test_other_caches_and_views_from_before_are_not_observed(device):
    cache, other, kv = make_cache(device), make_cache(device), make_kv(device)
    batch = full_batch(device)
    early_view = cache.view(0, batch)
    freqs, gamma = rope_freqs(NUM_TOKENS, R, device=device), torch.ones(L, device=device)
    with calibrate(cache) as observer:
        write(other, 0, kv)
        kvkern.write_kv(early_view, kv, freqs, gamma)
        assert not observer.amax.any()
        with calibrate(other) as observer_of_other:
            write(other, 1, kv)
        write(cache, 2, kv)
    assert observer.amax.any(dim=1).tolist() == [False, False, True]
    assert observer_of_other.amax.any(dim=1).tolist() == [False, True, False]


def test_second_calibration_of_an_observed_cache_is_refused(device):
    cache = make_cache(device)
    with calibrate(cache) as observer:
        with pytest.raises(ArgumentError, match="cache: want one calibration at a time"):
            calibrate(cache).__enter__()
        write(cache, 0, make_kv(device))
    assert observer.amax[0].all()
    with calibrate(cache):  # one after the other is fine
        pass


@LAYER_SCALED
def test_calibrated_scales_beat_unit_scales_where_gammas_are_small(device, name):
    """At gamma 0.002 most latents are subnormal with scale 1."""
    found_on, kv = make_kv(device), make_kv(device)
    cache = make_cache(device)
    with calibrate(cache) as observer:
        fill_every_layer(cache, found_on, gamma=0.002)
    calibrated = scaled_cache(device, observer.scales(name))
    latent_error, rope_error = written_error(calibrated, kv, gamma=0.002)
    unit_error, _ = written_error(make_cache(device, name), kv, gamma=0.002)
    assert latent_error < {"fp8": 0.028, "nvfp4": 0.10}[name]
    assert unit_error > 1.4 * latent_error
    assert rope_error < 0.028


@LAYER_SCALED
@pytest.mark.parametrize("headroom", [2.0, 16.0, 128.0])
def test_room_costs_no_precision_and_its_lack_does(device, name, headroom):
    """Values past what was seen saturate unless there is room; with room nothing else is worse.

    Powers of two, as where values lie within a binade is worth some percent either way.
    """
    cache, kv = make_cache(device), make_kv(device)
    tight, roomy = [], []
    for errors, factor in ((tight, 1.0), (roomy, headroom)):
        with calibrate(cache, factor) as observer:
            fill_every_layer(cache, kv)
        target = scaled_cache(device, observer.scales(name))
        errors += written_error(target, kv, gamma=1.0)
        errors += written_error(target, kv, gamma=2.0)[:1]  # twice what was seen
    assert roomy[0] < 1.05 * tight[0] and roomy[1] < 1.05 * tight[1]
    assert roomy[2] < 1.05 * roomy[0]
    assert tight[2] > {"fp8": 1.3, "nvfp4": 1.02}[name] * roomy[2]


@LAYER_SCALED
def test_scales_survive_a_file_bit_for_bit(device, name, tmp_path):
    cache, path = make_cache(device), tmp_path / "scales.safetensors"
    with calibrate(cache) as observer:
        fill_every_layer(cache, make_kv(device), gamma=0.0317)
    scales = observer.scales(name)
    scales.save(path)
    loaded = CacheScales.load(str(path))
    assert loaded.format_name == name
    assert torch.equal(loaded.latent, scales.latent) and torch.equal(loaded.rope, scales.rope)
    with safe_open(path, framework="pt") as file:  # what others see of it
        assert file.metadata() == {"kvkern_scales": "1", "format": name}
        assert sorted(file.keys()) == ["latent_scale", "rope_scale"]
    caches = [scaled_cache(device, found) for found in (scales, loaded)]
    assert caches[0].layer_scales.tolist() == caches[1].layer_scales.tolist()
    assert caches[0].layer_scales[:, 0].tolist() == scales.latent.tolist()
    assert caches[0].layer_scales[:, 1].tolist() == scales.rope.tolist()


def test_one_tensor_may_be_both_scales(tmp_path):
    same = torch.tensor([0.5, 0.25])
    CacheScales("fp8", same, same).save(tmp_path / "scales")
    loaded = CacheScales.load(tmp_path / "scales")
    assert loaded.latent.tolist() == loaded.rope.tolist() == [0.5, 0.25]


@LAYER_SCALED
def test_model_without_rope_keys_gets_scale_1_for_them(device, name):
    cache = make_cache(device, dims=(L, 0))
    with calibrate(cache) as observer:
        fill_every_layer(cache, make_kv(device, (L, 0)))
    scales = observer.scales(name)
    assert scales.rope.tolist() == [1.0] * LAYERS and (scales.latent != 1).all()
    assert scaled_cache(device, scales, (L, 0)).layer_scales is not None


@pytest.mark.parametrize("part, columns", [("latent", slice(L)), ("rope key", slice(L, None))])
def test_layer_that_saw_nothing_but_zeros_is_named(device, part, columns):
    cache, kv = make_cache(device), make_kv(device)
    with calibrate(cache) as observer:
        write(cache, 0, kv)
        write(cache, 2, kv)
        kv[:, columns] = 0
        write(cache, 1, kv)
    with pytest.raises(ArgumentError, match=f"written to layer 1, got none for its {part}"):
        observer.scales("fp8")


def test_step_without_tokens_is_observed_as_nothing(device):
    cache = make_cache(device)
    with calibrate(cache) as observer:
        write(cache, 0, make_kv(device)[:0], batch=PagedBatch([0], [], [], device=device))
    assert not observer.amax.any()
    with pytest.raises(ArgumentError, match="layer 0, got none for its latent"):
        observer.scales("fp8")


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32", "fp8_token", "fp8_ds_mla"])
def test_format_without_layer_scales_is_refused(device, name):
    cache = make_cache(device)
    with calibrate(cache) as observer:
        fill_every_layer(cache, make_kv(device))
    with pytest.raises(ArgumentError, match=f"want a format with layer scales, .*; got {name}"):
        observer.scales(name)
    with pytest.raises(ArgumentError, match=r"name: want one of bf16, .*; got 'int4'"):
        observer.scales("int4")
    with pytest.raises(ArgumentError, match=f"want a format with layer scales, .*; got {name}"):
        CacheScales(name, torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("headroom", [0.99, -1.0, float("nan"), float("inf")])
def test_headroom_that_would_clip_is_refused(device, headroom):
    with pytest.raises(ArgumentError, match="headroom: want finite and >= 1, got "):
        calibrate(make_cache(device), headroom).__enter__()


@pytest.mark.parametrize(
    "latent, rope, message",
    [
        (torch.ones(2).double(), torch.ones(2), "latent: want fp32 .*, got torch.float64"),
        (torch.ones(2), torch.ones(2, 1), r"rope: want fp32 \[num_layers\], got .* \[2, 1\]"),
        (torch.ones(2), torch.tensor([1.0, 0.0]), "rope: want finite and > 0, got"),
        (torch.tensor([1.0, torch.nan]), torch.ones(2), "latent: want finite and > 0, got"),
        (torch.ones(2), torch.ones(3), "latent, rope: want one value each .*, got 2 and 3"),
    ],
)
def test_wrong_scales_are_named_with_wanted_and_got(latent, rope, message):
    with pytest.raises(ArgumentError, match=message):
        CacheScales("fp8", latent, rope)


@pytest.mark.parametrize("name, num_layers", [("nvfp4", 2), ("fp8", 3), ("bf16", 2)])
def test_scales_of_another_format_or_depth_do_not_pass_the_check(name, num_layers):
    scales = CacheScales("fp8", torch.ones(2), torch.ones(2))
    scales.check(CacheFormat("fp8", 256, 32), 2)
    with pytest.raises(ArgumentError, match=r"scales: want \(format, num_layers\) .*, got"):
        scales.check(CacheFormat(name), num_layers)


@pytest.mark.parametrize(
    "tensors, metadata, message",
    [
        (None, None, "path: want a safetensors file of scales, got .*file"),
        ({}, None, "path: want scales in layout 1, .* got layout None in .*file"),
        ({}, {"kvkern_scales": "2"}, "path: want scales in layout 1, .* got layout 2 in .*file"),
        (
            {"latent_scale": torch.ones(2)},
            {"kvkern_scales": "1", "format": "fp8"},
            "path: want a safetensors file of scales, got .*rope_scale",
        ),
    ],
)
def test_file_of_anything_else_is_refused(tmp_path, tensors, metadata, message):
    path = tmp_path / "file"
    if tensors is None:
        path.write_bytes(b"not a tensor in sight")
    else:
        save_file(tensors, path, metadata)
    with pytest.raises(ArgumentError, match=message):
        CacheScales.load(path)


@pytest.mark.gpu
def test_observing_does_not_wait_for_the_device():
    cache, kv, batch = make_cache("cuda"), make_kv("cuda"), full_batch("cuda")
    freqs, gamma = rope_freqs(NUM_TOKENS, R, device="cuda"), torch.ones(L, device="cuda")
    with calibrate(cache) as observer:
        view = cache.view(0, batch)
        kvkern.write_kv(view, kv, freqs, gamma)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            kvkern.write_kv(view, kv * 2, freqs, gamma)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert observer.amax[0, 1] == largest(read(cache, 0, batch))[1]


@pytest.mark.gpu
def test_graph_captured_inside_observes_each_replay():
    cache, kv, batch = make_cache("cuda"), make_kv("cuda"), full_batch("cuda")
    freqs, gamma = rope_freqs(NUM_TOKENS, R, device="cuda"), torch.ones(L, device="cuda")
    with calibrate(cache) as observer:
        view = cache.view(0, batch)
        kvkern.write_kv(view, kv, freqs, gamma)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kvkern.write_kv(view, kv, freqs, gamma)
        before = observer.amax.clone()
        kv.mul_(3)
        graph.replay()
    torch.testing.assert_close(observer.amax[0, 1], 3 * before[0, 1])
