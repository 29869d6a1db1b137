"""The picker's own answers in the form of the request's API, as its client libraries expect them.

OpenAI: https://platform.openai.com/docs/guides/error-codes. Anthropic: https://docs.anthropic.com/en/api/errors.
Cohere (rerank, embed): https://docs.cohere.com/reference/errors. gRPC: https://grpc.io/docs/guides/status-codes.
"""

from collections.abc import Mapping

import msgspec
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    GrpcStatus,
    HeaderMutation,
    ImmediateResponse,
    ProcessingResponse,
)
from envoy.type.v3.http_status_pb2 import HttpStatus

from extproc.errors import LocalAnswer, PickError
from extproc.ext_proc.exchange import RequestFacts
from extproc.ext_proc.messages import visible
from extproc.requests.openai import api_of
from extproc.requests.request import ApiKind

REASON_HEADER = "x-kvmesh-reason"
REQUEST_ID_HEADER = "x-request-id"
JSON, TEXT = "application/json", "text/plain; charset=utf-8"
ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
GRPC_CODES: Mapping[int, int] = {
    400: 3,  # INVALID_ARGUMENT
    401: 16,  # UNAUTHENTICATED
    403: 7,  # PERMISSION_DENIED
    404: 5,  # NOT_FOUND
    410: 5,
    413: 8,  # RESOURCE_EXHAUSTED
    415: 3,
    429: 8,
    503: 14,  # UNAVAILABLE
    504: 4,  # DEADLINE_EXCEEDED
}
GRPC_INTERNAL = 13


def encode_refusal(error: PickError, facts: RequestFacts | None = None) -> bytes:
    """Encode an immediate response with the error's status and reason; `facts` are None before the headers."""
    headers = dict(error.headers) if isinstance(error, LocalAnswer) else {**error.headers, REASON_HEADER: error.reason}
    if facts is not None and facts.request_id:
        headers[REQUEST_ID_HEADER] = facts.request_id
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(error.retry_after_seconds)
    grpc = None
    if facts is not None and facts.headers.get("content-type", "").startswith("application/grpc"):
        grpc = GrpcStatus(status=GRPC_CODES.get(error.status, GRPC_INTERNAL))
        headers.pop("content-type", None)
        body = error.message.encode()  # Envoy makes it the status's message
    else:
        headers["content-type"], body = _body(error, facts)
    encoded: bytes = ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=error.status),
            headers=HeaderMutation(set_headers=[set_header(name, visible(value)) for name, value in headers.items()]),
            body=body,
            grpc_status=grpc,
            details=f"kvmesh_{error.reason.replace('-', '_')}",
        )
    ).SerializeToString()
    return encoded


def set_header(name: str, value: str) -> HeaderValueOption:
    """Return the option that sets a header, in place of any other."""
    # `raw_value`: Envoy ignores `value` here and would set an empty header
    return HeaderValueOption(
        header=HeaderValue(key=name, raw_value=value.encode()),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _body(error: PickError, facts: RequestFacts | None) -> tuple[str, bytes]:
    if isinstance(error, LocalAnswer):
        return JSON, error.document
    path = facts.path.partition("?")[0].rstrip("/") if facts is not None else "/v1/"
    if "/v1/messages" in path:
        return JSON, _anthropic(error, facts)
    if path.endswith(("/rerank", "/v2/embed")):
        return JSON, msgspec.json.encode({"message": error.message})
    if "/v1/" in f"{path}/" or api_of(path) is not ApiKind.OTHER:
        content = {"message": error.message, "type": error.error_type, "param": None, "code": error.error_code}
        return JSON, msgspec.json.encode({"error": content})
    return TEXT, f"{error.message}\n".encode()


def _anthropic(error: PickError, facts: RequestFacts | None) -> bytes:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    content = {"type": "error", "error": {"type": kind, "message": error.message}}
    return msgspec.json.encode(content | ({"request_id": facts.request_id} if facts and facts.request_id else {}))
