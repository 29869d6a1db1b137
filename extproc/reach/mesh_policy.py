"""Use case: documents -> each pool's configuration, and each policy's status.

It does no I/O. An invalid document or a contradictory merge never replaces the last valid one: that stays in force, and
the status says so.

Labels (llm-d's and our own) give pods roles and cordons; the policy's selectors override labels, and flags both.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from extproc.pods.endpoint import Role
from extproc.policy.disaggregation import Disaggregation
from extproc.policy.inference_extension import ModelRewrite, Objective, read_model_rewrite, read_objective
from extproc.policy.inference_policy import KIND, InferencePolicy, parse_inference_policy
from extproc.policy.merge import Layer, Level
from extproc.policy.model_tokens import ModelTokens, found_wrong
from extproc.policy.values import FAIL_CLOSE, PoolConfig
from extproc.reach.coverage import UNCOVERED, Coverage, LayerBook, Reach, endpoint_picker_of, reach_of
from extproc.reach.explanation import (
    PolicyTargetError,
    explain_pool,
    explain_problems,
    explain_status,
    targeted_pools,
)
from extproc.reach.findings import FindingsBook, StatusBook, refusals
from extproc.reach.hosts import HostBook, SettledHosts
from extproc.reach.intake import Intake
from extproc.reach.outcomes import OBJECTIVE, REWRITE, SETTINGS, Extensions, Outcome, OutcomeBook, PoolLayer
from extproc.reach.status import Findings, PolicyStatus, Standing, hosts_in
from kvmesh.documents.documents import Document, DocumentProblem, Snapshot
from kvmesh.documents.pool_resolver import PoolResolver
from kvmesh.documents.pools import Pool, PoolEndpoint, ResolvedPools

__all__ = ["ROOT_NAMESPACE", "MeshPolicy", "MeshState", "PolicyTargetError"]

ROOT_NAMESPACE = "istio-system"
NO_TOKENS: Mapping[str, Sequence[ModelTokens]] = {}
ROUTING_KINDS = ("Gateway", "HTTPRoute", "InferencePool", "Service")
# the first label on the pod counts
ROLE_LABELS = ("kvmesh.io/role", "llm-d.ai/role", "inference.networking.k8s.io/role")
_ROLES: Mapping[str, Role] = {
    "prefill": Role.PREFILL,
    "encode-prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "both": Role.BOTH,
    "prefill-decode": Role.BOTH,
    "encode-prefill-decode": Role.BOTH,
}
ENCODE = "encode"  # llm-d's pods that only encode images: they answer no request, so this label cordons them


def roles_of(
    endpoints: Iterable[PoolEndpoint], policy: Disaggregation, *, flags: Mapping[str, Role]
) -> Mapping[str, Role]:
    """Return endpoint -> role, without the endpoints with the role both."""
    roles: dict[str, Role] = {}
    for endpoint in endpoints:
        role = flags.get(endpoint.address) or _selected(endpoint, policy) or _ROLES.get(role_label(endpoint)[1])
        if role is not None and role is not Role.BOTH:
            roles[endpoint.address] = role
    return roles


def cordoned_of(endpoints: Iterable[PoolEndpoint], *, flags: frozenset[str]) -> frozenset[str]:
    """Return the endpoints that get no new requests."""
    return flags | {
        endpoint.address for endpoint in endpoints if endpoint.cordoned or role_label(endpoint)[1] == ENCODE
    }


def pair_labels_of(endpoints: Iterable[PoolEndpoint], policy: Disaggregation) -> Mapping[str, Mapping[str, str]]:
    """Return endpoint -> its pod's labels for pairing prefill with decode pods; empty if the policy uses none."""
    names = {*policy.same_labels, *(link.label for link in policy.links)}
    if not names or not policy.enabled:
        return {}
    return {
        endpoint.address: {name: value for name, value in endpoint.labels.items() if name in names}
        for endpoint in endpoints
    }


def role_label(endpoint: PoolEndpoint) -> tuple[str, str]:
    """Return the pod's role label and its value, or two "" without one."""
    for name in ROLE_LABELS:
        if (value := endpoint.labels.get(name)) is not None:
            return name, value
    return "", ""


def role_problems(pool: Pool, policy: Disaggregation, roles: Mapping[str, Role]) -> Iterator[DocumentProblem]:
    """Yield the problems with the roles of a pool's pods; `roles` are from `roles_of`."""
    where = f"{pool.kind} {pool.name}"
    for endpoint in pool.endpoints:
        name, value = role_label(endpoint)
        if name and value != ENCODE and value not in _ROLES:
            known = ", ".join((*_ROLES, ENCODE))
            words = f"pod {endpoint.pod} has {name}={value!r}, which is none of {known}: it prefills and decodes"
            yield DocumentProblem(reason="role-unknown", where=where, words=words)
            break  # other pods usually have it from the same template
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Everything derived from policies, routes and the set of pools; it does not depend on pods."""

    reach: Reach
    coverages: Mapping[str, Coverage] = field(default_factory=dict)  # by policy
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)  # by pool
    hosts: SettledHosts = field(default_factory=lambda: SettledHosts(by_pool={}, lost=()))
    host_problems: tuple[DocumentProblem, ...] = ()
    findings: Mapping[str, Findings] = field(default_factory=dict)  # by policy


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshState:
    """Everything derived from the last snapshot."""

    configs: Mapping[str, PoolConfig] = field(default_factory=dict)  # by pool; an unchanged one stays the same object
    statuses: Mapping[str, PolicyStatus] = field(default_factory=dict)  # by policy, "namespace/name"
    unwritten: tuple[PolicyStatus, ...] = ()  # statuses that differ from their document's
    problems: tuple[DocumentProblem, ...] = ()  # everything to log, including refused policies
    resolved: ResolvedPools = field(default_factory=lambda: ResolvedPools(pools={}))
    settled: Settled = field(default_factory=lambda: Settled(reach=reach_of({}, {})), repr=False)  # for `explain`


@dataclass(slots=True, kw_only=True)
class MeshPolicy:
    """The policies in force. One per picker; not thread-safe."""

    root_namespace: str = ROOT_NAMESPACE
    installation: str = "default"  # the namespace of the pickers; it marks our status entries
    # the picker's own flags as `fields` of an InferencePolicy: weaker than all policies
    settings: Mapping[str, Any] = field(default_factory=dict)
    # flags about single endpoints, which policies do not name
    cordoned: frozenset[str] = frozenset()
    roles: Mapping[str, Role] = field(default_factory=dict)
    state: MeshState = field(default_factory=MeshState)
    book: OutcomeBook = field(default_factory=OutcomeBook)
    _resolver: PoolResolver = field(default_factory=PoolResolver)
    _policies: Intake[InferencePolicy] = field(default_factory=lambda: Intake(parse_inference_policy))
    _objectives: Intake[Objective] = field(default_factory=lambda: Intake(read_objective))
    _rewrites: Intake[ModelRewrite] = field(default_factory=lambda: Intake(read_model_rewrite))
    _policies_seen: tuple[Document, ...] = ()
    _tokens_seen: Mapping[str, Sequence[ModelTokens]] = field(default_factory=dict)
    _reach: Reach = field(default_factory=lambda: reach_of({}, {}))
    _surroundings: object = None  # the inputs of `_reach`
    _layers: LayerBook = field(init=False)
    _hosts: HostBook = field(default_factory=HostBook)
    _found: FindingsBook = field(default_factory=FindingsBook)
    _settled: Settled | None = None  # None after an exception in between: the next snapshot starts over
    _statuses: StatusBook = field(init=False)
    _made: dict[str, tuple[tuple[Pool, Outcome], PoolConfig]] = field(default_factory=dict)  # pool -> inputs, result

    def __post_init__(self) -> None:
        self._layers = LayerBook(self.root_namespace)
        self._statuses = StatusBook(installation=self.installation)

    def update(
        self,
        snapshot: Snapshot,
        *,
        now: datetime,
        tokens: Mapping[str, Sequence[ModelTokens]] = NO_TOKENS,
    ) -> MeshState:
        """Take a snapshot and return the new state; its errors are in the state, never raised.

        `tokens` has, by pool, the token sources that its requests have shown.
        """
        documents = snapshot.documents
        resolved = self._resolver.resolve(documents)
        policies = documents.get(KIND, ())
        taken = [
            self._policies.take(policies),
            self._objectives.take(documents.get(OBJECTIVE, ())),
            self._rewrites.take(documents.get(REWRITE, ())),
            self._look_around(documents, resolved.pools),
        ]
        if any(taken) or (policies is not self._policies_seen and not self._hosts.agrees(self._written_hosts())):
            self._settled = None
        settled = self._settled
        if settled is None or policies is not self._policies_seen or tokens != self._tokens_seen:  # else only pods
            settled = settled or self._settle(resolved.pools)
            wrong = {source: found_wrong(tokens, each.pools) for source, each in settled.coverages.items()}
            self._statuses.update(self._policies.held, settled.findings, tokens=wrong, now=now)
            self._policies_seen, self._settled, self._tokens_seen = policies, settled, tokens
        self._made = {name: made for name, made in self._made.items() if name in resolved.pools}
        statuses = self._statuses.statuses()
        configs = {name: self._config(pool, settled) for name, pool in resolved.pools.items()}
        self.state = MeshState(
            configs=configs,
            statuses=statuses,
            unwritten=self._statuses.unwritten(),
            problems=(
                *snapshot.problems,
                *resolved.problems,
                *settled.host_problems,
                *_role_problems(resolved.pools, configs),
                *self._extension_problems(settled.outcomes.values()),
                *refusals(statuses.values()),
            ),
            resolved=resolved,
            settled=settled,
        )
        return self.state

    def explain(self, target: str | None, *, tokens: Mapping[str, Sequence[ModelTokens]] = NO_TOKENS) -> dict[str, Any]:
        """Explain the pools of a target (see `targeted_pools`) as JSON-ready values; without a target, an overview.

        `tokens` has the token sources by pool; for other pools only the policies' settings are shown. Raise
        PolicyTargetError for an unknown target. Reads only `state`, so that another thread may update.
        """
        return explain_state(self.state, target, root_namespace=self.root_namespace, tokens=tokens)

    # --- the policies in force ---------------------------------------------------------------------------------------

    def _look_around(self, documents: Mapping[str, tuple[Document, ...]], pools: Mapping[str, Pool]) -> bool:
        """Follow routes and gateways to the pools; tell whether anything except pods has changed."""
        routing = [documents.get(kind, ()) for kind in ROUTING_KINDS]
        surroundings = (routing, {name: pool.kind for name, pool in pools.items()})
        if self._surroundings == surroundings:
            return False
        self._reach = reach_of(documents, pools)
        self._surroundings = surroundings
        return True

    def _settle(self, pools: Mapping[str, Pool]) -> Settled:
        held = self._policies.held
        coverages = self._layers.cover(held, self._reach)
        layers = self._layers.layers(held, pools=pools, settings=self._settings_layers())
        objectives = self._objectives.good_by(lambda each: each.pools)
        rewrites = self._rewrites.good_by(lambda each: (each.pool,))
        outcomes = self.book.settle(
            {
                pool: (layers[pool], Extensions(objectives=objectives.get(pool, ()), rewrites=rewrites.get(pool, ())))
                for pool in pools
            }
        )
        hosts, host_problems = self._hosts.settle(pools.values(), outcomes, self._reach, self._written_hosts())
        return Settled(
            reach=self._reach,
            coverages=coverages,
            outcomes=outcomes,
            hosts=hosts,
            host_problems=host_problems,
            findings=self._found.settle(held, coverages, outcomes, hosts.lost, self._hosts.standings),
        )

    def _written_hosts(self) -> Mapping[str, Mapping[str, Standing]]:
        return {source: hosts_in(each.document, self.installation) for source, each in self._policies.held.items()}

    def _settings_layers(self) -> tuple[PoolLayer, ...]:
        if not self.settings:
            return ()
        layer = Layer(source=SETTINGS, level=Level.SETTINGS, created_at=None, fields=self.settings)
        return (PoolLayer(layer=layer, version=0, generation=0),)

    def _config(self, pool: Pool, settled: Settled) -> PoolConfig:
        outcome, hosts = settled.outcomes[pool.name], settled.hosts.by_pool.get(pool.name, frozenset())
        made_of, known = self._made.get(pool.name, (None, None))
        picker = endpoint_picker_of(pool, settled.reach)
        settled_else = (hosts, picker)
        if known is not None and made_of == (pool, outcome) and (known.hosts, known.endpoint_picker) == settled_else:
            return known
        policy = outcome.policy
        roles = roles_of(pool.endpoints, policy.disaggregation, flags=self.roles)
        cordoned = cordoned_of(pool.endpoints, flags=self.cordoned)
        labels = pair_labels_of(pool.endpoints, policy.disaggregation)
        if roles or cordoned or labels:
            policy = replace(policy, cordoned=cordoned, roles=roles, pair_labels=labels)
        config = PoolConfig(
            name=pool.name,
            endpoints=pool.endpoints,
            policy=policy,
            models=outcome.models,
            hosts=hosts,
            endpoint_picker=picker,
            sample_share=outcome.policy.observability.sample_share,
            failure_mode=outcome.merged.fields.get("failureMode", FAIL_CLOSE),
            model=pool.model,
            origins=outcome.origins,
        )
        if known == config:
            config = known
        self._made[pool.name] = ((pool, outcome), config)
        return config

    def _extension_problems(self, outcomes: Iterable[Outcome]) -> Iterator[DocumentProblem]:
        """Yield the problems of documents without a status of ours."""
        for kind, errors in ((OBJECTIVE, self._objectives.errors()), (REWRITE, self._rewrites.errors())):
            for source, message in errors:
                yield DocumentProblem(reason="document-not-valid", where=f"{kind} {source}", words=message)
        for source, first, second in self._objectives.doubles():
            message = f"is there in {first} and in {second}: the older one counts, or the first; delete one"
            yield DocumentProblem(reason="document-twice", where=f"{OBJECTIVE} {source}", words=message)
        for source, first, second in self._rewrites.doubles():
            message = f"is there in {first} and in {second}: both count, the older one's rules before; delete one"
            yield DocumentProblem(reason="document-twice", where=f"{REWRITE} {source}", words=message)
        for outcome in outcomes:
            for fault in outcome.faults:
                if fault.source.startswith(REWRITE):
                    message = f"not in force at {fault.pool}: {fault.message}"
                    yield DocumentProblem(reason="model-rewrite-not-valid", where=fault.source, words=message)


def _role_problems(pools: Mapping[str, Pool], configs: Mapping[str, PoolConfig]) -> Iterator[DocumentProblem]:
    for name, pool in pools.items():
        policy = configs[name].policy
        yield from role_problems(pool, policy.disaggregation, policy.roles)


def explain_state(
    state: MeshState,
    target: str | None,
    *,
    root_namespace: str,
    tokens: Mapping[str, Sequence[ModelTokens]] = NO_TOKENS,
) -> dict[str, Any]:
    """Return the JSON of `MeshPolicy.explain`."""

    def explained(name: str) -> dict[str, Any]:
        return explain_pool(
            state.configs[name],
            state.settled.outcomes[name],
            state.statuses,
            kind=state.resolved.pools[name].kind,
            tokens=tokens.get(name),
        )

    if target is None:
        policies = [
            explain_status(status, covers=list(state.settled.coverages.get(source, UNCOVERED).pools))
            for source, status in state.statuses.items()
        ]
        pools = [explained(name) for name in state.configs]
        return {"target": None, "pools": pools, "policies": policies, "problems": explain_problems(state.problems)}
    covers = {source: coverage.pools for source, coverage in state.settled.coverages.items()}
    names = targeted_pools(target, state.settled.reach, covers)
    near = {root_namespace, *(name.partition("/")[0] for name in names)}
    problems = explain_problems(state.problems, namespaces=near)
    return {"target": target, "pools": [explained(name) for name in names], "problems": problems}
