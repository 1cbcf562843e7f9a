"""Find the module-level tables that name torch operators.

Run as a script it prints all of them: `python -m tests.operator_tables`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

REPOSITORY = Path(__file__).parent.parent

HOMONYMS = {
    "autopar/frontend/rewrites/embedding_bags.py": {"_MODES"},
    "autopar/frontend/trace_modes/batch_values.py": {"_SYMBOLS", "_MOVES"},
    "autopar/frontend/trace_modes/constants.py": {"ASKS", "_UNSET", "_OPERATIONS"},
    "autopar/frontend/trace_modes/drawn_numbers.py": {"_DRAWS", "_UNARY", "_BUILTINS"},
    "autopar/frontend/rewrites/draws.py": {"_NOUNS"},
    "autopar/frontend/trace_modes/one_process.py": {"_MESH_METHODS", "_ANSWERS", "_DIFFERENTIABLE"},
    "autopar/frontend/overloads.py": {"_DROPPED"},
    "autopar/frontend/rewrites/vmaps.py": {"BRACKETS"},
    "codegen/source/expressions.py": {"REDUCTIONS", "WITHOUT_EFFECT"},
    "codegen/source/names.py": {"GENERATED_NAMES", "RUNTIME_HOME"},
    "codegen/runtime/attention_blocks.py": {"_TRIANGLES"},
    "codegen/runtime/draws.py": {"DISTRIBUTIONS"},
    "codegen/runtime/python_distributions.py": {"NUMPY"},
    "codegen/runtime/python_random.py": {"_OF_NUMPY", "FUNCTIONS"},
    "codegen/runtime/windows.py": {"Kind"},
}
"""Tables of other things that are called as operators of torch are: Python's and NumPy's functions, methods of tensors,
modes, distributions, arguments, variables."""

HOMES = ("autopar/operators/", "autopar/rules/")
"""The records of operators, and the rules, which are registered by operator."""


class OperatorTable(NamedTuple):
    """A table of operators. name: the variable that it is assigned to, with its class in front."""

    file: str
    name: str
    line: int
    operators: tuple[str, ...]


@cache
def is_operator(name: str) -> bool:
    """Whether `name` is a torch operator: "view", "aten.view", "aten.view.default", or "torch.ops.aten.view"."""
    parts = name.removeprefix("torch.ops.").removeprefix("ops.").removeprefix("aten.").split(".")
    if not parts[0].isidentifier() or (len(parts) > 1 and "aten" not in name):
        return False
    return len(parts) <= 2 and hasattr(torch.ops.aten, parts[0])


def tables_in(text: str, file: str) -> Iterator[OperatorTable]:
    """Yield the tables of one file: assignments of a module or class that name two or more operators."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[OperatorTable]:
        for statement in body:
            if isinstance(statement, ast.ClassDef):
                yield from visit(statement.body, f"{prefix}{statement.name}.")
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                operators = tuple(dict.fromkeys(operators_in(statement.value)))
                if len(operators) > 1:
                    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
                    yield OperatorTable(file, prefix + ast.unparse(target), statement.lineno, operators)

    yield from visit(ast.parse(text).body, "")


def operators_in(value: ast.expr) -> Iterator[str]:
    """Yield the operators that the displays of an expression name: entries, and keys of a dict and its values."""
    for node in ast.walk(value):
        if isinstance(node, (ast.Set, ast.Tuple, ast.List)):
            entries: list[ast.expr | None] = [*node.elts]
        elif isinstance(node, ast.Dict):
            entries = [*node.keys, *node.values]
        else:
            continue
        for entry in entries:
            if isinstance(entry, ast.Constant) and isinstance(entry.value, str) and is_operator(entry.value):
                yield entry.value
            elif isinstance(entry, ast.Attribute):
                name = ast.unparse(entry)
                packet = re.fullmatch(r"(?:\w+\.)*_?aten\.(\w+)(?:\.\w+)?", name)
                if packet is not None and is_operator(packet.group(1)):
                    yield name


def operator_tables(*roots: str) -> list[OperatorTable]:
    """Return the tables of the folders, without those in their home."""
    files = [path for root in roots for path in sorted((REPOSITORY / root).rglob("*.py"))]
    tables = [table for path in files for table in tables_in(path.read_text(encoding="utf-8"), _name_of(path))]
    return [t for t in tables if not t.file.startswith(HOMES) and t.name not in HOMONYMS.get(t.file, ())]


def _name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


if __name__ == "__main__":
    for table in operator_tables("autopar", "codegen"):
        print(f"{table.file}:{table.line} {table.name}: {' '.join(table.operators)}")
