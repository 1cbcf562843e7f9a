"""A checkpoint is data: it runs nothing, damage in it is noticed, and only its own model continues from it."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import resource
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import CheckpointError, ConstraintError, OutputError
from autopar.trainer import Trainer
from autopar.training import checkpoints
from autopar.training.checkpoints import DamagedCheckpoint
from autopar.training.config import TrainerConfig
from codegen.runtime import checkpoint as runtime_checkpoint
from codegen.runtime import checkpoint_files as files
from codegen.runtime.mesh import Mesh
from tests.codegen.runtime.mlp_program import whole_state
from tests.codegen.runtime.test_checkpoint import make_step

PROGRESS = {"step": 3, "num_samples": 24, "seed": 7}
CONFIG = TrainerConfig(auto_parallel=False, steps=2, log_every=0, learning_rate=0.1)


class Net(nn.Module):
    """With a buffer of every kind, a parameter that takes no part, and complex numbers."""

    def __init__(self, width: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rates", torch.polar(torch.ones(3), torch.arange(3.0)), persistent=False)
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def trained(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], **options)
    for seed in range(2):
        optimizer.zero_grad()
        net(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))).backward()
        optimizer.step()
    return optimizer


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    net = Net()
    net.count.fill_(5)
    optimizer = trained(net)
    for step in (1, 2):
        checkpoints.write(tmp_path, step, lambda f: checkpoints.save_plain(net, optimizer, PROGRESS, f), True, nothing)
    return tmp_path


def nothing() -> None:
    """No other rank to wait for."""


def load(folder: Path, net: nn.Module | None = None) -> Callable[[Path], None]:
    net = net or Net()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    return lambda path: None if checkpoints.load_plain(net, optimizer, path) else None


def test_everything_comes_back_to_the_bit(tmp_path: Path) -> None:
    net = Net()
    optimizer = trained(net)
    net.count.fill_(5)
    net.rates.mul_(2j)
    checkpoints.save_plain(net, optimizer, PROGRESS, tmp_path / "c")
    other = Net()
    again = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad])
    assert checkpoints.load_plain(other, again, tmp_path / "c") == PROGRESS
    for (name, value), (_, expected) in zip(other.named_parameters(), net.named_parameters(), strict=True):
        assert torch.equal(value, expected), name
        for key, state in optimizer.state.get(expected, {}).items():
            assert torch.equal(again.state[value][key], state)
    assert torch.equal(other.rates, net.rates) and other.count == 5
    # What is read needs no pickle: every file is safetensors or JSON.
    assert {path.suffix for path in (tmp_path / "c").iterdir()} == {".safetensors", ".json"}


class Runs:
    """Executes when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def truncate(path: Path, marker: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path, marker: Path) -> None:
    path.write_bytes(b"")


def missing(path: Path, marker: Path) -> None:
    path.unlink()


def pickled(path: Path, marker: Path) -> None:
    path.write_bytes(pickle.dumps(Runs(marker)))


def old_format(path: Path, marker: Path) -> None:
    (path.parent / ".metadata").write_bytes(pickle.dumps(Runs(marker)))


@pytest.mark.parametrize("name", [files.MANIFEST, "rank00000-00000.safetensors"])
@pytest.mark.parametrize("damage", [truncate, empty, missing, pickled])
def test_a_damaged_checkpoint_is_passed_over(damage: Any, name: str, saved: Path, tmp_path: Path) -> None:
    damage(saved / "step-00000002" / name, tmp_path / "executed")
    net = Net()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(DamagedCheckpoint):
        load(saved, net)(saved / "step-00000002")
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items()), "changed before it failed"
    with pytest.warns(UserWarning, match="passed over a damaged checkpoint"):
        assert checkpoints.resume(saved, load(saved)) == saved / "step-00000001"
    assert (saved / "step-00000002.damaged").is_dir()
    assert not (tmp_path / "executed").exists()


def test_every_flipped_bit_is_noticed(saved: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in (files.MANIFEST, "rank00000-00000.safetensors"):
        path = saved / "step-00000002" / name
        whole = path.read_bytes()
        for _ in range(40):
            data = bytearray(whole)
            bit = int(torch.randint(8 * len(data), (), generator=generator))
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            with pytest.raises(DamagedCheckpoint):
                load(saved)(saved / "step-00000002")
        path.write_bytes(whole)
    load(saved)(saved / "step-00000002")


def test_all_damaged_is_an_error_and_none_is_not(saved: Path, tmp_path: Path) -> None:
    for step in ("step-00000001", "step-00000002"):
        truncate(saved / step / "rank00000-00000.safetensors", tmp_path)
    for _ in range(2):  # at every start
        with warnings.catch_warnings(), pytest.raises(CheckpointError, match="every checkpoint of .* is damaged"):
            warnings.simplefilter("ignore")
            checkpoints.resume(saved, load(saved))
    (tmp_path / "new" / "step-00000009").mkdir(parents=True)
    with pytest.warns(UserWarning, match="has no manifest"):
        assert checkpoints.resume(tmp_path / "new", load(saved)) is None


def test_the_older_format_is_refused_and_not_run(saved: Path, tmp_path: Path) -> None:
    old_format(saved / "step-00000002" / files.MANIFEST, tmp_path / "executed")
    with pytest.raises(CheckpointError, match="an older autopar wrote"):
        checkpoints.resume(saved, load(saved))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("net", "text"),
    [
        (Net(depth=1), r"it has, and the model has not, layers.1.bias, layers.1.weight"),
        (Net(depth=3), r"it lacks layers.2.bias, layers.2.weight"),
        (Net(width=5), r"layers.0.bias has shape \(4,\) in the checkpoint, \(5,\) in the program"),
    ],
)
def test_another_models_checkpoint_is_refused(net: nn.Module, text: str, saved: Path) -> None:
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(CheckpointError, match=text):
        checkpoints.resume(saved, load(saved, net))
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_another_optimisers_checkpoint_is_refused(saved: Path) -> None:
    net = Net()
    with pytest.raises(CheckpointError, match="the checkpoint is AdamW's, and the optimizer is SGD"):
        checkpoints.load_plain(net, torch.optim.SGD(net.parameters(), 0.1), saved / "step-00000002")


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


@pytest.mark.parametrize(("depth", "optimizer", "text"), [(3, adamw, "of another model"), (2, sgd, "is AdamW's")])
def test_another_checkpoint_is_refused_before_planning(
    depth: int, optimizer: Any, text: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_anyway(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("planned before the checkpoint was looked at")

    monkeypatch.setattr("autopar.training.loop.compile_with", compile_anyway)
    config = replace(CONFIG, auto_parallel=True, cluster="2 cpu", checkpoint_directory=str(saved))
    batches = [{"x": torch.ones(8, 4)}]
    with pytest.raises(CheckpointError, match=text):
        Trainer(Net(depth=depth), config, batches, optimizer=optimizer).compile()
    with pytest.raises(AssertionError):
        Trainer(Net(), config, batches, optimizer=adamw).compile()


def test_as_many_are_kept_as_asked_for(tmp_path: Path) -> None:
    config = replace(CONFIG, checkpoint_directory=str(tmp_path), checkpoint_every=1, steps=5, keep_checkpoints=3)
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match="passed over"):
        Trainer(Net(), config, [{"x": torch.ones(8, 4)}]).fit()
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-00000001.replaced", "step-00000003", "step-00000004", "step-00000005"]
    assert (tmp_path / "step-00000001.replaced" / "notes.txt").exists()
    with pytest.raises(ConstraintError, match="keep_checkpoints is a whole number of at least 2"):
        replace(CONFIG, keep_checkpoints=1)


def test_a_full_disk_keeps_the_last_good_one(saved: Path, monkeypatch) -> None:
    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(files, "write_synced", full)
    net = Net()
    with pytest.raises(CheckpointError, match="No space left on device"):
        save = lambda folder: checkpoints.save_plain(net, trained(net), PROGRESS, folder)  # noqa: E731
        checkpoints.write(saved, 3, save, True, nothing)
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000001", "step-00000002"]
    load(saved)(saved / "step-00000002")


def test_a_ranks_full_disk_is_named_and_left_as_it_was(tmp_path: Path) -> None:
    step = make_step(Mesh.create((), ()), 3)
    step.load(whole_state())
    save = lambda folder: runtime_checkpoint.save(step, folder)  # noqa: E731
    checkpoints.write(tmp_path, 1, save, True, nothing)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # python has its signal ignored
    try:
        with pytest.raises(CheckpointError, match=r"file system refuses: .*safetensors: File too large") as caught:
            checkpoints.write(tmp_path, 2, save, True, nothing)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "another model" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_a_killed_run_had_begun_is_removed_by_the_next(tmp_path: Path) -> None:
    begun = [tmp_path / name for name in (".step-00000003.partial", "..step-00000007.partial.partial")]
    kept = [tmp_path / name for name in ("step-00000003.replaced", ".step-3.partial.mine", "step-00000004.partial")]
    for folder in (*begun, *kept):
        folder.mkdir()
        (folder / "rank00000-00000.safetensors").write_text("half")
    with checkpoints.locked(tmp_path):
        assert not any(folder.exists() for folder in begun)
    assert all(folder.exists() for folder in kept)


def holds_the_lock(directory: Path, pipe: Any) -> None:
    with checkpoints.locked(directory):
        pipe.send("held")
        pipe.recv()


def test_two_trainers_do_not_share_a_folder(tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=holds_the_lock, args=(tmp_path, there))
    other.start()
    try:
        assert here.recv() == "held"
        with pytest.raises(CheckpointError, match=rf"another trainer[^$]*process {other.pid} on "):
            Trainer(Net(), replace(CONFIG, checkpoint_directory=str(tmp_path)), [{"x": torch.ones(8, 4)}]).fit()
    finally:
        other.kill()
        other.join()
    with checkpoints.locked(tmp_path):
        pass


class Odd(torch.optim.SGD):
    """Keeps what is no tensor."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = ["text"]


def test_what_cannot_be_saved_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    batches = [{"x": torch.ones(8, 4)}]
    config = replace(CONFIG, steps=50, checkpoint_directory=str(tmp_path / "file" / "run"))
    with pytest.raises(OutputError, match="is not a folder"):
        Trainer(Net(), config, batches).fit()
    seen = []

    def counted(start: int) -> Any:
        while True:
            seen.append(start)
            yield batches[0]

    config = replace(config, checkpoint_directory=str(tmp_path / "run"))
    with pytest.raises(CheckpointError, match="the optimizer's state cannot be saved") as caught:
        Trainer(Net(), config, counted, optimizer=lambda params: Odd(params, 0.1)).fit()
    assert caught.value.alternatives == ["another optimizer", "no checkpoint_directory"]
    assert len(seen) <= 3
