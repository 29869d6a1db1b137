"""Many changes are few snapshots."""

import asyncio
from collections.abc import Callable

from kvmesh.documents.document_store import SnapshotPublisher
from kvmesh.documents.documents import Snapshot


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():
            await asyncio.sleep(0)


async def test_nothing_is_told_before_there_is_a_snapshot_nor_twice_the_same() -> None:
    now: list[Snapshot | None] = [None]
    told: list[Snapshot] = []
    publisher = SnapshotPublisher(lambda: now[0], told.append, interval_seconds=0.0)
    task = asyncio.create_task(publisher.run())
    publisher.changed()
    now[0] = Snapshot(documents={"Pod": ({"x": 1},)}, synced=True)
    publisher.changed()
    await _until(lambda: len(told) == 1)
    now[0] = Snapshot(documents=dict(told[0].documents), synced=True)
    publisher.changed()
    now[0] = Snapshot(documents={"Pod": ()}, synced=True)
    publisher.changed()
    await _until(lambda: len(told) == 2)
    task.cancel()
    assert [snapshot.of("Pod") for snapshot in told] == [({"x": 1},), ()]


async def test_a_defect_in_who_is_told_does_not_end_the_telling() -> None:
    told: list[Snapshot] = []
    now = [Snapshot(documents={"Pod": ({"x": 1},)}, synced=True)]

    def take(snapshot: Snapshot) -> None:
        told.append(snapshot)
        if len(told) == 1:
            raise ValueError("a defect")

    publisher = SnapshotPublisher(lambda: now[0], take, interval_seconds=0.0)
    task = asyncio.create_task(publisher.run())
    publisher.changed()
    await _until(lambda: len(told) == 1)
    now[0] = Snapshot(documents={"Pod": ()}, synced=True)
    publisher.changed()
    await _until(lambda: len(told) == 2)
    assert not task.done()
    task.cancel()
