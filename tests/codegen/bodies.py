"""Small handmade programs, run as they would be written (`expression`), before and after fusing."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from codegen.fusion import KERNELS, fuse
from codegen.program import Call, ModuleClass, Program, TensorType, Var
from codegen.runtime.cross_entropy import cross_entropy
from codegen.runtime.dropout_module import DropoutModule
from codegen.runtime.layout import Layout
from codegen.source.expressions import expression, kernel_name
from tests.codegen.typed import var, variables

WIDTH = 6
SHAPES = {"x": (3, 4, WIDTH), "a": (3, 4, WIDTH), "b": (3, 4, WIDTH), "row": (WIDTH,), "self.weight": (WIDTH,)}


class Body:
    """Statements in a row, with the variables' types read off the values that the calls really get."""

    def __init__(self, dtypes: dict[str, torch.dtype] | None = None, **shapes: tuple[int, ...]) -> None:
        dtypes = dtypes or {}
        self.values = {
            name: torch.randn(shape, dtype=torch.float32).to(dtypes.get(name, torch.float32))
            for name, shape in (SHAPES | shapes).items()
        }
        self.known = dict(self.values)
        self.statements: list = []

    def call(self, result: str, target: str, *args: object, divisor: int = 1, **kwargs: object) -> Body:
        named = tuple(self.var(a) if isinstance(a, str) else a for a in args)
        statement = Call(target, named, tuple(kwargs.items()), (var(result),), "", divisor)
        self.known = execute([statement], self.known)
        self.statements.append(replace(statement, results=(self.var(result),)))
        return self

    def var(self, name: str) -> Var:
        """As it is by now."""
        value = self.known[name]
        return Var(name, TensorType(tuple(value.shape), str(value.dtype).removeprefix("torch."), tensor=(name, 0)))

    def rms_norm(
        self, x: str = "x", weight: str = "self.weight", eps: object = 1e-3, dims: object = (-1,), by: int = 1
    ) -> Body:
        self.call("power", "aten.pow.Tensor_Scalar", x, 2).call(
            "mean", "aten.mean.dim", "power", dims, True, divisor=by
        )
        self.call("shifted", "aten.add.Tensor", "mean", eps).call("rsqrt", "aten.rsqrt.default", "shifted")
        return self.call("mul", "aten.mul.Tensor", x, "rsqrt").call("y", "aten.mul.Tensor", weight, "mul")

    def swiglu(self, gate: str = "a", up: str = "b") -> Body:
        return self.call("act", "aten.silu.default", gate).call("y", "aten.mul.Tensor", "act", up)

    def program(self, *outputs: str, num_micro_batches: int = 1) -> Program:
        cls = ModuleClass("M", "", {}, {}, (var("x"),), tuple(self.statements), variables(*(outputs or ("y",))))
        return Program("M", ("dp", "tp"), (1, 2), "fp32", 8, num_micro_batches, {}, (), cls, ())


def execute(statements: list, values: dict) -> dict:
    """The statements as they are written in a generated file; `self.weight` stands for any stored tensor."""
    module = DropoutModule(SimpleNamespace(device=torch.device("cpu")))
    scope = {"F": F, "torch": torch, "cross_entropy": cross_entropy, "LAYOUT": Layout(SHAPES["x"])}
    scope |= {"self_same_dropout": module.same_dropout, "self_dropout_mask": module.dropout_mask}
    for kernel in (target.removeprefix("kernels.") for target in KERNELS):
        scope[kernel_name(kernel)] = getattr(importlib.import_module(f"codegen.kernels.{kernel}"), kernel)
    scope |= {name.replace("self.", "self_"): value for name, value in values.items()}
    for statement in statements:
        results = ", ".join(result.name or "_" for result in statement.results)
        exec(f"{results} = {expression(statement)}".replace("self.", "self_"), scope)
    return {name.replace("self_", "self."): value for name, value in scope.items() if name not in ("F", "torch")}


def targets(program: Program) -> list[str]:
    return [s.target if isinstance(s, Call) else type(s).__name__ for s in program.root.body]


def assert_same_numbers(body: Body, fused: Program, tolerance: float = 1e-6) -> None:
    """Value of y and gradients of all that the program returns, before and after fusing."""
    found = []
    for statements in (body.statements, fused.root.body):
        leaves = {n: v.detach().clone().requires_grad_(v.is_floating_point()) for n, v in body.values.items()}
        values = execute(list(statements), leaves)
        torch.manual_seed(1)
        outputs = [values[output.name] for output in fused.root.outputs]
        torch.autograd.backward(outputs, [torch.randn(output.shape).to(output.dtype) for output in outputs])
        found.append((values["y"].detach(), {n: v.grad for n, v in leaves.items() if v.grad is not None}))
    (y, gradients), (fused_y, fused_gradients) = found
    assert y.dtype == fused_y.dtype and gradients.keys() == fused_gradients.keys()
    torch.testing.assert_close(fused_y, y, rtol=tolerance, atol=tolerance)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            fused_gradients[name],
            gradient,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def is_left_alone(body: Body, *outputs: str) -> bool:
    """Whether fusing changes nothing."""
    program = body.program(*outputs)
    return fuse(program) == program
