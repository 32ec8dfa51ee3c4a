"""merge_states: lse = log sum exp(lse_s), out = sum exp(lse_s - lse) * out_s."""

import torch
from torch import Tensor


def merge_states(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """The specification; ``kvkern.merge_states`` states the contract."""
    compute = torch.float64 if outs.dtype == torch.float64 else torch.float32
    lses = lses.to(compute).masked_fill(lses == torch.inf, -torch.inf)
    is_empty = lses == -torch.inf
    merged = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - merged.nan_to_num(neginf=0.0))
    parts = outs.to(compute).masked_fill(is_empty[..., None], 0.0)
    out.copy_((weights[..., None] * parts).sum(0))
    lse.copy_(merged)
