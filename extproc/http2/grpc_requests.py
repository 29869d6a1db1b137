"""What a request's HTTP/2 headers ask of a gRPC server: which method, by when, or which refusal they get. Pure.

`http2.session` hands it to `http2.headers` to interpret each request's fields.
"""

from dataclasses import dataclass

from extproc.http2.frames import literal
from extproc.http2.grpc_messages import RESPONSE_HEADERS, GrpcStatus, trailers
from extproc.http2.headers import Fields

_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT_DIGITS = 8
POOL_METADATA = b"x-kvmesh-pool"  # set by the EnvoyFilter's grpc_initial_metadata
_GRPC = b"application/grpc"
# answers of a server that gRPC's clients and others understand, complete: header blocks that end the stream
_NOT_POST = literal(b":status", b"405")
_NOT_GRPC = literal(b":status", b"415")
_BAD_TIMEOUT = RESPONSE_HEADERS + trailers(GrpcStatus.INTERNAL, "grpc-timeout cannot be read")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcRequest:
    """One request's head."""

    path: bytes  # /service/method
    timeout_seconds: float | None
    refusal: bytes | None = None  # a header block that ends the stream, where the request is not gRPC
    pool: str = ""  # which pool the call is for (POOL_METADATA); "": not said


def grpc_request(fields: Fields) -> GrpcRequest:
    """Interpret the fields of a well-formed request."""
    found = dict(fields)
    path = found[b":path"]
    refusal = None
    timeout_seconds = None
    if found[b":method"] != b"POST":
        refusal = _NOT_POST
    elif not _is_grpc(found.get(b"content-type", b"")):
        refusal = _NOT_GRPC
    elif (timeout := found.get(b"grpc-timeout")) is not None:
        timeout_seconds = parse_timeout(timeout)
        refusal = _BAD_TIMEOUT if timeout_seconds is None else None
    pool = found.get(POOL_METADATA, b"").decode("ascii", "replace").strip()
    return GrpcRequest(path=path, timeout_seconds=timeout_seconds, refusal=refusal, pool=pool)


def _is_grpc(content_type: bytes) -> bool:
    """Return whether it is application/grpc, perhaps with a format (+proto) or parameters."""
    return content_type.startswith(_GRPC) and content_type[len(_GRPC) : len(_GRPC) + 1] in (b"", b"+", b";")


def parse_timeout(value: bytes) -> float | None:
    """Return seconds from `grpc-timeout` (at most eight digits and a unit), None if it cannot be read."""
    number, unit = value[:-1], value[-1:]
    if not number.isdigit() or len(number) > _TIMEOUT_DIGITS or unit not in _UNITS:
        return None
    return int(number) * _UNITS[unit]
