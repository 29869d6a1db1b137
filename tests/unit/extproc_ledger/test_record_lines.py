"""A record becomes a line, whatever it holds."""

import json
from typing import Any

import pytest

from extproc.ledger.access_log import AccessRecord
from tests.unit.extproc_ledger.chains import NOW, Writer


def record(**fields: Any) -> AccessRecord:
    return AccessRecord(kind="decision", at=NOW, fate="routed", decided_us=1, **fields)


@pytest.mark.parametrize(
    ("fields", "written"),
    [
        ({"max_tokens": 10**5000}, {"max_tokens": 2**63 - 1}),
        ({"output_tokens": -(10**5000)}, {"output_tokens": -(2**63) + 1}),
        ({"request_id": "a\ud800b"}, {"request_id": "a?b"}),
        ({"fallbacks": ("\ud800",)}, {"fallbacks": ["?"]}),
    ],
)
def test_what_cannot_be_written_as_it_is_costs_no_record(fields: dict[str, Any], written: dict[str, Any]) -> None:
    writer = Writer()
    for number in range(3):
        writer.buffer.put(record(**fields if number == 1 else {}, stream=True))
    lines = [json.loads(line) for line in writer.lines.next(10)]
    assert [line["seq"] for line in lines] == [0, 1, 2]
    assert {name: lines[1][name] for name in written} == written
    assert lines[1]["stream"] is True
