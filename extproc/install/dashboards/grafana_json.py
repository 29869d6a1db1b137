"""A `Dashboard` as the JSON that Grafana imports and provisions (schema 39: Grafana 10.4 and later). Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from extproc.install.dashboards.panels import Dashboard, Kind, Panel, Query, RedisQuery, Row, Unit, Variable

SCHEMA_VERSION = 39
PROMETHEUS = {"type": "prometheus", "uid": "${prometheus}"}
REDIS = {"type": "redis-datasource", "uid": "${redis}"}
COLUMNS = 24
INFO, HASH = "info", "hgetall"

Json = dict[str, Any]


def grafana_json(dashboard: Dashboard) -> Json:
    """Return the dashboard; the data sources are chosen at its top, the first of their kind by default."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.says,
        "tags": ["kvmesh"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,  # the crosshair is shared: what happened at that moment elsewhere
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "title": "kvmesh",
                "type": "dashboards",
                "tags": ["kvmesh"],
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
            },
        ],
        "templating": {"list": list(_variables(dashboard))},
        "annotations": {"list": [_alerts_annotation()]},
        "panels": list(_laid_out(dashboard.rows)),
    }


def _variables(dashboard: Dashboard) -> Iterator[Json]:
    yield _data_source("prometheus", "Prometheus", "prometheus")
    if dashboard.uses_redis:
        yield _data_source("redis", "Redis of the index", "redis-datasource")
    for variable in dashboard.variables:
        yield _variable(variable)


def _data_source(name: str, label: str, kind: str) -> Json:
    return {"name": name, "label": label, "type": "datasource", "query": kind, "refresh": 1, "hide": 0}


def _variable(variable: Variable) -> Json:
    query = {"query": variable.values, "refId": variable.name}
    every = {"includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": PROMETHEUS,
        "query": query,
        "definition": variable.values,
        "refresh": 2,  # when the time range changes: pods come and go
        "sort": 1,
        **(every if variable.has_all else {"includeAll": False, "multi": False}),
    }


def _alerts_annotation() -> Json:
    return {
        "name": "Alerts",
        "datasource": PROMETHEUS,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Kvmesh.*", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{pool}} {{endpoint}} {{class}}",
        "step": "15s",
    }


def _laid_out(rows: Sequence[Row]) -> Iterator[Json]:
    """Panels from left to right and from top to bottom, a heading above each row."""
    number, top = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
            "panels": [],
        }
        top += 1
        left = tallest = 0
        for panel in row.panels:
            number += 1
            if left + panel.width > COLUMNS:
                top, left, tallest = top + tallest, 0, 0
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            yield _panel(panel, number=number, place=place)
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest


def _panel(panel: Panel, *, number: int, place: Json) -> Json:
    is_redis = isinstance(panel.queries[0], RedisQuery)
    source = REDIS if is_redis else PROMETHEUS
    transformations = _transformations(panel)
    return {
        "id": number,
        "type": panel.kind.value,
        "title": panel.title,
        "description": panel.says,
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": _field_defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": [_target(query, kind=panel.kind, at=at) for at, query in enumerate(panel.queries)],
        **({"transformations": transformations} if transformations else {}),
    }


def _transformations(panel: Panel) -> list[Json]:
    first = panel.queries[0]
    if isinstance(first, RedisQuery):
        if first.fields:
            return [{"id": "filterFieldsByName", "options": {"include": {"names": list(first.fields)}}}]
        is_wide = first.command[0] == HASH  # one column a field; there may be thousands
        return [{"id": "transpose", "options": {"firstFieldName": "field"}}] if is_wide else []
    if panel.kind is not Kind.TABLE:
        return []
    hidden = {"Time": True, "__name__": True, "job": True, "instance": True}
    return [{"id": "merge", "options": {}}, {"id": "organize", "options": {"excludeByName": hidden}}]


def _target(query: Query | RedisQuery, *, kind: Kind, at: int) -> Json:
    ref = {"refId": chr(ord("A") + at), "datasource": REDIS if isinstance(query, RedisQuery) else PROMETHEUS}
    if isinstance(query, Query):
        is_instant = kind is not Kind.LINES
        legend = {"legendFormat": query.legend or "__auto"}
        table = {"format": "table"} if kind is Kind.TABLE else {}
        return {**ref, "expr": query.expr, **legend, "instant": is_instant, "range": not is_instant, **table}
    name, *words = query.command
    if name == INFO:
        return {**ref, "type": "command", "command": INFO, "section": words[0], "query": ""}
    if name == HASH:
        return {**ref, "type": "command", "command": HASH, "keyName": words[0], "query": ""}
    return {**ref, "type": "cli", "query": " ".join(query.command)}


def _field_defaults(panel: Panel) -> Json:
    defaults: Json = {"unit": panel.unit.value, "thresholds": {"mode": "absolute", "steps": _steps(panel)}}
    if panel.unit is Unit.SHARE or panel.highest is not None:
        defaults |= {"min": 0, "max": 1 if panel.highest is None else panel.highest}
    if panel.kind is Kind.LINES:
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 25 if panel.stacked else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none"},
            **({"thresholdsStyle": {"mode": "line"}} if panel.yellow is not None else {}),
        }
        if not panel.stacked and panel.unit is not Unit.SHARE:
            defaults.setdefault("min", 0)
    return defaults


def _steps(panel: Panel) -> list[Json]:
    if panel.yellow is None or panel.red is None:
        return [{"color": "blue" if panel.kind is Kind.NUMBER else "green", "value": None}]
    if panel.red < panel.yellow:  # more is better
        return [
            {"color": "red", "value": None},
            {"color": "yellow", "value": panel.red},
            {"color": "green", "value": panel.yellow},
        ]
    return [
        {"color": "green", "value": None},
        {"color": "yellow", "value": panel.yellow},
        {"color": "red", "value": panel.red},
    ]


def _options(panel: Panel) -> Json:
    is_redis = isinstance(panel.queries[0], RedisQuery)
    reduced = {"calcs": ["lastNotNull"], "fields": "/.*/" if is_redis else "", "values": False}
    if panel.kind is Kind.NUMBER:
        return {"reduceOptions": reduced, "colorMode": "value", "graphMode": "none", "textMode": "auto"}
    if panel.kind is Kind.BARS:
        return {"reduceOptions": reduced, "orientation": "horizontal", "displayMode": "basic"}
    if panel.kind is Kind.TABLE:
        return {"showHeader": True, "cellHeight": "sm"}
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
