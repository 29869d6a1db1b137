"""Draws a Grafana dashboard from its JSON and the data of its panels: Grafana's grid without Grafana, for eyes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

Json = Mapping[str, Any]

COLUMNS = 24
COLUMN_INCHES, LINE_INCHES, DOTS_AN_INCH = 0.6, 0.34, 100
HEAD_LINES = 1.6  # of the grid, for the dashboard's title
INK, FAINT, EDGE, PAPER, MISSING = "#1f2937", "#6b7280", "#d1d5db", "#f3f4f6", "#c4162a"
COLOURS = ("#3274d9", "#e0752d", "#37872d", "#a352cc", "#c4162a", "#d6a400", "#0a8f8f", "#8f3bb8", "#6b7280", "#b45309")
MOST_LEGENDS = 9  # of a panel; the rest is counted
STACKED = "normal"

mpl.rcParams |= {"font.size": 7, "font.family": "DejaVu Sans", "axes.edgecolor": EDGE, "text.color": INK}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What one query of a panel has returned: a series, or a field of Redis."""

    legend: str
    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]  # unix seconds, value; of what is no series, one

    @property
    def known(self) -> Sequence[tuple[float, float]]:
        """The points that can be drawn."""
        return [(at, value) for at, value in self.points if math.isfinite(value)]


def draw(board: Json, data: Mapping[str, Sequence[Line]], path: Path, *, rows: int | None = None) -> None:
    """Write a picture of the dashboard; otherwise as `figure_of`."""
    figure_of(board, data, rows=rows).savefig(path, facecolor=PAPER, metadata={"Software": None})


def figure_of(board: Json, data: Mapping[str, Sequence[Line]], *, rows: int | None = None) -> Figure:
    """Draw the dashboard; `data` is by the panel's title, `rows` how many of the grid are drawn (default: all)."""
    panels = [each for each in board["panels"] if rows is None or _end(each) <= rows]
    lines = max(map(_end, panels)) + HEAD_LINES
    figure = Figure(figsize=(COLUMNS * COLUMN_INCHES, lines * LINE_INCHES), dpi=DOTS_AN_INCH, facecolor=PAPER)
    figure.text(0.008, 1 - 1.05 / lines, board["title"], fontsize=12, fontweight="bold")
    for panel in panels:
        at = panel["gridPos"]
        left, width = at["x"] / COLUMNS, at["w"] / COLUMNS
        bottom, height = 1 - (at["y"] + at["h"] + HEAD_LINES) / lines, at["h"] / lines
        if panel["type"] == "row":
            figure.text(left + 0.006, bottom + 0.3 * height, panel["title"], fontsize=9, fontweight="bold")
            continue
        gap = (0.003, 0.12 / lines)
        box = (left + gap[0], bottom + gap[1], width - 2 * gap[0], height - 2 * gap[1])
        _panel(figure, panel, data.get(panel["title"], ()), box, lines=lines)
    return figure


def _end(panel: Json) -> int:
    at = panel["gridPos"]
    return int(at["y"] + at["h"])


def _panel(figure: Figure, panel: Json, lines_of: Sequence[Line], box: tuple[float, ...], *, lines: float) -> None:
    left, bottom, width, height = box
    frame = figure.add_axes((left, bottom, width, height), xticks=[], yticks=[], facecolor="white")
    line = 1 / lines  # of the grid, as a share of the picture's height
    figure.text(left + 0.005, bottom + height - 0.62 * line, panel["title"], fontsize=7.5, fontweight="bold")
    known = [each for each in lines_of if each.known]
    if panel["type"] == "table" or (known and panel["type"] == "stat"):
        (_table if panel["type"] == "table" else _stat)(frame, panel, lines_of)
        return
    if not known:
        _nothing(frame, panel, "No data")
        return
    legend_lines = math.ceil(min(len(known), MOST_LEGENDS + 1) / 3)
    foot = (0.55 + 0.42 * legend_lines + 0.45) * line
    axes = figure.add_axes((left + 0.035, bottom + foot, width - 0.042, height - foot - 0.95 * line))
    _curves(axes, panel, known, y_of_legend=-(0.75 * line) / (height - foot - 0.95 * line))


def _curves(axes: Axes, panel: Json, known: Sequence[Line], *, y_of_legend: float) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults["unit"]
    base: dict[float, float] = {}
    tops: list[tuple[Any, list[float]]] = []  # what is in the legend, and its values as they are drawn
    for number, line in enumerate(known):
        colour = COLOURS[number % len(COLOURS)]
        moments = [datetime.fromtimestamp(at, UTC) for at, _ in line.known]
        values = [value for _, value in line.known]
        if defaults["custom"]["stacking"]["mode"] == STACKED:
            below = [base.get(at, 0.0) for at, _ in line.known]
            values = [under + value for under, value in zip(below, values, strict=True)]
            base.update({at: value for (at, _), value in zip(line.known, values, strict=True)})
            axes.fill_between(moments, below, values, color=colour, alpha=0.25, linewidth=0)  # type: ignore[arg-type]
        style = "." if len(values) == 1 else "-"
        (handle,) = axes.plot(moments, values, style, color=colour, linewidth=1.0)  # type: ignore[arg-type]
        tops.append((handle, values))
    drawn = [value for _, top in tops for value in top]
    highest = defaults.get("max", 1.1 * max(drawn) or 1.0)  # of nothing but zeros the axis ends at 1
    axes.set_ylim(defaults.get("min", 1.1 * min(0.0, *drawn)), highest)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, unit)))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(_clock))
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.6)
    axes.tick_params(length=0, labelcolor=FAINT, labelsize=6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    names = [_short(each.legend or panel["title"]) for each in known[:MOST_LEGENDS]]
    if len(known) > MOST_LEGENDS:
        names.append(f"and {len(known) - MOST_LEGENDS} more")
        tops = [*tops[:MOST_LEGENDS], (axes.plot([], [], " ")[0], [])]
    longest = max(map(len, names))
    axes.legend(
        [handle for handle, _ in tops],
        names,
        loc="upper left",
        bbox_to_anchor=(-0.06, y_of_legend),
        ncols=3 if longest <= 18 or panel["gridPos"]["w"] > 8 else 2,
        frameon=False,
        fontsize=6,
        handlelength=1.0,
        columnspacing=1.0,
        labelspacing=0.25,
        borderpad=0,
    )


def _stat(frame: Axes, panel: Json, lines_of: Sequence[Line]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    known = [each for each in lines_of if each.known][:4]
    for number, line in enumerate(known):
        value = line.known[-1][1]
        words = written(value, unit) if len(line.points) > 1 or not line.labels.get("text") else line.labels["text"]
        x = (number + 0.5) / len(known)
        frame.text(x, 0.38, words, ha="center", fontsize=17 if len(known) == 1 else 11, color=COLOURS[0])
        if len(known) > 1:
            frame.text(x, 0.16, _short(line.legend), ha="center", fontsize=6, color=FAINT)


def _table(frame: Axes, panel: Json, lines_of: Sequence[Line]) -> None:
    high = panel["gridPos"]["h"]
    shown = lines_of[: 2 * (high - 1)]
    for number, line in enumerate(shown):
        words = ", ".join(f"{name}={value}" for name, value in line.labels.items() if name not in {"job", "instance"})
        text = f"{line.legend}: {words or written(line.points[-1][1], 'none')}" if line.legend else words
        frame.text(0.015, 1 - (1.5 + 0.5 * number) / high, text[: panel["gridPos"]["w"] * 11], fontsize=5.5)
    if not shown:
        _nothing(frame, panel, "No rows")


def _nothing(frame: Axes, panel: Json, otherwise: str) -> None:
    """Say that there is nothing: in the panel's own words where that is as it should be."""
    words = panel["fieldConfig"]["defaults"].get("noValue")
    frame.text(0.5, 0.45, words or otherwise, ha="center", color=FAINT if words else MISSING, fontsize=8)


def _clock(value: float, _: object) -> str:
    return datetime.fromtimestamp(value * 86400, UTC).strftime("%H:%M:%S")


def _short(text: str) -> str:
    return text if len(text) <= 34 else f"{text[:33]}…"


def written(value: float, unit: str) -> str:
    """Return a number as Grafana writes it, roughly."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        return _scaled(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))
    if unit == "bytes":
        return _scaled(value, ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")))
    if unit == "none" and value.is_integer():
        return f"{value:.0f}"
    number = (
        f"{value / 1e6:.3g} M" if abs(value) >= 1e6 else f"{value / 1e3:.3g} k" if abs(value) >= 1e3 else f"{value:.3g}"
    )
    return f"{number}{ {'reqps': ' req/s', 'cps': ' /s'}.get(unit, '') }"


def _scaled(value: float, steps: Sequence[tuple[float, str]]) -> str:
    size, name = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return f"{value / size:.3g} {name}" if value else f"0 {steps[0][1] if steps[0][0] == 1.0 else steps[-1][1]}"
