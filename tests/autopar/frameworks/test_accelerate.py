"""A loop with Accelerate around a program on four processes has the losses of one; what it cannot honour it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup  # noqa: E402

from autopar.errors import AutoparError, ModelError  # noqa: E402
from autopar.frameworks.accelerate import parallelize  # noqa: E402
from autopar.launch import run_ranks  # noqa: E402

RANKS, STEPS, LENGTH, WORDS = 4, 8, 16, 64
CONFIG = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
)


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    rows = []
    for number in range(count):
        ids = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(number))
        rows.append({"input_ids": ids, "labels": torch.where(torch.arange(LENGTH) < number % 9, -100, ids)})
    return rows


def fresh(**named: Any) -> Any:
    AcceleratorState._reset_state(reset_partial_state=True)  # what another test, or the parent, has left
    return accelerate.Accelerator(cpu=True, **named)


def script(adapt: Callable[[Any], Any]) -> dict[str, Any]:
    accelerator = adapt(fresh())
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(CONFIG)
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1}]
    groups += [{"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}]
    optimizer: Any = torch.optim.AdamW(groups, lr=1e-2)
    scheduler: Any = get_cosine_schedule_with_warmup(optimizer, 2, STEPS)
    loader: Any = torch.utils.data.DataLoader(samples(40), batch_size=8, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    numbers: list[float] = []
    while len(numbers) < 3 * STEPS:
        for batch in loader:  # the second epoch is shuffled anew
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            numbers += [loss.item(), norm.item(), scheduler.get_last_lr()[0]]
            if len(numbers) == 3 * STEPS:
                break
    model.eval()
    with torch.no_grad():
        numbers.append(accelerator.gather_for_metrics(model(**batch).loss).item())
    weights = accelerator.unwrap_model(model).state_dict()
    return {"numbers": numbers, "weights": {name: value.numpy().copy() for name, value in weights.items()}}


def rank() -> dict[str, Any] | None:
    me = dist.get_rank()
    os.environ |= {"RANK": str(me), "LOCAL_RANK": str(me), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    torch.manual_seed(me)  # ranks that would shuffle otherwise
    result = script(lambda accelerator: parallelize(accelerator, f"{RANKS} cpu", constraints={"tp": 2, "dp": 2}))
    return result if me == 0 else None


@pytest.mark.slow
@pytest.mark.distributed
def test_losses_norms_rates_and_weights_are_those_of_one_process() -> None:
    ours = run_ranks(rank, (), RANKS)[0]
    theirs = script(lambda accelerator: accelerator)
    assert ours["numbers"] == pytest.approx(theirs["numbers"], rel=1e-5)
    for name, value in theirs["weights"].items():
        np.testing.assert_allclose(ours["weights"][name], value, rtol=1e-3, atol=1e-4)


class OwnLoss(nn.Module):
    """A model that returns the bare loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.linear(x), y)


def prepared(**named: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    accelerator = parallelize(fresh(**named), "1 cpu")
    model = OwnLoss()
    loader: Any = torch.utils.data.DataLoader([{"x": torch.ones(4), "y": torch.zeros(4)}] * 4, batch_size=2)  # type: ignore[arg-type]
    objects = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loader)
    return accelerator, *objects, next(iter(objects[2]))


def test_what_a_script_does_to_gradients_by_hand_is_refused() -> None:
    accelerator, model, optimizer, _, batch = prepared()
    with pytest.raises(RuntimeError, match="without backward"):
        optimizer.step()
    loss = model(**batch)
    with pytest.raises(RuntimeError, match="multiplied by 0.5"):
        accelerator.backward(loss / 2)
    other = model(**batch)  # of the first call no gradients are wanted any more
    with pytest.raises(RuntimeError, match="gradients were gone"):
        accelerator.backward(loss)
    optimizer.zero_grad()  # drops nothing before the backward
    accelerator.backward(other)
    with pytest.raises(RuntimeError, match="called again before the update"):
        model(**batch)
    optimizer.step()
    loss = model(**batch)
    with pytest.raises(RuntimeError, match="zero_grad\\(\\) was not called"):
        accelerator.backward(loss)
    model.zero_grad()
    penalty = sum(parameter.square().sum() for parameter in model.module.parameters())
    accelerator.backward(loss + penalty)
    with pytest.raises(RuntimeError, match="gradients of another loss"):
        optimizer.step()
    for refused in (
        lambda: accelerator.clip_grad_value_(model.parameters(), 1.0),
        lambda: accelerator.clip_grad_norm_(list(model.parameters())[:1], 1.0),
        lambda: optimizer.state_dict(),
        lambda: optimizer.add_param_group({"params": []}),
        lambda: accelerator.prepare(nn.Linear(2, 2)),
    ):
        with pytest.raises(AutoparError):
            refused()


def test_values_that_a_script_writes_reach_the_program() -> None:
    accelerator, model, optimizer, _, batch = prepared()
    first = model(**batch)
    accelerator.backward(first)
    optimizer.zero_grad()  # dropped, as on one process
    with torch.no_grad():
        for parameter in accelerator.unwrap_model(model).parameters():
            parameter.zero_()
    assert model(**batch).item() == 0.0 < first.item()


def test_what_a_script_does_to_parameters_by_hand_is_seen_or_refused() -> None:
    accelerator, model, optimizer, _, batch = prepared()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in model.module.parameters())
    with pytest.raises(RuntimeError, match="accelerator.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match="unwrap_model"):
        next(model.parameters()).data.mul_(0.5)
    accelerator.backward(model(**batch))
    optimizer.step()
    optimizer.zero_grad()
    for parameter in accelerator.unwrap_model(model).parameters():
        parameter.data.zero_()  # which torch's counters do not see
    assert model(**batch).item() == 0.0
    for parameter in accelerator.unwrap_model(model).parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ModelError, match="no parameter is left to train"):
        model(**batch)


@pytest.mark.parametrize("named", [{"gradient_accumulation_steps": 2}, {"mixed_precision": "bf16"}])
def test_what_an_accelerator_does_itself_is_refused(named: dict[str, Any]) -> None:
    with pytest.raises(AutoparError, match=next(iter(named))):
        parallelize(fresh(**named), "1 cpu")


def test_an_optimiser_of_other_parameters_is_refused() -> None:
    accelerator, model = parallelize(fresh(), "1 cpu"), OwnLoss()
    loader: Any = torch.utils.data.DataLoader([{"x": torch.ones(4), "y": torch.zeros(4)}] * 4, batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(AutoparError, match="not the model's"):
        accelerator.prepare(model, torch.optim.SGD(OwnLoss().parameters()), loader)
    with pytest.raises(AutoparError, match="one model, its optimizer"):
        accelerator.prepare(model)


def test_a_loss_is_gathered_also_after_a_last_batch_of_fewer_rows() -> None:
    accelerator, model, *_ = prepared()
    rows = [{"x": torch.full((4,), float(number)), "y": torch.zeros(4)} for number in range(3)]
    loader = accelerator.prepare(torch.utils.data.DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    model.eval()
    with torch.no_grad():
        gathered = [accelerator.gather_for_metrics((model(**batch), batch["x"])) for batch in loader]
    module = accelerator.unwrap_model(model)
    expected = [
        module(torch.stack([row["x"] for row in part]), torch.zeros(len(part), 4)) for part in (rows[:2], rows[2:])
    ]
    assert [loss.item() for loss, _ in gathered] == pytest.approx([loss.item() for loss in expected], rel=1e-6)
    assert [len(x) for _, x in gathered] == [2, 1]


STATE_BATCHES = [
    {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(n)), "y": torch.ones(4, 4)} for n in range(6)
]


def momentum_run(adapt: Callable[[Any], Any], folder: str, *, begin: int, end: int) -> list[float]:
    """The losses of steps from `begin`, which reads what it goes on from, to `end`, which writes; then the weights."""
    accelerator = adapt(fresh())
    torch.manual_seed(begin)  # other values than those that are read
    model: Any = OwnLoss()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loader: Any = torch.utils.data.DataLoader(STATE_BATCHES, batch_size=None)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if begin:
        accelerator.load_state(folder)
    numbers = []
    for batch in STATE_BATCHES[begin:end]:
        loss = model(**batch)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        numbers += [loss.item(), scheduler.get_last_lr()[0]]
    accelerator.save_state(folder)
    accelerator.end_training()  # after which scripts save their model
    accelerator.wait_for_everyone()
    return [*numbers, *accelerator.unwrap_model(model).linear.weight.flatten().tolist()]


def saving_rank(folder: str) -> list[float]:
    me = dist.get_rank()
    os.environ |= {"RANK": str(me), "LOCAL_RANK": str(me), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    return momentum_run(lambda accelerator: parallelize(accelerator, "2 cpu"), folder, begin=0, end=3)


@pytest.mark.distributed
def test_a_saved_state_is_gone_on_from_on_another_number_of_ranks(tmp_path: Any) -> None:
    run_ranks(saving_rank, (str(tmp_path / "ours"),), 2)
    ours = momentum_run(lambda a: parallelize(a, "1 cpu"), str(tmp_path / "ours"), begin=3, end=6)
    momentum_run(lambda a: a, str(tmp_path / "theirs"), begin=0, end=3)
    theirs = momentum_run(lambda a: a, str(tmp_path / "theirs"), begin=3, end=6)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_a_state_that_one_process_saved_without_a_program_is_refused(tmp_path: Any) -> None:
    momentum_run(lambda a: a, str(tmp_path), begin=0, end=1)
    with pytest.raises(AutoparError, match="no state of a program"):
        momentum_run(lambda a: parallelize(a, "1 cpu"), str(tmp_path), begin=1, end=2)


def triggered_rank() -> list[bool]:
    me = dist.get_rank()
    os.environ |= {"RANK": str(me), "LOCAL_RANK": str(me), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    accelerator = parallelize(fresh(), "2 cpu")
    answers = [accelerator.check_trigger()]
    if me == 0:
        accelerator.set_trigger()
    return [*answers, accelerator.check_trigger(), accelerator.check_trigger()]


@pytest.mark.distributed
def test_a_trigger_that_one_rank_sets_is_seen_by_all() -> None:
    assert run_ranks(triggered_rank, (), 2) == [[False, True, False]] * 2
