"""What each answer tells its client: the request's id, and the id under which the decision is found everywhere.

A real Envoy with each of the files of `envoy/`, a whole picker, and simulated pods.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.models.models import ModelTable
from extproc.policy.values import Steering
from extproc.pools.plan_response import DECISION_HEADER, PREDICTED_HEADER
from extproc.settings.observation_settings import AccessLogTargets, ObservationSettings
from operate.install.envoy_filters import REQUEST_ID as REQUEST_ID_OF_ROUTES
from operate.local.envoy_config import SocketAddress
from podsim.model_folder import TINY_MODEL
from tests.e2e.stack import eventually, free_ports, simulated_pods
from tests.integration.envoy_process import running_envoy
from tests.integration.hermetic_picker import Picker, running_picker

FILES = ("local.yaml", "buffered.yaml", "original-dst.yaml")
REQUEST_ID, REASON = "x-request-id", "x-kvmesh-reason"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pods() -> AsyncIterator[tuple[str, ...]]:
    async with simulated_pods(2) as running:
        yield tuple(running)


def fresh_prompt() -> str:
    """Return a prompt of which no pod has any block."""
    return f"{uuid.uuid4()} " + " ".join(f"word{number} of a story about the sea" for number in range(60))


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A gateway with its picker."""

    gateway: str
    picker: Picker
    log: Path

    async def ask(
        self, prompt: str = "", *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Return status, headers and body of the answer to a completion."""
        body = {"model": "tiny", "prompt": prompt or fresh_prompt(), "max_tokens": 2} | fields
        url = f"{self.gateway}/v1/completions"
        async with self.picker.http.post(url, json=body, headers=headers) as answer:
            return answer.status, answer.headers, await answer.read()

    async def line_of(self, headers: Mapping[str, str]) -> dict[str, Any]:
        """Return the line of the access log for the decision that the answer names, once it is written."""

        async def lines() -> list[dict[str, Any]]:
            written = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
            return [line for line in written if line.get("decision_id") == headers[DECISION_HEADER]]

        [line] = await eventually(lines, bool)
        return line  # type: ignore[no-any-return]


@asynccontextmanager
async def way(
    file: str,
    pods: Sequence[str],
    tmp_path: Path,
    *,
    change: Callable[[dict[str, Any]], None] = lambda _: None,
    **changes: Any,
) -> AsyncIterator[Way]:
    log = tmp_path / "access.log"
    steering = Steering.ORIGINAL_DST if file == "original-dst.yaml" else Steering.OVERRIDE_HOST
    settings = {"model": "tiny", "tokenizer_folder": TINY_MODEL, "models": ModelTable(only_listed=True)}
    settings |= {"steering": steering, "observation": ObservationSettings(access_log=AccessLogTargets(file=log))}
    async with (
        running_picker((), **settings | {"endpoints": tuple(pods), "max_body_bytes": 100_000} | changes) as picker,
        running_envoy(
            tmp_path,
            file=file,
            picker_port=int(picker.grpc_address.rpartition(":")[2]),
            pods=[SocketAddress.parse(address) for address in pods],
            change=change,
        ) as envoy,
    ):
        yield Way(gateway=envoy.gateway, picker=picker, log=log)


@pytest.mark.parametrize("file", FILES)
async def test_an_answer_leads_to_its_decision(file: str, pods: tuple[str, ...], tmp_path: Path) -> None:
    async with way(file, pods, tmp_path) as mesh:
        status, first, _ = await mesh.ask(headers={REQUEST_ID: "the-clients-own"})
        assert (status, first[REQUEST_ID]) == (200, "the-clients-own")
        line = await mesh.line_of(first)
        assert (line["request_id"], line["fate"], line["status"]) == ("the-clients-own", "routed", 200)
        [shown] = await mesh.picker.get(f"/v1/decisions?decision_id={first[DECISION_HEADER]}")
        assert (shown["id"], shown["request_id"]) == (first[DECISION_HEADER], "the-clients-own")

        _, streamed, events = await mesh.ask(stream=True)
        assert events.endswith(b"data: [DONE]\n\n")
        assert uuid.UUID(streamed[REQUEST_ID])  # Envoy has named it
        assert (await mesh.line_of(streamed))["request_id"] == streamed[REQUEST_ID]
        assert streamed[DECISION_HEADER] != first[DECISION_HEADER]


@pytest.mark.parametrize("file", FILES)
async def test_the_predicted_tokens_are_those_that_the_pod_had_cached(
    file: str, pods: tuple[str, ...], tmp_path: Path
) -> None:
    async with way(file, pods, tmp_path) as mesh:
        prompt = fresh_prompt()
        _, cold, first = await mesh.ask(prompt)
        status, warm, body = await mesh.ask(prompt)
        assert status == 200
        cached = [json.loads(each)["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, body)]
        assert [int(each[PREDICTED_HEADER]) for each in (cold, warm)] == cached
        assert cached[0] == 0 < cached[1]
        assert (await mesh.line_of(warm))["predicted_cached_tokens"] == cached[1]


@pytest.mark.parametrize("file", FILES)
async def test_a_refusal_has_the_requests_id_and_the_decisions_where_there_is_one(
    file: str, pods: tuple[str, ...], tmp_path: Path
) -> None:
    async with way(file, pods, tmp_path) as mesh:
        status, unknown, _ = await mesh.ask(model="nobodys", headers={REQUEST_ID: "mine"})
        assert (status, unknown[REASON], unknown[REQUEST_ID]) == (404, "unknown-model", "mine")
        line = await mesh.line_of(unknown)
        assert (line["fate"], line["reason"], line["request_id"]) == ("refused", "unknown-model", "mine")
        assert PREDICTED_HEADER not in unknown

        status, large, _ = await mesh.ask("a" * 200_000, headers={REQUEST_ID: "large"})
        assert (status, large[REASON], large[REQUEST_ID]) == (413, "body-too-large", "large")
        assert DECISION_HEADER not in large  # it ended before its body did: nothing was decided


@pytest.mark.parametrize("file", FILES)
async def test_without_decision_headers_the_requests_id_is_still_told(
    file: str, pods: tuple[str, ...], tmp_path: Path
) -> None:
    async with way(file, pods, tmp_path, decision_headers=False) as mesh:
        answers = [await mesh.ask(headers={REQUEST_ID: "a"}), await mesh.ask(model="b", headers={REQUEST_ID: "a"})]
        assert [status for status, _, _ in answers] == [200, 404]
        for _, headers, _ in answers:
            assert headers[REQUEST_ID] == "a"
            assert DECISION_HEADER not in headers
            assert PREDICTED_HEADER not in headers


def as_installed(config: dict[str, Any]) -> None:
    """Have routes add the id as `kvmesh install` has it, and not the connection manager, which others may use."""
    [chain] = config["static_resources"]["listeners"][0]["filter_chains"]
    manager = chain["filters"][0]["typed_config"]
    del manager["always_set_request_id_in_response"]
    manager["route_config"]["virtual_hosts"][0]["routes"][0]["response_headers_to_add"] = [REQUEST_ID_OF_ROUTES]


@pytest.mark.parametrize("change", [lambda _: None, as_installed], ids=["files", "installed"])
@pytest.mark.parametrize("file", FILES)
async def test_envoys_own_answers_have_the_requests_id_where_there_is_no_picker(
    file: str, change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    picker, pod = free_ports(2)
    nobody = [SocketAddress(host="127.0.0.1", port=pod)]
    async with (
        running_envoy(tmp_path, file=file, picker_port=picker, pods=nobody, change=change) as envoy,
        aiohttp.ClientSession() as http,
    ):
        for headers in ({REQUEST_ID: "mine"}, {}):
            async with http.post(f"{envoy.gateway}/v1/completions", json={"prompt": "a"}, headers=headers) as answer:
                [found] = answer.headers.getall(REQUEST_ID)
                assert answer.status == 503
                assert found == "mine" if headers else uuid.UUID(found)


async def test_the_picker_tells_the_requests_id_where_envoy_does_not_and_it_comes_once(
    pods: tuple[str, ...], tmp_path: Path
) -> None:
    async with way("local.yaml", pods, tmp_path, change=as_installed) as mesh:
        for model, status in (("tiny", 200), ("nobodys", 404)):
            body = {"model": model, "prompt": fresh_prompt(), "max_tokens": 2}
            url = f"{mesh.gateway}/v1/completions"
            async with mesh.picker.http.post(url, json=body, headers={REQUEST_ID: "mine"}) as answer:
                assert (answer.status, answer.headers.getall(REQUEST_ID)) == (status, ["mine"])


@pytest.mark.parametrize("preserves", [False, True])
async def test_an_envoy_at_the_edge_keeps_a_strangers_id_only_where_it_is_told_to(
    preserves: bool, pods: tuple[str, ...], tmp_path: Path
) -> None:
    def at_the_edge(config: dict[str, Any]) -> None:
        [chain] = config["static_resources"]["listeners"][0]["filter_chains"]
        edge = {"use_remote_address": True, "xff_num_trusted_hops": 1, "preserve_external_request_id": preserves}
        chain["filters"][0]["typed_config"] |= edge

    async with way("local.yaml", pods, tmp_path, change=at_the_edge) as mesh:
        status, headers, _ = await mesh.ask(headers={REQUEST_ID: "mine", "x-forwarded-for": "203.0.113.7"})
        assert status == 200
        assert (headers[REQUEST_ID] == "mine") is preserves
        assert (await mesh.line_of(headers))["request_id"] == headers[REQUEST_ID]


# what no Unicode is, what is not printable, and more than most servers take
ODD_IDS = {"bytes": b"\xff\xfe\x80", "signs": "h\u00e9 \u202e".encode(), "tab": b"a\tb", "long": b"x" * 40_000}


@pytest.mark.parametrize("name", ODD_IDS.values(), ids=ODD_IDS)
async def test_no_name_of_a_request_is_too_odd_for_the_pickers_answer(
    name: bytes, pods: tuple[str, ...], tmp_path: Path
) -> None:
    async with way("local.yaml", pods, tmp_path, change=by_the_picker_alone) as mesh:
        for model in ("tiny", "nobodys"):
            body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1}).encode()
            reader, writer = await asyncio.open_connection(*mesh.gateway.removeprefix("http://").split(":"))
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\nx-request-id: %b\r\n\r\n%b" % (len(body), name, body)
            )
            first, *lines = (await reader.read()).partition(b"\r\n\r\n")[0].split(b"\r\n")
            writer.close()
            names = [line.partition(b": ")[0].decode() for line in lines]
            assert [names.count(each) for each in (REQUEST_ID, DECISION_HEADER)] == [1, 1]
            # the pod finds a long one too long, but has not failed
            by_pod = b"400" if name == ODD_IDS["long"] else b"200"
            assert first.split(b" ")[1] == (by_pod if model == "tiny" else b"404")
            assert ("x-kvmesh-upstream" in names) == (model == "tiny")


def by_the_picker_alone(config: dict[str, Any]) -> None:
    """Leave it to the picker to tell the id."""
    [chain] = config["static_resources"]["listeners"][0]["filter_chains"]
    del chain["filters"][0]["typed_config"]["always_set_request_id_in_response"]
