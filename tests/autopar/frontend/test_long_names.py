"""Names of a hundred characters and more, and paths through many modules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from benchmarks.by_hand import compiled_for, is_exact
from benchmarks.faults.names import Blocks, Chain, Chain2
from codegen.source.columns import fitted
from codegen.source.names import MOST_CHARACTERS, class_name, shortened

X = torch.linspace(-1, 1, 32).reshape(4, 8)
LONG = ("q" * 130, "q" * 131, "projection_" * 27, "\u00fcber" * 40, "my-" * 60, "a = b, (c" * 20)


class Nested(nn.Module):
    """A layer inside of `depth` modules of one name."""

    def __init__(self, name: str, depth: int) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, Nested(name, depth - 1) if depth else nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self._modules[self.name](x)  # type: ignore[misc]
        return made


class Root(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)
        return made.square().mean()


def test_long_names_of_modules() -> None:
    torch.manual_seed(0)
    assert is_exact(Chain(LONG), {"x": X})


@pytest.mark.parametrize(
    ("name", "depth"), [("layer", 60), pytest.param("inner_layer" * 5, 12, marks=pytest.mark.slow)]
)
def test_deeply_nested_modules(name: str, depth: int) -> None:
    assert is_exact(Root(Nested(name, depth)), {"x": X})


@pytest.mark.slow
@pytest.mark.parametrize("length", [119, 250])
def test_long_names_of_classes(length: int) -> None:
    block, root = type("B" * length, (Chain2,), {}), type("R" * length, (Blocks,), {})
    model = root(lambda: block(("up",)))
    found = compiled_for(model, {"x": X})
    assert f"class {shortened('B' * length)}(Module)" in found.source and "B" * 70 not in found.source
    assert is_exact(model, {"x": X})


@pytest.mark.slow
def test_a_program_with_long_names_is_saved(tmp_path: Path) -> None:
    program = autopar.compile(Chain(LONG), "1 cpu", example_inputs={"x": X})
    program.save(tmp_path / "program")
    assert (tmp_path / "program" / "model.py").is_file()


def test_shortened_names_are_short_and_unlike() -> None:
    names = [*("N" * count for count in range(1, 300)), "N" * 200 + "a", "N" * 200 + "b"]
    found = [class_name(name) for name in names]
    assert len(set(found)) == len(names) and max(map(len, found)) <= MOST_CHARACTERS
    assert found == [class_name(name) for name in names] and shortened("mlp") == "mlp"


@pytest.mark.parametrize(
    "text",
    [
        "class {}(Module):\n    pass\n",
        'TABLE = {{\n    "{}.weight": Param((8, 8), dp="Rp"),\n}}\n',
        "for x in {}:\n    pass\n",
    ],
)
def test_lines_without_a_place_to_break_stay_python(text: str) -> None:
    long = text.format("a" * 150)
    assert ast.dump(ast.parse(fitted(long))) == ast.dump(ast.parse(long))
