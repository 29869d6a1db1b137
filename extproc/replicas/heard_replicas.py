"""What the other replicas said last, and who they are: their records, read and added up. Pure; time is an argument.

Used by `replicas.shared_state` for the answers that come with each lookup and with each beat.
"""

from collections.abc import Mapping
from typing import Any

from extproc.replicas.shared_load import EndpointBookings, add_bookings
from extproc.replicas.shared_records import MAX_REPLICAS, Record, pack_read_loads, read_load, read_names

FORGET_SECONDS = 10.0  # after which a replica without a lease is taken off the list; it enters itself again if it lives


class HeardReplicas:
    """What the other replicas said last, and who they are."""

    def __init__(self, *, own: bytes, lease_seconds: float) -> None:
        self.question = b""  # the command that asks for all others' bookings; empty while there are none
        self.others: Mapping[str, EndpointBookings] = {}
        self.replicas = 0  # of which there are bookings
        self._own = own
        self._lease_seconds = lease_seconds
        self._names: list[bytes] = []
        self._silent_since: dict[bytes, float] = {}  # replicas of the list without a lease -> monotonic seconds
        self._heard_at: float | None = None
        self._values: list[Any] = []
        self._records: dict[bytes, Record] = {}  # as they came -> read; of the last answer

    def is_fresh(self, *, now: float) -> bool:
        """Tell whether what was heard last may still be used when nothing can be heard."""
        return self._heard_at is not None and now - self._heard_at <= self._lease_seconds

    def hear(self, values: list[Any], *, now: float) -> None:
        """Take the answer to the question, which is often the same as the one before."""
        self._heard_at = now
        if values == self._values:
            return
        records: dict[bytes, Record] = {}
        for value in values:
            record = self._records.get(value) if value is not None else None
            if record is None and value is not None:
                record = read_load(value)
            if record is not None:
                records[value] = record
        # two replicas may have said the same
        said = [records[value] for value in values if value in records]
        self.others = add_bookings(said)
        self.replicas = len(said)
        self._values, self._records = values, records

    def learn(self, names: Any, loads: Any, *, now: float) -> list[bytes]:
        """Take the list of replicas and the answer to the question; return who has been silent for too long."""
        if isinstance(loads, list):
            self.hear(loads, now=now)
            for name, value in zip(self._names, loads, strict=False):
                if value is None:
                    self._silent_since.setdefault(name, now)
                else:
                    self._silent_since.pop(name, None)
        if not isinstance(names, list):
            return []
        listed = read_names(names, own=self._own)
        gone = [name for name in listed if now - self._silent_since.get(name, now) > FORGET_SECONDS]
        there = sorted(set(listed).difference(gone))
        known = set(there)  # made once: somebody may have filled the list
        self._silent_since = {name: at for name, at in self._silent_since.items() if name in known}
        if len(there) > MAX_REPLICAS:  # those who have said something, or were not asked yet
            there = sorted(sorted(there, key=lambda name: name in self._silent_since)[:MAX_REPLICAS])
        if there != self._names:
            self._names = there
            self.question = pack_read_loads(there) if there else b""
            if not there:
                self.hear([], now=now)
        return gone
