"""Deleting: finalizers, grace, owners and their dependents, namespaces with all that is in them."""

from dataclasses import dataclass
from typing import Any

from tests.kube_api.errors import Document, conflict
from tests.kube_api.registry import Resource
from tests.kube_api.store import ObjectKey
from tests.kube_api.writing import Intent, Writer

FOREGROUND = "foregroundDeletion"  # what an owner waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """DeleteOptions, from the body or the query."""

    propagation: str = "Background"
    grace_seconds: int | None = None
    uid: str = ""
    resource_version: str = ""
    dry_run: bool = False


def deletion_of(options: dict[str, Any], query: dict[str, str]) -> Deletion:
    preconditions = options.get("preconditions") or {}
    grace = options.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
    return Deletion(
        propagation=options.get("propagationPolicy") or query.get("propagationPolicy") or "Background",
        grace_seconds=None if grace is None else int(grace),
        uid=preconditions.get("uid") or "",
        resource_version=preconditions.get("resourceVersion") or "",
        dry_run=bool(options.get("dryRun") or query.get("dryRun")),
    )


def delete(writer: Writer, resource: Resource, at: ObjectKey, how: Deletion) -> Document:
    """Delete or begin to: returns the object's last state, with a deletionTimestamp where something still holds it."""
    old = writer.current(resource, at)
    metadata = old["metadata"]
    if how.uid and how.uid != metadata["uid"]:
        why = f"Precondition failed: UID in precondition: {how.uid}, UID in object meta: {metadata['uid']}"
        raise conflict(resource.group, resource.plural, at[1], why)
    if how.resource_version and how.resource_version != metadata["resourceVersion"]:
        why = (
            f"Precondition failed: ResourceVersion in precondition: {how.resource_version}, "
            f"ResourceVersion in object meta: {metadata['resourceVersion']}"
        )
        raise conflict(resource.group, resource.plural, at[1], why)
    if how.dry_run:
        return old
    if resource.kind == "Namespace":
        _empty_namespace(writer, at[1])
    finalizers = list(metadata.get("finalizers") or ())
    dependents = _dependents(writer, metadata["uid"])
    if how.propagation == "Foreground" and any(blocks for _, _, blocks in dependents):
        finalizers.append(FOREGROUND)
    grace = _grace_seconds(resource, old, how)
    held = finalizers or grace or (resource.kind == "Namespace" and writer.store.has_content(at[1]))
    last = _mark(writer, resource, at, finalizers, grace) if held else writer.drop(resource, at)
    _pass_on(writer, metadata["uid"], how)
    if FOREGROUND in finalizers:
        last = _finish_foreground(writer, resource, at)
    return last


def _grace_seconds(resource: Resource, document: Document, how: Deletion) -> int:
    """Only pods on a node go gracefully: their kubelet (here: the test) deletes them again with 0."""
    if resource.key != ("", "pods") or not document.get("spec", {}).get("nodeName"):
        return 0
    if how.grace_seconds is not None:
        return how.grace_seconds
    return int(document["spec"].get("terminationGracePeriodSeconds", 30))


def _mark(writer: Writer, resource: Resource, at: ObjectKey, finalizers: list[str], grace: int) -> Document:
    old = writer.current(resource, at)
    metadata = {**old["metadata"]}
    metadata.setdefault("deletionTimestamp", writer.timestamp())
    if resource.kind != "Namespace":
        metadata["deletionGracePeriodSeconds"] = grace
    if finalizers:
        metadata["finalizers"] = finalizers
    if resource.generation and "deletionTimestamp" not in old["metadata"]:
        metadata["generation"] = metadata.get("generation", 1) + 1
    document = {**old, "metadata": metadata}
    if resource.kind == "Namespace":
        document["status"] = {**document["status"], "phase": "Terminating"}
    return old if document == old else writer.store.put(resource.key, at, document)


def _dependents(writer: Writer, uid: str) -> list[tuple[Resource, ObjectKey, bool]]:
    """Who names this object as an owner, and whether the owner must wait for it."""
    found = []
    for key in writer.store.resources():
        resource = next((one for one in writer.registry if one.key == key), None)
        for at, document in list(writer.store.objects(key).items()) if resource else ():
            for owner in document["metadata"].get("ownerReferences") or ():
                if owner.get("uid") == uid and resource is not None:
                    found.append((resource, at, bool(owner.get("blockOwnerDeletion"))))
    return found


def _pass_on(writer: Writer, uid: str, how: Deletion) -> None:
    for resource, at, _ in _dependents(writer, uid):
        document = writer.store.get(resource.key, at)
        if document is None:
            continue
        others = [one for one in document["metadata"]["ownerReferences"] if one.get("uid") != uid]
        if how.propagation == "Orphan" or others:
            metadata = {**document["metadata"], "ownerReferences": others}
            writer.keep(resource, at, {**document, "metadata": metadata}, Intent())
        else:
            delete(writer, resource, at, Deletion(propagation=how.propagation))


def _finish_foreground(writer: Writer, resource: Resource, at: ObjectKey) -> Document:
    old = writer.current(resource, at)
    if any(blocks for _, _, blocks in _dependents(writer, old["metadata"]["uid"])):
        return old  # a dependent has finalizers of its own
    return _release(writer, resource, at, FOREGROUND)


def _release(writer: Writer, resource: Resource, at: ObjectKey, finalizer: str) -> Document:
    old = writer.current(resource, at)
    left = [one for one in old["metadata"].get("finalizers", ()) if one != finalizer]
    return writer.keep(resource, at, {**old, "metadata": {**old["metadata"], "finalizers": left}}, Intent())


def finish_waiting(writer: Writer, gone: Document) -> None:
    """After an object is really gone: its owner in foreground deletion, or its namespace, may go as well."""
    for owner in gone["metadata"].get("ownerReferences") or ():
        resource = writer.registry.of_kind(owner["kind"], owner["apiVersion"].rpartition("/")[0])
        at = (gone["metadata"].get("namespace", "") if resource and resource.namespaced else "", owner["name"])
        document = writer.store.get(resource.key, at) if resource else None
        if resource and document and FOREGROUND in document["metadata"].get("finalizers", ()):
            _finish_foreground(writer, resource, at)
    namespace = gone["metadata"].get("namespace")
    home = writer.store.get(("", "namespaces"), ("", namespace)) if namespace else None
    resource = writer.registry.find("", "v1", "namespaces")
    going = home is not None and "deletionTimestamp" in home["metadata"] and not home["metadata"].get("finalizers")
    if going and resource and not writer.store.has_content(namespace):
        writer.drop(resource, ("", namespace))


def _empty_namespace(writer: Writer, namespace: str) -> None:
    for key in writer.store.resources():
        resource = next((one for one in writer.registry if one.key == key), None)
        for at in list(writer.store.objects(key)) if resource else ():
            if at[0] == namespace and resource is not None and writer.store.get(key, at) is not None:
                delete(writer, resource, at, Deletion(grace_seconds=0))
