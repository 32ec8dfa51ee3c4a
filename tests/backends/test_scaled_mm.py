"""scaled_mm by other libraries: what they are given, and what they are not asked to do."""

import re
import sys
from functools import lru_cache
from types import ModuleType

import pytest
import torch

from kvkern import UnsupportedError, quantize_fp8, scaled_mm
from kvkern.backends import TABLE, MatmulCall, deepgemm, torch_scaled_mm

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
CELLS = {"tensor": (0, 0), "row": (1, 0), "group": (1, 128), "block": (128, 128)}
CELLS_OF_COLUMNS = {"tensor": (0, 0), "row": (0, 1), "block": (128, 128)}


def given(of_a, of_b, *, bias=None, is_exact=True, column_major=False):
    """What a backend is called with, but for ``out``, and the right result."""
    a = quantize_fp8(torch.randn(20, 256), granularity=of_a, column_major_scales=column_major)
    b = quantize_fp8(torch.randn(192, 256), granularity=of_b)
    scale_b = b.scale if of_b == "tensor" else b.scale.T
    right = scaled_mm(a.values, b.values.T, a.scale, scale_b, bias=bias, backend="reference")
    scale_a = a.scale.view(1, 1, 1) if of_a == "tensor" else a.scale[None]
    scale_b = scale_b.view(1, 1, 1) if of_b == "tensor" else scale_b[None]
    cells = CELLS[of_a], CELLS_OF_COLUMNS[of_b]
    bias = None if bias is None else bias[None]
    inputs = (a.values[None], b.values.T[None], scale_a, scale_b, *cells, None, bias, is_exact)
    return inputs, right


@lru_cache
def why_not_here(scales_are_of_rows):
    """Why this release of PyTorch does not multiply on this device, by its own word; or None."""
    a = torch.zeros(16, 32).to(E4M3)
    shapes = ((16, 1), (1, 16)) if scales_are_of_rows else ((), ())
    try:
        torch._scaled_mm(a, a.T, *map(torch.ones, shapes), out_dtype=BF16)
    except (RuntimeError, ValueError) as error:
        return f"torch._scaled_mm on {a.device}: {error}"
    return None


def skip_what_torch_cannot(of_a, of_b):
    reason = why_not_here((of_a, of_b) != ("tensor", "tensor"))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("columns", [192, 200])  # contiguous, and a part of something wider
@pytest.mark.parametrize("of_a, of_b", [("tensor", "tensor"), ("row", "row"), ("tensor", "row")])
def test_torch_fills_what_it_is_given(of_a, of_b, columns, with_bias):
    skip_what_torch_cannot(of_a, of_b)
    inputs, right = given(of_a, of_b, bias=torch.randn(192).to(BF16) if with_bias else None)
    wide = torch.full((1, 20, columns), 7.0, dtype=BF16)
    torch_scaled_mm.scaled_mm(*inputs, wide[..., :192])
    torch.testing.assert_close(wide[0, :, :192], right, rtol=2**-7, atol=0.02)
    assert (wide[..., 192:] == 7).all()


def test_what_torch_raises_is_a_refusal(monkeypatch):
    def raising(*arguments, **options):
        raise RuntimeError("not on this card")

    monkeypatch.setattr(torch, "_scaled_mm", raising)
    inputs, _ = given("row", "row")
    with pytest.raises(UnsupportedError, match="backend 'torch' refuses: not on this card"):
        torch_scaled_mm.scaled_mm(*inputs, torch.zeros(1, 20, 192, dtype=BF16))


def test_torch_is_given_scales_as_it_lays_them_out(monkeypatch):
    def scaled(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum, out):
        assert scale_a.shape == (20, 2) and scale_a.stride() == (1, 20)
        assert scale_b.shape == (2, 2) and scale_b.stride() == (1, 2)
        assert bias is None and out_dtype == BF16 and use_fast_accum is False
        out.copy_(scaled_mm(a, b, scale_a, scale_b, backend="reference"))

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    for column_major in (False, True):
        inputs, right = given("group", "block", column_major=column_major)
        out = torch.zeros(1, 20, 192, dtype=BF16)
        torch_scaled_mm.scaled_mm(*inputs, out)
        assert torch.equal(out[0], right)


class FakeDeepGEMM(ModuleType):
    num_copies = 0

    def get_mn_major_tma_aligned_tensor(self, scale):
        assert scale.is_contiguous()
        self.num_copies += 1
        return scale.T.contiguous().T

    def fp8_gemm_nt(self, a, b, out):
        (a, scale_a), (weight, scale_of_weight) = a, b
        assert weight.is_contiguous() and scale_of_weight.is_contiguous()
        product = scaled_mm(a, weight.T, scale_a, scale_of_weight.T, backend="reference")
        out.copy_(product)


def test_deepgemm_is_given_the_weight_and_its_scales_not_transposed(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", FakeDeepGEMM("deep_gemm"))
    inputs, right = given("group", "block")
    out = torch.zeros(1, 20, 192, dtype=BF16)
    deepgemm.scaled_mm(*inputs, out)
    assert torch.equal(out[0], right)


def test_deepgemm_is_given_column_major_scales_as_they_lie(monkeypatch):
    fake = FakeDeepGEMM("deep_gemm")
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    inputs, right = given("group", "block", column_major=True)
    out = torch.zeros(1, 20, 192, dtype=BF16)
    deepgemm.scaled_mm(*inputs, out)
    assert torch.equal(out[0], right) and fake.num_copies == 0


TAKEN = MatmulCall(
    a_dtype=E4M3, b_dtype=E4M3, out_dtype=BF16, num_matrices=1, is_grouped=False, num_rows=5,
    num_columns=256, depth=512, cell_a=(1, 128), cell_b=(128, 128), a_is_aligned=True,
    b_is_aligned=True, out_is_aligned=True, bias_dtype=None, is_exact=True,
)  # fmt: skip
REFUSED = [
    ("hopper", {"is_grouped": True, "num_matrices": 0}, "takes 1 to 1024 experts, got 0"),
    ("hopper", {"is_grouped": True, "num_matrices": 1025}, "takes 1 to 1024 experts, got 1025"),
    ("hopper", {"depth": 0}, "takes K > 0"),
    ("hopper", {"cell_b": (128, 1)}, "takes scales of 128 x 128 beside groups"),
    ("hopper", {"a_is_aligned": False}, "takes a and out of contiguous rows"),
    ("hopper", {"b_is_aligned": False}, r"b of contiguous columns \(weight.t\(\)\)"),
    ("hopper", {"out_is_aligned": False}, "takes a and out of contiguous rows"),
    ("torch", {"num_matrices": 2}, "takes one matrix"),
    ("torch", {"is_grouped": True}, "takes one matrix"),
    ("torch", {"depth": 0}, "takes K > 0"),
    ("torch", {"a_is_aligned": False}, "takes a of contiguous rows"),
    ("torch", {"b_is_aligned": False}, r"b of contiguous columns \(weight.t\(\)\)"),
    ("torch", {"a_dtype": E5M2, "b_dtype": E5M2}, "takes e5m2 on one side"),
    ("torch", {"num_columns": 200}, "multiples of 16, got 200 and 512"),
    ("torch", {"depth": 208}, "a multiple of 128 with groups, got 208"),
    ("torch", {"depth": 640}, "a multiple of 512 and N that is one of 128 with blocks, got 640"),
    ("torch", {"num_columns": 192}, "with blocks, got 512 and 192"),
    ("torch", {"bias_dtype": torch.float32}, "takes a bias in out's dtype torch.bfloat16"),
    ("deepgemm", {"num_matrices": 2}, "takes one matrix"),
    ("deepgemm", {"b_dtype": E5M2}, "takes e4m3, got"),
    ("deepgemm", {"cell_b": (128, 1)}, "takes scales of 1 x 128 and 128 x 128"),
    ("deepgemm", {"out_dtype": torch.float16}, "gives bfloat16"),
    ("deepgemm", {"bias_dtype": BF16}, "takes no bias"),
    ("deepgemm", {"num_columns": 200}, "N that is a multiple of 64"),
    ("deepgemm", {"out_is_aligned": False}, "takes an out of contiguous rows"),
]


@pytest.mark.parametrize("name, change, reason", REFUSED)
def test_calls_that_a_library_does_not_take_are_refused_with_a_reason(name, change, reason):
    (backend,) = (backend for backend in TABLE["scaled_mm"] if backend.name == name)
    assert backend.refuses_call(TAKEN) is None
    assert re.search(reason, backend.refuses_call(TAKEN._replace(**change)))
