"""Default behavior of training systems that affects seconds and bytes: named profiles, as data.

The profiles are in ``machines/frameworks.toml``, with a source for each constant.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from types import MappingProxyType

from cost_models.dispatch import dispatch

FUSIONS = ("calls", "modules", "chains")
KERNELS = ("fa2", "fa3", "cudnn", "triton")
ATTENTIONS = ("flash", "unfused", *KERNELS)
STAGES = ("time", "layers", "weights")
CP_EXCHANGES = ("all-gather", "ring")
CP_HABITS = ("published", "generated")
HOST_SECONDS = tuple(f"host_{of}_seconds" for of in ("layer", "collective", "apart", "far", "step"))


@dataclass(frozen=True, slots=True)
class Framework:
    """The behavior of one framework, under which given strategies are predicted.

    fusion: which memory-bound calls share a kernel: none ("calls"), neighbors in one module, such as the operators of a
    norm ("modules"), or every run of pointwise calls ("chains").
    attention: one of the flash kernels of `Device.attention_variants` ("flash": the usual one of the time, fa2), or
    "unfused": two matmuls with a softmax between.
    attention_passes: reads and writes of the scores of unfused attention, forward and backward together.
    shards_weights: tensor parallelism shards every matrix.
    sequence_parallel: activations between such matrices are sharded along the sequence.
    stages: how a pipeline is cut: minimize the longest stage ("time"), put equally many layers on each stage with the
    ends on top ("layers"), or balance multiply-adds of weights including a final matrix ("weights").
    overlap: the share of a micro-batch's compute that can hide traffic of data parallelism; -1: the share of that
    traffic that the planner takes to be hidden.
    zero_overlaps: whether this includes gradients that ZeRO shards.
    async_linears: a tensor-parallel linear sends its input's gradient while it computes its weight's.
    cp_exchange: context-parallel ranks gather keys and values before attention, or pass them around while it computes
    ("ring").
    cp_habits: whether the price covers only the traffic on the links ("published"), or also the copies and kernels of
    generated programs.
    gradient_bytes: of a gradient as it is reduced, in 16-bit training (0: the planner's).
    accumulate_bytes: moved per parameter and micro-batch to add up gradients.
    gradient_copy_bytes: of a second copy of all gradients, kept for the update.
    optimizer_bytes: moved per parameter and step by clipping, unscaling and the update, in 16-bit training (0: the
    planner's).
    host_layer_seconds: the host's time to launch a layer's forward and backward.
    host_collective_seconds: added per tensor-parallel collective.
    host_apart_seconds: added per layer and tensor-parallel rank where a pipeline of such groups spans nodes.
    host_far_seconds: the same where such a group itself spans nodes.
    host_step_seconds: once per step of a pipeline, between its last backward and its next forward. A micro-batch takes
    at least the time of its host.
    loss_bytes: moved per logit by a language model's loss, forward and backward (0: the planner's).
    dispatches: the available kinds of expert exchange (`dispatch`); the fastest is taken.
    gathers_again: linear layers keep only their tensor-parallel rank's shard of the input and gather the rest again in
    backward, which saves kept bytes; its seconds are taken to be hidden.
    source: the origin of the constants.

    Raises ValueError for unknown words and for negative figures.
    """

    name: str
    source: str
    fusion: str = "calls"
    attention: str = "flash"
    attention_passes: float = 12.0
    shards_weights: bool = True
    sequence_parallel: bool = True
    stages: str = "layers"
    overlap: float = 0.0
    zero_overlaps: bool = True
    async_linears: bool = False
    cp_exchange: str = "all-gather"
    cp_habits: str = "published"
    gradient_bytes: int = 0
    accumulate_bytes: float = 0.0
    gradient_copy_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    loss_bytes: float = 0.0
    host_layer_seconds: float = 0.0
    host_collective_seconds: float = 0.0
    host_apart_seconds: float = 0.0
    host_far_seconds: float = 0.0
    host_step_seconds: float = 0.0
    dispatches: tuple[str, ...] = ("all_to_all",)
    gathers_again: bool = False

    def __post_init__(self) -> None:
        words = (("fusion", FUSIONS), ("attention", ATTENTIONS), ("stages", STAGES), ("cp_exchange", CP_EXCHANGES))
        for key, legal in (*words, ("cp_habits", CP_HABITS)):
            if getattr(self, key) not in legal:
                raise ValueError(f"framework {self.name}: {key} must be one of {', '.join(legal)}")
        for name in self.dispatches:
            dispatch(name)
        figures = ("attention_passes", "gradient_bytes", "accumulate_bytes", "optimizer_bytes")
        for key in (*figures, "gradient_copy_bytes", "loss_bytes", *HOST_SECONDS):
            if not getattr(self, key) >= 0:
                raise ValueError(f"framework {self.name}: {key} must be zero or more, got {getattr(self, key)!r}")
        if not (self.overlap == -1 or 0 <= self.overlap <= 1):
            raise ValueError(f"framework {self.name}: overlap must be -1 or in [0, 1], got {self.overlap!r}")

    @property
    def hides_by_share(self) -> bool:
        """Whether a fixed share of the traffic is hidden, whatever compute is available to hide it."""
        return self.overlap < 0


@cache
def frameworks() -> Mapping[str, Framework]:
    """Return the built-in profiles by name."""
    text = resources.files("cost_models").joinpath("machines", "frameworks.toml").read_text(encoding="utf-8")
    allowed = {item.name for item in fields(Framework)}
    profiles = {}
    for name, table in tomllib.loads(text).items():
        if surplus := sorted(table.keys() - allowed):
            raise ValueError(f"framework {name}: unknown keys {surplus}")
        lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
        profiles[name] = Framework(name, **{**table, **lists})
    return MappingProxyType(profiles)


def framework(name: str) -> Framework:
    """Return the profile called `name`. Raises ValueError that lists the known profiles."""
    if name not in frameworks():
        close = difflib.get_close_matches(name, frameworks(), 1, 0.4)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown framework {name!r}.{hint} Known: {', '.join(frameworks())}.")
    return frameworks()[name]
