"""Runs of calls that have a name: printed as calls of `codegen/runtime/idioms.py`, where no kernel stands for them.

The matcher is that of fusion. A function of idioms.py makes the very calls that it replaces, in their order, so that a
program computes what it did before, bit by bit; forms that round otherwise are left as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from codegen.fusion import KERNELS
from codegen.fusion.activations import GELU_WITH_TANH, SWIGLU
from codegen.fusion.match import matches
from codegen.fusion.norms import RMS_NORM, normalised
from codegen.fusion.rewrite import chosen, replaced
from codegen.fusion.rotary import HALVES, rotates
from codegen.fusion.template import Bindings, Either, Is, Leaf, Op, Pattern, Value, fused, is_dtype, on_leaves
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


def _with_eps(pattern: Pattern, bound: Bindings, last: Call) -> tuple[Call, ...]:
    return (fused(pattern.target, bound, pattern.leaves, last, (("eps", bound["eps"].value),)),)


def _is_whole_rotation(bound: Bindings) -> bool:
    return rotates(bound) and 2 * bound["half"].value == bound["q"].type.shape[3]


def _moves_last_dim(bound: Bindings) -> bool:
    return bound["dim"].value in (-1, len(bound["labels"].type.shape) - 1)


def _next_tokens(pattern: Pattern, bound: Bindings, last: Call) -> tuple[Call, ...]:
    ignored = bound["ignored"].value
    if "int" in bound["labels"].type.dtype and ignored == int(ignored):
        ignored = int(ignored)
    return (fused(pattern.target, bound, pattern.leaves, last, (("ignored", ignored),)),)


_PADDED: Final = Op("aten.pad.default", (Leaf("labels"), (Is(0), Is(1)), Is("constant"), Value("ignored")))
_MOVED: Final = Op("aten.slice.Tensor", (_PADDED, Value("dim"), Is(1), Value("stop")))

IDIOMS: Final[tuple[Pattern, ...]] = (
    replace(
        RMS_NORM,
        target="idioms.rms_norm",
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
        build=_with_eps,
    ),
    replace(HALVES, target="idioms.rotary", fits=_is_whole_rotation),
    replace(SWIGLU, target="idioms.swiglu"),
    replace(GELU_WITH_TANH, target="idioms.gelu_tanh", build=on_leaves),
    Pattern(
        name="next tokens",
        target="idioms.next_tokens",
        leaves=("labels",),
        template=Op("aten.contiguous.default", (_MOVED,)),
        fits=_moves_last_dim,
        build=_next_tokens,
    ),
)


def with_idioms(program: Program) -> Program:
    """The program with every run of calls that has a name as a call of that name."""
    # A program with kernels may import a kernel of an idiom's name.
    patterns = tuple(p for p in IDIOMS if not (program.kernels and p.target.replace("idioms.", "kernels.") in KERNELS))

    def named(cls: ModuleClass) -> ModuleClass:
        return replace(cls, body=replaced(cls.body, chosen(matches(patterns, cls.body, cls.outputs), 1)))

    counting = chosen(matches(patterns, program.count_targets, program.target_counts), 1)
    return replace(
        program,
        layers=tuple(map(named, program.layers)),
        root=named(program.root),
        count_targets=replaced(program.count_targets, counting),
    )
