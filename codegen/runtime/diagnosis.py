"""Say from the records of all ranks which one keeps the others waiting, and what it does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

SILENT_SECONDS = 5.0
"""Seconds without a sign after which a rank counts as stopped; its thread gives one every half, or two, of them."""
LOST = ("connection closed", "connection reset", "broken pipe", "remote process exited")
"""What gloo and NCCL say where another rank is gone."""
THE_END = "nothing more: it has come to the end of its work"
"""The last call of a rank that is done."""
SAME_CALLS = "every rank must make the same calls in the same order"
BATCH = " with a batch of "
"""What calls are told apart by whose batches differ."""
SAME_BATCHES = "every rank must read the same global batches in the same order"


@dataclass(frozen=True, slots=True)
class Record:
    """The state of a rank, as others see it.

    place: the line of the user's where its main thread is. is_waiting: for other ranks, in a collective. idle: seconds
    since it entered or left a call. raised: the error that ends it, is_own: which comes out of no collective,
    raised_at: when. beat: when this was written. is_finishing: it ends by itself after SIGTERM. is_gone: its
    process has ended. calls: the last calls that it entered, by their numbers. is_inside: of
    the last of them.
    """

    place: str
    is_waiting: bool
    idle: float
    raised: str
    is_own: bool
    raised_at: float
    beat: float
    process: int
    is_finishing: bool = False
    is_gone: bool = False
    rank: int = 0
    calls: dict[int, str] = field(default_factory=dict)
    is_inside: bool = False

    def to_bytes(self) -> bytes:
        """Return what `from_bytes` reads, without the calls, which the main thread writes itself."""
        fields_shown = {**asdict(self), "place": self.place[:500], "raised": self.raised[:1500]}
        return json.dumps(
            {name: fields_shown[name] for name in fields_shown if name not in ("rank", "calls", "is_inside")}
        ).encode()

    @staticmethod
    def from_bytes(data: bytes, rank: int, calls: dict[int, str], is_inside: bool) -> Record:
        """Read what `to_bytes` wrote."""
        return Record(**json.loads(data), rank=rank, calls=calls, is_inside=is_inside)

    @property
    def count(self) -> int:
        """The calls that it has entered."""
        return max(self.calls, default=-1) + 1

    @property
    def has_ended(self) -> bool:
        """Whether it came to the end of its work."""
        return self.calls.get(self.count - 1) == THE_END

    @property
    def where(self) -> str:
        """Its line, for a sentence."""
        return f"in {self.place}" if self.place else "in code without a line of Python"


def cause_of(records: Sequence[Record | None], now: float) -> str:
    """Return why ranks wait, in one or two lines; "" where the records do not tell.

    now: the time at which they were read.
    """
    if certain := certain_cause_of(records):
        return certain
    present = [record for record in records if record is not None]
    # A rank that raised out of a collective waited for another one: who raised is no cause from here on.
    missing = [rank for rank, record in enumerate(records) if record is None]
    if missing and present:
        return f"{_ranks(missing)} did not join the others"
    living = [record for record in present if not record.raised]
    silent = [record for record in living if now - record.beat > SILENT_SECONDS]
    if silent:
        said = (
            f"rank {record.rank} (process {record.process}) gives no sign of life for {now - record.beat:.0f} s; "
            f"it was last {record.where}"
            for record in silent
        )
        return "; ".join(said) + ": it has ended, is stopped, or runs code that keeps Python's lock"
    return _behind(present, living)


def is_of_another(said: str) -> bool:
    """Whether an error's text tells of another rank that is gone."""
    return any(word in said.lower() for word in LOST)


def certain_cause_of(records: Sequence[Record | None]) -> str:
    """Return a cause that no later record can change: an error of a rank's own, its end, or other calls."""
    present = [record for record in records if record is not None]
    raising = [record for record in present if record.raised and record.is_own]
    if raising:
        first = min(raising, key=lambda record: record.raised_at)
        return f"rank {first.rank} raised {first.raised}"
    gone = [record for record in present if record.is_gone and not record.raised and not record.has_ended]
    if gone:
        said = (
            f"rank {record.rank} (process {record.process}) ended without an error, {record.where}" for record in gone
        )
        return "; ".join(said) + ": it was killed (the system does so when memory runs out), or has left"
    return mismatch(present)


def mismatch(records: Sequence[Record]) -> str:
    """Return which ranks made different calls, in the place of one another; "" where none did."""
    for number in sorted({number for record in records for number in record.calls}):
        names: dict[str, list[int]] = {}
        for record in records:
            if number in record.calls:
                names.setdefault(record.calls[number], []).append(record.rank)
        if len(names) > 1:
            # Who is alone is likely the one to blame: named first.
            told = sorted(names.items(), key=lambda item: (len(item[1]), -item[1][0]))
            return f"{'; '.join(_differs(name, ranks) for name, ranks in told)}: {_rule(names)}"
    return ""


def _differs(name: str, ranks: list[int]) -> str:
    return f"{_ranks(ranks)} {'calls' if len(ranks) == 1 else 'call'} {name}"


def _rule(names: dict[str, list[int]]) -> str:
    if all(BATCH in name for name in names):
        return SAME_BATCHES
    return SAME_CALLS


def _behind(present: Sequence[Record], living: Sequence[Record]) -> str:
    """Return the ranks that neither wait nor have given up."""
    busy = [record for record in living if not record.is_waiting]
    if not busy or len(busy) == len(present):
        return ""
    least = min((record.count, record.is_inside) for record in busy)
    late = [record for record in busy if (record.count, record.is_inside) == least]
    ahead = max(present, key=lambda record: (record.count, record.is_inside))
    first, said = late[0], "; ".join(f"{_ranks([record.rank])} is {record.where}" for record in late)
    call = ahead.calls.get(ahead.count - 1, "")
    if (ahead.count, ahead.is_inside) > least and not first.is_inside:
        return f"{_ranks([record.rank for record in late])} did not take part in {call} for {first.idle:.0f} s: {said}"
    call = first.calls.get(first.count - 1, "") if first.is_inside else ""
    what = f"{f' in {call}' if call else ''} (for {first.idle:.0f} s)"
    return f"the others wait for {_ranks([record.rank for record in late])}{what}: {said}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:-1])) if len(ranks) <= 6 else ", ".join(map(str, ranks[:5])) + ", ..."
    return f"ranks {shown} and {ranks[-1]}"
