"""The command line: `autopar plan | report | simulate | explain | compare | certify | fit | doctor`,
`verify | profile | trial | tune | train | launch | export`.

What a user got wrong is printed without a traceback (which `--traceback` shows) and ends with exit code 2; a
verification or certificate that finds a difference, and a rank that fails, end with 1; an error of autopar's own with
70. docs/cli.md has all of them.
"""

from __future__ import annotations

import contextlib
import platform
import signal
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

from autopar.cli import certifying as cli_certifying
from autopar.cli import doctor as cli_doctor
from autopar.cli import exporting as cli_exporting
from autopar.cli import fitting as cli_fitting
from autopar.cli import planning as cli_planning
from autopar.cli import running as cli_running
from autopar.cli import trying as cli_trying
from autopar.cli.options import as_command, shows_traceback
from autopar.running.supervise import exit_on
from codegen.text import visible

_ClickException: Any = typer.BadParameter.__mro__[2]
"""The base of errors about words; which package has it depends on typer's version."""


class Commands(TyperGroup):
    """The commands; the words of a user are shown with escapes where typer refuses them."""

    def make_context(self, *given: Any, **named: Any) -> Any:
        with _visible_errors():
            return super().make_context(*given, **named)

    def invoke(self, ctx: Any) -> Any:
        with _visible_errors():
            return super().invoke(ctx)


@contextlib.contextmanager
def _visible_errors() -> Iterator[None]:
    try:
        yield
    except _ClickException as error:
        error.message = visible(error.message)
        raise


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script; `--traceback` may stand anywhere. SIGINT, SIGTERM and SIGHUP end it with 128 + number."""
    exit_on(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    as_text = warnings.formatwarning
    warnings.formatwarning = lambda *given, **named: visible(as_text(*given, **named))
    words = sys.argv[1:]
    asked = ["--traceback"] if "--traceback" in words else []
    app([*asked, *(word for word in words if word != "--traceback")])


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(f"autopar {metadata.version('autopar')} (torch {torch.__version__}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def everywhere(
    traceback: Annotated[bool, typer.Option("--traceback", help="show where an error was raised")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="show the version, and end", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """From a single-GPU PyTorch model to a distributed training program."""
    shows_traceback.set(traceback)


for command in (
    *(cli_planning.plan, cli_planning.report, cli_planning.simulate, cli_planning.explain, cli_planning.compare),
    *(cli_running.verify, cli_running.profile, cli_trying.trial, cli_running.tune, cli_running.train),
    *(cli_certifying.certify, cli_fitting.fit, cli_doctor.doctor, cli_running.launch, cli_exporting.export),
):
    app.command()(as_command(command))
