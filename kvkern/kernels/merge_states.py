"""merge_states: lse = log sum exp(lse_s), out = sum exp(lse_s - lse) * out_s."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvkern.kernels.config import KernelConfig, config_of_call
from kvkern.kernels.numerics import round_to


@triton.jit(do_not_specialize=["num_splits"])
def _merge_states_kernel(
    outs_ptr,  # [S, T, H, V]
    lses_ptr,  # fp32 [S, T, H]
    out_ptr,  # [T, H, V]
    lse_ptr,  # fp32 [T, H]
    num_splits,
    num_rows,  # T * H
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program per (token, head) row; splits are read in order, so results repeat bitwise."""
    row = tl.program_id(0).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V)
    mask_v = offs_v < VALUE_DIM

    acc = tl.zeros([BLOCK_V], tl.float32)
    weight_sum = 0.0
    max_lse = -float("inf")
    split_row = row
    for _ in range(num_splits):
        lse = tl.load(lses_ptr + split_row)
        # an empty split, marked -inf or +inf, is skipped, not weighted by 0: it may hold NaN
        if tl.abs(lse) != float("inf"):
            part = tl.load(outs_ptr + split_row * VALUE_DIM + offs_v, mask=mask_v, other=0.0)
            new_max = tl.maximum(max_lse, lse)
            rescale = tl.exp(max_lse - new_max)
            weight = tl.exp(lse - new_max)
            acc = acc * rescale + part.to(tl.float32) * weight
            weight_sum = weight_sum * rescale + weight
            max_lse = new_max
        split_row += num_rows

    weight_sum = tl.where(weight_sum == 0.0, 1.0, weight_sum)  # no part: max_lse stays -inf
    out = round_to(acc / weight_sum, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * VALUE_DIM + offs_v, out, mask=mask_v)
    tl.store(lse_ptr + row, max_lse + tl.log(weight_sum))


def merge_states(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Fill ``out`` and ``lse``. ``kvkern.merge_states`` has checked the arguments."""
    num_rows = outs.shape[1] * outs.shape[2]
    if num_rows == 0:
        return
    arguments, options = _call(outs, lses, out, lse)
    _merge_states_kernel[(num_rows,)](**arguments, **options)


def _call(
    outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor
) -> tuple[dict[str, object], dict[str, object]]:
    num_splits, num_tokens, num_heads, value_dim = outs.shape
    arguments = {
        "outs_ptr": outs,
        "lses_ptr": lses,
        "out_ptr": out,
        "lse_ptr": lse,
        "num_splits": num_splits,
        "num_rows": num_tokens * num_heads,
        "VALUE_DIM": value_dim,
        "BLOCK_V": triton.next_power_of_2(value_dim),
    }
    return arguments, {"num_warps": 4, "enable_fp_fusion": True}


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    """fp32 parts into every dtype (split decode), and each dtype into itself."""
    for value_dim in (512, 96):
        for parts in (torch.bfloat16, torch.float16, torch.float32):
            for merged in {parts, torch.bfloat16}:
                outs = torch.empty(2, 16, 1, value_dim, dtype=parts)
                lses = torch.empty(2, 16, 1)
                arguments, options = _call(outs, lses, outs[0].to(merged), lses[0])
                label = f"{parts}-{merged}-V{value_dim}".replace("torch.", "")
                yield config_of_call(_merge_states_kernel, label, arguments, options)
