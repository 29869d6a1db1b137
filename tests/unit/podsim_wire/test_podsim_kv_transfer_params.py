"""`--kv-transfer-config` and `kv_transfer_params` as vLLM 0.32 reads them."""

import json
from typing import Any

import pytest

from podsim.errors import SettingsError
from podsim.wire.kv_transfer import (
    KvTransferConfig,
    LoadFailurePolicy,
    RemotePrompt,
    parse_kv_transfer_config,
    prefilled_params,
    remote_cached_tokens,
    remote_prompt,
)

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def test_a_configuration_as_vllm_takes_it() -> None:
    assert parse_kv_transfer_config(json.dumps(NIXL)) == KvTransferConfig()
    full = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "engine_id": "e1",
        "kv_buffer_device": "cpu",
        "kv_port": 14579,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": 12, "backends": ["UCX"]},
    }
    assert parse_kv_transfer_config(json.dumps(full)) == KvTransferConfig(
        kv_role="kv_consumer",
        engine_id="e1",
        kv_load_failure_policy=LoadFailurePolicy.RECOMPUTE,
        kv_lease_duration=12,
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "Invalid JSON"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "Connector name is not set in KVTransferConfig"),
        ({**NIXL, "kv_role": None}, "Please specify kv_role when kv_connector is set, supported roles are"),
        ({**NIXL, "kv_role": "x"}, "kv_role: Input should be 'kv_producer', 'kv_both' or 'kv_consumer', not 'x'"),
        ({**NIXL, "kv_connector": "P2pNcclConnector"}, "Unsupported connector type: P2pNcclConnector"),
        ({**NIXL, "foo": 1}, "unknown field `foo`"),
        ({**NIXL, "kv_load_failure_policy": "x"}, "Invalid enum value 'x'"),
        ({**NIXL, "kv_connector_extra_config": 3}, "Expected `object`, got `int`"),
        ({**NIXL, "kv_connector_extra_config": {"kv_lease_duration": 0}}, "kv_lease_duration is 0"),
        ({**NIXL, "kv_connector_extra_config": {"bidirectional_kv_xfer": True}}, "does not simulate"),
    ],
)
def test_bad_configurations_are_refused_with_what_is_wrong(value: Any, words: str) -> None:
    with pytest.raises(SettingsError) as refused:
        parse_kv_transfer_config(value if isinstance(value, str) else json.dumps(value))
    assert str(refused.value).startswith("argument --kv-transfer-config: ")
    assert words in str(refused.value)


def test_heartbeats_come_six_times_a_lease_and_renew_it_for_two_thirds() -> None:
    usual = KvTransferConfig(kv_lease_duration=30)
    assert (usual.heartbeat_seconds, usual.renewal_seconds) == (5, 20)
    short = KvTransferConfig(kv_lease_duration=0.6)
    assert [short.heartbeat_seconds, short.renewal_seconds] == pytest.approx([0.1, 0.4])


PARAMS = prefilled_params(
    block_ids=[4, 5], engine_id="e", request_id="r", host="10.0.0.1", port=5600, tokens=20, cached_tokens=16
)
PROMPT = RemotePrompt(engine_id="e", request_id="r", host="10.0.0.1", port=5600, block_ids=[4, 5], complete=True)


def test_what_a_prefill_leg_answers_is_what_a_decode_leg_reads() -> None:
    assert remote_prompt(PARAMS) == PROMPT
    assert remote_cached_tokens(PARAMS) == 16
    assert remote_cached_tokens({**PARAMS, "do_remote_prefill": False}) is None
    assert remote_cached_tokens(None) is None


def test_a_key_that_lacks_is_another_thing_than_a_null() -> None:
    nulls = dict.fromkeys(PARAMS)
    absent = RemotePrompt(engine_id=None, request_id=None, host=None, port=None, block_ids=[], complete=True)
    assert remote_prompt(nulls) == absent
    assert remote_prompt({"remote_port": "5600", "remote_block_ids": 3}).complete is False
