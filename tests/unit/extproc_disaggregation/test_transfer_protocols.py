"""What the bodies of both legs get, protocol by protocol; NIXL's answers are those of vLLM 0.32.0.

`test_transfer_forms.py` of tests/vllm and of tests/sglang compare the others' names with the engines'.
"""

import json
import re
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from extproc.disaggregation.leg_answers import MOST_ENGINE_IDS, EngineIds, LegAnswerError
from extproc.disaggregation.transfer_protocols import (
    CLIENT_HEADERS,
    PROTOCOLS,
    Engine,
    LegNames,
    engine_of,
    protocol_of,
    removed_headers,
)
from extproc.ext_proc.answers import wanted_headers
from extproc.policy.disaggregation import Disaggregation, Protocol

NAMES = LegNames(
    host="[fd00::1]",
    bootstrap_port=8998,
    number=255,
    claim=partial(EngineIds().claim, "[fd00::1]:8000"),
    engine=Engine(engine_id="97270537-e9c7-4553-a13a-23faca3814ad"),
)
PARAMETERS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "97270537-e9c7-4553-a13a-23faca3814ad",
    "remote_request_id": "cmpl-a2fa0fcd676dc5b3-0-934a547d",
    "remote_host": "fd00::1",
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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"remote_block_ids": [4, 5]},  # without cache groups, as vLLM did
        {"remote_block_ids": [[], [7]], "remote_block_size": 16, "remote_blocks_expiry_time": 12.5},
        {"remote_host": "FD00:0::1"},
        {"a_newer_number": 1.5, "a_newer_flag": True, "a_newer_null": None},
    ],
)
def test_nixl_hands_the_answers_parameters_over(changes: dict[str, Any]) -> None:
    assert ask(Protocol.NIXL) == {"kv_transfer_params": ASKED}
    assert hand_over(Protocol.NIXL, answer(**changes)) == {"kv_transfer_params": PARAMETERS | changes}


def test_nixls_minimum_gets_no_field_that_the_pod_did_not_tell() -> None:
    least = {name: value for name, value in PARAMETERS.items() if name.startswith(("do_", "remote_block_ids"))}
    least |= {
        name: PARAMETERS[name] for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
    }
    assert hand_over(Protocol.NIXL, json.dumps({"kv_transfer_params": least}).encode()) == {"kv_transfer_params": least}


def test_texts_lists_and_objects_of_unknown_names_are_left_out() -> None:
    further = {"remote_bootstrap_addr": "http://169.254.169.254", "nested": [[[1]]], "remote_kv_source": {"a": 1}}
    assert hand_over(Protocol.NIXL, answer(**further)) == {"kv_transfer_params": PARAMETERS}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"remote_host": "169.254.169.254"}, r"names the host '169.254.169.254', its own is \[fd00::1\]: let"),
        ({"remote_host": "localhost"}, "names the host 'localhost'"),
        ({"remote_host": "fd00::1\r\nx: y"}, "matching regex .* `\\$.remote_host`"),
        *(({"remote_host": host}, "remote_host") for host in ("", "fd00::1/128", "fd00::1%a", "x" * 254, None)),
        *(({"remote_port": port}, "remote_port") for port in (-5, 0, 65_536, 10**30, "5600", 5600.5, True)),
        *(({"remote_engine_id": text}, "remote_engine_id") for text in ("a\n", "a\0", "x" * 513, "", None)),
        *(
            ({"remote_block_ids": ids}, "remote_block_ids")
            for ids in ([[[1]]], [-1], [[10**30]], ["1"], [[True]], [None], {"0": 1}, "x")
        ),
        ({"remote_block_ids": [1, [2]]}, "mix block ids and lists"),
        *(({name: value}, name) for name in ("tp_size", "dcp_size", "pp_size") for value in (0, -1, 10**7, "2", None)),
        ({"remote_num_tokens": -1}, "remote_num_tokens"),
        ({"remote_blocks_expiry_time": "soon"}, "remote_blocks_expiry_time"),
        ({"do_remote_decode": True}, "do_remote_decode"),
        ({"further": 10**30}, "are refused"),
        ({f"further{number}": 1 for number in range(64)}, "length <= 64"),
        ({"x" * 65: 1}, "length <= 64"),
        ({"a\r\nb": 1}, "are refused"),
    ],
)
def test_nixls_parameters_of_other_types_lengths_hosts_and_ports_are_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(LegAnswerError, match=why):
        hand_over(Protocol.NIXL, answer(**changes))


def test_an_escaped_name_is_the_same_field() -> None:
    with pytest.raises(LegAnswerError, match="tp_size"):
        hand_over(Protocol.NIXL, answer(tp_size=-1).replace(b'"tp_size"', b'"tp\\u005fsize"'))


@pytest.mark.parametrize(
    ("own", "declared", "told", "passes"),
    [
        ("prefill-0.llm", (), "Prefill-0.llm.", True),
        ("prefill-0.llm", (), "10.0.0.1", False),
        ("127.0.0.1", (), "localhost", True),
        ("localhost", (), "::1", True),
        ("10.0.0.1", ("192.168.7.0/24",), "192.168.7.9", True),
        ("10.0.0.1", ("192.168.7.0/24",), "192.168.8.9", False),
        ("10.0.0.1", ("fd00::/8", "side.llm", "10.0.0.9"), "fd12::1", True),
        ("10.0.0.1", ("fd00::/8", "side.llm", "10.0.0.9"), "side.llm", True),
        ("10.0.0.1", ("fd00::/8", "side.llm", "10.0.0.9"), "10.0.0.9", True),
        ("10.0.0.1", ("fd00::/8", "side.llm", "10.0.0.9"), "10.0.0.8", False),
        ("10.0.0.1", ("10.0.0.0/99",), "10.0.0.8", False),
    ],
)
def test_a_pod_names_itself_or_a_declared_host(own: str, declared: tuple[str, ...], told: str, passes: bool) -> None:
    names = structs.replace(NAMES, host=own, side_channel_hosts=declared)
    if passes:
        assert PROTOCOLS[Protocol.NIXL].hand_over(names, answer(remote_host=told))
        return
    with pytest.raises(LegAnswerError, match=re.escape(f"names the host {told!r}, its own is {own}")):
        PROTOCOLS[Protocol.NIXL].hand_over(names, answer(remote_host=told))


@pytest.mark.parametrize("protocol", [Protocol.NIXL, Protocol.MOONCAKE])
def test_a_pod_names_no_other_pods_engine(protocol: Protocol) -> None:
    content = answer() if protocol is Protocol.NIXL else choice(finish_reason="length")
    engines = EngineIds()
    first, second = (structs.replace(NAMES, claim=partial(engines.claim, pod)) for pod in ("a:1", "b:1"))
    for _ in range(2):
        assert PROTOCOLS[protocol].hand_over(first, content)
    with pytest.raises(LegAnswerError, match="names the engine of a:1: give each pod an engine_id of its own"):
        PROTOCOLS[protocol].hand_over(second, content)
    engines.keep(["b:1"])
    assert PROTOCOLS[protocol].hand_over(second, content)


def test_a_pod_with_many_engine_ids_displaces_only_its_own() -> None:
    engines = EngineIds()
    engines.claim("a:1", "a")
    for number in range(MOST_ENGINE_IDS + 1):
        engines.claim("b:1", str(number))
    engines.claim("c:1", "0")
    for taken in ("a", "1"):
        with pytest.raises(LegAnswerError):
            engines.claim("c:1", taken)


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
    said = {"ctx_request_id": 7, "first_gen_tokens": [3], "encoded_opaque_state": "aGk="}
    for reason in ("length", "not_finished"):
        handed = hand_over(Protocol.TRTLLM, choice(finish_reason=reason, disaggregated_params=said))
        assert handed == {"disaggregated_params": {**said, "request_type": "generation_only", "disagg_request_id": 255}}
    full = {
        **{"ctx_request_id": 7, "first_gen_tokens": [3], "draft_tokens": None, "ctx_dp_rank": 0, "schedule_style": 0},
        "first_gen_log_probs": [-0.5, [{"token_id": 3, "logprob": -0.5, "rank": None}]],
        "ctx_info_endpoint": "tcp://[fd00::1]:5000",
        "ctx_usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}},
    }
    (handed,) = hand_over(Protocol.TRTLLM, choice(finish_reason="length", disaggregated_params=full)).values()
    assert handed == {**full, "request_type": "generation_only", "disagg_request_id": 255}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        *(({"ctx_info_endpoint": place}, "names the host") for place in
          ("tcp://10.0.0.9:5000", "10.0.0.9:5000", "tcp://[fd00::1]:99999")),
        *(({"ctx_info_endpoint": place}, "ctx_info_endpoint") for place in
          ("tcp://[fd00::1]:0", "tcp://[x", "tcp://[fd00::1]?@10.0.0.9:5000", "[fd00::1]")),
        ({"ctx_info_endpoint": "tcp://[fd00::1]:1\r\n"}, "ctx_info_endpoint"),
        ({"ctx_info_endpoint": {"a": 1}}, "ctx_info_endpoint"),
        ({"ctx_request_id": 10**30}, "ctx_request_id"),
        *(({"first_gen_tokens": tokens}, "first_gen_tokens") for tokens in ([], [[3]], [-3], "3")),
        ({"first_gen_log_probs": [[[1]]]}, "first_gen_log_probs"),
        ({"encoded_opaque_state": "aG\n"}, "encoded_opaque_state"),
    ],
)  # fmt: skip
def test_tensorrt_llms_phase_of_other_types_and_hosts_is_refused(changes: dict[str, Any], why: str) -> None:
    said = {"ctx_request_id": 7, "first_gen_tokens": [3], **changes}
    with pytest.raises(LegAnswerError, match=why):
        hand_over(Protocol.TRTLLM, choice(finish_reason="length", disaggregated_params=said))


@pytest.mark.parametrize(
    ("protocol", "content", "why"),
    [
        *((protocol, content, "cannot be read") for protocol in PROTOCOLS for content in (b"", b"[1]", b"\xff")
          if not PROTOCOLS[protocol].is_at_once),
        (Protocol.NIXL, b'{"usage": {}}', "no kv_transfer_params"),
        (Protocol.NIXL, b'{"kv_transfer_params": null}', "no kv_transfer_params"),
        (Protocol.NIXL, b'{"kv_transfer_params": "x"}', "no kv_transfer_params"),
        (Protocol.NIXL, answer(remote_block_ids=None, remote_port=None), "`null` - at `\\$.remote_block_ids`"),
        (Protocol.NIXL, answer(remote_request_id=7), "remote_request_id"),
        (Protocol.NIXL, answer(do_remote_prefill=False), "lack do_remote_prefill"),
        (Protocol.NIXL, answer(transfer_mode="push"), "mode 'push'"),
        # LMCacheMPConnector's, and LMCacheConnectorV1's where it is asked for the first token
        (Protocol.NIXL, b'{"kv_transfer_params": {}}', "required field `do_remote_prefill`"),
        (Protocol.NIXL, b'{"kv_transfer_params": {"first_tok": 5}}', "required field `do_remote_prefill`"),
        (Protocol.MOONCAKE, choice(finish_reason="stop"), "ended with 'stop'"),
        (Protocol.MOONCAKE, choice(), "ended with 'None'"),
        (Protocol.MOONCAKE, b'{"choices": []}', "ended with 'None'"),
        (Protocol.TRTLLM, choice(finish_reason="stop", disaggregated_params={}), "ended with 'stop'"),
        (Protocol.TRTLLM, choice(finish_reason="length"), "no disaggregated_params"),
        (Protocol.TRTLLM, choice(finish_reason="length", disaggregated_params={"a": 1}), "required field `ctx_req"),
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
    unreadable = (
        b'{"0": {}}',
        b"<html>",
        b'{"0\\r\\nx-evil: 1": {"engine_id": "a"}}',
        b'{"-1": {"engine_id": "a"}}',
        b'{"0\\n": {"engine_id": "a"}}',
        b'{"0": {"engine_id": "a\\r\\n"}}',
        b'{"0": {"engine_id": ["a"]}}',
    )
    for content, why in ((b"{}", "knows no engine"), *((each, "cannot be read") for each in unreadable)):
        with pytest.raises(LegAnswerError, match=why):
            engine_of(content, number=1)


def test_headers_by_which_a_client_would_choose_pods_are_taken_off() -> None:
    headers = {"x-prefiller-host-port": "10.0.0.9:80", "x-session-id": "s", "x-encoder-hosts-ports": "a:1"}
    assert removed_headers({"x-data-parallel-rank": "1"}) == ("x-data-parallel-rank",)
    assert removed_headers(headers) == ("x-prefiller-host-port", "x-encoder-hosts-ports")
    assert removed_headers({"x-override-bootstrap-room": "5"}) == ("x-override-bootstrap-room",)
    assert removed_headers({"x-session-id": "s"}) == ()
    assert wanted_headers().issuperset(CLIENT_HEADERS)
