"""The file of raw samples: cut off anywhere, it goes on; from another machine, it does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.profiling.cases import Case, Topology, linear
from autopar.profiling.clock import Timing
from autopar.profiling.samples import Provenance, Sample, Samples

HERE = Provenance(
    date="2026-01-01T00:00Z",
    host="here",
    device="CPU",
    torch="2.13",
    cuda="",
    driver="",
    backend="gloo",
    num_nodes=1,
    devices_per_node=2,
    num_cores=2.0,
    memory_bytes=2**30,
    process_bytes=2**28,
)
COLLECTIVE = {"kind": "all_reduce", "num_bytes": 1024, "group_size": 2, "stride": 1}
CASES = [
    linear(64, 64, 64, "fp32"),
    Case("overhead", "block forward"),
    Case("overhead", "block forward and backward"),
    Case("collective", "all_reduce 1024 group 2 stride 1", COLLECTIVE),
    Case("transfer", "copy to host", {"operation": "copy to host", "num_bytes": 1000}),
]
SECONDS = {"overhead": (1e-4, 3.8e-4), "matmul": (1e-5,), "collective": (2e-3,), "transfer": (1e-6,)}


def written(path: Path, rounds: int = 3) -> Samples:
    samples = Samples.open(path, HERE)
    for number in range(rounds):
        for case in CASES:
            seconds = 3.8e-4 if case.name.endswith("backward") else SECONDS[case.family][0]
            # The middle round is the median.
            samples.add(Sample(case, number, Timing(seconds * (0.9, 1.0, 1.3)[number % 3], 10, 0.9)))
    return samples


def test_the_file_holds_what_was_added(tmp_path: Path) -> None:
    path = tmp_path / "profile.jsonl"
    samples = written(path)
    found = Samples.read(path)
    assert found is not None
    assert found.samples == samples.samples and found.provenance == HERE
    assert found.done == {(case.name, number) for case in CASES for number in range(3)}


def test_medians_of_rounds_are_what_is_fitted(tmp_path: Path) -> None:
    measured = written(tmp_path / "profile.jsonl").measurements()
    assert measured.kernels[0].seconds == pytest.approx(1e-5)
    assert measured.forward_seconds == pytest.approx(1e-5)
    assert measured.backward_seconds == pytest.approx(2.8e-4 / 14)
    assert measured.collectives[0].seconds == pytest.approx(2e-3) and measured.collectives[0].group_size == 2
    assert measured.rates == {"copy to host": pytest.approx(1e9)}
    assert measured.spread == pytest.approx(0.4) and measured.num_samples == 15
    assert measured.topology == Topology(1, 2)


def test_a_file_cut_off_anywhere_goes_on_from_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "profile.jsonl"
    whole = written(path).path
    assert whole is not None
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    for size in range(len(lines[0]), len(text), 97):
        path.write_text(text[:size])
        found = Samples.open(path, HERE)
        expected = text[:size].count("\n") - 1
        assert expected <= len(found.samples) <= expected + 1
        # What is added next must not be glued to half a line.
        found.add(Sample(CASES[0], 7, Timing(1.0, 1)))
        again = Samples.read(path)
        assert again is not None and again.samples == found.samples


@pytest.mark.parametrize("change", [{"host": "there"}, {"torch": "2.14"}, {"devices_per_node": 4}, {"device": "GPU"}])
def test_another_machine_starts_anew(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "profile.jsonl"
    written(path)
    other = replace(HERE, **change)  # type: ignore[arg-type]
    assert not Samples.open(path, other).samples
    found = Samples.read(path)
    assert found is not None and found.provenance == other


def test_a_later_date_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "profile.jsonl"
    written(path)
    assert len(Samples.open(path, replace(HERE, date="2027-01-01T00:00Z", memory_bytes=1)).samples) == 15


@pytest.mark.parametrize("text", ["", "no json\n", '{"format": 0}\n', '{"format": 1}\n', "[]\n"])
def test_a_file_of_another_form_is_not_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.jsonl"
    path.write_text(text)
    assert Samples.read(path) is None
    assert Samples.read(tmp_path / "absent.jsonl") is None


def test_too_few_samples_are_refused(tmp_path: Path) -> None:
    samples = Samples.open(tmp_path / "profile.jsonl", HERE)
    samples.add(Sample(CASES[0], 0, Timing(1e-5, 10)))
    with pytest.raises(ValueError, match="too few samples"):
        samples.measurements()
