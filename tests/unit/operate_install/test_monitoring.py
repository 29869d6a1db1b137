"""Dashboards and rules ask for what there is, Grafana and Prometheus can take them, and they are installed as they are.

What a metric is called and which labels it has is read from docs/reference/metrics.md, which other tests hold to the
processes; vLLM's metrics are those of the simulated pod.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from operate.install.render import monitoring_objects
from operate.install.shipped_files import DASHBOARDS
from podsim.wire.metrics_text import EngineState, PodMetrics
from tests.prometheus.monitoring import (
    BOARDS,
    FOLDER,
    RULES,
    Json,
    alerts,
    exprs_of,
    panels_of,
    recordings,
    seconds,
    shorter_rules,
)
from tests.unit.operate_install.sample_plans import plan

ROOT = Path(__file__).parents[3]
LONGEST_CONFIG_MAP_BYTES = 1 << 20
COLUMNS = 24
OF_THE_PLACE = {"cluster", "namespace"}  # of the operator, or of a Prometheus of many clusters; a series may lack them
OF_THE_SCRAPE = {"instance", "job", "pool"} | OF_THE_PLACE  # a series of a single pool may lack `pool`
OF_PROMETHEUS = {
    "up": OF_THE_SCRAPE,
    "process_cpu_seconds_total": OF_THE_SCRAPE,
    "ALERTS": {"alertname", "alertstate", "cluster"},
}
SOURCES = {"prometheus": "prometheus", "redis": "redis-datasource"}  # variable -> type of data source
NAME = r"[a-zA-Z_]\w*"
METRIC = re.compile(r"\b(?:kvmesh_\w+|vllm:\w+|process_\w+|up\b|ALERTS\b)(?![:\w])")
SELECTOR = re.compile(rf"((?:{NAME}:)*{NAME})\{{([^}}]*)\}}")
LABEL_LIST = re.compile(r"\b(?:by|on|without|ignoring) ?\(([^)]*)\)")
BOARD = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
ALERTS = pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])


def known_metrics() -> dict[str, set[str]]:
    """Return the labels of each series' name: of kvmesh, of a pod, and of those that Prometheus makes."""
    known = dict(OF_PROMETHEUS)
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    for name, kind, labels in re.findall(r"^\| `(kvmesh_\w+)` \| (\w+)[^|]* \| ([^|]*) \|", page, re.MULTILINE):
        known |= _series(name, kind, set(re.findall(NAME, labels)) | OF_THE_SCRAPE)
    pod = PodMetrics(model="tiny", max_model_len=2048, block_size=16, total_blocks=100, started_at=0.0)
    state = EngineState(running=1, waiting=1, kv_usage=0.5, prefix_queries=1, prefix_hits=1, preemptions=1)
    for family in text_string_to_metric_families(pod.render(state).decode()):
        for sample in family.samples:
            known.setdefault(sample.name, set(OF_THE_SCRAPE)).update(sample.labels)
    return known


def _series(name: str, kind: str, labels: set[str]) -> dict[str, set[str]]:
    if kind != "histogram":
        return {name: labels}
    return {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}


KNOWN = known_metrics()
RECORDED = {rule["record"] for rule in recordings()}


def asked() -> Iterator[tuple[str, str]]:
    """Return every expression with its place: panels, variables, annotations, rules."""
    for uid, board in BOARDS.items():
        yield from ((f"{uid}: {expr[:60]}", expr) for expr in exprs_of(board))
        yield from ((f"{uid}: annotation", each["expr"]) for each in board["annotations"]["list"])
    for rule in [*alerts(), *recordings()]:
        yield rule.get("alert") or rule["record"], rule["expr"]


def test_no_rule_counts_what_a_policy_in_shadow_has_not_done() -> None:
    assert not [rule for rule in [*alerts(), *recordings()] if "shadow" in rule["expr"]]


ASKED = pytest.mark.parametrize("expr", [expr for _, expr in asked()], ids=[place for place, _ in asked()])


@ASKED
def test_every_metric_that_is_asked_for_exists(expr: str) -> None:
    recorded = set(re.findall(r"\w+:kvmesh_\w+:\w+", expr))
    assert recorded <= RECORDED
    bare = re.sub(r"\w+:kvmesh_\w+:\w+|\"[^\"]*\"", "", expr)
    metrics = set(METRIC.findall(bare))
    assert metrics or recorded
    assert metrics <= set(KNOWN)


@ASKED
def test_every_label_that_is_asked_for_exists(expr: str) -> None:
    for name, matchers in SELECTOR.findall(expr):
        labels = set(re.findall(rf"({NAME})\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', "", matchers)))
        of_recorded = set(name.split(":")[0].split("_")) | {"cluster"}  # as an external label
        assert labels <= (of_recorded if name in RECORDED else KNOWN[name]), name
    recorded = [{"cluster", *name.split(":")[0].split("_")} for name in re.findall(r"\w+:kvmesh_\w+:\w+", expr)]
    there = set().union(
        *recorded, *(KNOWN[name] for name in METRIC.findall(re.sub(r'"[^"]*"', "", expr)) if name in KNOWN)
    )
    listed = {label for labels in LABEL_LIST.findall(expr) for label in re.findall(NAME, labels)}
    assert listed <= there


@BOARD
def test_legends_name_labels_that_the_expression_leaves(board: Json) -> None:
    for panel in panels_of(board):
        for target in panel["targets"]:
            named = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            left = {
                label
                for labels in re.findall(r"\bby \(([^)]*)\)", target.get("expr", ""))
                for label in re.findall(NAME, labels)
            }
            raw = set().union(*(KNOWN.get(name, set()) for name in METRIC.findall(target.get("expr", ""))))
            assert named <= (left or raw), panel["title"]


@BOARD
def test_variables_ask_for_metrics_and_labels_that_exist(board: Json) -> None:
    offered: list[str] = []
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((\w+)(?:\{([^}]*)\})?, (\w+)\)", variable["definition"])
            assert found is not None
            assert variable["query"]["query"] == variable["definition"]
            assert found[3] in KNOWN[found[1]]
            # what is chosen above narrows what is offered
            named = re.findall(r"(\w+)=~\"\$(\w+)\"", found[2] or "")
            assert named == [(each, each) for each in ("cluster", "namespace") if each in offered]
            offered.append(variable["name"])


@BOARD
def test_a_place_is_chosen_once_for_all_panels_and_need_not_be_there(board: Json) -> None:
    variables = {each["name"]: each for each in board["templating"]["list"]}
    for name in sorted(OF_THE_PLACE):
        assert (variables[name]["includeAll"], variables[name]["allValue"]) == (True, ".*")  # which an absent label is
    for expr in exprs_of(board):
        for metric in METRIC.findall(re.sub(r'"[^"]*"', '""', expr)):
            wanted = 'cluster=~"$cluster"' + ("" if metric.startswith("vllm:") else ', namespace=~"$namespace"')
            assert re.findall(rf"{metric}(?![\w:])", expr) == re.findall(
                rf"{metric}(?=\{{{re.escape(wanted)})", expr
            ), expr
        # replicas of one cluster show the same; two clusters do not
        for outer, inner in re.findall(r"\b(sum|count)(?: by \([^)]*\))? ?\(+ ?max by \((\w+)", expr):
            assert inner == "cluster", (outer, expr)


@BOARD
def test_links_lead_to_what_there_is(board: Json) -> None:
    offered = {each["name"] for each in board["templating"]["list"]}
    runbooks = {f"Runbook: {alert['alert']}": alert["annotations"]["runbook_url"] for alert in alerts()}
    for panel in panels_of(board):
        for link in panel.get("links", ()):
            assert (link["url"], link["targetBlank"]) == (runbooks[link["title"]], True)
        exprs = " ".join(target.get("expr", "") for target in panel["targets"])
        for link in panel["fieldConfig"]["defaults"].get("links", ()):
            used = set(re.findall(r"\$\{(\w+)[:}]", link["url"])) - {"__url_time_range"}
            assert used <= offered, link
            for label in re.findall(r"\$\{__(?:field\.labels|data\.fields)\.(\w+)\}", link["url"]):
                assert re.search(rf"by \([^)]*\b{label}\b", exprs), (panel["title"], link)
            if found := re.match(r"/d/([\w-]+)\?var-(\w+)=", link["url"]):
                theirs = {each["name"] for each in BOARDS[found[1]]["templating"]["list"]}
                assert {found[2], *(used - {"page"})} <= theirs
            else:
                view = link["url"].removeprefix("${page}/#/")
                assert (ROOT / "extproc" / "pages" / "page" / f"view_{view}.js").is_file()


@BOARD
def test_every_pod_and_class_leads_somewhere(board: Json) -> None:
    for panel in panels_of(board):
        legends = " ".join(target.get("legendFormat", "") for target in panel["targets"])
        urls = " ".join(link["url"] for link in panel["fieldConfig"]["defaults"].get("links", ()))
        assert ("{{class}}" in legends) <= ("/d/kvmesh-priorities?var-class=" in urls), panel["title"]
        assert ("{{endpoint}}" in legends) <= ("/#/pods" in urls), panel["title"]


@BOARD
def test_what_needs_a_redis_data_source_says_so(board: Json) -> None:
    for panel in panels_of(board):
        kinds = {target["datasource"]["type"] for target in panel["targets"]}
        assert panel["title"].endswith(" (Redis)") == (kinds == {"redis-datasource"}), panel["title"]


@BOARD
def test_every_variable_that_is_used_is_offered(board: Json) -> None:
    offered = {each["name"] for each in board["templating"]["list"] if each["type"] == "query"}
    used = set(re.findall(r"\$(\w+)", " ".join(exprs_of(board)))) - {"__rate_interval", "__range"}
    assert used == offered


@BOARD
def test_data_sources_are_chosen_at_the_top(board: Json) -> None:
    chosen = {each["name"]: each["query"] for each in board["templating"]["list"] if each["type"] == "datasource"}
    users = [*panels_of(board), *(target for panel in panels_of(board) for target in panel["targets"])]
    users += board["annotations"]["list"] + [each for each in board["templating"]["list"] if each["type"] == "query"]
    used = {each["datasource"]["uid"]: each["datasource"]["type"] for each in users}
    assert used == {f"${{{name}}}": kind for name, kind in chosen.items()}
    assert chosen.items() <= SOURCES.items()


@BOARD
def test_panels_do_not_overlap_and_stay_inside(board: Json) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= COLUMNS, panel["title"]
        taken |= cells


@BOARD
def test_panels_have_a_number_and_a_title_each_and_say_what_they_show(board: Json) -> None:
    for key, panels in (("id", board["panels"]), ("title", panels_of(board))):
        values = [panel[key] for panel in panels]
        assert len(set(values)) == len(values)
    assert [panel["title"] for panel in panels_of(board) if not panel["description"].endswith(".")] == []
    for panel in panels_of(board):
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


@BOARD
def test_panels_use_the_words_of_the_glossary_and_the_page(board: Json) -> None:
    for panel in panels_of(board):
        for words in (panel["title"], panel.get("description", "")):
            assert not re.search(
                r"time to the first token|between tokens|token to token|under way", words, re.IGNORECASE
            )
        assert not re.search(
            r"first token|in its cache|cached share|open (requests|exchanges)", panel["title"], re.IGNORECASE
        )


@BOARD
def test_units_are_those_of_what_is_shown(board: Json) -> None:
    for panel in panels_of(board):
        unit = panel["fieldConfig"]["defaults"]["unit"]
        assert unit in {"short", "percentunit", "s", "bytes", "reqps", "cps", "none"}, panel["title"]
        quantiles = any("histogram_quantile" in target.get("expr", "") for target in panel["targets"])
        if quantiles and "_seconds_bucket" in panel["targets"][0]["expr"]:
            assert unit == "s", panel["title"]


def test_uids_stay_and_are_the_names_of_the_files() -> None:
    assert DASHBOARDS == ("kvmesh-overview", "kvmesh-cache", "kvmesh-priorities", "kvmesh-prefill", "kvmesh-pod")
    assert [board["uid"] for board in BOARDS.values()] == list(DASHBOARDS)
    assert {path.stem for path in (FOLDER / "grafana" / "dashboards").glob("*")} == set(DASHBOARDS)


def test_names_of_rules_are_unique() -> None:
    names = [rule["alert"] for rule in alerts()] + [rule["record"] for rule in recordings()]
    assert len(set(names)) == len(names)


@ALERTS
def test_every_alert_has_an_urgency_a_summary_and_a_link_to_its_paragraph(alert: Json) -> None:
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert alert["annotations"]["summary"].endswith(".")
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert page == "https://github.com/kvmesh/kvmesh/blob/main/docs/guides/operations.md"
    assert anchor == alert["alert"].lower()
    assert f"\n### {alert['alert']}\n" in (ROOT / "docs" / "guides" / "operations.md").read_text(encoding="utf-8")
    assert ("for" in alert) == (alert["alert"] != "KvmeshRedisEvicted")


def test_the_files_for_a_server_of_ones_own_name_the_rules_and_the_folder_of_dashboards() -> None:
    prometheus = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yaml").read_text())
    assert prometheus["rule_files"] == ["kvmesh.rules.yaml"]
    assert [each["job_name"] for each in prometheus["scrape_configs"]] == ["kvmesh-picker", "kvmesh-indexer", "vllm"]
    sources = yaml.safe_load((FOLDER / "grafana" / "provisioning" / "datasources" / "kvmesh.yaml").read_text())
    assert {each["type"] for each in sources["datasources"]} == set(SOURCES.values())


def test_nothing_is_installed_unless_it_is_asked_for() -> None:
    assert monitoring_objects(plan()) == []


def test_monitoring_installs_monitors_rules_and_one_config_map_a_dashboard() -> None:
    objects = monitoring_objects(plan(monitoring=True))
    assert [(each["kind"], each["metadata"]["name"]) for each in objects] == [
        ("ServiceMonitor", "kvmesh-picker"),
        ("ServiceMonitor", "kvmesh-indexer"),
        ("PrometheusRule", "kvmesh-rules"),
        *(("ConfigMap", f"{uid}-dashboard") for uid in DASHBOARDS),
    ]
    assert objects[2]["spec"] == RULES
    for (uid, board), config_map in zip(BOARDS.items(), objects[3:], strict=True):
        assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
        ((name, text),) = config_map["data"].items()
        assert (name, json.loads(text)) == (f"{uid}.json", board)
        assert len(text.encode()) < LONGEST_CONFIG_MAP_BYTES


def test_our_labels_win_over_those_of_the_target() -> None:
    monitors = [each for each in monitoring_objects(plan(monitoring=True)) if each["kind"] == "ServiceMonitor"]
    assert [end["honorLabels"] for monitor in monitors for end in monitor["spec"]["endpoints"]] == [True, True]


def test_times_are_divided_for_tests_and_nothing_else() -> None:
    long, short = yaml.safe_dump(RULES), yaml.safe_dump(shorter_rules(60))
    assert long.count("[5m]") == short.count("[5000ms]") > 20
    assert "[5m]" not in short
    assert long.count("for: 10m") == short.count("for: 10000ms") > 0
    assert seconds("10m") == 60 * seconds("10000ms")
