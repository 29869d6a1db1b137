"""Where one picker serves several pools, a prompt is shown on the admin pages of the pool whose policy allows it.

Two pools, everything switched on, the same secrets sent to both. `test_planted_secrets` has one pool, and more kinds.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.planted import leaks, token_traces, traces_of
from tests.e2e.pool_documents import MODEL, inference_policy, mesh_policy
from tests.e2e.stack import eventually
from tests.e2e.test_planted_secrets import (
    BEARER,
    CREDENTIALS,
    SECRETS,
    STREAM,
    collector,
    lines_of,
    prompt_tokens,
    stored,
)
from tests.mesh.pools_mesh import CHAT, CODE, PoolsMesh, pools_mesh

HOSTS = {CHAT: "chat.example.com", CODE: "code.example.com"}
PROMPT = " ".join([SECRETS.prompt] * 12)
SHOWN = "the page of prefixes of the pool that may show text"


@pytest.mark.asyncio(loop_scope="session")
async def test_a_prompt_is_shown_for_the_pool_whose_policy_allows_it_and_nowhere_else(
    secrets: Path, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(SECRETS.admin_token)
    async with collector() as (otlp, spans):
        flags = ("--admin-token-file", str(tmp_path / "token"), "--log-level", "debug", "--log-format", "json")
        observed = ("--access-log", f"stdout,{tmp_path / 'access.log'},redis:{STREAM}")
        picker_flags = (
            "--otlp-endpoint",
            otlp,
            "--sample-share",
            "1",
            "--trace-share",
            "1",
            "--max-body-bytes",
            "100000",
            *observed,
        )
        async with pools_mesh(tmp_path, secrets=secrets, flags=flags, picker_flags=(*picker_flags, "--audit")) as mesh:
            mesh.write("policy", *policies(shows_text=True))
            await traffic(mesh)
            shown = await eventually(lambda: asked_and_shown(mesh), lambda page: b"zebra7f3a" in page)
            places = await pages(mesh) | stored(mesh.redis_port)
            assert leaks({SHOWN: shown}, traces_of({"others": SECRETS.tenant, "key": SECRETS.api_key})) == []
            mesh.write("policy", *policies(shows_text=False))
            await eventually(lambda: prefixes(mesh, CHAT), lambda page: b"zebra7f3a" not in page)
            places |= {f"{name} afterwards": page for name, page in (await pages(mesh)).items()}
            await eventually(lambda: asyncio.sleep(0, lines_of(tmp_path / "access.log")), lambda lines: lines >= 8)
            await eventually(lambda: asyncio.sleep(0, b"".join(spans).count(b"spanId")), lambda count: count >= 5)
    places |= {f"log {path.name}": path.read_bytes() for path in tmp_path.rglob("*.log*")}
    places |= {f"span export {number}": body for number, body in enumerate(spans)}
    for place, word in {
        f"admin /state?pool={CHAT}": b'"tiny"',
        f"admin /v1/decisions?limit=100&pool={CODE}": b'"tiny"',
        f"admin /v1/prefixes?pool={CODE}": b'"nodes"',
        "log picker.log": b'"level":"debug"',
        "log indexer.log": b"is live",
        "log access.log": CODE.encode(),
    }.items():
        assert word in places[place], f"{place} says nothing: {places[place][:300]!r}"
    found = leaks(places, traces_of(SECRETS.all()) | token_traces("the prompt", prompt_tokens()))
    assert not found, "\n".join(found)


def policies(*, shows_text: bool) -> list[dict[str, Any]]:
    """Return the mesh's policy with a quota for each tenant, and the one that lets a namespace's prompts be shown."""
    mesh = mesh_policy()
    mesh["spec"]["priorities"] = {"quotas": [{"tenant": "*", "requestsPerMinute": 600, "burstSeconds": 6}]}
    return [mesh, inference_policy("shown", CHAT.split("/")[0], observability={"showPromptText": shows_text})]


async def traffic(mesh: PoolsMesh) -> None:
    """Send requests that go well and wrong to both pools."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"json": {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "user": SECRETS.end_user}}),
        ("/v1/chat/completions", {"json": {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}}),
        (f"/v1/completions?api_key={SECRETS.query}", {"json": {"model": "nobodys", "prompt": PROMPT}}),
        ("/v1/completions", {"data": f'{{"prompt": "{PROMPT}'.encode()}),
        ("/v1/completions", {"json": {"model": MODEL, "prompt": PROMPT * 300}}),
    ]
    for host in HOSTS.values():
        for path, body in bodies:
            headers = CREDENTIALS | {"Host": host}
            async with mesh.http.post(f"{mesh.gateway}{path}", headers=headers, **body) as answer:
                await answer.read()
                assert (answer.status == 200) == ("json" in body and len(str(body)) < 10_000 and "?" not in path), path


async def asked_and_shown(mesh: PoolsMesh) -> bytes:
    """Return the prefixes of the pool that may show text, after one more request: the policy may just have come."""
    await mesh.complete(HOSTS[CHAT], PROMPT)
    return await prefixes(mesh, CHAT)


async def prefixes(mesh: PoolsMesh, pool: str) -> bytes:
    async with mesh.http.get(f"{mesh.admin}/v1/prefixes?pool={pool}", headers=BEARER) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.read()


async def pages(mesh: PoolsMesh) -> dict[str, bytes]:
    """Return what the admin pages say, but for the prefixes of the pool that may show text."""
    names = ["/metrics", "/readyz", "/pools", "/policies", "/nowhere", "/state", f"/v1/prefixes?pool={CODE}"]
    names += [f"{page}pool={pool}" for page in ("/state?", "/v1/decisions?limit=100&") for pool in HOSTS]
    found = {}
    for role, address, each in (
        *(("admin", mesh.admin, name) for name in names),
        *(("indexer_admin", mesh.indexer_admin, name) for name in ("/sources", "/pools", "/metrics", "/readyz")),
    ):
        async with mesh.http.get(f"{address}{each}", headers=BEARER) as answer:
            found[f"{role} {each}"] = await answer.read() + repr(answer.raw_headers).encode()
    return found
