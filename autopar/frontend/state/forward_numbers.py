"""The numbers that a forward passes to operators, apart from its other arguments.

Two such records tell whether a changed number changes nothing, numbers alone, or the calls themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.frontend import fakes
from autopar.frontend.attributes import is_a, items_of, modules_of
from autopar.frontend.export import forward_and_loss
from autopar.frontend.fakes import Results
from autopar.frontend.inputs import fake_input, name_inputs
from autopar.frontend.recorder import Record, Source, record
from autopar.frontend.skeleton import loss_skeleton, skeleton_of
from autopar.frontend.state.model_state import ModelState
from autopar.frontend.state.reads import Reads
from autopar.frontend.state.values import MISSING, Key
from autopar.frontend.trace_modes.batch_values import Specialization
from autopar.frontend.trace_modes.specialization import specializing


@dataclass(frozen=True, slots=True)
class ForwardOf:
    """One forward and its loss: a model, an example batch, a loss, the dtype that parameters are cast
    to, and guards.
    """

    model: nn.Module
    example: tuple[Any, ...] | Mapping[str, Any]
    loss_fn: Callable[..., torch.Tensor] | None
    param_dtype: torch.dtype | None
    specialization: Specialization = field(default_factory=Specialization)

    def numbers(self) -> ForwardNumbers | None:
        """Return the numbers of a forward of the model in its present state. None where it cannot run on
        fake tensors.
        """
        record = self._recorded(lambda skeleton, loss: None)
        if record is None:
            return None
        values: list[float] = []

        def without(value: Any) -> Any:
            if is_a(value, float):
                values.append(value)
                return float
            if is_a(value, tuple, list) and not is_a(value, Source):
                return tuple([without(item) for _, item in items_of(value) or ()])
            return value

        return ForwardNumbers(without(record.outside), tuple(values))

    def advanced(self, reads: Reads, is_training: bool) -> dict[Key, Any] | None:
        """Return the numbers, flags and texts that one forward changes: their places and new values.

        reads: the names that forwards of the model read. None where it cannot run on fake tensors.
        """
        states: list[ModelState] = []

        def prepare(skeleton: nn.Module, loss: Any) -> None:
            if not is_training:
                skeleton.eval()
            states.append(ModelState.of_constants(skeleton, loss, reads))

        if self._recorded(prepare) is None:
            return None
        changes = states[0].plain_changes()
        return {change.key: change.new for change in changes if change.key is not None and change.old is not MISSING}

    def has_silent_hooks(self) -> bool:
        """Return whether forward hooks of modules only observe: they return nothing, and write to no tensor."""
        returned: list[Any] = []

        def watch(skeleton: nn.Module, loss: Any) -> None:
            for module in modules_of(skeleton):
                for table in (module._forward_hooks, module._forward_pre_hooks):
                    for key, hook in list(table.items()):
                        table[key] = partial(_noting, hook, returned)

        def drop(skeleton: nn.Module, loss: Any) -> None:
            for module in modules_of(skeleton):
                module._forward_hooks.clear()
                module._forward_pre_hooks.clear()

        with_hooks, without = self._recorded(watch), self._recorded(drop)
        if with_hooks is None or without is None or any(result is not None for result in returned):
            return False
        return _writes(with_hooks) == _writes(without)

    @fakes.probing()
    def _recorded(self, prepare: Callable[[nn.Module, Any], None]) -> Record | None:
        fake = fakes.mode()
        batch = name_inputs(self.model, self.example, self.loss_fn)
        batch = batch.map(lambda value: fake_input(value, fake, 0, None))
        try:
            skeleton = skeleton_of(self.model, fake, self.param_dtype)
            loss = loss_skeleton(self.loss_fn, fake)
            prepare(skeleton, loss)
            forward = partial(forward_and_loss, loss_fn=loss, batch=batch, dtype=self.param_dtype)
            with specializing(self.specialization.copy()):
                return record(skeleton, (), batch, forward, Results(fake), loss)
        except Exception:  # any failure of forward on fake tensors
            return None


@dataclass(frozen=True, slots=True)
class ForwardNumbers:
    """values: the floats among the operands, in order. rest: the operators with all their other operands."""

    rest: Any
    values: tuple[float, ...]


def _noting(hook: Callable[..., Any], returned: list[Any], *args: Any, **kwargs: Any) -> Any:
    result = hook(*args, **kwargs)
    returned.append(result)
    return result


def _writes(record: Record) -> list[str]:
    functions = [entry[0] for entry in record.outside if hasattr(entry[0], "_schema")]
    return [str(function) for function in functions if function._schema.is_mutable]
