"""Run one option of a call on real tensors: the results of its ranks, forward and backward, against the whole call."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.ir.graph import Graph, Node, TensorMeta
from autopar.ir.mesh import Mesh
from autopar.ir.operators import call_operator
from autopar.ir.placement import Placements
from autopar.lowering.one_call import call_graph, one_call
from autopar.proofs.simulated_ranks import (
    Coordinate,
    Sizes,
    assembled,
    conjugate,
    distribute,
    meshes,
    run_ranks,
    simulated_mesh,
)
from autopar.rules.call import Call
from autopar.rules.localize import tensor_placements
from autopar.rules.rule import AxisOption, Rule
from autopar.rules.samples import sample_inputs


@dataclass(frozen=True, slots=True)
class Case:
    """One call with its values, whole results and whole gradients."""

    node: Node
    graph: Graph
    rule: Rule
    call: Call
    inputs: tuple[TensorMeta, ...]
    values: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    out_grads: tuple[Tensor | None, ...]
    in_grads: tuple[Tensor | None, ...]
    generator: torch.Generator

    @property
    def tolerance(self) -> float:
        """The allowed relative error of gradients, whose sums are rounded to the outputs' dtype shard by shard."""
        widest = [torch.finfo(out.dtype).eps for out in self.outputs if out.dtype.is_floating_point]
        return max(1e-9, *(32 * eps for eps in widest), 0.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run: the largest error of results and gradients, relative to the whole tensor's largest
    element, and the fault, if any."""

    error: float
    fault: str | None = None


def check_option(
    node: Node,
    inputs: tuple[TensorMeta, ...],
    rule: Rule,
    options: tuple[AxisOption, ...],
    sizes: Sizes,
    seed: int = 0,
) -> Outcome:
    """Run the call once, forward and backward, under one option per axis of these sizes, against the whole call."""
    return _outcome(make_case(node, inputs, rule, seed), options, sizes)


def make_case(node: Node, inputs: tuple[TensorMeta, ...], rule: Rule, seed: int) -> Case:
    """Return the call with random values, its results and gradients."""
    generator = torch.Generator().manual_seed(seed)
    call = Call.of(node, inputs)
    values = sample_inputs(node, inputs, generator)
    leaves = leaves_of(values, inputs)
    outputs = _run_whole(node, rule, inputs, leaves)
    grads = tuple(
        torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) if out.requires_grad else None
        for out in outputs
    )
    in_grads = gradients(outputs, grads, leaves)
    # Metas of the float64 run: the actual gradient flow decides, not the one recorded in the trace.
    metas = tuple(replace(m, requires_grad=out.requires_grad) for m, out in zip(node.outputs, outputs, strict=True))
    node = replace(node, outputs=metas)
    return Case(
        node=node,
        graph=call_graph(node, inputs),
        rule=rule,
        call=call,
        inputs=inputs,
        values=values,
        outputs=tuple(out.detach() for out in outputs),
        out_grads=grads,
        in_grads=in_grads,
        generator=generator,
    )


def _run_whole(
    node: Node, rule: Rule, inputs: tuple[TensorMeta, ...], leaves: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Run torch's operator. Random calls, which every program lowers, run as the program of one rank."""
    if "*" not in rule.lowerings:
        return call_operator(node, leaves)
    return one_call(call_graph(node, inputs), rule, (), Mesh((), ())).run(leaves, meshes(())[()])


def operands(node: Node, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the call's operands: the leaves, or copies of them for a call that writes to its operand."""
    is_in_place = node.op.split(".")[1].endswith("_")
    return tuple(leaf.clone() for leaf in leaves) if is_in_place else leaves


def leaves_of(values: tuple[Tensor, ...], metas: tuple[TensorMeta, ...]) -> tuple[Tensor, ...]:
    return tuple(
        value.detach().clone().requires_grad_(meta.requires_grad and value.dtype.is_floating_point)
        for value, meta in zip(values, metas, strict=True)
    )


def gradients(
    outputs: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], leaves: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """Return d outputs / d leaves along `grads`; zeros for unused leaves, None for leaves without gradient."""
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None and out.requires_grad]
    trained = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not trained:
        return tuple(torch.zeros_like(leaf) if leaf.requires_grad else None for leaf in leaves)
    computed = iter(torch.autograd.grad([o for o, _ in pairs], trained, [g for _, g in pairs], allow_unused=True))
    result: list[Tensor | None] = []
    for leaf in leaves:
        grad = next(computed) if leaf.requires_grad else None
        result.append(torch.zeros_like(leaf) if grad is None and leaf.requires_grad else grad)
    return tuple(result)


def fault_of(case: Case, options: tuple[AxisOption, ...], sizes: Sizes) -> str | None:
    """Return the fault of these options, one per axis; None if they are correct."""
    return _outcome(case, options, sizes).fault


def _outcome(case: Case, options: tuple[AxisOption, ...], sizes: Sizes) -> Outcome:
    places_in, places_out = tensor_placements(options)
    try:
        call = one_call(case.graph, case.rule, options, simulated_mesh(sizes))
        parts = [
            distribute(value, places, sizes, case.generator)
            for value, places in zip(case.values, places_in, strict=True)
        ]
        mesh_of = meshes(sizes)
        leaves = {rank: leaves_of(tuple(part[rank] for part in parts), case.inputs) for rank in mesh_of}
        grads = _gradient_parts(case, places_out, sizes)

        def work(rank: Coordinate) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
            outputs = call.run(operands(case.node, leaves[rank]), mesh_of[rank])
            rank_grads = tuple(None if grad is None else grad[rank] for grad in grads)
            return outputs, gradients(outputs, rank_grads, leaves[rank])

        results = run_ranks(list(mesh_of), work, call.together)
        return _compare(case, results, places_in, places_out, sizes)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return Outcome(math.inf, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _gradient_parts(
    case: Case, places_out: tuple[Placements, ...], sizes: Sizes
) -> list[dict[Coordinate, Tensor] | None]:
    """Return the outputs' gradients, distributed in the conjugate placements."""
    return [
        None if grad is None else distribute(grad, tuple(conjugate(p) for p in places), sizes, case.generator)
        for grad, places in zip(case.out_grads, places_out, strict=True)
    ]


def _compare(
    case: Case,
    results: dict[Coordinate, tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]],
    places_in: tuple[Placements, ...],
    places_out: tuple[Placements, ...],
    sizes: Sizes,
) -> Outcome:
    largest = 0.0
    for number, (whole, places) in enumerate(zip(case.outputs, places_out, strict=True)):
        parts = {rank: result[0][number] for rank, result in results.items()}
        error = error_of(parts, places, sizes, whole, tolerance_of(whole.dtype))
        if math.isinf(error):
            return Outcome(math.inf, f"output {number} differs")
        largest = max(largest, error)
    for number, (grad, places) in enumerate(zip(case.in_grads, places_in, strict=True)):
        if grad is None:
            continue
        grad_parts = {rank: result[1][number] for rank, result in results.items()}
        present = {rank: part for rank, part in grad_parts.items() if part is not None}
        if len(present) < len(grad_parts):
            return Outcome(math.inf, f"gradient {number} is missing")
        conjugates = tuple(conjugate(p) for p in places)
        error = error_of(present, conjugates, sizes, grad, case.tolerance)
        if math.isinf(error):
            return Outcome(math.inf, f"gradient {number} differs")
        largest = max(largest, error)
    return Outcome(largest)


def error_of(
    parts: dict[Coordinate, Tensor], places: Placements, sizes: Sizes, whole: Tensor, tolerance: float
) -> float:
    """Return the largest difference from the whole, relative to its largest element, among finite elements.

    Return infinity if an element differs by more than the tolerance, absolute and relative, or the dtype differs.
    """
    if any(part.dtype != whole.dtype for part in parts.values()):
        return math.inf
    wide = torch.complex128 if whole.is_complex() else torch.float64
    totals = torch.stack(assembled(parts, places, sizes, tuple(whole.shape))).to(wide)
    exact = whole.to(wide)
    if not exact.numel():
        return 0.0
    largest = float((totals - exact).abs().max())
    if largest <= tolerance:
        return largest / (float(exact.abs().max()) or 1.0)
    if not torch.allclose(totals, exact.expand_as(totals), rtol=tolerance, atol=tolerance, equal_nan=True):
        return math.inf
    finite = torch.isfinite(exact)
    largest = float(torch.where(finite, totals - exact, 0.0).abs().max())
    return largest / (float(torch.where(finite, exact, 0.0).abs().max()) or 1.0)


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the tolerance for a result's dtype. Inputs are float64; a call that casts to less is compared accordingly.

    Values are compared at least as strictly as float32 everywhere, so that summing rounded parts does not pass.
    """
    return 1e-9 if dtype == torch.float64 or not dtype.is_floating_point else 1e-5


def options_text(options: tuple[AxisOption, ...]) -> str:
    return " and ".join(option_text(option) for option in options)


def option_text(option: AxisOption) -> str:
    ins, outs = (", ".join(map(str, places)) for places in (option.inputs, option.outputs))
    return f"{option.label}: {ins} -> {outs}" + (f" by {option.lowering}" if option.lowering else "")
