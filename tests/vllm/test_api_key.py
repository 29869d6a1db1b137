"""A real vLLM with --api-key before the real stack: what it guards, what the key opens, and what a wrong one leaves."""

import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.pages.findings import Severity
from extproc.settings.config import PickerSettings
from kv_indexer.pools.event_sources import EventSourceDirectory
from kvmesh.errors import PodRefusesError
from kvmesh.pods.pod_access import PodAccess
from kvmesh.pods.pod_http import PodPages
from kvmesh.pods.pod_key import PodKey
from operate.doctor.examine import DoctorSettings, examine
from tests.e2e.stack import Stack, eventually, running_stack
from tests.integration.keyed_pods import keyed_pod, write_key
from tests.vllm.environment import VllmEnvironment
from tests.vllm.servers import BLOCK_SIZE, MODEL_NAME, VllmPod, running_pods

KEY, NEXT = "sk-planted-7a8b9c", "sk-planted-next-0d1e2f"
AS_CLIENT = {"Authorization": f"Bearer {KEY}"}
WANTS_A_KEY = "the pod wants a key: give --pod-key-file"
PATIENT = "index_timeout_ms: 2000\nrender_timeout_ms: 5000\nsample_share: 1.0\n"
# said, because the model's folder is on this machine and would be found
ASKED = f"policy: {{models: {{served: [{{name: {MODEL_NAME}, tokens: auto}}]}}}}\n"
RENDERED = '"POST /v1/completions/render HTTP/1.1" 200'
GET, POST = "GET", "POST"
PATHS = {
    "/v1/models": GET,
    "/v1/completions": POST,
    "/v1/completions/render": POST,
    "/v1/chat/completions/render": POST,
    "/v1/nothing": GET,
    "/v2/embed": POST,
    "/inference/v1/generate": POST,
    "/tokenize": POST,
    "/metrics": GET,
    "/version": GET,
    "/kv_event_sources": GET,
    "/health": GET,
}


@pytest.fixture(scope="module")
def guarded_pod(
    vllm_environment: VllmEnvironment, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmPod]:
    logs, flags = tmp_path_factory.mktemp("vllm"), ("--api-key", KEY, NEXT)
    with running_pods(1, environment=vllm_environment, model_folder=tiny_model, logs=logs, extra_flags=flags) as [pod]:
        yield pod


async def refused_paths(base_url: str, headers: Mapping[str, str]) -> set[str]:
    """Return the paths that are answered 401."""
    refused = set()
    async with aiohttp.ClientSession(headers=headers) as http:
        for path, method in PATHS.items():
            body: dict[str, Any] = {} if method == GET else {"json": {"prompt": "import os", "max_tokens": 1}}
            async with http.request(method, base_url + path, **body) as answer:
                if answer.status == 401:
                    assert await answer.json() == {"error": "Unauthorized"}
                    refused.add(path)
    return refused


@pytest.mark.parametrize(
    "authorization", [None, f"Bearer {KEY}", f"bearer {NEXT}", "Bearer wrong", f"Basic {KEY}", KEY]
)
async def test_a_simulated_pod_guards_what_vllm_guards(authorization: str | None, guarded_pod: VllmPod) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    refused = await refused_paths(guarded_pod.url, headers)
    async with keyed_pod(KEY, NEXT) as simulated:
        assert await refused_paths(simulated.base_url, headers) == refused
    assert refused == (
        set() if authorization and authorization.lower().startswith("bearer sk-") else set(list(PATHS)[:7])
    )


async def test_an_indexer_learns_the_model_with_the_key_alone(guarded_pod: VllmPod, tmp_path: Path) -> None:
    without, given = PodPages(), PodPages(key=PodKey(write_key(tmp_path / "key", KEY)))
    try:
        directory = EventSourceDirectory(pages=given, configured={})
        assert await directory.first_model(guarded_pod.address) == MODEL_NAME
        assert list(await directory.find(guarded_pod.address)) == [0]
        with pytest.raises(PodRefusesError, match=WANTS_A_KEY):
            await EventSourceDirectory(pages=without, configured={}).first_model(guarded_pod.address)
    finally:
        without.close()
        given.close()


async def completion(stack: Stack, prompt: str) -> tuple[int, int]:
    """Send a completion as a client with a key of its own; return what was predicted and what vLLM found."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    answer = await stack.send("POST", "/v1/completions", json=body, headers=AS_CLIENT)
    assert answer.status == 200, answer.body
    decision = (await stack.state())["decisions"][0]
    assert decision["degraded"] == []
    [choice] = answer.json["choices"]
    assert decision["prompt_tokens"] == len(choice["prompt_token_ids"])
    filled = (len(choice["prompt_token_ids"]) + len(choice["token_ids"]) - 1) // BLOCK_SIZE
    again = {"model": MODEL_NAME, "prompt": [*choice["prompt_token_ids"], *choice["token_ids"], 0]}
    await eventually(
        lambda: stack.explain(again), lambda explained: explained["candidates"][0]["matched_blocks"] >= filled
    )
    return decision["matched_tokens"], answer.cached_tokens


async def problems(stack: Stack) -> str:
    async with stack.http.get(f"{stack.ready['admin']}/readyz") as answer:
        return json.dumps({name: said for name, said in (await answer.json()).items() if name.endswith("_problems")})


async def test_with_the_key_prompts_are_rendered_and_hit_as_predicted(guarded_pod: VllmPod, tmp_path: Path) -> None:
    file = write_key(tmp_path / "key", KEY)
    rendered = guarded_pod.log.read_text().count(RENDERED)
    flags = ("--pod-key-file", str(file))
    async with running_stack(tmp_path, *flags, settings=PATIENT + ASKED, endpoints=[guarded_pod.address]) as stack:
        assert stack.ready["model"] == MODEL_NAME  # as the pod says
        [endpoint] = await eventually(lambda: endpoints(stack), lambda found: bool(found[0]["models"]))
        assert endpoint["models"] == [MODEL_NAME]

        shared = f"{uuid.uuid4()} " + " ".join(f"the {i}th wave reached the harbour" for i in range(40))
        outcomes = [await completion(stack, f"{shared} {'and then ' * turn}") for turn in range(4)]
        assert [predicted for predicted, _ in outcomes] == [cached for _, cached in outcomes]
        assert all(cached > 0 for _, cached in outcomes[1:])
        assert guarded_pod.log.read_text().count(RENDERED) >= rendered + len(outcomes)
        assert await problems(stack) == json.dumps({"endpoint_problems": {}, "render_problems": {}})

        # a client's key is its own: the picker's is put into nobody's request
        strange = await stack.send("POST", "/v1/completions", json={"model": MODEL_NAME, "prompt": shared})
        assert strange.status == 401

        write_key(file, "wrong")
        await eventually(lambda: problems(stack), lambda said: "does not take the key of --pod-key-file" in said)
        [endpoint] = await endpoints(stack)
        assert endpoint["models"] == [MODEL_NAME]
        assert await stack.metric("kvmesh_endpoint_wants_key") == 1
        predicted, cached = await completion(stack, f"{shared} by /tokenize")  # which stays open
        assert predicted == cached > 0

        write_key(file, NEXT)
        await eventually(lambda: problems(stack), lambda said: "--pod-key-file" not in said)
        assert await stack.metric("kvmesh_endpoint_wants_key") == 0
        seen = json.dumps(await stack.state())
    assert KEY not in seen
    assert NEXT not in seen


async def endpoints(stack: Stack) -> Any:
    return (await stack.state())["endpoints"]


@pytest.mark.parametrize(("has_key", "severity"), [(True, Severity.OK), (False, Severity.ERROR)])
async def test_the_doctor_asks_with_the_key_and_names_the_flag_without(
    has_key: bool, severity: Severity, guarded_pod: VllmPod, tmp_path: Path
) -> None:
    access = PodAccess(key_file=write_key(tmp_path / "key", KEY) if has_key else None)
    settings = PickerSettings(
        endpoints=(guarded_pod.address,),
        model=MODEL_NAME,
        tokenizer_folder=guarded_pod.model_folder,
        pod_access=access,
        redis_url="redis://127.0.0.1:1/0",
    )
    found = await examine(DoctorSettings(picker=settings, trial=False))
    [finding] = [each for each in found if each.check == "pod-key"]
    assert finding.severity is severity
    assert has_key or finding.seen == f"/v1/models: {WANTS_A_KEY}"
