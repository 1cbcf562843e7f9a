"""Recomputation changes what is kept and what runs, and no number: on one process and on two."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.costs.live_bytes import LiveBytes
from codegen.runtime.mesh import Mesh
from codegen.runtime.sharded_units import ShardedUnits
from codegen.runtime.step import Step
from tests.codegen.runtime.ranks import run_ranks
from tests.codegen.runtime.transformer_program import HEADS, LENGTH, WIDTH, make_program, whole_batch, whole_state

ROWS, NUM_LAYERS, P = 8, 3, 0.1


def make_step(mesh: Mesh, micro: int = 1, layers: int = NUM_LAYERS, rows: int = ROWS, **options: Any) -> Step:
    step = Step(
        make_program(rows // micro, layers, **options),
        mesh,
        optimizer_factory=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        num_micro_batches=micro,
        units=ShardedUnits,
        seed=3,
    )
    step.load(whole_state(layers))
    return step


def train(step: Step) -> dict[str, Tensor]:
    """Loss and gradients of each of two steps, and the parameters after them."""
    found = {}
    for index in range(2):
        loss = step.forward_backward(step.local_batch(whole_batch(ROWS, seed=index)))
        found[f"loss {index}"] = loss
        found.update({f"gradient {name} {index}": value for name, value in step.gradients().items()})
        step.update()
    return {**found, **step.full_state_dict()}


def check_modes(mesh: Mesh, zero: int, micro: int) -> dict[str, Tensor]:
    """Bit for bit what it is without recomputation, and every layer run once more per backward where it has a mode."""
    expected = train(make_step(mesh, micro, zero=zero))
    for modes in (["full"] * 3, ["selective"] * 3, ["full", "none", "selective"]):
        step = make_step(mesh, micro, zero=zero, recompute=modes)
        found = train(step)
        case = f"{mesh}, zero {zero}, {micro} micro-batches, {modes}"
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"{case}: {name} differs"
        runs = Counter(step.model.runs)
        assert runs == {
            (f"blocks.{layer}", index): 2 * (1 if modes[layer] == "none" else 2)
            for layer in range(NUM_LAYERS)
            for index in range(micro)
        }, case
    return expected


def two_ranks(rank: int, world_size: int) -> None:
    single = {name: value for name, value in train_alone().items() if not name.startswith("loss")}
    for axis, zero, micro in [*itertools.product(("dp",), (0, 1, 2, 3), (1, 2)), ("tp", 0, 1), ("tp", 0, 2)]:
        found = check_modes(Mesh.create((axis,), (2,)), zero, micro)
        for name, value in single.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=f"{name}, {axis} {zero} {micro}")


def train_alone() -> dict[str, Tensor]:
    """Without any process group, dropout drawn for the whole batch at once."""
    alone = Mesh((), Mesh.create(("dp",), (2,)).tp, torch.device("cpu"))
    return train(make_step(alone))


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_compute_the_same() -> None:
    run_ranks(two_ranks, 2)


def test_one_rank_computes_the_same() -> None:
    for micro in (1, 4):
        check_modes(Mesh.create((), ()), 0, micro)


def bytes_per_layer(mode: str, rows: int) -> int:
    """What one more layer of that mode keeps alive between forward and backward."""
    alive = []
    for layers in (2, 3):
        step = make_step(Mesh.create((), ()), layers=layers, rows=rows, recompute=[mode] * layers)
        batch = step.local_batch(whole_batch(rows, seed=0))
        # What the first step caches (dropout's layouts) is not of the layers.
        step.forward_backward(batch)
        with LiveBytes() as live:
            loss = step.model(**batch)
            alive.append(live.num_bytes)
            del loss
    return alive[1] - alive[0]


def test_memory_between_forward_and_backward() -> None:
    rows = 4
    hidden = rows * LENGTH * WIDTH * 8
    # The layer's argument.
    assert bytes_per_layer("full", rows) == hidden
    # And the results of qkv, attention (with its log-sum-exp), out, up and down.
    sums = rows * HEADS * LENGTH * 8
    assert bytes_per_layer("selective", rows) == (1 + 3 + 1 + 1 + 4 + 1) * hidden + sums
    # What backward reads: argument, normalised (before and after the weight), qkv, attention, middle, normalised, tanh;
    # two dropout masks of one byte, two normalisations' scales of one number a row.
    masks, scales = 2 * hidden // 8, 2 * hidden // WIDTH
    assert bytes_per_layer("none", rows) == (1 + 2 + 3 + 1 + 1 + 1 + 4) * hidden + masks + scales + sums


def test_no_recomputation_where_no_backward_follows() -> None:
    step = make_step(Mesh.create((), ()), recompute=["full"] * 3)
    batch = step.local_batch(whole_batch(ROWS, seed=0))
    step.evaluate(batch)
    assert len(step.model.runs) == NUM_LAYERS
    step.model.eval()
    step.model(**batch).backward()
    assert len(step.model.runs) == 2 * NUM_LAYERS


def test_keeps_the_micro_batch_of_the_forward() -> None:
    """Two forwards, then two backwards, as in a pipeline: masks are those of the forward."""
    gradients = []
    for mode in ("none", "full", "selective"):
        step = make_step(Mesh.create((), ()), micro=2, recompute=[mode] * 3)
        whole = step.local_batch(whole_batch(ROWS, seed=0))
        step.forward_backward(whole)
        step.zero.begin(accumulate=False, is_last=True)
        losses = []
        for index, ids in enumerate(whole["ids"].chunk(2)):
            step.rng.micro_batch = index
            losses.append(step.model(ids=ids))
        torch.stack(losses).sum().backward()
        step.zero.end()
        gradients.append(step.gradients())
    assert all(gradients[0][name].any() for name in gradients[0])
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(gradients[2][name], value, rtol=1e-12, atol=1e-14)


def test_refuses_wrong_tables() -> None:
    with pytest.raises(ValueError, match="recompute must be one of none, selective, full, got 'half'"):
        make_step(Mesh.create((), ()), recompute=["half"] * 3)
    with pytest.raises(ValueError, match="Block has 3 instances"):
        make_step(Mesh.create((), ()), recompute=["full"] * 2)
    with pytest.raises(ValueError, match="Block has 3 instances"):
        make_step(Mesh.create((), ()), offload=[True])
