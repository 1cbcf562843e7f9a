"""Decisions made at one number of rows are those of another: every call has them, and they cut the same loops."""

from __future__ import annotations

import pytest

from autopar.ir.mesh import Mesh
from autopar.ir.placement import S
from autopar.planning.request import operators_at
from autopar.rules.factorize import view_factors
from autopar.sharding.batch_rescaling import rescaled, suits
from autopar.sharding.call_options import options_of
from tests.autopar.requests import request_for, setting

SOURCE = 8


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "t5"))])
@pytest.mark.parametrize(("mesh", "rows"), [("tp2", 1), ("tp2", 4), ("dp2 x tp2", 2)])
def test_decisions_of_one_number_of_rows_are_options_of_another(name: str, mesh: str, rows: int) -> None:
    """Random ones too, and each call's are cut into the same parts: local sizes without the batch are equal."""
    base = setting(name, mesh)
    graph, operators = operators_at(request_for(name), rows)
    for seed in range(4):
        assignment = base.assignment(seed)[1]
        there = rescaled(assignment, base.operators, SOURCE, rows)
        assert suits(there, graph, operators, Mesh.parse(mesh)), seed
        for key, option in there.operators.items():
            kinds = [[p.kind for p in placements] for placements in (*option.inputs, *option.outputs)]
            mine = assignment.operators[key]
            assert kinds == [[p.kind for p in placements] for placements in (*mine.inputs, *mine.outputs)], key


def test_cutting_what_lies_inside_the_batch_keeps_its_meaning() -> None:
    """Rows x positions seen as one dim: positions cut by tp are as many sections as there are rows."""
    base = setting("llama", "tp2")
    ops = base.operators
    key = next(k for k, o in ops.items() if k[0] == "" and o.node.op.startswith(("aten.view", "aten.reshape"))
               and len(o.inputs[0].shape) == 3 and len(o.node.outputs[0].shape) == 2)  # fmt: skip
    option = next(o for o in options_of(ops[key], base.pricer.mesh) if o.inputs[0] == (S(1),))
    assert option.outputs[0] == (S(0, SOURCE),)
    assignment = base.assignment(0)[1]
    assignment.operators[key] = option  # type: ignore[index]
    for rows, sections in ((4, 4), (64, 64), (1, 1)):
        there = rescaled(assignment, base.operators, SOURCE, rows).operators[key]
        assert there.labels == option.labels
        assert there.inputs[0] == (S(1),) and there.outputs[0] == (S(0, sections),)


def test_factors_of_a_view_are_named_alike_with_one_row() -> None:
    many, one = view_factors((4, 16, 12), (64, 3, 4)), view_factors((1, 16, 12), (16, 3, 4))
    assert one.sizes.items() <= many.sizes.items()
    assert one.source[1:] == many.source[1:] and one.target[1:] == many.target[1:]
