"""A user's own search.py must be reported by name, in a real Python that would import it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHADOWING = ROOT / "autopar" / "shadowing.py"

# shadowing.py is loaded by its path, so that this tests the check alone and not all of autopar's imports.
SCRIPT = f"""
import importlib.util, sys
sys.path.append({str(ROOT)!r})
{{first}}
spec = importlib.util.spec_from_file_location("shadowing", {str(SHADOWING)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
try:
    module.check_shadowing()
except ImportError as error:
    print(error.path)
    print(error)
else:
    print("clear")
"""


def run_in(folder: Path, first: str = "") -> str:
    """Output of the check under a Python started in `folder`, whose path comes before the project's."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(first=first)], cwd=folder, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["search", "codegen", "cost_models"])
def test_users_module_is_named(tmp_path: Path, name: str) -> None:
    offender = tmp_path / f"{name}.py"
    offender.write_text("x = 1\n")
    output = run_in(tmp_path)
    assert output.splitlines()[0] == str(offender)
    assert f"{offender} hides autopar's own package '{name}' ({ROOT / name})" in output
    assert "Rename it" in output


def test_users_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "__init__.py").touch()
    assert run_in(tmp_path).splitlines()[0] == str(tmp_path / "search" / "__init__.py")


def test_module_that_is_already_imported_is_named(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "search.py").touch()
    first = f"sys.path.insert(0, {str(elsewhere)!r}); import search; sys.path.pop(0)"
    assert run_in(tmp_path, first).splitlines()[0] == str(elsewhere / "search.py")


def test_other_files_and_our_own_packages_pass(tmp_path: Path) -> None:
    (tmp_path / "searching.py").touch()
    assert run_in(tmp_path) == "clear"
    assert run_in(tmp_path, "import search, codegen") == "clear"


def test_folder_without_init_does_not_hide_an_installed_package(tmp_path: Path) -> None:
    """Python prefers a package anywhere on the path to a folder without __init__.py."""
    (tmp_path / "search").mkdir()
    assert run_in(tmp_path) == "clear"
