"""What is known of the cluster: documents as the Kubernetes API has them, whoever delivers them.

Values and one protocol; filled by `kubernetes_watch` and `document_folder`, read by `pool_resolver` and by the
picker's policies.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Document = Mapping[str, Any]
"""One object as the API's JSON: apiVersion, kind, metadata, spec, status. Never changed by whoever reads it."""


class DocumentKey(NamedTuple):
    """What a document is called: unique among all documents of a snapshot. A tuple, so that keys sort."""

    group: str  # "" for core kinds
    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        """Return `Kind namespace/name`, as people say it."""
        return f"{self.kind} {self.namespace}/{self.name}"


def document_key(document: Document) -> DocumentKey:
    """Return a document's key; a document without namespace counts to "default", as kubectl has it."""
    metadata = document.get("metadata") or {}
    group, slash, _ = str(document.get("apiVersion", "")).partition("/")
    return DocumentKey(
        group=group if slash else "",
        kind=str(document.get("kind", "")),
        namespace=str(metadata.get("namespace") or "default"),
        name=str(metadata.get("name", "")),
    )


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class DocumentProblem:
    """Something that a person should mend; the last good state stays meanwhile."""

    reason: str  # one of a few words with hyphens: a metric label
    where: str  # a file's path, `Kind namespace/name`, or the kind that cannot be read
    words: str  # what is wrong and what would be right; names the field's path where there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All documents at one moment.

    A document that has not changed is the same object as in the snapshot before, and so is the tuple of a kind of which
    none has changed: whoever computes from them may remember results by identity.
    """

    documents: Mapping[str, tuple[Document, ...]]  # by kind ("Pod", "InferencePool" …), sorted by namespace and name
    synced: bool  # every kind has been read once (or is known not to exist, or to be forbidden)
    problems: tuple[DocumentProblem, ...] = ()
    source: str = ""  # "kubernetes" | "folder" | "", for logs
    missing_kinds: frozenset[str] = field(default_factory=frozenset)  # not served by the API (yet), or forbidden

    def of(self, kind: str) -> tuple[Document, ...]:
        """Return the documents of one kind, none if there are none."""
        return self.documents.get(kind, ())


class DocumentSource(Protocol):
    """Where documents come from. Runs until cancelled; survives whatever the other side does."""

    async def run(self, on_change: Callable[[Snapshot], None]) -> None:
        """Call `on_change` with the first synced snapshot and after each change, four times a second at most.

        The callback runs on the event loop and must return at once. While the other side is away nothing is called and
        the last snapshot stays true; what is wrong becomes a problem of the next one.
        """
