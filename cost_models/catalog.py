"""The built-in devices and links, read from ``machines/*.toml`` of this package, and the TOML form of both."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

from cost_models.hardware import Device, Link

Part = TypeVar("Part", Device, Link)


@cache
def devices() -> Mapping[str, Device]:
    """Return the built-in devices by name."""
    return MappingProxyType({name: from_table(Device, name, table) for name, table in _read("devices.toml").items()})


@cache
def links() -> Mapping[str, Link]:
    """Return the built-in links by name."""
    return MappingProxyType({name: from_table(Link, name, table) for name, table in _read("links.toml").items()})


def device(name: str) -> Device:
    """Return the built-in device called `name`. Raises ValueError that lists the known devices and links."""
    if name not in devices():
        raise unknown("device", name)
    return devices()[name]


def link(name: str) -> Link:
    """Return the built-in link called `name`. Raises ValueError that lists the known devices and links."""
    if name not in links():
        raise unknown("link", name)
    return links()[name]


def unknown(part_kind: str, name: str) -> ValueError:
    """Return the error for a name that is not in the catalog, with the nearest name and all names.

    A name that starts with the given one is nearest: for h200 that is h200-sxm, not h20.
    """
    names = list(devices() if part_kind == "device" else links())
    longer = [item for item in names if name and item.startswith(name)]
    close = longer or difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ValueError(
        f"unknown {part_kind} {name!r}.{hint} Devices: {', '.join(devices())}. Links: {', '.join(links())}."
    )


def from_table(kind: type[Part], name: str, table: Mapping[str, Any]) -> Part:
    """Read a device or link from its TOML table. Raises ValueError for unknown, missing or wrongly typed keys."""
    owner = f"{kind.__name__.lower()} {name}"
    hints = get_type_hints(kind)
    values: dict[str, Any] = {"name": name, **table}
    allowed = [item.name for item in fields(kind)]
    surplus = sorted(values.keys() - set(allowed))
    required = [item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING]
    missing = [key for key in required if key not in values]
    if surplus or missing:
        wrong = ", ".join(
            f"{problem} keys {keys}" for problem, keys in (("unknown", surplus), ("missing", missing)) if keys
        )
        raise ValueError(f"{owner}: {wrong}; the keys are {', '.join(allowed)}")
    for key, value in values.items():
        _require_type(f"{owner}: {key}", value, hints[key])
    return kind(**values)


def to_table(part: Device | Link) -> str:
    """Return the `key = value` lines of a device's or link's TOML table; `from_table` reads them back."""
    return "".join(f"{item.name} = {_toml_value(getattr(part, item.name))}\n" for item in fields(part))


def _read(file_name: str) -> dict[str, Any]:
    text = resources.files("cost_models").joinpath("machines", file_name).read_text(encoding="utf-8")
    return tomllib.loads(text)


def _require_type(owner: str, value: object, hint: object) -> None:
    if hint is float:
        right = isinstance(value, int | float) and not isinstance(value, bool)
    elif hint is int:
        right = isinstance(value, int) and not isinstance(value, bool)
    elif hint in (bool, str):
        right = isinstance(value, bool if hint is bool else str)
    else:
        right = isinstance(value, dict) and all(type(item) in (int, float) for item in value.values())
    if not right:
        raise ValueError(f"{owner} has the wrong type: {value!r}")


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, except that TOML also requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_value(str(key))} = {_toml_value(item)}" for key, item in value.items()) + "}"
    return repr(value)
