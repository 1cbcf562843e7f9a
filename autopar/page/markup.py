"""HTML as values: text is escaped unless it is `Markup`."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias


class Markup(str):
    """Text that is HTML already."""


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
