"""Refuses to start when a user's own module hides one of the libraries that autopar is made of.

`search`, `codegen` and `cost_models` are common file names, and the folder that Python runs in comes first on the
import path: a `search.py` there would be imported instead of ours and fail later in a way nobody could place.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

LIBRARIES = ("cost_models", "search", "codegen")


def check_shadowing() -> None:
    """Raise ImportError, naming the file, if importing a library of ours would give somebody else's module.

    Ours lie beside the `autopar` package, however it was installed. Nothing is imported. A library that cannot be
    found at all is left to its own import, which says so.
    """
    home = Path(__file__).resolve().parent.parent
    for name in LIBRARIES:
        found, ours = _locations(name), (home / name).resolve()
        if found and ours not in (folder for path in found for folder in (path, path.parent)):
            raise ImportError(
                f"{found[0]} hides autopar's own package {name!r} ({ours}).\n"
                f"Rename it, move it off the import path, or run Python with -P so that the working folder is not "
                f"searched first.",
                name=name,
                path=str(found[0]),
            )


def _locations(name: str) -> list[Path]:
    """Files or folders that `import name` gives: the module's file, or the folders of a namespace package."""
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
