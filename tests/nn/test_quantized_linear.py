"""All layers with a quantised weight: right, never stale, and state dicts of either kind."""

import copy
import io
import weakref

import pytest
import torch
from torch import nn

import kvkern
from kvkern import dequantize_fp8, dequantize_int4, dequantize_int8
from kvkern.nn import FP8Linear, W4A16Linear, W8A16Linear

BF16 = torch.bfloat16
N, K = 200, 260  # blocks, groups and chunks end in the middle of the last one
LAYERS = {
    "fp8": (FP8Linear, {}),
    "fp8 row": (FP8Linear, {"scaling": "row"}),
    "w8": (W8A16Linear, {}),
    "w8 zero": (W8A16Linear, {"symmetric": False}),
    "w4": (W4A16Linear, {}),
    "w4 g32 zero": (W4A16Linear, {"group_size": 32, "symmetric": False}),
    "w4 gK": (W4A16Linear, {"group_size": None}),
}
KEYS = {
    FP8Linear: {"weight", "weight_scale_inv", "bias"},
    W8A16Linear: {"weight", "weight_scale", "bias"},
    W4A16Linear: {"weight", "weight_scale", "bias"},
}
ERRORS = {FP8Linear: 0.06, W8A16Linear: 0.02, W4A16Linear: 0.35}  # of a result, relative RMS
every_layer = pytest.mark.parametrize("name", LAYERS)
each_kind = pytest.mark.parametrize("name", ["fp8", "w8 zero", "w4 g32 zero"])
with_and_without_master = pytest.mark.parametrize("keep_master", [True, False])


@pytest.fixture(params=[False, True], ids=["data", "swap"])
def way_to_convert(request):
    """PyTorch's two: other data in a parameter, or another tensor swapped for it."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(request.param)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


converted_either_way = pytest.mark.usefixtures("way_to_convert")


def linear(device, bias=True, dtype=BF16):
    return nn.Linear(K, N, bias=bias, device=device, dtype=dtype)


def from_linear(name, plain, **options):
    kind, own = LAYERS[name]
    return kind.from_linear(plain, **own, **options)


def new(name, device, **options):
    kind, own = LAYERS[name]
    return kind(K, N, **own, device=device, dtype=BF16, **options)


def rows(device, *shape, dtype=BF16):
    return torch.randn(*shape, K, device=device).to(dtype)


def real_weight(layer):
    weight = layer.quantized_weight()
    if isinstance(layer, FP8Linear):
        return dequantize_fp8(*weight, dtype=torch.float32)
    dequantize = dequantize_int8 if isinstance(layer, W8A16Linear) else dequantize_int4
    return dequantize(weight, dtype=torch.float32)


def expected_of(name, layer, x):
    """By a layer that was made just now."""
    fresh = new(name, x.device)
    fresh.weight, fresh.bias = nn.Parameter(layer.weight.detach().clone()), layer.bias
    return fresh(x)


def places(layer):
    return [tensor.data_ptr() for tensor in layer.quantized_weight() if hasattr(tensor, "data_ptr")]


@every_layer
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,)], ids=str)
def test_result_is_near_that_of_the_layer_it_was_made_of(name, shape, dtype, device):
    plain = linear(device, dtype=dtype)
    layer, x = from_linear(name, plain), rows(device, *shape, dtype=dtype)
    out, exact = layer(x), plain(x)
    assert out.shape == exact.shape and out.dtype == dtype
    if x.numel() > 0:
        error, size = ((given.float()).square().mean().sqrt() for given in (out - exact, exact))
        assert error < ERRORS[type(layer)] * size
    with torch.no_grad():
        assert torch.equal(layer(x), out)


@each_kind
@pytest.mark.parametrize("num_inputs, num_outputs", [(0, 5), (5, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_of_nothing_is_its_bias(name, num_inputs, num_outputs, device):
    kind, own = LAYERS[name]
    x = torch.randn(2, 3, num_inputs, device=device).to(BF16)
    layer = kind(num_inputs, num_outputs, **own, device=device, dtype=BF16)
    assert torch.equal(layer(x), layer.bias.expand(2, 3, num_outputs))


def double_in_place(layer):
    with torch.no_grad():
        layer.weight.mul_(2)


def step_an_optimizer(layer):
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD([layer.weight], lr=0.5).step()


def step_a_fused_optimizer(layer, kind=torch.optim.AdamW):
    layer.weight.grad = torch.ones_like(layer.weight)
    kind([layer.weight], lr=0.5, fused=True).step()


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


def write_behind_its_back_and_move(layer):
    layer.weight.data.mul_(7)
    layer.to(layer.weight.device)


CHANGES = [
    double_in_place, step_an_optimizer, step_a_fused_optimizer, load, load_by_assignment, replace,
    replace_data, write_behind_its_back_and_refresh, write_behind_its_back_and_move,
]  # fmt: skip
FUSED = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW]
if not torch.cuda.is_available():
    FUSED.append(torch.optim.Adagrad)  # on CUDA not with every PyTorch
every_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


@every_layer
@every_change
@converted_either_way
def test_a_changed_weight_is_never_multiplied_by_as_it_was(change, name, device):
    layer, x = from_linear(name, linear(device)), rows(device, 4)
    before = layer(x)
    for _ in range(2):
        change(layer)
        assert torch.equal(layer(x), expected_of(name, layer, x))
    assert not torch.equal(layer(x), before)


@every_layer
@pytest.mark.parametrize("kind", FUSED, ids=lambda kind: kind.__name__)
def test_a_step_of_a_fused_optimizer_is_seen(kind, name, device):
    """PyTorch does not count it as a change. In fp32: on the CPU its fused SGD leaves others."""
    layer = from_linear(name, linear(device, dtype=torch.float32))
    x = rows(device, 4)
    before = layer(x)
    for _ in range(2):
        step_a_fused_optimizer(layer, kind)
        assert torch.equal(layer(x), expected_of(name, layer, x))
    assert not torch.equal(layer(x), before)


@each_kind
@every_change
def test_the_copy_stays_where_graphs_read_it(change, name, device):
    layer = from_linear(name, linear(device))
    before = places(layer)
    change(layer)
    layer.refresh()
    assert places(layer) == before


@each_kind
def test_the_copy_stays_where_it_is_without_its_master(name, device):
    source = from_linear(name, linear(device), keep_master=False)
    for let_go in [
        lambda layer: layer.release_master(),
        lambda layer: layer.load_state_dict(source.state_dict()),
    ]:
        layer = from_linear(name, linear(device))
        before = places(layer)
        let_go(layer)
        assert not layer.has_master and places(layer) == before
        for state in [linear(device).state_dict(), source.state_dict()]:
            layer.load_state_dict(state)
            assert places(layer) == before


@each_kind
def test_a_weight_is_quantised_once_for_each_change(name, monkeypatch, device):
    kind, made = LAYERS[name][0], []
    quantize = kind._quantize

    def count(layer, weight):
        made.append(weight)
        return quantize(layer, weight)

    monkeypatch.setattr(kind, "_quantize", count)
    layer, x = from_linear(name, linear(device)), rows(device, 4).requires_grad_()
    for num_changes in (1, 2):
        for _ in range(3):
            layer(x).sum().backward()
        assert len(made) == num_changes
        double_in_place(layer)


@each_kind
def test_a_step_of_another_optimizer_costs_a_quantisation_at_most(name, monkeypatch, device):
    """And none of a frozen weight."""
    kind, made = LAYERS[name][0], []
    quantize = kind._quantize
    monkeypatch.setattr(kind, "_quantize", lambda *given: made.append(1) or quantize(*given))
    other, x = linear(device), rows(device, 4)
    for is_frozen in (False, True):
        layer = from_linear(name, linear(device).requires_grad_(not is_frozen))
        layer(x)
        made.clear()
        step_an_optimizer(other)
        for _ in range(3):
            layer(x)
        assert len(made) <= (0 if is_frozen else 1)


@each_kind
def test_another_weight_in_the_same_memory_is_another_weight(name, device):
    """Told apart by itself: address and version may be those of the one before."""
    layer, x = from_linear(name, linear(device)), rows(device, 4)
    memory = layer.weight.detach()
    layer(x)
    version = layer.weight._version
    memory.data.copy_(torch.randn(N, K))  # not counted
    layer.weight = nn.Parameter(memory)
    assert layer.weight._version == version
    assert torch.equal(layer(x), expected_of(name, layer, x))


@each_kind
def test_loading_is_seen_where_changes_are_not_counted(name, device):
    with torch.inference_mode():
        layer, x = new(name, device), rows(device, 4)
        layer(x)
        load(layer)
        assert torch.equal(layer(x), expected_of(name, layer, x))


@each_kind
def test_a_weight_of_inference_mode_is_never_stale(name, device):
    with torch.inference_mode():
        x = rows(device, 4)
        for layer in [new(name, device), from_linear(name, linear(device))]:
            before = layer(x)
            double_in_place(layer)
            assert torch.equal(layer(x), expected_of(name, layer, x))
            assert not torch.equal(layer(x), before)


@each_kind
def test_a_weight_of_inference_mode_lets_gradients_through(name, device):
    with torch.inference_mode():
        layer = from_linear(name, linear(device))
    x = rows(device, 4).requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(layer(x)) @ real_weight(layer).to(BF16))


@with_and_without_master
@each_kind
def test_a_layer_made_in_inference_mode_can_be_trained(name, keep_master, device):
    with torch.inference_mode():
        layer, other = (new(name, device, keep_master=keep_master) for _ in range(2))
    x = rows(device, 4).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None and layer.bias.grad is not None
    torch.optim.SGD(layer.parameters(), lr=0.5).step()
    layer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("kind_of_state", ["float", "quantised"])
@with_and_without_master
@pytest.mark.parametrize("assign", [False, True])
@each_kind
def test_a_layer_loaded_in_inference_mode_can_be_trained_and_loaded_again(
    name, assign, keep_master, kind_of_state, device
):
    plain = linear(device)
    source = from_linear(name, plain, keep_master=False)
    state = plain.state_dict() if kind_of_state == "float" else source.state_dict()
    layer, x = new(name, device, keep_master=keep_master), rows(device, 4).requires_grad_()
    with torch.inference_mode():
        layer.load_state_dict(state, assign=assign)
    out = layer(x)
    out.sum().backward()
    assert x.grad is not None and torch.equal(out, source(x))
    layer.load_state_dict(new(name, device, keep_master=layer.has_master).state_dict())
    assert not torch.equal(layer(x), out)


def call_with(layer, weight, x):
    return torch.func.functional_call(layer, {"weight": weight}, x)


def replace_and_call(layer, weight, x):
    layer.weight = nn.Parameter(weight)
    return layer(x)


@each_kind
@pytest.mark.parametrize("call", [call_with, replace_and_call])
def test_gradients_may_wait_for_calls_with_other_weights(call, name, device):
    layer = from_linear(name, linear(device, bias=False))
    before, sources = places(layer), [linear(device, bias=False) for _ in range(3)]
    inputs = [rows(device, 4).requires_grad_() for _ in sources]
    outs = [call(layer, s.weight.detach(), x) for s, x in zip(sources, inputs, strict=True)]
    with torch.no_grad():
        replace_and_call(layer, torch.zeros_like(layer.weight), inputs[0])
    sum(outs).sum().backward()
    for source, x in zip(sources, inputs, strict=True):
        weight = real_weight(from_linear(name, source)).to(BF16)
        torch.testing.assert_close(x.grad, torch.ones_like(outs[0]) @ weight)
    assert places(layer) == before


@each_kind
def test_a_weight_that_is_computed_at_each_use_has_gradients_of_all(name, device):
    layer = from_linear(name, linear(device, bias=False))
    nn.utils.parametrizations.weight_norm(layer)
    originals = list(layer.parametrizations.weight.parameters())
    x = rows(device, 4).requires_grad_()
    once = torch.autograd.grad(layer(x).sum(), [x, *originals])
    twice = torch.autograd.grad((layer(x) + layer(x)).sum(), [x, *originals])
    for of_one, of_two in zip(once, twice, strict=True):
        torch.testing.assert_close(of_two, 2 * of_one)


@each_kind
def test_a_weight_changed_in_place_before_its_gradients_is_refused_as_by_nn_linear(name, device):
    plain, x = linear(device), rows(device, 4).requires_grad_()
    for layer in [plain, from_linear(name, plain)]:
        out = layer(x).sum()
        double_in_place(layer)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


@each_kind
def test_a_layer_that_was_called_in_inference_mode_can_be_trained(name, device):
    layer, x = from_linear(name, linear(device)), rows(device, 4)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    step_an_optimizer(layer)
    assert torch.equal(layer(x), expected_of(name, layer, x))


@every_layer
def test_parameters_are_shared_and_nothing_else_is_registered(name, device):
    plain = linear(device).eval()
    layer = from_linear(name, plain)
    layer(rows(device, 4))
    assert layer.weight is plain.weight and layer.bias is plain.bias and not layer.training
    assert list(layer.named_buffers()) == []
    assert not any(isinstance(held, torch.Tensor) for held in vars(layer).values())


@every_layer
def test_master_can_be_let_go(name, device):
    layer, x = from_linear(name, linear(device)), rows(device, 4)
    with torch.no_grad():
        before, master = layer(x), weakref.ref(layer.weight)
        layer.release_master()
        assert master() is None and not layer.has_master
        assert torch.equal(layer(x), before)
        layer.release_master()  # again: nothing to do
        layer.refresh()
        assert torch.equal(layer(x), before)
    assert set(dict(layer.named_parameters())) == {"weight", "bias"}
    assert not from_linear(name, linear(device), keep_master=False).has_master


@every_layer
def test_a_new_layer_without_a_master_is_as_one_that_let_it_go(name, device):
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        layer = new(name, device, keep_master=False)
    finally:
        torch.set_default_dtype(default)
    released = from_linear(name, linear(device), keep_master=False)
    for key, tensor in released.state_dict().items():
        given = layer.state_dict()[key]
        assert given.shape == tensor.shape and given.dtype == tensor.dtype
    assert torch.equal(layer(rows(device, 2)), layer.bias.expand(2, N))  # by a weight of zeros


@pytest.mark.parametrize("assign", [False, True])
@with_and_without_master
@every_layer
def test_quantised_and_float_state_dicts_go_into_either_kind(name, keep_master, assign, device):
    plain, x = linear(device), rows(device, 4)
    source = from_linear(name, plain)
    right = source(x)
    assert source.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(source.state_dict())
    of_float = new(name, device, keep_master=keep_master)
    of_float(x)
    of_float.load_state_dict(plain.state_dict(), assign=assign)
    assert of_float.has_master == keep_master and torch.equal(of_float(x), right)
    source.release_master()
    zero = {"weight_zero"} if "zero" in name else set()
    assert set(source.state_dict()) == KEYS[type(source)] | zero
    of_quantised = nn.Sequential(new(name, device, keep_master=keep_master))
    of_quantised(x)
    state = {f"0.{key}": tensor for key, tensor in source.state_dict().items()}
    of_quantised.load_state_dict(state, assign=assign)
    assert not of_quantised[0].has_master and torch.equal(of_quantised(x), right)


def without_a_scale(state):
    del state[next(key for key in state if key.startswith("weight_scale"))]


def with_another_scale(state):
    state[next(key for key in state if key.startswith("weight_scale"))] = torch.ones(3, 3)


def of_a_float_of_another_shape(state):
    for key in [key for key in state if key.startswith("weight")]:
        del state[key]
    state["weight"] = torch.ones(N, K - 1)  # as many chunks and groups


def of_integers(state):
    state["weight"] = state["weight"].to(torch.int32)


def of_a_number(state):
    state["weight"] = 3


def with_a_scale_that_is_a_number(state):
    state[next(key for key in state if key.startswith("weight_scale"))] = 3


def with_another_bias(state):
    state["bias"] = torch.zeros(3)


def with_a_bias_of_integers(state):
    state["bias"] = state["bias"].to(torch.int32)


def of_a_float_with_another_bias(state):
    state.update(weight=torch.ones(N, K), bias=torch.zeros(3))


@with_and_without_master
@each_kind
@pytest.mark.parametrize(
    "spoil, message",
    [
        (without_a_scale, r"weight_scale\w*: want \[.*\] for a weight of torch.\w+, got none"),
        (with_another_scale, r"weight_scale\w*: want \[.*\] for a weight of .*, got \[3, 3\]"),
        (of_a_float_of_another_shape, r"weight: want \[200, 260\] for .*32, got \[200, 259\]"),
        (of_integers, r"weight: want torch.\w+ or a float of 16 bits or more, got .*int32"),
        (of_a_number, r"weight: want torch.\w+ or a float of 16 bits or more, got int"),
        (
            with_a_scale_that_is_a_number,
            r"weight_scale\w*: want \[.*\] for a weight of .*, got int",
        ),
        (with_another_bias, r"bias: want \[200\], got \[3\]"),
        (with_a_bias_of_integers, r"bias: want a float of 16 bits or more, got torch.int32"),
        (of_a_float_with_another_bias, r"bias: want \[200\], got \[3\]"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_a_state_dict_that_does_not_fit_changes_nothing(spoil, message, name, keep_master, device):
    layer, x = from_linear(name, linear(device), keep_master=keep_master), rows(device, 4)
    before = layer(x)
    state = from_linear(name, linear(device), keep_master=False).state_dict()
    spoil(state)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state, strict=False)
    assert layer.has_master == keep_master and torch.equal(layer(x), before)


@pytest.mark.parametrize("assign", [False, True])
@with_and_without_master
@each_kind
def test_a_weight_in_64_bits_can_be_loaded(name, keep_master, assign, device):
    plain, x = linear(device), rows(device, 4)
    layer = new(name, device, keep_master=keep_master)
    state = {"weight": plain.weight.double(), "bias": plain.bias}
    layer.load_state_dict(state, assign=assign)
    assert torch.equal(layer(x), from_linear(name, plain)(x))


@pytest.mark.parametrize("name, other", [("fp8", "w8"), ("w8", "fp8"), ("w8", "w4"), ("w4", "w8")])
@with_and_without_master
def test_a_quantised_weight_of_another_layer_is_refused(name, other, keep_master, device):
    state = from_linear(other, linear(device), keep_master=False).state_dict()
    with pytest.raises(RuntimeError, match=r"weight: want torch.\w+ or a float of 16 bits or more"):
        new(name, device, keep_master=keep_master).load_state_dict(state, strict=False)


@pytest.mark.parametrize(
    "name, other",
    [("fp8", "fp8 row"), ("w4", "w4 gK"), ("w8", "w8 zero"), ("w8 zero", "w8")],
)
@with_and_without_master
def test_scales_and_zeros_of_another_kind_are_refused(name, other, keep_master, device):
    state = from_linear(other, linear(device), keep_master=False).state_dict()
    with pytest.raises(RuntimeError, match=r"weight_\w+: want .* for a weight of .*, got"):
        new(name, device, keep_master=keep_master).load_state_dict(state, strict=False)


@every_layer
@with_and_without_master
def test_gradients_are_those_of_the_weight_that_was_multiplied_by(name, keep_master, device):
    layer = from_linear(name, linear(device), keep_master=keep_master)
    x = rows(device, 3, 5).requires_grad_()
    grad = torch.randn(3, 5, N, device=device).to(BF16)
    layer(x).backward(grad)
    torch.testing.assert_close(x.grad, grad @ real_weight(layer).to(BF16))
    torch.testing.assert_close(layer.bias.grad, grad.float().sum((0, 1)).to(BF16))
    if keep_master:
        expected = grad.flatten(0, 1).T @ x.detach().flatten(0, 1)
        torch.testing.assert_close(layer.weight.grad, expected)
    else:
        assert not layer.weight.requires_grad and layer.weight.grad is None


@each_kind
def test_gradients_have_the_dtype_of_what_they_are_for(name, device):
    layer, x = from_linear(name, linear(device, dtype=torch.float32)), rows(device, 3)
    grad = torch.randn(3, N, device=device).to(BF16)
    layer(x.requires_grad_()).backward(grad)
    assert [p.grad.dtype for p in (x, layer.weight, layer.bias)] == [BF16, *[torch.float32] * 2]
    torch.testing.assert_close(layer.bias.grad, grad.float().sum(0))  # not rounded between


@pytest.mark.parametrize("convert", [lambda m: m.to(torch.float16), lambda m: m.double()])
@every_layer
@converted_either_way
def test_without_a_master_no_cast_touches_the_quantised_weight(name, convert, device):
    layer = from_linear(name, linear(device), keep_master=False)
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    parameter = layer.weight
    convert(layer)
    assert layer.weight is parameter and layer.state_dict().keys() == before.keys()
    for key, tensor in layer.state_dict().items():
        if key == "bias":
            assert tensor.dtype in (torch.float16, torch.float64)
        else:
            assert tensor.dtype == before[key].dtype
            assert torch.equal(tensor.view(torch.uint8), before[key].view(torch.uint8))


@each_kind
@converted_either_way
def test_cast_master_is_quantised_again(name, device):
    layer, x = from_linear(name, linear(device, dtype=torch.float32)), rows(device, 4)
    layer(x)
    layer.to(BF16)
    assert torch.equal(layer(x), expected_of(name, layer, x))


@with_and_without_master
@each_kind
def test_copies_and_pickles_are_layers_of_their_own(name, keep_master, device):
    layer, x = from_linear(name, linear(device), keep_master=keep_master), rows(device, 4)
    right = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    held = sum(tensor.nbytes for tensor in layer.state_dict().values())
    assert held < file.tell() < held + 10_000  # no copy is in it
    file.seek(0)
    for other in [copy.deepcopy(layer), torch.load(file, weights_only=False)]:
        assert torch.equal(other(x), right)
        if keep_master:
            double_in_place(other)
            assert not torch.equal(other(x), right)
    assert torch.equal(layer(x), right)


@each_kind
@converted_either_way
def test_a_layer_without_memory_can_be_made_and_filled(name, device):
    plain, x = linear(device), rows(device, 4)
    source = from_linear(name, plain, keep_master=False)
    layer = new(name, "meta", keep_master=False)
    layer.to_empty(device=device).load_state_dict(source.state_dict())
    assert torch.equal(layer(x), source(x))
    for state in [source.state_dict(), plain.state_dict()]:
        layer = new(name, "meta", keep_master=False)
        layer.load_state_dict(state, assign=True)
        assert torch.equal(layer(x), source(x))


@each_kind
def test_no_bias(name, device):
    layer, x = from_linear(name, linear(device, bias=False)), rows(device, 4)
    assert layer.bias is None and set(layer.state_dict()) == {"weight"}
    assert torch.equal(layer(x), expected_of(name, layer, x))
    assert set(new(name, device, bias=False).state_dict()) == {"weight"}


@each_kind
def test_mistakes_say_what_to_change(name, device):
    layer = new(name, device)
    with pytest.raises(kvkern.ShapeMismatchError, match=r"x: want \[..., in_features=260\], got"):
        layer(torch.zeros(2, 6, device=device))
    with pytest.raises(kvkern.UnsupportedDtypeError, match="x: want a tensor, got NoneType"):
        layer(None)
    layer.weight = nn.Parameter(layer.weight.detach()[:1])
    with pytest.raises(kvkern.ShapeMismatchError, match=r"weight: want \[200, 260\], got \[1, 260"):
        layer(rows(device, 2))
    for given in [None, nn.Conv1d(3, 3, 1)]:
        want = f"linear: want an nn.Linear, got {type(given).__name__}"
        with pytest.raises(kvkern.ArgumentError, match=want):
            from_linear(name, given)
    with pytest.raises(
        kvkern.ArgumentError, match="linear: want one with a weight, got a lazy one"
    ):
        from_linear(name, nn.LazyLinear(5))


@pytest.mark.gpu
@each_kind
@every_change
def test_refresh_reaches_a_captured_graph(name, change):
    layer, x = from_linear(name, linear("cuda")), rows("cuda", 4)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
    change(layer)
    layer.refresh()
    graph.replay()
    assert torch.equal(out, expected_of(name, layer, x))


@pytest.mark.gpu
@each_kind
def test_a_stale_copy_in_a_captured_graph_is_made_at_the_replay_and_eagerly_before(name):
    layer, x = from_linear(name, linear("cuda")), rows("cuda", 4)
    with torch.no_grad():
        layer(x)
        layer.refresh()  # its kernels are compiled
        double_in_place(layer)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        right = expected_of(name, layer, x)
        assert torch.equal(layer(x), right)
        graph.replay()
        assert torch.equal(out, right)
