"""Reads and changes text fields of a form (`multipart/form-data`) within its bytes; its files are not copied.

Only forms that all releases of the pods' parser read alike are read: who could make picker and pod see different
models would evade quotas and rules. Of equal fields the last counts, as in vLLM.
"""

import re
from collections.abc import Mapping

from extproc.errors import MalformedRequestError

MODEL = "model"
_UPLOADS = ("multipart/", "audio/", "image/", "video/", "application/octet-stream")
MAX_PARTS = 256  # 3 us each, 30 us with the longest headers; no API has a fifth of it
MAX_FIELD_BYTES = 1 << 20  # of a text field; vLLM refuses longer ones
MAX_BOUNDARY_BYTES = 256  # as in vLLM's parser
_WINDOW_BYTES = 1 << 20  # per search: it stops all other threads for 1 to 2 ms
_HEAD = re.compile(rb"((?:[\w!#$%&'*+\-.^`|~]++:[^\r\n]{0,4096}+\r\n){1,8}+)\r\n")  # vLLM's parser takes no more
_DISPOSITION = re.compile(rb"^content-disposition:([^\r\n]*+)", re.IGNORECASE | re.MULTILINE)
# parsers disagree on the end of a text after two backslashes, and on "<"
_PARAMETER = re.compile(rb'[ \t]*+;[ \t]*+([\w*\-]++)=(?:"((?:[^"\\]|\\[^\\])*+)"|([^\s";\\<]++))')
_WITH_PARAMETERS = re.compile(rb"[\w\-/]++((?:%b)*+)" % _PARAMETER.pattern)


class FormNotReadError(MalformedRequestError):
    """The form is malformed, or parsers may read it differently."""

    reason = "malformed-request"


def is_form(content_type: str) -> bool:
    """Tell whether a body of this type is a form that may have files."""
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


def is_upload(content_type: str) -> bool:
    """Tell whether a body of this type is a file, or a form that may have files."""
    return content_type.lower().startswith(_UPLOADS)


def form_fields(body: bytes, content_type: str, names: frozenset[str]) -> Mapping[str, str]:
    """Return the form's values of these text fields, if present. Raise FormNotReadError."""
    found = _spans(body, _boundary(content_type), names)
    return {name: _text(body[start:stop]) for name, (start, stop) in found.items()}


def with_model(body: bytes, content_type: str, model: str) -> bytes:
    """Return a form that names a model with another one; all other bytes stay. Raise FormNotReadError."""
    start, stop = _spans(body, _boundary(content_type), frozenset((MODEL,)))[MODEL]
    return b"".join((body[:start], model.encode(), body[stop:]))


def _spans(body: bytes, boundary: bytes, names: frozenset[str]) -> Mapping[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    delimiter = b"\r\n" + boundary
    at = body.find(boundary, 0, 2 * MAX_BOUNDARY_BYTES)
    if at < 0 or body[:at].strip(b"\r\n"):
        raise FormNotReadError("The form does not begin with its boundary.")
    at += len(boundary)
    for _ in range(MAX_PARTS + 1):
        if body.startswith(b"--", at):
            return found
        if not body.startswith(b"\r\n", at):
            raise FormNotReadError("A line of the form has more than its boundary.")
        name, is_file, start = _head(body, at + 2)
        stop = _find(body, delimiter, start)
        if name in names:
            if is_file or stop - start > MAX_FIELD_BYTES:
                raise FormNotReadError(f"The form's field {name!r} is a file, or too long.")
            found[name] = start, stop
        at = stop + len(delimiter)
    raise FormNotReadError(f"The form has more than {MAX_PARTS} parts.")


def _head(body: bytes, at: int) -> tuple[str, bool, int]:
    """Return the name of the part at `at`, whether it is a file, and where its content begins."""
    head = _HEAD.match(body, at)
    dispositions = [] if head is None else _DISPOSITION.findall(head[1])
    parameters = _parameters(dispositions[0]) if len(dispositions) == 1 else {}
    name = parameters.get(b"name", b"\\")
    if head is None or b"\\" in name or any(key.startswith(b"name*") for key in parameters):
        raise FormNotReadError("A part of the form has unusual headers, or no plain name.")
    return _text(name), any(key.startswith(b"filename") for key in parameters), head.end()


def _find(body: bytes, delimiter: bytes, at: int) -> int:
    while at < len(body):
        if (found := body.find(delimiter, at, at + _WINDOW_BYTES + len(delimiter))) >= 0:
            return found
        at += _WINDOW_BYTES
    raise FormNotReadError("The form does not end with its boundary.")


def _boundary(content_type: str) -> bytes:
    parameters = _parameters(content_type.encode("latin-1", "replace"))
    boundary = parameters.get(b"boundary") or b"\\"
    is_utf8 = parameters.get(b"charset", b"utf-8").lower() in (b"utf-8", b"utf8")  # else "model" may be other bytes
    if not is_utf8 or b"\\" in boundary or len(boundary) > MAX_BOUNDARY_BYTES or any(b"*" in key for key in parameters):
        raise FormNotReadError("The content-type has no plain boundary, or another charset than UTF-8.")
    return b"--" + boundary


def _parameters(header: bytes) -> Mapping[bytes, bytes]:
    """Return the parameters of a header by name, in lowercase. Raise FormNotReadError if one occurs twice."""
    whole = _WITH_PARAMETERS.fullmatch(header.strip(b" \t").rstrip(b"; \t"))
    each = [] if whole is None else _PARAMETER.findall(whole[1])
    found = {name.lower(): quoted or plain for name, quoted, plain in each}
    if whole is None or len(found) < len(each):
        raise FormNotReadError("A header of the form is malformed.")
    return found


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")  # as vLLM does
