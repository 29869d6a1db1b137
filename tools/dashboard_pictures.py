"""Draws the dashboards of manifests/monitoring from a running Prometheus and Redis, without Grafana.

`python -m tools.dashboard_pictures --prometheus URL --redis URL FOLDER` writes a PNG
for each dashboard. Panels of one pod show the first that there is, or the one of `--endpoint`.
"""

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import redis

from operate.install.shipped_files import read_dashboards
from tools.dashboard_drawing import Json, Line, draw

SCRAPES_OF_A_RATE = 4  # as Grafana's $__rate_interval
POINTS = 120  # of a series
OPEN_SECONDS = 30.0


class PrometheusPages:
    """The HTTP API of a Prometheus, as Grafana asks it."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def range(self, expr: str, *, seconds: float) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Return the series of the last seconds: labels and points."""
        now = time.time()
        found = self._get("query_range", query=expr, start=now - seconds, end=now, step=max(seconds / POINTS, 0.1))
        return [(each["metric"], [(float(at), float(value)) for at, value in each["values"]]) for each in found]

    def instant(self, expr: str) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Return the series as they are now."""
        found = self._get("query", query=expr)
        return [(each["metric"], [(float(each["value"][0]), float(each["value"][1]))]) for each in found]

    def _get(self, path: str, **parameters: object) -> list[Any]:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=OPEN_SECONDS) as answer:  # noqa: S310
            result: list[Any] = json.load(answer)["data"]["result"]
        return result


def as_grafana_asks(expr: str, values: Mapping[str, str]) -> str:
    """Return the expression with its variables' values. Raise ValueError where one has none."""
    for name in sorted(values, key=len, reverse=True):
        expr = expr.replace(f"${name}", values[name])
    if left := re.search(r"\$\w+", expr):
        raise ValueError(f"{left[0]} has no value: {expr}")
    return expr


def usual_values(*, scrape_seconds: float, shown_seconds: float, endpoint: str) -> dict[str, str]:
    """Return what Grafana would put in: every variable at "All", but for the pod of a dashboard of one."""
    everything = dict.fromkeys(("cluster", "namespace", "pool", "class"), ".*")
    interval = f"{SCRAPES_OF_A_RATE * scrape_seconds * 1000:.0f}ms"
    times = {"__rate_interval": interval, "__range": f"{shown_seconds:.0f}s"}
    return everything | times | {"endpoint": endpoint}


def legend_of(target: Json, labels: Mapping[str, str]) -> str:
    """Return a series' name as the panel writes it."""
    text = str(target.get("legendFormat", "")).removeprefix("__auto")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), text)


def redis_lines(server: Any, panel: Json, target: Json) -> list[Line]:
    """Return the fields that a panel shows of its command's answer, by a client of Redis. Raise KeyError for a lack."""
    if target["type"] == "cli":
        answer: Any = server.execute_command(*target["query"].split())
    else:
        answer = server.execute_command(target["command"], target.get("section") or target["keyName"])
    fields = answer if isinstance(answer, dict) else {"": answer}
    filters = [each for each in panel.get("transformations", ()) if each["id"] == "filterFieldsByName"]
    names = filters[0]["options"]["include"]["names"] if filters else fields
    return [_field(name, fields[name]) for name in names]


def _field(name: str, value: object) -> Line:
    text = str(value)
    try:
        number = float(text)
    except ValueError:
        return Line(legend=name, labels={"text": text}, points=((0.0, 0.0),))  # it is shown, not drawn
    return Line(legend=name, labels={}, points=((0.0, number),))


def panel_lines(
    panel: Json,
    *,
    prometheus: PrometheusPages,
    server: Any,
    values: Mapping[str, str],
    seconds: float,
) -> list[Line]:
    """Return what a panel's queries bring; of Redis nothing where none is given."""
    lines: list[Line] = []
    for target in panel["targets"]:
        if "expr" not in target:
            lines += redis_lines(server, panel, target) if server is not None else []
            continue
        expr = as_grafana_asks(target["expr"], values)
        is_range = panel["type"] == "timeseries"
        found = prometheus.range(expr, seconds=seconds) if is_range else prometheus.instant(expr)
        lines += [Line(legend=legend_of(target, labels), labels=labels, points=points) for labels, points in found]
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(prog="python -m tools.dashboard_pictures", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures are written")
    parser.add_argument("--prometheus", required=True, help="address of a Prometheus that scrapes kvmesh")
    parser.add_argument("--redis", help="address of the index; without it the panels of Redis are empty")
    parser.add_argument("--dashboard", action="append", help="uid of a dashboard; may be repeated (default: all)")
    parser.add_argument("--seconds", type=float, default=900.0, help="how much is shown, up to now")
    parser.add_argument("--scrape-seconds", type=float, default=15.0, help="how often Prometheus scrapes")
    parser.add_argument("--endpoint", help="the pod of the dashboard of one pod")
    parser.add_argument("--rows", type=int, help="so many rows of Grafana's grid alone")
    given = parser.parse_args(arguments)
    prometheus = PrometheusPages(given.prometheus)
    server = redis.Redis.from_url(given.redis, decode_responses=True) if given.redis else None
    pods = [labels["endpoint"] for labels, _ in prometheus.instant("max by (endpoint) (kvmesh_open_bookings)")]
    endpoint = given.endpoint or next(iter(sorted(pods)), "")
    values = usual_values(scrape_seconds=given.scrape_seconds, shown_seconds=given.seconds, endpoint=endpoint)
    given.folder.mkdir(parents=True, exist_ok=True)
    for uid, board in read_dashboards().items():
        if given.dashboard and uid not in given.dashboard:
            continue
        data = {
            panel["title"]: panel_lines(
                panel, prometheus=prometheus, server=server, values=values, seconds=given.seconds
            )
            for panel in board["panels"]
            if panel["type"] != "row"
        }
        empty = sorted(title for title, lines in data.items() if not any(line.known for line in lines))
        path = given.folder / f"{uid}.png"
        draw(board, data, path, rows=given.rows)
        print(
            f"{path}: {len(data) - len(empty)} of {len(data)} panels have data" + (f"; none: {empty}" if empty else "")
        )


if __name__ == "__main__":
    main()
