"""Writes the status of policies while this replica leads: read, change, write, again on conflict. By `cluster_sources`.

Never part of serving: whatever happens here, the picker goes on. Only what differs is written.
"""

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

from lightkube import ApiError

from kvmesh.documents.document_kinds import MESH_KINDS
from kvmesh.documents.documents import ClusterAccess, DocumentKey, DocumentProblem, StatusUpdate, status_to_write
from kvmesh.documents.kubernetes_client import Connection, failure_of, resource_class, status_class
from kvmesh.documents.leader_election import LeaderElection

log = logging.getLogger(__name__)
_POLICY = next(each for each in MESH_KINDS if each.kind == "InferencePolicy")
_Policy = resource_class(_POLICY)
_PolicyStatus = status_class(_POLICY)
_CONFLICT_TRIES = 5
_REQUEST_SECONDS = 15.0
_SPACING_SECONDS = 0.01  # between two writes: 1,000 new policies are no reason to flood an API server
_RETRY_SECONDS = 5.0


class StatusWriter:
    """The to-do list of statuses, and who works it off."""

    def __init__(self, access: ClusterAccess, *, lease_namespace: str, lease_name: str, identity: str) -> None:
        self._access = access
        self._lease = (lease_namespace, lease_name)
        self._identity = identity
        self._wanted: dict[DocumentKey, StatusUpdate] = {}
        self._work = asyncio.Event()
        self._election: LeaderElection | None = None
        self._failure = ""

    def want(self, updates: Iterable[StatusUpdate]) -> None:
        """Replace the list of what is to be written; every replica keeps it, the leader works it off."""
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
            DocumentProblem(reason="status-unwritten", where=where, words=words)
            for where, words in failures.items()
            if words
        )

    async def run(self) -> None:
        """Take part until cancelled. Raises KubernetesConfigError at once where there is no configuration."""
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
            failure = ""
            while self._wanted and self.leads and not failure:
                key = next(iter(self._wanted))
                update = self._wanted.pop(key)
                failure = await self._write(connection, update)
                if failure:
                    self._wanted.setdefault(key, update)  # unless a newer wish has come meanwhile; behind the others
                await asyncio.sleep(_SPACING_SECONDS)
            if failure and failure != self._failure:
                log.warning("status not written: %s", failure)
            self._failure = failure
            if failure:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_RETRY_SECONDS):
                        await self._work.wait()
                self._work.set()

    async def _write(self, connection: Connection, update: StatusUpdate) -> str:
        """Write one status; return why it should be tried again later, or ""."""
        try:
            for _ in range(_CONFLICT_TRIES):
                async with asyncio.timeout(_REQUEST_SECONDS):
                    if await self._write_once(connection, update):
                        return ""
        except Exception as error:
            failure = failure_of(error)
            if failure.code == 404:
                return ""  # deleted meanwhile
            words = f"{update.key}: {failure.words}"
            if failure.code != 422:
                return words
            log.warning("status refused: %s", words)
            return ""  # the same again would be refused again
        return f"{update.key}: somebody else changes it all the time"

    @staticmethod
    async def _write_once(connection: Connection, update: StatusUpdate) -> bool:
        key = update.key
        current = await connection.client.get(_Policy, key.name, namespace=key.namespace)
        status = status_to_write(current, update)
        if status is None:
            return True
        try:
            await connection.client.replace(
                _PolicyStatus({**current, "status": status}), key.name, namespace=key.namespace
            )
        except ApiError as error:
            if error.status.code == 409:
                return False  # changed since it was read
            raise
        return True
