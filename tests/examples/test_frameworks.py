"""The scripts with loops of other packages differ by one added line and its import, as the documentation shows."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("number, name", list(enumerate(("hf_trainer", "accelerate_loop", "lightning_module"))))
def test_two_lines_are_added_and_none_changed(number: int, name: str) -> None:
    texts = [(HOME / f"examples/{each}.py").read_text() for each in (name, f"{name}_parallel")]
    code = [text.split('"""', 2)[2].splitlines() for text in texts]
    changes = [
        line for line in difflib.unified_diff(*code, n=0, lineterm="") if not line.startswith(("---", "+++", "@@"))
    ]
    shown = re.findall(r"```diff\n(.*?)```", (HOME / "docs/frameworks.md").read_text(), flags=re.DOTALL)[number]
    assert len(changes) == 2
    assert changes == shown.splitlines()
