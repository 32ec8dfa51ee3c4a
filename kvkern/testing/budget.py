"""The error budget: how far from fp64 a kernel may be."""

import torch
from torch import Tensor

from kvkern.cache.storage import CacheView
from kvkern.reference.mla_decode import attend, mla_decode

_GAIN = 256.0  # of a row's largest weight, which keeps the small ones normal numbers of e4m3


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


def matmul_in_order(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in their dtype, a term of K after the other.

    The ``rounded`` of kernels that sum fp32 in fp32: libraries sum in pieces, whose errors are
    smaller, by how much depends on the card. An order that is no worse than this is no fault.
    """
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=a.dtype, device=a.device)
    for k in range(a.shape[-1]):
        total += a[..., k, None] * b[..., k, None, :]
    return total


def _assert_same_specials(result: Tensor, exact: Tensor) -> None:
    for name, of in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = of(result) != of(exact)
        assert not wrong.any(), f"{name} differs at {wrong.nonzero()[:4].tolist()}"


def decode_by_e4m3_weights(q: Tensor, cache: CacheView, *, softmax_scale: float) -> Tensor:
    """``mla_decode``'s ``out``, fp64, exact but for weights: the best that fp8 tensor cores can do.

    A kernel that multiplies weights and values in e4m3 rounds weights to 4 bits: as ``rounded`` of
    ``assert_within_budget`` this is what it is to be held against.
    """
    out = q.new_empty(*q.shape[:2], cache.format.kv_lora_rank, dtype=torch.float64)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    mla_decode(
        q.double(), cache.pages, cache.batch, softmax_scale, None, False, False, out, lse,
        attend_to=_attend_by_e4m3_weights,
    )  # fmt: skip
    return out


def _attend_by_e4m3_weights(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """On keys [s, D] that all heads share."""
    _, lse = attend(q, keys, values, visible, softmax_scale)
    scores = (torch.einsum("thd,sd->ths", q, keys) * softmax_scale).masked_fill(
        ~visible[:, None], -torch.inf
    )
    largest = scores.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.exp(scores - largest)
    rounded = (weights * _GAIN).float().to(torch.float8_e4m3fn).to(q.dtype) / _GAIN
    weight_sum = weights.sum(dim=-1, keepdim=True)
    out = torch.einsum("ths,sv->thv", rounded, values) / weight_sum.clamp(min=1e-300)
    return out, lse
