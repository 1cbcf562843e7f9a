"""The calls of a recorded forward that its loss depends on, in training or as a program evaluates them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.frontend.recorder import Source
from autopar.frontend.rewrites.recurrent_dropout import PADDED
from autopar.operators.schemas import may_be_view, named_arguments

FLAGS: Mapping[str, tuple[str, Any]] = {
    "aten.dropout.default": ("train", False),
    "aten.dropout_.default": ("train", False),
    "aten.rrelu.default": ("training", False),
    **dict.fromkeys(sorted(PADDED), ("train", False)),
    "aten.scaled_dot_product_attention.default": ("dropout_p", 0.0),
    "aten.batch_norm.default": ("training", False),
    "aten.instance_norm.default": ("use_input_stats", False),
}
"""Operator -> the argument that differs in a program's evaluation, and its value there."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A recorded call.

    what: (arguments by name, shape and dtype of each result), or the new mode of gradients. counts: whether the call is
    kept even if the loss reads no result. writes: whether it writes to its first argument.
    """

    key: tuple[Any, ...]
    name: str
    what: Any
    counts: bool
    writes: bool = False


class RecordedCalls:
    """A record's calls; identities (dropout that drops nothing, `contiguous`) are left out, and their results renamed.

    in_program: as the program runs them in evaluation mode, rather than as they were called.
    """

    def __init__(self, entries: list[Any], in_program: bool) -> None:
        self.entries = entries
        self.loss = entries[-1][1]
        self._renamed: dict[Any, Any] = {}  # the result of an identity -> its operand
        self._viewed: set[Any] = set()  # buffers with views
        self._calls: list[RecordedCall] = []
        for position, entry in enumerate(entries[:-1], 1):
            self._add(position, entry, in_program)

    def _add(self, position: int, entry: Any, in_program: bool) -> None:
        name = str(entry[0])
        if name in ("enter", "grad mode"):
            self._calls.append(RecordedCall(("mode", position), name, entry[1], True))
            return
        operator, (args, kwargs), *results = entry
        named = named_arguments(operator, args, dict(kwargs))
        if name in FLAGS and not (name.endswith("norm.default") and named.get("running_mean") is None):
            flag, value = FLAGS[name]
            if in_program:
                named[flag] = value
            named.pop("momentum", None)  # which matters in training alone
        is_identity = name.startswith("aten.dropout") and (not named["train"] or not named["p"])
        if is_identity or name == "aten.contiguous.default":  # whether that copies depends on strides, not on values
            self._renamed["result", position, 0] = next(iter(named.values()))
            return
        # A reader of a written tensor does not name the call; only the value that a buffer gets stays invisible.
        first: Any = next(iter(named.values()), None)
        writes = operator._schema.is_mutable
        if _is_buffer(first) and may_be_view(name):
            self._viewed.add(first[1])
        counts = writes and not (_is_buffer(first) and first[1] not in self._viewed)
        what = (tuple(named.items()), tuple(result[:2] for result in results))
        self._calls.append(RecordedCall(("result", position), name, what, counts, writes=writes))

    def source(self, value: Any) -> Any:
        """Return `value`, or the value that it is another name of."""
        while isinstance(value, Source) and value[1] in self._renamed:
            value = self._renamed[value[1]]
        return value

    def sources(self, value: Any) -> Iterator[Any]:
        value = self.source(value)
        if isinstance(value, Source):
            yield value
        elif isinstance(value, (tuple, list)):
            for item in value:
                yield from self.sources(item)

    def live(self) -> list[RecordedCall]:
        """Return the calls that the loss depends on."""
        needed = {value[1][:2] for value in self.sources(self.loss)}
        calls: list[RecordedCall] = []
        for call in reversed(self._calls):
            if call.counts or call.key in needed:
                calls.append(call)
                needed |= {value[1][:2] for value in self.sources(call.what)}
        return _with_needed_modes(calls[::-1])

    def numbered(self) -> list[Any]:
        """Return the calls that the loss depends on, with results numbered anew, comparable between records."""
        live = self.live()
        number = {call.key: index for index, call in enumerate(live)}

        def of(value: Any) -> Any:
            value = self.source(value)
            if isinstance(value, Source):
                name = value[1]
                return ("result", number.get(name[:2], -1), *name[2:]) if name[0] == "result" else tuple(value)
            return tuple(map(of, value)) if isinstance(value, (tuple, list)) else value

        return [(call.name, of(call.what)) for call in live] + [("loss", of(self.loss))]


def _with_needed_modes(live: list[RecordedCall]) -> list[RecordedCall]:
    """Return the calls with those switches of the grad mode that a later call is under."""
    calls: list[RecordedCall] = []
    mode, switch = True, None
    for call in live:
        if call.name == "grad mode":
            switch = call
            continue
        if switch is not None and switch.what != mode:
            mode = switch.what
            calls.append(switch)
        switch = None
        calls.append(call)
    return calls


def _is_buffer(value: Any) -> bool:
    return isinstance(value, Source) and bool(value[1][0] == "tensor")
