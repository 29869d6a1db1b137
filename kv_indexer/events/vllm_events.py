"""Decodes event batches of vLLM 0.8.5 to 0.32, SGLang and TRT-LLM into `blocks.events`. Pure.

It is liberal on purpose: unknown fields are ignored; an unreadable event is skipped and counted by reason, and its
batch is kept. Only a payload that is not a batch at all raises. Format: vllm/distributed/kv_events.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Annotated, Any

import msgspec

from kv_indexer.events import event_fields as read
from kv_indexer.events.event_fields import ABSENT, UNREADABLE, BadEventError
from kv_indexer.events.plain_batches import read_plain_batch
from kvmesh.blocks.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from kvmesh.errors import DecodeError

MAX_PAYLOAD_BYTES = 64 << 20  # a step that fills a cache of a million tokens takes 5 MiB
MAX_EVENTS = 1_000_000  # per batch
_BATCH_FIELDS = ("ts", "events", "data_parallel_rank")
# positions in the array form; the map form (vLLM >= 0.24) uses these names
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
_METADATA = frozenset({"cache_salt", "session_id"})  # the fields that we read from SGLang's map
_STORED_LEAST, _REMOVED_LEAST = 4, 1  # number of fields in the oldest forms

_Raws = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENTS)]
_raw_list = msgspec.msgpack.Decoder(_Raws)
_raw_map = msgspec.msgpack.Decoder(dict[Any, msgspec.Raw])
_rank = msgspec.msgpack.Decoder(Annotated[int, msgspec.Meta(ge=0)] | None)
_number = msgspec.msgpack.Decoder(float)
_word = msgspec.msgpack.Decoder(str)


class OpenBatch:
    """One payload whose events are still to read."""

    def __init__(self, payload: bytes) -> None:
        """Raise DecodeError if it is no event batch, or larger than MAX_PAYLOAD_BYTES."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise DecodeError(f"payload of {len(payload)} bytes: more than {MAX_PAYLOAD_BYTES} are not read")
        try:
            self.ts, self._raw_events, self.rank = _split_batch(payload)
        except UNREADABLE as error:
            raise DecodeError(f"payload of {len(payload)} bytes is no event batch: {error}") from error
        self.skipped: dict[str, int] = {}  # reason -> events that could not be read so far

    def read(self) -> list[Event]:
        """Return all readable events."""
        return self._read(self._raw_events)

    def turns(self, *, size: int) -> Iterator[list[Event]]:
        """Yield all readable events in turns of about `size` bytes; one event may be larger."""
        first, so_far = 0, 0
        for number, raw in enumerate(self._raw_events, 1):
            so_far += len(memoryview(raw))
            if so_far >= size:
                yield self._read(self._raw_events[first:number])
                first, so_far = number, 0
        yield self._read(self._raw_events[first:])

    def _read(self, raw_events: Sequence[msgspec.Raw]) -> list[Event]:
        events: list[Event] = []
        for raw in raw_events:
            try:
                events.append(_event(raw))
            except BadEventError as error:
                self._skip(error.reason)
            except UNREADABLE:
                self._skip("undecodable-event")
        return events

    def _skip(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one payload frame. Raise DecodeError if it is no event batch, or larger than MAX_PAYLOAD_BYTES."""
    plain = read_plain_batch(payload)
    if plain is not None:  # the usual case
        ts, read_at_once, rank = plain
        return EventBatch(ts=ts, events=tuple(read_at_once), data_parallel_rank=rank)
    return decode_any_batch(payload)


def decode_any_batch(payload: bytes) -> EventBatch:
    """Do the same as `decode_batch`, event by event and field by field."""
    batch = OpenBatch(payload)
    events = tuple(batch.read())
    return EventBatch(ts=batch.ts, events=events, data_parallel_rank=batch.rank, skipped=batch.skipped)


def _split_batch(payload: bytes) -> tuple[float, list[msgspec.Raw], int | None]:
    # events stay raw at first, so that one broken event does not cost its batch
    if read.is_map(payload):
        fields = _raw_map.decode(payload)  # the form of one development version of vLLM
    else:
        fields = dict(zip(_BATCH_FIELDS, _raw_list.decode(payload), strict=False))
    if "ts" not in fields or "events" not in fields:
        raise ValueError("a batch has at least a time and events")
    ts = _number.decode(fields["ts"])
    if not isfinite(ts):
        raise ValueError("the time of a batch must be a finite number")  # restarts are judged by it
    try:
        rank = _rank.decode(fields.get("data_parallel_rank", ABSENT))
    except UNREADABLE:
        rank = None  # the stream's own rank counts; this one is only shown
    return ts, _raw_list.decode(fields["events"]), rank


def _event(raw: msgspec.Raw) -> Event:
    if read.is_map(raw):
        fields: Mapping[str, msgspec.Raw] = _raw_map.decode(raw)
        values: Sequence[msgspec.Raw] | None = None
        name = fields.get("type", ABSENT)
    else:
        fields, values = {}, _elements(raw)
        name = values.pop(0)
    try:
        kind = _word.decode(name)
    except UNREADABLE:
        raise BadEventError("event-without-type") from None
    if kind == "BlockStored":
        return _stored(fields if values is None else _named(_STORED_FIELDS, values, least=_STORED_LEAST))
    if kind == "BlockRemoved":
        return _removed(fields if values is None else _named(_REMOVED_FIELDS, values, least=_REMOVED_LEAST))
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    raise BadEventError("unknown-event-type")


def _elements(raw: msgspec.Raw) -> list[msgspec.Raw]:
    try:
        if elements := _raw_list.decode(raw):
            return elements
    except UNREADABLE:
        pass
    raise BadEventError("event-without-type")


def _named(names: Sequence[str], values: Sequence[msgspec.Raw], *, least: int) -> dict[str, msgspec.Raw]:
    if len(values) < least:
        raise BadEventError("too-few-fields")
    return dict(zip(names, values, strict=False))


def _stored(fields: Mapping[str, msgspec.Raw]) -> BlockStored:
    more = read.metadata(fields["lora_name"]) if "lora_name" in fields else None
    if more is not None:  # SGLang >= 0.5.18 has a metadata map in this position
        fields = {**fields, "lora_name": ABSENT, **{name: more[name] for name in more.keys() & _METADATA}}
    hashes = read.hashes(fields.get("block_hashes", ABSENT))
    extra_keys = read.features(fields.get("extra_keys", ABSENT))
    if extra_keys is None and "mm_keys" in fields:  # TRT-LLM
        extra_keys = read.items(fields["mm_keys"], blocks=len(hashes))
    lora_name, lora_id = read.adapter(fields.get("lora_name", ABSENT), fields.get("lora_id", ABSENT))
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=read.parent_hash(fields.get("parent_block_hash", ABSENT)),
        tokens=read.tokens(fields.get("token_ids", ABSENT)),
        block_size=read.block_size(fields.get("block_size", ABSENT)),
        lora_id=lora_id,
        medium=read.medium(fields.get("medium", ABSENT)),
        lora_name=lora_name,
        extra_keys=extra_keys,
        group_idx=read.unsigned(fields.get("group_idx", ABSENT), "bad-group"),
        kv_cache_spec_kind=read.short_name(fields.get("kv_cache_spec_kind", ABSENT), "bad-kind"),
        kv_cache_spec_sliding_window=read.integer(fields.get("kv_cache_spec_sliding_window", ABSENT), "bad-window"),
        locality=read.short_name(fields.get("locality", ABSENT), "bad-locality"),
        ownership=read.short_name(fields.get("ownership", ABSENT), "bad-ownership"),
        session_id=read.session(fields.get("session_id", ABSENT)),
        cache_salt=read.name(fields.get("cache_salt", ABSENT), "bad-cache-salt"),
    )


def _removed(fields: Mapping[str, msgspec.Raw]) -> BlockRemoved:
    return BlockRemoved(
        block_hashes=read.hashes(fields.get("block_hashes", ABSENT)),
        medium=read.medium(fields.get("medium", ABSENT)),
        group_idx=read.unsigned(fields.get("group_idx", ABSENT), "bad-group"),
        locality=read.short_name(fields.get("locality", ABSENT), "bad-locality"),
        ownership=read.short_name(fields.get("ownership", ABSENT), "bad-ownership"),
    )
