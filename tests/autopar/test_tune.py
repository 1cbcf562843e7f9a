"""`autopar tune`, and the file that programs which are not saved share, with known times in the place of a GPU's."""

from __future__ import annotations

import importlib
import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar import tune as tuning_of_programs
from autopar.cli import app
from autopar.errors import AutoparError
from autopar.launch import RankError, launch_main
from autopar.running.build import share_choices
from autopar.running.folder import TUNING_FILE
from codegen.kernels import tuning
from codegen.kernels.tile import Tile
from codegen.kernels.tuning import Case, Tuner
from codegen.kernels.tuning_file import TuningFile

TILES = Tile(4096), Tile(2048), Tile(1024)
TIMES = {4096: 0.4, 2048: 0.3, 1024: 0.2}
CASE = Case("norm", (), (torch.bfloat16,), (1024, 8192), torch.device("cpu"))


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(tuning.VARIABLE, raising=False)


@pytest.fixture
def has_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def choose_in(path, case=CASE):
    """Run a kernel on a case that it meets for the first time."""
    tuner = Tuner(TuningFile(path), lambda run: TIMES[run.args[0].most], lambda _: "fast device", lambda: False)
    return tuner.choose(case, TILES, lambda tile: None)


@pytest.fixture
def folder(tmp_path):
    """As much of a saved program as is looked at."""
    home = tmp_path / "program"
    (home / "kernels").mkdir(parents=True)
    (home / "main.py").write_text("")
    (home / "plan.yaml").write_text("")
    (home / TUNING_FILE).write_text("{}\n")
    return home


@pytest.fixture
def launched(monkeypatch):
    """The calls of `launch_main`, in which kernels meet CASE in the file that the environment names."""
    calls = []

    def launch(main, arguments, num_ranks):
        calls.append((main, arguments, num_ranks))
        choose_in(tuning.program_file())

    class Plan:
        num_ranks = 2

        @staticmethod
        def from_file(path):
            return Plan()

    monkeypatch.setattr(tuning_of_programs, "launch_main", launch)
    monkeypatch.setattr(tuning_of_programs, "Plan", Plan)
    return calls


def run(*arguments):
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def test_without_a_gpu_there_is_nothing_to_tune(folder, launched, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(folder)
    assert result.exit_code == 0 and "nothing to tune" in result.output and not launched


def test_the_first_steps_fill_the_programs_file(folder, launched, has_gpu, monkeypatch):
    monkeypatch.setenv(tuning.VARIABLE, "off")
    result = run(folder, "--steps", 3)
    assert result.exit_code == 0, result.output
    assert launched == [(folder / "main.py", ["--steps", "3"], 2)]
    assert "norm bfloat16 1024x8192: Tile(most=1024" in result.output
    assert "0.2000 ms (3 candidates, 0.2000 to 0.4000 ms)" in result.output
    assert "1 case tuned, 0 known before" in result.output
    assert choose_in(folder / TUNING_FILE) == Tile(1024)
    assert tuning.program_file() is None, "the variable is not what it was"
    again = run(folder)
    assert "0 cases tuned, 1 known before" in again.output


def test_a_folder_that_is_no_program_is_refused(tmp_path, folder, has_gpu, launched):
    with pytest.raises(AutoparError, match="no saved program"):
        tuning_of_programs.tune(tmp_path)
    (folder / "kernels").rmdir()
    with pytest.raises(AutoparError, match="no kernels"):
        tuning_of_programs.tune(folder)
    assert not launched


def test_what_cannot_be_understood_has_no_choices(tmp_path):
    for text in ("", "[]", '{"device": 3}', '{"device": {"case": {"tile": "x"}}}'):
        (tmp_path / "file").write_text(text)
        assert tuning_of_programs.read_choices(tmp_path / "file") == []


@pytest.mark.slow
def test_main_is_launched_as_by_torchrun(tmp_path):
    main = tmp_path / "main.py"
    main.write_text(
        "import os, sys, pathlib\n"
        "rank = os.environ['RANK']\n"
        "said = ' '.join([os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:]])\n"
        "pathlib.Path(__file__).with_name(rank).write_text(said)\n"
        "sys.exit(7 if 'fail' in sys.argv else 0)\n"
    )
    launch_main(main, ["--steps", "1"], 2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0 2 --steps 1", "1 2 --steps 1"]
    with pytest.raises(RankError, match="rank 0 of"):
        launch_main(main, ["fail"], 1)


# Programs that are not saved ------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "autopar" / TUNING_FILE


def file_of(package, monkeypatch):
    monkeypatch.setattr(tuning, "__file__", str(package / "kernels" / "tuning.py"))
    return tuning.program_file()


def test_programs_share_the_users_file(tmp_path, cache, monkeypatch):
    one_node = autopar.ClusterSpec.parse("8 h100-sxm")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        share_choices(tmp_path / name, one_node)
        assert file_of(tmp_path / name, monkeypatch) == cache
        # A file that is replaced must not take the place of the link.
        assert choose_in(tuning.program_file()) == Tile(1024)
        assert (tmp_path / name / TUNING_FILE).is_symlink()
    assert list(json.loads(cache.read_text())["fast device"]) == [str(CASE)]
    monkeypatch.setenv(tuning.VARIABLE, "off")
    assert tuning.program_file() is None


def test_nodes_and_places_that_cannot_share_keep_the_heuristics(tmp_path, cache, monkeypatch):
    share_choices(tmp_path, autopar.ClusterSpec.parse("2x8 h100-sxm"))
    assert file_of(tmp_path, monkeypatch) is None and not cache.exists()
    cache.parent.parent.mkdir()
    cache.parent.write_text("no folder")
    share_choices(tmp_path, autopar.ClusterSpec.parse("8 h100-sxm"))
    assert file_of(tmp_path, monkeypatch) is None


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(self.norm(x)).square().mean()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_built_program_on_a_gpu_is_tuned_by_default(on_gpu, cache, monkeypatch):
    batch = {"x": torch.randn(4, 64)}
    program = autopar.compile(Normed(), "1 h100-sxm", example_inputs=batch, kernels="on")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    package = program.load_package()
    tuning = importlib.import_module(f"{package.__name__}.kernels.tuning")
    assert tuning.program_file() == (cache if on_gpu else None)
    assert cache.exists() == on_gpu
