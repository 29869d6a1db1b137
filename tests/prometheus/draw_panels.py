"""Draws what panels show as one SVG page a dashboard: Grafana's layout without Grafana, for eyes."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from tests.prometheus.monitoring import Json
from tests.prometheus.prometheus_process import Series

COLUMN, LINE = 60, 22  # pixels of Grafana's grid
COLOURS = ("#3274d9", "#e0752d", "#37872d", "#a352cc", "#c4162a", "#d6a400", "#0a8f8f", "#8f3bb8", "#6b7280", "#b45309")
INK, FAINT, BOX = "#1f2937", "#9ca3af", "#ffffff"
Drawn = Sequence[tuple[str, Series]]  # legend, data


def draw(board: Json, data: Mapping[str, Drawn]) -> str:
    """Return the page; `data` is by the panel's title."""
    placed = board["panels"]
    height = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in placed) * LINE + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{24 * COLUMN}" height="{height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="#f3f4f6"/>',
        f'<text x="12" y="24" font-size="18">{escape(board["title"])}</text>',
    ]
    for each in placed:
        at = each["gridPos"]
        x, y, w, h = at["x"] * COLUMN + 4, at["y"] * LINE + 40, at["w"] * COLUMN - 8, at["h"] * LINE - 6
        if each["type"] == "row":
            parts.append(
                f'<text x="{x + 4}" y="{y + 15}" font-size="14" font-weight="bold">{escape(each["title"])}</text>'
            )
            continue
        drawing = _drawing(each, data.get(each["title"], ()), w, h)
        title = f'<text x="8" y="16" font-size="12" font-weight="bold" fill="{INK}">{escape(each["title"])}</text>'
        box = f'<rect width="{w}" height="{h}" fill="{BOX}" stroke="#d1d5db" rx="3"/>'
        parts.append(f'<g transform="translate({x},{y})">{box}{title}{drawing}</g>')
    return "\n".join([*parts, "</svg>"])


def _drawing(panel: Json, drawn: Drawn, w: int, h: int) -> str:
    known = [(legend, series) for legend, series in drawn if any(not math.isnan(value) for _, value in series.points)]
    if not known:
        return f'<text x="{w / 2}" y="{h / 2}" text-anchor="middle" fill="#c4162a">No data</text>'
    if panel["type"] == "timeseries":
        return _lines(panel, known, w, h)
    if panel["type"] == "table":
        return _table(known, w, h)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    shown = [(legend, written(series.points[-1][1], unit)) for legend, series in known]
    lines = [
        f'<text x="{w / 2}" y="{34 + 26 * (at + 1)}" text-anchor="middle" font-size="{20 if len(shown) < 3 else 13}" '
        f'fill="{COLOURS[0]}">{escape(f"{legend} {value}".strip())}</text>'
        for at, (legend, value) in enumerate(shown[:6])
    ]
    return "".join(lines)


def _table(drawn: Drawn, w: int, h: int) -> str:
    rows = [
        f'<text x="8" y="{34 + 13 * at}" font-size="10" fill="{INK}">'
        f"{escape(', '.join(f'{k}={v}' for k, v in series.labels.items())[: w // 6])}: {series.points[-1][1]:g}</text>"
        for at, (_, series) in enumerate(drawn)
        if 34 + 13 * at < h
    ]
    return "".join(rows)


def _lines(panel: Json, drawn: Drawn, w: int, h: int) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    unit, is_stacked = defaults["unit"], defaults["custom"]["stacking"]["mode"] == "normal"
    left, top, right, bottom = 52, 26, w - 8, h - 44
    begin = min(series.points[0][0] for _, series in drawn)
    end = max(series.points[-1][0] for _, series in drawn)
    stacked: dict[float, float] = {}
    paths: list[tuple[str, list[tuple[float, float]]]] = []
    for legend, series in drawn:
        points = []
        for moment, value in series.points:
            if math.isnan(value) or math.isinf(value):
                continue
            base = stacked.get(moment, 0.0) if is_stacked else 0.0
            if is_stacked:
                stacked[moment] = base + value
            points.append((moment, base + value))
        paths.append((legend, points))
    values = [value for _, points in paths for _, value in points]
    highest = 1.0 if unit == "percentunit" else max([*values, 1e-9]) * 1.08
    lowest = min([*values, 0.0])
    parts = []
    for share in (0, 0.5, 1):
        y = bottom - (bottom - top) * share
        label = written(lowest + (highest - lowest) * share, unit)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{left - 4}" y="{y + 3}" text-anchor="end" font-size="9" fill="{FAINT}">{label}</text>')
    for at, (_, points) in enumerate(paths):
        line = " ".join(
            f"{left + (right - left) * (moment - begin) / max(end - begin, 1):.1f},"
            f"{bottom - (bottom - top) * (min(value, highest) - lowest) / (highest - lowest):.1f}"
            for moment, value in points
        )
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[at % 10]}" stroke-width="1.4"/>')
    x, y = 8.0, h - 26
    for at, (legend, _) in enumerate(paths):
        wide = 14 + 5.4 * len(legend)
        if x + wide > w:
            x, y = 8.0, y + 12
        if y > h - 4:
            break
        parts.append(f'<rect x="{x}" y="{y - 7}" width="8" height="8" fill="{COLOURS[at % 10]}"/>')
        parts.append(f'<text x="{x + 11}" y="{y}" font-size="9.5" fill="{INK}">{escape(legend)}</text>')
        x += wide + 8
    return "".join(parts)


def written(value: float, unit: str) -> str:
    """Return a number as Grafana writes it, roughly."""
    if unit == "percentunit":
        return f"{value * 100:.0f} %"
    if unit == "s":
        return f"{value * 1000:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    if unit == "bytes":
        return f"{value / 2**20:.3g} MiB"
    suffix = {"reqps": " req/s", "cps": "/s"}.get(unit, "")
    return f"{value / 1000:.3g}k{suffix}" if abs(value) >= 1_000 else f"{value:.3g}{suffix}"
