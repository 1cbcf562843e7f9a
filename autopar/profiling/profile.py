"""`autopar profile`: measure this machine, and write it as a cluster file.

profile.toml      the cluster, as --cluster reads it, with its provenance
profile.jsonl     every sample; an interrupted run resumes from it
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
"""Below this share of the cores, other programs may have disturbed the measurement."""
BUSY = "while other programs took"
"""Words in the `source` of a device or link that was measured while other programs ran."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A fitted cluster and its measurements."""

    cluster: Cluster
    measured: Measurements
    provenance: Provenance

    def to_toml(self) -> str:
        """Return the cluster's TOML under comments with its provenance."""
        head = [*self.provenance.lines(), *noise_lines(self.measured)]
        return "".join(f"# {line}\n" for line in head) + self.cluster.to_toml()

    def errors(self) -> dict[str, list[float]]:
        """Return predicted / measured - 1 of the measurements, by kind of kernel and collective."""
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
    """Measure this machine, and write `out` with its raw samples beside it; under torchrun on all ranks together.

    processes: that share this machine, each with a GPU or one torch thread (default: one per GPU, or 4). level: "quick"
    for fewer shapes and rounds. fresh: discard the samples of an earlier run. like: nominal figures of the GPU and its
    links, for GPUs without a built-in entry. limit_seconds: time limit, after which the samples so far are used if they
    contain every case (not under torchrun). force: replace files that are not autopar's. Returns None on ranks other
    than the first.

    Raises ClusterError for unknown GPUs, counts that do not fit and failed processes, OutputError for files that
    autopar may not replace.
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
    measured = fitted(samples, base)
    # The measured steps of trials stay valid under new prices.
    trials = read_trials(out) if out.exists() and is_ours(out) else ()
    write_output(out, measured.to_toml() + trials_text(trials), force)
    return measured


def _require_outputs(out: Path, raw: Path, force: bool) -> None:
    """Raise OutputError unless all files of a profile are new or autopar's."""
    require_writable(out, force)
    is_ours = force or not raw.exists() or raw.stat().st_size == 0 or Samples.is_ours(raw)
    failures = failures_path(raw)
    if not is_ours or (failures.exists() and not (force or raw.exists())):
        raise OutputError(
            "the samples of a profile need a place beside it, where another file exists",
            values=str(failures if is_ours else raw),
            alternatives=["another --out", "--force (in Python force=True), to replace the file"],
        )


def measure_locally(
    count: int, raw: Path, level: Level, on_gpu: bool, console: Console, limit_seconds: float = LIMIT_SECONDS
) -> Samples:
    """Start the processes, show their progress, and report what could not be measured."""
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
            # Rounds follow one another, so from the second round on every case has a sample.
            partial = Samples.read(raw)
            if partial is None or not any(sample.round for sample in partial.samples):
                raise
            console.print(
                f"{error.constraint}: the fit uses the {len(partial.samples)} samples of {total} so far", soft_wrap=True
            )
        watch()
    if failures.exists():
        console.print(f"could not be measured:\n{failures.read_text(encoding='utf-8')}", markup=False, soft_wrap=True)
    samples = Samples.read(raw)
    if samples is None:
        raise ClusterError(
            "the measuring processes left no samples",
            values=str(raw),
            alternatives="run it again, or describe the cluster in a TOML file",
        )
    return samples


def fitted(samples: Samples, base: Cluster | None = None) -> Profile:
    """Return the cluster that the samples describe. base: nominal figures, for GPUs."""
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
        # The link gets another name, as NCCL does not drive the network here.
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
    """Return the file of a profile's samples."""
    return out.with_suffix(".jsonl")


def noise_lines(measured: Measurements) -> list[str]:
    """Return sentences on the number of samples and on their noise."""
    forward, backward = measured.forward_seconds * 1e6, measured.backward_seconds * 1e6
    lines = [
        f"{measured.num_samples} samples, median spread over rounds {measured.spread:.0%}, "
        f"overhead of a kernel on tiny tensors {forward:.1f} us forward, {backward:.1f} us backward"
    ]
    if measured.share < QUIET_SHARE:
        lines.append(f"{BUSY} {1 - measured.share:.0%} of the cores")
    return lines


@contextmanager
def _bar(console: Console, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar. Yields its update function, with arguments (done, total, next case)."""
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, disable=quiet) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)
