"""Options and inputs that mean nothing end in one error; an error of autopar's own says that it is one."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autopar.cli import app, main
from autopar.cli import options as cli_options
from autopar.errors import ConstraintError
from autopar.launch import RankError
from autopar.models.job import parse_settings
from benchmarks.faults import inputs

CHEAP = ("constraints", "cluster", "configuration", "plan file")
"""Cases that need no model."""


def test_bad_options_and_files_are_refused() -> None:
    """What `python -m benchmarks.faults inputs` tries, but for what traces a model."""
    tried = 0
    for case in inputs.cases(None, 0):
        if case.name.startswith(CHEAP):
            result = case.run()
            assert result.outcome == "refused", (case.name, result)
            tried += 1
    assert tried > 150


@pytest.mark.slow
def test_all_bad_inputs_are_refused() -> None:
    for case in inputs.cases(None, 0):
        result = case.run()
        assert result.outcome == "refused", (case.name, result)


@pytest.mark.parametrize(("name", "value"), [*inputs.COMPILE[:20:3], ("global_batch_size", 0), ("precision", 32)])
def test_arguments_of_compile(name: str, value: Any) -> None:
    result = inputs.refused(lambda: inputs._compile(**{name: value}))
    assert result.outcome == "refused", result


def test_settings_with_two_values_contradict() -> None:
    assert parse_settings(["dp=2", "dp=2"], "--set") == {"dp": 2}
    with pytest.raises(ConstraintError, match="two values for dp"):
        parse_settings(["dp=2", "dp=4"], "--set")


# --- the command line -------------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, error: BaseException, *words: str) -> Any:
    """`autopar report x` where reading the source raises."""

    def fails(source: str) -> bool:
        raise error

    monkeypatch.setattr("autopar.cli.report.is_plan_file", fails)
    return CliRunner().invoke(app, [*words, "report", "x"])


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyError("x"), cli_options.INTERNAL_ERROR, "internal error: this is a defect of autopar"),
        (ConstraintError("tp is wrong", values="[3]"), cli_options.USER_ERROR, "error: tp is wrong\n  got: [3]"),
        (RankError("rank 1: Traceback (most recent call last):\n  x\nKeyError: 3"), 1, "error: rank 1: KeyError: 3\n"),
        (PermissionError(13, "Permission denied", "/x"), cli_options.USER_ERROR, "error: /x: Permission denied\n"),
        (KeyboardInterrupt(), cli_options.INTERRUPTED, ""),
        (BrokenPipeError(), cli_options.BROKEN_PIPE, ""),
    ],
)
def test_exit_codes_and_words(error: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, error)
    assert found.exit_code == code and "Traceback" not in found.stderr
    assert found.stderr.startswith(says) and bool(found.stderr) == bool(says)
    if code == cli_options.INTERNAL_ERROR:
        assert "KeyError: 'x'" in found.stderr and "--traceback" in found.stderr and found.stderr.count("\n") == 1


def test_a_traceback_is_shown_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (KeyError("x"), ConstraintError("tp is wrong")):
        found = run(monkeypatch, error, "--traceback")
        assert "Traceback (most recent call last)" in found.stderr and type(error).__name__ in found.stderr


@pytest.mark.parametrize("more", [(), ("--traceback",)])
def test_traceback_may_stand_behind_the_command(
    more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["autopar", "report", "missing.yaml", *more])
    with pytest.raises(SystemExit) as caught:
        main()
    said = capsys.readouterr().err
    assert caught.value.code == 2 and ("Traceback" in said) == bool(more)
    assert said.endswith("error: cannot read missing.yaml\n  got: No such file or directory\n")


def test_words_of_a_plan_are_no_markup(tmp_path: Path) -> None:
    """Rich would take [/x] for the end of a style, and [link=...] for a link."""
    text = (Path(__file__).parents[2] / "golden" / "plans" / "mlp_dp2_tp2.yaml").read_text()
    changed = re.sub("(?m)^cluster: .*$", 'cluster: "[/bold] 4 a100-80g [link=x]"', text)
    (tmp_path / "plan.yaml").write_text(changed)
    found = CliRunner().invoke(app, ["report", str(tmp_path / "plan.yaml")])
    assert found.exit_code == 0, found.stderr
    assert "[/bold] 4 a100-80g [link=x]" in found.stdout


def test_processes_that_a_given_cluster_has_not_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text('model: examples.models:gpt2\ncluster: "2 cpu"\nnum_processes: 3\nsteps: 0\n')
    for words, says in (
        (("train", str(path)), "num_processes=2, or none"),
        (("train", str(path), "cluster=3 cpu", "num_processes=2"), "num_processes=3, or none"),
        (("plan", "examples.models:gpt2", "--cluster", "2 cpu", "--processes", "3"), "num_processes=2, or none"),
    ):
        found = CliRunner().invoke(app, list(words))
        assert found.exit_code == 2 and says in str(found.exception) + found.output, (words, found.output)


def test_another_cluster_than_the_file_s_leaves_the_file_s_number_of_processes(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("model: examples.models:gpt2\ncluster: detect\nnum_processes: 3\nsteps: 0\n")
    for words in (["--cluster", "1 cpu"], ["cluster=1 cpu"]):
        found = CliRunner().invoke(app, ["train", str(path), *words])
        assert found.exit_code == 0, (words, found.output, found.exception)
