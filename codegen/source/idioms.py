"""Runs of calls that have a name: printed as calls of `codegen/runtime/idioms.py`, where no kernel stands for them.

The matcher is that of fusion. A function of idioms.py makes the very calls that it replaces, in their order, so that a
program computes what it did before, bit by bit; forms that round otherwise are left as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from codegen.fusion.activations import written_gelu
from codegen.fusion.match import matches
from codegen.fusion.norms import normalised
from codegen.fusion.rewrite import chosen, replaced
from codegen.fusion.rotary import rotated, rotates
from codegen.fusion.template import Bindings, Either, Is, Leaf, Op, Pattern, Result, Value, fused, is_dtype
from codegen.program import Call, ModuleClass, Program

_WIDE: Final = Op("aten.to.dtype", (Leaf("x"), Value("wide")))


def _squares(x: Leaf | Op) -> tuple[Op, ...]:
    return (Op("aten.pow.Tensor_Scalar", (x, Is(2))),)


def _rms_norm_fits(bound: Bindings) -> bool:
    """All in fp32, or in fp32 between, over the last dim."""
    x, weight, dims = bound["x"].type, bound["weight"].type, bound["dims"].value
    casts = "wide" in bound and is_dtype(bound["wide"], "float32") and is_dtype(bound["narrow"], x.dtype)
    is_last = dims in ((-1,), (len(x.shape) - 1,)) and weight.shape == x.shape[-1:]
    return is_last and weight.dtype == x.dtype and (casts or ("wide" not in bound and x.dtype == "float32"))


def _rms_norm(bound: Bindings, last: Call) -> tuple[Call, ...]:
    return (fused("idioms.rms_norm", bound, ("x", "weight"), last, (("eps", bound["eps"].value),)),)


def _is_whole_rotation(bound: Bindings) -> bool:
    return rotates(bound) and 2 * bound["half"].value == bound["q"].type.shape[3]


def _rotary(bound: Bindings, last: Call) -> tuple[Call, ...]:
    options = (("heads_dim", 2),) if bound["heads_dim"].value == 2 else ()
    call = fused("idioms.rotary", bound, ("q", "k", "cos", "sin"), last, options)
    return (replace(call, results=(*bound["rotated q"].value.results, *last.results)),)


def _moves_last_dim(bound: Bindings) -> bool:
    return bound["dim"].value in (-1, len(bound["labels"].type.shape) - 1)


def _next_tokens(bound: Bindings, last: Call) -> tuple[Call, ...]:
    ignored = bound["ignored"].value
    if "int" in bound["labels"].type.dtype and ignored == int(ignored):
        ignored = int(ignored)
    return (fused("idioms.next_tokens", bound, ("labels",), last, (("ignored", ignored),)),)


_PADDED: Final = Op("aten.pad.default", (Leaf("labels"), (Is(0), Is(1)), Is("constant"), Value("ignored")))
_MOVED: Final = Op("aten.slice.Tensor", (_PADDED, Value("dim"), Is(1), Value("stop")))

IDIOMS: Final[tuple[Pattern, ...]] = (
    Pattern(
        name="RMSNorm",
        target="idioms.rms_norm",
        leaves=("x", "weight"),
        template=Op(
            "aten.mul.Tensor",
            (
                Leaf("weight"),
                Either(
                    (
                        Op("aten.to.dtype", (normalised(_WIDE, _squares(_WIDE)), Value("narrow"))),
                        normalised(Leaf("x"), _squares(Leaf("x"))),
                    )
                ),
            ),
            commutes=True,
        ),
        fits=_rms_norm_fits,
        build=_rms_norm,
    ),
    Pattern(
        name="rotary",
        target="idioms.rotary",
        leaves=("k", "cos", "sin"),
        template=rotated("k", interleaved=False, partial=False),
        fits=_is_whole_rotation,
        build=_rotary,
        beside=(rotated("q", interleaved=False, partial=False),),
        results=(Result("rotated q", ("q", "cos", "sin")),),
    ),
    Pattern(
        name="SwiGLU",
        target="idioms.swiglu",
        leaves=("gate", "up"),
        template=Op("aten.mul.Tensor", (Op("aten.silu.default", (Leaf("gate"),)), Leaf("up")), commutes=True),
        fits=lambda bound: bound["gate"].type.is_alike(bound["up"].type),
        build=lambda bound, last: (fused("idioms.swiglu", bound, ("gate", "up"), last),),
    ),
    Pattern(
        name="GELU",
        target="idioms.gelu_tanh",
        leaves=("x",),
        template=written_gelu(Leaf("x"))[0],
        fits=lambda bound: True,
        build=lambda bound, last: (fused("idioms.gelu_tanh", bound, ("x",), last),),
    ),
    Pattern(
        name="next tokens",
        target="idioms.next_tokens",
        leaves=("labels",),
        template=Op("aten.contiguous.default", (_MOVED,)),
        fits=_moves_last_dim,
        build=_next_tokens,
    ),
)
_KERNELS: Final = frozenset({"rms_norm", "rotary", "swiglu"})
"""Idioms of whose name there is a kernel, which a program with kernels may import."""


def with_idioms(program: Program) -> Program:
    """The program with every run of calls that has a name as a call of that name."""
    patterns = tuple(p for p in IDIOMS if not (program.kernels and p.target.partition(".")[2] in _KERNELS))

    def named(cls: ModuleClass) -> ModuleClass:
        return replace(cls, body=replaced(cls.body, chosen(matches(patterns, cls.body, cls.outputs), 1)))

    counting = chosen(matches(patterns, program.count_targets, program.target_counts), 1)
    return replace(
        program,
        layers=tuple(map(named, program.layers)),
        root=named(program.root),
        count_targets=replaced(program.count_targets, counting),
    )
