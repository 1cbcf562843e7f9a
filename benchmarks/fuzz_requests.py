"""Requests drawn from a seed, for `benchmarks.plan_fuzz`: any model, cluster, batch and pins that a user may write.

Models are built on meta from transformers' own classes. A seed draws its model from MODELS shapes, so that a process
traces each shape once, whatever it is planned for.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from autopar.cluster import as_cluster
from autopar.costs.rates import is_cpu
from autopar.costs.updates import adamw, training_of
from autopar.frontend.inputs import name_inputs
from autopar.frontend.rebatch import BatchedTrace
from autopar.frontend.trace import find_cuts, trace
from autopar.ir.compression import Compression
from autopar.ir.graph import Graph
from autopar.planning.request import Request
from autopar.settings.constraints import Constraints
from autopar.settings.fp8 import check_fp8
from cost_models.mixed_cluster import MixedCluster

MODELS = 20
"""Shapes of models that seeds share."""

FAMILIES = ("gpt2", "llama", "llama", "t5")
BILLIONS = (0.1, 0.35, 1.3, 3.0, 8.0, 13.0, 34.0, 70.0, 175.0, 405.0)
VOCABULARIES = (32000, 50257, 32003, 51200, 128256, 250112, 30522)
SEQUENCES = (128, 512, 1000, 1024, 2048, 4096, 8192)
HEADS = (1, 5, 7, 8, 12, 16, 20, 24, 25, 32, 40, 56, 64, 71, 96, 128)
DEVICES = ("v100-16g", "v100-32g", "a100-40g", "a100-80g", "h100-sxm", "h200-sxm", "b200", "rtx3090", "l4", "cpu")
NODES = (1, 1, 1, 1, 2, 3, 4, 6, 7, 8, 16, 64, 512)
PER_NODE = (1, 2, 3, 4, 4, 6, 7, 8, 8, 8, 8)
BATCHES = (1, 2, 3, 4, 6, 7, 8, 12, 16, 30, 32, 63, 64, 96, 128)
LARGE_BATCHES = (64, 128, 256, 384, 1000, 1024, 1536, 4096)
"""For more than FEW devices, and now and then for few."""
FEW = 16
PINNED = 0.8
"""How often the degrees of the mesh are pinned."""
RARE = 0.12
"""How often a pin of a kind is drawn."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model: its architecture and sizes."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    seq: int


@dataclass(frozen=True, slots=True)
class Draw:
    """A request as a user would write it."""

    seed: int
    shape: Shape
    cluster: str
    batch: int
    precision: str
    kernels: str
    fp8: bool
    compression: dict[str, str] | None
    constraints: dict[str, Any]


def draw(seed: int) -> Draw:
    """The request of a seed: always the same."""
    shape, random_ = shape_of(seed % MODELS), random.Random(seed)
    cluster, devices = _cluster(random_)
    batch = random_.choice(LARGE_BATCHES if devices > FEW or random_.random() < RARE / 4 else BATCHES)
    precision = ("bf16", "bf16", "fp32")[(seed % MODELS + (random_.random() < RARE)) % 3]
    kernels = random_.choice(("auto", "auto", "on", "off"))
    fp8 = precision == "bf16" and random_.random() < RARE / 3
    compression = random_.choice(({"gather": "int8"}, {"reduce": "int8"})) if random_.random() < RARE / 3 else None
    pins = _pins(random_, devices, batch, shape)
    return Draw(seed, shape, cluster, batch, precision, kernels, fp8, compression, pins)


@cache
def shape_of(number: int) -> Shape:
    """A model of about one of BILLIONS parameters, its number of heads and of layers drawn freely."""
    random_ = random.Random(f"shape {number}")
    family = random_.choice(FAMILIES)
    weights = random_.choice(BILLIONS) * 1e9
    # 12 hidden^2 weights a layer, and a hidden size of about 100 times the number of layers.
    layers = max(2, round((weights / 12 / 110**2) ** (1 / 3) * random_.uniform(0.7, 1.4)))
    wanted = math.sqrt(weights / 12 / layers)
    heads = random_.choice([h for h in HEADS if 24 <= wanted / h <= 200] or [8])
    head_dim = max(8, round(wanted / heads / 8) * 8)
    kv_heads = random_.choice([k for k in (1, 2, 4, 8, heads) if heads % k == 0])
    vocabulary, seq = random_.choice(VOCABULARIES), random_.choice(SEQUENCES)
    if family == "t5":  # an encoder and a decoder, and scores of its own
        layers, seq = max(1, layers // 2), min(seq, 1024)
    return Shape(family, layers, heads * head_dim, heads, kv_heads, vocabulary, seq)


def _cluster(random_: random.Random) -> tuple[str, int]:
    """(text, devices)"""
    if random_.random() < RARE / 2:
        parts = [(random_.choice((1, 2, 3)), random_.choice((2, 4, 8)), random_.choice(DEVICES[:7])) for _ in range(2)]
        text = " + ".join(f"{nodes}x{per_node} {device}" for nodes, per_node, device in parts)
        return text, sum(nodes * per_node for nodes, per_node, _ in parts)
    device, nodes, per_node = random_.choice(DEVICES), random_.choice(NODES), random_.choice(PER_NODE)
    nodes = 1 if device == "cpu" else nodes
    return f"{nodes}x{per_node} {device}", nodes * per_node


def _pins(random_: random.Random, devices: int, batch: int, shape: Shape) -> dict[str, Any]:
    def rarely(times: float = 1.0) -> bool:
        return random_.random() < RARE * times

    pins: dict[str, Any] = {}
    # A search over all layouts takes ten times as long as one with the degrees given.
    if random_.random() < PINNED:
        pins["tp"] = random_.choice([n for n in _divisors(devices) if n <= 16])
        pins["pp"] = random_.choice([n for n in _divisors(devices // pins["tp"]) if n <= max(shape.layers, 1)])
    for axis in ("pp", "ddp", "dp", "tp"):
        if axis not in pins and rarely(0.3 if axis == "ddp" else 1.0):
            known = _divisors(batch if axis in ("dp", "ddp") else devices)
            pins[axis] = random_.choice([n for n in known if n <= devices and n <= 64] or [1])
    for name, values in (
        ("zero", (0, 1, 2, 3)),
        ("schedule", ("gpipe", "1f1b", "zero-bubble", "interleaved", "zero-bubble-v")),
        ("recompute", ("none", "offload", "selective", "full")),
        ("offload", ("optimizer", "parameters", "none", "nvme:/scratch")),
        ("context", ("ring", "all_gather", "auto")),
    ):
        if rarely(0.2 if name == "context" else 1.0):
            pins[name] = random_.choice(values)
    if rarely(5.0 if devices > FEW else 2.0):
        pins["micro_batches"] = random_.choice(_divisors(batch))
    if rarely(2.5):
        pins["memory"] = f"{random_.choice((0.3, 1, 2, 4, 8, 12, 24, 40, 100, 300))}GiB"
    if rarely(0.5) or (rarely(3) and pins.get("schedule") == "interleaved"):
        pins["chunks"] = random_.choice((1, 2, 3, 4))
    if rarely():
        pins |= random_.choice(_tables(shape.family))
    return pins


def _tables(family: str) -> list[dict[str, Any]]:
    """Pins of placements by the names that the family has."""
    mlp, norm = {
        "gpt2": ("*.mlp.c_fc.weight", "*.ln_1"),
        "llama": ("*.mlp.up_proj.weight", "*.input_layernorm"),
        "t5": ("*.wi.weight", "*.final_layer_norm"),
    }[family]
    return [
        {"parameters": {mlp: {"tp": "R"}}},
        {"parameters": {mlp: {"tp": "S(0)"}}},
        {"parameters": {"*": {"tp": "Rp"}}},
        {"forbid_parameters": {mlp: {"tp": "S(0)"}}},
        {"activations": {norm: {"tp": "R"}}},
        {"activations": {norm: {"tp": "S(1)"}}},
        {"forbid_activations": {norm: {"tp": "S(1)"}}},
    ]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


# --- requests as the planner takes them -------------------------------------------------------------------------------


def request_of(drawn: Draw, cluster: Any = None) -> Request:
    """What `autopar.compile` plans for, from the same arguments. cluster: another one than the draw's.

    Raises AutoparError.
    """
    whole = as_cluster(cluster or drawn.cluster)
    compression, limits = Compression.parse(drawn.compression), Constraints.parse(drawn.constraints)
    if drawn.fp8:
        check_fp8(whole, drawn.precision)
    traced = trace_of(drawn.shape, drawn.precision)
    limits.check(traced(drawn.batch))
    first, mixed = whole.groups[0], whole if isinstance(whole, MixedCluster) else None
    training = replace(_training(drawn.precision, not is_cpu(first)), compression=compression)
    fused = drawn.kernels == "on" or (drawn.kernels == "auto" and not is_cpu(first))
    return Request(traced, first, drawn.batch, drawn.precision, training, limits, mixed, fused, drawn.fp8)


@cache
def _training(precision: str, on_gpu: bool) -> Any:
    return training_of(adamw, precision, on_gpu)


@cache
def trace_of(shape: Shape, precision: str) -> BatchedTrace:
    """The model's graphs, traced once in this process."""
    model, inputs = _build(shape)
    batch = name_inputs(model, inputs, None)
    cuts = find_cuts(model, batch, None)
    dtype = torch.bfloat16 if precision == "bf16" else None

    def at(rows: int) -> Graph:
        return trace(model, batch, None, batch_size=rows, param_dtype=dtype, cuts=cuts)

    return BatchedTrace(at)


def _build(shape: Shape) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """(model, batch of two rows) on meta."""
    import transformers

    with torch.device("meta"):
        model: Any
        if shape.family == "gpt2":
            sizes = {"n_embd": shape.hidden, "n_layer": shape.layers, "n_head": shape.heads}
            model = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(vocab_size=shape.vocabulary, n_positions=shape.seq, **sizes)
            )
            model.loss_type = "ForCausalLM"
        elif shape.family == "llama":
            model = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    vocab_size=shape.vocabulary,
                    hidden_size=shape.hidden,
                    intermediate_size=shape.hidden * 7 // 2,
                    num_hidden_layers=shape.layers,
                    num_attention_heads=shape.heads,
                    num_key_value_heads=shape.kv_heads,
                    max_position_embeddings=shape.seq,
                )
            )
        else:
            model = transformers.T5ForConditionalGeneration(
                transformers.T5Config(
                    vocab_size=shape.vocabulary,
                    d_model=shape.hidden,
                    d_kv=shape.hidden // shape.heads,
                    d_ff=4 * shape.hidden,
                    num_layers=shape.layers,
                    num_decoder_layers=shape.layers,
                    num_heads=shape.heads,
                    use_cache=False,
                    pad_token_id=0,
                    decoder_start_token_id=0,
                )
            )
        ids = torch.zeros(2, shape.seq, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids.clone()}
