"""The last valid documents of one kind: an invalid document never replaces a valid one, it only adds its error.

Independent of the kind: the reading function is an argument.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from extproc.errors import ConfigError
from kvmesh.documents.documents import Document, document_key

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Generic[T]):
    """One document, and its value in force."""

    source: str  # "namespace/name"; plus " (group)" if a document of another group has the same name
    document: Document
    good: T | None  # of this document, or of the last valid one before it; None without any
    good_generation: int  # generation of `good`
    error: str  # "" if the document itself is valid
    version: int  # changes with `good`

    @property
    def uid(self) -> str:
        """The object's uid: a new object of the same name has another one."""
        return str(_metadata(self.document).get("uid") or "")

    @property
    def instead(self) -> str:
        """What is in force instead of an invalid document, in words."""
        if self.good is None:
            return "nothing of it is in force"
        generation = f" (generation {self.good_generation})" if self.good_generation else ""
        return f"what it said before{generation} stays in force"

    @property
    def generation(self) -> int:
        """The document's own generation, or 0 without one."""
        return _generation(self.document)


@dataclass(slots=True)
class Intake(Generic[T]):
    """The held documents of one kind, by "namespace/name"."""

    read: Callable[[Document], T]  # raises ConfigError
    held: dict[str, Held[T]] = field(default_factory=dict)
    _taken: tuple[Document, ...] | None = None
    _versions: int = 0

    def take(self, documents: tuple[Document, ...]) -> bool:
        """Read the changed documents; tell whether any value in force or any error has changed."""
        if documents is self._taken:
            return False
        self._taken = documents
        before, self.held = self.held, {}
        for document in documents:
            key = document_key(document)
            source = f"{key.namespace}/{key.name}"
            if source in self.held:  # the kind may exist in two groups
                source = f"{source} ({key.group})"
            known = before.get(source)
            if known is not None and document_key(known.document).group != key.group:
                known = None
            self.held[source] = self._hold(source, document, known)
        return before.keys() != self.held.keys() or any(
            (held.version, held.error) != (before[source].version, before[source].error)
            for source, held in self.held.items()
        )

    def good_by(self, keys: Callable[[T], Iterable[str]]) -> dict[str, tuple[Held[T], ...]]:
        """Return the documents in force by the keys of their values."""
        found: defaultdict[str, list[Held[T]]] = defaultdict(list)
        for held in self.held.values():
            if held.good is not None:
                for key in keys(held.good):
                    found[key].append(held)
        return {name: tuple(group) for name, group in found.items()}

    def doubles(self) -> Iterator[tuple[str, str, str]]:
        """Yield documents that exist in two groups: "namespace/name", and the groups."""
        for held in self.held.values():
            key = document_key(held.document)
            first = self.held.get(f"{key.namespace}/{key.name}")
            if first is not None and first is not held:
                yield first.source, document_key(first.document).group, key.group

    def errors(self) -> Iterator[tuple[str, str]]:
        """Yield the invalid documents, each with its error and the version in force instead."""
        for source, held in self.held.items():
            if held.error:
                yield source, f"{held.error}; {held.instead}"

    def _hold(self, source: str, document: Document, before: Held[T] | None) -> Held[T]:
        if before is not None and before.document is document:
            return before
        if before is not None and before.uid != (_metadata(document).get("uid") or ""):
            before = None  # deleted and recreated meanwhile: nothing of the old object stays
        if before is not None and _what_counts(before.document) == _what_counts(document):
            return replace(before, document=document)  # only its status has changed
        try:
            good = self.read(document)
        except ConfigError as error:
            return self._refused(source, document, before, str(error))
        except Exception as error:
            logger.exception("a document could not be read", extra={"document": source})
            return self._refused(source, document, before, f"cannot be read: {type(error).__name__}")
        return Held(
            source=source,
            document=document,
            good=good,
            good_generation=_generation(document),
            error="",
            version=self._next_version(),
        )

    def _refused(self, source: str, document: Document, before: Held[T] | None, message: str) -> Held[T]:
        if before is not None:
            return replace(before, document=document, error=message)
        return Held(
            source=source, document=document, good=None, good_generation=0, error=message, version=self._next_version()
        )

    def _next_version(self) -> int:
        self._versions += 1
        return self._versions


def _what_counts(document: Document) -> tuple[Any, ...]:
    metadata = _metadata(document)
    return (
        *(document.get("apiVersion"), document.get("spec"), set(document) - {"status"}),
        *(metadata.get("creationTimestamp"), metadata.get("generation"), metadata.get("annotations")),
    )


def _metadata(document: Document) -> Mapping[str, Any]:
    metadata = document.get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def _generation(document: Document) -> int:
    generation = _metadata(document).get("generation")
    return generation if isinstance(generation, int) and not isinstance(generation, bool) else 0
