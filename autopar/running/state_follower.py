"""Keep a step's program in agreement with what a script changes on the model between steps.

Buffers and values of parameters are copied into the program. Numbers, flags, functions and plain tensors decide the
program's text: the program is generated again by its plan, or an earlier one is reused. Where two programs differ only
in the bodies of functions, these get the new code. Parameters that are frozen, or that get no gradient, are left out of
updates. All other changes are refused before the step that would differ.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, ModelError
from autopar.frontend.attributes import named_parameters
from autopar.frontend.state.forward_numbers import ForwardOf
from autopar.frontend.state.model_state import ModelState
from autopar.frontend.state.modules import HOOKS
from autopar.frontend.state.values import Change
from autopar.program import GeneratedProgram
from autopar.running.growth import let_grow
from autopar.running.process_state import kept_random_states
from autopar.running.program_code import exchange_code
from autopar.running.program_tensors import (
    changed_tables,
    forward_of,
    unread_of,
    values_of,
    write_parameters,
    written_buffers,
)
from autopar.running.variants import MOST_VARIANTS, Loaded, Variant, Variants
from codegen.runtime import watch
from codegen.runtime.processes import store_of_ranks

AGAIN = [
    "compile the changed model again, and resume from a checkpoint",
    "pass what changes while training as an input of the batch",
]
FULL = "compile the model with that module on, and switch it off before the first step"
THAW = [
    "requires_grad_(True) on them before the model is compiled, and requires_grad_(False) before the first step",
    "compile the changed model again, and resume from a checkpoint",
]
_ELSEWHERE = "of Accelerate accelerator.unwrap_model(model), of Lightning trainer.strategy.values.take(), instead"
STALE = [
    "program.update_model(step) on every rank before the change: the buffer's value in the model is an old one",
    _ELSEWHERE,
]
OLD = [
    "program.update_model(step) on every rank before a script writes to the model's parameters: these are old values",
    _ELSEWHERE,
    "step.load(values), for values that do not depend on the model's",
    "a copy.deepcopy of the model, for values that you evaluate and do not train",
    "an optimizer whose step() writes them, where callbacks of a Trainer do: these see old values",
]


def change_error(changes: Sequence[Change], instead: Any, reason: str = "") -> ModelError:
    """Return the error that names the changes. instead: what a user can do."""
    some = [str(change) for change in changes[:5]] + ([f"and {len(changes) - 5} more"] if len(changes) > 5 else [])
    return ModelError(
        "the program cannot follow a change of the model between steps",
        values="\n".join([*some, *([reason] if reason else [])]),
        alternatives=instead,
    )


def require(is_met: bool, changes: Sequence[Change], instead: Any) -> None:
    """Raise ModelError unless a condition is met."""
    if not is_met:
        raise change_error(changes, instead)


AGREE_SECONDS = 60.0
"""Seconds for which a rank that sees a change waits at most for the others to see it."""

_numbers = itertools.count()
"""Numbers the followers. Every rank makes them in the same order."""

_log = logging.getLogger("autopar")


class StateFollower:
    """Look for changes before each batch of a step; `Step.state_check`.

    make: makes a step of another program that shares the parameters of this one. Collective.
    """

    def __init__(self, compiled: GeneratedProgram, step: Any, make: Callable[[Any, GeneratedProgram], Any]) -> None:
        assert compiled.state is not None
        self.state: ModelState = compiled.state.twin()
        self._step, self._make = step, make
        self._programs = [Loaded(compiled, step, 0)]  # the current ones, one for each shape of batches
        self._first = [compiled]  # the first of each; it has parameters that later ones may lack
        self._number, self._num_changes = next(_numbers), 0
        self._synced, self._is_loaded = self._position(), False
        self._advanced, self._has_followed = frozenset[Any](), False
        self._decided = self.state.deciding()
        self._frozen: frozenset[str] = frozenset()
        self._unread: frozenset[str] = frozenset()
        self._variant, self._variants = Variant([compiled]), Variants()
        self._kept: list[Loaded] = [*self._programs]
        let_grow(step)

    def take_also(self, compiled: GeneratedProgram, step: Any) -> None:
        """Keep a program for other batches in agreement, too, with all that its forward reads. Collective."""
        self(False)  # otherwise the note below would hide a change from the first programs
        if compiled.state is not None:
            self.state.read_also(compiled.state.reads)
            self.state.note(keep_modes=True)
        self._programs.append(Loaded(compiled, step, len(self._first)))
        self._first.append(compiled)
        self._variant, self._variants = Variant([loaded.program for loaded in self._programs]), Variants()

    def __call__(self, is_training: bool | None) -> None:
        """Follow changes before a batch is trained or evaluated, or (None) before values are read. Collective where
        something changed.

        Raises ModelError, on every rank, for a change that the program cannot follow.
        """
        if is_training is None:
            self._follow_values()
            return
        self._follow_deciding()
        if self.state.is_same(is_training):
            return
        changes = self.state.changes(is_training)
        advanced, self._advanced = self._advanced, frozenset()
        if any(change.key not in advanced for change in changes):
            self._agree(changes)
        if changes:
            with torch.inference_mode(False), torch.enable_grad(), kept_random_states():
                self._follow(changes)
            self._has_followed = True
        self.state.note(keep_modes=not is_training)

    def after_forward(self, is_training: bool) -> None:
        """Change the model's own numbers as its forward does, since the program does not; `Step.after_forward`.

        Does nothing where forward changes none, unless the script changed something: then it may change some now.
        Raises ModelError where forward can no longer run to see its changes, or makes others for other shapes.
        """
        advanced = self.state.reads.advanced
        if not (advanced or self._has_followed):
            return
        with torch.inference_mode(False), torch.enable_grad(), kept_random_states():
            forwards = [forward_of(loaded.program) for loaded in self._programs]
            numbers = [forward.advanced(self.state.reads, is_training) for forward in forwards]
        if advanced and (None in numbers or any(values != numbers[0] for values in numbers)):
            raise ModelError(
                "forward changes numbers of the model, which the program cannot follow",
                values=", ".join(sorted(advanced.values())),
                alternatives=["change them in the training loop", "numbers that do not depend on the batch's shape"],
            )
        values = numbers[0] or {}
        self.state.apply(values.items())
        self._advanced, self._has_followed = frozenset(values), False

    def _follow_values(self) -> None:
        """Copy values that a script wrote to the model's parameters into the step, if the model's values were
        current."""
        if self._is_loaded or self._is_stale or self.state.is_same(False):
            return
        if changes := [change for change in self.state.changes(False) if change.parameter_values]:
            self._agree(changes)
            self._write(changes)
            self.state.note_values()

    def _follow_deciding(self) -> None:
        """Generate the program again where a buffer whose value decides what forward does has a new value."""
        now = self.state.deciding()
        if now == self._decided:
            return
        names = [name for name in now.keys() | self._decided.keys() if now.get(name) != self._decided.get(name)]
        changes = [Change(name, self._decided.get(name), now.get(name), buffer=name) for name in sorted(names)]
        self._agree(changes)
        with torch.inference_mode(False), torch.enable_grad(), kept_random_states():
            self._make_anew(changes, self._frozen)
        self._decided = self.state.deciding()

    def share(self) -> None:
        """Repeat rank 0's changes of the model on every rank, where callbacks run on rank 0. Collective.

        Raises ModelError, on every rank, for a change that cannot be sent to another process.
        """
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        is_first = dist.get_rank() == 0
        changes = self.state.changes() if is_first and not self.state.is_same() else []
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        count = torch.tensor([len(changes)], device=device)
        dist.broadcast(count, src=0)
        if not int(count):
            return
        fixed = [change for change in changes if not change.is_movable]
        message: list[Any] = [change_error(fixed, AGAIN) if fixed else [(change.key, change.new) for change in changes]]
        dist.broadcast_object_list(message, src=0, device=device)
        if isinstance(message[0], ModelError):
            raise message[0]
        if not is_first:
            self.state.apply(message[0])

    def values_written(self) -> None:
        """Note that the model got the step's values, which is no change by the script."""
        self.state.note(keep_modes=True)
        self._synced, self._is_loaded = self._position(), False

    def values_given(self) -> None:
        """Note that the step got the model's values."""
        self._synced, self._is_loaded = self._position(), False

    def values_loaded(self) -> None:
        """Note that the step got the values of a checkpoint. Copy those that decide what forward does into the
        model."""
        self._is_loaded = True
        deciding = self.state.deciding_buffers()
        for part in self._step.parts if deciding else ():
            for name, spec, value in part.model.buffer_slots():
                for buffer in deciding.keys() & {name, *spec.aliases}:
                    deciding[buffer].copy_(value.reshape(deciding[buffer].shape))

    def _follow(self, changes: Sequence[Change]) -> None:
        if any(change.name == HOOKS for change in changes) and self._forward.has_silent_hooks():
            changes = [change for change in changes if change.name != HOOKS]
        require(not (never := [change for change in changes if change.is_of_parts]), never, AGAIN)
        buffers = [change for change in changes if change.buffer]
        self._require_current(buffers)
        recast = [change for change in buffers if change.is_tensor and change.old.dtype != change.new.dtype]
        require(not recast, recast, AGAIN)
        self._write([change for change in changes if change.parameter_values])
        frozen = self._frozen_now([change for change in changes if change.parameter])
        constants = [c for c in changes if not (c.buffer or c.parameter or c.parameter_values)]
        if constants:
            self._make_anew(constants, frozen)
        elif frozen != self._frozen:
            self._leave_out(frozen | self._unread, changes)
        self._frozen = frozen
        if buffers:
            self._load({change.buffer for change in buffers}, buffers)
        _log.info("the program follows: %s", "; ".join(map(str, changes)))

    def _require_current(self, changes: Sequence[Change]) -> None:
        """Raise ModelError, on every rank, for buffers whose values were old, unless they now equal the step's."""
        if not changes or not (self._is_loaded or self._is_stale):
            return
        names = {change.buffer for change in changes}
        if not self._is_loaded:
            names &= written_buffers(self._step)
        is_other = write_parameters(self._step, values_of(self._programs[0].program), names, is_dry=True)
        require(not is_other, [change for change in changes if change.buffer in names] or changes, STALE)

    def _write(self, changes: Sequence[Change]) -> None:
        """Copy values that a script wrote to the model's parameters into the step. Collective."""
        if not changes:
            return
        names, source = {change.parameter_values for change in changes}, values_of(self._programs[0].program)
        is_old = self._is_loaded or self._is_stale
        is_other = write_parameters(self._step, source, names, is_dry=is_old)
        require(not (is_old and is_other), changes, OLD)

    def _frozen_now(self, changes: Sequence[Change]) -> frozenset[str]:
        """Return the parameters that are frozen now and were trained when the program was made."""
        frozen = {change.parameter for change in changes if not change.new}
        thawed = {change.parameter for change in changes if change.new}
        require(thawed <= self._frozen, changes, THAW)
        return self._frozen - thawed | frozen

    def _leave_out(self, names: frozenset[str], changes: Sequence[Change]) -> None:
        try:
            self._step.freeze(names)
        except ValueError as error:
            raise change_error(changes, AGAIN, str(error)) from error

    @contextlib.contextmanager
    def _trained(self, names: frozenset[str]) -> Iterator[None]:
        """Train the frozen parameters `names` again inside the context, as when the program was made."""
        frozen = [p for name, p in named_parameters(self.state.model) if name in names]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    @property
    def _is_stale(self) -> bool:
        """Whether the step went on since it had the model's values."""
        return self._position() != self._synced

    def _position(self) -> tuple[int, int]:
        return int(self._step.rng.step), int(self._step.num_loads)

    @property
    def _forward(self) -> ForwardOf:
        return forward_of(self._programs[0].program)

    def _make_anew(self, changes: Sequence[Change], frozen: frozenset[str]) -> None:
        """Generate the programs again for changed constants: all of them, or none on an error."""
        others = self._programs_now(changes, frozen)
        tables, planned = set[str](), []
        for old, other in zip(self._programs, others, strict=True):
            moved = changed_tables(old.program, other)
            if other.files != old.program.files or moved:
                require(not (self._is_stale and moved & written_buffers(self._step)), changes, STALE)
                tables |= moved
                planned.append((old, self._loaded(old, other, changes), other))
            else:
                planned.append((old, old, other))
        unread = frozenset.intersection(*(unread_of(self._step, loaded.step) for _, loaded, _ in planned))
        if frozen | unread != self._frozen | self._unread:
            self._leave_out(frozen | unread, changes)
        self._unread = unread
        for index, (old, loaded, other) in enumerate(planned):
            if loaded.program.files != other.files:
                exchange_code(loaded.package, loaded.program.files, other.files)
                self._step.forget_graphs()
            loaded.program = replace(loaded.program, files=other.files, best=other.best)
            if loaded is not old:
                self._step.run_instead(old.step, loaded.step, values_of(other))
                self._programs[index] = loaded
        if tables:
            self._load(tables, changes)

    def _programs_now(self, changes: Sequence[Change], frozen: frozenset[str]) -> list[GeneratedProgram]:
        """Return the programs of the model's present state, one for each shape of batches: earlier ones, perhaps with
        other numbers, or new ones."""
        can_renumber = len(self._programs) == 1 and self._programs[0].program.backend != "inductor"
        variant, is_same, files = self._variant, False, None
        numbers = self._forward.numbers() if can_renumber and all(c.is_of_values for c in changes) else None
        if numbers is not None:
            files = variant.files_for(numbers)
        if files is None:
            match, is_same = self._variants.find(self.state.constants(), len(self._first))
            variant = match or Variant([])
            if can_renumber and not is_same:
                numbers = numbers or self._forward.numbers()
                files = variant.files_for(numbers)
        if files is not None:
            variant.programs = [replace(variant.programs[0], files=files)]
        elif not is_same:
            with self._trained(frozen):
                programs = [self._remade(first, changes) for first in self._first]
            variant.learn(programs, numbers)
        self._variant = variant
        self._variants.keep(variant, self.state.constants())
        return variant.programs

    def _remade(self, first: GeneratedProgram, changes: Sequence[Change]) -> GeneratedProgram:
        assert first.remake is not None
        try:
            other = first.remake(first)
        except AutoparError as error:
            raise change_error(changes, AGAIN, f"the same plan gives no program: {error}") from error
        if other.state is not None:
            self.state.read_also(other.state.reads)
        return other

    def _loaded(self, old: Loaded, other: GeneratedProgram, changes: Sequence[Change]) -> Loaded:
        """Return a step whose code is that of a program, or may be exchanged for it."""
        candidates = [old, *(kept for kept in self._kept if kept.index == old.index and kept is not old)]
        if (usable := next((loaded for loaded in candidates if loaded.may_run(other)), None)) is not None:
            return usable
        try:
            loaded = Loaded(other, self._make(self._step, other), old.index)
        except AutoparError as error:
            raise change_error(changes, [FULL, *AGAIN], str(error)) from error
        new = sorted(written_buffers(loaded.step) - written_buffers(self._step))
        if new:
            reason = f"forward now updates buffers that it did not update before: {', '.join(new[:3])}"
            raise change_error(changes, [FULL, *AGAIN], reason)
        self._kept = [loaded, *self._kept][:MOST_VARIANTS]
        return loaded

    def _load(self, names: set[str], changes: Sequence[Change]) -> None:
        """Copy the model's buffers of these names into the program's."""
        # The step keeps its own buffers apart from those of a program that runs in its place: load both.
        steps = {id(self._step): (self._programs[0].program, self._step)}
        steps |= {id(loaded.step): (loaded.program, loaded.step) for loaded in self._programs}
        for program, step in steps.values():
            source = values_of(program)
            for part in step.parts:
                slots = list(part.model.buffer_slots())
                for name, spec, _ in slots:
                    if {name, *spec.aliases} & names:
                        shape = tuple(source.outline(name).shape)
                        require(shape == tuple(spec.shape), changes, AGAIN)
                others = {id(value) for name, spec, value in slots if not {name, *spec.aliases} & names}
                with torch.no_grad():
                    part.load_buffers(source, others)

    def _agree(self, changes: Sequence[Change]) -> None:
        """Raise ModelError where ranks see different changes: they would wait for one another, or compute
        differently."""
        self._num_changes += 1
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        store, rank = store_of_ranks(), dist.get_rank()
        base = f"autopar/state/{self._number}/{self._num_changes}"
        store.set(f"{base}/{rank}", "\n".join(sorted(map(str, changes))))
        keys = [f"{base}/{other}" for other in range(dist.get_world_size())]
        watcher = watch.current()
        patience = min(AGREE_SECONDS, (watcher and watcher.seconds or AGREE_SECONDS) / 2)  # before the others give up
        try:
            store.wait(keys, timedelta(seconds=patience))
            seen = [store.get(key) for key in keys]
        except (RuntimeError, ValueError):  # dist.DistStoreError: some ranks saw no change
            seen = []
        require(len(set(seen)) == 1, changes, "the same change on every rank, before the same step")


def follow(compiled: GeneratedProgram, step: Any, make: Callable[[Any, GeneratedProgram], Any]) -> None:
    """Let a step follow the changes of its program's model. make: as StateFollower takes it."""
    if compiled.state is not None and compiled.remake is not None:
        step.state_check = follower = StateFollower(compiled, step, make)
        step.after_forward = follower.after_forward


def followed(step: Any) -> StateFollower | None:
    """Return the follower of a step that `build_step` made."""
    check = step.state_check
    return check if isinstance(check, StateFollower) else None
