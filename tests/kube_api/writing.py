"""What creating, changing and deleting an object means: the server's rules over the store. No HTTP here."""

import copy
import re
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from tests.kube_api.built_in_defaults import fill_built_in
from tests.kube_api.custom_objects import admit_custom
from tests.kube_api.definitions import accept_definition
from tests.kube_api.errors import (
    Cause,
    Document,
    already_exists,
    bad_request,
    conflict,
    forbidden,
    invalid,
    not_found,
)
from tests.kube_api.field_types import FieldType
from tests.kube_api.managed_fields import UPDATE, Manager, track_update
from tests.kube_api.object_metadata import readable_metadata
from tests.kube_api.registry import Registry, Resource
from tests.kube_api.store import ObjectKey, Store

_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$")
_NAME_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_SERVER_KEPT = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds")
FREE_NAMES = frozenset({"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"})  # colons are welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """How a write was asked for."""

    manager: str = "unknown"
    dry_run: bool = False
    subresource: str = ""
    strict: bool = False  # unknown fields are an error, not a warning
    tracked: bool = True  # False: the fields get no manager, which is much faster
    warnings: list[str] = field(default_factory=list)  # filled while the write is carried out


class Writer:
    """Applies writes to the store; raises ApiError and changes nothing where the real server refuses."""

    def __init__(self, store: Store, registry: Registry, now: Callable[[], datetime]) -> None:
        self.store = store
        self.registry = registry
        self._now = now
        self.after_drop: Callable[[Document], None] = lambda document: None  # owners and namespaces that waited for it

    def timestamp(self) -> str:
        return self._now().strftime("%Y-%m-%dT%H:%M:%SZ")

    def current(self, resource: Resource, at: ObjectKey) -> Document:
        found = self.store.get(resource.key, at)
        if found is None:
            raise not_found(resource.group, resource.plural, at[1])
        return found

    def create(self, resource: Resource, namespace: str, document: Document, intent: Intent) -> Document:
        document = copy.deepcopy(document)
        metadata = self._check_identity(resource, namespace, document)
        if metadata.pop("resourceVersion", ""):
            raise bad_request("resourceVersion should not be set on objects to be created")
        self._check_namespace(resource, namespace, metadata["name"])
        for name in (*_SERVER_KEPT, "managedFields"):
            metadata.pop(name, None)
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": self.timestamp()}
        if resource.generation:
            metadata["generation"] = 1
        if resource.status:
            document.pop("status", None)
        document = self._admit(resource, document, None, intent)
        at = (metadata["namespace"] if resource.namespaced else "", metadata["name"])
        if self.store.get(resource.key, at) is not None:
            raise already_exists(resource.group, resource.plural, at[1])
        return self.keep(resource, at, self._tracked(resource, None, document, intent), intent)

    def update(self, resource: Resource, at: ObjectKey, document: Document, intent: Intent) -> Document:
        old = self.current(resource, at)
        document = copy.deepcopy(document)
        metadata = self._check_identity(resource, at[0], document)
        if metadata["name"] != at[1]:
            raise bad_request(
                f"the name of the object ({metadata['name']}) does not match the name on the URL ({at[1]})"
            )
        self.check_precondition(resource, old, metadata)
        document = self.successor(resource, old, document, intent)
        tracked = self._tracked(resource, old, document, intent)
        return self.keep(resource, at, tracked, intent)

    def successor(self, resource: Resource, old: Document, document: Document, intent: Intent) -> Document:
        """The new document as it may be stored: what only the server sets is kept, the rest is validated."""
        metadata = document["metadata"]
        if intent.subresource == "status":
            document = {**old, **({"status": document["status"]} if "status" in document else {})}
            if "managedFields" in metadata:
                document["metadata"] = {**old["metadata"], "managedFields": metadata["managedFields"]}
            return self._admit(resource, copy.deepcopy(document), old, intent)
        for name in (*_SERVER_KEPT, "resourceVersion"):
            metadata.pop(name, None)
            if name in old["metadata"]:
                metadata[name] = old["metadata"][name]
        if resource.status:
            document.pop("status", None)
            if "status" in old:
                document["status"] = old["status"]
        document = self._admit(resource, document, old, intent)
        if resource.generation and _meaning(resource, document) != _meaning(resource, old):
            document["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
        return document

    def keep(self, resource: Resource, at: ObjectKey, document: Document, intent: Intent) -> Document:
        """Store it unless nothing changed; the last finalizer that goes takes a deleted object with it."""
        old = self.store.get(resource.key, at)
        if old is not None and _same(old, document):
            return old
        if intent.dry_run:
            return document
        metadata = document["metadata"]
        held = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
        if old is not None and "deletionTimestamp" in metadata and not held:
            self.store.put(resource.key, at, document)
            return self.drop(resource, at)
        stored = self.store.put(resource.key, at, document)
        if resource.kind == "CustomResourceDefinition":
            self.registry.add_definition(stored)
            self.store.wake()
        return stored

    def drop(self, resource: Resource, at: ObjectKey) -> Document:
        """Take the object out at once; a definition takes its resources with it."""
        last = self.store.remove(resource.key, at)
        if resource.kind == "CustomResourceDefinition":
            key = last["spec"]["group"], last["spec"]["names"]["plural"]
            for one in list(self.store.objects(key)):
                self.store.remove(key, one)
            self.registry.drop_definition(last)
            self.store.wake()
        self.after_drop(last)
        return last

    def _tracked(self, resource: Resource, old: Document | None, new: Document, intent: Intent) -> Document:
        if not intent.tracked:
            return new
        manager = Manager(
            name=intent.manager,
            operation=UPDATE,
            subresource=intent.subresource,
            api_version=resource.api_version,
            time=self.timestamp(),
        )
        return track_update(field_type(resource), old, new, manager)

    def _admit(self, resource: Resource, document: Document, old: Document | None, intent: Intent) -> Document:
        if resource.kind == "CustomResourceDefinition":
            return accept_definition(document, self.timestamp())
        if not resource.custom:
            return fill_built_in(resource.kind, document)
        admission = admit_custom(resource, document, old, strict=intent.strict)
        intent.warnings.extend(f'unknown field "{path}"' for path in admission.unknown)
        return admission.document

    def _check_identity(self, resource: Resource, namespace: str, document: Document) -> dict[str, Any]:
        """The object's metadata, with its name and namespace as they must be."""
        given = (document.get("apiVersion"), document.get("kind"))
        if given != (resource.api_version, resource.kind):
            raise bad_request(
                f"the object provided is unrecognized (must be of type {resource.kind} in {resource.api_version}): "
                f"got {given[1]} in {given[0]}"
            )
        metadata = readable_metadata(document)
        if resource.namespaced:
            if metadata.setdefault("namespace", namespace) != namespace:
                raise bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request"
                )
        else:
            metadata.pop("namespace", None)
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + secrets.token_hex(3)[:5]
        self._check_name(resource, metadata.get("name", ""))
        return metadata

    @staticmethod
    def _check_name(resource: Resource, name: Any) -> None:
        cause = None
        if not name:
            cause = Cause("metadata.name", "FieldValueRequired", "Required value: name or generateName is required")
        elif resource.kind not in FREE_NAMES and not (isinstance(name, str) and _NAME.match(name) and len(name) < 254):
            cause = Cause("metadata.name", "FieldValueInvalid", f'Invalid value: "{name}": {_NAME_RULE}')
        if cause:
            raise invalid(resource.group, resource.kind, str(name or ""), [cause])

    def _check_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        if not resource.namespaced:
            return
        found = self.store.get(("", "namespaces"), ("", namespace))
        if found is None:
            raise not_found("", "namespaces", namespace)
        if "deletionTimestamp" in found["metadata"]:
            text = f"unable to create new content in namespace {namespace} because it is being terminated"
            cause = {"reason": "NamespaceTerminating", "message": f"namespace {namespace} is being terminated"}
            raise forbidden(resource.group, resource.plural, name, text, [cause | {"field": "metadata.namespace"}])

    @staticmethod
    def check_precondition(resource: Resource, old: Document, metadata: dict[str, Any]) -> None:
        name = old["metadata"]["name"]
        uid = metadata.get("uid")
        if uid and uid != old["metadata"]["uid"]:
            why = f"Precondition failed: UID in precondition: {uid}, UID in object meta: {old['metadata']['uid']}"
            raise conflict(resource.group, resource.plural, name, why)
        version = metadata.get("resourceVersion")
        if version and version != old["metadata"]["resourceVersion"]:
            raise conflict(resource.group, resource.plural, name)
        if not version and resource.custom:
            text = "Invalid value: 0x0: must be specified for an update"
            raise invalid(
                resource.group, resource.kind, name, [Cause("metadata.resourceVersion", "FieldValueInvalid", text)]
            )


def _meaning(resource: Resource, document: Document) -> Document:
    """What a change of counts for the generation."""
    left_out = {"metadata", "status"} if resource.status else {"metadata"}
    return {name: value for name, value in document.items() if name not in left_out}


def _same(old: Document, new: Document) -> bool:
    def comparable(document: Document) -> Document:
        metadata = {name: value for name, value in document["metadata"].items() if name != "resourceVersion"}
        entries = [{**entry, "time": None} for entry in metadata.get("managedFields", ())]
        return {**document, "metadata": {**metadata, "managedFields": entries}}

    return comparable(old) == comparable(new)


def in_version(resource: Resource, document: Document) -> Document:
    """The document as that version of the resource shows it (conversion strategy None: only the apiVersion differs)."""
    return (
        document
        if document.get("apiVersion") == resource.api_version
        else {**document, "apiVersion": resource.api_version}
    )


def field_type(resource: Resource) -> FieldType:
    """How the fields of that resource are merged and owned."""
    return FieldType(schema=resource.schema, root=True)
