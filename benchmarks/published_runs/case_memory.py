"""Memory of Megatron-LM's own cases: predicted of the last rank, beside the bytes that torch had allocated."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.published_runs.accuracy import percentile
from benchmarks.published_runs.megatron_cases import case_of, is_case, kind_of, lacks_gpus, on_gpus_of
from benchmarks.published_runs.predictions import Skipped
from benchmarks.published_runs.rows import Row, SkippedError
from cost_models.certainty import spread
from cost_models.megatron_core import RankMemory, rank_memory

FAR = 0.12
"""Relative error from which a row is printed by itself."""


@dataclass(frozen=True, slots=True)
class CaseMemory:
    """One case, predicted."""

    row: Row
    memory: RankMemory

    @property
    def allocated_error(self) -> float | None:
        """Signed, relative; None where there is no figure, or where the number of GPUs was taken from it."""
        measured = self.row.get("mem_allocated_gb")
        return self.memory.allocated / 2**30 / measured - 1 if measured and not lacks_gpus(self.row) else None

    @property
    def peak_error(self) -> float | None:
        """Signed, relative; None where there is no figure."""
        measured = self.row.get("mem_peak_gb")
        return self.memory.peak / 2**30 / measured - 1 if measured else None


def predict_cases(rows: Iterable[Row]) -> tuple[list[CaseMemory], list[Skipped]]:
    """(predicted cases, skipped ones with the reason) of the rows that are cases."""
    found, skipped = list[CaseMemory](), list[Skipped]()
    for row in rows:
        if not is_case(row):
            continue
        try:
            if not row.get("mem_allocated_gb"):
                raise SkippedError("no memory was measured")
            model, setup = case_of(row)
            setup = on_gpus_of(row, model, setup) if lacks_gpus(row) else setup
            found.append(CaseMemory(row, rank_memory(model, setup)))
        except SkippedError as error:
            skipped.append((row, str(error)))
    return found, skipped


def show_cases(cases: Sequence[CaseMemory], skipped: Sequence[Skipped]) -> None:
    """Errors of what stays and of the peak by family, the rows that are far off, and the spread of ratios."""
    kinds = list(dict.fromkeys(kind_of(case.row) for case in cases))
    print(f"{'memory of the last rank':26} rows   median     p90    bias   worst over  worst under   under by > 5 %")
    for name, kind in (("allocated", "allocated_error"), ("peak", "peak_error")):
        for group in [*kinds, "all"]:
            own = [getattr(case, kind) for case in cases if group in (kind_of(case.row), "all")]
            errors = [error for error in own if error is not None]
            sizes = [abs(error) for error in errors]
            print(
                f"{f'{name}, {group}':26} {len(errors):4} {statistics.median(sizes):8.1%} "
                f"{percentile(sizes, 0.9):7.1%} {statistics.median(errors):+7.1%} {max(errors):+12.1%} "
                f"{min(errors):+12.1%} {sum(error < -0.05 for error in errors):12}"
            )
    for reason, count in Counter(reason for _, reason in skipped).items():
        print(f"    skipped {count}: {reason}")
    print(f"    {sum(lacks_gpus(case.row) for case in cases)} rows: GPUs not given, taken from what is allocated")
    for case in cases:
        errors = [error for error in (case.allocated_error, case.peak_error) if error is not None]
        if max(map(abs, errors)) > FAR or min(errors) < -0.05:
            image = str(case.row["source_ref"]).rsplit("golden_values_", 1)[-1].removesuffix(".json")
            name = str(case.row["model"]).rsplit("/", 1)[-1]
            print(f"    far off {case.row['id']} {name} {image}: {', '.join(f'{error:+.1%}' for error in errors)}")
    print("measured by predicted peak, 5th to 95th percentile:")
    for group in kinds:
        ratios = [1 / (1 + case.peak_error) for case in cases if kind_of(case.row) == group and case.peak_error]
        known = spread(f"megatron-core {group}")
        print(
            f"    {group:8} {percentile(ratios, 0.05):.2f} to {percentile(ratios, 0.95):.2f}; "
            f"cost_models has {known.low:.2f} to {known.high:.2f} of {known.rows} rows"
        )
