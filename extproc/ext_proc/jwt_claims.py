"""Claims of the JWT that Envoy's jwt_authn filter has verified, from the metadata that it leaves -> texts.

Called by `ext_proc`. The filter stores a payload under whatever key `payload_in_metadata` names (Istio: `payload`, or
the issuer), so every key is looked into. What is no claim of the usual forms is absent, never an error.
https://www.envoyproxy.io/docs/envoy/latest/api-v3/extensions/filters/http/jwt_authn/v3/config.proto
"""

from collections.abc import Mapping
from typing import Any

JWT_NAMESPACE = "envoy.filters.http.jwt_authn"
CLAIM_SEPARATOR = "\n"  # of a list claim, and of `scope`, a list in one text (RFC 8693, 4.2); no claim's text has it
SPACED_LISTS = frozenset({"scope", "scp"})  # a list in one text (RFC 8693, 4.2)
MOST_CHARACTERS = 4096
EXACT_INTEGERS = 2.0**53  # JSON's numbers are doubles here
NO_CLAIMS: Mapping[str, str] = {}


def verified_claims(filter_metadata: Any, names: frozenset[str]) -> Mapping[str, str]:
    """Return those of these claims that are there; "a.b" is b within a, unless a claim is called so."""
    if not names or JWT_NAMESPACE not in filter_metadata:
        return NO_CLAIMS
    payloads = filter_metadata[JWT_NAMESPACE].fields
    found: dict[str, str] = {}
    for key in sorted(payloads):  # several tokens: the same one counts each time
        payload = payloads[key]
        if payload.WhichOneof("kind") != "struct_value":
            continue
        for name in names:
            if name not in found and (text := _claim(payload.struct_value, name)):
                found[name] = text
    return found


def _claim(payload: Any, name: str) -> str:
    """Return the claim's text, "" if it is absent."""
    if name in payload.fields:
        return _text(payload.fields[name], spaced=name in SPACED_LISTS)
    head, dot, rest = name.partition(".")
    while dot:
        # a name like https://example.com/tier has dots of its own
        if head in payload.fields and payload.fields[head].WhichOneof("kind") == "struct_value":
            return _claim(payload.fields[head].struct_value, rest)
        further, dot, rest = rest.partition(".")
        head = f"{head}.{further}"
    return ""


def _text(value: Any, *, spaced: bool) -> str:
    kind = value.WhichOneof("kind")
    if kind == "list_value":
        texts = [_single(item) for item in value.list_value.values]
        text = CLAIM_SEPARATOR.join(text for text in texts if text)
    else:
        text = _single(value)
        if spaced:
            text = CLAIM_SEPARATOR.join(text.split(" "))
    return text if len(text) <= MOST_CHARACTERS else ""


def _single(value: Any) -> str:
    kind = value.WhichOneof("kind")
    if kind == "string_value":
        text = str(value.string_value)
        return "" if CLAIM_SEPARATOR in text else text  # or one text could pass for a list
    if kind == "bool_value":
        return "true" if value.bool_value else "false"
    if kind == "number_value":
        number = value.number_value
        return f"{number:.0f}" if number.is_integer() and abs(number) < EXACT_INTEGERS else repr(number)
    return ""
