"""Layers of experts whose rows one kernel multiplies (`codegen/runtime/grouped.py`), in programs with kernels.

    y = expert_linear(rows, self.up, routes)        y = grouped.expert_linear(rows, self.up, routes)

Which kernel that is, torch's or ours, is decided when a rank runs it: by its GPU, and by what lies how.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.program import Call, ModuleClass, Program, Statement

SEPARATE = "runtime.expert_linear"
GROUPED = "grouped.expert_linear"


def with_grouped_experts(program: Program) -> Program:
    """The program with such calls replaced, in all classes."""
    return replace(program, layers=tuple(map(_grouped, program.layers)), root=_grouped(program.root))


def _grouped(cls: ModuleClass) -> ModuleClass:
    return replace(cls, body=tuple(map(_statement, cls.body)))


def _statement(statement: Statement) -> Statement:
    if isinstance(statement, Call) and statement.target == SEPARATE:
        return replace(statement, target=GROUPED)
    return statement
