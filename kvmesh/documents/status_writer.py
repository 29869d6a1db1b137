"""Writes the status of policies while this replica leads, by a Kubernetes Lease (coordination.k8s.io/v1).

It is never part of serving: whatever happens here, the picker goes on. Only differences are written: read, change,
write, again on conflict.

`Leadership` has the rules of client-go's `leaderelection`: a lease counts as held if it was seen to change less than
its duration ago, by our own monotonic clock. The wall time that a leader writes is for people and is never compared.
`LeaderElection` reads and writes the lease.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from lightkube import ApiError
from lightkube.resources.core_v1 import Service

from kvmesh.documents.document_kinds import MESH_KINDS, DocumentKind
from kvmesh.documents.documents import (
    PICKER_SERVICE,
    ClusterAccess,
    Document,
    DocumentKey,
    DocumentProblem,
    StatusFullError,
    StatusUpdate,
    controller_name,
    installations_in,
    status_to_write,
)
from kvmesh.documents.kubernetes_client import Connection, Failure, failure_of, resource_class, status_class

log = logging.getLogger(__name__)

LEASE_SECONDS = 15.0  # after this silence a leader has lost the lease
# a leader that could not renew for this long stops leading, well before another replica starts
RENEW_WITHIN_SECONDS = 10.0
RETRY_SECONDS = 2.0
LEASE_KIND = DocumentKind(group="coordination.k8s.io", version="v1", kind="Lease", plural="leases", keep=dict)
_Lease = resource_class(LEASE_KIND)
_LEASE_REQUEST_SECONDS = 5.0
_POLICY = next(each for each in MESH_KINDS if each.kind == "InferencePolicy")
_Policy = resource_class(_POLICY)
_PolicyStatus = status_class(_POLICY)
_CONFLICT_TRIES = 5
_REQUEST_SECONDS = 15.0
_SPACING_SECONDS = 0.01  # between two writes: 1,000 new policies are no reason to flood an API server
_RETRY_SECONDS = 5.0


@dataclass(slots=True)
class Leadership:
    """One replica's knowledge of a lease."""

    identity: str
    _seen: Mapping[str, Any] | None = None  # the last spec seen
    _seen_at: float = 0.0  # monotonic seconds
    _renewed_at: float | None = field(default=None)  # start of our last successful write; None if we do not lead

    def leads(self, *, now: float) -> bool:
        """Tell whether we certainly lead."""
        return self._renewed_at is not None and now - self._renewed_at < RENEW_WITHIN_SECONDS

    def wish(self, spec: Mapping[str, Any] | None, *, now: float, wall_time: str) -> dict[str, Any] | None:
        """Return the spec to write over the one just read (None without a lease), or None if another replica leads."""
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
        """Note that our write succeeded; `began_at`: monotonic time before the request was sent."""
        self._seen, self._seen_at, self._renewed_at = dict(spec), began_at, began_at

    def released(self) -> None:
        """Note that we have given the lease back."""
        self._renewed_at = None

    @staticmethod
    def _duration(spec: Mapping[str, Any] | None) -> float:
        seconds = (spec or {}).get("leaseDurationSeconds")
        return float(seconds) if isinstance(seconds, int) and seconds > 0 else LEASE_SECONDS


class LeaderElection:
    """One replica's part in the election."""

    def __init__(
        self, connection: Connection, *, namespace: str, name: str, identity: str, on_change: Callable[[], None]
    ) -> None:
        """`on_change` is called when a request shows that we begin or cease to lead."""
        self._connection = connection
        self._namespace = namespace
        self._name = name
        self._state = Leadership(identity=identity)
        self._on_change = on_change
        self.failure = ""  # why we can neither lead nor know the leader, or ""

    @property
    def leads(self) -> bool:
        """Tell whether we lead at this moment."""
        return self._state.leads(now=time.monotonic())

    async def run(self) -> None:
        """Stand for election until cancelled; then give the lease back, so that the next leader need not wait."""
        try:
            while True:
                before = self.leads
                await self._try_once()
                if self.leads != before:
                    log.info("status is %s", "written here from now on" if self.leads else "no longer written here")
                    self._on_change()
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            if self.leads:
                await self._release()

    async def _try_once(self) -> None:
        began_at = time.monotonic()
        try:
            async with asyncio.timeout(_LEASE_REQUEST_SECONDS):
                lease = await self._read()
                wall_time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # MicroTime
                spec = self._state.wish((lease or {}).get("spec"), now=time.monotonic(), wall_time=wall_time)
                if spec is not None:
                    await self._write(lease, spec)
                    self._state.wrote(spec, began_at=began_at)
            self._note(None)
        except Exception as error:
            failure = failure_of(error)
            if failure.code != 409:  # another replica was faster; its lease is read next time
                self._note(failure)

    def _note(self, failure: Failure | None) -> None:
        if failure is not None and not failure.is_of_all and not self.failure:
            log.warning("leader election: lease %s/%s: %s", self._namespace, self._name, failure.message)
        message = failure.message if failure is not None else ""
        changed, self.failure = message != self.failure, message
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
        else:  # with the resource version that was read: of two simultaneous writers only one succeeds
            await client.replace(_Lease({**lease, "spec": spec}), namespace=self._namespace)

    async def _release(self) -> None:
        self._state.released()
        try:
            async with asyncio.timeout(1.0):
                lease = await self._read()
                if lease is not None and lease.get("spec", {}).get("holderIdentity") == self._state.identity:
                    await self._write(lease, {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1})
        except Exception as error:
            log.debug("the lease was not given back: %s", failure_of(error).message)


class StatusWriter:
    """The statuses to write; the leader writes them."""

    def __init__(self, access: ClusterAccess, *, lease_namespace: str, lease_name: str, identity: str) -> None:
        self._access = access
        self._lease = (lease_namespace, lease_name)
        self._identity = identity
        self._wanted: dict[DocumentKey, StatusUpdate] = {}
        self._work = asyncio.Event()
        self._election: LeaderElection | None = None
        self._failure = ""
        self._has_old_definition = False

    def want(self, updates: Iterable[StatusUpdate]) -> None:
        """Replace the statuses to write; every replica keeps them, the leader writes them."""
        self._wanted = {each.key: each for each in updates}
        if self._wanted:
            self._work.set()

    @property
    def leads(self) -> bool:
        """Tell whether this replica writes."""
        return self._election is not None and self._election.leads

    @property
    def problems(self) -> tuple[DocumentProblem, ...]:
        """Return why no status can be written here, if so."""
        namespace, name = self._lease
        failures = {f"Lease {namespace}/{name}": self._election.failure if self._election else ""}
        failures["InferencePolicy status"] = self._failure
        return tuple(
            DocumentProblem(reason="status-unwritten", where=where, words=message)
            for where, message in failures.items()
            if message
        )

    async def run(self) -> None:
        """Take part until cancelled. Raise KubernetesConfigError at once without a usable configuration."""
        connection = Connection(self._access)
        namespace, name = self._lease
        self._election = LeaderElection(
            connection, namespace=namespace, name=name, identity=self._identity, on_change=self._work.set
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._election.run(), name="leader-election")
                tasks.create_task(self._write_all(connection), name="status-writer")
        finally:
            await connection.close()

    async def _write_all(self, connection: Connection) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            failure: Failure | None = None
            while self._wanted and self.leads and failure is None:
                key = next(iter(self._wanted))
                update = self._wanted.pop(key)
                failure = await self._write(connection, update)
                if failure is not None:
                    self._wanted.setdefault(key, update)  # last in line, unless a newer update has come
                await asyncio.sleep(_SPACING_SECONDS)
            if failure is not None and not failure.is_of_all and not self._failure:
                log.warning("status not written: %s", failure.message)
            self._failure = failure.message if failure is not None else ""
            if failure is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_SECONDS):
                        await self._work.wait()
                self._work.set()

    async def _write(self, connection: Connection, update: StatusUpdate) -> Failure | None:
        """Write one status; return the failure if it should be tried again later."""
        try:
            for _ in range(_CONFLICT_TRIES):
                async with asyncio.timeout(_REQUEST_SECONDS):
                    if await self._write_once(connection, update):
                        return None
        except StatusFullError as error:
            log.warning("status not written: %s: %s", update.key, error)
            return None  # the next change of the policy tries again
        except Exception as error:
            failure = failure_of(error)
            if failure.code == 404:
                return None  # deleted meanwhile
            message = f"{update.key}: {failure.message}"
            if failure.code != 422:
                return replace(failure, message=message)
            log.warning("status refused: %s", message)
            return None  # a repetition would be refused again
        return Failure(code=409, message=f"{update.key}: another client changes it all the time")

    async def _write_once(self, connection: Connection, update: StatusUpdate) -> bool:
        key = update.key
        current = await connection.client.get(_Policy, key.name, namespace=key.namespace)
        gone = await self._gone(connection, current, update)
        status = status_to_write(current, update, gone=gone)
        if status is None:
            return True
        try:
            stored = await connection.client.replace(
                _PolicyStatus({**current, "status": status}), key.name, namespace=key.namespace
            )
        except ApiError as error:
            if error.status.code == 409:
                return False  # changed since it was read
            raise
        if not (stored.get("status") or {}).get("ancestors") and not self._has_old_definition:
            self._has_old_definition = True
            log.warning(
                "the cluster's definition of InferencePolicy is of an older kvmesh and drops our status: apply that "
                "of this release (manifests/crds, or `kvmesh install`)"
            )
        return True

    async def _gone(self, connection: Connection, current: Document, update: StatusUpdate) -> list[str]:
        """Return the controller names in this status whose installation has no picker Service any more.

        Only we can remove their entries. An installation that we may not ask about counts as existing.
        """
        found = []
        for installation in installations_in(current):
            name = controller_name(installation)
            if name == update.entry.get("controllerName"):
                continue
            try:
                await connection.client.get(Service, PICKER_SERVICE, namespace=installation)
            except ApiError as error:
                if error.status.code == 404:
                    found.append(name)
                elif failure_of(error).is_of_all:
                    raise
        return found
