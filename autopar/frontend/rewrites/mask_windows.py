"""Prove that masks are windows: which keys a query sees by its position alone, from the calls that compute the mask.

A mask is a window if it is true (or zero, for an added mask) exactly where a conjunction of these holds for query p and
key s. Causal masks and transformers' masks of sliding windows and chunks are windows.

    p - s <= before        s - p <= after        floor(p / chunk) = floor(s / chunk)

The calls prove it: integer combinations c + a p + b s of a tensor's indices, their quotients, comparisons of two such,
conjunctions, and moves and expansions of these. Any other part of a mask may be evaluated if it depends on no input and
is small; then the window is read off all of its values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.graph import Node, Ref, TensorMeta, base_name
from autopar.ir.operators import arguments_of
from autopar.operators.traits import FILLS, REPEATS, RESHAPES, SAME_PLACES, VIEWS
from codegen.runtime.windows import Window

QUERIES, KEYS = -2, -1
"""Dims of a mask, from its end."""
_UNBOUNDED = (torch.int32, torch.int64)
"""Types that positions and their differences fit in: a uint8 has no number below 0."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Elements start + sum of index[d] * i_d, over dims counted from the end; divided: by that number, rounded down."""

    start: int
    index: tuple[tuple[int, int], ...] = ()
    divided: int = 1

    def plus(self, other: Numbers, sign: int = 1) -> Numbers | None:
        """Return the sum or the difference, of undivided numbers."""
        if self.divided != 1 or other.divided != 1:
            return None
        steps = dict(self.index)
        for dim, step in other.index:
            steps[dim] = steps.get(dim, 0) + sign * step
        return _numbers(self.start + sign * other.start, steps)


def _numbers(start: int, steps: Mapping[int, int]) -> Numbers:
    return Numbers(start, tuple(sorted((dim, step) for dim, step in steps.items() if step)))


@dataclass(frozen=True, slots=True)
class Truth:
    """Elements that are true where all conditions hold.

    at_least: numbers that are at least 0; also pairs of numbers that are equal when divided. is_mask: of a floating
    tensor that is 0 where the conditions hold, and -inf or the least number elsewhere.
    """

    at_least: tuple[Numbers, ...] = ()
    equal: tuple[tuple[Numbers, Numbers], ...] = ()
    is_mask: bool = False


Form = Numbers | Truth


def forms_of(nodes: list[Node], metas: Mapping[Ref, TensorMeta]) -> dict[Ref, Form]:
    """Return the forms of tensors that calls compute from positions alone."""
    forms: dict[Ref, Form] = {}
    for node in nodes:
        if len(node.outputs) == 1 and all(ref in forms for ref in node.inputs):
            form = _form(node, forms, metas)
            if form is not None:
                forms[Ref(node.name)] = form
    return forms


def hides_nothing(form: Form | None, values: torch.Tensor | None) -> bool:
    """Return whether a mask of any dims shows all keys to all queries."""
    if isinstance(form, Truth) and not form.equal:
        return all(not numbers.index and numbers.start >= 0 for numbers in form.at_least)
    return values is not None and not bool((~values if values.dtype == torch.bool else values).any())


def window_of(form: Form | None, values: torch.Tensor | None, lengths: Collection[int]) -> Window | None:
    """Return the window of a mask, from its form or its values. lengths: of its dims, and of queries and keys."""
    if hides_nothing(form, values):
        return Window()
    if len(set(lengths)) > 1:
        return None
    window = window_of_form(form, next(iter(lengths)))
    return window if window is not None or values is None else window_of_values(values)


def window_of_form(form: Form | None, length: int) -> Window | None:
    """Return the window of a mask [..., L, L], from its form."""
    if not isinstance(form, Truth):
        return None
    before: int | None = None
    after: int | None = None
    chunk: int | None = None
    for numbers in form.at_least:
        steps = dict(numbers.index)
        if steps == {QUERIES: -1, KEYS: 1}:
            before = numbers.start if before is None else min(before, numbers.start)
        elif steps == {QUERIES: 1, KEYS: -1}:
            after = numbers.start if after is None else min(after, numbers.start)
        elif steps or numbers.start < 0:
            return None
    for one, other in form.equal:
        sides = {one, other} == {replace(one, index=((dim, 1),)) for dim in (QUERIES, KEYS)}
        if not sides or one.start or chunk not in (None, one.divided):
            return None
        chunk = one.divided
    return _shortest(Window(before, after, chunk), length)


def window_of_values(mask: torch.Tensor) -> Window | None:
    """Return the window of a mask [..., L, L] of known values. Float masks count -inf and the dtype's
    least as hidden.
    """
    rows = mask.reshape(-1, *mask.shape[-2:])
    if mask.dtype != torch.bool:
        if ((rows != 0) & (rows > torch.finfo(mask.dtype).min / 2)).any():
            return None
        rows = rows == 0
    length = rows.shape[-1]
    if rows.shape[-2] != length or not bool((rows == rows[:1]).all()):
        return None
    seen, at = rows[0], torch.arange(length)
    sees = seen.any(-1)
    if not bool(sees.any()):
        return None
    first, last = seen.to(torch.uint8).argmax(-1), length - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
    before, after = int((at - first)[sees].max()), int((last - at)[sees].max())
    gaps = (~seen.diagonal(-1)).nonzero().flatten() if before > 0 else at[:0]
    window = _shortest(Window(before, after, int(gaps[0]) + 1 if len(gaps) else None), length)
    return window if torch.equal(window.mask(at, at), seen) else None


def _shortest(window: Window, length: int) -> Window:
    """Return the window without bounds that hide nothing in a sequence of this length, or nothing beyond
    other bounds.
    """
    chunk = window.chunk if window.chunk is not None and window.chunk < length else None
    least = length if chunk is None else chunk
    before, after = (None if side is None or side >= least - 1 else side for side in (window.before, window.after))
    return Window(before, after, chunk)


def _form(node: Node, forms: Mapping[Ref, Form], metas: Mapping[Ref, TensorMeta]) -> Form | None:
    packet = node.op.split(".")[1].strip("_")
    arguments = arguments_of(node)
    if packet in _MAKERS:
        return _MAKERS[packet](arguments, node)
    if packet in _MOVES:
        moves = _MOVES[packet](metas[node.inputs[0]].shape, node.meta.shape)
        return _moved(forms[node.inputs[0]], moves, node)
    if packet in _CALCULATIONS:
        operands = [_operand(arguments[name], forms) for name in ("self", "other")]
        is_scaled = arguments.get("alpha", 1) != 1 or (packet == "div" and arguments.get("rounding_mode") != "floor")
        if any(operand is None for operand in operands) or is_scaled:
            return None
        form: Form | None = _CALCULATIONS[packet](*operands)
        return form
    return _masked(packet, arguments, forms, node)


def _operand(value: Any, forms: Mapping[Ref, Form]) -> Form | None:
    if isinstance(value, Ref):
        return forms.get(value)
    return Numbers(value) if isinstance(value, int) and not isinstance(value, bool) else None


# --- what makes tensors of nothing ------------------------------------------------------------------------------------


def _arange(arguments: Mapping[str, Any], node: Node) -> Form | None:
    start, step = arguments.get("start", 0), arguments.get("step", 1)
    is_whole = node.meta.dtype in _UNBOUNDED and isinstance(start, int) and isinstance(step, int)
    # A dim of one element may be expanded, and its index is 0 throughout.
    return _numbers(start, {-1: step} if node.meta.numel > 1 else {}) if is_whole else None


def _filled(arguments: Mapping[str, Any], node: Node) -> Form | None:
    fill = FILLS[base_name(node.op)]
    value = arguments[fill] if isinstance(fill, str) else fill
    if node.meta.dtype == torch.bool:
        return Truth() if value else Truth((Numbers(-1),))
    if node.meta.dtype.is_floating_point:
        is_hidden = hides(value, node.meta.dtype)
        return Truth(is_mask=True) if value == 0 else Truth((Numbers(-1),), is_mask=True) if is_hidden else None
    return Numbers(int(value)) if node.meta.dtype in _UNBOUNDED and value == int(value) else None


def hides(value: float, dtype: torch.dtype) -> bool:
    """Return whether a score plus this number has no share of the softmax: -inf and the dtype's least number."""
    return value <= torch.finfo(dtype).min / 2


_MAKERS = {
    "arange": _arange,
    **dict.fromkeys(FILLS, _filled),
}


# --- what moves dims --------------------------------------------------------------------------------------------------

Moves = dict[int, int] | None
"""Dim of the source -> dim of the result, both from the end; None: not a movement of dims."""


def _same(source: tuple[int, ...], result: tuple[int, ...]) -> Moves:
    return {-dim: -dim for dim in range(1, len(source) + 1)}


def _reshaped(source: tuple[int, ...], result: tuple[int, ...]) -> Moves:
    """Return the moved dims of a reshape that only adds or drops dims of one element."""
    here, there = ([dim for dim, size in enumerate(shape) if size != 1] for shape in (source, result))
    if [source[dim] for dim in here] != [result[dim] for dim in there]:
        return None
    return {d - len(source): e - len(result) for d, e in zip(here, there, strict=True)}


_MOVES = {
    **dict.fromkeys(RESHAPES, _reshaped),
    **dict.fromkeys(SAME_PLACES | (REPEATS & VIEWS), _same),
}


def _moved(form: Form, moves: Moves, node: Node) -> Form | None:
    dtype = node.meta.dtype
    is_kept = dtype in _UNBOUNDED if isinstance(form, Numbers) else form.is_mask == dtype.is_floating_point
    is_bool_as_number = isinstance(form, Truth) and not form.is_mask and dtype != torch.bool
    if moves is None or not is_kept or is_bool_as_number:
        return None

    def moved(numbers: Numbers) -> Numbers:
        return _numbers_like(numbers, {moves[dim]: step for dim, step in numbers.index if dim in moves})

    if isinstance(form, Numbers):
        return moved(form)
    pairs = tuple((moved(one), moved(other)) for one, other in form.equal)
    return replace(form, at_least=tuple(map(moved, form.at_least)), equal=pairs)


def _numbers_like(numbers: Numbers, steps: Mapping[int, int]) -> Numbers:
    return replace(_numbers(numbers.start, steps), divided=numbers.divided)


# --- what is calculated -----------------------------------------------------------------------------------------------


def _sum(one: Form, other: Form) -> Form | None:
    return one.plus(other) if isinstance(one, Numbers) and isinstance(other, Numbers) else None


def _difference(one: Form, other: Form) -> Form | None:
    return one.plus(other, -1) if isinstance(one, Numbers) and isinstance(other, Numbers) else None


def _quotient(one: Form, other: Form) -> Form | None:
    if not (isinstance(one, Numbers) and isinstance(other, Numbers)) or other.index or other.start <= 0:
        return None
    return replace(one, divided=other.start) if one.divided == other.divided == 1 else None


def _at_least(least: int, swap: bool) -> Any:
    """Return, for a comparison, the difference that is at least `least`."""

    def compared(one: Form, other: Form) -> Form | None:
        difference = _difference(other, one) if swap else _difference(one, other)
        if not isinstance(difference, Numbers):
            return None
        return Truth((replace(difference, start=difference.start - least),))

    return compared


def _equal(one: Form, other: Form) -> Form | None:
    if not (isinstance(one, Numbers) and isinstance(other, Numbers)) or one.divided != other.divided:
        return None
    return Truth(equal=((one, other),)) if one.divided > 1 else None


def _both(one: Form, other: Form) -> Form | None:
    if not (isinstance(one, Truth) and isinstance(other, Truth)) or one.is_mask or other.is_mask:
        return None
    return Truth((*one.at_least, *other.at_least), (*one.equal, *other.equal))


_CALCULATIONS = {
    "add": _sum,
    "sub": _difference,
    **dict.fromkeys(("div", "floor_divide"), _quotient),
    "ge": _at_least(0, False),
    "gt": _at_least(1, False),
    "le": _at_least(0, True),
    "lt": _at_least(1, True),
    "eq": _equal,
    **dict.fromkeys(("and", "bitwise_and", "logical_and"), _both),
}


def _masked(packet: str, arguments: Mapping[str, Any], forms: Mapping[Ref, Form], node: Node) -> Form | None:
    """Return triangles of true elements, and added masks made of such."""
    if packet in ("tril", "triu") and arguments["self"] in forms:
        form, diagonal = forms[arguments["self"]], arguments["diagonal"]
        if not isinstance(form, Truth) or form.is_mask or 1 in node.meta.shape[-2:]:
            return None
        sign = 1 if packet == "tril" else -1
        kept = _numbers(sign * diagonal, {QUERIES: sign, KEYS: -sign})
        return replace(form, at_least=(*form.at_least, kept))
    if packet in ("bitwise_not", "logical_not"):
        return negated(forms[arguments["self"]])
    if packet == "where" and {"self", "other", "condition"} <= set(arguments) and node.meta.dtype.is_floating_point:
        form, kept, hidden = (_value(arguments[name], forms) for name in ("condition", "self", "other"))
        is_hidden = isinstance(hidden, float) and hides(hidden, node.meta.dtype)
        if isinstance(form, Truth) and not form.is_mask and kept == 0 and is_hidden:
            return replace(form, is_mask=True)
    return None


def negated(form: Form | None) -> Form | None:
    """Return the negation of a single comparison."""
    if not isinstance(form, Truth) or form.is_mask or form.equal or len(form.at_least) != 1:
        return None
    (kept,) = form.at_least
    return Truth((_numbers(-kept.start - 1, {dim: -step for dim, step in kept.index}),))


def _value(value: Any, forms: Mapping[Ref, Form]) -> Any:
    """Return a number, the value of a tensor of one element, or the form."""
    form = forms.get(value) if isinstance(value, Ref) else None
    if isinstance(form, Truth) and form.is_mask and not form.equal and form.at_least in ((), (Numbers(-1),)):
        return -torch.inf if form.at_least else 0.0
    return value if form is None else form
