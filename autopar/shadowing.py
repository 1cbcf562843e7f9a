"""Refuse to start where a user's module hides one of autopar's libraries.

`search`, `codegen` and `cost_models` are common file names, and the folder that Python runs in comes first on the
import path. A `search.py` there would be imported instead of ours, and would fail later with an obscure error.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

LIBRARIES = ("cost_models", "search", "codegen")


def check_shadowing() -> None:
    """Raise ImportError, naming the file, where the import of a library of ours would give somebody else's module.

    Ours are siblings of the `autopar` package, however it was installed. Nothing is imported. A library that is missing
    altogether fails in its own import, with a clear error.
    """
    home = Path(__file__).resolve().parent.parent
    for name in LIBRARIES:
        paths, ours = _locations(name), (home / name).resolve()
        if paths and ours not in (folder for path in paths for folder in (path, path.parent)):
            raise ImportError(
                f"{paths[0]} hides autopar's own package {name!r} ({ours}).\n"
                f"Rename it, move it off the import path, or run Python with -P so that the working folder is not "
                f"searched first.",
                name=name,
                path=str(paths[0]),
            )


def _locations(name: str) -> list[Path]:
    """Return the files or folders that `import name` gives: a module's file, or a namespace package's folders."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        origin, folders = getattr(loaded, "__file__", None), list(getattr(loaded, "__path__", ()))
    else:
        spec = importlib.util.find_spec(name)
        if spec is None:
            return []
        origin = spec.origin if spec.has_location else None
        folders = list(spec.submodule_search_locations or ())
    return [Path(path).resolve() for path in ([origin] if origin else folders)]
