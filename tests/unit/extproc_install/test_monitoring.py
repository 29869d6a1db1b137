"""Dashboards and rules as files and as objects: equal to their tables, and what Grafana and Prometheus can take."""

import json
import re
from pathlib import Path

import pytest
import yaml

from extproc.install.alert_rules import ALERTS
from extproc.install.dashboards.all_dashboards import DASHBOARDS
from extproc.install.dashboards.grafana_json import grafana_json
from extproc.install.dashboards.panels import Dashboard, Query
from extproc.install.monitoring_files import monitoring_files, write
from extproc.install.monitoring_objects import monitoring_objects
from extproc.install.recording_rules import RECORDINGS
from extproc.install.rule_groups import rule_groups
from tests.unit.extproc_install.sample_plans import plan

FOLDER = Path(__file__).parents[3] / "manifests" / "monitoring"
LONGEST_CONFIG_MAP_BYTES = 1 << 20
BOARDS = pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)


def test_the_folder_is_what_the_tables_say() -> None:
    found = {str(path.relative_to(FOLDER)): path.read_text() for path in FOLDER.rglob("*") if path.is_file()}
    assert found == monitoring_files(), "run: python -m extproc.install.monitoring_files manifests/monitoring"


def test_writing_the_folder_removes_what_is_no_longer_made(tmp_path: Path) -> None:
    (tmp_path / "grafana").mkdir()
    (tmp_path / "grafana" / "old.json").write_text("{}")
    write(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(
        monitoring_files()
    )


def test_nothing_is_installed_unless_it_is_asked_for() -> None:
    assert monitoring_objects(plan()) == []


def test_monitoring_installs_monitors_rules_and_one_config_map_a_dashboard() -> None:
    objects = monitoring_objects(plan(monitoring=True))
    assert [(each["kind"], each["metadata"]["name"]) for each in objects] == [
        ("ServiceMonitor", "kvmesh-picker"),
        ("ServiceMonitor", "kvmesh-indexer"),
        ("PrometheusRule", "kvmesh-rules"),
        *(("ConfigMap", f"{board.uid}-dashboard") for board in DASHBOARDS),
    ]
    assert objects[2]["spec"] == rule_groups()
    for board, config_map in zip(DASHBOARDS, objects[3:], strict=True):
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, text),) = config_map["data"].items()
        assert (name, json.loads(text)) == (f"{board.uid}.json", grafana_json(board))
        assert len(text.encode()) < LONGEST_CONFIG_MAP_BYTES


def test_our_labels_win_over_those_of_the_target() -> None:
    monitors = [each for each in monitoring_objects(plan(monitoring=True)) if each["kind"] == "ServiceMonitor"]
    assert [end["honorLabels"] for monitor in monitors for end in monitor["spec"]["endpoints"]] == [True, True]


@BOARDS
def test_panels_do_not_overlap_and_stay_inside(board: Dashboard) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in grafana_json(board)["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


@BOARDS
def test_panels_have_one_title_each_and_say_what_they_show(board: Dashboard) -> None:
    assert len({panel.title for panel in board.panels}) == len(board.panels)
    assert [panel.title for panel in board.panels if not panel.says.endswith((".", "ready."))] == []
    numbers = [panel["id"] for panel in grafana_json(board)["panels"]]
    assert len(set(numbers)) == len(numbers)


@BOARDS
def test_every_variable_that_is_used_is_offered(board: Dashboard) -> None:
    exprs = [query.expr for panel in board.panels for query in panel.queries if isinstance(query, Query)]
    used = set(re.findall(r"\$(\w+)", " ".join(exprs))) - {"__rate_interval", "__range"}
    assert used == {variable.name for variable in board.variables}


def test_uids_stay() -> None:
    assert [board.uid for board in DASHBOARDS] == ["kvmesh-overview", "kvmesh-cache", "kvmesh-priorities", "kvmesh-pod"]


def test_names_of_rules_are_unique_and_recorded_ones_exist() -> None:
    alerts = [alert for alerts in ALERTS.values() for alert in alerts]
    names = [alert.name for alert in alerts] + [rule.record for rule in RECORDINGS]
    assert len(set(names)) == len(names)
    used = {name for alert in alerts for name in re.findall(r"\w+:\w+:\w+", alert.expr)}
    assert used <= {rule.record for rule in RECORDINGS}


def test_times_are_divided_for_tests_and_nothing_else() -> None:
    long, short = (yaml.safe_dump(rule_groups(divided_by=by)) for by in (1, 60))
    assert "[5m]" in long
    assert "[5m]" not in short
    assert long.replace("m]", "s]").count("[5s]") == short.count("[5s]")
    assert "for: 10m" in long
    assert "for: 10s" in short
