"""Reads policies of other systems as InferencePolicies."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from extproc.policy.inference_policy import API_VERSION, KIND
from extproc.policy.reading import PolicyDocumentError, record_of
from extproc.policy.resource import name_of
from extproc.translation.endpoint_picker_config import translate_endpoint_picker_config
from extproc.translation.planner_file import translate_planner_file
from extproc.translation.translation import Translation
from kvmesh.documents.document_files import DocumentFileError
from kvmesh.documents.documents import Document, document_key

log = logging.getLogger(__name__)


def translated(value: Mapping[str, Any], *, name: str) -> tuple[Document, Translation]:
    """Return the InferencePolicy for a value, named by its `metadata`, else `name`. Raise DocumentFileError."""
    content = {key: part for key, part in value.items() if key != "metadata"}
    translate = translate_endpoint_picker_config if "kind" in content else translate_planner_file
    try:
        metadata = {"name": name, **record_of(value.get("metadata", {}), "metadata")}
        translation = translate(content)
        spec = translation.spec()
    except PolicyDocumentError as error:
        raise DocumentFileError(str(error).lstrip(".")) from error
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}, translation


def translated_file(path: str, place: str, value: Mapping[str, Any]) -> Document:
    """Do the same for a file of a folder, and log the keys that differ."""
    document, translation = translated(value, name=name_of(Path(path).stem) + place)
    keys = ", ".join(note.key for note in translation.notes if note.difference) or "none"
    log.warning("%s: read as %s; differences (see `kvmesh policy check`): %s", path, document_key(document), keys)
    return document
