"""The reference's parts against second formulations; tests/ops/test_write_kv.py has the whole."""

import math

import numpy as np
import pytest
import torch

from kvkern.reference.write_kv import rms_norm, rotate

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize("dim", [128, 384, 512])
def test_rms_norm_equals_torchs_in_fp64(device, dim):
    x, gamma = torch.randn(7, dim, dtype=FP64, device=device), torch.randn(dim, device=device)
    x[3] = 0.0
    expected = torch.nn.functional.rms_norm(x, (dim,), gamma.double(), eps=1e-5)
    torch.testing.assert_close(
        rms_norm(x, gamma, 1e-5, round_hf=False), expected, rtol=1e-14, atol=1e-14
    )


def test_rms_norm_in_fp32_is_within_its_roundings_of_fp64(device):
    x, gamma = torch.randn(50, 512, device=device), torch.randn(512, device=device)
    exact = torch.nn.functional.rms_norm(x.double(), (512,), gamma.double(), eps=1e-6)
    error = (rms_norm(x, gamma, 1e-6, round_hf=False) - exact).abs()
    # mean square, root, inverse, x * inverse, * gamma: half an ulp each, halved by the root
    assert (error <= 4.5 * 2.0**-24 * exact.abs()).all()


def test_rms_norm_rounds_the_exact_sum_of_squares_once(device):
    """A sum in fp32 depends on its order: some rows' last bits would differ."""
    x = torch.randn(200, 384)
    sums = [math.fsum(v * v for v in row) for row in x.double().tolist()]
    mean_squares = (np.array(sums) / 384).astype(np.float32)
    inverses = np.float32(1) / np.sqrt(mean_squares + np.float32(1e-6))
    expected = x * torch.from_numpy(inverses)[:, None]
    y = rms_norm(x.to(device), torch.ones(384, device=device), 1e-6, round_hf=False)
    assert torch.equal(y.cpu(), expected)


@pytest.mark.parametrize("gamma_dtype", [BF16, FP16])
def test_hf_rounding_goes_through_gammas_dtype_twice(device, gamma_dtype):
    x = torch.randn(9, 256, device=device)
    gamma = (torch.rand(256, device=device) + 0.5).to(gamma_dtype)
    normalised = rms_norm(x, torch.ones(256, device=device), 1e-6, round_hf=False)
    published = gamma * normalised.to(gamma_dtype)  # a 16-bit product: rounded again
    assert torch.equal(rms_norm(x, gamma, 1e-6, round_hf=True), published.float())


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rope_dim", [2, 48, 64])
def test_rotation_is_multiplication_by_a_complex_number(device, interleaved, rope_dim):
    x = torch.randn(3, 5, rope_dim, dtype=FP64, device=device)
    angle = torch.randn(3, 1, rope_dim // 2, dtype=FP64, device=device)
    turn = torch.polar(torch.ones_like(angle), angle)
    if interleaved:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn
        expected = torch.view_as_real(pairs).flatten(-2)
    else:
        pairs = torch.complex(*x.chunk(2, dim=-1)) * turn
        expected = torch.cat([pairs.real, pairs.imag], dim=-1)
    rotated = rotate(x, angle.cos(), angle.sin(), interleaved)
    torch.testing.assert_close(rotated, expected, rtol=1e-14, atol=1e-14)


def test_rotation_styles_differ_by_a_permutation_of_columns(device):
    x, angle = torch.randn(4, 64, device=device), torch.randn(4, 32, device=device)
    cos, sin = angle.cos(), angle.sin()
    order = torch.arange(64).view(32, 2).T.flatten()  # even columns, then odd ones
    half = rotate(x[:, order], cos, sin, interleaved=False)
    assert torch.equal(half, rotate(x, cos, sin, interleaved=True)[:, order])
