"""Finds the server with the index and opens a connection to it: TLS, password, role; Sentinels, cluster nodes.

All of our keys are in one slot, so there is one server to find. Redis' own ROLE decides, not other servers' claims:
nothing may be written to a replica.
"""

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hiredis

from kvmesh.errors import IndexUnavailableError
from kvmesh.redis.address import RedisAddress, RedisKind, RedisNode
from kvmesh.redis.keys import KEY_SLOT
from kvmesh.redis.protocol import RedisProtocol, checked, explained, pack, refusal_word

NODE_SECONDS = 1.0  # for one node to answer, while others may know better
AGREEMENT_SECONDS = 0.25  # after the first answer, for a majority to agree
KNOWN_NODES = 32  # remembered nodes of a cluster in addition to the address's


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """The content of the files when the connection was opened."""

    password: str = field(repr=False)
    sentinel_password: str = field(repr=False)
    tls: ssl.SSLContext | None


def read_secrets(address: RedisAddress) -> Secrets:
    """Read all files of an address; blocks. Raise IndexUnavailableError naming the parameter and the file."""
    return Secrets(
        password=address.password or _read_password(address, "password_file"),
        sentinel_password=_read_password(address, "sentinel_password_file"),
        tls=_read_tls(address) if address.secure else None,
    )


class RedisRoute:
    """Opens connections to the server that currently holds the index."""

    def __init__(self, address: RedisAddress, *, reads_only: bool = False) -> None:
        self.address = address
        self.node: RedisNode | None = None  # target of the last connection
        self._reads_only = reads_only
        self.in_cluster = address.kind is RedisKind.CLUSTER
        self.can_move = address.kind is not RedisKind.STANDALONE
        self._known: tuple[RedisNode, ...] = ()

    async def open(self, hint: RedisNode | None) -> RedisProtocol:
        """Open a connection to the server, at `hint` if that works. Raise IndexUnavailableError; set a deadline."""
        secrets = await asyncio.to_thread(read_secrets, self.address)
        if not self.can_move:
            return await self._open_server(next(iter(self.address.nodes), None), secrets)
        if hint is not None:
            with contextlib.suppress(IndexUnavailableError, TimeoutError):
                async with asyncio.timeout(NODE_SECONDS):
                    return await self._open_server(hint, secrets)
        failures: list[str] = []
        for node, _ in (await self._votes(secrets)).most_common(2):
            try:
                async with asyncio.timeout(NODE_SECONDS):
                    return await self._open_server(node, secrets)
            except TimeoutError:
                failures.append(f"{node} does not answer")
            except IndexUnavailableError as error:
                failures.append(str(error))
        raise IndexUnavailableError("; ".join(failures))

    async def is_elsewhere(self) -> bool:
        """Ask whether another server is the right one by now; return False if this is unknown."""
        try:
            async with asyncio.timeout(2 * NODE_SECONDS):
                secrets = await asyncio.to_thread(read_secrets, self.address)
                votes = await self._votes(secrets)
        except (IndexUnavailableError, TimeoutError):
            return False
        node, count = votes.most_common(1)[0]
        return node != self.node and count >= _majority(self._to_ask())

    def moved_to(self, error: str) -> RedisNode | None:
        """Return the node in `MOVED SLOT HOST:PORT`; without a host, the answering server means itself."""
        host, _, port = error.rpartition(" ")[2].rpartition(":")
        host = host.strip("[]") or (self.node.host if self.node else "")
        return RedisNode(host=host, port=int(port)) if host and port.isdecimal() else None

    def _to_ask(self) -> tuple[RedisNode, ...]:
        return tuple(dict.fromkeys((*self.address.nodes, *self._known)))

    async def _votes(self, secrets: Secrets) -> Counter[RedisNode]:
        """Ask all nodes at once for the server, until most agree: a single answer may be out of date."""
        nodes, votes, failures = self._to_ask(), Counter[RedisNode](), list[str]()
        pending = {asyncio.create_task(self._ask(node, secrets), name=f"redis-ask-{node}") for node in nodes}
        deadline = asyncio.get_running_loop().time() + NODE_SECONDS
        try:
            while pending and max(votes.values(), default=0) < _majority(nodes):
                now = asyncio.get_running_loop().time()
                done, pending = await asyncio.wait(pending, timeout=deadline - now, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in done:
                    if (failure := task.exception()) is None:
                        votes[task.result()] += 1
                        deadline = min(deadline, now + AGREEMENT_SECONDS)
                    else:
                        failures.append(str(failure))
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        if not votes:
            silent = f"{len(pending)} of {len(nodes)} do not answer" if pending else ""
            raise IndexUnavailableError("; ".join(filter(None, (*sorted(failures), silent))))
        return votes

    async def _ask(self, node: RedisNode, secrets: Secrets) -> RedisNode:
        protocol = await self._open_socket(node, secrets)
        try:
            if self.address.kind is RedisKind.SENTINEL:
                return await self._ask_sentinel(protocol, node, secrets)
            return await self._ask_cluster(protocol, node, secrets)
        finally:
            protocol.abort()

    async def _ask_sentinel(self, protocol: RedisProtocol, node: RedisNode, secrets: Secrets) -> RedisNode:
        name = self.address.master_name
        login = [pack("AUTH", secrets.sentinel_password)] if secrets.sentinel_password else []
        where = f"Sentinel {node}"
        # https://redis.io/docs/latest/develop/reference/sentinel-clients/
        question = pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name)
        answer = _all_checked(await self._exchange(protocol, where, *login, question), where)[-1]
        if answer is None:
            raise IndexUnavailableError(f"Sentinel {node} knows no master called {name!r}")
        return RedisNode(host=answer[0].decode(), port=int(answer[1]))

    async def _ask_cluster(self, protocol: RedisProtocol, node: RedisNode, secrets: Secrets) -> RedisNode:
        commands = (*self._login(secrets), pack("CLUSTER", "SLOTS"))
        ranges = _all_checked(await self._exchange(protocol, str(node), *commands), str(node))[-1]
        owner = None
        known = [*self._known]
        for first, last, master, *replicas in ranges:
            known += [_announced(entry, asked=node) for entry in (master, *replicas)]
            if first <= KEY_SLOT <= last:
                owner = _announced(master, asked=node)
        self._known = tuple(dict.fromkeys(reversed(known)))[:KNOWN_NODES]
        if owner is None:
            raise IndexUnavailableError(f"{node} says that no server of the cluster has the index's slot {KEY_SLOT}")
        return owner

    async def _open_server(self, node: RedisNode | None, secrets: Secrets) -> RedisProtocol:
        where = str(node or self.address.socket_path)
        protocol = await self._open_socket(node, secrets)
        try:
            commands = self._login(secrets)
            if self.address.database:
                commands.append(pack("SELECT", self.address.database))
            *answers, role = await self._exchange(protocol, where, *commands, pack("ROLE"))
            _all_checked(answers, where)
            self._check_role(role, where)
        except BaseException:
            protocol.abort()
            raise
        self.node = node
        return protocol

    async def _exchange(self, protocol: RedisProtocol, where: str, *commands: bytes) -> list[Any]:
        try:
            return await protocol.request(b"".join(commands), len(commands))
        except IndexUnavailableError as error:
            ended = str(error).endswith(("end of stream", "reset by peer"))
            perhaps = "; perhaps it wants TLS: rediss://" if ended and not self.address.secure else ""
            raise IndexUnavailableError(f"{where}: {error}{perhaps}") from None

    def _login(self, secrets: Secrets) -> list[bytes]:
        if not secrets.password:
            return []
        user = (self.address.username,) if self.address.username else ()
        return [pack("AUTH", *user, secrets.password)]

    def _check_role(self, reply: Any, where: str) -> None:
        """Raise IndexUnavailableError unless this is the server that we may write to."""
        if isinstance(reply, hiredis.ReplyError):
            # proxies and restricted users; in a cluster MOVED keeps us from writing to a replica
            unknown = refusal_word(str(reply)) == "NOPERM" or "unknown command" in str(reply)
            if unknown and self.address.kind is not RedisKind.SENTINEL:
                return
            raise IndexUnavailableError(f"{where} refuses ROLE: {explained(str(reply))}")
        role = reply[0].decode() if isinstance(reply, list) and reply else ""
        if role == "sentinel":
            raise IndexUnavailableError(f"{where} is a Sentinel: use redis+sentinel://HOST:PORT,…/MASTER")
        if role == "slave" and not (self._reads_only and self.address.kind is RedisKind.STANDALONE):
            master = RedisNode(host=reply[1].decode(), port=int(reply[2]))
            raise IndexUnavailableError(
                f"{where} is a replica of {master}; the index is written to and read from the master"
            )

    async def _open_socket(self, node: RedisNode | None, secrets: Secrets) -> RedisProtocol:
        loop = asyncio.get_running_loop()
        try:
            if node is None:
                _, protocol = await loop.create_unix_connection(RedisProtocol, self.address.socket_path)
                return protocol
            name = (self.address.server_name or node.host) if secrets.tls is not None else None
            _, protocol = await loop.create_connection(
                lambda: RedisProtocol(in_cluster=self.in_cluster),
                node.host,
                node.port,
                ssl=secrets.tls,
                server_hostname=name,
            )
        except (OSError, ValueError) as error:  # ValueError if the host is not a valid host name
            where = str(node or self.address.socket_path)
            raise IndexUnavailableError(f"{where}: {_connect_fault(error)}") from error
        return protocol


def _all_checked(replies: Sequence[Any], where: str) -> list[Any]:
    """Return the replies. Raise IndexUnavailableError for the first error among them."""
    try:
        return [checked(reply) for reply in replies]
    except IndexUnavailableError as error:
        raise IndexUnavailableError(f"{where}: {error}") from None


def _announced(entry: Sequence[Any], *, asked: RedisNode) -> RedisNode:
    """Return a node in the answer to CLUSTER SLOTS; one without a name has the host of the asked node."""
    host = (entry[0] or b"").decode()
    return RedisNode(host=asked.host if host in ("", "?") else host, port=int(entry[1]))


def _majority(nodes: Sequence[RedisNode]) -> int:
    return len(nodes) // 2 + 1


def _connect_fault(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message} (see ca_file and server_name in --redis)"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection: {error.reason or error} (a server without TLS is redis://)"
    return str(error) or type(error).__name__


def _read_password(address: RedisAddress, name: str) -> str:
    path = address.files.get(name)
    if path is None:
        return ""
    try:
        # editors and `echo` end the file with a line break; no password contains one
        password = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise IndexUnavailableError(f"{name} {path}: {_file_fault(error)}") from None
    if not password:
        raise IndexUnavailableError(f"{name} {path}: it is empty")
    return password


def _read_tls(address: RedisAddress) -> ssl.SSLContext:
    ca_file, cert_file = address.files.get("ca_file"), address.files.get("cert_file")
    what = f"ca_file {ca_file}"
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            what = f"cert_file {cert_file}"
            context.load_cert_chain(cert_file, address.files.get("key_file"), password=_no_passphrase)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise IndexUnavailableError(f"{what}: {_file_fault(error)}") from None
    return context


def _no_passphrase() -> str:
    # without this, OpenSSL would ask on the terminal
    raise ValueError("the key is encrypted; give one without a passphrase")


def _file_fault(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
