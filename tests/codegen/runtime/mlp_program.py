"""A program as the compiler would write it, and the same model in plain torch on one process.

Two gated blocks over a tied embedding; tensor parallel by shards (one weight of two fused sections), data and context
parallel by Rp, odd sizes so that flat buffers need padding, one parameter without use, one frozen, one buffer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from codegen.runtime.parameters import Module, Param

VOCABULARY, WIDTH, INNER, LENGTH = 11, 6, 8, 6


def make_program(zero: int, rows: int, dtype: str = "float64") -> type[Module]:
    """The root class for micro-batches of `rows` rows; every trainable parameter under the given ZeRO stage."""

    def weight(*shape: int, **options: Any) -> Param:
        return Param(shape, zero=zero, dtype=dtype, **{"dp": "Rp", "cp": "Rp", **options})

    class Block(Module):
        PARAMETERS = {
            "norm.weight": weight(WIDTH),
            "gate_up.weight": weight(2 * INNER, WIDTH, tp="S(0/2)"),
            "gate_up.bias": weight(2 * INNER, tp="S(0/2)"),
            "down.weight": weight(WIDTH, INNER, tp="S(1)"),
            "frozen": weight(WIDTH, requires_grad=False),
        }

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            tp = self.mesh.tp
            h = tp.for_use(F.layer_norm(x, (WIDTH,)) * self.norm.weight)
            gate, up = F.linear(h, self.gate_up.weight, self.gate_up.bias).chunk(2, -1)
            h = tp.all_reduce(F.linear(torch.tanh(gate) * up, self.down.weight))
            return x + h * self.frozen * scale.to(h.dtype)

    class Root(Module):
        PARAMETERS = {
            "embed.weight": weight(VOCABULARY, WIDTH, aliases=("head.weight",)),
            "unused.weight": weight(3),
            "final.weight": weight(WIDTH),
        }
        BUFFERS = {"scale": Param((WIDTH,), dtype=dtype), "tables.unit": Param((1,), dtype=dtype, persistent=False)}
        LAYERS = {Block: ("blocks.0", "blocks.1")}
        INPUTS = {
            "ids": Param((rows, LENGTH), dp="S(0)", cp="S(1)", dtype="int64"),
            "labels": Param((rows, LENGTH), dp="S(0)", cp="S(1)", dtype="int64"),
        }

        def forward(self, ids: Tensor, labels: Tensor, num_targets: list[Tensor]) -> Tensor:
            hidden = F.embedding(ids, self.embed.weight)
            for block in self.layers_of(Block):
                hidden = block(hidden, self.scale * self.tables.unit)
            logits = F.linear(hidden * self.final.weight, self.head.weight)
            total = F.cross_entropy(logits.flatten(0, 1).to(self.scale.dtype), labels.flatten(), reduction="sum")
            return self.mesh.cp.all_reduce(self.mesh.dp.all_reduce(total / num_targets[0]), wait=False)

        def count_targets(self, ids: Tensor, labels: Tensor) -> list[Tensor]:
            return [self.mesh.cp.sum_over(self.mesh.dp.sum_over((labels != -100).sum()), wait=False)]

    return Root


def whole_state(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Initial values of everything, equal wherever it is called."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"embed.weight": (VOCABULARY, WIDTH), "unused.weight": (3,), "final.weight": (WIDTH,), "scale": (WIDTH,)}
    shapes["tables.unit"] = (1,)
    for block in ("blocks.0.", "blocks.1."):
        shapes[block + "norm.weight"] = (WIDTH,)
        shapes[block + "gate_up.weight"] = (2 * INNER, WIDTH)
        shapes[block + "gate_up.bias"] = (2 * INNER,)
        shapes[block + "down.weight"] = (WIDTH, INNER)
        shapes[block + "frozen"] = (WIDTH,)
    return {name: 0.4 * torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def whole_batch(rows: int, seed: int) -> dict[str, Tensor]:
    """Ids and labels; few valid labels in the first rows, more in the last, so that means of means would be wrong."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    chance = torch.rand((rows, LENGTH), generator=generator) * rows
    return {"ids": ids, "labels": labels.masked_fill(chance > torch.arange(1, rows + 1)[:, None], -100)}


def is_trainable(name: str) -> bool:
    return name not in ("scale", "tables.unit") and not name.endswith("frozen")


def eager_loss(state: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """The whole model on the whole batch in plain torch."""
    x = F.embedding(batch["ids"], state["embed.weight"])
    for block in ("blocks.0.", "blocks.1."):
        h = F.layer_norm(x, (WIDTH,)) * state[block + "norm.weight"]
        gate, up = F.linear(h, state[block + "gate_up.weight"], state[block + "gate_up.bias"]).chunk(2, -1)
        h = F.linear(torch.tanh(gate) * up, state[block + "down.weight"])
        x = x + h * state[block + "frozen"] * state["scale"] * state["tables.unit"]
    logits = F.linear(x * state["final.weight"], state["embed.weight"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def make_optimizer(kind: str, parameters: list[Any]) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=1e-1, momentum=0.9)


class EagerTraining:
    """The reference: one process, whole batch, plain torch."""

    def __init__(self, kind: str, max_grad_norm: float | None = None) -> None:
        self.state = whole_state()
        self.trained = {n: v.requires_grad_() for n, v in self.state.items() if is_trainable(n)}
        self.optimizer = make_optimizer(kind, list(self.trained.values()))
        self.max_grad_norm = max_grad_norm
        self.grad_norm = torch.zeros(())
        self.gradients: dict[str, Tensor] = {}

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        self.optimizer.zero_grad()
        loss = eager_loss(self.state, batch)
        loss.backward()
        for value in self.trained.values():
            value.grad = torch.zeros_like(value) if value.grad is None else value.grad
        self.gradients = {name: value.grad.clone() for name, value in self.trained.items() if value.grad is not None}
        if self.max_grad_norm is not None:
            self.grad_norm = torch.nn.utils.clip_grad_norm_(list(self.trained.values()), self.max_grad_norm)
        self.optimizer.step()
        return loss.detach()
