"""What a client cannot make a pod do: real Envoy and picker, and what simulated pods get of fields of transfers.

vLLM 0.32 connects to the host in them, and ends where they have a wrong type.
"""

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.recorded_pods import Received, recorded_pods
from tests.e2e.stack import Stack, eventually, running_stack
from tests.e2e.test_disaggregation import HANDS_OVER

CHOSEN = b'"do_remote_prefill": true, "remote_host": "10.6.6.6", "remote_port": 1'
FIELD = b'"kv_transfer_params": {' + CHOSEN + b"}"
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
BODIES = {
    CHAT: b'{"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "bootstrap_host"}], "x": @}',
    COMPLETIONS: b'{"model": "tiny", "max_tokens": 2, "prompt": "a wave", "x": @}',
    "/v1/responses": b'{"model": "tiny", "store": false, "input": "a wave", "x": @}',
    "/v1/messages": b'{"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}], "x": @}',
    GENERATE: b'{"model": "tiny", "token_ids": [1, 2], "sampling_params": {"max_tokens": 2}, "x": @}',
    "/invocations": b'{"model": "tiny", "max_tokens": 2, "prompt": "a wave", "x": @}',
    "/of/another/api": b'{"x": @}',
}
# a form of the field -> what is left of it, each in place of @
FORMS = {
    b"1, " + FIELD: b"1",
    b'1, "ec_transfer_params": "", "bootstrap_host": "10.6.6.6", "disaggregated_params": 1': b"1",
    b"1, " + FIELD.replace(b"kv_transfer", b"kv\\u005Ftransfer"): b"1",
    b"1, " + FIELD + b', "y": 2, ' + FIELD + b', "kv_transfer_params": ""': b'1, "y": 2',
    b'1, "vllm_xargs": {"kv_transfer_params": "", "y": 2}': b'1, "vllm_xargs": {"y": 2}',
    b'1, "sampling_params": {"extra_args": {' + FIELD + b"}}": b'1, "sampling_params": {"extra_args": {}}',
}
PACKS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


async def sent(stack: Stack, received: list[Received], path: str, body: bytes, **headers: str) -> list[Received]:
    """Send it with a rank; return what the pods have got of it."""
    received.clear()
    fields = {"content-type": "application/json", "x-data-parallel-rank": "0"}
    answer = await stack.send("POST", path, data=body, headers=fields | headers)
    if path in (CHAT, COMPLETIONS) and body.startswith(b"{") and not headers:  # the others podsim does not serve
        assert answer.status == 200, answer.body
    got = [each for each in received if each.path == path]
    assert not any("x-data-parallel-rank" in each.headers for each in got)
    return got


@pytest.mark.parametrize("flags", [(), ("--body-mode", "buffered")])
async def test_without_disaggregation_pods_get_all_but_the_fields(tmp_path: Path, flags: tuple[str, ...]) -> None:
    async with (
        recorded_pods(1, *HANDS_OVER) as (pods, received),
        running_stack(tmp_path, *flags, endpoints=pods, settings="sample_share: 0\n") as stack,
    ):
        await eventually(stack.state, lambda state: all(pod["state"] == "ready" for pod in state["endpoints"]))
        for path, body in BODIES.items():
            for form, left in FORMS.items():
                given, kept = body.replace(b"@", form), body.replace(b"@", left)
                assert [each.body for each in await sent(stack, received, path, given)] == [kept]
                assert [each.body for each in await sent(stack, received, path, kept)] == [kept]
                (got,) = await sent(stack, received, path, given.decode().encode("utf-16"))
                assert got.body == kept
                for coding, pack in PACKS.items():
                    (got,) = await sent(stack, received, path, pack(given), **{"content-encoding": coding})
                    assert (got.body, got.headers.get("content-encoding")) == (kept, None)
            for coding, pack in PACKS.items():  # nothing is to be taken out
                (got,) = await sent(stack, received, path, pack(kept), **{"content-encoding": coding})
                assert (zlib.decompress(got.body, 47), got.headers["content-encoding"]) == (kept, coding)
            kept = kept.decode().encode("utf-16")
            assert [each.body for each in await sent(stack, received, path, kept)] == [kept]


@pytest.mark.parametrize("flags", [(), ("--body-mode", "buffered")])
async def test_with_disaggregation_pods_get_the_pickers_own_and_no_others(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    (tmp_path / "policy.yaml").write_text("disaggregation: {enabled: true, rule: always}\n", encoding="utf-8")
    async with recorded_pods(2, *HANDS_OVER) as (pods, received):
        settings = f"roles: {pods[0]}=prefill\npolicy: {tmp_path / 'policy.yaml'}\nsample_share: 0\n"
        async with running_stack(tmp_path, *flags, endpoints=pods, settings=settings) as stack:
            await eventually(stack.state, lambda state: all(pod["state"] == "ready" for pod in state["endpoints"]))
            for path, body in BODIES.items():
                for form, left in FORMS.items():
                    given, kept = body.replace(b"@", form), body.replace(b"@", left)
                    got = await sent(stack, received, path, given)
                    assert not any(b"10.6.6.6" in each.body for each in got)
                    if path not in (CHAT, COMPLETIONS):  # podsim serves no leg of them
                        assert (got[-1].pod, got[-1].body) == (pods[1], kept)
                        continue
                    leg, decoded = got
                    assert (leg.pod, decoded.pod) == (pods[0], pods[1])
                    fields = [json.loads(each.body)["kv_transfer_params"] for each in got]
                    assert [each["do_remote_decode"] for each in fields] == [True, False]
                    assert decoded.body.count(b'_transfer_params"') == 1
