"""How a prompt's blocks get from the prefill pod to the decode pod, protocol by protocol: one table. Pure.

A protocol says what the bodies of both legs get, whether the decode pod's request waits for the prefill pod's answer,
and what the prefill pod must be asked first. Whoever runs legs knows these alone. The fields are those of vLLM 0.32.0's
connectors (`distributed/kv_transfer/kv_connector/v1`), of SGLang 0.5.23 (`srt/entrypoints/openai/protocol.py`) and of
TensorRT-LLM (`tensorrt_llm/serve/openai_disagg_service.py`); docs/guides/disaggregation.md has how engines are started.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec

from extproc.policy.disaggregation import Disaggregation, Protocol
from extproc.requests.json_edit import JsonObject
from extproc.requests.request import ApiKind

KV_PARAMETERS = "kv_transfer_params"  # vLLM's
BOOTSTRAP_HOST, BOOTSTRAP_PORT, BOOTSTRAP_ROOM = "bootstrap_host", "bootstrap_port", "bootstrap_room"  # SGLang's
PHASE_PARAMETERS = "disaggregated_params"  # TensorRT-LLM's
RANK_HEADER = "x-data-parallel-rank"  # vLLM sends the request to this rank
# by which a client would choose pods or blocks itself; llm-d's sidecar goes by the first three, SGLang by the others,
# which go before the body's fields
PREFILLER_HEADER = "x-prefiller-host-port"
CLIENT_HEADERS = (
    *(PREFILLER_HEADER, "x-encoder-hosts-ports", "x-kv-cache-source-host-port"),
    *("x-override-bootstrap-host", "x-override-bootstrap-port", "x-override-bootstrap-room"),
    "x-override-disagg-prefill-dp-rank",
)
# Envoy's: it goes before what the route says of retries, where the ext_proc filter's `mutation_rules` allow it
NO_RETRIES: Mapping[str, str] = {"x-envoy-max-retries": "0"}
LEAST_NUMBER, MOST_NUMBER = 1 << 42, 1 << 62  # TensorRT-LLM's own ids are below, and engines keep 63 bits
Fields: TypeAlias = Mapping[str, bytes]  # of a body: name -> JSON


class LegOutcome(StrEnum):
    """How a prefill leg has ended; a metric's label."""

    ANSWERED = "answered"
    FULL = "full"  # 503: the pod has no room
    REFUSED = "refused"  # 4xx: the decode pod would say the same, and to the client
    FAILED = "failed"  # 5xx, a redirect, or no answer at all
    TIMED_OUT = "timed-out"
    UNREADABLE = "unreadable"  # 200, and does not say where the blocks are
    CLIENT_LEFT = "client-left"
    LOST = "lost"  # in a race: the other leg was first, and this one's connection is closed
    LATE = "late"  # in a race: it has answered behind the first, and keeps its blocks until its engine's time for it


class LegAnswerError(Exception):
    """A prefill pod's answer cannot be used; the words say why."""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a prefill pod, as its bootstrap server names it."""

    engine_id: str
    rank: str | None = None  # that requests to it name; None: there is only one


class LegNames(msgspec.Struct, frozen=True, kw_only=True):
    """By what both legs call the transfer, where it has a name before it begins."""

    host: str  # the prefill pod's, an IPv6 address in brackets
    bootstrap_port: int
    number: int  # drawn for this transfer, from LEAST_NUMBER on and below MOST_NUMBER
    engine: Engine | None = None  # where the protocol asks for it


class TransferProtocol(msgspec.Struct, frozen=True, kw_only=True):
    """What one protocol wants of both legs."""

    apis: frozenset[ApiKind]
    client_fields: tuple[str, ...]  # of a body, that only the picker may set
    ask: Callable[[LegNames], Fields]  # what the prefill pod's body gets
    hand_over: Callable[[LegNames, bytes], Fields]  # what the decode pod's gets by that answer; raises LegAnswerError
    is_one_token: bool = True  # the prefill pod answers like any other, so that its answer is to be short
    is_at_once: bool = False  # the decode pod waits for the blocks itself: there is no answer before it is asked
    asks_bootstrap: bool = False  # `engine_of` reads what the prefill pod's bootstrap server says
    decode_pods_prefill: bool = True  # a decode pod computes the prompt itself where no leg has
    tells_prefill_hits: bool = False  # the decode pod's usage has what the prefill pod had cached


# --- NIXL -------------------------------------------------------------------------------------------------------------

# of the decode pod's request, as the prefill pod's answer says them; null ones end vLLM's engine
_NIXL_TYPES: Mapping[str, type] = {
    "remote_block_ids": list,
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
}
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


def _nixl_hands_over(_: LegNames, content: bytes) -> Fields:
    """Return the answer's own parameters, unchanged.

    The prefill pod keeps the blocks until the decode pod has fetched them or 30 s have passed. The parameters are worth
    one fetch: the decode pod's notice frees the blocks, and a second fetch reads whatever has taken their place,
    without an error anywhere.
    """
    raw = _read(content, _KvAnswer).kv_transfer_params
    said = _read(raw, Any)
    if not isinstance(said, dict):
        raise LegAnswerError(f"its answer has no {KV_PARAMETERS}: it runs without a connector, or with another one")
    lacking = [name for name, kind in _NIXL_TYPES.items() if type(said.get(name)) is not kind]
    if lacking or said.get("do_remote_prefill") is not True:
        raise LegAnswerError(f"its answer's {KV_PARAMETERS} lack {', '.join(lacking) or 'do_remote_prefill'}")
    if said.get("transfer_mode", "pull") != "pull":
        raise LegAnswerError(f"it hands its cache over in mode {str(said['transfer_mode'])[:40]!r}; pull is understood")
    return {KV_PARAMETERS: bytes(raw)}


# --- Mooncake ---------------------------------------------------------------------------------------------------------


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    disaggregated_params: msgspec.Raw = msgspec.Raw(b"null")


class _ChoicesAnswer(msgspec.Struct):
    choices: list[_Choice] = []


class _Rank(msgspec.Struct):
    engine_id: str


def engine_of(content: bytes, *, number: int) -> Engine:
    """Return one rank of those that a bootstrap server's `/query` names, any by this number. Raise LegAnswerError."""
    ranks = _read(content, dict[str, _Rank])
    if not ranks:
        raise LegAnswerError("its bootstrap server knows no engine yet")
    rank = sorted(ranks)[number % len(ranks)]
    return Engine(engine_id=ranks[rank].engine_id, rank=rank if len(ranks) > 1 else None)


def _ask_mooncake(names: LegNames) -> Fields:
    said = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": _transfer_id(names)}
    return {KV_PARAMETERS: msgspec.json.encode(said)}


def _mooncake_hands_over(names: LegNames, content: bytes) -> Fields:
    """Return what was agreed beforehand: the answer has no parameters, only whether the blocks are kept.

    vLLM keeps them where the answer has reached its limit of one token, for 480 s; after any other end a decode pod
    would wait just as long for nothing.
    """
    _require_limit_reached(_read(content, _ChoicesAnswer))
    assert names.engine is not None, "it was asked for"
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


# --- a store that the pods share --------------------------------------------------------------------------------------


def _store_hands_over(_: LegNames, content: bytes) -> Fields:
    """Return nothing: the decode pod finds in the store what the prefill pod has put there, by the tokens."""
    _read(content, _KvAnswer)
    return {}


# --- SGLang -----------------------------------------------------------------------------------------------------------


def _bootstrap(names: LegNames, _: bytes = b"") -> Fields:
    """Return where the two pods meet; the room is one of the prefill pod's."""
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
    """Return the context phase's parameters for the generation phase: its first token and the cache's state."""
    choice = _require_limit_reached(_read(content, _ChoicesAnswer), "not_finished")
    said = _read(choice.disaggregated_params, Any)
    if not isinstance(said, dict):
        raise LegAnswerError(f"its answer has no {PHASE_PARAMETERS}: it is no context server")
    lacking = [name for name in ("ctx_request_id", "first_gen_tokens") if not said.get(name)]
    if lacking:
        raise LegAnswerError(f"its answer's {PHASE_PARAMETERS} lack {', '.join(lacking)}")
    number = msgspec.json.encode(names.number)
    changes = {"request_type": b'"generation_only"', "disagg_request_id": number}
    return {PHASE_PARAMETERS: JsonObject(bytes(choice.disaggregated_params)).replaced(changes)}


# --- the table --------------------------------------------------------------------------------------------------------

_COMPLETIONS = frozenset((ApiKind.CHAT_COMPLETIONS, ApiKind.COMPLETIONS))
_VLLM = _COMPLETIONS | {ApiKind.RESPONSES, ApiKind.MESSAGES, ApiKind.GENERATE}

# what the picker runs itself: all but Protocol.SIDECAR
PROTOCOLS: Mapping[Protocol, TransferProtocol] = {
    Protocol.NIXL: TransferProtocol(
        apis=_VLLM,
        client_fields=(KV_PARAMETERS,),
        ask=lambda _: {KV_PARAMETERS: _ASK_NIXL},
        hand_over=_nixl_hands_over,
        tells_prefill_hits=True,
    ),
    # vLLM's connector takes both legs at once, too; one after the other costs the hand-shake's time and means that the
    # decode pod never waits for blocks that do not come
    Protocol.MOONCAKE: TransferProtocol(
        apis=_COMPLETIONS | {ApiKind.GENERATE},
        client_fields=(KV_PARAMETERS,),
        ask=_ask_mooncake,
        hand_over=_mooncake_hands_over,
        asks_bootstrap=True,
    ),
    Protocol.SHARED_STORAGE: TransferProtocol(
        apis=_VLLM, client_fields=(KV_PARAMETERS,), ask=lambda _: {}, hand_over=_store_hands_over
    ),
    Protocol.SGLANG: TransferProtocol(
        apis=_COMPLETIONS | {ApiKind.RESPONSES, ApiKind.MESSAGES},
        client_fields=(BOOTSTRAP_HOST, BOOTSTRAP_PORT, BOOTSTRAP_ROOM, "disagg_prefill_dp_rank"),
        ask=_bootstrap,
        hand_over=_bootstrap,
        is_one_token=False,
        is_at_once=True,
        decode_pods_prefill=False,
    ),
    Protocol.TRTLLM: TransferProtocol(
        apis=_COMPLETIONS,
        client_fields=(PHASE_PARAMETERS,),
        ask=_context_phase,
        hand_over=_generation_phase,
        is_one_token=False,
    ),
}


def protocol_of(policy: Disaggregation) -> TransferProtocol | None:
    """Return the protocol of the legs that the picker runs; None where it runs none."""
    return PROTOCOLS.get(policy.protocol) if policy.enabled else None


def client_fields(policy: Disaggregation) -> tuple[str, ...]:
    """Return the fields of bodies that no client may set in a pool: they name others' blocks, and hosts."""
    if not policy.enabled:
        return ()
    protocol = protocol_of(policy)
    return protocol.client_fields if protocol is not None else (KV_PARAMETERS,)


def removed_headers(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return those of a client's headers that no pod gets: by them it would choose pods and hosts itself."""
    return tuple([name for name in CLIENT_HEADERS if name in headers])


def given_fields(body: JsonObject, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of these fields that the client has put into the body.

    Raise MalformedRequestError where there may be some and no field can be found.
    """
    if not any(body.may_name(name) for name in names):
        return ()
    return tuple(body.values(frozenset(names)))


def _read(content: bytes | msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LegAnswerError(f"its answer cannot be read: {error}") from error
