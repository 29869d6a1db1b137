"""The pickers' volume with tokenizer folders, the init container that fills it, and checks that a cluster can hold it.

Optional: without it, pickers ask the pods of each model for tokens.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import urlsplit

from extproc.errors import ConfigError
from extproc.models.model_folders import folder_parts
from operate.install.cluster import Cluster, ForbiddenError, InstallError
from operate.install.objects import DEPLOYMENT, NAMESPACE, Document, Kind, kind_of
from operate.install.plan import InstallPlan, MeshMembership
from operate.install.pod_parts import LOCKED_DOWN, TMP_MOUNT, image_of

MODELS = "/models"
VOLUME = "models"
TOKEN_KEY = "token"  # noqa: S105 - a key of the Secret
TOKEN_VOLUME, TOKEN_FOLDER = "hub-token", "/run/secrets/kvmesh/hub"  # a file: an environment is inherited and dumped
CACHE_SIZE = "2Gi"  # on the node's disk: about sixty models of up to 34 MB
# Istio's own user. Init containers run before the proxy; traffic of other users is redirected to it and lost.
PROXY_USER = 1337
FETCH = files("operate.install").joinpath("fetch_models.sh").read_text(encoding="utf-8")
HF_SETTINGS = {
    "HF_HOME": "/tmp/huggingface",  # noqa: S108
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    "HF_HUB_DISABLE_XET": "1",  # plain downloads: mirrors and proxies support nothing else
    "NO_COLOR": "1",
}
WRITTEN = "[NAME=]MODEL[@REVISION]"
_REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9_][\w./-]{0,127}", re.ASCII)
NODE = Kind(name="Node", group="", version="v1", plural="nodes", namespaced=False)
CLAIM = kind_of("PersistentVolumeClaim")
PROBE = "kvmesh-image-volume"  # name of a dry-run Deployment
EVERYWHERE = "default"  # a namespace in every cluster
ONE_NODE, MANY_NODES, MANY_READERS = "ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"
KEEPS_PODS_AWAY = ("NoSchedule", "NoExecute")
T = TypeVar("T")


def check_model_folders(plan: InstallPlan) -> None:
    """Raise ConfigError for conflicting options for tokenizer folders."""
    given = {
        "--tokenizers-claim": plan.tokenizers_claim,
        "--model-cache-claim": plan.model_cache_claim,
        "--tokenizers-image": plan.tokenizers_image,
    }
    flags = [flag for flag, value in given.items() if value]
    if len(flags) > 1:
        raise ConfigError(f"{' and '.join(flags)}: /models is one volume, give one of them")
    if plan.fetch_models and (plan.tokenizers_claim or plan.tokenizers_image):
        raise ConfigError(f"{flags[0]} is only read: give --model-cache-claim, or nothing, for --fetch-model")
    if plan.fetch_models:
        check_models(plan.fetch_models)
    elif plan.hub_endpoint or plan.hub_token_secret:
        raise ConfigError("--hub-endpoint and --hub-token-secret are of --fetch-model")
    if plan.hub_endpoint:
        check_endpoint(plan.hub_endpoint)


def lacks_image_volume(deployment: Mapping[str, Any] | None) -> bool:
    """Tell whether the API server dropped the image from the volume, as it does without the feature ImageVolume."""
    if deployment is None:
        return False
    volumes = deployment["spec"]["template"]["spec"].get("volumes") or ()
    return not any(each["name"] == VOLUME and "image" in each for each in volumes)


def model_volume(plan: InstallPlan) -> dict[str, Any] | None:
    """Return the pickers' volume at /models, or None."""
    if plan.tokenizers_claim:
        source: dict[str, Any] = {"persistentVolumeClaim": {"claimName": plan.tokenizers_claim, "readOnly": True}}
    elif plan.model_cache_claim:
        source = {"persistentVolumeClaim": {"claimName": plan.model_cache_claim}}
    elif plan.tokenizers_image:
        source = {"image": {"reference": plan.tokenizers_image, "pullPolicy": "IfNotPresent"}}
    elif plan.fetch_models:
        source = {"emptyDir": {"sizeLimit": CACHE_SIZE}}
    else:
        return None
    return {"name": VOLUME, **source}


def token_volumes(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return the volume with the hub's token, which exposes no other key of the Secret."""
    if not plan.hub_token_secret:
        return []
    items = [{"key": TOKEN_KEY, "path": TOKEN_KEY}]
    secret = {"secretName": plan.hub_token_secret, "items": items, "defaultMode": 0o440, "optional": True}
    return [{"name": TOKEN_VOLUME, "secret": secret}]


def fetching_containers(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return the init container that fetches the models with the image's `hf`, if any are wanted.

    It always succeeds: if the hub is down, the picker asks the pods and reports that.
    """
    if not plan.fetch_models:
        return []
    environment: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in HF_SETTINGS.items()]
    if plan.hub_endpoint:
        environment.append({"name": "HF_ENDPOINT", "value": plan.hub_endpoint})
    mounts: list[dict[str, Any]] = [TMP_MOUNT, {"name": VOLUME, "mountPath": MODELS}]
    if plan.hub_token_secret:
        environment.append({"name": "HF_TOKEN_PATH", "value": f"{TOKEN_FOLDER}/{TOKEN_KEY}"})
        mounts.append({"name": TOKEN_VOLUME, "mountPath": TOKEN_FOLDER, "readOnly": True})
    is_behind_proxy = plan.membership is MeshMembership.SIDECAR and plan.run_as_user
    return [
        {
            "name": "fetch-models",
            **image_of(plan),
            "command": ["sh", "-c", FETCH, "fetch-models"],
            "args": [MODELS, ",".join(plan.fetch_models), "/dev/termination-log"],
            "env": environment,
            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
            "securityContext": LOCKED_DOWN | ({"runAsUser": PROXY_USER} if is_behind_proxy else {}),
            "volumeMounts": mounts,
        }
    ]


def check_models(texts: Iterable[str]) -> None:
    """Raise ConfigError for a malformed model, or two models with the same folder."""
    names = [_folder_of(text) for text in texts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice!r} is given twice: a name has one folder")


def _folder_of(text: str) -> str:
    name, separator, source = text.rpartition("=")
    repository, at, revision = source.partition("@")
    served = name if separator else repository
    if _REPOSITORY.fullmatch(repository) is None:
        raise ConfigError(f"{text!r}: {repository!r} is no model of a hub; write {WRITTEN}, such as org/model@v1")
    if folder_parts(served) is None:
        raise ConfigError(f"{text!r}: {served!r} cannot be a folder's name; write {WRITTEN}, NAME as the pods serve it")
    if at and (_REVISION.fullmatch(revision) is None or ".." in revision):
        raise ConfigError(f"{text!r}: {revision!r} is no branch, tag or commit; write {WRITTEN}")
    return served


def check_endpoint(url: str) -> None:
    """Raise ConfigError if it is no http(s) URL or holds credentials."""
    if "@" in url or "?" in url or "#" in url:
        raise ConfigError(
            "--hub-endpoint: a user, a password or a token does not belong into an address that everybody may read"
        )
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or any(not 32 < ord(each) < 127 for each in url):
        raise ConfigError(f"--hub-endpoint {url[:200]!r}: must be https://HOST or http://HOST")


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeFacts:
    """The facts about the volume."""

    keeps_image: bool = True  # whether the API server supports image volumes
    claim: Document | None = None
    claim_is_missing: bool = False
    nodes: int | None = None  # schedulable nodes; None if unreadable
    unread: Sequence[str] = ()  # reasons for missing parts


def read_volume(cluster: Cluster, plan: InstallPlan) -> VolumeFacts:
    """Read the facts for `judge_volume`; most plans need none."""
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
    """Return refusals and warnings, each with a fix."""
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
    said = ", ".join(modes)
    if MANY_READERS in modes:
        if plan.fetch_models and ONE_NODE not in modes:
            yield f"it is {said}, and --fetch-model writes into it: {_instead(plan)}"
    elif ONE_NODE not in modes:
        yield f"it is {said}: one pod alone can have it, also while a picker is replaced: {_instead(plan)}"


def _one_node(plan: InstallPlan, modes: Sequence[str], nodes: int | None) -> Iterator[str]:
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
    """Return the access modes of the bound volume, or else the requested ones."""
    if claim is None:
        return ()
    status, spec = claim.get("status") or {}, claim.get("spec") or {}
    return tuple(status.get("accessModes") or spec.get("accessModes") or ())


def _keeps_image(cluster: Cluster, plan: InstallPlan) -> bool:
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
        return True  # no right to read namespaces: assume it exists


def _nodes(cluster: Cluster) -> int:
    return sum(
        not (node.get("spec") or {}).get("unschedulable")
        and not any(taint.get("effect") in KEEPS_PODS_AWAY for taint in (node.get("spec") or {}).get("taints") or ())
        for node in cluster.labelled(NODE, {})
    )
