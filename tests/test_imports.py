"""How the package hangs together: imports point one way, and little is needed to import it."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvkern

ROOT = Path(__file__).parent.parent

# A module may import from its own part and from the parts listed here. `testing` and the command
# line may import anything and nothing imports them; `kvkern` itself is for users.
MAY_IMPORT = {
    "errors": set(),
    "layout": {"errors"},
    "warm_up": {"errors"},
    "cache": {"errors", "layout"},
    "reference": {"errors", "layout", "cache"},
    "kernels": {"errors", "layout", "cache", "warm_up"},
    "backends": {"errors", "layout", "cache", "warm_up", "reference", "kernels"},
    "ops": {"errors", "layout", "cache", "backends"},
    "nn": {"errors", "layout", "cache", "backends", "ops"},
    "engine": {"errors", "layout", "cache", "backends", "ops", "nn"},
    "integrations": {"errors", "layout", "cache", "backends", "ops", "nn", "engine"},
}
UNBOUND = {"testing", "__main__", "_cli", ""}  # "" is kvkern/__init__.py

OPS = [
    "absorb_weights",
    "copy_pages",
    "dequantize_fp8",
    "fp8_gemm",
    "dequantize_int4",
    "dequantize_int8",
    "gather_kv",
    "matmul_w4a16",
    "matmul_w8a16",
    "matmul_w8a8",
    "merge_states",
    "mla_absorb",
    "mla_decode",
    "mla_prefill",
    "quantize_fp8",
    "scaled_mm",
    "rms_norm_quant_fp8",
    "silu_and_mul_quant_fp8",
    "quantize_int4",
    "quantize_int8",
    "write_kv",
]


def imported_modules(source: str, module: str) -> set[str]:
    """Everything of kvkern that ``module`` imports, anywhere in it, also as ``"module:name"``."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            # `from kvkern import ops` imports a part, `from kvkern.ops import x` stays in it
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"^kvkern[\w.]*(?=:\w+$)", node.value))
    return {name for name in found if name.split(".")[0] == "kvkern"}


def part_of(module: str) -> str:
    return module.removesuffix(".__init__").partition(".")[2].partition(".")[0]


def wrong_imports(source: str, module: str) -> list[str]:
    part = part_of(module)
    if part in UNBOUND:
        return []
    allowed = {part, *MAY_IMPORT[part]}
    imports = imported_modules(source, module)
    return sorted(name for name in imports if part_of(name) not in allowed)


def modules() -> dict[str, Path]:
    files = sorted((ROOT / "kvkern").rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}


@pytest.mark.parametrize("module", modules())
def test_imports_point_one_way(module):
    wrong = wrong_imports(modules()[module].read_text(), module)
    assert not wrong, f"{module} must not import {wrong}"


@pytest.mark.parametrize(
    "module, source",
    [
        ("kvkern.layout", "from kvkern.cache.storage import PagedKVCache"),
        ("kvkern.kernels.write_kv", "from kvkern.reference import write_kv"),
        ("kvkern.reference.write_kv", "def f():\n    import kvkern.kernels.write_kv"),
        ("kvkern.cache.pages", "from ..ops import write_kv"),
        ("kvkern.cache.__init__", "from ..ops import write_kv"),
        ("kvkern.ops.write_kv", "from kvkern import reference"),
        ("kvkern.ops.write_kv", "SOURCE = 'kvkern.kernels.write_kv:write_kv'"),
        ("kvkern.engine.step", "import kvkern"),
        ("kvkern.engine.step", "from kvkern import write_kv"),
        ("kvkern.engine.step", "from kvkern.testing import models"),
    ],
)
def test_import_against_the_order_is_found(module, source):
    assert wrong_imports(source, module)


@pytest.mark.parametrize(
    "module, source",
    [
        (
            "kvkern.cache.pages",
            "from .storage import x\nfrom ..errors import y",
        ),
        ("kvkern.backends.table", "SOURCE = 'kvkern.kernels.write_kv:write_kv'"),
        ("kvkern.engine.step", "from kvkern import ops\nimport torch"),
        ("kvkern.__main__", "import kvkern"),
    ],
)
def test_import_along_the_order_is_allowed(module, source):
    assert not wrong_imports(source, module)


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_package_works_without_triton_flashinfer_and_transformers():
    out = run_python(
        "import sys\n"
        "for name in ('triton', 'flashinfer', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "import kvkern, torch\n"
        "outs, lses = torch.ones(2, 3, 1, 4), torch.zeros(2, 3, 1)\n"
        "print(kvkern.merge_states(outs, lses).out.eq(1).all().item())\n"
    )
    assert out == "True\n"


def test_package_imports_nothing_heavier_than_torch():
    out = run_python(
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import kvkern\n"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}))\n"
    )
    added = set(ast.literal_eval(out)) - sys.stdlib_module_names
    assert added <= {"kvkern", "numpy", "torch"}, added


def test_package_root_holds_names_only():
    for node in ast.parse((ROOT / "kvkern" / "__init__.py").read_text()).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        names = isinstance(node, ast.ImportFrom | ast.Import)
        constant = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in {
            "__all__",
            "__version__",
        }
        assert docstring or names or constant, ast.unparse(node)
    assert all(hasattr(kvkern, name) for name in kvkern.__all__)


@pytest.mark.parametrize("name", OPS)
def test_public_op_documents_its_contract(name):
    op = getattr(kvkern, name)
    lines = {line.strip() for line in (op.__doc__ or "").splitlines()}
    sections = {"Args:", "Raises:"}
    if inspect.signature(op).return_annotation is not None:
        sections.add("Returns:")
    assert sections <= lines, f"{name}: no {sections - lines}"
    assert any(line.startswith("Source: ") for line in lines), f"{name}: no Source"


SOMEBODYS_MACHINE = re.compile(r"(?<![\w.])/(home|work|root|Users|mnt|opt)/\w")


def published_files() -> list[Path]:
    folders = ("kvkern", "tests", "examples", "benchmarks", "docs", ".ci")
    nested = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    kinds = {".py", ".md", ".toml", ".txt", ".yaml", ".jsonl"}
    files = [path for path in [*ROOT.iterdir(), *nested] if path.is_file()]
    return [path for path in files if path.suffix in kinds or path.name in {"Makefile", "run"}]


def test_no_file_names_a_folder_of_somebodys_machine():
    files = published_files()
    assert ROOT / "kvkern" / "errors.py" in files
    for path in files:
        found = SOMEBODYS_MACHINE.search(path.read_text())
        assert found is None, f"{path.relative_to(ROOT)}: {found}"
