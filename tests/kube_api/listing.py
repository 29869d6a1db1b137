"""Lists with limit and continue: consistent pages of the revision at which the first page was taken."""

import base64
import binascii
import json
from collections.abc import Mapping

from tests.kube_api.calls import Call
from tests.kube_api.errors import ApiError, Document, bad_request, expired
from tests.kube_api.selectors import Predicate, field_predicate, label_predicate
from tests.kube_api.store import ObjectKey, Store
from tests.kube_api.writing import in_version

_CONTINUE_EXPIRED = (
    "The provided continue parameter is too old to display a consistent list result. You can start a new list without "
    "the continue parameter."
)


def selection(call: Call) -> Predicate:
    """What the call's namespace, label selector and field selector let through."""
    known = call.resource.fields | {"metadata.name", "metadata.namespace"}
    labels = label_predicate(call.query.get("labelSelector", ""))
    fields = field_predicate(call.query.get("fieldSelector", ""), known)

    def holds(document: Document) -> bool:
        metadata = document["metadata"]
        inside = not call.namespace or metadata.get("namespace") == call.namespace
        return inside and (not call.name or metadata["name"] == call.name) and labels(document) and fields(document)

    return holds


def list_objects(call: Call, store: Store) -> Document:
    """The List document; raises 410 for a continue token whose revision was compacted."""
    revision, after = _position(call, store)
    objects = store.at_revision(call.resource.key, revision)
    if objects is None:
        raise expired(_CONTINUE_EXPIRED)
    holds = selection(call)
    rows = sorted(at for at, document in objects.items() if holds(document) and (after is None or at > after))
    limit = int(call.query.get("limit") or 0)
    page = rows[:limit] if limit else rows
    metadata: Document = {"resourceVersion": str(revision)} | ({"continue": ""} if call.resource.custom else {})
    if len(page) < len(rows):
        metadata["continue"] = _token(revision, page[-1])
        if not call.query.get("labelSelector") and not call.query.get("fieldSelector"):
            metadata["remainingItemCount"] = len(rows) - len(page)
    return {
        "kind": call.resource.kind + "List",
        "apiVersion": call.resource.api_version,
        "metadata": metadata,
        "items": [_item(call, objects, at) for at in page],
    }


def _item(call: Call, objects: Mapping[ObjectKey, Document], at: ObjectKey) -> Document:
    """As in a list: built-in kinds leave out apiVersion and kind there, custom objects have them."""
    document = in_version(call.resource, objects[at])
    if call.resource.custom:
        return document
    return {name: value for name, value in document.items() if name not in {"apiVersion", "kind"}}


def _position(call: Call, store: Store) -> tuple[int, ObjectKey | None]:
    token = call.query.get("continue", "")
    if token:
        if call.query.get("resourceVersion"):
            raise bad_request("specifying resource version is not allowed when using continue")
        return _parse_token(token)
    asked = call.query.get("resourceVersion") or "0"
    if not asked.isdigit():
        raise bad_request(f"Invalid value: {asked!r}: strconv.ParseUint: parsing {asked!r}: invalid syntax")
    if int(asked) > store.revision:
        raise too_large(int(asked), store)
    if call.query.get("resourceVersionMatch") == "Exact":
        return int(asked), None
    return store.revision, None


def too_large(asked: int, store: Store) -> ApiError:
    """The client knows a later state than this server: it must wait and ask again."""
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    text = f"Timeout: Too large resource version: {asked}, current: {store.revision}"
    return ApiError(504, "Timeout", text, {"retryAfterSeconds": 1, "causes": causes})


def _token(revision: int, last: ObjectKey) -> str:
    text = json.dumps({"v": "meta.k8s.io/v1", "rv": revision, "start": last})
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _parse_token(token: str) -> tuple[int, ObjectKey]:
    try:
        parsed = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
        namespace, name = parsed["start"]
        return int(parsed["rv"]), (namespace, name)
    except (ValueError, KeyError, TypeError, binascii.Error):
        raise bad_request(f'Invalid value: "{token}": continue key is not valid') from None
