"""Linear layers of layer classes multiplied in e4m3 (`codegen/runtime/fp8.py`), where a user asks for it.

    y = F.linear(x, self.up.weight)                     y = fp8.linear(x, self.up.weight)
    y = torch.addmm(self.up.bias, x, self.up.weight)    y = fp8.addmm(self.up.bias, x, self.up.weight)

Of stored weights whose local dims are multiples of MULTIPLE, which the fp8 units want. What stands before and after the
layers (embeddings, head) stays as it is: it is what training in fp8 is most sensitive to. Weight gradients that would
be put off come at once, with the input's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from codegen.program import Call, ModuleClass, PipelineProgram, Program, Spec, Statement, Var
from codegen.runtime.parameters import parse_placement

MULTIPLE: Final = 16

_TARGETS: Final[Mapping[str, str]] = {
    "aten.linear.default": "fp8.linear",
    "deferred.linear": "fp8.linear",
    "aten.addmm.default": "fp8.addmm",
    "deferred.addmm": "fp8.addmm",
}
_WEIGHT: Final[Mapping[str, int]] = {"fp8.linear": 1, "fp8.addmm": 2}
"""Which argument is the weight."""


def in_fp8(program: Program) -> Program:
    """The program with such calls replaced in its layer classes."""
    sizes = dict(zip(program.axes, program.axis_sizes, strict=True))
    layers = tuple(_rewritten(cls, sizes) for cls in program.layers)
    return replace(program, layers=layers, fp8=True)


def count_calls(program: Program | PipelineProgram) -> int:
    """Products in e4m3 of one forward: of each layer class, times its layers."""
    stages = [stage.program for stage in program.stages] if isinstance(program, PipelineProgram) else [program]
    counts = (
        len(stage.paths(cls.name)) * sum(isinstance(s, Call) and s.target in _WEIGHT for s in cls.body)
        for stage in stages
        for cls in stage.layers
    )
    return sum(counts)


def _rewritten(cls: ModuleClass, sizes: Mapping[str, int]) -> ModuleClass:
    return replace(cls, body=tuple(_statement(each, cls, sizes) for each in cls.body))


def _statement(statement: Statement, cls: ModuleClass, sizes: Mapping[str, int]) -> Statement:
    if not isinstance(statement, Call) or statement.target not in _TARGETS or statement.kwargs:
        return statement
    target = _TARGETS[statement.target]
    weight, x = statement.args[_WEIGHT[target]], statement.args[_WEIGHT[target] - 1]
    spec = cls.parameters.get(weight.name.removeprefix("self.")) if isinstance(weight, Var) else None
    dtypes = {held.dtype for name, held in statement.operands if Var(name) in (x, weight)}
    fits = spec is not None and len(dtypes) == 1 and _is_whole(spec, sizes)
    return replace(statement, target=target) if fits else statement


def _is_whole(spec: Spec, sizes: Mapping[str, int]) -> bool:
    """Whether a rank's part of a weight is a matrix of whole multiples."""
    shape = list(spec.shape)
    for axis, text in spec.placements:
        kind, dim, _ = parse_placement(text)
        if kind == "S":
            shape[dim] //= sizes[axis]
    return len(shape) == 2 and all(size % MULTIPLE == 0 for size in shape)
