"""The cluster's documents in the form of the Kubernetes API, from any source.

Also how a cluster is reached, and the status to write back to a document. Values and one protocol; pure.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvmesh.errors import KvIndexerError

Document = Mapping[str, Any]
"""One object as the API's JSON: apiVersion, kind, metadata, spec, status. Readers never change it."""
PICKER_SERVICE = "kvmesh-picker"  # in each installation's namespace, where it represents the installation
CONTROLLER = "kvmesh.io/picker/"
MOST_ANCESTORS = 16  # of one status, a limit of Gateway API


class DocumentKey(NamedTuple):
    """The name of a document, unique within a snapshot. A tuple, so that keys sort."""

    group: str  # "" for core kinds
    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


def document_key(document: Document) -> DocumentKey:
    """Return a document's key; a document without a namespace counts as "default", as in kubectl."""
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
    """A fault that an operator should fix; the last good state stays in use meanwhile."""

    reason: str  # a few words with hyphens: a metric label
    where: str  # a file's path, `Kind namespace/name`, or the kind that cannot be read
    words: str  # the fault and the correct form; names the field's path if there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All documents at one moment.

    An unchanged document is the same object as in the snapshot before, and so is the tuple of a kind without changes.
    Results computed from them may be cached by identity.
    """

    documents: Mapping[str, tuple[Document, ...]]  # by kind ("Pod", "InferencePool" …), sorted by namespace and name
    synced: bool  # every kind has been read once, or is known to be missing or forbidden
    problems: tuple[DocumentProblem, ...] = ()
    source: str = ""  # "kubernetes" | "folder" | "", for logs
    missing_kinds: frozenset[str] = field(default_factory=frozenset)  # not served by the API (yet), or forbidden

    def of(self, kind: str) -> tuple[Document, ...]:
        """Return the documents of one kind; empty if there are none."""
        return self.documents.get(kind, ())


class DocumentSource(Protocol):
    """A source of documents. Runs until cancelled; survives every failure of the other side."""

    async def run(self, on_change: Callable[[Snapshot], None]) -> None:
        """Call `on_change` with the first synced snapshot and after each change, at most four times per second.

        The callback runs on the event loop and must return at once. While the other side is away, nothing is called and
        the last snapshot stays valid; the fault becomes a problem in the next one.
        """


class KubernetesConfigError(KvIndexerError):
    """There is no usable configuration of a Kubernetes API; the message says which ones were tried."""

    reason = "kubernetes-config"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """Where the API server is, and who we are there."""

    kubeconfig: Path | None = None  # None for $KUBECONFIG, else ~/.kube/config, else the pod's service account
    context: str | None = None  # of the kubeconfig; None for its current one
    service_account: Path | None = None  # folder with token, ca.crt, namespace; None for where Kubernetes mounts it
    program: str = "kvmesh"  # our name in the API server's audit log


class StatusFullError(KvIndexerError):
    """A status has the maximum number of ancestors, all of other controllers."""

    reason = "status-full"


def controller_name(installation: str) -> str:
    """Return the name under which an installation (the namespace of its pickers) writes into a status."""
    return f"{CONTROLLER}{installation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusUpdate:
    """The entry that one installation wants in a document's `status.ancestors`."""

    key: DocumentKey
    uid: str  # of the judged document; "" if unknown
    generation: int  # of its spec; 0 if unknown
    entry: Mapping[str, Any]  # ancestorRef, controllerName, conditions


def status_to_write(current: Document, update: StatusUpdate, *, gone: Collection[str] = ()) -> dict[str, Any] | None:
    """Return the whole status to write over `current`; None if it is up to date or another document was judged.

    The entries of other controllers stay unchanged, except those of `gone`, by controller name. Raise StatusFullError
    if there is no room for ours.
    """
    metadata = current.get("metadata") or {}
    if update.uid and metadata.get("uid") != update.uid:
        return None
    if update.generation and metadata.get("generation", update.generation) != update.generation:
        return None  # the spec is newer than the judgement; a newer judgement will follow
    before = current.get("status") or {}
    entries = list(before.get("ancestors") or ())
    kept = [each for each in entries if each.get("controllerName") not in gone]
    own = update.entry.get("controllerName")
    place = next((at for at, each in enumerate(kept) if each.get("controllerName") == own), len(kept))
    if place == MOST_ANCESTORS:
        message = (
            f"its status has entries of {MOST_ANCESTORS} installations: remove those of installations that are gone"
        )
        raise StatusFullError(message)
    if len(kept) == len(entries) and place < len(kept) and _comparable(kept[place]) == _comparable(update.entry):
        return None
    kept[place : place + 1] = [dict(update.entry)]
    return {**before, "ancestors": kept}


def installations_in(current: Document) -> list[str]:
    """Return the installations (namespaces) that have entries in a document's status."""
    entries = (current.get("status") or {}).get("ancestors") or ()
    names = [str(each.get("controllerName", "")) for each in entries]
    return [name.removeprefix(CONTROLLER) for name in names if name.startswith(CONTROLLER)]


def _comparable(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an entry whose conditions have no order, as in the API."""
    return {**entry, "conditions": {each.get("type"): each for each in entry.get("conditions") or ()}}
