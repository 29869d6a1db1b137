"""Server-side apply: an object merged by field managers, with conflicts; called by `serving`."""

import copy
from collections.abc import Iterable, Mapping

from tests.kube_api.errors import ApiError, Document, bad_request
from tests.kube_api.field_sets import Path, changes, merge, owned_paths, shown, tracked, without
from tests.kube_api.managed_fields import APPLY, Manager, Owned, read_managers, write_managers
from tests.kube_api.object_metadata import readable_metadata
from tests.kube_api.registry import Resource
from tests.kube_api.schema_validation import validate
from tests.kube_api.store import ObjectKey
from tests.kube_api.structural import prune
from tests.kube_api.writing import Intent, Writer, field_type, in_version


def apply(
    writer: Writer, resource: Resource, at: ObjectKey, applied: Document, intent: Intent, *, force: bool
) -> Document:
    """Merge what a manager wants into the object, or create it; raises 409 naming every field that others manage."""
    if not isinstance(applied, dict):
        raise bad_request("the applied configuration must be an object")
    applied = copy.deepcopy(applied)
    metadata = readable_metadata(applied)
    if metadata.get("managedFields"):
        raise bad_request("metadata.managedFields must be nil")
    if metadata.setdefault("name", at[1]) != at[1]:
        raise bad_request(f"the name of the object ({metadata['name']}) does not match the name on the URL ({at[1]})")
    _check_declared(resource, applied)
    me = Manager(
        name=intent.manager,
        operation=APPLY,
        subresource=intent.subresource,
        api_version=resource.api_version,
        time=writer.timestamp(),
    )
    kind = field_type(resource)
    wanted = _reset(resource, applied, intent.subresource)
    mine = frozenset(owned_paths(kind, tracked(wanted))) - {()}
    live = writer.store.get(resource.key, at)
    if live is None:
        if intent.subresource:
            writer.current(resource, at)  # raises 404
        created = writer.create(resource, at[0], wanted, Intent(manager=intent.manager, dry_run=True))
        return writer.keep(resource, at, write_managers(created, {me: mine}), intent)
    live = in_version(resource, live)
    metadata.setdefault("resourceVersion", live["metadata"]["resourceVersion"])
    writer.check_precondition(resource, live, metadata)
    return _apply_to(writer, resource, at, live, wanted, me, mine, intent, force=force)


def _apply_to(
    writer: Writer,
    resource: Resource,
    at: ObjectKey,
    live: Document,
    wanted: Document,
    me: Manager,
    mine: frozenset[Path],
    intent: Intent,
    *,
    force: bool,
) -> Document:
    kind, owned = field_type(resource), read_managers(live)
    merged = merge(kind, live, wanted)
    merged["metadata"] = {**merged["metadata"], "resourceVersion": live["metadata"]["resourceVersion"]}
    others = {one: paths for one, paths in owned.items() if one.identity != me.identity}
    before = next((paths for one, paths in owned.items() if one.identity == me.identity), frozenset[Path]())
    held = _held([mine, *others.values()])
    merged = without(kind, merged, (before - mine) - held, held)
    changed, removed = changes(kind, live, merged)
    conflicts = {one: sorted(paths & changed & mine) for one, paths in others.items() if paths & changed & mine}
    if conflicts and not force:
        raise _conflict(conflicts)
    document = writer.successor(resource, live, merged, intent)
    left: Owned = {one: paths - (changed & mine) - removed for one, paths in others.items()}
    if before == mine:  # the same wish again does not count as a write
        me = next(one for one in owned if one.identity == me.identity)
    return writer.keep(resource, at, write_managers(document, {**left, me: mine}), intent)


def _held(owned: Iterable[frozenset[Path]]) -> frozenset[Path]:
    """Paths that somebody owns, or owns something in."""
    return frozenset(path[:length] for paths in owned for path in paths for length in range(1, len(path) + 1))


def _conflict(conflicts: Mapping[Manager, list[Path]]) -> ApiError:
    causes = [
        {"reason": "FieldManagerConflict", "message": f"conflict with {one.shown()}", "field": shown(path)}
        for one, paths in conflicts.items()
        for path in paths
    ]
    parts = []
    for one, paths in conflicts.items():
        if len(paths) == 1:
            parts.append(f"conflict with {one.shown()}: {shown(paths[0])}")
        else:
            parts.append(f"conflicts with {one.shown()}:\n" + "\n".join(f"- {shown(path)}" for path in paths))
    count = f"{len(causes)} conflict{'s' * (len(causes) != 1)}"
    return ApiError(409, "Conflict", f"Apply failed with {count}: " + "\n".join(parts), {"causes": causes})


def _reset(resource: Resource, applied: Document, subresource: str) -> Document:
    """What this endpoint does not write is not owned by who applies there either."""
    if subresource == "status":
        metadata = {name: applied["metadata"][name] for name in ("name", "namespace") if name in applied["metadata"]}
        return {name: applied[name] for name in ("apiVersion", "kind", "status") if name in applied} | {
            "metadata": metadata
        }
    return {name: value for name, value in applied.items() if not (resource.status and name == "status")}


def _check_declared(resource: Resource, applied: Document) -> None:
    """What does not fit the schema's types cannot be merged: the server fails with 500, not 422."""
    if resource.schema is None:
        return
    pruned, unknown = prune(resource.schema, applied, root=True)
    wrong = f".{unknown[0]}: field not declared in schema" if unknown else ""
    own = {name: value for name, value in pruned.items() if name != "metadata"}
    for path, reason, message in validate(resource.schema, own):
        if reason == "FieldValueTypeInvalid" and not wrong:
            wrong = f".{path}: {message}"
    if wrong:
        at = f"{applied['metadata'].get('namespace', '')}/{applied['metadata']['name']}"
        named = f"{at}; {resource.api_version}, Kind={resource.kind}"
        raise ApiError(500, "", f"failed to create typed patch object ({named}): {wrong}")
