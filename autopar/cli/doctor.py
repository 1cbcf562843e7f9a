"""`autopar doctor`: examine this machine for training."""

from __future__ import annotations

import typer
from rich.text import Text

from autopar.cli.options import Json
from autopar.cli.output import print_json, show, working
from autopar.launch import meet
from autopar.report.json_facts import record_json
from autopar.running.doctor import HANDSHAKE_SECONDS, PROBLEM, WARNING, examine_machine

COLORS = {WARNING: "yellow", PROBLEM: "bold red"}


def doctor(as_json: Json = False) -> None:
    """Check whether this machine can train: versions, GPUs, communication, limits and compilers, with advice."""
    with working("two processes meet over gloo"):
        health = examine_machine(lambda: meet(HANDSHAKE_SECONDS))
    if as_json:
        print_json(record_json("doctor", health))
    else:
        for check in health.checks:
            style = COLORS.get(check.status, "green")
            show(Text.assemble((f"{check.status:8}", style), f"{check.name}: {check.found}"))
            if check.advice:
                show(Text(f"        -> {check.advice}"))
    if health.has_problem:
        raise typer.Exit(1)
