"""Losses that need sums over the batch whole, in micro-batches: as one process computes them, and at a price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

import autopar
from autopar.costs.layer_costs import FIRST_PASS, SUMS
from autopar.launch import run_ranks

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")
ROWS, LENGTH, WIDTH, EXPERTS = 8, 5, 8, 4
SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 32,
    "output_router_logits": True, "router_aux_loss_coef": 0.5,
}  # fmt: skip


def mixtral(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=EXPERTS, attention_dropout=dropout))


def qwen() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"num_experts": EXPERTS, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL, **sizes))


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(64, (ROWS, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "ranks", "pins"),
    [
        ("mixtral with dropout", 2, {"dp": 2, "micro_batches": 2}),
        ("mixtral", 2, {"dp": 2, "micro_batches": 4, "zero": 3}),
        ("qwen", 4, {"dp": 2, "tp": 2, "micro_batches": 2}),
        ("qwen", 2, {"ep": 2, "micro_batches": 2}),
        ("mixtral with dropout", 2, {"pp": 2, "micro_batches": 4, "schedule": "zero-bubble"}),
    ],
    ids=str,
)
def test_mixtures_that_balance_their_loads_train_as_one_process_does(
    name: str, ranks: int, pins: dict[str, Any]
) -> None:
    model = qwen() if name == "qwen" else mixtral(0.1 if "dropout" in name else 0.0)
    report = autopar.verify(model, f"{ranks} cpu", example_inputs=tokens(), constraints=pins)
    assert report.ok(1e-5), report


class Block(nn.Module):
    """A layer with losses of its own, of a sum with a gradient and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.router(x).softmax(-1)
        hidden = F.gelu(self.up(x)) * gates.repeat(1, 1, 16 // EXPERTS)
        load = F.one_hot(gates.argmax(-1), EXPERTS).float().mean((0, 1))
        share = gates.mean((0, 1))
        penalty = penalty + (share * share.log()).sum() + (share / load.clamp(min=0.1)).sum()
        return x + self.dropout(self.down(hidden)), penalty


class Penalised(nn.Module):
    """Penalties of every layer; the last stage's loss reads a sum of the first one's, and both have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden, penalty = self.inner(x), torch.zeros(())
        early = hidden.pow(2).mean((0, 1))
        for block in self.blocks:
            hidden, penalty = block(hidden, penalty)
        p, q = self.heads[0](hidden).sigmoid().mean((0, 1)), self.heads[1](hidden).pow(2).mean((0, 1))
        ratio = (p.log() * q).sum() / (1 + early.sqrt().sum() * q.sum())
        return ratio.square() + hidden.square().mean() + 0.5 * penalty


def penalised() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Penalised(), {"x": torch.randn(ROWS, LENGTH, 6)}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "pins"),
    [
        (1, {"micro_batches": 2, "recompute": "full"}),
        pytest.param(2, {"dp": 2, "micro_batches": 4, "recompute": "full", "zero": 3}, marks=pytest.mark.slow),
        pytest.param(2, {"tp": 2, "micro_batches": 2, "recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param(4, {"pp": 2, "dp": 2, "micro_batches": 2, "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param(2, {"pp": 2, "micro_batches": 4, "schedule": "interleaved"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sums_of_layers_and_of_earlier_stages_are_those_of_the_batch(ranks: int, pins: dict[str, Any]) -> None:
    model, batch = penalised()
    report = autopar.verify(model, f"{ranks} cpu", example_inputs=batch, constraints=pins)
    assert report.ok(1e-5), report


def evaluated(compiled: Any, batch: dict[str, Tensor]) -> tuple[list[float], bool]:
    """Losses of evaluation before and after a step, and whether the first evaluation left everything as it was."""
    step = compiled.build()
    before = {name: value.clone() for name, value in step.full_state_dict().items()}
    losses = [float(step.evaluate(step.local_batch(batch)))]
    after = step.full_state_dict()
    step(step.local_batch(batch))
    losses.append(float(step.evaluate(step.local_batch(batch))))
    return losses, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "pins",
    [{"micro_batches": 4}, pytest.param({"pp": 2, "dp": 2, "micro_batches": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_evaluation_gives_the_loss_of_the_whole_batch(pins: dict[str, Any]) -> None:
    model, batch = penalised()
    ranks = pins.get("pp", 1) * pins.get("dp", 1)
    arguments = {"example_inputs": batch, "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05)}
    one, many = (
        autopar.compile(model, f"{n} cpu", **arguments, constraints=c)
        for n, c in ((1, {"micro_batches": 1}), (ranks, pins))
    )
    expected, _ = evaluated(one, batch)
    losses, is_unchanged = run_ranks(evaluated, (many, batch), ranks)[0]
    assert is_unchanged
    assert expected[0] == pytest.approx(float(model.eval()(**batch).detach()), rel=1e-6)
    assert losses == pytest.approx(expected, rel=1e-5) and losses[0] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    "pins", [pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.slow), {"pp": 2, "dp": 2}], ids=str
)
def test_a_forward_more_of_every_micro_batch_is_priced(pins: dict[str, Any]) -> None:
    """The same calls but for one that needs a sum: the step takes one forward of each micro-batch more."""
    model, batch = penalised()
    settings = {"example_inputs": batch, "constraints": {**pins, "micro_batches": 2, "zero": 0}}
    compiled = autopar.compile(model, IDEAL, **settings)
    seconds = compiled.plan.prediction.seconds
    kinds = ("forward compute", "all_gather tp", "all_reduce tp", "all_reduce dp", "local resharding")
    assert seconds["forward compute"] <= seconds[FIRST_PASS] <= sum(seconds.get(kind, 0.0) for kind in kinds)
    alone = autopar.compile(model, IDEAL, example_inputs=batch, constraints={**pins, "micro_batches": 1, "zero": 0})
    assert FIRST_PASS not in alone.plan.prediction.seconds
    # A load and a share of every layer, two means of the heads and one of the first stage.
    of_stages = compiled.plan.prediction.pipeline_ranks or (compiled.plan.prediction.num_bytes,)
    whole_bytes = 4 * (4 * 2 * EXPERTS + 2 * 3 + WIDTH)
    assert whole_bytes / pins.get("tp", 1) <= sum(kinds[SUMS] for kinds in of_stages) <= whole_bytes
    assert "forward runs twice" in compiled.report() and "forward runs twice" not in alone.report()
    solution = compiled.best.solution
    if solution is not None:  # what several readers share is paid for once
        assert solution.objective == pytest.approx(compiled.plan.prediction.step_seconds, rel=0.01)


@pytest.mark.slow
def test_the_search_cuts_the_batch_only_where_memory_asks_for_the_first_pass() -> None:
    model, batch = penalised()
    free = autopar.compile(model, "1 cpu", example_inputs=batch).plan
    least = int(free.prediction.peak_bytes * 0.8)
    tight = autopar.compile(
        model, "1 cpu", example_inputs=batch, constraints={"memory": least, "recompute": "none"}
    ).plan
    assert free.num_micro_batches == 1 < tight.num_micro_batches
    assert tight.prediction.seconds[FIRST_PASS] == pytest.approx(tight.prediction.seconds["forward compute"], rel=0.1)
    assert tight.prediction.step_seconds > free.prediction.step_seconds
