"""Forms: the fields of an upload, read and changed within its bytes; what parsers may read differently is not read."""

import time

import pytest

from extproc.requests.form_body import MAX_PARTS, FormNotReadError, form_fields, is_form, is_upload, with_model
from extproc.requests.openai import parse_request

TYPE = "multipart/form-data; boundary=cut"
NAMES = frozenset(("model", "stream"))
FILE = b'form-data; name="file"; filename="a.wav"'


def field(disposition: bytes, value: bytes, *headers: bytes) -> bytes:
    lines = (b"Content-Disposition: " + disposition, *headers)
    return b"--cut\r\n" + b"\r\n".join(lines) + b"\r\n\r\n" + value + b"\r\n"


def model(value: bytes, disposition: bytes = b'form-data; name="model"') -> bytes:
    return field(disposition, value)


AUDIO = field(FILE, b"RIFF\r\n--cu\0\r\n\r\n--\xff", b"Content-Type: audio/wav")
END = b"--cut--\r\n"
READ = {
    "before the file": model(b"tiny") + AUDIO + END,
    "after the file": AUDIO + model(b"tiny") + END,
    "the last of two": model(b"other") + AUDIO + model(b"tiny") + END,
    "an epilogue": model(b"tiny") + END + b"--cut\r\n" + model(b"other"),
    "line ends first": b"\r\n\r\n" + model(b"tiny") + END,
    "no line end at the end": model(b"tiny") + b"--cut--",
    "a plain name": model(b"tiny", b"form-data; name=model") + END,
    "other letters": field(b'Form-Data;NAME="model"', b"tiny").replace(b"Content-Disp", b"content-DISP") + END,
    "a type of the field": field(b'form-data; name="model"', b"tiny", b"Content-Type: text/plain") + END,
    "a file named model": model(b"tiny") + field(b'form-data; name="file"; filename="model"', b"other") + END,
    "a quote in a file's name": field(b'form-data; name="file"; filename="\\"; name=\\"model"', b"x")
    + model(b"tiny")
    + END,
    "a file's name in two codings": field(FILE + b"; filename*=utf-8''%61.wav", b"x") + model(b"tiny") + END,
    "a file with a form": field(FILE, b'--cut \r\nContent-Disposition: form-data; name="model"\r\n\r\nother')
    + model(b"tiny")
    + END,
}
NOT_READ = {
    "empty": b"",
    "JSON": b'{"model": "tiny"}',
    "another boundary": b"--other\r\n" + model(b"tiny") + END,
    "a preamble": b"for old readers\r\n" + model(b"tiny") + END,
    "no end": model(b"tiny") + AUDIO,
    "an end within a part": b'--cut\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny',
    "a padded boundary": AUDIO + model(b"tiny").replace(b"--cut", b"--cut ") + END,
    "a longer boundary": AUDIO + model(b"tiny").replace(b"--cut", b"--cuts") + END,
    "a model that is a file": model(b"tiny", b'form-data; name="model"; filename="a"') + END,
    "perhaps a file": model(b"tiny", b"form-data; name=\"model\"; filename*=utf-8''a") + END,
    "a coded name": AUDIO + model(b"tiny", b"form-data; name*=utf-8''model") + END,
    "two names": model(b"tiny", b'form-data; name="file"; name="model"') + END,
    "a name in brackets": model(b"tiny", b"form-data; name=<model>") + END,
    "an escaped name": model(b"tiny", b'form-data; name="mo\\del"') + END,
    "an escape before the end": model(b"tiny", b'form-data; filename="a\\\\"; name="model"') + END,
    "two dispositions": field(FILE, b"tiny", b'Content-Disposition: form-data; name="model"') + END,
    "no disposition": b"--cut\r\nContent-Type: text/plain\r\n\r\ntiny\r\n" + END,
    "no name": model(b"tiny", b"form-data") + END,
    "a folded header": field(b'form-data;\r\n name="model"', b"tiny") + END,
    "lines without returns": (model(b"tiny") + END).replace(b"\r\n", b"\n"),
    "a long header": field(b'form-data; name="' + b"x" * 4096 + b'"', b"a") + model(b"tiny") + END,
    "many headers": field(b'form-data; name="a"', b"a", *[b"A: b"] * 8) + model(b"tiny") + END,
    "many parts": field(b'form-data; name="a"', b"a") * (MAX_PARTS + 1) + END,
    "a long model": model(b"x" * ((1 << 20) + 1)) + END,
}


@pytest.mark.parametrize("body", READ.values(), ids=READ)
def test_the_model_of_a_form_is_read(body: bytes) -> None:
    assert form_fields(body, TYPE, NAMES) == {"model": "tiny"}


@pytest.mark.parametrize("body", NOT_READ.values(), ids=NOT_READ)
def test_a_form_that_parsers_may_read_differently_is_not_read(body: bytes) -> None:
    with pytest.raises(FormNotReadError):
        form_fields(body, TYPE, NAMES)


def test_a_form_without_a_model_has_none() -> None:
    assert form_fields(AUDIO + END, TYPE, NAMES) == {}
    assert form_fields(b"--cut--", TYPE, NAMES) == {}
    assert form_fields(AUDIO + model(b"") + END, TYPE, NAMES) == {"model": ""}


@pytest.mark.parametrize(
    "content_type",
    [
        'multipart/form-data; boundary="cut"',
        "Multipart/Form-Data;Boundary=cut",
        "multipart/form-data; charset=UTF-8; boundary=cut;",
    ],
)
def test_the_boundary_may_be_written_in_several_ways(content_type: str) -> None:
    assert is_form(content_type)
    assert form_fields(READ["after the file"], content_type, NAMES) == {"model": "tiny"}


@pytest.mark.parametrize(
    "content_type",
    [
        *("multipart/form-data", "multipart/form-data; boundary=", 'multipart/form-data; boundary="cut'),
        *("multipart/form-data; boundary=other; boundary=cut", "multipart/form-data; boundary*=utf-8''cut"),
        *("multipart/form-data; charset=utf-16; boundary=cut", "multipart/form-data; charset=utf-7; boundary=cut"),
        f"multipart/form-data; boundary={'x' * 257}",
    ],
)
def test_without_a_plain_boundary_nothing_is_read(content_type: str) -> None:
    with pytest.raises(FormNotReadError):
        form_fields(READ["after the file"], content_type, NAMES)


def test_the_end_of_a_long_file_is_found_wherever_it_is() -> None:
    for size in ((1 << 20) + shift for shift in range(-60, 10)):
        assert form_fields(field(FILE, b"\r" * size) + model(b"tiny") + END, TYPE, NAMES) == {"model": "tiny"}


@pytest.mark.parametrize("piece", [b"\r\n--" + b"x" * 199, b"\r", b"\r\n--", b"x", b"\n"])
def test_a_hostile_file_costs_little(piece: bytes) -> None:
    content_type, size = f"multipart/form-data; boundary={'x' * 200}", 4 << 20
    body = (field(FILE, piece * (size // len(piece)) + b"z") + model(b"tiny") + END).replace(
        b"--cut", b"--" + b"x" * 200
    )
    began = time.thread_time()
    assert form_fields(body, content_type, NAMES) == {"model": "tiny"}
    assert time.thread_time() - began < 0.2


def test_hostile_headers_cost_little() -> None:
    part = field(b'form-data; name="a"' + b'; a="\\"b"' * 400, b"", *[b"A: " + b"; b=c" * 800] * 7)
    began = time.thread_time()
    with pytest.raises(FormNotReadError):
        form_fields(part * 100 + END, TYPE, NAMES)
    parts = field(
        b'form-data; name="a"' + b"".join(b'; a%d="x"' % i for i in range(300)), b"", *[b"A: " + b"b" * 4000] * 7
    )
    with pytest.raises(FormNotReadError):
        form_fields(parts * (MAX_PARTS + 1) + END, TYPE, NAMES)
    assert time.thread_time() - began < 0.5


def test_another_model_replaces_only_its_bytes() -> None:
    assert with_model(READ["the last of two"], TYPE, "grün") == READ["the last of two"].replace(
        b"tiny", "grün".encode()
    )


def test_a_request_has_the_models_of_its_form() -> None:
    path, body = "/team/v1/audio/transcriptions", model(b"tiny") + field(b'form-data; name="stream"', b"true") + END
    request = parse_request(path=path, body=body, content_type=TYPE, require_readable=True)
    assert (request.model, request.stream, request.unsupported_reason) == ("tiny", True, None)
    # vLLM ignores the coding
    assert parse_request(path=path, body=body, content_type=TYPE, content_encoding="gzip").model == "tiny"


def test_an_unreadable_form_is_routed_or_refused_if_rules_depend_on_it() -> None:
    body = NOT_READ["a padded boundary"]
    request = parse_request(path="/v1/audio/translations", body=body, content_type=TYPE)
    assert request.model is None
    assert request.unsupported_reason == "A line of the form has more than its boundary."
    with pytest.raises(FormNotReadError):
        parse_request(path="/v1/audio/translations", body=body, content_type=TYPE, require_readable=True)


def test_uploads_are_told_from_prompts() -> None:
    assert is_upload(TYPE)
    assert is_upload("Audio/wav")
    assert not is_upload("application/json; charset=utf-8")
    assert not is_upload("")
