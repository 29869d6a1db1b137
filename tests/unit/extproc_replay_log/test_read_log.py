"""Which lines of an access log are replayed, and what is said of the others."""

from typing import Any

import msgspec
import pytest

from extproc.errors import ConfigError
from extproc.records.audit_chain import AuditChain
from extproc.replay_log.read_log import arrived_at, read_log
from tests.unit.extproc_replay_log.recorded import START, encoded, line, refused


def test_requests_are_in_the_order_of_their_arrivals_and_not_of_their_decisions() -> None:
    late, early = line(1.0), line(0.5, waited=3.0)
    log = read_log(encoded([late, early]), pool=None, where="log")
    assert [record.request_id for record in log.records] == ["0.500", "1.000"]
    assert log.began == pytest.approx(START + 0.5)
    assert arrived_at(log.records[1]) == pytest.approx(START + 1.0)


def test_an_audit_is_read_as_a_log() -> None:
    chain = AuditChain("c", key=None)
    lines = [chain.line(msgspec.json.encode(each)) for each in ({"kind": "head", "at": 1.0}, line(0.0))]
    assert len(read_log(lines, pool=None, where="audit").records) == 1
    assert len(read_log([*lines, lines[1]], pool=None, where="a stream, which may have a line twice").records) == 1


def test_what_is_missing_is_said() -> None:
    gap = b'{"kind":"gap","at":1.0,"dropped":7,"why":"x"}\n'
    unread = refused(2.0, "unknown-model", class_=None)
    log = read_log([*encoded([line(0.0, share=0.25), unread]), gap, b"no json\n", b"\n"], pool=None, where="log")
    assert len(log.records) == 1
    assert [note.split(" ", 1)[0] for note in log.notes] == ["1", "7", "1", "only"]
    assert "auditShare 0.25" in log.notes[-1]


@pytest.mark.parametrize(
    "changed",
    [
        {"at": 1e300},
        {"at": -5.0},
        {"decided_us": -1},
        {"decided_us": 2**63},
        {"ended_us": 2**62},
        {"output_tokens": 10**12},
        {"prompt_tokens": -3},
    ],
)
def test_numbers_that_no_picker_writes_are_damage(changed: dict[str, Any]) -> None:
    damaged = msgspec.json.encode(msgspec.structs.replace(line(1.0), **changed))
    deep = b'{"kind":"decision","x":' + b"[" * 100_000
    log = read_log([*encoded([line(0.0)]), damaged + b"\n", deep, b'{"kind":"decis'], pool=None, where="log")
    assert (len(log.records), log.notes) == (1, ("3 lines could not be read",))


def test_a_clock_that_was_set_is_doubted() -> None:
    log = read_log(encoded([line(-1.7e9), line(0.0), line(3600.0)]), pool=None, where="log")
    (note,) = log.notes
    assert note.startswith("for 19,676 days there is no request, from 1973-03-03T")


def test_one_of_several_pools_is_to_be_named() -> None:
    lines = encoded([line(0.0, pool="a/one"), line(1.0, pool="a/two"), line(2.0, pool="a/two")])
    with pytest.raises(ConfigError, match=r"--pool takes one: a/two \(2\), a/one \(1\)"):
        read_log(lines, pool=None, where="log")
    assert len(read_log(lines, pool="a/two", where="log").records) == 2
    with pytest.raises(ConfigError, match="no request of the pool 'b/no'"):
        read_log(lines, pool="b/no", where="log")


@pytest.mark.parametrize("lines", [[], [b"\n"], [b'{"level":"info","msg":"not an access log"}\n'], [b"\x00\xff\n"]])
def test_a_file_without_decisions_is_no_access_log(lines: list[bytes]) -> None:
    with pytest.raises(ConfigError, match="no access log"):
        read_log(lines, pool=None, where="log")
