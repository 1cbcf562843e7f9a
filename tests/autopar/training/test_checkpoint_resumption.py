"""Resume with other settings: rates, seeds and optimizers that keep state of their own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import CheckpointError
from autopar.trainer import Trainer
from autopar.training import checkpoints
from codegen.runtime.optimizers import settings_of
from codegen.runtime.reference import SameDropout
from tests.autopar.training.test_checkpoints import CONFIG, PROGRESS, Net, adamw, trained


class Slow(torch.optim.Optimizer):
    """Around another optimiser, as libraries write Lookahead (Zhang et al. 2019). is_one: with one state for both."""

    def __init__(self, inner: torch.optim.Optimizer, is_one: bool) -> None:
        self.inner, self.param_groups, self.defaults = inner, inner.param_groups, inner.defaults
        self.state = inner.state if is_one else {}

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("auto_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_state_of_an_inner_optimiser_is_not_lost(auto_parallel: bool, tmp_path: Path) -> None:
    def fit(is_one: bool, steps: int, folder: str) -> torch.Tensor:
        torch.manual_seed(0)
        net, config = Net(), replace(CONFIG, auto_parallel=auto_parallel, cluster="1 cpu", steps=steps)
        batches = [{"x": torch.ones(8, 4)}]
        config = replace(config, checkpoint_directory=str(tmp_path / folder))
        Trainer(net, config, batches, optimizer=lambda params: Slow(adamw(params), is_one)).fit()
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    with pytest.raises(CheckpointError, match="Slow keeps something .* around inner, a AdamW"):
        fit(False, 2, "two")
    assert not list((tmp_path / "two").glob("step-*"))
    straight = fit(True, 4, "straight")
    fit(True, 2, "resumed")
    torch.testing.assert_close(fit(True, 4, "resumed"), straight)


class Counting(torch.optim.SGD):
    """A rate that falls with the steps, which are counted in an attribute, or in the groups."""

    def __init__(self, params: Any, in_groups: bool) -> None:
        super().__init__(params, lr=0.1)
        self.num_steps, self.in_groups = 0, in_groups
        for group in self.param_groups:
            group["num_steps"] = 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            group["num_steps"] += self.in_groups
            group["lr"] = 0.1 / (1 + (group["num_steps"] if self.in_groups else self.num_steps))
        super().step()


@pytest.mark.parametrize("auto_parallel", [False, True])
def test_what_an_optimiser_keeps_for_itself_is_refused(auto_parallel: bool, tmp_path: Path) -> None:
    config = replace(CONFIG, auto_parallel=auto_parallel, cluster="1 cpu", steps=1)
    for in_groups in (False, True):
        again = replace(config, checkpoint_directory=str(tmp_path / str(in_groups)))
        trainer = Trainer(Net(), again, [{"x": torch.ones(8, 4)}], optimizer=partial(Counting, in_groups=in_groups))
        refused = pytest.raises(CheckpointError, match="Counting keeps something that its steps depend on")
        with contextlib.nullcontext() if in_groups else refused as caught:
            trainer.fit()
        assert in_groups or caught.value.alternatives == ["another optimizer", "no checkpoint_directory"]
    assert [path.parent.name for path in tmp_path.glob("*/step-*")] == ["True"]


def test_new_settings_win_and_schedules_continue(tmp_path: Path) -> None:
    net = Net()
    optimizer = trained(net, lr=0.1, weight_decay=0.3)
    settings = settings_of(optimizer)
    optimizer.param_groups[0]["lr"] = 0.05  # as a schedule does
    checkpoints.save_plain(net, optimizer, PROGRESS, tmp_path / "c", settings)
    for lr, decay, expected in ((0.1, 0.3, (0.05, 0.3)), (0.2, 0.3, (0.2, 0.3)), (0.1, 0.0, (0.05, 0.0))):
        again = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=lr, weight_decay=decay)
        checkpoints.load_plain(net, again, tmp_path / "c")
        group = again.param_groups[0]
        assert (group["lr"], group["weight_decay"]) == expected
        assert group["betas"] == (0.9, 0.999)


def plain_losses(net: nn.Module, rates: Sequence[float], seeds: Sequence[int]) -> list[float]:
    """Of a plain loop with AdamW: one for every rate, and seed of its dropout masks."""
    reference = copy.deepcopy(net)
    optimizer = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], 0.1, weight_decay=0.01)
    losses = []
    for step, (rate, seed) in enumerate(zip(rates, seeds, strict=True)):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        with SameDropout(seed, step):
            loss = reference(**BATCH)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


BATCH = {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(1))}


def test_a_new_learning_rate_counts_when_training_is_resumed(tmp_path: Path) -> None:
    """Equal to a plain loop that changes the rate after two steps."""
    torch.manual_seed(0)
    net = Net()
    losses = plain_losses(net, (0.1, 0.1, 0.01, 0.01), (0,) * 4)
    config = replace(CONFIG, checkpoint_directory=str(tmp_path))
    first = Trainer(copy.deepcopy(net), config, [BATCH]).fit().losses
    rest = Trainer(copy.deepcopy(net), replace(config, steps=4, learning_rate=0.01), [BATCH]).fit().losses
    assert (*first, *rest) == pytest.approx(losses, rel=1e-5)


class Dropping(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x).tanh(), 0.5)
        return x.square().mean()


@pytest.mark.parametrize("auto_parallel", [False, True])
def test_a_new_seed_counts_when_training_is_resumed(auto_parallel: bool, tmp_path: Path) -> None:
    """Equal to a plain loop whose dropout masks are of the new seed after two steps."""
    torch.manual_seed(0)
    net = Dropping()
    losses = plain_losses(net, (0.1,) * 4, (3, 3, 4, 4))
    config = replace(CONFIG, auto_parallel=auto_parallel, cluster="1 cpu", checkpoint_directory=str(tmp_path))
    first = Trainer(copy.deepcopy(net), replace(config, seed=3), [BATCH]).fit().losses
    rest = Trainer(copy.deepcopy(net), replace(config, seed=4, steps=4), [BATCH]).fit().losses
    assert (*first, *rest) == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("is_parallel", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_run_resumed_where_its_schedule_is_at_the_first_rate_goes_on_with_it(
    is_parallel: bool, tmp_path: Path
) -> None:
    """A schedule sets the rate of step 0 when it is made; after a warmup the saved rate is that of the optimiser."""
    torch.manual_seed(0)
    net = Net()
    losses = plain_losses(net, (0.0, 0.05, 0.1, 0.1, 0.1), (0,) * 5)
    wanted = {"schedule": {"name": "constant", "warmup_steps": 2}, "auto_parallel": is_parallel}
    config = replace(CONFIG, checkpoint_directory=str(tmp_path), **wanted)
    resumed: list[float] = []
    for steps in (2, 3, 5):
        resumed += Trainer(copy.deepcopy(net), replace(config, steps=steps), [BATCH]).fit().losses
    assert resumed == pytest.approx(losses, rel=1e-5)
