"""Recording rules and alerts as Prometheus reads them: a rules file, or the spec of a PrometheusRule. Pure."""

import re
from typing import Any

from extproc.install.alert_rules import ALERTS, Alert
from extproc.install.recording_rules import RECORDINGS

RUNBOOK = "https://github.com/kvmesh/kvmesh/blob/main/docs/guides/operations.md"
INTERVAL_SECONDS = 30.0
_RANGE = re.compile(r"\[(\d+)m\]")  # the only way in which our expressions write a window


def rule_groups(*, divided_by: float = 1) -> dict[str, Any]:
    """Return the content; `divided_by` makes every window and every wait so many times shorter, for tests."""
    interval = {"interval": _duration(INTERVAL_SECONDS / divided_by)}
    recorded = [{"record": rule.record, "expr": _shorter(rule.expr, divided_by)} for rule in RECORDINGS]
    groups = [{"name": "kvmesh-recorded", **interval, "rules": recorded}]
    for name, alerts in ALERTS.items():
        rules = [_alert(alert, divided_by) for alert in alerts]
        groups.append({"name": f"kvmesh-{name}", **interval, "rules": rules})
    return {"groups": groups}


def _alert(alert: Alert, divided_by: float) -> dict[str, Any]:
    wait = {"for": _duration(alert.for_minutes * 60 / divided_by)} if alert.for_minutes else {}
    return {
        "alert": alert.name,
        "expr": _shorter(alert.expr, divided_by),
        **wait,
        "labels": {"severity": alert.severity.value},
        "annotations": {"summary": alert.summary, "runbook_url": f"{RUNBOOK}#{alert.anchor}"},
    }


def _shorter(expr: str, divided_by: float) -> str:
    return _RANGE.sub(lambda found: f"[{_duration(int(found[1]) * 60 / divided_by)}]", expr)


def _duration(seconds: float) -> str:
    if seconds % 60 == 0:
        return f"{seconds / 60:.0f}m"
    return f"{seconds:.0f}s" if seconds % 1 == 0 else f"{seconds * 1000:.0f}ms"
