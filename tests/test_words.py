"""Ratchets on how the source is written: names that say nothing, and docstrings that begin with "What".

Counts may only fall. A change that lowers one lowers its number here.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("autopar", "codegen", "cost_models", "search")

EMPTY_NAMES = frozenset({"each", "found", "given", "held", "known", "made", "own"})
"""Words that name nothing, as names of variables, parameters, fields and keyword arguments."""

MOST_EMPTY_NAMES: dict[str, int] = {
    "autopar/cli": 7,
    "autopar/costs": 2,
    "autopar/explain": 11,
    "autopar/rules": 1,
    "autopar/running": 1,
    "autopar/settings": 1,
    "codegen": 9,
}
MOST_WHAT: dict[str, int] = {}
"""Uses of empty names, and docstrings that begin with "What", by package; packages that are not listed have none."""


def syntax_trees() -> Iterator[tuple[str, ast.Module]]:
    """Yield (package, syntax tree) of all source files; the parts of autopar count as packages."""
    for root in PACKAGES:
        for path in sorted((REPOSITORY / root).rglob("*.py")):
            folders = path.relative_to(REPOSITORY).parts[:-1]
            yield "/".join(folders[: 2 if root == "autopar" else 1]), ast.parse(path.read_text(encoding="utf-8"))


def name_of(node: ast.AST) -> str | None:
    """Return the name that a node of the tree uses or binds, if it does."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.arg | ast.keyword):
        return node.arg
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    return node.attr if isinstance(node, ast.Attribute) else None


def begins_with_what(node: ast.AST) -> bool:
    has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return has_docstring and (ast.get_docstring(node) or "").startswith("What")


def test_the_names_that_count() -> None:
    tree = ast.parse("def f(found):\n    '''What it is.'''\n    return [each.own for each in g(made=found)]")
    assert [name_of(node) for node in ast.walk(tree) if name_of(node) in EMPTY_NAMES].count("each") == 2
    assert sum(map(begins_with_what, ast.walk(tree))) == 1


@pytest.mark.parametrize("kind", ["empty names", "What"])
def test_counts_only_fall(kind: str) -> None:
    counts: Counter[str] = Counter()
    for package, tree in syntax_trees():
        nodes = ast.walk(tree)
        is_counted = begins_with_what if kind == "What" else lambda node: name_of(node) in EMPTY_NAMES
        counts[package] += sum(map(is_counted, nodes))
    assert {name: count for name, count in counts.items() if count} == (
        MOST_WHAT if kind == "What" else MOST_EMPTY_NAMES
    )
