"""Rules and dashboards by Prometheus' own tools: all are valid, each alert fires after its time, for its cause."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.prometheus.monitoring import BOARDS, RULES_FILE, Json, alerts, exprs_of, seconds, shorter_rules
from tests.prometheus.prometheus_process import program

MINUTES = 26  # the longest window and the longest wait
POD = 'endpoint="10.0.0.1:8000"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Series, one point a minute in promtool's notation: those by which it fires, and those by which it must not."""

    bad: Mapping[str, str]
    good: Mapping[str, str]


def steady(value: float) -> str:
    return f"{float(value)}+0x{MINUTES}"


def growing(by: float) -> str:
    return f"0+{by}x{MINUTES}"


def both(shared: Mapping[str, str], *, bad: Mapping[str, str], good: Mapping[str, str]) -> Case:
    return Case(bad={**shared, **bad}, good={**shared, **good})


def gauge(series: str, *, bad: float, good: float) -> Case:
    return Case(bad={series: steady(bad)}, good={series: steady(good)})


PICKS = {f"kvmesh_picks_total{{{POD}}}": growing(600)}
LEGS = f'kvmesh_prefill_legs_total{{{POD}, outcome="%s"}}'
BATCHES = f'kvmesh_indexer_batches_total{{{POD}, dp_rank="0"}}'
LAG = f'kvmesh_indexer_lag_seconds{{{POD}, dp_rank="0"}}'
LOOKUPS = 'kvmesh_pick_phase_seconds_bucket{phase="lookup", le="%s"}'
JUDGED = 'kvmesh_slo_requests_total{class="standard", target="all", outcome="%s", promise="%s"}'
PROMPTS = 'kvmesh_realised_prompt_tokens_total{model="m"}'
FOUND, PREDICTED = (f'kvmesh_realised_{name}_tokens_total{{model="m"}}' for name in ("cached", "predicted"))
BURST = {PROMPTS: 10_000, PREDICTED: 9_000, FOUND: 0}
PROMISED = {
    'kvmesh_slo_objective_ratio{class="standard"}': steady(0.99),
    'kvmesh_slo_promised_requests_total{class="standard"}': growing(100),
    'kvmesh_slo_judged_requests_total{class="standard"}': growing(2),
}

CASES: dict[str, Case] = {
    "KvmeshNoPickerReady": Case(
        bad={'kvmesh_ready{instance="a"}': steady(0)},
        good={'kvmesh_ready{instance="a"}': steady(0), 'kvmesh_ready{instance="b"}': steady(1)},
    ),
    "KvmeshNoReadyEndpoint": Case(
        bad={'kvmesh_decisions_total{outcome="no-pod-in-time"}': growing(1)},
        good={'kvmesh_decisions_total{outcome="shed"}': growing(100)},
    ),
    "KvmeshPoolFails": both(
        PICKS,
        bad={f"kvmesh_endpoint_failures_total{{{POD}}}": growing(60)},
        good={f"kvmesh_endpoint_failures_total{{{POD}}}": growing(6)},
    ),
    "KvmeshPrefillLegsFail": both(
        {LEGS % "answered": growing(60), LEGS % "client-left": growing(600), LEGS % "refused": growing(600)},
        bad={LEGS % "timed-out": growing(10), LEGS % "failed": growing(10)},
        good={LEGS % "timed-out": growing(10)},
    ),
    "KvmeshReplicaDown": Case(
        bad={'up{job="kvmesh-picker", instance="a"}': steady(0)},
        good={'up{job="kvmesh-picker", instance="a"}': steady(1), 'up{job="other"}': steady(0)},
    ),
    "KvmeshPicksDegraded": both(
        PICKS,
        bad={'kvmesh_degraded_decisions_total{missing="prefix-index-timeout"}': growing(120)},
        good={'kvmesh_degraded_decisions_total{missing="prefix-index-timeout"}': growing(6)},
    ),
    "KvmeshLookupSlow": Case(
        bad={LOOKUPS % "0.001": growing(10), LOOKUPS % "0.025": growing(600), LOOKUPS % "+Inf": growing(600)},
        good={LOOKUPS % "0.001": growing(599), LOOKUPS % "0.025": growing(600), LOOKUPS % "+Inf": growing(600)},
    ),
    "KvmeshEndpointFails": both(
        {**PICKS, 'kvmesh_picks_total{endpoint="10.0.0.2:8000"}': growing(6000)},
        bad={f"kvmesh_endpoint_failures_total{{{POD}}}": growing(200)},
        good={f"kvmesh_endpoint_failures_total{{{POD}}}": growing(60)},
    ),
    "KvmeshEndpointSilent": Case(  # one replica that hears it is enough
        bad={f'kvmesh_endpoint_reporting{{{POD}, instance="a"}}': steady(0)},
        good={f'kvmesh_endpoint_reporting{{{POD}, instance="{at}"}}': steady(at == "b") for at in "ab"},
    ),
    "KvmeshEndpointWantsKey": gauge(f"kvmesh_endpoint_wants_key{{{POD}}}", bad=1, good=0),
    "KvmeshEndpointRefuses": Case(
        bad={f"kvmesh_endpoint_full_answers_total{{{POD}}}": growing(1)},
        good={f"kvmesh_endpoint_full_answers_total{{{POD}}}": steady(7)},
    ),
    "KvmeshRequestsRerouted": both(
        PICKS,
        bad={f"kvmesh_rerouted_picks_total{{{POD}}}": growing(60)},
        good={f"kvmesh_rerouted_picks_total{{{POD}}}": growing(12)},
    ),
    "KvmeshNoIndexerReady": Case(
        bad={'kvmesh_indexer_ready{instance="a"}': steady(0)},
        good={'kvmesh_indexer_ready{instance="a"}': steady(1)},
    ),
    "KvmeshNoEvents": both(
        {"kvmesh_prompt_tokens_total": growing(1000)}, bad={BATCHES: steady(5)}, good={BATCHES: growing(5)}
    ),
    "KvmeshSourceNotLive": gauge(f'kvmesh_indexer_source_state{{{POD}, dp_rank="0", state="lost"}}', bad=1, good=0),
    "KvmeshIndexBehind": Case(
        bad={LAG: steady(9), BATCHES: growing(5)},
        good={LAG: steady(9), BATCHES: steady(5)},  # nothing new: what it was long ago says nothing
    ),
    "KvmeshEventsNotUnderstood": Case(
        bad={'kvmesh_indexer_decode_errors_total{reason="x"}': growing(1)},
        good={'kvmesh_indexer_decode_errors_total{reason="x"}': steady(3)},
    ),
    "KvmeshFinding": gauge(f'kvmesh_indexer_finding{{{POD}, reason="no-events"}}', bad=1, good=0),
    "KvmeshModelFinding": gauge('kvmesh_extproc_model_finding{model="m", reason="x"}', bad=1, good=0),
    "KvmeshTextOnly": gauge('kvmesh_extproc_model_finding{model="m", reason="text-only"}', bad=1, good=0),
    "KvmeshPredictionsOff": both(
        {PROMPTS: growing(1000), PREDICTED: growing(700)},
        bad={FOUND: growing(300)},
        good={FOUND: growing(600)},
    ),
    "KvmeshHitRatioLow": both(
        {PROMPTS: growing(1000), "kvmesh_alert_hit_ratio": steady(0.5)},
        bad={FOUND: growing(300)},
        good={FOUND: growing(600)},
    ),
    "KvmeshPoolProblem": gauge('kvmesh_indexer_pool_problems{reason="x"}', bad=1, good=0),
    "KvmeshPoolConflict": gauge("kvmesh_indexer_pool_conflicts", bad=1, good=0),
    "KvmeshRedisDown": Case(
        bad={f'kvmesh_indexer_redis_up{{instance="{at}"}}': steady(0) for at in "ab"},
        good={f'kvmesh_indexer_redis_up{{instance="{at}"}}': steady(at == "b") for at in "ab"},
    ),
    "KvmeshRedisMayEvict": Case(
        bad={'kvmesh_indexer_redis_eviction_policy{policy="allkeys-lru"}': steady(1)},
        good={'kvmesh_indexer_redis_eviction_policy{policy="noeviction"}': steady(1)},
    ),
    "KvmeshRedisEvicted": Case(
        bad={"kvmesh_indexer_redis_evicted_keys_total": growing(1)},
        good={"kvmesh_indexer_redis_evicted_keys_total": steady(8)},
    ),
    "KvmeshRedisAlmostFull": both(
        {'kvmesh_indexer_redis_memory_bytes{instance="a"}': steady(90)},
        bad={'kvmesh_indexer_redis_memory_limit_bytes{instance="a"}': steady(100)},
        good={'kvmesh_indexer_redis_memory_limit_bytes{instance="a"}': steady(0)},  # no limit
    ),
    "KvmeshUnreadableRecords": gauge("kvmesh_indexer_unreadable_records", bad=1, good=0),
    "KvmeshQuotaWritesFail": gauge("kvmesh_quota_writes_failing", bad=1, good=0),
    "KvmeshClassShed": both(
        {'kvmesh_admitted_requests_total{class="sheddable"}': growing(80)},
        bad={'kvmesh_shed_requests_total{class="sheddable", reason="shed"}': growing(20)},
        good={'kvmesh_shed_requests_total{class="sheddable", reason="shed"}': growing(4)},
    ),
    "KvmeshPromiseBurnsFast": both(
        PROMISED,  # 14.4 times what an objective of 0.99 allows are 14.4 %
        bad={JUDGED % ("late", "class"): growing(10), JUDGED % ("refused", "class"): growing(5)},
        good={JUDGED % ("late", "class"): growing(14), JUDGED % ("late", "request"): growing(90)},
    ),
    "KvmeshPromiseBurnsSlowly": both(
        PROMISED,
        bad={JUDGED % ("failed", "class"): growing(7)},
        good={JUDGED % ("late", "class"): growing(5)},
    ),
    "KvmeshQueueNeverEmpty": gauge('kvmesh_queued_requests{class="standard"}', bad=3, good=0),
    "KvmeshStepInForce": gauge('kvmesh_degradation_step{class="standard", step="cap-output"}', bad=1, good=0),
}
# what Grafana puts in the place of its variables
GRAFANA = {"$__rate_interval": "1m", "$__range": "1h", "$pool": ".*", "$class": ".*", "$endpoint": "10.0.0.1:8000"}
GRAFANA |= {"$cluster": ".*", "$namespace": ".*"}


def promtool(*words: str) -> str:
    done = subprocess.run([program("promtool"), *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_files_of_a_prometheus_of_ones_own_are_valid() -> None:
    assert "59 rules found" in promtool("check", "rules", str(RULES_FILE))
    promtool("check", "config", str(RULES_FILE.with_name("prometheus.yaml")))


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_every_expression_of_a_dashboard_is_valid(board: Json, tmp_path: Path) -> None:
    rules = []
    for number, asked in enumerate(exprs_of(board)):
        expr = re.sub(r"\$\w+", lambda found: GRAFANA[found[0]], asked)
        rules.append({"record": f"panel:{number}", "expr": expr})
    content = {"groups": [{"name": board["uid"], "rules": rules}]}
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(tmp_path / "panels.yaml"))


def test_shorter_rules_for_tests_are_valid_too(tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(shorter_rules(60)), encoding="utf-8")
    promtool("check", "rules", str(tmp_path / "short.yaml"))


def test_every_alert_fires_after_its_time_and_only_for_its_cause(tmp_path: Path) -> None:
    assert set(CASES) == {alert["alert"] for alert in alerts()}
    tests = [test for alert in alerts() for test in cases_of(alert, CASES[alert["alert"]])]
    content = {"rule_files": [str(RULES_FILE)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "tests.yaml"))


def test_one_wrong_conversation_in_a_quiet_pool_is_no_alert_of_predictions(tmp_path: Path) -> None:
    """Two minutes of it fill the ratio's window for longer than 5 minutes: hence a wait of twice that window."""
    burst = {name: f"0x3 {all_of_it / 2} {all_of_it}x{MINUTES}" for name, all_of_it in BURST.items()}
    firing, pending = (
        f'(count_over_time(ALERTS{{alertname="KvmeshPredictionsOff", alertstate="{state}"}}[{MINUTES}m]) > bool 0) '
        "or vector(0)"
        for state in ("firing", "pending")
    )
    test = _test(burst, asked=[(f"max({firing})", MINUTES, 0), (f"max({pending})", MINUTES, 1)])
    content = {"rule_files": [str(RULES_FILE)], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "tests.yaml"))


BURN_FAST = 'count(ALERTS{alertname="KvmeshPromiseBurnsFast", alertstate="firing"}) or vector(0)'


@pytest.mark.parametrize(
    ("objective", "missed", "judged", "fires"),
    [
        ("0.99", growing(90), growing(2), 1),
        ("0.99", growing(90), f"0+1x10 {steady(10)}", 0),  # too few to tell: ten judged in the hour
        ("0.99", f"0+90x20 {90 * 20}+0x40", growing(2), 0),  # it is over: the short window says so
        ("0.9", growing(51), growing(2), 1),  # at most every second request, however low the objective
        ("0.9", growing(49), growing(2), 0),
    ],
)
def test_a_burn_is_fast_if_much_is_missed_now_and_for_long_and_enough_was_judged(
    objective: str, missed: str, judged: str, fires: int, tmp_path: Path
) -> None:
    series = {
        **PROMISED,
        'kvmesh_slo_objective_ratio{class="standard"}': steady(float(objective)),
        'kvmesh_slo_judged_requests_total{class="standard"}': judged,
        JUDGED % ("late", "class"): missed,
    }
    test = _test(series, asked=[(BURN_FAST, MINUTES, fires)])
    content = {"rule_files": [str(RULES_FILE)], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "tests.yaml"))


def test_the_share_of_the_sample_is_compared_with_that_of_the_pods(tmp_path: Path) -> None:
    labels = 'class="standard", model="m", role="both", target="ttft"'
    series = {
        f'kvmesh_slo_requests_total{{{labels}, promise="class", outcome="met"}}': growing(90),
        f'kvmesh_slo_requests_total{{{labels}, promise="class", outcome="late"}}': growing(10),
        f'kvmesh_slo_requests_total{{{labels}, promise="request", outcome="late"}}': growing(100),
    }
    for replica in "ab":  # each shows all pods
        of = f'{labels}, instance="{replica}"'
        series[f"kvmesh_slo_pod_observations_total{{{of}}}"] = growing(200)
        series[f'kvmesh_slo_pod_observations_within_total{{{of}, bound="estimate"}}'] = growing(190)
        series[f'kvmesh_slo_pod_observations_within_total{{{of}, bound="most"}}'] = growing(200)
    less = "round(pool_class_model_target:kvmesh_slo_sampled_less_pods:ratio_rate30m * 100) + 5"
    test = _test(series, asked=[(f"sum({less})", MINUTES, 0)])
    content = {"rule_files": [str(RULES_FILE)], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "tests.yaml"))


def cases_of(alert: Json, case: Case) -> list[dict[str, Any]]:
    """Fire: not before its `for` is over, but at the end. Stay silent: never."""
    firing = f'count(ALERTS{{alertname="{alert["alert"]}", alertstate="firing"}}) or vector(0)'
    early = max(int(seconds(alert.get("for", "0m")) / 60) - 1, 0)
    return [
        _test(case.bad, asked=[*([(firing, early, 0)] if early else []), (firing, MINUTES, 1)]),
        _test(case.good, asked=[(firing, MINUTES, 0)]),
    ]


def _test(series: Mapping[str, str], *, asked: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expr, "eval_time": f"{at}m", "exp_samples": [{"labels": "{}", "value": value}]}
            for expr, at, value in asked
        ],
    }
