"""HTML pieces. Every text that comes from a file or a name is escaped here and nowhere else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from skinny_lab.report.svg import Picture


@dataclass(frozen=True, slots=True)
class Html:
    """Text that is HTML already."""

    text: str


def escaped(value: object) -> str:
    """For element content and attribute values."""
    return value.text if isinstance(value, Html) else html.escape(str(value), quote=True)


def tag(name: str, *content: object, **attributes: str) -> Html:
    """One element. `kind` is written as `class`; underscores of other attributes as dashes."""
    said = "".join(
        f' {"class" if key == "kind" else key.replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value
    )
    return Html(f"<{name}{said}>{''.join(escaped(part) for part in content)}</{name}>")


def join(parts: Iterable[object], between: str = "\n") -> Html:
    """Several pieces."""
    return Html(between.join(escaped(part) for part in parts))


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[object]], kinds: Sequence[str]) -> Html:
    """A table that scrolls sideways on its own, also by keyboard. kinds: class of each column ("number", ...)."""
    pairs = list(zip(heads, kinds, strict=True))
    head = tag("tr", *(tag("th", name, scope="col", kind=kind) for name, kind in pairs))
    body = join(tag("tr", *(tag("td", v, kind=k) for v, k in zip(row, kinds, strict=True))) for row in rows)
    whole = tag("table", tag("caption", caption), tag("thead", head), "\n", tag("tbody", body))
    return tag("div", whole, kind="scroll", role="region", tabindex="0", aria_label=caption)


def picture(drawn: Picture) -> Html:
    """An inline SVG. It scales with the page up to a quarter above its size, and scrolls below nine tenths of it: the
    smallest type is 8 points."""
    least, most = f"{0.9 * drawn.width:.0f}px", f"{1.25 * drawn.width:.0f}px"
    body = drawn.inline.replace("<svg ", f'<svg style="min-width:{least};max-width:{most}" ', 1)
    return tag("figure", Html(body), tabindex="0")


def fold(title: str, *, unfolded: bool) -> tuple[Html, Html]:
    """Opening and closing of a part that a reader can fold."""
    return Html(f"<details{' open' if unfolded else ''}><summary>{escaped(title)}</summary>"), Html("</details>")


def facts(pairs: Iterable[tuple[str, object]]) -> Html:
    """Names and values; a missing value is said."""
    return tag("dl", *(join((tag("dt", name), tag("dd", value or "not told")), "") for name, value in pairs))


def page(title: str, css: str, body: Iterable[object]) -> str:
    """The document. css is trusted."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{css}\n</style>\n</head>\n<body>\n<main>\n"
        f"{join(body).text}\n</main>\n</body>\n</html>\n"
    )
