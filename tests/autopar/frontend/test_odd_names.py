"""Names of modules, classes, inputs and folders that Python or generated code cannot take as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import TraceError
from autopar.frontend.trace import trace
from benchmarks.by_hand import compiled_for, is_exact
from benchmarks.faults.names import CLASSES, MODULES, Blocks, Chain, Chain2, Inputs, Tables
from codegen.source.names import RUNTIME_HOME, argument, attribute_path, class_name
from tests.autopar.planning.random_requests import Routed

ROOT = Path(__file__).parents[3]
X = torch.linspace(-1, 1, 32).reshape(4, 8)


def test_all_module_names_in_one_model() -> None:
    torch.manual_seed(0)
    assert is_exact(Chain(MODULES), {"x": X})


def test_odd_names_in_a_layer_that_repeats() -> None:
    assert is_exact(Blocks(lambda: Chain2(("mesh", "my-proj", "class", "0")), "my blocks"), {"x": X})


def test_a_list_of_layers_called_like_an_input() -> None:
    assert is_exact(Blocks(lambda: Chain2(("x",)), "x"), {"x": X})


def test_tables_of_parameters_at_the_root() -> None:
    assert is_exact(Tables(), {"x": X})


@pytest.mark.parametrize(
    "name", ["torch", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dp", "num_targets", "hidden", "Ω"))]
)
def test_inputs_that_are_called_like_generated_names(name: str) -> None:
    assert is_exact(Inputs(), {name: X, "other": X.flip(0)})


def test_two_inputs_never_share_an_argument() -> None:
    assert is_exact(Inputs(), {"mesh": X, "mesh_": X.flip(0)})
    inputs = [f"{name}{'_' * count}" for name in ("mesh", "__x", "tokens") for count in range(4)]
    assert len({argument(name) for name in inputs}) == len(inputs)


@pytest.mark.parametrize("name", ["class", "a-b", "self", "__x"])
def test_inputs_that_are_refused(name: str) -> None:
    with pytest.raises(TraceError, match="name"):
        trace(Inputs(), {name: X, "other": X})


class _SameNames(nn.Module):
    """Arguments of forward that are called like a parameter, a buffer and a module."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.other = nn.Parameter(torch.linspace(0, 1, 8)), nn.Linear(8, 8)
        self.register_buffer("mask", torch.arange(8.0) / 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (self.other(x * self.x + other) * (mask + self.mask)).square().mean()


def test_inputs_that_are_called_like_parameters() -> None:
    torch.manual_seed(0)
    assert is_exact(Inputs(), {"scale": X, "other": X.flip(0)})
    batch = {"x": X, "mask": X.cos(), "other": X.flip(1)}
    assert is_exact(_SameNames(), batch)
    assert "def forward(self, x, mask, other)" in compiled_for(_SameNames(), batch).source


def test_what_programs_import_is_reserved() -> None:
    programs = [path.read_text(encoding="utf-8") for path in (ROOT / "tests/golden/programs").iterdir()]
    lines = re.findall(r"^from \.runtime\.\w+ import (.+)$", "\n".join(programs), re.MULTILINE)
    imported = {name for line in lines for name in line.split(", ")}
    assert {"rms_norm", "cross_entropy", "Param"} < imported
    assert all(class_name(name) != name for name in {*imported, *RUNTIME_HOME})


class Routes(nn.Module):
    """A mixture whose class and modules are called like what its program imports."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatch, self.mixture, self.combine = nn.Linear(16, 16), Routed(16, 32), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.combine(self.mixture(self.dispatch(x)))


class Mixtures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(24, 16), nn.ModuleList(Routes() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.slow
def test_a_mixture_called_like_what_its_program_imports() -> None:
    torch.manual_seed(0)
    inputs = {"tokens": torch.randint(24, (4, 8))}
    report = autopar.verify(Mixtures(), "2 cpu", example_inputs=inputs, constraints={"ep": 2})
    assert report.ok(1e-5), report


def test_a_block_class_named_like_the_root() -> None:
    block, root = type("Same", (Chain2,), {}), type("Same", (Blocks,), {})
    compiled = compiled_for(root(lambda: block(("up",))), {"x": X})
    assert "class Same(Module)" in compiled.source and "class Same2(Module)" in compiled.source


def test_class_names_are_identifiers_of_their_own() -> None:
    found = [class_name(name) for name in CLASSES]
    assert all(name.isidentifier() for name in found)
    assert class_name("Module") == "Module2" and class_name("Stage0") == "Stage0_2" and class_name("Stage") == "Stage_2"


def test_paths_and_arguments() -> None:
    assert attribute_path("layers.0.mlp.weight") == "self.layers[0].mlp.weight"
    assert attribute_path("my-list.mesh.00") == 'self["my-list"]["mesh"]["00"]'
    assert attribute_path('a"b.class') == """self['a"b']["class"]"""
    assert (argument("dp"), argument("input_ids"), argument("hidden")) == ("dp_", "input_ids", "hidden")
