"""Use case: documents -> what each pool is to be served with, and what each policy's status has to say.

It does no I/O. A bad document, or a merge that contradicts itself, never
replaces what was good before: that stays in force and the status says so.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from extproc.pods.endpoint import Role
from extproc.policy.coverage import UNCOVERED, Coverage, LayerBook, Reach, endpoint_picker_of, reach_of
from extproc.policy.explanation import (
    PolicyTargetError,
    explain_pool,
    explain_problems,
    explain_status,
    targeted_pools,
)
from extproc.policy.findings import FindingsBook, StatusBook, refusals
from extproc.policy.hosts import SettledHosts, settle_pool_hosts
from extproc.policy.inference_extension import ModelRewrite, Objective, read_model_rewrite, read_objective
from extproc.policy.inference_policy import KIND, InferencePolicy, parse_inference_policy
from extproc.policy.intake import Held, Intake
from extproc.policy.merge import Layer, Level
from extproc.policy.model_tokens import ModelTokens, found_wrong
from extproc.policy.outcomes import OBJECTIVE, REWRITE, SETTINGS, Extensions, Outcome, OutcomeBook, PoolLayer
from extproc.policy.pod_roles import cordoned_of, pair_labels_of, role_problems, roles_of
from extproc.policy.pool_config import FAIL_CLOSE, PoolConfig
from extproc.policy.scale_problems import Problems, ScaleProblem, problems_of
from extproc.policy.status import Findings, PolicyStatus
from kvmesh.documents.documents import Document, DocumentProblem, Snapshot
from kvmesh.documents.pool_resolver import PoolResolver
from kvmesh.documents.pools import Pool, ResolvedPools

__all__ = ["ROOT_NAMESPACE", "MeshPolicy", "MeshState", "PolicyTargetError"]

ROOT_NAMESPACE = "istio-system"
NO_TOKENS: Mapping[str, Sequence[ModelTokens]] = {}
NO_PROBLEMS: Mapping[str, Sequence[ScaleProblem]] = {}
ROUTING_KINDS = ("Gateway", "HTTPRoute", "InferencePool", "Service")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """All that follows from policies, routes and the set of pools; a change of pods changes nothing of it."""

    reach: Reach
    coverages: Mapping[str, Coverage] = field(default_factory=dict)  # by policy
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)  # by pool
    hosts: SettledHosts = field(default_factory=lambda: SettledHosts(by_pool={}, lost=()))
    host_problems: tuple[DocumentProblem, ...] = ()
    findings: Mapping[str, Findings] = field(default_factory=dict)  # by policy


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshState:
    """All that follows from the last snapshot."""

    configs: Mapping[str, PoolConfig] = field(default_factory=dict)  # by pool; the same object while nothing changes
    statuses: Mapping[str, PolicyStatus] = field(default_factory=dict)  # by policy, "namespace/name"
    unwritten: tuple[PolicyStatus, ...] = ()  # of these the document says something else
    problems: tuple[DocumentProblem, ...] = ()  # all that a log should have: policies that are refused, too
    resolved: ResolvedPools = field(default_factory=lambda: ResolvedPools(pools={}))
    settled: Settled = field(default_factory=lambda: Settled(reach=reach_of({}, {})), repr=False)  # for `explain`


@dataclass(slots=True, kw_only=True)
class MeshPolicy:
    """Keeps what is in force. One for each picker; not for several threads at a time."""

    root_namespace: str = ROOT_NAMESPACE
    installation: str = "default"  # whose status entries are ours: the namespace of its pickers
    # what the picker's own flags say, as `fields` of an InferencePolicy: below all policies
    settings: Mapping[str, Any] = field(default_factory=dict)
    # and of single endpoints, which no policy names
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
    _unscaled_seen: Mapping[str, Sequence[ScaleProblem]] = field(default_factory=dict)
    _reach: Reach = field(default_factory=lambda: reach_of({}, {}))
    _surroundings: object = None  # what `_reach` was made of
    _layers: LayerBook = field(init=False)
    _found: FindingsBook = field(default_factory=FindingsBook)
    _settled: Settled | None = None  # None after a defect in the middle: the next snapshot starts over
    _statuses: StatusBook = field(init=False)
    _made: dict[str, tuple[tuple[Pool, Outcome], PoolConfig]] = field(default_factory=dict)  # with what it is made of

    def __post_init__(self) -> None:
        self._layers = LayerBook(self.root_namespace)
        self._statuses = StatusBook(installation=self.installation)

    def update(
        self,
        snapshot: Snapshot,
        *,
        now: datetime,
        tokens: Mapping[str, Sequence[ModelTokens]] = NO_TOKENS,
        unscaled: Mapping[str, Sequence[ScaleProblem]] = NO_PROBLEMS,
    ) -> MeshState:
        """Take a snapshot in and return the new state; what is bad in it is in the state, never raised.

        `tokens`: by pool, what its requests have shown of its models' tokens; `unscaled`: by pool, the Deployments
        that are not scaled as its policies want.
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
        if any(taken):
            self._settled = None
        settled = self._settled
        seen = (self._tokens_seen, self._unscaled_seen)
        if settled is None or policies is not self._policies_seen or (tokens, unscaled) != seen:  # else only pods
            settled = settled or self._settle(resolved.pools)
            wrong = {source: found_wrong(tokens, each.pools) for source, each in settled.coverages.items()}
            idle = {source: problems_of(unscaled, each.pools) for source, each in settled.coverages.items()}
            held = self._policies.held
            self._statuses.update(held, settled.findings, tokens=wrong, unscaled=_of_scaling(held, idle), now=now)
            self._policies_seen, self._settled = policies, settled
            self._tokens_seen, self._unscaled_seen = tokens, unscaled
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
        """Return, ready for JSON, who says what for the pools of a target: see `targeted_pools`; None: an overview.

        `tokens`: by pool, where its models get their tokens; of others only what the policies want is said. Raise
        PolicyTargetError where there is no such thing. Reads only `state`, so that another thread may update.
        """
        return explain_state(self.state, target, root_namespace=self.root_namespace, tokens=tokens)

    # --- what is in force --------------------------------------------------------------------------------------------

    def _look_around(self, documents: Mapping[str, tuple[Document, ...]], pools: Mapping[str, Pool]) -> bool:
        """Follow routes and gateways to the pools; tell whether anything but pods has changed."""
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
        objectives, rewrites = self._objectives.good_by(_pool_of), self._rewrites.good_by(_pool_of)
        outcomes = self.book.settle(
            {
                pool: (layers[pool], Extensions(objectives=objectives.get(pool, ()), rewrites=rewrites.get(pool, ())))
                for pool in pools
            }
        )
        hosts, host_problems = settle_pool_hosts(pools.values(), outcomes, self._reach)
        return Settled(
            reach=self._reach,
            coverages=coverages,
            outcomes=outcomes,
            hosts=hosts,
            host_problems=host_problems,
            findings=self._found.settle(held, coverages, outcomes, hosts.lost),
        )

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
        """Yield what is wrong with documents that have no status of ours."""
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


def _of_scaling(held: Mapping[str, Held[InferencePolicy]], problems: Mapping[str, Problems]) -> Mapping[str, Problems]:
    """Return the problems of policies that say something of autoscaling; others cannot mend them."""
    return {
        source: found
        for source, found in problems.items()
        if (good := held[source].good) is not None and "autoscale" in good.fields
    }


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


def _pool_of(value: Objective | ModelRewrite) -> str:
    return value.pool
