"""A Trainer refuses, skips and leaves behind: batches that do not fit, steps that are not finite, the model."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar
from autopar.errors import ConstraintError, DataError, TraceError, TrainingError
from autopar.launch import run_ranks
from autopar.lowering.completion import with_inputs_of
from autopar.trainer import Trainer
from autopar.training import checkpoints
from autopar.training.config import TrainerConfig
from codegen.runtime.options import RANGES

CONFIG = TrainerConfig(cluster="2 cpu", steps=5, learning_rate=1e-2, log_every=0)
ROWS = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12, bias=False)  # the gradient of a bias before batch norm would be round-off
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.linear(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = x * scale
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batch(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(ROWS, 12, generator=generator),
        "target": torch.randint(5, (ROWS,), generator=generator),
    }


@dataclass(frozen=True)
class Batches:
    """Batch i at step i; those of `spoiled` steps have one value that is not finite."""

    spoiled: tuple[int, ...] = ()
    value: float = math.inf

    def __call__(self, start: int) -> Iterator[dict[str, Any]]:
        step = start // ROWS
        while True:
            values = batch(step)
            if step in self.spoiled:
                values["x"][3, 4] = self.value
            yield values
            step += 1


def reference(model: nn.Module, steps: int, skipped: tuple[int, ...] = ()) -> nn.Module:
    """AdamW on one process, as if the skipped batches did not exist."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=CONFIG.learning_rate, weight_decay=CONFIG.weight_decay)
    for step in range(steps):
        if step not in skipped:
            optimizer.zero_grad()
            F.cross_entropy(model(batch(step)["x"]), batch(step)["target"]).backward()
            optimizer.step()
    return model


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def check_equal(model: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


# The model afterwards, and steps that are not finite ----------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.parametrize(
    "constraints", [{"dp": 2, "zero": 2}, slow({"tp": 2}), slow({"pp": 2}), slow({"dp": 2, "offload": "optimizer"})]
)
def test_a_spoiled_sample_is_passed_over_and_the_model_holds_what_was_trained(constraints: dict[str, Any]) -> None:
    """Parameters, statistics and counters equal those of a run without the batch."""
    model = net()
    expected = reference(model, 5, skipped=(2,))
    result = Trainer(model, replace(CONFIG, constraints=constraints), Batches((2,)), F.cross_entropy).fit()
    assert result.num_skipped == 1 and result.num_samples == 5 * ROWS
    assert [math.isfinite(loss) for loss in result.losses] == [True, True, False, True, True]
    check_equal(model, expected)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_plain_run_passes_over_a_spoiled_sample(value: float) -> None:
    model = net()
    expected = reference(model, 5, skipped=(1,))
    result = Trainer(model, replace(CONFIG, auto_parallel=False), Batches((1,), value), F.cross_entropy).fit()
    assert result.num_skipped == 1
    check_equal(model, expected)


class OnlyGradient(nn.Module):
    """A finite loss whose gradient is not: the root of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().sum(1).sqrt().mean() + self.linear.weight.square().sum()


def zeros(start: int) -> Iterator[dict[str, Any]]:
    while True:
        yield {"x": torch.zeros(ROWS, 12)}


@pytest.mark.parametrize("cluster", ["1 cpu", pytest.param("2 cpu", marks=pytest.mark.distributed)])
def test_a_gradient_that_is_not_finite_is_seen_without_clipping(cluster: str) -> None:
    model = OnlyGradient()
    with torch.no_grad():
        model.linear.bias.zero_()
    before = copy.deepcopy(model)
    result = Trainer(model, replace(CONFIG, cluster=cluster, steps=2), zeros).fit()
    assert result.num_skipped == 2 and all(map(math.isfinite, result.losses))
    check_equal(model, before)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("non_finite", "spoiled", "text"),
    [("stop", (3,), "non_finite='stop'"), ("skip", tuple(range(3, 40)), "10 steps before this one were skipped")],
)
def test_a_run_that_stops_keeps_its_last_finite_checkpoint(
    tmp_path: Path, non_finite: str, spoiled: tuple[int, ...], text: str
) -> None:
    config = replace(
        CONFIG, steps=30, checkpoint_directory=str(tmp_path / "run"), checkpoint_every=3, non_finite=non_finite
    )
    with pytest.raises(TrainingError, match=text):
        Trainer(net(), config, Batches(spoiled), F.cross_entropy).fit()
    assert checkpoints.latest(tmp_path / "run") is not None
    model = net()
    resumed = Trainer(model, replace(config, steps=14), Batches(), F.cross_entropy).fit()
    assert resumed.first_step in (3, 12) and all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("auto_parallel", [False, True])
def test_no_checkpoint_of_parameters_that_are_not_finite_is_written(tmp_path: Path, auto_parallel: bool) -> None:
    config = replace(
        CONFIG,
        cluster="1 cpu",
        auto_parallel=auto_parallel,
        non_finite="ignore",
        steps=4,
        checkpoint_every=2,
        checkpoint_directory=str(tmp_path / "run"),
    )
    with pytest.raises(TrainingError, match="some parameters are inf or nan"):
        Trainer(net(), config, Batches((2,)), F.cross_entropy).fit()
    assert checkpoints.latest(tmp_path / "run") == tmp_path / "run" / "step-00000002"


# Batches ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changed:
    """The usual batches, changed from step 1 on."""

    change: Callable[[dict[str, Any]], dict[str, Any]]

    def __call__(self, start: int) -> Iterator[dict[str, Any]]:
        yield batch(start // ROWS)
        while True:
            yield self.change(batch(1))


def with_mask(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "mask": torch.ones(ROWS)}


def shorter(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:5] for name, value in values.items()}


def empty(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:0] for name, value in values.items()}


def doubled(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "x": values["x"].double()}


def wider(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "x": torch.cat([values["x"], values["x"]], 1)}


def without_target(values: dict[str, Any]) -> dict[str, Any]:
    return {"x": values["x"]}


def as_numbers(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "x": values["x"].tolist()}


def own_rows(values: dict[str, Any]) -> dict[str, Any]:
    """As a loader that every rank shuffles for itself."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {name: value.roll(rank, 0) for name, value in values.items()}


BAD = [
    (with_mask, "has mask, which the example inputs lack"),
    (shorter, r"drop_last=True"),
    (empty, r"x has shape \(0, 12\)"),
    (doubled, "x has dtype torch.float64"),
    (wider, r"x has shape \(8, 24\)"),
    (without_target, "lacks target"),
    (as_numbers, "x must be a tensor, got list"),
]


@pytest.fixture(scope="module")
def compiled_once() -> tuple[Any, Any]:
    compiled = autopar.compile(net(), "1 cpu", example_inputs=batch(0), loss_fn=F.cross_entropy)
    return compiled, compiled.build()


@pytest.mark.parametrize(("change", "text"), BAD)
def test_a_batch_that_does_not_fit_is_one_clear_error(change: Any, text: str, compiled_once: tuple[Any, Any]) -> None:
    compiled, step = compiled_once
    with pytest.raises(DataError, match=text):
        compiled.local_batch(change(batch(0)))
    with pytest.raises(ValueError, match=text):
        step.local_batch(change(batch(0)))
    with pytest.raises(ValueError, match=text):
        step(change(batch(0)))
    assert step.rng.step == 0


@pytest.mark.parametrize(("change", "text"), [BAD[0], *(slow(*case) for case in BAD[2:])])
def test_fit_refuses_a_batch_that_does_not_fit(change: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        Trainer(net(), replace(CONFIG, cluster="1 cpu"), Changed(change), F.cross_entropy).fit()


@pytest.mark.distributed
@pytest.mark.parametrize("constraints", [{"tp": 2}, slow({"dp": 2}), slow({"pp": 2})])
def test_ranks_that_read_other_rows_are_told(constraints: dict[str, int]) -> None:
    with pytest.raises(DataError, match="ranks 0 and 1 were given different data(.|\n)*DistributedSampler"):
        Trainer(net(), replace(CONFIG, constraints=constraints), Changed(own_rows), F.cross_entropy).fit()


def step_with_other_part(compiled: Any) -> str:
    step = compiled.build()
    local = step.local_batch(batch(0))
    if dist.get_rank() == 1:
        local["x"] = local["x"] + 1
    try:
        step(local)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_local_batches_of_one_shard_must_agree() -> None:
    """Every rank is told, none hangs."""
    compiled = autopar.compile(net(), "2 cpu", example_inputs=batch(0), loss_fn=F.cross_entropy, constraints={"tp": 2})
    errors = run_ranks(step_with_other_part, (compiled,), 2)
    assert all("their parts of x are of the same rows" in text for text in errors)


def test_values_that_are_no_tensors_are_part_of_the_program() -> None:
    values = {**batch(0), "scale": 2.0}
    compiled = autopar.compile(net(), "1 cpu", example_inputs=values, loss_fn=F.cross_entropy)
    compiled.local_batch(values)
    compiled.local_batch(batch(0))  # left out, it is what it was
    with pytest.raises(DataError, match="made for scale=2.0 alone"):
        compiled.local_batch({**values, "scale": 3.0})
    for value in (object(), [torch.ones(2)], {"a": math.nan}):
        with pytest.raises(TraceError, match="every input of the batch is a tensor"):
            with_inputs_of(compiled.program, {**batch(0), "scale": value})


def loader(samples: int, **options: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(samples, 12), torch.randint(5, (samples,)))
    return DataLoader(data, batch_size=ROWS, **options)


def test_loaders_that_would_end_a_run_are_refused_before_it() -> None:
    with pytest.raises(DataError, match=r"3 rows on dp2(.|\n)*drop_last=True"):
        Trainer(net(), replace(CONFIG, constraints={"dp": 2}), loader(19), F.cross_entropy).compile()
    sampler: DistributedSampler[Any] = DistributedSampler(range(16), num_replicas=2, rank=0)
    with pytest.raises(ConstraintError, match="DistributedSampler"):
        Trainer(net(), CONFIG, loader(16, sampler=sampler), F.cross_entropy)
    with pytest.raises(ConstraintError, match="batch_size=8, global_batch_size=16"):
        Trainer(net(), replace(CONFIG, global_batch_size=16), loader(16), F.cross_entropy)
    with pytest.raises(DataError, match="5 rows on dp2"):
        Trainer(net(), replace(CONFIG, constraints={"dp": 2}), [batch(0), shorter(batch(1))], F.cross_entropy).compile()
    with pytest.raises(DataError, match="no rows"):
        Trainer(net(), CONFIG, [empty(batch(0))], F.cross_entropy)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_loader_of_tuples_trains_as_one_process() -> None:
    """A DataLoader collates pairs to lists; here with a seeded shuffle, over more than one epoch."""

    def shuffled() -> DataLoader[Any]:
        torch.manual_seed(1)
        return loader(20, drop_last=True, shuffle=True, generator=torch.Generator().manual_seed(0))

    one, two = net(), net()
    expected = Trainer(one, replace(CONFIG, auto_parallel=False), shuffled(), F.cross_entropy).fit()
    result = Trainer(two, replace(CONFIG, constraints={"dp": 2}), shuffled(), F.cross_entropy).fit()
    assert result.losses == pytest.approx(expected.losses, rel=1e-4)
    check_equal(two, one)


# Batches without targets --------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def with_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def losses_and_state(compiled: Any, batches: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Any]]:
    step = compiled.build(non_finite="ignore")
    losses = [float(step(compiled.local_batch(batch))) for batch in batches]
    return losses, {name: value.numpy() for name, value in step.full_state_dict().items()}


@pytest.mark.by_turns(2)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("constraints", "kernels"),
    [
        ({"dp": 2}, "off"), ({"dp": 2, "micro_batches": 2}, "on"), slow({"tp": 2}, "off"), slow({"tp": 2}, "on"),
        slow({"pp": 2, "micro_batches": 2}, "off"), slow({"dp": 2, "micro_batches": 2}, "off"),
    ],
)  # fmt: skip
def test_a_batch_without_targets_is_as_on_one_process(constraints: dict[str, Any], kernels: str) -> None:
    """Of one rank or micro-batch it is exact; of the whole batch the loss is nan, with torch's gradients of 0."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, 16, (ROWS, 4), generator=generator) for _ in range(2))
    first, every = torch.arange(ROWS)[:, None] < ROWS // 2, torch.ones(ROWS, 1, dtype=torch.bool)
    batches = [{"x": x, "y": y.masked_fill(mask, -100)} for mask in (first, every, ~first)]
    torch.manual_seed(0)
    model = Tagger()
    plain = copy.deepcopy(model)
    optimizer, losses = with_momentum(plain.parameters()), []
    for batch in batches:
        optimizer.zero_grad()
        loss = plain(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    options = {"optimizer": with_momentum, "constraints": constraints, "kernels": kernels}
    compiled = autopar.compile(model, "2 cpu", example_inputs=batches[0], **options)
    by_rank, state = run_ranks(losses_and_state, (compiled, batches), 2)[0]
    assert by_rank == pytest.approx(losses, rel=1e-5, nan_ok=True) and math.isnan(by_rank[1])
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(torch.as_tensor(state[name]), value, rtol=1e-4, atol=1e-6, msg=name)


# The configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        {"steps": -1}, {"steps": 1.5}, {"steps": True}, {"learning_rate": math.nan}, {"learning_rate": math.inf},
        {"learning_rate": -1e-3}, {"weight_decay": math.nan}, {"max_grad_norm": -1}, {"max_grad_norm": 0},
        {"max_grad_norm": math.nan}, {"global_batch_size": 0}, {"num_processes": 0}, {"seed": "a"},
        {"precision": "fp64"}, {"backend": "xla"}, {"non_finite": "hope"}, {"checkpoint_every": 3},
        {"log_every": -1}, {"auto_parallel": "yes"}, {"checkpoint_directory": ""}, {"cluster": ""},
    ],
)  # fmt: skip
def test_absurd_values_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ConstraintError, match=next(iter(field))):
        TrainerConfig(**field)


def test_none_is_a_number_where_it_is_the_default() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(TrainerConfig)} | {"tolerance": None}
    for name in RANGES.keys() & defaults.keys():
        assert (None in RANGES[name]) == (defaults[name] is None), name
    with pytest.raises(ConstraintError, match="seed is a whole number"):
        TrainerConfig(seed=None)
