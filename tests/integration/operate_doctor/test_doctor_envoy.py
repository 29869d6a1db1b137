"""Planted in Envoy's configuration: a real Envoy runs each, a real picker stands behind it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from extproc.pages.findings import Finding, Severity
from extproc.policy.values import Steering
from kvmesh.admin.admin_login import AdminLogin
from operate.doctor.checks import judge
from operate.doctor.examine import expected_of
from operate.doctor.facts import Facts, IndexFacts, PickerFacts, RedisFacts
from operate.doctor.gather_admin import gather_envoy
from operate.doctor.questions import open_client
from operate.install.envoy_filters import UNPICKED_FILTER
from tests.integration.doctor_mesh import envoy, parts, picker, picker_settings, two_ports
from tests.integration.envoy_process import HOST

PODS = (f"{HOST}:8101", f"{HOST}:8102")  # nobody needs to be there
NO_REDIS = "redis://127.0.0.1:1/0"


async def envoy_findings(
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None] = lambda _: None,
    *,
    file: str = "local.yaml",
    steering: Steering = Steering.OVERRIDE_HOST,
    endpoints: tuple[str, ...] = PODS,
    picker_port: int | None = None,
) -> list[Finding]:
    """What the doctor finds wrong with a real Envoy that runs the changed file."""
    grpc_port, admin_port = two_ports()
    settings = picker_settings(
        NO_REDIS, endpoints, tokenizer=None, steering=steering, grpc_port=grpc_port, admin_port=admin_port
    )
    async with (
        picker(settings),
        envoy(tmp_path, picker_port=picker_port or grpc_port, endpoints=PODS, file=file, change=change) as url,
        open_client(timeout_seconds=20.0, login=AdminLogin()) as client,
    ):
        facts = Facts(
            expected=expected_of(settings),
            now=0.0,
            pods=(),
            redis=RedisFacts(label="redis", problem="not asked"),
            index=IndexFacts(problem="not asked"),
            envoy=await gather_envoy(client, url),
        )
    assert facts.envoy is not None
    assert facts.envoy.version.startswith("1.")
    of_envoy = [finding for finding in judge(facts) if finding.check.startswith("envoy-")]
    return [finding for finding in of_envoy if finding.severity is not Severity.OK]


@pytest.mark.parametrize(
    ("file", "steering"),
    [
        ("buffered.yaml", Steering.OVERRIDE_HOST),
        ("original-dst.yaml", Steering.ORIGINAL_DST),
    ],  # local.yaml is that of the healthy mesh
)
async def test_the_files_of_this_repository_have_no_finding(file: str, steering: Steering, tmp_path: Path) -> None:
    assert await envoy_findings(tmp_path, file=file, steering=steering) == []


def no_filter(config: dict[str, Any]) -> None:
    manager, *_ = parts(config)
    manager["http_filters"] = manager["http_filters"][-1:]


def no_bodies(config: dict[str, Any]) -> None:
    _, ext_proc, *_ = parts(config)
    ext_proc["processing_mode"]["request_body_mode"] = "NONE"
    ext_proc["processing_mode"]["response_trailer_mode"] = "SKIP"


def drops_metadata(config: dict[str, Any]) -> None:
    _, ext_proc, *_ = parts(config)
    del ext_proc["metadata_options"]["receiving_namespaces"]


def trusts_clients(config: dict[str, Any]) -> None:
    manager, _, _, pods = parts(config)
    del manager["early_header_mutation_extensions"]
    policy = pods["load_balancing_policy"]["policies"][0]["typed_extension_config"]["typed_config"]
    policy["override_host_sources"] = [{"header": "x-gateway-destination-endpoint"}]


def round_robin(config: dict[str, Any]) -> None:
    *_, pods = parts(config)
    del pods["load_balancing_policy"]


def short_timeouts(config: dict[str, Any]) -> None:
    manager, ext_proc, *_ = parts(config)
    del manager["stream_idle_timeout"]
    route = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    del route["timeout"]
    ext_proc["grpc_service"]["timeout"] = "5s"


def plain_http_to_picker(config: dict[str, Any]) -> None:
    _, _, picker_cluster, _ = parts(config)
    del picker_cluster["typed_extension_protocol_options"]
    del picker_cluster["circuit_breakers"]


def few_frames(config: dict[str, Any]) -> None:
    _, _, picker_cluster, _ = parts(config)
    [options] = picker_cluster["typed_extension_protocol_options"].values()
    del options["explicit_http_config"]["http2_protocol_options"]["max_outbound_frames"]


ERROR, WARNING = Severity.ERROR, Severity.WARNING
PLANTED = {
    "no ext_proc filter": (no_filter, [("envoy-filter", ERROR, "envoy/local.yaml")]),
    "bodies and trailers are not sent": (
        no_bodies,
        [
            ("envoy-mode", ERROR, "request_body_mode: FULL_DUPLEX_STREAMED"),
            ("envoy-mode", ERROR, "response_trailer_mode: SEND"),
        ],
    ),
    "the picker's metadata is dropped": (drops_metadata, [("envoy-mode", ERROR, "receiving_namespaces")]),
    "clients may choose": (trusts_clients, [("envoy-header", ERROR, "early_header_mutation_extensions")]),
    "the pick is not obeyed": (round_robin, [("envoy-steering", ERROR, "override_host")]),
    "timeouts cut generations": (
        short_timeouts,
        [
            ("envoy-timeouts", ERROR, "remove grpc_service.timeout"),
            ("envoy-timeouts", WARNING, "stream_idle_timeout: 0s"),
            ("envoy-timeouts", WARNING, "timeout: 0s on the route"),
        ],
    ),
    "the picker's cluster speaks HTTP/1": (
        plain_http_to_picker,
        [("envoy-picker", ERROR, "http2_protocol_options"), ("envoy-picker", WARNING, "circuit_breakers")],
    ),
    "one client may end the connection of all": (
        few_frames,
        [("envoy-picker", WARNING, "max_outbound_frames: 1000000")],
    ),
}


@pytest.mark.parametrize("name", PLANTED)
async def test_what_envoy_has_wrong_is_found_and_the_fix_named(name: str, tmp_path: Path) -> None:
    change, expected = PLANTED[name]
    found = await envoy_findings(tmp_path, change)

    assert [(finding.check, finding.severity) for finding in found] == [(check, how) for check, how, _ in expected]
    for finding, (_, _, fix) in zip(found, expected, strict=True):
        assert fix in finding.fix


async def test_an_envoy_that_looks_for_the_picker_elsewhere_is_found(tmp_path: Path) -> None:
    nobody = two_ports()[0]
    found = await envoy_findings(tmp_path, picker_port=nobody)

    assert [(finding.check, finding.severity, finding.subject) for finding in found] == [
        ("envoy-picker", ERROR, f"{HOST}:{nobody}")
    ]
    assert "--grpc-port" in found[0].fix


async def test_a_picker_that_steers_another_way_than_envoy_is_found(tmp_path: Path) -> None:
    found = await envoy_findings(tmp_path, steering=Steering.ORIGINAL_DST)

    assert [(finding.check, finding.severity) for finding in found] == [("envoy-steering", ERROR)]
    assert "--steering override-host" in found[0].fix


async def test_an_endpoint_that_envoys_cluster_does_not_have_is_found(tmp_path: Path) -> None:
    further = f"{HOST}:8199"
    found = await envoy_findings(tmp_path, endpoints=(*PODS, further))

    assert [(finding.check, finding.severity) for finding in found] == [("envoy-steering", ERROR)]
    assert further in found[0].seen


def names_pool(config: dict[str, Any]) -> None:
    """As `kvmesh install --failure-mode FailOpen` writes a route, and without what refuses unpicked requests."""
    manager, *_ = parts(config)
    manager["http_filters"] = [each for each in manager["http_filters"] if each["name"] != UNPICKED_FILTER]
    route = manager["route_config"]["virtual_hosts"][0]["routes"][0]
    route["typed_per_filter_config"] = {
        "envoy.filters.http.ext_proc.kvmesh": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "overrides": {
                "grpc_initial_metadata": [{"key": "x-kvmesh-pool", "value": "llm/a:8000"}],
                "failure_mode_allow": True,
            },
        }
    }


@pytest.mark.parametrize(("mode", "differs"), [("FailOpen", []), ("FailClose", ["is made for FailOpen"])])
async def test_a_running_envoys_failure_mode_is_compared_with_the_policy_of_its_pool(
    mode: str, differs: list[str], tmp_path: Path
) -> None:
    grpc_port, admin_port = two_ports()
    settings = picker_settings(NO_REDIS, PODS, tokenizer=None, grpc_port=grpc_port, admin_port=admin_port)
    async with (
        envoy(tmp_path, picker_port=grpc_port, endpoints=PODS, file="buffered.yaml", change=names_pool) as url,
        open_client(timeout_seconds=20.0, login=AdminLogin()) as client,
    ):
        facts = Facts(
            expected=replace(expected_of(settings), pool="llm/a", failure_mode=mode),
            now=0.0,
            pods=(),
            redis=RedisFacts(label="redis", problem="not asked"),
            index=IndexFacts(problem="not asked"),
            envoy=await gather_envoy(client, url),
        )
    found = judge(facts, names={"envoy-failure-mode", "envoy-steering"})
    assert [finding.check for finding in found] == ["envoy-steering", "envoy-failure-mode"]
    wrong = [finding.seen for finding in found if finding.severity is not Severity.OK]
    assert [part in seen for part, seen in zip(differs, wrong, strict=True)] == [True] * len(differs)


ISTIO_RETRIES = "connect-failure,refused-stream,unavailable,cancelled,retriable-status-codes"
ALLOWED = {"allow_envoy": True}


def retried(*codes: int, rules: dict[str, bool] | None = None) -> Callable[[dict[str, Any]], None]:
    """Return what gives the route the retries that Istio writes, with these codes, and the filter rules for headers."""

    def change(config: dict[str, Any]) -> None:
        manager, ext_proc, *_ = parts(config)
        route = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
        route["retry_policy"] = {"retry_on": ISTIO_RETRIES, "num_retries": 2, "retriable_status_codes": list(codes)}
        ext_proc["mutation_rules"] = rules or {}

    return change


AGAIN = "a route to the pods is retried on status 503, and prefill pods compute prompts"


@pytest.mark.parametrize(
    ("change", "prefill_pods", "wrong"),
    [
        (retried(503), 1, [AGAIN]),
        (retried(), 1, []),  # where its owner says nothing of retries
        (retried(503, rules=ALLOWED), 1, []),  # the picker forbids them
        (retried(503, rules={**ALLOWED, "disallow_all": True}), 1, [AGAIN]),
        (
            retried(rules={"disallow_is_error": True}),
            1,
            ["the filter ends requests with headers that the picker may not set (mutation_rules.disallow_is_error)"],
        ),
        (lambda _: None, 1, []),
        (retried(503), 0, []),  # it costs work twice, and no answer is wrong
    ],
)
async def test_retries_that_could_fetch_a_cache_twice_are_found_where_pods_prefill_for_others(
    change: Callable[[dict[str, Any]], None], prefill_pods: int, wrong: list[str], tmp_path: Path
) -> None:
    grpc_port, admin_port = two_ports()
    settings = picker_settings(NO_REDIS, PODS, tokenizer=None, grpc_port=grpc_port, admin_port=admin_port)
    async with (
        envoy(tmp_path, picker_port=grpc_port, endpoints=PODS, file="buffered.yaml", change=change) as url,
        open_client(timeout_seconds=20.0, login=AdminLogin()) as client,
    ):
        facts = Facts(
            expected=expected_of(settings),
            now=0.0,
            pods=(),
            redis=RedisFacts(label="redis", problem="not asked"),
            index=IndexFacts(problem="not asked"),
            picker=PickerFacts(url="picker", prefill_pods=prefill_pods),
            envoy=await gather_envoy(client, url),
        )
    found = [each for each in judge(facts, names={"envoy-retries"}) if each.severity is ERROR]
    assert [each.seen.partition(":")[0] for each in found] == wrong
