"""Rules of recurrent layers as one call: rows of the batch are free; time is sequential, and features mix."""

from __future__ import annotations

from autopar.rules.call import Call, Groups, Operand, make_rule
from autopar.rules.rule import Rule


def recurrent(call: Call) -> Rule | None:
    """input [t, b, i] (or [b, t, i]), states [l, b, h] -> results [t, b, o] (or [b, t, o]), states [l, b, h].

    None with dropout between layers, whose mask covers the whole batch, for packed sequences, and where torch (2.11
    with batch_first) records a wrong shape of the states.
    """
    x = call.arguments.get("input")
    if not isinstance(x, Operand) or len(x.shape) != 3 or (call["dropout"] > 0 and call["train"]):
        return None
    states = call["hx"] if isinstance(call["hx"], tuple) else (call["hx"],)
    out, *last = call.outputs
    order = ["b", "t"] if call["batch_first"] else ["t", "b"]
    if any(meta.shape[1] != x.shape[order.index("b")] for meta in last):
        return None
    sizes = dict(zip([*order, "i"], x.shape, strict=True)) | {"o": out.shape[-1]}
    blocked = {"t", "i", "o"}

    def of_state(name: str, shape: tuple[int, ...]) -> Groups:
        sizes.update({f"l{name}": shape[0], f"h{name}": shape[2]})
        blocked.update({f"l{name}", f"h{name}"})
        return [[f"l{name}"], ["b"], [f"h{name}"]]

    groups: dict[int, Groups] = {x.index: [[f] for f in (*order, "i")]}
    groups |= {state.index: of_state(str(n), state.shape) for n, state in enumerate(states)}
    for index, meta in enumerate(call.inputs):
        if index not in groups:
            names = [f"p{index}.{d}" for d in range(len(meta.shape))]
            sizes |= dict(zip(names, meta.shape, strict=True))
            blocked |= set(names)
            groups[index] = [[f] for f in names]
    results = [[[f] for f in (*order, "o")], *(of_state(str(n), meta.shape) for n, meta in enumerate(last))]
    return make_rule(call, [groups[i] for i in range(len(groups))], results, sizes, blocked=blocked)


TABLE = {f"aten.{name}": recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
