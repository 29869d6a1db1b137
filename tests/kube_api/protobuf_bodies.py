"""The few built-in objects that `kubectl create` and `kubectl auth` send as protobuf; answers are JSON. Pure.

Field numbers: generated.proto of k8s.io/api and k8s.io/apimachinery.
"""

from collections.abc import Iterator
from typing import Any

from tests.kube_api.errors import Document, unsupported_media

Fields = dict[int, Any]  # field number -> name of a text, (name, "map") of texts, (name, Fields) of a message

_MAGIC = b"k8s\x00"
_META: Fields = {1: "name", 2: "generateName", 3: "namespace", 11: ("labels", "map"), 12: ("annotations", "map")}
_ATTRIBUTES: Fields = dict(enumerate(("namespace", "verb", "group", "version", "resource", "subresource", "name"), 1))
_KINDS: dict[str, Fields] = {
    "Namespace": {1: ("metadata", _META)},
    "ServiceAccount": {1: ("metadata", _META)},
    "ConfigMap": {1: ("metadata", _META), 2: ("data", "map")},
    "SelfSubjectAccessReview": {1: ("metadata", _META), 2: ("spec", {1: ("resourceAttributes", _ATTRIBUTES)})},
}


def decode_protobuf(body: bytes) -> Document:
    """The object; raises 415 for kinds that only real servers read."""
    if not body.startswith(_MAGIC):
        raise unsupported_media(["application/json", "application/yaml"])
    envelope = dict(_fields(body[len(_MAGIC) :]))
    named = dict(_fields(envelope.get(1, b"")))
    kind = named.get(2, b"").decode()
    if kind not in _KINDS:
        raise unsupported_media(["application/json", "application/yaml"])
    return {"apiVersion": named[1].decode(), "kind": kind, **_message(envelope.get(2, b""), _KINDS[kind])}


def _message(data: bytes, known: Fields) -> Document:
    document: Document = {}
    for number, value in _fields(data):
        shape = known.get(number)
        if isinstance(shape, str):
            if value:  # in Go's API an empty text is an absent one
                document[shape] = value.decode()
        elif shape is not None and shape[1] == "map":
            entry = dict(_fields(value))
            document.setdefault(shape[0], {})[entry.get(1, b"").decode()] = entry.get(2, b"").decode()
        elif shape is not None:
            document[shape[0]] = _message(value, shape[1])
    return document


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each field with a length; numbers are skipped, none of ours has one."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        if tag & 7 == 2:
            length, position = _varint(data, position)
            yield tag >> 3, data[position : position + length]
            position += length
        elif tag & 7 == 0:
            _, position = _varint(data, position)
        else:
            position += 8 if tag & 7 == 1 else 4


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, position
