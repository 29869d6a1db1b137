"""The cases that endpoint pickers of the Gateway API are measured by, over real gRPC, rewritten for what kvmesh does.

After the hermetic suite of llm-d-router (test/integration/epp): pods with given queues, KV use and adapters, one
request, and what becomes of it. Each case runs in both body modes and with both encodings of header values.
"""

import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from extproc.ext_proc.exchange import BodyMode
from extproc.models.models import ModelRule, ModelTable, ModelTarget, ServedModel, TokensFrom
from extproc.policy.priority import DEFAULT_CLASSES, OverloadPolicy, PriorityClass
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import PickPolicy
from tests.integration.hermetic_envoy import Envoy, Refused, Returned, Routed
from tests.integration.hermetic_picker import Picker, running_picker
from tests.integration.hermetic_pods import BASE_MODEL, PodState
from tests.integration.kv_redis import RedisServer

TOKENIZER = Path(__file__).parents[3] / "podsim" / "tiny_model"
MODELS = ModelTable(
    served=(ServedModel(name=BASE_MODEL),),
    rules=(
        ModelRule(model="sql-lora", targets=(ModelTarget(model="sql-lora-1fdg2"),)),
        ModelRule(model="model-to-be-rewritten", targets=(ModelTarget(model="rewritten-model"),)),
    ),
)
# each request is sent on at once: that full pods get none, and what waits for them, are the tests' of admission
AT_ONCE = PickPolicy(priorities=PriorityPolicy(overload=OverloadPolicy(enabled=False)))
IDLE, SHORT, LONG = PodState(kv_usage=0.1), PodState(waiting=3, kv_usage=0.2), PodState(waiting=10, kv_usage=0.2)
THREE = (SHORT, IDLE, LONG)
# the pod in the middle is the best one; the last one would be the worst
WITH_ADAPTERS = (
    PodState(kv_usage=0.2, running_adapters=("foo",)),
    PodState(kv_usage=0.1, running_adapters=("foo", "sql-lora-1fdg2")),
    PodState(waiting=10, kv_usage=0.2, running_adapters=("foo",)),
)


@pytest.fixture(params=[BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED], ids=["duplex", "buffered"])
def mode(request: pytest.FixtureRequest) -> BodyMode:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[True, False], ids=["raw_value", "value"])
def envoy(request: pytest.FixtureRequest, mode: BodyMode) -> Envoy:
    return Envoy(mode=mode, raw=request.param)


def body_of(model: str, prompt: str = "do something") -> bytes:
    """The suite's request: its keys are sorted and there are no blanks, so any rewriting by a JSON library shows."""
    return b'{"max_tokens": 100,"model":%s,  "temperature":0, "prompt":%s}' % (
        json.dumps(model).encode(),
        json.dumps(prompt).encode(),
    )


async def outcome(envoy: Envoy, picker: Picker, *chunks: bytes, **request: Any) -> Routed | Refused:
    async with envoy.exchange(picker.grpc_address) as exchange:
        return await exchange.request(*chunks, **request)


async def routed(envoy: Envoy, picker: Picker, *chunks: bytes, **request: Any) -> Routed:
    found = await outcome(envoy, picker, *chunks, **request)
    assert isinstance(found, Routed), found
    return found


def steering_picker(states: Sequence[PodState], **changes: Any) -> AbstractAsyncContextManager[Picker]:
    """A picker that only decides which pod is the best."""
    return running_picker(states, **{"policy": AT_ONCE} | changes)


def unchanged(found: Routed, body: bytes) -> Routed:
    """What an untouched request looks like that goes to the same pods."""
    return Routed(endpoints=found.endpoints, body=body)


# --- the choice of the pod --------------------------------------------------------------------------------------------


async def test_the_pod_with_the_shorter_queue_and_the_emptier_cache_is_taken(envoy: Envoy) -> None:
    body = body_of(BASE_MODEL)
    async with steering_picker(THREE, models=MODELS) as picker:
        found = await routed(envoy, picker, body)
        assert found == Routed(endpoints=(picker.pods[1], picker.pods[0], picker.pods[2]), body=body)
        assert await picker.metric('kvmesh_decisions_total{outcome="routed"}') == 1
        assert await picker.metric(f'kvmesh_picks_total{{endpoint="{picker.pods[1]}"}}') == 1
        ended = f'kvmesh_model_requests_total{{arm="",model="{BASE_MODEL}",status="none"}}'
        await picker.eventually("/metrics", lambda page: f"{ended} 1.0" in page)
        assert await picker.metric("kvmesh_open_bookings") == 0


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param(
            (
                PodState(kv_usage=0.2, running_adapters=("foo", "bar")),
                PodState(kv_usage=0.1, running_adapters=("foo", "sql-lora-1fdg2")),
                PodState(waiting=10, kv_usage=0.2, running_adapters=("foo", "bar")),
            ),
            id="and an empty queue",
        ),
        pytest.param(
            (
                PodState(waiting=10, kv_usage=0.2, running_adapters=("foo", "bar")),
                PodState(waiting=10, kv_usage=0.4, running_adapters=("foo", "sql-lora-1fdg2")),
                PodState(waiting=10, kv_usage=0.3, running_adapters=("foo",)),
            ),
            id="despite a fuller cache",
        ),
        pytest.param(
            (
                PodState(running_adapters=("foo", "bar"), adapter_slots=2),
                PodState(waiting=1, kv_usage=0.4, running_adapters=("foo", "sql-lora-1fdg2"), adapter_slots=2),
                PodState(running_adapters=("foo", "bar"), adapter_slots=2),
            ),
            id="where the others have no slot free",
        ),
    ],
)
async def test_the_pod_that_runs_the_adapter_is_taken(envoy: Envoy, pods: Sequence[PodState]) -> None:
    body = body_of("sql-lora-1fdg2")
    async with steering_picker(pods, models=MODELS) as picker:
        found = await routed(envoy, picker, body)
        assert found == unchanged(found, body)
        assert found.endpoints[0] == picker.pods[1]


async def test_a_free_slot_is_better_than_none_where_nobody_runs_the_adapter(envoy: Envoy) -> None:
    pods = (
        PodState(running_adapters=("foo", "bar"), adapter_slots=2),
        PodState(kv_usage=0.2, running_adapters=("foo",), adapter_slots=2),
    )
    async with steering_picker(pods, models=MODELS) as picker:
        assert (await routed(envoy, picker, body_of("sql-lora-1fdg2"))).endpoints[0] == picker.pods[1]


SATURATED = (
    PodState(waiting=6, kv_usage=0.2, running_adapters=("foo", "bar", "sql-lora-1fdg2")),
    PodState(kv_usage=0.85, running_adapters=("foo",)),
    PodState(waiting=10, kv_usage=0.9, running_adapters=("foo",)),
)


SHEDDABLE = {"x-gateway-inference-objective": "sheddable"}


async def test_a_sheddable_request_goes_where_there_is_room(envoy: Envoy) -> None:
    body = body_of("sql-lora-1fdg2")
    async with running_picker(SATURATED, models=MODELS) as picker:
        found = await routed(envoy, picker, body, headers=SHEDDABLE)
        assert found == unchanged(found, body)
        # the one without a queue, though its cache is nearly full and it has not loaded the adapter
        assert found.endpoints[0] == picker.pods[1]


async def test_a_class_that_may_be_refused_is_told_when_to_come_back(envoy: Envoy) -> None:
    priorities = PriorityPolicy(
        classes={
            **DEFAULT_CLASSES,
            "sheddable": PriorityClass(priority=-100, sheddable=True, ttft_seconds=1e5, queue_requests=0),  # none waits
            "standard": PriorityClass(queue_seconds=0.1),
        },
    )
    busy = [replace(pod, waiting=100) for pod in SATURATED]
    async with running_picker(busy, models=MODELS, policy=PickPolicy(priorities=priorities)) as picker:
        found = await outcome(envoy, picker, body_of("sql-lora-1fdg2"), headers=SHEDDABLE)
        assert isinstance(found, Refused)
        assert (found.status, found.reason) == (503, "queue-full")
        assert 1 <= int(found.retry_after or 0) <= 60
        assert found.headers["x-kvmesh-priority"] == "sheddable"
        assert isinstance(await outcome(envoy, picker, body_of("sql-lora-1fdg2")), Routed)


async def test_a_session_stays_on_its_pod(envoy: Envoy) -> None:
    async with steering_picker((IDLE, IDLE, IDLE), models=MODELS) as picker:
        taken = {
            (
                await routed(envoy, picker, body_of(BASE_MODEL, f"question {i}"), headers={"x-session-id": "s1"})
            ).endpoints[0]
            for i in range(8)
        }
        assert len(taken) == 1


# --- subsets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_list", [True, False], ids=["list", "text"])
async def test_the_best_pod_of_the_routes_subset_is_taken(envoy: Envoy, as_list: bool) -> None:
    async with steering_picker(WITH_ADAPTERS, models=MODELS) as picker:
        pods = list(picker.pods)
        found = await routed(envoy, picker, body_of("sql-lora-1fdg2"), subset=pods if as_list else ",".join(pods))
        assert found.endpoints[0] == pods[1]


async def test_a_subset_goes_before_load(envoy: Envoy) -> None:
    body = body_of("sql-lora-1fdg2")
    async with steering_picker(WITH_ADAPTERS, models=MODELS) as picker:
        found = await routed(envoy, picker, body, subset=[picker.pods[2]])
        assert found == Routed(endpoints=(picker.pods[2],) * 3, body=body)  # nor may a retry leave it


async def test_a_subset_without_any_of_our_pods_is_answered_503(envoy: Envoy) -> None:
    async with steering_picker(WITH_ADAPTERS[:2], models=MODELS) as picker:
        found = await outcome(envoy, picker, body_of("sql-lora-1fdg2"), subset=["192.168.1.99:8000"])
        assert found == Refused(
            status=503,
            reason="no-ready-endpoint",
            content_type="application/json",
            error={
                "message": "no endpoint may serve this request: subset: not in the route's subset",
                "type": "server_error",
                "param": None,
                "code": "no_ready_endpoint",
            },
        )


# --- requests that are odd --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chunks", [(), (body_of(BASE_MODEL),), (b'{"prompt":"hello world"}',)], ids=["GET", "POST", "no model"]
)
async def test_without_pods_every_request_is_answered_503(envoy: Envoy, chunks: Sequence[bytes]) -> None:
    async with steering_picker((), models=MODELS) as picker:
        found = await outcome(envoy, picker, *chunks, method="POST" if chunks else "GET")
        assert found == Refused(
            status=503,
            reason="no-ready-endpoint",
            content_type="application/json",
            error={
                "message": "no endpoint is configured for this picker",
                "type": "server_error",
                "param": None,
                "code": "no_ready_endpoint",
            },
        )


@pytest.mark.parametrize(
    ("path", "chunks"),
    [
        pytest.param("/v1/completions", (b'{"prompt":"hello world"}',), id="no model"),
        pytest.param("/v1/audio/transcriptions", (b"passthrough-parser",), id="no JSON"),
        pytest.param("/v1/files", (b"\x00\xff not text", b" in parts"), id="no text"),
    ],
)
async def test_what_needs_no_understanding_goes_unchanged_to_the_idlest_pod(
    envoy: Envoy, path: str, chunks: Sequence[bytes]
) -> None:
    async with steering_picker(THREE, models=MODELS) as picker:
        found = await routed(envoy, picker, *chunks, path=path)
        assert found == Routed(endpoints=(picker.pods[1], picker.pods[0], picker.pods[2]), body=b"".join(chunks))
        assert await picker.metric("kvmesh_model_requests_total") == 0  # no model, no label


async def test_a_completion_that_is_no_json_is_answered_400(envoy: Envoy) -> None:
    async with steering_picker((IDLE,), models=MODELS) as picker:
        found = await outcome(envoy, picker, b"no healthy upstream")
        assert isinstance(found, Refused)
        assert (found.status, found.reason, found.content_type) == (400, "malformed-json", "application/json")
        assert (found.error["type"], found.error["code"]) == ("invalid_request_error", "malformed_request")
        assert await picker.metric("kvmesh_picks_total") == 0


async def test_a_body_in_parts_is_read_as_one(envoy: Envoy) -> None:
    body = body_of("sql-lora-1fdg3")
    pods = (
        PodState(waiting=1, kv_usage=0.2, running_adapters=("foo", "bar", "sql-lora-1fdg3")),
        PodState(waiting=4, kv_usage=0.85, running_adapters=("foo", "sql-lora-1fdg3")),
    )
    async with steering_picker(pods, models=MODELS) as picker:
        found = await routed(envoy, picker, body[:30], body[30:])
        assert found == Routed(endpoints=picker.pods, body=body)
        (decision,) = await picker.get("/v1/decisions")
        assert (decision["request"]["model"], decision["request"]["adapter"]) == ("sql-lora-1fdg3", "sql-lora-1fdg3")


async def test_a_get_without_a_body_is_routed_by_its_headers(envoy: Envoy) -> None:
    async with steering_picker(THREE, models=MODELS) as picker:
        found = await routed(envoy, picker, method="GET", path="/health")
        assert found == Routed(endpoints=(picker.pods[1], picker.pods[0], picker.pods[2]), body=b"")


# --- models -----------------------------------------------------------------------------------------------------------


async def test_a_model_that_nobody_listed_is_routed_as_it_is(envoy: Envoy) -> None:
    body = body_of("direct-model")
    async with steering_picker(THREE, models=MODELS) as picker:
        found = await routed(envoy, picker, body[:20], body[20:])
        assert found == Routed(endpoints=(picker.pods[1], picker.pods[0], picker.pods[2]), body=body)


async def test_where_only_listed_models_are_served_another_one_is_answered_404(envoy: Envoy) -> None:
    models = replace(MODELS, rules=(), only_listed=True)
    async with steering_picker(THREE, models=models) as picker:
        found = await outcome(envoy, picker, body_of("direct-model"))
        assert found == Refused(
            status=404,
            reason="unknown-model",
            content_type="application/json",
            error={
                "message": f"the model 'direct-model' is not served here; there are {BASE_MODEL}",
                "type": "invalid_request_error",
                "param": None,
                "code": "model_not_found",
            },
        )
        assert isinstance(await outcome(envoy, picker, body_of("foo")), Routed)  # an adapter that the pods tell of


@pytest.mark.parametrize("rule", MODELS.rules, ids=lambda rule: rule.model)
async def test_a_rewritten_model_is_all_that_changes_of_a_body(envoy: Envoy, rule: ModelRule) -> None:
    sent, served = body_of(rule.model), body_of(rule.targets[0].model)
    states = [replace(state, models=(BASE_MODEL, "rewritten-model")) for state in WITH_ADAPTERS]
    async with steering_picker(states, models=MODELS) as picker:
        found = await routed(envoy, picker, sent[:17], sent[17:])
        length = {} if envoy.mode is BodyMode.FULL_DUPLEX_STREAMED else {"content-length": str(len(served))}
        uncompressed = ("accept-encoding",)  # the answer's name is changed back
        assert found == Routed(endpoints=found.endpoints, body=served, set_headers=length, removed_headers=uncompressed)
        assert found.endpoints[0] == picker.pods[1]


# --- responses --------------------------------------------------------------------------------------------------------

JSON_CHUNKS = (b'{"model":"sql-lora-1fdg2","choi', b'ces":[{"text":"\\"model\\":\\"sql-lora-1fdg2\\""}]}')
EVENTS = (
    b'data: {"model":"sql-lora-1fdg2","choices":[]}\n\ndata: {"mod',
    b'el":"sql-lora-1fdg2","usage":{"prompt_tokens":7,"total_tokens":17,"completion_tokens":10}}\n',
    b"data: [DONE]\n\n",
    b"",
)


async def returned(envoy: Envoy, picker: Picker, model: str, *chunks: bytes, **response: Any) -> Returned:
    async with envoy.exchange(picker.grpc_address) as exchange:
        assert isinstance(await exchange.request(body_of(model)), Routed)
        return await exchange.response(*chunks, **response)


@pytest.mark.parametrize(
    ("chunks", "content_type"),
    [
        pytest.param(JSON_CHUNKS, "application/json", id="JSON in parts"),
        pytest.param((b"no healthy upstream",), "application/json", id="no JSON"),
        pytest.param((b"".join(JSON_CHUNKS), b""), "application/json", id="an empty part at the end"),
        pytest.param(EVENTS, "text/event-stream", id="events"),
    ],
)
async def test_a_response_does_not_pass_the_picker_when_nothing_is_wanted_of_it(
    envoy: Envoy, chunks: Sequence[bytes], content_type: str
) -> None:
    async with steering_picker((IDLE,), models=MODELS) as picker:
        found = await returned(envoy, picker, "sql-lora-1fdg2", *chunks, content_type=content_type)
        assert found == Returned(asked_for=False, removed_headers=(), chunks=tuple(chunks))
        ended = f'kvmesh_pod_responses_total{{endpoint="{picker.pods[0]}",status="2xx"}} 1.0'
        await picker.eventually("/metrics", lambda page: ended in page)


@pytest.mark.parametrize(
    ("chunks", "content_type", "expected"),
    [
        pytest.param(
            JSON_CHUNKS,
            "application/json",
            (b'{"model":"sql-lora","choi', JSON_CHUNKS[1]),
            id="JSON in parts",
        ),
        pytest.param((b"no healthy", b" upstream"), "application/json", (b"", b"no healthy upstream"), id="no JSON"),
        pytest.param(
            (b"".join(JSON_CHUNKS), b""),
            "application/json",
            (b'{"model":"sql-lora","choi' + JSON_CHUNKS[1], b""),
            id="an empty part at the end",
        ),
        pytest.param(
            EVENTS,
            "text/event-stream",
            (
                b'data: {"model":"sql-lora","choices":[]}\n\n',
                b'data: {"model":"sql-lora","usage":{"prompt_tokens":7,"total_tokens":17,"completion_tokens":10}}\n',
                b"data: [DONE]\n\n",
                b"",
            ),
            id="events",
        ),
    ],
)
async def test_the_response_to_a_rewritten_request_names_the_clients_model(
    envoy: Envoy, chunks: Sequence[bytes], content_type: str, expected: Sequence[bytes]
) -> None:
    async with steering_picker((IDLE,), models=MODELS) as picker:
        found = await returned(envoy, picker, "sql-lora", *chunks, content_type=content_type)
        assert (found.asked_for, b"".join(found.chunks)) == (True, b"".join(expected))
        assert found.removed_headers == ("content-length",)
        if content_type == "text/event-stream":
            assert found.chunks == tuple(expected)  # whole lines go on at once


async def test_an_error_of_the_pod_passes_as_it_is(envoy: Envoy) -> None:
    error = b'{"error":{"message":"sql-lora-1fdg2 is not loaded"},"model":"sql-lora-1fdg2"}'
    async with steering_picker((IDLE,), models=MODELS) as picker:
        found = await returned(envoy, picker, "sql-lora", error, status=404)
        assert found == Returned(asked_for=False, removed_headers=(), chunks=(error,))


async def test_a_streamed_responses_usage_is_counted_beside_its_prediction(
    envoy: Envoy, redis_server: RedisServer
) -> None:
    served = ServedModel(name=BASE_MODEL, tokens_from=TokensFrom.TOKENIZER, tokenizer_folder=TOKENIZER)
    usage = b'{"prompt_tokens":2,"total_tokens":12,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":1}}'
    chunks = (b"data: {}\n\n", b'data: {"usage":' + usage + b"}\n\ndata: [DONE]\n\n", b"")
    # without an index nothing is predicted that could be compared
    settings: dict[str, Any] = {"sample_share": 1.0, "redis_url": redis_server.url, "index_timeout_seconds": 5.0}
    async with steering_picker((IDLE,), models=ModelTable(served=(served,)), **settings) as picker:
        found = await returned(envoy, picker, BASE_MODEL, *chunks, content_type="text/event-stream")
        assert found == Returned(asked_for=True, removed_headers=(), chunks=chunks)
        label = f'{{model="{BASE_MODEL}"}}'
        await picker.eventually("/metrics", lambda page: f"kvmesh_realised_requests_total{label} 1.0" in page)
        assert await picker.metric(f"kvmesh_realised_prompt_tokens_total{label}") == 2
        assert await picker.metric(f"kvmesh_realised_predicted_tokens_total{label}") == 0
        assert await picker.metric(f"kvmesh_realised_cached_tokens_total{label}") == 1
