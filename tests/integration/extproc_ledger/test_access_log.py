"""A whole picker writes down its requests: to a file, to a Redis Stream, as spans; and no secret of theirs."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from extproc.ext_proc.exchange import BodyMode
from extproc.ledger import tracing
from extproc.ledger.audit_chain import parse_keys
from extproc.ledger.record_targets import stream_key
from extproc.models.models import ModelTable, ServedModel
from extproc.policy.merged_policy import pick_policy
from extproc.settings.observation_settings import AccessLogTargets, ObservationSettings
from operate.audit.verify import verify_chains
from podsim.model_folder import TINY_MODEL
from tests.integration.hermetic_envoy import Envoy, HttpExchange, Refused, Routed
from tests.integration.hermetic_picker import Picker, running_picker
from tests.integration.hermetic_pods import BASE_MODEL, PodState
from tests.integration.kv_redis import RedisServer
from tests.integration.otlp_collector import collector, spans_of
from tests.integration.overload_picker import crowd_before, policy
from tests.integration.overload_pods import held_pods

ENVOY = Envoy(mode=BodyMode.FULL_DUPLEX_STREAMED, raw=True)
BUFFERED = Envoy(mode=BodyMode.BUFFERED, raw=True)
PLANTED = (
    "planted-prompt",
    "planted-answer",
    "planted-tenant",
    "planted-query",
    "planted-token",
    "planted-key-of-audit",
)
LISTED = ModelTable(served=(ServedModel(name=BASE_MODEL),), only_listed=True)
DROPPED_SPANS = 'kvmesh_trace_spans_total{outcome="dropped"} 3.0'
KEY_LINE = "k1:planted-key-of-audit"
BODY = json.dumps({"model": BASE_MODEL, "prompt": PLANTED[0] * 40, "max_tokens": 5}).encode()
ANSWER = json.dumps(
    {
        "choices": [{"text": PLANTED[1]}],
        "usage": {"prompt_tokens": 90, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}},
    }
).encode()
HEADERS = {
    "x-gateway-inference-fairness-id": PLANTED[2],
    "authorization": f"Bearer {PLANTED[4]}",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=1",
}
PATH = f"/v1/completions?key={PLANTED[3]}"


async def routed(exchange: HttpExchange, **more: str) -> Routed:
    found = await exchange.request(BODY, path=PATH, headers=HEADERS | more)
    assert isinstance(found, Routed), found
    return found


async def three_requests(picker: Picker, *, envoy: Envoy = ENVOY) -> str:
    """One that is answered, one whose client leaves, one that is refused; return the first one's pod."""
    async with envoy.exchange(picker.grpc_address) as exchange:
        pod = (await routed(exchange, **{"x-request-id": "answered"})).endpoints[0]
        await exchange.response(ANSWER)
    async with envoy.exchange(picker.grpc_address) as exchange:
        await routed(exchange, **{"x-request-id": "left"})
    async with envoy.exchange(picker.grpc_address) as exchange:
        unknown = BODY.replace(BASE_MODEL.encode(), b"nobodys-model")
        found = await exchange.request(unknown, path=PATH, headers=HEADERS | {"x-request-id": "refused"})
        assert isinstance(found, Refused)
        assert (found.request_id, len(found.decision_id or "")) == ("refused", 16)
    return pod


def decisions(lines: Sequence[str]) -> dict[str, dict[str, Any]]:
    records = [json.loads(line) for line in lines]
    return {record["request_id"]: record for record in records if record["kind"] == "decision"}


async def test_every_request_has_one_line_with_its_outcome_in_a_chain_that_is_whole(tmp_path: Path) -> None:
    file, key_file = tmp_path / "access.log", tmp_path / "keys"
    key_file.write_text(KEY_LINE)
    observation = ObservationSettings(access_log=AccessLogTargets(file=file), audit=True, audit_key_file=key_file)
    settings: dict[str, Any] = {"models": LISTED, "observation": observation}
    async with running_picker([PodState(), PodState()], sample_share=1.0, **settings) as picker:
        pod = await three_requests(picker)
        await picker.eventually("/metrics", lambda page: 'kvmesh_access_log_lines_total{outcome="written"' in page)

    text = file.read_text()
    lines = decisions(text.splitlines())
    assert sorted(lines) == ["answered", "left", "refused"]
    answered, left, refused = lines["answered"], lines["left"], lines["refused"]
    wanted = {"fate": "routed", "path": "/v1/completions", "model": BASE_MODEL, "class": "standard", "status": 200}
    assert (
        answered.items()
        >= (wanted | {"endpoint": pod, "served_by": pod, "max_tokens": 5, "api": "completions"}).items()
    )
    assert answered["ended_us"] >= answered["headers_us"] >= answered["decided_us"] > 0
    assert sum(answered["scores"].values()) > 0
    assert (left["status"], left["fate"]) == (0, "routed")
    assert refused.items() >= {"fate": "refused", "reason": "unknown-model", "status": 404}.items()
    assert answered["tenant"] == left["tenant"] != PLANTED[2]
    assert answered["prompt"] == left["prompt"]
    assert not [secret for secret in PLANTED if secret in text]

    found = verify_chains(
        [("f", file.read_bytes().splitlines(keepends=True))],
        keys=parse_keys(KEY_LINE, where="test"),
        now=0.0,
        whole=True,
    )
    assert (found.findings, [chain.state for chain in found.chains]) == ([], ["closed"])


@pytest.mark.parametrize("envoy", [ENVOY, BUFFERED], ids=["second-stream", "same-stream"])
async def test_a_line_has_the_tokens_that_the_pod_counted(
    envoy: Envoy, tmp_path: Path, redis_server: RedisServer
) -> None:
    file = tmp_path / "access.log"
    settings: dict[str, Any] = {
        "model": BASE_MODEL,
        "tokenizer_folder": TINY_MODEL,
        "redis_url": redis_server.url,
        "index_timeout_seconds": 5.0,
        "sample_share": 1.0,
        "observation": ObservationSettings(access_log=AccessLogTargets(file=file)),
    }
    async with running_picker([PodState()], **settings) as picker, envoy.exchange(picker.grpc_address) as exchange:
        await routed(exchange, **{"x-request-id": "read"})
        assert (await exchange.response(ANSWER)).asked_for
    line = decisions(file.read_text().splitlines())["read"]
    found = [line.get(name) for name in ("realised_prompt_tokens", "realised_cached_tokens", "output_tokens")]
    assert found == [90, 16, 5]


@pytest.mark.parametrize("number", [2**64, 10**400])
async def test_numbers_that_no_record_takes_cost_no_record(number: int, tmp_path: Path) -> None:
    file, received = tmp_path / "access.log", list[Any]()
    body = json.dumps({"model": BASE_MODEL, "prompt": "x", "max_tokens": number}).encode()
    usage = {"prompt_tokens": number, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": -number}}
    async with (
        collector(received) as address,
        running_picker(
            [PodState()],
            sample_share=1.0,
            models=LISTED,
            otlp_endpoint=address,
            observation=ObservationSettings(access_log=AccessLogTargets(file=file)),
        ) as picker,
        ENVOY.exchange(picker.grpc_address) as exchange,
    ):
        found = await exchange.request(body, path=PATH, headers=HEADERS | {"x-request-id": "large"})
        assert isinstance(found, Routed)
        await exchange.response(json.dumps({"choices": [], "usage": usage}).encode())
    line = decisions(file.read_text().splitlines())["large"]
    assert (line["fate"], line["max_tokens"]) == ("routed", 2**53 - 1)
    assert "realised_prompt_tokens" not in line
    (span,) = [span for span in spans_of(received) if span["kind"] == 2]
    assert int(span["attributes"]["gen_ai.request.max_tokens"]) == 2**53 - 1


async def test_who_was_refused_after_waiting_is_in_its_line(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    async with (
        held_pods(1) as pods,
        crowd_before(
            pods,
            policy=policy(classes={"standard": {"queueRequests": 1}, "sheddable": {"queueRequests": 0}}),
            observation=ObservationSettings(access_log=AccessLogTargets(file=file)),
        ) as crowd,
    ):
        pods[0].fill()
        await crowd.saw(waiting=100)
        refusal = await crowd.send("sheddable", name="shed", tenant="planted-tenant").refused()
    line = decisions(file.read_text().splitlines())["shed"]
    wanted = {"fate": "refused", "reason": refusal.reason, "class": "sheddable", "api": "completions"}
    assert line.items() >= (wanted | {"max_tokens": 100}).items()
    assert line["model"]
    assert len(line["tenant"]) == 16
    assert "planted-tenant" not in file.read_text()


async def test_who_was_refused_by_a_quota_is_in_its_line(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    quotas = policy(quotas=[{"tenant": "planted-tenant", "requestsPerMinute": 4, "burstSeconds": 15}])
    observation = ObservationSettings(access_log=AccessLogTargets(file=file))
    async with held_pods(1) as pods, crowd_before(pods, policy=quotas, observation=observation) as crowd:
        await crowd.send(name="first", tenant="planted-tenant").routed()
        refusal = await crowd.send(name="second", tenant="planted-tenant").refused()
    assert refusal.reason == "quota-exceeded"
    lines = decisions(file.read_text().splitlines())
    same = ("tenant", "model", "class", "api", "max_tokens")
    assert [lines["second"][name] for name in same] == [lines["first"][name] for name in same]
    assert lines["second"].items() >= {"fate": "refused", "reason": "quota-exceeded", "status": 429}.items()
    assert "planted-tenant" not in file.read_text()


async def test_a_second_picker_with_the_same_file_is_told_so(tmp_path: Path) -> None:
    from extproc.errors import ConfigError
    from extproc.ledger.record_targets import RecordFile

    first = RecordFile(tmp_path / "log", max_bytes=100, files=2)
    with pytest.raises(ConfigError, match="a file of its own"):
        RecordFile(tmp_path / "log", max_bytes=100, files=2)
    first.close()


async def test_of_a_share_the_same_requests_are_written_every_time(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    none, _ = pick_policy({"observability": {"auditShare": 0.0}})
    async with (
        running_picker(
            [PodState()], policy=none, observation=ObservationSettings(access_log=AccessLogTargets(file=file))
        ) as picker,
        ENVOY.exchange(picker.grpc_address) as exchange,
    ):
        await routed(exchange)
        await exchange.response(ANSWER)
    assert file.read_text() == ""


async def test_a_stream_in_redis_has_the_lines_and_redis_may_come_later(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    observation = ObservationSettings(access_log=AccessLogTargets(stream="audit"), audit=True)
    try:
        async with running_picker([PodState()], redis_url=redis.url, observation=observation) as picker:
            async with ENVOY.exchange(picker.grpc_address) as exchange:  # picks are unharmed
                await routed(exchange, **{"x-request-id": "early"})
                await exchange.response(ANSWER)
            redis.start()
            client = redis.client()
            async with asyncio.timeout(20.0):
                while not client.exists(stream_key("audit")):
                    await asyncio.sleep(0.02)
        entries: Any = client.xrange(stream_key("audit"))
        lines = [fields[b"line"] + b"\n" for _, fields in entries]
        found = verify_chains([("stream", lines)], keys={}, now=0.0, interleaved=True)
        assert (found.findings, found.chains[0].decisions, found.chains[0].state) == ([], 1, "closed")
        assert "early" in decisions([line.decode() for line in lines if b'"decision"' in line])
        assert not [secret for secret in PLANTED if secret.encode() in b"".join(lines)]
    finally:
        redis.kill()


async def test_spans_of_an_exchange_are_children_of_the_clients_trace_and_of_each_other() -> None:
    received: list[Any] = []
    async with (
        collector(received) as address,
        running_picker([PodState()], otlp_endpoint=address, models=LISTED) as picker,
    ):
        await three_requests(picker)

    spans = spans_of(received)
    exchanges = [span for span in spans if span["kind"] == 2]
    assert {(span["traceId"], span["parentSpanId"]) for span in exchanges} == {
        ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    }
    (answered,) = [span for span in exchanges if span["attributes"]["kvmesh.request_id"] == "answered"]
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": BASE_MODEL,
        "url.path": "/v1/completions",
    }
    assert answered["name"] == f"text_completion {BASE_MODEL}"
    assert answered["attributes"].items() >= wanted.items()
    (pick,) = [span for span in spans if span.get("parentSpanId") == answered["spanId"]]
    (lookup,) = [span for span in spans if span.get("parentSpanId") == pick["spanId"]]
    assert (pick["name"], lookup["name"]) == ("kvmesh.pick", "kvmesh.lookup")
    assert int(answered["startTimeUnixNano"]) <= int(lookup["startTimeUnixNano"])
    assert int(lookup["endTimeUnixNano"]) <= int(pick["endTimeUnixNano"]) <= int(answered["endTimeUnixNano"])
    assert not [secret for secret in PLANTED if secret in json.dumps(received)]


async def test_a_client_that_is_not_sampled_has_no_span() -> None:
    received: list[Any] = []
    async with (
        collector(received) as address,
        running_picker([PodState()], otlp_endpoint=address) as picker,
        ENVOY.exchange(picker.grpc_address) as exchange,
    ):
        await routed(exchange, traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")
        await exchange.response(ANSWER)
    assert received == []


async def test_a_collector_that_is_gone_costs_spans_and_no_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "EXPORT_SECONDS", 0.2)
    async with running_picker([PodState()], otlp_endpoint="http://127.0.0.1:1/v1/traces") as picker:
        async with ENVOY.exchange(picker.grpc_address) as exchange:
            await routed(exchange)
            await exchange.response(ANSWER)
        assert await picker.metric("kvmesh_decisions_total") == 1.0
        await picker.eventually("/metrics", lambda page: DROPPED_SPANS in page)


async def test_who_waits_and_goes_and_who_leaves_meanwhile_have_a_line_each(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    async with (
        held_pods(1) as pods,
        crowd_before(
            pods, policy=policy(), observation=ObservationSettings(access_log=AccessLogTargets(file=file))
        ) as crowd,
    ):
        pods[0].fill()
        await crowd.saw(waiting=100)
        stays, leaves = crowd.send("critical", name="stays"), crowd.send("critical", name="leaves")
        await crowd.waiting(2)
        await leaves.leave()
        await crowd.waiting(1)
        pods[0].free()
        await stays.routed()
        await stays.answered()
    lines = decisions(file.read_text().splitlines())
    assert lines["stays"]["fate"] == "routed"
    assert 0 < lines["stays"]["queued_us"] <= lines["stays"]["decided_us"] <= lines["stays"]["headers_us"]
    assert lines["leaves"].items() >= {"fate": "abandoned", "reason": "client-left", "status": 499}.items()
    assert "endpoint" not in lines["leaves"]
