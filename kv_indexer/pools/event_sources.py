"""Asks pods over HTTP where they publish KV events, and which models they serve.

A pod is trusted only about itself: it may announce TCP ports of its host, within a configured range.
"""

import asyncio
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, TypeGuard

import msgspec

from kv_indexer.pools.members import Member, PoolFeed, own_rank
from kvmesh.blocks.source import EventAddresses, reachable
from kvmesh.errors import FeedLostError, NoEventSourceError, PodRefusesError, UnknownModelError
from kvmesh.pods.pod_http import MAX_MODELS_BYTES, PodPages
from kvmesh.pods.served_models import ModelCard, first_base_model, model_cards

MAX_SOURCES_BYTES = 256 << 10
MAX_RANKS = 1024  # exclusive limit on a rank
LONGEST_NAME = 256  # limit on a model's name in characters; it is part of every block key
SHOWN_CHARACTERS = 100  # of a pod's answer, in an error
ANY_PORT = range(1024, 65536)
QUESTIONS_AT_ONCE = 64  # if thousands of pods appear at once, the others wait before their deadlines begin


class _Publisher(msgspec.Struct):
    """One rank's `KVEventsConfig` (vllm/config/kv_events.py): the fields used here."""

    endpoint: str
    replay_endpoint: str | None = None
    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"


_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class _SglangPublisher(msgspec.Struct):
    """SGLang's description of its publishers (`describe_kv_events_publisher`): each rank has the next port."""

    endpoint_port_base: _Port
    replay_endpoint_port_base: _Port | None = None
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1


class _ServerInfo(msgspec.Struct):
    kv_events: _SglangPublisher | None = None


_sources = msgspec.json.Decoder(dict[str, _Publisher | None])
_server_info = msgspec.json.Decoder(_ServerInfo)


class EventSourceDirectory:
    """Knows where pods publish: from the settings, otherwise from the pods.

    vLLM >= 0.31 says so in `GET /kv_event_sources`, SGLang in `GET /server_info`.
    """

    def __init__(
        self,
        *,
        pages: PodPages,
        configured: Mapping[str, tuple[EventAddresses, ...]],
        ports: range = ANY_PORT,
        timeout_seconds: float = 2.0,
    ) -> None:
        """`configured` addresses are not checked; pods may announce only `ports`."""
        self._pages = pages
        self._configured = configured
        self._ports = ports
        self._timeout = timeout_seconds

    async def find(self, endpoint: str) -> Mapping[int, EventAddresses]:
        """Return data-parallel rank -> addresses. Raise FeedLostError, or NoEventSourceError if there are none."""
        if endpoint in self._configured:
            return dict(enumerate(self._configured[endpoint]))
        status, body = await self._get(endpoint, "/kv_event_sources", max_body_bytes=MAX_SOURCES_BYTES)
        if status == 404:
            publishers = await self._of_sglang(endpoint)
        elif status != 200:
            raise FeedLostError(f"{endpoint}/kv_event_sources answers {status}")
        else:
            try:
                publishers = {_rank(name): each for name, each in _sources.decode(body).items() if _publishes(each)}
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise NoEventSourceError(f"{endpoint}/kv_event_sources is not what vLLM answers: {error}") from error
        ranks = self._own(endpoint, publishers)
        if not ranks:
            raise NoEventSourceError(
                f"{endpoint} publishes no KV events: start it with --kv-events-config "
                '\'{"enable_kv_cache_events": true, "publisher": "zmq", …}\''
            )
        return ranks

    async def _of_sglang(self, endpoint: str) -> dict[int, _Publisher]:
        """Return the publishers by rank if the pod is SGLang. Raise FeedLostError, or NoEventSourceError."""
        status, body = await self._get(endpoint, "/server_info", max_body_bytes=MAX_SOURCES_BYTES)
        if status != 200:
            raise NoEventSourceError(
                f"{endpoint} has no /kv_event_sources (vLLM < 0.31) and no /server_info (SGLang): name it in "
                "--event-sources"
            )
        try:
            found = _server_info.decode(body).kv_events
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise NoEventSourceError(f"{endpoint}/server_info is not what SGLang answers: {error}") from error
        if found is None:
            return {}
        base, replay = found.endpoint_port_base, found.replay_endpoint_port_base
        return {
            rank: _Publisher(
                endpoint=f"tcp://*:{base + rank}",
                replay_endpoint=None if replay is None else f"tcp://*:{replay + rank}",
            )
            for rank in range(found.dp_size)
        }

    def _own(self, endpoint: str, publishers: Mapping[int, "_Publisher"]) -> Mapping[int, EventAddresses]:
        """Return the addresses by rank. Raise NoEventSourceError if the pod may not announce one of them."""
        ranks = {}
        for rank, publisher in publishers.items():
            events, replay = publisher.endpoint, publisher.replay_endpoint
            ranks[rank] = EventAddresses(
                events=own_address(events, endpoint=endpoint, ports=self._ports),
                replay=own_address(replay, endpoint=endpoint, ports=self._ports) if replay else None,
                announced=True,
            )
        given = [address for each in ranks.values() for address in (each.events, each.replay) if address]
        if len(given) != len(set(given)):
            raise NoEventSourceError(f"{endpoint} announces one address twice")
        return ranks

    async def served_models(self, endpoint: str) -> AbstractSet[str]:
        """Return the model names that the pod answers to; empty if it lists none. Raise FeedLostError."""
        status, models = await self._list_models(endpoint)
        return {model.id for model in models} if status == 200 else set()

    async def first_model(self, endpoint: str) -> str | None:
        """Return the model that the pod's blocks belong to, or None if it names none. Raise FeedLostError."""
        status, models = await self._list_models(endpoint)
        if status != 200:
            raise FeedLostError(f"{endpoint}/v1/models answers {status}")
        return first_base_model(models)

    async def _list_models(self, endpoint: str) -> tuple[int, Sequence[ModelCard]]:
        status, body = await self._get(endpoint, "/v1/models", max_body_bytes=MAX_MODELS_BYTES)
        try:
            return status, model_cards(body) if status == 200 else ()
        except ValueError as error:
            raise FeedLostError(f"{endpoint}/v1/models is not what vLLM answers: {error}") from error

    async def _get(self, endpoint: str, path: str, *, max_body_bytes: int) -> tuple[int, bytes]:
        try:
            answer = await self._pages.get(endpoint, path, timeout_seconds=self._timeout, max_body_bytes=max_body_bytes)
        except (OSError, ValueError) as error:  # including TimeoutError and HttpResponseError
            raise FeedLostError(f"{endpoint}{path}: {str(error) or type(error).__name__}") from error
        if (why := self._pages.why_refused(answer.status)) is not None:
            raise PodRefusesError(f"{endpoint}{path}: {why}")
        return answer.status, answer.body


def _rank(name: str) -> int:
    # each rank becomes a stream with its own sockets
    rank = int(name)
    if str(rank) != name or not 0 <= rank < MAX_RANKS:
        raise ValueError(f"{name[:20]!r} is no data-parallel rank from 0 to {MAX_RANKS - 1}")
    return rank


def _publishes(publisher: _Publisher | None) -> TypeGuard[_Publisher]:
    return publisher is not None and publisher.enable_kv_cache_events and publisher.publisher in (None, "zmq")


def own_address(announced: str, *, endpoint: str, ports: range) -> str:
    """Return the ZMQ address that a pod announces, with the host at which we reach the pod.

    Raise NoEventSourceError if it has another host, is no TCP port, or is not in `ports`.
    """
    host = endpoint.rpartition(":")[0]
    there, _, port = reachable(announced, None, host=host).events.rpartition(":")
    shown = announced[:SHOWN_CHARACTERS]
    if not there.startswith("tcp://") or not _is_same_host(there.removeprefix("tcp://"), host):
        raise NoEventSourceError(
            f"{endpoint} announces events at {shown!r}, which is no TCP port of {host}; have it announce tcp://*:PORT, "
            "or name the address in --event-sources (of a pool: kvmesh.io/events-port)"
        )
    if not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) not in ports:
        raise NoEventSourceError(
            f"{endpoint} announces events at {shown!r}, and only ports from {ports.start} to {ports.stop - 1} are "
            "followed: see --event-ports"
        )
    return f"tcp://{host}:{int(port)}"


def _is_same_host(one: str, other: str) -> bool:
    if one.lower() == other.lower():
        return True
    addresses = [_ip(each) for each in (one, other)]
    if None not in addresses:
        return addresses[0] == addresses[1]
    names = {one.lower(), other.lower()}
    return "localhost" in names and any(each is not None and each.is_loopback for each in addresses)


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


class MemberDirectory:
    """Answers for the current members of pools."""

    def __init__(
        self, *, members: Mapping[str, Member], pods: EventSourceDirectory, at_once: int = QUESTIONS_AT_ONCE
    ) -> None:
        """`members` by address, updated in place; `pods` are asked for everything that no pool declares."""
        self._members = members
        self._pods = pods
        self._limit = asyncio.Semaphore(at_once)

    async def find(self, endpoint: str) -> Mapping[int, EventAddresses]:
        """See `find_streams.EventDirectory`; the addresses are `PoolFeed`s."""
        async with self._limit:
            member = self._members.get(endpoint)
            if member is None:
                raise FeedLostError(f"{endpoint} is in no pool any more")
            ranks = await self._ranks(member)
            model = member.model or await self._model(endpoint)
        return {
            rank: PoolFeed(
                events=each.events, replay=each.replay, announced=each.announced, pool=member.pool, model=model
            )
            for rank, each in ranks.items()
        }

    async def served_models(self, endpoint: str) -> AbstractSet[str]:
        """See `find_streams.EventDirectory`."""
        async with self._limit:
            return await self._pods.served_models(endpoint)

    async def _ranks(self, member: Member) -> Mapping[int, EventAddresses]:
        if member.feed is not None:
            return {member.endpoint.rank or 0: member.feed}
        ranks = own_rank(await self._pods.find(member.endpoint.address), member)
        if not ranks:
            raise NoEventSourceError(
                f"{member.endpoint.address} is port {member.endpoint.rank} of its pod, which names fewer data-parallel "
                "ranks: compare the pool's targetPorts with --data-parallel-size"
            )
        return ranks

    async def _model(self, endpoint: str) -> str:
        model = await self._pods.first_model(endpoint)
        if not model:
            raise UnknownModelError(
                f"{endpoint} names no model in /v1/models: declare it on the pool (annotation kvmesh.io/model)"
            )
        if len(model) > LONGEST_NAME:
            raise UnknownModelError(f"{endpoint} names a model of {len(model)} characters: no more than {LONGEST_NAME}")
        return model
