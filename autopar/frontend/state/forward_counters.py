"""Find the numbers, flags and texts that forward itself changes, and test that it changes them alike each time.

Examples: a counter, a temperature that forward lowers, a term that begins after some calls. Forward runs once, and once
more. With the changes of the second call set back to the values after the first, it runs again, and must leave the
same.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from autopar.errors import TraceError
from autopar.frontend.admission import where
from autopar.frontend.state.model_state import ModelState
from autopar.frontend.state.reads import Reads
from autopar.frontend.state.values import MISSING, Change, Key


class ForwardCounters:
    """The numbers that one model's forwards change, in modules, in objects of theirs and in the loss."""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self._state_of = partial(ModelState.of_constants, model, loss_fn)
        self._start = self._state_of(Reads())
        self._once: dict[Key | None, Change] = {}
        self._found: dict[Key, Any] = {}
        self.changes: list[Change] = []

    def note_first(self, reads: Reads) -> None:
        """Note the first forward and its reads."""
        self._once = {change.key: change for change in self._start.plain_changes()}
        self._middle, self._read = self._state_of(Reads()), self._state_of(reads)

    def changed_first(self) -> set[str]:
        """Return the names of values that the first forward changed."""
        return {change.name for change in self._once.values()}

    def note_second(self) -> bool:
        """Note the second forward. Return whether it changed followed values, which are then set back.

        Raises TraceError for values that cannot be sent to another process.
        """
        changes = self._middle.plain_changes()
        _refuse(change for change in changes if change.key is not None and change.key[0] == "variable")
        # Only values of objects that forward reads and that existed before count: objects may keep records of calls.
        read = {change.key for change in self._read.plain_changes() if change.old is not MISSING}
        self.changes = [change for change in changes if _is_attribute(change.key) or change.key in read]
        before = {change.key: self._once.get(change.key, change).old for change in self.changes}
        _refuse(change for change in self.changes if change.key is None or before[change.key] is MISSING)
        self._found = {key: value for key, value in before.items() if key is not None}
        self._middle.apply(self._found.items())
        return bool(self.changes)

    def note_third(self) -> None:
        """Note the third forward. Raises TraceError if it left other values than the second."""
        now = {change.key: change.new for change in self._start.plain_changes()}

        def left(key: Key | None) -> Any:
            return self._once[key].new if key in self._once else self._found.get(key)  # type: ignore[arg-type]

        def value(key: Key | None) -> Any:
            return now.get(key, self._found.get(key))  # type: ignore[arg-type]

        _refuse(change for change in self.changes if value(change.key) != left(change.key))

    def places(self) -> set[tuple[str, str]]:
        """Return (module, attribute) of followed values, the module by its path and as errors name it."""
        keys = (change.key for change in self.changes if change.key is not None and change.key[0] == "attribute")
        return {(place, steps[0]) for _, path, steps in keys for place in (path, where(path))}

    def kinds(self) -> dict[Any, str]:
        """Return the kinds of followed places, for `Reads.advanced`."""
        return {self._middle.kind_of(change.key): change.name for change in self.changes if change.key is not None}


def changes_state(change: str) -> TraceError:
    """Return the error for state of Python that a program would leave unchanged."""
    return TraceError(
        "forward changes Python state, and the generated program would not",
        values=change,
        alternatives=[
            "change it in the training loop",
            "use a number as an attribute of the module, which autopar follows",
            "use a buffer that is changed in place, which is kept",
        ],
    )


def _is_attribute(key: Key | None) -> bool:
    return key is not None and key[0] == "attribute" and len(key[2]) == 1


def _refuse(changes: Iterable[Change]) -> None:
    for change in changes:
        raise changes_state(str(change))
