"""What passes make of decisions, read off the program that is emitted for them.

Which reshards' sums run beside weight gradients, which runs of calls are one kernel or one function, and which products
are in e4m3 is decided where programs are rewritten (codegen/overlap.py, fusion, idioms.py, fp8.py). A prediction asks
the program that they give, so that it cannot count what no rank runs. The search has no program yet: it prices an
option by what passes do where nothing beside it is in their way (overlap.py, kernels.py, fp8.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.costs.fp8 import Fp8Pricer
from autopar.costs.kernels import KernelPricer
from autopar.costs.overlap import Site
from autopar.costs.price import Pricer
from autopar.ir.graph import Graph, Ref
from autopar.ir.mesh import Mesh
from autopar.lowering.lower import lower
from autopar.lowering.passes import passes
from autopar.options.choices import Choices
from autopar.options.fused import Fusion
from autopar.options.strategies import Operator, scopes_of
from codegen.idioms import with_idioms
from codegen.program import Call, Program

OVERLAPPED = {"overlapped.linear": 0, "overlapped.linears": 0, "overlapped.addmm": 1}
"""Calls whose input's gradient is summed beside weight gradients, and which argument that input is."""

IN_FP8 = frozenset({"fp8.linear", "fp8.linears", "fp8.addmm"})

Key = tuple[str, str]
"""(scope, call)"""


@dataclass(frozen=True, slots=True)
class Facts:
    """What one program says of the calls of its graph, whatever their number of rows.

    overlapped: resharded tensors whose gradient is summed over ranks beside weight gradients. made: (scope, target,
    call of the graph whose result it makes) of all calls. products: call in e4m3 -> how many share its cast of x.
    """

    overlapped: frozenset[Site] = frozenset()
    made: frozenset[tuple[str, str, str]] = frozenset()
    products: Mapping[Key, int] = field(default_factory=dict)


Known = dict[Hashable, Facts]
"""Programs of one model that were asked already, by all that they follow from."""


@dataclass(frozen=True, slots=True)
class Passed:
    """The facts of one program for a graph.

    fusions: call -> the run that is one kernel and has it as a member. unnamed: calls whose results have no variable,
    since a function of the run time makes them on its way (codegen/idioms.py), and frees them when it returns.
    """

    facts: Facts
    fusions: Mapping[Key, Fusion]
    unnamed: frozenset[Key] = frozenset()

    def priced(self, pricer: Pricer) -> Pricer:
        """The pricer for calls as this program has them."""
        found: dict[str, Any] = {"fusions": self.fusions} if isinstance(pricer, KernelPricer) else {}
        found |= {"products": self.facts.products} if isinstance(pricer, Fp8Pricer) else {}
        return replace(pricer, **found) if found else pricer


@dataclass(frozen=True, slots=True)
class _OneStage:
    """What lowering reads of a plan, of which nothing but the mesh matters for these facts."""

    mesh: Mesh
    cluster: str = ""
    precision: str = ""
    global_batch_size: int = 1
    num_micro_batches: int = 1


def passed(graph: Graph, operators: Mapping[Key, Operator], pricer: Pricer, choices: Choices, known: Known) -> Passed:
    """What the passes that the pricer prices make of these decisions."""
    if not pricer.has_program:
        return Passed(Facts(), {})
    has_kernels, has_fp8 = isinstance(pricer, KernelPricer), isinstance(pricer, Fp8Pricer)
    overlaps = pricer.overlap_share > 0
    runs = _runs(graph, operators) if has_kernels else []
    pays = tuple((f.node.name, f.node.op, f.pays(pricer.mesh.num_data_ranks)) for _, f in runs)
    key = has_kernels, has_fp8, overlaps, pricer.mesh, pays, _signature(choices)
    if key not in known:
        program = lower(graph, operators, _OneStage(pricer.mesh), choices)
        for rewrite in passes(fused=has_kernels, fp8=has_fp8, overlapped=overlaps):
            program = rewrite(program)
        known[key] = _facts(with_idioms(program))
    facts, fusions = known[key], dict[Key, Fusion]()
    for scope, fusion in runs:
        assert isinstance(pricer, KernelPricer)
        if (scope, fusion.node.op, fusion.node.name) in facts.made and pricer.is_one_call(fusion):
            fusions |= {(scope, member.name): fusion for member in fusion.members}
    named = {(scope, name) for scope, _, name in facts.made}
    calls = {(scope.name, node.name) for scope in scopes_of(graph) for node in scope.nodes}
    return Passed(facts, fusions, frozenset(calls - named))


def _facts(program: Program) -> Facts:
    overlapped, products, made = set[Site](), dict[Key, int](), set[tuple[str, str, str]]()
    classes = (("", program.root), *((layer.name, layer) for layer in program.layers))
    for scope, call in ((name, s) for name, cls in classes for s in cls.body if isinstance(s, Call)):
        results = [result.type.tensor[0] for result in call.results]
        made |= {(scope, call.target, name) for name in results}
        if call.target in OVERLAPPED:
            overlapped.add((scope, Ref(*call.args[OVERLAPPED[call.target]].type.tensor)))
        elif call.target in IN_FP8:
            products |= {(scope, name): len(results) for name in results}
    return Facts(frozenset(overlapped), frozenset(made), products)


def _runs(graph: Graph, operators: Mapping[Key, Operator]) -> list[tuple[str, Fusion]]:
    """Every run of calls that one kernel can do, with its scope, in the order in which programs prefer them."""
    scopes = [scope for scope in scopes_of(graph) if scope.nodes]
    runs = [(scope.name, operators[scope.name, scope.nodes[0].name].runs) for scope in scopes]
    return [(name, fusion) for name, found in runs if found is not None for fusion in found.all]


def _signature(choices: Choices) -> Hashable:
    """Equal for decisions that place all tensors alike."""
    calls = tuple((key, option.inputs, option.outputs) for key, option in choices.operators.items())
    return calls, tuple(choices.tensors.items()), tuple(choices.parameters.items())
