"""What every command does with its options: numbers out of range, names with control characters, misspelled models."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli import app, options
from autopar.errors import ModelError, OutputError
from autopar.models.loading import load_model, require_model
from autopar.page.run_log import read_log
from autopar.settings.arguments import check_numbers
from autopar.settings.constraints import Constraints
from codegen.runtime.options import RANGES
from codegen.source.text import visible

COMMANDS = {command.callback.__name__: command.callback for command in app.registered_commands if command.callback}
ESCAPE = "\x1b[2J"


def numbers_of(callback: Any) -> Iterator[tuple[str, str, str]]:
    """(parameter, its flag, a legal value) of each option that takes a number."""
    for parameter in inspect.signature(callback).parameters.values():
        kind, *others = get_args(parameter.annotation)
        if {int, float} & {kind, *get_args(kind)}:
            declared = [each for each in others[0].param_decls or () if each.startswith("--")]
            yield parameter.name, (declared or ["--" + parameter.name.replace("_", "-")])[0], "1"


NUMBERS = [(name, *each) for name, callback in COMMANDS.items() for each in numbers_of(callback)]


def test_every_number_of_a_command_has_a_range() -> None:
    assert len(NUMBERS) > 30
    assert {parameter for _, parameter, _, _ in NUMBERS} <= RANGES.keys()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -1, 10**400, True, "1"])
@pytest.mark.parametrize("name", sorted({parameter for _, parameter, _, _ in NUMBERS}))
def test_illegal_numbers_are_refused_in_one_place(name: str, value: Any) -> None:
    if (value == float("inf") or value == 10**400) and value in RANGES[name]:
        assert name in ("max_grad_norm", "steps", "checkpoint_every")  # for which these have a meaning
        return
    with pytest.raises(autopar.AutoparError, match=f"{name} is "):
        check_numbers({name: value})


@pytest.mark.parametrize(("command", "flag"), [("fit", "--seconds"), ("explain", "--seconds"), ("plan", "--batch")])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_commands_check_numbers_before_anything_else(command: str, flag: str, value: str) -> None:
    result = CliRunner().invoke(app, [command, "no_such:model", "--cluster", "2 cpu", flag, value])
    assert result.exit_code == 2
    assert " is a " in result.output or "Invalid value" in result.output
    assert "no_such" not in result.output


@pytest.mark.parametrize(
    "words",
    [
        ("plan", f"no{ESCAPE}such:model", "--cluster", "2 cpu"),
        ("plan", "examples.models:mlp", "--cluster", f"2 c{ESCAPE}pu"),
        ("plan", "examples.models:mlp", "--cluster", "2 cpu", "--set", f"d{ESCAPE}p=2"),
        ("plan", "examples.models:mlp", "--cluster", "2 cpu", "-o", f"lay{ESCAPE}ers=2"),
        ("report", f"no{ESCAPE}such.yaml"),
        ("train", f"no{ESCAPE}such.toml"),
        ("launch", f"no{ESCAPE}such.yaml", "--", __file__),
        ("plan", f"--no{ESCAPE}such"),
        ("plan", "examples.models:mlp", f"no{ESCAPE}such"),
        (f"--no{ESCAPE}such",),
    ],
    ids=lambda words: " ".join(words).replace(ESCAPE, "ESC"),
)
def test_refusals_show_control_characters_as_escapes(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2
    assert "\x1b" not in result.output and "x1b[2j" in result.output.lower()


def test_names_in_files_are_shown_with_escapes(tmp_path: Path) -> None:
    plan, cluster = tmp_path / "plan.yaml", tmp_path / "cluster.toml"
    plan.write_text('"a\\e[2Jb": 1\n')
    cluster.write_text('"a\\u001b[2Jb" = 1\n')
    for words in (("report", str(plan)), ("plan", "examples.models:mlp", "--cluster", str(cluster))):
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 2 and "\x1b" not in result.output and "\\x1b[2J" in result.output, result.output


def test_reports_show_names_of_modules_with_escapes() -> None:
    model = nn.Sequential()
    model.add_module(f"first{ESCAPE}", nn.Linear(8, 8))
    batch = {"input": torch.zeros(8, 8), "target": torch.zeros(8, 8)}
    program = autopar.compile(model, "2 cpu", example_inputs=batch, loss_fn=nn.functional.mse_loss)
    text = str(program.report())
    assert "\x1b" not in text and "\\x1b[2J" in text


def test_reports_of_verifications_show_names_with_escapes() -> None:
    found = autopar.VerifyReport(0.0, {f"first{ESCAPE}": 0.1}, {}, {}, {}, (), (), "dp2")
    assert "\x1b" not in str(found) and "\\x1b[2J" in str(found)


@pytest.mark.parametrize("option", ["--out", "--html", "--timeline", "--code"])
def test_a_path_with_a_null_character_is_refused(option: str) -> None:
    result = CliRunner().invoke(app, ["plan", "examples.models:mlp", "--cluster", "2 cpu", option, "a\0b"])
    assert result.exit_code == 2 and "null character" in result.output, result.output


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: autopar.explain(None, seconds=float("nan")),  # type: ignore[arg-type]
        lambda: autopar.explain(None, processes=0),  # type: ignore[arg-type]
        lambda: autopar.TrainerConfig(evaluation={"min_delta": float("inf")}),  # type: ignore[arg-type]
        lambda: autopar.TrainerConfig(precision="fp16", loss_scale={"init_scale": 10**400}),
        lambda: autopar.TrainerConfig(checkpoint_directory="a\0b"),
        lambda: Constraints.parse({"memory": -(10**400)}),
    ],
)
def test_numbers_and_paths_of_functions_are_checked(attempt: Any) -> None:
    with pytest.raises(autopar.AutoparError):
        attempt()


def test_visible_text() -> None:
    assert visible("a\x07\x9b\u202e\u2028\r\x00") == "a\\x07\\x9b\\u202e\\u2028\\r\\x00"
    assert visible("plain ä 漢\n\tlines") == "plain ä 漢\n\tlines"


# Models ---------------------------------------------------------------------------------------------------------------


def planned_on(command: str, model: str) -> list[str]:
    if command == "certify":
        return [command, "--model", model, "--cluster", "detect"]
    return [command, model] if command == "train" else [command, model, "--cluster", "detect"]


@pytest.mark.parametrize("command", ["plan", "report", "explain", "simulate", "verify", "trial", "train", "fit"])
def test_a_misspelled_model_is_refused_before_anything_is_measured(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*given: Any) -> None:
        raise AssertionError("the machine is measured")

    monkeypatch.setattr(options, "resolve_cluster", measured)
    result = CliRunner().invoke(app, planned_on(command, "examples.models:gtp2"))
    assert result.exit_code == 2 and "has no callable 'gtp2'" in result.output, result.output


FACTORY = """
import torch
from torch import nn
from {helper} import WIDTH

def build():
    from {later} import RATE
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(RATE)), (torch.zeros(4, WIDTH), torch.zeros(4, WIDTH))
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file whose module and factory import from files beside it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "helper_of_mine.py").write_text("WIDTH = 6\n")
    (tmp_path / "later_of_mine.py").write_text("RATE = 0.5\n")
    path = tmp_path / "net_of_mine.py"
    path.write_text(FACTORY.format(helper="helper_of_mine", later="later_of_mine"))
    yield path
    for name in set(sys.modules) - before:
        if name.endswith("_of_mine"):
            del sys.modules[name]


def test_a_file_is_a_module_and_what_lies_beside_it_is_found(factory: Path) -> None:
    require_model(f"{factory}:build")
    assert load_model(f"{factory}:build").model[0].in_features == 6  # type: ignore[index]


def test_a_module_of_a_package_imports_from_beside_its_file(factory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(factory.parent.parent)
    name = f"{factory.parent.name}.net_of_mine:build"
    if factory.parent.name.isidentifier():
        assert load_model(name).model[0].in_features == 6  # type: ignore[index]


def test_a_path_below_the_working_folder(factory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(factory.parent.parent)
    assert load_model(f"{factory.parent.name}/net_of_mine.py:build").inputs is not None


def test_files_that_cannot_be_modules(factory: Path) -> None:
    hidden = factory.with_name("statistics.py")
    factory.rename(hidden)
    with pytest.raises(ModelError, match="another module has the name 'statistics'"):
        load_model(f"{hidden}:build")
    with pytest.raises(ModelError, match="the file does not exist"):
        load_model(f"{factory}:build")
    with pytest.raises(ModelError, match=r"statistics.py:FACTORY"):
        load_model(str(hidden))


# Logs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["1" + "0" * 400, "-1e308", "1e309", "NaN", "[" * 5000 + "]" * 5000])
def test_numbers_that_no_plot_has_room_for(loss: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "loss": {loss}}}\n{{"step": 2, "loss": 3.5}}\n')
    if loss.startswith("["):
        with pytest.raises(OutputError, match="line 1"):
            read_log(path)
        return
    assert [step.figures for step in read_log(path)] == [{}, {"loss": 3.5}]
