"""Check a Trainer's batches before the first step: whether the last is short, whether all ranks read the same ones."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from autopar.errors import ConstraintError, DataError
from autopar.training.config import Batches
from autopar.training.run_state import Stateful


def check_batches(batches: Batches, global_batch_size: int | None) -> None:
    """Raise ConstraintError for batches that would end a run, or train ranks apart, later on."""
    if isinstance(batches, DataLoader):
        _check_loader(batches, global_batch_size)
    elif callable(batches):
        _check_function(batches)
    elif isinstance(batches, Sequence) and batches and global_batch_size not in (None, num_rows(batches[0])):
        raise ConstraintError(
            f"the first batch has {global_batch_size} rows, those of the whole step",
            values=f"{num_rows(batches[0])} rows",
            alternatives=f"batches of {global_batch_size} rows",
        )


def rows_of_batches(batches: Batches) -> set[int]:
    """Return the numbers of rows of the batches, as far as they are known without reading all of them."""
    if isinstance(batches, DataLoader):
        count, size = _num_samples(batches), batches.batch_size
        if size is None or count is None:
            return set()
        rest = 0 if batches.drop_last else count % size
        return {size} | ({rest} if rest else set())
    return {num_rows(batch) for batch in batches} if isinstance(batches, Sequence) else set()


def without_worker_iterator(batches: Iterable[Any]) -> Iterable[Any]:
    """Return the batches; of a DataLoader a copy without its persistent workers' iterator, which serves one process.

    A DataLoader that remembers its place is returned itself, since it is also asked for that place.
    """
    if not isinstance(batches, DataLoader) or isinstance(batches, Stateful):
        return batches
    loader = copy.copy(batches)
    loader._iterator = None
    return loader


@contextmanager
def peeking(batches: Batches) -> Iterator[None]:
    """Restore the generators that shuffle a DataLoader, and the place of batches that remember it.

    So training begins with the first batch of the first order.
    """
    place = copy.deepcopy(batches.state_dict()) if isinstance(batches, Stateful) else None  # a copy: it may change
    with kept_generators(batches):
        try:
            yield
        finally:
            if isinstance(batches, Stateful):
                batches.load_state_dict(place)


@contextmanager
def kept_generators(source: Any) -> Iterator[None]:
    """Restore the generators that shuffle a DataLoader: its own, and those of its samplers."""
    states = [(generator, generator.get_state()) for generator in _generators_of(source)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _generators_of(source: Any) -> Iterator[torch.Generator]:
    if isinstance(generator := getattr(source, "generator", None), torch.Generator):
        yield generator
    for name in ("sampler", "batch_sampler"):
        if (inner := getattr(source, name, None)) is not None:
            yield from _generators_of(inner)


def _check_function(batches: Callable[[int], Iterator[Any]]) -> None:
    try:
        inspect.signature(batches).bind(0)
    except TypeError as error:
        raise ConstraintError(
            "batches, as a function, takes the number of its first sample, from which a resumed run continues",
            values=str(error),
            alternatives="def batches(start_sample): ..., which yields whole global batches",
        ) from None
    except ValueError:  # a C function does not describe its arguments
        return


def _check_loader(loader: DataLoader[Any], global_batch_size: int | None) -> None:
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler):
        raise ConstraintError(
            "every rank must read the same whole batches, of which the program takes its own rows",
            values="a DataLoader with a DistributedSampler, which gives each rank others",
            alternatives="the same DataLoader without it; to shuffle, shuffle=True with "
            "generator=torch.Generator().manual_seed(0)",
        )
    size = loader.batch_size
    if size is not None and global_batch_size is not None and size != global_batch_size:
        raise ConstraintError(
            "the DataLoader's batch_size is that of the whole step, over all ranks",
            values=f"batch_size={size}, global_batch_size={global_batch_size}",
            alternatives=f"DataLoader(batch_size={global_batch_size})",
        )
    if size is not None and _num_samples(loader) is not None and not len(loader):
        raise ConstraintError(
            "there are no batches",
            values=f"{_num_samples(loader)} samples for a batch_size of {size}",
            alternatives="a smaller batch_size, or drop_last=False",
        )


def _num_samples(loader: DataLoader[Any]) -> int | None:
    """Return the samples of an epoch; None where an iterable dataset does not know."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    try:
        return len(sampler)
    except TypeError:
        return None


def named_batch(batch: Any) -> Any:
    """Return a batch as name_inputs takes it: a mapping, or a tuple (a DataLoader gives lists). Raises DataError."""
    if isinstance(batch, (Mapping, tuple)):
        return batch
    if isinstance(batch, list):
        return tuple(batch)
    if isinstance(batch, torch.Tensor):
        return (batch,)
    raise DataError(
        "a batch is a mapping of input names to tensors, or a tuple of tensors",
        values=type(batch).__name__,
        alternatives="a collate_fn that returns a dict",
    )


def leaves_of_batch(batch: Any) -> list[Any]:
    """Return all values of a batch of `named_batch`, including those inside of containers."""
    return tree_leaves(list(batch.values() if isinstance(batch, Mapping) else batch))


def num_rows(batch: Any) -> int:
    """Return dim 0 of the batch's first tensor that has dims. Raises DataError where there is none."""
    named = named_batch(batch)
    for value in leaves_of_batch(named):
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            if not value.shape[0]:
                raise DataError("a batch has no rows", values=f"a tensor of shape {tuple(value.shape)}")
            return int(value.shape[0])
    raise DataError(
        "a batch has no tensor with rows",
        values=f"{len(named)} values",
        alternatives="a collate_fn that returns at least one tensor with rows",
    )
