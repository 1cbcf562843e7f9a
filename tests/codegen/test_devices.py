"""Tensors that a program makes of nothing lie on the rank's device: every operator of torch that takes a device."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.frontend.trace import trace
from codegen.program import Call, Raw
from codegen.schemas import devices_of, makes, schema_of
from codegen.source.expressions import expression

_SAMPLES = {"int": 4, "List[int]": (4, 3), "number": 2.0, "float": 2.0, "bool": True, "int[]": (4, 3)}
_NAMED = {"physical_layout": (0, 1), "stride": (3, 1), "low": 1}
_NO_MODEL = ("sparse", "quantized", "Generator", "from_file", "pin")
"""Operators of other layouts, of generators, files and kinds of memory, which no graph has."""
_UNCALLED = frozenset({"tensor", "as_tensor", "normal", "to"})
"""Schemas of TorchScript, a draw (`autopar.draw` in a graph), and what is written `x.to(dtype)`."""


def _factories() -> list[str]:
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        target = f"aten.{name}.{schema.overload_name or 'default'}"
        is_model = name[0] != "_" and not any(word in name for word in _NO_MODEL) and name not in _UNCALLED
        if space == "aten" and schema.overload_name != "out" and "device" in devices_of(target) and is_model:
            found.add(target)
    return sorted(found)


def _arguments(target: str) -> dict[str, Any] | None:
    """The arguments that an operator must be given, tensors as the variable x. None for one that takes a generator."""
    schema = schema_of(target) or ()
    if any(argument.type == "Optional[Generator]" for argument in schema):
        return None
    needed = [argument for argument in schema if argument.is_required and argument.name != "device"]
    values = {each.name: Raw("x") if each.type == "Tensor" else _SAMPLES.get(each.type, 0) for each in needed}
    return values | {name: value for name, value in _NAMED.items() if name in values}


def test_every_operator_that_takes_a_device_gets_the_ranks() -> None:
    followed, made = [], []
    module = SimpleNamespace(mesh=SimpleNamespace(device=torch.device("meta")))
    for target in _factories():
        arguments = _arguments(target)
        if arguments is None:
            continue
        text = expression(Call(target, (), tuple(arguments.items()), ()))
        (made if makes(target) else followed).append(target)
        result = eval(text, {"torch": torch, "self": module, "x": torch.ones((), device="meta")})
        assert result.device.type == "meta", text
    assert {"aten.hann_window.periodic", "aten.linspace.Tensor_Tensor", "aten.randperm.default"} <= set(made)
    assert {"aten.zeros_like.default", "aten.new_full.default"} <= set(followed)
    assert len(made) > 35


class Made(nn.Module):
    """Multiplies a linear layer's result by what a constructor makes."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(8, 8), made

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.made(x)).square().mean()


MADE = {
    "bartlett": lambda x: torch.bartlett_window(8, device=x.device),
    "hamming": lambda x: torch.hamming_window(8, periodic=False, alpha=0.6, device=x.device),
    "kaiser": lambda x: torch.kaiser_window(8, False, 9.0, device=x.device),
    "blackman": lambda x: torch.blackman_window(8, device=x.device),
    "fftfreq": lambda x: torch.fft.fftfreq(8, device=x.device) + torch.fft.rfftfreq(14, device=x.device),
    "logspace": lambda x: torch.logspace(0.0, 1.0, 8, device=x.device),
    "indices": lambda x: torch.tril_indices(4, 4, device=x.device).float().mean() + torch.eye(8, device=x.device)[0],
    "vander": lambda x: torch.vander(torch.linspace(0.1, 1.0, 8, device=x.device)).mean(0),
    "complex": lambda x: torch.view_as_real(
        torch.complex(torch.hann_window(8, device=x.device), torch.ones(8, device=x.device))
    ).sum(-1),
    "empty_strided": lambda x: torch.empty_strided((8,), (1,), device=x.device).fill_(2.0),
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", MADE)
def test_a_model_that_makes_tensors_of_nothing(name: str) -> None:
    model = Made(MADE[name])
    constraints = {"dp": 2, "tp": 2} if name == "kaiser" else {}  # any plan writes the call alike
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such small work is not worth splitting
        autopar.compile(model, "1x4 cpu", example_inputs=(torch.randn(8, 8),), constraints=constraints)


def test_a_custom_operator_gets_the_ranks_device() -> None:
    with torch.library._scoped_library("device_tests", "DEF") as library:
        library.define("ramp(int n, Device device, *, bool copy=False) -> Tensor")
        library.impl(
            "ramp", lambda n, device, *, copy=False: torch.arange(float(n), device=device), "CompositeExplicitAutograd"
        )
        model = Made(lambda x: torch.ops.device_tests.ramp(8, x.device, copy=True))
        graph = trace(model, (torch.randn(4, 8),))
        (node,) = [piece for piece in graph.body if "ramp" in getattr(piece, "op", "")]
        text = expression(Call(node.op, node.args, node.kwargs, ()))
        assert text == "torch.ops.device_tests.ramp.default(8, self.mesh.device, copy=True)"
