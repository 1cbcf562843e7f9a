"""`docs/glossary.md`: the words are unique and sorted, and what they say is in the code is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(r"`([\w/]+\.py)(?:: ([\w.]+))?`")


def rows() -> list[tuple[str, str]]:
    """(word, what its last column names) of every row of the table."""
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [(word, where) for word, _, where in cells if word != "word"]


def defined(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """What statements define, with the body of what has one."""
    found: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node.body
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: [] for target in targets if isinstance(target, ast.Name)}
    return found


def test_words_are_unique_and_sorted() -> None:
    words = [word.lower() for word, _ in rows()]
    assert len(words) > 40
    assert words == sorted(set(words))


def test_what_is_named_exists() -> None:
    for word, where in rows():
        places = PLACE.findall(where)
        assert places, f"{word} names no file"
        for path, name in places:
            body = ast.parse((ROOT / path).read_text()).body
            for part in name.split(".") if name else ():
                names = defined(body)
                assert part in names, f"{word}: {path} defines no {name}"
                body = names[part]
