"""Mixtures of experts and expert parallelism of a given strategy.

An experts module is one that has `num_experts` experts in three-dimensional weights `down_proj` [E, H, F] (or
transposed) and `gate_up_proj` or `up_proj`, called with tokens [T, H], the experts of each token [T, k] and their
weights [T, k]: the form of the mixtures of experts in transformers. It is traced as a mixture of searched plans: each
token is repeated for its k experts, and a matmul by expert (rules/families/experts.py) multiplies every row by its
expert's matrix; results are weighted and added up. What lies between the first and the last matmul, and the exchange of
tokens, is priced for the tokens that the fullest rank has (cost_models/routing.py). Bytes are those of equal loads.

Under `ep` the ranks of a group of dp x cp hold E / ep experts each and exchange tokens by all_to_all. Balanced, a rank
gets as many rows as it gives, which is what is traced. Per module and
micro-batch there are two exchanges (dispatch, combine) of T k H elements forward and two backward
(D. Lepikhin et al., "GShard" (2020), section 3; S. Rajbhandari et al., "DeepSpeed-MoE" (2022), section 5), by the
fastest of the kinds that the framework has (costs/expert_exchange.py), which their seconds are named after. They are
exposed but for the share that the kind hides, at most behind all that the layer computes. A layer that is computed
again exchanges again. Gradients of experts are summed, and ZeRO shards them, over dp x cp / ep ranks. The ranks of a
group of ep are neighbors, tensor-parallel ones aside; under sequence parallelism those send a part of the tokens each.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from autopar.costs.expert_exchange import Mixture
from autopar.costs.price import Pricer
from autopar.errors import ConstraintError
from autopar.ir.chain import segments
from autopar.ir.graph import Graph, base_name, view_root
from autopar.ir.mesh import Mesh, zero_axes
from autopar.ir.placement import Placements, R, Stored
from autopar.operators.traits import MATMULS
from autopar.planning.solved_layers import SolvedLayer
from autopar.rules.families.experts import EXPERT_LINEAR
from autopar.sharding.call_options import num_local
from autopar.sharding.scopes import scopes_of
from autopar.strategies.exchange import Exchange, again
from cost_models import collective, routing

EXPERT_MODES = ("selective", "full")
"""Recompute modes that send tokens again: what arrives is kept by neither."""


# --- the model --------------------------------------------------------------------------------------------------------


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that have the form that this file's docstring tells."""
    return [module for module in model.modules() if _is_experts(module)]


def _is_experts(module: nn.Module) -> bool:
    down, up = (module._parameters.get(name) for name in ("down_proj", "up_proj"))
    up = module._parameters.get("gate_up_proj", up)
    three = down is not None and up is not None and down.dim() == up.dim() == 3
    return three and isinstance(getattr(module, "num_experts", None), int)


@contextlib.contextmanager
def share_of_experts(model: nn.Module, ep: int) -> Iterator[None]:
    """Within it, experts modules are matmuls by expert and have the ep-th part of their experts, without memory.

    Raises ConstraintError where ep does not divide the experts, or there are none.
    """
    modules = expert_modules(model)
    _check_experts(modules, ep)
    with contextlib.ExitStack() as stack:
        for kind in {type(module) for module in modules}:
            stack.enter_context(mock.patch.object(kind, "forward", routed_forward))
        for module in modules if ep > 1 else ():
            parts = {n: _part(p, ep) for n, p in module._parameters.items() if p is not None and p.dim() > 1}
            stack.enter_context(mock.patch.dict(module._parameters, parts))
        yield


def _check_experts(modules: list[nn.Module], ep: int) -> None:
    if ep == 1:
        return
    if not modules:
        raise ConstraintError(
            "ep splits experts, and the model has no module of them that autopar knows",
            values=f"ep={ep}",
            alternatives="ep=1, or a module with num_experts, down_proj [E, H, F] and gate_up_proj or up_proj",
        )
    for module in modules:
        count = int(getattr(module, "num_experts"))  # noqa: B009  # an attribute of the user's class
        if count % ep:
            legal = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise ConstraintError(
                "ep does not divide the experts", values=f"ep={ep}, {count} experts", alternatives=f"ep of {legal}"
            )


def _part(parameter: nn.Parameter, ep: int) -> nn.Parameter:
    shape = (parameter.shape[0] // ep, *parameter.shape[1:])
    return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)


def routed_forward(self: Any, tokens_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, H] -> [T, H], with the operator that searched plans have for experts."""
    T, H = tokens_TH.shape
    K = experts_TK.shape[-1]
    rows_NH = tokens_TH.repeat_interleave(K, 0)
    experts_N = experts_TK.reshape(T * K)
    if getattr(self, "has_gate", hasattr(self, "gate_up_proj")):
        gate = getattr(self, "_apply_gate", None)
        both_NF = _linear(self, rows_NH, experts_N, "gate_up_proj")
        inner_NF = gate(both_NF) if gate else _swiglu(self, both_NF)
    else:
        inner_NF = self.act_fn(_linear(self, rows_NH, experts_N, "up_proj"))
    out_NH = _linear(self, inner_NF, experts_N, "down_proj") * weights_TK.reshape(T * K, 1)
    return out_NH.view(T, K, H).sum(dim=1).to(tokens_TH.dtype)


def _linear(module: Any, x_NI: Tensor, experts_N: Tensor, name: str) -> Tensor:
    """[N, in] -> [N, out]; weights are [E, out, in], or [E, in, out] where `is_transposed`."""
    weight, bias = getattr(module, name), getattr(module, f"{name}_bias", None)
    if not getattr(module, "is_transposed", False):
        weight = weight.transpose(1, 2)
    result: Tensor = torch.ops.autopar.expert_linear(x_NI, weight, experts_N, bias)
    return result


def _swiglu(module: Any, both_NF: Tensor) -> Tensor:
    gate_NF, up_NF = both_NF.chunk(2, dim=-1)
    out_NF: Tensor = module.act_fn(gate_NF) * up_NF
    return out_NF


# --- the graph --------------------------------------------------------------------------------------------------------

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Routed:
    """One experts module as it is traced: experts of one rank, tokens and choices of each."""

    experts: int
    tokens: int
    choices: int


@dataclass(frozen=True, slots=True)
class Experts:
    """parameters: (scope, name) of experts' weights and biases; modules: their matmuls by (scope, module), in order;
    inner: (scope, call) from the first to the last of them; routed: by (scope, module)."""

    parameters: frozenset[Key] = frozenset()
    modules: Mapping[Key, tuple[str, ...]] | None = None
    inner: frozenset[Key] = frozenset()
    routed: Mapping[Key, Routed] | None = None

    @property
    def calls(self) -> frozenset[Key]:
        """The (scope, call) of all matmuls."""
        return frozenset((scope, call) for (scope, _), calls in (self.modules or {}).items() for call in calls)

    def fullest_load(self, ep: int, rows: float, skew: float) -> float:
        """The most tokens, over all modules, that the fullest of `ep` ranks gets by the mean. rows: on each of them, by
        those of the graph."""
        return max(
            (
                routing.fullest_load(ep, r.experts * ep, r.choices, r.tokens * rows * ep, skew)
                for r in (self.routed or {}).values()
            ),
            default=1.0,
        )


def experts_of(graph: Graph) -> Experts:
    """Found by their weights: three-dimensional parameters that a matmul reads, and what belongs to the same module."""
    modules: dict[Key, list[str]] = {}
    parameters: set[Key] = set()
    inner: set[Key] = set()
    routed: dict[Key, Routed] = {}
    for scope in scopes_of(graph):
        by_name = {p.name: p for p in (scope.layer.parameters if scope.layer else graph.parameters)}
        nodes = {node.name: node for node in scope.nodes}
        for node in scope.nodes:
            roots = [view_root(ref, nodes) for ref in node.inputs] if base_name(node.op) in MATMULS else []
            weights = [r.node for r in roots if r.node in by_name and len(by_name[r.node].meta.shape) == 3]
            if weights:
                modules.setdefault((scope.name, node.module), []).append(node.name)
                parameters |= {(scope.name, name) for name in weights}
        for node in scope.nodes:
            if (scope.name, node.module) in modules:
                read = {view_root(ref, nodes).node for ref in node.inputs}
                parameters |= {(scope.name, name) for name in read if name in by_name}
        names = [node.name for node in scope.nodes]
        for (owner, module), calls in modules.items():
            if owner == scope.name:
                between = names[names.index(calls[0]) : names.index(calls[-1]) + 1]
                inner |= {(owner, name) for name in between}
                first, tokens = nodes[calls[0]], tokens_of(graph)
                if first.op == EXPERT_LINEAR:
                    count = by_name[view_root(first.inputs[1], nodes).node].meta.shape[0]
                    routed[owner, module] = Routed(count, tokens, first.outputs[0].shape[0] // tokens)
    by_module = {key: tuple(calls) for key, calls in modules.items()}
    return Experts(frozenset(parameters), by_module, frozenset(inner), routed)


def tokens_of(graph: Graph) -> int:
    """Tokens of a graph's batch, by its first input of two dims or more."""
    return next((math.prod(i.meta.shape[:2]) for i in graph.inputs if len(i.meta.shape) > 1), graph.batch_size)


# --- prices -----------------------------------------------------------------------------------------------------------


def expert_mesh(mesh: Mesh, ep: int) -> Mesh:
    """The ranks of `mesh` as experts' parameters lie on them: neighbors of dp (dp x cp) have different experts."""
    sharing = mesh.size("dp") * mesh.size("cp")
    sizes = (("ddp", mesh.size("ddp")), ("dp", sharing // ep), ("ep", ep), ("tp", mesh.size("tp")))
    return Mesh(tuple(a for a, n in sizes if n > 1), tuple(n for _, n in sizes if n > 1))


def expert_stored(stored: Stored, mesh: Mesh, target: Mesh, zero: int) -> Stored:
    """How a parameter of which every rank has its own experts lies on `target`, if it lies on `mesh` as `stored`."""
    by_axis = dict(zip(mesh.axes, stored.placements, strict=True)) | {"ep": R}
    by_axis.setdefault("dp", by_axis.get("cp", R))
    placements = tuple(by_axis[axis] for axis in target.axes)
    return Stored(placements, zero if zero_axes(target.axes, placements) else 0)


def expert_exchanges(
    solved_layer: SolvedLayer,
    pricer: Pricer,
    experts: Experts,
    *,
    group: collective.Group,
    senders: int,
    load: float,
    dispatches: Iterable[str],
    skew: float,
) -> dict[str, list[Exchange]]:
    """Unit -> one exchange per experts module. group: of ep. senders: tensor-parallel ranks that send a part of the
    tokens each. load: tokens of the fullest rank by the mean. dispatches: kinds of exchange, of which the fastest is
    taken. skew: of experts' shares of tokens."""
    call_costs, exchanges_of = solved_layer.call_costs, dict[str, list[Exchange]]()
    data: Placements = tuple(R for _ in solved_layer.costed.axes)
    for (scope, module), calls in (experts.modules or {}).items():
        rows_in = call_costs.operators[scope, calls[0]].inputs[0]
        routed = (experts.routed or {}).get((scope, module), Routed(rows_in.shape[0], 0, 1))
        rows = num_local(rows_in, data, solved_layer.costed) / rows_in.shape[-1]
        rows /= solved_layer.costed.num_token_ranks * senders
        mixture = Mixture(
            group,
            num_experts=routed.experts * group.size,
            choices=routed.choices,
            tokens=rows / routed.choices,
            row_bytes=rows_in.shape[-1] * rows_in.dtype.itemsize,
            load=load,
            skew=skew,
        )
        kind = mixture.fastest(dispatches, pricer.cluster)
        forward = {f"{kind.name} ep": 2 * mixture.seconds(kind, pricer.cluster)}
        exchanges_of.setdefault(scope or segments(call_costs.graph)[calls[0]], []).append(
            Exchange(forward, forward, again(forward, EXPERT_MODES), hidden=kind.hidden)
        )
    return exchanges_of
