"""Cross-entropy, alone and with the linear layer that makes its logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import torch

from codegen.fusion.template import FLOATS, VIEWS, Bindings, Either, Leaf, Op, Pattern, Template, Value, is_dtype
from codegen.kernels.linear_cross_entropy import even_chunk, sum_dtype
from codegen.program import Call, Raw, TensorType, Var
from codegen.source.expressions import expression, literal

# --- cross-entropy ----------------------------------------------------------------------------------------------------


def _cross_entropy_template() -> Op:
    """Logits that are widened before the loss are taken as they were: the kernel computes in fp32 anyway."""
    x = Leaf("logits")
    wide = Op("aten.to.dtype", (x, Value("wide")))
    viewed = Op("aten.view.default", (wide, Value("sizes")), name="view")
    args = (Either((viewed, wide, x)), Leaf("target"), Value("num_targets"))
    return Op("runtime.cross_entropy", args, keywords=("ignore_index", "own_classes"))


def _cross_entropy_fits(bound: Bindings) -> bool:
    """Whether the kernel computes this loss; the template has no vocab_axis and no label_smoothing.

    Logits of more dims, of which lowering makes rows that are no tensor of the graph, are priced without the kernel.
    """
    logits, target = bound["logits"].type, bound["target"].type
    if not isinstance(bound["num_targets"].value, Raw) or not logits.tensor[0]:
        return False
    widens = "wide" not in bound or (is_dtype(bound["wide"], "float32") and logits.dtype in ("bfloat16", "float16"))
    return widens and target.dtype == "int64" and logits.dtype in ("float32", "bfloat16", "float16")


def _cross_entropy(pattern: Pattern, bound: Bindings, last: Call) -> tuple[Call, ...]:
    """Losses per token, their sum, and the division by the count of targets on all ranks."""
    logits: Var = bound["logits"].value
    before: tuple[Call, ...] = ()
    if "view" in bound:
        view: Call = bound["view"].value
        viewed = Var(view.results[0].name, replace(view.results[0].type, dtype=logits.type.dtype))
        before = (replace(view, args=(logits, *view.args[1:]), results=(viewed,)),)
        logits = viewed
    ignored = (bound["ignore_index"].value,) if "ignore_index" in bound else ()
    (loss,), target, divisor = last.results, bound["target"].value, bound["num_targets"].value
    row_losses = Var(loss.name, replace(loss.type, shape=target.type.shape, placements=_of_rows(target.type)))
    plain = replace(last, kwargs=())
    losses = replace(plain, target=pattern.target, args=(logits, target, *ignored), results=(row_losses,))
    total = replace(plain, target="aten.sum.default", args=(row_losses,))
    if divisor.text == "1.0":
        return (*before, losses, total)
    mean = replace(plain, target="aten.div.Tensor", args=(loss, divisor))
    return (*before, losses, total, mean)


def _per_target(call: Call) -> tuple[TensorType, ...]:
    """Losses of the targets, the second argument."""
    return (TensorType(call.args[1].type.shape, call.results[0].type.dtype),)


def _of_rows(target: TensorType) -> tuple[tuple[str, str], ...]:
    """Return the placements of losses, one per target: as the targets, which have no gradient that could be partial."""
    return tuple((axis, text) for axis, text in target.placements if text != "Rp")


# --- linear layer and cross-entropy -----------------------------------------------------------------------------------


def _linear_cross_entropy_template() -> Op:
    """Logits may be cast, lose rows (models that shift them against the labels), and be viewed as rows of tokens.

    The layer's weight gradient is summed up in the forward pass, so one that a zero-bubble schedule would defer is
    there with the input's: nothing is left for W.
    """
    x, weight, bias = Leaf("x"), Leaf("weight"), Leaf("bias")
    operands = (x, weight), (x, weight, bias)
    linear = Either(tuple(Op(target, args, name="linear") for target in _LINEARS for args in operands))
    logits = Either((_wide(linear), linear))
    part = Op("aten.slice.Tensor", (logits, Value("dim"), Value("start"), Value("stop")), name="slice")
    rows = Either((logits, part, Op("aten.contiguous.default", (part,))))
    viewed = Either(tuple(Op(target, (rows, Value("sizes"))) for target in VIEWS))
    args = (Either((viewed, _wide(viewed), rows)), Leaf("target"), Value("num_targets"))
    return Op("runtime.cross_entropy", args, keywords=("ignore_index", "vocab_axis", "own_classes"), name="loss")


_LINEARS: Final = ("aten.linear.default", "deferred.linear")


def _wide(x: Template) -> Op:
    return Op("aten.to.dtype", (x, Value("wide")))


def _linear_cross_entropy_fits(bound: Bindings) -> bool:
    """One dtype of x, weight and bias; logits of the whole layer in rows; no label smoothing (not in the template)."""
    x, weight, target = (bound[name].type for name in ("x", "weight", "target"))
    logits: TensorType = bound["loss"].value.args[0].type
    same = x.dtype in FLOATS and len({bound[n].type.dtype for n in ("x", "weight", "bias") if n in bound}) == 1
    wide = "float64" if x.dtype == "float64" else "float32"
    widens = "wide" not in bound or is_dtype(bound["wide"], wide)
    # A slice of the rows' own dim would cut classes off.
    slices_rows = "slice" not in bound or bound["dim"].value in range(len(x.shape) - 1)
    is_rows = len(logits.shape) == 2 and logits.shape[1] == weight.shape[0]
    return same and widens and slices_rows and is_rows and target.dtype == "int64"


def _linear_cross_entropy(pattern: Pattern, bound: Bindings, last: Call) -> tuple[Call, ...]:
    """One call on rows of tokens, which divides by the count of targets on all ranks."""
    x: Var = bound["x"].value
    rows: Var | Raw = x
    if "slice" in bound:
        rows = Raw(expression(replace(bound["slice"].value, args=(rows, *bound["slice"].value.args[1:]))), (x,))
    if len(x.type.shape) > 2:
        rows = Raw(f"{literal(rows)}.reshape(-1, {x.type.shape[-1]})", (x,))
    names = ("weight", "target", *(("bias",) if "bias" in bound else ()))
    args = (rows, *(bound[name].value for name in names))
    kwargs: list[tuple[str, Any]] = [("ignore_index", bound["ignore_index"].value)] if "ignore_index" in bound else []
    kwargs.append(("num_targets", bound["num_targets"].value))
    kwargs += [("vocab_axis", bound["vocab_axis"].value)] if "vocab_axis" in bound else []
    section = bound["linear"].value.section
    return (replace(last, target=pattern.target, args=args, kwargs=tuple(kwargs), section=section),)


def _no_dims(call: Call) -> tuple[TensorType, ...]:
    return (TensorType((), call.results[0].type.dtype),)


def _linear_cross_entropy_pays(bound: Bindings, num_token_ranks: int) -> bool:
    """Whether the peak is lower than with logits and their gradient beside each other.

    Per column of the vocabulary, with N rows on a rank of which C <= N are a chunk, H the layer's width, e bytes per
    element and a >= e per element of the summed weight gradient, that is 2 N e without the fused call, and with it
    C e + H a forward and H (a + e) backward. Both are less where H a <= N e. The products are the same and the sum has
    traffic of its own, so there is no gain in time that would make up for more memory.
    """
    x = bound["x"].type
    rows, dtype = math.prod(x.shape[:-1]) / num_token_ranks, torch_dtype(x)
    return rows * dtype.itemsize >= x.shape[-1] * sum_dtype(dtype).itemsize


def torch_dtype(tensor_type: TensorType) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, tensor_type.dtype)
    return dtype


PATTERNS: Final[tuple[Pattern, ...]] = (
    Pattern(
        name="linear and cross-entropy",
        target="kernels.linear_cross_entropy",
        leaves=("x", "weight", "target", "bias"),
        template=_linear_cross_entropy_template(),
        fits=_linear_cross_entropy_fits,
        build=_linear_cross_entropy,
        result_types=_no_dims,
        pays=_linear_cross_entropy_pays,
        launches=(2, 0),
        products=(3, 0),
        torch_calls=(5, 2),
        chunk_rows=even_chunk,
        on_cpu=True,
    ),
    Pattern(
        name="cross-entropy",
        target="kernels.cross_entropy",
        leaves=("logits", "target"),
        template=_cross_entropy_template(),
        fits=_cross_entropy_fits,
        build=_cross_entropy,
        result_types=_per_target,
        saves=("logits", "target"),
        row_bytes=8,  # the largest logit and the logarithm of the sum
        launches=(3, 1),  # forward adds up the losses and divides
        needs_whole=True,
    ),
)
