"""Optimisers of whole matrices train as on one process under every plan, with updates and state shared out."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.frontend.inputs import NamedBatch
from autopar.launch import run_ranks
from autopar.training import checkpoints
from autopar.verify import _compare, _rotated, verify_program
from benchmarks.verify_pipelines import cluster_of, mixed_cluster
from codegen.runtime.optimizers import call
from examples.models import gpt2
from tests.autopar.optimizer_factories import WHOLE, Lamb, TinyNet, inputs, loss_fn, model, muon_by_ndim
from tests.autopar.test_expert_parallel import Routed
from tests.autopar.test_expert_parallel import batch as routed_batch

TIED = {"pp": 2, "dp": 2, "zero": 1, "schedule": "1f1b", "micro_batches": 2}
CUT = {"parameters": {"*.up.weight": {"tp": "S(0)"}, "*.down.weight": {"tp": "S(1)"}}}
PLANS: dict[str, dict[str, Any]] = {
    **{f"dp4 zero{zero}": {"dp": 4, "zero": zero} for zero in range(4)},
    "tp2 x dp2 zero3": {"tp": 2, "dp": 2, "zero": 3, **CUT},
    "pp2 x dp2 tied": TIED,
}
TOLERANCE = 1e-5


def compiled(factory: Any, constraints: Mapping[str, Any], net: nn.Module | None = None, ranks: int = 4) -> Any:
    return autopar.compile(
        net or model(), f"{ranks} cpu", example_inputs=inputs(), loss_fn=loss_fn, optimizer=factory,
        constraints=constraints,
    )  # fmt: skip


def batches(count: int = 3) -> list[NamedBatch]:
    batch = NamedBatch(dict(zip(("tokens", "target"), inputs(), strict=True)), {})
    return [_rotated(batch, 4, shift) for shift in range(count)]


def _compare_all(pairs: list[tuple[Any, list[NamedBatch]]]) -> list[Any]:
    return [_compare(program, batches, None, 0) for program, batches in pairs]


def require_exact(cases: Mapping[str, tuple[Any, list[NamedBatch]]]) -> None:
    """Every program on four ranks, against one process."""
    for case, report in zip(cases, run_ranks(_compare_all, (list(cases.values()),), 4, 600.0)[0], strict=True):
        assert report.ok(TOLERANCE), f"{case}: {report}"
        assert len(report.parameters) > 3, case


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", WHOLE)
def test_exact_under_every_plan(name: str) -> None:
    plans = PLANS if name == "Muon by ndim" else {key: PLANS[key] for key in list(PLANS)[-2:]}
    require_exact(
        {key: (compiled(WHOLE[name], pins, model(tied="tied" in key)), batches()) for key, pins in plans.items()}
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_stacks_of_experts_are_the_users_own_parameters() -> None:
    """[E, A, B] on ep: what the optimiser sees has all experts."""
    torch.manual_seed(0)
    net, values = Routed(), routed_batch("mixed")
    cases = {}
    for name, factory in {"Muon": muon_by_ndim, "LAMB": Lamb}.items():
        for constraints in ({"dp": 2, "ep": 2, "zero": 1}, {"dp": 2, "ep": 2, "zero": 0}):
            program = autopar.compile(
                net, "4 cpu", example_inputs=values, optimizer=factory, constraints=constraints
            )  # fmt: skip
            placed = {n: s for scope in program.plan.scopes.values() for n, s in scope.parameters.items()}
            assert any(p.is_shard for p in placed["up"].placements)
            cases[f"{name} {constraints}"] = program, [_rotated(NamedBatch(values, {}), 8, shift) for shift in range(3)]
    require_exact(cases)


@pytest.mark.slow
@pytest.mark.distributed
def test_padding_is_not_seen() -> None:
    """30 rows on tp4: a rank's part has rows that no parameter of the user has."""
    torch.manual_seed(0)
    net = TinyNet()
    net.embed, net.head = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
    values = tuple(tokens % 30 for tokens in inputs())
    cases = {}
    for name in ("LAMB", "Adafactor"):
        program = autopar.compile(
            net, "4 cpu", example_inputs=values, loss_fn=loss_fn, optimizer=WHOLE[name],
            constraints={"tp": 4, "parameters": {"embed.weight": {"tp": "S(0)"}}},
        )  # fmt: skip
        assert program.plan.padded_to == 4
        cases[name] = program, [NamedBatch(dict(zip(("tokens", "target"), values, strict=True)), {})] * 3
    require_exact(cases)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("cluster", "pinned"),
    [
        (cluster_of(4), {"pp": 2, "dp": 2, "schedule": "interleaved", "chunks": 2, "micro_batches": 4, "zero": 1}),
        (mixed_cluster((2, 1)), {"pp": 2, "tp": 1, "schedule": "1f1b", "micro_batches": 2, "zero": 1}),
    ],
    ids=["several stages each", "unlike pipeline ranks"],
)
def test_stages_with_tied_weights(cluster: Any, pinned: dict[str, Any]) -> None:
    """The table of GPT-2 is on its first and last stage, each with an owner of its own."""
    example = gpt2(layers=4, width=32, seq_len=8, vocab_size=64, batch_size=8)
    program = autopar.compile(
        example.model, cluster, example_inputs=example.inputs, loss_fn=example.loss_fn, optimizer=muon_by_ndim,
        constraints=pinned,
    )  # fmt: skip
    report = verify_program(program, example.inputs)
    assert report.ok(TOLERANCE) and len(report.parameters) > 40, str(report)


# Balance --------------------------------------------------------------------------------------------------------------


def _owned(programs: list[Any]) -> list[tuple[dict[str, int], int]]:
    """Return the tensors that this rank updates whole (name: elements), and the elements of its optimizer's state."""
    owned = []
    for program in programs:
        step = program.build()
        step(program.local_batch(batches(1)[0]))
        sizes = {entry.slot.name: torch.Size(entry.slot.spec.shape).numel() for _, entry in step.entries()}
        states = [value for state in step.optimizer.state.values() for value in state.values()]
        numel = sum(value.numel() for value in states if isinstance(value, torch.Tensor))
        owned.append(({name: sizes[name] for name in step.wholes.owned}, numel))
    return owned


@pytest.mark.slow
@pytest.mark.distributed
def test_updates_and_state_are_balanced() -> None:
    """Every parameter has one owner, whose loads are by hand, and the two moments lie with it."""
    plans = [PLANS[key] for key in ("dp4 zero0", "dp4 zero3", "tp2 x dp2 zero3")]
    ranks = run_ranks(_owned, ([compiled(WHOLE["LAMB"], plan) for plan in plans],), 4, 600.0)
    sizes = {name: parameter.numel() for name, parameter in model().named_parameters()}
    for index in range(len(plans)):
        owned = [rank[index][0] for rank in ranks]
        assert sorted(name for sizes_of_rank in owned for name in sizes_of_rank) == sorted(sizes)
        loads = [sum(sizes_of_rank.values()) for sizes_of_rank in owned]
        # Six matrices of 512 elements: two for each of two ranks, and all vectors for the others.
        assert sorted(loads) == [608, 608, 1024, 1024]
        assert [rank[index][1] for rank in ranks] == [2 * load for load in loads]


# Checkpoints and schedules --------------------------------------------------------------------------------------------


def _schedule(optimizer: torch.optim.Optimizer, start: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda index: 0.7 ** (index + start))


def _train(program: Any, source: str, target: str, start: int, stop: int) -> list[float]:
    """The losses of steps start to stop, continued from source and saved as target, where these are named."""
    step = program.build()
    checkpoint = importlib.import_module(type(step).__module__.replace(".step", ".checkpoint"))
    scheduler = _schedule(step.optimizer, start)
    if source:
        checkpoint.load(step, source)
    losses = []
    for batch in batches(stop)[start:]:
        losses.append(float(step(program.local_batch(batch))))
        step.optimizer.zero_grad()
        scheduler.step()
    if target:
        checkpoint.save(step, target)
    return losses if dist.get_rank() == 0 else []


def _train_plain(factory: Any, source: str, target: str, start: int, stop: int) -> list[float]:
    net = model()
    optimizer = call(factory, net.named_parameters())
    settings = [dict(group, params=[]) for group in optimizer.param_groups]
    scheduler = _schedule(optimizer, start)
    if source:
        checkpoints.load_plain(net, optimizer, Path(source), settings)
    losses = []
    for batch in batches(stop)[start:]:
        loss = loss_fn(net(batch["tokens"]), batch["target"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    if target:
        progress = {"step": stop, "num_samples": 4 * stop, "seed": 0}
        checkpoints.save_plain(net, optimizer, progress, Path(target), settings)
    return losses


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["Muon by name", "Shampoo", "Adafactor"])
def test_checkpoints_move_between_ranks_and_plain_runs(name: str, tmp_path: Path) -> None:
    """Four ranks, then two, then one process, then four again, with a schedule, as one process does in one go."""
    factory = WHOLE[name]
    four, two = compiled(factory, PLANS["tp2 x dp2 zero3"]), compiled(factory, {"dp": 2, "zero": 0}, ranks=2)
    first, second, third = (str(tmp_path / folder) for folder in ("first", "second", "third"))
    losses = [
        *run_ranks(_train, (four, "", first, 0, 2), 4, 600.0)[0],
        *run_ranks(_train, (two, first, second, 2, 4), 2, 600.0)[0],
        *_train_plain(factory, second, third, 4, 6),
        *run_ranks(_train, (four, third, "", 6, 8), 4, 600.0)[0],
    ]
    expected = _train_plain(factory, "", "", 0, 8)
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert expected[0] - expected[-1] > 0.05
