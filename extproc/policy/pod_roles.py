"""What a pod is for, and whether it is closed: by its labels, by the policy's selectors, by flags. Pure.

Flags go before selectors, and selectors before labels. The labels are llm-d's and our own.
"""

from collections.abc import Iterable, Iterator, Mapping

from extproc.pods.endpoint import Role
from extproc.policy.disaggregation import Disaggregation
from kvmesh.documents.documents import DocumentProblem
from kvmesh.documents.pools import Pool, PoolEndpoint

# the first one that a pod has counts
ROLE_LABELS = ("kvmesh.io/role", "llm-d.ai/role", "inference.networking.k8s.io/role")
_ROLES: Mapping[str, Role] = {
    "prefill": Role.PREFILL,
    "encode-prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "both": Role.BOTH,
    "prefill-decode": Role.BOTH,
    "encode-prefill-decode": Role.BOTH,
}
ENCODE = "encode"  # llm-d's pods that only encode pictures: they answer nobody, and their label closes them


def roles_of(
    endpoints: Iterable[PoolEndpoint], policy: Disaggregation, *, flags: Mapping[str, Role]
) -> Mapping[str, Role]:
    """Return endpoint -> role of those that do not do both."""
    roles: dict[str, Role] = {}
    for endpoint in endpoints:
        role = flags.get(endpoint.address) or _selected(endpoint, policy) or _labelled(endpoint)
        if role is not None and role is not Role.BOTH:
            roles[endpoint.address] = role
    return roles


def cordoned_of(endpoints: Iterable[PoolEndpoint], *, flags: frozenset[str]) -> frozenset[str]:
    """Return the endpoints that get nothing new."""
    return flags | {
        endpoint.address for endpoint in endpoints if endpoint.cordoned or role_label(endpoint)[1] == ENCODE
    }


def pair_labels_of(endpoints: Iterable[PoolEndpoint], policy: Disaggregation) -> Mapping[str, Mapping[str, str]]:
    """Return endpoint -> those of its pod's labels by which pairs of pods are made; empty where the policy has none."""
    names = {*policy.same_labels, *(link.label for link in policy.links)}
    if not names or not policy.enabled:
        return {}
    return {
        endpoint.address: {name: value for name, value in endpoint.labels.items() if name in names}
        for endpoint in endpoints
    }


def role_label(endpoint: PoolEndpoint) -> tuple[str, str]:
    """Return the label that says what the pod is for, and its value; both "" where there is none."""
    for name in ROLE_LABELS:
        if (value := endpoint.labels.get(name)) is not None:
            return name, value
    return "", ""


def role_problems(pool: Pool, policy: Disaggregation, roles: Mapping[str, Role]) -> Iterator[DocumentProblem]:
    """Yield what is wrong with the roles of a pool's pods; `roles` as `roles_of` returns them."""
    where = f"{pool.kind} {pool.name}"
    for endpoint in pool.endpoints:
        name, value = role_label(endpoint)
        if name and value != ENCODE and value not in _ROLES:
            known = ", ".join((*_ROLES, ENCODE))
            words = f"pod {endpoint.pod} has {name}={value!r}, which is none of {known}: it prefills and decodes"
            yield DocumentProblem(reason="role-unknown", where=where, words=words)
            break  # the others have it from the same template, mostly
    prefill = sum(role is Role.PREFILL for role in roles.values())
    if prefill and prefill == len(pool.endpoints):
        words = "every pod only prefills, so that nobody answers: give some pods the role decode or both"
        yield DocumentProblem(reason="no-decode-pods", where=where, words=words)
    elif prefill and not policy.enabled:
        words = f"{prefill} pods only prefill and get nothing: set spec.disaggregation.enabled in a policy of the pool"
        yield DocumentProblem(reason="prefill-pods-idle", where=where, words=words)


def _selected(endpoint: PoolEndpoint, policy: Disaggregation) -> Role | None:
    for selector, role in ((policy.prefill_selector, Role.PREFILL), (policy.decode_selector, Role.DECODE)):
        if selector and selector.items() <= endpoint.labels.items():
            return role
    return None


def _labelled(endpoint: PoolEndpoint) -> Role | None:
    return _ROLES.get(role_label(endpoint)[1])
