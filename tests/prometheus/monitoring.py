"""The dashboards and rules of `manifests/monitoring`, as tests read them."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from operate.install.shipped_files import read_dashboards, read_rules

FOLDER = Path(__file__).parents[2] / "manifests" / "monitoring"
RULES_FILE = FOLDER / "prometheus" / "kvmesh.rules.yaml"
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0}
WINDOW = re.compile(r"\[(\d+m)\]")  # the only way in which the rules write one
Json = dict[str, Any]

BOARDS = read_dashboards()
RULES = read_rules()


def panels_of(board: Json) -> list[Json]:
    """Return the panels that show something: headings of rows do not."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def exprs_of(board: Json) -> list[str]:
    """Return the expressions of all panels; a query of Redis has none."""
    return [target["expr"] for panel in panels_of(board) for target in panel["targets"] if "expr" in target]


def alerts() -> list[Json]:
    return [rule for rule in _every_rule() if "alert" in rule]


def recordings() -> list[Json]:
    return [rule for rule in _every_rule() if "record" in rule]


def _every_rule() -> Iterable[Json]:
    return (rule for group in RULES["groups"] for rule in group["rules"])


def seconds(duration: str) -> float:
    """Return what `90s`, `5m` or `500ms` says."""
    number, unit = re.fullmatch(r"(\d+)(ms|s|m)", duration).groups()  # type: ignore[union-attr]
    return int(number) * SECONDS[unit]


def shorter_rules(divided_by: float) -> Json:
    """Return the rules with every interval, window and wait so many times shorter."""

    def shorter(duration: str) -> str:
        return f"{seconds(duration) / divided_by * 1000:.0f}ms"

    def changed(rule: Json) -> Json:
        expr = WINDOW.sub(lambda found: f"[{shorter(found[1])}]", rule["expr"])
        return {**rule, "expr": expr, **({"for": shorter(rule["for"])} if "for" in rule else {})}

    return {
        "groups": [
            {**group, "interval": shorter(group["interval"]), "rules": [changed(rule) for rule in group["rules"]]}
            for group in RULES["groups"]
        ]
    }
