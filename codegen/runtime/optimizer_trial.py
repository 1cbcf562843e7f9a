"""Trials of unknown optimizers: a step tries one, and refuses updates that ranks cannot make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .mesh import Mesh
from .optimizer_probe import Needs, forgotten, keeps_zeros, needs_of
from .optimizers import Factory, GlobalParameter, OptimizerError
from .stage_module import Part
from .update import stored_whole
from .whole_updates import WholeUpdates


def check_stored(needs: Needs, is_whole: Mapping[str, bool], *, is_staged: bool, is_offloaded: bool) -> None:
    """Raises OptimizerError where a rank stores a part of what its optimizer must have whole.

    is_whole: whether this rank stores a parameter whole, of those of which it stores something. is_staged: other ranks
    store other parameters.
    """
    cut = [name for name, whole in is_whole.items() if not whole and name in needs.whole]
    if cut or (needs.is_coupled and is_staged):
        storage = f"{cut[0]} is sharded" if cut else "a pipeline, whose ranks hold different parameters"
        instead = "a plan with zero=0 and tp=1" + ", pp=1" * needs.is_coupled
        if is_offloaded and not needs.is_coupled:
            storage, instead = f"{storage}, and the optimizer is offloaded", f"no offload, or {instead}"
        raise OptimizerError(needs.problem, storage, instead)


@dataclass(frozen=True, slots=True)
class OptimizerTrial:
    """Answers a step's questions about an unknown optimizer. needs: those found before the step; None: try."""

    needs: Needs | None = None

    def wholes(
        self,
        factory: Factory,
        parameters: Sequence[GlobalParameter],
        parts: Sequence[Part],
        mesh: Mesh,
        *,
        is_staged: bool,
        is_offloaded: bool,
    ) -> WholeUpdates | None:
        """Return parameters that ranks update whole for one another; None if none. Raises OptimizerError where a rank
        stores a part of what a coupled or offloaded update must see, or zeros that would not stay."""
        needs = needs_of(factory, parameters) if self.needs is None else self.needs
        is_shared = bool(needs.whole) and not needs.is_coupled and not is_offloaded and mesh.world_size > 1
        if not is_shared:
            check_stored(needs, stored_whole(parts), is_staged=is_staged, is_offloaded=is_offloaded)
        if self.needs is None and any(entry.slot.spec.padding for part in parts for _, entry in part.entries()):
            self._check_padding(factory, parameters, needs.whole if is_shared else frozenset())
        return WholeUpdates(parts, mesh, needs.whole) if is_shared else None

    @staticmethod
    def _check_padding(factory: Factory, parameters: Sequence[GlobalParameter], beside: frozenset[str]) -> None:
        if not keeps_zeros(factory, parameters, beside):
            raise OptimizerError(
                "the update of this optimizer moves zeros whose gradients are zeros",
                "the program's padding, which must stay zeros",
                "a program that is compiled with this optimizer",
            )

    def forgotten(self, factory: Factory, parameters: Sequence[GlobalParameter]) -> str:
        """Return what the function of that name does."""
        return forgotten(factory, parameters)
