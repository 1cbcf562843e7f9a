"""The places of a model's numbers in a program's text, learned from two texts of the program.

A number in the text stands for a number of the forward if both changed from one value to the same other value. With
these places, a step of a schedule needs one recorded forward and no new program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.frontend.state.forward_numbers import ForwardNumbers
from autopar.running.program_code import literals_of, with_literals

Files = Mapping[str, str]

_SPECIAL = (0.0, 1.0, -1.0, 2.0)
"""Numbers for which a program may contain other calls."""


class NumberPlaces:
    """The places that are learned for one program. numbers: those of the forward that the program computes now."""

    def __init__(self) -> None:
        self.numbers: ForwardNumbers | None = None
        self._places: dict[tuple[str, int], frozenset[int]] = {}
        self._moved: frozenset[int] = frozenset()

    def learn(self, old: Files, new: Files, now: ForwardNumbers | None) -> None:
        """Learn from a new text of the program, generated when the forward had the numbers `now`."""
        before, self.numbers = self.numbers, now
        learned = None if before is None or now is None else _matched(old, new, before, now)
        if learned is None:
            self._places, self._moved = {}, frozenset()
        else:
            self._places |= learned[0]
            self._moved |= learned[1]

    def files_for(self, files: Files, now: ForwardNumbers | None) -> dict[str, str] | None:
        """Return the files with the numbers of a forward; None where that takes a new program."""
        before = self.numbers
        if before is None or now is None or before.rest != now.rest or len(before.values) != len(now.values):
            return None
        changed = {i for i, (old, new) in enumerate(zip(before.values, now.values, strict=True)) if old != new}
        values = [numbers.values[i] for numbers in (before, now) for i in changed]
        if not changed <= self._moved or any(v in _SPECIAL or not math.isfinite(v) for v in values):
            return None
        wanted: dict[str, dict[int, float]] = {}
        for (name, position), places in self._places.items():
            candidates = {now.values[i] for i in places}
            if len(candidates) > 1:
                return None
            wanted.setdefault(name, {})[position] = candidates.pop()
        self.numbers = now
        return {name: with_literals(text, wanted[name]) if name in wanted else text for name, text in files.items()}


def _matched(
    old: Files, new: Files, before: ForwardNumbers, now: ForwardNumbers
) -> tuple[dict[tuple[str, int], frozenset[int]], frozenset[int]] | None:
    """Return the places of the changed numbers; None where a text changed in anything else, or in a number of its
    own."""
    if before.rest != now.rest or len(before.values) != len(now.values) or old.keys() != new.keys():
        return None
    pairs: dict[tuple[float, float], set[int]] = {}
    for index, pair in enumerate(zip(before.values, now.values, strict=True)):
        if pair[0] != pair[1]:
            pairs.setdefault(pair, set()).add(index)
    places: dict[tuple[str, int], frozenset[int]] = {}
    for name in old:
        if old[name] == new[name]:
            continue
        (outline, numbers), (other_outline, others) = literals_of(old[name]), literals_of(new[name])
        if outline != other_outline or len(numbers) != len(others):
            return None
        for position, (literal, other) in enumerate(zip(numbers, others, strict=True)):
            if literal.value != other.value:
                indices = pairs.get((literal.value, other.value))
                if indices is None:
                    return None
                places[name, position] = frozenset(indices)
    placed = frozenset().union(*places.values())
    return (places, placed) if placed == frozenset().union(*pairs.values()) else None
