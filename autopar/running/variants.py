"""Programs that a step had for earlier states of its model, so that a flag that alternates needs no compile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.frontend.state.constants import Constants
from autopar.frontend.state.forward_numbers import ForwardNumbers
from autopar.program import GeneratedProgram
from autopar.running.number_places import NumberPlaces
from autopar.running.program_code import differ_in_bodies

MOST_VARIANTS = 8
"""Number of states that are kept. A number that no program can follow makes a state of each value."""


@dataclass(eq=False, slots=True)
class Loaded:
    """A step that shares the parameters of another one, and the program whose code it runs. index: of its batch
    shape."""

    program: GeneratedProgram
    step: Any
    index: int

    @property
    def package(self) -> str:
        """Return the name of the package that the step belongs to."""
        return type(self.step).__module__.partition(".runtime.")[0]

    def may_run(self, other: GeneratedProgram) -> bool:
        """Return whether its code is a program's, or may be exchanged for it."""
        if self.program.files == other.files:
            return True
        return self.program.backend != "inductor" and differ_in_bodies(self.program.files, other.files)


class Variant:
    """The programs of a model in one state, one for each shape of batches."""

    def __init__(self, programs: Sequence[GeneratedProgram]) -> None:
        self.programs = list(programs)
        self._places = NumberPlaces()

    def files_for(self, numbers: ForwardNumbers | None) -> dict[str, str] | None:
        """Return the files of its program with other numbers; None where that takes a new program."""
        return self._places.files_for(self.programs[0].files, numbers) if len(self.programs) == 1 else None

    def learn(self, programs: Sequence[GeneratedProgram], numbers: ForwardNumbers | None) -> None:
        """Replace the programs by new ones, generated when forward had these numbers."""
        old, self.programs = self.programs, list(programs)
        if len(programs) == 1 and (not old or old[0].files != programs[0].files):
            self._places.learn(old[0].files if old else {}, programs[0].files, numbers)


class Variants:
    """The latest states of the model, by their constants."""

    def __init__(self) -> None:
        self._latest: list[tuple[Variant, Constants]] = []

    def find(self, constants: Constants, num_programs: int) -> tuple[Variant | None, bool]:
        """Return the variant with these constants, and whether its floats are equal, too."""
        usable = [(v, kept.compared(constants)) for v, kept in self._latest if len(v.programs) == num_programs]
        for wanted in ("same", "other numbers"):
            match = next((variant for variant, how in usable if how == wanted), None)
            if match is not None:
                return match, wanted == "same"
        return None, False

    def keep(self, variant: Variant, constants: Constants) -> None:
        """Make a variant the latest one."""
        others = (pair for pair in self._latest if pair[0] is not variant)
        self._latest = [(variant, constants), *others][:MOST_VARIANTS]
