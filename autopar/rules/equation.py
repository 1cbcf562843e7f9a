"""One-line equations for rules: `"b* k, n k, [n] -> b* n"`.

Operands are separated by commas; each is a list of factor names, one per dim. `b*` stands for all leading dims of the
tensor. `!d` is a factor that cannot be sharded (`!h*` for several). `[...]` is an operand that is added to the
contraction's result; such operands may be absent at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import TensorMeta
from autopar.rules.rule import Dims, Lowering, Rule


@dataclass(frozen=True, slots=True)
class Equation:
    """A parsed equation; `bind` returns the Rule for concrete shapes."""

    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]
    blocked: frozenset[str]
    additive: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Equation:
        """Parse an equation. Raises ValueError without an arrow, and for repeated or several starred factors."""
        left, arrow, right = text.partition("->")
        if not arrow:
            raise ValueError(f"an equation needs '->': {text!r}")
        blocked: set[str] = set()

        def operand(part: str) -> tuple[str, ...]:
            names = part.strip().strip("[]").split()
            blocked.update(name[1:].removesuffix("*") for name in names if name.startswith("!"))
            factors = tuple(name.removeprefix("!") for name in names)
            if len(set(factors)) < len(factors) or sum(name.endswith("*") for name in factors) > 1:
                raise ValueError(f"operand {part.strip()!r} of {text!r} repeats a factor or has two starred ones")
            return factors

        lefts = left.split(",")
        additive = frozenset(i for i, part in enumerate(lefts) if part.strip().startswith("["))
        inputs = tuple(operand(part) for part in lefts)
        outputs = tuple(operand(part) for part in right.split(","))
        return cls(inputs, outputs, frozenset(blocked), additive)

    def bind(
        self,
        inputs: tuple[TensorMeta, ...],
        outputs: tuple[TensorMeta, ...],
        linear: tuple[frozenset[int], ...] = (),
        lowerings: dict[str, Lowering] | None = None,
    ) -> Rule:
        """Return the rule for tensors of these shapes. Raises ValueError if the shapes contradict the equation."""
        sizes: dict[str, int] = {}
        needed = max((i + 1 for i in range(len(self.inputs)) if i not in self.additive), default=0)
        if not needed <= len(inputs) <= len(self.inputs):
            raise ValueError(f"{len(inputs)} tensors for {len(self.inputs)} operands")
        bound_in = tuple(_bind(names, meta, sizes) for names, meta in zip(self.inputs, inputs, strict=False))
        bound_out = tuple(_bind(names, meta, sizes) for names, meta in zip(self.outputs, outputs, strict=True))
        blocked = frozenset(f for f in sizes if f.split(".")[0] in self.blocked)
        additive = frozenset(i for i in self.additive if i < len(inputs))
        return Rule(
            inputs=bound_in,
            outputs=bound_out,
            sizes=sizes,
            blocked=blocked,
            additive=additive,
            linear=linear,
            lowerings=lowerings or {},
        )


def _bind(names: tuple[str, ...], meta: TensorMeta, sizes: dict[str, int]) -> Dims:
    """Return the factors of each dim. A starred name takes the leading dims: `b*` over two dims is b.0, b.1."""
    expanded: list[str] = []
    fixed = sum(not name.endswith("*") for name in names)
    for name in names:
        if name.endswith("*"):
            expanded += [f"{name[:-1]}.{i}" for i in range(len(meta.shape) - fixed)]
        else:
            expanded.append(name)
    if len(expanded) != len(meta.shape):
        raise ValueError(f"operand {' '.join(names)} does not describe shape {meta.shape}")
    for factor, size in zip(expanded, meta.shape, strict=True):
        if sizes.setdefault(factor, size) != size:
            raise ValueError(f"factor {factor} is {sizes[factor]} and {size}")
    return tuple((factor,) if size > 1 else () for factor, size in zip(expanded, meta.shape, strict=True))
