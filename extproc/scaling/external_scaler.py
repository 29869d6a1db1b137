"""Answers KEDA's external scaler protocol from the pools' signals, on the picker's gRPC port.

A ScaledObject's metadata names the `pool` ("namespace/name", or a name in its own namespace; optional if the picker
serves a single pool), the `role` (default: both), the `variant` if the policy has variants, and the `metric` (default:
wanted-replicas).

Names and numbers of the messages' fields are KEDA's (pkg/scalers/externalscaler/externalscaler.proto). KEDA reads the
float fields if they are above 0, and otherwise the integer fields, which are deprecated.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, Protocol

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from extproc.http2.grpc_messages import GrpcError, GrpcStatus
from extproc.http2.grpc_stream import Call, GrpcStream, Methods, UnaryCall, refuse_longer
from extproc.scaling.seen import Signal

TELL_SECONDS = 1.0
LONGEST_REQUEST = 65_536  # bytes
SHOWN_POOLS = 20
WANTED, QUEUED = "wanted-replicas", "queued-tokens"
METRICS = (WANTED, QUEUED)
PACKAGE = "externalscaler"
SERVICE = f"{PACKAGE}.ExternalScaler"
_KINDS = descriptor_pb2.FieldDescriptorProto

_TEXT, _YES, _WHOLE, _REAL = _KINDS.TYPE_STRING, _KINDS.TYPE_BOOL, _KINDS.TYPE_INT64, _KINDS.TYPE_DOUBLE
# message -> field -> (number, type); the type is a scalar or a message name, with "*" if repeated
_MESSAGES: dict[str, dict[str, tuple[int, Any]]] = {
    "ScaledObjectRef": {
        "name": (1, _TEXT),
        "namespace": (2, _TEXT),
        "scalerMetadata": (3, "*ScaledObjectRef.ScalerMetadataEntry"),
    },
    "IsActiveResponse": {"result": (1, _YES)},
    "MetricSpec": {"metricName": (1, _TEXT), "targetSize": (2, _WHOLE), "targetSizeFloat": (3, _REAL)},
    "GetMetricSpecResponse": {"metricSpecs": (1, "*MetricSpec")},
    "GetMetricsRequest": {"scaledObjectRef": (1, "ScaledObjectRef"), "metricName": (2, _TEXT)},
    "MetricValue": {"metricName": (1, _TEXT), "metricValue": (2, _WHOLE), "metricValueFloat": (3, _REAL)},
    "GetMetricsResponse": {"metricValues": (1, "*MetricValue")},
}


def _declare(message: Any, name: str, fields: dict[str, tuple[int, Any]]) -> None:
    message.name = name
    for field_name, (number, kind) in fields.items():
        field = message.field.add(name=field_name, number=number, label=_KINDS.LABEL_OPTIONAL)
        if isinstance(kind, str):
            field.type, field.type_name = _KINDS.TYPE_MESSAGE, f".{PACKAGE}.{kind.removeprefix('*')}"
            field.label = _KINDS.LABEL_REPEATED if kind.startswith("*") else _KINDS.LABEL_OPTIONAL
        else:
            field.type = kind


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="externalscaler.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add()
        _declare(message, name, fields)
        if name == "ScaledObjectRef":  # a map is a repeated entry message
            entry = message.nested_type.add()
            _declare(entry, "ScalerMetadataEntry", {"key": (1, _TEXT), "value": (2, _TEXT)})
            entry.options.map_entry = True
    pool = descriptor_pool.DescriptorPool()  # a private pool: another library may register the same file
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _classes()
ScaledObjectRef = _CLASSES["ScaledObjectRef"]
IsActiveResponse = _CLASSES["IsActiveResponse"]
MetricSpec = _CLASSES["MetricSpec"]
GetMetricSpecResponse = _CLASSES["GetMetricSpecResponse"]
GetMetricsRequest = _CLASSES["GetMetricsRequest"]
MetricValue = _CLASSES["MetricValue"]
GetMetricsResponse = _CLASSES["GetMetricsResponse"]


class ScaledPools(Protocol):
    """See `pools.Pools`."""

    @property
    def names(self) -> Sequence[str]:
        """Return the pools' names."""

    def signals(self, name: str) -> Mapping[str, Signal] | None:
        """Return the signals of a pool by role, or None if there is no such pool."""


class ExternalScaler:
    """Answers KEDA for all ScaledObjects."""

    def __init__(self, pools: ScaledPools) -> None:
        self._pools = pools
        self._watches: set[_ActiveWatch] = set()

    def methods(self) -> Methods:
        """Return the handler of each method. StreamMetricSpec is left out: our target never changes."""
        short = partial(UnaryCall, most_bytes=LONGEST_REQUEST)
        return {
            f"/{SERVICE}/IsActive".encode(): partial(short, answer=self._is_active),
            f"/{SERVICE}/GetMetricSpec".encode(): partial(short, answer=self._spec),
            f"/{SERVICE}/GetMetrics".encode(): partial(short, answer=self._values),
            f"/{SERVICE}/StreamIsActive".encode(): lambda stream: _ActiveWatch(stream, self),
        }

    async def run(self) -> None:
        """Send changes to open streams until cancelled."""
        while True:
            await asyncio.sleep(TELL_SECONDS)
            self.tell()

    def tell(self) -> None:
        """Send changes to open streams, and end the streams of removed pools."""
        for watch in list(self._watches):
            watch.tell()

    def active(self, ref: Any) -> bool:
        """Tell whether any pod is desired. Raise GrpcError for an unknown pool, role or variant."""
        return _told(self._signal(ref), ref) > 0

    def watch(self, watch: "_ActiveWatch") -> None:
        """Send changes to this stream until `unwatch`."""
        self._watches.add(watch)

    def unwatch(self, watch: "_ActiveWatch") -> None:
        """Stop sending changes to this stream."""
        self._watches.discard(watch)

    def _is_active(self, data: bytes) -> bytes:
        return _bytes(IsActiveResponse(result=self.active(_read(ScaledObjectRef, data))))

    def _spec(self, data: bytes) -> bytes:
        ref = _read(ScaledObjectRef, data)
        _told(self._signal(ref), ref)  # so that a mistake shows when the ScaledObject is created
        metric, target = _metric(ref), _target(ref)
        spec = MetricSpec(metricName=metric, targetSize=max(round(target), 1), targetSizeFloat=target)
        return _bytes(GetMetricSpecResponse(metricSpecs=[spec]))

    def _values(self, data: bytes) -> bytes:
        request = _read(GetMetricsRequest, data)
        ref = request.scaledObjectRef
        signal, metric = self._signal(ref), _metric(ref)
        value = float(_told(signal, ref)) if metric == WANTED else signal.queued_tokens
        given = MetricValue(metricName=request.metricName or metric, metricValue=round(value), metricValueFloat=value)
        return _bytes(GetMetricsResponse(metricValues=[given]))

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
    """Sends whether any pod is desired: now, and after every change until the client ends or the pool is removed."""

    def __init__(self, stream: GrpcStream, scaler: ExternalScaler) -> None:
        self._stream = stream
        self._scaler = scaler
        self._ref: Any = None
        self._told: bool | None = None

    def message(self, data: bytes) -> None:
        if self._ref is not None:
            raise GrpcError(GrpcStatus.INTERNAL, "one request is enough")
        ref = _read(ScaledObjectRef, data)
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
        self._stream.send(_bytes(IsActiveResponse(result=active)))


def _told(signal: Signal, ref: Any) -> int:
    """Return the reported replicas of the role, or of the named variant. Raise GrpcError."""
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
