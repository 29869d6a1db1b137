"""A response's plan as dynamic metadata, which carries it through Envoy to whichever picker gets the response; no I/O.

Clients cannot set dynamic metadata; Envoy forwards the namespace to the filter for responses alone (envoy/local.yaml).
"""

import msgspec

from extproc.responses.response_plan import ResponsePlan

NOTE_NAMESPACE = "kvmesh"
NOTE_KEY = "response"  # a string

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ResponsePlan).decode


def encode_note(plan: ResponsePlan) -> bytes:
    """Return the plan as one line of text, in UTF-8."""
    return _encode(plan)


def decode_note(text: str) -> ResponsePlan | None:
    """Return the plan, or None where another version of the picker wrote what this one cannot read."""
    try:
        return _decode(text)
    except msgspec.DecodeError:
        return None
