"""Which of several replicas leads, by a Kubernetes Lease (coordination.k8s.io/v1).

`Leadership` has the rules of client-go's `leaderelection`: a lease counts as held for as long as it was seen to change
less than its duration ago, by our own monotonic clock. The wall time that a leader writes is for people and is never
compared. `LeaderElection` reads and writes the lease.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from lightkube import ApiError

from kvmesh.documents.document_kinds import DocumentKind
from kvmesh.documents.kubernetes_client import Connection, failure_of, resource_class

LEASE_SECONDS = 15.0  # a leader that is silent for so long has lost it
RENEW_WITHIN_SECONDS = 10.0  # a leader that could not renew for so long stops leading: well before anybody else starts
RETRY_SECONDS = 2.0


@dataclass(slots=True)
class Leadership:
    """What one replica knows of a lease."""

    identity: str
    _seen: Mapping[str, Any] | None = None  # the last spec seen
    _seen_at: float = 0.0  # monotonic seconds
    _renewed_at: float | None = field(default=None)  # when our last successful write began; None: we do not lead

    def leads(self, *, now: float) -> bool:
        """Tell whether we lead, for certain."""
        return self._renewed_at is not None and now - self._renewed_at < RENEW_WITHIN_SECONDS

    def wish(self, spec: Mapping[str, Any] | None, *, now: float, wall_time: str) -> dict[str, Any] | None:
        """Return the spec to write over what was just read (None: no lease yet), or None: another one leads."""
        if spec is not None and spec != self._seen:
            self._seen, self._seen_at = dict(spec), now
        holder = str((spec or {}).get("holderIdentity") or "")
        if holder and holder != self.identity and now - self._seen_at < self._duration(spec):
            self._renewed_at = None
            return None
        fresh = {"holderIdentity": self.identity, "leaseDurationSeconds": int(LEASE_SECONDS), "renewTime": wall_time}
        if spec is not None and holder == self.identity:
            return {**spec, **fresh}
        changes = (spec or {}).get("leaseTransitions")
        transitions = changes + 1 if isinstance(changes, int) else 0
        return {**(spec or {}), **fresh, "acquireTime": wall_time, "leaseTransitions": transitions}

    def wrote(self, spec: Mapping[str, Any], *, began_at: float) -> None:
        """Note that our wish was granted; `began_at`: monotonic, before the request was sent."""
        self._seen, self._seen_at, self._renewed_at = dict(spec), began_at, began_at

    def released(self) -> None:
        """Note that we have given the lease back."""
        self._renewed_at = None

    @staticmethod
    def _duration(spec: Mapping[str, Any] | None) -> float:
        seconds = (spec or {}).get("leaseDurationSeconds")
        return float(seconds) if isinstance(seconds, int) and seconds > 0 else LEASE_SECONDS


log = logging.getLogger(__name__)
LEASE_KIND = DocumentKind(group="coordination.k8s.io", version="v1", kind="Lease", plural="leases", keep=dict)
_Lease = resource_class(LEASE_KIND)
_REQUEST_SECONDS = 5.0


class LeaderElection:
    """One replica's part in the election."""

    def __init__(
        self, connection: Connection, *, namespace: str, name: str, identity: str, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called when we begin or cease to lead, as far as it is noticed by a request."""
        self._connection = connection
        self._namespace = namespace
        self._name = name
        self._state = Leadership(identity=identity)
        self._on_change = on_change
        self.failure = ""  # why we can neither lead nor know who does; "" while all is well

    @property
    def leads(self) -> bool:
        """Tell whether we lead at this moment."""
        return self._state.leads(now=time.monotonic())

    async def run(self) -> None:
        """Stand for election until cancelled; then give the lease back, so that the next one need not wait."""
        try:
            while True:
                before = self.leads
                await self._try_once()
                if self.leads != before:
                    log.info("status is written %s from now on", "here" if self.leads else "by another replica")
                    self._on_change()
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            if self.leads:
                await self._release()

    async def _try_once(self) -> None:
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                lease = await self._read()
                spec = self._state.wish((lease or {}).get("spec"), now=time.monotonic(), wall_time=_wall_time())
                if spec is not None:
                    await self._write(lease, spec)
                    self._state.wrote(spec, began_at=began_at)
            self._note("")
        except Exception as error:
            failure = failure_of(error)
            if failure.code != 409:  # somebody was quicker; what they wrote is read next time
                self._note(failure.words)

    def _note(self, failure: str) -> None:
        if failure and not self.failure:
            log.warning("leader election: lease %s/%s: %s", self._namespace, self._name, failure)
        changed, self.failure = failure != self.failure, failure
        if changed:
            self._on_change()

    async def _read(self) -> dict[str, Any] | None:
        try:
            lease: dict[str, Any] = await self._connection.client.get(_Lease, self._name, namespace=self._namespace)
        except ApiError as error:
            if error.status.code == 404:
                return None
            raise
        return lease

    async def _write(self, lease: dict[str, Any] | None, spec: dict[str, Any]) -> None:
        client: Any = self._connection.client
        if lease is None:
            metadata = {"name": self._name, "namespace": self._namespace}
            await client.create(_Lease({"metadata": metadata, "spec": spec}), namespace=self._namespace)
        else:  # with the resource version that was read: two who try at once cannot both succeed
            await client.replace(_Lease({**lease, "spec": spec}), namespace=self._namespace)

    async def _release(self) -> None:
        self._state.released()
        try:
            async with asyncio.timeout(1.0):
                lease = await self._read()
                if lease is not None and lease.get("spec", {}).get("holderIdentity") == self._state.identity:
                    await self._write(lease, {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1})
        except Exception as error:
            log.debug("the lease was not given back: %s", failure_of(error).words)


def _wall_time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # MicroTime
