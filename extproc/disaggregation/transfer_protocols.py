"""The protocols that transfer a prompt's blocks from the prefill pod to the decode pod: one table. Pure.

A protocol defines the fields of both legs' bodies, whether the decode request waits for the prefill pod's answer, and
whether to query the prefill pod first. The code that runs legs depends only on this. The fields come from vLLM
0.32.0's connectors (`distributed/kv_transfer/kv_connector/v1`), SGLang 0.5.23 (`srt/entrypoints/openai/protocol.py`)
and TensorRT-LLM (`tensorrt_llm/serve/openai_disagg_service.py`); docs/guides/disaggregation.md explains how to start
the engines.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import UNSET, Meta

from extproc.disaggregation.leg_answers import LegAnswerError, NixlAnswer, PhaseAnswer, Text, checked, read, require_own
from extproc.pods.pod_ranks import RANK_HEADER
from extproc.policy.disaggregation import Disaggregation, Protocol
from extproc.requests.client_body import (
    BOOTSTRAP_HOST,
    BOOTSTRAP_PORT,
    BOOTSTRAP_ROOM,
    KV_PARAMETERS,
    PHASE_PARAMETERS,
)
from extproc.requests.request import ApiKind

# With these headers a client could choose ranks, pods, blocks or its place in an engine's queue. llm-d's sidecar obeys
# PREFILLER_HEADER and the next two, vLLM the last; SGLang obeys the others, even over the body's fields.
PREFILLER_HEADER = "x-prefiller-host-port"
CLIENT_HEADERS = (
    RANK_HEADER,
    *(PREFILLER_HEADER, "x-encoder-hosts-ports", "x-kv-cache-source-host-port"),
    *("x-override-bootstrap-host", "x-override-bootstrap-port", "x-override-bootstrap-room"),
    *("x-override-disagg-prefill-dp-rank", "x-override-routed-dp-rank", "x-override-priority", "x-vllm-priority"),
)
_CLIENT_HEADERS = frozenset(CLIENT_HEADERS)
# Envoy's header: it overrides the route's retry policy, if the ext_proc filter's `mutation_rules` allow it
NO_RETRIES: Mapping[str, str] = {"x-envoy-max-retries": "0"}
LEAST_NUMBER, MOST_NUMBER = 1 << 42, 1 << 62  # TensorRT-LLM's own ids are smaller; engines keep 63 bits
Fields: TypeAlias = Mapping[str, bytes]  # a body's fields: name -> JSON


class LegOutcome(StrEnum):
    """The outcome of a prefill leg; a metric's label."""

    ANSWERED = "answered"
    FULL = "full"  # 503: the pod has no room
    REFUSED = "refused"  # 4xx: the decode pod would refuse the client in the same way
    FAILED = "failed"  # 5xx, a redirect, or no answer at all
    TIMED_OUT = "timed-out"
    UNREADABLE = "unreadable"  # 200, but without the location of the blocks
    CLIENT_LEFT = "client-left"
    LOST = "lost"  # in a race: the other leg was first, and this leg's connection was closed
    LATE = "late"  # in a race: it answered after the winner; its engine keeps the blocks until they expire


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a prefill pod, as its bootstrap server names it."""

    engine_id: str
    rank: str | None = None  # for the rank header; None if there is only one rank


class LegNames(msgspec.Struct, frozen=True, kw_only=True):
    """The identifiers of a transfer that both legs share and that are known before it begins."""

    host: str  # of the prefill pod, IPv6 in brackets
    bootstrap_port: int
    number: int  # random per transfer, in [LEAST_NUMBER, MOST_NUMBER)
    side_channel_hosts: tuple[str, ...] = ()  # that the pod may name beside its own
    claim: Callable[[str], None]  # note the pod's engine id; raises LegAnswerError if it is another pod's
    engine: Engine | None = None  # only if the protocol `asks_bootstrap`


class TransferProtocol(msgspec.Struct, frozen=True, kw_only=True):
    """One protocol's requirements for both legs."""

    apis: frozenset[ApiKind]
    ask: Callable[[LegNames], Fields]  # the fields for the prefill pod's body
    hand_over: Callable[[LegNames, bytes], Fields]  # from its answer, the decode body's fields; raises LegAnswerError
    is_one_token: bool = True  # the prefill pod generates like any other pod, so its answer must be limited
    is_at_once: bool = False  # both legs start together: the prefill pod answers only after the decode pod has asked
    asks_bootstrap: bool = False  # first query the prefill pod's bootstrap server, for `engine_of`
    decode_pods_prefill: bool = True  # without a successful leg, the decode pod computes the prompt
    tells_prefill_hits: bool = False  # the decode pod's usage includes the prefill pod's cached tokens


# --- NIXL -------------------------------------------------------------------------------------------------------------

_ASK_NIXL = msgspec.json.encode(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)


class _KvAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def _nixl_hands_over(names: LegNames, content: bytes) -> Fields:
    """Return the answer's own parameters.

    The prefill pod keeps the blocks until the decode pod has fetched them, for at most 30 s. The parameters are good
    for one fetch only: the decode pod's notification frees the blocks, and a second fetch would silently read whatever
    has replaced them.
    """
    said, fields = checked(read(content, _KvAnswer).kv_transfer_params, NixlAnswer, KV_PARAMETERS)
    if not said.do_remote_prefill or said.do_remote_decode:
        raise LegAnswerError(f"its answer's {KV_PARAMETERS} lack do_remote_prefill, or have do_remote_decode")
    if said.transfer_mode not in ("pull", UNSET):
        raise LegAnswerError(f"it hands its cache over in mode {str(said.transfer_mode)[:40]!r}; pull is understood")
    if len({type(each) for each in said.remote_block_ids}) > 1:
        raise LegAnswerError(f"its answer's {KV_PARAMETERS} mix block ids and lists of them")
    require_own(said.remote_host, own=names.host, declared=names.side_channel_hosts)
    names.claim(said.remote_engine_id)
    return {KV_PARAMETERS: msgspec.json.encode(fields)}


# --- Mooncake ---------------------------------------------------------------------------------------------------------


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    disaggregated_params: msgspec.Raw = msgspec.Raw(b"null")


class _ChoicesAnswer(msgspec.Struct):
    choices: list[_Choice] = []


class _Rank(msgspec.Struct):
    engine_id: Text


_Ranks = Annotated[dict[Annotated[str, Meta(pattern=r"^[0-9]{1,4}\Z")], _Rank], Meta(max_length=1024)]


def engine_of(content: bytes, *, number: int) -> Engine:
    """Return one of the ranks in a bootstrap server's `/query` answer, picked by `number`. Raise LegAnswerError."""
    ranks = read(content, _Ranks)
    if not ranks:
        raise LegAnswerError("its bootstrap server knows no engine yet")
    rank = sorted(ranks)[number % len(ranks)]
    return Engine(engine_id=ranks[rank].engine_id, rank=rank if len(ranks) > 1 else None)


def _ask_mooncake(names: LegNames) -> Fields:
    said = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": _transfer_id(names)}
    return {KV_PARAMETERS: msgspec.json.encode(said)}


def _mooncake_hands_over(names: LegNames, content: bytes) -> Fields:
    """Return the parameters agreed beforehand; the answer only shows whether the blocks are kept.

    vLLM keeps the blocks for 480 s if the answer reached its limit of one token. After any other finish reason, a
    decode pod would wait that long in vain.
    """
    _require_limit_reached(read(content, _ChoicesAnswer))
    assert names.engine is not None, "it was asked for"
    names.claim(names.engine.engine_id)
    said = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": _transfer_id(names),
        "remote_engine_id": names.engine.engine_id,
        "remote_bootstrap_addr": f"http://{names.host}:{names.bootstrap_port}",
    }
    return {KV_PARAMETERS: msgspec.json.encode(said)}


def _transfer_id(names: LegNames) -> str:
    return f"kvmesh-{names.number:016x}"


def _require_limit_reached(answer: _ChoicesAnswer, *reasons: str) -> _Choice:
    choice = answer.choices[0] if len(answer.choices) == 1 else _Choice()
    if choice.finish_reason not in ("length", *reasons):
        raise LegAnswerError(f"its answer ended with {str(choice.finish_reason)[:40]!r}: it keeps no blocks then")
    return choice


# --- shared storage ---------------------------------------------------------------------------------------------------


def _store_hands_over(_: LegNames, content: bytes) -> Fields:
    """Return no fields: the decode pod finds the prefill pod's blocks in the store by their tokens."""
    read(content, _KvAnswer)
    return {}


# --- SGLang -----------------------------------------------------------------------------------------------------------


def _bootstrap(names: LegNames, _: bytes = b"") -> Fields:
    """Return the meeting point of both pods; the room is on the prefill pod's bootstrap server."""
    return {
        BOOTSTRAP_HOST: msgspec.json.encode(names.host.strip("[]")),
        BOOTSTRAP_PORT: msgspec.json.encode(names.bootstrap_port),
        BOOTSTRAP_ROOM: msgspec.json.encode(names.number),
    }


# --- TensorRT-LLM -----------------------------------------------------------------------------------------------------


def _context_phase(names: LegNames) -> Fields:
    said = {"request_type": "context_only", "disagg_request_id": names.number}
    return {PHASE_PARAMETERS: msgspec.json.encode(said)}


def _generation_phase(names: LegNames, content: bytes) -> Fields:
    """Return the generation phase's parameters from the context phase: its first token and the cache's state."""
    choice = _require_limit_reached(read(content, _ChoicesAnswer), "not_finished")
    said, fields = checked(choice.disaggregated_params, PhaseAnswer, PHASE_PARAMETERS)
    if said.ctx_info_endpoint:
        host, _, port = said.ctx_info_endpoint.rpartition("/")[2].rpartition(":")
        told = host if int(port) <= 65_535 else said.ctx_info_endpoint
        require_own(told, own=names.host, declared=names.side_channel_hosts)
    changes = {"request_type": "generation_only", "disagg_request_id": names.number}
    return {PHASE_PARAMETERS: msgspec.json.encode(fields | changes)}


# --- the table --------------------------------------------------------------------------------------------------------

_COMPLETIONS = frozenset((ApiKind.CHAT_COMPLETIONS, ApiKind.COMPLETIONS))
_VLLM = _COMPLETIONS | {ApiKind.RESPONSES, ApiKind.MESSAGES, ApiKind.GENERATE}

# the protocols whose legs the picker runs: all but Protocol.SIDECAR
PROTOCOLS: Mapping[Protocol, TransferProtocol] = {
    Protocol.NIXL: TransferProtocol(
        apis=_VLLM,
        ask=lambda _: {KV_PARAMETERS: _ASK_NIXL},
        hand_over=_nixl_hands_over,
        tells_prefill_hits=True,
    ),
    # vLLM's connector also supports concurrent legs. Sequential legs cost the handshake's time, but the decode pod
    # never waits for blocks that do not come.
    Protocol.MOONCAKE: TransferProtocol(
        apis=_COMPLETIONS | {ApiKind.GENERATE},
        ask=_ask_mooncake,
        hand_over=_mooncake_hands_over,
        asks_bootstrap=True,
    ),
    Protocol.SHARED_STORAGE: TransferProtocol(apis=_VLLM, ask=lambda _: {}, hand_over=_store_hands_over),
    Protocol.SGLANG: TransferProtocol(
        apis=_COMPLETIONS | {ApiKind.RESPONSES, ApiKind.MESSAGES},
        ask=_bootstrap,
        hand_over=_bootstrap,
        is_one_token=False,
        is_at_once=True,
        decode_pods_prefill=False,
    ),
    Protocol.TRTLLM: TransferProtocol(
        apis=_COMPLETIONS,
        ask=_context_phase,
        hand_over=_generation_phase,
        is_one_token=False,
    ),
}


def protocol_of(policy: Disaggregation) -> TransferProtocol | None:
    """Return the protocol of the legs that the picker runs, or None if it runs no legs."""
    return PROTOCOLS.get(policy.protocol) if policy.enabled else None


def removed_headers(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the client headers to strip: they could steer the request."""
    return () if _CLIENT_HEADERS.isdisjoint(headers) else tuple(name for name in CLIENT_HEADERS if name in headers)
