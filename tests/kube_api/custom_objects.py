"""Custom objects against their definition's schema, on their way into the store; called by `writing`."""

from tests.kube_api.errors import Document, bad_request, invalid
from tests.kube_api.registry import Resource
from tests.kube_api.schemas import Admission, admit


def admit_custom(resource: Resource, document: Document, old: Document | None, *, strict: bool) -> Admission:
    """The object pruned and with defaults; raises 422 with every wrong field, or 400 for unknown ones if `strict`."""
    if resource.schema is None:
        return Admission(document=document, unknown=(), causes=())
    admission = admit(resource.schema, document, old)
    if admission.unknown and strict:
        named = f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}'
        found = ", ".join(f'unknown field "{path}"' for path in admission.unknown)
        raise bad_request(f"{named}: strict decoding error: {found}")
    if admission.causes:
        raise invalid(resource.group, resource.kind, document["metadata"]["name"], admission.causes)
    return admission
