"""``scaled_mm``: shapes of DeepSeek-V3's projections, their inputs and checks, other libraries."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.cases import Implementation, Model
from kvkern import explain, quantize_fp8, scaled_mm
from kvkern.testing.budget import assert_within_budget

Scaling = Literal["tensor", "row", "block"]  # block: 1 x 128 of a, 128 x 128 of b

_DTYPE = torch.bfloat16
_BLOCK = 128
_V3, _SQUARE = Model("deepseek_v3", 128), Model("square", 128)
_MEAN = 0.25  # without one, sums that are cut off would show no bias


@dataclass(frozen=True)
class MatmulCase:
    """``[M, K]`` of fp8 times a weight ``[N, K]``, transposed; out in bf16.

    Of E experts each has M rows, one's after another's, and a weight.
    """

    scaling: Scaling
    num_rows: int
    num_columns: int
    depth: int
    model: Model = _V3
    num_experts: int = 0  # none: one matrix
    op: str = "scaled_mm"

    @property
    def name(self) -> str:
        experts = f"E{self.num_experts}-" if self.num_experts else ""
        shape = f"{experts}M{self.num_rows}-N{self.num_columns}-K{self.depth}"
        return f"{self.op}-{self.model.name}-{self.scaling}-{shape}"

    @property
    def format(self) -> str:
        return self.scaling

    @property
    def num_bytes(self) -> int:
        """Every input read once and the output written once."""
        m, n, k = self.num_rows, self.num_columns, self.depth
        groups = -(-k // _BLOCK)
        num_scales = {"tensor": 2, "row": m + n, "block": groups * (m + -(-n // _BLOCK))}
        of_one = m * k + n * k + 2 * m * n + 4 * num_scales[self.scaling]
        return max(self.num_experts, 1) * of_one

    @property
    def num_flops(self) -> int:
        return max(self.num_experts, 1) * 2 * self.num_rows * self.num_columns * self.depth


_FEW_ROWS = (1, 8, 16, 32, 64, 128)
_LAYERS = (  # N, K
    (2112, 7168),  # query and latent down
    (24576, 1536),  # query up
    (7168, 16384),  # attention out
    (4096, 7168),  # an expert's gate and up
    (7168, 2048),  # its down
    (32768, 512),  # latent up
    (18432, 7168),  # a dense layer's gate, or up
)
MATMUL_CASES: tuple[MatmulCase, ...] = tuple(
    case
    for scaling in ("tensor", "row", "block")
    for case in (
        *(MatmulCase(scaling, rows, n, k) for n, k in _LAYERS for rows in _FEW_ROWS),
        *(MatmulCase(scaling, 4096, n, k) for n, k in _LAYERS[:-1]),
        MatmulCase(scaling, 8192, 8192, 8192, _SQUARE),
    )
) + tuple(
    MatmulCase(scaling, rows, n, k, num_experts=32)
    for scaling in ("row", "block")
    for n, k in _LAYERS[3:5]
    for rows in (1, 16, 64, 128, 256, 512, 1024)
)


class MatmulStep:
    """A case's inputs on a device; the same every time."""

    def __init__(self, case: MatmulCase, device: torch.device | str) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, torch.device(device)
        of_rows, of_weight = {"block": ("group", "block")}.get(case.scaling, (case.scaling,) * 2)
        experts = (case.num_experts,) if case.num_experts else ()
        self.a, self.scale_a = quantize_fp8(
            self.randn(math.prod(experts) * case.num_rows),
            granularity=of_rows,
            column_major_scales=of_rows == "group",
        )
        weight, scale = quantize_fp8(self.randn(*experts, case.num_columns), granularity=of_weight)
        self.b, self.scale_b = weight.mT, scale if of_weight == "tensor" else scale.mT
        self.row_offsets = None
        if experts:
            offsets = torch.arange(case.num_experts + 1, dtype=torch.int32, device=self.device)
            self.row_offsets = offsets * case.num_rows

    def randn(self, *rows: int) -> Tensor:
        return torch.randn(*rows, self.case.depth, device=self.device, dtype=_DTYPE).add_(_MEAN)

    def kvkern(self) -> Implementation:
        return self.by("kvkern")

    def by(self, name: str, **options: Any) -> Implementation:
        """kvkern's op, with other options than the defaults."""

        if self.row_offsets is not None:
            options["row_offsets"] = self.row_offsets

        def call() -> Tensor:
            return scaled_mm(self.a, self.b, self.scale_a, self.scale_b, **options)

        return Implementation(name, call, lambda: self.check(call()))

    def check(self, got: Tensor) -> None:
        """By the budget, on some rows and the first and the last block of columns.

        Of experts the first and the last are looked at.
        """
        assert got.isfinite().all(), "result: want finite"
        for expert in sorted({0, max(self.case.num_experts - 1, 0)}):
            rows = [expert * self.case.num_rows + row for row in self._sampled_rows()]
            for block in self._sampled_blocks():
                exact, rounded = (
                    self._part(rows, block, dtype, expert) for dtype in (torch.float64, _DTYPE)
                )
                columns = slice(block * _BLOCK, (block + 1) * _BLOCK)
                assert_within_budget(got[rows][:, columns], exact, rounded)

    def bias_of(self, got: Tensor) -> float:
        """The mean relative error of what ``check`` samples."""
        rows, errors = self._sampled_rows(), []
        for block in self._sampled_blocks():
            exact = self._part(rows, block, torch.float64)
            part = got[rows][:, block * _BLOCK : (block + 1) * _BLOCK]
            errors.append(float((part.double().mean() - exact.mean()) / exact.mean()))
        return max(errors, key=abs)

    def _sampled_rows(self) -> list[int]:
        num = self.case.num_rows
        return sorted({*range(0, num, max(num // 16, 1)), num - 1})

    def _sampled_blocks(self) -> set[int]:
        return {0, (self.case.num_columns - 1) // _BLOCK}

    def _part(self, rows: list[int], block: int, dtype: torch.dtype, expert: int = 0) -> Tensor:
        """What the reference makes of some rows and one block of columns."""
        columns = slice(block * _BLOCK, (block + 1) * _BLOCK)
        scale_a, b, scale_b = self.scale_a, self.b, self.scale_b
        if self.case.num_experts:
            b, scale_b = b.view(torch.uint8)[expert].view(b.dtype), scale_b[expert]
        if self.case.scaling == "row":
            scale_a, scale_b = scale_a[rows], scale_b[:, columns]
        elif self.case.scaling == "block":
            scale_a, scale_b = scale_a[rows], scale_b[:, block : block + 1]
        a = self.a.view(torch.uint8)[rows].view(self.a.dtype)
        return scaled_mm(a, b[:, columns], scale_a, scale_b, out_dtype=dtype, backend="reference")


def kvkern_triton(step: MatmulStep) -> Implementation | None:
    """kvkern's portable kernel, where ``auto`` takes another."""
    names = (name for name, reason in explain("scaled_mm", step.device) if reason is None)
    if step.device.type != "cuda" or next(names) == "triton":
        return None
    return step.by("kvkern_triton", backend="triton")


def kvkern_fast(step: MatmulStep) -> Implementation | None:
    """Sums over K within the tensor core."""
    if step.device.type != "cuda" or step.case.scaling == "block":
        return None

    return _fast(step, "kvkern_fast", step.by("kvkern_fast", accumulation="fast").call)


def torch_exact(step: MatmulStep) -> Implementation | None:
    """cuBLASLt or CUTLASS, whichever PyTorch takes, told not to sum fast."""
    if step.case.num_experts:
        return None
    call = _torch_call(step, use_fast_accum=False)
    return Implementation("torch", call, lambda: step.check(call()))


def torch_fast(step: MatmulStep) -> Implementation | None:
    """The same, summing within the tensor core."""
    if step.case.scaling == "block":
        return None
    if step.case.num_experts:
        return _fast(step, "torch_fast", _torch_call_of_experts(step))
    return _fast(step, "torch_fast", _torch_call(step, use_fast_accum=True))


def torch_bf16(step: MatmulStep) -> Implementation | None:
    """What fp8 is for: the same shape in bf16."""
    case = step.case
    if case.num_experts:
        a = step.randn(case.num_experts * case.num_rows)
        weight = step.randn(case.num_experts, case.num_columns)
    else:
        a, weight = (step.randn(num) for num in (case.num_rows, case.num_columns))
    ends = None if step.row_offsets is None else step.row_offsets[1:]

    def call() -> Tensor:
        return a @ weight.T if ends is None else torch._grouped_mm(a, weight.mT, offs=ends)

    return Implementation("torch_bf16", call, None, "bf16")


def deep_gemm(step: MatmulStep) -> Implementation | None:
    """DeepGEMM, its scales laid out before."""
    if step.case.scaling != "block":
        return None
    import deep_gemm

    if step.case.num_experts:
        return _deep_gemm_of_experts(step)
    shape = (step.case.num_rows, step.case.num_columns)
    out = torch.empty(shape, dtype=_DTYPE, device=step.device)
    a = step.a, deep_gemm.get_mn_major_tma_aligned_tensor(step.scale_a)
    b = step.b.T, step.scale_b.T.contiguous()

    def call() -> Tensor:
        deep_gemm.fp8_gemm_nt(a, b, out)
        return out

    return Implementation("deep_gemm", call, lambda: step.check(call()))


def _deep_gemm_of_experts(step: MatmulStep) -> Implementation:
    """Where its tiles of 128 rows fit, the rows as they are, or else in matrices of 128 rows."""
    import deep_gemm

    case, num_experts, num_rows = step.case, step.case.num_experts, step.case.num_rows
    b = step.b.mT, step.scale_b.mT.contiguous()
    if num_rows % _BLOCK == 0:
        out = torch.empty(len(step.a), case.num_columns, dtype=_DTYPE, device=step.device)
        of_rows = torch.arange(num_experts, dtype=torch.int32, device=step.device)
        of_rows = of_rows.repeat_interleave(num_rows)
        a = step.a, deep_gemm.get_mn_major_tma_aligned_tensor(step.scale_a)

        def call() -> Tensor:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, of_rows)
            return out

        return Implementation("deep_gemm", call, lambda: step.check(call()))
    values, scale = (
        torch.zeros(num_experts, _BLOCK, x.shape[1], dtype=x.dtype, device=step.device)
        for x in (step.a.view(torch.uint8), step.scale_a)
    )
    values[:, :num_rows] = step.a.view(torch.uint8).unflatten(0, (num_experts, num_rows))
    scale[:, :num_rows] = step.scale_a.unflatten(0, (num_experts, num_rows))
    a = values.view(step.a.dtype), deep_gemm.get_mn_major_tma_aligned_tensor(scale)
    wide = torch.empty(num_experts, _BLOCK, case.num_columns, dtype=_DTYPE, device=step.device)
    counts = torch.full((num_experts,), num_rows, dtype=torch.int32, device=step.device)

    def call_masked() -> Tensor:
        deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, wide, counts, num_rows)
        return wide

    def check() -> None:
        step.check(call_masked()[:, :num_rows].flatten(0, 1))

    return Implementation("deep_gemm", call_masked, check, "in matrices of 128 rows")


def _torch_call(step: MatmulStep, *, use_fast_accum: bool) -> Callable[[], Tensor]:
    scale_a, scale_b = step.scale_a, step.scale_b
    if step.case.scaling == "row":
        scale_b = scale_b.contiguous()
    elif step.case.scaling == "block":  # unit strides along M and along K
        scale_a = scale_a.T.contiguous().T

    def call() -> Tensor:
        return torch._scaled_mm(
            step.a, step.b, scale_a, scale_b, out_dtype=_DTYPE, use_fast_accum=use_fast_accum
        )

    return call


def _torch_call_of_experts(step: MatmulStep) -> Callable[[], Tensor]:
    assert step.row_offsets is not None
    ends = step.row_offsets[1:]
    scale_a, scale_b = step.scale_a.flatten(), step.scale_b.squeeze(-2).contiguous()

    def call() -> Tensor:
        return torch._scaled_grouped_mm(
            step.a, step.b, scale_a, scale_b, offs=ends, out_dtype=_DTYPE, use_fast_accum=True
        )

    return call


def _fast(step: MatmulStep, name: str, call: Callable[[], Tensor]) -> Implementation:
    """Held to a tenth; its bias on numbers with a mean is its note."""

    def check() -> None:
        bias = step.bias_of(call())
        assert abs(bias) < 0.1, f"bias {bias:+.2%}"

    return Implementation(name, call, check, f"fast sums, bias {step.bias_of(call()):+.2%}")


PEERS: tuple[Callable[[MatmulStep], Implementation | None], ...] = (
    kvkern_triton,
    kvkern_fast,
    torch_exact,
    torch_fast,
    deep_gemm,
    torch_bf16,
)
