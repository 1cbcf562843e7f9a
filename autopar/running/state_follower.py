"""A step's program kept in agreement with what a script changes on the model between steps.

Buffers and values of parameters are copied into the program. Numbers, flags, functions and plain tensors decide the
program's text: the program is made anew by its plan, or a kept one taken. Where two differ in the bodies of functions
alone, these get the new code. Parameters that are frozen, or that forward gives no gradient, are left out of updates.
All else is refused before the step that would differ.
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
from autopar.frontend.forward_numbers import ForwardOf
from autopar.frontend.model_hooks import HOOKS
from autopar.frontend.model_state import ModelState
from autopar.frontend.state_values import Change
from autopar.program import GeneratedProgram
from autopar.running.followed_changes import AGAIN, FULL, OLD, STALE, THAW, refused, require
from autopar.running.growth import let_grow
from autopar.running.parameter_writes import write_parameters
from autopar.running.program_code import exchange_code
from autopar.running.program_reads import changed_tables, forward_of, unread_of, values_of, written_buffers
from autopar.running.random_states import kept_random_states
from autopar.running.variants import MOST_VARIANTS, Loaded, Variant, Variants
from codegen.runtime import watch
from codegen.runtime.processes import store_of_ranks

AGREE_SECONDS = 60.0
"""How long a rank that sees a change waits at most for the others to see it."""

_numbers = itertools.count()
"""Of followers: every rank makes the same ones."""

_log = logging.getLogger("autopar")


class StateFollower:
    """Looks for changes before each batch of a step; `Step.state_check`.

    make: makes a step of another program that shares the parameters of this one. Collective.
    """

    def __init__(self, compiled: GeneratedProgram, step: Any, make: Callable[[Any, GeneratedProgram], Any]) -> None:
        assert compiled.state is not None
        self.state: ModelState = compiled.state.twin()
        self._step, self._make = step, make
        self._programs = [Loaded(compiled, step, 0)]  # that run, one for each shape of batches
        self._first = [compiled]  # of each of these, which has parameters that later ones may not
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
        """Keep a program for other batches in agreement, too: with what its forward reads as well. Collective."""
        self(False)  # what is noted below is then no change that the first programs lack
        if compiled.state is not None:
            self.state.read_also(compiled.state.reads)
            self.state.note(keep_modes=True)
        self._programs.append(Loaded(compiled, step, len(self._first)))
        self._first.append(compiled)
        self._variant, self._variants = Variant([each.program for each in self._programs]), Variants()

    def __call__(self, is_training: bool | None) -> None:
        """A batch is about to be trained or evaluated, or (None) values are to be read. Collective where something
        changed.

        Raises ModelError, on every rank, for what the program cannot follow.
        """
        if is_training is None:
            self._follow_values()
            return
        self._follow_deciding()
        if self.state.is_same(is_training):
            return
        changes = self.state.changes(is_training)
        own, self._advanced = self._advanced, frozenset()
        if any(each.key not in own for each in changes):
            self._agree(changes)
        if changes:
            with torch.inference_mode(False), torch.enable_grad(), kept_random_states():
                self._follow(changes)
            self._has_followed = True
        self.state.note(keep_modes=not is_training)

    def after_forward(self, is_training: bool) -> None:
        """Do to the model's own numbers what its forward does, which the program does not: if it changes any, or may
        since the script changed something. `Step.after_forward`.

        Raises ModelError where forward can no longer be run to see what it does, or does it otherwise for other shapes.
        """
        advanced = self.state.reads.advanced
        if not (advanced or self._has_followed):
            return
        with torch.inference_mode(False), torch.enable_grad(), kept_random_states():
            forwards = [forward_of(each.program) for each in self._programs]
            found = [each.advanced(self.state.reads, is_training) for each in forwards]
        if advanced and (None in found or any(each != found[0] for each in found)):
            raise ModelError(
                "forward changes numbers of the model, which cannot be followed",
                values=", ".join(sorted(advanced.values())),
                alternatives=["change them in the training loop", "numbers that do not depend on the batch's shape"],
            )
        values = found[0] or {}
        self.state.apply(values.items())
        self._advanced, self._has_followed = frozenset(values), False

    def _follow_values(self) -> None:
        """Bring values that were written to the model's parameters into the step, where they were up to date."""
        if self._is_loaded or self._is_stale or self.state.is_same(False):
            return
        if changes := [each for each in self.state.changes(False) if each.parameter_values]:
            self._agree(changes)
            self._write(changes)
            self.state.note_values()

    def _follow_deciding(self) -> None:
        """Make the program anew where a buffer whose value decides what forward does has another one."""
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
        """Make on every rank the changes that rank 0 has, where callbacks run. Collective.

        Raises ModelError, on every rank, for what cannot be brought to another process.
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
        fixed = [each for each in changes if not each.is_movable]
        said: list[Any] = [refused(fixed, AGAIN) if fixed else [(each.key, each.new) for each in changes]]
        dist.broadcast_object_list(said, src=0, device=device)
        if isinstance(said[0], ModelError):
            raise said[0]
        if not is_first:
            self.state.apply(said[0])

    def values_written(self) -> None:
        """The step's values were put into the model, which is no change of the script's."""
        self.state.note(keep_modes=True)
        self._synced, self._is_loaded = self._position(), False

    def values_given(self) -> None:
        """The step has taken the model's values."""
        self._synced, self._is_loaded = self._position(), False

    def values_loaded(self) -> None:
        """The step has the values of a checkpoint, and the model gets those that decide what forward does."""
        self._is_loaded = True
        deciding = self.state.deciding_buffers()
        for part in self._step.parts if deciding else ():
            for name, spec, value in part.model.buffer_slots():
                for own in deciding.keys() & {name, *spec.aliases}:
                    deciding[own].copy_(value.reshape(deciding[own].shape))

    def _follow(self, changes: Sequence[Change]) -> None:
        if any(each.name == HOOKS for each in changes) and self._forward.has_silent_hooks():
            changes = [each for each in changes if each.name != HOOKS]
        require(not (never := [each for each in changes if each.is_of_parts]), never, AGAIN)
        self._require_current([each for each in changes if each.buffer])
        other = [each for each in changes if each.buffer and each.is_tensor and each.old.dtype != each.new.dtype]
        require(not other, other, AGAIN)
        self._write([each for each in changes if each.parameter_values])
        frozen = self._frozen_now([each for each in changes if each.parameter])
        constants = [each for each in changes if not (each.buffer or each.parameter or each.parameter_values)]
        if constants:
            self._make_anew(constants, frozen)
        elif frozen != self._frozen:
            self._leave_out(frozen | self._unread, changes)
        self._frozen = frozen
        if names := {each.buffer for each in changes if each.buffer}:
            self._load(names, [each for each in changes if each.buffer])
        _log.info("the program follows: %s", "; ".join(map(str, changes)))

    def _require_current(self, changes: Sequence[Change]) -> None:
        """Raises ModelError, on every rank, for buffers whose values were old, unless they are now the step's."""
        if not changes or not (self._is_loaded or self._is_stale):
            return
        names = {each.buffer for each in changes}
        if not self._is_loaded:
            names &= written_buffers(self._step)
        is_other = write_parameters(self._step, values_of(self._programs[0].program), names, is_dry=True)
        require(not is_other, [each for each in changes if each.buffer in names] or changes, STALE)

    def _write(self, changes: Sequence[Change]) -> None:
        """Bring values that were written to the model's parameters into the step. Collective."""
        if not changes:
            return
        names, source = {each.parameter_values for each in changes}, values_of(self._programs[0].program)
        is_old = self._is_loaded or self._is_stale
        is_other = write_parameters(self._step, source, names, is_dry=is_old)
        require(not (is_old and is_other), changes, OLD)

    def _frozen_now(self, changes: Sequence[Change]) -> frozenset[str]:
        """The parameters that are frozen now and were trained when the program was made."""
        frozen = {each.parameter for each in changes if not each.new}
        thawed = {each.parameter for each in changes if each.new}
        require(thawed <= self._frozen, changes, THAW)
        return self._frozen - thawed | frozen

    def _leave_out(self, names: frozenset[str], changes: Sequence[Change]) -> None:
        try:
            self._step.freeze(names)
        except ValueError as error:
            raise refused(changes, AGAIN, str(error)) from error

    @contextlib.contextmanager
    def _trained(self, names: frozenset[str]) -> Iterator[None]:
        """Within it, the model's parameters are trained that were when the program was made."""
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
        """Whether the step went on since its values were those of the model."""
        return self._position() != self._synced

    def _position(self) -> tuple[int, int]:
        return int(self._step.rng.step), int(self._step.num_loads)

    @property
    def _forward(self) -> ForwardOf:
        return forward_of(self._programs[0].program)

    def _make_anew(self, changes: Sequence[Change], frozen: frozenset[str]) -> None:
        """Bring constants up to date, in all programs or in none."""
        others = self._programs_now(changes, frozen)
        tables, planned = set[str](), []
        for held, other in zip(self._programs, others, strict=True):
            moved = changed_tables(held.program, other)
            if other.files != held.program.files or moved:
                require(not (self._is_stale and moved & written_buffers(self._step)), changes, STALE)
                tables |= moved
                planned.append((held, self._loaded(held, other, changes), other))
            else:
                planned.append((held, held, other))
        unread = frozenset.intersection(*(unread_of(self._step, loaded.step) for _, loaded, _ in planned))
        if frozen | unread != self._frozen | self._unread:
            self._leave_out(frozen | unread, changes)
        self._unread = unread
        for index, (held, loaded, other) in enumerate(planned):
            if loaded.program.files != other.files:
                exchange_code(loaded.package, loaded.program.files, other.files)
            loaded.program = replace(loaded.program, files=other.files, best=other.best)
            if loaded is not held:
                self._step.run_instead(held.step, loaded.step, values_of(other))
                self._programs[index] = loaded
        if tables:
            self._load(tables, changes)

    def _programs_now(self, changes: Sequence[Change], frozen: frozenset[str]) -> list[GeneratedProgram]:
        """The programs of the model as it is now, of each shape of batches: kept ones, perhaps with other numbers, or
        new ones."""
        can_renumber = len(self._programs) == 1 and self._programs[0].program.backend != "inductor"
        variant, is_same, files = self._variant, False, None
        numbers = self._forward.numbers() if can_renumber and all(each.is_of_values for each in changes) else None
        if numbers is not None:
            files = variant.files_for(numbers)
        if files is None:
            found, is_same = self._variants.find(self.state.constants(), len(self._first))
            variant = found or Variant([])
            if can_renumber and not is_same:
                numbers = numbers or self._forward.numbers()
                files = variant.files_for(numbers)
        if files is not None:
            variant.programs = [replace(variant.programs[0], files=files)]
        elif not is_same:
            with self._trained(frozen):
                made = [self._remade(first, changes) for first in self._first]
            variant.learn(made, numbers)
        self._variant = variant
        self._variants.keep(variant, self.state.constants())
        return variant.programs

    def _remade(self, first: GeneratedProgram, changes: Sequence[Change]) -> GeneratedProgram:
        assert first.remake is not None
        try:
            other = first.remake(first)
        except AutoparError as error:
            raise refused(changes, AGAIN, f"by the same plan there is no program: {error}") from error
        if other.state is not None:
            self.state.read_also(other.state.reads)
        return other

    def _loaded(self, held: Loaded, other: GeneratedProgram, changes: Sequence[Change]) -> Loaded:
        """A step whose code is that of a program, or may be exchanged for it."""
        kept = [held, *(each for each in self._kept if each.index == held.index and each is not held)]
        if (found := next((each for each in kept if each.may_run(other)), None)) is not None:
            return found
        try:
            made = Loaded(other, self._make(self._step, other), held.index)
        except AutoparError as error:
            raise refused(changes, [FULL, *AGAIN], str(error)) from error
        new = sorted(written_buffers(made.step) - written_buffers(self._step))
        if new:
            reason = f"forward now updates buffers that it did not: {', '.join(new[:3])}"
            raise refused(changes, [FULL, *AGAIN], reason)
        self._kept = [made, *self._kept][:MOST_VARIANTS]
        return made

    def _load(self, names: set[str], changes: Sequence[Change]) -> None:
        """Copy the model's buffers of these names into the program's own."""
        # What a program that runs in another's place reads lies elsewhere than what the step is asked for afterwards.
        steps = {id(self._step): (self._programs[0].program, self._step)}
        steps |= {id(each.step): (each.program, each.step) for each in self._programs}
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
        """Raises ModelError where ranks do not see the same changes: they would wait for one another, or differ."""
        self._num_changes += 1
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        store, rank = store_of_ranks(), dist.get_rank()
        base = f"autopar/state/{self._number}/{self._num_changes}"
        store.set(f"{base}/{rank}", "\n".join(sorted(map(str, changes))))
        keys = [f"{base}/{other}" for other in range(dist.get_world_size())]
        own = watch.current()
        patience = min(AGREE_SECONDS, (own and own.seconds or AGREE_SECONDS) / 2)  # before the others give up
        try:
            store.wait(keys, timedelta(seconds=patience))
            seen = [store.get(key) for key in keys]
        except (RuntimeError, ValueError):  # dist.DistStoreError of those that did not come
            seen = []
        require(len(set(seen)) == 1, changes, "the same change on every rank, before the same step")


def follow(compiled: GeneratedProgram, step: Any, make: Callable[[Any, GeneratedProgram], Any]) -> None:
    """Let a step follow what is changed on the model of its program. make: as StateFollower takes it."""
    if compiled.state is not None and compiled.remake is not None:
        step.state_check = follower = StateFollower(compiled, step, make)
        step.after_forward = follower.after_forward


def followed(step: Any) -> StateFollower | None:
    """The follower of a step that `build_step` made."""
    check = step.state_check
    return check if isinstance(check, StateFollower) else None
