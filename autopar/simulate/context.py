"""Context parallelism of a given strategy: every row is cut along its tokens over `cp` ranks.

The model is traced at S / cp tokens, so that all but attention costs what it costs on one rank. The ranks of cp hold
the same parameters: gradients and ZeRO shards go over dp x cp ranks. Attention has S / cp queries and S keys.
With a causal mask a rank has the chunks i and 2 cp - 1 - i of 2 cp chunks, so that all have the same work, the cp-th
part of the whole (A. Dubey et al., "The Llama 3 Herd of Models" (2024), section 3.3.2).

With B the bytes of the whole K and V of a rank's rows and heads, and b = B / cp those of one rank, ranks exchange by

    all-gather   forward all_gather(B), backward all_gather(B) again and reduce_scatter(B) of their gradients, all of it
                 exposed (Llama 3, the same section); the gathered tensors are alive in one layer at a time
    ring         in cp steps, each computing with the part at hand while the next one arrives (H. Liu, M. Zaharia,
                 P. Abbeel, "Ring Attention with Blockwise Transformers" (2023), section 3). With f and g the seconds of
                 attention forward and backward, a step lasts max(f / cp, p2p(b)) forward but for the last one, and
                 max(g / cp, p2p(2 b)) backward, where the gradients of K and V travel along and take one hop more home
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.costs.layer_costs import HIDDEN
from autopar.costs.price import Pricer
from autopar.errors import ConstraintError
from autopar.ir.chain import segments
from autopar.ir.graph import ATTENTION, Graph, TensorMeta, base_name, is_causal
from autopar.options.scopes import scopes_of
from autopar.options.strategies import Operator, num_local
from autopar.planning.solved_layers import SolvedLayer
from autopar.simulate.exchange import Exchange, again
from cost_models import collective

ATTENTION_MODES = ("full",)
"""Recompute modes that run attention again; "selective" keeps its result."""


def shortened(batch: Mapping[str, Any], cp: int) -> dict[str, Any]:
    """The batch with the cp-th part of its tokens: every dim behind the first that is as long as a row of tokens.

    Raises ConstraintError where there are no tokens, or cp does not divide them.
    """
    if cp == 1:
        return dict(batch)
    length = _num_tokens(batch)
    if length % cp:
        legal = ", ".join(str(n) for n in range(1, min(length, 256) + 1) if length % n == 0)
        raise ConstraintError("cp does not divide the tokens of a row", values=f"cp={cp}, {length} tokens",
                              alternatives=f"cp of {legal}")  # fmt: skip
    return {name: _cut(value, length, cp) for name, value in batch.items()}


def _num_tokens(batch: Mapping[str, Any]) -> int:
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim() >= 2]
    tokens = [value for value in tensors if not value.is_floating_point()]
    if not tokens:
        raise ConstraintError("cp cuts rows of tokens, and the batch has none", alternatives="cp=1")
    return int(tokens[0].shape[1])


def _cut(value: Any, length: int, cp: int) -> Any:
    if isinstance(value, torch.Tensor):
        for dim in range(1, value.dim()):
            if value.shape[dim] == length:
                value = value.narrow(dim, 0, length // cp)
    return value


def check_context(graph: Graph, cp: int) -> None:
    """Raises ConstraintError unless the keys that the other ranks hold can be counted, and shared out evenly. graph: of
    one rank's tokens."""
    nodes = [node for scope in scopes_of(graph) for node in scope.nodes]
    calls = [node for node in nodes if base_name(node.op) in ATTENTION]
    if not calls:
        raise ConstraintError(
            "cp needs attention as a call of scaled_dot_product_attention, and the model has none",
            alternatives='cp=1, or a model with attn_implementation="sdpa"',
        )
    tokens = calls[0].outputs[0].shape[-2]
    if tokens % 2 and any(map(is_causal, calls)):
        raise ConstraintError(
            "a causal mask is shared out in 2 cp chunks, which do not divide the tokens of a row",
            values=f"cp={cp}, {tokens * cp} tokens",
            alternatives=f"a multiple of {2 * cp} tokens",
        )


def with_whole_keys(operators: Mapping[tuple[str, str], Operator], cp: int) -> dict[tuple[str, str], Operator]:
    """Every attention call with the keys and values of all ranks of cp, as it computes."""
    return {
        key: _with_whole_keys(operator, cp) if base_name(operator.node.op) in ATTENTION else operator
        for key, operator in operators.items()
    }


def _with_whole_keys(operator: Operator, cp: int) -> Operator:
    query, key, value, *rest = operator.inputs
    masks = [
        replace(m, shape=(*m.shape[:-1], m.shape[-1] * cp)) if len(m.shape) > 1 and m.shape[-1] == key.shape[-2] else m
        for m in rest
    ]
    return replace(operator, inputs=(query, _longer(key, cp), _longer(value, cp), *masks))


def _longer(meta: TensorMeta, cp: int) -> TensorMeta:
    return replace(meta, shape=(*meta.shape[:-2], meta.shape[-2] * cp, meta.shape[-1]))


def context_exchanges(solved_layer: SolvedLayer, pricer: Pricer, cp: int, by_ring: bool) -> dict[str, list[Exchange]]:
    """Unit -> one exchange per attention call. solved_layer: whose calls have whole keys. pricer: of the whole
    strategy."""
    call_costs, found = solved_layer.call_costs, dict[str, list[Exchange]]()
    for (scope, name), operator in call_costs.operators.items():
        if base_name(operator.node.op) not in ATTENTION:
            continue
        option = call_costs.assignment.operators[scope, name]
        whole = sum(
            float(
                num_local(operator.inputs[i], option.inputs[i], solved_layer.costed) * operator.inputs[i].dtype.itemsize
            )
            for i in (1, 2)
        )
        seconds = call_costs.pricer.operator_seconds(operator, option)
        found.setdefault(scope or segments(call_costs.graph)[name], []).append(
            ring(whole, seconds, pricer, cp) if by_ring else all_gather(whole, pricer, cp)
        )
    return found


def all_gather(whole_bytes: float, pricer: Pricer, cp: int) -> Exchange:
    """The exchange by all_gather. whole_bytes: of K and V of all ranks of cp (the module's B)."""
    group = collective.Group(cp, pricer.mesh.size("tp"))
    gather, scatter = (
        collective.seconds(kind, whole_bytes, group, pricer.cluster) for kind in ("all_gather", "reduce_scatter")
    )
    forward = {"all_gather cp": gather}
    backward = {"all_gather cp": gather, "reduce_scatter cp": scatter}
    return Exchange(
        forward=forward,
        backward=backward,
        again=again(forward, ATTENTION_MODES),
        forward_bytes=whole_bytes,
        backward_bytes=2 * whole_bytes,
    )


def ring(whole_bytes: float, attention_seconds: tuple[float, float], pricer: Pricer, cp: int) -> Exchange:
    """whole_bytes: as in `all_gather`. attention_seconds: of this rank's forward and backward over all keys."""
    group = collective.Group(cp, pricer.mesh.size("tp"))
    part = whole_bytes / cp
    once, twice = (collective.seconds("p2p", n * part, group, pricer.cluster) for n in (1, 2))
    forward = _ring_steps(once, attention_seconds[0] / cp, cp)
    backward = _ring_steps(twice, attention_seconds[1] / cp, cp)
    backward["p2p cp"] += once
    # Of each tensor that travels, the part in use and the part that arrives.
    return Exchange(
        forward=forward,
        backward=backward,
        again=again(forward, ATTENTION_MODES),
        forward_bytes=2 * part,
        backward_bytes=4 * part,
    )


def _ring_steps(message: float, compute: float, cp: int) -> dict[str, float]:
    hidden = min(message, compute)
    return {"p2p cp": (cp - 1) * (message - hidden), HIDDEN: (cp - 1) * hidden}
