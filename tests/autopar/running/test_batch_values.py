"""Values of the batch that decide what forward does: equal to one process, and checked in every batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Trainer, TrainerConfig
from autopar.errors import ConstraintError, TraceError
from tests.autopar.test_verify import TOLERANCE
from tests.turns import by_turns

Batch = dict[str, Tensor]


class Encoder(nn.Module):
    """Two layers around what each model does with its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))


class Longest(Encoder):
    """Sequences are cut to the longest of the batch, as speech models do."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = int(lengths.max())
        mask = torch.arange(longest, device=x.device)[None] < lengths[:, None]
        return self.second((self.hidden(x[:, :longest]) * mask[..., None]).sum(1) / lengths[:, None])


class Pooled(Encoder):
    """As many graphs as the largest number among their nodes says."""

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        num_graphs = graph.max().item() + 1
        return self.second(torch.zeros(num_graphs, 16).index_add(0, graph, self.hidden(x)))


class Repaired(Encoder):
    """Missing values are replaced where there are any."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            x = torch.nan_to_num(x) * 2
        return self.second(self.hidden(x))


class Masked(Encoder):
    """A mask that leaves nothing out is not applied."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.hidden(x)
        if not mask.all():
            hidden = hidden * mask[..., None]
        return self.second(hidden.mean(1))


class Levels(Encoder):
    """Feature maps side by side, with their sizes in a table."""

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        parts = x.split([height * width for height, width in sizes.tolist()], 1)
        return self.second(sum(self.hidden(part).amax(1) for part in parts))


class Compared(Encoder):
    """Expressions of casts, comparisons, indices and keyword arguments."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        share = (lengths.to(torch.float32) / 6.0).clamp(max=1.0)
        longest = int((share.amax(dim=0, keepdim=False) * x.shape[1]).ceil())
        if torch.equal(lengths.sort().values[6:], torch.tensor([3, 5])) and bool((lengths[..., None] >= 2).any()):
            longest = longest - 1
        return self.second(self.hidden(x[:, :longest]).mean(1))


def lengths_of(longest: int) -> Tensor:
    return torch.tensor([3, longest, 2, 1, 1, 3, 2, 1])


def inputs_of(model: type[Encoder], index: int = 0) -> Batch:
    """The index-th batch: values differ from one to the next."""
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(8, 6, 8, generator=generator)
    batches: dict[type[Encoder], Callable[[], Batch]] = {
        Longest: lambda: {"x": x, "lengths": lengths_of(4 + index % 2)},
        Pooled: lambda: {"x": x[:, 0].repeat(3, 1), "graph": torch.arange(8).repeat_interleave(3)},
        Repaired: lambda: {"x": x[:, 0].masked_fill(torch.eye(8, dtype=torch.bool) & (index % 2 == 1), torch.nan)},
        Masked: lambda: {"x": x, "mask": (torch.rand(8, 6, generator=generator) > 0.3) | (index % 2 == 1)},
        Levels: lambda: {"x": x, "sizes": torch.tensor([[2, 2], [1, 2]])},
        Compared: lambda: {"x": x, "lengths": lengths_of(5 - index % 2)},
    }
    return {**batches[model](), "y": torch.randint(4, (8,), generator=generator)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def eager_losses(model: nn.Module, batches: Sequence[Batch]) -> list[float]:
    optimizer, losses = sgd(model.parameters()), []
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name != "y"}
        loss = F.cross_entropy(model(**inputs), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


MODELS = [Pooled, Longest, Repaired, Masked, Levels, Compared]
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("1x4 cpu", {"dp": 4}),
    ("1x4 cpu", {"dp": 2, "tp": 2}),
    ("1x2 cpu", {"pp": 2}),
    ("1x2 cpu", {"dp": 1, "tp": 2, "micro_batches": 2}),
]


# Pooled joins the rows of the batch, which then cannot be cut into micro-batches.
QUICK, *SLOW = [
    (model, plan) for model, plan in by_turns(MODELS, PLANS, 2) if not (model is Pooled and "micro_batches" in plan[1])
]


@pytest.mark.parametrize(("model", "plan"), [QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)])
def test_equal_to_one_process(model: type[Encoder], plan: tuple[str, dict[str, Any]]) -> None:
    cluster, pins = plan
    report = autopar.verify(
        model(),
        cluster,
        example_inputs=inputs_of(model),
        loss_fn=F.cross_entropy,
        optimizer=sgd,
        constraints=pins,
    )
    assert report.ok(TOLERANCE), str(report)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("model", MODELS)
def test_programs_for_several_values(model: type[Encoder]) -> None:
    """A step that has a program for each value is equal to one process, and refuses others before it takes them."""
    batches = [inputs_of(model, index) for index in range(4)]
    module = model()
    theirs = copy.deepcopy(module)
    compiled = autopar.compile(module, "1 cpu", example_inputs=batches[0], loss_fn=F.cross_entropy, optimizer=sgd)
    assert compiled.program.any.guards
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "optimizer": sgd, "plan": compiled.plan}
    also = [autopar.compile(module, "1 cpu", example_inputs=batches[1], **options)] if has_several(model) else []
    step = compiled.build(device="cpu", also=also)
    losses = [float(step(step.local_batch(batch))) for batch in batches]
    assert losses == pytest.approx(eager_losses(theirs, batches), rel=1e-5)


def has_several(model: type[Encoder]) -> bool:
    return model not in (Pooled, Levels)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("model", list(filter(has_several, MODELS)))
def test_other_values_are_refused(model: type[Encoder]) -> None:
    module = model()
    before = copy.deepcopy(module.state_dict())
    compiled = autopar.compile(module, "1 cpu", example_inputs=inputs_of(model), loss_fn=F.cross_entropy, optimizer=sgd)
    step = compiled.build(device="cpu")
    for call in (step, step.local_batch, step.evaluate):
        with pytest.raises(ValueError, match="values of the batch decide what forward does"):
            call(inputs_of(model, 1))
    assert not step.takes(inputs_of(model, 1)) and step.takes(inputs_of(model, 2))
    assert all(torch.equal(value, before[name]) for name, value in step.full_state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("model", [Longest, Repaired])
def test_trainer_makes_a_program_for_each_value(model: type[Encoder]) -> None:
    batches, module = [inputs_of(model, index) for index in range(4)], model()
    theirs = copy.deepcopy(module)

    def data(start: int) -> Iterator[Batch]:
        return iter(batches[start // 8 :])

    config = TrainerConfig(cluster="1x2 cpu", steps=4, log_every=0)
    result = Trainer(module, config, data, loss_fn=F.cross_entropy, optimizer=sgd).fit()
    assert result.losses == pytest.approx(eager_losses(theirs, batches), rel=1e-5)


class OnlyChecked(Encoder):
    """Checks, which are left out: no value decides."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = lengths.max().item()
        if longest > 100:
            raise ValueError("too long")
        if not lengths.min().item() >= 0:
            raise ValueError("no length")
        return self.second(self.hidden(x).mean(1))


class CheckedAndAsked(Encoder):
    """A check beside a size."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if lengths.min().item() < 0:
            raise ValueError("no length")
        return self.second(self.hidden(x[:, : int(lengths.max())]).mean(1))


class ByPhase(Encoder):
    """Asks one more value in evaluation, which it knows by an attribute."""

    phase = "training"

    def train(self, mode: bool = True) -> ByPhase:
        self.phase = "training" if mode else "evaluation"
        return super().train(mode)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.hidden(x[:, : int(lengths.max())])
        if self.phase == "evaluation" and bool((lengths > 0).all()):
            hidden = 3 * hidden
        return self.second(hidden.mean(1))


def test_values_that_decide_in_evaluation_alone_are_guarded() -> None:
    compiled = autopar.compile(ByPhase(), "1 cpu", example_inputs=inputs_of(Longest), loss_fn=F.cross_entropy)
    assert len(compiled.program.any.guards) == 2


@pytest.mark.parametrize(("model", "texts"), [(OnlyChecked, []), (CheckedAndAsked, ["int(lengths.max())"])])
def test_checks_decide_nothing(model: type[Encoder], texts: list[str]) -> None:
    compiled = autopar.compile(model(), "1 cpu", example_inputs=inputs_of(Longest), loss_fn=F.cross_entropy)
    assert [value.text for value in compiled.program.any.guards] == texts


class Counted(Encoder):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.second(self.hidden(x).sum(1) / lengths.sum().item())


class OfEachRow(Encoder):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.second(torch.stack([self.hidden(x[i, :n]).mean(0) for i, n in enumerate(lengths.tolist())]))


class Scaled(Encoder):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.second(self.hidden(x / x.abs().max().item()).mean(1))


@pytest.mark.parametrize("model", [Counted, OfEachRow, Scaled])
def test_values_that_differ_in_each_batch_are_refused(model: type[Encoder]) -> None:
    """Counts, floats and values of single rows would take a program for each batch."""
    batch = inputs_of(Longest)
    before = {name: value.clone() for name, value in batch.items()}
    with pytest.raises(TraceError, match="values"):
        autopar.compile(model(), "1 cpu", example_inputs=batch, loss_fn=F.cross_entropy)
    assert all(torch.equal(value, batch[name]) for name, value in before.items())


def into_zeros(lengths: Tensor) -> Tensor:
    ends = torch.zeros(9, dtype=torch.long)
    ends[1:] = lengths.cumsum(0)
    return ends[1:] - ends[:-1]


def into_a_copy(lengths: Tensor) -> Tensor:
    lengths = lengths.clone()
    lengths[0] = 2
    return lengths


def into_a_row(lengths: Tensor) -> Tensor:
    lengths = lengths.clone()
    lengths[0].fill_(2)
    return lengths


def into_the_input(lengths: Tensor) -> Tensor:
    lengths.clamp_(max=4)
    return lengths


def through_data(lengths: Tensor) -> Tensor:
    lengths = lengths.clone()
    lengths.data.fill_(2)
    return lengths


def through_out(lengths: Tensor) -> Tensor:
    other = torch.zeros(8, dtype=torch.long)
    torch.maximum(lengths, torch.ones_like(lengths), out=other)
    return other


def beside_a_written_constant(lengths: Tensor) -> Tensor:
    less = torch.zeros(8, dtype=torch.long)
    less[1] = -2
    return lengths + less


def within_a_function(lengths: Tensor) -> Tensor:
    other = lengths.float()
    F.threshold(other, 4.0, 1.0, inplace=True)
    return other


def without_counts(lengths: Tensor) -> Tensor:
    with torch.inference_mode():
        lengths = lengths.clone()
        lengths[0].fill_(2)
    return lengths


class Changed(Encoder):
    """Asks what was written to before."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.second(self.hidden(x[:, : int(self.change(lengths).max())]).mean(1))


WRITES = [
    *(into_zeros, into_a_copy, into_a_row, into_the_input),
    *(through_data, through_out, beside_a_written_constant, within_a_function, without_counts),
]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("change", WRITES)
def test_what_was_written_to_is_not_specialized_on(change: Callable[[Tensor], Tensor]) -> None:
    """An expression of the batch would leave the write out. The example is left as it was."""
    batch = inputs_of(Longest)
    before = {name: value.clone() for name, value in batch.items()}
    with pytest.raises(TraceError, match="values"):
        autopar.compile(Changed(change), "1 cpu", example_inputs=batch, loss_fn=F.cross_entropy)
    assert all(torch.equal(value, batch[name]) for name, value in before.items())


def test_inputs_that_functions_write_to_are_left_as_they_were() -> None:
    class Rectified(Encoder):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            return self.second(self.hidden(F.relu(x, inplace=True)[:, : int(lengths.max())]).mean(1))

    batch = inputs_of(Longest)
    before = batch["x"].clone()
    autopar.compile(Rectified(), "1 cpu", example_inputs=batch, loss_fn=F.cross_entropy)
    assert torch.equal(batch["x"], before)


class Box:
    longest = 0


_box, _longest = Box(), 0


class Keeps(Encoder):
    """Keeps a value of one batch for later batches."""

    of_class = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.longest, self.box = kind, None if kind == "first" else 0, Box()
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        global _longest
        longest = int(lengths.max())
        if self.kind == "first":
            longest = self.longest = self.longest or longest
        if self.kind == "largest":
            longest = self.longest = max(self.longest or 0, longest)
        if self.kind == "object":
            longest = self.box.longest = max(self.box.longest, longest)
        if self.kind == "global":
            longest = _longest = max(_longest, longest)
        if self.kind == "class":
            longest = Keeps.of_class = max(Keeps.of_class, longest)
        if self.kind == "buffer":
            if len(self.table) < longest:
                self.table = torch.linspace(0, 1, longest)
            longest = len(self.table)
        return self.second(self.hidden(x[:, :longest]).mean(1))


@pytest.mark.parametrize("kind", ["first", "largest", "object", "global", "class", "buffer"])
def test_what_a_batch_leaves_in_the_model_is_refused(kind: str) -> None:
    with pytest.raises(TraceError, match="values"):
        autopar.compile(Keeps(kind), "1 cpu", example_inputs=inputs_of(Longest), loss_fn=F.cross_entropy)


class Limited(Encoder):
    """A number of the model within what is asked."""

    limit, scale = 4, 1.0

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if (lengths > self.limit).any():
            x = x * self.scale * 0.5
        return self.second(self.hidden(x).mean(1))


def test_numbers_of_the_model_are_followed_beside_values() -> None:
    batches, module = [inputs_of(Longest, index) for index in (0, 0, 1, 1)], Limited()
    theirs = copy.deepcopy(module)
    compiled = autopar.compile(module, "1 cpu", example_inputs=batches[0], loss_fn=F.cross_entropy, optimizer=sgd)
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "optimizer": sgd, "plan": compiled.plan}
    step = compiled.build(device="cpu", also=[autopar.compile(module, "1 cpu", example_inputs=batches[2], **options)])
    losses, expected, optimizer = list[float](), list[float](), sgd(theirs.parameters())
    for batch, scale in zip(batches, (1.0, 2.0, 2.0, 3.0), strict=True):
        module.scale = theirs.scale = scale
        losses.append(float(step(step.local_batch(batch))))
        loss = F.cross_entropy(theirs(batch["x"], batch["lengths"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)


class ByLength(Encoder):
    """Reads a number of the model in long batches alone."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.hidden(x * self.scale if x.shape[1] > 4 else x).mean(1))


def test_numbers_that_other_programs_read_are_followed() -> None:
    whole, module = inputs_of(Longest), ByLength()
    batches = [{"x": whole["x"][:, :length], "y": whole["y"]} for length in (4, 6, 4, 6)]
    theirs = copy.deepcopy(module)
    compiled = autopar.compile(module, "1 cpu", example_inputs=batches[0], loss_fn=F.cross_entropy, optimizer=sgd)
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "optimizer": sgd, "plan": compiled.plan}
    other = autopar.compile(module, "1 cpu", example_inputs=batches[1], **options)
    module.scale = theirs.scale = 2.0
    step = compiled.build(device="cpu", also=[other])
    losses = [float(step(step.local_batch(batch))) for batch in batches[:3]]
    module.scale = 3.0
    losses.append(float(step(step.local_batch(batches[3]))))
    optimizer, expected = sgd(theirs.parameters()), list[float]()
    for batch in batches:
        theirs.scale = 3.0 if batch is batches[3] else 2.0
        loss = F.cross_entropy(theirs(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)


class Counts(Encoder):
    """Counts its calls, and computes with the count."""

    calls = 0

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.hidden(x).mean(1) / self.calls)


@pytest.mark.parametrize(("model", "name"), [(Longest, r"int\(lengths.max\(\)\)"), (Counts, "calls")])
def test_batches_that_are_accumulated_are_refused(model: type[Encoder], name: str) -> None:
    """Joined they are one call, of one longest sequence and one count, where each batch had its own."""
    config = TrainerConfig(cluster="1x2 cpu", steps=1, gradient_accumulation_steps=2, log_every=0)
    trainer = Trainer(model(), config, lambda start: iter([inputs_of(Longest)] * 2), loss_fn=F.cross_entropy)
    with pytest.raises(ConstraintError, match=f"go through one call of it\n.*{name}"):
        trainer.fit()
