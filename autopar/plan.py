"""The Plan: all decisions, as a file that a person can read, edit and give back.

The file has the mesh, the placements of parameters and inputs, the calls that do more than follow their inputs, and
the prediction. The default of a call is the option with the least communication for its inputs' placements; the
default of a tensor is where its producer left it. `assignment.py` derives the rest and validates edits; `plan_file.py`
knows the file's format.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopar.errors import PlanError
from autopar.files.text_files import read_text
from autopar.ir.plan_data import PlanData
from autopar.ir.plan_file import read, write


@dataclass(frozen=True, slots=True)
class Plan(PlanData):
    """A plan with its file: see the module's docstring."""

    def to_yaml(self) -> str:
        """Return the file's text. `Plan.from_yaml` reads it to an equal plan."""
        return write(self)

    @classmethod
    def from_yaml(cls, text: str, source: str = "plan.yaml") -> Plan:
        """Read a plan. Raises PlanError with the file, line and key that cannot be read."""
        return read(text, source, cls)

    @classmethod
    def from_file(cls, path: str | Path) -> Plan:
        """Read a plan from a file. Raises PlanError, also where the file cannot be read."""
        return cls.from_yaml(read_text(path, PlanError), str(path))
