"""Prove a rule on real tensors: every option, shard by shard, forward and backward, against the whole op.

For each option the inputs are sharded as it says, every simulated rank runs its local call, and the outputs must
assemble to the whole result. Then the output's gradient is distributed in the conjugate placements, and the inputs'
gradients must assemble to the whole gradients in theirs. Everything is float64, so that the comparison is tight.
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
from autopar.ir.operators import call_operator
from autopar.ir.placement import P, Placement, Rp, S, divides
from autopar.lowering.one_call import one_call
from autopar.proofs.outcome import (
    Case,
    error_of,
    fault_of,
    gradients,
    leaves_of,
    make_case,
    option_text,
    options_text,
    tolerance_of,
)
from autopar.proofs.simulated_ranks import (
    Coordinate,
    SimulatedMesh,
    Sizes,
    cut,
    distribute,
    meshes,
    simulated_mesh,
)
from autopar.rules.localize import REWRITES, combines, local_call, tensor_placements
from autopar.rules.rule import AxisOption, Rule, axis_options, canonical
from autopar.rules.samples import sample_inputs

AXIS_SIZES = (2, 3)
PRIME_SIZES = (5, 7)
"""Axis sizes for factors that neither 2 nor 3 divides."""
Tensors = tuple[Tensor, ...]
MAX_PAIRS = 24
MAX_SEARCHED = 400


@dataclass(frozen=True, slots=True)
class ProofReport:
    """The result of a proof. Texts name the option, its placements and the difference.

    options_checked: runs of (option or pair of options, axis sizes). wrong: options that failed. missed: placements
    of inputs and outputs that are correct but not offered by the rule. skipped: factors that no tried size divides.
    """

    op: str
    options_checked: int
    wrong: tuple[str, ...]
    missed: tuple[str, ...]
    skipped: tuple[str, ...]


def prove_rule(
    node: Node, inputs: tuple[TensorMeta, ...], rule: Rule, *, search_missed: bool = True, seed: int = 0
) -> ProofReport:
    """Check every option of the rule on one mesh axis of 2 and 3 ranks, and pairs of options on a 2 x 2 mesh.

    node must name an operator that torch has. Set requires_grad in the metas of differentiated tensors. Small shapes
    (dims 4, 6, 12) keep this fast; factors of dims that 2 and 3 divide are all checked.
    """
    case = make_case(node, inputs, rule, seed)
    checked = 0
    wrong: list[str] = []
    seen: set[str] = set()
    for options, sizes in itertools.chain(_single(case), _pairs(case, seed)):
        seen.update(option.label.partition("/")[0] for option in options)
        checked += 1
        fault = fault_of(case, options, sizes)
        if fault:
            wrong.append(f"{options_text(options)} on {'x'.join(map(str, sizes))}: {fault}")
    skipped = tuple(f"{factor} of size {rule.sizes[factor]}" for factor in rule.shardable if factor not in seen)
    missed = tuple(dict.fromkeys(_missed(case, seed))) if search_missed else ()
    return ProofReport(op=node.op, options_checked=checked, wrong=tuple(wrong), missed=missed, skipped=skipped)


def check_options(node: Node, inputs: tuple[TensorMeta, ...], rule: Rule) -> tuple[int, tuple[str, ...]]:
    """Return the number of options on 2 ranks, and the faults of those that differ from torch."""
    case = make_case(node, inputs, rule, seed=0)
    options = axis_options(rule, 2, inputs, case.node.outputs)
    faults = ((option, fault_of(case, (option,), (2,))) for option in options)
    return len(options), tuple(f"{option_text(option)}: {fault}" for option, fault in faults if fault)


def torch_alone(node: Node, inputs: tuple[TensorMeta, ...]) -> None:
    """Run the call on whole tensors, forward and backward. Raises whatever torch raises."""
    leaves = leaves_of(sample_inputs(node, inputs, torch.Generator().manual_seed(0)), inputs)
    outputs = call_operator(node, leaves)
    gradients(outputs, tuple(torch.ones_like(out) if out.requires_grad else None for out in outputs), leaves)


def _single(case: Case) -> Iterator[tuple[tuple[AxisOption, ...], Sizes]]:
    """Yield every option on one axis of 2 and of 3 ranks; sectioned ones on 2; primes for the remaining factors."""
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


def _pairs(case: Case, seed: int) -> Iterator[tuple[tuple[AxisOption, ...], Sizes]]:
    """Yield a sample of two-axis combinations, 2 x 2 and 2 x 3."""
    combinations: list[tuple[tuple[AxisOption, ...], Sizes]] = []
    for sizes in ((2, 2), (2, 3)):
        per_axis = [axis_options(case.rule, size, case.inputs, case.node.outputs) for size in sizes]
        combinations += [(options, sizes) for options in itertools.product(*per_axis) if _fits(case, options, sizes)]
    yield from random.Random(seed).sample(combinations, min(MAX_PAIRS, len(combinations)))


def _fits(case: Case, options: tuple[AxisOption, ...], sizes: Sizes) -> bool:
    places_in, places_out = tensor_placements(options)
    tensors = (*zip(case.inputs, places_in, strict=True), *zip(case.node.outputs, places_out, strict=True))
    return combines(case.rule, options, sizes) and all(divides(meta.shape, places, sizes) for meta, places in tensors)


def _missed(case: Case, seed: int) -> Iterator[str]:
    """Yield correct placements on one axis of 2 ranks, with the plain local call, that the rule does not offer."""
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
            if fault_of(replace(case, rule=plain), (option,), (size,)) is None:
                listed.add((option.inputs, option.outputs))
                yield option_text(option).removeprefix("missed: ")


def _candidates(value: Tensor, replicated: list[Placement]) -> list[Placement]:
    shards = [S(dim) for dim, n in enumerate(value.shape) if n % 2 == 0 and n > 0]
    partial = [P] if value.dtype.is_floating_point else []
    return [*replicated, *shards, *partial]


def _matching_outputs(
    case: Case, rule: Rule, inputs: tuple[Placement, ...], candidates: list[list[Placement]]
) -> Iterator[tuple[Placement, ...]]:
    """Yield output placements that match the shapes and values of the ranks' forward results."""
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
    """Return the combinations of `candidates` (one list per output) that give all outputs the same placement."""
    common = [p for p in candidates[0] if all(p in other for other in candidates)]
    return [(p,) * len(candidates) for p in common]


def _forward(
    case: Case, rule: Rule, option: AxisOption, parts: list[dict[Coordinate, Tensor]]
) -> dict[Coordinate, tuple[Tensor, ...]] | None:
    try:
        run = _plain_call(case, rule, option)
        with torch.no_grad():
            return {rank: run(tuple(part[rank] for part in parts), mesh) for rank, mesh in meshes((2,)).items()}
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None


def _plain_call(case: Case, rule: Rule, option: AxisOption) -> Callable[[Tensors, SimulatedMesh], Tensors]:
    """Return a rank's call of torch's operator with local sizes. Random calls run as their program."""
    if "*" in rule.lowerings:
        return one_call(case.graph, rule, (option,), simulated_mesh((2,))).run
    local = local_call(case.node, rule, (option,), case.inputs, (2,))
    node = replace(case.node, op=local.op, args=local.args, kwargs=local.kwargs)
    return lambda values, _: call_operator(node, values)


def _forward_equal(case: Case, results: dict[Coordinate, tuple[Tensor, ...]], outputs: tuple[Placement, ...]) -> bool:
    for number, (whole, place) in enumerate(zip(case.outputs, outputs, strict=True)):
        for rank in results:
            expected = cut(whole, (place,), (2,), rank).shape
            if results[rank][number].shape != expected:
                return False
        parts = {rank: results[rank][number] for rank in results}
        if math.isinf(error_of(parts, (place,), (2,), whole, tolerance_of(whole.dtype))):
            return False
    return True
