"""`autopar doctor`: what this machine has for training, and what is wrong with it."""

from __future__ import annotations

import typer
from rich.text import Text

from autopar.cli.options import Json, console
from autopar.cli.output import print_json, working
from autopar.launch import meet
from autopar.report.json_facts import record_json
from autopar.running.doctor import HANDSHAKE_SECONDS, PROBLEM, WARNING, examine_machine

COLOURS = {WARNING: "yellow", PROBLEM: "bold red"}


def doctor(as_json: Json = False) -> None:
    """Whether this machine can train: versions, GPUs, communication, limits, compilers; and what to do about it."""
    with working("two processes meet over gloo"):
        health = examine_machine(lambda: meet(HANDSHAKE_SECONDS))
    if as_json:
        print_json(record_json("doctor", health))
    else:
        for check in health.checks:
            style = COLOURS.get(check.status, "green")
            console().print(Text.assemble((f"{check.status:8}", style), f"{check.name}: {check.found}"))
            if check.advice:
                console().print(Text(f"        -> {check.advice}"))
    if health.has_problem:
        raise typer.Exit(1)
