"""Shared by the kernel tests, also by those that run in a subprocess of their own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# (relative, absolute) tolerance per dtype: a few units in the last place for values of order one, in sums of <= 10^4;
# wider for bf16 than a GPU needs, since the interpreter truncates fp32 to bf16 instead of rounding to nearest.
_TOLERANCES = {torch.float32: (2e-5, 2e-5), torch.float16: (4e-3, 4e-3), torch.bfloat16: (3e-2, 3e-2)}

AssertNear = Callable[..., None]


@pytest.fixture
def assert_near() -> AssertNear:
    """Compares with an fp64 result, elementwise and, tighter, in norm, to `dtype`'s tolerance (default: `actual`'s)."""

    def compare(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        assert expected.dtype == torch.float64
        relative, absolute = _TOLERANCES[dtype or actual.dtype]
        torch.testing.assert_close(actual.double(), expected, rtol=relative, atol=absolute, equal_nan=True)
        finite = expected.isfinite()
        error, size = (actual.double() - expected)[finite].norm(), expected[finite].norm()
        # The norm averages rounding: a systematic error (a missing term) shows here before it shows elementwise.
        assert error <= relative / 3 * size + 1e-7, f"relative error {error / size:.2e}"

    return compare


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives nan, so that an element no kernel wrote cannot pass."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def _convert_as_torch(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, bits: torch.dtype) -> None:
    """Triton's interpreter converts fp32 to the type it calls `name` by torch, to nearest even."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    inexact = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if (str(source), str(target)) != ("fp32", name):
            return inexact(data, source, target, rounding_mode)
        return torch.tensor(data).to(dtype).view(bits).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture
def exact_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter converts fp32 to e4m3 as a GPU does.

    Its own conversion drops the carry where rounding reaches the next power of two: 124 becomes 64 instead of 128.
    """
    _convert_as_torch(monkeypatch, "fp8e4nv", torch.float8_e4m3fn, torch.uint8)


@pytest.fixture
def exact_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter converts fp32 to bf16 as a GPU does, where its own conversion truncates."""
    _convert_as_torch(monkeypatch, "bf16", torch.bfloat16, torch.uint16)
