"""The command line: `autopar plan | report | simulate | explain | compare | certify | fit | doctor`,
`verify | profile | trial | tune | train | launch | export`.

A user's error ends with exit code 2 and without a traceback, which `--traceback` shows. A verification or certificate
that finds a difference, and a rank that fails, end with 1; a defect of autopar ends with 70. docs/cli.md lists all
codes.
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

from autopar.cli import certify as cli_certify
from autopar.cli import compare as cli_compare
from autopar.cli import explain as cli_explain
from autopar.cli import export as cli_export
from autopar.cli import fit as cli_fit
from autopar.cli import plan as cli_plan
from autopar.cli import report as cli_report
from autopar.cli import running as cli_running
from autopar.cli import simulate as cli_simulate
from autopar.cli import trial as cli_trial
from autopar.cli.options import as_command, shows_traceback
from autopar.running.supervise import exit_on
from codegen.source.text import visible

_ClickException: Any = typer.BadParameter.__mro__[2]
"""The base class of command-line errors; the package that defines it depends on typer's version."""


class Commands(TyperGroup):
    """The commands. Error messages escape the control characters of a user's words."""

    def make_context(self, *arguments: Any, **settings: Any) -> Any:
        with _visible_errors():
            return super().make_context(*arguments, **settings)

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
    """Run the console script. SIGINT, SIGTERM and SIGHUP end it with 128 + their number.

    `--traceback` may stand anywhere. Warnings for users are printed as one line each, without their place in the
    source.
    """
    exit_on(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with_source = warnings.formatwarning

    def one_line(message: Any, category: Any, *place: Any, **settings: Any) -> str:
        if category is UserWarning:
            return visible(f"warning: {message}") + "\n"
        return visible(with_source(message, category, *place, **settings))

    warnings.formatwarning = one_line
    words = sys.argv[1:]
    flags = ["--traceback"] if "--traceback" in words else []
    app([*flags, *(word for word in words if word != "--traceback")])


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"autopar {metadata.version('autopar')} (torch {torch.__version__}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def everywhere(
    traceback: Annotated[bool, typer.Option("--traceback", help="show where an error was raised")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="show the version, and end", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Turn a single-GPU PyTorch model into a distributed training program."""
    shows_traceback.set(traceback)


for command in (
    *(cli_plan.plan, cli_report.report, cli_simulate.simulate, cli_explain.explain, cli_compare.compare),
    *(cli_running.verify, cli_running.profile, cli_trial.trial, cli_running.tune, cli_running.train),
    *(cli_certify.certify, cli_fit.fit, cli_running.doctor, cli_running.launch, cli_export.export),
):
    app.command()(as_command(command))
