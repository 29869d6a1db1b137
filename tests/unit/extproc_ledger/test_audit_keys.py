"""Keys of the audit chain: read from a file, used for two things that tell nothing of each other, never shown."""

import re
from pathlib import Path

import pytest

from extproc.errors import ConfigError
from extproc.ledger.access_log import NameHashes
from extproc.ledger.audit_chain import AuditKey, parse_keys
from extproc.settings.observation_settings import AccessLogTargets, ObservationSettings, read_access_log

SECRET = "a secret of sixteen"


def test_the_last_key_of_a_file_is_the_one_in_use() -> None:
    keys = parse_keys(f"# old\nk1:{SECRET}\n\nk2:{SECRET} two\n", where="f")
    assert list(keys) == ["k1", "k2"]
    assert keys["k2"].secret == f"{SECRET} two".encode()


def test_a_key_alone_has_an_id_all_the_same() -> None:
    assert parse_keys(SECRET, where="f") == {"1": AuditKey(id="1", secret=SECRET.encode())}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no key"),
        ("# only words\n", "no key"),
        ("k1:short", "has 5 bytes"),
        ("k1:" + "x" * 2000, "has 2000 bytes"),
        (f"k1:{SECRET}\nk1:{SECRET}", "is there twice"),
        (f"{SECRET}\n{SECRET}", "has no id"),
        (f"a b:{SECRET}", "is not of letters"),
    ],
)
def test_a_key_file_that_cannot_be_used_says_why_and_shows_no_key(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        parse_keys(text, where="f")
    assert SECRET not in str(refused.value)


def test_a_key_is_not_shown() -> None:
    assert SECRET not in repr(AuditKey(id="1", secret=SECRET.encode()))


def test_the_chain_and_the_names_have_different_keys() -> None:
    key = AuditKey(id="1", secret=SECRET.encode())
    assert key.for_chain != key.for_names


def test_a_tenant_has_one_hash_for_a_key_and_another_one_for_another_key() -> None:
    one, same, other = NameHashes(b"k" * 32), NameHashes(b"k" * 32), NameHashes(b"l" * 32)
    assert one.tenant("acme") == same.tenant("acme")
    assert len({one.tenant("acme"), one.tenant("acme2"), other.tenant("acme"), one.prompt(b"acme")}) == 4


def test_a_share_of_the_requests_is_written_and_always_the_same_ones() -> None:
    names = NameHashes(b"k" * 32)
    written = [names.is_written(f"r{number}", share=0.25) for number in range(4000)]
    assert 800 < sum(written) < 1200
    assert written == [NameHashes(b"k" * 32).is_written(f"r{number}", share=0.25) for number in range(4000)]
    assert not names.is_written("r", share=0.0)


def test_an_audit_of_lines_that_nobody_writes_is_refused() -> None:
    with pytest.raises(ConfigError, match="give --access-log, too"):
        ObservationSettings(audit=True)
    assert ObservationSettings(audit=True, access_log=AccessLogTargets(stdout=True)).writes


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("stdout", AccessLogTargets(stdout=True)),
        ("log/a.log", AccessLogTargets(file=Path("log/a.log"))),
        ("/a.log?max_mb=5&files=2", AccessLogTargets(file=Path("/a.log"), max_bytes=5_000_000, files=2)),
        (
            "stdout, /a.log, redis:audit?length=2000",
            AccessLogTargets(stdout=True, file=Path("/a.log"), stream="audit", stream_length=2000),
        ),
    ],
)
def test_the_access_log_has_one_value_with_all_its_targets(text: str, targets: AccessLogTargets) -> None:
    assert read_access_log(text) == targets


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/a.log?size=1", "behind '?' it takes max_mb and files only"),
        ("stdout?files=1", "behind '?' it takes none"),
        ("redis:audit?length=9", "length must be a whole number of at least 1000"),
        ("/a.log?files=x", "files must be a whole number of at least 1"),
        ("redis:", "'redis:' has no name"),
        ("/a.log,/b.log", "there may be one file and one stream"),
    ],
)
def test_a_target_that_cannot_be_read_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^--access-log.*{re.escape(words)}"):
        read_access_log(text)
