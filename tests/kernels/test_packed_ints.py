"""Planes of packed words: what the PTX makes of every code, by an emulator, and on a card."""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvkern.kernels.numerics import compute_dtype, round_to
from kvkern.kernels.packed_ints import _plane_asm, float_plane

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def emulate(asm, inputs, dtype):
    """``$0`` of a few instructions' PTX; ``inputs`` are ``$1`` on, as arrays of 32-bit words."""
    names = {f"${number}": value for number, value in enumerate(inputs, 1)}

    def value(operand):
        if operand in names:
            return names[operand]
        return np.uint32(int(operand, 0))

    def lop3(a, b, c, table):
        result = np.zeros_like(a)
        for index in range(8):
            if table >> index & 1:
                picks = (v if index >> (2 - i) & 1 else ~v for i, v in enumerate((a, b, c)))
                result = result | np.bitwise_and.reduce(np.broadcast_arrays(*picks))
        return result

    def prmt(a, b, selector):
        places = [f.astype(np.uint32) >> s & 255 for f in (a, b) for s in (0, 8, 16, 24)]
        return sum(places[selector >> 4 * i & 7] << np.uint32(8 * i) for i in range(4))

    def floats(words):
        halves = np.ascontiguousarray(np.broadcast_to(words, inputs[0].shape)).view(np.int16)
        return torch.from_numpy(halves.copy()).view(dtype).double()

    def fma(a, b, c):
        rounded = (floats(a) * floats(b) + floats(c)).to(dtype)
        return rounded.view(torch.int16).numpy().view(np.uint32)

    body = re.fullmatch(r"\{\.reg \.b32 [\w, ]+;(.*)\}", asm)[1]
    for line in filter(None, map(str.strip, body.split(";"))):
        name, operands = line.split(maxsplit=1)
        target, *sources = (operand.strip() for operand in operands.split(","))
        if name.startswith("fma.rn"):
            assert name == ("fma.rn.bf16x2" if dtype == torch.bfloat16 else "fma.rn.f16x2")
            names[target] = fma(*map(value, sources))
        else:
            names[target] = {
                "mov.b32": lambda a: a,
                "shr.u32": lambda a, b: a >> b,
                "lop3.b32": lambda a, b, c, table: lop3(a, b, c, int(table)),
                "prmt.b32": lambda a, b, c: prmt(a, b, int(c)),
            }[name](*map(value, sources))
    return floats(names["$0"])


def codes_of(words, plane, bits):
    code = words.astype(np.int64) >> bits * plane & (2**bits - 1)
    return (code ^ 128) - 128 if bits == 8 else code


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("has_zero", [False, True])
def test_ptx_makes_every_code_less_every_zero(bits, dtype, has_zero):
    """Without a GPU: the interpreter runs no PTX."""
    words = np.random.default_rng(0).integers(2**32, size=(2, 8192), dtype=np.uint32)
    zeros = range(-128, 128, 17 if bits == 8 else 256) if bits == 8 else range(16)
    for zero in (*zeros, 127) if has_zero and bits == 8 else zeros if has_zero else (None,):
        less = torch.full((2,), float(zero or 0), dtype=dtype).view(torch.int16).numpy()
        inputs = [*words] if zero is None else [*words, less.view(np.uint32)]
        middle = 0 if bits == 8 else 8
        for plane in range(32 // bits):
            asm = _plane_asm(plane, bits, dtype == torch.bfloat16, has_zero)
            got = emulate(asm, inputs, dtype).view(-1, 2).T
            want = codes_of(words, plane, bits) - (middle if zero is None else zero)
            assert torch.equal(got, torch.from_numpy(want).double()), (plane, zero)


@triton.jit
def _planes_kernel(
    words_ptr, zero_ptr, out_ptr, BITS: tl.constexpr, N: tl.constexpr, W: tl.constexpr
):
    offs_n, offs_w = tl.arange(0, N), tl.arange(0, W)
    words = tl.load(words_ptr + offs_n[:, None] * W + offs_w[None, :])
    zero = None
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + offs_n)[:, None]
    for plane in tl.static_range(32 // BITS):
        values = float_plane(words, zero, plane, BITS, compute_dtype(out_ptr))
        out_ptrs = out_ptr + (plane * N + offs_n[:, None]) * W + offs_w[None, :]
        tl.store(out_ptrs, round_to(values, out_ptr.dtype.element_ty))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("has_zero", [False, True])
def test_planes_are_the_codes_less_a_rows_zero(bits, dtype, has_zero, device):
    words = np.random.default_rng(1).integers(2**32, size=(64, 32), dtype=np.uint32)
    zero = torch.arange(64.0) * 2 - 64 if bits == 8 else torch.arange(64.0) % 16
    out = torch.empty(32 // bits, 64, 32, dtype=dtype, device=device)
    given = torch.from_numpy(words.view(np.int32)).to(device)
    _planes_kernel[(1,)](
        given, zero.to(device) if has_zero else None, out, BITS=bits, N=64, W=32, num_warps=4
    )
    less = zero[:, None] if has_zero else 0 if bits == 8 else 8
    for plane in range(32 // bits):
        want = torch.from_numpy(codes_of(words, plane, bits)) - less
        assert torch.equal(out[plane].double().cpu(), want.double())
