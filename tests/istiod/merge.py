"""istiod's MERGE of one typed message into another: like protobuf's, but for durations.

Set fields win, lists are appended, entries of a map are replaced whole, and an Any is a value: what it holds is not
merged (only HTTP and network filters and transport sockets are, by their own rule).
"""

from typing import Any

from tests.istiod.envoy_api import pack, unpack


def merge(into: Any, patch: Any) -> None:
    """Change the first message by the second one, of the same type."""
    for field, value in patch.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _merge_map(getattr(into, field.name), value)
        elif field.is_repeated:
            getattr(into, field.name).extend(value)
        elif field.message_type is None:
            setattr(into, field.name, value)
        elif field.message_type.full_name == "google.protobuf.Duration":
            getattr(into, field.name).CopyFrom(value)  # protobuf would keep the nanoseconds of the old one
        else:
            part = getattr(into, field.name)
            part.SetInParent()
            merge(part, value)


def _merge_map(into: Any, patch: Any) -> None:
    for key in patch:
        if hasattr(into, "GetEntryClass") and into.GetEntryClass().DESCRIPTOR.fields_by_name["value"].message_type:
            into[key].CopyFrom(patch[key])
        else:
            into[key] = patch[key]


def merge_any(into: Any, patch: Any) -> None:
    """Merge what the second Any holds into what the first one holds; other types are left as they are."""
    if into.type_url != patch.type_url:
        return
    content = unpack(into)
    merge(content, unpack(patch))
    pack(content, into)
