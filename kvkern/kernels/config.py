"""What a kernel module says it ships, so that every variant can be compiled without a GPU.

A kernel module has ``shipped_configs(capability) -> Iterator[KernelConfig]``: the variants that its
launcher picks on that compute capability (80, 89, 90, ...), built from the same ``choose_tiles``.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton


class KernelConfig(NamedTuple):
    """One variant of a kernel, as the launcher would have it compiled.

    ``signature`` and ``constexprs`` together name every parameter of the kernel once. ``aligned``
    lists parameters whose address or value is a multiple of 16, which Triton specialises on;
    integers that equal 1 and arguments that are None belong in ``constexprs`` for the same reason.
    """

    kernel: Any  # a @triton.jit function
    name: str  # unique in its module: "bf16-L512-R64"
    signature: Mapping[str, str]  # parameter -> "*bf16", "*u8", "i32", "i64", "fp32", ...
    constexprs: Mapping[str, Any]
    aligned: tuple[str, ...] = ()
    options: Mapping[str, Any] = {}  # num_warps, num_stages, enable_fp_fusion, maxnreg
    spill_budget: int = 0  # bytes stored and loaded a thread
    spill_reason: str = ""  # why the budget is not 0
    product: str = ""  # a pattern of the tensor core's instruction that it has to have
    loop_ends: tuple[int, ...] = ()  # bytes into 128 where its first loop of products may end


def config_of_call(
    kernel: Any,
    name: str,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    **budget: Any,
) -> KernelConfig:
    """The variant that ``kernel[grid](**arguments, **options)`` would have compiled.

    Tensors may be on any device; only dtype and address matter. ``budget`` sets the fields that say
    what is demanded of it, as ``spill_budget``.
    """
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    aligned: list[str] = []
    for parameter in kernel.params:
        value = arguments[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None:
            constexprs[parameter.name] = value
        elif hasattr(value, "block_shape"):  # a TMA descriptor
            element = _TRITON_TYPES[value.base.dtype]
            block = ", ".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{element}[{block}],{value.layout!r}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{_TRITON_TYPES[value.dtype]}"
            if value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment:
                aligned.append(parameter.name)
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        elif value == 1 and specialised:
            constexprs[parameter.name] = 1
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if specialised and value % 16 == 0:
                aligned.append(parameter.name)
    return KernelConfig(kernel, name, signature, constexprs, tuple(aligned), options, **budget)


_TRITON_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}


def spills(reason: str, budget: int, *, newer: int | None = None) -> dict[str, Any]:
    """A variant's ``spill_budget`` with Triton 3.6, with later releases, and ``spill_reason``.

    Kernels are timed with 3.6; later ones give an SM's registers out otherwise.
    """
    is_newer = newer is not None and not triton.__version__.startswith("3.6.")
    return {"spill_budget": newer if is_newer else budget, "spill_reason": reason}


FP8_PRODUCT = r"mma\S*(?:e4m3|e5m2)\.(?:e4m3|e5m2)|mma\S*kind::f8f6f4"  # of any GPU that has fp8

SMALL_SPILLS: Mapping[str, Any] = spills(
    "up to eight of 255 registers, which some card's ptxas parks around the loop", 64
)
