"""An audit chain tells of every line that was changed, left out, added, moved, cut off or taken from elsewhere."""

import random

import pytest

from extproc.ledger.audit_chain import AuditChain, ChainEnd
from operate.audit.verify import MissingKeyError, verify_chains
from tests.unit.extproc_ledger.chains import KEY, NOW, OTHER_KEY, Writer, verdict, whole_file, wrongs


def test_a_chain_as_it_was_written_is_whole_and_closed() -> None:
    found = verdict(whole_file())
    assert (found.is_whole, found.is_ended, found.lines, found.notes) == (True, True, 7, [])
    (chain,) = found.chains
    assert (chain.chain, chain.process, chain.decisions, chain.state) == ("c1", "host/1", 5, "closed")


def test_a_changed_byte_is_found_whichever_it_is() -> None:
    lines = whole_file(3)
    chance = random.Random(7)
    for _ in range(200):
        at = chance.randrange(len(lines))
        changed = bytearray(lines[at])
        place = chance.randrange(len(changed) - 1)
        changed[place] ^= 1 << chance.randrange(8)
        if changed[place] == ord("\n"):
            continue
        found = verdict([*lines[:at], bytes(changed), *lines[at + 1 :]])
        assert not found.is_whole, (at, place)


def test_a_changed_line_is_named() -> None:
    lines = whole_file()
    lines[3] = lines[3].replace(b"r2", b"r9")
    assert wrongs(verdict(lines)) == [("changed", "1:4")]


def test_a_changed_line_with_a_new_hash_breaks_the_line_after_it() -> None:
    lines = whole_file()
    forged = Writer()
    forged.head()
    forged.decisions(1)
    lines[2] = forged.decisions(2)[0]
    assert wrongs(verdict(lines)) == [("spliced", "1:4")]


def test_a_line_that_was_left_out_is_found() -> None:
    lines = whole_file()
    del lines[2:4]
    assert wrongs(verdict(lines)) == [("missing", "1:3")]


def test_lines_in_another_order_are_found() -> None:
    lines = whole_file()
    lines[2], lines[3] = lines[3], lines[2]
    assert wrongs(verdict(lines))[:2] == [("missing", "1:3"), ("reordered", "1:4")]


def test_a_line_that_is_there_twice_is_found() -> None:
    lines = whole_file()
    lines.insert(3, lines[2])
    assert wrongs(verdict(lines)) == [("repeated", "1:4")]


def test_a_line_of_another_chain_is_found() -> None:
    lines = whole_file()
    lines.insert(3, whole_file(chain="c2")[3])
    assert ("spliced", "1:4") in wrongs(verdict(lines))


def test_the_end_of_one_file_behind_the_beginning_of_another_is_found() -> None:
    assert ("spliced", "1:4") in wrongs(verdict([*whole_file()[:3], *whole_file(chain="c2")[3:]]))


def test_a_file_without_its_beginning_is_found() -> None:
    assert wrongs(verdict(whole_file(key=KEY)[2:], keys={"k1": KEY})) == [("cut-beginning", "1:1")]


def test_a_file_whose_close_was_cut_off_has_no_end() -> None:
    found = verdict(whole_file()[:-1], now=NOW + 1000.0)
    assert (found.is_whole, found.is_ended, found.chains[0].state) == (True, False, "unended")


def test_a_chain_that_is_still_written_is_open() -> None:
    found = verdict(whole_file()[:-1], now=NOW + 60.0)
    assert (found.is_whole, found.is_ended, found.chains[0].state) == (True, True, "open")


def test_what_is_cut_off_of_a_dead_process_is_found_by_what_the_next_one_saw() -> None:
    first, second = Writer("c1"), Writer("c2")
    lines = [*first.head(), *first.decisions(3)]
    lines += [*second.head(first.end), *second.decisions(1), *second.last()]
    found = verdict(lines)
    assert (found.is_whole, found.is_ended) == (True, False)
    assert [chain.state for chain in found.chains] == ["ended", "closed"]

    del lines[3]

    assert wrongs(verdict(lines)) == [("cut-end", "1:4")]


def test_what_is_cut_off_before_the_next_process_comes_is_no_certain_end() -> None:
    first, second = Writer("c1"), Writer("c2")
    lines = [*first.head(), *first.decisions(2)]
    cut = first.end
    first.last()
    found = verdict([*lines, *second.head(cut), *second.last()])
    assert (found.is_whole, found.is_ended, found.chains[0].state) == (True, False, "ended")
    assert "and the next process found it so" in found.notes[0]


def test_a_chain_that_is_removed_as_a_whole_is_found_by_what_the_next_process_saw() -> None:
    first, second = Writer("c1", key=KEY), Writer("c2", key=KEY)
    gone = [*first.head(), *first.decisions(2), *first.last()]
    rest = [*second.head(first.end), *second.last()]
    assert verdict([*gone, *rest], keys={"k1": KEY}).is_whole
    assert wrongs(verdict(rest, keys={"k1": KEY})) == [("cut-end", "1:1")]


def test_half_a_line_at_the_end_is_a_cut() -> None:
    lines = whole_file()
    lines[-1] = lines[-1][:40]
    assert wrongs(verdict(lines)) == [("cut-end", "1:7")]


def test_a_line_after_the_close_is_found() -> None:
    writer = Writer()
    lines = [*writer.head(), *writer.last(), *writer.decisions(1)]
    assert wrongs(verdict(lines)) == [("after-close", "1:3")]


def rotated() -> tuple[list[bytes], list[bytes], list[bytes]]:
    writer = Writer()
    return (
        [*writer.head(), *writer.decisions(2)],
        [*writer.continued(), *writer.decisions(2)],
        [*writer.continued(), *writer.decisions(1), *writer.last()],
    )


def test_rotated_files_are_one_chain_in_whatever_order_they_are_given() -> None:
    first, second, third = rotated()
    for files in ((first, second, third), (third, second, first), (second, third, first)):
        found = verdict(*files)
        assert (found.is_whole, found.notes, found.chains[0].decisions) == (True, [], 5)


def test_a_file_that_is_missing_between_two_is_found() -> None:
    first, _, third = rotated()
    assert wrongs(verdict(first, third)) == [("missing", "2:1")]


def test_the_oldest_files_may_be_gone_unless_all_is_asked_for() -> None:
    _, second, third = rotated()
    assert verdict(second, third).is_whole
    assert wrongs(verdict(second, third, whole=True)) == [("missing", "1:1")]


def test_a_rotated_file_that_was_cut_at_its_end_is_found() -> None:
    first, second, _ = rotated()
    assert wrongs(verdict(first[:-1], second)) == [("missing", "2:1")]


def test_what_the_writer_dropped_is_owned_up_to_and_no_finding() -> None:
    writer = Writer(most=2)
    lines = [*writer.head(), *writer.decisions(5), *writer.decisions(1), *writer.last()]
    found = verdict(lines)
    assert (found.is_whole, found.chains[0].dropped, found.chains[0].decisions) == (True, 3, 3)
    assert found.notes == ["chain c1: the writer itself dropped 3 records and says so (gap)"]


def test_a_keyed_chain_needs_its_key() -> None:
    assert verdict(whole_file(key=KEY), keys={"k1": KEY}).is_whole
    assert ("changed", "1:1") in wrongs(verdict(whole_file(key=KEY), keys={"k1": OTHER_KEY}))
    with pytest.raises(MissingKeyError, match="'k1'"):
        verdict(whole_file(key=KEY))


def test_a_chain_that_somebody_has_written_without_the_key_is_found() -> None:
    assert wrongs(verdict(whole_file(), keys={"k1": KEY})) == [("unkeyed", "1:1")]


def forged(*records: str, chain: str = "c1") -> list[bytes]:
    """Lines that were made without the key."""
    writer = AuditChain(chain, key=None)
    return [writer.line(record.encode()) for record in records]


def test_a_key_that_is_named_by_no_text_does_not_make_a_chain_keyed() -> None:
    lines = forged('{"kind":"head","key_id":5}', '{"kind":"decision"}', '{"kind":"close"}')
    assert ("unkeyed", "1:2") in wrongs(verdict(lines, keys={"k1": KEY}))


def test_lines_without_a_key_and_a_head_are_found_in_a_stream_too() -> None:
    lines = forged('{"kind":"head"}', '{"kind":"decision"}', '{"kind":"close"}')[1:]
    assert wrongs(verdict(lines, keys={"k1": KEY}, interleaved=True)) == [("unkeyed", "1:1")]


@pytest.mark.parametrize(
    "record",
    [
        '{"kind":"head","heartbeat_seconds":"x"}',
        '{"kind":"head","after":{"chain":1}}',
        '{"kind":"gap","dropped":"many"}',
        '{"kind":"close","at":null}',
        '{"kind":"decision","deep":' + "[" * 50_000 + "]" * 50_000 + "}",
    ],
)
def test_fields_that_nobody_writes_so_are_found_and_break_nothing(record: str) -> None:
    assert ("unreadable", "1:2") in wrongs(verdict(forged('{"kind":"head"}', record, '{"kind":"close"}')))


def test_a_chain_made_anew_is_found_by_a_line_that_was_noted_before() -> None:
    writer = Writer()
    lines = [*writer.head(), *writer.decisions(2)]
    noted = writer.end
    files = [("f", lines)]
    assert verify_chains(files, keys={}, now=NOW, expected=[noted]).is_whole
    other = ChainEnd(chain="c1", seq=1, hash="0" * 64)
    assert [finding.wrong for finding in verify_chains(files, keys={}, now=NOW, expected=[other]).findings] == [
        "expected-not-found"
    ]


def test_chains_of_several_pickers_in_one_stream_are_told_apart() -> None:
    one, other = whole_file(key=KEY), whole_file(chain="c2", key=KEY)
    mixed = [line for pair in zip(one, other, strict=True) for line in pair]
    trimmed, twice = mixed[3:], [*mixed[:6], *mixed[4:]]
    for lines in (mixed, trimmed, twice):
        assert verdict(lines, keys={"k1": KEY}, interleaved=True).is_whole
    del mixed[6]
    assert wrongs(verdict(mixed, keys={"k1": KEY}, interleaved=True)) == [("missing", "1:8")]


@pytest.mark.parametrize(
    "line", [b"\n", b"{}\n", b"nonsense\n", b'{"a":1,"hash":"' + b"0" * 64 + b'"}\n', b"\xff\xfe\n"]
)
def test_what_is_no_line_of_a_chain_is_found(line: bytes) -> None:
    lines = whole_file()
    lines.insert(3, line)
    assert wrongs(verdict(lines)) == [("unreadable", "1:4")]
