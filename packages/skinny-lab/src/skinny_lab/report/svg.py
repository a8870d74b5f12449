"""Figures as SVG text: same content, same bytes; legible on light and dark paper. Imports matplotlib late."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skinny_core.errors import KernelUnavailableError, SkinnyError

INK, MUTED, LINE = "#1f2933", "#59616b", "#d5d9de"
PEER = "#a3005f"
DARK = {INK: "#e8eaed", MUTED: "#aab2bc", LINE: "#454c55", PEER: "#f28cc4"}
"""What these become on dark paper. All other colours are legible on both."""
PHONE = 4.1
"""Inches. A figure of that width fits a phone's 390 pixels with its smallest type at 8 points; wider ones scroll."""
BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#8a929c"
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Okabe and Ito: told apart with any colour vision."""

THEME = "@media (prefers-color-scheme: dark) {%s}" % "".join(  # noqa: UP031
    f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
    for light, dark in DARK.items()
    for what in ("fill", "stroke")
)
"""CSS: an attribute selector over the inline styles, so that a viewer that knows no CSS shows the light version.
Without `svg` in front: a marker is drawn through `<use>`, whose shadow tree no descendant selector reaches."""

_DARK_PAPER = "@media (prefers-color-scheme: dark) {svg {background: #14181d}}"


class ReportUnavailableError(KernelUnavailableError):
    """matplotlib is not installed."""


@dataclass(frozen=True, slots=True)
class Picture:
    """name: file name without ".svg", unique in a report. alt: what it shows, in words. body: the `<svg>` element, ids
    not yet made unique. width: of the drawing, CSS pixels."""

    name: str
    alt: str
    body: str
    width: float

    @property
    def file(self) -> str:
        """The text of the SVG file."""
        style = f"<style>svg {{background: #ffffff}} {THEME} {_DARK_PAPER}</style>"
        head, rest = self.body.split(">", 1)
        return f'<?xml version="1.0" encoding="utf-8"?>\n{head}>\n{style}{rest}'

    @property
    def inline(self) -> str:
        """The element for a page that holds `THEME`: ids carry the picture's name."""
        text = re.sub(r'\bid="([^"]+)"', rf'id="{self.name}-\1"', self.body)
        text = re.sub(r'href="#([^"]+)"', rf'href="#{self.name}-\1"', text)
        return re.sub(r"url\(#([^)]+)\)", rf"url(#{self.name}-\1)", text)


def require() -> None:
    """Raise, with what to install, where matplotlib is absent or broken."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ReportUnavailableError(
            f"skinny report draws with matplotlib, which cannot be imported ({' '.join(str(error).split())})",
            "pip install 'skinny-lab[report]'",
        ) from None


def draw(name: str, alt: str, width: float, height: float, paint: Callable[[Any], None]) -> Picture:
    """Call `paint(figure)` on an empty figure of this size (inches). alt: one or two sentences."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context():
        mpl.rcParams.update({k: v for k, v in mpl.rcParamsDefault.items() if k not in _LEAVE})
        mpl.rcParams.update(_STYLE | {"svg.hashsalt": name})
        figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        paint(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", facecolor="none")
    return Picture(name, alt, _element(text.getvalue(), alt), width * 96)


_LEAVE = frozenset({"backend", "backend_fallback", "interactive", "toolbar", "timezone"})
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # a tenth of the bytes, and text that can be searched
    "text.parse_math": False,  # a name may hold a dollar sign
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "hatch.linewidth": 0.7,
}


def _element(text: str, alt: str) -> str:
    text = text[text.index("<svg") :]
    # The metadata holds the time of day.
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # matplotlib's own style element would count for the whole page the picture stands in.
    text = re.sub(r"\s*<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", text, count=1, flags=re.DOTALL)
    text = text.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    said = html.escape(alt, quote=True)
    text = text.replace(
        "<svg ", f'<svg role="img" aria-label="{said}" stroke-linejoin="round" stroke-linecap="butt" ', 1
    )
    head, rest = text.split(">", 1)
    text = f"{head}>\n <title>{html.escape(alt)}</title>{rest}"
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def as_error(error: OSError, path: object) -> SkinnyError:
    """For a file or folder that cannot be written."""
    return SkinnyError(f"{path} cannot be written: {error.strerror or error}", "give another --out")
