"""Connects one stream's follower with its sockets. Used by the service, once a claim; decides nothing."""

from dataclasses import dataclass
from functools import partial

import zmq

from kv_indexer.adapters.pod_metrics import PodMetrics
from kv_indexer.adapters.zmq_replay import ZmqReplaySource
from kv_indexer.adapters.zmq_subscriber import ZmqLiveEvents
from kv_indexer.apply_events import EventApplier
from kv_indexer.core.change_plan import RootKeys
from kv_indexer.core.source import Claim, EventAddresses
from kv_indexer.follow_stream import RecoveryPolicy, StreamFollower
from kv_indexer.ports import IndexerTelemetry, IndexWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerParts:
    """What all followers of a process share."""

    context: zmq.Context[zmq.Socket[bytes]]
    pods: PodMetrics
    writer: IndexWriter
    telemetry: IndexerTelemetry
    roots: RootKeys
    policy: RecoveryPolicy

    def build(self, claim: Claim, addresses: EventAddresses) -> StreamFollower:
        """Return a follower that writes under this claim; it opens its sockets when it runs."""
        stream = claim.stream
        on_malformed = partial(self.telemetry.undecodable, stream, reasons={"malformed-message": 1})
        replay = addresses.replay
        return StreamFollower(
            claim=claim,
            live=ZmqLiveEvents(context=self.context, address=addresses.events, on_malformed=on_malformed),
            replay=ZmqReplaySource(context=self.context, address=replay, on_malformed=on_malformed) if replay else None,
            applier=EventApplier(claim=claim, roots=self.roots, writer=self.writer, telemetry=self.telemetry),
            writer=self.writer,
            telemetry=self.telemetry,
            policy=self.policy,
            identity=self.pods.identity(stream.endpoint),
        )
