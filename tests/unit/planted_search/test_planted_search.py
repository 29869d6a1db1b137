"""The search for planted secrets finds them as they are and in the usual disguises."""

import base64
import urllib.parse

import pytest

from tests.e2e.planted import Secrets, leaks, token_traces, traces_of

SECRET = "planted-secret-1a2b"
TRACES = traces_of({"it": SECRET})


@pytest.mark.parametrize(
    "said",
    [
        f'{{"prompt": "{SECRET}"}}'.encode(),
        SECRET.encode().hex().encode(),
        urllib.parse.quote(SECRET).encode(),
        *[base64.b64encode(b"x" * before + SECRET.encode() + b"y" * 5) for before in range(4)],
        *[base64.urlsafe_b64encode(b"x" * before + SECRET.encode()) for before in range(3)],
    ],
)
def test_a_secret_is_found_in_any_of_its_forms(said: bytes) -> None:
    [*found] = leaks({"a place": b"before " + said + b" after", "another": b"nothing here"}, TRACES)
    assert found
    assert all(each.startswith("a place has it") for each in found)


def test_each_word_of_a_secret_counts_and_other_words_do_not() -> None:
    secrets = Secrets()
    assert leaks({"log": f"so {secrets.prompt.split()[1]} it was".encode()}, traces_of(secrets.all()))
    assert leaks({"log": b"GET /v1/chat/completions tiny 200 kvmesh"}, traces_of(secrets.all())) == []
    assert leaks({"log": secrets.jwt.split(".")[1].encode()}, traces_of(secrets.all()))


def test_token_ids_are_found_as_lists_and_packed() -> None:
    traces = token_traces("the prompt", [5, 600, 70000])
    for said in (b"[1,5,600,70000]", b"(5, 600, 70000)", b"".join(i.to_bytes(4, "little") for i in (1, 5, 600, 70000))):
        assert len(leaks({"redis": said}, traces)) == 1
    assert leaks({"redis": b"[5,600]"}, traces) == []
