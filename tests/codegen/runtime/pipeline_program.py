"""A pipeline as the compiler would write it, and the same model in plain torch on one process.

Residual blocks with dropout between an embedding and a head that may share a weight. The first stage also sends its
embeddings and an integer mask past all others to the last one; a stage in the middle sends nothing but its result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from codegen.runtime.deferred import linear
from codegen.runtime.dropout import dropout, dropout_key
from codegen.runtime.dropout_module import DropoutModule
from codegen.runtime.layout import Layout
from codegen.runtime.parameters import Module, Param
from codegen.runtime.pipeline import Pipeline, Stage
from codegen.runtime.recompute import MemorySaving
from tests.codegen.runtime.mlp_program import make_optimizer

VOCABULARY, WIDTH, INNER, LENGTH, NUM_BLOCKS = 11, 6, 8, 4, 8
DROPOUT, SEED = 0.25, 5
TIED = "embed.weight"


def make_block(weight: Any) -> type[Module]:
    """The kind of layer that all stages run; its first parameters' gradients are there after I, the others' after W."""

    class Block(DropoutModule, MemorySaving):
        PARAMETERS = {
            "norm.weight": weight(WIDTH),
            "up.weight": weight(INNER, WIDTH, tp="S(0)"),
            "up.bias": weight(INNER, tp="S(0)"),
            "down.weight": weight(WIDTH, INNER, tp="S(1)"),
            "frozen": weight(WIDTH, requires_grad=False),
        }
        dropout_base, dropout_calls = 1, 1
        layout: Layout

        def forward(self, x: Tensor) -> Tensor:
            tp = self.mesh.tp
            h = tp.for_use(F.layer_norm(x, (WIDTH,)) * self.norm.weight)
            h = torch.tanh(linear(h, self.up.weight, self.up.bias))
            h = tp.all_reduce(linear(h, self.down.weight))
            return x + self.same_dropout(h, DROPOUT, call=0, layout=self.layout) * self.frozen

    return Block


def make_pipeline(
    pipeline_ranks: tuple[int, ...],
    rows: int,
    axes: tuple[str, ...] = (),
    sizes: tuple[int, ...] = (),
    zero: int = 0,
    boundary: str = "R",
    is_tied: bool = True,
    recompute: str = "none",
    dtype: str = "float64",
    hidden_dtype: str | None = None,
    meshes: tuple[Any, ...] | None = None,
    first_ranks: tuple[int, ...] | None = None,
    table: str = "R",
) -> Pipeline:
    """Stages for micro-batches of `rows` rows. boundary: how tp holds hidden states between stages, table ("R" or
    "S(1)"): the embedding's weight and the head's."""

    def weight(*shape: int, **options: Any) -> Param:
        return Param(shape, zero=zero, dtype=dtype, **{"dp": "Rp", **options})

    def hidden(tp: str = boundary, **options: Any) -> Param:
        return Param((rows, LENGTH, WIDTH), dp="S(0)", tp=tp, dtype=hidden_dtype or dtype, **options)

    Block = make_block(weight)
    Block.layout = Layout((rows, LENGTH, WIDTH), dp="S(0)")
    ids = Param((rows, LENGTH), dp="S(0)", dtype="int64")
    count = len(pipeline_ranks)
    cuts = [NUM_BLOCKS * stage // count for stage in range(count + 1)]

    def whole(module: Module, x: Tensor) -> Tensor:
        return module.mesh.tp.all_gather(x, 1, grad="full") if boundary != "R" else x

    def part(module: Module, x: Tensor) -> Tensor:
        return module.mesh.tp.slice(x, 1) if boundary != "R" else x

    def run(module: Module, x: Tensor) -> Tensor:
        x = whole(module, x)
        for block in module.layers_of(Block):
            x = block(x)
        return x

    class First(DropoutModule):
        PARAMETERS = {TIED: weight(VOCABULARY, WIDTH, tp=table)}
        LAYERS = {Block: ()}
        INPUTS = {"ids": ids}
        SENDS = {"hidden_0": hidden(), "skip": hidden("R"), "mask": ids}

        def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
            x = F.embedding(ids, self.embed.weight)
            x = self.mesh.tp.all_gather(x, 2, grad="full") if table != "R" else x
            skip = self.same_dropout(x, DROPOUT, call=0, layout=Block.layout)
            return part(self, run(self, part(self, x))), skip, (ids % 3 > 0).long()

    class Last(Module):
        PARAMETERS = {
            **({TIED: weight(VOCABULARY, WIDTH, tp=table, aliases=("head.weight",))} if is_tied else {}),
            **({} if is_tied else {"head.weight": weight(VOCABULARY, WIDTH, tp=table)}),
            "final.weight": weight(WIDTH),
        }
        BUFFERS = {"scale": Param((WIDTH,), dtype=dtype)}
        LAYERS = {Block: ()}
        RECEIVES = {
            f"hidden_{count - 2}": hidden(),
            "skip": hidden("R"),
            "mask": Param((rows, LENGTH), dp="S(0)", dtype="int64"),
        }
        INPUTS = {"labels": ids}

        def forward(self, skip: Tensor, mask: Tensor, labels: Tensor, num_targets: Any, **hidden: Tensor) -> Tensor:
            (x,) = hidden.values()
            x = run(self, x) * mask.unsqueeze(-1) + skip
            x = x * self.final.weight * self.scale.to(x.dtype)
            x = self.mesh.tp.slice(x, 2) if table != "R" else x
            logits = linear(x, self.head.weight)
            logits = self.mesh.tp.all_reduce(logits) if table != "R" else logits
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            return self.mesh.dp.all_reduce(total / num_targets[0])

        def count_targets(self, labels: Tensor) -> list[Tensor]:
            return [self.mesh.dp.sum_over((labels != -100).sum())]

    def make_middle(stage: int) -> type[Module]:
        class Middle(Module):
            LAYERS = {Block: ()}
            RECEIVES = {f"hidden_{stage - 1}": hidden()}
            SENDS = {f"hidden_{stage}": hidden()}

            def forward(self, **received: Tensor) -> Tensor:
                (x,) = received.values()
                return part(self, run(self, x))

        return Middle

    programs = [First, *(make_middle(stage) for stage in range(1, count - 1)), Last]
    stages = tuple(
        Stage(
            program,
            pipeline_rank,
            layers={Block: tuple(f"blocks.{i}" for i in range(cuts[index], cuts[index + 1]))},
            first_layer={Block: cuts[index]},
            recompute={Block: (recompute,) * (cuts[index + 1] - cuts[index])},
        )
        for index, (program, pipeline_rank) in enumerate(zip(programs, pipeline_ranks, strict=True))
    )
    return Pipeline(stages, axes, sizes, meshes, ((TIED, (0, count - 1)),) if is_tied else (), first_ranks)


def whole_state(is_tied: bool = True) -> dict[str, Tensor]:
    """Initial values of everything, equal wherever it is called."""
    generator = torch.Generator().manual_seed(7)
    shapes: dict[str, tuple[int, ...]] = {TIED: (VOCABULARY, WIDTH), "final.weight": (WIDTH,), "scale": (WIDTH,)}
    for index in range(NUM_BLOCKS):
        prefix = f"blocks.{index}."
        shapes |= {prefix + "norm.weight": (WIDTH,), prefix + "up.weight": (INNER, WIDTH), prefix + "up.bias": (INNER,)}
        shapes |= {prefix + "down.weight": (WIDTH, INNER), prefix + "frozen": (WIDTH,)}
    if not is_tied:
        shapes["head.weight"] = (VOCABULARY, WIDTH)
    return {name: 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def whole_batch(rows: int, seed: int) -> dict[str, Tensor]:
    """Ids and labels; few valid labels in the first rows, more in the last, so that means of means would be wrong."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    chance = torch.rand((rows, LENGTH), generator=generator) * rows
    return {"ids": ids, "labels": labels.masked_fill(chance > torch.arange(1, rows + 1)[:, None], -100)}


def eager_loss(state: dict[str, Tensor], batch: dict[str, Tensor], step: int) -> Tensor:
    """The whole model on the whole batch in plain torch; step: whose dropout, none if negative."""
    rows = len(batch["ids"])

    def drop(x: Tensor, call: int) -> Tensor:
        layout = Layout((rows, LENGTH, WIDTH))
        return dropout(x, DROPOUT, key=dropout_key(SEED, step, call), layout=layout, mesh=None) if step >= 0 else x

    x = F.embedding(batch["ids"], state[TIED])
    skip = drop(x, 0)
    for index in range(NUM_BLOCKS):
        prefix = f"blocks.{index}."
        h = F.layer_norm(x, (WIDTH,)) * state[prefix + "norm.weight"]
        h = torch.tanh(F.linear(h, state[prefix + "up.weight"], state[prefix + "up.bias"]))
        x = x + drop(F.linear(h, state[prefix + "down.weight"]), 1 + index) * state[prefix + "frozen"]
    x = x * (batch["ids"] % 3 > 0).unsqueeze(-1) + skip
    logits = F.linear(x * state["final.weight"] * state["scale"], state.get("head.weight", state[TIED]))
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


class EagerTraining:
    """The reference: one process, whole batch, plain torch."""

    def __init__(self, kind: str, max_grad_norm: float | None, is_tied: bool = True) -> None:
        self.state = whole_state(is_tied)
        names = [name for name in self.state if name != "scale" and not name.endswith("frozen")]
        self.trained = {name: self.state[name].requires_grad_() for name in names}
        self.optimizer = make_optimizer(kind, list(self.trained.values()))
        self.max_grad_norm = max_grad_norm
        self.grad_norm = torch.zeros(())
        self.num_steps = 0

    def step(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and the gradients before clipping."""
        self.optimizer.zero_grad()
        loss = eager_loss(self.state, batch, self.num_steps)
        loss.backward()
        gradients = {name: value.grad.clone() for name, value in self.trained.items() if value.grad is not None}
        if self.max_grad_norm is not None:
            self.grad_norm = torch.nn.utils.clip_grad_norm_(list(self.trained.values()), self.max_grad_norm)
        self.optimizer.step()
        self.num_steps += 1
        return loss.detach(), gradients


@dataclass(frozen=True, slots=True)
class EagerStep:
    """What one step of `EagerTraining` gives; evaluated: its batch's loss without dropout, before the step."""

    evaluated: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    grad_norm: Tensor


@cache
def eager_steps(
    kind: str, max_grad_norm: float | None, is_tied: bool, rows: int, num_steps: int
) -> tuple[list[EagerStep], dict[str, Tensor]]:
    """The first steps, and the state after them; for each process once, whatever is compared with them."""
    eager, steps = EagerTraining(kind, max_grad_norm, is_tied), []
    for index in range(num_steps):
        batch = whole_batch(rows, seed=index)
        with torch.no_grad():
            evaluated = eager_loss(eager.state, batch, -1)
        steps.append(EagerStep(evaluated, *eager.step(batch), eager.grad_norm))
    return steps, {name: value.detach() for name, value in eager.state.items()}
