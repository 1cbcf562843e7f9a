"""Rotary position embedding of a layer's queries and keys: two runs beside one another that share cos and sin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from codegen.fusion.template import Bindings, Is, Leaf, Op, Pattern, Result, Template, Value, argument_types, fused
from codegen.program import Call, Raw, TensorType


def _part(x: Template, start: Template, stop: Template) -> Op:
    return Op("aten.slice.Tensor", (x, Value("dim"), start, stop))


def _angles(name: str, interleaved: bool) -> Op:
    """[B or 1, S, A], with a dim for the heads; interleaved, the first half of it, each angle twice."""
    angles = Op("aten.unsqueeze.default", (Leaf(name), Value("heads_dim")))
    if not interleaved:
        return angles
    return Op("aten.repeat_interleave.self_int", (_part(angles, Is(0), Value("half")), Is(2), Value("angle_dim")))


def _turned(x: Template, interleaved: bool) -> Op:
    """The template of (-b, a) for each pair (a, b)."""
    if not interleaved:
        first, second = _part(x, Is(0), Value("half")), _part(x, Value("half"), Value("stop"))
        return Op("aten.cat.default", ((Op("aten.neg.default", (second,)), first), Value("cat_dim")))
    even, odd = (Op("aten.slice.Tensor", (x, Value("dim"), Is(start), Value("stop"), Is(2))) for start in (0, 1))
    stack = Op("aten.stack.default", ((Op("aten.neg.default", (odd,)), even), Is(-1)))
    return Op("aten.flatten.using_ints", (stack, Is(-2)))


def _rotated(x: str, interleaved: bool, partial: bool) -> Op:
    """x * cos + turned(x) * sin, of all components or of the first, beside which the others stay."""
    part: Template = _part(Leaf(x), Is(0), Value("rotated")) if partial else Leaf(x)
    cos, sin = _angles("cos", interleaved), _angles("sin", interleaved)
    products = (
        Op("aten.mul.Tensor", (part, cos), commutes=True),
        Op("aten.mul.Tensor", (_turned(part, interleaved), sin), commutes=True),
    )
    name = f"rotated {x}"
    if not partial:
        return Op("aten.add.Tensor", products, commutes=True, name=name)
    rest = _part(Leaf(x), Value("rotated"), Value("stop"))
    joined = (Op("aten.add.Tensor", products, commutes=True), rest)
    return Op("aten.cat.default", (joined, Value("cat_dim")), name=name)


def rotates(bound: Bindings) -> bool:
    """Tensors of one dtype as the kernel wants them, halves that are halves, and all of it along the last dim."""
    q, k, cos, sin = (bound[name].type for name in ("q", "k", "cos", "sin"))
    if len(q.shape) != 4 or len(k.shape) != 4 or len(cos.shape) != 3 or not cos.is_alike(sin):
        return False
    heads_dim = bound["heads_dim"].value
    if heads_dim not in (1, 2) or any(bound[n].value not in (-1, 3) for n in _DIMS if n in bound):
        return False
    width, half = q.shape[3], bound["half"].value
    num_rotated = bound["rotated"].value if "rotated" in bound else width
    num_angles = half if "angle_dim" in bound else cos.shape[2]
    is_rotation = isinstance(half, int) and 2 * half == num_rotated <= width <= bound["stop"].value
    agree = all(q.shape[dim] == k.shape[dim] for dim in (0, 3 - heads_dim, 3))
    agree = agree and cos.shape[0] in (1, q.shape[0]) and cos.shape[1] == q.shape[3 - heads_dim]
    has_angles = num_angles <= cos.shape[2] and num_angles == (half if "angle_dim" in bound else num_rotated)
    return is_rotation and agree and has_angles and len({operand.dtype for operand in (q, k, cos)}) == 1


_DIMS: Final = ("dim", "cat_dim", "angle_dim")


def _build(pattern: Pattern, bound: Bindings, last: Call) -> tuple[Call, ...]:
    interleaved = "angle_dim" in bound
    options: dict[str, Any] = {"interleaved": True} if interleaved else {}
    options |= {"heads_dim": 2} if bound["heads_dim"].value == 2 else {}
    call = fused(pattern.target, bound, ("q", "k", "cos", "sin"), last, tuple(options.items()))
    q, k, *angles = call.args
    cos, sin = (Raw(f"{x.name}[..., :{bound['half'].value}]", (x,)) if interleaved else x for x in angles)
    return (replace(call, args=(q, k, cos, sin), results=(*bound["rotated q"].value.results, *last.results)),)


def _like_queries_and_keys(call: Call) -> tuple[TensorType | None, ...]:
    return argument_types(call)[:2]


def _rotary(interleaved: bool, partial: bool) -> Pattern:
    return Pattern(
        name="rotary",
        target="kernels.rotary",
        leaves=("k", "cos", "sin"),
        template=_rotated("k", interleaved, partial),
        fits=rotates,
        build=_build,
        result_types=_like_queries_and_keys,
        beside=(_rotated("q", interleaved, partial),),
        results=(Result("rotated q", ("q", "cos", "sin")),),
        saves=("cos", "sin"),
        needs_whole=True,
        is_linear=True,
    )


HALVES: Final = _rotary(interleaved=False, partial=False)
PATTERNS: Final[tuple[Pattern, ...]] = (
    _rotary(interleaved=False, partial=True),
    HALVES,
    _rotary(interleaved=True, partial=True),
    _rotary(interleaved=True, partial=False),
)
"""Pairs (j, j + R / 2) or (2j, 2j + 1), of the first R of D components or of all."""
