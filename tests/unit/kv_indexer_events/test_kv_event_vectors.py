"""Every golden payload decodes to its normal form."""

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kv_indexer.events.vllm_events import decode_batch
from kvmesh.blocks.events import EventBatch

VECTORS: list[dict[str, Any]] = json.loads(
    Path(__file__).parents[2].joinpath("data", "kv_event_wire_vectors.json").read_text(encoding="utf-8")
)["vectors"]


def normal_form(batch: EventBatch) -> dict[str, Any]:
    events = []
    for event in batch.events:
        fields: dict[str, Any] = {"type": type(event).__name__, **msgspec.structs.asdict(event)}
        if "tokens" in fields:
            fields["token_ids"] = list(array("I", fields.pop("tokens")))
            del fields["cache_salt"]  # SGLang's, in no vector
        events.append(json.loads(json.dumps(fields)))  # tuples to lists
    return {"ts": batch.ts, "data_parallel_rank": batch.data_parallel_rank, "events": events}


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_a_golden_payload_decodes_to_its_normal_form(vector: dict[str, Any]) -> None:
    batch = decode_batch(bytes.fromhex(vector["payload_hex"]))

    assert normal_form(batch) == vector["expected"]
    assert batch.skipped == {}
