"""What holds for the source as a whole: no import cycle, imports at the top, short files and short functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import networkx as nx

REPOSITORY = Path(__file__).parent.parent
ROOTS = ("autopar", "codegen", "cost_models", "search")

LATE_IMPORTS = {
    ("autopar/settings/fp8.py", "codegen.runtime.fp8"): "heavy: triton comes with it",
    ("autopar/integrations/loading.py", "transformers"): "optional, and heavy",
    ("autopar/tune.py", "codegen.kernels.tuning"): "heavy: triton comes with it",
    ("autopar/profiling/worker.py", "resource"): "optional: not on every system",
}
"""Imports inside of functions of autopar, with the reason."""

TYPE_IMPORTS = {
    ("autopar/lowering/lowerings.py", "autopar.lowering.scope_lowering"): "a call and its scope name each other",
    ("autopar/simulate/scenario.py", "autopar.simulate.prediction"): "a scenario predicts itself again",
    ("autopar/simulate/scenario.py", "autopar.simulate.predictor"): "a scenario predicts itself again",
}
"""Imports of autopar for type checkers alone, with the reason."""

LONG_FILES = {
    "codegen/runtime/checkpoint_files.py",
    "codegen/runtime/pipeline_course.py",
}
"""Files of more than MOST_FILE_LINES lines, to be cut."""
LONG_FUNCTIONS = {
    "autopar/lowering/lower.py:_lower_stage",
    "codegen/kernels/layer_norm_kernels.py:_backward_kernel",
    "codegen/kernels/layer_norm_kernels.py:_forward_kernel",
    "codegen/kernels/layer_norm_kernels.py:launch_backward",
    "codegen/kernels/quantize.py:quantize_blocks",
    "codegen/kernels/rotary.py:_rotary_kernel",
    "codegen/runtime/step.py:__init__",
    "cost_models/schedules/list_scheduler.py:list_schedule",
}
"""Functions of more than MOST_FUNCTION_LINES lines, to be cut."""
MOST_FILE_LINES, MOST_FUNCTION_LINES = 400, 60


class Import(NamedTuple):
    """One import of a module. kind: "top", "late" (inside a function) or "types" (for type checkers)."""

    file: str
    target: str
    kind: str


def files(root: str) -> list[Path]:
    return sorted((REPOSITORY / root).rglob("*.py"))


@cache
def modules() -> dict[str, Path]:
    """autopar's modules and packages by dotted name."""
    found = {}
    for path in files("autopar"):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_in(path: Path) -> Iterator[Import]:
    """All of a file's; of `from package import name` the module that the name is, if it is one."""
    file = str(path.relative_to(REPOSITORY))

    def visit(node: ast.AST, kind: str) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inner = kind
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = "late"
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inner = "types"
            if isinstance(child, ast.Import):
                yield from (Import(file, alias.name, kind) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.module is not None and not child.level, f"{file}: a relative import"
                names = {f"{child.module}.{alias.name}" for alias in child.names}
                yield from (Import(file, n if n in modules() else child.module, kind) for n in sorted(names))
            else:
                yield from visit(child, inner)

    yield from visit(ast.parse(path.read_text(encoding="utf-8")), "top")


@cache
def imports() -> tuple[tuple[str, Import], ...]:
    """(module, import) of all of autopar."""
    return tuple((name, each) for name, path in modules().items() for each in imports_in(path))


def listed(kind: str) -> set[tuple[str, str]]:
    return {(each.file, each.target) for _, each in imports() if each.kind == kind}


def test_no_modules_import_one_another() -> None:
    edges = [(name, each.target) for name, each in imports() if each.kind != "types" and each.target in modules()]
    assert len(edges) > 1000
    cycles = [sorted(group) for group in nx.strongly_connected_components(nx.DiGraph(edges)) if len(group) > 1]
    assert not cycles


def test_imports_inside_functions_have_their_reason() -> None:
    assert listed("late") == LATE_IMPORTS.keys()
    for file, target in LATE_IMPORTS:
        lines = (REPOSITORY / file).read_text(encoding="utf-8").splitlines()
        assert any(target in line and "import" in line and "#" in line for line in lines), (file, target)


def test_imports_for_type_checkers_have_their_reason() -> None:
    assert listed("types") <= TYPE_IMPORTS.keys()


def test_files_and_functions_are_short() -> None:
    long_files, long_functions = set(), set()
    for root in ROOTS:
        for path in files(root):
            text, name = path.read_text(encoding="utf-8"), str(path.relative_to(REPOSITORY))
            if len(text.splitlines()) > MOST_FILE_LINES:
                long_files.add(name)
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    assert node.end_lineno is not None
                    if node.end_lineno - node.lineno + 1 > MOST_FUNCTION_LINES:
                        long_functions.add(f"{name}:{node.name}")
    assert long_files <= LONG_FILES
    assert long_functions <= LONG_FUNCTIONS
