"""The parts of nn.Module that a program's modules have: children under any name, and no whole tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


class Container(nn.Module):
    """A module on the way to a parameter; `self.linears[0]` is the child called "0"."""

    def __getitem__(self, name: int | str) -> Any:
        return member_of(self, str(name))


def member_of(module: nn.Module, name: str) -> Any:
    """The child, parameter or buffer of that name, which need not be an identifier or free of our own names."""
    for table in (module._modules, module._parameters, module._buffers):
        if name in table:
            return table[name]
    raise KeyError(f"{type(module).__name__} holds no {name!r}")


class HoldingParts(nn.Module):
    """A module that has a rank's parts of parameters, whatever their names say."""

    def held_values(self) -> Iterable[tuple[str, tuple[int, ...], Tensor | None]]:
        """The name of every parameter and buffer, the shape of all of it, and what is here."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError: copies and pickles would have hooks of this one, and under ZeRO-3 read memory that is
        freed."""
        raise TypeError(
            "a program's module is neither copied nor pickled: it has this rank's parts, and under ZeRO-3 not even "
            "those between steps. step.full_state_dict() on every rank gathers whole tensors, and "
            "program.update_model(step) puts them into the model that was compiled, which can be copied"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict, where this rank has all of it. Raises RuntimeError elsewhere: under the
        names of whole tensors it would have parts, or freed memory."""
        for name, shape, value in self.held_values():
            if value is None or tuple(value.shape) != shape or value.untyped_storage().nbytes() < value.nbytes:
                raise RuntimeError(
                    f"step.model.state_dict() would not have all of {name} on this rank: "
                    "step.full_state_dict() on every rank gathers whole tensors"
                )
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError: what the optimizer updates may be other tensors, on other ranks."""
        raise RuntimeError(
            "step.model.load_state_dict() does not reach what the optimizer updates: step.load(state), with whole "
            "tensors under the model's own names on every rank"
        )
