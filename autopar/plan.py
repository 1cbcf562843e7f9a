"""The Plan: everything that was decided, as a file that a person can read, edit and give back.

Written are the mesh, the placements of parameters and inputs, the calls that do something other than follow their
inputs, and the prediction. A call's default is the option that needs the least communication given where its inputs
lie; a tensor's default is where its producer left it. `assignment.py` derives the rest and validates what was edited;
`plan_file.py` knows the form of the file.
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
        """The file's text; `Plan.from_yaml` reads it back to an equal plan."""
        return write(self)

    @classmethod
    def from_yaml(cls, text: str, source: str = "plan.yaml") -> Plan:
        """Raises PlanError naming the file, line and key of what cannot be read."""
        return read(text, source, cls)

    @classmethod
    def from_file(cls, path: str | Path) -> Plan:
        """`from_yaml` of a file. Raises PlanError, also where it cannot be read."""
        return cls.from_yaml(read_text(path, PlanError), str(path))
