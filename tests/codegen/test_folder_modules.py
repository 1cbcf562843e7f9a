"""A saved folder holds what its plan imports: no module more, none less, in lines that fit."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import autopar
from examples.models import EXAMPLES

CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "one rank": ("llama", "1 cpu", {}, {}),
    "dp2 x tp2": ("llama", "4 cpu", {"dp": 2, "tp": 2}, {}),
    "pp2 x dp2": ("llama", "4 cpu", {"pp": 2, "dp": 2, "schedule": "1f1b"}, {}),
    "zero bubble": ("gpt2", "2 cpu", {"pp": 2, "schedule": "zero-bubble", "micro_batches": 4}, {}),
    "zero 3 offloaded": ("llama", "2 cpu", {"dp": 2, "zero": 3, "offload": "parameters", "recompute": "offload"}, {}),
    "recomputed": ("gpt2", "2 cpu", {"dp": 2, "recompute": "full"}, {"kernels": "on"}),
    "compressed": ("mlp", "2 cpu", {"dp": 2, "zero": 2}, {"compression": {"gather": "int8", "reduce": "int8"}}),
    "experts": ("mixtral", "2 cpu", {"dp": 2, "ep": 2}, {"kernels": "on"}),
    "async": ("llama", "2 cpu", {"tp": 2}, {"backend": "async-tp"}),
}
AT_LENGTH = ("experts", "async")
FEATURES = {
    "pipeline_executor": {"pp2 x dp2", "zero bubble"},
    "transfer": {"pp2 x dp2", "zero bubble"},
    "tied_gradients": {"pp2 x dp2", "zero bubble"},
    "deferred": {"zero bubble"},
    "host_memory": {"zero 3 offloaded"},
    "host_optimizer": {"zero 3 offloaded"},
    "offload": {"zero 3 offloaded"},
    "sharded_units": {"zero 3 offloaded", "compressed"},
    "pipeline_ranks": {"pp2 x dp2", "zero bubble"},
    "recompute": {"zero 3 offloaded", "recomputed"},
    "fused_update": {"recomputed", "experts"},
    "fused_adamw": {"recomputed", "experts"},
    "grouped": {"experts"},
    "compressed": {"compressed"},
    "symmetric_memory": {"async"},
    "dropout_module": set(),
    "sharing": set(),
    "names": set(),
    "optimizer_probe": set(),
    "optimizer_trial": set(),
    "whole_updates": set(),
    "compiled_layers": set(),
    "reference": set(),
    "fp8": set(),
}
"""Module of the run time -> the cases that have it."""


@pytest.fixture(
    scope="module", params=[pytest.param(c, marks=pytest.mark.slow if c in AT_LENGTH else ()) for c in CASES]
)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name, cluster, constraints, options = CASES[request.param]
    example = EXAMPLES[name]()
    compiled = autopar.compile(
        example.model, cluster, example_inputs=example.inputs, loss_fn=example.loss_fn, constraints=constraints,
        **{"kernels": "off", **options},
    )  # fmt: skip
    return request.param, compiled.save(tmp_path_factory.mktemp("saved") / "program", weights=False)


class WithoutTyping(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> Any:
        return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)


def closure(folder: Path) -> set[Path]:
    """Files that main.py leads to, by every import statement at any depth."""
    found: set[Path] = set()
    waiting = [folder / "main.py"]
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        waiting += [parent / "__init__.py" for parent in path.parents if parent == folder or folder in parent.parents]
        for node in ast.walk(WithoutTyping().visit(ast.parse(path.read_text()))):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("autopar_program")):
                home = path.parents[node.level - 1] if node.level else folder
                inner = (node.module or "").removeprefix("autopar_program").strip(".").split(".")
                place = home.joinpath(*filter(None, inner))
                waiting += [place.with_suffix(".py"), *(place / f"{alias.name}.py" for alias in node.names)]
    return found


@pytest.mark.by_turns(3)
def test_the_files_are_what_main_imports(saved: tuple[str, Path]) -> None:
    case, folder = saved
    files = set(folder.rglob("*.py"))
    assert files == closure(folder)
    for module, cases in FEATURES.items():
        assert ((folder / "runtime" / f"{module}.py") in files) == (case in cases), module
    assert (folder / "kernels").exists() == (case in ("recomputed", "compressed", "experts"))


def bound(statements: list[ast.stmt]) -> set[str]:
    """The names that a module's statements bind."""
    names = set[str]()
    for node in statements:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.If, ast.Try)):
            names |= bound(node.body)
        else:
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names


@pytest.mark.by_turns(3)
def test_every_name_that_is_read_is_there(saved: tuple[str, Path]) -> None:
    """In the file itself, and in the modules of the folder that it imports from."""
    _, folder = saved
    trees = {path: ast.parse(path.read_text()) for path in folder.rglob("*.py")}
    names = {path: bound(tree.body) for path, tree in trees.items()}
    for path, tree in trees.items():
        modules: dict[str, Path] = {}
        for node in ast.walk(WithoutTyping().visit(ast.parse(path.read_text()))):
            if not isinstance(node, ast.ImportFrom):
                continue
            if not (node.level or (node.module or "").startswith("autopar_program")):
                continue
            home = path.parents[node.level - 1] if node.level else folder
            place = home.joinpath(*filter(None, (node.module or "").removeprefix("autopar_program").split(".")))
            for alias in node.names:
                if (place / f"{alias.name}.py").exists():
                    modules[alias.asname or alias.name] = place / f"{alias.name}.py"
                else:
                    assert alias.name in names[place.with_suffix(".py")], (path, alias.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                assert node.attr in names[modules[node.value.id]], (path, ast.unparse(node))


@pytest.mark.by_turns(3)
def test_no_line_is_long(saved: tuple[str, Path]) -> None:
    _, folder = saved
    lines = [(path.name, line) for path in folder.rglob("*.py") for line in path.read_text().splitlines()]
    assert [each for each in lines if len(each[1]) > 120] == []
