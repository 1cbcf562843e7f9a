"""Kinds of losses under several micro-batches, pipelines, data and tensor parallelism: exact or refused, never wrong.

    python -m benchmarks.losses [KIND ...]

Every kind is a small model with a batch whose micro-batches differ in what counts (ragged padding, a micro-batch
without any valid target). Each is compiled for its plans and compared with the single process in real processes by
`autopar.verify`: loss, gradients and parameters of three steps. A kind that needs its whole batch at once must be
refused with more than one micro-batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.cluster import as_cluster
from autopar.errors import ConstraintError

ROWS, LENGTH, WIDTH, CLASSES = 8, 6, 16, 12
IGNORED = -100
TOLERANCE = 1e-5

PLANS: Mapping[str, dict[str, Any]] = {
    "micro-batches 2": {"dp": 1, "tp": 1, "micro_batches": 2},
    "pp2": {"pp": 2, "dp": 1, "tp": 1, "micro_batches": 2, "schedule": "1f1b"},
    "dp2": {"dp": 2, "tp": 1, "micro_batches": 1},
    "tp2": {"dp": 1, "tp": 2, "micro_batches": 1},
    "dp2, micro-batches 4": {"dp": 2, "tp": 1, "micro_batches": 4},
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A model, its batch and its loss. whole: why it needs its whole batch at once ("" where it does not)."""

    model: nn.Module
    batch: dict[str, Tensor]
    loss: Callable[..., Tensor] | None
    whole: str = ""


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Tokens(nn.Module):
    """Tokens [B, S] to logits [B, S, C]."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Regularised(Tokens):
    """Its loss has a penalty on the parameters beside the mean."""

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        loss = F.mse_loss(super().forward(tokens), target)
        return loss + 1e-2 * self.head.weight.pow(2).sum() + 0.5


class SumRegularised(Tokens):
    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        loss = F.mse_loss(super().forward(tokens), target, reduction="sum")
        return 1e-2 * loss + self.head.weight.pow(2).sum().sqrt()


class Balanced(Tokens):
    """A load-balancing loss: the product of two means over the batch."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(tokens)
        gates = logits.softmax(-1).flatten(0, 1)
        chosen = F.one_hot(gates.argmax(-1), CLASSES).float().mean(0)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + CLASSES * (chosen * gates.mean(0)).sum()


class Towers(nn.Module):
    """Two towers that a contrastive loss compares."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Tokens(), Tokens()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        a, b = (F.normalize(t(x).mean(1), dim=-1) for t, x in ((self.image, images), (self.text, texts)))
        logits = self.scale.exp() * a @ b.t()
        target = torch.arange(images.shape[0])
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


class Normalised(nn.Module):
    """Batch norm between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(image).mean((2, 3)))


def _tokens(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randint(0, CLASSES, (ROWS, LENGTH), generator=generator)  # noqa: E731
    return {"tokens": draw(), "labels": draw()}


def _ragged() -> dict[str, Tensor]:
    """Rows with fewer and fewer valid labels; the last micro-batch of four has none."""
    batch = _tokens()
    for row in range(ROWS):
        batch["labels"][row, max(LENGTH - 1 - row, 0) :] = IGNORED
    return batch


def _masked() -> dict[str, Tensor]:
    batch = _ragged()
    return {"tokens": batch["tokens"], "labels": batch["labels"].clamp(min=0), "mask": (batch["labels"] >= 0).float()}


def _values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"tokens": _tokens()["tokens"], "target": torch.randn(ROWS, LENGTH, CLASSES, generator=generator)}


def _bits() -> dict[str, Tensor]:
    batch = _values()
    return {"tokens": batch["tokens"], "target": (batch["target"] > 0).float()}


def _images() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    image = torch.randn(ROWS, 4, 6, 6, generator=generator)
    return {"image": image, "labels": torch.randint(0, CLASSES, (ROWS,), generator=generator)}


def _flat(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss of [N, C] and [N] for [B, S, C] and [B, S]."""
    return lambda logits, labels, *more: function(logits.flatten(0, 1), labels.flatten(), *more)


def _cross_entropy(**options: Any) -> Callable[..., Tensor]:
    return _flat(lambda logits, labels: F.cross_entropy(logits, labels, **options))


def _nll(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits, -1), labels, ignore_index=IGNORED)


def _masked_mean(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum().clamp(min=1)


def _z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy()(logits, labels) + 1e-2 * torch.logsumexp(logits, -1).pow(2).mean()


def _two_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean over valid targets and a sum per row."""
    rows = logits.pow(2).sum() / float(logits.shape[0])
    return _cross_entropy()(logits, labels) + 1e-3 * logits.abs().sum() + 1e-2 * rows


def _two_cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy()(logits[:, :-1], labels[:, 1:]) + 0.3 * _cross_entropy()(logits, labels)


def _per_row(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """The mean over rows of each row's own masked mean."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def _perplexity(logits: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy()(logits, labels).exp()


def _centred(logits: Tensor, labels: Tensor) -> Tensor:
    """Every row's gradient depends on all rows through the mean."""
    return _cross_entropy()(logits - logits.mean((0, 1)), labels)


WEIGHTS = tuple(0.5 + 0.25 * i for i in range(CLASSES))


class Weighted(Tokens):
    """Class weights are a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor(WEIGHTS))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        logits, weights = super().forward(tokens), self.weights
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weights, label_smoothing=0.1)


KINDS: Mapping[str, Callable[[], Kind]] = {
    "mean": lambda: Kind(Tokens(), _tokens(), _cross_entropy()),
    "sum": lambda: Kind(Tokens(), _ragged(), _cross_entropy(reduction="sum")),
    "masked mean": lambda: Kind(Tokens(), _masked(), _masked_mean),
    "mean of masked means per row": lambda: Kind(Tokens(), _masked(), _per_row),
    "weighted cross-entropy": lambda: Kind(Weighted(), _ragged(), None),
    "nll": lambda: Kind(Tokens(), _ragged(), _flat(_nll)),
    "cross-entropy of [N, C, L]": lambda: Kind(
        Tokens(), _ragged(), lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels)
    ),
    "label smoothing": lambda: Kind(Tokens(), _ragged(), _cross_entropy(label_smoothing=0.1)),
    "ignore_index, ragged": lambda: Kind(Tokens(), _ragged(), _cross_entropy(ignore_index=IGNORED)),
    "BCE": lambda: Kind(Tokens(), _bits(), F.binary_cross_entropy_with_logits),
    "MSE": lambda: Kind(Tokens(), _values(), F.mse_loss),
    "two losses": lambda: Kind(Tokens(), _ragged(), _two_losses),
    "two cross-entropies": lambda: Kind(Tokens(), _ragged(), _two_cross_entropies),
    "z-loss": lambda: Kind(Tokens(), _ragged(), _z_loss),
    "penalty on parameters": lambda: Kind(Regularised(), _values(), None),
    "sum and penalty": lambda: Kind(SumRegularised(), _values(), None),
    "dropout": lambda: Kind(Tokens(0.25), _ragged(), _cross_entropy()),
    "CLIP": lambda: Kind(Towers(), {"images": _tokens()["tokens"], "texts": _tokens(1)["tokens"]}, None, "rows"),
    "batch norm": lambda: Kind(Normalised(), _images(), F.cross_entropy, "batch_norm"),
    "load balancing": lambda: Kind(Balanced(), _tokens(), None),
    "exp of the mean": lambda: Kind(Tokens(), _ragged(), _perplexity),
    "centred on the batch": lambda: Kind(Tokens(), _tokens(), _centred, "not linear in a sum over the batch"),
}


def kind_of(name: str) -> Kind:
    """The same model and batch in every process."""
    torch.manual_seed(0)
    return KINDS[name]()


def result(name: str, plan: str, steps: int = 3) -> str:
    """ "exact", "refused: reason" or "WRONG: figures" of one kind under one plan."""
    kind, constraints = kind_of(name), PLANS[plan]
    ranks = constraints.get("pp", 1) * constraints["dp"] * constraints["tp"]
    arguments = {"example_inputs": kind.batch, "loss_fn": kind.loss, "constraints": constraints}
    try:
        report = autopar.verify(kind.model, as_cluster(f"{ranks} cpu"), steps=steps, **arguments)
    except ConstraintError as error:
        return f"refused: {error.values}"
    return ("exact" if report.ok(TOLERANCE) else "WRONG") + f" {report.loss:.1e}/{report.largest_gradient:.1e}"


def main() -> None:
    """Print the table; exit status 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="by default all")
    names, wrong = parser.parse_args().kinds or list(KINDS), 0
    for name in names:
        for plan in PLANS:
            found = result(name, plan)
            wrong += found.startswith("WRONG")
            print(f"{name:30s} {plan:22s} {found}", flush=True)
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
