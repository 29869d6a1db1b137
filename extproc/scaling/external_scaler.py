"""Answers KEDA's external scaler protocol from the pools' signals, on the picker's gRPC port.

A ScaledObject names the pool (`pool`: "namespace/name", or a name in its own namespace; left out where the picker
serves one pool alone), the `role` (both), the `variant` of its pods, where the policy has variants, and the `metric`
(wanted-replicas).
"""

import asyncio
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from extproc.http2.grpc_messages import GrpcError, GrpcStatus
from extproc.http2.grpc_stream import Call, GrpcStream, Methods, UnaryCall, refuse_longer
from extproc.scaling import scaler_messages as messages
from extproc.scaling.seen import Signal

TELL_SECONDS = 1.0
LONGEST_REQUEST = 65_536  # bytes
SHOWN_POOLS = 20
WANTED, QUEUED = "wanted-replicas", "queued-tokens"
METRICS = (WANTED, QUEUED)


class ScaledPools(Protocol):
    """See `pools.Pools`."""

    @property
    def names(self) -> Sequence[str]:
        """Return the pools' names."""

    def signals(self, name: str) -> Mapping[str, Signal] | None:
        """Return the signals of a pool by role; None: there is no such pool."""


class ExternalScaler:
    """Serves all ScaledObjects."""

    def __init__(self, pools: ScaledPools) -> None:
        self._pools = pools
        self._watches: set[_ActiveWatch] = set()

    def methods(self) -> Methods:
        """Return what serves each method. StreamMetricSpec is left out: our target never changes."""
        return {
            f"/{messages.SERVICE}/IsActive".encode(): lambda stream: UnaryCall(
                stream, self._is_active, most_bytes=LONGEST_REQUEST
            ),
            f"/{messages.SERVICE}/GetMetricSpec".encode(): lambda stream: UnaryCall(
                stream, self._spec, most_bytes=LONGEST_REQUEST
            ),
            f"/{messages.SERVICE}/GetMetrics".encode(): lambda stream: UnaryCall(
                stream, self._values, most_bytes=LONGEST_REQUEST
            ),
            f"/{messages.SERVICE}/StreamIsActive".encode(): lambda stream: _ActiveWatch(stream, self),
        }

    async def run(self) -> None:
        """Tell open streams of changes, until cancelled."""
        while True:
            await asyncio.sleep(TELL_SECONDS)
            self.tell()

    def tell(self) -> None:
        """Tell open streams what has changed, and end those whose pool has gone."""
        for watch in list(self._watches):
            watch.tell()

    def active(self, ref: Any) -> bool:
        """Tell whether any pod is to be there. Raise GrpcError where the pool or the role is not known."""
        return _told(self._signal(ref), ref) > 0

    def watch(self, watch: "_ActiveWatch") -> None:
        """Tell this stream of changes until it is over."""
        self._watches.add(watch)

    def unwatch(self, watch: "_ActiveWatch") -> None:
        """Tell it nothing more."""
        self._watches.discard(watch)

    def _is_active(self, data: bytes) -> bytes:
        return _bytes(messages.IsActiveResponse(result=self.active(_read(messages.ScaledObjectRef, data))))

    def _spec(self, data: bytes) -> bytes:
        ref = _read(messages.ScaledObjectRef, data)
        _told(self._signal(ref), ref)  # a mistake is to be seen when the ScaledObject is made
        metric, target = _metric(ref), _target(ref)
        spec = messages.MetricSpec(metricName=metric, targetSize=max(round(target), 1), targetSizeFloat=target)
        return _bytes(messages.GetMetricSpecResponse(metricSpecs=[spec]))

    def _values(self, data: bytes) -> bytes:
        request = _read(messages.GetMetricsRequest, data)
        ref = request.scaledObjectRef
        signal, metric = self._signal(ref), _metric(ref)
        value = float(_told(signal, ref)) if metric == WANTED else signal.queued_tokens
        given = messages.MetricValue(
            metricName=request.metricName or metric, metricValue=round(value), metricValueFloat=value
        )
        return _bytes(messages.GetMetricsResponse(metricValues=[given]))

    def _signal(self, ref: Any) -> Signal:
        names = self._pools.names
        if not names:
            raise GrpcError(GrpcStatus.UNAVAILABLE, "no pool is known here yet")
        name = self._named(ref, names)
        signals = self._pools.signals(name)
        if signals is None:
            shown = ", ".join(sorted(names)[:SHOWN_POOLS]) + (", ..." if len(names) > SHOWN_POOLS else "")
            raise GrpcError(GrpcStatus.NOT_FOUND, f"there is no pool {name!r} here; there are: {shown}")
        role = ref.scalerMetadata.get("role", "both")
        if role not in signals:
            there = ", ".join(signals) or "none, or none yet"
            raise GrpcError(
                GrpcStatus.NOT_FOUND,
                f"no signal for the role {role!r} of the pool {name!r}: the policy's autoscale names {there}",
            )
        return signals[role]

    @staticmethod
    def _named(ref: Any, names: Sequence[str]) -> str:
        given: str = ref.scalerMetadata.get("pool", "")
        if given:
            return given if given in names or "/" in given else f"{ref.namespace}/{given}"
        if len(names) == 1:
            return names[0]
        raise GrpcError(GrpcStatus.INVALID_ARGUMENT, "this picker serves several pools: metadata.pool must name one")


class _ActiveWatch(Call):
    """Whether any pod is wanted, now and after every change, until the client ends the stream or the pool is gone."""

    def __init__(self, stream: GrpcStream, scaler: ExternalScaler) -> None:
        self._stream = stream
        self._scaler = scaler
        self._ref: Any = None
        self._told: bool | None = None

    def message(self, data: bytes) -> None:
        if self._ref is not None:
            raise GrpcError(GrpcStatus.INTERNAL, "one request is enough")
        ref = _read(messages.ScaledObjectRef, data)
        self._send(self._scaler.active(ref))
        self._ref = ref
        self._scaler.watch(self)

    def partial(self, size: int) -> None:
        refuse_longer(size, most_bytes=LONGEST_REQUEST)

    def half_closed(self) -> None:
        if self._ref is None:
            raise GrpcError(GrpcStatus.INTERNAL, "the client ended without a request")

    def ended(self) -> None:
        self._scaler.unwatch(self)

    def tell(self) -> None:
        """Send what has changed."""
        try:
            active = self._scaler.active(self._ref)
        except GrpcError as error:
            self._stream.finish(error.status, error.reason)
        else:
            if active == self._told:
                return
            self._send(active)
        self._stream.flush()

    def _send(self, active: bool) -> None:
        self._told = active
        self._stream.send(_bytes(messages.IsActiveResponse(result=active)))


def _told(signal: Signal, ref: Any) -> int:
    """Return the pods that a scaler is told, of the role or of the variant that it names. Raise GrpcError."""
    name: str = ref.scalerMetadata.get("variant", "")
    if not name:
        return signal.told
    for each in signal.variants:
        if each.name == name:
            return each.told
    there = ", ".join(each.name for each in signal.variants if each.name) or "none"
    words = f"the role {signal.role!r} has no variant {name!r}: the policy's autoscale names {there}"
    raise GrpcError(GrpcStatus.NOT_FOUND, words)


def _metric(ref: Any) -> str:
    metric: str = ref.scalerMetadata.get("metric", WANTED)
    if metric not in METRICS:
        raise GrpcError(GrpcStatus.INVALID_ARGUMENT, f"metadata.metric is {metric!r}; it may be {' or '.join(METRICS)}")
    return metric


def _target(ref: Any) -> float:
    """Return what the metric is to be for each pod: 1 wanted one, or the tokens that the ScaledObject says."""
    if _metric(ref) == WANTED:
        return 1.0
    given = ref.scalerMetadata.get("target", "")
    try:
        target = float(given)
    except ValueError:
        target = 0.0
    if not (isfinite(target) and target > 0.0):
        raise GrpcError(
            GrpcStatus.INVALID_ARGUMENT, f"metadata.target is {given!r}; queued-tokens needs tokens a pod, above 0"
        )
    return target


def _read(kind: Any, data: bytes) -> Any:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise GrpcError(GrpcStatus.INTERNAL, "the request cannot be decoded") from error


def _bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data
