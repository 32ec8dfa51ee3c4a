"""Quantisers, alone and behind a norm or an activation: what is measured, as in ``cases.py``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import kvkern
from benchmarks.cases import Implementation, Model
from kvkern import QuantizedFP8
from kvkern.ops.quantize import Granularity

_DTYPE = torch.bfloat16
_V3 = Model("deepseek_v3", 128)  # its hidden size is 7168
_MOST_OTHER_CODES = 1e-3  # of a norm or an activation, whose last bits differ between backends


@dataclass(frozen=True)
class QuantizeCase:
    """``num_rows`` rows of ``num_columns`` numbers in fp8, from or to bf16."""

    op: Literal["quantize_fp8", "dequantize_fp8", "rms_norm_quant_fp8", "silu_and_mul_quant_fp8"]
    num_rows: int
    num_columns: int
    granularity: Granularity
    is_static: bool = False
    has_residual: bool = False
    column_major_scales: bool = False
    dtype: torch.dtype = torch.float8_e4m3fn
    model: Model = _V3
    num_flops: int = 0

    @property
    def name(self) -> str:
        words = ["static"] * self.is_static + ["residual"] * self.has_residual
        words += ["column_major"] * self.column_major_scales
        shape = f"M{self.num_rows}-K{self.num_columns}"
        return "-".join([self.op, self.format, self.granularity, shape, *words])

    @property
    def format(self) -> str:
        return str(self.dtype).removeprefix("torch.float8_")

    @property
    def num_bytes(self) -> int:
        """Every input read once and every output written once."""
        inputs = {"silu_and_mul_quant_fp8": 2}.get(self.op, 1) + 2 * self.has_residual
        gamma = 2 * self.num_columns if self.op == "rms_norm_quant_fp8" else 0
        num_elements = self.num_rows * self.num_columns
        return num_elements * (inputs * _DTYPE.itemsize + 1) + 4 * self.num_scales + gamma

    @property
    def num_scales(self) -> int:
        groups = -(-self.num_columns // 128)
        return {
            "tensor": 1,
            "row": self.num_rows,
            "group": self.num_rows * groups,
            "block": -(-self.num_rows // 128) * groups,
        }[self.granularity]


QUANTIZE_CASES: tuple[QuantizeCase, ...] = tuple(
    QuantizeCase(op, num_rows, 7168, granularity, **others)  # type: ignore[arg-type]
    for num_rows in (4096, 64)
    for op, granularity, others in (
        ("quantize_fp8", "tensor", {}),
        ("quantize_fp8", "tensor", {"is_static": True}),
        ("quantize_fp8", "row", {}),
        ("quantize_fp8", "group", {}),
        ("quantize_fp8", "group", {"column_major_scales": True}),
        ("quantize_fp8", "block", {}),
        ("quantize_fp8", "row", {"dtype": torch.float8_e5m2}),
        ("dequantize_fp8", "tensor", {}),
        ("dequantize_fp8", "row", {}),
        ("dequantize_fp8", "group", {}),
        ("dequantize_fp8", "block", {}),
        ("rms_norm_quant_fp8", "tensor", {"is_static": True}),
        ("rms_norm_quant_fp8", "row", {}),
        ("rms_norm_quant_fp8", "row", {"has_residual": True}),
        ("rms_norm_quant_fp8", "group", {}),
        ("silu_and_mul_quant_fp8", "row", {}),
        ("silu_and_mul_quant_fp8", "group", {}),
    )
)


class QuantizeStep:
    """A case's inputs on a device; the same every time."""

    def __init__(self, case: QuantizeCase, device: torch.device | str) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, torch.device(device)
        num_columns = case.num_columns * (1 + (case.op == "silu_and_mul_quant_fp8"))
        self.x = self.randn(case.num_rows, num_columns)
        self.gamma = torch.rand(case.num_columns, device=device).add_(0.5).to(_DTYPE)
        self.residual = self.randn(case.num_rows, num_columns) if case.has_residual else None
        self.scale = torch.full((1,), 0.02, device=device) if case.is_static else None
        self.quantized = self._quantize("quantize_fp8", self.x[:, : case.num_columns], "auto")

    def randn(self, *shape: int) -> Tensor:
        """With a mean, without which a sum's bias would not show."""
        return torch.randn(shape, dtype=_DTYPE, device=self.device).add_(1.0)

    def kvkern(self) -> Implementation:
        def call() -> Any:
            return self._run("auto", self.residual)

        return Implementation("kvkern", call, self._check)

    def _run(self, backend: str, residual: Tensor | None) -> Any:
        case = self.case
        if case.op == "dequantize_fp8":
            return kvkern.dequantize_fp8(*self.quantized, dtype=_DTYPE, backend=backend)
        if case.op != "rms_norm_quant_fp8":
            return self._quantize(case.op, self.x, backend)
        return self._quantize(case.op, self.x, backend, gamma=self.gamma, residual=residual)

    def _quantize(self, op: str, x: Tensor, backend: str, **others: Any) -> QuantizedFP8:
        run: Callable[..., QuantizedFP8] = getattr(kvkern, op)
        case = self.case
        style = {
            "granularity": case.granularity,
            "scale": self.scale,
            "dtype": case.dtype,
            "column_major_scales": case.column_major_scales,
        }
        return run(x, **others, **style, backend=backend)

    def _check(self) -> None:
        """Bytes are the reference's; but for a few codes where the arithmetic before is another."""
        mine, other = (None if x is None else x.clone() for x in (self.residual, self.residual))
        got, want = self._run("auto", mine), self._run("reference", other)
        if mine is not None and other is not None:
            assert torch.equal(mine, other), "residual: want the reference's"
        if isinstance(got, Tensor):
            assert torch.equal(got, want), "result: want the reference's"
            return
        is_other = got.values.view(torch.uint8) != want.values.view(torch.uint8)
        is_exact = self.case.op == "quantize_fp8"
        allowed = 0.0 if is_exact else _MOST_OTHER_CODES
        share = is_other.double().mean().item()
        assert share <= allowed, f"codes: want at most {allowed:.1%} other, got {share:.1%}"
        tolerance = 0.0 if is_exact else 1e-5
        is_close = torch.allclose(got.scale, want.scale, rtol=tolerance, atol=0)
        assert is_close, "scale: want the reference's"
