"""The constants of the cost models: how many were fitted, each to how many rows, and where the others are from.

    python -m benchmarks.constants [--write]

Values are read from the modules and TOML files that the cost models use, rows are counted in the tables of
../shared/data. Fitted are: the constants that benchmarks/operators.py and benchmarks/collectives.py refit (FITTED
there), the two of attention in cost_models/compute.py, and those of RUNS. A row counts for a constant of a link if its
predicted time moves with it, for one of a device if it was timed there, for one of RUNS if its filter takes it.
--write: rewrites docs/constants.md.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from benchmarks import collectives, operators
from benchmarks.published_runs.rows import Row, read
from cost_models import catalog, compute, nccl
from cost_models.framework_profiles import framework

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "constants.md"
ROWS = operators.TABLE.parent / "measured_runs.jsonl"
FILES = ("devices.toml", "links.toml", "nccl.toml", "stragglers.toml", "frameworks.toml", "dispatches.toml")


@dataclass(frozen=True, slots=True)
class Fitted:
    """One constant. data: what it was fitted to, of which `rows` rows of `sources` publications bear on it."""

    place: str
    value: float
    data: str
    rows: int
    sources: int


# --- operator times and collectives -----------------------------------------------------------------------------------


def of_operators() -> Iterator[Fitted]:
    """As benchmarks/operators.py counts them; each device's rows are of one cluster."""
    rows, _ = operators.read_rows()
    data = "measured_ops.json, forward"
    timed = {
        name: sum(r.device == name and r.which == "forward" for r in rows) for name, _ in operators.DEVICES.values()
    }
    for name, count in timed.items():
        for key in operators.FITTED:
            yield Fitted(f"devices.toml {name} {key}", getattr(catalog.device(name), key), data, count, 1)
    for family in operators.OUTPUT_EXPOSED:
        count = sum(timed[name] for name in family)
        value = catalog.device(family[0]).output_exposed
        yield Fitted(f"devices.toml {' and '.join(family)} output_exposed", value, data, count, len(family))
    for place in operators.OF_ONE:
        name, key = place.split(".")
        yield Fitted(f"devices.toml {name} {key}", getattr(catalog.device(name), key), data, timed[name], 1)
    rows_, columns, elements = compute.TILES[-2]
    halved = rows_ * columns / elements
    yield Fitted(f"compute.py {operators.SHARED[0]}", halved, data, sum(timed.values()), len(timed))


def of_collectives() -> Iterator[Fitted]:
    """As benchmarks/collectives.py refits them."""
    rows, present = collectives.read_rows(), collectives.built_in()
    plain = [collectives.predicted(row, collectives.complete(present)) for row in rows]
    for setting, value in present.items():
        moved = collectives.complete({**present, setting: 0.9 * value + 1e-3})
        own = [r for r, before in zip(rows, plain, strict=True) if collectives.predicted(r, moved) != before]
        yield Fitted(f"links.toml {' '.join(setting)}", value, "tables of collectives", len(own), _tables(own))
    copied = [row for row in rows if nccl.own_step(row.kind)]
    yield Fitted(
        "nccl.toml own_step", nccl.own_step("all_gather"), "tables of collectives", len(copied), _tables(copied)
    )
    for kind, seconds in collectives.HOST_SECONDS.items():
        timed = [row for row in rows if row.kind == kind and row.host_seconds]
        yield Fitted(
            f"collectives.py host seconds of {kind}", seconds, "tables of collectives", len(timed), _tables(timed)
        )


def _tables(rows: Iterable[collectives.Row]) -> int:
    return len({row.table for row in rows})


def of_figures() -> Iterator[Fitted]:
    """Of attention kernels: the bars without a mask and with one, forward and backward, of two head sizes."""
    data = "J. Shah et al., FlashAttention-3 (2024), figures 5 and 6: FlashAttention-2 by sequence length"
    for backward, ramp in compute.ATTENTION_RAMP.items():
        yield Fitted(f"compute.py ATTENTION_RAMP {'backward' if backward else 'forward'}", ramp, data, 0, 1)
    yield Fitted("compute.py CAUSAL_RATE", compute.CAUSAL_RATE, data, 0, 1)


# --- published runs ---------------------------------------------------------------------------------------------------


def _foundry(gpu: str) -> Callable[[Row], bool]:
    return lambda row: "llm-foundry" in row["source"] and row["gpu"].startswith(gpu) and row["precision"] != "amp_fp8"


def _nanotron(row: Row) -> bool:
    return bool(row["framework"] == "nanotron")


def _small(row: Row) -> bool:
    """On the host's floor: micro-batches of 1 and 2 on one node, without a pipeline."""
    return _nanotron(row) and row["gpus_total"] == 8 and row["pp"] == 1 and row["micro_batch"] <= 2


def _apart(row: Row) -> bool:
    return _nanotron(row) and row["gpus_total"] > row["gpus_per_node"] and row["pp"] > 1 and row["tp"] > 1


def _far(row: Row) -> bool:
    return _nanotron(row) and row["tp"] > row["gpus_per_node"]


RUNS: Mapping[tuple[str, str, str], Callable[[Row], bool]] = {
    ("devices.toml", "a100-80g", "attention_variants.triton"): _foundry("A100"),
    ("devices.toml", "a100-80g", "attention_variants.triton.backward"): _foundry("A100"),
    ("devices.toml", "h100-sxm", "attention_variants.triton"): _foundry("H100"),
    ("devices.toml", "h100-sxm", "attention_variants.triton.backward"): _foundry("H100"),
    ("devices.toml", "h100-sxm", "matmul_efficiency"): _foundry("H100"),
    ("frameworks.toml", "nanotron", "host_layer_seconds"): _small,
    ("frameworks.toml", "nanotron", "host_collective_seconds"): lambda row: _small(row) and row["tp"] > 1,
    ("frameworks.toml", "nanotron", "host_apart_seconds"): _apart,
    ("frameworks.toml", "nanotron", "host_far_seconds"): _far,
    ("frameworks.toml", "nanotron", "host_step_seconds"): lambda row: _nanotron(row) and row["pp"] > 1,
}
"""(file, owner, key) of what was fitted to step times of published runs, and the rows that it was fitted to."""


def of_runs(rows: Iterable[Row]) -> Iterator[Fitted]:
    """rows: of measured_runs.jsonl."""
    known = [row for row in rows if row.get("status", "ok") == "ok" and row.get("iter_time_s")]
    for (file, owner, key), takes in RUNS.items():
        part = framework(owner) if file == "frameworks.toml" else catalog.device(owner)
        head, _, entry = key.partition(".")
        value = getattr(part, head)
        own = [row for row in known if takes(row)]
        place = f"{file} {owner} {key}"
        yield Fitted(
            place, value[entry] if entry else value, "measured_runs.jsonl", len(own), len({r["source"] for r in own})
        )


# --- the others -------------------------------------------------------------------------------------------------------


def sourced() -> Iterator[tuple[str, str, int, str]]:
    """(file, owner, its figures, fitted or not, its source) of every table of the data files."""
    for file in FILES:
        text = resources.files("cost_models").joinpath("machines", file).read_text(encoding="utf-8")
        for owner, table in _owners(tomllib.loads(text)):
            yield file, owner, sum(1 for _ in _figures(table)), str(table.get("source", "head of the file"))


def _owners(tables: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            yield name, {name: table}
        elif "source" not in table and all(isinstance(v, Mapping) and "source" in v for v in table.values()):
            yield from ((f"{name}.{key}", value) for key, value in table.items())
        else:
            yield name, table


def _figures(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _figures(item)
    elif isinstance(value, list):
        for item in value:
            yield from _figures(item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


# --- report -----------------------------------------------------------------------------------------------------------


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """The report, as Markdown."""
    rows = list(rows)
    num_operators, tables = len(operators.read_rows()[0]), collectives.read_rows()
    groups = (
        ("kernels (benchmarks/operators.py)", list(of_operators()), num_operators, len(operators.DEVICES)),
        ("collectives (benchmarks/collectives.py)", list(of_collectives()), len(tables), _tables(tables)),
        ("attention by sequence length", list(of_figures()), None, 1),
        ("step times (benchmarks/published.py)", list(of_runs(rows)), len(rows), len({row["source"] for row in rows})),
    )
    yield "# Constants of the cost models"
    yield ""
    yield "Look up a constant of a cost model: its value, and the data it was fitted to. This page is generated:"
    yield ""
    yield "*Not run: the tables are not part of this repository.*"
    yield ""
    yield "```"
    yield "python -m benchmarks.constants --write"
    yield "```"
    yield ""
    yield "## Fitted constants"
    yield ""
    yield "| fitted to | constants | rows | sources |"
    yield "|---|---|---|---|"
    for name, constants, count, sources in groups:
        yield f"| {name} | {len(constants)} | {'bars of two figures' if count is None else count} | {sources} |"
    yield f"| all | {sum(len(constants) for _, constants, _, _ in groups)} | | |"
    yield ""
    yield "Here rows and sources count the whole table. Below they count those that bear on one constant."
    yield ""
    yield "| constant | value | fitted to | rows | sources |"
    yield "|---|---|---|---|---|"
    for _, constants, _, _ in groups:
        for c in constants:
            yield f"| {c.place} | {c.value:.4g} | {c.data} | {c.rows or ''} | {c.sources} |"
    yield ""
    yield "## Sources"
    yield ""
    yield "All numbers of the files in `cost_models/machines/`, including the constants above."
    yield ""
    yield "| file | entry | numbers | source |"
    yield "|---|---|---|---|"
    for file, owner, count, source in sourced():
        yield f"| {file} | {owner} | {count} | {source.replace('|', '/')} |"


def main() -> int:
    parser = argparse.ArgumentParser("constants.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT.relative_to(ROOT)}")
    options = parser.parse_args()
    text = "\n".join(lines(read(str(ROWS), None))) + "\n"
    if options.write:
        DOCUMENT.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
