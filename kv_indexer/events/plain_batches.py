"""Reads batches in the form of nearly all publishers, in one pass. Pure.

`vllm_events` reads any form, field by field, and passes over each token four times. This module reads a batch only if
all of it has the usual form, and yields the same events; otherwise it returns None, and `vllm_events` reads the batch.
One difference is left: an unknown field whose name is not UTF-8 costs its event there, and nothing here.
"""

from math import isfinite
from typing import Annotated, Any

import msgspec
from msgspec.msgpack import Decoder

from kv_indexer.events.event_fields import (
    NAME_LIMIT,
    UINT32,
    UNREADABLE,
    BadEventError,
    Features,
    feature_entries,
    is_map,
    named_adapter,
    packed_tokens,
    tier,
)
from kvmesh.blocks.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

PLAIN_BYTES = 128 << 10  # limit on the payload: the tokens of all its events become objects for a moment
_FLOAT = b"\xcb"  # first byte of the time, which follows the batch's first byte
_EVENTS_AT = 10
_SHORT_LISTS = range(0x90, 0xA0)  # first byte of a list of up to 15 events; it precedes them alone, else three do

_Unsigned = Annotated[int, msgspec.Meta(ge=0)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=UINT32)]
_Name = Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)] | None  # a longer one is stored as a digest


class _Metadata(msgspec.Struct):
    """SGLang's map in the adapter's position."""

    cache_salt: _Name = None
    session_id: _Name = None


class _Stored(msgspec.Struct):
    """The fields, in the order of the array form."""

    block_hashes: tuple[_Unsigned, ...]
    parent_block_hash: _Unsigned | None
    token_ids: list[int]
    block_size: _Size
    lora_id: int | None = None
    medium: _Name = None
    lora_name: _Name | _Metadata = None
    extra_keys: tuple[Any, ...] | None = None
    group_idx: _Unsigned | None = None
    kv_cache_spec_kind: _Name = None
    kv_cache_spec_sliding_window: int | None = None


class _Removed(msgspec.Struct):
    block_hashes: tuple[_Unsigned, ...]
    medium: _Name = None
    group_idx: _Unsigned | None = None


class _StoredRow(_Stored, array_like=True, tag="BlockStored"):
    pass


class _RemovedRow(_Removed, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedRow(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _StoredMap(_Stored, tag="BlockStored"):
    mm_keys: None = None  # TRT-LLM's items are read by `vllm_events`
    locality: _Name = None
    ownership: _Name = None
    session_id: _Name = None
    cache_salt: _Name = None


class _RemovedMap(_Removed, tag="BlockRemoved"):
    locality: _Name = None
    ownership: _Name = None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _Rows(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredRow | _RemovedRow | _ClearedRow]
    rank: _Unsigned | None = None


class _Maps(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredMap | _RemovedMap | _ClearedMap]
    rank: _Unsigned | None = None


_rows, _maps = Decoder(_Rows), Decoder(_Maps)


def read_plain_batch(payload: bytes) -> tuple[float, list[Event], int | None] | None:
    """Return the time, the events and the rank, or None if any of the payload is unusual or malformed."""
    if len(payload) > PLAIN_BYTES or len(payload) <= _EVENTS_AT or payload[1:2] != _FLOAT:
        return None
    first = _EVENTS_AT + (1 if payload[_EVENTS_AT] in _SHORT_LISTS else 3)
    try:
        batch = _maps.decode(payload) if is_map(payload[first : first + 1]) else _rows.decode(payload)
        events = list(map(_event, batch.events))
    except (*UNREADABLE, OverflowError, BadEventError):
        return None
    return (batch.ts, events, batch.rank) if isfinite(batch.ts) else None


def _event(written: msgspec.Struct) -> Event:
    match written:
        case _StoredMap():
            if isinstance(written.lora_name, _Metadata):
                raise BadEventError("bad-lora")  # `vllm_events` decides which of the two salts counts
            return _stored(
                written,
                locality=written.locality,
                ownership=written.ownership,
                session_id=written.session_id,
                cache_salt=written.cache_salt,
            )
        case _StoredRow(lora_name=_Metadata() as more):
            return _stored(written, session_id=more.session_id, cache_salt=more.cache_salt)
        case _StoredRow():
            return _stored(written)
        case _RemovedMap():
            return _removed(written, locality=written.locality, ownership=written.ownership)
        case _RemovedRow():
            return _removed(written)
        case _:
            return AllBlocksCleared()


def _stored(
    written: _Stored,
    *,
    locality: str | None = None,
    ownership: str | None = None,
    session_id: str | None = None,
    cache_salt: str | None = None,
) -> BlockStored:
    lora_name = written.lora_name
    return BlockStored(
        block_hashes=written.block_hashes,
        parent_block_hash=written.parent_block_hash or None,
        tokens=packed_tokens(written.token_ids),
        block_size=written.block_size,
        lora_id=written.lora_id,
        medium=tier(written.medium),
        lora_name=named_adapter(None if isinstance(lora_name, _Metadata) else lora_name, written.lora_id),
        extra_keys=_features(written.extra_keys),
        group_idx=written.group_idx,
        kv_cache_spec_kind=written.kv_cache_spec_kind,
        kv_cache_spec_sliding_window=written.kv_cache_spec_sliding_window,
        locality=locality,
        ownership=ownership,
        session_id=session_id,
        cache_salt=cache_salt,
    )


def _features(entries: tuple[Any, ...] | None) -> Features | None:
    if entries is None or entries.count(None) == len(entries):  # of a plain prompt
        return entries
    return feature_entries(entries)


def _removed(written: _Removed, *, locality: str | None = None, ownership: str | None = None) -> BlockRemoved:
    return BlockRemoved(
        block_hashes=written.block_hashes,
        medium=tier(written.medium),
        group_idx=written.group_idx,
        locality=locality,
        ownership=ownership,
    )
