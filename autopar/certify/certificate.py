"""The certificate: what of a plan was proven, how often, to what error, and what was not; as value, YAML and tables."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import RenderableType

from autopar.certify.findings import Findings
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
    """What was found of one plan.

    plan_sha256: of the text of its file. versions: of what computed. cpu_seconds: of this process and its ranks,
    without planning. planning_seconds: of CPU too, of imports and planning before it; None where that is not known.
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
        """In a word: "FAILED" where anything is wrong, "incomplete" where parts of the plan were not run, "passed"."""
        return "FAILED" if not self.ok else "incomplete" if self.gaps else "passed"

    @property
    def ok(self) -> bool:
        """Whether nothing that was checked is wrong. Whether all was checked is in `verdict`."""
        return all(each.ok for each in self.findings)

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(text for each in self.findings for text in each.failures)

    @property
    def gaps(self) -> tuple[str, ...]:
        """What of this plan a certificate shows, and this one does not."""
        return tuple(text for each in self.findings for text in each.gaps)

    @property
    def not_proven(self) -> tuple[str, ...]:
        """The gaps, and what no certificate shows."""
        return (*self.gaps, *(text for each in self.findings for text in each.not_proven))

    def part(self, subject: str) -> Findings:
        """The findings about "operators", "reshards", "decisions", "edges", "messages", "schedule" or "miniature".

        Raises KeyError.
        """
        for each in self.findings:
            if each.subject == subject:
                return each
        raise KeyError(subject)

    def to_yaml(self) -> str:
        """The certificate's file."""
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
            "proven": {each.subject: _proven(each) for each in self.findings if each.counts},
            "failures": list(self.failures),
            "not_proven": list(self.not_proven),
        }
        return yaml.safe_dump(data, sort_keys=False, width=120, default_flow_style=False)

    def write(self, path: str | Path, force: bool = False) -> Path:
        """Writes the file; a folder gets it as `certificate.yaml`. Raises OutputError."""
        path = Path(path)
        return write_output(path / FILE if path.is_dir() else path, self.to_yaml(), force)

    def panels(self) -> Iterator[RenderableType]:
        """Tables of what was proven, and of what failed or was not."""
        table = short_table(f"Certificate of {self.model} on {self.mesh}: {self.verdict}", "", "")
        table.add_row("cluster", f"{self.cluster} ({self.num_ranks} ranks)")
        table.add_row("plan", f"sha256 {self.plan_sha256[:16]}")
        table.add_row("computed by", ", ".join(f"{name} {version}" for name, version in self.versions.items()))
        before = "" if self.planning_seconds is None else f", after {self.planning_seconds:.1f} of imports and planning"
        table.add_row("in", f"{self.cpu_seconds:.1f} CPU-seconds{before}")
        yield table
        for each in self.findings:
            if each.counts:
                yield _table(each)
        others = self.not_proven[len(self.gaps) :]
        titles = ("What failed", "What of this plan was not run", "What was not proven")
        for title, texts in zip(titles, (self.failures, self.gaps, others), strict=True):
            if texts:
                rows = short_table(title, "")
                for text in texts:
                    rows.add_row(text)
                yield rows

    def __str__(self) -> str:
        return plain_text(self.panels(), WIDTH)


def _table(found: Findings) -> RenderableType:
    table = short_table(TITLES[found.subject], "", "")
    for name, count in found.counts.items():
        table.add_row(name, f"{count:,}")
    if found.largest_error is not None:
        table.add_row(
            "largest relative error", f"{found.largest_error:.1e}{f' ({found.worst})' if found.worst else ''}"
        )
    table.add_row("wrong", str(len(found.failures)), style="bold red" if found.failures else "")
    return table


def _proven(found: Findings) -> dict[str, Any]:
    data: dict[str, Any] = dict(found.counts)
    if found.largest_error is not None:
        data["largest relative error"] = float(f"{found.largest_error:.2e}")
        data["largest at"] = found.worst
    data["wrong"] = len(found.failures)
    data["cpu_seconds"] = round(found.seconds, 1)
    return data


def hash_of(plan: Plan) -> str:
    """The sha256 of a plan file's text, which the file's own last line has too."""
    return hashlib.sha256(plan.to_yaml().encode()).hexdigest()
