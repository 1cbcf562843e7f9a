"""The programs that a step had in earlier states of its model, so that a flag that alternates needs no compile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autopar.frontend.forward_numbers import ForwardNumbers
from autopar.frontend.state_constants import Constants
from autopar.program import GeneratedProgram
from autopar.running.number_places import NumberPlaces
from autopar.running.program_code import differ_in_bodies

MOST_VARIANTS = 8
"""How many states are kept: of a number that no program can follow, each value is one."""


@dataclass(eq=False, slots=True)
class Loaded:
    """A step that has its parameters from another one, and the program whose code it runs. index: of its shape."""

    program: GeneratedProgram
    step: Any
    index: int

    @property
    def package(self) -> str:
        """The name of the package that the step is of."""
        return type(self.step).__module__.partition(".runtime.")[0]

    def may_run(self, other: GeneratedProgram) -> bool:
        """Whether its code is that of a program, or may be exchanged for it."""
        if self.program.files == other.files:
            return True
        return self.program.backend != "inductor" and differ_in_bodies(self.program.files, other.files)


class Variant:
    """The programs of a model in one state, one for each shape of batches."""

    def __init__(self, programs: Sequence[GeneratedProgram]) -> None:
        self.programs = list(programs)
        self._places = NumberPlaces()

    def files_for(self, numbers: ForwardNumbers | None) -> dict[str, str] | None:
        """The files of its program with other numbers; None where that takes a new program."""
        return self._places.files_for(self.programs[0].files, numbers) if len(self.programs) == 1 else None

    def learn(self, programs: Sequence[GeneratedProgram], numbers: ForwardNumbers | None) -> None:
        """Take new programs, made when forward had these numbers."""
        old, self.programs = self.programs, list(programs)
        if len(programs) == 1 and (not old or old[0].files != programs[0].files):
            self._places.learn(old[0].files if old else {}, programs[0].files, numbers)


class Variants:
    """The states that were met last, with their constants."""

    def __init__(self) -> None:
        self._found: list[tuple[Variant, Constants]] = []

    def find(self, constants: Constants, num_programs: int) -> tuple[Variant | None, bool]:
        """The variant with these constants, and whether its floats are these, too."""
        usable = [(v, known.compared(constants)) for v, known in self._found if len(v.programs) == num_programs]
        for wanted in ("same", "other numbers"):
            found = next((variant for variant, how in usable if how == wanted), None)
            if found is not None:
                return found, wanted == "same"
        return None, False

    def keep(self, variant: Variant, constants: Constants) -> None:
        """Take a variant as the one that was met last."""
        self._found = [(variant, constants), *(each for each in self._found if each[0] is not variant)][:MOST_VARIANTS]
