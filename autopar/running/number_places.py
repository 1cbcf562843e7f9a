"""Which numbers in a program's text are which numbers of the model's forward, learned from two texts of it.

A number of the text that changed with a number of the forward, from and to the same values, is that number. With that
known, a schedule needs one recorded forward a step, and no new program.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.frontend.forward_numbers import ForwardNumbers
from autopar.running.program_code import literals_of, with_literals

Files = Mapping[str, str]

_SPECIAL = (0.0, 1.0, -1.0, 2.0)
"""Numbers for which a program may have other calls."""


class NumberPlaces:
    """What is known of one program. numbers: of the forward that the program computes now."""

    def __init__(self) -> None:
        self.numbers: ForwardNumbers | None = None
        self._places: dict[tuple[str, int], frozenset[int]] = {}
        self._moved: frozenset[int] = frozenset()

    def learn(self, old: Files, new: Files, now: ForwardNumbers | None) -> None:
        """A program was made anew, when the forward had the numbers `now`."""
        before, self.numbers = self.numbers, now
        found = None if before is None or now is None else _matched(old, new, before, now)
        if found is None:
            self._places, self._moved = {}, frozenset()
        else:
            self._places |= found[0]
            self._moved |= found[1]

    def files_for(self, files: Files, now: ForwardNumbers | None) -> dict[str, str] | None:
        """The files with the numbers of a forward; None where that takes a new program."""
        before = self.numbers
        if before is None or now is None or before.rest != now.rest or len(before.values) != len(now.values):
            return None
        changed = {i for i, (one, two) in enumerate(zip(before.values, now.values, strict=True)) if one != two}
        values = [each.values[i] for each in (before, now) for i in changed]
        if not changed <= self._moved or any(v in _SPECIAL or not math.isfinite(v) for v in values):
            return None
        wanted: dict[str, dict[int, float]] = {}
        for (name, position), places in self._places.items():
            found = {now.values[i] for i in places}
            if len(found) > 1:
                return None
            wanted.setdefault(name, {})[position] = found.pop()
        self.numbers = now
        return {name: with_literals(text, wanted[name]) if name in wanted else text for name, text in files.items()}


def _matched(
    old: Files, new: Files, before: ForwardNumbers, now: ForwardNumbers
) -> tuple[dict[tuple[str, int], frozenset[int]], frozenset[int]] | None:
    """The places of the numbers that changed; None where a text changed in more, or has a number of its own."""
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
        for position, (one, two) in enumerate(zip(numbers, others, strict=True)):
            if one.value != two.value:
                found = pairs.get((one.value, two.value))
                if found is None:
                    return None
                places[name, position] = frozenset(found)
    known = frozenset().union(*places.values())
    return (places, known) if known == frozenset().union(*pairs.values()) else None
