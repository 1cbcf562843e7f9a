"""docs/models.md, made of benchmarks/results/zoo.csv: what became of every model of the zoo under every plan.

    python -m benchmarks.zoo_table

A model and plan that were run more than once are shown as they were last. Rows of models that the zoo has no more are
left out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.zoo import PLANS, RESULTS, ROOT, cases
from examples.zoo import ZOO

TARGET = ROOT / "docs" / "models.md"
TITLE = """# Models

Look up whether autopar trains your model's architecture. To test your own model, run
`autopar verify my_module:factory --cluster "4 cpu"` ([Your own model](howto/custom_model.md)).

We compiled tiny models of {models} architectures (`examples/zoo.py`) for four processes on
`examples/clusters/ideal.toml`.
Each ran three SGD steps next to eager training in one process. Each cell has the mesh and the largest relative error
of losses, gradients and parameters, or the reason why autopar refuses the model.

- "64": the error is that of fp64, because rounding alone took the fp32 program over 1e-5.
- "-": the model does not offer the plan's axis. "?": not run.
- The last column names operators that every rank computes whole, with their share of the forward's work.

`python -m benchmarks.zoo_table` writes this page from `benchmarks/results/zoo.csv`, which `python -m benchmarks.zoo
--csv` writes. The latest row of a model and plan counts.
"""


def latest(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """(model, plan) -> the last row of a results file."""
    with path.open(newline="", encoding="utf-8") as file:
        return {(row["model"], row["plan"]): row for row in csv.DictReader(file)}


def table(rows: Mapping[tuple[str, str], Mapping[str, str]]) -> str:
    """The whole page."""
    offered = set(cases(list(ZOO), list(PLANS)))
    lines = [TITLE.format(models=len(ZOO)), "| plan | models run | right | largest error |", "|---|---|---|---|"]
    for plan in PLANS:
        run = [row for key, row in rows.items() if key[1] == plan and key in offered]
        right = [row for row in run if row["ok"] == "True"]
        worst = max((row["error"] for row in right), key=float, default="")
        lines.append(f"| {plan} | {len(run)} | {len(right)} | {worst} |")
    lines += ["", f"| family | model | {' | '.join(PLANS)} | whole on every rank |", f"|{'---|' * (len(PLANS) + 3)}"]
    for model, entry in sorted(ZOO.items(), key=lambda item: item[1].family):
        mine = {plan: rows.get((model, plan)) for plan in PLANS}
        cells = [cell(mine[plan]) if (model, plan) in offered else "-" for plan in PLANS]
        lines.append(f"| {entry.family} | {model} | {' | '.join(cells)} | {whole(mine.values())} |")
    return "\n".join(lines) + "\n"


def cell(row: Mapping[str, str] | None) -> str:
    """One model under one plan."""
    if row is None:
        return "?"
    if row["ok"] != "True":
        return row["failure"].replace("|", "\\|")
    return f"{row['mesh']}: {row['error']}{' (64)' if row['dtype'] == 'fp64' else ''}"


def whole(rows: Iterable[Mapping[str, str] | None]) -> str:
    """The operators that ranks compute whole under some plan, of the first plan that has any."""
    return next((row["replicated"] for row in rows if row is not None and row["replicated"]), "")


if __name__ == "__main__":
    TARGET.write_text(table(latest(RESULTS)), encoding="utf-8")
