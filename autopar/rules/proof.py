"""Proof of a rule on real tensors: every option, shard by shard, forward and backward, against the whole op.

For each option the inputs are cut as it says, every simulated rank runs its local call, and the outputs must put the
whole result together again. Then the output's gradient is handed out in the conjugate placements, and the inputs'
gradients must put the whole gradients together in theirs. Everything is float64, so that equality is tight.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.ir.graph import Node, TensorMeta
from autopar.ir.placement import P, Placement, Placements, Rp, S, divides
from autopar.rules.call import Call
from autopar.rules.execute import COMMUNICATING, Tensors, call_op, count_targets, run_local, run_whole
from autopar.rules.localize import REWRITES, LoweringCall, combines, local_call, tensor_placements
from autopar.rules.rule import AxisOption, Rule, axis_options, canonical
from autopar.rules.samples import sample_inputs
from autopar.rules.simulate import (
    Coordinate,
    SimulatedMesh,
    Sizes,
    assembled,
    conjugate,
    coordinates,
    cut,
    distribute,
    meshes,
    run_ranks,
)

AXIS_SIZES = (2, 3)
PRIME_SIZES = (5, 7)
"""Axis sizes tried for a factor that neither 2 nor 3 divides."""
MAX_PAIRS = 24
MAX_SEARCHED = 400


@dataclass(frozen=True, slots=True)
class ProofReport:
    """What a proof found. Texts name the option, its placements and, if wrong, what differs.

    options_checked: runs of (option or pair of options, axis sizes). wrong: options that failed. missed: placements
    of inputs and outputs that are right but that the rule does not offer. skipped: factors that no tried size divides.
    """

    op: str
    options_checked: int
    wrong: tuple[str, ...]
    missed: tuple[str, ...]
    skipped: tuple[str, ...]


Ranks = Callable[[Tensors, SimulatedMesh], Tensors]
"""What one rank computes of its parts of the inputs."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One option of a call as something to run. together: the ranks communicate."""

    run: Ranks
    together: bool


Prepare = Callable[[Node, Rule, tuple[AxisOption, ...], tuple[TensorMeta, ...], Sizes], Prepared]
"""How a call under one option per axis is made runnable: as the proof does, or through a program that is emitted."""


@dataclass(frozen=True, slots=True)
class _Case:
    """One call with its values, whole results and whole gradients."""

    node: Node
    rule: Rule
    call: Call
    inputs: tuple[TensorMeta, ...]
    values: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    out_grads: tuple[Tensor | None, ...]
    in_grads: tuple[Tensor | None, ...]
    num_targets: Tensor | None
    generator: torch.Generator
    prepare: Prepare | None = None

    @property
    def tolerance(self) -> float:
        """The relative error allowed to gradients, whose sums are rounded to the outputs' dtype part by part."""
        widest = [torch.finfo(out.dtype).eps for out in self.outputs if out.dtype.is_floating_point]
        return max(1e-9, *(32 * eps for eps in widest), 0.0)


def prove_rule(
    node: Node, inputs: tuple[TensorMeta, ...], rule: Rule, *, search_missed: bool = True, seed: int = 0
) -> ProofReport:
    """Check every option of the rule on one mesh axis of 2 and 3 ranks, and pairs of options on a 2 x 2 mesh.

    node must name an operator that torch has. Set requires_grad in the metas of what is differentiated. Small
    shapes (dims 4, 6, 12) keep this fast; dims that divide by 2 and 3 have every factor checked.
    """
    case = _make_case(node, inputs, rule, seed)
    checked = 0
    wrong: list[str] = []
    seen: set[str] = set()
    for options, sizes in itertools.chain(_single(case), _pairs(case, seed)):
        seen.update(option.label.partition("/")[0] for option in options)
        checked += 1
        fault = _fault(case, options, sizes)
        if fault:
            wrong.append(f"{_text(options)} on {'x'.join(map(str, sizes))}: {fault}")
    skipped = tuple(f"{factor} of size {rule.sizes[factor]}" for factor in rule.shardable if factor not in seen)
    missed = tuple(dict.fromkeys(_missed(case, seed))) if search_missed else ()
    return ProofReport(op=node.op, options_checked=checked, wrong=tuple(wrong), missed=missed, skipped=skipped)


def check_options(
    node: Node, inputs: tuple[TensorMeta, ...], rule: Rule, prepare: Prepare
) -> tuple[int, tuple[str, ...]]:
    """How many options an axis of 2 ranks has, and what is wrong with each that `prepare` does not make torch's."""
    case = replace(_make_case(node, inputs, rule, seed=0), prepare=prepare)
    options = axis_options(rule, 2, inputs, case.node.outputs)
    faults = ((option, _fault(case, (option,), (2,))) for option in options)
    return len(options), tuple(f"{_option_text(option)}: {fault}" for option, fault in faults if fault)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run under one option per axis gave: the largest error of results and gradients, as a share of the whole
    tensor's largest element, and what is wrong, if anything."""

    error: float
    fault: str | None = None


def check_option(
    node: Node,
    inputs: tuple[TensorMeta, ...],
    rule: Rule,
    options: tuple[AxisOption, ...],
    sizes: Sizes,
    prepare: Prepare,
    seed: int = 0,
) -> Outcome:
    """One run of the call under one option per axis of so many ranks, forward and backward, against the whole call."""
    return _outcome(replace(_make_case(node, inputs, rule, seed), prepare=prepare), options, sizes)


def torch_alone(node: Node, inputs: tuple[TensorMeta, ...]) -> None:
    """Raises what torch raises for the call on whole tensors, forward or backward."""
    leaves = _leaves(sample_inputs(node, inputs, torch.Generator().manual_seed(0)), inputs)
    outputs = call_op(node.op, node.args, node.kwargs, leaves)
    _gradients(outputs, tuple(torch.ones_like(out) if out.requires_grad else None for out in outputs), leaves)


def _make_case(node: Node, inputs: tuple[TensorMeta, ...], rule: Rule, seed: int) -> _Case:
    generator = torch.Generator().manual_seed(seed)
    call = Call.of(node, inputs)
    values = sample_inputs(node, inputs, generator)
    leaves = _leaves(values, inputs)
    outputs = run_whole(node, call, _whole_lowering(node, rule, inputs), leaves)
    grads = tuple(
        torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) if out.requires_grad else None
        for out in outputs
    )
    in_grads = _gradients(outputs, grads, leaves)
    # The metas as they are in float64 runs: what flows decides, not what the trace recorded.
    metas = tuple(replace(m, requires_grad=out.requires_grad) for m, out in zip(node.outputs, outputs, strict=True))
    return _Case(
        node=replace(node, outputs=metas),
        rule=rule,
        call=call,
        inputs=inputs,
        values=values,
        outputs=tuple(out.detach() for out in outputs),
        out_grads=grads,
        in_grads=in_grads,
        num_targets=count_targets(call, values),
        generator=generator,
    )


def _whole_lowering(node: Node, rule: Rule, inputs: tuple[TensorMeta, ...]) -> LoweringCall | None:
    """The lowering that the op needs even if nothing is sharded."""
    option = axis_options(rule, 1, inputs, node.outputs)[0]
    return local_call(node, rule, (option,), inputs, (1,)).lowering


def _leaves(values: tuple[Tensor, ...], metas: tuple[TensorMeta, ...]) -> tuple[Tensor, ...]:
    return tuple(
        value.detach().clone().requires_grad_(meta.requires_grad and value.dtype.is_floating_point)
        for value, meta in zip(values, metas, strict=True)
    )


def _gradients(
    outputs: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], leaves: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """d outputs / d leaves along `grads`; zeros for unused leaves, None for those without gradient."""
    pairs = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None and out.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return tuple(torch.zeros_like(leaf) if leaf.requires_grad else None for leaf in leaves)
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    result: list[Tensor | None] = []
    for leaf in leaves:
        grad = next(found) if leaf.requires_grad else None
        result.append(torch.zeros_like(leaf) if grad is None and leaf.requires_grad else grad)
    return tuple(result)


def _single(case: _Case) -> Iterator[tuple[tuple[AxisOption, ...], Sizes]]:
    """Every option on one axis of 2 and of 3; sectioned ones on 2; primes for what is left."""
    seen: set[str] = set()
    for size in AXIS_SIZES:
        sections = {factor: (2,) for factor in case.rule.shardable} if size == 2 else {}
        for option in axis_options(case.rule, size, case.inputs, case.node.outputs, sections):
            seen.add(option.label)
            yield (option,), (size,)
    for size in PRIME_SIZES:
        for option in axis_options(case.rule, size, case.inputs, case.node.outputs):
            if option.label not in seen:
                yield (option,), (size,)


def _pairs(case: _Case, seed: int) -> Iterator[tuple[tuple[AxisOption, ...], Sizes]]:
    """A sample of two-axis combinations, 2 x 2 and 2 x 3."""
    found: list[tuple[tuple[AxisOption, ...], Sizes]] = []
    for sizes in ((2, 2), (2, 3)):
        per_axis = [axis_options(case.rule, size, case.inputs, case.node.outputs) for size in sizes]
        found += [(options, sizes) for options in itertools.product(*per_axis) if _fits(case, options, sizes)]
    yield from random.Random(seed).sample(found, min(MAX_PAIRS, len(found)))


def _fits(case: _Case, options: tuple[AxisOption, ...], sizes: Sizes) -> bool:
    places_in, places_out = tensor_placements(options)
    tensors = (*zip(case.inputs, places_in, strict=True), *zip(case.node.outputs, places_out, strict=True))
    return combines(case.rule, options, sizes) and all(divides(meta.shape, places, sizes) for meta, places in tensors)


def _fault(case: _Case, options: tuple[AxisOption, ...], sizes: Sizes) -> str | None:
    """What is wrong with these options, one per axis; None if they are right."""
    return _outcome(case, options, sizes).fault


def _outcome(case: _Case, options: tuple[AxisOption, ...], sizes: Sizes) -> Outcome:
    places_in, places_out = tensor_placements(options)
    try:
        prepared = (
            case.prepare(case.node, case.rule, options, case.inputs, sizes)
            if case.prepare
            else _local(case, options, sizes)
        )
        parts = [
            distribute(value, places, sizes, case.generator)
            for value, places in zip(case.values, places_in, strict=True)
        ]
        mesh_of = meshes(sizes)
        leaves = {rank: _leaves(tuple(part[rank] for part in parts), case.inputs) for rank in mesh_of}
        grads = _gradient_parts(case, places_out, sizes)

        def work(rank: Coordinate) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
            outputs = prepared.run(leaves[rank], mesh_of[rank])
            own_grads = tuple(None if grad is None else grad[rank] for grad in grads)
            return outputs, _gradients(outputs, own_grads, leaves[rank])

        results = run_ranks(list(mesh_of), work, prepared.together)
        return _compare(case, results, places_in, places_out, sizes)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return Outcome(math.inf, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _local(case: _Case, options: tuple[AxisOption, ...], sizes: Sizes) -> Prepared:
    local = local_call(case.node, case.rule, options, case.inputs, sizes)
    together = local.lowering is not None and local.lowering.name in COMMUNICATING
    return Prepared(lambda values, mesh: run_local(local, case.call, values, mesh, case.num_targets), together)


def _gradient_parts(
    case: _Case, places_out: tuple[Placements, ...], sizes: Sizes
) -> list[dict[Coordinate, Tensor] | None]:
    """The outputs' gradients, handed out in the conjugate placements."""
    return [
        None if grad is None else distribute(grad, tuple(conjugate(p) for p in places), sizes, case.generator)
        for grad, places in zip(case.out_grads, places_out, strict=True)
    ]


def _compare(
    case: _Case,
    results: dict[Coordinate, tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]],
    places_in: tuple[Placements, ...],
    places_out: tuple[Placements, ...],
    sizes: Sizes,
) -> Outcome:
    largest = 0.0
    for number, (whole, places) in enumerate(zip(case.outputs, places_out, strict=True)):
        parts = {rank: result[0][number] for rank, result in results.items()}
        if not _equal(parts, places, sizes, whole, _tolerance(whole.dtype)):
            return Outcome(math.inf, f"output {number} differs")
        largest = max(largest, _error(parts, places, sizes, whole))
    for number, (grad, places) in enumerate(zip(case.in_grads, places_in, strict=True)):
        if grad is None:
            continue
        grad_parts = {rank: result[1][number] for rank, result in results.items()}
        present = {rank: part for rank, part in grad_parts.items() if part is not None}
        if len(present) < len(grad_parts):
            return Outcome(math.inf, f"gradient {number} is missing")
        conjugates = tuple(conjugate(p) for p in places)
        if not _equal(present, conjugates, sizes, grad, case.tolerance):
            return Outcome(math.inf, f"gradient {number} differs")
        largest = max(largest, _error(present, conjugates, sizes, grad))
    return Outcome(largest)


def _equal(parts: dict[Coordinate, Tensor], places: Placements, sizes: Sizes, whole: Tensor, tolerance: float) -> bool:
    if any(part.dtype != whole.dtype for part in parts.values()):
        return False
    wide = torch.complex128 if whole.is_complex() else torch.float64
    return all(
        torch.allclose(total.to(wide), whole.to(wide), rtol=tolerance, atol=tolerance, equal_nan=True)
        for total in assembled(parts, places, sizes, tuple(whole.shape))
    )


def _error(parts: dict[Coordinate, Tensor], places: Placements, sizes: Sizes, whole: Tensor) -> float:
    """The largest difference as a share of the whole's largest element, among finite ones."""
    wide = torch.complex128 if whole.is_complex() else torch.float64
    exact, largest = whole.to(wide), 0.0
    usual = torch.isfinite(exact)
    size = float(exact[usual].abs().max()) if usual.any() else 0.0
    for total in assembled(parts, places, sizes, tuple(whole.shape)):
        difference = (total.to(wide) - exact)[usual].abs()
        largest = max(largest, float(difference.max()) if difference.numel() else 0.0)
    return largest / size if size else largest


def _tolerance(dtype: torch.dtype) -> float:
    """Inputs are float64; a call that casts to less is compared as far as the result's dtype goes.

    For values this is as strict as float32 everywhere, so that summing rounded parts is not taken for right.
    """
    return 1e-9 if dtype == torch.float64 or not dtype.is_floating_point else 1e-5


def _text(options: tuple[AxisOption, ...]) -> str:
    return " and ".join(_option_text(option) for option in options)


def _option_text(option: AxisOption) -> str:
    ins, outs = (", ".join(map(str, places)) for places in (option.inputs, option.outputs))
    return f"{option.label}: {ins} -> {outs}" + (f" by {option.lowering}" if option.lowering else "")


def _missed(case: _Case, seed: int) -> Iterator[str]:
    """Placements on one axis of 2 ranks that are right with the plain local call and that the rule does not offer."""
    size = 2
    listed = {(o.inputs, o.outputs) for o in axis_options(case.rule, size, case.inputs, case.node.outputs)}
    candidates = [_candidates(value, [Rp]) for value in case.values]
    combinations = list(itertools.product(*candidates))
    if len(combinations) > MAX_SEARCHED:
        combinations = random.Random(seed).sample(combinations, MAX_SEARCHED)
    out_candidates = [_candidates(out, []) for out in case.outputs]
    plain = replace(case.rule, lowerings={k: v for k, v in case.rule.lowerings.items() if k == "*"})
    for inputs in combinations:
        for outputs in _matching_outputs(case, plain, inputs, out_candidates):
            option = canonical(AxisOption("missed", inputs, outputs), case.inputs, case.node.outputs)
            if (option.inputs, option.outputs) in listed:
                continue
            if _fault(replace(case, rule=plain), (option,), (size,)) is None:
                listed.add((option.inputs, option.outputs))
                yield _option_text(option).removeprefix("missed: ")


def _candidates(value: Tensor, replicated: list[Placement]) -> list[Placement]:
    shards = [S(dim) for dim, n in enumerate(value.shape) if n % 2 == 0 and n > 0]
    partial = [P] if value.dtype.is_floating_point else []
    return [*replicated, *shards, *partial]


def _matching_outputs(
    case: _Case, rule: Rule, inputs: tuple[Placement, ...], candidates: list[list[Placement]]
) -> Iterator[tuple[Placement, ...]]:
    """Output placements whose shapes and values the ranks' forward results give."""
    groups: list[tuple[Placement, ...]] = (
        [tuple(c) for c in itertools.product(*candidates)] if len(candidates) == 1 else _alike(candidates)
    )
    cached: dict[Coordinate, tuple[Tensor, ...]] | None = None
    parts = [distribute(v, (p,), (2,), case.generator) for v, p in zip(case.values, inputs, strict=True)]
    for outputs in groups:
        if cached is None or case.call.packet in REWRITES or "*" in rule.lowerings:
            cached = _forward(case, rule, AxisOption("", inputs, outputs), parts)
        if cached is None:
            if case.call.packet in REWRITES or "*" in rule.lowerings:
                continue
            return
        if _forward_equal(case, cached, outputs):
            yield outputs


def _alike(candidates: list[list[Placement]]) -> list[tuple[Placement, ...]]:
    """The combinations of `candidates` (one list per output) in which all outputs have the same placement."""
    common = [p for p in candidates[0] if all(p in other for other in candidates)]
    return [(p,) * len(candidates) for p in common]


def _forward(
    case: _Case, rule: Rule, option: AxisOption, parts: list[dict[Coordinate, Tensor]]
) -> dict[Coordinate, tuple[Tensor, ...]] | None:
    mesh_of = meshes((2,))
    try:
        local = local_call(case.node, rule, (option,), case.inputs, (2,))
        with torch.no_grad():
            return {
                rank: run_local(local, case.call, tuple(p[rank] for p in parts), mesh_of[rank], case.num_targets)
                for rank in coordinates((2,))
            }
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None


def _forward_equal(case: _Case, found: dict[Coordinate, tuple[Tensor, ...]], outputs: tuple[Placement, ...]) -> bool:
    for number, (whole, place) in enumerate(zip(case.outputs, outputs, strict=True)):
        for rank in found:
            expected = cut(whole, (place,), (2,), rank).shape
            if found[rank][number].shape != expected:
                return False
        parts = {rank: found[rank][number] for rank in found}
        if not _equal(parts, (place,), (2,), whole, _tolerance(whole.dtype)):
            return False
    return True
