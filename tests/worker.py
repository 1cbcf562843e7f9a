"""Where tests run, which with xdist is not the process that deals them out: turns, one thread, seeds, shared traces.

conftest.py loads it; the process that deals tests out would import torch for nothing, while the workers wait for it.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Generator
from pathlib import Path
from unittest import mock

import hypothesis
import numpy as np
import pytest
import torch

from autopar.frontend.fakes import count_devices
from autopar.running import start_method
from tests.shared_traces import shared
from tests.turns import one_in

# Tests make fake tensors and compile before they fork ranks.
count_devices()
# `with torch.device` keeps the constructors of its first use; transformers replaces linspace while it loads a model.
with torch.device("meta"):
    torch.empty(0)

_TRACING = {
    Path(__file__).parent / "autopar" / name
    for name in (
        "frontend",
        "frameworks",
        "running/test_batch_values.py",
        "running/test_deciding_buffers.py",
        "running/test_own_numbers.py",
        "running/test_state_follower.py",
    )
}
"""Tests of tracing, and of what happens while a model is traced, such as a LightningModule's `log`."""

# Equal examples on every run; HYPOTHESIS_PROFILE=explore looks further.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the cases of a test marked `by_turns(n)`, mark all but every n-th slow, before slow ones are deselected."""
    cases_of: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("by_turns") and not item.get_closest_marker("slow"):
            cases_of.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in cases_of.values():
        (stride,) = cases[0].get_closest_marker("by_turns").args
        quick = one_in(min(stride, len(cases)), cases)
        for case in cases:
            if case not in quick:
                case.add_marker("slow")


def pytest_collection_finish() -> None:
    """Look for garbage rarely, and not among the modules imported by now: collections take a tenth of a run."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 50)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Equal models share their traces (shared_traces.py), but in folders of _TRACING and where a test has replaced
    something; SHARED_TRACES=0 does without."""

    def has_replaced() -> bool:
        patch = getattr(item, "funcargs", {}).get("monkeypatch")
        return bool(patch and patch._setattr)

    if not _TRACING.isdisjoint((item.path, *item.path.parents)) or os.environ.get("SHARED_TRACES") == "0":
        return (yield)
    with shared(has_replaced):
        return (yield)


@pytest.fixture(autouse=True, scope="session")
def forks_are_tried_once() -> Generator[None]:
    """Before it forks ranks, autopar tries a backward in a fork. One that worked does again without new threads."""
    threads, attempt = Path("/proc/self/task"), start_method._fork_has_gradients
    harmless: set[str] = set()

    def has_gradients() -> bool:
        nonlocal harmless
        running = {thread.name for thread in threads.iterdir()} if threads.exists() else set()
        if running and running <= harmless:
            return True
        harmless = running if (works := attempt()) else set()
        return works

    with mock.patch.object(start_method, "_fork_has_gradients", has_gradients):
        yield


@pytest.fixture(autouse=True)
def same_handlers() -> Generator[None]:
    """The command line, called in this process, handles signals as a process of its own would; the next test's runs
    would end by its handlers."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_group_is_left() -> Generator[None]:
    """A test that leaves a process group fails: all tests after it in this process would wait for its ranks."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        pytest.fail("the test left a process group", pytrace=False)


@pytest.fixture(autouse=True)
def reproducible() -> None:
    """Every test starts from the same random state, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
