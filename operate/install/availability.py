"""Waits for workloads to become available and for objects to be gone, and reports the reasons."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from operate.install.cluster import Cluster, InstallError
from operate.install.objects import DEPLOYMENT, NAME, POD, STATEFUL_SET, Document, describe, kind_of

POLL_SECONDS = 2.0
GOING_SECONDS = 120.0  # for a terminating namespace
USUAL_WAITS = {"ContainerCreating", "PodInitializing"}


def wait_until_gone(
    cluster: Cluster,
    documents: Sequence[Document],
    *,
    say: Callable[[str], None],
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Wait until none of the objects is terminating. Raise InstallError after GOING_SECONDS."""
    deadline = now() + GOING_SECONDS
    for document in documents:
        said = ""
        while (going := _going(cluster, document)) is not None:
            line = f"waiting for {describe(document)}, which is still being removed{_what_remains(going)}"
            if now() >= deadline:
                raise InstallError(f"{line}: not gone after {GOING_SECONDS:g} s. Nothing was changed")
            if line != said:
                say(line)
            said = line
            sleep(POLL_SECONDS)


def is_going(document: Document | None) -> bool:
    """Tell whether an object exists and is terminating."""
    return document is not None and bool(document["metadata"].get("deletionTimestamp"))


def _going(cluster: Cluster, document: Document) -> Document | None:
    meta = document["metadata"]
    found = cluster.get(kind_of(document["kind"]), meta["name"], meta.get("namespace"))
    return found if is_going(found) else None


def _what_remains(namespace: Document) -> str:
    conditions = (namespace.get("status") or {}).get("conditions") or []
    told = [each.get("message", "") for each in conditions if each.get("status") == "True"]
    return f" ({'; '.join(told)})" if told else ""


def wait_until_available(
    cluster: Cluster,
    documents: Sequence[Document],
    *,
    wait_seconds: float,
    say: Callable[[str], None],
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Wait until the workloads among the documents are available as just applied.

    Raise InstallError with the reasons after `wait_seconds`; 0 means do not wait.
    """
    waiting = [each for each in documents if each["kind"] in {DEPLOYMENT.name, STATEFUL_SET.name}]
    deadline = now() + wait_seconds
    said = ""
    while waiting and wait_seconds > 0:
        troubles = {each["metadata"]["name"]: _trouble(cluster, each) for each in waiting}
        waiting = [each for each in waiting if troubles[each["metadata"]["name"]]]
        if not waiting:
            return
        reasons = "; ".join(f"{name} ({trouble})" for name, trouble in troubles.items() if trouble)
        if now() >= deadline:
            raise InstallError(
                f"not ready after {wait_seconds:g} s: {reasons}. No gateway was told to ask the picker; mend what "
                f"keeps it from running (kubectl get pods -n {waiting[0]['metadata']['namespace']}) and run this again"
            )
        if reasons != said:
            say(f"waiting for {reasons}")
        said = reasons
        sleep(POLL_SECONDS)


def _trouble(cluster: Cluster, document: Document) -> str:
    meta = document["metadata"]
    found = cluster.get(kind_of(document["kind"]), meta["name"], meta["namespace"])
    if found is None:
        return "it is gone"
    status = found.get("status") or {}
    if status.get("observedGeneration", 0) < found["metadata"].get("generation", 0):
        return "no controller has looked at it yet"
    wanted, updated = status.get("replicas", 0), status.get("updatedReplicas", 0)
    if updated and updated == wanted == status.get("availableReplicas", 0):
        return ""
    pods = cluster.labelled(POD, {NAME: meta["labels"][NAME]}, meta["namespace"])
    reasons = dict.fromkeys(reason for pod in pods if (reason := _pod_trouble(pod)))
    refused = [each.get("message", "") for each in status.get("conditions") or () if each["type"] == "ReplicaFailure"]
    ready = f"{status.get('availableReplicas', 0)} of {wanted} pods are ready"
    return ", ".join([ready, *refused, *reasons])


def _pod_trouble(pod: Document) -> str:
    status = pod.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    placed = conditions.get("PodScheduled", {})
    if placed.get("status") == "False":
        return f"pending: {placed.get('message', 'no node takes it')}"
    if is_going(pod) or conditions.get("Ready", {}).get("status") == "True":
        return ""
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    return ", ".join(words for each in containers if (words := "".join(_container_trouble(pod, each))))


def _container_trouble(pod: Document, container: dict[str, Any]) -> Iterator[str]:
    state, last = container.get("state") or {}, container.get("lastState") or {}
    logs = f"kubectl logs -n {pod['metadata']['namespace']} {pod['metadata']['name']} -c {container['name']}"
    if waits := state.get("waiting"):
        if waits.get("reason") not in USUAL_WAITS:
            yield f"{waits.get('reason', 'waits')}: {waits.get('message', '')}".rstrip(": ")
        if ended := last.get("terminated"):
            yield f" (ended with exit code {ended.get('exitCode')}; {logs} --previous)"
    elif "running" in state and not container.get("ready"):
        yield f"{container['name']} runs and is not ready ({logs})"
