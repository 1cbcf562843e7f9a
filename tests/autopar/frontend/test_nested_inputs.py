"""Tensors inside containers that forward and the loss take: traced, cut, trained and saved as if they had names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.frontend.inputs import name_inputs
from autopar.frontend.trace import trace
from autopar.trainer import Trainer
from autopar.training.config import TrainerConfig
from tests import forked
from tests.autopar.interpret import assert_equals_eager

ROWS = 8


class Masks(NamedTuple):
    """Of one batch: left float [B, L], scale float []."""

    left: Tensor
    scale: Tensor


class Nested(nn.Module):
    """Takes a dict, and a list with a named tuple and a word in it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.image, self.head = nn.Embedding(12, 8), nn.Linear(6, 8), nn.Linear(8, 12)

    def forward(self, batch: dict[str, Tensor], rest: list[Any]) -> dict[str, Tensor]:
        images, (masks, word) = rest
        hidden = self.embedding(batch["token-ids"]) + self.image(images)[:, None]
        if word == "twice":
            hidden = 2 * hidden
        return {"logits": self.head((hidden * masks.left[..., None] * masks.scale).tanh())}


def nested_loss(output: dict[str, Tensor], target: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target[0].flatten())


def model() -> Nested:
    torch.manual_seed(0)
    return Nested()


def batch_at(step: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(12, (ROWS, 4), generator=generator)
    masks = Masks(torch.rand(ROWS, 4, generator=generator), torch.tensor(1.5))
    rest = [torch.randn(ROWS, 6, generator=generator), (masks, "twice")]
    return {"token-ids": ids, "unused": torch.zeros(ROWS)}, rest, (torch.randint(12, (ROWS, 4), generator=generator),)


def batches(start: int) -> Iterator[tuple[Any, ...]]:
    step = start // ROWS
    while True:
        yield batch_at(step)
        step += 1


def test_what_containers_hold_has_names_of_its_own() -> None:
    own, batch = model(), batch_at(0)
    named = name_inputs(own, batch, nested_loss)
    names = ("batch_token_ids", "batch_unused", "rest_0", "rest_1_0_left", "rest_1_0_scale", "rest_1_1", "target_0")
    assert tuple(named) == names and named["rest_1_1"] == "twice"
    graph = trace(own, batch, nested_loss)
    rows = {item.name: item.batch_dim for item in graph.inputs}
    assert rows.pop("rest_1_0_scale") is None and set(rows.values()) == {0}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    assert_equals_eager(graph, own, tensors, nested_loss(own(*batch[:2]), batch[2]))


class Sum(nn.Module):
    """Takes the batch as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.scale * batch["a"] * batch["b"]).mean()


def test_a_dict_may_be_the_only_argument_of_forward() -> None:
    own, batch = Sum(), {"a": torch.rand(4), "b": torch.rand(4)}
    named = name_inputs(own, batch)
    assert tuple(named) == ("batch_a", "batch_b") and tuple(name_inputs(own, {"batch": batch})) == tuple(named)
    assert_equals_eager(trace(own, batch), own, {f"batch_{name}": value for name, value in batch.items()}, own(batch))


def test_two_inputs_of_one_name_are_refused() -> None:
    batch = {"batch": {"a-b": torch.ones(2), "a_b": torch.ones(2)}, "rest": torch.ones(2)}
    with pytest.raises(TraceError, match="batch_a_b"):
        name_inputs(model(), batch)
    with pytest.raises(TraceError, match="batch_0"):
        name_inputs(model(), {"batch": [torch.ones(2)], "batch_0": torch.ones(2)})


class Named(nn.Module):
    """Takes plain data, too: text of each row, and a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)

    def forward(self, texts: list[str], factors: list[float], x: Tensor, nothing: list[int]) -> Tensor:
        return (self.linear(x) * factors[1]).square().mean()


def test_lists_of_plain_data_are_what_a_program_is_made_for() -> None:
    texts, factors = [f"row {number}" for number in range(ROWS)], [1.0, 2.0]
    batch = {"texts": texts, "factors": factors, "x": torch.randn(ROWS, 4), "nothing": []}
    net = Named()
    step = autopar.compile(net, "1 cpu", example_inputs=batch).build(first_step_check=True)
    assert float(step(step.local_batch(batch))) == pytest.approx(float(net(**batch).detach()))
    with pytest.raises(ValueError, match="made for factors"):
        step(step.local_batch({**batch, "factors": [1.0, 3.0]}))


@pytest.mark.slow
@pytest.mark.distributed
def test_a_program_trains_on_containers_as_one_process_does() -> None:
    options: dict[str, Any] = {"loss_fn": nested_loss, "constraints": {"dp": 2, "zero": 3, "micro_batches": 2}}
    report = autopar.verify(model(), "2 cpu", example_inputs=batch_at(0), **options)
    assert report.ok(1e-5), report
    own, plain = model(), model()
    config = {"steps": 3, "log_every": 0, "max_grad_norm": 1.0}
    found = Trainer(own, TrainerConfig(cluster="2 cpu", **config), batches, nested_loss).fit()
    expected = Trainer(plain, TrainerConfig(auto_parallel=False, **config), batches, nested_loss).fit()
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_saved_program_takes_containers(tmp_path: Path) -> None:
    compiled = autopar.compile(model(), "2 cpu", example_inputs=batch_at(0), loss_fn=nested_loss, constraints={"pp": 2})
    compiled.save(tmp_path / "saved", weights=True)
    main = tmp_path / "saved" / "main.py"
    given = tmp_path / "batch.pt"
    first, (images, (masks, word)), target = batch_at(0)
    torch.save(
        {"batch": first, "rest": [images, ({"left": masks.left, "scale": masks.scale}, word)], "target": target}, given
    )
    text = main.read_text()
    begin, end = text.index("def batches("), text.index("def initial_value(")
    own = f"def batches(start, data):\n    while True:\n        yield torch.load({str(given)!r})\n\n\n"
    main.write_text(text[:begin] + own + text[end:])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run([str(main), "--steps", "1"], ranks=2, env=environment)
    assert done.returncode == 0, done.stderr
    eager = model()
    loss = nested_loss(eager(*batch_at(0)[:2]), batch_at(0)[2])
    assert f"loss {loss:.4f}" in done.stdout
