"""Whether a script wrote to the parameters of its model, which the program does not train."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

import torch
from torch import Tensor, nn

from autopar.frontend.state.values import Change

_MOST_SAMPLES, _SAMPLE = 8, 4096
_VERSION = attrgetter("_version")


class ParameterValues:
    """The present parameters of a model.

    Torch counts writes. A write through `.data` is not counted: it is seen on the CPU alone, where it changes the first
    elements of one of some parameters.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._named = [(name, p) for name, p in named if not (p.is_meta or p.is_inference())]
        self._parameters = [parameter for _, parameter in self._named]
        self._versions = list(map(_VERSION, self._parameters))
        sampled = [p for p in self._parameters if _head(p) is not None]
        chosen = sampled[:: -(-len(sampled) // _MOST_SAMPLES) or 1]
        self._samples = [(p, _digest(head)) for p in chosen if (head := _head(p)) is not None]

    def are_same(self) -> bool:
        """Return, quickly, whether nothing was written."""
        return list(map(_VERSION, self._parameters)) == self._versions and all(map(_is_kept, self._samples))

    def changes(self) -> Iterator[Change]:
        """Yield each parameter that was written to; all of them if torch did not count which."""
        is_uncounted = not all(map(_is_kept, self._samples))
        for (name, parameter), was in zip(self._named, self._versions, strict=True):
            if is_uncounted or parameter._version != was:
                key = ("values", name, ())
                yield Change(f"values of {name}", None, parameter, key=key, parameter_values=name)


def _head(parameter: nn.Parameter) -> Tensor | None:
    """Return some elements of a parameter on the CPU."""
    is_plain = type(parameter) is nn.Parameter and parameter.layout == torch.strided and parameter.is_contiguous()
    if not is_plain or parameter.device.type != "cpu" or not parameter.numel():
        return None
    return parameter.detach().view(-1)[:_SAMPLE]


def _digest(head: Tensor) -> tuple[torch.dtype, int, str]:
    """Return a few bytes that change almost surely when a value does: no copy, which would take memory of the rank."""
    values = torch.view_as_real(head) if head.is_complex() else head
    wide = values.double()
    return head.dtype, head.numel(), f"{float(wide.sum())!r} {float(wide.square().sum())!r}"


def _is_kept(sample: tuple[nn.Parameter, tuple[torch.dtype, int, str]]) -> bool:
    parameter, before = sample
    now = _head(parameter)
    return now is None or _digest(now) == before
