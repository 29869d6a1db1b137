"""Use case: documents of the mesh (Kubernetes or a folder) -> pools and policies in force, within a second of a change.

Run by `service` beside the requests. What the documents mean is `mesh_policy`'s matter, what follows for running
requests `pools`'; here is only the way between them. The last good state stays whatever happens to the source.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from extproc.policy.mesh_policy import MeshPolicy, MeshState
from extproc.policy.pool_config import PoolConfig
from extproc.settings.config import PickerSettings
from kvmesh.documents.documents import DocumentProblem, DocumentSource, Snapshot

log = logging.getLogger(__name__)


class ServedPools(Protocol):
    """See `pools.Pools`."""

    async def apply(self, configs: Mapping[str, PoolConfig]) -> None:
        """Serve these pools so from now on."""


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
        self._pools = pools
        self.told: Callable[[MeshState], None] | None = None  # hears of each new state, once it is in force
        self._clock = clock
        self._newest: Snapshot | None = None
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

    async def explain(self, target: str | None) -> dict[str, Any]:
        """Return who says what for the pools of a target. Raise PolicyTargetError."""
        async with self._busy:
            # of hundreds of pools: a few tenths of a second, in which requests are picked
            return await asyncio.to_thread(self._policy.explain, target)

    async def _apply_each(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            snapshot, self._newest = self._newest, None
            if snapshot is not None and snapshot.synced:
                await self._apply(snapshot)

    async def _apply(self, snapshot: Snapshot) -> None:
        try:
            async with self._busy:
                # a thousand policies take a moment, in which requests are picked
                state = await asyncio.to_thread(self._policy.update, snapshot, now=self._clock())
        except Exception:  # a defect that one document meets: what was good before stays
            log.exception("documents could not be taken in; pools and policies stay as they were")
            return
        self.state = state
        self._say(frozenset(state.problems) - frozenset(snapshot.problems))  # its source has said these itself
        await self._pools.apply(state.configs)
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


def mesh_policy(settings: PickerSettings) -> MeshPolicy:
    """Return the policies' keeper; what the picker's flags say is below all of them."""
    return MeshPolicy(
        root_namespace=settings.root_namespace,
        settings=settings.policy_fields,
        cordoned=settings.policy.cordoned,
        roles=settings.policy.roles,
    )
