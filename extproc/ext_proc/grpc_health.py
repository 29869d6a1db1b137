"""grpc.health.v1 without grpc: Check, Watch and List on the port that Envoy uses anyway. Served by `grpc_server`.

Protocol: https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from extproc.http2.grpc_messages import GrpcError, GrpcStatus
from extproc.http2.grpc_stream import Call, GrpcStream, Methods

SERVICE = "grpc.health.v1.Health"
SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """What each service's state is, and who watches it."""

    def __init__(self, services: Iterable[str]) -> None:
        self._states = dict.fromkeys(services, NOT_SERVING)
        self._watches: set[_Watch] = set()

    def methods(self) -> Methods:
        """Return what serves each method."""
        return {
            f"/{SERVICE}/Check".encode(): lambda stream: _Check(stream, self),
            f"/{SERVICE}/List".encode(): lambda stream: _List(stream, self),
            f"/{SERVICE}/Watch".encode(): lambda stream: _Watch(stream, self),
        }

    def set(self, service: str, *, serving: bool) -> None:
        """Set one service's state and tell those who watch it, where it has changed."""
        state = SERVING if serving else NOT_SERVING
        if self._states.get(service) == state:
            return
        self._states[service] = state
        for watch in list(self._watches):
            if watch.service == service:
                watch.tell(state)

    def state(self, service: str) -> int | None:
        """Return the state, None for a service that nobody knows."""
        return self._states.get(service)

    def states(self) -> dict[str, int]:
        """Return all of them."""
        return dict(self._states)

    def watched_by(self, watch: "_Watch") -> None:
        """Tell this one of changes, until `unwatched_by`."""
        self._watches.add(watch)

    def unwatched_by(self, watch: "_Watch") -> None:
        """Tell it no more."""
        self._watches.discard(watch)


def encoded(state: int) -> bytes:
    """Return the response with this state."""
    message: bytes = health_pb2.HealthCheckResponse(status=state).SerializeToString()
    return message


class _Unary(Call):
    """One request, one answer."""

    def __init__(self, stream: GrpcStream, health: Health) -> None:
        self._stream = stream
        self._health = health

    def message(self, data: bytes) -> None:
        self._stream.send(self._answer(data))
        self._stream.finish()

    def half_closed(self) -> None:
        raise GrpcError(GrpcStatus.INTERNAL, "the client ended without a request")

    def ended(self) -> None:
        pass

    def _answer(self, data: bytes) -> bytes:
        raise NotImplementedError


class _Check(_Unary):
    def _answer(self, data: bytes) -> bytes:
        state = self._health.state(_service(data))
        if state is None:
            raise GrpcError(GrpcStatus.NOT_FOUND, "unknown service")
        return encoded(state)


class _List(_Unary):
    def _answer(self, data: bytes) -> bytes:  # noqa: ARG002  (the request has no fields)
        response = health_pb2.HealthListResponse()
        for service, state in self._health.states().items():
            response.statuses[service].status = state
        message: bytes = response.SerializeToString()
        return message


class _Watch(Call):
    """The state now and after every change, until the client ends the stream."""

    def __init__(self, stream: GrpcStream, health: Health) -> None:
        self.service: str | None = None
        self._stream = stream
        self._health = health

    def message(self, data: bytes) -> None:
        if self.service is not None:
            raise GrpcError(GrpcStatus.INTERNAL, "one request is enough")
        self.service = _service(data)
        self._health.watched_by(self)
        state = self._health.state(self.service)
        self._stream.send(encoded(SERVICE_UNKNOWN if state is None else state))

    def half_closed(self) -> None:
        if self.service is None:
            raise GrpcError(GrpcStatus.INTERNAL, "the client ended without a request")

    def ended(self) -> None:
        self._health.unwatched_by(self)

    def tell(self, state: int) -> None:
        """Send the new state."""
        self._stream.send(encoded(state))
        self._stream.flush()


def _service(data: bytes) -> str:
    try:
        request: Any = health_pb2.HealthCheckRequest.FromString(data)
    except DecodeError as error:
        raise GrpcError(GrpcStatus.INTERNAL, "the request cannot be decoded") from error
    service: str = request.service
    return service
