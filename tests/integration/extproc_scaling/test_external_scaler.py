"""KEDA's external scaler as a real gRPC client sees it, before a whole picker that follows documents.

Messages are written and read here byte by byte, after the numbers of KEDA's externalscaler.proto: the picker's own
declaration of them is not asked.
"""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from extproc.scaling import external_scaler
from extproc.settings.config import GrpcServer
from tests.integration.hermetic_envoy import Refused, Routed
from tests.integration.overload_pods import HeldPod
from tests.integration.pools_picker import Mesh, policy_document, pool_document, running_mesh

CALL_SECONDS = 10.0
SCALED = {"both": {"minReplicas": 1, "maxReplicas": 8, "scaleUp": {"queueRequests": 8}}}


def field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2, len(value)]) + value


def ref(namespace: str = "llm", **metadata: str) -> bytes:
    """Return a ScaledObjectRef."""
    entries = [field(3, field(1, key.encode()) + field(2, value.encode())) for key, value in metadata.items()]
    return field(1, b"my-scaled-object") + field(2, namespace.encode()) + b"".join(entries)


def fields(data: bytes) -> dict[int, Any]:
    """Read a message of short fields: number -> its last value."""
    found: dict[int, Any] = {}
    at = 0
    while at < len(data):
        number, kind = data[at] >> 3, data[at] & 7
        at += 1
        if kind == 1:
            (found[number],) = struct.unpack_from("<d", data, at)
            at += 8
        elif kind == 2:
            found[number] = data[at + 1 : at + 1 + data[at]]
            at += 1 + data[at]
        else:
            assert kind == 0
            found[number] = data[at]
            assert data[at] < 0x80
            at += 1
    return found


class Keda:
    """Calls as KEDA makes them."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def call(self, method: str, request: bytes) -> dict[int, Any]:
        return fields(await self._channel.unary_unary(f"/externalscaler.ExternalScaler/{method}")(request, timeout=10))

    def stream(self, request: bytes) -> Any:
        method = self._channel.unary_stream("/externalscaler.ExternalScaler/StreamIsActive")
        return method(request, timeout=CALL_SECONDS)

    async def refusal(self, method: str, request: bytes) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await self.call(method, request)
        return raised.value.code(), raised.value.details() or ""


@asynccontextmanager
async def scaled_pools(
    folder: Path, *, shadow: bool = False, server: GrpcServer = GrpcServer.OWN, **spec: Any
) -> AsyncIterator[tuple[Mesh, Keda, HeldPod]]:
    """Have the pools llm/a, with a pod and a policy that scales it, and llm/b; wait until there is a signal."""
    async with running_mesh(folder, grpc_server=server) as mesh:
        mesh.desk.put(
            pool_document("a", port=mesh.port, hosts="a.example.com"),
            pool_document("b", port=mesh.port, hosts="b.example.com"),
            policy_document("scaled", pool="a", autoscale=spec or SCALED, shadow=shadow),
        )
        pod = await mesh.pod("a")
        await mesh.eventually("/state?pool=llm/a", lambda state: any(each["ready"] for each in state.get("scale", ())))
        async with grpc.aio.insecure_channel(mesh.picker.grpc_address) as channel:
            yield mesh, Keda(channel), pod


async def test_the_wanted_number_is_told_as_keda_asks_for_it(tmp_path: Path) -> None:
    async with scaled_pools(tmp_path) as (_, keda, _pod):
        asked = ref(pool="llm/a")
        assert await keda.call("IsActive", asked) == {1: 1}
        spec = fields((await keda.call("GetMetricSpec", asked))[1])
        assert spec == {1: b"wanted-replicas", 2: 1, 3: 1.0}
        # KEDA asks for the metric by the name of the spec
        value = fields((await keda.call("GetMetrics", field(1, asked) + field(2, b"wanted-replicas")))[1])
        assert value == {1: b"wanted-replicas", 2: 1, 3: 1.0}


async def test_a_pool_may_be_named_in_its_scaled_objects_namespace(tmp_path: Path) -> None:
    async with scaled_pools(tmp_path) as (_, keda, _pod):
        assert await keda.call("IsActive", ref(pool="a", role="both")) == {1: 1}
        code, words = await keda.refusal("IsActive", ref(namespace="other", pool="a"))
        assert (code, words) == (
            grpc.StatusCode.NOT_FOUND,
            "there is no pool 'other/a' here; there are: llm/a, llm/b",
        )


async def test_queued_tokens_may_be_asked_for_with_a_target(tmp_path: Path) -> None:
    async with scaled_pools(tmp_path) as (_, keda, _pod):
        asked = ref(pool="a", metric="queued-tokens", target="100")
        assert fields((await keda.call("GetMetricSpec", asked))[1]) == {1: b"queued-tokens", 2: 100, 3: 100.0}
        assert fields((await keda.call("GetMetrics", field(1, asked)))[1]) == {1: b"queued-tokens"}


@pytest.mark.parametrize(
    ("metadata", "code", "words"),
    [
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "this picker serves several pools: metadata.pool must name one"),
        ({"pool": "b"}, grpc.StatusCode.NOT_FOUND, "no signal for the role 'both' of the pool 'llm/b'"),
        ({"pool": "a", "role": "prefill"}, grpc.StatusCode.NOT_FOUND, "the policy's autoscale names both"),
        ({"pool": "a", "metric": "x"}, grpc.StatusCode.INVALID_ARGUMENT, "wanted-replicas or queued-tokens"),
        (
            {"pool": "a", "metric": "queued-tokens", "target": "nan"},
            grpc.StatusCode.INVALID_ARGUMENT,
            "metadata.target is 'nan'",
        ),
    ],
)
async def test_what_cannot_be_answered_is_refused_in_words(
    tmp_path: Path, metadata: dict[str, str], code: grpc.StatusCode, words: str
) -> None:
    async with scaled_pools(tmp_path) as (_, keda, _pod):
        told = await keda.refusal("GetMetricSpec", ref(**metadata))
        assert told[0] is code
        assert words in told[1]


async def test_what_is_no_message_is_refused_and_other_methods_are_not_there(tmp_path: Path) -> None:
    async with scaled_pools(tmp_path) as (_, keda, _pod):
        assert (await keda.refusal("IsActive", b"\xff\xff"))[0] is grpc.StatusCode.INTERNAL
        # KEDA falls back on GetMetricSpec then
        assert (await keda.refusal("StreamMetricSpec", ref(pool="a")))[0] is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("server", GrpcServer)
async def test_a_stream_is_told_of_changes_and_ends_with_its_pool(server: GrpcServer, tmp_path: Path) -> None:
    spec: dict[str, Any] = {"both": {"minReplicas": 0, "maxReplicas": 8}, "shadow": True}
    async with scaled_pools(tmp_path, server=server, **spec) as (mesh, keda, pod):
        stream = keda.stream(ref(pool="a"))
        assert fields(await stream.read()) == {1: 1}
        address = pod.address.rpartition(":")[0].replace(".", "-")
        mesh.desk.remove("Pod", f"llm/pod-{address}")
        assert fields(await stream.read()) == {}  # in shadow: the present number, which is none
        mesh.desk.remove("InferencePool", "llm/a")
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()
        assert await stream.code() is grpc.StatusCode.NOT_FOUND
        assert await stream.details() == "there is no pool 'llm/a' here; there are: llm/b"


async def test_the_signals_are_on_the_pages(tmp_path: Path) -> None:
    async with scaled_pools(tmp_path) as (mesh, _, _pod):
        (scale,) = (await mesh.picker.get("/state?pool=llm/a"))["scale"]
        assert {name: scale[name] for name in ("role", "wanted", "told", "ready", "present", "shadow")} == {
            "role": "both",
            "wanted": 1,
            "told": 1,
            "ready": 1,
            "present": 1,
            "shadow": False,
        }
        assert "the number stays" in scale["reason"]
        assert await mesh.picker.metric("kvmesh_wanted_replicas") == 1
        assert await mesh.picker.metric("kvmesh_ready_replicas") == 1
        page = await mesh.picker.get("/metrics")
        assert 'kvmesh_scale_state{pool="llm/a",role="both",state="too-few-samples"} 1' in page


@pytest.mark.parametrize("server", GrpcServer)
async def test_the_first_request_for_a_pool_without_pods_wakes_it_at_once_and_is_answered(
    server: GrpcServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_scaler, "TELL_SECONDS", 3600.0)  # streams are told by the request alone
    async with running_mesh(tmp_path, grpc_server=server) as mesh:
        mesh.desk.put(
            pool_document("a", port=mesh.port),
            policy_document("scaled", pool="a", autoscale={"both": {"minReplicas": 0}}),
        )
        await mesh.eventually("/state?pool=llm/a", lambda state: bool(state.get("scale")))
        async with grpc.aio.insecure_channel(mesh.picker.grpc_address) as channel:
            stream = Keda(channel).stream(ref(pool="a"))
            assert fields(await stream.read()) == {}
            asked = asyncio.create_task(mesh.asked(pool="llm/a"))
            assert fields(await stream.read()) == {1: 1}
            (scale,) = (await mesh.picker.get("/state?pool=llm/a"))["scale"]
            assert (scale["wanted"], scale["state"]) == (1, "no-ready-pods")
            assert not asked.done()
            pod = await mesh.pod("a")
            pod.release()
            routed = await asked
            assert isinstance(routed, Routed)
            assert routed.endpoints[0] == pod.address


async def test_where_a_pool_may_not_be_without_pods_a_request_is_refused_at_once(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        mesh.desk.put(
            pool_document("a", port=mesh.port),
            policy_document("scaled", pool="a", autoscale={"both": {"minReplicas": 1}}),
        )
        await mesh.eventually("/state?pool=llm/a", lambda state: bool(state.get("scale")))
        assert isinstance(await mesh.asked(pool="llm/a"), Refused)


VARIANTS = [
    {
        "name": "large",
        "selector": [{"name": "gpu", "value": "h100"}],
        "podHourPrice": 4,
        "minReplicas": 1,
        "prefillTokensPerSecond": 9000,
    }
]


async def test_a_variants_number_is_told_and_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with scaled_pools(tmp_path, both={"variants": VARIANTS}) as (mesh, keda, _pod):
        await mesh.eventually("/state?pool=llm/a", lambda state: len(state["scale"][0]["variants"]) == 2)
        value = fields((await keda.call("GetMetrics", field(1, ref(pool="a", variant="large"))))[1])
        assert value[3] == 1.0
        code, words = await keda.refusal("GetMetricSpec", ref(pool="a", variant="small"))
        assert code is grpc.StatusCode.NOT_FOUND
        assert words == "the role 'both' has no variant 'small': the policy's autoscale names large"


async def test_the_plan_is_on_a_page_for_one_pool_and_for_all(tmp_path: Path) -> None:
    async with scaled_pools(tmp_path) as (mesh, _, _pod):
        (plan,) = await mesh.picker.get("/v1/plan?pool=llm/a&seconds=3600")
        assert (plan["pool"], plan["of"]) == ("llm/a", "in 3600 s")
        assert [role["role"] for role in plan["roles"]] == ["both"]
        every = await mesh.picker.get("/v1/plan")
        assert [(each["pool"], len(each["roles"])) for each in every] == [("llm/a", 1), ("llm/b", 0)]
        refused = await mesh.picker.get("/v1/plan?seconds=-3")
        assert refused == {"error": "seconds must be a number from 0 to 604800, not '-3'"}
        assert "is not known here" in (await mesh.picker.get("/v1/plan?pool=llm/c"))["error"]
