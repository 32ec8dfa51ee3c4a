"""The error budget: how far from fp64 a kernel may be."""

import torch
from torch import Tensor


def assert_within_budget(
    result: Tensor,
    exact: Tensor,
    rounded: Tensor,
    *,
    eps_of: torch.dtype | None = None,
    ulps: int = 1,
) -> None:
    """``max|result - exact| <= 2 * max|rounded - exact| + ulps * eps * max|exact|``.

    Args:
        result: what is judged.
        exact: fp64, computed from inputs that were rounded to their dtype first.
        rounded: the reference in the same dtype as ``result``.
        eps_of: the dtype whose eps is allowed; default ``result``'s, for an fp32 result (a
            log-sum-exp, say) of 16-bit inputs name theirs.
        ulps: how many of those; more than one needs a reason where it is asked for.

    Infinities, NaN and empty tensors must agree exactly. Raises ``AssertionError`` with the
    numbers.
    """
    eps = torch.finfo(eps_of or result.dtype).eps
    result, exact, rounded = (x.double().cpu() for x in (result, exact, rounded))
    _assert_same_specials(result, exact)
    finite = exact.isfinite()
    if not finite.any():
        return
    error = (result - exact)[finite].abs().max().item()
    allowed = 2 * (rounded - exact)[finite].abs().max().item()
    allowed += ulps * eps * exact[finite].abs().max().item()
    assert error <= allowed, f"error {error:.3e} is over the budget {allowed:.3e}"


def _assert_same_specials(result: Tensor, exact: Tensor) -> None:
    for name, of in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = of(result) != of(exact)
        assert not wrong.any(), f"{name} differs at {wrong.nonzero()[:4].tolist()}"
