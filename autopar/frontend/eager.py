"""Test whether model and loss run in one process on the example inputs; error messages of tracing depend on it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from autopar.frontend import fakes
from autopar.frontend.attributes import named_parameters, named_tensors
from autopar.frontend.copies import deep_copy
from autopar.frontend.inputs import NamedBatch, fake_input
from autopar.frontend.loss_module import LossModule
from autopar.frontend.skeleton import in_training, skeleton_of

MOST_BYTES = 2**30
"""Elements of parameters, buffers and inputs: a larger model runs on fake tensors only."""

Loss = Callable[..., Tensor] | None


def runs(
    model: nn.Module, loss_fn: Loss, batch: NamedBatch, dtype: torch.dtype | None = None
) -> bool | Exception | None:
    """Return True if forward and loss run in one process on `batch`, their error if they fail, None if unknown.

    They run on fake tensors first, then, if that fails and they are small, on a copy of the model. dtype: the dtype
    that parameters are cast to first.
    """
    with _disable_current_modes(), _random_state(), warnings.catch_warnings(action="ignore"), torch.enable_grad():
        fake = fakes.mode()
        try:
            with fake:
                skeleton = skeleton_of(model, fake, dtype)
                unreal = batch.map(lambda value: fake_input(value, fake, 0, None))
                LossModule(skeleton, loss_fn, unreal, dtype=dtype)(**unreal)
            return True
        except Exception:  # also failures for lack of values: the real run decides
            pass
        tensors = [
            *(tensor for _, tensor in named_tensors(model)),
            *(v for v in batch.values() if isinstance(v, Tensor)),
        ]
        if any(value.is_meta or isinstance(value, FakeTensor) for value in tensors):
            return None
        if sum(value.nbytes for value in tensors) > MOST_BYTES:
            return None
        try:
            detached = batch.map(lambda value: value.detach().clone() if isinstance(value, Tensor) else value)
            copied = in_training(deep_copy(model))
            for _, parameter in named_parameters(copied):
                parameter.data = _cast(parameter.data, dtype)
            LossModule(copied, loss_fn, detached, dtype=dtype)(**detached)
        except Exception as error:
            return error
        return True


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


@contextmanager
def _random_state() -> Iterator[None]:
    """Context manager that restores the random state of Python, numpy and torch."""
    python, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)
