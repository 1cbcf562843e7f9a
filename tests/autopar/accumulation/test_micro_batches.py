"""Micro-batches: each loss is either that of the whole batch, value and gradients, or it is refused.

The whole batch on one process, with torch's own operators, in fp64, is what the micro-batches must give; the generated
programs in real processes are in test_losses.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cluster import as_cluster
from autopar.errors import ConstraintError, InfeasibleError, PlanError
from autopar.frontend.rebatch import BatchedTrace
from autopar.frontend.trace import trace
from autopar.plan import Plan
from benchmarks.losses import KINDS, Kind, kind_of
from examples.models import EXAMPLES
from tests.autopar.micro_batched import loss_in_micro_batches, traced

ROWS, LENGTH, WIDTH = 8, 5, 3
Loss = Callable[..., Tensor]


class Scores(nn.Module):
    """Rows [B, S, W] to scores of that shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(1.5))
        self.register_buffer("weights", torch.linspace(0.5, 2.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.gain


def batch_of(seed: int = 0) -> dict[str, Tensor]:
    """Rows of which ever fewer positions count; the last one has none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    valid = torch.arange(LENGTH)[None] < torch.linspace(LENGTH, 0, ROWS)[:, None].round()
    labels = torch.randint(0, WIDTH, (ROWS, LENGTH), generator=generator).masked_fill(~valid, -100)
    return {"x": x, "mask": valid.double(), "labels": labels}


def is_exact(loss_fn: Loss, count: int, seed: int = 0) -> bool:
    """Whether `count` micro-batches are allowed; asserts that they then give the whole batch's loss and gradients."""
    torch.manual_seed(seed)
    return check(Scores().double(), batch_of(seed), loss_fn, count)


def check(model: nn.Module, batch: Mapping[str, Tensor], loss_fn: Loss | None, *counts: int) -> bool:
    """The same of any model, for all counts alike."""
    graphs = traced(model, batch, loss_fn)
    allowed = {graphs.whole_batch_reason(count) is None for count in counts}
    for count in counts:
        if graphs.whole_batch_reason(count) is not None:
            continue
        whole = loss_of(model, batch, loss_fn)
        loss = loss_in_micro_batches(graphs(ROWS // count), model, batch, count)
        torch.testing.assert_close(loss.to(whole.dtype), whole, rtol=1e-6, atol=1e-9)
        parameters = [p for p in model.parameters() if p.requires_grad]
        expected = torch.autograd.grad(whole, parameters, allow_unused=True)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for want, have in zip(expected, gradients, strict=True):
            if want is not None:
                assert have is not None
                torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7)
    assert len(allowed) == 1, "some counts are refused and others are not"
    return allowed.pop()


def loss_of(model: nn.Module, batch: Mapping[str, Tensor], loss_fn: Loss | None) -> Tensor:
    """Return the whole batch's loss on one process."""
    if loss_fn is not None:
        first, *others = batch.values()
        return loss_fn(model(first), *others)
    output = model(**batch)
    loss: Tensor = output[1] if isinstance(output, tuple) else getattr(output, "loss", output)
    return loss


def masked_mean(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return (scores.mean(-1) * mask).sum() / mask.sum().clamp(min=1)


def mean_over_rows_squared(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return scores.sum() / (scores.shape[0] * scores.shape[0])


def unbiased(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return scores.pow(2).sum() / (scores.shape[0] - 1)


def rooted_count(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return (scores.mean(-1) * mask).sum() / (mask.sum() + 1).sqrt() + 2 - mask.mean() * mask.sum()


def by_class(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Classes weigh as the inverse of how often they occur in the batch."""
    counts = F.one_hot(labels.clamp(min=0), WIDTH).double().mul(mask[..., None]).sum((0, 1)) + 1
    return (scores * (mask[..., None] / counts)).sum()


def nll_in_space(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    weight = torch.ones(WIDTH, dtype=scores.dtype) * 0.5
    return F.nll_loss(F.log_softmax(scores, -1).transpose(1, 2), labels, weight=weight)


def scaled_by_rows(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """The root is taken of what was divided by the number of rows."""
    return (scores.pow(2).mean(-1) / scores.shape[0] + 1e-3).sqrt().sum() / float(scores.shape[0])


def one_minus(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """A dice loss whose union is known before."""
    return 1 - 2 * (scores.sigmoid().mean(-1) * mask).sum() / (mask.sum() + mask.numel())


def sequence_first(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    flat = scores.transpose(0, 1).reshape(-1, WIDTH)
    return F.cross_entropy(flat, labels.t().reshape(-1), ignore_index=-100, label_smoothing=0.1)


def pairs_of_rows(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """A micro-batch of some whole pairs has all that they need."""
    return scores.view(scores.shape[0] // 2, 2, -1).prod(1).mean()


def squeezed(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """With one row `squeeze` would drop the batch, and the difference would be broadcast."""
    return (scores.mean(-1, keepdim=True).squeeze() - mask).pow(2).mean()


def product_of_means(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return (scores.mean((0, 1)) * scores.sigmoid().mean((0, 1))).sum() + scores.pow(2).mean()


def balanced(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """As mixtures of experts balance their loads; of the two factors one has no gradient."""
    chosen = F.one_hot(scores.argmax(-1), WIDTH).double().mean((0, 1))
    return (chosen * scores.softmax(-1).mean((0, 1))).sum() + F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def learned_denominator(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """A dice loss."""
    return 1 - 2 * (scores.sigmoid().mean(-1) * mask).sum() / (scores.sigmoid().sum() + mask.sum())


def gram_matrix(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return (scores.flatten(1).t() @ scores.flatten(1)).norm() / scores.shape[0]


def sums_in_sums(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """A sum computed from a complete sum and an incomplete one must be complete, too."""
    first = (scores.pow(2).mean() + mask.mean()).log()
    return (first + scores.mean().exp() + scores.sigmoid().mean()).square() * (first + scores.mean())


def rows_over_a_detached_mean(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return (scores / (1 + scores.detach().pow(2).mean())).exp().mean()


def divided_by_a_variance(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Of the batch alone, but one sum over it needs another."""
    return scores.mean() / (mask - mask.mean()).pow(2).mean()


EXACT: tuple[Loss, ...] = (
    product_of_means,
    balanced,
    learned_denominator,
    gram_matrix,
    sums_in_sums,
    rows_over_a_detached_mean,
    divided_by_a_variance,
    masked_mean,
    mean_over_rows_squared,
    unbiased,
    rooted_count,
    by_class,
    nll_in_space,
    scaled_by_rows,
    one_minus,
    sequence_first,
    pairs_of_rows,
)


def quick(values: Any, *names: str) -> list[Any]:
    """All of them; those not named are slow."""
    return [pytest.param(v, id=_name(v), marks=() if _name(v) in names else pytest.mark.slow) for v in values]


def _name(value: Any) -> str:
    return value if isinstance(value, str) else str(value.__name__)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("loss_fn", quick(EXACT, "rooted_count", "nll_in_space", "sums_in_sums", "balanced"))
def test_losses_that_add_up_over_micro_batches(loss_fn: Loss) -> None:
    assert is_exact(loss_fn, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0].square().mean()


def test_recurrent_layers_without_dropout_draw_nothing() -> None:
    """Though their operator may."""
    assert check(Recurrent().double(), {"x": batch_of()["x"]}, None, 2)


@pytest.mark.slow
def test_the_number_of_micro_batches_does_not_matter() -> None:
    torch.manual_seed(0)
    assert check(Scores().double(), batch_of(), masked_mean, 2, 4, 8)


@pytest.mark.by_turns(8)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_models_may_be_cut_into_two_four_or_eight(name: str) -> None:
    example, counts = EXAMPLES[name](), (2, 4, 8)
    if name == "mixtral":  # Its product of groups has no fp64.
        graphs = traced(example.model, example.inputs, example.loss_fn)
        assert [graphs.whole_batch_reason(count) for count in counts] == [None] * 3
        return
    batch = {key: value.double() if value.is_floating_point() else value for key, value in example.inputs.items()}
    assert check(example.model.double(), batch, example.loss_fn, *counts)


WHOLE: Mapping[str, tuple[Loss, str]] = {
    "contrastive": (lambda s, m, y: (s.mean(1) @ s.mean(1).t()).logsumexp(1).mean(), "combines the rows"),
    "median": (lambda s, m, y: s.mean((1, 2)).median(), "looks across the rows"),
    "normalised over rows": (lambda s, m, y: ((s - s.mean(0)) * m[..., None]).pow(2).mean(), "not linear in a sum"),
    "deviation over rows": (lambda s, m, y: s.std(0).sum(), "looks across the rows"),
    "rows times a mean": (lambda s, m, y: (s * s.pow(2).mean()).exp().mean(), "not linear in a sum"),
    "means that rows are made into": (
        lambda s, m, y: s.pow(2).mean((0, 1)).expand(s.shape[0], WIDTH).mul(s.mean(1)).mean(),
        "not linear in a sum",
    ),
    "root of a mean of what a mean divides": (
        lambda s, m, y: (s / (1 + s.detach().pow(2).mean())).pow(2).mean().sqrt(),
        "depends on another one",
    ),
    "softmax over rows": (lambda s, m, y: (s.mean(-1).softmax(0) * m).sum(), "looks across the rows"),
    "neighboring rows": (lambda s, m, y: (s[1:] - s[:-1]).pow(2).mean(), "looks across the rows"),
    "half of the rows": (lambda s, m, y: s[: s.shape[0] // 2].mean(), "looks across the rows"),
    "first row": (lambda s, m, y: s[0].mean(), "looks across the rows"),
    "numbered rows": (lambda s, m, y: (s.mean((1, 2)) * torch.arange(s.shape[0])).sum(), "numbers the rows"),
    "largest row": (lambda s, m, y: s.mean((1, 2)).max(), "looks across the rows"),
    "halves of the batch": (lambda s, m, y: s.view(2, s.shape[0] // 2, -1).prod(0).mean(), "makes [2, 2, 15]"),
    "sum along rows": (lambda s, m, y: s.mean((1, 2)).cumsum(0).mean(), "looks across the rows"),
    "targets of its own": (
        lambda s, m, y: F.cross_entropy(
            s.flatten(0, 1), s.argmax(-1).flatten().masked_fill(s.mean(-1).flatten() > 0, -100)
        ),
        "known only after the forward",
    ),
}


@pytest.mark.parametrize(
    "name", quick(WHOLE, "contrastive", "normalised over rows", "numbered rows", "targets of its own")
)
def test_losses_that_need_the_whole_batch_are_refused_by_name(name: str) -> None:
    loss_fn, why = WHOLE[name]
    torch.manual_seed(0)
    graphs = traced(Scores().double(), batch_of(), loss_fn)
    assert why in str(graphs.whole_batch_reason(2)), graphs.whole_batch_reason(2)
    assert graphs.whole_batch_reason(1) is None


def test_one_row_in_a_micro_batch_is_the_whole_batchs_program_or_refused() -> None:
    torch.manual_seed(0)
    graphs = traced(Scores().double(), batch_of(), squeezed)
    assert graphs.whole_batch_reason(2) is None
    assert graphs.whole_batch_reason(8) is not None
    assert is_exact(masked_mean, 8)
    assert is_exact(scaled_by_rows, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in KINDS if n != "dropout"])
def test_the_kinds_of_the_table(name: str) -> None:
    kind = kind_of(name)
    graphs = traced(kind.model, kind.batch, kind.loss)
    reason = graphs.whole_batch_reason(2)
    assert kind.whole in reason if reason else not kind.whole, reason
    if not kind.whole:
        assert check(kind.model, kind.batch, kind.loss, 2)


class Masked(nn.Module):
    """Rows [B, S, W] of which a mask of shape [B, 1, 1], [1, S, 1] or of a table drops some, and their loss."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.ones(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = {
            "rows": torch.ones(x.shape[0], 1, 1),
            "like": torch.ones_like(x[:, :1]),
            "positions": torch.ones(1, x.shape[1], 1),
            "table": self.table,
        }[self.what]
        return (self.linear(x) * F.dropout(rows, 0.5)).square().mean()


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("what", ["rows", "like", "positions", "table"])
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), ROWS])
def test_masks_of_tensors_that_are_made_of_no_input(what: str, count: int) -> None:
    """Those of rows go on from micro-batch to micro-batch, others are the same in all."""
    torch.manual_seed(0)
    report = autopar.verify(
        Masked(what),
        "1 cpu",
        example_inputs={"x": torch.randn(ROWS, LENGTH, WIDTH)},
        constraints={"micro_batches": count},
    )
    assert report.ok(1e-5), report


# --- numbers that depend on the rows ----------------------------------------------------------------------------------


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("divisor", (lambda n: n * n, lambda n: n + 1, float, lambda n: 1 / n, lambda n: 3 * n))
def test_numbers_that_count_rows_are_right_at_every_number_of_rows(divisor: Callable[[int], float]) -> None:
    """Two traces give all others only where that is true of the numbers in arithmetic too."""

    def loss(scores: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        return scores.sum() / divisor(scores.shape[0])

    model, batch = Scores().double(), batch_of()
    graphs = BatchedTrace(lambda size: trace(model, batch, loss, batch_size=size))
    for rows in (8, 4, 2, 6):
        (call,) = [n for n in graphs(rows).body if getattr(n, "op", "") == "aten.div.Tensor"]
        assert call.args[1] == divisor(rows)  # type: ignore[union-attr]


# --- what a user is told ----------------------------------------------------------------------------------------------


def compiled(kind: Kind, **constraints: Any) -> autopar.CompiledProgram:
    cluster = as_cluster("1 cpu")
    return autopar.compile(
        kind.model, cluster, example_inputs=kind.batch, loss_fn=kind.loss, constraints=constraints or None
    )


def test_a_pin_to_more_micro_batches_is_refused_with_the_call_and_its_module() -> None:
    with pytest.raises(
        ConstraintError, match=r"micro_batches=2, but batch_norm \(batch_norm, blocks\.1\) looks across"
    ):
        compiled(kind_of("batch norm"), micro_batches=2)


@pytest.mark.slow
def test_the_search_under_memory_pressure_keeps_one_micro_batch_where_the_loss_needs_it() -> None:
    """With the least memory that does, a loss that adds up is cut into micro-batches and one that does not is not."""
    counts = {}
    for name in ("masked mean", "exp of the mean", "centred on the batch"):
        free = compiled(kind_of(name)).plan
        for share in (0.95, 0.9, 0.85, 0.8, 0.75, 0.7):
            try:
                plan = compiled(kind_of(name), memory=int(free.prediction.peak_bytes * share)).plan
            except InfeasibleError:
                break
            counts[name] = max(counts.get(name, 1), plan.num_micro_batches)
    assert counts["masked mean"] > 1 and counts["exp of the mean"] > 1
    assert counts.get("centred on the batch", 1) == 1


def test_an_infeasible_answer_says_why_the_batch_is_not_cut() -> None:
    with pytest.raises(InfeasibleError, match="micro-batches = 1, because sub .* is not linear in a sum"):
        compiled(kind_of("centred on the batch"), memory=10_000)


def test_a_plan_file_with_more_micro_batches_is_refused() -> None:
    kind = kind_of("CLIP")
    text = compiled(kind).plan.to_yaml()
    assert "micro_batches: 1" in text
    plan = Plan.from_yaml(text.replace("micro_batches: 1", "micro_batches: 2"))
    with pytest.raises(PlanError, match="matmul"):
        autopar.compile(kind.model, "1 cpu", example_inputs=kind.batch, loss_fn=kind.loss, plan=plan)
