"""The bodies of prefill legs by vLLM's own code: what its APIs read of them, and two connectors."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from extproc.disaggregation.leg_body import decode_body, prefill_body
from extproc.disaggregation.transfer_protocols import PROTOCOLS, Engine, LegNames, engine_of
from extproc.policy.disaggregation import Protocol
from extproc.requests.json_edit import JsonObject
from extproc.requests.openai import parse_request
from tests.vllm.environment import VllmEnvironment, offline

NAMES = LegNames(host="10.0.0.1", bootstrap_port=8998, number=5, claim=print, engine=Engine(engine_id="engine-0"))
TALK = [{"role": "user", "content": "hi"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": TALK, "max_completion_tokens": 9, "stream": True}),
    ("/v1/chat/completions", {"messages": TALK, "logprobs": True, "top_logprobs": 2}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 90, "stream": True}),
    ("/v1/messages", {"messages": TALK, "max_tokens": 9, "stream": True}),
    (
        "/v1/messages",
        {"messages": TALK, "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    ),
    ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9}, "stream": True}),
    ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {}}),
]
LENGTH = b'{"choices": [{"finish_reason": "length"}]}'


def leg(path: str, fields: dict[str, Any]) -> Any:
    body = JsonObject(json.dumps({"model": "m", **fields}).encode())
    return json.loads(prefill_body(parse_request(path=path, body=body.raw), body, PROTOCOLS[Protocol.NIXL], NAMES))


def parameters(raw: bytes) -> Any:
    return json.loads(raw)["kv_transfer_params"]


@pytest.fixture(scope="module")
def oracle(vllm_environment: VllmEnvironment) -> Any:
    mooncake, empty = PROTOCOLS[Protocol.MOONCAKE], JsonObject(b"{}")
    given = {
        "bodies": [(path, leg(path, fields)) for path, fields in REQUESTS],
        "asked": parameters(decode_body(empty, mooncake.ask(NAMES))),
        "handed": parameters(decode_body(empty, mooncake.hand_over(NAMES, LENGTH))),
    }
    done = subprocess.run(
        [str(vllm_environment.python), str(Path(__file__).parent / "transfer_oracle.py")],
        input=json.dumps(given), env=offline(), capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_api_reads_one_token_no_stream_and_the_parameters(oracle: Any) -> None:
    asked = json.loads(PROTOCOLS[Protocol.NIXL].ask(NAMES)["kv_transfer_params"])
    assert oracle["sampling"] == [{"stream": False, "limit": 1, "parameters": asked}] * len(REQUESTS)


def test_mooncakes_decode_pod_fetches_by_what_is_handed_over_and_blocks_are_kept_at_the_limit_alone(
    oracle: Any,
) -> None:
    assert oracle["mooncake"] == {
        "fetched": ["kvmesh-0000000000000005", "engine-0", "http://10.0.0.1:8998"],
        "kept": {"FINISHED_LENGTH_CAPPED": [True, None], "FINISHED_STOPPED": [False, None]},
    }


def test_mooncakes_bootstrap_server_is_understood(oracle: Any) -> None:
    assert engine_of(oracle["bootstrap"].encode(), number=3) == Engine(engine_id="engine-0")


def test_lmcaches_connectors_need_no_parameters(oracle: Any) -> None:
    # its own prefill/decode backend, the first token for a proxy, and a count: nothing by which blocks are found
    assert oracle["lmcache"] == ["disagg_spec", "num_lmcache_extra_cached_tokens", "ret_first_tok"]
