"""Envoy's API as typed messages: JSON in, messages to match and merge, JSON out.

The descriptors are those of xds-protos, with the few fields that it is too old for.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, json_format, message_factory
from google.protobuf.descriptor_pool import DescriptorPool

from tests.istiod.releases import EXT_PROC, OVERRIDE_HOST, PACKAGES

LISTENER = "envoy.config.listener.v3.Listener"
ROUTE_CONFIGURATION = "envoy.config.route.v3.RouteConfiguration"
CLUSTER = "envoy.config.cluster.v3.Cluster"
CONNECTION_MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
TYPE_URL = "type.googleapis.com/"

_FURTHER_PACKAGES = (
    *("envoy.config.bootstrap.v3", "envoy.config.cluster.v3", "envoy.config.core.v3", "envoy.config.endpoint.v3"),
    *("envoy.config.listener.v3", "envoy.config.route.v3", "envoy.config.rbac.v3", "envoy.type.v3"),
    *("envoy.type.metadata.v3", "envoy.type.tracing.v3"),
)
# in Envoy 1.38, not yet in xds-protos: (package, message, field, type)
_NEWER_FIELDS = (
    (OVERRIDE_HOST, "OverrideHost", "selected_host_key", ".envoy.type.metadata.v3.MetadataKey"),
    (EXT_PROC, "ExternalProcessor", "allow_content_length_header", None),
)


def new(type_name: str, content: Mapping[str, Any] | None = None) -> Any:
    """Make a message of that type; raise ParseError for a field or enum name that it does not have."""
    message = message_factory.GetMessageClass(descriptor(type_name))()
    return json_format.ParseDict(content or {}, message, descriptor_pool=_pool())


def to_json(message: Any) -> dict[str, Any]:
    """Return the message as Envoy reads it from a file."""
    parsed: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, descriptor_pool=_pool()
    )
    return parsed


def descriptor(type_name: str) -> Any:
    """Return the descriptor; raise KeyError if nobody knows the type."""
    return _pool().FindMessageTypeByName(type_name)


def clone(message: Any) -> Any:
    """Return a copy."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def unpack(any_message: Any) -> Any:
    """Return what an Any holds."""
    message = new(any_message.type_url.removeprefix(TYPE_URL))
    message.ParseFromString(any_message.value)
    return message


def pack(message: Any, into: Any) -> None:
    """Let an Any hold the message."""
    into.type_url = TYPE_URL + message.DESCRIPTOR.full_name
    into.value = message.SerializeToString(deterministic=True)


@cache
def _pool() -> Any:
    pool = DescriptorPool()
    added: set[str] = set()
    for package in (*_FURTHER_PACKAGES, *PACKAGES):
        folder = importlib.import_module(package)
        for module in pkgutil.iter_modules(folder.__path__):
            if module.name.endswith("_pb2"):
                _add(importlib.import_module(f"{package}.{module.name}").DESCRIPTOR, pool, added)
    return pool


def _add(file: Any, pool: Any, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add(dependency, pool, added)
    content = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(content)
    for package, message_name, field, type_name in _NEWER_FIELDS:
        for message in content.message_type:
            is_there = any(each.name == field for each in message.field)
            if (content.package, message.name) == (package, message_name) and not is_there:
                _add_field(content, message, field, type_name)
    pool.Add(content)


def _add_field(content: Any, message: Any, name: str, type_name: str | None) -> None:
    kind = descriptor_pb2.FieldDescriptorProto
    number = max(each.number for each in message.field) + 100  # any: JSON alone leaves this process
    added = message.field.add(name=name, number=number, label=kind.LABEL_OPTIONAL)
    added.type = kind.TYPE_BOOL if type_name is None else kind.TYPE_MESSAGE
    if type_name is not None:
        added.type_name = type_name
