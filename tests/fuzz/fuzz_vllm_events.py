"""Coverage-guided fuzzing of all that happens to bytes from a pod until Redis is asked: messages, batches, plans.

Run by `make fuzz`, with libFuzzer's own options behind it (`make fuzz FUZZ_ARGS=-runs=1000`). An input is tried as a
payload, as one event among good ones, as the messages of a socket, and as a recipe for an event whose fields are almost
right. Anything but DecodeError, an input of more than five seconds, or memory that keeps growing ends the run with an
error; the input is then in build/fuzz.
"""

import contextlib
import json
import os
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import atheris

with atheris.instrument_imports(include=["kv_indexer"]):
    from kv_indexer.apply.change_plan import plan_change
    from kv_indexer.apply.look_ups import hashes_to_look_up
    from kv_indexer.apply.store_rules import first_size_change
    from kv_indexer.apply.stream_context import StreamContext
    from kv_indexer.events.event_fields import Fault
    from kv_indexer.events.sequence import is_replay_end, parse_live, parse_replay
    from kv_indexer.events.vllm_events import decode_any_batch, decode_batch
    from kvmesh.blocks.block_keys import UnknownExtraKeyError, root_key, separate_extra_keys
    from kvmesh.blocks.events import MAX_GROUP, BlockStored, EventBatch
    from kvmesh.blocks.index_changes import Store
    from kvmesh.errors import DecodeError

import msgspec

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "tests" / "data" / "kv_event_wire_vectors.json"
FINDINGS = ROOT / "build" / "fuzz"
MEMORY_LIMIT_MIB = 1024  # of the whole process, the fuzzer's own corpus included
GROWTH_LIMIT_MIB = 128  # after the warm-up, for as long as it runs
WARM_UP_RUNS, CHECK_EVERY_RUNS = 50_000, 25_000
INPUT_BYTES = 4096

FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id"),
    *("cache_salt", "mm_keys", "uuid", "hash", "start_offset", "type", "future"),
)
WORDS = (
    *("BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "CPU", "STORAGE", "LOCAL", "REMOTE"),
    *("full_attention", "sliding_window", "mm_key", "ad", "salt", ""),
)
PLAIN = {"block_hashes": [7], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
pack = msgspec.msgpack.encode
runs = 0
context = StreamContext()
memory_at_first_mib = 0.0


def test_one_input(data: bytes) -> None:
    """Try one input in every role."""
    payload(data)
    payload(b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x93" + pack(["AllBlocksCleared"]) + data + b"\x00")
    payload(pack(recipe(data)))
    messages(data)
    check_memory()


def payload(data: bytes) -> None:
    """Decode a payload and do with its events what the indexer does before it writes."""
    try:
        batch = decode_batch(data)
        slowly = decode_any_batch(data)
        if slowly.skipped == batch.skipped:  # else it is a name that is no UTF-8
            assert repr(batch) == repr(slowly)  # not a number is unequal to itself
    except DecodeError:
        return
    assert set(batch.skipped) <= set(get_args(Fault)), batch.skipped
    assert len(batch.events) + sum(batch.skipped.values()) <= len(data)
    use(batch)


def use(batch: EventBatch) -> None:
    """Do what the indexer does with one stream's events before it asks Redis, and remember as much as it does."""
    hashes_to_look_up(batch.events, context)
    first_size_change([batch.events], context)
    plan = plan_change(batch.events, context=context, roots=root)
    context.forget_oldest()
    for operation in plan.operations:
        if isinstance(operation, Store):
            assert len(operation.hashes) == len(operation.keys) > 0, operation
    assert len(context.groups) <= MAX_GROUP + 1
    for event in batch.events:
        if isinstance(event, BlockStored):
            with contextlib.suppress(UnknownExtraKeyError):
                separate_extra_keys(event.extra_keys, lora_name=event.lora_name, starts_prompt=True)


def root(lora: str | None, cache_salt: str | None) -> bytes:
    """Return a root key."""
    return root_key(hash_seed="fuzz", model="tiny", lora=lora, cache_salt=cache_salt)


def messages(data: bytes) -> None:
    """Cut the input into frames, by its own lengths, and read it as live and replayed messages."""
    parts: list[bytes] = []
    at = 0
    while at < len(data) and len(parts) < 8:
        size = data[at] % 16
        parts.append(data[at + 1 : at + 1 + size])
        at += 1 + size
    for frame in (parse_live(parts), parse_replay(parts)):
        assert frame is None or (0 <= frame.seq < 1 << 64 and frame.payload == parts[-1])
    is_replay_end(parts)


def recipe(data: bytes) -> Any:
    """Build a batch whose events are nearly right, choice by choice from the input."""
    choose = atheris.FuzzedDataProvider(data)
    events: list[Any] = []
    for _ in range(choose.ConsumeIntInRange(0, 4)):
        kind = WORDS[choose.ConsumeIntInRange(0, 2)]
        if choose.ConsumeBool():
            chosen = [
                FIELDS[choose.ConsumeIntInRange(0, len(FIELDS) - 1)] for _ in range(choose.ConsumeIntInRange(0, 9))
            ]
            events.append({"type": kind, **PLAIN, **{name: value(choose, 3) for name in chosen}})
        else:
            events.append([kind, *(value(choose, 3) for _ in range(choose.ConsumeIntInRange(0, 13)))])
    return [1.5, events, value(choose, 1)]


def value(choose: "atheris.FuzzedDataProvider", depth: int) -> Any:
    """Return something that a field might hold."""
    kind = choose.ConsumeIntInRange(0, 9 if depth else 6)
    if kind < 2:
        return choose.ConsumeIntInRange(0, 40)
    if kind < 4:
        return (None, True)[kind - 2] if choose.ConsumeBool() else choose.ConsumeIntInRange(-(2**63), 2**64 - 1)
    if kind == 4:
        return WORDS[choose.ConsumeIntInRange(0, len(WORDS) - 1)]
    if kind == 5:
        return choose.ConsumeBytes(choose.ConsumeIntInRange(0, 33))
    if kind == 6:
        return choose.ConsumeFloat()
    if kind == 7:
        names = [FIELDS[choose.ConsumeIntInRange(0, len(FIELDS) - 1)] for _ in range(choose.ConsumeIntInRange(0, 3))]
        return {name: value(choose, depth - 1) for name in names}
    return [value(choose, depth - 1) for _ in range(choose.ConsumeIntInRange(0, 5))]


def check_memory() -> None:
    """Fail once the process keeps growing: it has seen everything often enough to have settled."""
    global runs, memory_at_first_mib  # noqa: PLW0603
    runs += 1
    if runs < WARM_UP_RUNS or runs % CHECK_EVERY_RUNS:
        return
    used_mib = resident_mib()
    memory_at_first_mib = memory_at_first_mib or used_mib
    grown = used_mib - memory_at_first_mib
    assert grown < GROWTH_LIMIT_MIB, f"{grown:.0f} MiB more than after {WARM_UP_RUNS} runs"


def resident_mib() -> float:
    """Return the process's resident memory; where /proc is missing, its peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def write_seeds(folder: Path) -> None:
    """Write the golden payloads, their events alone, and messages, one file each."""
    for vector in json.loads(VECTORS.read_text(encoding="utf-8"))["vectors"]:
        golden = bytes.fromhex(vector["payload_hex"])
        (folder / vector["name"]).write_bytes(golden)
        for index, event in enumerate(msgspec.msgpack.decode(golden, type=list[msgspec.Raw])[1:2]):
            for number, raw in enumerate(msgspec.msgpack.decode(event, type=list[msgspec.Raw])):
                (folder / f"{vector['name']}-{index}-{number}").write_bytes(bytes(raw))
    (folder / "live").write_bytes(b"\x00\x08" + bytes(7) + b"\x07\x01x")
    (folder / "end").write_bytes(b"\x00\x00\x08" + b"\xff" * 8 + b"\x00")


def write_dictionary(path: Path) -> None:
    """Write the words of the format as libFuzzer reads them, with their msgpack heads."""
    lines = [pack(word) for word in (*FIELDS, *WORDS)]
    text = "".join('"' + "".join(f"\\x{byte:02x}" for byte in line) + '"\n' for line in lines)
    path.write_text(text, encoding="ascii")


def main() -> None:
    """Fuzz from the golden payloads until libFuzzer's options say stop."""
    FINDINGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        corpus, words = Path(scratch, "corpus"), Path(scratch, "words")
        corpus.mkdir()
        write_seeds(corpus)
        write_dictionary(words)
        options = [
            f"-dict={words}",
            f"-max_len={INPUT_BYTES}",
            "-timeout=5",
            f"-rss_limit_mb={MEMORY_LIMIT_MIB}",
            f"-artifact_prefix={FINDINGS}/",
            "-print_final_stats=1",
        ]
        atheris.Setup([sys.argv[0], *options, *sys.argv[1:], str(corpus)], test_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
