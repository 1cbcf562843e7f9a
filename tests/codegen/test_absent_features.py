"""A saved program's run time has no branches on features that the program lacks, and reads as if it never had them."""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import dedent

import pytest

import codegen.kernels
from codegen.saved_folder.absent_features import ABSENT as FEATURES
from codegen.saved_folder.absent_features import folded
from codegen.saved_folder.wording import tidied, without_words

ABSENT = {"host": None, "padding": 0, "guards": {}, "unused": ()}


def folded_text(module: str, source: str = "") -> str:
    texts = folded({"program.py": dedent(source)}, {"runtime/a.py": dedent(module)}, ABSENT)
    ast.parse(texts["runtime/a.py"])
    return tidied(texts["runtime/a.py"])


STEP = '''\
class Step:
    """A step.

    rank: of all. host: where the state is, if the optimizer is offloaded; None: on the device. scale: of the loss.
    """

    def __init__(self, rank, *, host=None, scale=1.0):
        self.rank, self.host = rank, host
        self.scale = scale

    def update(self):
        device = "cpu" if self.host is not None else "cuda"
        # On the host.
        if self.host is not None:
            self.host.update(device)
            return
        self.step(device, host=self.host)
'''


def test_an_absent_feature_leaves_no_trace() -> None:
    assert folded_text(STEP) == dedent('''\
        class Step:
            """A step.

            rank: of all. scale: of the loss.
            """

            def __init__(self, rank, *, scale=1.0):
                self.rank = rank
                self.scale = scale

            def update(self):
                device = "cuda"
                self.step(device)
        ''')


@pytest.mark.parametrize(
    "source",
    [
        "Step(0, host=Host())",
        "step.host = Host()",
        "step.other, step.host = None, Host()",
        "for host in hosts: pass",
        "def host(): pass",
        "def f(host): pass",
        'type("Step", (), {"host": Host()})',
        'setattr(step, "host", Host())',
        "def f(*, host=Host()): pass",
        "def f(*host): pass",
        "from hosts import first as host",
        "try: f()\nexcept Error as host: pass",
        "match x:\n    case [host]: pass",
        "del step.host",
    ],
)
def test_a_name_that_is_bound_to_anything_else_stays(source: str) -> None:
    assert folded_text(STEP, source) == STEP


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = a if host is None else b", "x = a"),
        ("x = f(a if host is None else b)", "x = f(a)"),
        ("x = 2 * (a if host is None else b)", "x = 2 * a"),
        ("x = f(a, padding=padding)", "x = f(a)"),
        ("x = [a for a in b if not padding]", "x = [a for a in b]"),
        ("x = [a for a in guards.items()]", "x = []"),
        ("x = {*a, *unused}", "x = {*a}"),
        ("x = guards.get(a, b)", "x = b"),
        ("x = a and host is None and b", "x = a and b"),
        ("x = f() and host is not None", "x = f() and False"),
        ("x = isinstance(a, int) and padding", "x = 0"),
        ("x = [a for a in ''.join(b)]", "x = [a for a in ''.join(b)]"),
        ("x = kwargs or {}", "x = kwargs or {}"),
        ("x = y = padding", "x = y = 0"),
    ],
)
def test_expressions(before: str, after: str) -> None:
    assert folded_text(before) == after + "\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if host:\n    f()\nelse:\n    g()", "g()"),
        ("if host:\n    f()\nelif a:\n    g()\nelse:\n    h()", "if a:\n    g()\nelse:\n    h()"),
        ("if a:\n    f()\nelif host:\n    g()\nelse:\n    h()", "if a:\n    f()\nelse:\n    h()"),
        ("if a:\n    f()\nelif host:\n    g()", "if a:\n    f()"),
        ("if a:\n    f()\nelif not host:\n    g()\nelse:\n    h()", "if a:\n    f()\nelse:\n    g()"),
        ("if a:\n    f()\nelse:\n    if host:\n        g()", "if a:\n    f()"),
        ("if not host:\n    f()\nelse:\n    g()", "f()"),
        ("for text in guards:\n    f(text)\ng()", "g()"),
        ("if a:\n    x.host = None", "if a:\n    pass"),
        (
            "if a:\n    with nullcontext() if host is None else host.on():\n        f()\n    g()",
            "if a:\n    f()\n    g()",
        ),
        ("if padding:\n    x.host = Host()\nf(host)", "f(None)"),
        ("x = '' if a else b\nx += f'{a}' if host else ''", "x = '' if a else b"),
    ],
)
def test_statements(before: str, after: str) -> None:
    assert folded_text(before) == after + "\n"


def test_a_loop_with_an_else_stays() -> None:
    text = "for text in guards:\n    f(text)\nelse:\n    g()\n"
    assert "g()" in folded_text(text)


def test_a_generator_stays_one() -> None:
    text = "def f():\n    for text in guards.items():\n        yield text\n"
    assert "yield" in folded_text(text)


def test_statements_after_a_return_go() -> None:
    assert folded_text("def f():\n    if not padding:\n        return 1\n    return 2\n") == "def f():\n    return 1\n"


def test_kernels_have_no_names_of_features() -> None:
    """A local variable of such a name would keep the branches of that feature in every folder with kernels."""
    kernels = Path(codegen.kernels.__file__).parent.glob("*.py")
    texts = {path.name: path.read_text() for path in kernels}
    probe = "".join(f"def f(*, {name}={value!r}):\n    return {name}\n" for name, value in FEATURES.items())
    left = folded(texts, {"runtime/probe.py": probe})["runtime/probe.py"]
    assert [name for name in FEATURES if f"return {name}\n" in left] == []


def test_words_about_arguments() -> None:
    text = '"""Do it.\n\n    a: one, as in: two. b, c: both. d (always): last.\n    """'
    assert without_words(text, {"b", "c"}, 4) == '"""Do it.\n\n    a: one, as in: two. d (always): last.\n    """'
    assert without_words(text, {"a", "d"}, 4) == '"""Do it.\n\n    b, c: both.\n    """'
    assert without_words(text, {"c"}, 4) == text
    assert without_words('"""Do it. host: where."""', {"host"}, 4) == '"""Do it."""'
