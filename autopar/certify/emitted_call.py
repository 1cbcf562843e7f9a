"""Run one operator call through the real lowering and emitter, on simulated ranks in this process.

`autopar.rules.proofs.prove_rule` compares the results, forward and backward, with torch's operator on whole tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autopar.ir.draws import draw_numbers
from autopar.ir.graph import Graph, Input, Node, Ref, TensorMeta
from autopar.ir.mesh import Mesh
from autopar.lowering.scope_lowering import Lowering, Shared, dtype_name
from autopar.rules.localize import tensor_placements
from autopar.rules.proofs.execute import DROPOUT_KEY
from autopar.rules.proofs.outcome import Prepared
from autopar.rules.proofs.simulated_ranks import SIMULATED_AXES, SimulatedMesh, Sizes
from autopar.rules.rule import AxisOption, Rule
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator, Option
from autopar.sharding.scopes import scopes_of
from codegen.check_source import check_files
from codegen.program import ModuleClass, Program, Spec
from codegen.source.emit import emit_model


def program_of(
    node: Node, rule: Rule, options: tuple[AxisOption, ...], inputs: tuple[TensorMeta, ...], sizes: Sizes
) -> Program:
    """Build a model of just this call, whose inputs and results have the placements of the options."""
    names = [ref.node for ref in node.inputs]
    formal = tuple(Input(name, meta) for name, meta in zip(names, inputs, strict=True))
    places_in, places_out = tensor_placements(options)
    results = tuple(Ref(node.name, index) for index in range(len(node.outputs)))
    graph = Graph(name="Model", inputs=formal, parameters=(), body=(node,), loss=results[0], batch_size=1)
    key = "", node.name
    assignment = Assignment(
        {key: Option(options, places_in, places_out)},
        {("", Ref(name)): places for name, places in zip(names, places_in, strict=True)},
        {},
    )
    mesh = Mesh(SIMULATED_AXES[: len(sizes)], sizes)
    operators = {key: Operator(scope="", node=node, inputs=inputs, rule=rule, has_rule=True, batch=None, sections={})}
    shared = Shared(
        graph=graph,
        operators=operators,
        mesh=mesh,
        assignment=assignment,
        scopes={scope.name: scope for scope in scopes_of(graph)},
        results=results,
        numbers=draw_numbers(graph),
    )
    lowering = Lowering(shared, shared.scopes[""])
    entering = tuple(lowering.available[Ref(name), lowering.placements[Ref(name)]] for name in names)
    body = lowering.run(graph.body)
    outputs = tuple(lowering.available[ref, lowering.placements[ref]] for ref in results)
    counting = Lowering(shared, shared.scopes[""])
    statements, counts = counting.count_targets(lowering.losses)
    cls = ModuleClass(
        name="Model",
        doc="One call.",
        parameters={},
        buffers={},
        inputs=entering,
        body=body,
        outputs=outputs,
        layouts=tuple(lowering.layouts),
    )
    specs = {name: Spec(meta.shape, dtype_name(meta.dtype)) for name, meta in zip(names, inputs, strict=True)}
    return Program(
        name="Model",
        axes=mesh.axes,
        axis_sizes=mesh.sizes,
        precision="fp32",
        global_batch_size=1,
        num_micro_batches=1,
        inputs=specs,
        layers=(),
        root=cls,
        runs=(),
        count_targets=tuple(statements),
        target_counts=counts,
    )


def prepare(
    node: Node, rule: Rule, options: tuple[AxisOption, ...], inputs: tuple[TensorMeta, ...], sizes: Sizes
) -> Prepared:
    """Return a function that runs one rank of the emitted program (`proof.Prepare`)."""
    program = program_of(node, rule, options, inputs, sizes)
    text = emit_model(program)
    check_files({"model.py": text})
    scope: dict[str, Any] = {"__name__": "codegen.emitted", "__package__": "codegen"}
    exec(compile(text, "model.py", "exec"), scope)
    names = [variable.name for variable in program.root.inputs]

    def run(values: tuple[Tensor, ...], mesh: SimulatedMesh) -> tuple[Tensor, ...]:
        model = scope["Model"](mesh)
        model.dropout_key = lambda call: DROPOUT_KEY
        model._rows_before = lambda layout: 0
        batch = dict(zip(names, values, strict=True))
        counted = {"num_targets": model.count_targets(**batch)} if program.count_targets else {}
        result = model(**batch, **counted)
        return result if isinstance(result, tuple) else (result,)

    return Prepared(run, together="self.mesh." in text)
