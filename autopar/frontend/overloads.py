"""Overloads of torch's operators that stand for one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_DROPPED = ("device", "pin_memory", "layout", "memory_format", "non_blocking", "copy")
"""Arguments for a tensor's device and layout in a trace. The emitted program sets its device."""
_DROPPED_OF = (("aten.einsum.default", "path"),)
"""Arguments that one operator drops, too: torch.einsum finds an order of products itself, if opt_einsum
is installed.
"""


def functional_overload(overload: torch._ops.OpOverload | None) -> torch._ops.OpOverload | None:
    """Return the overload that takes an in-place one's arguments and writes nothing: `pow.Tensor_Scalar` of
    `pow_.Scalar`.
    """
    if overload is None:
        return None
    namespace, _, name = overload._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    candidates = [getattr(packet, candidate) for candidate in packet.overloads()] if packet is not None else []
    named = [candidate for candidate in candidates if candidate._overloadname == overload._overloadname]
    fitting = (candidate for candidate in (*named, *candidates) if _takes(candidate) == _takes(overload))
    return next((candidate for candidate in fitting if not candidate._schema.is_mutable), None)


def _takes(overload: torch._ops.OpOverload) -> list[str]:
    return [str(argument.type) for argument in overload._schema.arguments]


def is_write(node: torch.fx.Node) -> bool:
    """Return whether a call of an exported graph writes to one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def written_by(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the calls whose memory a call writes to: one, or several that wrote to it before, as C++'s
    `1 - x` does.
    """
    targets: list[Any] = [node.args[0]]
    while is_write(targets[-1]):
        targets.append(targets[-1].args[0])
    return targets


def kept_kwargs(op: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name that a graph keeps of a call. Operators outside torch may give them any meaning."""
    dropped = _DROPPED if op.startswith(("aten.", "autopar.")) else ()
    return {name: value for name, value in kwargs.items() if name not in dropped and (op, name) not in _DROPPED_OF}
