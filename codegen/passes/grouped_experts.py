"""Layers of experts whose rows kernels sort, multiply and sum (`codegen/runtime/grouped.py`), in programs with kernels.

    routes = Routes(chosen, 128)                             routes = grouped.Routes(chosen, 128)
    rows = dispatch(x, routes, choices=8)                    rows = grouped.dispatch(x, routes, choices=8)
    y = expert_linear(rows, self.up, routes)                 y = grouped.expert_linear(rows, self.up, routes)
    total = combine(y, routes, weights, choices=8)           total = grouped.combine(y, routes, weights, choices=8)

Which kernel that is, torch's or ours, is decided when a rank runs it: by its GPU, and by what lies how.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from codegen.program import Call, ModuleClass, Program, Statement

GROUPED: Final = {f"runtime.{name}": f"grouped.{name}" for name in ("Routes", "dispatch", "expert_linear", "combine")}


def with_grouped_experts(program: Program) -> Program:
    """The program with such calls replaced, in all classes."""
    return replace(program, layers=tuple(map(_grouped, program.layers)), root=_grouped(program.root))


def _grouped(cls: ModuleClass) -> ModuleClass:
    return replace(cls, body=tuple(map(_statement, cls.body)))


def _statement(statement: Statement) -> Statement:
    if isinstance(statement, Call) and statement.target in GROUPED:
        return replace(statement, target=GROUPED[statement.target])
    return statement
