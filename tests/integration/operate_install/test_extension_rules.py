"""The recording rules for the inference extension's names, by promtool: what they make of a picker's metrics."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from extproc.ledger.metrics import METRICS
from tests.prometheus.monitoring import FOLDER
from tests.prometheus.prometheus_process import program

RULES_FILE = FOLDER / "prometheus" / "inference-extension.rules.yaml"
RULES = [rule for group in yaml.safe_load(RULES_FILE.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]
THEIRS = json.loads((Path(__file__).parents[2] / "data" / "inference_extension_metrics.json").read_text("utf-8"))
PART = re.compile(r"_(bucket|sum|count)$")
PODS = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
PICKER = 'pool="llm/llama",instance="p1"'
ENDPOINTS = {"ready": (1, 1, 0), "reporting": (1, 1, 1), "waiting": (1, 2, 9), "running": (3, 5, 9)}


def test_names_are_those_of_the_extension_and_come_from_metrics_that_there_are() -> None:
    theirs, ours = {each["name"]: each for each in THEIRS["metrics"]}, {each.name for each in METRICS}
    assert "22 rules found" in promtool("check", "rules", str(RULES_FILE))
    for rule in RULES:
        name = PART.sub("", rule["record"])
        assert (theirs[name]["type"] == "histogram") == (name != rule["record"])
        made = re.findall(r'"([a-z_]+)", "\$1"', rule["expr"])
        assert {*made, *rule.get("labels", {})} <= set(theirs[name]["labels"])
        assert {PART.sub("", each) for each in re.findall(r"kvmesh_\w+", rule["expr"])} <= ours


def test_pods_are_averaged_once_however_many_pickers_see_them(tmp_path: Path) -> None:
    series: dict[str, float] = {}
    for number, pod in enumerate(PODS):
        for picker in ("p1", "p2"):
            of = f'pool="llm/llama",instance="{picker}",endpoint="{pod}"'
            series |= {
                f'kvmesh_endpoint_state{{{of},state="ready"}}': ENDPOINTS["ready"][number],
                f"kvmesh_endpoint_reporting{{{of}}}": ENDPOINTS["reporting"][number],
                f"kvmesh_endpoint_waiting_requests{{{of}}}": ENDPOINTS["waiting"][number],
                f"kvmesh_endpoint_running_requests{{{of}}}": ENDPOINTS["running"][number],
                f"kvmesh_endpoint_kv_usage_ratio{{{of}}}": 0.5,
            }
    of = 'name="llama",pool="llm/llama"'
    become(
        tmp_path,
        series,
        {
            f"inference_pool_ready_pods{{{of}}}": 2,
            f"inference_pool_average_queue_size{{{of}}}": 1.5,
            f"inference_pool_average_running_requests{{{of}}}": 4,
            f"inference_pool_average_kv_cache_utilization{{{of}}}": 0.5,
            f'inference_pool_per_pod_queue_size{{{of},endpoint="{PODS[2]}",model_server_pod="{PODS[2]}"}}': 9,
        },
    )


def test_no_ready_pod_is_a_nought_and_no_mean(tmp_path: Path) -> None:
    of = f'{PICKER},endpoint="{PODS[0]}"'
    series = {
        f'kvmesh_endpoint_state{{{of},state="ready"}}': 0,
        f"kvmesh_endpoint_reporting{{{of}}}": 1,
        f"kvmesh_endpoint_waiting_requests{{{of}}}": 7,
    }
    become(tmp_path, series, {'inference_pool_ready_pods{name="llama",pool="llm/llama"}': 0})
    become(tmp_path, series, {}, asked="inference_pool_average_queue_size")


def test_requests_are_counted_for_each_picker(tmp_path: Path) -> None:
    def counted(name: str, value: float, **labels: str) -> dict[str, float]:
        written = "".join(f',{key}="{each}"' for key, each in labels.items())
        return {f"{name}{{{PICKER}{written}}}": value}

    series = {
        **counted("kvmesh_model_requests_total", 5, model="chat", arm="", status="2xx"),
        **counted("kvmesh_model_requests_total", 2, model="chat", arm="canary", status="5xx"),
        **counted("kvmesh_model_request_seconds_bucket", 6, model="chat", arm="", le="1"),
        **counted("kvmesh_expected_ttft_seconds_sum", 3, model="llama"),
        **counted("kvmesh_pick_phase_seconds_count", 7, phase="decide"),
        **counted("kvmesh_pick_phase_seconds_count", 9, phase="parse"),
        **counted("kvmesh_picks_total", 7, endpoint=PODS[0]),
        **counted("kvmesh_decisions_total", 4, outcome="no-ready-endpoint"),
        **counted("kvmesh_queue_seconds_sum", 8, **{"class": "standard"}),
        **counted("kvmesh_queued_requests", 1, **{"class": "standard"}),
    }
    objective, extension = "inference_objective", "inference_extension"
    become(
        tmp_path,
        series,
        {
            **counted(f"{objective}_request_total", 7, model_name="chat"),
            **counted(f"{objective}_request_error_total", 2, model_name="chat", error_code="ModelServerError"),
            **counted(f"{objective}_request_duration_seconds_bucket", 6, model_name="chat", le="1"),
            **counted(f"{objective}_request_predicted_ttft_seconds_sum", 3, target_model_name="llama"),
            **counted(f"{extension}_scheduler_e2e_duration_seconds_count", 7),
            **counted(f"{extension}_scheduler_attempts_total", 7, status="success", pod_name=PODS[0]),
            **counted(f"{extension}_scheduler_attempts_total", 4, status="failure"),
            **counted(f"{extension}_flow_control_request_queue_duration_seconds_sum", 8, priority="standard"),
            **counted(f"{extension}_flow_control_queue_size", 1, priority="standard"),
        },
    )


def become(tmp_path: Path, series: Mapping[str, float], made: Mapping[str, float], *, asked: str = "") -> None:
    """Have promtool evaluate the rules on these series, and compare each series that is named."""
    questions: list[dict[str, Any]] = [
        {"expr": name, "eval_time": "1m", "exp_samples": [{"labels": name, "value": value}]}
        for name, value in made.items()
    ]
    questions += [{"expr": asked, "eval_time": "1m", "exp_samples": []}] if asked else []
    given = [{"series": name, "values": f"{value}+0x3"} for name, value in series.items()]
    test = {"interval": "30s", "input_series": given, "promql_expr_test": questions}
    content = {"rule_files": [str(RULES_FILE)], "evaluation_interval": "30s", "tests": [test]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "tests.yaml"))


def promtool(*words: str) -> str:
    done = subprocess.run([program("promtool"), *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
