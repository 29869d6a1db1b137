"""Use case: documents of the mesh (Kubernetes or a folder) -> pools and policies in force, within a second of a change.

What the documents mean is `mesh_policy`'s matter, what follows for running requests `pools`'; here is only the way
between them. The last good state stays whatever happens to the source.
"""

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from extproc.errors import ConfigError, first_error
from extproc.policy.inference_policy import GROUP, KIND
from extproc.policy.mesh_policy import MeshPolicy, MeshState
from extproc.policy.model_tokens import ModelTokens, as_told, found_wrong
from extproc.policy.pool_config import PoolConfig
from extproc.policy.scale_problems import ScaleProblem, as_said, problems_of
from extproc.pools.scale_acts import act_in_cluster
from extproc.scaling.acting import ActOutcome, ScaleWish
from extproc.settings.config import PickerSettings
from kvmesh.documents.documents import (
    ClusterAccess,
    DocumentKey,
    DocumentProblem,
    DocumentSource,
    KubernetesConfigError,
    Snapshot,
    StatusUpdate,
)
from kvmesh.documents.sources import FolderSource, kubernetes_source, status_writer

log = logging.getLogger(__name__)

TOKENS_SECONDS = 5.0  # between two looks: as often as the pools judge


class ServedPools(Protocol):
    """See `pools.Pools`."""

    async def apply(self, configs: Mapping[str, PoolConfig]) -> None:
        """Serve these pools so from now on."""

    def model_tokens(self) -> Mapping[str, Sequence[ModelTokens]]:
        """Return by pool where its models' tokens come from, as their requests have shown."""

    def wrong_acts(self) -> Mapping[str, Sequence[ScaleProblem]]:
        """Return by pool which Deployments are not scaled as its policies want, and why."""

    def scale_wishes(self) -> Sequence[ScaleWish]:
        """Return what the pools want written into the scale of Deployments."""

    def note_acts(self, outcomes: Sequence[ActOutcome]) -> None:
        """Take what has come of all wishes."""


class MeshFollower:
    """Takes snapshots in, newest only, and has them applied."""

    def __init__(
        self,
        policy: MeshPolicy,
        pools: ServedPools,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._policy = policy
        self.pools = pools
        self.told: Callable[[MeshState], None] | None = None  # hears of each new state, once it is in force
        self._clock = clock
        self._newest: Snapshot | None = None
        self._last: Snapshot | None = None  # that was applied
        self._wrong = frozenset[tuple[str, str, str]]()  # tokens and scales, as the statuses say it
        self._changed = asyncio.Event()
        self._busy = asyncio.Lock()  # MeshPolicy is not for several threads
        self._said: frozenset[DocumentProblem] = frozenset()
        self.state = MeshState()
        self.applied = 0  # snapshots

    def take(self, snapshot: Snapshot) -> None:
        """Have this applied soon, in place of what was still to be."""
        self._newest = snapshot
        self._changed.set()

    async def run(self, source: DocumentSource) -> None:
        """Follow the source until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(source.run(self.take), name="documents")
            tasks.create_task(self._apply_each(), name="apply documents")
            tasks.create_task(self._look_at_tokens(), name="look at tokens")

    async def explain(self, target: str | None) -> dict[str, Any]:
        """Return who says what for the pools of a target. Raise PolicyTargetError."""
        async with self._busy:
            # of hundreds of pools: a few tenths of a second, in which requests are picked
            return await asyncio.to_thread(partial(self._policy.explain, target, tokens=self.pools.model_tokens()))

    async def _look_at_tokens(self) -> None:
        """Have the statuses say so when a model has no exact tokens, a Deployment is not scaled, or is mended."""
        while True:
            await asyncio.sleep(TOKENS_SECONDS)
            if self._last is not None and _wrong(self.pools) != self._wrong:
                self._newest = self._newest or self._last
                self._changed.set()

    async def _apply_each(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            snapshot, self._newest = self._newest, None
            if snapshot is not None and snapshot.synced:
                await self._apply(snapshot)

    async def _apply(self, snapshot: Snapshot) -> None:
        tokens, unscaled = self.pools.model_tokens(), self.pools.wrong_acts()
        self._wrong = _wrong(self.pools)
        try:
            async with self._busy:
                # a thousand policies take a moment, in which requests are picked
                known = partial(self._policy.update, snapshot, tokens=tokens, unscaled=unscaled)
                state = await asyncio.to_thread(known, now=self._clock())
        except Exception:  # a defect that one document meets: what was good before stays
            log.exception("documents could not be taken in; pools and policies stay as they were")
            return
        self.state, self._last = state, snapshot
        self._say(frozenset(state.problems) - frozenset(snapshot.problems))  # its source has said these itself
        await self.pools.apply(state.configs)
        self.applied += 1
        if self.told is not None:
            self.told(state)

    def _say(self, problems: frozenset[DocumentProblem]) -> None:
        """Log each problem when it appears, and that it is gone."""
        for problem in sorted(problems - self._said):
            log.error("%s: %s", problem.where, problem.words, extra={"reason": problem.reason})
        for problem in sorted(self._said - problems):
            log.info("%s: mended (%s)", problem.where, problem.reason)
        self._said = problems


def _wrong(pools: ServedPools) -> frozenset[tuple[str, str, str]]:
    tokens, unscaled = pools.model_tokens(), pools.wrong_acts()
    return as_told(found_wrong(tokens, tokens)) | as_said(problems_of(unscaled, unscaled))


def mesh_policy(settings: PickerSettings) -> MeshPolicy:
    """Return the policies' keeper; what the picker's flags say is below all of them."""
    return MeshPolicy(
        root_namespace=settings.root_namespace,
        installation=own_namespace(),
        settings=settings.policy_fields,
        cordoned=settings.policy.cordoned,
        roles=settings.policy.roles,
    )


SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


async def follow_source(
    settings: PickerSettings, follower: MeshFollower, *, source: DocumentSource | None = None
) -> None:
    """Follow the documents until cancelled; `source` goes before what the settings say.

    Raise ConfigError where no cluster is configured.
    """
    if source is not None:
        await follower.run(source)
    elif settings.policies_folder is not None:
        await follower.run(FolderSource(settings.policies_folder))
    else:
        try:
            await _follow_cluster(settings, follower)
        except* KubernetesConfigError as errors:
            raise ConfigError(f"--kubernetes: {first_error(errors)}") from errors


async def _follow_cluster(settings: PickerSettings, follower: MeshFollower) -> None:
    """Follow the cluster, and write the status while elected."""
    access = ClusterAccess(program="kvmesh-picker")
    writer = status_writer(access, lease_namespace=own_namespace(), identity=own_name())
    follower.told = lambda state: writer.want(status_updates(state))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run(), name="write status")
        tasks.create_task(act_in_cluster(follower.pools, access, leads=lambda: writer.leads), name="scale Deployments")
        documents = kubernetes_source(access, namespaces=namespaces_read(settings))
        tasks.create_task(follower.run(documents), name="follow documents")


def status_updates(state: MeshState) -> list[StatusUpdate]:
    """Return what the policies' documents do not say yet."""
    return [
        StatusUpdate(
            key=DocumentKey(group=GROUP, kind=KIND, namespace=status.namespace, name=status.name),
            uid=status.uid,
            generation=status.observed_generation,
            entry=status.entry(),
        )
        for status in state.unwritten
    ]


def namespaces_read(settings: PickerSettings) -> list[str]:
    """Return the namespaces to be read, none for all; the one with the mesh's policies is always among them."""
    return sorted(settings.namespaces | {settings.root_namespace}) if settings.namespaces else []


def own_namespace() -> str:
    """Return the namespace that this process runs in: where its lease is."""
    told = os.environ.get("POD_NAMESPACE")
    if told:
        return told
    try:
        return SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"


def own_name() -> str:
    """Return a name for this process that no other one has."""
    return f"{os.environ.get('POD_NAME') or socket.gethostname()}-{secrets.token_hex(4)}"
