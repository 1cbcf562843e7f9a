"""Measured step times of plans on this machine: `[[trials]]` in a profile's TOML file, written by `autopar trial`.

A record is valid for its machine, its versions and its job: a model with the shapes of a batch, a precision and a
cluster. It does not change prices, which follow from the profile; `autopar plan` only reports it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from autopar.errors import ClusterError
from autopar.files.outputs import is_ours, write_output
from autopar.files.text_files import read_text
from autopar.profiling.machine import cache_folder
from cost_models.machine import TRIALS

_HEAD = f"\n[[{TRIALS}]]\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One plan's step, predicted and measured.

    job, plan: digests of the job and of the decisions. words: the decisions in words. pins: constraints, as `--set`
    takes them, for which the planner finds the plan again. measured_seconds: median of num_steps steps; spread:
    distance of their quartiles, as a share of it. is_chosen: fastest of its trial. machine: CPU with its cores, or GPU.
    """

    date: str
    job: str
    model: str
    cluster: str
    plan: str
    words: str
    pins: str
    predicted_seconds: float
    measured_seconds: float
    spread: float
    num_steps: int
    is_chosen: bool
    machine: str
    torch: str
    autopar: str


_TYPES: dict[str, type] = {"str": str, "float": float, "int": int, "bool": bool}


def profile_of(cluster: str) -> Path | None:
    """Return the file that a cluster's text names, or None."""
    return Path(cluster) if cluster.endswith(".toml") else None


def trials_path(profile: str | Path | None) -> Path:
    """Return the file of this machine's trials: the profile if it is autopar's, else one in the user's cache.

    profile: the cluster's TOML file, or None.
    """
    if profile is not None and (not Path(profile).exists() or is_ours(Path(profile))):
        return Path(profile)
    return cache_folder() / "trials.toml"


def read_trials(path: Path) -> tuple[TrialRecord, ...]:
    """Return all records of a file, oldest first; none without a file. Raises ClusterError for a file that is no
    TOML."""
    if not path.exists():
        return ()
    try:
        table = tomllib.loads(read_text(path, ClusterError))
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(
            "the cluster file is not valid TOML",
            values=f"{path}: {error}",
            alternatives="repair the file, or measure again with autopar profile",
        ) from None
    entries = table.get(TRIALS, [])
    return tuple(_record(entry) for entry in entries if _is_record(entry))


def _is_record(entry: Any) -> bool:
    """Return whether a table has all fields of a record; records of other versions are ignored."""
    return isinstance(entry, dict) and all(
        isinstance(entry.get(f.name), _TYPES[str(f.type)]) for f in fields(TrialRecord)
    )


def _record(entry: dict[str, Any]) -> TrialRecord:
    return TrialRecord(**{field.name: entry[field.name] for field in fields(TrialRecord)})


def add_trials(path: Path, fresh: Sequence[TrialRecord]) -> None:
    """Append the records of a trial; they replace earlier ones of the same job, machine and versions.

    Raises OutputError if the file is not autopar's, or cannot be written.
    """
    others = [record for record in read_trials(path) if not any(_is_same_job(record, other) for other in fresh)]
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    cluster = text.partition(_HEAD)[0] if _HEAD in text else text.rpartition("# written by autopar")[0]
    write_output(path, cluster.rstrip("\n") + "\n" + trials_text([*others, *fresh]))


def _is_same_job(first: TrialRecord, second: TrialRecord) -> bool:
    return (first.job, first.machine, first.torch, first.autopar) == (
        second.job,
        second.machine,
        second.torch,
        second.autopar,
    )


def trials_text(records: Sequence[TrialRecord]) -> str:
    """Return the records as TOML for a file's end."""
    return "".join(
        _HEAD + "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in asdict(record).items())
        for record in records
    )
