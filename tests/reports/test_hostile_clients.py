"""No client makes a good pod look bad."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.echo_pod import MODEL
from tests.e2e.stack import Answer, Stack
from tests.reports.failing_pods import (
    CHAT,
    CHATS,
    MOST_CHARACTERS,
    PATIENCE_SECONDS,
    Pod,
    all_serve,
    mesh_of,
    ordinary,
)


async def leave(mesh: Stack, *, seconds: float = 0.0, is_stream: bool = True) -> None:
    """Leave so many seconds after the headers, or the request if they do not come."""
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_SECONDS):
            async with mesh.http.post(f"{mesh.ready['gateway']}{CHATS}", json=CHAT | {"stream": is_stream}) as response:
                await asyncio.sleep(seconds)
                response.close()


LONG = [{"role": "user", "content": "hello " * MOST_CHARACTERS}]
HOSTILE: dict[str, Callable[[Stack], Awaitable[object]]] = {
    "leaves behind the headers": leave,
    "leaves before the first token": lambda mesh: leave(mesh, seconds=0.2),
    "no messages": lambda mesh: mesh.send("POST", CHATS, json={"model": MODEL, "messages": 3}),
    "no JSON": lambda mesh: mesh.send("POST", CHATS, data=b"{", headers={"content-type": "application/json"}),
    "too long": lambda mesh: mesh.send("POST", CHATS, json=CHAT | {"messages": LONG}),
    "above its quota": lambda mesh: mesh.send(
        "POST", CHATS, json=CHAT, headers={"x-gateway-inference-fairness-id": "greedy"}
    ),
    "leaves before the headers": lambda mesh: leave(mesh, is_stream=False),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_no_client_makes_a_good_pod_look_bad(tmp_path: Path, what: str) -> None:
    pods = [Pod(way=ordinary, counts=what.startswith("leaves")) for _ in range(4)]
    async with mesh_of(tmp_path, pods) as mesh:
        await all_serve(mesh, pods)
        for _ in range(10):
            answers = await asyncio.gather(*(HOSTILE[what](mesh) for _ in range(6)))
            shown = await mesh.explain(CHAT, path=CHATS)
            assert (len(shown["candidates"]), shown["rejected"]) == (4, [])
        statuses = {answer.status for answer in answers if isinstance(answer, Answer)}
        assert statuses == ({429} if what == "above its quota" else set() if what.startswith("leaves") else {400})
