"""Context parallelism of a given strategy: every row is cut along its tokens over `cp` ranks.

The model is traced at S / cp tokens, so that all but attention costs what it costs on one rank. The ranks of cp hold
the same parameters: gradients and ZeRO shards go over dp x cp ranks. Attention has S / cp queries and S keys.
With a causal mask ranks share the work evenly: by stripes, or with the chunks i and 2 cp - 1 - i of 2 cp chunks (A.
Dubey et al., "The Llama 3 Herd of Models" (2024), section 3.3.2).

The exchange is priced by costs/context.py, as in searched plans: for generated programs with their copies and their
kernel for each part, for other frameworks as what crosses the links (`Habits`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.costs import host_calls
from autopar.costs.context import AttentionSeconds, ContextCall, Direction, Habits, NearCall, Ranks, call_of
from autopar.costs.layer_costs import HIDDEN
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.errors import ConstraintError
from autopar.ir.chain import segments
from autopar.ir.graph import Graph, TensorMeta, base_name, is_causal
from autopar.ir.mesh import Mesh
from autopar.operators.traits import ATTENTION
from autopar.options.scopes import scopes_of
from autopar.options.strategies import Operator, Option, num_local
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


def context_exchanges(
    solved_layer: SolvedLayer, pricer: Pricer, cp: int, by_ring: bool, habits: Habits
) -> dict[str, list[Exchange]]:
    """Unit -> one exchange per attention call, as costs/context.py prices it.

    solved_layer: whose calls have whole keys. pricer: of the whole strategy.
    """
    call_costs, found = solved_layer.call_costs, dict[str, list[Exchange]]()
    group = collective.Group(cp, pricer.mesh.size("tp"))

    def sent(kind: collective.Kind, axis: int, num_bytes: float) -> float:
        return collective.seconds(kind, num_bytes, group, pricer.cluster)

    for (scope, name), operator in call_costs.operators.items():
        if base_name(operator.node.op) not in ATTENTION:
            continue
        option, mesh, own = call_costs.assignment.operators[scope, name], solved_layer.costed, call_costs.pricer
        ranks = Ranks(
            exchange="ring" if by_ring else "all_gather",
            axis=0,
            size=cp,
            queries=operator.inputs[0].shape[-2],
            is_striped=is_causal(operator.node),
            habits=habits,
        )
        elements = sum(num_local(operator.inputs[i], option.inputs[i], mesh) for i in (1, 2)) // cp
        call = call_of(operator, option, mesh, ranks, elements, is_cpu(pricer.cluster))
        plain = own.operator_seconds(operator, option)
        kernels = _kernels(own, operator, option, mesh, call, plain, habits)
        kind = own.compute_kinds(operator)
        exchange = _exchange(call, call.directions(sent, own.memory_seconds, kernels), plain, kind)
        if habits.sends_again:
            repeated = {"selective": call.again_seconds(sent, own.memory_seconds)}
            exchange = replace(exchange, again={**exchange.again, **repeated}, host=_issued(operator, own))
        found.setdefault(scope or segments(call_costs.graph)[name], []).append(exchange)
    return found


def _issued(operator: Operator, pricer: Pricer) -> tuple[float, float]:
    """Return what the host of a generated program needs for a function of the run time in the place of a kernel."""
    one = host_calls.product_calls(sum(meta.requires_grad for meta in operator.inputs))
    forward, backward = (more - known for more, known in zip(host_calls.RUNTIME, one, strict=True))
    return pricer.host_call_seconds * forward, pricer.host_call_seconds * backward


def _kernels(
    pricer: Pricer,
    operator: Operator,
    option: Option,
    mesh: Mesh,
    call: ContextCall | NearCall,
    plain: tuple[float, float],
    habits: Habits,
) -> AttentionSeconds:
    """Seconds of the kernels. plain: of one kernel over all keys. Published frameworks take a part of it for each part
    of the keys; generated programs have a flash kernel for each part."""
    if not habits.copies:
        whole = call.size * call.keys
        return lambda keys, causal: (plain[0] * keys / whole, plain[1] * keys / whole)
    output = operator.node.outputs[0]
    moved = num_local(operator.inputs[0], option.inputs[0], mesh) * operator.inputs[0].dtype.itemsize
    moved += num_local(output, option.outputs[0], mesh) * output.dtype.itemsize
    width = operator.inputs[0].shape[-1]
    return pricer.kernels_of_context(call, width, moved + call.part, pricer.dtype_name(output))


def _exchange(
    call: ContextCall | NearCall,
    directions: tuple[Direction, Direction],
    plain: tuple[float, float],
    kinds: tuple[str, str],
) -> Exchange:
    """Return what a call takes beyond `plain`, the seconds of one kernel over all keys."""
    tables = []
    for own, known, kind in zip(directions, plain, kinds, strict=True):
        table = {f"{name} cp": seconds for name, seconds in own.sent.items()}
        table |= {HIDDEN: own.hidden} if own.hidden else {}
        more = own.kernels + own.copies - known
        tables.append(table | ({kind: more} if more else {}))
    return Exchange(
        forward=tables[0],
        backward=tables[1],
        again=again(tables[0], ATTENTION_MODES),
        forward_bytes=call.forward_temporary(),
        backward_bytes=call.backward_temporary(),
    )
