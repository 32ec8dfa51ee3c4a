"""Kernels that the compile gate must refuse, each for its own reason, and one that it must pass."""

from collections.abc import Iterator

import triton
import triton.language as tl
from triton.experimental.gluon.language import BlockedLayout

from kvkern.kernels.config import FP8_PRODUCT, KernelConfig


@triton.jit
def _copy(src_ptr, dst_ptr, size, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    tl.store(dst_ptr + offs, tl.load(src_ptr + offs, mask=mask, other=0.0), mask=mask)


@triton.jit
def _product(a_ptr, b_ptr, out_ptr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    offs = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in range(STEPS):
        tile = step * BLOCK * BLOCK + offs
        acc = tl.dot(tl.load(a_ptr + tile), tl.load(b_ptr + tile), acc)
    tl.store(out_ptr + offs, acc)


@triton.jit
def _to_e4m3(value):
    return value.to(tl.float8e4nv)


@triton.jit
def _cast_to_e4m3(src_ptr, dst_ptr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(dst_ptr + offs, _to_e4m3(tl.load(src_ptr + offs)))


def _copy_config(name: str, **overrides) -> KernelConfig:
    config = KernelConfig(
        kernel=_copy,
        name=name,
        signature={"src_ptr": "*bf16", "dst_ptr": "*bf16", "size": "i32"},
        constexprs={"BLOCK": 1024},
        aligned=("src_ptr", "dst_ptr"),
        options={"num_warps": 4},
    )
    return config._replace(**overrides)


def shipped_configs(capability: int) -> Iterator[KernelConfig]:
    registers_for_one_warp_too_few = _copy_config(
        "spills", constexprs={"BLOCK": 4096}, options={"num_warps": 1, "maxnreg": 24}
    )
    yield _copy_config("sound")
    yield registers_for_one_warp_too_few
    yield registers_for_one_warp_too_few._replace(
        name="spills within budget", spill_budget=1 << 20, spill_reason="planted"
    )
    yield registers_for_one_warp_too_few._replace(name="spills unexplained", spill_budget=1 << 20)
    yield _copy_config("early start", options={"launch_pdl": True})
    yield _copy_config("misspelt option", options={"num_warp": 8})
    yield _copy_config("missing constexpr", constexprs={})
    yield KernelConfig(
        kernel=_product,
        name="shared memory",
        signature={"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32"},
        constexprs={"BLOCK": 128, "STEPS": 8},
        aligned=("a_ptr", "b_ptr", "out_ptr"),
        options={"num_warps": 8, "num_stages": 6},
    )
    yield KernelConfig(
        kernel=_cast_to_e4m3,
        name="e4m3",
        signature={"src_ptr": "*fp32", "dst_ptr": "*fp8e4nv"},
        constexprs={"BLOCK": 1024},
    )
    product = KernelConfig(
        kernel=_product,
        name="bf16 product",
        signature={"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32"},
        constexprs={"BLOCK": 32, "STEPS": 8},
        product=r"mma\S*bf16",
    )
    yield product
    yield product._replace(name="fp8 product", product=FP8_PRODUCT)
    yield _copy_config("layout", constexprs={"BLOCK": BlockedLayout([1], [32], [4], [0])})
