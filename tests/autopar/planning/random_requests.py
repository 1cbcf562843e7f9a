"""Small requests drawn from a seed: models of two towers, frozen parts, unlike layers, tied tables and mixtures, on
two to eight devices, with budgets that bind and pins of every kind.

A seed draws its model from MODELS shapes, each of which is traced once in a process. From seed ROUTED_FROM on, models
have layers of experts that ranks may share out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  # registers grouped_mm_fallback
from torch import nn

from autopar.cluster import as_cluster
from autopar.planning.make_request import request_of
from autopar.planning.request import Request, divisors
from autopar.planning.traced_model import traced_of
from autopar.settings.compile_options import CompileOptions
from autopar.settings.constraints import Constraints
from tests.autopar.requests import hostless

MODELS, ROUTED_MODELS, ROUTED_FROM = 24, 6, 216
EXPERTS, CHOICES = 4, 2
CLUSTERS = (
    "2 cpu",
    "4 cpu",
    "6 cpu",
    "8 cpu",
    "2 h100-sxm",
    "4 h100-sxm",
    "2x4 a100-80g",
    "6 a100-80g",
    "3 l4",
    "8 l4",
)
BATCHES = (4, 6, 8, 12)
POSITIONS, WORDS = 8, 24


class Block(nn.Module):
    """A layer with a residual, of the width of its tower."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Mixture(nn.Module):
    """Two layers weighted by a router."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, 2), nn.ModuleList(Block(width, inner) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        return sum(shares[..., i : i + 1] * each(x) for i, each in enumerate(self.experts))


class Routed(nn.Module):
    """A layer whose experts have the rows that a router sends them, sorted by expert as transformers does it."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, width, inner) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, inner, width) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        shares, choices = self.router(rows).softmax(-1).topk(CHOICES)
        own, order = torch.sort(choices.flatten())
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=x.device)
        ends = torch.histc(own.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        grouped = torch.ops.transformers.grouped_mm_fallback
        made = grouped(F.silu(grouped(rows[order // CHOICES], self.up, ends)), self.down, ends)[inverse]
        return x + (made.view(len(rows), CHOICES, -1) * shares[..., None]).sum(1).view_as(x)


KINDS = (("block",), ("attention",), ("block", "wide"), ("attention", "mixture"))
ROUTED_KINDS = (("routed",), ("attention", "routed"), ("block", "routed"))


class Tower(nn.Module):
    """A table, layers, and a head."""

    def __init__(self, random_: random.Random, is_routed: bool = False) -> None:
        super().__init__()
        width, depth = random_.choice((16, 32, 64)), random_.choice((1, 2, 3, 5))
        kinds = random_.choice(ROUTED_KINDS if is_routed else KINDS)
        self.table, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        if random_.random() < 0.3:
            self.head.weight = self.table.weight
        made = {
            "block": lambda: Block(width, 2 * width),
            "wide": lambda: Block(width, 6 * width),
            "mixture": lambda: Mixture(width, 2 * width),
            "routed": lambda: Routed(width, 2 * width),
            "attention": lambda: nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True),
        }
        self.layers = nn.ModuleList(made[kinds[i % len(kinds)]]() for i in range(depth))
        if random_.random() < 0.3:
            self.layers[0].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Model(nn.Module):
    """One tower, two trained ones, or one and a frozen teacher."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random_ = random.Random(f"model {seed}")
        self.kind = random_.choice(("one", "two", "teacher", "teacher"))
        is_routed = seed >= MODELS
        self.first = Tower(random_, is_routed)
        self.second = Tower(random_, is_routed) if self.kind != "one" else None
        if self.kind == "teacher":
            self.second.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.kind == "teacher":
            with torch.no_grad():
                wanted = self.second(tokens).softmax(-1)
            return F.kl_div(self.first(tokens).log_softmax(-1), wanted)
        scores = self.first(tokens)
        if self.second is not None:
            scores = scores * self.second(tokens).sigmoid()
        return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


@dataclass(frozen=True, slots=True)
class Drawn:
    """A request, with pins that a user may add. shares: of what the free plan needs, budgets of memory."""

    seed: int
    request: Request
    pins: tuple[dict[str, Any], ...]
    shares: tuple[float, ...]


@cache
def _traced(number: int, rows: int) -> tuple[nn.Module, CompileOptions, Any]:
    torch.manual_seed(number)
    model = Model(number)
    options = CompileOptions(example_inputs={"tokens": torch.randint(WORDS, (rows, POSITIONS))})
    return model, options, traced_of(model, options)


def draw(seed: int, num_pins: int = 4) -> Drawn:
    """The request of a seed: always the same."""
    random_ = random.Random(seed)
    cluster, rows = random_.choice(CLUSTERS), random_.choice(BATCHES)
    number = seed % MODELS if seed < ROUTED_FROM else MODELS + seed % ROUTED_MODELS
    model, options, known = _traced(number, rows)
    request = request_of(model, as_cluster(cluster), options, known)
    if random_.random() < 0.5:
        request = replace(request, cluster=hostless(request.cluster))
    devices = request.cluster.num_devices
    pins = [_pins(random_, _common(devices, rows)) for _ in range(num_pins)]
    more = random.Random(f"more pins {seed}")
    pins += [_pins(more, _common(devices, rows), _rare(devices)) for _ in range(num_pins)]
    shares = tuple(round(more.uniform(0.3, 1.0), 2) for _ in range(max(num_pins // 2, 1)))
    return Drawn(seed, request, tuple(pins), shares)


def pinned(request: Request, pins: dict[str, Any]) -> Request:
    """The request with pins beside its own budget."""
    limits = Constraints.parse(pins)
    return replace(request, constraints=replace(limits, memory_bytes=request.constraints.memory_bytes))


def within(request: Request, num_bytes: float) -> Request:
    """The request in so many bytes."""
    return replace(request, constraints=replace(request.constraints, memory_bytes=int(num_bytes)))


def _common(devices: int, rows: int) -> dict[str, tuple[Any, ...]]:
    """Pins of most requests, with their values."""
    degrees = tuple(divisors(devices))
    return {
        "pp": degrees,
        "tp": degrees,
        "dp": degrees,
        "zero": (0, 1, 2, 3),
        "micro_batches": tuple(divisors(rows)),
        "recompute": ("none", "full", "selective"),
        "schedule": ("1f1b", "zero-bubble", "gpipe"),
    }


def _rare(devices: int) -> dict[str, tuple[Any, ...]]:
    """Other pins."""
    degrees = tuple(divisors(devices))
    return {
        "cp": degrees,
        "ep": degrees,
        "ttp": degrees,
        "ddp": degrees,
        "offload": ("none", "optimizer", "parameters"),
        "schedule": ("interleaved", "zero-bubble-v"),
        "recompute": ("offload",),
    }


def _pins(
    random_: random.Random, common: dict[str, tuple[Any, ...]], rare: dict[str, tuple[Any, ...]] | None = None
) -> dict[str, Any]:
    """One to three pins; one of `rare` and up to two others, if it is given."""
    own = random_.choice(sorted(rare)) if rare else ""
    names = random_.sample(sorted(common.keys() - {own}), random_.choice((0, 1, 1, 2) if rare else (1, 1, 2, 2, 3)))
    found = {name: random_.choice(common[name]) for name in names}
    return {**found, own: random_.choice(rare[own])} if rare else found
