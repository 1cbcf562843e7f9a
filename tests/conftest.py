"""What every test shares: one thread per process, turns, the order of files, and golden files; see also worker.py."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

# Before torch and numpy are imported, here and in the processes that tests start: many of them share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import pytest

from tests.turns import TURN, VARIABLE

# Workers take the same turn.
os.environ[VARIABLE] = str(TURN)
GOLDEN_FOLDER = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew instead of comparing")


def pytest_configure(config: pytest.Config) -> None:
    """The process that deals tests out runs none."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.worker")


def pytest_report_header() -> str:
    """Print the turn of this run, which repeats it."""
    return f"turn: {VARIABLE}={TURN} (tests/turns.py)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the turn again where tests failed, and where a quiet run has no header."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"To repeat this run: {VARIABLE}={TURN} pytest ...")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers are dealt files with many slow tests first, small ones last: the end finds none of them without work."""
    if hasattr(config, "workerinput"):
        tests = Counter(item.path for item in items)
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: (-slow[item.path], -tests[item.path], item.path))


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
