"""Asks a pod of each pool, through the API server, whether it tells a text's tokens: what exact routing rests on.

`kvmesh install` says the answer at its end. Under STRICT mTLS, or without the right to use pods' proxies, no pod can be
asked from here; then that is said, and where to look instead.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from extproc.install.availability import is_going
from extproc.install.cluster import InstallError
from extproc.install.objects import POD, Document, Kind, kind_of
from extproc.install.plan import InstallPlan, PoolTarget
from kvmesh.pods.pod_access import UNAUTHORIZED

INFERENCE_POOL = Kind(
    name="InferencePool", group="inference.networking.k8s.io", version="v1", plural="inferencepools", optional=True
)
QUESTION = json.dumps({"prompt": "Which tokens are these?"}).encode()
PATHS = ("/tokenize", "/v1/completions/render")  # the first is what every vLLM has
LOOK_LATER = "`kvmesh policy explain {pool}` says what the pickers find, and `kvmesh doctor` (render) asks every pod"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAnswer:
    """What a pod answered; `problem`: why it could not be asked, "" where it could."""

    status: int = 0
    body: bytes = b""
    problem: str = ""


class PodsOfCluster(Protocol):
    """See `cluster.Cluster`; a cluster whose API server passes questions on to pods."""

    def get(self, kind: Kind, name: str, namespace: str | None) -> Document | None:
        """Return an object, or None."""

    def labelled(self, kind: Kind, labels: Mapping[str, str], namespace: str | None = None) -> Sequence[Document]:
        """Return all objects with these labels."""

    def ask_pod(self, namespace: str, name: str, port: int, path: str, *, post: bytes) -> PodAnswer:
        """POST JSON to a pod, with a deadline."""


def token_lines(cluster: PodsOfCluster, plan: InstallPlan) -> Iterator[str]:
    """Yield a line for each pool: whether its pods tell tokens, and what to do where they do not. Raise nothing."""
    claim = plan.tokenizers_claim or plan.model_cache_claim
    for pool in plan.pools:
        verdict = _verdict(cluster, pool, claim=claim, shows_key=plan.pod_key_secret is not None)
        yield f"tokens of pool {pool.identity}: {verdict}"


def _verdict(cluster: PodsOfCluster, pool: PoolTarget, *, claim: str | None, shows_key: bool) -> str:
    look_later = LOOK_LATER.format(pool=pool.identity)
    try:
        pods = _ready_pods(cluster, pool)
    except InstallError as error:
        return f"UNVERIFIED, its pods cannot be looked for: {error}. {look_later}"
    if not pods:
        return f"UNVERIFIED, it has no pod that is ready yet. {look_later}"
    name = pods[0]["metadata"]["name"]
    refusals = []
    wants_key = False
    for path in PATHS:
        answer = cluster.ask_pod(pool.namespace, name, pool.api_port, path, post=QUESTION)
        if answer.problem:
            return f"UNVERIFIED, pod {name} cannot be asked from here: {answer.problem}. {look_later}"
        if answer.status == 200 and _has_tokens(answer.body):
            return f"pod {name} tells them at {path}"
        if answer.status == UNAUTHORIZED:
            wants_key = True  # which the API server does not pass on
        refusals.append(f"{path} answers {answer.status}{', without tokens' if answer.status == 200 else ''}")
    if wants_key:
        then = "the pickers show theirs" if shows_key else "give the pickers one by --pod-key-secret"
        return f"UNVERIFIED, pod {name} wants a key, which is not sent through the API server: {then}. {look_later}"
    routed = "models without a folder in that claim are routed on TEXT ONLY" if claim else "it is routed on TEXT ONLY"
    folders = f"put their folders into claim {claim}" if claim else "give folders by --tokenizers-claim"
    return (
        f"pod {name} tells none ({'; '.join(refusals)}): {routed}, which only predicts. Let its pods answer POST "
        f"/tokenize or, with --enable-scale-out, /render; or {folders}"
    )


def _ready_pods(cluster: PodsOfCluster, pool: PoolTarget) -> list[Document]:
    selector = pool.selector or _selector(cluster, pool)
    pods = cluster.labelled(POD, selector, pool.namespace) if selector else ()
    return [each for each in pods if _is_ready(each) and not is_going(each)]


def _selector(cluster: PodsOfCluster, pool: PoolTarget) -> Mapping[str, str]:
    service = cluster.get(kind_of("Service"), pool.name, pool.namespace)
    if service is not None:
        return (service.get("spec") or {}).get("selector") or {}
    found = cluster.get(INFERENCE_POOL, pool.name, pool.namespace) or {}
    return ((found.get("spec") or {}).get("selector") or {}).get("matchLabels") or {}


def _is_ready(pod: Document) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def _has_tokens(body: bytes) -> bool:
    try:
        answer = json.loads(body)
    except ValueError:
        return False
    if isinstance(answer, list):  # a rendered completion may have several prompts
        answer = answer[0] if answer else None
    tokens = (answer.get("tokens") or answer.get("token_ids")) if isinstance(answer, dict) else None
    return isinstance(tokens, list) and bool(tokens)
