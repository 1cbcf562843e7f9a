"""The command line: `autopar plan | report | simulate | explain | compare | certify | verify | ...`.

What a user got wrong is printed without a traceback (which `--traceback` shows) and ends with exit code 2; a
verification or certificate that finds a difference, and a rank that fails, end with 1; an error of autopar's own with
70.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from autopar.cli import certifying as cli_certifying
from autopar.cli import planning as cli_planning
from autopar.cli import running as cli_running
from autopar.cli.options import as_command, shows_traceback
from autopar.running.supervise import exit_on

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script; `--traceback` may stand anywhere. SIGINT, SIGTERM and SIGHUP end it with 128 + number."""
    exit_on(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    words = sys.argv[1:]
    asked = ["--traceback"] if "--traceback" in words else []
    app([*asked, *(word for word in words if word != "--traceback")])


@app.callback()
def everywhere(
    traceback: Annotated[bool, typer.Option("--traceback", help="show where an error was raised")] = False,
) -> None:
    """From a single-GPU PyTorch model to a distributed training program."""
    shows_traceback.set(traceback)


for command in (
    *(cli_planning.plan, cli_planning.report, cli_planning.simulate, cli_planning.explain, cli_planning.compare),
    *(cli_running.verify, cli_running.profile, cli_running.tune, cli_running.train),
    cli_certifying.certify,
):
    app.command()(as_command(command))
