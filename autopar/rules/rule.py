"""A sharding rule: the factors (loop indices) of one operator call, and the options that follow from them.

An operator is an einsum-like loop nest. Each dim of each tensor is a tuple of *factors*, major to minor; `()` is a dim
of size 1. If a mesh axis of n ranks shards a factor f, every rank runs 1/n of that loop:

    tensor                                     placement on that axis
    has f in dim d                             S(d/k), k = product of the sizes of the factors before f in d
        input without f                            Rp: every rank uses it for its own share of the work
        output without f (f is contracted)         P: each rank has a partial sum
        additive input without f, f contracted     P: it must enter the sum once (a bias)

Besides factors, some options exist for every operator or follow from linearity:

    R     all ranks do the same work                          inputs R, outputs R
    Rp    the same, for a value whose gradient is partial     inputs Rp, outputs Rp (backward is linear in it)
    P     the op is linear in a set of inputs jointly         those P, the other inputs Rp, outputs P

A factor may be sharded with sections k: it is cut into k equal runs and each is sharded (see placement.py).
One axis may shard several factors together, if a lowering exchanges what the ranks need of each other (see Joint).
Sources: GSPMD (Xu et al. 2021) and Shardy's factor rules for the loop view; Megatron-LM for the conjugates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autopar.ir.graph import TensorMeta
from autopar.ir.placement import P, Placement, R, Rp, S

Dim = tuple[str, ...]
Dims = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class AxisOption:
    """One way to run an operator on one mesh axis. `lowering` names a different local computation, if one is needed."""

    label: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    lowering: str | None = None


@dataclass(frozen=True, slots=True)
class Lowering:
    """The computation that replaces the plain local call when a factor is sharded.

    name: of the lowering (see localize.LoweringCall). outputs: placements that differ from the factor algebra; for
    example cross-entropy over a sharded vocabulary reduces inside and returns R. contiguous: a rank's share of the
    factor must be one run, so the factor is never sharded in sections (one offset locates vocabulary rows).
    """

    name: str
    outputs: tuple[Placement, ...] | None = None
    contiguous: bool = False


@dataclass(frozen=True, slots=True)
class Joint:
    """Several factors that one axis shards together; `lowering` exchanges the data that a rank lacks.

    inputs: the factor that shards each input; None: it is whole on every rank. `output` shards the outputs. free:
    factors that other axes may shard too. is_striped: each of n ranks has every n-th index of the factors; else
    consecutive ones. in_sections: whether the factor of the outputs may be cut in sections, as it can be alone; the
    count then follows the label ("n+e/8"). least: the least size of the inputs' factors on one rank.
    """

    inputs: tuple[str | None, ...]
    output: str
    lowering: str
    free: frozenset[str] = frozenset()
    is_striped: bool = False
    in_sections: bool = False
    least: int = 1

    @property
    def factors(self) -> tuple[str, ...]:
        """Return all factors that the axis shards together, the outputs' factor first."""
        return tuple(dict.fromkeys((self.output, *(f for f in self.inputs if f is not None))))

    def sections(self, factor_size: int, axis_size: int) -> int:
        """Return the number of sections in which an axis shards a factor."""
        return factor_size // axis_size if self.is_striped else 1


@dataclass(frozen=True, slots=True)
class Rule:
    """The factors of one call. `inputs` follows `Node.inputs`, `outputs` follows `Node.outputs`.

    blocked: factors that cannot be sharded. additive: inputs that are added to a contraction's result.
    linear: sets of inputs in which the op is jointly linear. lowerings: by factor; the key "*" applies whatever is
    sharded. joints: by the label of their option.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    blocked: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    lowerings: Mapping[str, Lowering] = field(default_factory=dict)
    joints: Mapping[str, Joint] = field(default_factory=dict)

    def joint(self, label: str) -> Joint | None:
        """Return the joint that belongs to an option's label, with sections or without."""
        sectioned = self.joints.get(label.rpartition("/")[0])
        return sectioned if sectioned is not None and sectioned.in_sections else self.joints.get(label)

    def sharded_by(self, label: str, axis_size: int) -> tuple[tuple[str, int], ...]:
        """Return (factor, sections) of everything that this option shards on an axis; () if it shards nothing."""
        joint = self.joint(label)
        if joint is not None:
            counts = {factor: joint.sections(self.sizes[factor], axis_size) for factor in joint.factors}
            if label not in self.joints:
                counts[joint.output] = int(label.rpartition("/")[2])
            return tuple(counts.items())
        factor, _, sections = label.partition("/")
        return ((factor, int(sections or 1)),) if factor in self.sizes else ()

    @property
    def contracted(self) -> frozenset[str]:
        """Return the factors that appear in an input and in no output."""
        return _factors(self.inputs) - _factors(self.outputs)

    @property
    def shardable(self) -> tuple[str, ...]:
        """Return the factors that an axis may shard, in order of first appearance."""
        seen = dict.fromkeys(f for dims in (*self.outputs, *self.inputs) for dim in dims for f in dim)
        return tuple(f for f in seen if f not in self.blocked and self.sizes[f] > 1)


def _factors(tensors: Iterable[Dims]) -> frozenset[str]:
    return frozenset(f for dims in tensors for dim in dims for f in dim)


def find_factor(rule: Rule, dims: Dims, factor: str, sections: int = 1) -> Placement | None:
    """Return the shard of a tensor with `dims` when `factor` is sharded, or None if it lacks the factor."""
    for index, dim in enumerate(dims):
        if factor in dim:
            before = math.prod(rule.sizes[f] for f in dim[: dim.index(factor)])
            return S(index, before * sections)
    return None


def shard_option(rule: Rule, factor: str, sections: int = 1) -> AxisOption:
    """Return the option in which one axis shards `factor`."""
    is_contracted = factor in rule.contracted
    lowering = rule.lowerings.get(factor) or rule.lowerings.get("*")
    inputs = tuple(
        find_factor(rule, dims, factor, sections) or (P if is_contracted and index in rule.additive else Rp)
        for index, dims in enumerate(rule.inputs)
    )
    outputs = tuple(find_factor(rule, dims, factor, sections) or P for dims in rule.outputs)
    if lowering and lowering.outputs is not None:
        outputs = lowering.outputs
    return AxisOption(label_of(factor, sections), inputs, outputs, lowering.name if lowering else None)


def label_of(name: str, sections: int) -> str:
    """Return the label of the option that shards a factor, or a joint's factors, in this many sections."""
    return name if sections == 1 else f"{name}/{sections}"


def joint_option(rule: Rule, label: str, axis_size: int) -> AxisOption:
    """Return the option in which one axis shards several factors together. label: of a joint, perhaps in sections."""
    joint = rule.joint(label)
    assert joint is not None
    sections = dict(rule.sharded_by(label, axis_size))
    inputs = tuple(
        Rp if factor is None else find_factor(rule, dims, factor, sections[factor]) or Rp
        for factor, dims in zip(joint.inputs, rule.inputs, strict=True)
    )
    outputs = tuple(find_factor(rule, dims, joint.output, sections[joint.output]) or P for dims in rule.outputs)
    return AxisOption(label, inputs, outputs, joint.lowering)


def axis_options(
    rule: Rule,
    axis_size: int,
    inputs: tuple[TensorMeta, ...],
    outputs: tuple[TensorMeta, ...],
    sections: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[AxisOption, ...]:
    """Return every option of the call on one axis of `axis_size` ranks that divides evenly.

    sections: extra section counts to offer per factor (1 is always offered).
    """
    num_in, num_out = len(rule.inputs), len(rule.outputs)
    options = [AxisOption("R", (R,) * num_in, (R,) * num_out)]
    if any(meta.requires_grad for meta in outputs):
        options.append(AxisOption("Rp", (Rp,) * num_in, (Rp,) * num_out))
    for linear in rule.linear:
        option_inputs = tuple(P if index in linear else Rp for index in range(num_in))
        options.append(AxisOption("P", option_inputs, (P,) * num_out))
    for factor in rule.shardable:
        lowering = rule.lowerings.get(factor)
        more = () if lowering and lowering.contiguous else (sections or {}).get(factor, ())
        for count in dict.fromkeys((1, *more)):
            if rule.sizes[factor] % (count * axis_size) == 0:
                options.append(shard_option(rule, factor, count))
    for name, joint in rule.joints.items():
        more = (sections or {}).get(joint.output, ()) if joint.in_sections else ()
        for count in dict.fromkeys((1, *more)):
            ways = {factor: axis_size * (count if factor == joint.output else 1) for factor in joint.factors}
            shares = [divmod(rule.sizes[factor], number) for factor, number in ways.items()]
            if all(not rest and share >= joint.least for share, rest in shares):
                options.append(joint_option(rule, label_of(name, count), axis_size))
    return tuple(dict.fromkeys(canonical(option, inputs, outputs) for option in options))


def canonical(option: AxisOption, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...]) -> AxisOption:
    """Return the option with Rp written as R where no gradient flows, because the two differ only in the gradient."""

    def plain(placement: Placement, meta: TensorMeta) -> Placement:
        return R if placement == Rp and not meta.requires_grad else placement

    return AxisOption(
        option.label,
        tuple(plain(p, m) for p, m in zip(option.inputs, inputs, strict=True)),
        tuple(plain(p, m) for p, m in zip(option.outputs, outputs, strict=True)),
        option.lowering,
    )
