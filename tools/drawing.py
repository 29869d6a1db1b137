"""Boxes, arrows and words as an SVG. Pure: equal pictures are equal text.

The background is opaque, so that a picture can be read on a light and on a dark page.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
INK, LINE, PAPER, FRAME = "#1f2430", "#5b6475", "#ffffff", "#d7dbe3"
# tone -> fill, border
TONES = {
    "plain": ("#f4f5f8", "#9aa3b2"),
    "envoy": ("#e8f1fd", "#3b7dd8"),
    "picker": ("#ece9fb", "#6554c0"),
    "pod": ("#e6f5ec", "#2e8b57"),
    "idle": ("#f4f5f8", "#9aa3b2"),
    "redis": ("#fdeeea", "#d2553a"),
    "step": ("#ffffff", "#a79fe0"),
}
LINE_HEIGHT = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A rectangle with a title and lines of text below it."""

    at: Point  # its upper left corner
    size: Point
    title: str = ""
    lines: tuple[str, ...] = ()
    tone: str = "plain"
    middle: bool = False  # the text in the middle of its height, else at the top

    def svg(self) -> str:
        """Return its elements."""
        (x, y), (width, height) = self.at, self.size
        fill, border = TONES[self.tone]
        parts = [
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" fill="{fill}" stroke="{border}"'
            ' stroke-width="1.4"/>'
        ]
        rows = [(self.title, True)] if self.title else []
        rows += [(line, False) for line in self.lines]
        first = y + (height - LINE_HEIGHT * len(rows)) / 2 + 13 if self.middle else y + 21
        for row, (text, bold) in enumerate(rows):
            middle = Words(at=(x + width / 2, first + LINE_HEIGHT * row), text=text, bold=bold, anchor="middle")
            parts.append(middle.svg())
        return "\n".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """One line of text."""

    at: Point  # of its base line
    text: str
    bold: bool = False
    anchor: str = "start"  # start, middle, end
    size: int = 13
    tone: str = ""  # "": ink

    def svg(self) -> str:
        """Return its element."""
        x, y = self.at
        fill = TONES[self.tone][1] if self.tone else INK
        weight = ' font-weight="bold"' if self.bold else ""
        return (
            f'<text x="{x:g}" y="{y:g}" font-size="{self.size}" text-anchor="{self.anchor}" fill="{fill}"{weight}>'
            f"{escape(self.text, quote=False)}</text>"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """A line through points, with a head at its end."""

    points: tuple[Point, ...]
    tone: str = ""  # "": grey
    dashed: bool = False
    both: bool = False  # heads at both ends
    thick: bool = False

    def svg(self) -> str:
        """Return its elements."""
        color = TONES[self.tone][1] if self.tone else LINE
        path = " ".join(f"{x:g},{y:g}" for x, y in self.points)
        dash = ' stroke-dasharray="5 4"' if self.dashed else ""
        width = 4 if self.thick else 1.7
        parts = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width:g}"{dash}/>']
        parts.append(_head(self.points[-2], self.points[-1], color, self.thick))
        if self.both:
            parts.append(_head(self.points[1], self.points[0], color, self.thick))
        return "\n".join(parts)


def _head(before: Point, tip: Point, color: str, thick: bool) -> str:
    """Return the triangle at the end of a line; it goes a little beyond the point, over the end of the line."""
    length, half = (15, 8) if thick else (10, 4.5)
    turn = math.atan2(tip[1] - before[1], tip[0] - before[0])
    tip = (tip[0] + 2 * math.cos(turn), tip[1] + 2 * math.sin(turn))
    back = (tip[0] - length * math.cos(turn), tip[1] - length * math.sin(turn))
    side = (half * math.sin(turn), -half * math.cos(turn))
    corners = [tip, (back[0] + side[0], back[1] + side[1]), (back[0] - side[0], back[1] - side[1])]
    return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}" fill="{color}"/>'


def drawing(*, size: Point, title: str, about: str, parts: Iterable[Box | Words | Arrow]) -> str:
    """Return the picture; `about` says in words what it shows, for readers who do not see it."""
    width, height = size
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-labelledby="title about" font-family="{FONT}">'
    )
    frame = (
        f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="10" fill="{PAPER}" stroke="{FRAME}"/>'
    )
    names = f'<title id="title">{escape(title)}</title>\n<desc id="about">{escape(about)}</desc>'
    return "\n".join([head, names, frame, *(part.svg() for part in parts), "</svg>"]) + "\n"
