"""A canvas for the SVG files of these pages: boxes, lines, arrows and words, legible on light and on dark pages.

An image on a page follows what the reader's system prefers, not a switch of the page; so each has a ground of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

SANS = 'system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif'
STYLE = (
    f"""
text{{font-family:{SANS};font-size:13px}}.small{{font-size:11px}}.head{{font-weight:600}}
.code{{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:12px}}
rect{{rx:3px}}.none,.line,.grid{{fill:none}}
"""
    + """
text{fill:#1f2328}.dim{fill:#59636e}.ground{fill:#ffffff}.box{fill:#f6f8fa;stroke:#818b98}.none{stroke:#818b98}
.line{stroke:#59636e}.grid{stroke:#d1d9e0}.tip{fill:#59636e}
.a{fill:#b6d7f5;stroke:#3b78b0}.b{fill:#f9d3a8;stroke:#b56b14}.c{fill:#bfe3c2;stroke:#3c8a45}
.d{fill:#e3c8ee;stroke:#8a4fa3}.e{fill:#f5c2c2;stroke:#b04a4a}
@media (prefers-color-scheme: dark){
text{fill:#f0f6fc}.dim{fill:#9198a1}.ground{fill:#0d1117}.box{fill:#151b23;stroke:#656c76}.none{stroke:#656c76}
.line{stroke:#9198a1}.grid{stroke:#3d444d}.tip{fill:#9198a1}
.a{fill:#1d4468;stroke:#6cb0ec}.b{fill:#5e3a0f;stroke:#e0a050}.c{fill:#1f4d26;stroke:#6cc078}
.d{fill:#4b2b5a;stroke:#c48ee0}.e{fill:#612626;stroke:#e08585}
}
"""
)


class Canvas:
    """One drawing. Coordinates are in pixels from its upper left corner; ``kind`` names classes of the style."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, kind: str = "box", title: str = ""
    ) -> None:
        """A rectangle; its title shows under the pointer where the file itself is open."""
        told = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect class="{kind}" x="{x:.5g}" y="{y:.5g}" width="{width:.5g}" height="{height:.5g}">{told}</rect>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """One line of words, ``y`` at their foot."""
        at = f'x="{x:.5g}" y="{y:.5g}" class="{kind}" text-anchor="{anchor}"'
        self._parts.append(f"<text {at}>{escape(words)}</text>")

    def line(
        self, x1: float, y1: float, x2: float, y2: float, kind: str = "line", dashed: bool = False
    ) -> None:
        """A straight line."""
        more = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<line class="{kind}" x1="{x1:.5g}" y1="{y1:.5g}" x2="{x2:.5g}" y2="{y2:.5g}"{more}/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A line with a tip at its end."""
        self._parts.append(
            f'<line class="line" x1="{x1:.5g}" y1="{y1:.5g}" x2="{x2:.5g}" y2="{y2:.5g}" marker-end="url(#tip)"/>'
        )

    def circle(self, x: float, y: float, radius: float, kind: str, title: str = "") -> None:
        """A dot."""
        told = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<circle class="{kind}" cx="{x:.5g}" cy="{y:.5g}" r="{radius:.5g}">{told}</circle>'
        )

    def svg(self) -> str:
        """The file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" aria-label="{escape(self.title)}">'
        )
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>'
        )
        ground = f'<rect class="ground" width="{self.width}" height="{self.height}" rx="6"/>'
        title = f"<title>{escape(self.title)}</title>"
        return (
            "\n".join([head, title, f"<style>{STYLE}</style>", tip, ground, *self._parts, "</svg>"])
            + "\n"
        )


def write_all(drawings: Mapping[str, Callable[[], str]], folder: Path) -> None:
    """Write every drawing as NAME.svg, into ``folder`` or the one that the command line names."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in drawings.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")
