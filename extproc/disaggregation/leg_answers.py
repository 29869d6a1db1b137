"""What a prefill pod may answer about its blocks: typed, bounded, and only about the pod itself. Pure.

The answer goes into the decode pod's body. A hostile pod could name another host, another pod's blocks, or values that
crash or stall an engine. Of unknown fields only numbers, booleans and nulls pass: a text could name a host.
"""

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from extproc.policy.disaggregation import Port

MOST_ENGINE_IDS = 256  # remembered per pod: one for each rank, and new ones after a restart

_INT64 = (1 << 63) - 1
Text = Annotated[str, Meta(min_length=1, max_length=512, pattern=r"^[ -~]+\Z")]
_Count = Annotated[int, Meta(ge=0, le=_INT64)]
_Size = Annotated[int, Meta(ge=1, le=1 << 20)]
_Name = Annotated[str, Meta(max_length=64, pattern=r"^\w+\Z")]
_HostName = Annotated[str, Meta(max_length=253, pattern=r"^[-0-9A-Za-z_.:\[\]]+\Z")]
_Place = Annotated[str, Meta(pattern=r"^([a-z]+://)?(\[[0-9A-Fa-f:.]+\]|[-\w.]{1,253}):[1-9][0-9]{0,4}\Z")]
_SCALAR = msgspec.json.Decoder(Annotated[int, Meta(ge=-_INT64, le=_INT64)] | float | bool | None)
_NO_SCALARS = b'"', b"[", b"{"
_FIELDS = msgspec.json.Decoder(Annotated[dict[_Name, msgspec.Raw], Meta(max_length=64)])
_Network: TypeAlias = IPv4Network | IPv6Network
_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class LegAnswerError(Exception):
    """A prefill pod's answer cannot be used; the message says why."""


class NixlAnswer(msgspec.Struct, kw_only=True):
    """`kv_transfer_params` of vLLM's NixlConnector; a null in a required field crashes the engine."""

    do_remote_prefill: bool
    do_remote_decode: bool = False
    remote_block_ids: list[_Count | list[_Count]]  # one list for each cache group; old versions have no groups
    remote_engine_id: Text
    remote_request_id: Text
    remote_host: _HostName
    remote_port: Port
    tp_size: _Size | UnsetType = UNSET
    dcp_size: _Size | UnsetType = UNSET
    pp_size: _Size | UnsetType = UNSET
    remote_block_size: _Size | UnsetType | None = UNSET
    remote_num_tokens: _Count | UnsetType | None = UNSET
    remote_blocks_expiry_time: float | UnsetType | None = UNSET
    transfer_mode: Text | UnsetType = UNSET


class PhaseAnswer(msgspec.Struct, kw_only=True):
    """`disaggregated_params` of TensorRT-LLM's context phase; the state is opaque."""

    ctx_request_id: _Count
    first_gen_tokens: Annotated[list[_Count], Meta(min_length=1)]
    first_gen_log_probs: list[float | list[dict[_Name, float | None]]] | UnsetType | None = UNSET
    draft_tokens: list[_Count] | UnsetType | None = UNSET
    encoded_opaque_state: Annotated[str, Meta(pattern=r"^[A-Za-z0-9+/=]*\Z")] | UnsetType | None = UNSET
    ctx_info_endpoint: _Place | UnsetType | None = UNSET
    ctx_usage: dict[_Name, _Count | dict[_Name, _Count] | None] | UnsetType | None = UNSET


def read(content: bytes | msgspec.Raw, kind: Any) -> Any:
    """Return an answer, or a part of it, as this type. Raise LegAnswerError."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LegAnswerError(f"its answer cannot be read: {error}") from error


def checked(raw: msgspec.Raw, kind: type[_Kind], name: str) -> tuple[_Kind, dict[str, Any]]:
    """Return an answer's parameters, and the same as fields for the decode pod. Raise LegAnswerError."""
    if not bytes(raw).startswith(b"{"):
        raise LegAnswerError(f"its answer has no {name}: it runs without a connector, or with another one")
    try:
        said, further = msgspec.json.decode(raw, type=kind), {}
        for field, value in _FIELDS.decode(raw).items():
            if field not in kind.__struct_fields__ and not bytes(value).startswith(_NO_SCALARS):
                further[field] = _SCALAR.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LegAnswerError(f"its answer's {name} are refused: {error}") from error
    return said, msgspec.to_builtins(said) | further


def require_own(told: str, *, own: str, declared: Sequence[str]) -> None:
    """Raise LegAnswerError unless a host is the pod's own, or declared in the policy as a name, address or network."""
    if not any(_covers(_place(each), _place(told)) for each in (own, *declared)):
        raise LegAnswerError(
            f"it names the host {told[:80]!r}, its own is {own}: let it name its own (VLLM_NIXL_SIDE_CHANNEL_HOST),"
            " or declare the host in disaggregation.sideChannelHosts"
        )


class EngineIds:
    """The engine ids that pods have told: decode pods keep the first place of an id, and would read another pod."""

    def __init__(self) -> None:
        self._ids: dict[str, dict[str, None]] = {}  # pod -> its ids, the latest last

    def claim(self, pod: str, engine_id: str) -> None:
        """Note a pod's engine id. Raise LegAnswerError if another pod has told it first."""
        other = next((each for each, ids in self._ids.items() if engine_id in ids and each != pod), None)
        if other is not None:
            raise LegAnswerError(f"it names the engine of {other}: give each pod an engine_id of its own, or none")
        ids = self._ids.setdefault(pod, {})
        ids[engine_id] = ids.pop(engine_id, None)
        if len(ids) > MOST_ENGINE_IDS:
            del ids[next(iter(ids))]

    def keep(self, pods: Iterable[str]) -> None:
        """Forget all other pods."""
        for pod in self._ids.keys() - set(pods):
            del self._ids[pod]


def _place(text: str) -> _Network | str:
    name = text.strip("[]").rstrip(".").lower()
    try:
        return ip_network("127.0.0.1" if name == "localhost" else name, strict=False)
    except ValueError:
        return name


def _covers(known: _Network | str, told: _Network | str) -> bool:
    if isinstance(known, str) or isinstance(told, str):
        return known == told
    return (known.is_loopback and told.is_loopback) or told.network_address in known
