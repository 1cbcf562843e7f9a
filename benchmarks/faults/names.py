"""Names that a user may give modules, parameters, classes, inputs and folders, and that source cannot hold as they are.

Each is compiled for one CPU and trained in this process and by hand; names of modules and classes are also compiled for
one of dp2, tp2 and pp2, whose source is checked when it is emitted. Folders are saved to and their main.py is run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.by_hand import compiled_for, is_exact
from benchmarks.faults.case import Case, Result, drawn, judge, judged

MODULES = (
    *("my-proj", "a b", "naïve", "Ω", "ﬁ", 'q"uote', "it's", "new\nline", "back\\slash", "{x}", "%(s)s", '"""', "#"),
    *("class", "import", "None", "lambda", "print", "self", "torch", "F", "nn", "layer", "hidden", "0", "00", "1st"),
    *("mesh", "rng", "path", "recompute", "offload", "units", "slots", "layers_of", "count_targets", "same_dropout"),
    *("PARAMETERS", "BUFFERS", "INPUTS", "LAYERS", "dp", "tp", "pp", "__hidden", "_x", "linear", "F2", "x", "loss"),
)
CLASSES = (
    *("Model", "Module", "Step", "Mesh", "Tensor", "Param", "Layout", "Container", "Stage0", "tuple", "torch", "F"),
    *("self", "class", "My-Block", "Ω", 'x"""y', "new\nline", "dropout", "swiglu", "Block2", "__Block", "1st", ""),
)
INPUTS = (
    *("input", "torch", "dp", "tp", "mesh", "F", "hidden", "type", "num_targets", "class_", "_x", "ﬁ", "Ω", "__x"),
    *(
        "lin",
        "scale",
        "layer",
        "sum",
        "loss",
        "dropout",
        "Module",
        "rng",
        "x_",
        "model",
        "class",
        "a-b",
        "none",
        "arg0",
    ),
)
FOLDERS = ("llama-3.1", "a b", "class", "3d", "naïve", "torch", "runtime", "model", "x.py", "it's")

PLANS: tuple[dict[str, Any], ...] = ({"dp": 2}, {"tp": 2}, {"pp": 2})


class Chain(nn.Module):
    """A linear layer under each name, and a parameter under each name with `p-` before it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, nn.Linear(8, 8))
            self.register_parameter(f"p-{name}", nn.Parameter(torch.ones(8)))

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = self._modules[name](x).tanh() * self._parameters[f"p-{name}"]  # type: ignore[misc]
        return x.square().mean()


class Blocks(nn.Module):
    """Equal blocks in a list under a name of its own."""

    def __init__(self, block: Callable[[], nn.Module], key: str = "blocks") -> None:
        super().__init__()
        self.key = key
        self.add_module(key, nn.ModuleList(block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self._modules[self.key]:  # type: ignore[union-attr]
            x = block(x)
        return x.square().mean()


class Inputs(nn.Module):
    """Takes inputs under any name."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, **inputs: Tensor) -> Tensor:
        return sum((self.lin(x) * self.scale for x in inputs.values()), torch.zeros(())).square().mean()


class Tables(nn.Module):
    """Lists and dicts of parameters and modules at the root, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        one = nn.Parameter(torch.ones(8))
        self.plist = nn.ParameterList([one, nn.Parameter(torch.ones(8)), one])
        self.pdict = nn.ParameterDict({"a-b": nn.Parameter(torch.ones(8)), "class": nn.Parameter(torch.ones(8))})
        self.mdict = nn.ModuleDict({"up-proj": nn.Linear(8, 8), "é": nn.Linear(8, 8)})

    def forward(self, x: Tensor) -> Tensor:
        for parameter in (*self.plist, *self.pdict.values()):
            x = x * parameter
        for module in self.mdict.values():
            x = module(x)
        return x.square().mean()


def cases(count: int | None, seed: int) -> list[Case]:
    """Each takes about a second."""
    return drawn(_all(), count, seed)


def _all() -> Iterator[Case]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for name in MODULES:
        yield _trained(f"module {name!r}", lambda n=name: Chain((n, "other")), {"x": x})
        yield _trained(f"blocks of {name!r}", lambda n=name: Blocks(lambda: Chain2((n,)), n), {"x": x})
    yield _trained("all modules at once", lambda: Chain(MODULES), {"x": x})
    for name in CLASSES:
        block = type(name, (Chain2,), {})
        root = type(name, (Blocks,), {})
        yield _trained(f"class {name!r}", lambda r=root, b=block: r(lambda: b(("up", "down"))), {"x": x})
    for name in INPUTS:
        batch = {name: x, "other": x.flip(0)}
        yield judged(f"input {name!r}", lambda b=batch: is_exact(Inputs(), b))
    yield _trained("tables of parameters", Tables, {"x": x})
    yield _trained("a root of Sequential", lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), _Mean()), {"input": x})
    for name in FOLDERS:
        yield Case(f"folder {name!r}", lambda n=name: _saved(n, x))


class Chain2(Chain):
    """A chain that returns what it computes, beside its input."""

    def forward(self, x: Tensor) -> Tensor:
        start = x
        for name in self.names:
            x = self._modules[name](x).tanh() * self._parameters[f"p-{name}"]  # type: ignore[misc]
        return start + x


class _Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def _trained(name: str, make: Callable[[], nn.Module], batch: Mapping[str, Tensor]) -> Case:
    def attempt() -> bool:
        plan = PLANS[len(name) % len(PLANS)]
        compiled_for(make(), batch, cluster="2 cpu", constraints=plan)
        return is_exact(make(), batch)

    return judged(name, attempt)


def _saved(name: str, x: Tensor) -> Result:
    """A program saved to a folder of that name, whose main.py then trains."""
    home = tempfile.TemporaryDirectory(prefix="autopar_names_")
    with home as parent:
        folder = Path(parent) / name
        found = judge(lambda: bool(compiled_for(Chain(("up", "down")), {"x": x}).save(folder)))
        if found.outcome != "right":
            return found
        command = [sys.executable, str(folder / "main.py"), "--steps", "1"]
        # Where the optimiser that was compiled in is found.
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        done = subprocess.run(command, capture_output=True, text=True, cwd=parent, env=environment, timeout=900)
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return Result("right") if done.returncode == 0 and "loss" in done.stdout else Result("raw", last)
