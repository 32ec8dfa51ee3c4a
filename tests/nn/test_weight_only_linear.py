"""W8A16Linear and W4A16Linear: right, never stale, and a state dict of their own."""

import copy
import io
import weakref

import pytest
import torch
from torch import nn

import kvkern
from kvkern import dequantize_int4, dequantize_int8
from kvkern.nn import W4A16Linear, W8A16Linear

BF16 = torch.bfloat16
LAYERS = {
    "w8": (W8A16Linear, {}),
    "w8 zero": (W8A16Linear, {"symmetric": False}),
    "w4": (W4A16Linear, {}),
    "w4 g32 zero": (W4A16Linear, {"group_size": 32, "symmetric": False}),
    "w4 gK": (W4A16Linear, {"group_size": None}),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def linear(device, n=40, k=300, bias=True):
    return nn.Linear(k, n, bias=bias, device=device, dtype=BF16)


def from_linear(name, plain, **options):
    kind, own = LAYERS[name]
    return kind.from_linear(plain, **own, **options)


def empty(name, device, **options):
    kind, own = LAYERS[name]
    return kind(300, 40, **own, device=device, dtype=BF16, **options)


def rows(device, *shape):
    return torch.randn(*shape, 300, device=device).to(BF16)


def real_weight(layer):
    weight = layer.quantized_weight()
    dequantize = dequantize_int8 if isinstance(layer, W8A16Linear) else dequantize_int4
    return dequantize(weight, dtype=torch.float32)


def expected_of(name, layer, x):
    """By a layer that was made just now."""
    fresh = from_linear(name, nn.Linear(300, 40, device=x.device, dtype=BF16))
    fresh.weight, fresh.bias = nn.Parameter(layer.weight.detach().clone()), layer.bias
    return fresh(x)


@every_layer
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,)], ids=str)
def test_result_is_near_that_of_the_layer_it_was_made_of(name, shape, device):
    plain = linear(device)
    layer, x = from_linear(name, plain), rows(device, *shape)
    out, exact = layer(x), plain(x)
    assert out.shape == exact.shape and out.dtype == BF16
    if x.numel() > 0:
        off = 0.02 if name.startswith("w8") else 0.35
        assert (out - exact).float().std() < off * exact.float().std()
        product = x.float() @ real_weight(layer).T + layer.bias
        torch.testing.assert_close(out, product.to(BF16), rtol=0.02, atol=0.02)
    with torch.no_grad():
        assert torch.equal(layer(x), out)


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


@pytest.mark.parametrize("name", ["w8 zero", "w4 g32 zero"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_weight_is_never_multiplied_by_as_it_was(change, name, device):
    layer, x = from_linear(name, linear(device)), rows(device, 4)
    before = layer(x)
    for _ in range(2):
        change(layer)
        assert torch.equal(layer(x), expected_of(name, layer, x))
    assert not torch.equal(layer(x), before)


def test_another_weight_in_the_same_memory_is_another_weight(device):
    """Told apart by itself: address and version may be those of the one before."""
    layer, x = from_linear("w8", linear(device)), rows(device, 4)
    memory = layer.weight.detach()
    layer(x)
    version = layer.weight._version
    memory.data.copy_(torch.randn(40, 300))  # not counted
    layer.weight = nn.Parameter(memory)
    assert layer.weight._version == version
    assert torch.equal(layer(x), expected_of("w8", layer, x))


def test_loading_is_seen_where_changes_are_not_counted(device):
    with torch.inference_mode():
        layer, x = empty("w4", device), rows(device, 4)
        layer(x)
        load(layer)
        assert torch.equal(layer(x), expected_of("w4", layer, x))


@every_layer
def test_a_weight_is_quantised_once_for_each_change_in_place(name, device):
    plain = linear(device)
    layer, x = from_linear(name, plain), rows(device, 4)
    assert layer.weight is plain.weight and layer.bias is plain.bias
    layer(x)
    first = layer.quantized_weight()
    layer(x)
    assert layer.quantized_weight() is first
    double_in_place(layer)
    assert layer.quantized_weight().values.data_ptr() == first.values.data_ptr()
    assert list(layer.named_buffers()) == []


@every_layer
def test_master_can_be_let_go(name, device):
    layer, x = from_linear(name, linear(device)), rows(device, 4)
    with torch.no_grad():
        before, master = layer(x), weakref.ref(layer.weight)
        layer.release_master()
        assert master() is None and not layer.has_master
        assert torch.equal(layer(x), before)
        layer.release_master()  # again: nothing to do
    assert set(dict(layer.named_parameters())) == {"weight", "bias"}
    assert not from_linear(name, linear(device), keep_master=False).has_master


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("keep_master", [False, True])
@pytest.mark.parametrize("name", ["w8", "w4 g32 zero"])
def test_stored_and_float_state_dicts_go_into_either_kind(name, keep_master, assign, device):
    plain, x = linear(device), rows(device, 4)
    source = from_linear(name, plain)
    right = source(x)
    assert source.state_dict().keys() == plain.state_dict().keys()
    of_float = empty(name, device, keep_master=keep_master)
    of_float.load_state_dict(source.state_dict(), assign=assign)
    assert of_float.has_master == keep_master and torch.equal(of_float(x), right)
    source.release_master()
    zero = {"weight_zero"} if "zero" in name else set()
    assert set(source.state_dict()) == {"weight", "weight_scale", "bias"} | zero
    of_stored = nn.Sequential(empty(name, device, keep_master=keep_master))
    state = {f"0.{key}": tensor for key, tensor in source.state_dict().items()}
    of_stored.load_state_dict(state, assign=assign)
    assert not of_stored[0].has_master and torch.equal(of_stored(x), right)


def test_stored_weight_without_its_scale_is_refused_and_changes_nothing(device):
    layer = from_linear("w8", linear(device))
    before = layer.weight.detach().clone()
    stored = layer.quantized_weight().values
    with pytest.raises(RuntimeError, match="weight: want weight_scale beside quantised weights"):
        layer.load_state_dict({**layer.state_dict(), "weight": stored})
    assert layer.has_master and torch.equal(layer.weight, before)


def test_weights_of_other_groups_are_refused(device):
    other = from_linear("w4", linear(device), keep_master=False)
    with pytest.raises(RuntimeError, match="size mismatch for weight_scale"):
        empty("w4 gK", device).load_state_dict(other.state_dict())


@every_layer
@pytest.mark.parametrize("keep_master", [False, True])
def test_gradients_are_those_of_the_weight_that_was_multiplied_by(name, keep_master, device):
    layer = from_linear(name, linear(device), keep_master=keep_master)
    x = rows(device, 3, 5).requires_grad_()
    grad = torch.randn(3, 5, 40, device=device).to(BF16)
    layer(x).backward(grad)
    torch.testing.assert_close(x.grad, grad @ real_weight(layer).to(BF16))
    torch.testing.assert_close(layer.bias.grad, grad.float().sum((0, 1)).to(BF16))
    if keep_master:
        expected = grad.flatten(0, 1).T @ x.detach().flatten(0, 1)
        torch.testing.assert_close(layer.weight.grad, expected)
    else:
        assert not layer.weight.requires_grad and layer.weight.grad is None


@pytest.mark.parametrize("name", ["w8 zero", "w4 g32 zero"])
@pytest.mark.parametrize("convert", [lambda m: m.to(torch.float16), lambda m: m.double()])
def test_without_a_master_no_cast_touches_codes_scales_and_zeros(name, convert, device):
    layer = from_linear(name, linear(device), keep_master=False)
    before = layer.quantized_weight()
    kept = [tensor.clone() for tensor in before[:3]]
    convert(layer)
    after = layer.quantized_weight()
    assert all(map(torch.equal, kept, after[:3]))
    assert [t.dtype for t in after[:3]] == [t.dtype for t in kept]
    assert layer.bias.dtype in (torch.float16, torch.float64)


@pytest.mark.parametrize("keep_master", [False, True])
def test_copies_and_pickles_are_layers_of_their_own(keep_master, device):
    layer, x = from_linear("w4", linear(device), keep_master=keep_master), rows(device, 4)
    right = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in [copy.deepcopy(layer), torch.load(file, weights_only=False)]:
        assert torch.equal(other(x), right)
        if keep_master:
            double_in_place(other)
            assert not torch.equal(other(x), right)
    assert torch.equal(layer(x), right)


def test_a_layer_without_memory_can_be_made_and_filled(device):
    source, x = from_linear("w4", linear(device), keep_master=False), rows(device, 4)
    layer = W4A16Linear(300, 40, keep_master=False, device="meta", dtype=BF16)
    layer.to_empty(device=device).load_state_dict(source.state_dict())
    assert torch.equal(layer(x), source(x))


def test_no_bias(device):
    layer, x = from_linear("w8", linear(device, bias=False)), rows(device, 4)
    assert layer.bias is None and set(layer.state_dict()) == {"weight"}
    assert torch.equal(layer(x), expected_of("w8", layer, x))


@pytest.mark.gpu
def test_refresh_reaches_a_captured_graph():
    layer, x = from_linear("w4", linear("cuda")), rows("cuda", 4)
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
    with pytest.raises(kvkern.ArgumentError, match="group_size: want 32, 64, 128 or None, got 100"):
        W4A16Linear(4, 4, group_size=100)
    with pytest.raises(kvkern.ArgumentError, match="group_size: want 32, 64, 128 or None, got 5"):
        W4A16Linear.from_linear(linear(device), group_size=5)
    layer = W4A16Linear(4, 6, device=device)
    with pytest.raises(kvkern.ShapeMismatchError, match=r"x: want \[..., in_features=4\], got"):
        layer(torch.zeros(2, 6, device=device))
    with pytest.raises(kvkern.UnsupportedDtypeError, match="x: want bfloat16 or float16"):
        layer(torch.zeros(2, 4, device=device))
    assert repr(layer) == (
        "W4A16Linear(in_features=4, out_features=6, bias=True, symmetric=True, keep_master=True, "
        "group_size=128)"
    )
