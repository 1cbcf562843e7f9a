"""Allocations alive during a unit's forward or backward: results in variables, and gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from autopar.costs.events import Key


@dataclass(slots=True)
class Gradients:
    """Live gradients. Several keys may share one allocation."""

    of: dict[Key, int] = field(default_factory=dict)
    sizes: dict[int, float] = field(default_factory=dict)
    holders: dict[int, int] = field(default_factory=dict)
    total: float = 0.0

    def new(self, num_bytes: float) -> int:
        number = len(self.sizes)
        self.sizes[number], self.holders[number] = num_bytes, 0
        self.total += num_bytes
        return number

    def hold(self, number: int) -> None:
        self.holders[number] += 1

    def drop(self, number: int) -> None:
        self.holders[number] -= 1
        if self.holders[number] == 0:
            self.total -= self.sizes[number]

    def add(self, key: Key, number: int) -> None:
        """Add gradient `number` to that of `key`: in place, or in a new allocation if other keys share the old one."""
        self.hold(number)
        if key not in self.of:
            self.of[key] = number
            return
        old = self.of[key]
        if self.holders[old] > 1:
            total = self.new(self.sizes[old])
            self.hold(total)
            self.of[key] = total
            self.drop(old)
        self.drop(number)


@dataclass(slots=True)
class Variables:
    """Results that nothing keeps. Each lives as long as a variable refers to it or to a view of it."""

    of: dict[str, Key] = field(default_factory=dict)
    sizes: dict[Key, float] = field(default_factory=dict)
    total: float = 0.0

    def add(self, key: Key, num_bytes: float) -> None:
        self.sizes[key] = num_bytes
        self.total += num_bytes

    def assign(self, name: str, key: Key) -> None:
        """Point `name` at `key` instead of its former result."""
        old, self.of[name] = self.of.get(name), key
        if old is not None:
            self.drop_unnamed([old])

    def drop_unnamed(self, keys: Iterable[Key]) -> None:
        """Free those of `keys` that no variable refers to."""
        for key in set(keys) - set(self.of.values()):
            self.total -= self.sizes.pop(key, 0.0)

    def forget(self, names: Collection[str]) -> None:
        """Remove variables."""
        gone = [self.of.pop(name) for name in names if name in self.of]
        self.drop_unnamed(gone)
