"""Linear layers: what is measured, as ``cases`` has it of attention, and its peer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.cases import Implementation
from kvkern import matmul_w4a16, matmul_w8a8, matmul_w8a16, quantize_int4, quantize_int8
from kvkern.testing.budget import assert_within_budget

_DTYPE = torch.bfloat16
_ROWS = 128  # that are compared


class Layer(NamedTuple):
    """A linear layer of a model: ``[num_columns, depth]`` as ``nn.Linear`` has its weight."""

    name: str
    num_columns: int
    depth: int


@dataclass(frozen=True)
class LinearCase:
    """``num_rows`` tokens through one layer."""

    op: Literal["matmul_w8a16", "matmul_w4a16", "matmul_w8a8"]
    model: Layer
    num_rows: int

    @property
    def format(self) -> str:
        """Of the weight."""
        return "int4" if self.op == "matmul_w4a16" else "int8"

    @property
    def name(self) -> str:
        layer = self.model
        return f"{self.op}-{layer.name}-M{self.num_rows}-N{layer.num_columns}-K{layer.depth}"

    @property
    def num_bytes(self) -> int:
        """Every input read once and every output written once."""
        num_columns, depth = self.model.num_columns, self.model.depth
        weight = num_columns * depth
        stored = weight // 2 + weight // 128 * 4 if self.format == "int4" else weight
        scales = 0 if self.format == "int4" else 4 * num_columns
        return stored + scales + 2 * self.num_rows * (num_columns + depth)

    @property
    def num_flops(self) -> int:
        return 2 * self.num_rows * self.model.num_columns * self.model.depth


_LAYERS = (Layer("llama2_7b_down", 4096, 11008), Layer("llama2_70b_o", 8192, 8192))
LINEAR_CASES: tuple[LinearCase, ...] = tuple(
    LinearCase(op, layer, num_rows)
    for op in ("matmul_w8a16", "matmul_w4a16", "matmul_w8a8")
    for layer in _LAYERS
    for num_rows in (1, 8, 16, 128)
)
_MATMULS: dict[str, Callable[..., Tensor]] = {
    "matmul_w8a16": matmul_w8a16,
    "matmul_w4a16": matmul_w4a16,
    "matmul_w8a8": matmul_w8a8,
}


class LinearStep:
    """A case's inputs; numbers have a mean, without which a sum's bias would not show."""

    def __init__(self, case: LinearCase, device: torch.device | str) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, torch.device(device)
        shape = case.model.num_columns, case.model.depth
        self.weight = torch.randn(shape, dtype=_DTYPE, device=device).add_(0.1)
        self.x = torch.randn(case.num_rows, shape[1], dtype=_DTYPE, device=device).add_(0.1)
        quantize: Callable[[Tensor], Any] = (
            quantize_int4 if case.format == "int4" else quantize_int8
        )
        self.quantized = quantize(self.weight)
        self.out = torch.empty(case.num_rows, shape[0], dtype=_DTYPE, device=device)

    def kvkern(self) -> Implementation:
        matmul = _MATMULS[self.case.op]

        def call() -> Tensor:
            return matmul(self.x, self.quantized, out=self.out)

        def check() -> None:
            got, x = call(), self.x[:_ROWS]
            exact = matmul(x.double(), self.quantized, backend="reference")
            rounded = matmul(x, self.quantized, backend="reference")
            assert_within_budget(got[:_ROWS], exact, rounded)

        return Implementation("kvkern", call, check)


def cublas(step: LinearStep) -> Implementation:
    """PyTorch's product with the weight that was not quantised."""
    out, transposed = torch.empty_like(step.out), step.weight.T

    def call() -> Tensor:
        return torch.mm(step.x, transposed, out=out)

    def check() -> None:
        exact = step.x.double() @ step.weight.double().T
        assert_within_budget(call(), exact, exact.to(_DTYPE), ulps=2)

    return Implementation("cublas", call, check, "bf16 weights")
