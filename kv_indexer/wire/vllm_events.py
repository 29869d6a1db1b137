"""Decode event batches of vLLM 0.8.5 to 0.32, SGLang and TRT-LLM into `core.events`. Called once a batch; no I/O.

Liberal by intent: unknown fields are ignored, an event that cannot be read is skipped and counted by reason, its
batch kept. Only a payload that is no batch at all raises. Format: vllm/distributed/kv_events.py.
"""

import sys
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import msgspec

from kv_indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from kv_indexer.errors import DecodeError

UINT64 = 0xFFFF_FFFF_FFFF_FFFF
_BATCH_FIELDS = ("ts", "events", "data_parallel_rank")
# positions of the array forms; the map form (vLLM >= 0.24) uses these names
_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
)
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError, TypeError)

_raw_batch = msgspec.msgpack.Decoder(list[msgspec.Raw])
_raw_map = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_anything = msgspec.msgpack.Decoder()
_number = msgspec.msgpack.Decoder(float)


class _BadEventError(Exception):
    """One event cannot be read; the reason is the metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one payload frame. Raise DecodeError if it is no event batch."""
    try:
        ts, raw_events, rank = _split_batch(payload)
    except _UNREADABLE as error:
        raise DecodeError(f"payload of {len(payload)} bytes is no event batch: {error}") from error
    events: list[Event] = []
    skipped: Counter[str] = Counter()
    for raw in raw_events:
        try:
            events.append(_event(_anything.decode(raw)))
        except _BadEventError as error:
            skipped[error.reason] += 1
        except _UNREADABLE:
            skipped["undecodable-event"] += 1
    return EventBatch(ts=ts, events=tuple(events), data_parallel_rank=rank, skipped=dict(skipped))


def _split_batch(payload: bytes) -> tuple[float, list[msgspec.Raw], int | None]:
    # events stay raw at first, so that one broken event cannot take its batch along
    first = payload[0] if payload else 0
    if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
        fields = _raw_map.decode(payload)  # one development version of vLLM
    else:
        fields = dict(zip(_BATCH_FIELDS, _raw_batch.decode(payload), strict=False))
    if "ts" not in fields or "events" not in fields:
        raise ValueError("a batch has at least a time and events")
    ts = _number.decode(fields["ts"])
    if not isfinite(ts):
        raise ValueError("the time of a batch must be a finite number")  # it decides what is a restart
    rank = _anything.decode(fields["data_parallel_rank"]) if "data_parallel_rank" in fields else None
    return ts, _raw_batch.decode(fields["events"]), rank if _is_int(rank) else None


def _event(value: Any) -> Event:
    fields: Mapping[str, Any]
    if isinstance(value, dict):
        kind, fields = value.get("type"), value
        values: Sequence[Any] | None = None
    elif isinstance(value, list) and value:
        kind, values, fields = value[0], value[1:], {}
    else:
        raise _BadEventError("event-without-type")
    if not isinstance(kind, str):
        raise _BadEventError("event-without-type")
    if kind == "BlockStored":
        return _stored(_named(_STORED_FIELDS, values, least=4) if values is not None else fields)
    if kind == "BlockRemoved":
        return _removed(_named(_REMOVED_FIELDS, values, least=1) if values is not None else fields)
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    raise _BadEventError("unknown-event-type")


def _named(names: Sequence[str], values: Sequence[Any], *, least: int) -> dict[str, Any]:
    if len(values) < least:
        raise _BadEventError("too-few-fields")
    return dict(zip(names, values, strict=False))


def _stored(fields: Mapping[str, Any]) -> BlockStored:
    lora_name: Any = fields.get("lora_name")
    cache_salt: Any = fields.get("cache_salt")
    if isinstance(lora_name, dict):  # SGLang >= 0.5.18 has a metadata map in this position
        cache_salt, lora_name = lora_name.get("cache_salt"), None
    return BlockStored(
        block_hashes=_hashes(fields.get("block_hashes")),
        parent_block_hash=_parent(fields.get("parent_block_hash")),
        tokens=_tokens(fields.get("token_ids")),
        block_size=_block_size(fields.get("block_size")),
        lora_id=_optional(fields.get("lora_id"), _is_int, "bad-lora"),
        medium=_medium(fields.get("medium")),
        lora_name=_optional(lora_name, _is_str, "bad-lora"),
        extra_keys=_extra_keys(fields.get("extra_keys")),
        group_idx=_group(fields.get("group_idx")),
        kv_cache_spec_kind=_optional(fields.get("kv_cache_spec_kind"), _is_str, "bad-kind"),
        kv_cache_spec_sliding_window=_optional(fields.get("kv_cache_spec_sliding_window"), _is_int, "bad-window"),
        locality=_optional(fields.get("locality"), _is_str, "bad-locality"),
        ownership=_optional(fields.get("ownership"), _is_str, "bad-ownership"),
        session_id=_optional(fields.get("session_id"), _is_str, "bad-session"),
        cache_salt=_optional(cache_salt, _is_str, "bad-cache-salt"),
    )


def _removed(fields: Mapping[str, Any]) -> BlockRemoved:
    return BlockRemoved(
        block_hashes=_hashes(fields.get("block_hashes")),
        medium=_medium(fields.get("medium")),
        group_idx=_group(fields.get("group_idx")),
        locality=_optional(fields.get("locality"), _is_str, "bad-locality"),
        ownership=_optional(fields.get("ownership"), _is_str, "bad-ownership"),
    )


def _is_int(value: Any) -> bool:
    return type(value) is int  # a bool is an int to isinstance


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _optional(value: Any, is_valid: Callable[[Any], bool], reason: str) -> Any:
    if value is not None and not is_valid(value):
        raise _BadEventError(reason)
    return value


def normal_hash(value: Any) -> int:
    """Return an engine hash as unsigned 64 bit: integers modulo 2^64, bytes by their last 8, big-endian.

    vLLM's own integers are the last 8 bytes of the digest, so both spellings of one hash agree.
    """
    if type(value) is int:
        return value & UINT64
    if isinstance(value, bytes) and value:
        return int.from_bytes(value[-8:], "big")
    raise _BadEventError("bad-block-hash")


def _hashes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise _BadEventError("bad-block-hash")
    return tuple(map(normal_hash, values))


def _parent(value: Any) -> int | None:
    # llm-d-inference-sim's older format writes 0 for "none"
    return (normal_hash(value) or None) if value is not None else None


def _tokens(values: Any) -> bytes:
    if not isinstance(values, list):
        raise _BadEventError("bad-token-ids")
    try:
        tokens = array("I", values)
    except (TypeError, OverflowError):
        tokens = _written_tokens(values)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def _written_tokens(values: list[Any]) -> "array[int]":
    # TRT-LLM may write token ids as strings; SGLang's EAGLE pairs are not tokens of a prompt
    try:
        return array("I", [int(value) if isinstance(value, str) else value for value in values])
    except (TypeError, OverflowError, ValueError):
        raise _BadEventError("bad-token-ids") from None


def _block_size(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 0xFFFF_FFFF:
        raise _BadEventError("bad-block-size")
    return value


def _medium(value: Any) -> str:
    if value is None or value == "":
        return "GPU"
    if not isinstance(value, str):
        raise _BadEventError("bad-medium")
    return value.upper()


def _group(value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise _BadEventError("bad-group")
    return value


def _extra_keys(value: Any) -> tuple[tuple[Any, ...] | None, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise _BadEventError("bad-extra-keys")
    return tuple(map(_extra_entry, value))


def _extra_entry(entry: Any) -> tuple[Any, ...] | None:
    if entry is None:
        return None
    if isinstance(entry, list):
        return tuple(tuple(part) if isinstance(part, list) else part for part in entry)
    if isinstance(entry, str | bytes):
        return (entry,)
    raise _BadEventError("bad-extra-keys")
