"""Connects one stream's follower with its sockets. Used by the service, once a claim; decides nothing."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from kv_indexer.apply.apply_events import EventApplier
from kv_indexer.apply.change_plan import RootKeys
from kv_indexer.events.zmq_sockets import HEARTBEAT_SECONDS, ZmqLiveEvents, ZmqReplaySource
from kv_indexer.follow.follow_stream import RecoveryPolicy, StreamFollower
from kv_indexer.pools.members import PoolFeed
from kv_indexer.ports import IndexerTelemetry, IndexWriter
from kv_indexer.watch.pod_metrics import PodMetrics
from kv_indexer.watch.watch_index import IndexWatch
from kvmesh.blocks.source import Claim, EventAddresses, Stream, StreamRecord

SLOWEST_HEARTBEAT = 12.0  # times; TCP notices a vanished host as quickly as ever, a hung process is noticed later


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerParts:
    """What all followers of a process share."""

    context: zmq.Context[zmq.Socket[bytes]]
    pods: PodMetrics
    writer: IndexWriter
    telemetry: IndexerTelemetry
    roots: Callable[[PoolFeed | None], RootKeys]  # of a pool's part of the index; None: of a stream without pool
    policy: RecoveryPolicy
    slowdown: Callable[[], float] = lambda: 1.0  # see `StreamFollower`
    turns: AbstractAsyncContextManager[Any] | None = None  # likewise
    watch: IndexWatch | None = None  # that reads the registry for all
    lost: Callable[[Stream], None] = lambda _: None  # told when a publisher cannot be heard any more

    def build(self, claim: Claim, addresses: EventAddresses) -> StreamFollower:
        """Return a follower that writes under this claim; it opens its sockets when it runs."""
        stream = claim.stream
        on_malformed = partial(self.telemetry.undecodable, stream, reasons={"malformed-message": 1})
        replay = addresses.replay
        feed = addresses if isinstance(addresses, PoolFeed) else None
        roots = self.roots(feed)
        return StreamFollower(
            claim=claim,
            live=ZmqLiveEvents(
                context=self.context,
                address=addresses.events,
                on_malformed=on_malformed,
                heartbeat_seconds=HEARTBEAT_SECONDS * min(self.slowdown(), SLOWEST_HEARTBEAT),
            ),
            replay=ZmqReplaySource(context=self.context, address=replay, on_malformed=on_malformed) if replay else None,
            applier=EventApplier(
                claim=claim,
                roots=roots,
                writer=self.writer,
                telemetry=self.telemetry,
                namespace=roots(None, None).hex() if feed else "",
            ),
            writer=self.writer,
            telemetry=self.telemetry,
            policy=self.policy,
            identity=self.pods.identity(stream.endpoint),
            slowdown=self.slowdown,
            turns=self.turns,
            registered=partial(_record, self.watch, stream) if self.watch else lambda _: None,
            attend=partial(self.watch.attend, stream) if self.watch else None,
            on_lost=partial(self.lost, stream),
        )


def _record(watch: IndexWatch, stream: Stream, max_age_seconds: float) -> StreamRecord | None:
    return watch.record(stream, max_age_seconds=max_age_seconds)
