"""Ratchets on how the source is written: names that say nothing, and docstrings that begin with a question word.

Counts may only fall. A change that lowers one lowers its number here.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

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
"""Uses by package; packages that are not listed have none."""

QUESTION_WORDS = ("What", "How", "Where", "Which", "Who", "Why", "When", "Of", "As")
"""A docstring begins with a verb or names a thing, and with none of these words."""


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


def begins_with_a_question(node: ast.AST) -> bool:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    first, _, _ = (ast.get_docstring(node) or "").partition(" ")
    return first in QUESTION_WORDS


def test_the_names_and_docstrings_that_count() -> None:
    tree = ast.parse("def f(found):\n    '''What it is.'''\n    return [each.own for each in g(made=found)]")
    assert [name_of(node) for node in ast.walk(tree) if name_of(node) in EMPTY_NAMES].count("each") == 2
    assert sum(map(begins_with_a_question, ast.walk(tree))) == 1


def test_empty_names_only_become_fewer() -> None:
    counts = Counter(package for package, tree in syntax_trees() for n in ast.walk(tree) if name_of(n) in EMPTY_NAMES)
    assert counts == MOST_EMPTY_NAMES


def test_no_docstring_begins_with_a_question() -> None:
    assert not [package for package, tree in syntax_trees() if any(map(begins_with_a_question, ast.walk(tree)))]
