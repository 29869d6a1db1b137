"""A real Prometheus stores, for the buckets of a picker's latencies, the traces of requests that fell into them."""

import json
from pathlib import Path
from typing import Any

from extproc.ext_proc.exchange import BodyMode
from extproc.settings.observation_settings import ObservationSettings
from podsim.model_folder import TINY_MODEL
from tests.e2e.stack import eventually
from tests.integration.hermetic_envoy import Envoy, Routed
from tests.integration.hermetic_picker import Picker, running_picker
from tests.integration.hermetic_pods import BASE_MODEL, PodState
from tests.integration.kv_redis import RedisServer
from tests.integration.otlp_collector import collector, spans_of
from tests.prometheus.prometheus_process import running_prometheus

ENVOY = Envoy(mode=BodyMode.BUFFERED, raw=True)
TRACED, UNTRACED = "0af7651916cd43dd8448eb211c80319c", "1af7651916cd43dd8448eb211c80319c"
EVENTS = b"".join(
    b"data: " + json.dumps(each).encode() + b"\n\n"
    for each in (
        {"choices": [{"text": "a"}]},
        {
            "choices": [],
            "usage": {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
        },
    )
)
LATENCIES = {
    "kvmesh_pick_phase_seconds_bucket",
    "kvmesh_model_request_seconds_bucket",
    "kvmesh_model_first_token_seconds_bucket",
}


async def ask(picker: Picker, trace_id: str, *, is_sampled: bool) -> None:
    """Send one stream to its end, whose client has a trace."""
    body = json.dumps({"model": BASE_MODEL, "prompt": "a story", "stream": True}).encode()
    flags = "01" if is_sampled else "00"
    async with ENVOY.exchange(picker.grpc_address) as exchange:
        found = await exchange.request(body, headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-{flags}"})
        assert isinstance(found, Routed), found
        returned = await exchange.response(EVENTS, content_type="text/event-stream")
        assert returned.asked_for


async def test_a_bucket_leads_to_a_trace_and_no_untraced_request_is_named(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    received: list[Any] = []
    async with collector(received) as address:
        settings: dict[str, Any] = {
            "otlp_endpoint": address,
            "observation": ObservationSettings(trace_share=0.0),
            "model": BASE_MODEL,
            "tokenizer_folder": TINY_MODEL,
            "redis_url": redis_server.url,
            "sample_share": 1.0,
        }
        async with running_picker([PodState()], **settings) as picker:
            await ask(picker, UNTRACED, is_sampled=False)
            await ask(picker, TRACED, is_sampled=True)
            targets = {"kvmesh-picker": [picker.admin.removeprefix("http://")]}
            async with running_prometheus(tmp_path, targets=targets) as prometheus:
                found = await eventually(
                    lambda: prometheus.exemplars('{__name__=~".+_bucket",service="kvmesh-picker"}'),
                    lambda found: {series["__name__"] for series, _ in found} >= LATENCIES,
                )
                assert {labels["trace_id"] for _, labels in found} == {TRACED}
                phases = {series["phase"] for series, _ in found if "phase" in series}
                assert phases == {"parse", "tokenize", "lookup", "decide"}
                # the page is well taken: a malformed one would not be stored; exemplars are visible before their scrape
                await eventually(
                    lambda: prometheus.query('up{service="kvmesh-picker"}'),
                    lambda up: [each.points[0][1] for each in up] == [1.0],
                )
            page = await picker.get("/metrics")
            assert "trace_id" not in page  # the text format has no place for it
    assert {span["traceId"] for span in spans_of(received)} == {TRACED}
