"""Whether a cluster can give pickers the volume with tokenizer folders, looked at before anything is applied."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from extproc.install.cluster import Cluster, ForbiddenError, InstallError
from extproc.install.model_volume import lacks_image_volume, model_volume
from extproc.install.objects import DEPLOYMENT, NAMESPACE, Document, Kind, kind_of
from extproc.install.plan import InstallPlan

NODE = Kind(name="Node", group="", version="v1", plural="nodes", namespaced=False)
CLAIM = kind_of("PersistentVolumeClaim")
PROBE = "kvmesh-image-volume"  # of a Deployment that is never made
EVERYWHERE = "default"  # a namespace that each cluster has
ONE_NODE, MANY_NODES, MANY_READERS = "ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"
KEEPS_PODS_AWAY = ("NoSchedule", "NoExecute")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeFacts:
    """What was read of it."""

    keeps_image: bool = True  # a volume of an image, in a pod
    claim: Document | None = None
    claim_is_missing: bool = False
    nodes: int | None = None  # that take pods; None: it could not be read
    unread: Sequence[str] = ()  # why a part is missing


def read_volume(cluster: Cluster, plan: InstallPlan) -> VolumeFacts:
    """Read what `judge_volume` looks at, which is nothing for most plans."""
    unread: list[str] = []

    def read(what: str, look: Callable[[], T], otherwise: T) -> T:
        try:
            return look()
        except InstallError as error:
            unread.append(f"{what}: {error}")
            return otherwise

    if plan.tokenizers_image:
        keeps_image = read("whether pods may have volumes of images", lambda: _keeps_image(cluster, plan), True)
        return VolumeFacts(keeps_image=keeps_image, unread=tuple(unread))
    name = plan.model_cache_claim or plan.tokenizers_claim
    if not name:
        return VolumeFacts()
    claim = read(f"claim {name}", lambda: cluster.get(CLAIM, name, plan.namespace), None)
    is_missing = claim is None and not unread
    modes, nodes = _access_modes(claim), None
    if ONE_NODE in modes and MANY_NODES not in modes:
        nodes = read("how many nodes there are", lambda: _nodes(cluster), None)
    return VolumeFacts(claim=claim, claim_is_missing=is_missing, nodes=nodes, unread=tuple(unread))


def judge_volume(plan: InstallPlan, facts: VolumeFacts) -> tuple[Sequence[str], Sequence[str]]:
    """Return refusals and warnings, each with what to do."""
    refusals = [] if facts.keeps_image else [_no_image(plan)]
    warnings = [f"not looked at: {reason}" for reason in facts.unread]
    of_claim = f"--tokenizers-claim {plan.tokenizers_claim}"
    if plan.model_cache_claim:
        of_claim = f"--model-cache-claim {plan.model_cache_claim}"
    if facts.claim_is_missing:
        warnings.append(
            f"{of_claim}: there is no such PersistentVolumeClaim in namespace {plan.namespace} now, and no picker "
            "starts until there is"
        )
    modes = _access_modes(facts.claim)
    if modes and MANY_NODES not in modes:
        refusals += [f"{of_claim}: {each}" for each in _useless_modes(plan, modes)]
        warnings += [f"{of_claim}: {each}" for each in _one_node(plan, modes, facts.nodes)]
    return refusals, warnings


def _no_image(plan: InstallPlan) -> str:
    return (
        f"--tokenizers-image {plan.tokenizers_image}: the API server leaves volumes of images out of pods, so that "
        "pickers would find no folders: its feature ImageVolume is off, as it is by default before Kubernetes 1.35. "
        "Switch it on for API server and kubelets (1.31 or newer), or put the folders into a claim (--tokenizers-claim)"
    )


def _useless_modes(plan: InstallPlan, modes: Sequence[str]) -> Iterator[str]:
    """Say by which modes no picker, or not a second one, can have the claim."""
    said = ", ".join(modes)
    if MANY_READERS in modes:
        if plan.fetch_models and ONE_NODE not in modes:
            yield f"it is {said}, and --fetch-model writes into it: {_instead(plan)}"
    elif ONE_NODE not in modes:
        yield f"it is {said}: one pod alone can have it, also while a picker is replaced: {_instead(plan)}"


def _one_node(plan: InstallPlan, modes: Sequence[str], nodes: int | None) -> Iterator[str]:
    """Say that pickers on several nodes cannot share the claim; `nodes` None: it is not known how many there are."""
    most = max(plan.picker_replicas, plan.picker_replicas_max)
    writes = bool(plan.fetch_models) or MANY_READERS not in modes
    if ONE_NODE not in modes or not writes or most == 1 or nodes in {0, 1}:
        return
    yield (
        f"it is {', '.join(modes)}: of {'the' if nodes is None else nodes} nodes one alone can have it, and pickers on "
        f"others (--replicas {plan.picker_replicas}, --max-replicas {most}) never start: {_instead(plan)}"
    )


def _instead(plan: InstallPlan) -> str:
    if plan.tokenizers_claim:
        return "give one with ReadOnlyMany or ReadWriteMany"
    return "give one with ReadWriteMany, or leave it out: each picker then fetches into a volume of its own"


def _access_modes(claim: Document | None) -> Sequence[str]:
    """Return those of the volume that it has got, else those that it asks for."""
    if claim is None:
        return ()
    status, spec = claim.get("status") or {}, claim.get("spec") or {}
    return tuple(status.get("accessModes") or spec.get("accessModes") or ())


def _keeps_image(cluster: Cluster, plan: InstallPlan) -> bool:
    """Ask the API server what would become of such a volume; it makes nothing."""
    labels = {"app": PROBE}
    container = {"name": "picker", "image": plan.image}
    probe = {
        "apiVersion": DEPLOYMENT.api_version,
        "kind": DEPLOYMENT.name,
        "metadata": {"name": PROBE, "namespace": plan.namespace if _is_there(cluster, plan.namespace) else EVERYWHERE},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [container], "volumes": [model_volume(plan)]},
            },
        },
    }
    return not lacks_image_volume(cluster.apply(probe, force=False, rehearse=True))


def _is_there(cluster: Cluster, namespace: str) -> bool:
    try:
        return cluster.get(NAMESPACE, namespace, None) is not None
    except ForbiddenError:
        return True  # whoever may only write into it has been given it


def _nodes(cluster: Cluster) -> int:
    """Count the nodes that take pods."""
    return sum(
        not (node.get("spec") or {}).get("unschedulable")
        and not any(taint.get("effect") in KEEPS_PODS_AWAY for taint in (node.get("spec") or {}).get("taints") or ())
        for node in cluster.labelled(NODE, {})
    )
