"""The bodies of both legs by SGLang's own request classes, and the headers that go before them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from extproc.disaggregation.leg_body import decode_body, prefill_body
from extproc.disaggregation.transfer_protocols import CLIENT_HEADERS, PROTOCOLS, LegNames
from extproc.policy.disaggregation import Disaggregation, Protocol
from extproc.requests.json_edit import JsonObject
from extproc.requests.openai import parse_request
from tests.sglang.environment import ensure_sglang, without_gpu
from tests.vllm.environment import ensure_environment

SGLANG = PROTOCOLS[Protocol.SGLANG]
NAMES = LegNames(host="[fd00::1]", bootstrap_port=8998, number=1 << 62, claim=print)
TALK = [{"role": "user", "content": "hi"}]
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": TALK, "max_tokens": 9, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": TALK, "max_tokens": 9}),
]


@pytest.fixture(scope="module")
def oracle() -> Any:
    bodies = []
    for path, fields in REQUESTS:
        body = JsonObject(json.dumps({"model": "m", "stream": True, **fields}).encode())
        request = parse_request(path=path, body=body.raw)
        legs = (prefill_body(request, body, SGLANG, NAMES), decode_body(body, SGLANG.hand_over(NAMES, b"")))
        bodies += [(path, json.loads(raw)) for raw in legs]
    done = subprocess.run(
        [str(ensure_sglang(ensure_environment())), str(Path(__file__).parent / "transfer_oracle.py")],
        input=json.dumps(bodies), env=without_gpu(), capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_api_reads_the_room_of_both_legs(oracle: Any) -> None:
    met = {"bootstrap_host": "fd00::1", "bootstrap_port": 8998, "bootstrap_room": 1 << 62}
    assert oracle["read"] == [{"stream": False, **met}, {"stream": True, **met}] * len(REQUESTS)


def test_headers_that_go_before_the_room_are_taken_off_clients_requests(oracle: Any) -> None:
    ours = {header for header in CLIENT_HEADERS if header.startswith("x-override-")}
    assert set(oracle["headers"]) == ours - {"x-override-priority"}  # the oracle's are about places


def test_the_bootstrap_servers_usual_port_is_the_policys(oracle: Any) -> None:
    assert oracle["port"] == str(Disaggregation().bootstrap_port)
