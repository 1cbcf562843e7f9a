"""A program as the compiler would write it: transformer blocks, sequence and tensor parallel, with dropout.

Sizes are such that every flat buffer divides evenly over two ranks, so that its bytes have a formula without padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from codegen.runtime.dropout_module import DropoutModule
from codegen.runtime.layout import Layout
from codegen.runtime.parameters import Module, Param
from codegen.runtime.recompute import MemorySaving

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 16, 4, 8
LAYER_SHAPES = {
    "norm.weight": (WIDTH,),
    "qkv.weight": (3 * WIDTH, WIDTH),
    "out.weight": (WIDTH, WIDTH),
    "up.weight": (4 * WIDTH, WIDTH),
    "down.weight": (WIDTH, 4 * WIDTH),
}
ROOT_SHAPES = {"embed.weight": (VOCABULARY, WIDTH), "head.weight": (VOCABULARY, WIDTH)}


def make_program(
    rows: int, num_layers: int, zero: int = 0, dtype: str = "float64", p: float = 0.1, **tables: Any
) -> type[Module]:
    """The root class. tables: recompute, offload: one value for each layer. `runs` lists the layers as they run."""
    over_tp = {"qkv.weight": "S(0/3)", "out.weight": "S(1)", "up.weight": "S(0)", "down.weight": "S(1)"}

    class Block(DropoutModule, MemorySaving):
        PARAMETERS = {
            name: Param(shape, zero=zero, dtype=dtype, dp="Rp", tp=over_tp.get(name, "Rp"))
            for name, shape in LAYER_SHAPES.items()
        }
        dropout_calls = 2

        def forward(self, x: Tensor) -> Tensor:
            runs.append((self.path, self.rng.micro_batch))
            tp, layout = self.mesh.tp, Layout((rows, LENGTH, WIDTH), dp="S(0)", tp="S(1)")
            h = tp.all_gather(F.rms_norm(x, (WIDTH,)) * self.norm.weight, dim=1)
            qkv = F.linear(h, self.qkv.weight).view(h.shape[0], LENGTH, 3, HEADS // tp.size, WIDTH // HEADS)
            q, k, v = qkv.transpose(1, 3).unbind(2)
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            h = tp.reduce_scatter(F.linear(h, self.out.weight), dim=1)
            x = x + self.same_dropout(h, p, call=0, layout=layout)
            h = tp.all_gather(F.rms_norm(x, (WIDTH,)), dim=1)
            h = tp.reduce_scatter(F.linear(torch.tanh(F.linear(h, self.up.weight)), self.down.weight), dim=1)
            return x + self.same_dropout(h, p, call=1, layout=layout)

    class Root(Module):
        PARAMETERS = {
            name: Param(shape, zero=zero, dtype=dtype, dp="Rp", tp="Rp") for name, shape in ROOT_SHAPES.items()
        }
        LAYERS = {Block: tuple(f"blocks.{i}" for i in range(num_layers))}
        RECOMPUTE = {Block: tuple(tables["recompute"])} if "recompute" in tables else {}
        OFFLOAD = {Block: tuple(tables["offload"])} if "offload" in tables else {}
        INPUTS = {"ids": Param((rows, LENGTH), dp="S(0)", tp="S(1)", dtype="int64")}

        def forward(self, ids: Tensor) -> Tensor:
            hidden = F.embedding(ids, self.embed.weight)
            for block in self.layers_of(Block):
                hidden = block(hidden)
            loss = F.linear(hidden, self.head.weight).square().sum() / (rows * LENGTH)
            return self.mesh.tp.all_reduce(self.mesh.dp.all_reduce(loss), wait=False)

    runs: list[tuple[str, int]] = []
    Root.runs = runs
    return Root


def whole_state(num_layers: int) -> dict[str, Tensor]:
    """Initial values of everything, equal wherever it is called."""
    generator = torch.Generator().manual_seed(11)
    shapes = dict(ROOT_SHAPES)
    for index in range(num_layers):
        shapes.update((f"blocks.{index}.{name}", shape) for name, shape in LAYER_SHAPES.items())
    return {name: 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def whole_batch(rows: int, seed: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))}
