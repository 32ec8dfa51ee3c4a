"""Every kernel in every shipped variant compiles for every supported GPU, within its limits.

The compiling happens in processes of their own: in this one, without a GPU, Triton interprets.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from kvkern.errors import KvkernError
from kvkern.testing.compile import (
    SHARED_LIMITS,
    _read_report,
    count_wrong_unpacks,
    ends_of_product_loops,
    kernel_modules,
)

ROOT = Path(__file__).parent.parent


def judge(capability: int, *modules: str, cache_dir: Path) -> list[dict]:
    """One row for each variant that ``modules`` ship (all of kvkern.kernels if none is named)."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache_dir)
    command = [sys.executable, "-m", "kvkern.testing.compile", str(capability), *modules]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"after {done.stdout[-300:]}:\n{done.stderr[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def launched_kernels(*paths: Path) -> set[tuple[str, str]]:
    """(module, name) of each jitted function that no other jitted function names."""
    jitted, named = set(), set()
    for path in paths:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and is_jitted(function):
                jitted.add((module, function.name))
                named |= names_in(function.body)
    return {(module, name) for module, name in jitted if name not in named}


def is_jitted(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def names_in(body: list[ast.stmt]) -> set[str]:
    nodes = [node for statement in body for node in ast.walk(statement)]
    plain = {node.id for node in nodes if isinstance(node, ast.Name)}
    return plain | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


GATES = {f"sm_{capability}": (capability, False) for capability in SHARED_LIMITS}
GATES["sm_90, Gluon"] = (90, True)


@pytest.mark.parametrize(("capability", "is_gluon"), GATES.values(), ids=GATES)
def test_every_kernel_compiles_without_spills_within_shared_memory(capability, is_gluon, tmp_path):
    def is_meant(module):
        return (".hopper." in module) == is_gluon

    rows = judge(capability, *filter(is_meant, kernel_modules()), cache_dir=tmp_path)
    failed = [row for row in rows if row["problems"]]
    assert not failed, "\n".join(
        f"{row['module']} {row['name']}: {'; '.join(row['problems'])}" for row in failed
    )
    names = [(row["module"], row["name"]) for row in rows]
    assert len(names) == len(set(names)), f"want a name of its own for each variant, got {names}"
    launched = launched_kernels(*(ROOT / "kvkern" / "kernels").rglob("*.py"))
    meant = {(module, kernel) for module, kernel in launched if is_meant(module)}
    never_compiled = meant - {tuple(row["kernel"].split(":")) for row in rows}
    assert not never_compiled, f"in no shipped_configs({capability}): {sorted(never_compiled)}"


def test_every_jitted_function_counts_but_those_that_others_call():
    module = "tests.planted_kernels"
    launched = launched_kernels(ROOT / "tests" / "planted_kernels.py")
    assert launched == {(module, "_copy"), (module, "_product"), (module, "_cast_to_e4m3")}


def test_tiles_that_hopper_has_no_loop_for_do_not_compile(tmp_path):
    rows = judge(90, "tests.planted_tiles", cache_dir=tmp_path)
    found = {row["name"].removesuffix("-M64"): "; ".join(row["problems"]) for row in rows}
    for name in ("sums-in-tensor-core", "two-warpgroups", "kept"):
        assert "only pairs share a stage" in found[name]
    assert "a stage is asked for while another is multiplied" in found["one-stage"]
    assert "sums that leave the tensor core" in found["turns-of-groups"]
    for name in ("extra-of-256", "extra-of-turns"):
        assert "one second product, of rows or of columns" in found[name]
    assert "a team has stages of its own" in found["stages-of-both-teams"]
    assert not any(reason for name, reason in found.items() if name.startswith("sound"))
    assert len(found) == 13


def test_gate_refuses_each_planted_kernel_for_its_own_reason_and_passes_the_sound_ones(tmp_path):
    rows = judge(80, "tests.planted_kernels", cache_dir=tmp_path)
    found = {row["name"]: row["problems"] for row in rows}
    expected = {
        "sound": None,
        "spills": "spills: want at most 0 bytes, got ",
        "spills within budget": None,
        "spills unexplained": "spill_budget: want a spill_reason beside it",
        "early start": "early start: want a gdc_wait",
        "misspelt option": "options: want Triton's own, got ['num_warp']",
        "missing constexpr": "signature and constexprs: want each of",
        "shared memory": "shared memory: want at most 166912 bytes, got ",
        "e4m3": "fp8e4nv not supported",  # sm_80 has none
        "bf16 product": None,
        "fp8 product": "product: want an instruction like",
        "layout": "constexprs: want what JSON can hold",
    }
    assert found.keys() == expected.keys()
    for name, problem in expected.items():
        if problem is None:
            assert found[name] == []
        else:
            assert len(found[name]) == 1 and problem in found[name][0]


def test_serialised_wgmma_is_a_warning():
    log = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to insufficient register resources\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
    )
    report = _read_report(log, shared_bytes=1024)
    assert report[:3] == (168, 16, 1024)
    assert len(report.warnings) == 1 and "serialized" in report.warnings[0]


def test_unpacking_the_stack_pointer_is_found():
    wrong = "/*0a0*/ F2FP.F16.E4M3.UNPACK_B R7, R1 ;  /*0b0*/ F2FP.F16.E4M3.UNPACK_B R8, R1.H1 ;"
    right = "/*0c0*/ F2FP.F16.E4M3.UNPACK_B R7, R10 ; /*0d0*/ F2FP.BF16.F32.PACK_AB R1, R1, R2 ;"
    assert count_wrong_unpacks(right) == 0
    assert count_wrong_unpacks(f"{wrong}\n{right}") == 2


def test_where_loops_of_products_end_is_found():
    code = """
.L_x_0:
        /*0010*/    LDS R2, [UR8] ;
        /*0020*/    @!P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/    @P1 BRA `(.L_x_3) ;
.L_x_2:
        /*0040*/    QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR16], R24 ;
        /*01b0*/    @P0 BRA `(.L_x_2) ;
        /*01c0*/    @P0 BRA `(.L_x_1) ;
.L_x_3:
        /*01d0*/    HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*01f0*/    @P0 BRA `(.L_x_3) ;
"""
    assert ends_of_product_loops(code) == [0x1B0, 0x1F0]


def test_log_without_numbers_is_an_error_not_a_pass():
    with pytest.raises(KvkernError, match="ptxas log: want registers and spills"):
        _read_report("", shared_bytes=0)
