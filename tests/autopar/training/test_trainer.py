"""Training through `Trainer`, against a plain torch loop; resumption after a rank was killed; checkpoints; memory."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.costs.live_bytes import LiveBytes
from autopar.errors import CheckpointError, ConstraintError, WorldSizeError
from autopar.launch import RankError, run_ranks
from autopar.trainer import Trainer
from autopar.training import checkpoints, loop
from autopar.training.config import TrainerConfig
from autopar.training.feeding import batches_from
from autopar.training.result import TrainResult
from examples.models import Example, gpt2
from tests import forked

CONFIG = TrainerConfig(cluster="2 cpu", steps=6, learning_rate=1e-2, max_grad_norm=1.0, log_every=0)
VOCABULARY = 96


def batch_of(sample: int) -> dict[str, Tensor]:
    tokens = torch.randint(VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(sample))
    return {"input_ids": tokens, "labels": tokens.clone()}


def batches(start: int) -> Iterator[dict[str, Tensor]]:
    while True:
        yield batch_of(start)
        start += 8


@dataclass(frozen=True)
class DiesOnce:
    """Batches whose rank 1 is killed when it asks for the batch at `sample`, unless `marker` says it has been."""

    sample: int
    marker: Path

    def __call__(self, start: int) -> Iterator[dict[str, Tensor]]:
        while True:
            is_victim = dist.is_initialized() and dist.get_rank() == 1
            if start == self.sample and is_victim and not self.marker.exists():
                self.marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch_of(start)
            start += 8


def reference_losses(example: Example, steps: int) -> list[float]:
    """Of a training loop as anyone would write it."""
    losses: list[float] = []
    reference_model(example, steps, losses)
    return losses


def reference_model(example: Example, steps: int, losses: list[float], factory: Any = None) -> torch.nn.Module:
    """The same loop's model; the losses are added to the list. factory: AdamW by default."""
    model = copy.deepcopy(example.model)
    adamw = functools.partial(torch.optim.AdamW, lr=CONFIG.learning_rate, weight_decay=CONFIG.weight_decay)
    optimizer = (factory or adamw)(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch_of(8 * step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return model


def fit(example: Example, config: TrainerConfig, source: Any = batches) -> TrainResult:
    return Trainer(copy.deepcopy(example.model), config, source, example.loss_fn).fit()


@pytest.mark.distributed
@pytest.mark.parametrize("constraints", [{"dp": 2, "zero": 3}, pytest.param({"tp": 2}, marks=pytest.mark.slow)])
def test_losses_are_those_of_a_plain_loop(constraints: dict[str, int]) -> None:
    example = gpt2()
    result = fit(example, replace(CONFIG, constraints=constraints, measure_memory=True))
    assert result.losses == pytest.approx(reference_losses(example, 6), rel=1e-4)
    assert result.num_samples == 48 and result.first_step == 0 and result.step_seconds > 0
    assert result.program is not None and len(result.peak_bytes) == 2
    parameters = sum(p.numel() for p in example.model.parameters()) * 4
    # Weights, gradients and two moments, of which ZeRO-3 keeps half on each rank, and activations besides.
    assert all(peak > (2 if "zero" in constraints else 1) * parameters for peak in result.peak_bytes)


def test_plain_training_is_a_plain_loop() -> None:
    example = gpt2()
    assert fit(example, replace(CONFIG, auto_parallel=False)).losses == pytest.approx(
        reference_losses(example, 6), rel=1e-6
    )


@pytest.mark.distributed
def test_killed_run_resumes_as_if_nothing_had_happened(tmp_path: Path) -> None:
    example = gpt2(dropout=0.1)
    pinned = replace(CONFIG, constraints={"dp": 2, "zero": 3})
    whole = fit(example, pinned).losses
    config = replace(pinned, checkpoint_directory=str(tmp_path / "run"), checkpoint_every=2)
    source = DiesOnce(8 * 5, tmp_path / "died")
    with pytest.raises(RankError):
        fit(example, config, source)
    assert checkpoints.latest(tmp_path / "run") == tmp_path / "run" / "step-00000004"
    resumed = fit(example, config, source)
    assert resumed.first_step == 4 and resumed.num_samples == 48
    assert resumed.losses == whole[4:]
    assert resumed.checkpoint == tmp_path / "run" / "step-00000006"


@pytest.mark.distributed
def test_checkpoints_move_between_one_process_and_many(tmp_path: Path) -> None:
    example = gpt2()
    expected = reference_losses(example, 6)
    shared = replace(CONFIG, checkpoint_directory=str(tmp_path))
    plain = replace(shared, auto_parallel=False)
    fit(example, replace(plain, steps=2))
    spread = fit(example, replace(shared, steps=4, constraints={"dp": 2, "zero": 2}))
    back = fit(example, plain)
    assert (spread.first_step, back.first_step) == (2, 4)
    assert (*spread.losses, *back.losses) == pytest.approx(expected[2:], rel=1e-4)


def fit_under_launcher(cluster: str) -> TrainResult:
    result = Trainer(gpt2().model, replace(CONFIG, cluster=cluster, steps=3, measure_memory=True), batches).fit()
    return replace(result, program=None)


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_of_a_launcher_train_together() -> None:
    first, second = run_ranks(fit_under_launcher, ("2 cpu",), 2)
    assert first.losses == second.losses == pytest.approx(reference_losses(gpt2(), 3), rel=1e-4)
    assert first.peak_bytes == second.peak_bytes and len(first.peak_bytes) == 2


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Unlike Adam it leaves what has no gradient but round-off (biases of keys) where it is."""
    return torch.optim.SGD(parameters, 0.5, momentum=0.9)


def trained_under_launcher(constraints: dict[str, int]) -> dict[str, Any]:
    model = gpt2().model
    Trainer(model, replace(CONFIG, constraints=constraints, steps=3), batches, optimizer=sgd).fit()
    return {name: value.detach().clone().numpy() for name, value in model.state_dict().items()}


def require_trained(values: dict[str, Any]) -> None:
    """As three steps of a plain loop leave the model."""
    example = gpt2()
    before = copy.deepcopy(example.model.state_dict())
    expected = reference_model(example, 3, [], sgd).state_dict()
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(torch.from_numpy(values[name]), value, rtol=1e-4, atol=1e-5, msg=name)
    moved = [name for name, value in expected.items() if (value - before[name]).abs().max() > 1e-2]
    assert len(moved) > len(expected) / 2, "values that a model which was not trained would have, too"


@pytest.mark.distributed
@pytest.mark.parametrize(
    "constraints",
    [
        pytest.param({"dp": 2, "zero": 3}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        {"pp": 2},
    ],
)
def test_every_rank_of_a_launcher_has_the_trained_model(constraints: dict[str, int]) -> None:
    for values in run_ranks(trained_under_launcher, (constraints,), 2):
        require_trained(values)


TORCHRUN = """
import os, sys
import torch
from tests.autopar.training.test_trainer import trained_under_launcher
torch.save(trained_under_launcher({"dp": 2, "zero": 3}), sys.argv[1] + os.environ["RANK"])
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_every_rank_of_torchrun_has_the_trained_model(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TORCHRUN)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3]), "OMP_NUM_THREADS": "1"}
    done = forked.run([str(tmp_path / "script.py"), str(tmp_path / "rank")], ranks=2, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(2):
        require_trained(torch.load(tmp_path / f"rank{rank}", weights_only=False))


@pytest.mark.slow
@pytest.mark.distributed
def test_other_number_of_processes_than_planned() -> None:
    with pytest.raises(WorldSizeError, match="the plan is for 4 processes"):
        run_ranks(fit_under_launcher, ("4 cpu",), 2)


@pytest.mark.slow
@pytest.mark.distributed
def test_another_models_checkpoint_is_refused_before_ranks_are_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other layers, of another width, of another optimiser; the right one is trained on, whoever wrote it."""
    config = replace(CONFIG, checkpoint_directory=str(tmp_path / "run"), steps=1)
    fit(gpt2(), replace(config, auto_parallel=False))
    with monkeypatch.context() as patched:
        patched.setattr(loop, "run_ranks", lambda *args: pytest.fail("ranks were started"))
        for other, text in ((gpt2(layers=1), "it has, and the model has not,"), (gpt2(layers=3), "it lacks")):
            with pytest.raises(CheckpointError, match=f"is of another model: {text}"):
                fit(other, config)
        with pytest.raises(CheckpointError, match="has shape .* in the checkpoint, .* in the program"):
            fit(gpt2(width=16), config)
        with pytest.raises(CheckpointError, match="the checkpoint is AdamW's, and the optimizer is SGD"):
            Trainer(gpt2().model, config, batches, optimizer=sgd).fit()
    assert fit(gpt2(), replace(config, steps=2)).first_step == 1
    # One that is damaged is passed over, whosever it is: ranks would not have read it either.
    shutil.copytree(tmp_path / "run" / "step-00000001", tmp_path / "other" / "step-00000001")
    fit(gpt2(layers=1), replace(config, auto_parallel=False, steps=2, checkpoint_directory=str(tmp_path / "one")))
    damaged = shutil.copytree(tmp_path / "one" / "step-00000002", tmp_path / "other" / "step-00000002")
    with (damaged / "rank00000-00000.safetensors").open("ab") as file:
        file.write(b"x")
    again = replace(config, steps=2, checkpoint_directory=str(tmp_path / "other"))
    assert fit(gpt2(), again).first_step == 1


def save_little(folder: Path) -> None:
    model = torch.nn.Linear(2, 2)
    progress = {"step": 1, "num_samples": 1, "seed": 0}
    checkpoints.save_plain(model, torch.optim.SGD(model.parameters()), progress, folder)


def test_only_complete_checkpoints_count_and_two_are_kept(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path / "nothing") is None
    for step in (1, 2, 10):
        checkpoints.write(tmp_path, step, save_little, True, lambda: None)
    (tmp_path / ".step-00000011.partial").mkdir()
    (tmp_path / "step-00000012").mkdir()
    (tmp_path / "step-00000012" / "rank00000-00000.safetensors").touch()
    assert checkpoints.latest(tmp_path) == tmp_path / "step-00000010"
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] != ".") == [
        "step-00000002", "step-00000010", "step-00000012"
    ]  # fmt: skip


def test_failing_save_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    checkpoints.write(tmp_path, 1, save_little, True, lambda: None)

    def half(folder: Path) -> None:
        folder.mkdir()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.write(tmp_path, 2, half, True, lambda: None)
    assert checkpoints.latest(tmp_path) == tmp_path / "step-00000001"


def test_list_of_batches_is_repeated_and_resumed() -> None:
    samples = [{"x": torch.full((2,), i)} for i in range(3)]
    source = batches_from(samples, 2 * 4)
    assert [int(next(source)["x"][0]) for _ in range(4)] == [1, 2, 0, 1]


def test_batches_that_cannot_start_again_are_refused() -> None:
    with pytest.raises(ConstraintError, match="able to start again"):
        Trainer(gpt2().model, CONFIG, iter([]))
    with pytest.raises(ConstraintError, match="there are no batches"):
        next(batches_from([], 0))
    with pytest.raises(ConstraintError, match="number of its first sample"):
        Trainer(gpt2().model, CONFIG, lambda: iter([]))
    with pytest.raises(ConstraintError, match="gives no batches"):
        next(batches_from(lambda start: None, 0))


def test_configuration_files(tmp_path: Path) -> None:
    yaml_file, toml_file = tmp_path / "a.yaml", tmp_path / "a.toml"
    yaml_file.write_text('cluster: "2 cpu"\nsteps: 6\nlearning_rate: 0.01\nmax_grad_norm: 1.0\nlog_every: 0\n')
    toml_file.write_text('cluster = "2 cpu"\nsteps = 6\nlearning_rate = 0.01\nmax_grad_norm = 1.0\nlog_every = 0\n')
    assert TrainerConfig.from_file(yaml_file) == TrainerConfig.from_file(toml_file) == CONFIG
    yaml_file.write_text("step: 6\n")
    with pytest.raises(ConstraintError, match="did you mean 'steps'"):
        TrainerConfig.from_file(yaml_file)
    yaml_file.write_text("steps: [\n")
    with pytest.raises(ConstraintError, match="line 2"):
        TrainerConfig.from_file(yaml_file)
    with pytest.raises(ConstraintError, match="steps is a whole number"):
        TrainerConfig(steps=-1)


def test_live_bytes_follow_storages() -> None:
    weight = torch.randn(1000, requires_grad=True)
    with LiveBytes() as live:
        x = torch.randn(1000)
        assert live.num_bytes == 4000
        y = (x * weight).view(10, 100)
        assert live.num_bytes == 8000  # the view is no storage of its own
        z = y.exp()
        del y
        assert live.num_bytes == 8000  # exp keeps its result, not its input
        loss = z.sum()
        del z
        assert live.num_bytes == 8004  # the graph still holds it
        loss.backward()
        assert live.num_bytes == 8004  # gone, and the gradient is there
        peak = live.peak_bytes
        live.reset_peak()
        assert peak >= 12004 and live.peak_bytes == 8004
