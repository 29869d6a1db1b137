"""A hostile prefill pod's answers: clients get theirs from the decode pod, which gets nothing that the pod said."""

import itertools
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.e2e.echo_pod import echo_pod
from tests.e2e.stack import eventually, free_ports, running_stack

PATH = "/v1/chat/completions"
HONEST = {
    **{"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "remote_engine_id": "e"},
    **{"remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1},
}
HOSTILE: tuple[dict[str, Any], ...] = (
    {"remote_host": "169.254.169.254"},
    {"remote_host": "10.0.0.9", "remote_port": 6379},
    {"remote_host": "127.0.0.1\r\nx-evil: 1"},
    {"remote_port": -5},
    {"remote_port": 10**30},
    {"remote_block_ids": [[[[1]]]]},
    {"remote_block_ids": {"0": [1]}},
    {"remote_engine_id": "e\0"},
    {"tp_size": 0},
    {f"further{number}": 1 for number in range(100)},
)


async def test_what_a_hostile_prefill_pod_says_reaches_no_decode_pod(tmp_path: Path) -> None:
    got: list[dict[str, Any]] = []
    said = itertools.chain(HOSTILE, itertools.repeat({}))

    async def prefill(request: web.Request) -> web.StreamResponse:
        if request.path != PATH:
            return web.Response(status=404)
        return web.json_response({"kv_transfer_params": HONEST | next(said)})

    async def decode(request: web.Request) -> web.StreamResponse:
        if request.path != PATH:
            return web.Response(status=404)
        got.append(await request.json())
        return web.json_response({"choices": []})

    ports = free_ports(2)
    pods = [f"127.0.0.1:{port}" for port in ports]
    policy = {"disaggregation": {"enabled": True, "rule": "always"}, "load": {"health": {"avoidSeconds": 0.05}}}
    settings = json.dumps({"roles": f"{pods[0]}=prefill", "policy": policy})
    async with (
        echo_pod("127.0.0.1", ports[0], prefill, model="tiny"),
        echo_pod("127.0.0.1", ports[1], decode, model="tiny"),
        running_stack(tmp_path, settings=settings, endpoints=pods) as stack,
    ):
        await eventually(stack.state, lambda state: all(pod["state"] == "ready" for pod in state["endpoints"]))

        async def send() -> float:
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "a prompt " * 100}]}
            assert (await stack.send("POST", PATH, json=chat)).status == 200
            return await stack.metric(r'kvmesh_prefill_legs_total\{[^}]*outcome="answered"\}')

        await eventually(send, lambda answered: answered == 1)  # meanwhile the pod is avoided now and then
        refused = await stack.metric(r'kvmesh_prefill_legs_total\{[^}]*outcome="unreadable"\}')
    assert refused == len(HOSTILE)
    *others, last = (body.get("kv_transfer_params") for body in got)
    assert last == HONEST
    assert not any(others)
