"""Linear layers and the collective before or after them as one call, which torch can run chunk by chunk.

Under tensor and sequence parallelism a column-parallel layer reads what an all_gather brought together, and a
row-parallel layer's partial result goes into a reduce_scatter:

    x = tp.all_gather(x, dim=1)             q, k = async_tp.all_gather_linears(
    q = F.linear(x, self.q.weight)              x, (self.q.weight, self.k.weight), axis=tp, dim=1
    k = F.linear(x, self.k.weight)          )

    y = F.linear(h, self.o.weight)          y = async_tp.linear_reduce_scatter(h, self.o.weight, axis=tp, dim=1)
    y = tp.reduce_scatter(y, dim=1)

The product of one rank's chunk needs no other chunk, so that it can run while the next is on its way
(`codegen/runtime/async_tp.py`). Where the collective is not along rows but along the features, or in sections, calls
stay as they are; so do layers of classes that recompute selectively, which keeps the results of products that it can
see, and layers whose weight gradients are deferred. What a replicated bias becomes for a partial sum, itself on the
first rank and zeros elsewhere, is part of the call: such a bias is added once, after the sum.

A gather's call stands where its first layer stood, a scatter's where the reduce_scatter stood.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from codegen.fusion.match import Flow
from codegen.passes.linear_calls import Layer, is_stored, layer_of, readers_of, view_of
from codegen.passes.overlap import joined
from codegen.program import Call, ModuleClass, PipelineProgram, Program, Raw, Reshard, Var, reads

AXIS: Final = "tp"
"""The axis whose ranks share memory, if any do."""

_GATHERED: Final = {
    "overlapped.linear": "async_tp.all_gather_linear",
    "overlapped.linears": "async_tp.all_gather_linears",
    "overlapped.addmm": "async_tp.all_gather_addmm",
}


def with_async_tp(program: Program) -> Program:
    """The program with all such calls joined."""
    selective = {name for name, runs in program.recompute.items() if any(mode == "selective" for mode, _ in runs)}
    layers = tuple(cls if cls.name in selective else _joined_class(cls) for cls in program.layers)
    return replace(program, layers=layers, root=_joined_class(program.root))


def has_async_tp(program: Program | PipelineProgram) -> bool:
    """Whether the program has any such call."""
    bodies = (cls.body for stage in program.programs for cls in (*stage.layers, stage.root))
    return any(isinstance(s, Call) and s.target.startswith("async_tp.") for body in bodies for s in body)


@dataclass(frozen=True, slots=True)
class _Joint:
    """A call that stands for the statement at `position`, and for those in `gone`."""

    call: Call
    position: int
    gone: frozenset[int]


def _joined_class(cls: ModuleClass) -> ModuleClass:
    body = cls.body
    # One at a time: a call reads its operands where it stands, which another one may have changed.
    while (joint := next(_joints(Flow.of(body, cls.outputs)), None)) is not None:
        statements = enumerate(body)
        body = tuple(joint.call if i == joint.position else s for i, s in statements if i not in joint.gone)
    return replace(cls, body=body)


def _joints(flow: Flow) -> Iterator[_Joint]:
    for index, statement in enumerate(flow.body):
        if isinstance(statement, Reshard) and statement.axis == AXIS:
            find = {"all_gather": _gathered, "reduce_scatter": _scattered}.get(statement.method)
            joint = find(statement, index, flow) if find else None
            if joint is not None:
                yield joint


def _gathered(gather: Reshard, index: int, flow: Flow) -> _Joint | None:
    """An all_gather with the layers that are all that reads it."""
    readers = readers_of(gather.result, index, flow)
    if readers is None:
        return None
    first, gone = readers.calls[0], readers.gone | {index}
    if not _is_of_rows(gather) or not _holds(gather.source, index, first, gone, flow):
        return None
    call = joined(readers)
    args = tuple(gather.source if arg == readers.x else arg for arg in call.args)
    kwargs = (("axis", Raw(gather.axis)), *gather.kwargs)
    return _Joint(replace(call, target=_GATHERED[call.target], args=args, kwargs=kwargs), first, gone)


@dataclass(frozen=True, slots=True)
class _Product:
    """The layer at `position` whose result a reduce_scatter alone reads. view: the position of a statement between them
    that gives the rows of the result the dims of `shape`, -1 if there is none."""

    layer: Layer
    position: int
    view: int = -1
    shape: tuple[Any, ...] = ()


def _scattered(scatter: Reshard, index: int, flow: Flow) -> _Joint | None:
    """A reduce_scatter with the layer whose result it alone reads, and with that layer's bias."""
    product = _product(scatter.source, index, flow)
    if product is None or not _is_of_rows(scatter):
        return None
    layer, position = product.layer, product.position
    masked, bias = _masked(layer, position, scatter.axis, flow)
    gone = frozenset(i for i in (position, product.view, masked) if i >= 0)
    if bias is None and layer.bias is not None or not _holds(layer.x, position, index, gone, flow):
        return None
    args: tuple[Any, ...] = (layer.x, layer.weight) if bias is None else (layer.x, layer.weight, bias)
    kwargs: tuple[tuple[str, Any], ...] = (("axis", Raw(scatter.axis)), *scatter.kwargs)
    target = "async_tp.linear_reduce_scatter"
    if layer.is_addmm:
        target, args = "async_tp.addmm_reduce_scatter", (bias, layer.x, layer.weight)
        kwargs = (("shape", product.shape), *kwargs) if product.shape else kwargs
    call = replace(layer.call, target=target, args=args, kwargs=kwargs, results=(scatter.result,))
    return _Joint(call, index, gone)


def _product(result: Var, reader: int, flow: Flow) -> _Product | None:
    maker, view = _only_for(result, reader, flow), -1
    shape: tuple[Any, ...] = ()
    viewed = view_of(flow.body[maker]) if maker >= 0 else None
    if viewed is not None:
        product, shape = viewed
        if not shape or shape[-1] != product.shape[-1] or len(flow.origins[maker]) != 1:
            return None
        (source,) = reads(flow.body[maker])
        maker, view = _only_for(source, maker, flow), maker
    layer = layer_of(flow.body[maker]) if maker >= 0 else None
    if layer is None or (view >= 0 and not layer.is_addmm):
        return None
    return _Product(layer, maker, view, shape)


def _masked(layer: Layer, position: int, axis: str, flow: Flow) -> tuple[int, Var | None]:
    """The reshard of a layer's bias from replicated to partial, and that bias; (-1, None) where there is none."""
    maker = _only_for(layer.bias, position, flow) if isinstance(layer.bias, Var) else -1
    reshard = flow.body[maker] if maker >= 0 else None
    if not isinstance(reshard, Reshard) or not is_stored(reshard.source):
        return -1, None
    is_mask = (reshard.axis, reshard.method, reshard.kwargs) == (axis, "first_rank_only", ())
    return (maker, reshard.source) if is_mask else (-1, None)


def _only_for(value: Var, reader: int, flow: Flow) -> int:
    """The statement that made what `reader` alone reads; -1 if others read it, or nothing here made it."""
    maker = flow.origins[reader][value.name]
    return maker if maker >= 0 and flow.readers[maker, value.name] == {reader} else -1


def _is_of_rows(reshard: Reshard) -> bool:
    """Whether a gather or scatter is along one dim of the rows, in one section, with the summed gradient."""
    kwargs = dict(reshard.kwargs)
    return kwargs.keys() == {"dim"} and 0 <= kwargs["dim"] < len(reshard.result.type.shape) - 1


def _holds(value: Var, reader: int, at: int, gone: frozenset[int], flow: Flow) -> bool:
    """Whether a variable has the value at `at` that `reader` reads, with the statements in `gone` away."""
    return flow.value_at(value.name, at, gone) == flow.origins[reader][value.name]
