"""A pod with --api-key guards what vLLM 0.32 guards (vllm/entrypoints/serve/middleware/authenticate.py)."""

import aiohttp
import pytest

from tests.integration.keyed_pods import KEY, keyed_pod

GUARDED = [
    "/v1/models",
    "/v1/chat/completions",
    "/v1/completions/render",
    "/v1/nothing",
    "/v2/embed",
    "/inference/v1/x",
]
OPEN = ["/metrics", "/version", "/kv_event_sources", "/health", "/load"]


@pytest.mark.parametrize(
    ("authorization", "opens"),
    [
        (None, False),
        ("", False),
        (f"Bearer {KEY}", True),
        (f"bearer {KEY}", True),
        ("Bearer second", True),
        (f"Basic {KEY}", False),
        (f"Bearer  {KEY}", False),
        (f"Bearer {KEY}x", False),
        (KEY, False),
    ],
)
async def test_guarded_paths_want_the_key_and_others_do_not(authorization: str | None, opens: bool) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    async with (
        keyed_pod(KEY, "second") as pod,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10), headers=headers) as http,
    ):
        for path in GUARDED:
            async with http.get(pod.base_url + path) as answer:
                assert (answer.status != 401) is opens, path
                if not opens:
                    assert await answer.json() == {"error": "Unauthorized"}
        for path in OPEN:
            async with http.get(pod.base_url + path) as answer:
                assert answer.status == 200, path
        async with http.post(f"{pod.base_url}/tokenize", json={"prompt": "import os"}) as answer:
            assert answer.status == 200
        async with http.options(f"{pod.base_url}/v1/models") as answer:
            assert answer.status == 405


async def test_without_keys_nothing_is_guarded() -> None:
    async with keyed_pod() as pod, aiohttp.ClientSession() as http, http.get(f"{pod.base_url}/v1/models") as answer:
        assert answer.status == 200
