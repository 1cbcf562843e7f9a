"""Breaking long lines changes no meaning, and leaves none that has a place to break."""

from __future__ import annotations

import ast

import pytest

from codegen.source.columns import COLUMNS, documented, fit, fitted

NAMES = [f"some_rather_long_variable_{i}" for i in range(9)]
LINES = [
    f"result = function({', '.join(NAMES)})",
    f"result = function({', '.join(NAMES)}).view(2, 3)",
    f"result = {' + '.join(NAMES)}",
    f"result = self.mesh.tp.all_gather({NAMES[0]}, dim=1)  # {'a word ' * 20}",
    f"    TABLE = {{'name': Param((4, 8), aliases=({', '.join(map(repr, NAMES))})), 'other': Param((3,))}}",
    f"{', '.join(NAMES)} = torch.split({NAMES[0]}, 4)",
    f"x = f([({NAMES[0]} + {NAMES[1]}) for {NAMES[2]}, {NAMES[3]} in zip({NAMES[4]}, {NAMES[5]})])",
    f"x = outer(inner({', '.join(NAMES[:4])}), inner({', '.join(NAMES)}), key='a, (b', other=\"it's # no comment\")",
    f"x = table[{NAMES[0]} : {NAMES[1]}, {NAMES[2]}, {NAMES[3]}, {NAMES[4]}, {NAMES[5]}]",
    f"x = ({NAMES[0]}, ({', '.join(NAMES)},))",
    f"return {' * '.join(f'({a} - {b})' for a, b in zip(NAMES, NAMES[1:], strict=False))}",
]


@pytest.mark.parametrize("line", LINES)
def test_a_long_line_means_the_same_in_several(line: str) -> None:
    before = line.lstrip()
    lines = fit(line)
    assert len(lines) > 1 and max(map(len, lines)) <= COLUMNS, "\n".join(lines)
    wrap = "def f():\n" + "{}"
    indent = " " * (4 - (len(line) - len(before))) if line.startswith(" ") else "    "
    whole = wrap.format("\n".join(indent + each for each in lines))
    assert ast.dump(ast.parse(whole)) == ast.dump(ast.parse(wrap.format(indent + line)))


def test_what_fits_and_what_cannot_stay() -> None:
    for line in ("x = 1", f"x = '{'a' * 200}'", "# " + "a" * COLUMNS):
        assert "".join(fitted(line).split("\n")).replace("(    ", "").replace(")", "") == line


def test_docstrings_keep_their_words() -> None:
    doc = " ".join(["model.layers.0"] * 20)
    lines = documented(doc)
    assert max(map(len, lines)) <= COLUMNS
    assert ast.literal_eval("\n".join(lines).strip()).split() == doc.split()
