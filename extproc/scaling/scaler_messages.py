"""KEDA's external scaler: its messages (`externalscaler.proto`, package externalscaler), made at run time. Pure.

Names and numbers of the fields are those of KEDA (pkg/scalers/externalscaler/externalscaler.proto). Its scaler reads
the numbers with a point where they are above 0, and the whole ones, which are deprecated, where they are not.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "externalscaler"
SERVICE = f"{PACKAGE}.ExternalScaler"
_KINDS = descriptor_pb2.FieldDescriptorProto

_TEXT, _YES, _WHOLE, _REAL = _KINDS.TYPE_STRING, _KINDS.TYPE_BOOL, _KINDS.TYPE_INT64, _KINDS.TYPE_DOUBLE
# message -> field -> number, and its type: a scalar, or the name of a message; "*": repeated
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
        if name == "ScaledObjectRef":  # a map is a list of such entries
            entry = message.nested_type.add()
            _declare(entry, "ScalerMetadataEntry", {"key": (1, _TEXT), "value": (2, _TEXT)})
            entry.options.map_entry = True
    pool = descriptor_pool.DescriptorPool()  # of our own: another library may have the same file
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
