"""Publishes the state of one stream: in the index, in the telemetry, and once in the log."""

import logging
from collections.abc import Callable

from kv_indexer.ports import IndexerTelemetry, IndexWriter
from kvmesh.blocks.source import Claim, SourceState, StreamPosition
from kvmesh.errors import IndexUnavailableError

log = logging.getLogger(__name__)

_Shown = tuple[int, SourceState, str]  # epoch, state, reason


class StreamState:
    """The published state of a stream, and the one that the index is known to have."""

    def __init__(
        self,
        *,
        claim: Claim,
        writer: IndexWriter,
        telemetry: IndexerTelemetry,
        position: Callable[[], StreamPosition],
        on_lost: Callable[[], None],
    ) -> None:
        """`position` returns the stream's position; `on_lost` is called when the publisher can no longer be heard."""
        self._claim = claim
        self._name = claim.stream.name
        self._writer = writer
        self._telemetry = telemetry
        self._position = position
        self._on_lost = on_lost
        self._said: _Shown | None = None  # in the log and the telemetry
        self.recorded: _Shown | None = None  # in the index; None if unknown

    async def show(self, state: SourceState, reason: str = "") -> None:
        """Show a state. Raise IndexUnavailableError, LeaseLostError."""
        shown = (self._position().epoch, state, reason)
        await self._record(shown)
        if self._said == shown:
            return
        self._said = shown
        self._telemetry.state(self._claim.stream, state=state, reason=reason)
        level = logging.WARNING if state in (SourceState.DEGRADED, SourceState.UNCONFIRMED) else logging.INFO
        log.log(level, "%s is %s", self._name, f"{state} ({reason})" if reason else state)

    async def show_lost(self, message: str, reason: str, *, is_unheard: bool = False) -> None:
        """Show that the session has ended, even if the index cannot be written. Raise LeaseLostError."""
        shown = (self._position().epoch, SourceState.LOST, reason)
        if self._said != shown:  # logged once; the retries are silent
            self._said = shown
            log.error("%s is lost: %s", self._name, message)
            self._telemetry.state(self._claim.stream, state=SourceState.LOST, reason=reason)
            if is_unheard:  # not if Redis has failed, which concerns all streams at once
                self._on_lost()
        try:
            await self._record(shown)
        except IndexUnavailableError as error:
            log.debug("cannot record yet that %s is lost: %s", self._name, error)

    def note_recorded(self) -> None:
        """Take over the state from the index: our record may have been overwritten, or lost in a failover."""
        position = self._position()
        self.recorded = (position.epoch, position.state, position.reason) if position.state is not None else None

    async def _record(self, shown: _Shown) -> None:
        if self.recorded == shown:
            return
        epoch, state, reason = shown
        self.recorded = None  # until there is an answer
        await self._writer.set_state(self._claim, epoch=epoch, state=state, reason=reason)
        self.recorded = shown
