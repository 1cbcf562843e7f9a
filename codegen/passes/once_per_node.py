"""Experts' layers whose rows cross between nodes once per node (`codegen/runtime/experts_by_node.py`).

    index = x.repeat_interleave(8, 0)
    routes = Routes(chosen, 128, ep)                 routes = NodeRoutes(chosen, 128, ep, 8, neighbors=8)
    rows = dispatch(index, routes)                   rows = dispatch_by_node(x, routes)
    ...                                              ...
    y = combine(product, routes)                     total = combine_by_node(product, weights, routes)
    y = y * weights
    total = y.view(4096, 8, 2048).sum(1)

Rows are copies of tokens, and results are weighed by one number each and summed by token, all of which the calls show;
where something else reads what is between, or it is resharded, rows go straight. Sums are taken in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from codegen.fusion.match import Flow
from codegen.program import Call, ModuleClass, Program, Statement, Var

Neighbors = Callable[[int, int, tuple[str, ...]], int]
"""(experts, choices of each token, axes over which they are as one) -> how many ranks of these in a row share a node; 0
where rows go straight."""


def with_rows_once_per_node(program: Program, neighbors: Neighbors) -> Program:
    """The program with such layers rewritten where `neighbors` says so, in all classes."""
    layers = tuple(_rewritten(cls, neighbors) for cls in program.layers)
    return replace(program, layers=layers, root=_rewritten(program.root, neighbors))


@dataclass(frozen=True, slots=True)
class _Mixture:
    """The statements of one mixture by their positions. combine, weigh, view, sum: in this order."""

    routes: int
    repeat: int
    dispatch: int
    ends: tuple[int, int, int, int]
    weights: Var


def _rewritten(cls: ModuleClass, neighbors: Neighbors) -> ModuleClass:
    flow = Flow.of(cls.body, cls.outputs)
    body: list[Statement | None] = list(cls.body)
    for position in flow.calls.get("runtime.Routes", ()):
        mixture = _mixture(flow, position)
        if mixture is None:
            continue
        call, repeat, dispatch = (_call(flow, i) for i in (mixture.routes, mixture.repeat, mixture.dispatch))
        combine, *_, total = ends = tuple(_call(flow, i) for i in mixture.ends)
        num_experts, choices = call.args[1], repeat.args[1]
        axis = call.args[2]
        node_neighbors = neighbors(num_experts, choices, axis.joint or (axis.text,))
        if not node_neighbors:
            continue
        (routes,) = call.results
        args, kwargs = (*call.args, choices), (("neighbors", node_neighbors),)
        body[mixture.routes] = replace(call, target="runtime.NodeRoutes", args=args, kwargs=kwargs, members=(call,))
        sent, arrived = (repeat.args[0], routes), (combine.args[0], mixture.weights, routes)
        members = repeat, dispatch
        body[mixture.dispatch] = replace(dispatch, target="runtime.dispatch_by_node", args=sent, members=members)
        last = mixture.ends[-1]
        body[last] = replace(total, target="runtime.combine_by_node", args=arrived, kwargs=(), members=ends)
        for gone in (mixture.repeat, *mixture.ends[:-1]):
            body[gone] = None
    return replace(cls, body=tuple(statement for statement in body if statement is not None))


def _mixture(flow: Flow, position: int) -> _Mixture | None:
    """The mixture whose routes the statement at `position` makes, if all of it is as this file's docstring tells."""
    call = _call(flow, position)
    readers: dict[str, list[int]] = {}
    for reader in sorted(flow.readers.get((position, call.results[0].name), ())):
        readers.setdefault(_target(flow, reader), []).append(reader)
    ways = [readers.pop(f"runtime.{name}", []) for name in ("dispatch", "combine")]
    if len(call.args) != 3 or readers.keys() - {"runtime.expert_linear"} or list(map(len, ways)) != [1, 1]:
        return None
    ((dispatch,), (combine,)) = ways
    repeat, ends = _copied(flow, dispatch), _summed(flow, combine)
    if repeat is None or ends is None or _call(flow, repeat).args[1] != _choices(flow, ends):
        return None
    weigh = _call(flow, ends[1])
    (weights,) = (arg for arg in weigh.args if arg != _call(flow, combine).results[0])
    is_same = _stays(flow, repeat, dispatch, (_call(flow, repeat).args[0],)) and all(
        _stays(flow, at, ends[-1], names) for at, names in ((combine, _call(flow, combine).args), (ends[1], (weights,)))
    )
    mixture = _Mixture(routes=position, repeat=repeat, dispatch=dispatch, ends=ends, weights=weights)
    return mixture if is_same else None


def _copied(flow: Flow, dispatch: int) -> int | None:
    """The statement that copies every token as often as it has choices, for this dispatch alone."""
    rows = _call(flow, dispatch).args[0]
    maker = flow.origins[dispatch][rows.name]
    if maker < 0 or _target(flow, maker) != "aten.repeat_interleave.self_int" or _reader(flow, maker) != dispatch:
        return None
    tokens, *how = _call(flow, maker).args
    is_plain = len(how) == 2 and isinstance(how[0], int) and how[1] == 0 and not _call(flow, maker).kwargs
    return maker if is_plain and tokens.type.placements == rows.type.placements else None


def _summed(flow: Flow, combine: int) -> tuple[int, int, int, int] | None:
    """combine and the statements that multiply its rows by a number each, view them by token, and sum over choices."""
    wanted = ("aten.mul.Tensor", "aten.view.default", "aten.sum.dim_IntList")
    chain = [combine]
    for target in wanted:
        reader = _reader(flow, chain[-1])
        if reader is None or _target(flow, reader) != target:
            return None
        chain.append(reader)
    (rows,), (weighed,), (viewed,), (summed,) = (_call(flow, i).results for i in chain)
    factors, (_, *dims), kwargs = _call(flow, chain[1]).args, _call(flow, chain[3]).args, _call(flow, chain[3]).kwargs
    others = [arg for arg in factors if arg != rows]
    is_weight = len(others) == 1 and isinstance(others[0], Var) and others[0].type.shape == (rows.type.shape[0], 1)
    is_rows = weighed.type.shape == rows.type.shape and rows.type.placements == summed.type.placements
    is_by_token = len(viewed.type.shape) == 3 and summed.type.shape == (viewed.type.shape[0], viewed.type.shape[2])
    over = [tuple(dims[0])] if dims and isinstance(dims[0], (tuple, list)) else []
    is_over_choices = over == [(1,)] and not any(dims[1:]) and not any(value for _, value in kwargs)
    is_all = is_weight and is_rows and is_by_token and is_over_choices
    return (chain[0], chain[1], chain[2], chain[3]) if is_all else None


def _choices(flow: Flow, ends: tuple[int, int, int, int]) -> int:
    (viewed,) = _call(flow, ends[2]).results
    return viewed.type.shape[1]


def _stays(flow: Flow, at: int, to: int, names: tuple[Var, ...]) -> bool:
    """Whether what the statement `at` reads under these names is still there at `to`."""
    return all(flow.value_at(v.name, to, frozenset()) == flow.origins[at][v.name] for v in names)


def _reader(flow: Flow, position: int) -> int | None:
    """The only call that reads what the statement at `position` makes."""
    readers = {r for result in _call(flow, position).results for r in flow.readers.get((position, result.name), ())}
    (reader,) = readers if len(readers) == 1 else (None,)
    return reader if reader is not None and reader < len(flow.body) else None


def _target(flow: Flow, position: int) -> str:
    statement = flow.body[position] if position < len(flow.body) else None
    return statement.target if isinstance(statement, Call) else ""


def _call(flow: Flow, position: int) -> Call:
    statement = flow.body[position]
    assert isinstance(statement, Call)
    return statement
