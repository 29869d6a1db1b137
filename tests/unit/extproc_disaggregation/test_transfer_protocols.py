"""What the bodies of both legs get, protocol by protocol; NIXL's answers are those of vLLM 0.32.0.

`test_transfer_forms.py` of tests/vllm and of tests/sglang compare the others' names with the engines'.
"""

import json
from typing import Any

import pytest

from extproc.disaggregation.transfer_protocols import (
    CLIENT_HEADERS,
    PROTOCOLS,
    Engine,
    LegAnswerError,
    LegNames,
    engine_of,
    protocol_of,
    removed_headers,
)
from extproc.ext_proc.answers import wanted_headers
from extproc.policy.disaggregation import Disaggregation, Protocol

NAMES = LegNames(
    host="[fd00::1]", bootstrap_port=8998, number=255, engine=Engine(engine_id="97270537-e9c7-4553-a13a-23faca3814ad")
)
PARAMETERS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "97270537-e9c7-4553-a13a-23faca3814ad",
    "remote_request_id": "cmpl-a2fa0fcd676dc5b3-0-934a547d",
    "remote_host": "127.0.0.1",
    "remote_port": 25453,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 592,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 576,
}
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def answer(**changes: Any) -> bytes:
    usage = {"prompt_tokens": 592, "prompt_tokens_details": {"cached_tokens": 576}}
    return json.dumps({"usage": usage, "kv_transfer_params": PARAMETERS | changes}).encode()


def hand_over(protocol: Protocol, content: bytes) -> dict[str, Any]:
    return {name: json.loads(raw) for name, raw in PROTOCOLS[protocol].hand_over(NAMES, content).items()}


def ask(protocol: Protocol) -> dict[str, Any]:
    return {name: json.loads(raw) for name, raw in PROTOCOLS[protocol].ask(NAMES).items()}


def choice(**fields: Any) -> bytes:
    return json.dumps({"choices": [fields]}).encode()


def test_the_table_has_every_protocol_that_the_picker_runs_itself() -> None:
    assert set(PROTOCOLS) == set(Protocol) - {Protocol.SIDECAR}
    assert protocol_of(Disaggregation(enabled=True, protocol=Protocol.SIDECAR)) is None
    assert protocol_of(Disaggregation()) is None
    # who gives no answer before the decode pod is asked cannot fall back
    assert all(protocol.decode_pods_prefill is not protocol.is_at_once for protocol in PROTOCOLS.values())


def test_nixl_hands_the_answers_parameters_over_unchanged() -> None:
    assert ask(Protocol.NIXL) == {"kv_transfer_params": ASKED}
    handed = PROTOCOLS[Protocol.NIXL].hand_over(NAMES, answer())
    assert handed == {"kv_transfer_params": json.dumps(PARAMETERS).encode()}


def test_mooncake_names_the_transfer_beforehand_and_the_engine_that_the_bootstrap_server_knows() -> None:
    (asked,) = ask(Protocol.MOONCAKE).values()
    assert asked == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "kvmesh-00000000000000ff"}
    assert hand_over(Protocol.MOONCAKE, choice(finish_reason="length")) == {
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": "kvmesh-00000000000000ff",
            "remote_engine_id": "97270537-e9c7-4553-a13a-23faca3814ad",
            "remote_bootstrap_addr": "http://[fd00::1]:8998",
        }
    }


def test_a_shared_store_needs_no_parameters() -> None:
    assert (ask(Protocol.SHARED_STORAGE), hand_over(Protocol.SHARED_STORAGE, b"{}")) == ({}, {})


def test_sglangs_pods_meet_in_a_room_of_the_prefill_pod() -> None:
    met = {"bootstrap_host": "fd00::1", "bootstrap_port": 8998, "bootstrap_room": 255}
    assert ask(Protocol.SGLANG) == hand_over(Protocol.SGLANG, b"") == met


def test_tensorrt_llms_context_phase_is_followed_by_the_generation_phase_with_its_state() -> None:
    assert ask(Protocol.TRTLLM) == {
        "disaggregated_params": {"request_type": "context_only", "disagg_request_id": 255}
    }  # fmt: skip
    said = {
        "request_type": "context_only",
        "ctx_request_id": 7,
        "first_gen_tokens": [3],
        "encoded_opaque_state": "aGk=",
    }
    for reason in ("length", "not_finished"):
        handed = hand_over(Protocol.TRTLLM, choice(finish_reason=reason, disaggregated_params=said))
        assert handed == {"disaggregated_params": {**said, "request_type": "generation_only", "disagg_request_id": 255}}


@pytest.mark.parametrize(
    ("protocol", "content", "why"),
    [
        *((protocol, content, "cannot be read") for protocol in PROTOCOLS for content in (b"", b"[1]", b"\xff")
          if not PROTOCOLS[protocol].is_at_once),
        (Protocol.NIXL, b'{"usage": {}}', "no kv_transfer_params"),
        (Protocol.NIXL, b'{"kv_transfer_params": null}', "no kv_transfer_params"),
        (Protocol.NIXL, b'{"kv_transfer_params": "x"}', "no kv_transfer_params"),
        (Protocol.NIXL, answer(remote_block_ids=None, remote_port=None), "lack remote_block_ids, remote_port"),
        (Protocol.NIXL, answer(remote_request_id=7), "lack remote_request_id"),
        (Protocol.NIXL, answer(do_remote_prefill=False), "lack do_remote_prefill"),
        (Protocol.NIXL, answer(transfer_mode="push"), "mode 'push'"),
        # LMCacheMPConnector's, and LMCacheConnectorV1's where it is asked for the first token
        (Protocol.NIXL, b'{"kv_transfer_params": {}}', "lack remote_block_ids"),
        (Protocol.NIXL, b'{"kv_transfer_params": {"first_tok": 5}}', "lack remote_block_ids"),
        (Protocol.MOONCAKE, choice(finish_reason="stop"), "ended with 'stop'"),
        (Protocol.MOONCAKE, choice(), "ended with 'None'"),
        (Protocol.MOONCAKE, b'{"choices": []}', "ended with 'None'"),
        (Protocol.TRTLLM, choice(finish_reason="stop", disaggregated_params={}), "ended with 'stop'"),
        (Protocol.TRTLLM, choice(finish_reason="length"), "no disaggregated_params"),
        (Protocol.TRTLLM, choice(finish_reason="length", disaggregated_params={"a": 1}), "lack ctx_req"),
    ],
)  # fmt: skip
def test_an_answer_that_does_not_say_where_the_blocks_are_brings_nothing(
    protocol: Protocol, content: bytes, why: str
) -> None:
    with pytest.raises(LegAnswerError, match=why):
        PROTOCOLS[protocol].hand_over(NAMES, content)


def test_one_of_a_bootstrap_servers_ranks_is_taken_and_named_where_there_are_several() -> None:
    one = b'{"0": {"engine_id": "a", "worker_addr": {"0": {"0": "tcp://10.0.0.1:1"}}}}'
    two = b'{"0": {"engine_id": "a"}, "1": {"engine_id": "b"}}'
    assert engine_of(one, number=7) == Engine(engine_id="a")
    assert [engine_of(two, number=number) for number in (4, 5)] == [
        Engine(engine_id="a", rank="0"), Engine(engine_id="b", rank="1")
    ]  # fmt: skip
    for content, why in ((b"{}", "knows no engine"), (b'{"0": {}}', "cannot be read"), (b"<html>", "cannot be read")):
        with pytest.raises(LegAnswerError, match=why):
            engine_of(content, number=1)


def test_headers_by_which_a_client_would_choose_pods_are_taken_off() -> None:
    headers = {"x-prefiller-host-port": "10.0.0.9:80", "x-session-id": "s", "x-encoder-hosts-ports": "a:1"}
    assert removed_headers({"x-data-parallel-rank": "1"}) == ("x-data-parallel-rank",)
    assert removed_headers(headers) == ("x-prefiller-host-port", "x-encoder-hosts-ports")
    assert removed_headers({"x-override-bootstrap-room": "5"}) == ("x-override-bootstrap-room",)
    assert removed_headers({"x-session-id": "s"}) == ()
    assert wanted_headers().issuperset(CLIENT_HEADERS)
