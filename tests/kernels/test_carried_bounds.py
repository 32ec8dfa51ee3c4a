"""No loop of a kernel is bounded by what the loop around it carries: Triton 3.6 loses that.

Where an inner loop's bound is all that a carried value is used for, Triton 3.6 takes the first
value for all turns (3.9 does not). Kernels hang on it, or read the wrong rows, and nothing tells.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvkern.kernels

_KERNELS = Path(kvkern.kernels.__file__).parent
_USED_OTHERWISE = {  # carried bounds that arithmetic in the loop reads too
    ("mla_decode_few_fp8.py", "_attend", "taken"),
    ("scaled_mm_ring.py", "fetch", "place"),
}


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    found = (part for part in ast.walk(node) if isinstance(part, ast.Name))
    return {part.id for part in found if isinstance(part.ctx, context)}


def _is_loop(node: ast.AST) -> bool:
    """Of the device: one over ``static_range`` is unrolled."""
    if isinstance(node, ast.For) and isinstance(node.iter, ast.Call):
        return isinstance(node.iter.func, ast.Name) and node.iter.func.id == "range"
    return isinstance(node, ast.While)


def _in_order(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those of branches and unrolled loops among them."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.For) and not _is_loop(statement):
            yield from _in_order([*statement.body, *statement.orelse])


def _carried(loop: ast.For | ast.While) -> set[str]:
    """Names that are read in a turn before they are assigned in it."""
    assigned: set[str] = set()
    carried: set[str] = set()
    for statement in _in_order(loop.body):
        head: ast.AST = statement
        if isinstance(statement, ast.If | ast.For) and not _is_loop(statement):
            head = statement.test if isinstance(statement, ast.If) else statement.iter
        reads = _names(head, ast.Load)
        if isinstance(statement, ast.AugAssign):
            reads |= _names(statement.target, ast.Store)
        carried |= reads - assigned
        assigned |= _names(head, ast.Store)
    return carried & assigned


def _carried_bounds(function: ast.FunctionDef) -> set[str]:
    """Carried names that bound an inner loop, as they are or by another name."""
    found: set[str] = set()
    for loop in ast.walk(function):
        if not isinstance(loop, ast.For | ast.While) or not _is_loop(loop):
            continue
        other_names = {
            name: _names(statement.value, ast.Load)
            for statement in _in_order(loop.body)
            if isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Name | ast.Subscript)
            for name in _names(statement, ast.Store)
        }
        for inner in ast.walk(loop):
            if isinstance(inner, ast.For) and inner is not loop and _is_loop(inner):
                bounds = _names(inner.iter, ast.Load)
                bounds |= {name for bound in bounds for name in other_names.get(bound, ())}
                found |= bounds & _carried(loop)
    return found


def _functions(source: str) -> Iterator[ast.FunctionDef]:
    """Those that Triton compiles."""
    for node in ast.walk(ast.parse(source)):
        decorators = getattr(node, "decorator_list", [])
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in decorators):
            yield node


@pytest.mark.parametrize("path", sorted(_KERNELS.rglob("*.py")), ids=lambda path: path.name)
def test_no_bound_of_an_inner_loop_is_carried(path: Path) -> None:
    for function in _functions(path.read_text()):
        for name in _carried_bounds(function):
            assert (path.name, function.name, name) in _USED_OTHERWISE


_HANGS = """
@gluon.jit
def kernel(rounds, depth, place):
    first_due = place[0]
    for turn in range(rounds):
        {before}
        for step in range({first}, {end}):
            put(step)
        {after}
"""


@pytest.mark.parametrize(
    ("before", "first", "end", "after", "carried"),
    [
        ("pass", "first_due", "depth", "first_due = 0 * turn", {"first_due"}),
        ("pass", "0", "first_due", "first_due += turn", {"first_due"}),
        ("_, end = place", "0", "end", "place = place_of(turn + 1)", {"place"}),
        ("end = place[1]", "0", "end", "place = place_of(turn + 1)", {"place"}),
        ("place = place_of(turn)", "place[0]", "depth", "pass", set()),
        ("first_due = turn + 5", "first_due", "depth", "pass", set()),
        ("pass", "first_due", "depth", "pass", set()),
    ],
)
def test_what_is_found(before: str, first: str, end: str, after: str, carried: set[str]) -> None:
    source = _HANGS.format(before=before, first=first, end=end, after=after)
    (function,) = _functions(source)
    assert _carried_bounds(function) == carried
