"""A program of one call: lowered and emitted as a call of any program, and loaded in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

from torch import Tensor

from autopar.ir.draws import draw_numbers
from autopar.ir.graph import Graph, Input, Node, Ref, TensorMeta, with_refs
from autopar.ir.mesh import Mesh
from autopar.lowering.scope_lowering import Lowering, Shared, dtype_name
from autopar.rules.localize import tensor_placements
from autopar.rules.rule import AxisOption, Rule
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator, Option
from autopar.sharding.scopes import scopes_of
from codegen.check_source import check_files
from codegen.program import ModuleClass, Program, Spec
from codegen.runtime.parameters import Module
from codegen.source.emit import emit_model

MODEL = "Model"


def call_graph(node: Node, inputs: tuple[TensorMeta, ...]) -> Graph:
    """Return the graph of a model of just this call. Every tensor argument is an input, with its own gradient."""
    numbers = count()
    call = with_refs(node, lambda _: Ref(f"input_{next(numbers)}"))
    formal = tuple(Input(ref.node, meta) for ref, meta in zip(call.inputs, inputs, strict=True))
    return Graph(name=MODEL, inputs=formal, parameters=(), body=(call,), loss=Ref(node.name), batch_size=1)


def call_program(graph: Graph, rule: Rule, options: tuple[AxisOption, ...], mesh: Mesh) -> Program:
    """Lower a call, whose inputs and results have the placements of the options, one per axis of the mesh."""
    (scope,) = scopes_of(graph)
    (node,) = scope.nodes
    inputs = {formal.name: formal.meta for formal in graph.inputs}
    results = tuple(Ref(node.name, index) for index in range(len(node.outputs)))
    places_in, places_out = tensor_placements(options) if options else (((),) * len(inputs), ((),) * len(results))
    key = "", node.name
    assignment = Assignment(
        {key: Option(options, places_in, places_out)},
        {("", Ref(name)): places for name, places in zip(inputs, places_in, strict=True)},
        {},
    )
    operator = Operator("", node, tuple(inputs.values()), rule, has_rule=True, batch=None, sections={})
    shared = Shared(
        graph=graph,
        operators={key: operator},
        mesh=mesh,
        assignment=assignment,
        scopes={scope.name: scope},
        results=results,
        numbers=draw_numbers(graph),
    )
    lowering = Lowering(shared, scope)
    entering = tuple(lowering.available[Ref(name), lowering.placements[Ref(name)]] for name in inputs)
    body = lowering.run(graph.body)
    outputs = tuple(lowering.available[ref, lowering.placements[ref]] for ref in results)
    counting = Lowering(shared, scope) if lowering.losses else lowering
    statements, counts = counting.count_targets(lowering.losses)
    cls = ModuleClass(
        name=MODEL,
        doc="One call.",
        parameters={},
        buffers={},
        inputs=entering,
        body=body,
        outputs=outputs,
        layouts=tuple(lowering.layouts),
    )
    return Program(
        name=MODEL,
        axes=mesh.axes,
        axis_sizes=mesh.sizes,
        precision="fp32",
        global_batch_size=1,
        num_micro_batches=1,
        inputs={name: Spec(meta.shape, dtype_name(meta.dtype)) for name, meta in inputs.items()},
        layers=(),
        root=cls,
        runs=(),
        count_targets=tuple(statements),
        target_counts=counts,
    )


@dataclass(frozen=True, slots=True)
class OneCall:
    """A call as its emitted program runs it.

    model: for ranks that run one after the other. inputs: the names of forward's arguments. together: the ranks
    communicate, so each needs its own model.
    """

    model: Module
    inputs: tuple[str, ...]
    together: bool

    def run(self, values: Sequence[Tensor], mesh: Any) -> tuple[Tensor, ...]:
        """Return the outputs of the mesh's rank from its parts of the inputs."""
        model = type(self.model)(mesh) if self.together else self.model
        model.mesh = mesh
        batch = dict(zip(self.inputs, values, strict=True))
        counts = {"num_targets": model.count_targets(**batch)} if model.counts_targets else {}
        result = model(**batch, **counts)
        return result if isinstance(result, tuple) else (result,)


def one_call(graph: Graph, rule: Rule, options: tuple[AxisOption, ...], mesh: Mesh) -> OneCall:
    """Lower, emit and load a call under one option per axis of the mesh."""
    program = call_program(graph, rule, options, mesh)
    text = emit_model(program)
    names = tuple(variable.name for variable in program.root.inputs)
    return OneCall(_load(text)(None), names, together="self.mesh." in text)


@lru_cache(maxsize=256)
def _load(text: str) -> Any:
    """Check and execute emitted source. Return its class; equal sources share one."""
    check_files({"model.py": text})
    scope: dict[str, Any] = {"__name__": "codegen.emitted", "__package__": "codegen"}
    exec(compile(text, "model.py", "exec"), scope)
    return scope[MODEL]
