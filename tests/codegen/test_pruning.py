"""A saved program's run time has what the program reaches: definitions, methods, imports; and it reads as written."""

from __future__ import annotations

from textwrap import dedent

import pytest

from codegen.saved_folder.pruning import pruned


def pruned_text(program: str, module: str, **others: str) -> str:
    modules = {"runtime/a.py": module, "runtime/__init__.py": "", **{f"runtime/{k}.py": v for k, v in others.items()}}
    texts = pruned({"model.py": dedent(program)}, {name: dedent(text) for name, text in modules.items()})
    return texts.get("runtime/a.py", "")


MODULE = '''\
"""A module."""

from __future__ import annotations

import math
import os

from .b import first, second

SIZE = 3
"""An argument of `used`."""
OTHER = 4
"""An argument of `unused`."""


def used() -> int:
    return first() + SIZE + math.pi


# Says something about `unused`.
def unused() -> int:
    return second() + OTHER + len(os.sep)


class Thing:
    """A thing."""

    # Inside -------------------------------------------------------------------

    def __init__(self) -> None:
        self.x = 1

    def called(self) -> int:
        return self.inner()

    def inner(self) -> int:
        return 1

    def named(self) -> int:
        return 2

    # Outside ------------------------------------------------------------------

    def lonely(self) -> int:
        return 3
'''
B = "def first(): return 1\n\n\ndef second(): return 2\n"


def test_unreached_functions_constants_and_imports_go() -> None:
    text = pruned_text("from .runtime.a import used", MODULE, b=B)
    assert text == dedent('''\
        """A module."""

        from __future__ import annotations

        import math

        from .b import first

        SIZE = 3
        """An argument of `used`."""


        def used() -> int:
            return first() + SIZE + math.pi
        ''')


def test_methods_stay_where_they_are_named() -> None:
    text = pruned_text("from .runtime.a import Thing\nThing().called()\ngetattr(Thing(), 'named')", MODULE, b=B)
    assert [name for name in ("__init__", "called", "inner", "named", "lonely") if f"def {name}" in text] == [
        "__init__", "called", "inner", "named",
    ]  # fmt: skip
    assert "Outside" not in text and "# Inside ---" in text and text.endswith("return 2\n")


@pytest.mark.parametrize(
    ("base", "method", "is_kept"),
    [
        ("nn.Module", "forward", True),
        ("nn.Module", "other", False),
        ("torch.autograd.Function", "backward", True),
        ("ast.NodeVisitor", "visit_Name", True),
        ("ValueError", "other", False),
    ],
)
def test_methods_that_a_base_class_calls_stay(base: str, method: str, is_kept: bool) -> None:
    module = f"import ast\n\nimport torch\nfrom torch import nn\n\n\nclass A({base}):\n    def {method}(self): pass\n"
    text = pruned_text("from .runtime.a import A", module)
    assert (method in text) == is_kept and "pass" in text


def test_a_name_that_a_module_hands_on_stays() -> None:
    text = pruned_text("from .runtime import a\na.first()", "from .b import first, second\n", b=B)
    assert text == "from .b import first\n"


def test_a_module_that_is_not_reached_goes() -> None:
    assert not pruned_text("from .runtime.b import first", MODULE, b=B)


def test_statements_that_do_more_than_bind_stay() -> None:
    module = (
        "import torch\n\ntry:\n    import triton\nexcept ImportError:\n    triton = None\n\n\ndef f():\n    return 1\n"
    )
    assert pruned_text("from .runtime.a import f", module) == module.replace("import torch\n\n", "")
