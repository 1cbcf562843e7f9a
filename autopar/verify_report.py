"""The report of a verification: errors by kind and name, and reasons for which it fails whatever the errors are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.settings.fp8 import EXACT, UNIT
from codegen.source.text import visible

FLOORS = 4.0
RESOLUTION = 2.0**-23
GRADIENTS = 4 * UNIT
"""Error in norm of all gradients together that a program that rounds on purpose may have. Two layers with products in
fp8, gathers and sums in codes were off by 0.06, 0.07 and 0.01, and with all of them by 0.08."""
LOSS = UNIT / 4
"""Relative error of its loss that such a program may have; under all of these it was below 0.001."""
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Largest relative errors over all steps, and their places; inf where a number is not finite.

    gradients, parameters, buffers: error by name (the latter two after the last step). gradient_floors, floors: the
    reference's own error against the same training in fp64, of gradients, and of parameters and buffers. round_off:
    names that the rule leaves out. losses: (program, reference) of each step. tolerance: the error to expect of the
    program, by autopar/settings/fp8.py. proves_nothing: why equal numbers would prove nothing, such as a reference that
    did not train. rounds: what the program rounds on purpose, in words. together: the error of all gradients as one
    vector, by which such a program is judged: a small tensor may share a block of codes with large ones, and rounding
    may change the experts of a token or two.
    """

    loss: float
    gradients: Mapping[str, float]
    parameters: Mapping[str, float]
    gradient_floors: Mapping[str, float]
    floors: Mapping[str, float]
    round_off: tuple[str, ...]
    losses: tuple[tuple[float, float], ...]
    mesh: str
    tolerance: float = EXACT
    buffers: Mapping[str, float] = field(default_factory=dict)
    proves_nothing: tuple[str, ...] = ()
    together: float = 0.0
    rounds: tuple[str, ...] = ()

    @property
    def largest_gradient(self) -> float:
        return max(self.gradients.values(), default=0.0)

    @property
    def largest_parameter(self) -> float:
        return max(self.parameters.values(), default=0.0)

    def ok(self, tolerance: float | None = None) -> bool:
        """Return whether every error is within `tolerance` (by default the report's), or FLOORS times the reference's,
        and the comparison proves something. Without a tolerance, a program that rounds on purpose must have no
        `faults`."""
        if tolerance is None and self.rounds:
            return not self.faults()
        tolerance = self.tolerance if tolerance is None else tolerance
        return self.loss <= tolerance and not self.beyond(tolerance) and not self.proves_nothing

    def faults(self) -> tuple[str, ...]:
        """Return the faults of a program that rounds on purpose. Rounding explains an error of all gradients, of the
        loss or of buffers up to a limit, and none of an update by the program's own gradients."""
        buffers = max(self.buffers.values(), default=0.0)
        faults = [f"all gradients together are off by {self.together:.2g}"] if not self.together <= GRADIENTS else []
        faults += [f"the loss is off by {self.loss:.2g}"] if not self.loss <= LOSS else []
        faults += [f"a buffer is off by {buffers:.2g}"] if not buffers <= GRADIENTS else []
        if not self.largest_parameter <= EXACT:
            faults.append(f"an update by its own gradients is off by {self.largest_parameter:.2g}")
        return (*self.proves_nothing, *faults)

    def beyond(self, tolerance: float = 1e-5) -> tuple[str, ...]:
        """Return tensors that are off by more than `tolerance` and by more than the reference's round-off explains.

        A tolerance below fp32's resolution is taken literally: round-off then explains nothing.
        """
        factor = FLOORS if tolerance >= RESOLUTION else 0.0
        return tuple(
            n for n, error, floor in self._errors() if math.isinf(error) or not error <= max(tolerance, factor * floor)
        )

    def explained(self, tolerance: float = 1e-5) -> tuple[str, ...]:
        """Return tensors that are off by more than `tolerance`, as the reference itself is."""
        outside = set(self.beyond(tolerance))
        return tuple(dict.fromkeys(n for n, error, _ in self._errors() if error > tolerance and n not in outside))

    def _errors(self) -> Iterator[tuple[str, float, float]]:
        """Yield (name, error, the reference's error) of all gradients, parameters and buffers."""
        for errors, floors in (
            (self.gradients, self.gradient_floors),
            (self.parameters, self.floors),
            (self.buffers, self.floors),
        ):
            yield from ((name, error, floors.get(name, 0.0)) for name, error in errors.items())

    def __str__(self) -> str:
        """Return one line per kind."""
        spoiled = [
            f"step {i}: {loss} and {right}" for i, (loss, right) in enumerate(self.losses) if not _finite(loss, right)
        ]
        lines = [
            f"{self.mesh} against one process, {len(self.losses)} steps; largest relative errors:",
            f"  loss        {self.loss:.2e}" + (f"  (not finite in {', '.join(spoiled[:_SHOWN])})" if spoiled else ""),
            _line("gradients", self.gradients),
            _line("parameters", self.parameters),
        ]
        lines += [_line("buffers", self.buffers)] if self.buffers else []
        if self.rounds:
            lines.append(
                f"  together    {self.together:.2e}  (all gradients as one vector, in {' and '.join(self.rounds)})"
            )
        if self.round_off:
            names = ", ".join(self.round_off[:_SHOWN]) + (", ..." if len(self.round_off) > _SHOWN else "")
            lines.append(f"  left out    {len(self.round_off)}, pure round-off: {names}")
        lines += [f"  proves nothing: {reason}" for reason in self.proves_nothing]
        return visible("\n".join(lines))


def _line(kind: str, errors: Mapping[str, float]) -> str:
    worst = max(errors, key=lambda name: errors[name], default="")
    where = f"  ({worst}, of {len(errors)} compared)" if worst else "  (none compared)"
    return f"  {kind:<11} {errors.get(worst, 0.0):.2e}{where}"


def _finite(*values: float) -> bool:
    return all(map(math.isfinite, values))
