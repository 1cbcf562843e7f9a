"""The state of a step on this rank: parameters, gradients, and whole tensors by their original names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from . import watch
from .executor import Executor, reading
from .flat import Bucket, Entry
from .mesh import Mesh
from .parameters import Module
from .rng_state import RngState
from .stage_module import Part, Source, What
from .update import buckets_of, require_finite
from .zero import ZeroUnits

if TYPE_CHECKING:
    # Only programs that use it have it beside them.
    from .whole_updates import WholeUpdates


class StepState:
    """The parameters and buffers of a step, `Step` without its training."""

    mesh: Mesh
    rng: RngState
    wholes: WholeUpdates | None
    _executor: Executor
    state_check: Callable[[bool | None], object] | None
    _num_loads = 0
    loaded_states: frozenset[str] = frozenset()
    """The parameters that the checkpoint loaded last has optimizer state of."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The modules of this rank: one, or its stages."""
        return self._executor.parts

    @property
    def model(self) -> Module:
        """The module of this rank (of its stages the first)."""
        return self.parts[0].model

    @property
    def zero(self) -> ZeroUnits:
        """The parameters of `model`."""
        return self.parts[0].zero

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets of all parts."""
        return buckets_of(self.parts)

    @property
    def num_loads(self) -> int:
        """Return how often `load` was called."""
        return self._num_loads

    def load(self, source: Source) -> None:
        """Fill parameters and buffers from whole tensors under original names, equal on all ranks.

        A callable is asked for one name at a time, in the order of declaration (whatever the mesh and the stages), so
        that nothing but this rank's part stays in memory. A tied weight may come under any of its names. Raises
        KeyError for a missing name, ValueError for a wrong shape.
        """
        self._num_loads += 1
        for part in self.parts:
            part.load(source)
        for part in self.parts:
            part.zero.publish()

    @watch.noted("for a look at inf and nan after step {done}")
    def require_finite(self) -> None:
        """Raises FloatingPointError on all ranks if a parameter is inf or nan on one. Collective."""
        require_finite(self.buckets, self.mesh)

    def stored_parameters(self) -> dict[str, nn.Parameter]:
        """Return what this rank stores and optimizers update, by original name (of tied stages' copies the first)."""
        parameters: dict[str, nn.Parameter] = {}
        for _, entry in self.entries():
            if entry.stored is not None:
                parameters.setdefault(entry.slot.name, entry.stored)
        return parameters

    def entries(self) -> list[tuple[Bucket, Entry]]:
        """All parameters of this rank."""
        return [entry for part in self.parts for entry in part.entries()]

    def updated(self, entry: Entry) -> nn.Parameter | None:
        """Parameters as this rank's optimizer has them: the stored parts, or a whole parameter or nothing of it."""
        return entry.stored if self.wholes is None else self.wholes.updated(entry)

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradient of every trainable parameter, after `forward_backward`. Collective."""
        with reading(self._executor, "gradients", self.rng.step):
            return {names[0]: value.clone() for names, value in self._executor.read("gradients", rank0_only=False)}

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """Whole tensors under original names, aliases included (as the same tensor), and persistent buffers.

        Collective. rank0_only: other ranks get an empty dict; rank 0's is in host memory, moved one at a time.
        """
        state: dict[str, Tensor] = {}
        for names, whole in self.whole_tensors(rank0_only=rank0_only):
            value = whole.cpu() if rank0_only else whole
            # Never a view of what training changes.
            state.update(dict.fromkeys(names, value.clone()))
        return state

    def whole_tensors(
        self, *, rank0_only: bool = False, all_written: bool = False
    ) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """(all names, tensor) of what `full_state_dict` has, one at a time; it may change with the next step.

        Collective: every rank must exhaust it. rank0_only: other ranks get none. all_written: with buffers that a step
        changes and no state dict has.
        """
        if self.state_check is not None:
            self.state_check(None)
        what: What = "all" if all_written else "state"
        with reading(self._executor, what, self.rng.step):
            for names, whole in self._executor.read(what, rank0_only):
                if self.mesh.everyone.rank == 0 or not rank0_only:
                    yield names, whole
