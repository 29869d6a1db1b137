"""Documents of one kind as last understood: a bad document never replaces a good one, it only says what is wrong.

It knows no kind: it is given the function that reads one.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from extproc.errors import ConfigError
from kvmesh.documents.documents import Document, document_key

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(Generic[T]):
    """One document, and what is in force of it."""

    source: str  # "namespace/name", and " (group)" of the second of two groups that have one of this name
    document: Document
    good: T | None  # of this document, or of the last good one before it; None: there never was one
    good_generation: int  # whose `good` is
    error: str  # "" where the document itself is good
    version: int  # another one for each other `good`

    @property
    def uid(self) -> str:
        """Which object it is: another one of the same name has another uid."""
        return str(_metadata(self.document).get("uid") or "")

    @property
    def instead(self) -> str:
        """What is in force in the place of a document that is wrong."""
        if self.good is None:
            return "nothing of it is in force"
        generation = f" (generation {self.good_generation})" if self.good_generation else ""
        return f"what it said before{generation} stays in force"

    @property
    def generation(self) -> int:
        """The document's own generation, 0 where it has none."""
        return _generation(self.document)


@dataclass(slots=True)
class Intake(Generic[T]):
    """What is held of one kind, by "namespace/name"."""

    read: Callable[[Document], T]  # raises ConfigError
    held: dict[str, Held[T]] = field(default_factory=dict)
    _taken: tuple[Document, ...] | None = None
    _versions: int = 0

    def take(self, documents: tuple[Document, ...]) -> bool:
        """Read what has changed; tell whether anything else is in force now, or in error."""
        if documents is self._taken:
            return False
        self._taken = documents
        before, self.held = self.held, {}
        for document in documents:
            key = document_key(document)
            source = f"{key.namespace}/{key.name}"
            if source in self.held:  # the same kind may be in two groups
                source = f"{source} ({key.group})"
            known = before.get(source)
            if known is not None and document_key(known.document).group != key.group:
                known = None
            self.held[source] = self._hold(source, document, known)
        return before.keys() != self.held.keys() or any(
            (held.version, held.error) != (before[source].version, before[source].error)
            for source, held in self.held.items()
        )

    def good_by(self, key: Callable[[T], str]) -> dict[str, tuple[Held[T], ...]]:
        """Return what is in force, by some key of the value."""
        found: defaultdict[str, list[Held[T]]] = defaultdict(list)
        for held in self.held.values():
            if held.good is not None:
                found[key(held.good)].append(held)
        return {name: tuple(group) for name, group in found.items()}

    def doubles(self) -> Iterator[tuple[str, str, str]]:
        """Yield what is there in two groups: "namespace/name", and the groups."""
        for held in self.held.values():
            key = document_key(held.document)
            first = self.held.get(f"{key.namespace}/{key.name}")
            if first is not None and first is not held:
                yield first.source, document_key(first.document).group, key.group

    def errors(self) -> Iterator[tuple[str, str]]:
        """Yield the documents that are wrong, with what is wrong and what is in force instead."""
        for source, held in self.held.items():
            if held.error:
                yield source, f"{held.error}; {held.instead}"

    def _hold(self, source: str, document: Document, before: Held[T] | None) -> Held[T]:
        if before is not None and before.document is document:
            return before
        if before is not None and before.uid != (_metadata(document).get("uid") or ""):
            before = None  # deleted meanwhile, and made anew: nothing of the old one stays
        if before is not None and _what_counts(before.document) == _what_counts(document):
            return replace(before, document=document)  # its status was written
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
