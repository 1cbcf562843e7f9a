"""Raw measurements in a file that grows line by line: an interrupted run resumes, and a fit can be repeated."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from autopar.files.text_files import parse_json
from autopar.profiling import blocks
from autopar.profiling.cases import Case, Family, Topology
from autopar.profiling.clock import Timing
from autopar.units import counted
from cost_models.collective import Kind
from cost_models.compute import Work

FORMAT = 2


@dataclass(frozen=True, slots=True)
class Provenance:
    """The place and software of measurements. date: UTC, of the first measurement. process_bytes: resident memory of a
    process right after importing torch. num_cores: of one node. memory_bytes: of a device.

    `same_machine` decides whether an interrupted run may resume.
    """

    date: str
    host: str
    device: str
    torch: str
    cuda: str
    driver: str
    backend: str
    num_nodes: int
    devices_per_node: int
    num_cores: float
    memory_bytes: int
    process_bytes: int

    @property
    def topology(self) -> Topology:
        return Topology(self.num_nodes, self.devices_per_node, bool(self.cuda))

    def same_machine(self, other: Provenance) -> bool:
        """Return whether measurements of both may be mixed: all fields but the date and memory must agree."""
        blank = {"date": "", "memory_bytes": 0, "process_bytes": 0}
        return replace(self, **blank) == replace(other, **blank)  # type: ignore[arg-type]

    def lines(self) -> list[str]:
        """Return the machine and its software as lines for people."""
        software = f"torch {self.torch}" + (f", CUDA {self.cuda}, driver {self.driver}" if self.cuda else "")
        return [
            f"measured {self.date} on {self.host}: {self.device}",
            f"{counted(self.num_nodes, 'node')} of {counted(self.devices_per_node, 'process')}, "
            f"{self.num_cores:g} cores each, {self.backend}, {software}",
        ]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Seconds of one call of a kernel, called from Python and recorded by autograd."""

    work: Work
    seconds: float


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Seconds of one block, forward and backward, and its kernels as the cost model counts them."""

    works: tuple[Work, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Seconds of one collective of num_bytes (as in cost_models.collective), all groups of its shape at once."""

    kind: Kind
    num_bytes: int
    group_size: int
    seconds: float
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Measurements:
    """Medians over rounds, for fitting.

    forward_seconds, backward_seconds: cost on host and device of one kernel on tiny tensors, in eager forward and in
    autograd's backward. overlaps: seconds that ranks lose to collectives that overlap with compute. rates: bytes per
    second of one process by transfer ("copy to host", ...). share: the part of its cores that a process got, as other
    programs took the rest. spread: median over cases of (largest - smallest) / median over rounds. num_samples: timed
    rounds of cases.
    """

    topology: Topology
    num_cores: float
    process_bytes: int
    forward_seconds: float
    backward_seconds: float
    kernels: tuple[KernelTime, ...]
    collectives: tuple[CollectiveTime, ...]
    blocks: tuple[BlockTime, ...] = ()
    overlaps: tuple[CollectiveTime, ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict, hash=False)
    optimizer: KernelTime | None = None
    share: float = 1.0
    spread: float = 0.0
    num_samples: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The timing of one case in one round."""

    case: Case
    round: int
    timing: Timing


class Samples:
    """The measurements of one machine in a JSON-lines file: provenance first, then a line per sample."""

    def __init__(self, provenance: Provenance, path: Path | None = None, samples: Sequence[Sample] = ()) -> None:
        self.provenance, self.path, self.samples = provenance, path, list(samples)

    @staticmethod
    def open(path: Path, provenance: Provenance) -> Samples:
        """Return the file's samples if they are of the same machine; else start the file again."""
        samples = Samples.read(path)
        if samples is None or not samples.provenance.same_machine(provenance):
            samples = Samples(provenance, path)
        # Write the file again, as it may end in half a line.
        path.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps({"format": FORMAT, **asdict(samples.provenance)})
        path.write_text("\n".join([head, *map(_line, samples.samples)]) + "\n", encoding="utf-8")
        return samples

    @staticmethod
    def is_ours(path: Path) -> bool:
        """Return whether a file begins as those that `open` writes, of any version, even if it was cut off."""
        start = b'{"format":'
        with path.open("rb") as file:
            return start.startswith(file.read(len(start)))

    @staticmethod
    def read(path: Path) -> Samples | None:
        """Return the file's samples up to its last whole line, or None without a file of this format."""
        try:
            head, *lines = path.read_text(encoding="utf-8").splitlines()
            fields = parse_json(head)
            if fields.pop("format") != FORMAT:
                return None
            samples = Samples(Provenance(**fields), path)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        for line in lines:
            try:
                value = parse_json(line)
                sample = Sample(Case.from_json(value["case"]), value["round"], Timing(**value["timing"]))
            except (ValueError, KeyError, TypeError, AttributeError):
                break  # cut off while it was written, or damaged
            samples.samples.append(sample)
        return samples

    @property
    def done(self) -> set[tuple[str, int]]:
        """(name of the case, round) of every sample."""
        return {(sample.case.name, sample.round) for sample in self.samples}

    def add(self, sample: Sample) -> None:
        """Add a sample, also to the file if there is one."""
        self.samples.append(sample)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(sample) + "\n")

    def only_rounds(self, rounds: slice) -> Samples:
        """Return the samples of some rounds, to compare with others."""
        numbers = sorted({sample.round for sample in self.samples})[rounds]
        return Samples(self.provenance, None, [s for s in self.samples if s.round in numbers])

    def measurements(self) -> Measurements:
        """Summarize the samples. Raises ValueError if a family that a fit needs is missing."""
        seconds = {case: statistics.median(times) for case, times in self._times()}
        overhead = {case.name: value for case, value in seconds.items() if case.family == "overhead"}
        if len(overhead) < 2 or not any(case.family == "matmul" for case in seconds):
            raise ValueError("too few samples to fit: the measurement was interrupted early; run it again to resume")
        forward, both = overhead["block forward"], overhead["block forward and backward"]
        kernels = [KernelTime(c.work, s) for c, s in seconds.items() if c.work and c.family != "optimizer"]
        updates = [KernelTime(c.work, s) for c, s in seconds.items() if c.work and c.family == "optimizer"]
        topology = self.provenance.topology
        return Measurements(
            topology=topology,
            num_cores=self.provenance.num_cores,
            process_bytes=self.provenance.process_bytes,
            forward_seconds=forward / blocks.FORWARD_KERNELS,
            backward_seconds=max(both - forward, 0.1 * forward) / blocks.BACKWARD_KERNELS,
            kernels=tuple(kernels),
            collectives=_collectives(seconds, "collective"),
            overlaps=_collectives(seconds, "overlap"),
            blocks=tuple(
                BlockTime(tuple(blocks.works(case.parameters)), s)
                for case, s in seconds.items()
                if case.family == "block"
            ),
            rates={c.name: c.parameters["num_bytes"] / s for c, s in seconds.items() if c.family == "transfer"},
            optimizer=updates[0] if updates else None,
            share=statistics.fmean(s.timing.share for s in self.samples if s.case.family in ("matmul", "memory")),
            spread=statistics.median((max(t) - min(t)) / statistics.median(t) for _, t in self._times()),
            num_samples=len(self.samples),
        )

    def _times(self) -> Iterator[tuple[Case, list[float]]]:
        times_by_case: dict[str, tuple[Case, list[float]]] = {}
        for sample in self.samples:
            times_by_case.setdefault(sample.case.name, (sample.case, []))[1].append(sample.timing.seconds)
        yield from times_by_case.values()


def _collectives(seconds: Mapping[Case, float], family: Family) -> tuple[CollectiveTime, ...]:
    timed = ((case.parameters, s) for case, s in seconds.items() if case.family == family)
    return tuple(
        CollectiveTime(
            kind=p["kind"], num_bytes=p["num_bytes"], group_size=p["group_size"], seconds=s, stride=p["stride"]
        )
        for p, s in timed
    )


def _line(sample: Sample) -> str:
    return json.dumps({"case": sample.case.to_json(), "round": sample.round, "timing": asdict(sample.timing)})
