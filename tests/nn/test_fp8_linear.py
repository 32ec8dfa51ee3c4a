"""FP8Linear: right, never stale, no more copies than it says, and a state dict of its own."""

import copy
import io
import weakref

import pytest
import torch
from torch import nn

import kvkern
from kvkern import dequantize_fp8, quantize_fp8
from kvkern.nn import FP8Linear, fp8_linear

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SCALINGS = ["block", "row"]


def linear(device, n=200, k=260, dtype=BF16, bias=True):
    return nn.Linear(k, n, bias=bias, device=device, dtype=dtype)


def expected_of(layer, x):
    """By a layer that was made just now."""
    fresh = FP8Linear(layer.in_features, layer.out_features, scaling=layer.scaling, device=x.device)
    fresh.weight, fresh.bias = nn.Parameter(layer.weight.detach().clone()), layer.bias
    return fresh(x)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(260,), (1, 260), (3, 5, 260), (0, 260)], ids=str)
def test_result_is_near_that_of_the_layer_it_was_made_of(shape, dtype, scaling, device):
    plain = linear(device, dtype=dtype)
    layer = FP8Linear.from_linear(plain, scaling=scaling)
    x = torch.randn(shape, device=device).to(dtype)
    out, exact = layer(x), plain(x)
    assert out.shape == exact.shape and out.dtype == dtype
    if x.numel() > 0:
        assert (out - exact).float().square().mean() < 0.06**2 * exact.float().square().mean()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_result_is_scaled_mm_of_both_sides_quantised(scaling, device):
    layer = FP8Linear(260, 200, scaling=scaling, device=device, dtype=BF16)
    x = torch.randn(7, 260, device=device).to(BF16)
    a = quantize_fp8(x, granularity="group" if scaling == "block" else "row")
    w = quantize_fp8(layer.weight.detach(), granularity=scaling)
    product = kvkern.scaled_mm(a.values, w.values.T, a.scale, w.scale.T, bias=layer.bias.detach())
    assert torch.equal(layer(x), product)
    with torch.no_grad():
        assert torch.equal(layer(x), product)


def double_in_place(layer):
    with torch.no_grad():
        layer.weight.mul_(2)


def step_an_optimizer(layer):
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD([layer.weight], lr=0.5).step()


def load(layer):
    layer.load_state_dict({**layer.state_dict(), "weight": layer.weight.detach() * -3})


def load_by_assignment(layer):
    weight = layer.weight.detach() * -3
    layer.load_state_dict({**layer.state_dict(), "weight": weight}, assign=True)


def replace(layer):
    layer.weight = nn.Parameter(layer.weight.detach() * 5)


def replace_data(layer):
    layer.weight.data = layer.weight.data * 5


def write_behind_its_back_and_refresh(layer):
    layer.weight.data.mul_(7)
    layer.refresh()


CHANGES = [
    double_in_place, step_an_optimizer, load, load_by_assignment, replace, replace_data,
    write_behind_its_back_and_refresh,
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_weight_is_never_multiplied_by_as_it_was(change, scaling, device):
    layer = FP8Linear.from_linear(linear(device), scaling=scaling)
    x = torch.randn(4, 260, device=device).to(BF16)
    before = layer(x)
    for _ in range(2):
        change(layer)
        assert torch.equal(layer(x), expected_of(layer, x))
    assert not torch.equal(layer(x), before)


def test_a_weight_is_quantised_once_for_each_change(monkeypatch, device):
    made = []
    quantize = fp8_linear.quantize_fp8

    def count(x, **options):
        made.append(x.shape[0])
        return quantize(x, **options)

    monkeypatch.setattr(fp8_linear, "quantize_fp8", count)
    layer = FP8Linear.from_linear(linear(device))
    x = torch.randn(4, 260, device=device).to(BF16)
    for _ in range(3):
        layer(x)
    double_in_place(layer)
    for _ in range(3):
        layer(x)
    assert made.count(200) == 2 and made.count(4) == 6


def test_another_weight_in_the_same_memory_is_another_weight(device):
    """Told apart by itself: address and version may be those of the one before."""
    layer = FP8Linear.from_linear(linear(device))
    x = torch.randn(4, 260, device=device).to(BF16)
    memory = layer.weight.detach()
    layer(x)
    version = layer.weight._version
    memory.data.copy_(torch.randn(200, 260))  # not counted
    layer.weight = nn.Parameter(memory)
    assert layer.weight._version == version
    assert torch.equal(layer(x), expected_of(layer, x))


def test_loading_is_seen_where_changes_are_not_counted(device):
    with torch.inference_mode():
        layer = FP8Linear(260, 200, device=device, dtype=BF16)
        x = torch.randn(4, 260, device=device).to(BF16)
        layer(x)
        load(layer)
        assert torch.equal(layer(x), expected_of(layer, x))


def test_there_is_one_copy_and_it_is_of_8_bits(device):
    plain = linear(device)
    layer = FP8Linear.from_linear(plain)
    assert layer.weight is plain.weight and layer.bias is plain.bias
    layer(torch.randn(4, 260, device=device).to(BF16))
    values, scale = layer.quantized_weight()
    assert values.dtype == E4M3 and values.shape == (200, 260) and scale.numel() == 2 * 3
    assert [name for name, _ in layer.named_buffers()] == []
    held = [x for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    assert held == []
    again = layer.quantized_weight()
    double_in_place(layer)
    assert layer.quantized_weight().values.data_ptr() == again.values.data_ptr()  # in place


@pytest.mark.parametrize("scaling", SCALINGS)
def test_master_can_be_let_go(scaling, device):
    layer = FP8Linear.from_linear(linear(device), scaling=scaling)
    x = torch.randn(4, 260, device=device).to(BF16)
    with torch.no_grad():
        before, master = layer(x), weakref.ref(layer.weight)
        layer.release_master()
        assert master() is None and not layer.has_master
        assert torch.equal(layer(x), before)
        layer.release_master()  # again: nothing to do
        direct = FP8Linear.from_linear(linear(device), scaling=scaling, keep_master=False)
    assert not direct.has_master and direct.weight.dtype == E4M3
    held = sum(x.numel() * x.element_size() for x in layer.state_dict().values())
    assert held < 200 * 260 + 4 * 200 + 2 * 200 + 1


def test_state_dict_with_a_master_is_nn_linears(device):
    plain, layer = linear(device), FP8Linear(260, 200, device=device, dtype=BF16)
    x = torch.randn(4, 260, device=device).to(BF16)
    layer(x)
    layer.load_state_dict(plain.state_dict())
    assert layer.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(layer(x), FP8Linear.from_linear(plain)(x))
    plain.load_state_dict(layer.state_dict())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("keep_master", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_fp8_and_float_state_dicts_go_into_either_kind(scaling, keep_master, assign, device):
    source = FP8Linear.from_linear(linear(device), scaling=scaling)
    x = torch.randn(4, 260, device=device).to(BF16)
    right = source(x)
    options = {"scaling": scaling, "device": device, "dtype": BF16}
    of_float = FP8Linear(260, 200, keep_master=keep_master, **options)
    of_float.load_state_dict(source.state_dict(), assign=assign)
    assert of_float.has_master == keep_master and torch.equal(of_float(x), right)
    source.release_master()
    assert set(source.state_dict()) == {"weight", "weight_scale_inv", "bias"}
    of_fp8 = nn.Sequential(FP8Linear(260, 200, keep_master=keep_master, **options))
    state = {f"0.{name}": tensor for name, tensor in source.state_dict().items()}
    of_fp8.load_state_dict(state, assign=assign)
    assert not of_fp8[0].has_master and torch.equal(of_fp8(x), right)


def test_fp8_weight_without_its_scale_is_refused_and_changes_nothing(device):
    layer = FP8Linear.from_linear(linear(device))
    before = layer.weight.detach().clone()
    state = {**layer.state_dict(), "weight": before.to(E4M3)}
    with pytest.raises(RuntimeError, match="weight: want weight_scale_inv beside fp8"):
        layer.load_state_dict(state)
    assert layer.has_master and torch.equal(layer.weight, before)


def test_scales_of_another_kind_are_refused(device):
    rows = FP8Linear.from_linear(linear(device), scaling="row", keep_master=False)
    with pytest.raises(RuntimeError, match="size mismatch for weight_scale_inv"):
        FP8Linear(260, 200, device=device).load_state_dict(rows.state_dict())


@pytest.mark.parametrize("keep_master", [False, True])
def test_gradients_are_those_of_the_weight_that_was_multiplied_by(keep_master, device):
    layer = FP8Linear.from_linear(linear(device, dtype=torch.float32), keep_master=keep_master)
    x = torch.randn(3, 5, 260, device=device, requires_grad=True)
    grad = torch.randn(3, 5, 200, device=device)
    layer(x).backward(grad)
    real = dequantize_fp8(*layer.quantized_weight(), dtype=torch.float32)
    torch.testing.assert_close(x.grad, grad @ real)
    torch.testing.assert_close(layer.bias.grad, grad.sum((0, 1)))
    if keep_master:
        expected = grad.flatten(0, 1).T @ x.detach().flatten(0, 1)
        torch.testing.assert_close(layer.weight.grad, expected)
    else:
        assert not layer.weight.requires_grad and layer.weight.grad is None


def test_training_follows_the_weight(device):
    torch.manual_seed(1)
    layer = FP8Linear(64, 32, device=device)
    target, x = torch.randn(64, 32, device=device) / 8, torch.randn(256, 64, device=device)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        loss = (layer(x) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.05 * losses[0]


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.float16), lambda m: m.double()])
def test_without_a_master_no_cast_touches_fp8_or_its_scale(convert, device):
    layer = FP8Linear.from_linear(linear(device), keep_master=False)
    values, scale = layer.weight.detach().clone(), layer.weight_scale_inv.clone()
    convert(layer)
    assert layer.weight.dtype == E4M3 and layer.weight_scale_inv.dtype == torch.float32
    assert torch.equal(layer.weight.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(layer.weight_scale_inv, scale)
    assert layer.bias.dtype in (torch.float16, torch.float64)
    assert set(dict(layer.named_parameters())) == {"weight", "bias"}


def test_cast_master_is_quantised_again(device):
    layer = FP8Linear.from_linear(linear(device, dtype=torch.float32))
    x = torch.randn(4, 260, device=device)
    layer(x)
    layer.to(BF16)
    assert torch.equal(layer(x.to(BF16)), expected_of(layer, x.to(BF16)))


@pytest.mark.parametrize("keep_master", [False, True])
def test_copies_and_pickles_are_layers_of_their_own(keep_master, device):
    layer = FP8Linear.from_linear(linear(device), keep_master=keep_master)
    x = torch.randn(4, 260, device=device).to(BF16)
    right = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    others = [copy.deepcopy(layer), torch.load(file, weights_only=False)]
    for other in others:
        assert torch.equal(other(x), right)
        if keep_master:
            double_in_place(other)
            assert not torch.equal(other(x), right)
    assert torch.equal(layer(x), right)


def test_a_layer_without_memory_can_be_made_and_filled(device):
    source = FP8Linear.from_linear(linear(device), keep_master=False)
    layer = FP8Linear(260, 200, keep_master=False, device="meta", dtype=BF16)
    layer.to_empty(device=device).load_state_dict(source.state_dict())
    x = torch.randn(4, 260, device=device).to(BF16)
    assert torch.equal(layer(x), source(x))


def test_no_bias(device):
    layer = FP8Linear.from_linear(linear(device, bias=False))
    x = torch.randn(4, 260, device=device).to(BF16)
    assert layer.bias is None and set(layer.state_dict()) == {"weight"}
    assert torch.equal(layer(x), expected_of(layer, x))


@pytest.mark.gpu
def test_refresh_reaches_a_captured_graph():
    layer = FP8Linear.from_linear(linear("cuda"))
    x = torch.randn(4, 260, device="cuda").to(BF16)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        layer.weight.mul_(3)
        layer.refresh()
        graph.replay()
        assert torch.equal(out, layer(x))


def test_mistakes_say_what_to_change(device):
    with pytest.raises(kvkern.ArgumentError, match="scaling: want block or row, got 'tensor'"):
        FP8Linear(4, 4, scaling="tensor")
    layer = FP8Linear(4, 6, device=device)
    with pytest.raises(kvkern.ShapeMismatchError, match=r"x: want \[..., in_features=4\], got"):
        layer(torch.zeros(2, 6, device=device))
    assert repr(layer) == (
        "FP8Linear(in_features=4, out_features=6, bias=True, scaling='block', keep_master=True)"
    )
