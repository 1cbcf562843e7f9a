"""What plans were measured to take on this machine: `[[trials]]` in a profile's TOML file, written by `autopar trial`.

A record holds for its machine, its versions, and its job: a model with the shapes of a batch, a precision and a
cluster. It is a measurement and no correction: prices stay what the profile says, and `autopar plan` tells of it.
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

    job, plan: digests of what was planned for and of what was decided. words: the plan's decisions in words. pins: the
    constraints with which the planner finds it again, as `--set` takes them. measured_seconds: the median of num_steps
    steps; spread: the distance of their quartiles, as a share of it. is_chosen: fastest of its trial. machine: CPU with
    its cores, or GPU.
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
    """The file that a cluster's text names, if it names one."""
    return Path(cluster) if cluster.endswith(".toml") else None


def trials_path(profile: str | Path | None) -> Path:
    """Where this machine's trials are kept: in the profile, where it is a file of autopar's, else in the user's cache.

    profile: the cluster's TOML file, or None for a cluster that has none.
    """
    if profile is not None and (not Path(profile).exists() or is_ours(Path(profile))):
        return Path(profile)
    return cache_folder() / "trials.toml"


def read_trials(path: Path) -> tuple[TrialRecord, ...]:
    """All records of a file, oldest first; none where there is no file. Raises ClusterError for one that is no TOML."""
    if not path.exists():
        return ()
    try:
        table = tomllib.loads(read_text(path, ClusterError))
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{path} cannot be read", values=str(error)) from None
    entries = table.get(TRIALS, [])
    return tuple(_record(each) for each in entries if _is_record(each))


def _is_record(entry: Any) -> bool:
    """Whether a table has all that a record has: one of another version's form tells nothing."""
    return isinstance(entry, dict) and all(
        isinstance(entry.get(f.name), _TYPES[str(f.type)]) for f in fields(TrialRecord)
    )


def _record(entry: dict[str, Any]) -> TrialRecord:
    return TrialRecord(**{field.name: entry[field.name] for field in fields(TrialRecord)})


def add_trials(path: Path, fresh: Sequence[TrialRecord]) -> None:
    """Write the records of a trial behind those of others; earlier ones of the same job, machine and versions go.

    Raises OutputError where the file is not autopar's own, or cannot be written.
    """
    kept = [each for each in read_trials(path) if not any(_is_same_job(each, other) for other in fresh)]
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    cluster = text.partition(_HEAD)[0] if _HEAD in text else text.rpartition("# written by autopar")[0]
    write_output(path, cluster.rstrip("\n") + "\n" + trials_text([*kept, *fresh]))


def _is_same_job(one: TrialRecord, other: TrialRecord) -> bool:
    return (one.job, one.machine, one.torch, one.autopar) == (other.job, other.machine, other.torch, other.autopar)


def trials_text(records: Sequence[TrialRecord]) -> str:
    """The records as TOML, to stand at a file's end."""
    return "".join(
        _HEAD + "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in asdict(record).items())
        for record in records
    )
