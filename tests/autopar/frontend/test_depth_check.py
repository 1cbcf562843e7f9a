"""Which runs of blocks may be traced by their first two: those whose full-depth forward repeats, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.errors import TraceError
from autopar.frontend.depth import Truncation, equal_runs
from autopar.frontend.depth_check import verified
from autopar.frontend.skeleton import skeleton_of
from autopar.frontend.trace import trace
from autopar.ir.graph import LayerRun
from examples.models import EXAMPLES
from tests.autopar.interpret import run_graph, tensors_of

DEPTH = 6
WIDTH = 8
Step = Callable[["Model", Tensor], Tensor]


class Block(nn.Module):
    """x -> x + tanh(linear(x)); subclasses change what comes before or after."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.linear, self.layer_idx = nn.Linear(WIDTH, WIDTH), layer_idx

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Model(nn.Module):
    """A linear, `DEPTH` blocks used as `step` says, and the mean."""

    def __init__(self, step: Step, block: Callable[[int], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block(i) for i in range(DEPTH))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self, self.first(x)).square().mean()


def in_turn(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def cut_of(model: nn.Module) -> tuple[Truncation, ...]:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    skeletons = [skeleton_of(model, fake) for _ in range(2)]
    with fake:
        x = torch.empty(3, WIDTH)
    return verified(iter(skeletons), equal_runs(skeletons[0]), {"x": x}, lambda candidate: candidate(x), fake)


def assert_trace_equals_eager(model: nn.Module) -> None:
    x, parameters = torch.randn(3, WIDTH), list(model.parameters())
    graph = trace(model, (x,))
    loss, want = run_graph(graph, tensors_of(model), {"x": x}), model(x)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-8)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    expected = torch.autograd.grad(want, parameters, allow_unused=True)
    for have, gradient in zip(found, expected, strict=True):
        assert (have is None) == (gradient is None)
        if have is not None:
            torch.testing.assert_close(have, gradient, rtol=1e-5, atol=1e-8)


# --- runs that must not be cut ----------------------------------------------------------------------------------


def u_net(model: Model, x: Tensor) -> Tensor:
    """The second half of the blocks gets the first half's outputs, from the inside out."""
    kept: list[Tensor] = []
    for index, block in enumerate(model.blocks):
        x = block(x + kept.pop() if index >= DEPTH // 2 else x)
        kept += [x] if index < DEPTH // 2 else []
    return x


def skip_at_the_end(model: Model, x: Tensor) -> Tensor:
    outputs = [x := block(x) for block in model.blocks]
    return x * outputs[3]


def frozen_from_the_fourth(model: Model, x: Tensor) -> Tensor:
    for index, block in enumerate(model.blocks):
        with torch.set_grad_enabled(index < 3):
            x = block(x)
    return x + model.first(x)


def told_how_many_there_are(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x, 1 / len(model.blocks))
    return x


def divided_by_how_many_there_are(model: Model, x: Tensor) -> Tensor:
    return in_turn(model, x) / len(model.blocks)


def last_one_left_out(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks[:-1]:
        x = block(x)
    return x


def backwards(model: Model, x: Tensor) -> Tensor:
    for block in reversed(model.blocks):
        x = block(x)
    return x


def fifth_twice(model: Model, x: Tensor) -> Tensor:
    return model.blocks[4](in_turn(model, x))


def weight_of_the_fifth(model: Model, x: Tensor) -> Tensor:
    return in_turn(model, x) @ model.blocks[4].linear.weight


def state_halfway(model: Model, x: Tensor) -> Tensor:
    """Every block adds to a shared tensor; what it was after half of them is used at the end."""
    state = torch.zeros_like(x)
    halfway = state
    for index, block in enumerate(model.blocks):
        x = block(x, state)
        halfway = state.clone() if index == len(model.blocks) // 2 else halfway
    return x * halfway


def mask_for_each(model: Model, x: Tensor) -> Tensor:
    masks = [torch.full((WIDTH,), 0.1 * max(index, 2)) for index in range(DEPTH)]
    for mask, block in zip(masks, model.blocks, strict=True):
        x = block(x, mask)
    return x


class Scaled(Block):
    def forward(self, x: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        return super().forward(x) * scale


class Accumulating(Block):
    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        x = super().forward(x)
        state[:, : WIDTH // 2].add_(x[:, : WIDTH // 2])  # through a view, so that `state` itself is never a result
        return x


class ScaledFromTheSixth(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if self.layer_idx >= 5 else 1.0)


class ConstantFromTheSixth(Block):
    """The number is in a tensor, which no operator shows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(0.5 if self.layer_idx >= 5 else 1.0)


class Alternating(Block):
    """Gemma: every other layer sees a window only; here from the third on."""

    def forward(self, x: Tensor) -> Tensor:
        window = torch.ones(WIDTH, WIDTH).tril().triu(-2) if self.layer_idx > 1 and self.layer_idx % 2 else 1.0
        return x + nn.functional.linear(x, self.linear.weight * window)


class DetachedFromTheFourth(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.layer_idx < 3):
            y = self.linear(x)
        return x + y


class Remembering(Block):
    """Gemma 3n: later layers use what an earlier one left behind."""

    memory: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.layer_idx == 3:
            self.memory["x"] = x
        return x * self.memory["x"] if self.layer_idx == 5 else x


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("step", "block"),
    [
        (u_net, Block),
        (skip_at_the_end, Block),
        (frozen_from_the_fourth, Block),
        (told_how_many_there_are, Scaled),
        (divided_by_how_many_there_are, Block),
        (last_one_left_out, Block),
        (backwards, Block),
        (fifth_twice, Block),
        (weight_of_the_fifth, Block),
        (state_halfway, Accumulating),
        (mask_for_each, Scaled),
        (in_turn, ScaledFromTheSixth),
        (in_turn, ConstantFromTheSixth),
        (in_turn, Alternating),
        (in_turn, DetachedFromTheFourth),
        (in_turn, Remembering),
    ],
    ids=lambda value: value.__name__,
)
def test_runs_that_do_not_repeat_are_traced_in_full(step: Step, block: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(0)
    model = Model(step, block)
    assert cut_of(model) == ()
    assert_trace_equals_eager(model)


def test_tie_between_two_of_the_blocks() -> None:
    model = Model(in_turn)
    model.blocks[4].linear.weight = model.blocks[5].linear.weight
    assert cut_of(model) == ()
    assert_trace_equals_eager(model)


# --- runs that are cut --------------------------------------------------------------------------------------------


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    "name",
    # test_trace.py traces all of them whole.
    [
        n if n in ("gpt2", "llama", "vit") else pytest.param(n, marks=pytest.mark.slow)
        for n in sorted(EXAMPLES.keys() - {"mlp"})
    ],
)
def test_examples_are_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the MLP, which has no run. In T5 each side's first block, which makes the position bias, is no part."""
    seen: list[tuple[tuple[Truncation, ...], tuple[Truncation, ...]]] = []

    def spy(models: Iterator[nn.Module], cuts: tuple[Truncation, ...], *rest: object) -> tuple[Truncation, ...]:
        seen.append((cuts, verified(models, cuts, *rest)))  # type: ignore[arg-type]
        return seen[-1][1]

    monkeypatch.setattr("autopar.frontend.trace.verified", spy)
    example = EXAMPLES[name](layers=6)
    graph = trace(example.model, example.inputs, example.loss_fn)
    ((wanted, granted),) = seen  # once: a fold that failed would have traced again
    assert len(wanted) == (2 if name == "t5" else 1) and wanted == granted
    runs = [len(piece.instances) for piece in graph.body if isinstance(piece, LayerRun)]
    assert runs == ([5, 5] if name == "t5" else [6])


def same_for_all(model: Model, x: Tensor) -> Tensor:
    scale = torch.linspace(0.5, 1.0, WIDTH)
    for block in model.blocks:
        x = block(x, scale)
    return x


def state_at_the_end(model: Model, x: Tensor) -> Tensor:
    state = torch.zeros_like(x)
    for block in model.blocks:
        x = block(x, state)
    return x * state


class Constant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor(0.5)


class PartlyDetached(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.linear(x)
        return super().forward(x) * scale


class Normalised(Block):
    """Writes to its own buffers."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__(layer_idx)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("step", "block"),
    [
        (in_turn, Block),
        (same_for_all, Scaled),
        (state_at_the_end, Accumulating),
        (in_turn, Constant),
        (in_turn, PartlyDetached),
        (in_turn, Normalised),
    ],
    ids=lambda value: value.__name__,
)
def test_runs_that_repeat_are_cut(step: Step, block: Callable[[int], nn.Module]) -> None:
    torch.manual_seed(0)
    model = Model(step, block)
    assert cut_of(model) == (Truncation("blocks", DEPTH, 0),)
    assert_trace_equals_eager(model)


class TwoLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.good, self.bad = Model(in_turn), Model(skip_at_the_end)

    def forward(self, x: Tensor) -> Tensor:
        return self.bad(self.good(x) + x)


def test_only_the_list_that_does_not_repeat_is_left_whole() -> None:
    torch.manual_seed(0)
    model = TwoLists()
    assert cut_of(model) == (Truncation("good.blocks", DEPTH, 0),)
    assert_trace_equals_eager(model)


# --- the check itself -----------------------------------------------------------------------------------------------


class Counting(Block):
    """Counts its calls in Python, which no program does: refused, and the model stays as it is."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__(layer_idx)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = Model(in_turn, Counting)
    assert cut_of(model) == (Truncation("blocks", DEPTH, 0),)
    with pytest.raises(TraceError, match="calls of blocks.0"):
        trace(model, (torch.randn(3, WIDTH),))
    assert [block.calls for block in model.blocks] == [0] * DEPTH
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def asks_for_a_value(model: Model, x: Tensor) -> Tensor:
    return in_turn(model, x) * x.mean().item()


def test_forward_that_fake_tensors_cannot_run_is_not_cut() -> None:
    before = torch._C._set_grad_enabled, torch.is_grad_enabled, torch.is_inference_mode_enabled
    assert cut_of(Model(asks_for_a_value)) == ()
    assert (torch._C._set_grad_enabled, torch.is_grad_enabled, torch.is_inference_mode_enabled) == before
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
