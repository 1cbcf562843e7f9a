"""What every test shares: one thread per process, fixed seeds, and golden files."""

from __future__ import annotations

import difflib
import gc
import os
import random
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

# Before torch and numpy are imported, here and in the processes that tests start: many of them share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytest
import torch

from autopar.frontend.fakes import count_devices
from tests.shared_traces import shared

# Tests make fake tensors and compile before they fork ranks.
count_devices()
# `with torch.device` keeps the constructors of its first use; transformers replaces linspace while it loads a model.
with torch.device("meta"):
    torch.empty(0)

GOLDEN_FOLDER = Path(__file__).parent / "golden"
_TRACING = {Path(__file__).parent / "autopar" / name for name in ("frontend", "frameworks")}
"""Tests of tracing, and of what happens while a model is traced, such as a LightningModule's `log`."""

# Equal examples on every run; HYPOTHESIS_PROFILE=explore looks further.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew instead of comparing")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers are dealt files with many slow tests first, small ones last: the end finds none of them without work."""
    if hasattr(config, "workerinput"):
        tests = Counter(item.path for item in items)
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: (-slow[item.path], -tests[item.path], item.path))


def pytest_collection_finish() -> None:
    """What is imported by now stays: looking through it for garbage again and again takes a tenth of a run."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Equal models share their traces (shared_traces.py), but in folders of _TRACING and where a test has replaced
    something; SHARED_TRACES=0 does without."""

    def has_replaced() -> bool:
        patch = getattr(item, "funcargs", {}).get("monkeypatch")
        return bool(patch and patch._setattr)

    if not _TRACING.isdisjoint(item.path.parents) or os.environ.get("SHARED_TRACES") == "0":
        return (yield)
    with shared(has_replaced):
        return (yield)


@pytest.fixture(autouse=True)
def reproducible() -> None:
    """Every test starts from the same random state, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: `text` must equal the file tests/golden/<name>; see `compare_golden`."""
    update = bool(request.config.getoption("--update-golden"))
    return lambda name, text: compare_golden(GOLDEN_FOLDER / name, text, update)


def compare_golden(path: Path, text: str, update: bool) -> None:
    """Fail with a diff where `text` differs from the file, and also when there is no file; `update` writes it."""
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    how = "run pytest with --update-golden, then read the difference in git"
    if not path.exists():
        pytest.fail(f"no golden file {path}: {how}", pytrace=False)
    expected = path.read_text(encoding="utf-8")
    if text != expected:
        diff = difflib.unified_diff(
            expected.splitlines(), text.splitlines(), f"golden/{path.name}", "now", lineterm="", n=2
        )
        lines = list(diff) or ["only line ends or the last newline differ"]
        pytest.fail("\n".join([f"{path} differs; if that is right, {how}", *lines]), pytrace=False)
