"""Experts' layers that take tokens, weigh and sum; activations of the halves of one tensor. Numbers are unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from codegen.fusion import fuse
from codegen.kernels.geglu import geglu
from codegen.kernels.swiglu import swiglu
from codegen.passes.grouped_experts import with_grouped_experts
from codegen.passes.packed_gates import with_packed_gates
from codegen.passes.token_rows import with_token_rows
from codegen.program import Call, Program, Var
from codegen.runtime import experts, grouped
from tests.codegen.bodies import Body, execute, targets
from tests.codegen.typed import var

TOKENS, CHOICES, EXPERTS, WIDTH = 5, 2, 3, 4
ROWS = TOKENS * CHOICES
RUNTIME: dict[str, Any] = {
    **{name: getattr(experts, name) for name in ("Routes", "dispatch", "expert_linear", "combine")},
    "grouped": grouped,
    "swiglu": swiglu,
    "geglu": geglu,
}


class Statements(Body):
    """Statements that may also call the run time, have several results, and read values that are no tensors."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__(**shapes)
        self.values["ids"] = torch.tensor([2, 0, 0, 1, 2, 2, 0, 1, 0, 0])
        self.known = self.values | RUNTIME

    def var(self, name: str) -> Var:
        return super().var(name) if isinstance(self.known[name], torch.Tensor) else var(name)

    def both(self, results: tuple[str, str], target: str, *args: Any) -> Statements:
        statement = Call(
            target, tuple(self.var(a) if isinstance(a, str) else a for a in args), (), (*map(var, results),)
        )
        self.known = execute([statement], self.known)
        self.statements.append(replace(statement, results=tuple(map(self.var, results))))
        return self


def mixture(
    weights: str = "weights", shape: tuple[int, ...] = (TOKENS, CHOICES, WIDTH), dims: Any = (1,)
) -> Statements:
    body = Statements(x=(TOKENS, WIDTH), up=(EXPERTS, WIDTH, WIDTH), weights=(ROWS, 1), wide=(ROWS, WIDTH))
    body.call("index", "aten.repeat_interleave.self_int", "x", CHOICES, 0)
    body.call("routes", "runtime.Routes", "ids", EXPERTS).call("rows", "runtime.dispatch", "index", "routes")
    body.call("product", "runtime.expert_linear", "rows", "up", "routes")
    body.call("back", "runtime.combine", "product", "routes")
    if weights:
        body.call("weighed", "aten.mul.Tensor", *((weights, "back") if weights == "wide" else ("back", weights)))
    body.call("view", "aten.view.default", "weighed" if weights else "back", shape)
    return body.call("y", "aten.sum.dim_IntList", "view", dims)


def check_numbers(body: Statements, program: Program) -> None:
    """Return the results of the statements and all gradients, to the bit."""
    results = []
    for statements in (body.statements, program.root.body):
        leaves = {n: v.clone().requires_grad_(v.is_floating_point()) for n, v in body.values.items()}
        outputs = [execute(list(statements), leaves | RUNTIME)[output.name] for output in program.root.outputs]
        torch.autograd.backward([output.square().sum() for output in outputs])
        results.append([*outputs, *(leaf.grad for leaf in leaves.values() if leaf.grad is not None)])
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("weights", ["weights", ""])
def test_layers_of_experts_take_tokens_and_sum(weights: str) -> None:
    body = mixture(weights)
    program = with_token_rows(body.program())
    names = ["Routes", "dispatch", "expert_linear", "combine"]
    assert targets(program) == [f"runtime.{name}" for name in names]
    calls: Any = program.root.body
    assert [call.kwargs for call in calls] == [(), (("choices", CHOICES),), (), (("choices", CHOICES),)]
    assert [call.target for call in calls[-1].original][-1] == "aten.sum.dim_IntList"
    check_numbers(body, program)
    with_kernels = with_grouped_experts(program)
    assert targets(with_kernels) == [f"grouped.{name}" for name in names]
    check_numbers(body, with_kernels)


STAYING: dict[str, tuple[Callable[[], Statements], tuple[str, ...], str]] = {
    "copies are read": (mixture, ("y", "index"), "dispatch"),
    "rows are read": (mixture, ("y", "back"), "combine"),
    "weighted rows are read": (mixture, ("y", "weighed"), "combine"),
    "a weight for each element": (lambda: mixture("wide"), ("y",), "combine"),
    "sums over tokens": (lambda: mixture(dims=(0,)), ("y",), "combine"),
    "sums that keep a dim": (lambda: mixture(dims=(1, 2)), ("y",), "combine"),
    "another view": (lambda: mixture(shape=(ROWS, 2, WIDTH // 2)), ("y",), "combine"),
}


@pytest.mark.parametrize(("made", "outputs", "name"), STAYING.values(), ids=STAYING)
def test_calls_stay_where_others_read_them(made: Callable[[], Statements], outputs: tuple[str, ...], name: str) -> None:
    body = made()
    program = with_token_rows(body.program(*outputs))
    calls: Any = [call for call in program.root.body if isinstance(call, Call) and call.target == f"runtime.{name}"]
    assert [call.kwargs for call in calls] == [()]
    check_numbers(body, program)


def gated(
    activation: str = "silu", cut: str = "chunk.default", sizes: int = 2, dim: int = -1, gate: str = "a", up: str = "b"
) -> Statements:
    body = Statements(x=(4, 2 * WIDTH)).both(("a", "b"), f"aten.{cut}", "x", sizes, dim)
    body.call("active", f"aten.{activation}.default", gate).call("y", "aten.mul.Tensor", "active", up)
    return body


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("cut", "sizes"), [("chunk.default", 2), ("split.Tensor", WIDTH)])
def test_halves_are_read_where_they_are(activation: str, cut: str, sizes: int) -> None:
    body = gated(activation, cut, sizes)
    program = with_packed_gates(fuse(body.program()))
    assert targets(program) == [f"kernels.{'swiglu' if activation == 'silu' else 'geglu'}"]
    (call,) = program.root.body
    assert isinstance(call, Call) and [arg.name for arg in call.args] == ["x"] and len(call.original) == 3
    check_numbers(body, program)


@pytest.mark.parametrize(
    ("body", "outputs"),
    [(gated(gate="b", up="a"), ("y",)), (gated(dim=0), ("y",)), (gated(), ("y", "b"))],
    ids=["the other half first", "rows", "a half is read"],
)
def test_other_halves_stay(body: Statements, outputs: tuple[str, ...]) -> None:
    program = fuse(body.program(*outputs))
    assert with_packed_gates(program) == program
