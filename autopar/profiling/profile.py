"""`autopar profile`: measures this machine and writes it down as a cluster that plans are made for.

profile.toml      the cluster, as --cluster reads it, with its provenance
profile.jsonl     every sample; an interrupted run goes on from there
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from autopar.errors import ClusterError, OutputError
from autopar.files.outputs import is_ours, require_writable, write_output
from autopar.profiling.cases import ROUNDS, Level, Topology, cases
from autopar.profiling.fit_device import fit_device, kernel_errors
from autopar.profiling.fit_link import collective_errors, fit_links, hidden_share, placed
from autopar.profiling.gpus import detect_gpus
from autopar.profiling.processes import LIMIT_SECONDS, OutOfTime, run_processes
from autopar.profiling.samples import Measurements, Provenance, Samples
from autopar.profiling.trials import read_trials, trials_text
from autopar.profiling.worker import failures_path, under_torchrun
from cost_models import catalog
from cost_models.machine import Cluster

DEFAULT_CPU_PROCESSES = 4
QUIET_SHARE = 0.8
"""Below this share of the cores, other programs may have disturbed what was measured."""
BUSY = "while other programs took"
"""The words with which a device's or link's `source` says that other programs ran meanwhile."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A fitted cluster with what it was fitted to."""

    cluster: Cluster
    measured: Measurements
    provenance: Provenance

    def to_toml(self) -> str:
        """The cluster's TOML under comments that say where it comes from."""
        head = [*self.provenance.lines(), *noise_lines(self.measured)]
        return "".join(f"# {line}\n" for line in head) + self.cluster.to_toml()

    def errors(self) -> dict[str, list[float]]:
        """predicted / measured - 1 of what was measured, by kind of kernel and collective."""
        kernels = kernel_errors(self.measured, self.cluster.device)
        return kernels | collective_errors(self.measured.collectives, self.cluster)


def profile(
    processes: int | None = None,
    *,
    out: str | Path = "profile.toml",
    level: Level = "full",
    fresh: bool = False,
    like: Cluster | None = None,
    console: Console | None = None,
    limit_seconds: float = LIMIT_SECONDS,
    force: bool = False,
) -> Profile | None:
    """Measures and writes `out` and its raw samples beside it; under torchrun on all ranks together.

    processes: that share this machine, each with a GPU of its own or one torch thread (default: as many as there are
    GPUs, or 4). level: "quick" for fewer shapes and rounds. fresh: forget what an earlier run measured. like: nominal
    figures of the GPU and its links, for those that are not known by name. limit_seconds: after which what was measured
    has to do, if that is every case once (not under torchrun). force: write over files that are not autopar's. Returns
    None on ranks other than the first.

    Raises ClusterError for unknown GPUs, counts that do not fit, and processes that fail, OutputError for files that
    are not autopar's to write over.
    """
    out = Path(out)
    raw = raw_path(out)
    if os.environ.get("RANK", "0") == "0":
        _require_outputs(out, raw, force)
    console = console or Console(highlight=False)
    on_gpu = torch.cuda.is_available()
    is_launched = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    if fresh and os.environ.get("RANK", "0") == "0":
        raw.unlink(missing_ok=True)
    base = like or (detect_gpus(processes) if on_gpu else None)
    if is_launched:
        with _bar(console, quiet=os.environ["RANK"] != "0") as update:
            samples = under_torchrun(raw, level, update)
        if samples is None:
            return None
    else:
        count = processes or (base.num_devices if base is not None else DEFAULT_CPU_PROCESSES)
        samples = measure_locally(count, raw, level, on_gpu, console, limit_seconds)
    found = fitted(samples, base)
    tried = (
        read_trials(out) if out.exists() and is_ours(out) else ()
    )  # steps took as long before they were predicted anew
    write_output(out, found.to_toml() + trials_text(tried), force)
    return found


def _require_outputs(out: Path, raw: Path, force: bool) -> None:
    """Raises OutputError unless all that a profile writes is new or autopar's own."""
    require_writable(out, force)
    is_ours = force or not raw.exists() or raw.stat().st_size == 0 or Samples.is_ours(raw)
    failures = failures_path(raw)
    if not is_ours or (failures.exists() and not (force or raw.exists())):
        raise OutputError(
            "the samples of a profile go beside it, where another's file is",
            values=str(failures if is_ours else raw),
            alternatives=["another file", "--force (in Python force=True), to overwrite it"],
        )


def measure_locally(
    count: int, raw: Path, level: Level, on_gpu: bool, console: Console, limit_seconds: float = LIMIT_SECONDS
) -> Samples:
    """Starts the processes, shows how far they are, and says what could not be measured."""
    total = ROUNDS[level] * len(cases(Topology(1, count, on_gpu), level))
    failures = failures_path(raw)
    failures.unlink(missing_ok=True)
    with _bar(console) as update:

        def watch() -> None:
            if raw.exists():
                with raw.open("rb") as file:
                    done = max(sum(1 for _ in file) - 1, 0)
                update(min(done, total), total, "")

        watch()
        try:
            run_processes(count, raw, level, on_gpu, timeout_seconds=limit_seconds, watch=watch)
        except OutOfTime as error:
            # Rounds follow one another: of what comes later there are all cases already.
            partial = Samples.read(raw)
            if partial is None or not any(sample.round for sample in partial.samples):
                raise
            console.print(f"{error.constraint}: {len(partial.samples)} samples of {total} have to do", soft_wrap=True)
        watch()
    if failures.exists():
        console.print(f"could not be measured:\n{failures.read_text(encoding='utf-8')}", markup=False, soft_wrap=True)
    samples = Samples.read(raw)
    if samples is None:
        raise ClusterError("the measuring processes left nothing to read", values=str(raw))
    return samples


def fitted(samples: Samples, base: Cluster | None = None) -> Profile:
    """The cluster that the samples describe. base: nominal figures, for GPUs."""
    try:
        measured = samples.measurements()
    except ValueError as error:
        raise ClusterError(str(error)) from None
    origin = samples.provenance
    source = f"autopar profile: {'; '.join([*origin.lines(), *noise_lines(measured)])}"
    device = fit_device(measured, origin.memory_bytes, source, base.device if base else None)
    if base is not None:
        links = base.intra_node, base.inter_node
    else:
        # A name of its own, since NCCL is not what drives the network here.
        network = replace(catalog.link("ethernet-10g"), name="gloo-network")
        links = catalog.link("loopback"), network if origin.num_nodes > 1 else catalog.link("loopback")
    cluster = Cluster(
        device=device,
        num_nodes=origin.num_nodes,
        devices_per_node=origin.devices_per_node,
        intra_node=links[0],
        inter_node=links[1],
    )
    cluster = fit_links(cluster, measured.collectives, source)
    if measured.overlaps:
        share = float(f"{hidden_share(measured.overlaps, measured.collectives):.3g}")
        cluster = placed(cluster, "intra_node", replace(cluster.intra_node, hidden_share=share))
    return Profile(cluster, measured, origin)


def raw_path(out: Path) -> Path:
    """Where the samples of a profile are."""
    return out.with_suffix(".jsonl")


def noise_lines(measured: Measurements) -> list[str]:
    """How much was measured and how steady it was."""
    forward, backward = measured.forward_seconds * 1e6, measured.backward_seconds * 1e6
    lines = [
        f"{measured.num_samples} samples, median spread over rounds {measured.spread:.0%}, "
        f"overhead of a kernel on tiny tensors {forward:.1f} us forward, {backward:.1f} us backward"
    ]
    if measured.share < QUIET_SHARE:
        lines.append(f"{BUSY} {1 - measured.share:.0%} of the cores")
    return lines


def summary_table(found: Profile) -> Table:
    """How well the fit meets what was measured."""
    table = Table("measured", "cases", "median error", "largest")
    for name, errors in found.errors().items():
        sizes = [abs(error) for error in errors]
        table.add_row(name, str(len(sizes)), f"{statistics.median(sizes):.1%}", f"{max(sizes):.0%}")
    return table


@contextmanager
def _bar(console: Console, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar; its update takes (done, all, what comes next)."""
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, disable=quiet) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)
