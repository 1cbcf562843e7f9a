"""The certificate of a plan as value, YAML and tables: the checks that passed, their number and largest error, and the
gaps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import RenderableType

from autopar.files.outputs import write_output
from autopar.plan import Plan
from autopar.report.tables import WIDTH, plain_text, short_table

FILE = "certificate.yaml"
TITLES = {
    "operators": "Operators, each under the plan's option, against the whole operator",
    "reshards": "Reshards as emitted, forward and backward",
    "edges": "The typed program, edge by edge",
    "schedule": "The schedule, action by action",
    "decisions": "The program, decision by decision",
    "messages": "Messages between stages, part by part",
    "miniature": "Miniatures trained on processes, against one process",
}


@dataclass(frozen=True, slots=True)
class Certificate:
    """The findings about one plan.

    plan_sha256: of the plan file's text. versions: of the software used. cpu_seconds: of this process and its ranks,
    without planning. planning_seconds: CPU-seconds of imports and planning before the certification; None if unknown.
    """

    model: str
    cluster: str
    mesh: str
    num_ranks: int
    plan_sha256: str
    versions: dict[str, str]
    findings: tuple[Findings, ...]
    cpu_seconds: float
    planning_seconds: float | None = None

    @property
    def verdict(self) -> str:
        """Return "FAILED" if anything is wrong, "incomplete" if parts of the plan were not run, else "passed"."""
        return "FAILED" if not self.ok else "incomplete" if self.gaps else "passed"

    @property
    def ok(self) -> bool:
        """Whether no check failed. `verdict` also says whether everything was checked."""
        return all(part.ok for part in self.findings)

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(text for part in self.findings for text in part.failures)

    @property
    def gaps(self) -> tuple[str, ...]:
        """List gaps of this certificate: checks that it usually has, but not for this plan."""
        return tuple(text for part in self.findings for text in part.gaps)

    @property
    def not_proven(self) -> tuple[str, ...]:
        """List the gaps of this certificate, and those of all certificates."""
        return (*self.gaps, *(text for part in self.findings for text in part.not_proven))

    def part(self, subject: str) -> Findings:
        """Return the findings about "operators", "reshards", "decisions", "edges", "messages", "schedule" or
        "miniature".

        Raises KeyError.
        """
        for part in self.findings:
            if part.subject == subject:
                return part
        raise KeyError(subject)

    def to_yaml(self) -> str:
        """Return the text of the certificate's file."""
        data: dict[str, Any] = {
            "certificate": self.verdict,
            "model": self.model,
            "cluster": self.cluster,
            "mesh": self.mesh,
            "ranks": self.num_ranks,
            "plan_sha256": self.plan_sha256,
            "versions": dict(self.versions),
            "cpu_seconds": round(self.cpu_seconds, 1),
            **({} if self.planning_seconds is None else {"planning_cpu_seconds": round(self.planning_seconds, 1)}),
            "proven": {part.subject: _proven(part) for part in self.findings if part.counts},
            "failures": list(self.failures),
            "not_proven": list(self.not_proven),
        }
        return yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=False)

    def write(self, path: str | Path, force: bool = False) -> Path:
        """Write the file; in a folder it is named `certificate.yaml`. Raises OutputError."""
        path = Path(path)
        return write_output(path / FILE if path.is_dir() else path, self.to_yaml(), force)

    def panels(self) -> Iterator[RenderableType]:
        """Yield tables of the checks that passed, of those that failed, and of the gaps."""
        table = short_table(f"Certificate of {self.model} on {self.mesh}: {self.verdict}", "", "")
        table.add_row("cluster", f"{self.cluster} ({self.num_ranks} ranks)")
        table.add_row("plan", f"sha256 {self.plan_sha256[:16]}")
        table.add_row("computed by", ", ".join(f"{name} {version}" for name, version in self.versions.items()))
        before = "" if self.planning_seconds is None else f", after {self.planning_seconds:.1f} of imports and planning"
        table.add_row("in", f"{self.cpu_seconds:.1f} CPU-seconds{before}")
        yield table
        for part in self.findings:
            if part.counts:
                yield _table(part)
        others = self.not_proven[len(self.gaps) :]
        titles = ("Failed", "Parts of this plan that were not run", "Not proven")
        for title, texts in zip(titles, (self.failures, self.gaps, others), strict=True):
            if texts:
                rows = short_table(title, "")
                for text in texts:
                    rows.add_row(text)
                yield rows

    def __str__(self) -> str:
        return plain_text(self.panels(), WIDTH)


def _table(part: Findings) -> RenderableType:
    table = short_table(TITLES[part.subject], "", "")
    for name, count in part.counts.items():
        table.add_row(name, f"{count:,}")
    if part.largest_error is not None:
        table.add_row("largest relative error", f"{part.largest_error:.1e}{f' ({part.worst})' if part.worst else ''}")
    table.add_row("wrong", str(len(part.failures)), style="bold red" if part.failures else "")
    return table


def _proven(part: Findings) -> dict[str, Any]:
    data: dict[str, Any] = dict(part.counts)
    if part.largest_error is not None:
        data["largest relative error"] = float(f"{part.largest_error:.2e}")
        data["largest at"] = part.worst
    data["wrong"] = len(part.failures)
    data["cpu_seconds"] = round(part.seconds, 1)
    return data


def hash_of(plan: Plan) -> str:
    """Return the sha256 of a plan file's text, as in the last line of the file itself."""
    return hashlib.sha256(plan.to_yaml().encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Findings:
    """One part of a certificate.

    subject: what was checked, such as "operators". counts: numbers by description. largest_error: of all runs, relative
    to the whole tensor's largest element; None where nothing was computed. worst: the place of that error. failures:
    the faults, each with its place. gaps: what this part usually shows but did not show for this plan, with the reason.
    not_proven: what this part cannot show for any plan.
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
    """Turn (name, reason) pairs into one line per reason, with all names it applies to."""
    names_of: dict[str, list[str]] = {}
    for name, reason in reasons:
        names_of.setdefault(reason, []).append(name)
    return tuple(f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in names_of.items())
