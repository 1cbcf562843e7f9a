"""What README.md and docs/ show is run as it stands there, page by page.

`tests/documented.py` says what is made of a block.

`--update-golden` writes what is printed today into the pages, where that is the same but for figures.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser

import autopar
from autopar import cli
from autopar.rules.registry import default_registry
from tests.documented import HOME, SHELLS, Block, Command, blocks, commands, excerpt, matched, pages, plain, spans

UsageError: Any = typer.BadParameter.__base__
"""click's, of which newer versions of typer have a copy of their own."""
STEADY = ("plan", "report", "compare", "simulate")
"""Commands whose figures are computed, and so shown exactly, unless they measure the machine."""


def run_autopar(words: list[str]) -> tuple[int, str]:
    """The command in this process; its exit code, and what it printed."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    printed, arguments = io.StringIO(), sys.argv
    try:
        sys.argv = words
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            cli.main()
        code: Any = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = arguments
        for number, handler in kept.items():
            signal.signal(number, handler)
    return code, printed.getvalue()


def run_process(words: list[str]) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    return ended.returncode, ended.stdout + ended.stderr


def parse_autopar(words: list[str], *, is_whole: bool = True) -> None:
    """Raises UsageError for what the command line would refuse; is_whole: what is missing, too."""
    group: Any = typer.main.get_command(cli.app)
    with group.make_context("autopar", [], resilient_parsing=True) as above:
        name, command, rest = group.resolve_command(above, words[1:])
        if command is None:
            raise UsageError(f"there is no command {words[1]}")
        command.make_context(name, list(rest), parent=above, resilient_parsing=not is_whole)


def parse(command: Command) -> bool:
    """Raises for what its program would not take; whether there is a parser for it at all."""
    program, words = command.words[0], command.words
    if program == "autopar":
        parse_autopar(words)
    elif program == "torchrun":
        get_args_parser().parse_args(words[1:])
    elif program == "make":
        assert all(f"\n{target}:" in (HOME / "Makefile").read_text() for target in words[1:]), command.line
    elif program == "python" and words[1] == "-m":
        assert importlib.util.find_spec(words[2]), command.line
    else:
        return False
    return True


class Page:
    """A page on its way: its folder, its namespace, and the blocks' text as it is printed today."""

    def __init__(self, page: str, folder: Path, update: bool) -> None:
        self.page, self.folder, self.update = page, folder, update
        self.counts: Counter[str] = Counter()
        self.updated: dict[Block, str] = {}
        self.text = (HOME / page).read_text(encoding="utf-8")
        self.module = types.ModuleType("docs_page_" + Path(page).stem)
        self.printed = ""

    def show(self, block: Block, old: str, new: str) -> None:
        """What stands in a block against what it should say."""
        if old != new and self.update:
            before = self.updated.get(block, block.text)
            self.updated[block] = before.replace(old, new)
            self.text = self.text.replace(before, self.updated[block])
        else:
            assert old == new, f"{block.place} is not what is there now; --update-golden writes it anew:\n{new}"

    def take(self, block: Block) -> None:
        """One block, in its turn."""
        is_output = block.language == "text" and self.printed
        printed, self.printed = self.printed, ""
        if block.title:
            self.take_file(block)
        elif block.language == "python":
            self.take_python(block)
        elif is_output:
            _, missing = matched(tuple(filter(str.strip, block.text.splitlines())), printed)
            assert not missing, f"{block.place}: {missing} is not in\n{printed}"
            self.counts["run"] += 1
        elif block.language == "yaml":
            yaml.safe_load(block.text.replace("[...]", "[]"))
            self.counts["parsed only"] += 1
        elif block.language == "diff":
            assert is_added(block), f"{block.place}: no example has these lines"
            self.counts["parsed only"] += 1
        elif block.language in SHELLS and commands(block):
            for command in commands(block):
                self.take_command(block, command)
        else:
            self.counts["not checked"] += 1

    def take_file(self, block: Block) -> None:
        path = self.folder / block.title
        if path.exists():
            found = excerpt(block, path.read_text(encoding="utf-8"))
            assert found is not None, f"{block.place}: no such part in {block.title}"
            self.show(block, block.text, found)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        self.counts["run"] += 1

    def take_python(self, block: Block) -> None:
        if block.reason:
            ast.parse(block.text)
            self.counts["parsed only"] += 1
            return
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.text, f"{block.place}", "exec"), self.module.__dict__)
        self.printed = printed.getvalue()
        self.counts["run"] += 1

    def take_command(self, block: Block, command: Command) -> None:
        is_parsed = parse(command)
        words = command.words
        if block.reason or words[0] not in ("autopar", "torchrun", "cat", "ls", "sed"):
            self.counts["parsed only" if is_parsed else "not checked"] += 1
            return
        if words[0] == "torchrun":
            words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
        code, printed = (run_autopar if words[0] == "autopar" else run_process)(words)
        fails = any(line.startswith("error:") for line in command.shown)
        assert bool(code) == fails, f"{block.place}: {command.line} ended with {code}\n{printed[-3000:]}"
        found, missing = matched(command.shown, printed)
        assert not missing, f"{block.place}: {command.line} does not print {missing} but\n{printed[-6000:]}"
        if words[0] == "autopar" and words[1] in STEADY and "detect" not in words:
            for old, new in zip(command.shown, found, strict=True):
                self.show(block, old.rstrip(), new)
        self.counts["run"] += 1


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what is measured of this machine, once for all pages."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folder(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder of a page, with what the project's own has for its commands."""
    for name in ("README.md", "examples"):
        source = HOME / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.syspath_prepend(tmp_path)
    before, rules = set(sys.modules), dict(default_registry().additions)
    yield tmp_path
    default_registry().additions.clear()  # a page may register rules of its own
    default_registry().additions.update(rules)
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


SHOWING = [page for page in pages() if blocks(page)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("page", SHOWING)
def test_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    taken = Page(page, folder, update=bool(request.config.getoption("--update-golden")))
    # Callbacks come back from ranks by the name of their module.
    monkeypatch.setitem(sys.modules, taken.module.__name__, taken.module)
    for block in blocks(page):
        taken.take(block)
    if taken.update:
        (HOME / page).write_text(taken.text, encoding="utf-8")
    print(f"{page}: {dict(taken.counts)}")


def is_added(block: Block) -> bool:
    """Whether one example has all lines that a diff adds."""
    added = {line.removeprefix("+") for line in block.text.splitlines() if line.startswith("+")}
    return any(added <= set(path.read_text(encoding="utf-8").splitlines()) for path in (HOME / "examples").glob("*.py"))


def expected(block: Block, before: Block | None) -> Counter[str]:
    """What `test_page` makes of a block after another, without running it."""
    is_output = block.language == "text" and before is not None and before.language == "python" and not before.reason
    if block.title or is_output:
        return Counter({"run": 1})
    if block.language == "python":
        return Counter({"parsed only" if block.reason else "run": 1})
    if block.language in ("yaml", "diff"):
        return Counter({"parsed only": 1})
    found: Counter[str] = Counter()
    for command in commands(block):
        runs = not block.reason and command.words[0] in ("autopar", "torchrun", "cat", "ls", "sed")
        found["run" if runs else "parsed only" if parse(command) else "not checked"] += 1
    return found or Counter({"not checked": 1})


def test_how_much_is_run() -> None:
    """Most of what is shown is run; what is not has its reason on the page, and is drawings and output otherwise."""
    total: Counter[str] = Counter()
    for page in SHOWING:
        found = blocks(page)
        for before, block in zip([None, *found], found, strict=False):
            total += expected(block, before)
    print(dict(total))
    assert total["run"] > total["parsed only"] and total["run"] > 10 * total["not checked"]


@pytest.mark.parametrize("page", pages())
def test_commands_in_sentences(page: str) -> None:
    """What is named in passing has options that exist."""
    for command in spans(page):
        try:
            parse_autopar(command.words, is_whole=False)
        except UsageError as error:
            pytest.fail(f"{page}: {command.line}: {error.format_message()}")


def test_the_reference_has_every_public_name() -> None:
    text = (HOME / "docs" / "api.md").read_text(encoding="utf-8")
    shown = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith("::: autopar.")}
    assert set(autopar.__all__) <= shown


def test_a_renamed_flag_is_caught() -> None:
    parse_autopar(["autopar", "plan", "a:b", "--cluster", "4 cpu"])
    with pytest.raises(UsageError):
        parse_autopar(["autopar", "plan", "a:b", "--clusters", "4 cpu"])
    with pytest.raises(UsageError):
        parse_autopar(["autopar", "plans", "a:b"], is_whole=False)


def test_a_block_is_updated_line_by_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HOME", tmp_path)
    text = "$ autopar plan\npeak 3 GB\nstep 5 ms"
    (tmp_path / "page.md").write_text(f"```console\n{text}\n```\n")
    page, block = Page("page.md", tmp_path, update=True), Block("page.md", 1, "console", "", "", text)
    for old, new in (("peak 3 GB", "peak 4 GB"), ("step 5 ms", "step 6 ms")):
        page.show(block, old, new)
    assert page.text == "```console\n$ autopar plan\npeak 4 GB\nstep 6 ms\n```\n"


def test_output_is_compared_by_its_words() -> None:
    printed = "predicted  130 ms\nmesh       tp = 4\n"
    assert matched(("predicted 131 ms", "..."), printed) == (["predicted  130 ms", "..."], [])
    assert matched(("mesh tp = 2", "predicted 1 ms"), printed) == (["mesh       tp = 4"], ["predicted 1 ms"])
    assert plain("a 1.5e-07 ███··· b") == "a # b"
