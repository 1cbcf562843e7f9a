"""A script may have more than a model: modes, losses with tensors, loaders, another's process group."""

from __future__ import annotations

import copy
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import AutoparError
from autopar.frontend.inputs import name_inputs
from autopar.launch import run_ranks
from autopar.training.feeding import batches_from
from autopar.training.loaders import peeking
from codegen.runtime.mesh import Mesh
from codegen.runtime.parameters import Param, runs

ROWS = 8


class Complex(nn.Module):
    """A parameter that acts on a complex tensor, as rotary embeddings and Fourier layers have it."""

    def __init__(self):
        super().__init__()
        self.inner, self.filter = nn.Linear(8, 8), nn.Parameter(torch.randn(5, 2))

    def forward(self, x, y):
        turned = torch.fft.rfft(self.inner(x)) * torch.view_as_complex(self.filter)
        return F.mse_loss(torch.fft.irfft(turned, n=8), y)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return x + torch.relu(self.norm(self.linear(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Normed() for _ in range(4))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def batch():
    torch.manual_seed(1)
    return {"x": torch.randn(ROWS, 8), "y": torch.randn(ROWS, 8)}


def partly_frozen():
    model = Stack().eval()
    model.blocks[3].train()
    return model


def train(compiled, inputs):
    step = compiled.build()
    losses = [float(step(compiled.local_batch(inputs))) for _ in range(3)]
    return losses, {name: value.numpy() for name, value in step.full_state_dict().items()}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("make", "constraints"),
    [
        (Complex, {"dp": 2}),
        pytest.param(Complex, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param(Stack, {"tp": 2, "recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param(Stack, {"tp": 2, "recompute": "full"}, marks=pytest.mark.slow),
        pytest.param(partly_frozen, {"dp": 2}, marks=pytest.mark.slow),
    ],
)
def test_trained_as_by_a_plain_loop(make, constraints):
    torch.manual_seed(0)
    model, inputs = make(), batch()
    plain = copy.deepcopy(model)
    optimizer, losses = sgd(plain.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain(**inputs)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    compiled = autopar.compile(model, "2 cpu", example_inputs=inputs, optimizer=sgd, constraints=constraints)
    outcome = run_ranks(train, (compiled, inputs), 2)[0]
    torch.testing.assert_close(outcome[0], losses, rtol=1e-5, atol=1e-6)
    assert outcome[1].keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(torch.as_tensor(outcome[1][name]), value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_loss_module_keeps_its_tensors():
    torch.manual_seed(0)
    model, inputs = Plain(), {"x": batch()["x"], "target": torch.arange(ROWS) % 3}
    loss_fn = nn.CrossEntropyLoss(weight=torch.arange(1.0, 9.0))
    options = {"example_inputs": inputs, "loss_fn": loss_fn}
    report = autopar.verify(model, "2 cpu", constraints={"dp": 2, "micro_batches": 2}, **options)
    assert report.ok(1e-5), str(report)
    compiled = autopar.compile(model, "2 cpu", optimizer=sgd, **options)
    losses, state = run_ranks(train, (compiled, inputs), 2)[0]
    assert losses[0] == pytest.approx(loss_fn(model(inputs["x"]), inputs["target"]).item())
    assert state.keys() == model.state_dict().keys()


def test_a_loss_with_parameters_is_refused():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, output, y):
            return F.mse_loss(output * self.weight, y)

    with pytest.raises(AutoparError, match="loss_fn has trainable parameters"):
        autopar.compile(Plain(), "2 cpu", example_inputs=batch(), loss_fn=Head())


def test_modes_around_a_call_are_refused():
    options = {"example_inputs": batch(), "loss_fn": F.mse_loss}
    with torch.autocast("cpu"), pytest.raises(AutoparError, match="autocast"):
        autopar.compile(Plain(), "2 cpu", **options)
    compiled = autopar.compile(Plain(), "2 cpu", **options)
    with torch.no_grad(), pytest.raises(AutoparError, match=r"launch trains(.|\n)*no_grad"):
        compiled.launch(print)
    with torch.inference_mode(), pytest.raises(AutoparError, match=r"verify trains(.|\n)*inference_mode"):
        autopar.verify(Plain(), "2 cpu", **options)


def test_peeking_leaves_a_loader_as_it_was():
    data = torch.arange(16)
    loaders = [
        torch.utils.data.DataLoader(
            data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3), **options
        )
        for options in ({}, {"num_workers": 1, "persistent_workers": True})
    ]
    with peeking(loaders[1]):
        next(batches_from(loaders[1], 0))
    assert loaders[1]._iterator is None
    assert torch.equal(next(iter(loaders[0])), next(iter(loaders[1])))


# --- tensors and batches of an odd make -------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, y):
        return F.mse_loss(self.inner(x), y)


InOrder = namedtuple("InOrder", "x y")
Reversed = namedtuple("Reversed", "y x")
Unrelated = namedtuple("Unrelated", "features labels")


def test_a_named_tuple_goes_by_places_that_agree_with_its_names() -> None:
    x, y = torch.ones(2, 8), torch.zeros(2, 8)
    for kind in (InOrder, Unrelated):
        assert name_inputs(TwoInputs(), kind(x, y)) == {"x": x, "y": y}
    with pytest.raises(AutoparError, match="another order than forward's arguments"):
        name_inputs(TwoInputs(), Reversed(y=y, x=x))


def test_tensors_of_inference_mode_are_refused_before_training() -> None:
    """Else the run is trained to its end, and its values cannot be put into the model."""
    with torch.inference_mode():
        model = TwoInputs()
    with pytest.raises(AutoparError, match=r"under torch.inference_mode cannot be trained\n.*inner.weight"):
        autopar.compile(model, "1 cpu", example_inputs=(torch.ones(2, 8), torch.zeros(2, 8)))


def test_a_dimension_without_elements_has_no_runs() -> None:
    assert runs(0, Param((0, 4)), Mesh.create((), ())) == []


# --- a model that is changed after the program was made ---------------------------------------------------------------


class Unused(nn.Module):
    """With a parameter that the loss does not depend on, and one that two modules share."""

    def __init__(self):
        super().__init__()
        self.stack, self.head, self.spare = Stack(), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head.weight = self.stack.blocks[0].linear.weight

    def forward(self, x, y):
        return self.stack(self.head(x), y)


def freeze(model):
    model.stack.blocks[1].linear.weight.requires_grad_(False)


def freeze_unused(model):
    model.spare.bias.requires_grad_(False)


def untie(model):
    model.head.weight = nn.Parameter(torch.zeros(8, 8))


def tie(model):
    model.spare.weight = model.stack.blocks[2].linear.weight


def halve(model):
    model.half()


def add_parameter(model):
    model.spare.more = nn.Parameter(torch.zeros(2))


def other_module(model):
    model.stack.blocks[2].norm = nn.Identity()


def freeze_statistics(model):
    model.stack.blocks[3].norm.eval()


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (freeze, "stack.blocks.1.linear.weight: trainable float32 [8, 8] then, frozen"),
        pytest.param(freeze_unused, "spare.bias: trainable float32 [8] then, frozen", marks=pytest.mark.slow),
        (untie, "tied to stack.blocks.0.linear.weight then, trainable float32 [8, 8] now"),
        pytest.param(
            tie, "spare.weight: trainable float32 [8, 8] then, trainable float32 [8, 8], tied", marks=pytest.mark.slow
        ),
        (halve, "stack.blocks.0.linear.bias: trainable float32 [8] then, trainable float16 [8] now"),
        pytest.param(add_parameter, "spare.more: not there then", marks=pytest.mark.slow),
        (other_module, "stack.blocks.2.norm: BatchNorm1d then, Identity now"),
        (freeze_statistics, "stack.blocks.3.norm: BatchNorm1d then, BatchNorm1d in evaluation mode now"),
    ],
)
def test_a_model_that_was_changed_is_not_trained_as_it_was(change, name, tmp_path):
    model = Unused()
    compiled = autopar.compile(model, "1 cpu", example_inputs=batch(), optimizer=sgd)
    change(model)
    for use in (compiled.build, lambda: compiled.save(tmp_path / "program"), lambda: compiled.launch(print)):
        with pytest.raises(AutoparError, match="changed since it was compiled") as caught:
            use()
        assert name in str(caught.value)
    trainer = autopar.Trainer(model, autopar.TrainerConfig(cluster="1 cpu", steps=1), [batch()])
    trainer._program = compiled
    with pytest.raises(AutoparError, match="changed since it was compiled"):
        trainer.fit()


def test_new_values_reach_a_step_that_is_built_later():
    """A parameter that takes another's place in every use, values that are loaded, and a model that was evaluated."""
    torch.manual_seed(0)
    model, inputs = Unused(), batch()
    compiled = autopar.compile(model, "1 cpu", example_inputs=inputs, optimizer=sgd)
    model.load_state_dict(Unused().state_dict())
    model.spare.weight = nn.Parameter(torch.ones(8, 8))
    expected = float(model(**inputs).detach())
    model.eval()
    step = compiled.build()
    assert float(step(compiled.local_batch(inputs))) == pytest.approx(expected, rel=1e-5)
