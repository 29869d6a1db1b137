"""`kv_transfer_params` and `--kv-transfer-config`, as in vLLM 0.32's NixlConnector.

The pod's KV transfer calls this (pull mode, one rank). A prefill request asks for `do_remote_decode`; its answer has
the parameters that the decode request then takes to another pod.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

import msgspec

from podsim.errors import SettingsError

_CONNECTOR = "NixlConnector"
_ROLES = ("kv_producer", "kv_both", "kv_consumer")
_REMOTE_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class LoadFailurePolicy(StrEnum):
    """What happens to a request whose prompt's KV does not arrive."""

    FAIL = "fail"  # vLLM's default: the request ends with status 500
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransferConfig:
    """The part of vLLM's KVTransferConfig that matters here."""

    kv_role: str = "kv_both"  # only affects metrics: vLLM accepts both kinds of request in any role
    engine_id: str | None = None  # None: a random one per pod
    kv_load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.FAIL
    kv_lease_duration: float = 30  # seconds that blocks are kept without a heartbeat

    @property
    def shows_loads(self) -> bool:
        """Tell whether vLLM has the metric of running loads, which only consumers have."""
        return self.kv_role != "kv_producer"

    @property
    def heartbeat_seconds(self) -> float:
        """Seconds between a decode pod's heartbeats, which renew the leases of prompts it will load."""
        return self.kv_lease_duration // 6 or self.kv_lease_duration / 6

    @property
    def renewal_seconds(self) -> float:
        """The least time in seconds that a lease lasts after a heartbeat."""
        return self.kv_lease_duration * 2 // 3 or self.kv_lease_duration * 2 / 3


class _Extra(msgspec.Struct, frozen=True, kw_only=True):  # vLLM ignores the keys it does not ask for
    kv_lease_duration: float = 30
    bidirectional_kv_xfer: bool = False


class _Flag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of vLLM's KVTransferConfig; nothing here depends on the last four."""

    kv_connector: str | None = None
    kv_role: str | None = None
    engine_id: str | None = None
    kv_load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.FAIL
    kv_connector_extra_config: _Extra = _Extra()
    kv_buffer_device: str | None = None
    kv_port: int | None = None
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False


_flag_decoder = msgspec.json.Decoder(_Flag)


def parse_kv_transfer_config(text: str) -> KvTransferConfig:
    """Parse the flag's JSON object; raise SettingsError, in vLLM's wording where vLLM refuses it."""
    try:
        flag = _flag_decoder.decode(text)
    except msgspec.ValidationError as error:
        _refuse(f"1 validation error for KVTransferConfig: {error}")
    except msgspec.DecodeError as error:
        _refuse(f"1 validation error for KVTransferConfig: Invalid JSON: {error}")
    extra = flag.kv_connector_extra_config
    if flag.kv_role is not None and flag.kv_role not in _ROLES:
        _refuse(
            "1 validation error for KVTransferConfig: kv_role: "
            f"Input should be 'kv_producer', 'kv_both' or 'kv_consumer', not {flag.kv_role!r}"
        )
    if flag.kv_connector is None:
        _refuse("Connector name is not set in KVTransferConfig")
    if flag.kv_role is None:
        _refuse(f"Please specify kv_role when kv_connector is set, supported roles are {_ROLES}")
    if flag.kv_connector != _CONNECTOR:
        _refuse(f"Unsupported connector type: {flag.kv_connector} (podsim has {_CONNECTOR} alone)")
    if extra.bidirectional_kv_xfer:
        _refuse("podsim does not simulate bidirectional_kv_xfer: leave it out")
    if extra.kv_lease_duration <= 0:
        _refuse(f"kv_lease_duration is {extra.kv_lease_duration:g}: give a number of seconds above 0")
    return KvTransferConfig(
        kv_role=flag.kv_role,
        engine_id=flag.engine_id,
        kv_load_failure_policy=flag.kv_load_failure_policy,
        kv_lease_duration=extra.kv_lease_duration,
    )


def _refuse(detail: str) -> NoReturn:
    raise SettingsError(f"argument --kv-transfer-config: {detail}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrompt:
    """Where the KV of a decode request's prompt is, from the prefill request's answer unless a proxy changed it.

    `complete` tells whether all keys are present; their values may still be null.
    """

    engine_id: str | None
    request_id: str | None
    host: str | None
    port: int | None
    block_ids: Sequence[int]
    complete: bool


def wants_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Tell whether a request is a decode request."""
    return bool(params and params.get("do_remote_prefill"))


def wants_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Tell whether a request is a prefill request."""
    return bool(params and params.get("do_remote_decode"))


def remote_prompt(params: Mapping[str, Any]) -> RemotePrompt:
    """Read a decode request's parameters; values of the wrong type count as null."""
    groups = params.get("remote_block_ids")
    blocks = groups[0] if isinstance(groups, list) and groups and isinstance(groups[0], list) else []
    engine_id, request_id, host, port = (params.get(key) for key in _REMOTE_KEYS)
    return RemotePrompt(
        engine_id=engine_id if isinstance(engine_id, str) else None,
        request_id=request_id if isinstance(request_id, str) else None,
        host=host if isinstance(host, str) else None,
        port=port if type(port) is int else None,
        block_ids=blocks,
        complete=all(key in params for key in _REMOTE_KEYS),
    )


def remote_cached_tokens(params: Mapping[str, Any] | None) -> int | None:
    """Return the `cached_tokens` that vLLM reports for a decode request: its prefill request's, if given."""
    if not wants_remote_prefill(params):
        return None
    assert params is not None
    cached = params.get("remote_prefill_cached_tokens")
    return cached if isinstance(cached, int) else None


def prefilled_params(
    *,
    block_ids: Sequence[int],
    engine_id: str,
    request_id: str,
    host: str,
    port: int,
    tokens: int,
    cached_tokens: int | None,
) -> dict[str, Any]:
    """Return the answer's `kv_transfer_params` for a prefill request; `cached_tokens` only if it made one token."""
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(block_ids)],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
    }
    return params if cached_tokens is None else {**params, "remote_prefill_cached_tokens": cached_tokens}
