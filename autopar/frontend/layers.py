"""Find repeated layers in the flat graph, verify that they are equal, and fold them into LayerRuns.

A node belongs to the layer with the name of the first `<list>.<index>` of its module path. Consecutive layers of one
list are folded when their subgraphs are isomorphic: same operators, constants, shapes, dtypes, gradient flow, parameter
names and shapes relative to the layer, and the same wiring. Also, a layer's input comes from its predecessor only, it
is called once, and no other reads its parameters. A layer unlike its neighbors (layers that alternate, stages of a
convolutional network) becomes a run of one layer if it consists of several modules with parameters, and if others are
like it or nothing of its list is folded.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import TraceError
from autopar.frontend.depth import Truncation
from autopar.frontend.fx_import import FlatGraph, unused_name
from autopar.ir.graph import Graph, Input, LayerClass, LayerRun, Node, Parameter, Ref, TensorMeta, map_refs, with_refs
from codegen.source.names import class_name

_LAYER = re.compile(r"(.*?)\.(\d+)(?:\..*)?$")
_NUMBER = re.compile(r"(?<=.)(_\d+)+$")


@dataclass(frozen=True, slots=True)
class _Segment:
    """A contiguous slice of nodes of one layer, in canonical form.

    traced: the path of the layer with these nodes; another layer's if this one was cut from the trace. results: names
    of the outputs outside of the layer.
    """

    path: str
    prefix: str
    index: int
    traced: str
    nodes: tuple[Node, ...]
    args: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    results: tuple[Ref, ...]
    key: Any


def fold_layers(flat: FlatGraph, inputs: tuple[Input, ...], cuts: tuple[Truncation, ...], batch_size: int) -> Graph:
    """Return the Graph of `flat`, with lists that were traced at reduced depth extended to their full length.

    Raises TraceError if a shortened list did not fold into runs (the caller then traces at full depth).
    """
    metas = flat.metas()
    users = _users(flat)
    pieces: list[Node | _Segment] = []
    for path, nodes in _split(flat.nodes):
        pieces += [_segment(path, nodes, flat, metas, users)] if path else nodes
    for cut in cuts:
        pieces = _extended(pieces, cut, users)
    body, renamed = _fold(pieces, flat, metas, users)
    loss = renamed.get(flat.loss, flat.loss)
    return Graph(
        name=class_name(flat.classes[""]),
        inputs=inputs,
        parameters=_all_parameters(body, flat, cuts),
        body=tuple(body),
        loss=loss,
        batch_size=batch_size,
    )


def layer_path(module: str) -> str:
    """`model.layers.3.mlp` -> `model.layers.3`; "" outside of any list."""
    match = _LAYER.match(module)
    return f"{match.group(1)}.{match.group(2)}" if match and match.group(1) else ""


def _split(nodes: list[Node]) -> Iterator[tuple[str, list[Node]]]:
    """Yield maximal contiguous runs of nodes of one layer (or of none)."""
    run: list[Node] = []
    current = ""
    for node in nodes:
        path = layer_path(node.module)
        if run and path != current:
            yield current, run
            run = []
        current = path
        run.append(node)
    if run:
        yield current, run


def _segment(
    path: str, nodes: list[Node], flat: FlatGraph, metas: dict[Ref, TensorMeta], users: dict[Ref, set[str]]
) -> _Segment:
    """Return the canonical form: positions instead of names, so that equal layers have equal keys."""
    position = {node.name: index for index, node in enumerate(nodes)}
    args: dict[Ref, int] = {}

    def canonical(ref: Ref) -> Any:
        if ref.node in position:
            return ("node", position[ref.node], ref.index)
        relative = _relative(path, ref, flat)
        if relative is not None:
            return ("parameter", relative, metas[ref], flat.parameters[ref.node].increment)
        return ("input", args.setdefault(ref, len(args)), metas[ref])

    body = tuple((n.op, map_refs(n.args, canonical), map_refs(n.kwargs, canonical), n.outputs) for n in nodes)
    produced = [Ref(n.name, i) for n in nodes for i in range(len(n.outputs))]
    outputs = tuple(ref for ref in produced if users.get(ref, set()) - {path})
    key = (body, tuple(canonical(ref) for ref in outputs), flat.classes.get(path, ""))
    prefix, _, index = path.rpartition(".")
    return _Segment(
        path=path,
        prefix=prefix,
        index=int(index),
        traced=path,
        nodes=tuple(nodes),
        args=tuple(args),
        outputs=outputs,
        results=outputs,
        key=key,
    )


def _relative(path: str, ref: Ref, flat: FlatGraph) -> str | None:
    """Return the name of a layer's parameter relative to its path. Tied parameters keep their one global name."""
    parameter = flat.parameters.get(ref.node)
    if parameter is None or parameter.aliases or not ref.node.startswith(path + "."):
        return None
    return ref.node.removeprefix(path + ".")


def _extended(pieces: list[Node | _Segment], cut: Truncation, users: dict[Ref, set[str]]) -> list[Node | _Segment]:
    """Return the pieces with the layers that were cut from a list, each a copy of the one a period before it.

    The last layer of the list takes over the result names of the last traced one; readers of new names are added to
    `users`. Raises TraceError where the layers do not repeat as traced.
    """
    places = [i for i, p in enumerate(pieces) if isinstance(p, _Segment) and p.prefix == cut.path]
    layers = [p for p in pieces if isinstance(p, _Segment) and p.prefix == cut.path and p.index >= cut.first]
    indices, period = [layer.index for layer in layers], cut.period
    is_whole = indices == list(range(cut.first, cut.end)) and places[-1] - places[-len(layers)] == len(layers) - 1
    if not is_whole or any(a.key != b.key for a, b in zip(layers, layers[period:], strict=False)):
        raise TraceError("blocks that look alike trace differently", values=cut.path)
    layer_outputs, handed_on = {ref for layer in layers for ref in layer.outputs}, layers[-1].outputs
    layers[-1] = _with_own_results(layers[-1], layers[-1].index)
    for index in range(cut.end, cut.num_blocks):
        model, before = layers[-period], layers[-period - 1]
        carried = dict(zip(before.results, layers[-1].results, strict=True))
        if any(
            ref not in carried and (ref in layer_outputs or ref.node.startswith(f"{cut.path}.")) for ref in model.args
        ):
            raise TraceError("blocks read more than what the one before them computes", values=model.path)
        args = tuple(carried.get(ref, ref) for ref in model.args)
        layers.append(_with_own_results(replace(model, path=f"{cut.path}.{index}", index=index, args=args), index))
    layers[-1] = replace(layers[-1], results=handed_on)
    for layer, following in itertools.pairwise(layers[cut.num_kept - 1 :]):
        users |= {ref: {following.path} for ref in layer.results}
    return [*pieces[: places[-1] - cut.num_kept + 1], *layers, *pieces[places[-1] + 1 :]]


def _with_own_results(layer: _Segment, index: int) -> _Segment:
    """Return the layer with results under new names, unique in a graph."""
    return replace(layer, results=tuple(replace(ref, node=f"{ref.node}@{index}") for ref in layer.outputs))


def _fold(
    pieces: list[Node | _Segment], flat: FlatGraph, metas: dict[Ref, TensorMeta], users: dict[Ref, set[str]]
) -> tuple[list[Node | LayerRun], dict[Ref, Ref]]:
    """Join neighboring segments into runs; other segments become plain nodes again."""
    body: list[Node | LayerRun] = []
    renamed: dict[Ref, Ref] = {}
    classes: dict[Any, LayerClass] = {}
    groups = list(_groups(pieces, users, _shared(pieces, flat, users)))
    alone = _alone([group for group in groups if isinstance(group, list)], flat, users)
    taken = {node.name for node in flat.nodes} | flat.inputs.keys() | flat.parameters.keys()
    runs = [group for group in groups if isinstance(group, list) and len(group) > 1]
    # A single layer hands its results on like layers of its class with neighbors of their class.
    carried = {run[0].key: _wiring(run[0], run[1]) or () for run in reversed(runs)}
    for group in groups:
        if isinstance(group, Node):
            body.append(_rename(group, renamed))
        elif len(group) == 1 and group[0].path not in alone:
            if group[0].traced != group[0].path:
                raise TraceError("blocks that were cut from the trace are no layers", values=group[0].path)
            body += [_rename(node, renamed) for node in group[0].nodes]
        else:
            wiring = _wiring(group[0], group[1]) if len(group) > 1 else None
            layer_run = _layer_run(
                group,
                carried=wiring or carried.get(group[0].key, ()),
                flat=flat,
                metas=metas,
                classes=classes,
                renamed=renamed,
                taken_names=taken,
            )
            body.append(layer_run)
            taken.add(layer_run.name)
            renamed |= {ref: Ref(layer_run.name, index) for index, ref in enumerate(group[-1].results)}
    return body, renamed


def _shared(pieces: list[Node | _Segment], flat: FlatGraph, users: dict[Ref, set[str]]) -> set[str]:
    """Return paths of layers that are called several times, or that share parameters with other code.

    A program's layers have their own parameters, which are gathered while they run. Tied ones belong to no layer.
    """
    times = Counter(piece.path for piece in pieces if isinstance(piece, _Segment))
    owners = {name: layer_path(name) for name, parameter in flat.parameters.items() if not parameter.aliases}
    lent = {path for name, path in owners.items() if path and users.get(Ref(name), set()) - {path}}
    return lent | {path for path, count in times.items() if count > 1}


def _groups(
    pieces: list[Node | _Segment], users: dict[Ref, set[str]], shared: set[str]
) -> Iterator[Node | list[_Segment]]:
    """Yield plain nodes, and the longest runs of equal layers; layers of the paths `shared` stay single."""
    position = 0
    while position < len(pieces):
        first = pieces[position]
        position += 1
        if isinstance(first, Node):
            yield first
            continue
        run = [first]
        while first.path not in shared and position < len(pieces):
            following = pieces[position]
            if not isinstance(following, _Segment) or following.path in shared:
                break
            if not _continues(run, following, users):
                break
            run.append(following)
            position += 1
        yield run


def _alone(groups: list[list[_Segment]], flat: FlatGraph, users: dict[Ref, set[str]]) -> set[str]:
    """Return paths of the layers that are runs of one layer. One unlike all others of a list with runs stays plain
    nodes.
    """
    segments = [segment for group in groups for segment in group]
    times, lists = Counter(s.path for s in segments), Counter(s.prefix for s in segments)
    alike, folded = Counter(s.key for s in segments), {group[0].prefix for group in groups if len(group) > 1}
    are_layers = {path: _is_layer(path, flat, users) for path in {segment.traced for segment in segments}}
    return {
        s.path
        for s in segments
        if times[s.path] == 1 < lists[s.prefix]
        and are_layers[s.traced]
        and (alike[s.key] > 1 or s.prefix not in folded)
    }


def _is_layer(path: str, flat: FlatGraph, users: dict[Ref, set[str]]) -> bool:
    """Return whether several modules under a path have parameters, and only the layer reads them."""
    names = [name for name in flat.parameters if name.startswith(f"{path}.")]
    modules = {name.rpartition(".")[0] for name in names if Ref(name) in users}
    return len(modules) > 1 and not any(users.get(Ref(name), set()) - {path} for name in names)


def _rename(node: Node, renamed: dict[Ref, Ref]) -> Node:
    return with_refs(node, lambda ref: renamed.get(ref, ref))


def _users(flat: FlatGraph) -> dict[Ref, set[str]]:
    """Layer paths that use each Ref ("" for uses outside of layers and for the loss)."""
    users: dict[Ref, set[str]] = {flat.loss: {""}}
    for node in flat.nodes:
        for ref in node.inputs:
            users.setdefault(ref, set()).add(layer_path(node.module))
    return users


def _continues(run: list[_Segment], following: _Segment, users: dict[Ref, set[str]]) -> bool:
    """Return whether `following` is the next equal layer, wired to the last of `run` as that one to its predecessor."""
    last = run[-1]
    if following.prefix != last.prefix or following.index != last.index + 1 or following.key != last.key:
        return False
    if any(users.get(ref, set()) - {last.path, following.path} for ref in last.results):
        return False
    wiring = _wiring(last, following)
    return wiring is not None and (len(run) == 1 or wiring == _wiring(run[-2], last))


def _wiring(last: _Segment, following: _Segment) -> tuple[tuple[int, int], ...] | None:
    """Return pairs (input, output) carried from `last` to `following`; None unless every other input is shared."""
    carried = []
    for index, (before, now) in enumerate(zip(last.args, following.args, strict=True)):
        if now in last.results:
            carried.append((index, last.results.index(now)))
        elif before != now:
            return None
    return tuple(carried) if carried else None


def _layer_run(
    run: list[_Segment],
    *,
    carried: tuple[tuple[int, int], ...],
    flat: FlatGraph,
    metas: dict[Ref, TensorMeta],
    classes: dict[Any, LayerClass],
    renamed: dict[Ref, Ref],
    taken_names: set[str],
) -> LayerRun:
    first = run[0]
    if first.key not in classes:
        taken = {layer.name for layer in classes.values()} | {class_name(flat.classes[""])}
        classes[first.key] = _layer_class(first, carried, flat, metas, taken)
    args = tuple(renamed.get(ref, ref) for ref in first.args)
    wish = "".join(char if f"_{char}".isidentifier() else "_" for char in first.prefix)
    return LayerRun(
        name=unused_name(wish, taken_names, first=2),
        layer=classes[first.key],
        instances=tuple(segment.path for segment in run),
        args=args,
        carried=carried,
    )


def _layer_class(
    segment: _Segment,
    carried: tuple[tuple[int, int], ...],
    flat: FlatGraph,
    metas: dict[Ref, TensorMeta],
    taken: set[str],
) -> LayerClass:
    """Return the body with local names: formal inputs are named for their producers, carried ones `hidden`.

    Torch's numbers (`cos_1`) are left out: they count calls of the whole model in the order of the trace, and a forward
    that iterates over a set has another order in another process.
    """
    carried_inputs = {index for index, _ in carried}
    taken_names = {node.name for node in segment.nodes}
    formal: dict[Ref, Ref] = {}
    for index, ref in enumerate(segment.args):
        wish = "hidden" if index in carried_inputs else _NUMBER.sub("", ref.node.rpartition(".")[2])
        formal[ref] = Ref(unused_name(wish, taken_names))
        taken_names.add(formal[ref].node)
    parameters = _layer_parameters(segment.path, segment.nodes, flat)

    def local(ref: Ref) -> Ref:
        if ref in formal:
            return formal[ref]
        relative = _relative(segment.path, ref, flat)
        return Ref(relative) if relative is not None else ref

    nodes = tuple(
        replace(with_refs(node, local), module=node.module.removeprefix(segment.path).removeprefix("."))
        for node in segment.nodes
    )
    name = class_name(flat.classes.get(segment.path, "Layer"), taken)
    inputs = tuple((formal[ref].node, metas[ref]) for ref in segment.args)
    return LayerClass(name=name, inputs=inputs, parameters=parameters, nodes=nodes, outputs=segment.outputs)


def _layer_parameters(path: str, nodes: tuple[Node, ...], flat: FlatGraph) -> tuple[Parameter, ...]:
    used = {ref.node for node in nodes for ref in node.inputs}
    return tuple(
        replace(parameter, name=name.removeprefix(path + "."))
        for name, parameter in flat.parameters.items()
        if name.startswith(path + ".") and name in used and not parameter.aliases
    )


def _in_block(parameter: Parameter, block: str, other: str) -> Parameter | None:
    """Return the parameter of another block for a block's parameter; None for one tied to a tensor elsewhere."""
    if not all(alias.startswith(block) for alias in parameter.aliases):
        return None
    aliases = tuple(other + alias.removeprefix(block) for alias in parameter.aliases)
    return replace(parameter, name=other + parameter.name.removeprefix(block), aliases=aliases)


def _all_parameters(
    body: list[Node | LayerRun], flat: FlatGraph, cuts: tuple[Truncation, ...]
) -> tuple[Parameter, ...]:
    """Return parameters of the traced model, used or not, and of the layers that were cut from it."""
    parameters = dict(flat.parameters)
    models = [(cut, index) for cut in cuts for index in range(cut.end - cut.period, cut.end)]
    for cut, model in models:
        block_parameters = [p for p in flat.parameters.values() if p.name.startswith(f"{cut.path}.{model}.")]
        for parameter, index in itertools.product(
            block_parameters, range(model + cut.period, cut.num_blocks, cut.period)
        ):
            moved = _in_block(parameter, f"{cut.path}.{model}.", f"{cut.path}.{index}.")
            parameters |= {} if moved is None else {moved.name: moved}
    for piece in body:
        if isinstance(piece, LayerRun):
            for path in piece.instances:
                for parameter in piece.layer.parameters:
                    full = f"{path}.{parameter.name}"
                    parameters.setdefault(full, replace(parameter, name=full))
    return tuple(parameters.values())
