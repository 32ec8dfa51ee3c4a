"""merge_states: partial attentions over disjoint keys, merged by log-sum-exp."""

import pytest
import torch

import kvkern
from kvkern import merge_states
from kvkern.testing.budget import assert_within_budget

BACKENDS = ["triton", "reference"]


def make_splits(num_splits, value_dim, dtype, device, num_tokens=5, num_heads=3):
    outs = torch.randn(num_splits, num_tokens, num_heads, value_dim).to(device=device, dtype=dtype)
    return outs, (torch.randn(num_splits, num_tokens, num_heads) * 3).to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("value_dim", [512, 96])  # the latent's, and no power of two
@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_merge_matches_fp64(num_splits, value_dim, dtype, device):
    outs, lses = make_splits(num_splits, value_dim, dtype, device)
    weights = torch.softmax(lses.double(), dim=0)[..., None]
    rounded = merge_states(outs, lses, backend="reference")
    merged = merge_states(outs, lses, backend="triton")
    assert_within_budget(merged.out, (weights * outs.double()).sum(0), rounded.out)
    assert_within_budget(merged.lse, torch.logsumexp(lses.double(), 0), rounded.lse)


def test_reference_equals_attention_over_all_keys():
    """A second formulation: one softmax over the keys that were split."""
    scores, values = torch.randn(4, 2, 11).double(), torch.randn(11, 6).double()
    parts = [slice(0, 3), slice(3, 4), slice(4, 11)]
    outs = torch.stack([scores[..., p].softmax(-1) @ values[p] for p in parts])
    lses = torch.stack([scores[..., p].logsumexp(-1) for p in parts]).float()
    merged = merge_states(outs, lses, backend="reference")
    torch.testing.assert_close(merged.out, scores.softmax(-1) @ values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(merged.lse, scores.logsumexp(-1).float())


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_splits_are_never_read(backend, empty, device):
    """Whichever infinity a kernel marks them with, and wherever they are: first, last, between."""
    outs, lses = make_splits(6, 96, torch.bfloat16, device)
    lses[::2] = empty
    expected = merge_states(outs[1::2].contiguous(), lses[1::2].contiguous(), backend=backend)
    outs[::2] = torch.nan
    merged = merge_states(outs, lses, backend=backend)
    if backend == "triton":  # skips them; the reference adds zeros, perhaps in another order
        assert all(map(torch.equal, merged, expected))
    assert torch.isfinite(merged.out).all()
    torch.testing.assert_close(merged.out, expected.out)
    torch.testing.assert_close(merged.lse, expected.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_without_keys_is_zero_with_minus_inf_lse(backend, device):
    outs, lses = make_splits(3, 128, torch.bfloat16, device)
    outs[:, 2], lses[:, 2] = torch.nan, -torch.inf
    lses[1, 2] = torch.inf
    out, lse = merge_states(outs, lses, backend=backend)
    assert (out[2] == 0).all() and (lse[2] == -torch.inf).all() and out.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_of_a_part_with_keys_is_not_hidden(backend, device):
    outs, lses = make_splits(2, 128, torch.float32, device)
    outs[1, 3], lses[0, 4] = torch.nan, torch.nan
    out, lse = merge_states(outs, lses, backend=backend)
    assert out[3:].isnan().all() and lse[4].isnan().all() and out[:3].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_natural_log_is_the_base(backend, device):
    """Two parts of weight 1 and 3: ln 1 and ln 3. In base 2 the merge would be 1 : 2.1."""
    outs = torch.tensor([0.0, 4.0], device=device).view(2, 1, 1, 1)
    lses = torch.tensor([1.0, 3.0], device=device).log().view(2, 1, 1)
    out, lse = merge_states(outs, lses, backend=backend)
    torch.testing.assert_close(out.item(), 3.0)
    torch.testing.assert_close(lse.exp().item(), 4.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_and_no_splits(backend, device):
    outs, lses = make_splits(2, 16, torch.float32, device, num_tokens=0)
    assert merge_states(outs, lses, backend=backend).out.shape == (0, 3, 16)
    outs, lses = make_splits(0, 16, torch.float32, device)
    out, lse = merge_states(outs, lses, backend=backend)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_given_out_is_filled(backend, device):
    outs, lses = make_splits(2, 16, torch.float32, device)
    out = torch.empty(5, 3, 16, device=device)
    assert merge_states(outs, lses, out=out, backend=backend).out is out
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            lambda outs, lses: (outs, lses[..., :2].contiguous()),
            kvkern.ShapeMismatchError,
            r"lses: want \[S=2, T=5, H=3\], got \[2, 5, 2\]",
        ),
        (
            lambda outs, lses: (outs.int(), lses),
            kvkern.UnsupportedDtypeError,
            r"outs: want bfloat16 or .*, got torch.int32",
        ),
        (
            lambda outs, lses: (outs, lses.double()),
            kvkern.UnsupportedDtypeError,
            r"lses: want float32, got torch.float64",
        ),
        (
            lambda outs, lses: (outs.mT, lses),
            kvkern.LayoutError,
            r"outs: want contiguous, got strides",
        ),
        (
            lambda outs, lses: (outs[0], lses),
            kvkern.ShapeMismatchError,
            r"outs: want \[S=any, T=any, H=any, V=any\], got \[5, 3, 128\]",
        ),
    ],
)
def test_refused_argument_is_named_with_wanted_and_got(spoil, error, message, device):
    with pytest.raises(error, match=message):
        merge_states(*spoil(*make_splits(2, 128, torch.bfloat16, device)))
