"""What is priced is what is written: every reshard of a program once, every call of the graph once."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.costs.emitted import classes, emitted, priced
from autopar.costs.events import Event, Moved, Ran, Reader
from autopar.ir.chain import segments
from autopar.sharding.assignment import Assignment
from autopar.sharding.scopes import scopes_of
from codegen.program import Call, Program, Reshard
from tests.autopar.costs.test_kernel_prices import fused_setting
from tests.autopar.requests import Setting, setting

SETTINGS = [
    ("llama", "dp2 x tp2", False),
    ("gpt2", "tp4", False),
    ("bert", "dp2 x tp2", False),
    ("llama", "tp4", True),
    ("gpt2", "dp2 x tp2", True),
]
ABSORBED = ("aten.view.default", "aten.reshape.default")
"""A view of the rows that torch.addmm reads is part of the call that overlaps it."""


def events_of(it: Setting, assignment: Assignment) -> tuple[Program, dict[str, list[Event]]]:
    """The program of the decisions, and the events of each of its classes."""
    program = emitted(it.graph, it.operators, it.pricer, assignment, {}).program
    pricer = priced(program, it.graph, it.operators, it.pricer)
    fusions = (pricer.kernels.fusions if pricer.kernels is not None else None) or {}
    bodies, found = dict(classes(program)), {}
    for scope in scopes_of(it.graph):
        reader = Reader(scope, it.pricer.mesh, it.operators, assignment, fusions, segments(it.graph))
        units = reader.units(bodies[scope.name]).values()
        found[scope.name] = [event for unit in units for event in unit.events]
    return program, found


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("name", "mesh", "kernels"), SETTINGS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_reshard_of_the_program_is_priced_once(name: str, mesh: str, kernels: bool, seed: int) -> None:
    """By its axis, collectives and bytes, which lowering worked out for the statement."""
    it = fused_setting(name, mesh) if kernels else setting(name, mesh)
    program, events = events_of(it, it.assignment(seed)[1])
    count = 0
    for scope, cls in classes(program):
        metas = next(s.metas for s in scopes_of(it.graph) if s.name == scope)
        written = Counter(
            (s.axis, s.forward, s.backward, s.num_bytes)
            for s in cls.body
            if isinstance(s, Reshard) and s.source.type.tensor[0]
        )
        found: Counter[tuple[str, str, str, float]] = Counter()
        for event in events[scope]:
            for step in event.path if isinstance(event, Moved) else ():
                meta = metas[event.ref]
                backward = step.backward if meta.requires_grad else None
                axis = it.pricer.mesh.axes[step.axis]
                found[axis, step.forward or "", backward or "", meta.num_bytes * step.fraction] += 1
        assert found == written
        count += found.total()
    assert count


@pytest.mark.parametrize(("name", "mesh", "kernels"), SETTINGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_call_is_counted_once(name: str, mesh: str, kernels: bool, seed: int) -> None:
    """Whatever passes make one call of: together the program's calls stand for all of the graph's."""
    it = fused_setting(name, mesh) if kernels else setting(name, mesh)
    assignment = it.assignment(seed)[1]
    program, events = events_of(it, assignment)
    for scope, cls in classes(program):
        names = {name for owner, name in it.operators if owner == scope}
        ran = Counter(event.name for event in events[scope] if isinstance(event, Ran))
        assert set(ran) <= names and set(ran.values()) == {1}
        calls = [member for s in cls.body if isinstance(s, Call) for member in s.original]
        made = {result.type.tensor[0] for call in calls for result in call.results}
        assert all(it.operators[scope, name].node.op in ABSORBED for name in names - made)
