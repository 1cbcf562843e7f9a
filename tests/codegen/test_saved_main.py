"""What a saved program's main.py does as a process: checkpoints on the way, ending when told to, what it imports."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import autopar
from autopar.errors import ConstraintError
from autopar.training.config import TrainerConfig
from codegen.runtime import checkpoint_files as files
from codegen.runtime import options
from codegen.runtime.checkpoint_folder import latest
from examples.models import EXAMPLES
from tests import forked

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")},
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": "",
}
"""Nothing of the checkout can be imported."""


def saved(folder: Path, ranks: int, layers: int = 1) -> Path:
    """With dropout, so that the random state has to be resumed as well."""
    example = EXAMPLES["gpt2"](layers=layers, width=16, num_heads=2, batch_size=4, seq_len=8, dropout=0.1)
    constraints = {"dp": ranks, "zero": 2} if ranks > 1 else {}
    return autopar.compile(example.model, f"{ranks} cpu", example_inputs=example.inputs, constraints=constraints).save(
        folder
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("alone") / "program", 1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("pair") / "program", 2)


def command(folder: Path, *words: str, ranks: int = 1) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, str(folder / "main.py"), *words]


def run(folder: Path, *words: str, ranks: int = 1, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return forked.run([str(folder / "main.py"), *words], ranks=ranks, cwd=cwd or folder.parent, env=ENVIRONMENT)


def steps(output: str) -> list[tuple[int, str]]:
    """(step, loss) of every line."""
    return [(int(number), loss) for number, loss in re.findall(r"step (\d+) loss (\S+)", output)]


def train(folder: Path, *words: str, ranks: int = 1) -> list[tuple[int, str]]:
    done = run(folder, *words, ranks=ranks)
    assert done.returncode == 0, done.stderr[-2000:]
    return steps(done.stdout)


def contents(checkpoint: Path) -> dict[str, bytes]:
    """Every file of a checkpoint."""
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


def whole_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """What a checkpoint holds, whichever rank wrote which piece of it."""
    pieces = {path.name: load_file(path) for path in checkpoint.glob("*.safetensors")}
    found = {}
    for name, stored in files.read_manifest(checkpoint).tensors.items():
        found[name] = torch.full(stored.shape, torch.nan).to(stored.dtype)
        for chunk in stored.chunks:
            place = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.shape, strict=True))
            found[name][place] = pieces[chunk.file][chunk.key]
    return found


def assert_same_end(one: Path, other: Path) -> None:
    """The same, up to the rounding of two processes whose memory is aligned otherwise."""
    assert files.read_manifest(one).record == files.read_manifest(other).record
    torch.testing.assert_close(whole_tensors(one), whole_tensors(other), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_checkpoints_on_the_way_continue_to_the_same_end(alone: Path, tmp_path: Path) -> None:
    home = tmp_path / "run"
    words = ("--until", "5", "--checkpoint-every", "2", "--checkpoint", str(home))
    whole = train(alone, *words)
    assert [number for number, _ in whole] == [1, 2, 3, 4, 5]
    # The newest two of those of the steps 2, 4 and, as the last, 5.
    assert sorted(path.name for path in home.glob("step-*")) == ["step-00000004", "step-00000005"]
    assert files.read_manifest(home / "step-00000004").record["progress"]["step"] == 4
    (home / "step-00000005").rename(tmp_path / "expected")
    assert train(alone, *words) == whole[4:], "--until counts the steps before a resumption"
    assert_same_end(home / "step-00000005", tmp_path / "expected")
    assert train(alone, *words) == []
    assert [number for number, _ in train(alone, "--steps", "1", "--checkpoint", str(home))] == [6]


@pytest.mark.slow
def test_a_program_in_fp16_keeps_its_loss_scale(tmp_path: Path) -> None:
    """And has the module of it, which others have not."""
    example = EXAMPLES["gpt2"](layers=1, width=16, num_heads=2, batch_size=4, seq_len=8)
    folder, wide = (
        autopar.compile(example.model, "1 cpu", example_inputs=example.inputs, precision=precision).save(
            tmp_path / precision
        )
        for precision in ("fp16", "fp32")
    )
    words = ("--steps", "3", "--checkpoint", str(tmp_path / "run"))
    losses = [*train(folder, *words), *train(folder, *words)]
    for (step, loss), (other, expected) in zip(losses, train(wide, "--steps", "6"), strict=True):
        assert step == other and abs(float(loss) - float(expected)) < 2e-3
    progress = files.read_manifest(tmp_path / "run" / "step-00000006").record["progress"]
    assert progress["loss_scale"] == {"value": 65536.0, "num_good": 6}
    assert list(folder.rglob("runtime/loss_scale.py")) and not list(wide.rglob("runtime/loss_scale.py"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_in_the_middle_ends_cleanly_and_resumes_equal(
    ranks: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Told to by its launcher, at a moment that only the run's speed decides; the end is that of one that was not."""
    folder = request.getfixturevalue("alone" if ranks == 1 else "pair")
    home = tmp_path / "run"
    words = command(folder, "--until", "1000000000", "--checkpoint", str(home), ranks=ranks)
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        read = ""
        while not steps(read) or steps(read)[-1][0] < 3:
            line = process.stdout.readline()
            assert line, process.stderr.read()[-2000:]
            read += line
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()  # communicate would lose the lines that are in its buffer
        errors = process.stderr.read()
    # torchrun says in its own way, with a traceback of its own, that it was told to end.
    assert process.returncode == (143 if ranks == 1 else 1), errors[-2000:]
    assert "main.py" not in errors, errors[-2000:]
    done = steps(read + rest)
    last = latest(home)
    assert last is not None and last.name == f"step-{len(done):08d}"
    assert [path.name for path in home.iterdir() if path.name != ".in_use"] == [last.name]
    until = str(len(done) + 2)
    resumed = train(folder, "--until", until, "--checkpoint", str(home), ranks=ranks)
    straight = train(folder, "--until", until, "--checkpoint", str(tmp_path / "straight"), ranks=ranks)
    assert done + resumed == straight
    name = f"step-{int(until):08d}"
    assert_same_end(home / name, tmp_path / "straight" / name)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_models_checkpoint_is_one_error(
    ranks: int, request: pytest.FixtureRequest, alone: Path, tmp_path: Path
) -> None:
    other = saved(tmp_path / "other", 1, layers=2)
    train(other, "--steps", "1", "--checkpoint", str(tmp_path / "run"))
    before = contents(tmp_path / "run" / "step-00000001")
    folder = request.getfixturevalue("alone" if ranks == 1 else "pair")
    done = run(folder, "--steps", "1", "--checkpoint", str(tmp_path / "run"), ranks=ranks)
    assert done.returncode != 0 and not steps(done.stdout)
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "the checkpoint is of another model: the program has no " in said[0]
    if ranks == 1:
        assert done.stderr.splitlines() == said
    assert contents(tmp_path / "run" / "step-00000001") == before


ABSURD = (
    ("--steps", "-1"), ("--steps", "1.5"), ("--until", "-3"), ("--lr", "nan"), ("--lr", "inf"), ("--lr", "-0.1"),
    ("--max-grad-norm", "nan"), ("--max-grad-norm", "0"), ("--checkpoint-every", "-1"), ("--checkpoint-every", "2"),
    ("--steps", "2", "--until", "3"), ("--data", "nowhere.txt"), ("--data", "short.txt"),
)  # fmt: skip


@pytest.mark.slow
def test_absurd_options_are_one_error_before_anything_starts(alone: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc")
    for words in ABSURD:
        done = run(alone, *words, cwd=tmp_path)
        *_, last = done.stderr.splitlines()
        assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr, (words, done.stderr)
        assert last.startswith(f"main.py: error: argument {words[-2]}: "), last
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


@pytest.mark.slow
@pytest.mark.distributed
def test_absurd_options_are_said_once(pair: Path) -> None:
    done = run(pair, "--collective-seconds", "1e300", ranks=2)
    said = [line for line in done.stderr.splitlines() if line.startswith("main.py: error")]
    assert said == [
        "main.py: error: argument --collective-seconds: collective_seconds is a finite number above 0 and at most "
        "1e+09, got '1e300'"
    ]
    assert done.returncode and not done.stdout


@pytest.mark.parametrize("name", options.RANGES)
@pytest.mark.parametrize("text", ["nan", "-1", "-inf", "", "one", "1e999", "1.5", "0", "2"])
def test_main_takes_the_numbers_that_the_trainer_takes(name: str, text: str) -> None:
    """The same rule, whether a number comes as text or as a number."""
    allowed = options.RANGES[name]
    try:
        value = int(text) if allowed.is_whole else float(text)
    except ValueError:
        value = None
    if value is None or value not in allowed:
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(f"{name} is {allowed}, got {text!r}")):
            options.number(name)(text)
    else:
        assert options.number(name)(text) == value
    fields = {field.name for field in dataclasses.fields(TrainerConfig)}
    if value is not None and name in fields:
        more = {"checkpoint_directory": "somewhere"} if name == "checkpoint_every" else {}
        with contextlib.nullcontext() if value in allowed else pytest.raises(ConstraintError, match=f"^{name} is "):
            TrainerConfig(**{name: value}, **more)


STRANGERS = ("torch.py", "random.py", "safetensors.py", "argparse.py", "runtime.py", "model.py", "program.py")


@pytest.mark.slow
def test_modules_beside_the_program_are_not_imported(alone: Path, tmp_path: Path) -> None:
    """Neither from the folder that the program lies in nor from the one where it is started."""
    beside, elsewhere = alone.parent, tmp_path
    for folder in (beside, elsewhere):
        for name in STRANGERS:
            text = f"open({str(tmp_path / 'imported')!r}, 'a').write(__name__)\nraise SystemExit('a stranger ran')\n"
            (folder / name).write_text(text)
    try:
        for cwd in (beside, elsewhere):
            done = run(alone, "--steps", "1", cwd=cwd)
            assert done.returncode == 0, done.stderr[-2000:]
            assert len(steps(done.stdout)) == 1
    finally:
        for name in STRANGERS:
            (beside / name).unlink()
    assert not (tmp_path / "imported").exists()
