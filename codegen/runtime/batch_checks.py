"""Checks of a batch before a step takes it: names, shapes, dtypes, and equality on ranks that share rows.

A batch that does not fit would otherwise end in a torch error on some ranks, in a hang on others, or train apart in
silence: ranks of one shard that draw other rows (a loader that shuffles without a common seed, a DistributedSampler)
compute sums of unrelated numbers. So in the first steps and in every CHECKED_EVERY-th one the ranks exchange hashes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

from .mesh import Mesh
from .parameters import Module, runs

CHECKED_FIRST = 3
CHECKED_EVERY = 100
"""Hashes are compared in the first CHECKED_FIRST steps, and in those whose number CHECKED_EVERY divides."""

_WHOLE = ""
_HOW = (
    "every rank must read the same global batches in the same order, of which step.local_batch takes its own rows: "
    "leave out DistributedSampler, and seed what shuffles (DataLoader(generator=torch.Generator().manual_seed(0)))"
)


Guards = Mapping[str, tuple[Callable[[Mapping[str, Tensor]], Any], Any]]
"""The values of a whole batch that a program is specialized on: by text, a function of the batch and the value."""


class BatchError(ValueError):
    """A batch is not what the program was made for, or not the same on ranks that share it.

    Control characters of names are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(
            "".join(
                character if character.isprintable() or character == "\n" else ascii(character)[1:-1]
                for character in message
            )
        )


class Expected(Protocol):
    """An input as the program expects it (`Param`): its shape in one micro-batch, and its dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


def leaves_of(name: str, value: Any) -> dict[str, Any] | None:
    """Return the tensors of an input that has them in containers, by names; None for any other input.

    Of `text` = {"ids": i, "masks": (m, n)} that is text_ids, text_masks_0 and text_masks_1. Raises BatchError where
    two would have one name.
    """
    leaves, _ = ([], None) if isinstance(value, Tensor) else tree_flatten_with_path(value)
    if not any(isinstance(leaf, Tensor) for _, leaf in leaves):
        return None
    named = {}
    for path, leaf in leaves:
        keys = (next(str(getattr(key, kind)) for kind in ("key", "idx", "name") if hasattr(key, kind)) for key in path)
        leaf_name = re.sub(r"\W", "_", "_".join((name, *keys)))
        if leaf_name in named:
            raise BatchError(f"two tensors inside {name} would have the name {leaf_name}: rename a key")
        named[leaf_name] = leaf
    return named


def flat_batch(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with what its containers hold under names of its own (`leaves_of`). Raises BatchError."""
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"a step takes the inputs of forward by name, got a {type(batch).__name__}; "
            "program.local_batch(batch) takes a batch as the example was given"
        )
    flat: dict[str, Any] = {}
    for name, value in batch.items():
        leaves = leaves_of(name, value) if isinstance(name, str) else None
        for leaf_name, leaf in ({name: value} if leaves is None else leaves).items():
            if leaf_name in flat:
                raise BatchError(f"two inputs of the batch have the name {leaf_name}: rename a key")
            flat[leaf_name] = leaf
    return flat


def check_batch(
    batch: Mapping[str, Any],
    inputs: Mapping[str, Expected],
    num_micro_batches: int,
    *,
    unused: Iterable[str] = (),
    fixed: Mapping[str, Any] = {},
) -> None:
    """Raises BatchError unless a whole global batch is what the program was made for.

    inputs: of all stages, with the global shape of one micro-batch. unused: further tensors that the batch may hold.
    fixed: values that are no tensors, which the program was made with.
    """
    missing = [name for name in inputs if name not in batch]
    names = {*inputs, *unused, *fixed}
    unknown = [str(name) for name in batch if name not in names]
    if missing or unknown:
        problems = [f"lacks {', '.join(missing)}"] if missing else []
        problems += [f"has {', '.join(unknown)}, which the example inputs lack"] if unknown else []
        raise BatchError(f"the batch {' and '.join(problems)}; the program takes {', '.join(sorted(names))}")
    for name, value in fixed.items():
        if name in batch and (type(batch[name]) is not type(value) or batch[name] != value):
            raise BatchError(f"{name} is {batch[name]!r}; the program was made for {name}={value!r} alone")
    rows = {name: _rows(name, batch[name], spec, num_micro_batches) for name, spec in inputs.items()}
    whole = {spec.shape[0] for name, spec in inputs.items() if rows[name]}
    apart = [n for n, spec in inputs.items() if not rows[n] and spec.shape and (not whole or spec.shape[0] in whole)]
    if num_micro_batches > 1 and apart:
        name = apart[0]
        _refuse_shape(name, batch[name], inputs[name], num_micro_batches)


def _rows(name: str, value: Any, spec: Expected, count: int) -> bool:
    """Whether the input has the rows of all micro-batches. Raises BatchError for a wrong type, shape or dtype."""
    if not isinstance(value, Tensor):
        raise BatchError(f"{name} must be a tensor, got {type(value).__name__}")
    is_rounded = spec.dtype in (torch.bfloat16, torch.float16) and value.dtype == torch.float32
    if value.dtype != spec.dtype and not is_rounded:
        raise BatchError(f"{name} has dtype {value.dtype}; the program was made for {spec.dtype}")
    shape = tuple(value.shape)
    has_rows = bool(spec.shape) and shape == (spec.shape[0] * count, *spec.shape[1:])
    if not has_rows and shape != spec.shape:
        _refuse_shape(name, value, spec, count)
    return has_rows


def _refuse_shape(name: str, value: Tensor, spec: Expected, count: int) -> None:
    shape, wanted = tuple(value.shape), spec.shape
    if wanted:
        wanted = (wanted[0] * count, *wanted[1:])
    text = f"{name} has shape {shape}; the program was made for {wanted}"
    if shape[1:] == wanted[1:] and shape and wanted:
        text += (
            f", that is for batches of {wanted[0]} rows, all ranks together: leave out a shorter last batch "
            "(DataLoader(drop_last=True)), or plan for another global_batch_size"
        )
    raise BatchError(text)


def guarded_values(batch: Mapping[str, Any], decisive: Guards) -> dict[str, Any]:
    """Return the guarded values of a whole batch by their text, or the text of an error."""
    values: dict[str, Any] = {}
    for text, (compute, _) in decisive.items():
        try:
            values[text] = compute(_OnHost(batch))
        except Exception as error:  # whatever torch raises of other shapes
            values[text] = f"{type(error).__name__}: {error}"
    return values


def check_guards(batch: Mapping[str, Any], decisive: Guards) -> None:
    """Raises BatchError unless a whole batch has the values that the program is specialized on."""
    values = guarded_values(batch, decisive)
    other = {text: values[text] for text, (_, value) in decisive.items() if values[text] != value}
    if other:
        was = ", ".join(f"{text} is {value!r}, not {decisive[text][1]!r}" for text, value in other.items())
        raise BatchError(
            f"values of the batch decide what forward does, and this batch has others than the program: {was}. Trainer "
            "makes a program for each value; in a loop of your own, use "
            "build(also=[compile(..., example_inputs=another_batch, plan=program.plan)])"
        )


class _OnHost(Mapping[str, Any]):
    """A batch with its tensors on the CPU, each moved when it is asked for."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self._batch = batch

    def __getitem__(self, name: str) -> Any:
        value = self._batch[name]
        return value.detach().cpu() if isinstance(value, Tensor) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)


class BatchCheck:
    """The check of the batches that one rank's step gets.

    roots: the program's root class, or those of all stages. models: this rank's own.
    """

    def __init__(
        self, roots: Iterable[type[Module]], models: Iterable[Module], mesh: Mesh, num_micro_batches: int
    ) -> None:
        roots, models = tuple(roots), tuple(models)
        self.mesh, self.count = mesh, num_micro_batches
        self.inputs = {name: spec for root in roots for name, spec in root.INPUTS.items()}
        self.unused = tuple(name for root in roots for name in root.UNUSED_INPUTS)
        self.fixed = {name: value for root in roots for name, value in root.FIXED_INPUTS.items()}
        self.guards = {text: entry for root in roots for text, entry in root.GUARDS.items()}
        self.local_inputs = {name: spec for model in models for name, spec in model.INPUTS.items()}
        self.local_shapes = {name: spec.local_shape(mesh) for name, spec in self.local_inputs.items()}
        self._whole: str | None = None

    def flat(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch by the names of the program's inputs; where forward takes all in one container, that may be given
        as it is. Raises BatchError."""
        flat, names = flat_batch(batch), {*self.inputs, *self.unused, *self.fixed}
        if not flat or not flat.keys().isdisjoint(names):
            return flat
        inside = {re.sub(r"\W", "_", name): value for name, value in flat.items()}
        last = f"_{next(iter(inside))}"
        for name in (name_known.removesuffix(last) for name_known in names if name_known.endswith(last)):
            flattened = {f"{name}_{key}": value for key, value in inside.items()}
            if self.inputs.keys() <= flattened.keys() <= names:
                return flattened
        return flat

    def takes(self, batch: Mapping[str, Any], is_local: bool) -> bool:
        """Whether a batch, or this rank's part of one, is what the program was made for."""
        if is_local:
            return not self._local_error(batch)
        try:
            self._check_whole(batch)
        except BatchError:
            return False
        return True

    def _check_whole(self, batch: Mapping[str, Any]) -> None:
        check_batch(batch, self.inputs, self.count, unused=self.unused, fixed=self.fixed)
        if self.guards:
            check_guards(batch, self.guards)

    def whole(self, batch: Mapping[str, Any], step: int) -> None:
        """A whole global batch came in; remembers its hash where ranks will compare it. Raises BatchError."""
        self._check_whole(batch)
        tensors = (batch[name] for name in sorted(self.inputs))
        self._whole = digest_of(tensors) if self._is_due(step) else None

    def local(self, batch: Mapping[str, Tensor], step: int) -> None:
        """This rank's part of a batch is about to be used. Collective where hashes are due; raises BatchError then on
        all ranks if it is wrong on one, else on this one. Raises RuntimeError inside torch.autocast."""
        if torch.is_autocast_enabled(self.mesh.device.type):
            raise RuntimeError(
                "torch.autocast is on around the step, which has a precision of its own: call it outside, and compile "
                'with precision="bf16" or "fp16"'
            )
        error = self._local_error(batch)
        if self._is_due(step):
            hashes = {} if error else {(n, self._place(n)): digest_of([batch[n]]) for n in self.local_inputs}
            self._agree(error, hashes | ({(_WHOLE, ()): self._whole} if self._whole and not error else {}))
        elif error:
            raise BatchError(error)
        self._whole = None

    def _is_due(self, step: int) -> bool:
        return self.mesh.everyone.size > 1 and (step < CHECKED_FIRST or step % CHECKED_EVERY == 0)

    def _local_error(self, batch: Mapping[str, Tensor]) -> str:
        names = {*self.inputs, *self.unused, *self.fixed}
        to_check = {name: value for name, value in batch.items() if name in self.local_inputs or name not in names}
        shapes = {name: _Local(shape, self.local_inputs[name].dtype) for name, shape in self.local_shapes.items()}
        try:
            check_batch(to_check, shapes, self.count)
        except BatchError as error:
            return f"{error} (this rank's part; step.local_batch makes it from a whole batch)"
        return self._other_values(batch) if self.guards else ""

    def _other_values(self, batch: Mapping[str, Tensor]) -> str:
        """Return what is wrong with the guarded values of the whole batch that this part is of; "" if nothing is."""
        whole = getattr(batch, "whole", None)
        if whole is None and self.mesh.everyone.size == 1:
            whole = batch
        if whole is None:
            return (
                f"values of the whole batch decide what forward does ({', '.join(self.guards)}), and a rank's part "
                "does not show them: step.local_batch makes the part from a whole batch"
            )
        try:
            check_guards(whole, self.guards)
        except BatchError as error:
            return str(error)
        return ""

    def _place(self, name: str) -> tuple[Any, ...]:
        """Return the elements of the whole input that this rank has."""
        spec = self.local_inputs[name]
        return tuple(tuple((at, length) for _, at, length in runs(d, spec, self.mesh)) for d in range(len(spec.shape)))

    def _agree(self, error: str, hashes: dict[tuple[str, tuple[Any, ...]], str]) -> None:
        reports: list[Any] = [None] * self.mesh.everyone.size
        dist.all_gather_object(reports, (error, hashes), group=self.mesh.everyone.group)
        for rank, (text, _) in enumerate(reports):
            if text:
                raise BatchError(f"rank {rank}: {text}" if text != error else text)
        first: dict[Any, tuple[int, str]] = {}
        for rank, (_, theirs) in enumerate(reports):
            for key, digest in theirs.items():
                other, expected = first.setdefault(key, (rank, digest))
                if digest != expected:
                    what = f"their parts of {key[0]} are of the same rows" if key[0] else "they read one global batch"
                    raise BatchError(f"ranks {other} and {rank} were given different data, though {what}: {_HOW}")


class LocalBatch(dict[str, Tensor]):
    """This rank's part of a batch. unread: whole inputs that the program does not read, but may read after a flag of
    its model has changed. whole: the batch that it is of, where values of that decide what forward does."""

    def __init__(
        self, part: Mapping[str, Tensor], unread: Mapping[str, Tensor], whole: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(part)
        self.unread, self.whole = unread, whole


class _Local:
    """The shape of this rank's part of one micro-batch."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


def digest_of(tensors: Iterable[Tensor]) -> str:
    """A digest of the values of tensors, bit by bit."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        line = tensor.detach().cpu().contiguous().view(-1)
        digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        if line.numel():
            digest.update(line.view(torch.uint8).numpy().data)
    return digest.hexdigest()
