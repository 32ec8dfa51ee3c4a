"""``mla_absorb``: both sides of absorbed attention, inputs and checks, PyTorch beside them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from benchmarks.cases import Implementation, Model
from kvkern import absorb_weights, mla_absorb, quantize_fp8
from kvkern.testing.budget import assert_within_budget

_DTYPE = torch.bfloat16
_BLOCK = 128
_TOKENS = 16  # that are compared, at most, and one
_MEAN = 0.25  # without one, sums that are cut off would show no bias


@dataclass(frozen=True)
class AbsorbCase:
    """``query``: q_nope into the packed query; ``output``: attention's output by ``w_uv``."""

    model: Model
    side: Literal["query", "output"]
    num_tokens: int
    format: Literal["bf16", "fp8"] = "bf16"  # of weights; fp8 has scales of 128 x 128
    op: str = "mla_absorb"

    @property
    def name(self) -> str:
        return f"{self.op}-{self.model.name}-{self.side}-{self.format}-T{self.num_tokens}"

    @property
    def depth(self) -> int:
        return self.model.nope_dim if self.side == "query" else self.model.kv_lora_rank

    @property
    def num_columns(self) -> int:
        return self.model.kv_lora_rank if self.side == "query" else self.model.v_dim

    @property
    def num_bytes(self) -> int:
        """Every input read once and the output written once."""
        k, n = self.depth, self.num_columns
        weight = 2 * k * n
        if self.format == "fp8":
            weight = k * n + 4 * -(-k // _BLOCK) * -(-n // _BLOCK)
        return self.model.num_heads * (weight + 2 * self.num_tokens * (k + n))

    @property
    def num_flops(self) -> int:
        return 2 * self.num_tokens * self.model.num_heads * self.depth * self.num_columns


ABSORB_CASES: tuple[AbsorbCase, ...] = tuple(
    AbsorbCase(model, side, num_tokens, weights)
    for weights in ("bf16", "fp8")
    for model in (Model("deepseek_v3", 128), Model("deepseek_v3_tp8", 16))
    for side in ("query", "output")
    for num_tokens in (1, 16, 128, 512, 4096)
)


class AbsorbStep:
    """A case's inputs on a device; the same every time."""

    def __init__(self, case: AbsorbCase, device: torch.device | str) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, torch.device(device)
        model, tokens = case.model, case.num_tokens
        rope = model.rope_dim if case.side == "query" else 0
        shape = (model.num_heads * (model.nope_dim + model.v_dim), model.kv_lora_rank)
        weight = torch.randn(shape, device=device, dtype=_DTYPE).add_(_MEAN)
        self.w, self.scale = self._split(weight, model.nope_dim, model.v_dim), None
        if case.format == "fp8":
            values, scale = quantize_fp8(weight, granularity="block")
            self.w = self._split(values, model.nope_dim, model.v_dim)
            self.scale = self._split(scale, model.nope_dim // _BLOCK, model.v_dim // _BLOCK)
        heads = (tokens, model.num_heads)
        x = torch.randn(*heads, case.depth + rope, device=device, dtype=_DTYPE).add_(_MEAN)
        self.x = x[..., : case.depth]
        self.packed = torch.zeros(*heads, case.num_columns + rope, device=device, dtype=_DTYPE)
        self.out = self.packed[..., : case.num_columns]

    def _split(self, x: Tensor, nope_dim: int, v_dim: int) -> Tensor:
        heads = self.case.model.num_heads
        parts = absorb_weights(x, num_heads=heads, nope_dim=nope_dim, v_dim=v_dim)
        return parts[self.case.side == "output"]

    def kvkern(self) -> Implementation:
        def call() -> Tensor:
            return mla_absorb(self.x, self.w, scale=self.scale, out=self.out)

        return Implementation("kvkern", call, lambda: self.check(call()))

    def check(self, got: Tensor) -> None:
        """By the budget, on some tokens; the rope columns must be as they were."""
        assert got.isfinite().all(), "result: want finite"
        assert not self.packed[..., self.case.num_columns :].any(), "rope columns: want untouched"
        num = self.case.num_tokens
        tokens = sorted({*range(0, num, max(num // _TOKENS, 1)), num - 1})
        x = self.x[tokens]
        rounded = mla_absorb(x, self.w, scale=self.scale, backend="reference")
        w = self.w if self.case.format == "fp8" else self.w.double()
        exact = mla_absorb(x.double(), w, scale=self.scale, backend="reference")
        assert_within_budget(got[tokens], exact, rounded)


def torch_bmm(step: AbsorbStep) -> Implementation:
    """PyTorch's batched product into the same view; of an fp8 weight's numbers in bf16."""
    w = step.w
    if step.scale is not None:
        eye = torch.eye(step.case.depth, device=step.device, dtype=_DTYPE)
        eye = eye[:, None].expand(-1, w.shape[0], -1)
        w = mla_absorb(eye, w, scale=step.scale, backend="reference").transpose(0, 1).contiguous()
    x, out = step.x.transpose(0, 1), step.out.transpose(0, 1)

    def call() -> Tensor:
        torch.bmm(x, w, out=out)
        return step.out

    if step.scale is not None:
        return Implementation("torch_bmm", call, None, "weights in bf16")
    return Implementation("torch_bmm", call, lambda: step.check(call()))


def torch_einsum(step: AbsorbStep) -> Implementation | None:
    """As engines write it, and copied into the view."""
    if step.scale is not None:
        return None

    def call() -> Tensor:
        step.out.copy_(torch.einsum("thk,hkn->thn", step.x, step.w))
        return step.out

    return Implementation("torch_einsum", call, lambda: step.check(call()))


PEERS: tuple[Callable[[AbsorbStep], Implementation | None], ...] = (torch_bmm, torch_einsum)
