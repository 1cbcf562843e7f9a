"""The choice of launch parameters and its file, with a clock of known times in the place of a GPU's."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from autopar.running.folder import TUNING_FILE
from codegen.kernels import tuning
from codegen.kernels.tile import Tile
from codegen.kernels.tuning import Case, Tuner
from codegen.kernels.tuning_file import TuningFile

ROOT = Path(__file__).parents[3]
TILES = (Tile(4096), Tile(2048), Tile(1024), Tile(512))
CASE = Case("norm", (("dx", True), ("dw", False)), (torch.bfloat16,), (1024, 8192), torch.device("cpu"))
DEVICE = "fast device"


def milliseconds(tile):
    """The third is fastest."""
    return {4096: 4.0, 2048: 3.0, 1024: 2.0, 512: 5.0}[tile.most]


def tuner(path, times=milliseconds, device=DEVICE, capturing=False):
    """times: of a tile; None where nothing may be timed. The timer sees what is run, and the tile that it runs with."""

    def timer(run):
        assert times is not None, "timed although the choice was known"
        run()
        return times(*run.args)

    return Tuner(TuningFile(path), timer, lambda _: device, lambda: capturing)


def nothing(tile):
    pass


def refuse(tile):
    raise AssertionError("run although the choice was known")


@pytest.mark.parametrize(
    ("num_cols", "fit"),
    [(1, (2048, 1, True, 4)), (100, (16, 128, True, 4)), (4097, (1, 8192, True, 16)), (99999, (1, 16384, False, 32))],
)
def test_tiles_fit_rows(num_cols, fit):
    assert Tile(16384, least=2048).fit(num_cols) == fit


def test_warps_hold_as_many_elements_as_they_should():
    assert [Tile(8192, per_warp=n).fit(8192).num_warps for n in (256, 512, 1024)] == [32, 16, 8]


def test_the_fastest_is_measured_once_and_kept(tmp_path):
    path = tmp_path / TUNING_FILE
    first = tuner(path)
    assert first.choose(CASE, TILES, nothing) == Tile(1024)
    first.timer = None
    assert first.choose(CASE, TILES, refuse) == Tile(1024), "not from memory"
    assert tuner(path, times=None).choose(CASE, TILES, refuse) == Tile(1024), "not from the file"
    entry = json.loads(path.read_text())[DEVICE]["norm dx bfloat16 1024x8192"]
    assert entry["torch"] == torch.__version__ and entry["tile"] == str(Tile(1024))
    assert entry["milliseconds"] == {str(tile): milliseconds(tile) for tile in TILES}
    assert not list(tmp_path.glob(f".{TUNING_FILE}_*")), "a temporary file is left"


def test_medians_decide_and_candidates_take_turns(tmp_path):
    turns = []

    def times(tile):
        turns.append(tile)
        # A hiccup in each of the first rounds; without it the last one is fastest.
        return 99.0 if turns.count(tile) <= tuning.ROUNDS // 2 else {512: 1.0}.get(tile.most, 2.0)

    assert tuner(tmp_path / "file", times).choose(CASE, TILES, nothing) == Tile(512)
    assert turns == [*TILES] * tuning.ROUNDS


@pytest.mark.parametrize(("second", "chosen"), [(0.98, 4096), (0.96, 2048)])
def test_the_heuristic_stays_unless_another_is_clearly_faster(second, chosen, tmp_path):
    times = {4096: 1.0, 2048: second, 1024: 1.1, 512: 1.1}
    found = tuner(tmp_path / "file", lambda tile: times[tile.most]).choose(CASE, TILES, nothing)
    assert found == Tile(chosen)


def test_what_does_not_run_is_left_out(tmp_path):
    triton = pytest.importorskip("triton")
    failures = {1024: triton.runtime.errors.OutOfResources(1, 0, "shared memory"), 4096: RuntimeError("no launch")}

    def run(tile):
        if tile.most in failures:
            raise failures[tile.most]

    path = tmp_path / "file"
    assert tuner(path).choose(CASE, TILES, run) == Tile(2048)
    assert json.loads(path.read_text())[DEVICE][str(CASE)]["milliseconds"][str(Tile(1024))] is None
    with pytest.raises(RuntimeError, match="no launch"):
        tuner(tmp_path / "other").choose(CASE, (Tile(1024), Tile(4096)), run)


def test_an_error_of_ours_is_no_failure_of_a_candidate(tmp_path):
    def wrong(tile):
        raise TypeError("a mistake")

    with pytest.raises(TypeError, match="a mistake"):
        tuner(tmp_path / "file").choose(CASE, TILES, wrong)


def test_candidates_that_launch_alike_are_not_compared(tmp_path):
    short = CASE._replace(shape=(1024, 64))
    assert tuner(tmp_path / "file", times=None).choose(short, TILES, refuse) == TILES[0]
    seen = []
    tuner(tmp_path / "file").choose(CASE._replace(shape=(1024, 1024)), TILES, seen.append)
    assert set(seen) == {Tile(4096), Tile(512)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        b"\xff\xfe",
        '{"fast device": 3}',
        '{"fast device": {"norm dx bfloat16 1024x8192": 1}}',
        '{"fast device": {"norm dx bfloat16 1024x8192": {"tile": "Tile(most=7)"}}}',
    ],
)
def test_what_cannot_be_understood_is_replaced(text, tmp_path):
    """Among it a tile that is no longer a candidate."""
    path = tmp_path / "file"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert tuner(path).choose(CASE, TILES, nothing) == Tile(1024)
    assert tuner(path, times=None).choose(CASE, TILES, refuse) == Tile(1024)


def test_another_device_has_its_own_choice(tmp_path):
    path = tmp_path / "file"
    assert tuner(path).choose(CASE, TILES, nothing) == Tile(1024)
    slow = tuner(path, lambda tile: float(tile.most), device="slow device")
    assert slow.choose(CASE, TILES, nothing) == Tile(512)
    assert tuner(path, times=None).choose(CASE, TILES, refuse) == Tile(1024), "the first device's choice is gone"
    assert set(json.loads(path.read_text())) == {DEVICE, "slow device"}


def test_in_a_captured_graph_what_is_known_or_the_first(tmp_path):
    path = tmp_path / "file"
    captured = tuner(path, times=None, capturing=True)
    assert captured.choose(CASE, TILES, refuse) == TILES[0]
    assert tuner(path).choose(CASE, TILES, nothing) == Tile(1024)
    assert captured.choose(CASE, TILES, refuse) == Tile(1024), "the unmeasured choice was kept"


def test_without_a_place_to_write_the_first(tmp_path):
    """Else ranks could not know what the others launch."""
    found = tuner(tmp_path / "missing" / "file")
    with pytest.warns(UserWarning, match="cannot be written"):
        assert found.choose(CASE, TILES, nothing) == TILES[0]
    found.timer = None
    assert found.choose(CASE, TILES, refuse) == TILES[0]


def test_who_comes_second_takes_what_is_there(tmp_path):
    """Both have measured, and found different tiles, before either wrote."""
    path, both = tmp_path / "file", threading.Barrier(2)
    orders = (4096, 2048, 1024, 512), (512, 1024, 2048, 4096)
    found = []

    def rank(order):
        def times(tile):
            if not waited:
                waited.append(both.wait(900))
            return 1.0 + order.index(tile.most)

        waited = []
        found.append(tuner(path, times).choose(CASE, TILES, nothing))

    threads = [threading.Thread(target=rank, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1] and found[0] in (Tile(4096), Tile(512))


NUM_CASES = 25


def _one_of_many(path, rank, start, results):
    start.wait(900)
    own = tuner(path, lambda tile: 1.0 + (tile.most // 512 + rank) % 5)
    cases = [CASE._replace(kernel=f"kernel_{number}") for number in range(NUM_CASES)]
    results.put(
        [own.choose(case, TILES, nothing).most for case in (cases if rank % 2 else reversed(cases))][
            :: 2 * (rank % 2) - 1
        ]
    )


def test_processes_that_write_at_once_agree(tmp_path):
    """Four of them, in two orders; what each would choose differs."""
    context, path = multiprocessing.get_context("fork"), tmp_path / "file"
    start, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_one_of_many, args=(path, rank, start, results)) for rank in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=900) for _ in processes]
    for process in processes:
        process.join(60)
    assert len(found[0]) == NUM_CASES and all(choices == found[0] for choices in found)
    written = json.loads(path.read_text())[DEVICE]
    assert len(written) == NUM_CASES
    assert sorted(p.name for p in tmp_path.iterdir()) == [".file.lock", "file"]


def test_on_a_cpu_nothing_is_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "file"))
    monkeypatch.setattr(tuning, "program_tuner", lambda: pytest.fail("asked for a tuner"))
    assert tuning.choose("norm", TILES, refuse, (4, 8192), torch.zeros(1)) == TILES[0]
    ran = tuning.launch("norm", TILES, lambda tile: tile, (4, 8192), torch.zeros(1), dx=True)
    assert ran == TILES[0] and not (tmp_path / "file").exists()


class OnDevice:
    """As much of a tensor on a GPU as the choice looks at."""

    device, dtype = torch.device("cuda", 1), torch.float16


def test_problems_of_about_one_size_are_one_case(tmp_path, monkeypatch):
    found = tuner(tmp_path / "file")
    monkeypatch.setattr(tuning, "program_tuner", lambda: found)
    for shape in ((700, 5000), (1024, 8192), (600, 4097)):
        assert tuning.choose("norm", TILES, nothing, shape, OnDevice, dx=True, dw=False) == Tile(1024)
    tuning.choose("norm", TILES, nothing, (1024, 8192), OnDevice, dx=True, dw=True)
    assert [str(case) for case in found.chosen] == ["norm dx float16 1024x8192", "norm dx dw float16 1024x8192"]


def test_off_and_while_compiling_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "program_tuner", lambda: None)
    assert tuning.choose("norm", TILES, refuse, (1024, 8192), OnDevice) == TILES[0]
    monkeypatch.setattr(tuning, "program_tuner", lambda: pytest.fail("asked for a tuner"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert tuning.choose("norm", TILES, refuse, (1024, 8192), OnDevice) == TILES[0]


def test_the_file_is_named_or_the_programs_own(tmp_path, monkeypatch):
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    assert tuning.program_file() is None, "kernels of the checkout belong to no program"
    monkeypatch.setattr(tuning, "__file__", str(tmp_path / "kernels" / "tuning.py"))
    assert tuning.program_file() is None
    (tmp_path / tuning.FILE_NAME).write_text("{}\n")
    assert tuning.program_file() == tmp_path / tuning.FILE_NAME
    monkeypatch.setenv(tuning.VARIABLE, "off")
    assert tuning.program_file() is None
    monkeypatch.setenv(tuning.VARIABLE, "/elsewhere/file")
    assert tuning.program_file() == Path("/elsewhere/file")
    assert tuning.FILE_NAME == TUNING_FILE


IMPORTS = """
import importlib, pkgutil, sys, time
import torch
def refuse(*_, **__):
    raise SystemExit("timed at import")
torch.cuda.Event = torch.cuda._sleep = torch.cuda.synchronize = time.perf_counter = refuse
import codegen.kernels
for found in pkgutil.iter_modules(codegen.kernels.__path__):
    importlib.import_module(f"codegen.kernels.{found.name}")
tuning = sys.modules["codegen.kernels.tuning"]
assert tuning.program_tuner.cache_info().currsize == 0, "a tuner was made at import"
"""


@pytest.mark.slow
def test_nothing_is_timed_at_import(tmp_path):
    environment = {**os.environ, tuning.VARIABLE: str(tmp_path / "file"), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert not (tmp_path / "file").exists()
