"""The budget of kernels that multiply weights and values in e4m3."""

import pytest
import torch

from kvkern import CacheFormat, mla_decode
from kvkern.testing.budget import assert_within_budget, decode_by_e4m3_weights
from kvkern.testing.inputs import make_paged_case

SCALE = 0.1


def make(num_padding=0):
    case = make_paged_case(CacheFormat("fp8", 128, 32), [70, 3, 200], [1, 0, 2], page_size=16)
    q = torch.randn(3 + num_padding, 8, 160, dtype=torch.bfloat16)
    return case.view, q


def exact(q, view):
    return mla_decode(q.double(), view, softmax_scale=SCALE, backend="reference").out


def test_weights_that_e4m3_holds_are_exact():
    view, q = make()
    q.zero_()  # all weights are 1
    out = decode_by_e4m3_weights(q, view, softmax_scale=SCALE)
    torch.testing.assert_close(out, exact(q, view), rtol=1e-12, atol=1e-12)


def test_other_weights_err_as_4_bits_do():
    view, q = make()
    want = exact(q, view)
    error = (decode_by_e4m3_weights(q, view, softmax_scale=SCALE) - want).norm() / want.norm()
    assert 2**-9 < error < 2**-5


def test_padding_gives_zero():
    view, q = make(num_padding=2)
    assert (decode_by_e4m3_weights(q, view, softmax_scale=SCALE)[-2:] == 0).all()


def test_budget_takes_rounded_weights_and_no_wrong_ones():
    view, q = make()
    want, rounded = exact(q, view), decode_by_e4m3_weights(q, view, softmax_scale=SCALE)
    assert_within_budget(rounded.bfloat16(), want, rounded)
    wrong = decode_by_e4m3_weights(q, view, softmax_scale=1.2 * SCALE)
    with pytest.raises(AssertionError, match="over the budget"):
        assert_within_budget(wrong.bfloat16(), want, rounded)
