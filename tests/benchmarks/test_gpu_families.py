"""`benchmarks.gpu.families` where there is no GPU: sides that fail, differ, hang or die, and who runs meanwhile."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import time

import pytest
import torch
from torch import Tensor

from benchmarks.families import FAMILIES
from benchmarks.gpu import families
from benchmarks.gpu.families import Case, Side, Table, Unavailable


def case(side, family="bert"):
    return Case(family, side, "tiny", "cpu", 3)


def steps(*losses):
    """A side whose steps have these losses, then the last one again and again."""
    values = list(losses)

    def step() -> Tensor:
        return torch.tensor(values.pop(0) if len(values) > 1 else values[0])

    return Side(step)


def test_all_ends_of_a_case_are_reported_and_end_no_other(monkeypatch):
    def refused(_):
        raise Unavailable("not here")

    sides = {
        "raises": lambda _: 1 / 0,
        "dies": lambda _: os._exit(3),
        "hangs": lambda _: time.sleep(100),
        "refused": refused,
        "works": lambda _: steps(3.0, 2.0),
    }
    monkeypatch.setattr(families, "SIDES", sides)
    monkeypatch.setattr(families, "CASE_SECONDS", 4.0)
    ends = {}
    for ended, kind, value in families.outcomes([case(side) for side in sides], 5, 100.0, time.monotonic() + 60):
        ends[ended.side] = kind, value
    assert {side: kind for side, (kind, _) in ends.items()} == {
        "raises": "failed", "dies": "failed", "hangs": "failed", "refused": "unavailable", "works": "done"
    }  # fmt: skip
    assert families.last_line(ends["raises"][1]) == "ZeroDivisionError: division by zero"
    assert "exit code 3" in ends["dies"][1] and "stopped" in ends["hangs"][1]
    figures = ends["works"][1]
    assert figures["losses"] == [3.0, *[2.0] * 5] and float(figures["median_seconds"]) >= 0
    assert not multiprocessing.active_children()


def test_nothing_else_runs_while_a_case_is_measured(monkeypatch):
    """A case counts all the time until the other one is measured, which sees the count stand still."""
    # Without locks: a process that is stopped keeps what it holds.
    counter, is_measuring = multiprocessing.RawValue("q", 0), multiprocessing.RawValue("b", 0)

    def counts(_):
        while True:
            counter.value += 1

    def watches(_):
        while counter.value == 0:
            time.sleep(0.01)
        seen = []

        def step() -> Tensor:
            if is_measuring.value:
                time.sleep(0.05)
                seen.append(counter.value)
            return torch.tensor(float(len(set(seen[1:]))))

        return Side(step)

    def measured(_, side):
        is_measuring.value = 1
        return {"distinct": [float(side.step()) for _ in range(4)][-1]}

    monkeypatch.setattr(families, "SIDES", {"counts": counts, "watches": watches})
    monkeypatch.setattr(families, "measured", measured)
    found = families.outcomes([case("counts"), case("watches")], 2, 100.0, time.monotonic() + 60)
    ended, kind, figures = next(found)
    found.close()
    assert (ended.side, kind) == ("watches", "done"), figures
    assert figures["distinct"] == 1.0
    assert not multiprocessing.active_children()


def test_cases_prepare_together_only_where_memory_is_enough(monkeypatch):
    running = multiprocessing.Value("i", 0)
    most = multiprocessing.Value("i", 0)

    def counted(_):
        with running.get_lock():
            running.value += 1
            most.value = max(most.value, running.value)
        time.sleep(0.3)
        with running.get_lock():
            running.value -= 1
        return steps(1.0)

    monkeypatch.setattr(families, "SIDES", {"a": counted})
    cases = [case("a", family) for family in ("bert", "vit", "t5")]
    assert len(list(families.outcomes(cases, 3, 1.5, time.monotonic() + 60))) == 3
    assert most.value == 1
    assert len(list(families.outcomes(cases, 3, 2.5, time.monotonic() + 60))) == 3
    assert most.value == 2


def test_rows_come_as_they_are_measured_and_compare_losses(tmp_path):
    table = Table(tmp_path / "rows.csv")
    kernels = [{"name": "k", "seconds": 1e-3, "launches": 2}]

    def figures(*losses):
        return {"losses": list(losses), "median_seconds": "0.1", "kernels": list(kernels)}

    table.add(case("hf"), "done", figures(3.0, 2.0), "cpu")
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 2
    table.add(case("emitted"), "done", figures(3.01, 2.0), "cpu")
    table.add(case("captured"), "done", figures(3.0, 2.0), "cpu")
    table.add(case("compile"), "done", figures(3.0, float("nan")), "cpu")
    table.add(case("liger"), "unavailable", "no package", "cpu")
    table.add(case("compile graphs"), "failed", "Traceback\n  line\nOutOfMemoryError: no memory", "cpu")
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["side"] for row in rows] == ["hf", "emitted", "captured", "compile", "compile graphs"]
    assert [bool(row["error"]) for row in rows] == [False, False, True, True, True]
    assert "uncaptured" in rows[2]["error"] and rows[4]["error"] == "OutOfMemoryError: no memory"
    assert all(tuple(row) == families.FIELDS for row in rows)
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert lines[0]["kernels"] == kernels and lines[4]["kernels"] == []


def test_only_what_is_missing_is_measured_again(tmp_path):
    table = Table(tmp_path / "rows.csv")
    table.add(case("hf"), "done", {"losses": [1.0], "median_seconds": "0.1"}, "cpu")
    table.add(case("hf", "vit"), "failed", "Error: no", "cpu")
    assert families.measured_before(tmp_path / "rows.csv", "cpu") == {("bert", "hf")}
    assert families.measured_before(tmp_path / "rows.csv", "another") == set()


def test_families_keep_their_layers_at_small_width():
    assert set(families.ORDER) == set(FAMILIES)
    for name, family in FAMILIES.items():
        full, narrow, tiny, short = (family.settings(size) for size in ("full", "narrow", "tiny", "short"))
        depths = [key for key in full if key in family.tiny]
        assert {key: narrow[key] for key in depths} == {key: full[key] for key in depths}, name
        for key in depths:
            of_size = [settings[key] if key == "depths" else [settings[key]] for settings in (full, tiny, short)]
            periods = [sum(layers) for layers in of_size]
            assert periods[0] == periods[1] + (periods[2] - periods[1]) * family.more_periods, name


@pytest.mark.slow
def test_sides_train_alike_on_a_cpu():
    rows = families.main(["--device", "cpu", "--tiny", "--family", "bert", "dit", "--side", "hf", "emitted"])
    assert [row["side"] for row in rows] == ["hf", "hf", "emitted", "emitted"]
    assert not any(row["error"] for row in rows)
