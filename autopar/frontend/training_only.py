"""Find calls that a model makes in training alone (stochastic depth, noise, averages that it updates), and replacements
for their results.

Two records of forward are read side by side, one in each mode. A call of the training record that the evaluation record
lacks is skipped. Where a later call of both reads a skipped result `m` in training and `r` in evaluation, and training
has computed `r` before, the graph gets `in_training(m, r)` there: m in training, r in evaluation. After these, the
training graph in evaluation mode makes every call of the model's own evaluation, by construction. For a buffer that
training alone writes to, m is the written value and r the buffer as forward found it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.frontend.fx_import import LOGITS, FlatGraph, unused_name
from autopar.frontend.other_rows import Places, UnlikeError
from autopar.frontend.recorded_calls import RecordedCall, RecordedCalls
from autopar.frontend.recorder import Record, Source
from autopar.frontend.simplify import drop_no_effect
from autopar.ir.draws import IN_TRAINING
from autopar.ir.graph import Node, Ref, with_refs
from autopar.operators.schemas import may_be_view

Name = tuple[Any, ...]
"""The origin of a value of a record, as recorder.py has it: ("result", position, index), ("input", name), ..."""

_CLONE = "aten.clone.default"
_MODES = ("enter", "grad mode")
"""Entries without meaning in an evaluation, which has no gradients."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """An evaluation reads `evaluation` in place of `training`, from the call at `position` on."""

    training: Name
    evaluation: Name
    position: int


def replacements(training: Record, evaluation: Record) -> tuple[Replacement, ...]:
    """Return the replacements. Raises UnlikeError, which names the difference, where evaluation has a call that
    training lacks.
    """
    return _Comparison(training, evaluation).run()


def write_training_only(flat: FlatGraph, training: Record, evaluation: Record) -> None:
    """Put `in_training` calls into the imported graph of the training record. Raises UnlikeError."""
    replaced = replacements(training, evaluation)
    if not replaced:
        return
    plain = flat.copy()
    drop_no_effect(plain)
    marks = [node for node in plain.nodes if node.op == LOGITS]
    plain.nodes = [node for node in plain.nodes if node.op != LOGITS]
    places = Places(plain, training)
    positions = [place + 1 for place in places.find()]
    refs = {origin: ref for ref, origin in places.sources.items()}
    metas, names = flat.metas(), {ref.node for ref in flat.metas()}
    renamed: dict[Ref, Ref] = {}
    waiting = sorted(replaced, key=lambda replacement: replacement.position)
    nodes: list[Node] = []
    untouched: list[Node] = []  # copies of buffers as forward finds them, which `simplify` drops again

    def before_writes(ref: Ref, module: str) -> Ref:
        if ref.node not in flat.parameters:
            return ref
        name = unused_name(f"{ref.node.replace('.', '_')}_before", names)
        names.add(name)
        meta = replace(metas[ref], requires_grad=False)
        untouched.append(Node(name=name, op=_CLONE, args=(ref,), kwargs=(), outputs=(meta,), module=module))
        return Ref(name)

    def insert(replacement: Replacement, module: str) -> None:
        if replacement.training not in refs or replacement.evaluation not in refs:
            raise UnlikeError("a tensor that evaluation reads is not in the exported graph")
        ref, other = refs[replacement.training], before_writes(refs[replacement.evaluation], module)
        name = unused_name(f"{ref.node}_in_training", names)
        names.add(name)
        args = (renamed.get(ref, ref), renamed.get(other, other))
        nodes.append(Node(name=name, op=IN_TRAINING, args=args, kwargs=(), outputs=(metas[ref],), module=module))
        renamed[ref] = Ref(name)

    for node, position in zip(plain.nodes, positions, strict=True):
        while waiting and waiting[0].position <= position:
            insert(waiting.pop(0), node.module)
        nodes.append(with_refs(node, lambda ref: renamed.get(ref, ref)))
    for replacement in waiting:  # the loss itself
        insert(replacement, "")
    flat.nodes = [*untouched, *nodes, *(with_refs(node, lambda ref: renamed.get(ref, ref)) for node in marks)]
    flat.loss = renamed.get(flat.loss, flat.loss)


@dataclass(slots=True)
class _Comparison:
    """counterparts: a value in training -> in evaluation. bound: a skipped value -> (evaluation's, reader's position).

    homes: a view, or the result of a write in place -> the tensor that owns its memory. written: owners that training
    alone writes to. stale: views of them from before.
    """

    training: Record
    evaluation: Record
    counterparts: dict[Name, Name] = field(default_factory=dict)
    skipped: set[Name] = field(default_factory=set)
    bound: dict[Name, tuple[Name, int]] = field(default_factory=dict)
    homes: dict[Name, Name] = field(default_factory=dict)
    written: set[Name] = field(default_factory=set)
    stale: set[Name] = field(default_factory=set)

    def run(self) -> tuple[Replacement, ...]:
        first, second = RecordedCalls(self.training.outside, True), RecordedCalls(self.evaluation.outside, False)
        metas = [
            {origin.name: origin.meta for origin in record.recorder.origins.values()}
            for record in (self.training, self.evaluation)
        ]
        waiting = [call for call in second.live() if call.name not in _MODES]
        for call in first.live():
            if call.name in _MODES:
                continue
            self.note_memory(call, first)
            other = waiting[0] if waiting else None
            if other is not None and self.is_alike(call, other, first, second, metas):
                waiting.pop(0)
                self.counterparts |= {(*call.key, index): (*other.key, index) for index in range(len(call.what[1]))}
                continue
            self.skip(call, first)
        if waiting:
            raise UnlikeError(f"the model calls {waiting[0].name} in evaluation mode, which training does not")
        for mine, theirs, what in self.results(first.loss, second.loss):
            matches = self.matched(mine, theirs, first, second, metas, len(first.entries))
            if matches is None or (matches and what != "loss"):
                raise UnlikeError(f"the {what} is computed differently in evaluation mode and in training")
            self.bound |= matches
        home = {theirs: ours for ours, theirs in self.counterparts.items()}
        return tuple(
            Replacement(ours, home.get(theirs, theirs), position) for ours, (theirs, position) in self.bound.items()
        )

    def results(self, ours: Any, theirs: Any) -> list[tuple[Any, Any, str]]:
        """Return the loss, and the logits where the records have them."""
        if isinstance(ours, Source) or isinstance(theirs, Source):
            return [(ours, theirs, "loss")]
        return [(*pair, what) for *pair, what in zip(ours, theirs, ("loss", "logits"), strict=True)]

    def home(self, name: Name) -> Name:
        while name in self.homes:
            name = self.homes[name]
        return name

    def note_memory(self, call: RecordedCall, first: RecordedCalls) -> None:
        """Note which tensors own the memory of a call's results."""
        operands = [first.source(value) for _, value in call.what[0]]
        if operands and isinstance(operands[0], Source) and (call.writes or may_be_view(call.name)):
            self.homes |= {(*call.key, index): operands[0][1] for index in range(len(call.what[1]))}

    def skip(self, call: RecordedCall, first: RecordedCalls) -> None:
        if call.writes:
            target = first.source(call.what[0][0][1])
            is_own = isinstance(target, Source) and (target[1] in self.skipped or target[1][0] == "tensor")
            if not is_own:
                raise UnlikeError(
                    f"the model calls {call.name} in training alone, which writes to a tensor that evaluation reads"
                )
            home = self.home(target[1])
            self.written.add(home)
            self.stale |= {name for name in self.homes if self.home(name) == home}
        self.skipped |= {(*call.key, index) for index in range(len(call.what[1]))}

    def is_alike(
        self, call: RecordedCall, other: RecordedCall, first: RecordedCalls, second: RecordedCalls, metas: Any
    ) -> bool:
        """Return whether both are one call, if skipped results are replaced suitably."""
        if call.name != other.name or call.what[1] != other.what[1]:
            return False
        matches = self.matched(call.what[0], other.what[0], first, second, metas, call.key[1])
        if matches is None:
            return False
        if call.writes and self.home(first.source(call.what[0][0][1])[1]) in self.written:
            raise UnlikeError(f"the model calls {call.name} on a tensor that training alone has written to")
        self.bound |= matches
        return True

    def matched(
        self, ours: Any, theirs: Any, first: RecordedCalls, second: RecordedCalls, metas: Any, position: int
    ) -> dict[Name, tuple[Name, int]] | None:
        """Return replacements that make two arguments equal; None if none do."""
        ours, theirs = first.source(ours), second.source(theirs)
        if isinstance(ours, Source) and isinstance(theirs, Source):
            return self.matched_values(ours[1], theirs[1], metas, position)
        if type(ours) is not type(theirs):
            return None
        if isinstance(ours, (tuple, list)):
            if len(ours) != len(theirs):
                return None
            matches: dict[Name, tuple[Name, int]] = {}
            for one, two in zip(ours, theirs, strict=True):
                more = self.matched(one, two, first, second, metas, position)
                if more is None or any(matches.get(name, value)[0] != value[0] for name, value in more.items()):
                    return None
                matches |= more
            return matches
        return {} if bool(ours == theirs) else None

    def matched_values(
        self, ours: Name, theirs: Name, metas: list[Mapping[Name, Any]], position: int
    ) -> dict[Name, tuple[Name, int]] | None:
        if ours in self.bound:
            return {} if self.bound[ours][0] == theirs else None
        if ours not in self.skipped:
            if ours in self.stale:
                raise UnlikeError("evaluation reads a view of a tensor that training alone writes to")
            return {} if self.counterparts.get(ours, ours) == theirs else None
        is_known = theirs[0] != "result" or theirs in self.counterparts.values()
        is_same = metas[0].get(ours) == metas[1].get(theirs)
        return {ours: (theirs, position)} if is_known and is_same else None
