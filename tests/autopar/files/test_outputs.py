"""No command writes over, or removes, what autopar did not make; and a folder is replaced whole or not at all."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.compiled import CompiledProgram
from autopar.errors import OutputError
from autopar.files import folder_swap
from autopar.files.folder_swap import MARK
from autopar.files.outputs import is_ours, require_writable, write_output
from autopar.trainer import Trainer
from autopar.training.config import TrainerConfig
from examples.models import gpt2

GPT2 = ("examples.models:gpt2", "--cluster", "1 cpu", "-o", "layers=1", "-o", "width=16", "-o", "num_heads=2")


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    example = gpt2(layers=1, width=16, num_heads=2, batch_size=2, seq_len=8)
    return autopar.compile(example.model, "1 cpu", example_inputs=example.inputs, loss_fn=example.loss_fn)


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.mark.parametrize("place", [".", "nested", "file", "link"])
def test_a_folder_of_others_is_refused_before_any_work(place: str, tmp_path: Path, monkeypatch) -> None:
    """The model does not exist, so that an error about the folder comes first."""
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    (tmp_path / "link").symlink_to(tmp_path / "nested")
    monkeypatch.chdir(tmp_path)
    before = listing(tmp_path)
    code, text = run("plan", "no_such_module:model", "--cluster", "1 cpu", "--code", place)
    assert code == 2 and "no_such_module" not in text
    assert "instead" in text and "Traceback" not in text
    assert listing(tmp_path) == before and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("place", ["home", "home/..", "home/project", "/", "home/project/deeper/.."])
def test_home_and_parents_are_refused_even_with_a_mark(
    place: str, program: CompiledProgram, tmp_path: Path, monkeypatch
) -> None:
    project = tmp_path / "home" / "project"
    (project / "deeper").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "home", project):
        (folder / MARK).write_text('{"written by": "autopar", "files": {}}')
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(project / "deeper")
    before = listing(tmp_path)
    with pytest.raises(OutputError, match="is not empty"):
        program.save(tmp_path / place)
    assert listing(tmp_path) == before


def test_own_folder_is_replaced_and_an_empty_one_filled(program: CompiledProgram, tmp_path: Path, monkeypatch) -> None:
    first = program.save(tmp_path / "out.d" / "llama-3.1")
    names = set(listing(first))
    (first / "__pycache__").mkdir()
    (first / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"compiled")
    assert program.save(tmp_path / "out.d" / "llama-3.1", weights=False) == first
    assert set(listing(first)) == names - {"weights.safetensors"}
    assert [path.name for path in first.parent.iterdir()] == ["llama-3.1"]
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    inode = empty.stat().st_ino
    program.save(".")
    assert set(listing(empty)) == names and empty.stat().st_ino == inode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "out.d"]


def notes(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def checkpoint(folder: Path) -> None:
    (folder / "runs" / "step-00000010").mkdir(parents=True)
    (folder / "runs" / "step-00000010" / "weights").write_bytes(b"trained")


def edited_main(folder: Path) -> None:
    with (folder / "main.py").open("a") as file:
        file.write("# my own data\n")


def compiled_stranger(folder: Path) -> None:
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "other.cpython-311.pyc").write_bytes(b"of another source")


def link_out(folder: Path) -> None:
    (folder / "runtime" / "data").symlink_to(folder.parent / "data")


def mark_of_another(folder: Path) -> None:
    (folder / MARK).write_text('{"files": {"main.py": 1}}')


def mark_that_leads_out(folder: Path) -> None:
    """Whatever a mark lists, nothing outside of its folder is touched."""
    text = (folder / MARK).read_text()
    (folder / MARK).write_text(text.replace('"files": {', '"files": {"../data/notes": "0",'))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    "addition", [notes, checkpoint, edited_main, compiled_stranger, link_out, mark_of_another, mark_that_leads_out]
)
def test_additions_of_the_user_are_not_lost(addition, program: CompiledProgram, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes").write_text("outside")
    folder = program.save(tmp_path / "run", weights=False)
    addition(folder)
    before = listing(tmp_path)
    if addition is mark_that_leads_out:
        program.save(folder, weights=False)
    else:
        with pytest.raises(OutputError, match="autopar did not write"):
            program.save(folder, weights=False)
        assert listing(tmp_path) == before
    assert (tmp_path / "data" / "notes").read_text() == "outside"


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("can_exchange", [True, False])
def test_what_comes_in_meanwhile_is_kept(can_exchange: bool, program: CompiledProgram, tmp_path: Path, monkeypatch):
    folder = program.save(tmp_path / "run", weights=False)
    names = set(listing(folder))
    replace = folder_swap.replace_folder

    def late(fresh: Path, directory: Path) -> None:
        (directory / "late.txt").write_text("mine")
        replace(fresh, directory)

    monkeypatch.setattr("autopar.files.folder_swap.replace_folder", late)
    if not can_exchange:
        monkeypatch.setattr(folder_swap, "_exchange", lambda first, second: False)
    with pytest.warns(UserWarning, match="late.txt appeared in"):
        program.save(folder, weights=False)
    assert set(listing(folder)) == names
    (kept,) = (path for path in tmp_path.iterdir() if path != folder)
    assert (kept / "late.txt").read_text() == "mine"


def test_a_failing_save_leaves_the_older_program(program: CompiledProgram, tmp_path: Path, monkeypatch) -> None:
    folder = program.save(tmp_path / "run", weights=False)
    before = listing(tmp_path)

    def full(sources: dict[str, str]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autopar.running.folder.imported_modules", full)
    with pytest.raises(OutputError, match="No space left"):
        program.save(folder)
    assert listing(tmp_path) == before


def test_a_full_disk_is_one_error_and_leaves_nothing(program: CompiledProgram, tmp_path: Path) -> None:
    weights = sum(value.nbytes for value in program.model.state_dict().values())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (100, weights // 2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # python has its signal ignored
        try:
            with pytest.raises(OutputError, match="the program cannot be written[^$]*File too large"):
                program.save(tmp_path / "saved")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not list(tmp_path.iterdir())


def test_files_of_others_are_not_written_over(tmp_path: Path) -> None:
    for name, text in (("plan.yaml", "mesh: 1\n"), ("trace.json", '{"traceEvents": []}')):
        path = tmp_path / name
        path.write_text("a stranger's\n")
        with pytest.raises(OutputError, match="autopar did not write it"):
            write_output(path, text)
        assert path.read_text() == "a stranger's\n"
        write_output(path, text, force=True)
        assert is_ours(path)
        write_output(path, text)
        path.write_text(path.read_text().replace("1", "2").replace("[]", "[1]"))
        with pytest.raises(OutputError, match="edited since"):
            write_output(path, text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.yaml", "trace.json"]


def test_unwritable_outputs_are_said_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "plan.yaml", tmp_path, Path("/proc/plan.yaml")):
        with pytest.raises(OutputError):
            require_writable(place)
    require_writable(tmp_path / "new" / "deep" / "plan.yaml")
    require_writable(os.devnull)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    for words in (("--out", "/proc/x/y.yaml"), ("--code", "/proc/x"), ("--code", "d", "--out", "d/plan.yaml")):
        code, text = run("plan", "no_such_module:model", "--cluster", "1 cpu", *words)
        assert code == 2 and "no_such_module" not in text


def test_commands_write_over_their_own_files_only(tmp_path: Path) -> None:
    plan, trace = str(tmp_path / "plan.yaml"), str(tmp_path / "trace.json")
    for _ in range(2):
        code, text = run("plan", *GPT2, "--out", plan, "--timeline", trace)
        assert code == 0, text
    Path(plan).write_text(Path(plan).read_text() + "# looked at by me\n")
    code, text = run("plan", *GPT2, "--out", plan)
    assert code == 2 and Path(plan).read_text().endswith("by me\n")
    assert run("plan", *GPT2, "--out", plan, "--force")[0] == 0
    for command in ("report", "explain", "simulate"):
        Path(trace).write_text("mine")
        code, text = run(command, "no_such_module:model", "--cluster", "1 cpu", "--timeline", trace)
        assert code == 2 and "no_such_module" not in text
    (tmp_path / "profile.jsonl").write_text("mine")
    code, text = run("profile", "--processes", "1", "--quick", "--fresh", "--out", str(tmp_path / "profile.toml"))
    assert code == 2 and (tmp_path / "profile.jsonl").read_text() == "mine"


def test_a_trainer_names_no_option_that_it_has_not(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    config = TrainerConfig(auto_parallel=False, steps=1, checkpoint_directory=str(tmp_path))
    with pytest.raises(OutputError, match="another checkpoint_directory") as refused:
        Trainer(nn.Linear(2, 2), config, [{"input": torch.ones(2, 2)}]).fit()
    assert "force" not in str(refused.value)
    assert (tmp_path / "config.yaml").read_text() == "mine: 1\n"
