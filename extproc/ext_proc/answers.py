"""Translates Envoy's messages into the exchange's facts, and the exchange's steps into answers for Envoy; no I/O.

`ext_proc.messages` reads the messages. Answers leave as bytes; the empty ones are encoded once, at import.
Field semantics: https://www.envoyproxy.io/docs/envoy/latest/api-v3/service/ext_proc/v3/external_processor.proto
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import msgspec
from envoy.config.core.v3.base_pb2 import Metadata
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ProcessingResponse,
    TrailersResponse,
)
from google.protobuf.struct_pb2 import Struct

from extproc.answers.promise import SLO_HEADERS
from extproc.answers.response_plan import ResponsePlan
from extproc.ext_proc.exchange import (
    Answer,
    AskForResponse,
    BodyChunk,
    BodyWithPick,
    ChangedResponse,
    HeadersWithPick,
    RequestFacts,
    SetResponseHeaders,
    Step,
)
from extproc.ext_proc.messages import (
    NOTE_KEY,
    NOTE_NAMESPACE,
    HeadersMessage,
    body_chunk,
    decode_note,
    noted,
    set_response_headers,
    visible,
)
from extproc.ext_proc.refusals import REQUEST_ID_HEADER, set_header
from extproc.pods.pod_ranks import MARK

DESTINATION_HEADER = "x-gateway-destination-endpoint"
OBJECTIVE_HEADER = "x-gateway-inference-objective"
UPSTREAM_ADDRESS = "upstream.address"  # an Envoy attribute: host:port, IPv6 bracketed
CODE_DETAILS = "response.code_details"  # an Envoy attribute: the response's origin and reason
CLUSTER_NAME = "xds.cluster_name"  # an Envoy attribute: the cluster of the request's route
VIA_UPSTREAM = "via_upstream"  # CODE_DETAILS of a pod's response
SUBSET_NAMESPACE, SUBSET_KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
LOAD_BALANCING_NAMESPACE = "envoy.lb"
SERVED_KEY = "x-gateway-destination-endpoint-served"  # in the endpoint picker protocol: the pod that answered
_SERVED = SERVED_KEY.encode()

PROCESSOR_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

_OWN_HEADERS = frozenset({":method", ":path", REQUEST_ID_HEADER, "traceparent", OBJECTIVE_HEADER})
# further request headers that the picker reads: the body's type and coding, session names, latency targets
FURTHER_HEADERS = frozenset(
    {
        *("content-type", "content-encoding", "upgrade"),
        # engines choose ranks and priorities by these, llm-d's sidecars and SGLang choose pods: they are removed
        "x-data-parallel-rank",
        *("x-prefiller-host-port", "x-encoder-hosts-ports", "x-kv-cache-source-host-port"),
        *("x-override-bootstrap-host", "x-override-bootstrap-port", "x-override-bootstrap-room"),
        *("x-override-disagg-prefill-dp-rank", "x-override-routed-dp-rank", "x-override-priority", "x-vllm-priority"),
        *("x-session-id", "session-id", "x-session-affinity", "x-claude-code-session-id"),
        *SLO_HEADERS,
    }
)

_EMPTY_ANSWERS: Mapping[Answer, bytes] = {
    Answer.REQUEST_HEADERS: ProcessingResponse(request_headers=HeadersResponse()).SerializeToString(),
    Answer.REQUEST_BODY: ProcessingResponse(request_body=BodyResponse()).SerializeToString(),
    Answer.REQUEST_TRAILERS: ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString(),
    Answer.RESPONSE_HEADERS: ProcessingResponse(response_headers=HeadersResponse()).SerializeToString(),
    Answer.RESPONSE_BODY: ProcessingResponse(response_body=BodyResponse()).SerializeToString(),
    Answer.RESPONSE_TRAILERS: ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString(),
}


def wanted_headers(further: frozenset[str] = FURTHER_HEADERS) -> frozenset[str]:
    """Return the request headers that `request_facts` reads, including these further ones."""
    return _OWN_HEADERS | further


def request_facts(
    message: HeadersMessage, *, claims: frozenset[str] = frozenset(), pool: str = "", called_as: str = ""
) -> RequestFacts:
    """Extract the headers that the picker needs, the route's candidates, and these claims of a verified JWT.

    `pool` comes from the call's metadata, `called_as` is its `:authority`. The path is unquoted, as in vLLM's server;
    the query stays unchanged.
    """
    found = dict(message.headers)
    metadata = _metadata(message) if message.metadata else None
    return RequestFacts(
        method=found.pop(":method", ""),
        path=_path(found.pop(":path", "")),
        objective=found.pop(OBJECTIVE_HEADER, None),
        request_id=found.pop(REQUEST_ID_HEADER, ""),
        traceparent=found.pop("traceparent", None),
        headers=found,
        subset=_subset(metadata) if metadata is not None else None,
        claims=verified_claims(metadata, claims) if metadata is not None and claims else NO_CLAIMS,
        pool=pool,
        called_as=called_as,
        cluster=message.attributes.get(CLUSTER_NAME, ""),
    )


def _metadata(message: HeadersMessage) -> Any:
    return Metadata.FromString(message.metadata).filter_metadata


def _path(target: str) -> str:
    if "%" not in target:
        return target
    path, mark, query = target.partition("?")
    # a quoted "?" stays quoted: unquoted, the rest of the path would pass for a query
    return "%3F".join(unquote(part) for part in re.split("%3[Ff]", path)) + mark + query


def _subset(metadata: Any) -> frozenset[str] | None:
    """Return the addresses that the route allows, given as a list or as one text with commas; None if not given."""
    if SUBSET_NAMESPACE not in metadata or SUBSET_KEY not in metadata[SUBSET_NAMESPACE].fields:
        return None
    value = metadata[SUBSET_NAMESPACE].fields[SUBSET_KEY]
    if value.WhichOneof("kind") == "list_value":
        texts = [item.string_value for item in value.list_value.values]
    else:
        texts = value.string_value.split(",")
    return frozenset(text.strip() for text in texts if text.strip())


class ResponseHead(msgspec.Struct, frozen=True, kw_only=True):
    """The facts in the response headers."""

    status: int  # 0 if absent
    content_type: str
    content_encoding: str
    content_length: int | None


def response_head(message: HeadersMessage) -> ResponseHead:
    """Extract the few response headers that the reader of the body needs."""
    found = message.headers
    length = found.get("content-length", "")
    return ResponseHead(
        status=response_status(message),
        content_type=found.get("content-type", ""),
        content_encoding=found.get("content-encoding", ""),
        content_length=int(length) if length.isdecimal() else None,
    )


def response_status(message: HeadersMessage) -> int:
    """Return the pod's HTTP status, or 0 if absent."""
    text = message.headers.get(":status", "")
    return int(text) if text.isdecimal() else 0


def response_plan(message: HeadersMessage) -> ResponsePlan | None:
    """Return the plan that a pick left for the response filter, or None."""
    metadata = _metadata(message)
    if NOTE_NAMESPACE not in metadata or NOTE_KEY not in metadata[NOTE_NAMESPACE].fields:
        return None
    return decode_note(metadata[NOTE_NAMESPACE].fields[NOTE_KEY].string_value)


def response_origin(message: HeadersMessage) -> tuple[str | None, bool]:
    """Return the address of the pod that answered, after retries, and whether a pod answered rather than Envoy.

    Without the attribute, the address comes from the endpoint picker protocol's metadata. Without either it is None.
    Without code details a pod is assumed.
    """
    attributes = message.attributes
    served_by = attributes.get(UPSTREAM_ADDRESS) or _served_by(message)
    return served_by, attributes.get(CODE_DETAILS, VIA_UPSTREAM) == VIA_UPSTREAM


def _served_by(message: HeadersMessage) -> str | None:
    if _SERVED not in message.metadata:  # ten times cheaper than decoding
        return None
    namespaces = _metadata(message)
    if LOAD_BALANCING_NAMESPACE not in namespaces or SERVED_KEY not in namespaces[LOAD_BALANCING_NAMESPACE].fields:
        return None
    return namespaces[LOAD_BALANCING_NAMESPACE].fields[SERVED_KEY].string_value or None


def encode_step(step: Step) -> bytes:
    """Encode one answer for Envoy."""
    if isinstance(step, Answer):
        return _EMPTY_ANSWERS[step]
    if isinstance(step, BodyChunk):
        return b"".join(body_chunk(step))
    if isinstance(step, HeadersWithPick):
        encoded = _pick(tuple(step.endpoints), with_body=False)
        is_more = step.removed_headers or step.set_headers or step.note is not None
        encoded = encoded + _further_headers(step) if is_more else encoded
        return encoded + _WITHOUT_BODY if step.without_body else encoded
    if isinstance(step, BodyWithPick):
        encoded = _pick(tuple(step.endpoints), with_body=True)
        is_more = step.removed_headers or step.set_headers or step.body is not None
        return encoded + _changed_body(step) if is_more else encoded
    return _encode_response_step(step)


def _encode_response_step(step: Step) -> bytes:
    if isinstance(step, SetResponseHeaders):
        return set_response_headers(step.headers)
    if isinstance(step, AskForResponse):
        encoded = _ASK_TO_CHANGE if step.changes else _ASK_TO_READ
        return encoded + set_response_headers(step.headers) if step.headers else encoded
    if isinstance(step, ChangedResponse):
        mutation = BodyMutation(body=step.body) if step.body else BodyMutation(clear_body=True)
        changed = ProcessingResponse(response_body=BodyResponse(response=CommonResponse(body_mutation=mutation)))
        whole: bytes = changed.SerializeToString()
        return whole
    raise TypeError(f"{type(step).__name__} is not an answer")


@lru_cache(maxsize=4096)  # the same few orders of pods recur
def _pick(endpoints: tuple[str, ...], *, with_body: bool) -> bytes:
    value = ",".join([endpoint.partition(MARK)[0] for endpoint in endpoints])  # without ranks
    # set, not added: replaces a client's header of this name
    change = CommonResponse(header_mutation=HeaderMutation(set_headers=[set_header(DESTINATION_HEADER, value)]))
    metadata = Struct()
    # a string, not a list: override_host ignores anything else; it must equal the header
    metadata.fields[LOAD_BALANCING_NAMESPACE].struct_value.fields[DESTINATION_HEADER].string_value = value
    answer = (
        {"request_body": BodyResponse(response=change)}
        if with_body
        else {"request_headers": HeadersResponse(response=change)}
    )
    encoded: bytes = ProcessingResponse(dynamic_metadata=metadata, **answer).SerializeToString()
    return encoded


# Protobuf merges an appended encoding into the message: lists grow, fields are set.


def _further_headers(step: HeadersWithPick) -> bytes:
    encoded = b"" if step.note is None else noted(step.note)
    if step.removed_headers or step.set_headers:
        change = CommonResponse(header_mutation=_mutation(step))
        encoded += ProcessingResponse(request_headers=HeadersResponse(response=change)).SerializeToString()
    return encoded


def _mutation(step: HeadersWithPick | BodyWithPick) -> HeaderMutation:
    return HeaderMutation(
        remove_headers=step.removed_headers,
        set_headers=[set_header(name, visible(value)) for name, value in step.set_headers.items()],
    )


def _changed_body(step: BodyWithPick) -> bytes:
    change = CommonResponse(header_mutation=_mutation(step))
    if step.body is not None:
        change.body_mutation.body = step.body
        # Envoy answers 500 if it does not match the body
        change.header_mutation.set_headers.append(set_header("content-length", str(len(step.body))))
    encoded: bytes = ProcessingResponse(request_body=BodyResponse(response=change)).SerializeToString()
    return encoded


def _ask(*, changes: bool) -> bytes:
    response = ProcessingResponse(
        response_headers=HeadersResponse(),
        # trailers as in the filter's configuration: their message keeps the stream open to the end of the exchange
        mode_override=ProcessingMode(
            response_header_mode=ProcessingMode.SEND,
            response_body_mode=ProcessingMode.STREAMED,
            response_trailer_mode=ProcessingMode.SEND,
        ),
    )
    if changes:
        # with the old length Envoy would cut the body, or refuse the change
        response.response_headers.response.header_mutation.remove_headers.append("content-length")
    encoded: bytes = response.SerializeToString()
    return encoded


_WITHOUT_BODY: bytes = ProcessingResponse(
    mode_override=ProcessingMode(
        request_body_mode=ProcessingMode.NONE,
        request_trailer_mode=ProcessingMode.SKIP,
        response_header_mode=ProcessingMode.SEND,
        response_trailer_mode=ProcessingMode.SEND,
    )
).SerializeToString()
_ASK_TO_READ, _ASK_TO_CHANGE = _ask(changes=False), _ask(changes=True)


JWT_NAMESPACE = "envoy.filters.http.jwt_authn"
CLAIM_SEPARATOR = "\n"  # between the entries of a list claim or of `scope`; a text containing it is ignored
SPACED_LISTS = frozenset({"scope", "scp"})  # lists as one text with spaces (RFC 8693, 4.2)
MOST_CHARACTERS = 4096
EXACT_INTEGERS = 2.0**53  # JSON's numbers are doubles here
NO_CLAIMS: Mapping[str, str] = {}


def verified_claims(filter_metadata: Any, names: frozenset[str]) -> Mapping[str, str]:
    """Return these claims, as far as present; "a.b" is b within a, unless a claim has that very name."""
    if not names or JWT_NAMESPACE not in filter_metadata:
        return NO_CLAIMS
    payloads = filter_metadata[JWT_NAMESPACE].fields
    found: dict[str, str] = {}
    for key in sorted(payloads):  # with several tokens, always prefer the same one
        payload = payloads[key]
        if payload.WhichOneof("kind") != "struct_value":
            continue
        for name in names:
            if name not in found and (text := _claim(payload.struct_value, name)):
                found[name] = text
    return found


def _claim(payload: Any, name: str) -> str:
    """Return the claim's text, or "" if absent."""
    if name in payload.fields:
        return _text(payload.fields[name], spaced=name in SPACED_LISTS)
    head, dot, rest = name.partition(".")
    while dot:
        # the dots may belong to a name, as in https://example.com/tier
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
        return "" if CLAIM_SEPARATOR in text else text  # otherwise one text could pass for a list
    if kind == "bool_value":
        return "true" if value.bool_value else "false"
    if kind == "number_value":
        number = value.number_value
        return f"{number:.0f}" if number.is_integer() and abs(number) < EXACT_INTEGERS else repr(number)
    return ""
