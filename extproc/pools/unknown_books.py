"""Books of a pool that this picker does not know: its responses are still what clients were promised; nothing is kept.

Used by `pools` for a response whose request another picker has routed.
"""

from typing import Never

from extproc.pods.inflight import Booking
from extproc.quotas.quota import QuotaNote
from extproc.responses.realised import Comparison


class UnknownBooks:
    """Implements `booked_exchange.ExchangeBooks`; nothing is booked here, hence nothing is moved or released."""

    def knows(self, endpoint: str) -> bool:  # noqa: ARG002 - a port
        """None."""
        return False

    def rebook(self, booking: Booking, endpoint: str) -> Never:
        """Never called."""
        raise NotImplementedError

    def endpoint_answered(self, endpoint: str, *, failed: bool) -> None:
        """Forget it."""

    def endpoint_full(self, endpoint: str) -> None:
        """Forget it."""

    def release(self, booking: Booking, *, status: int, model: str, arm: str, unserved: bool) -> Never:
        """Never called."""
        raise NotImplementedError

    def realised(self, comparison: Comparison) -> None:
        """Forget it."""

    def generated(self, note: QuotaNote, tokens: int) -> None:
        """Forget it: what was reserved stays charged."""

    def response_missed(self, why: str) -> None:
        """Forget it."""


UNKNOWN_BOOKS = UnknownBooks()
