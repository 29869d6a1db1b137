"""Bodies with a content-encoding, and content types: read, refused, or left to the pod."""

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.errors import BodyTooLargeError, MalformedRequestError, UnsupportedEncodingError
from extproc.requests.json_body import UnknownContentEncodingError, decoded_body
from extproc.requests.openai import parse_request
from extproc.requests.request import ApiKind, InferenceRequest, TextPrompt

LIMIT = 1 << 20
COMPLETIONS = "/v1/completions"
BODY = b'{"model": "m", "prompt": "Hello"}'
READ = InferenceRequest(
    api=ApiKind.COMPLETIONS,
    path=COMPLETIONS,
    model="m",
    prompts=(TextPrompt(text="Hello"),),
    max_tokens=16,
    body_bytes=len(BODY),
)


def raw_deflate(body: bytes) -> bytes:
    coder = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return coder.compress(body) + coder.flush()


@pytest.mark.parametrize(
    ("coding", "coded"),
    [
        ("gzip", gzip.compress(BODY, mtime=0)),
        ("GZip", gzip.compress(BODY, mtime=0)),
        ("x-gzip", gzip.compress(BODY, mtime=0)),
        ("identity, gzip", gzip.compress(BODY, mtime=0)),
        ("gzip", gzip.compress(BODY[:9], mtime=0) + gzip.compress(BODY[9:], mtime=0)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", raw_deflate(BODY)),
        ("gzip, deflate", zlib.compress(gzip.compress(BODY, mtime=0))),
        ("identity", BODY),
    ],
)
def test_coded_bodies_are_read_like_plain_ones(coding: str, coded: bytes) -> None:
    assert decoded_body(coded, content_encoding=coding, max_bytes=LIMIT) == BODY
    assert parse_request(path=COMPLETIONS, body=coded, content_encoding=coding) == READ


@pytest.mark.parametrize("coding", [None, "", "identity"])
def test_without_a_coding_the_body_is_not_copied(coding: str | None) -> None:
    assert decoded_body(BODY, content_encoding=coding, max_bytes=1) is BODY


@settings(max_examples=60)
@given(body=st.binary(max_size=300), room=st.integers(-1, 1))
def test_exactly_the_limit_still_fits(body: bytes, room: int) -> None:
    coded, limit = gzip.compress(body, mtime=0), max(0, len(body) + room)
    if limit >= len(body):
        assert decoded_body(coded, content_encoding="gzip", max_bytes=limit) == body
    else:
        with pytest.raises(BodyTooLargeError):
            decoded_body(coded, content_encoding="gzip", max_bytes=limit)


def test_a_bomb_is_a_413_and_is_never_unpacked() -> None:
    bomb = gzip.compress(b" " * (16 << 20))
    tracemalloc.start()
    with pytest.raises(BodyTooLargeError) as caught:
        parse_request(path=COMPLETIONS, body=bomb, content_encoding="gzip", max_decoded_bytes=LIMIT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (caught.value.http_status, caught.value.reason) == (413, "body-too-large")
    assert peak < 4 * LIMIT


def test_many_small_members_count_together() -> None:
    with pytest.raises(BodyTooLargeError):
        decoded_body(gzip.compress(b"x" * 100, mtime=0) * 11, content_encoding="gzip", max_bytes=1000)


@pytest.mark.parametrize(
    "coded", [b"", b"plain", gzip.compress(BODY, mtime=0)[:-9], gzip.compress(BODY, mtime=0) + b"rest"]
)
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_damaged_data_is_a_400_where_a_body_is_needed_and_ignored_elsewhere(coding: str, coded: bytes) -> None:
    with pytest.raises(MalformedRequestError):
        parse_request(path=COMPLETIONS, body=coded, content_encoding=coding)
    other = parse_request(path="/other", body=coded, content_encoding=coding)
    assert other == InferenceRequest(api=ApiKind.OTHER, path="/other")


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, br", "gzip, gzip, gzip", "nonsense"])
def test_what_the_picker_does_not_decode_is_routed_on_load(coding: str) -> None:
    with pytest.raises(UnknownContentEncodingError):
        decoded_body(b"x", content_encoding=coding, max_bytes=LIMIT)
    request = parse_request(path=COMPLETIONS, body=b"x", content_encoding=coding)
    assert request == InferenceRequest(
        api=ApiKind.COMPLETIONS,
        path=COMPLETIONS,
        unsupported_reason=f"the picker does not read the content-encoding {coding!r}",
    )


def test_a_coded_body_of_an_unknown_path_still_tells_its_model() -> None:
    request = parse_request(path="/other", body=gzip.compress(b'{"model": "m"}', mtime=0), content_encoding="gzip")
    assert request.model == "m"


@pytest.mark.parametrize("name", [None, "application/json", "APPLICATION/JSON", "application/json; charset=utf-8"])
def test_a_body_of_json_or_of_no_named_type_is_read(name: str | None) -> None:
    assert parse_request(path=COMPLETIONS, body=BODY, content_type=name) == READ


@pytest.mark.parametrize(
    "name",
    ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/json ;x"],
)
@pytest.mark.parametrize(("body", "model"), [(BODY, "m"), (b"a=b", None), (b"\xff\x00", None)])
def test_a_body_of_a_type_that_vllm_refuses_goes_to_any_pod_of_its_model(
    name: str, body: bytes, model: str | None
) -> None:
    assert parse_request(path=COMPLETIONS, body=body, content_type=name) == InferenceRequest(
        api=ApiKind.COMPLETIONS,
        path=COMPLETIONS,
        model=model,
        unsupported_reason="the content-type is not application/json, all that vLLM takes",
    )


def test_a_body_of_very_many_pieces_is_not_unpacked_because_each_would_cost_a_copy_of_the_rest() -> None:
    pieces = gzip.compress(b"", mtime=0) * 65
    assert decoded_body(pieces[: len(pieces) // 65 * 64], content_encoding="gzip", max_bytes=LIMIT) == b""
    with pytest.raises(UnknownContentEncodingError, match="more than 64 pieces"):
        decoded_body(pieces, content_encoding="gzip", max_bytes=LIMIT)


@pytest.mark.parametrize("coding", ["br", "utf-8", "gzip", "deflate, gzip", "gzip, gzip, gzip"])
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b" \r\n" * 50])
def test_a_json_object_under_a_header_that_is_not_true_of_it_is_read_as_what_it_is(coding: str, before: bytes) -> None:
    body = before + BODY
    assert decoded_body(body, content_encoding=coding, max_bytes=LIMIT) is body
    for needed in (False, True):
        assert parse_request(path=COMPLETIONS, body=body, content_encoding=coding, require_readable=needed) == replace(
            READ, body_bytes=len(body)
        )
    assert parse_request(path="/other", body=body, content_encoding=coding).model == "m"


@pytest.mark.parametrize(
    ("coding", "body"), [("br", b"\x1b\x00"), ("gzip, gzip, gzip", b"x"), ("gzip", gzip.compress(b"", mtime=0) * 65)]
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/score", "/invocations", "/cohere/v2/chat"])
def test_a_coding_that_cannot_be_read_is_a_415_where_the_policy_needs_bodies(
    coding: str, body: bytes, path: str
) -> None:
    def parse(method: str, content_type: str, *, needed: bool) -> InferenceRequest:
        return parse_request(
            method=method,
            path=path,
            body=body,
            content_type=content_type,
            content_encoding=coding,
            require_readable=needed,
        )

    with pytest.raises(UnsupportedEncodingError) as caught:
        parse("POST", "application/json", needed=True)
    assert (caught.value.status, caught.value.reason) == (415, "unsupported-encoding")
    for method, content_type, needed in (
        ("POST", "application/json", False),
        ("POST", "text/plain", True),  # an upload to another application
        ("PUT", "application/json", True),
    ):
        assert parse(method, content_type, needed=needed).prompts == ()


@pytest.mark.parametrize("path", [COMPLETIONS, "/score", "/invocations", "/cohere/v2/chat"])
def test_a_body_too_complex_to_be_read_is_a_413_where_the_policy_needs_bodies(path: str) -> None:
    body = b'{"model":"m","prompt":"a","x":[' + b"[]," * 150_000 + b"0]}"
    assert parse_request(path=path, body=body, content_type="application/json").model is None
    with pytest.raises(BodyTooLargeError, match="too many parts"):
        parse_request(path=path, body=body, content_type="application/json", require_readable=True)
