"""Decode a request body into typed fields, taking what vLLM's own parser takes.

Called by `openai.parse_request`. msgspec reads nearly all bodies; what it refuses and Python's parser accepts (NaN,
Infinity, halves of surrogate pairs, a byte order mark, UTF-16, numbers beyond a float) is read by that one, if small.
"""

import json
from typing import TypeVar

import msgspec

from extproc.errors import MalformedRequestError

_T = TypeVar("_T")

BODY_BYTES_WITHOUT_LIMIT = 256 << 10
MAX_CONTAINERS = 100_000  # objects and lists: about 0.1 s
MAX_ELEMENTS = 1_500_000  # a million token ids and their like: about 0.1 s
MAX_LENIENT_BYTES = 1 << 20  # Python's parser takes some ten times as long: about 10 ms
OUT_OF_RANGE = "Number out of range"


class MalformedFieldError(MalformedRequestError):
    """The body is JSON, but a field that the picker must read has the wrong type."""

    reason = "malformed-request"


class BodyNotReadError(Exception):
    """Reading the body would hold up other requests; the text says why."""


def decode_body(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Return the decoder's value of a body; of equal keys the last counts, as in vLLM.

    Raise MalformedRequestError for what vLLM would not parse either, BodyNotReadError for what would take too long.
    """
    if len(body) > BODY_BYTES_WITHOUT_LIMIT and has_too_many_parts(body):
        raise BodyNotReadError("the body has too many parts to be read")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if str(error).startswith(OUT_OF_RANGE):
            return _decode_leniently(decoder, body)
        raise _field_error(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_leniently(decoder, body)
    except RecursionError:
        raise MalformedRequestError("The request body is nested too deeply.") from None


def _decode_leniently(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    if len(body) > MAX_LENIENT_BYTES:
        raise BodyNotReadError("the body is large and has NaN, lone surrogates or the like, or is not JSON at all")
    try:
        value = json.loads(bytes(body))
    except ValueError as error:  # UnicodeDecodeError is one too
        raise MalformedRequestError(f"The request body is not a valid JSON object: {error}") from error
    except RecursionError:
        raise MalformedRequestError("The request body is nested too deeply.") from None
    try:
        return msgspec.convert(value, decoder.type)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter for half of a surrogate pair
        raise _field_error(error) from error


def _field_error(error: Exception) -> MalformedFieldError:
    return MalformedFieldError(f"The request body has a field of the wrong type: {error}")


def has_too_many_parts(body: bytes) -> bool:
    """Tell whether decoding could hold up other requests: the decoder makes an object a part and keeps the GIL.

    Counts what separates parts, also inside texts, so a very large text full of brackets is routed on load.
    """
    if len(body) <= BODY_BYTES_WITHOUT_LIMIT:
        return False
    return body.count(b"{") + body.count(b"[") > MAX_CONTAINERS or body.count(b",") > MAX_ELEMENTS
