"""Use case: apply the mesh's documents (Kubernetes or a folder) to pools and policies within a second of a change.

`mesh_policy` interprets the documents, `pools` applies them to running requests; this module only connects the two. The
last good state stays whatever happens to the source.
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
from extproc.policy.model_tokens import ModelTokens, as_told, found_wrong
from extproc.policy.values import PoolConfig
from extproc.reach.mesh_policy import MeshPolicy, MeshState
from extproc.settings.config import PickerSettings
from extproc.translation.translated import translated_file
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

TOKENS_SECONDS = 5.0  # interval of checks, equal to that of the pools' own judgement


class ServedPools(Protocol):
    """See `pools.Pools`."""

    async def apply(self, configs: Mapping[str, PoolConfig]) -> None:
        """Serve these pools with these configurations."""

    def model_tokens(self) -> Mapping[str, Sequence[ModelTokens]]:
        """Return the observed token sources of each pool's models."""


class MeshFollower:
    """Applies the newest snapshot of the documents."""

    def __init__(
        self,
        policy: MeshPolicy,
        pools: ServedPools,
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._policy = policy
        self._pools = pools
        self.told: Callable[[MeshState], None] | None = None  # called with each new state, once it is in force
        self._clock = clock
        self._newest: Snapshot | None = None
        self._last: Snapshot | None = None  # the last one applied
        self._wrong = frozenset[tuple[str, str, str]]()  # problems with tokens, as in the statuses
        self._changed = asyncio.Event()
        self._busy = asyncio.Lock()  # MeshPolicy is not thread-safe
        self._said: frozenset[DocumentProblem] = frozenset()
        self.state = MeshState()
        self.applied = 0  # snapshots

    def take(self, snapshot: Snapshot) -> None:
        """Schedule a snapshot; it replaces any pending one."""
        self._newest = snapshot
        self._changed.set()

    async def run(self, source: DocumentSource) -> None:
        """Follow the source until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(source.run(self.take), name="documents")
            tasks.create_task(self._apply_each(), name="apply documents")
            tasks.create_task(self._look_at_tokens(), name="look at tokens")

    async def explain(self, target: str | None) -> dict[str, Any]:
        """Return which policy sets what for the pools of a target. Raise PolicyTargetError."""
        async with self._busy:
            # takes a few tenths of a second for hundreds of pools; requests go on meanwhile
            return await asyncio.to_thread(partial(self._policy.explain, target, tokens=self._pools.model_tokens()))

    async def _look_at_tokens(self) -> None:
        """Update the statuses when a model loses or regains exact tokens."""
        while True:
            await asyncio.sleep(TOKENS_SECONDS)
            if self._last is not None and _wrong(self._pools) != self._wrong:
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
        tokens = self._pools.model_tokens()
        self._wrong = _wrong(self._pools)
        try:
            async with self._busy:
                # a thousand policies take a moment; requests go on meanwhile
                known = partial(self._policy.update, snapshot, tokens=tokens)
                state = await asyncio.to_thread(known, now=self._clock())
        except Exception:  # a bug triggered by some document: keep the last good state
            log.exception("documents could not be taken in; pools and policies stay as they were")
            return
        self.state, self._last = state, snapshot
        self._say(frozenset(state.problems) - frozenset(snapshot.problems))  # the source has already logged its own
        await self._pools.apply(state.configs)
        self.applied += 1
        if self.told is not None:
            self.told(state)

    def _say(self, problems: frozenset[DocumentProblem]) -> None:
        for problem in sorted(problems - self._said):
            log.error("%s: %s", problem.where, problem.words, extra={"reason": problem.reason})
        for problem in sorted(self._said - problems):
            log.info("%s: mended (%s)", problem.where, problem.reason)
        self._said = problems


def _wrong(pools: ServedPools) -> frozenset[tuple[str, str, str]]:
    tokens = pools.model_tokens()
    return as_told(found_wrong(tokens, tokens))


def mesh_policy(settings: PickerSettings) -> MeshPolicy:
    """Return the interpreter of policies; the picker's flags are defaults below all of them."""
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
    """Follow the documents until cancelled; `source` overrides the settings.

    Raise ConfigError if no cluster is configured.
    """
    if source is not None:
        await follower.run(source)
    elif settings.policies_folder is not None:
        await follower.run(FolderSource(settings.policies_folder, translate=translated_file))
    else:
        try:
            await _follow_cluster(settings, follower)
        except* KubernetesConfigError as errors:
            raise ConfigError(f"--kubernetes: {first_error(errors)}") from errors


async def _follow_cluster(settings: PickerSettings, follower: MeshFollower) -> None:
    access = ClusterAccess(program="kvmesh-picker")
    writer = status_writer(access, lease_namespace=own_namespace(), identity=own_name())
    follower.told = lambda state: writer.want(status_updates(state))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run(), name="write status")
        documents = kubernetes_source(access, namespaces=namespaces_read(settings))
        tasks.create_task(follower.run(documents), name="follow documents")


def status_updates(state: MeshState) -> list[StatusUpdate]:
    """Return the status entries that the policies' documents lack."""
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
    """Return the namespaces to read, empty for all; the root namespace is always included."""
    return sorted(settings.namespaces | {settings.root_namespace}) if settings.namespaces else []


def own_namespace() -> str:
    """Return this process's namespace, which also holds its lease."""
    told = os.environ.get("POD_NAMESPACE")
    if told:
        return told
    try:
        return SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"


def own_name() -> str:
    """Return a unique name for this process."""
    return f"{os.environ.get('POD_NAME') or socket.gethostname()}-{secrets.token_hex(4)}"
