"""The source of one call: a table from operator to Python expression.

An operator that no table names is written as `torch.ops.aten.<name>.<overload>(...)`, which is always right. Operands
are strings already; `Call.args` follow the operator's schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from codegen.functions import function_of
from codegen.program import Call, Raw, Var
from codegen.schemas import EmissionError, devices_of, makes, schema_of, signature_of
from codegen.source.text import quoted

INFIX: Mapping[str, str] = {
    "add.Tensor": "+", "add.Scalar": "+", "sub.Tensor": "-", "sub.Scalar": "-", "mul.Tensor": "*", "mul.Scalar": "*",
    "div.Tensor": "/", "div.Scalar": "/", "eq.Tensor": "==", "eq.Scalar": "==", "ne.Tensor": "!=", "ne.Scalar": "!=",
    "lt.Tensor": "<", "lt.Scalar": "<", "le.Tensor": "<=", "le.Scalar": "<=", "gt.Tensor": ">", "gt.Scalar": ">",
    "ge.Tensor": ">=", "ge.Scalar": ">=", "__and__.Tensor": "&", "__or__.Tensor": "|", "bitwise_and.Tensor": "&",
    "bitwise_or.Tensor": "|", "logical_and.default": "&", "matmul.default": "@", "mm.default": "@", "bmm.default": "@",
    "floor_divide.default": "//", "pow.Tensor_Scalar": "**", "pow.Tensor_Tensor": "**",
    "remainder.Tensor": "%", "remainder.Scalar": "%",
}  # fmt: skip

METHODS = frozenset(
    [
        "view",
        "reshape",
        "transpose.int",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "contiguous",
        "mean",
        "sum",
        "rsqrt",
        "sqrt",
        "tanh",
        "sigmoid",
        "neg",
        "cos",
        "sin",
        "exp",
        "log",
        "abs",
        "softmax.int",
        "log_softmax.int",
        "cumsum",
        "masked_fill",
        "clamp",
        "clamp_min",
        "clamp_max",
        "split",
        "split_with_sizes",
        "chunk",
        "flatten",
        "unflatten",
        "t",
        "clone",
        "detach",
        "amax",
        "amin",
        "argmax",
        "unbind",
        "repeat",
        "index_select",
        "gather",
        "movedim",
        "type_as",
        "repeat_interleave",
        "tril",
        "triu",
        "new_zeros",
        "new_ones",
        "new_full",
        "expand_as",
        "view_as",
        "var",
        "std",
        "bitwise_not",
        "logical_not",
    ]
)
"""`x.name(rest)`; with an overload where only that one is the method."""

FUNCTIONS: Mapping[str, str] = {
    "linear": "F.linear", "silu": "F.silu", "gelu": "F.gelu", "relu": "F.relu", "layer_norm": "F.layer_norm",
    "rms_norm": "F.rms_norm",
    "scaled_dot_product_attention": "F.scaled_dot_product_attention", "conv1d": "F.conv1d",
    "conv2d": "F.conv2d", "conv3d": "F.conv3d", "pad": "F.pad", "addmm": "torch.addmm", "baddbmm": "torch.baddbmm",
    "cat": "torch.cat", "stack": "torch.stack", "where": "torch.where", "einsum": "torch.einsum",
    "leaky_relu": "F.leaky_relu", "elu": "F.elu",
    "softplus": "F.softplus", "max_pool2d": "torch.max_pool2d", "adaptive_avg_pool2d": "F.adaptive_avg_pool2d",
    "avg_pool2d": "F.avg_pool2d", "hardtanh": "F.hardtanh", "group_norm": "F.group_norm",
}  # fmt: skip

REDUCTIONS = ("none", "mean", "sum")

_SPACES: Mapping[str, Callable[[str], str]] = {
    **dict.fromkeys(("self", "async_tp", "deferred", "fp8", "grouped", "overlapped"), str),
    **dict.fromkeys(("runtime", "idioms"), lambda target: target.partition(".")[2]),
    "kernels": lambda target: kernel_name(target.removeprefix("kernels.")),
}
"""Of functions that are no operators: what they are called in the source."""


def expression(call: Call) -> str:
    """The right-hand side of a call."""
    space, _, name = call.target.partition(".")
    if call.target == "self.dropout_attention":
        text = _dropout_attention(call)
    elif space in _SPACES:
        arguments = dict(call.kwargs)
        if name.endswith("attention") and _is_default_scale(call.args[0], arguments.get("scale")):
            del arguments["scale"]
        text = _function(_SPACES[space](call.target), [literal(a) for a in call.args], arguments)
    else:
        text = _operator(call)
    return f"{_atom(text)} / {call.divisor}" if call.divisor != 1 else text


def kernel_name(kernel: str) -> str:
    """A fused kernel's name in generated code; the run time has a cross_entropy too."""
    return "token_losses" if kernel == "cross_entropy" else kernel


def is_method(call: Call) -> bool:
    """Whether the expression starts with the first argument, so that it can follow it in a chain."""
    namespace, name, overload = (*call.target.split("."), "", "")[:3]
    chains = namespace == "aten" and (name in METHODS or f"{name}.{overload}" in METHODS or name == "to")
    return chains and call.divisor == 1 and name not in ("neg",)


Arguments = dict[str, Any]
"""What a call gives, by the names of its operator's schema and in that order, without what is the schema's default."""


def call_arguments(call: Call) -> Arguments:
    """Raises EmissionError for an operator that torch does not have, or that takes no such arguments."""
    schema = schema_of(call.target)
    if schema is None:
        raise EmissionError("torch has no such operator", call.target)
    names = [argument.name for argument in schema]
    if len(call.args) > len(names) or not {name for name, _ in call.kwargs} <= set(names):
        raise EmissionError(f"it does not take {len(call.args)} arguments and {dict(call.kwargs)}", call.target)
    values = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
    return {a.name: values[a.name] for a in schema if a.name in values and not a.is_default(values[a.name])}


def _operator(call: Call) -> str:
    """The first form of a call that says all of its arguments; that by the overload's own name always does."""
    namespace, name, overload = call.target.split(".")
    full = f"{name}.{overload}"
    arguments = call_arguments(call)
    if namespace == "aten":
        required = {argument.name for argument in schema_of(call.target) or () if argument.is_required}
        arguments = {k: v for k, v in arguments.items() if k not in WITHOUT_EFFECT or k in required}
        text = SPECIAL[name](call, dict(arguments)) if name in SPECIAL else None
        text = text or _infix(full, list(arguments.values()))
        if text is None and (name in METHODS or full in METHODS):
            operand, *rest = _positional(call.target, arguments)
            text = _function(f"{_atom(literal(operand[1]))}.{name}", *_split(rest))
        if text is None and name in FUNCTIONS:
            text = _python(FUNCTIONS[name], call.target, arguments)
        if text is None and name.endswith("_like"):
            text = _function(f"torch.{name}", *_split(_positional(call.target, arguments)))
        if text is not None:
            return text
    if namespace != "aten" or makes(call.target):
        arguments |= dict.fromkeys(devices_of(call.target), _DEVICE)
    function = function_of(call.target)
    path = function.call if function else f"torch.ops.{call.target}"
    if namespace == "aten" and makes(call.target) and hasattr(torch, name):
        path = f"torch.{name}"
    written = function.written if function else ()
    values = [(n, Raw(v) if i in written else v) for i, (n, v) in enumerate(_positional(call.target, arguments))]
    return _function(path, *_split(values))


_DEVICE = Raw("self.mesh.device")
"""Where a tensor is made that follows no operand: on the rank's own device, whatever the trace said."""

Given = tuple[str | None, Any]
"""An argument as it is written: its name, None where its position says it."""


def _positional(target: str, arguments: Arguments) -> list[Given]:
    """The arguments in the schema's order: by position as long as none is left out and the schema allows it."""
    written: list[Given] = []
    is_open = True
    for argument in schema_of(target) or ():
        is_open = is_open and argument.name in arguments and not argument.is_keyword
        if argument.name in arguments:
            written.append((None if is_open else argument.name, arguments[argument.name]))
    return written


def _split(written: list[Given]) -> tuple[list[str], dict[str, Any]]:
    return [literal(v) for n, v in written if n is None], {n: v for n, v in written if n is not None}


def _python(name: str, target: str, arguments: Arguments) -> str | None:
    """A call of torch's Python function; None if that lacks one of the arguments."""
    written = [("input" if n == "self" else n, v) for n, v in arguments.items()]
    module, short = name.split(".")
    signature = signature_of(getattr(F if module == "F" else torch, short))
    if signature is None:
        return _function(name, *_split(_positional(target, arguments)))
    names = list(signature.parameters)
    if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
        return _function(name, [literal(v) for _, v in written], {})
    if not {n for n, _ in written} <= set(names):
        return None
    lead = 0
    while lead < len(written) and written[lead][0] == names[lead]:
        lead += 1
    return _function(name, [literal(v) for _, v in written[:lead]], dict(written[lead:]))


def _infix(name: str, values: list[Any]) -> str | None:
    """An operation between two operands, `a + b`; `&` is the logical "and" of booleans only."""
    infix = INFIX.get(name)
    if infix is None or len(values) != 2:
        return None
    if name == "logical_and.default" and not all(isinstance(v, Var) and v.type.dtype == "bool" for v in values):
        return None
    return f"{_atom(literal(values[0]))} {infix} {_atom(literal(values[1]))}"


Special = Callable[[Call, Arguments], str | None]


def _to(call: Call, arguments: Arguments) -> str | None:
    """Devices are this rank's own whatever the trace said, and values need no copy of their own."""
    dtype = arguments.get("dtype")
    return f"{_atom(literal(arguments['self']))}.to({literal(dtype)})" if dtype is not None else None


def _slice(call: Call, arguments: Arguments) -> str | None:
    """`x[:, 1:]`; from the last dims `x[..., 4:]` is not known here, so colons count the dims."""
    dim = arguments.get("dim", 0)
    bounds = _bounds(arguments.get("start"), arguments.get("end"), arguments.get("step", 1))
    if dim < 0:
        return f"{_atom(literal(arguments['self']))}[..., {bounds}]" if dim == -1 else None
    return f"{_atom(literal(arguments['self']))}[{':, ' * dim}{bounds}]"


def _bounds(start: Any, stop: Any, step: Any) -> str:
    first = "" if start in (0, None) else str(start)
    last = "" if stop is None or stop >= 2**62 else str(stop)
    return f"{first}:{last}" + (f":{step}" if step not in (1, None) else "")


def _select(call: Call, arguments: Arguments) -> str | None:
    dim, index = arguments["dim"], arguments["index"]
    return f"{_atom(literal(arguments['self']))}[{':, ' * dim}{index}]" if isinstance(dim, int) and dim >= 0 else None


def _embedding(call: Call, arguments: Arguments) -> str | None:
    """F.embedding takes them in another order, and counts a negative padding_idx from the end."""
    if (arguments.get("padding_idx") or 0) < 0:
        return None
    return _function("F.embedding", [literal(arguments.pop("indices")), literal(arguments.pop("weight"))], arguments)


def _attention(call: Call, arguments: Arguments) -> str | None:
    if _is_default_scale(arguments["query"], arguments.get("scale")):
        del arguments["scale"]
    lead = [literal(arguments.pop(name)) for name in ("query", "key", "value")]
    return _function("F.scaled_dot_product_attention", lead, arguments)


def _is_default_scale(query: Any, scale: Any) -> bool:
    """Whether attention's scale is torch's own, 1 / sqrt(head dim), to the last digit but one."""
    if not isinstance(scale, float) or not isinstance(query, Var) or not query.type.shape:
        return False
    return math.isclose(scale, query.type.shape[-1] ** -0.5, rel_tol=4e-16)


def _dropout_attention(call: Call) -> str:
    """The run time's takes what torch's does, and where the mask is drawn."""
    extra_names = {"call", "layout", "batched"}
    plain = replace(
        call,
        target="aten.scaled_dot_product_attention.default",
        kwargs=tuple((name, value) for name, value in call.kwargs if name not in extra_names),
    )
    arguments = call_arguments(plain)
    if _is_default_scale(arguments["query"], arguments.get("scale")):
        del arguments["scale"]
    lead = [literal(arguments.pop(name)) for name in ("query", "key", "value")]
    return _function(call.target, lead, arguments | {n: v for n, v in call.kwargs if n in extra_names})


def _loss(call: Call, arguments: Arguments) -> str | None:
    """Torch's Python losses call their reduction by name."""
    name = FUNCTION_OF_LOSS.get(call.target.split(".")[1], call.target.split(".")[1])
    lead = [literal(arguments.pop("self")), literal(arguments.pop("target"))]
    if "reduction" in arguments:
        arguments["reduction"] = REDUCTIONS[arguments["reduction"]]
    return _function(f"F.{name}", lead, arguments)


def _index(call: Call, arguments: Arguments) -> str | None:
    parts = [":" if index is None else literal(index) for index in arguments["indices"]]
    return f"{_atom(literal(arguments['self']))}[{', '.join(parts)}]"


def _cat(call: Call, arguments: Arguments) -> str | None:
    items = ", ".join(literal(item) for item in arguments.pop("tensors"))
    return _function(f"torch.{call.target.split('.')[1]}", [f"[{items}]"], arguments)


def _view(call: Call, arguments: Arguments) -> str | None:
    """A view, with sizes without the tuple's brackets."""
    (_, operand), (_, sizes), *_ = arguments.items()
    if not isinstance(sizes, tuple):
        return None
    return f"{_atom(literal(operand))}.{call.target.split('.')[1]}({', '.join(map(literal, sizes)) or '()'})"


def _reduce(call: Call, arguments: Arguments) -> str | None:
    """A reduction: `x.mean(-1, keepdim=True)`."""
    operand, dims = arguments.pop("self"), arguments.pop("dim", None)
    single = dims[0] if isinstance(dims, tuple) and len(dims) == 1 else dims
    lead = [] if dims is None else [literal(single)]
    return _function(f"{_atom(literal(operand))}.{call.target.split('.')[1]}", lead, arguments)


def _norm(call: Call, arguments: Arguments) -> str | None:
    """A norm with its arguments by position, in the order of torch.nn.functional, which is not the operator's."""
    name = call.target.split(".")[1]
    signature = signature_of(getattr(F, name))
    if signature is None or not set(arguments) - {"input"} <= set(signature.parameters):
        return None
    return _function(f"F.{name}", [literal(arguments.get(parameter)) for parameter in signature.parameters], {})


def _neg(call: Call, arguments: Arguments) -> str | None:
    return f"-{_atom(literal(arguments['self']))}"


SPECIAL: Mapping[str, Special] = {
    "to": _to, "_to_copy": _to, "slice": _slice, "select": _select, "embedding": _embedding,
    "scaled_dot_product_attention": _attention, "mse_loss": _loss, "l1_loss": _loss, "smooth_l1_loss": _loss,
    "index": _index, "cat": _cat, "stack": _cat, "view": _view, "reshape": _view, "expand": _view, "permute": _view,
    "mean": _reduce, "sum": _reduce, "amax": _reduce, "amin": _reduce, "neg": _neg,
    "instance_norm": _norm, "cross_entropy_loss": _loss,
}  # fmt: skip

FUNCTION_OF_LOSS: Mapping[str, str] = {"cross_entropy_loss": "cross_entropy"}
"""Losses that torch.nn.functional calls otherwise."""

WITHOUT_EFFECT = frozenset({
    "cudnn_enabled", "cudnn_enable", "implicit", "non_blocking", "copy", "pin_memory", "device", "sparse", "sparse_grad"
})  # fmt: skip
"""Arguments that change no value: which library may be asked, and where a trace wanted things to lie."""


def _function(name: str, args: list[str], kwargs: Mapping[str, Any]) -> str:
    return f"{name}({', '.join([*args, *(f'{k}={literal(v)}' for k, v in kwargs.items())])})"


def literal(value: Any) -> str:
    """A value as Python source."""
    if isinstance(value, Var):
        return value.name
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    if isinstance(value, float) and value != value:
        return 'float("nan")'
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, str):
        return quoted(value)
    return str(value) if str(value).startswith("torch.") else repr(value)


def is_atom(text: str) -> bool:
    """Whether an expression can be an operand as it stands: no space or leading minus outside of brackets."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and (char == " " or (char == "-" and position == 0)):
            return False
    return True


def _atom(text: str) -> str:
    return text if is_atom(text) else f"({text})"
