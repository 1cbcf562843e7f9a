"""Nothing that a user's names or files say is executed, or ends the literal or comment that it stands in."""

from __future__ import annotations

import ast

import pytest

from benchmarks.faults import injection
from codegen.source.emit import paths_text
from codegen.source.expressions import literal
from codegen.source.text import plain, quoted

NASTY = [
    '"',
    "'",
    '"""',
    "'''",
    "\\",
    '\\"',
    "a\nb",
    "a\rb",
    "\u2028",
    "\x00",
    "{x}",
    "%(prog)s",
    "#",
    'a"""\nx = 1\n"""',
]


@pytest.mark.parametrize("text", NASTY)
def test_literals_and_comments_hold_any_text(text: str) -> None:
    assert ast.literal_eval(quoted(text)) == text and literal(text) == quoted(text)
    tree = ast.parse(f'"""{plain(text)}."""  # {plain(text)}\n')
    assert len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr)
    assert ast.literal_eval(paths_text(tuple(f"{text}.{i}" for i in range(3)))) == tuple(
        f"{text}.{i}" for i in range(3)
    )


def test_plain_names_stay_as_they_are() -> None:
    assert quoted("model.layers.0.weight") == '"model.layers.0.weight"'
    assert plain("LlamaForCausalLM for dp2 x tp2: batch 8, fp32") == "LlamaForCausalLM for dp2 x tp2: batch 8, fp32"
    assert paths_text(("a.0", "a.1", "a.2")) == 'tuple(f"a.{i}" for i in range(3))'


@pytest.mark.slow
def test_no_code_is_executed() -> None:
    """A part of `python -m benchmarks.faults injection`."""
    for case in injection.cases(200, seed=4):
        result = case.run()
        assert result.outcome in ("right", "refused"), (case.name, result)
