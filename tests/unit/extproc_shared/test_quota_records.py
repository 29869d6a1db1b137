"""Names that give nothing away, commands that Redis reads, answers that anyone may have written."""

from typing import Any

import hiredis
import pytest

from extproc.policy.priority import Quota
from extproc.shared.quota import QuotaAsk, quota_key
from extproc.shared.quota_records import SCRIPT, Taken, pack_settle, pack_take, quota_name, read_taken

KEY = quota_key(Quota(requests_per_minute=60, concurrent_requests=3), name=b"abc")
ASK = QuotaAsk(key=KEY, prompt_tokens=1234, reserved_tokens=56, member=b"me.1", asked_at=0.0)
FIXED = [b"2", b"{kv2}picker:quota:abc", b"{kv2}picker:quota:open:abc", b"4000", b"3"]
TERMS = [b"1.0", b"10.0", b"-1.0", b"0.0", b"-1.0", b"0.0"]


def read(command: bytes) -> list[bytes]:
    reader = hiredis.Reader()
    reader.feed(command)
    parts: list[bytes] = reader.gets()
    assert reader.gets() is False, "there is more than one command"
    return parts


def test_a_script_that_is_known_is_called_by_its_name() -> None:
    by_text = read(pack_take(ASK, lease_ms=4000, is_known=False))
    by_name = read(pack_take(ASK, lease_ms=4000, is_known=True))

    assert by_text == [b"EVAL", SCRIPT.source.encode(), *FIXED, *TERMS, b"take", b"1", b"1234", b"56", b"me.1"]
    assert by_name == [b"EVALSHA", SCRIPT.sha.encode(), *by_text[2:]]


def test_what_ends_and_what_goes_on_is_one_command() -> None:
    command = pack_settle(KEY, (0.0, -5.0, 7.5), ended=[b"a", b"b"], renewed=[b"c"], lease_ms=4000, is_known=False)
    assert read(command)[13:] == [b"settle", b"0.0", b"-5.0", b"7.5", b"2", b"a", b"b", b"c"]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ([0, 0, 9000, 1500, -2500], Taken(0, 0.0, (9.0, 1.5, -2.5))),
        ([2, 1500, 0, 0, 0], Taken(2, 1.5, (0.0, 0.0, 0.0))),
        ([-1, b"READONLY You can't write"], "READONLY You can't write"),
        (hiredis.ReplyError("NOSCRIPT No matching script"), "NOSCRIPT No matching script"),
        ([0, 0, b"9000", 0, 0], "Redis answers something else than was asked"),
        ([5, 0, 0, 0, 0], "Redis answers something else than was asked"),
        ([], "Redis answers something else than was asked"),
        (None, "Redis answers something else than was asked"),
        (b"abcde", "Redis answers something else than was asked"),
        (7, "Redis answers something else than was asked"),
    ],
)
def test_an_answer_is_read_or_told_why_not(reply: Any, expected: Taken | str) -> None:
    assert read_taken(reply) == expected


def test_names_differ_by_tenant_model_and_seed_and_do_not_show_them() -> None:
    made = [
        quota_name("seed", tenant="a", model="bc"),
        quota_name("seed", tenant="ab", model="c"),
        quota_name("seed", tenant="", model="1:abc"),
        quota_name("seed", tenant="\udcff", model="bc"),
        quota_name("other", tenant="a", model="bc"),
    ]
    assert len(set(made)) == 5
    assert made[0] == quota_name("seed", tenant="a", model="bc")
    assert all(len(name) == 24 for name in made)
