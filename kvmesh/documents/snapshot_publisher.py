"""Turns many small changes into few snapshots: at once after quiet, four a second at most. Used by every source."""

import asyncio
import logging
from collections.abc import Callable

from kvmesh.documents.documents import Snapshot

log = logging.getLogger(__name__)
INTERVAL_SECONDS = 0.25


class SnapshotPublisher:
    """Calls `on_change` with what `snapshot` returns, some time after `changed` was called and if it differs."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot | None],
        on_change: Callable[[Snapshot], None],
        *,
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        """`snapshot` may return None: not yet."""
        self._snapshot = snapshot
        self._on_change = on_change
        self._interval_seconds = interval_seconds
        self._dirty = asyncio.Event()
        self._last: Snapshot | None = None

    def changed(self) -> None:
        """Say that something may be different; cheap, as often as one likes."""
        self._dirty.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            snapshot = self._snapshot()
            if snapshot is None or (self._last is not None and _same(snapshot, self._last)):
                continue
            self._last = snapshot
            try:
                self._on_change(snapshot)
            except Exception:  # a defect that one document meets must not end the following of all
                log.exception("documents could not be taken in; what was known stays")
            await asyncio.sleep(self._interval_seconds)


def _same(one: Snapshot, other: Snapshot) -> bool:
    """Tell whether two snapshots say the same; documents by identity, which is quick and what sources promise."""
    if (one.synced, one.problems, one.missing_kinds) != (other.synced, other.problems, other.missing_kinds):
        return False
    kinds = one.documents.keys() | other.documents.keys()
    return all(one.of(kind) is other.of(kind) for kind in kinds)
