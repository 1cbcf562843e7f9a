"""The lowered program of an assignment: the basis of predictions.

Passes rewrite programs (autopar/lowering/passes.py). They decide which reshards' sums overlap weight gradients,
which runs of calls are one kernel or one function, and which products are in e4m3. The search has no program yet: it
prices an option as if nothing next to it blocked the passes (overlap.py, kernels.py, fp8.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.costs.fp8 import Fp8Layers
from autopar.costs.kernels import FusedKernels, is_one_call
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.ir.graph import Graph
from autopar.ir.mesh import EXPERT_AXES, Mesh
from autopar.lowering.lower import lower
from autopar.lowering.passes import passes
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator
from autopar.sharding.fusible_runs import Fusion
from autopar.sharding.scopes import scopes_of
from codegen.program import Call, ModuleClass, Program, reads
from codegen.source.idioms import with_idioms

IN_FP8 = frozenset({"fp8.linear", "fp8.linears", "fp8.addmm"})

Key = tuple[str, str]
"""(scope, call)"""


@dataclass(slots=True)
class Emitted:
    """A program, with cached units of its classes by scope and mesh (events.py), and their host calls (host_calls.py).

    Sizes are those of the first graph and mesh: a program for others has the same statements.
    """

    program: Program
    units: dict[tuple[str, Mesh], Any] = field(default_factory=dict)
    calls: dict[str, tuple[float, float]] = field(default_factory=dict)


Known = dict[Hashable, Emitted]
"""Cached programs of one model, by all that determines them."""


@dataclass(frozen=True, slots=True)
class _OneStage:
    """The plan that lowering reads; only the mesh affects the statements."""

    mesh: Mesh
    precision: str = ""
    global_batch_size: int = 1
    num_micro_batches: int = 1


def emitted(
    graph: Graph,
    operators: Mapping[Key, Operator],
    pricer: Pricer,
    assignment: Assignment,
    cache: Known,
    decisions: Hashable = None,
) -> Emitted:
    """Return the program of these decisions, after the passes that the pricer prices.

    decisions: equal for assignments that agree at several numbers of rows and axis sizes. Their programs differ only
    in sizes and numbers of sections: enough for seconds, not for bytes. By default only assignments that place all
    tensors of one mesh alike are equal.
    """
    has_kernels, has_fp8 = pricer.kernels is not None, pricer.fp8 is not None
    overlaps = pricer.rates.overlap_share > 0
    pays = tuple((f.node.name, f.pays(pricer.mesh.num_token_ranks)) for _, f in _runs(graph, operators, pricer))
    mixtures = mixtures_of(operators.values(), pricer.mesh)
    crossing = tuple((mixture, pricer.contractions.rows.neighbors(*mixture)) for mixture in mixtures)
    of_pricer = has_kernels, has_fp8, overlaps, pays, crossing, pricer.rates.is_compiled
    like = *of_pricer, pricer.mesh.axes, decisions
    if decisions is not None and like in cache:
        return cache[like]
    key = *of_pricer, pricer.mesh, _signature(assignment)
    if key not in cache:
        program = lower(graph, operators, _OneStage(pricer.mesh), assignment)
        for rewrite in passes(
            fused=has_kernels,
            fp8=has_fp8,
            overlapped=overlaps,
            neighbors=pricer.contractions.rows.neighbors if mixtures else None,
        ):
            program = rewrite(program)
        cache[key] = Emitted(with_idioms(program) if pricer.has_idioms else program)
    if decisions is not None:
        cache[like] = cache[key]
    return cache[key]


def mixtures_of(operators: Iterable[Operator], mesh: Mesh) -> list[tuple[int, int, tuple[str, ...]]]:
    """Return (experts, choices of each token, axes that may be flattened) of the mixtures whose rows may cross
    between nodes once per node."""
    mixtures = sorted({(op.inputs[1].shape[0], op.route.choices) for op in operators if op.route.choices})
    axes = [axis for axis in mesh.axes if axis in EXPERT_AXES]
    runs = [tuple(axes[first:end]) for first, end in itertools.combinations(range(len(axes) + 1), 2)]
    return [(*mixture, run) for mixture in mixtures for run in runs]


def priced(program: Program, graph: Graph, operators: Mapping[Key, Operator], pricer: Pricer) -> Pricer:
    """Return the pricer for this program: with its fused runs, its products in e4m3, and its expert rows that cross
    between nodes once per node."""
    changes: dict[str, Any] = {}
    calls = [(scope, call) for scope, cls in classes(program) for call in cls.body if isinstance(call, Call)]
    if pricer.kernels is not None:
        call_names = {(scope, call.target, name) for scope, call in calls for name in names_of(call)}
        fusions, on_cpu = dict[Key, Fusion](), is_cpu(pricer.cluster)
        for scope, fusion in _runs(graph, operators, pricer):
            if (scope, fusion.node.op, fusion.node.name) in call_names and is_one_call(fusion, on_cpu):
                fusions |= {(scope, member.name): fusion for member in fusion.members}
        changes["kernels"] = FusedKernels(fusions)
    if pricer.fp8 is not None:
        products = ((scope, names_of(call)) for scope, call in calls if call.target in IN_FP8)
        changes["fp8"] = Fp8Layers({(scope, name): len(names) for scope, names in products for name in names})
    if any(operator.route.choices for operator in operators.values()):
        from_tokens, to_tokens = (frozenset(_of_tokens(program, way)) for way in ("dispatch", "combine"))
        by_node = frozenset(_crossing(program))
        changes["experts"] = replace(pricer.experts, by_node=by_node, from_tokens=from_tokens, to_tokens=to_tokens)
    return replace(pricer, **changes) if changes else pricer


def _crossing(program: Program) -> Iterator[Key]:
    """Yield the calls of mixtures whose rows cross between nodes once per node."""
    for scope, cls in classes(program):
        calls = [call for call in cls.body if isinstance(call, Call)]
        routes = {result for call in calls if call.target == "runtime.NodeRoutes" for result in call.results}
        for call in calls:
            if not routes.isdisjoint(reads(call)):
                yield from ((scope, name) for original in call.original for name in names_of(original))


def _of_tokens(program: Program, way: str) -> Iterator[Key]:
    """Yield the expert layers whose mixture reads tokens ("dispatch") or sums rows by token ("combine")."""
    for scope, cls in classes(program):
        calls = [call for call in cls.body if isinstance(call, Call)]
        ends = [call for call in calls if call.target.endswith(f".{way}") and "choices" in dict(call.kwargs)]
        routes = {call.args[1] for call in ends}
        for call in calls:
            if not routes.isdisjoint(reads(call)):
                yield from ((scope, name) for original in call.original for name in names_of(original))


def classes(program: Program) -> Iterator[tuple[str, ModuleClass]]:
    """Yield every class with the name of its scope, the top level first."""
    yield "", program.root
    for layer in program.layers:
        yield layer.name, layer


def names_of(call: Call) -> tuple[str, ...]:
    """Return the graph's calls whose results a call computes."""
    return tuple(dict.fromkeys(result.type.tensor[0] for result in call.results if result.type.tensor[0]))


def _runs(graph: Graph, operators: Mapping[Key, Operator], pricer: Pricer) -> list[tuple[str, Fusion]]:
    """Return every run of calls that one kernel can compute, with its scope, in the order in which programs prefer
    them."""
    if pricer.kernels is None:
        return []
    scopes = [scope for scope in scopes_of(graph) if scope.nodes]
    runs = [(scope.name, operators[scope.name, scope.nodes[0].name].runs) for scope in scopes]
    return [(name, fusion) for name, fusions in runs if fusions is not None for fusion in fusions.all]


def _signature(assignment: Assignment) -> Hashable:
    """Return a key that is equal for decisions that place all tensors alike."""
    calls = tuple((key, option.inputs, option.outputs) for key, option in assignment.operators.items())
    return calls, tuple(assignment.tensors.items()), tuple(assignment.parameters.items())
