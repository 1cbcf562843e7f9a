"""What one part of a certification found: what was proven, how often and to what error, and what was not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Findings:
    """One part of a certificate.

    subject: what was checked, such as "operators". counts: how many of what, by words. largest_error: of all runs, as a
    share of the whole tensor's largest element; None where nothing was computed. worst: where it was. failures: what is
    wrong, each naming its place. gaps: what of this plan the part is there to show and did not, with the reason.
    not_proven: what it shows of no plan.
    """

    subject: str
    counts: dict[str, int] = field(default_factory=dict)
    largest_error: float | None = None
    worst: str = ""
    failures: tuple[str, ...] = ()
    gaps: tuple[str, ...] = ()
    not_proven: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.failures


def grouped(reasons: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """(what, why) -> one line per reason, with all that it holds for."""
    found: dict[str, list[str]] = {}
    for what, why in reasons:
        found.setdefault(why, []).append(what)
    return tuple(f"{', '.join(dict.fromkeys(names))}: {why}" for why, names in found.items())
