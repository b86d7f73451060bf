"""SVG, as the figures of the documentation are drawn in it."""

from __future__ import annotations

from collections.abc import Sequence

INK, QUIET, PAPER = "#1f2933", "#5a6772", "#ffffff"
HOST, DEVICE, OUTSIDE = "#e3edf7", "#fbe9d7", "#eef0f2"
BORDER = {HOST: "#4a7fb0", DEVICE: "#c7813a", OUTSIDE: "#8a949e"}
OWNERS = {"A": "#4a90c4", "B": "#e08a3c", "C": "#5aa469"}
FONT = "Helvetica, Arial, sans-serif"


class Drawing:
    """SVG elements on a white page; lengths in pixels, y downwards.

    Args:
        width, height: Of the page.
        title: Its title element, for screen readers.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str, line: str = "none", r: float = 6
    ) -> None:
        """Draws a rectangle.

        Args:
            x, y: Its upper left corner.
            w, h: Its size.
            fill: Colour inside.
            line: Colour of the border.
            r: Radius of the corners.
        """
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r:g}" '
            f'fill="{fill}" stroke="{line}" stroke-width="1.5"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        colour: str = INK,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        """Writes text.

        Args:
            x, y: Where on its base line it is anchored.
            words: The text.
            size: Of the font.
            colour: Of the letters.
            anchor: What of it is at x, as SVG's `text-anchor`.
            bold: Whether it is bold.
        """
        weight = ' font-weight="bold"' if bold else ""
        words = words.replace("&", "&amp;").replace("<", "&lt;")
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour}" '
            f'text-anchor="{anchor}"{weight}>{words}</text>'
        )

    def note(self, x: float, y: float, *lines: str) -> None:
        """Writes lines of small print from x to the right."""
        for i, words in enumerate(lines):
            self.text(x, y + 17 * i, words, size=12, colour=QUIET, anchor="start")

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, name: str, *notes: str
    ) -> None:
        """Draws a box with a bold name and lines of small print, centred.

        Args:
            x, y: Its upper left corner.
            w, h: Its size.
            fill: One of BORDER's colours.
            name: What it shows.
            *notes: The lines below.
        """
        self.rect(x, y, w, h, fill, BORDER[fill])
        top = y + h / 2 + 5 - 8 * len(notes)
        self.text(x + w / 2, top, name, bold=True)
        for i, note in enumerate(notes):
            self.text(x + w / 2, top + 17 * (i + 1), note, size=11.5, colour=QUIET)

    def arrow(self, *points: tuple[float, float], colour: str = INK, dashed: bool = False) -> None:
        """Draws a line through the points, with a head at the last one."""
        (x0, y0), (x1, y1) = points[-2:]
        length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        x, y = base = (x1 - 9 * ux, y1 - 9 * uy)
        head = [(x1, y1), (x - 4 * uy, y + 4 * ux), (x + 4 * uy, y - 4 * ux)]
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{_points([*points[:-1], base])}" fill="none" '
            f'stroke="{colour}" stroke-width="1.6"{dash}/>'
        )
        self._parts.append(f'<polygon points="{_points(head)}" fill="{colour}"/>')

    def svg(self) -> str:
        """The document."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img" font-family="{FONT}">'
        )
        page = f'<rect width="{self.width}" height="{self.height}" fill="{PAPER}"/>'
        return "\n".join([head, f"<title>{self.title}</title>", page, *self._parts, "</svg>\n"])


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.4g},{y:.4g}" for x, y in points)
