"""Runs of calls that one kernel does: a table of patterns, and the one place that finds and replaces them.

A pattern is a small tree of calls over the lowered program. What it replaces are calls of one rank on local tensors by
one call with the same local result, so fusing never changes which ranks hold what; a reshard is no call, hence never
inside a pattern. It is done where

- every intermediate is read inside the pattern only (not by other statements, not returned, not carried on by a loop),
- what the pattern reads still has the same value where its last call stands, which is where the fused call goes,
- no call of the pattern is corrected for sharding (`divisor` 1: the normalised dim of a mean is whole),
- shapes and dtypes (`Call.operands`) are those that the kernel is for.

All other statements keep their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from codegen.program import Call, LayerLoop, ModuleClass, Operand, Program, Raw, Reshard, Statement, Var

# --- what a pattern is made of ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that the pattern reads; under one name always the same one."""

    name: str


@dataclass(frozen=True, slots=True)
class Value:
    """An argument that is no variable, whatever it is."""

    name: str


@dataclass(frozen=True, slots=True)
class Is:
    """An argument that equals `value`."""

    value: Any


@dataclass(frozen=True, slots=True)
class Op:
    """The single result of a call of `target` on `args`; commutes: in either order.

    keywords: the keyword arguments that it may have, bound under their own names. name: binds the call itself. Such a
    name occurs once in a pattern.
    """

    target: str
    args: tuple[Template, ...]
    commutes: bool = False
    keywords: tuple[str, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class Either:
    """Any of the options; the first that leads to a match is taken."""

    options: tuple[Template, ...]


Template = Leaf | Value | Is | Op | Either


@dataclass(frozen=True, slots=True)
class Bound:
    """What a name of a pattern stands for. operand: of a Leaf; origin: the statement that made it (-1: none here)."""

    value: Any
    operand: Operand | None = None
    origin: int = -1


Bindings = Mapping[str, Bound]


@dataclass(frozen=True, slots=True)
class Pattern:
    """What to find and what to put there.

    fits: whether the kernel is for these shapes and dtypes. build: (bindings, the pattern's last call, the program) ->
    the calls that take its place, of which the last makes the same result.
    """

    name: str
    template: Op
    fits: Callable[[Bindings], bool]
    build: Callable[[Bindings, Call, Program], tuple[Call, ...]]


# --- the patterns -----------------------------------------------------------------------------------------------------


def _fused(target: str, bound: Bindings, names: tuple[str, ...], last: Call) -> Call:
    operands = tuple((b.value.name, b.operand) for n in names if (b := bound[n]).operand is not None)
    return Call(target, tuple(bound[n].value for n in names), (), last.results, last.section, operands=operands)


def _normalised(x: Template) -> Op:
    """x / sqrt(mean(x ** 2) + eps)"""
    squares = (Op("aten.pow.Tensor_Scalar", (x, Is(2))), Op("aten.mul.Tensor", (x, x)), Op("aten.square.default", (x,)))
    mean = Op("aten.mean.dim", (Either(squares), Value("dims"), Is(True)))
    rsqrt = Op("aten.rsqrt.default", (Op("aten.add.Tensor", (mean, Value("eps")), commutes=True),))
    return Op("aten.mul.Tensor", (x, rsqrt), commutes=True)


def _rms_norm_template() -> Op:
    """In half precision models widen x first and round before the weight (Hugging Face's, and Meta's own with type_as).

    Models that do all in half precision match too; the kernel's arithmetic is fp32, so the result is a better one.
    """
    x = Leaf("x")
    wide = Op("aten.to.dtype", (x, Value("wide")))
    normalised = Either((_normalised(wide), _normalised(x)))
    narrowed = Op("aten.to.dtype", (normalised, Value("narrow"))), Op("aten.type_as.default", (normalised, x))
    return Op("aten.mul.Tensor", (Leaf("weight"), Either((*narrowed, _normalised(x)))), commutes=True)


def _rms_norm_fits(bound: Bindings) -> bool:
    """The last dim, a weight of its length, and a result in x's dtype, which is what the kernel returns."""
    x, weight, dims, eps = bound["x"].operand, bound["weight"].operand, bound["dims"].value, bound["eps"].value
    if x is None or weight is None or not isinstance(eps, float) or not isinstance(dims, tuple):
        return False
    is_last = dims in ((-1,), (len(x.shape) - 1,))
    widens = "wide" not in bound or _is_dtype(bound["wide"], "float32")
    narrows = "narrow" not in bound or _is_dtype(bound["narrow"], x.dtype)
    return is_last and widens and narrows and weight == Operand(x.shape[-1:], x.dtype)


def _swiglu_fits(bound: Bindings) -> bool:
    """No broadcasting and no promotion."""
    gate, up = bound["gate"].operand, bound["up"].operand
    return gate is not None and gate == up


def _cross_entropy_template() -> Op:
    """Logits that are widened before the loss are taken as they were: the kernel computes in fp32 anyway."""
    x = Leaf("logits")
    wide = Op("aten.to.dtype", (x, Value("wide")))
    viewed = Op("aten.view.default", (wide, Value("sizes")), name="view")
    args = (Either((viewed, wide, x)), Leaf("target"), Value("num_targets"))
    return Op("runtime.cross_entropy", args, keywords=("ignore_index",))


def _cross_entropy_fits(bound: Bindings) -> bool:
    """Without vocab_axis and label_smoothing, which are keywords that the template does not have."""
    logits, target = bound["logits"].operand, bound["target"].operand
    if logits is None or target is None or not isinstance(bound["num_targets"].value, Raw):
        return False
    widens = "wide" not in bound or (_is_dtype(bound["wide"], "float32") and logits.dtype in ("bfloat16", "float16"))
    return widens and target.dtype == "int64" and logits.dtype in ("float32", "bfloat16", "float16")


def _cross_entropy(bound: Bindings, last: Call, program: Program) -> tuple[Call, ...]:
    """Losses per token, their sum, and the division by the count of targets on all ranks.

    Without any target the sum is 0 and so must the loss be, but the count is 0 too. Counts are multiples of
    1 / num_micro_batches, so the clamp changes no other.
    """
    logits = bound["logits"].value
    before: tuple[Call, ...] = ()
    if "view" in bound:
        view: Call = bound["view"].value
        logits = Var(view.results[0])
        before = (replace(view, args=(bound["logits"].value, *view.args[1:]), operands=()),)
    ignored = (bound["ignore_index"].value,) if "ignore_index" in bound else ()
    plain = replace(last, kwargs=(), operands=())
    losses = replace(plain, target="kernels.cross_entropy", args=(logits, bound["target"].value, *ignored))
    loss = Var(last.results[0])
    total = replace(plain, target="aten.sum.default", args=(loss,))
    divisor = bound["num_targets"].value.text
    if divisor == "1.0":
        return (*before, losses, total)
    smallest = 1 if program.num_micro_batches == 1 else 1 / program.num_micro_batches
    mean = replace(plain, target="aten.div.Tensor", args=(loss, Raw(f"{divisor}.clamp(min={smallest})")))
    return (*before, losses, total, mean)


def _is_dtype(bound: Bound, name: str) -> bool:
    return str(bound.value) == f"torch.{name}"


PATTERNS: Final[tuple[Pattern, ...]] = (
    Pattern(
        "RMSNorm",
        _rms_norm_template(),
        _rms_norm_fits,
        lambda bound, last, program: (_fused("kernels.rms_norm", bound, ("x", "weight", "eps"), last),),
    ),
    Pattern(
        "SwiGLU",
        Op("aten.mul.Tensor", (Op("aten.silu.default", (Leaf("gate"),)), Leaf("up")), commutes=True),
        _swiglu_fits,
        lambda bound, last, program: (_fused("kernels.swiglu", bound, ("gate", "up"), last),),
    ),
    Pattern("cross-entropy", _cross_entropy_template(), _cross_entropy_fits, _cross_entropy),
)


# --- find and replace -------------------------------------------------------------------------------------------------


def fuse(program: Program) -> Program:
    """The program with every run of calls that a pattern matches replaced, in all classes."""
    layers = tuple(_fuse_class(cls, program) for cls in program.layers)
    return replace(program, layers=layers, root=_fuse_class(program.root, program))


def _fuse_class(cls: ModuleClass, program: Program) -> ModuleClass:
    body = cls.body
    flow = Flow.of(body, cls.outputs)
    for pattern in PATTERNS:
        position = 0
        while position < len(body):
            found = _find(pattern, position, flow)
            if found is None:
                position += 1
                continue
            last = body[position]
            assert isinstance(last, Call)
            after = (*pattern.build(found.bound, last, program), *body[position + 1 :])
            before = tuple(s for i, s in enumerate(body[:position]) if i not in found.statements)
            body, position = before + after, len(before)
            flow = Flow.of(body, cls.outputs)
    return replace(cls, body=body)


@dataclass(frozen=True, slots=True)
class Flow:
    """Which statement made what a statement reads. Names may be assigned again, as in the source.

    origins: per statement (and for the returned values, last), name -> the statement that assigned it, -1 if none did.
    readers: (statement, name that it assigned) -> the statements that read that value.
    """

    body: tuple[Statement, ...]
    origins: tuple[Mapping[str, int], ...]
    readers: Mapping[tuple[int, str], frozenset[int]]

    @classmethod
    def of(cls, body: tuple[Statement, ...], outputs: tuple[str, ...]) -> Flow:
        latest: dict[str, int] = {}
        origins: list[Mapping[str, int]] = []
        readers: dict[tuple[int, str], frozenset[int]] = {}
        for index, names in enumerate([*(_reads(s) for s in body), frozenset(outputs)]):
            origins.append({name: latest.get(name, -1) for name in names})
            for name, origin in origins[-1].items():
                readers[origin, name] = readers.get((origin, name), frozenset()) | {index}
            if index < len(body):
                latest |= dict.fromkeys(_assigns(body[index]), index)
        return cls(body, tuple(origins), readers)

    def value_at(self, name: str, index: int, without: frozenset[int]) -> int:
        """The statement that assigned `name` last before `index`, if those in `without` were not there."""
        made = (i for i in range(index - 1, -1, -1) if i not in without and name in _assigns(self.body[i]))
        return next(made, -1)


@dataclass(frozen=True, slots=True)
class _Found:
    bound: Bindings
    statements: frozenset[int]


def _find(pattern: Pattern, position: int, flow: Flow) -> _Found | None:
    """The first legal match whose last call is the statement at `position`."""
    for found in _match_call(pattern.template, position, flow, _Found({}, frozenset())):
        if _is_closed(found, position, flow) and pattern.fits(found.bound):
            return found
    return None


def _is_closed(found: _Found, last: int, flow: Flow) -> bool:
    """Intermediates are read inside only, and what is read from outside has the same value at the last call."""
    inner = found.statements - {last}
    for index in inner:
        if any(flow.readers.get((index, name), frozenset()) - found.statements for name in _assigns(flow.body[index])):
            return False
    leaves = [b for b in found.bound.values() if isinstance(b.value, Var)]
    return all(
        b.origin not in found.statements and flow.value_at(b.value.name, last, inner) == b.origin for b in leaves
    )


def _match(template: Template, value: Any, reader: int, flow: Flow, found: _Found) -> Iterator[_Found]:
    """The ways in which `value`, an argument of the statement `reader`, matches."""
    if isinstance(template, Either):
        for option in template.options:
            yield from _match(option, value, reader, flow, found)
    elif isinstance(template, Is):
        if not isinstance(value, Var) and value == template.value:
            yield found
    elif isinstance(template, Value):
        if not isinstance(value, Var):
            yield from _bind(template.name, Bound(value), found)
    elif isinstance(value, Var):
        origin = flow.origins[reader][value.name]
        if isinstance(template, Op):
            if origin >= 0:
                yield from _match_call(template, origin, flow, found)
            return
        call = flow.body[reader]
        held = dict(call.operands).get(value.name) if isinstance(call, Call) else None
        yield from _bind(template.name, Bound(value, held, origin), found)


def _match_call(template: Op, index: int, flow: Flow, found: _Found) -> Iterator[_Found]:
    call = flow.body[index]
    if not isinstance(call, Call) or call.target != template.target or call.divisor != 1 or len(call.results) != 1:
        return
    if len(call.args) != len(template.args) or any(key not in template.keywords for key, _ in call.kwargs):
        return
    own = {key: Bound(value) for key, value in call.kwargs} | ({template.name: Bound(call)} if template.name else {})
    start = _Found({**found.bound, **own}, found.statements | {index})
    orders = (call.args, call.args[::-1]) if template.commutes else (call.args,)
    for args in orders:
        matched: Iterator[_Found] = iter((start,))
        for wanted, value in zip(template.args, args, strict=True):
            matched = _each(matched, partial(_match, wanted, value, index, flow))
        yield from matched


def _each(founds: Iterator[_Found], step: Callable[[_Found], Iterator[_Found]]) -> Iterator[_Found]:
    for found in founds:
        yield from step(found)


def _bind(name: str, bound: Bound, found: _Found) -> Iterator[_Found]:
    """Nothing where the name stands for something else already."""
    known = found.bound.get(name)
    if known is None or (known.value, known.origin) == (bound.value, bound.origin):
        yield _Found({name: bound, **found.bound}, found.statements)


def _reads(statement: Statement) -> frozenset[str]:
    if isinstance(statement, Reshard):
        return frozenset((statement.source.name,))
    if isinstance(statement, LayerLoop):
        return frozenset(var.name for var in statement.args)
    return frozenset(_names((statement.args, tuple(value for _, value in statement.kwargs))))


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Var):
        yield value.name
    elif isinstance(value, Raw):
        yield from re.findall(r"(?<![\w.])[A-Za-z_]\w*", value.text)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _names(item)


def _assigns(statement: Statement) -> tuple[str, ...]:
    return (statement.result,) if isinstance(statement, Reshard) else tuple(filter(None, statement.results))
