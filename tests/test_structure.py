"""Properties of the source as a whole: no import cycle, imports at the top, traits with one home."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import networkx as nx
import pytest

from codegen.axis_records import AXES
from cost_models.schedule import SCHEDULES
from tests.operator_tables import HOMONYMS, operator_tables, tables_in

REPOSITORY = Path(__file__).parent.parent
ROOTS = ("autopar", "codegen", "cost_models", "search")

LATE_IMPORTS = {
    ("autopar/frontend/export.py", "torch.export"): "heavy: torch imports it with the first export",
    ("autopar/settings/fp8.py", "codegen.runtime.fp8"): "heavy: triton comes with it",
    ("autopar/models/loading.py", "transformers"): "optional, and heavy",
    ("autopar/models/lazy_weights.py", "transformers.conversion_mapping"): "optional, and heavy",
    ("autopar/models/lazy_weights.py", "transformers.core_model_loading"): "optional, and heavy",
    ("autopar/models/pretrained_export.py", "transformers.core_model_loading"): "optional, and heavy",
    ("autopar/tune.py", "codegen.kernels.tuning"): "heavy: triton comes with it",
    ("autopar/training/records.py", "tensorboard"): "optional",
    ("autopar/training/records.py", "torch.utils.tensorboard"): "optional",
    ("autopar/training/records.py", "wandb"): "optional",
    ("autopar/profiling/worker.py", "resource"): "optional: not on every system",
}
"""Imports inside of functions of autopar, with the reason."""

TYPE_IMPORTS = {
    ("autopar/lowering/call_lowerings.py", "autopar.lowering.scope_lowering"): "a call and its scope name each other",
    ("autopar/strategies/scenario.py", "autopar.strategies.prediction"): "a scenario predicts itself again",
    ("autopar/strategies/scenario.py", "autopar.strategies.predictor"): "a scenario predicts itself again",
}
"""Imports of autopar for type checkers alone, with the reason."""

OPERATOR_TABLES = 46
"""Tables outside of `autopar/operators/` and `autopar/rules/` that name two or more operators of torch. `python -m
tests.operator_tables` prints them. Each is about its only reader; a trait that two readers need has its record."""

MOST_POSITIONAL = 4
"""Fields of a dataclass or named tuple that may be given by position."""
NAMED_FIELDS = ("autopar", "codegen", "cost_models", "search")
"""Folders that give no more of them so."""


class Import(NamedTuple):
    """One import of a module. kind: "top", "late" (inside a function) or "types" (for type checkers)."""

    file: str
    target: str
    kind: str


def files(root: str) -> list[Path]:
    return sorted((REPOSITORY / root).rglob("*.py"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's syntax tree, the module first."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


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
            elif isinstance(child, ast.If) and kind == "top" and "TYPE_CHECKING" in ast.unparse(child.test):
                inner = "types"
            if isinstance(child, ast.Import):
                yield from (Import(file, alias.name, kind) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.module is not None and not child.level, f"{file}: a relative import"
                names = {f"{child.module}.{alias.name}" for alias in child.names}
                yield from (Import(file, n if n in modules() else child.module, kind) for n in sorted(names))
            else:
                yield from visit(child, inner)

    yield from visit(nodes(path)[0], "top")


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


@cache
def field_counts() -> dict[str, int]:
    """The number of fields of each dataclass or named tuple by name; of two of one name the larger."""
    counts: dict[str, int] = {}
    for root in ROOTS:
        for path in files(root):
            for node in nodes(path):
                if isinstance(node, ast.ClassDef):
                    marks = " ".join(map(ast.unparse, (*node.decorator_list, *node.bases)))
                    if "dataclass" in marks or "NamedTuple" in marks:
                        count = sum(isinstance(each, ast.AnnAssign) for each in node.body)
                        counts[node.name] = max(count, counts.get(node.name, 0))
    return counts


def is_positional(call: ast.Call) -> bool:
    """Whether a call makes a record of many fields by their order. A row of data, `Row(*row)`, has no other names."""
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    spread = sum(isinstance(argument, ast.Starred) for argument in call.args)
    is_row = spread == len(call.args) == 1
    return field_counts().get(name, 0) > MOST_POSITIONAL and (len(call.args) > MOST_POSITIONAL or spread > is_row)


@pytest.mark.parametrize("folder", NAMED_FIELDS)
def test_many_fields_are_given_by_name(folder: str) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}"
        for path in files(folder)
        for node in nodes(path)
        if isinstance(node, ast.Call) and is_positional(node)
    ]
    assert not found


def test_what_is_by_position_is_seen() -> None:
    assert field_counts()["ModuleClass"] > MOST_POSITIONAL

    def seen(text: str) -> bool:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        return is_positional(call)

    assert seen("ModuleClass(1, 2, 3, 4, 5)") and seen("program.ModuleClass(*own, name)")
    assert (
        not seen("ModuleClass(1, 2, 3, 4, body=5)") and not seen("ModuleClass(*row)") and not seen("f(1, 2, 3, 4, 5)")
    )


RECORDS = {"codegen/axis_records.py": AXES, "cost_models/schedules/generate.py": SCHEDULES}
"""The modules that have the records of axes and schedules."""
ROTARY = ("codegen/fusion/rotary.py", "codegen/kernels/rotary.py")
"""Modules in which "interleaved" is an argument of rotary embeddings."""

DEGREES_BY_NAME = {
    "autopar/explain/decisions.py": 1,
    "autopar/explain/terminal.py": 2,
    "autopar/ir/mesh.py": 1,
    "autopar/page/what_if.py": 2,
}
"""Keys of dicts of degrees or placements: data, such as {"tp": 2}."""


def named(node: ast.expr) -> Iterator[str]:
    """The names of axes and schedules in a constant, or in a display of constants."""
    for part in node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else (node,):
        if isinstance(part, ast.Constant) and part.value in {*AXES, *SCHEDULES}:
            yield part.value
        elif isinstance(part, (ast.Tuple, ast.List, ast.Set)):
            yield from named(part)


def is_pin(comparison: ast.Compare) -> bool:
    """Whether it asks for the key of a user: `"tp" in limits.degrees`."""
    return isinstance(comparison.ops[0], (ast.In, ast.NotIn)) and ast.unparse(comparison.comparators[0]).endswith(
        "degrees"
    )


def compared_names(node: ast.AST) -> list[str]:
    """The names of axes and schedules that an expression compares with."""
    if not isinstance(node, ast.Compare) or is_pin(node):
        return []
    return [name for side in (node.left, *node.comparators) for name in named(side)]


def test_only_records_tell_axes_and_schedules_apart_by_name() -> None:
    compared, keys = [], {}
    for path in (path for root in ROOTS for path in files(root)):
        file = str(path.relative_to(REPOSITORY))
        own = RECORDS.get(file, ("interleaved",) if file in ROTARY else ())
        compared += [f"{file}: {name}" for node in nodes(path) for name in compared_names(node) if name not in own]
        displays = (node for node in nodes(path) if isinstance(node, ast.Dict))
        count = sum(name not in own for node in displays for key in node.keys if key for name in named(key))
        keys |= {file: count} if count else {}
    assert not compared
    assert keys == DEGREES_BY_NAME


def test_comparisons_with_names_are_seen() -> None:
    def seen(text: str) -> list[str]:
        return compared_names(ast.parse(text, mode="eval").body)

    assert seen('schedule == "1f1b"') == ["1f1b"] and seen('axis in ("tp", "ttp")') == ["tp", "ttp"]
    assert seen('axes[:1] in (("tp",),)') == ["tp"] and seen('"cp" not in mesh.axes') == ["cp"]
    assert not seen('"cp" in limits.degrees') and not seen('kind == "forward"')


def test_traits_of_operators_have_one_home() -> None:
    """A new table belongs into the records (`autopar/operators/records.py`); a table less lowers the number."""
    tables = operator_tables("autopar", "codegen")
    assert len(tables) == OPERATOR_TABLES, "\n".join(f"{table.file}:{table.line} {table.name}" for table in tables)


def test_tables_of_operators_are_seen() -> None:
    def seen(text: str) -> list[str]:
        return [name for table in tables_in(text, "") for name in table.operators]

    assert seen("A = frozenset({'view', 'reshape'})") == ["view", "reshape"]
    assert seen("class A:\n    B = {'aten.mm.default': 1, **dict.fromkeys(('bmm', 'linear'), 2)}")
    assert seen("A = (torch.ops.aten.mm, aten.bmm.default)") == ["torch.ops.aten.mm", "aten.bmm.default"]
    assert not seen("A = ('view',)") and not seen("A = ('tp', 'dp')") and not seen("def a():\n    return 'view', 'mm'")


def test_homonyms_of_operators_are_there() -> None:
    for file, names in HOMONYMS.items():
        tables = tables_in((REPOSITORY / file).read_text(encoding="utf-8"), file)
        assert names <= {table.name for table in tables}, file
