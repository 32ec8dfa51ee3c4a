"""Compile Triton kernels for GPUs that are not there, and read what each one would use.

``compile_kernel`` compiles one variant, ``problems`` judges a shipped one, and
``python -m kvkern.testing.compile CAPABILITY [MODULE ...]`` judges all that the modules ship (by
default every module of ``kvkern.kernels``), one JSON line each. All of it needs a process without
``TRITON_INTERPRET``, under which kernels are not compilable objects.
"""

import argparse
import contextlib
import dataclasses
import importlib
import io
import json
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDAOptions
from triton.compiler import ASTSource
from triton.errors import TritonError
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

import kvkern.kernels
from kvkern.errors import ArgumentError, KvkernError
from kvkern.kernels.config import KernelConfig

SHARED_LIMITS = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that one block may have, by compute capability."""


class CompileError(KvkernError):
    """Triton or ptxas refused a kernel."""


class CompiledReport(NamedTuple):
    """What the machine code uses, as ptxas tells it."""

    registers: int  # a thread
    spill_bytes: int  # stores and loads, a thread
    shared_bytes: int  # a block
    warnings: tuple[str, ...]  # such as serialised wgmma, which costs speed and shows nowhere else
    ptx: str = ""
    cubin: bytes = b""


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    capability: int,
    aligned: tuple[str, ...] = (),
    **options: Any,
) -> CompiledReport:
    """Compile one variant of a kernel for ``sm_<capability>``; no GPU is needed.

    Args:
        kernel: a ``@triton.jit`` function.
        signature: type of each runtime parameter: ``"*bf16"``, ``"i32"``, ``"fp32"``, ...
        constexprs: value of every other parameter.
        capability: 80 for sm_80, 90 for sm_90a, ...
        aligned: parameters whose address or value is a multiple of 16.
        options: ``num_warps``, ``num_stages``, ``enable_fp_fusion``, ``maxnreg``, ...

    Raises:
        ArgumentError: a parameter is named twice, never or wrongly, or an option is unknown.
        CompileError: Triton or ptxas refused the kernel; the message has their reason.
    """
    _check_arguments(kernel, signature, constexprs, aligned, options)
    source_type = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_type(
        kernel,
        {name: signature.get(name, "constexpr") for name in kernel.arg_names},
        constexprs=dict(constexprs),
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    ptxas_log = io.StringIO()
    try:
        # Triton prints the log of its own ptxas run. Running ptxas again instead would take twice
        # as long, with flags that have to be kept equal to Triton's.
        with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope():
            triton.knobs.nvidia.dump_ptxas_log = True
            triton.knobs.compilation.always_compile = True
            with contextlib.redirect_stdout(ptxas_log):
                compiled = triton.compile(
                    source, target=GPUTarget("cuda", capability, 32), options=options
                )
    except (TritonError, RuntimeError) as error:  # a failed compiler pass is a RuntimeError
        reason = f"{type(error).__name__}: {error}"
        raise CompileError(f"{kernel.__name__} for sm_{capability}: {reason}") from error
    report = _read_report(ptxas_log.getvalue(), compiled.metadata.shared)
    report = report._replace(ptx=compiled.asm["ptx"], cubin=compiled.asm["cubin"])
    num_wrong = count_wrong_unpacks(_disassembly(report.cubin)) if "e4m3x2" in report.ptx else 0
    if num_wrong:
        wrong = f"miscompiled: {num_wrong} unpackings of e4m3 read the stack pointer"
        report = report._replace(warnings=(*report.warnings, wrong))
    return report


def count_wrong_unpacks(machine_code: str) -> int:
    """How often e4m3 is unpacked from R1, which is never data but the stack pointer.

    ptxas 12.8 and 12.9 do it, in some kernels, to what was packed just before.
    """
    return len(re.findall(r"E4M3\.UNPACK_B R\d+, R1(?:\.\w+)* ;", machine_code))


def ends_of_product_loops(machine_code: str) -> list[int]:
    """Where the innermost loops that have wgmma branch back, in bytes from the code's beginning."""
    labels: dict[str, int] = {}
    ends: list[int] = []
    last_product = last_end = -1
    for number, line in enumerate(machine_code.splitlines()):
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = number
        elif "GMMA." in line:
            last_product = number
        elif branch := re.search(r"/\*(\w+)\*/.* BRA `\((\.L_x_\d+)\)", line):
            first = labels.get(branch[2], number)  # of a branch ahead, that is to come
            if last_end < first < last_product:
                ends.append(int(branch[1], 16))
                last_end = number
    return ends


def _disassembly(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def problems(config: KernelConfig, capability: int) -> list[str]:
    """What keeps a shipped variant from running well on ``capability``; empty when nothing does."""
    if config.spill_budget > 0 and not config.spill_reason:
        return [f"spill_budget: want a spill_reason beside it, got {config.spill_budget} alone"]
    try:
        json.dumps(dict(config.constexprs))
    except TypeError as error:  # Triton writes them so for hooks of its JIT
        return [f"constexprs: want what JSON can hold: {error}"]
    try:
        report = compile_kernel(
            config.kernel,
            config.signature,
            config.constexprs,
            capability=capability,
            aligned=config.aligned,
            **config.options,
        )
    except (ArgumentError, CompileError) as error:
        return [str(error)]
    found = list(report.warnings)
    if report.spill_bytes > config.spill_budget:
        found.append(
            f"spills: want at most {config.spill_budget} bytes, got {report.spill_bytes}"
            f" ({report.registers} registers)"
        )
    if report.shared_bytes > SHARED_LIMITS[capability]:
        limit = SHARED_LIMITS[capability]
        found.append(f"shared memory: want at most {limit} bytes, got {report.shared_bytes}")
    if config.loop_ends:
        ends = [end % 128 for end in ends_of_product_loops(_disassembly(report.cubin))]
        if not ends or ends[0] not in config.loop_ends:
            wanted = f"want the first to end {config.loop_ends} bytes into 128"
            found.append(f"loops of products: {wanted}, got {ends}")
    if config.options.get("launch_pdl") and "griddepcontrol.wait" not in report.ptx:
        found.append("early start: want a gdc_wait for the launch before, got none")
    if not re.search(config.product, report.ptx):
        found.append(f"product: want an instruction like {config.product!r}, got none")
    return found


def shipped_configs(module_name: str, capability: int) -> Iterator[KernelConfig]:
    """The variants that a module ships; none if it has no ``shipped_configs``."""
    module = importlib.import_module(module_name)
    if hasattr(module, "shipped_configs"):
        yield from module.shipped_configs(capability)


def kernel_modules() -> list[str]:
    """Every module of ``kvkern.kernels``, by its full name."""
    found = pkgutil.walk_packages(kvkern.kernels.__path__, "kvkern.kernels.")
    return [module.name for module in found if not module.ispkg]


def _check_arguments(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    aligned: tuple[str, ...],
    options: Mapping[str, Any],
) -> None:
    """Triton drops what it does not know: a misspelt option would ship another kernel unseen."""
    given = sorted([*signature, *constexprs])
    if given != sorted(kernel.arg_names):
        raise ArgumentError(
            f"signature and constexprs: want each of {kernel.arg_names} once, got {given}"
        )
    runtime = {param.name for param in kernel.params if not param.is_constexpr}
    if not signature.keys() <= runtime:
        raise ArgumentError(
            f"signature: want only runtime parameters, got {sorted(signature.keys() - runtime)}"
        )
    if not set(aligned) <= signature.keys():
        raise ArgumentError(f"aligned: want parameters in signature, got {aligned}")
    unknown = options.keys() - {field.name for field in dataclasses.fields(CUDAOptions)}
    if unknown:
        raise ArgumentError(f"options: want Triton's own, got {sorted(unknown)}")


def _read_report(ptxas_log: str, shared_bytes: int) -> CompiledReport:
    registers = re.search(r"Used (\d+) registers", ptxas_log)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", ptxas_log)
    if registers is None or spills is None:
        raise KvkernError(f"ptxas log: want registers and spills, got {ptxas_log!r}")
    return CompiledReport(
        registers=int(registers[1]),
        spill_bytes=int(spills[1]) + int(spills[2]),
        shared_bytes=shared_bytes,
        warnings=tuple(re.findall(r".*(?:warning|Performance Loss).*", ptxas_log)),
    )


def main() -> None:
    """Judge every shipped variant and print one JSON line each."""
    parser = argparse.ArgumentParser(prog="python -m kvkern.testing.compile", description=__doc__)
    parser.add_argument("capability", type=int, choices=sorted(SHARED_LIMITS))
    parser.add_argument("modules", nargs="*", metavar="MODULE")
    args = parser.parse_args()
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET: want it unset, got a process that interprets its kernels")
    judged: dict[str, list[str]] = {}  # shapes that choose the same tiles are one variant
    for module in args.modules or kernel_modules():
        for config in shipped_configs(module, args.capability):
            variant = repr(config._replace(name=""))
            if variant not in judged:
                judged[variant] = problems(config, args.capability)
            row = {
                "module": module,
                "kernel": f"{config.kernel.__module__}:{config.kernel.__name__}",
                "name": config.name,
                "problems": judged[variant],
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
