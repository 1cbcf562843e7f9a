"""HTML as values, with the page's colors: text is escaped unless it is `Markup`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import TypeAlias


class Markup(str):
    """Text that is HTML already."""


# Colors by meaning: names of classes in page.css.
TIME_COLORS: Mapping[str, str] = {
    "forward compute": "c0",
    "backward compute": "c4",
    "recomputation": "c3",
    "gradient accumulation": "c6",
    "local resharding": "c9",
    "optimizer": "c2",
    "pipeline bubble": "idle",
    "waiting for the host": "idle",
    "gradient and parameter synchronisation": "c1",
}
MEMORY_COLORS: Mapping[str, str] = {
    "parameters": "c0",
    "gradients": "c1",
    "optimizer state": "c2",
    "activations": "c4",
    "transient": "c6",
    "workspace": "idle",
}
OTHER_COLORS = ("c5", "c7", "c8", "c3", "c9", "c6")
AXIS_COLORS = ("c0", "c1", "c2", "c4", "c3", "c6", "c7", "c5")
"""Colors of neighboring groups of an axis. Further groups repeat them."""

Child: TypeAlias = "str | int | None | Iterable[Child]"

VOID = frozenset({"br", "col", "hr", "input", "meta", "rect", "path", "polyline", "line", "circle"})
"""Elements without content, and shapes, which have no content here."""


def element(name: str, /, *children: Child, **attributes: str | float | bool | None) -> Markup:
    """Build an element: `element("p", "a < b", class_="note")` -> `<p class="note">a &lt; b</p>`.

    Attribute names lose a trailing `_`, and other `_` become `-`. None and False omit an attribute, True omits its
    value.
    """
    opening = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID and not children:
        return Markup(f"<{name}{opening}/>" if name in ("rect", "path", "polyline", "line") else f"<{name}{opening}>")
    return Markup(f"<{name}{opening}>{joined(children)}</{name}>")


def joined(children: Child) -> Markup:
    """Join children, with plain text escaped."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, (str, int)):
        return Markup(escape(str(children)))
    return Markup("".join(joined(child) for child in children))


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f' {name}="{escape(text)}"'


def section(title: str, *children: Child, intro: str = "", name: str = "") -> Markup:
    """Return a section of the page under its heading."""
    heading = element("h2", title, id=name or None)
    words = element("p", intro, class_="intro") if intro else None
    return element("section", heading, words, *children)


def table(headers: Iterable[Child], rows: Iterable[Iterable[Child]], caption: str, numbers: int = 0) -> Markup:
    """Return a table. The last `numbers` columns are flush right. A wide table scrolls sideways."""
    heads = list(headers)
    first_number = len(heads) - numbers

    def kind(index: int) -> str | None:
        return "number" if index >= first_number else None

    head = element("tr", [element("th", h, scope="col", class_=kind(i)) for i, h in enumerate(heads)])
    body = [element("tr", [element("td", cell, class_=kind(i)) for i, cell in enumerate(row)]) for row in rows]
    inner = element("table", element("caption", caption), element("thead", head), element("tbody", body))
    return element("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption)


def legend(items: Iterable[tuple[str, str]]) -> Markup:
    """Return a legend of (color class, meaning) pairs."""
    names = [element("span", swatch(color), name, class_="name") for color, name in items]
    return element("p", names, class_="legend")


def swatch(color: str) -> Markup:
    """Return a small square of a color class, for legends."""
    return element("span", class_=f"swatch {color}", aria_hidden="true")


def details(summary: str, *children: Child) -> Markup:
    """Return children that are folded under their summary."""
    return element("details", element("summary", summary), *children)


def colors_of(kinds: Iterable[str], assigned: Mapping[str, str]) -> dict[str, str]:
    """Map every kind to a color; kinds without an assigned color take the colors of OTHER_COLORS in turn."""
    others = [kind for kind in kinds if kind not in assigned]
    return {kind: assigned[kind] for kind in kinds if kind in assigned} | {
        kind: OTHER_COLORS[index % len(OTHER_COLORS)] for index, kind in enumerate(others)
    }
