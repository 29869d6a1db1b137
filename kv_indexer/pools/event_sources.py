"""Asks pods over HTTP where they publish KV events, and which models they serve."""

import asyncio
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from kv_indexer.pools.members import Member, PoolFeed, own_rank
from kvmesh.blocks.source import EventAddresses, reachable
from kvmesh.errors import FeedLostError, NoEventSourceError, UnknownModelError
from kvmesh.pods.pod_http import PodPages
from kvmesh.pods.served_models import ModelCard, first_base_model, model_cards

ANSWER_LIMIT_BYTES = 1 << 20
MAX_RANKS = 1024
QUESTIONS_AT_ONCE = 64  # when thousands of pods appear at once, the others wait before their deadlines begin


class _Publisher(msgspec.Struct):
    """One rank's `KVEventsConfig` (vllm/config/kv_events.py), as far as it matters here."""

    endpoint: str
    replay_endpoint: str | None = None
    enable_kv_cache_events: bool = True
    publisher: str | None = "zmq"


_sources = msgspec.json.Decoder(dict[str, _Publisher | None])


class EventSourceDirectory:
    """Knows where pods publish: from the settings, else from `GET /kv_event_sources` (vLLM >= 0.31)."""

    def __init__(
        self, *, pages: PodPages, configured: Mapping[str, tuple[EventAddresses, ...]], timeout_seconds: float = 2.0
    ) -> None:
        self._pages = pages
        self._configured = configured
        self._timeout = timeout_seconds

    async def find(self, endpoint: str) -> Mapping[int, EventAddresses]:
        """Return data-parallel rank -> addresses. Raise FeedLostError, or NoEventSourceError if there are none."""
        if endpoint in self._configured:
            return dict(enumerate(self._configured[endpoint]))
        status, body = await self._get(endpoint, "/kv_event_sources")
        if status == 404:
            raise NoEventSourceError(f"{endpoint} has no /kv_event_sources (vLLM < 0.31): name it in --event-sources")
        if status != 200:
            raise FeedLostError(f"{endpoint}/kv_event_sources answers {status}")
        host = endpoint.rpartition(":")[0]
        try:
            found = {_rank(name): _addresses(publisher, host) for name, publisher in _sources.decode(body).items()}
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise NoEventSourceError(f"{endpoint}/kv_event_sources is not what vLLM answers: {error}") from error
        ranks = {rank: addresses for rank, addresses in found.items() if addresses is not None}
        if not ranks:
            raise NoEventSourceError(
                f"{endpoint} publishes no KV events: start it with --kv-events-config "
                '\'{"enable_kv_cache_events": true, "publisher": "zmq", …}\''
            )
        return ranks

    async def served_models(self, endpoint: str) -> AbstractSet[str]:
        """Return the model names that the pod answers to; none if it lists none. Raise FeedLostError."""
        status, models = await self._list_models(endpoint)
        return {model.id for model in models} if status == 200 else set()

    async def first_model(self, endpoint: str) -> str | None:
        """Return the model that the pod's blocks belong to, None if it names none. Raise FeedLostError."""
        status, models = await self._list_models(endpoint)
        if status != 200:
            raise FeedLostError(f"{endpoint}/v1/models answers {status}")
        return first_base_model(models)

    async def _list_models(self, endpoint: str) -> tuple[int, Sequence[ModelCard]]:
        status, body = await self._get(endpoint, "/v1/models")
        try:
            return status, model_cards(body) if status == 200 else ()
        except ValueError as error:
            raise FeedLostError(f"{endpoint}/v1/models is not what vLLM answers: {error}") from error

    async def _get(self, endpoint: str, path: str) -> tuple[int, bytes]:
        try:
            answer = await self._pages.get(
                endpoint, path, timeout_seconds=self._timeout, max_body_bytes=ANSWER_LIMIT_BYTES
            )
        except (OSError, ValueError) as error:  # TimeoutError and HttpResponseError among them
            raise FeedLostError(f"{endpoint}{path}: {str(error) or type(error).__name__}") from error
        return answer.status, answer.body


def _rank(name: str) -> int:
    # each rank becomes a stream with sockets of its own
    rank = int(name)
    if str(rank) != name or not 0 <= rank < MAX_RANKS:
        raise ValueError(f"{name[:20]!r} is no data-parallel rank from 0 to {MAX_RANKS - 1}")
    return rank


def _addresses(publisher: _Publisher | None, host: str) -> EventAddresses | None:
    if publisher is None or not publisher.enable_kv_cache_events or publisher.publisher not in (None, "zmq"):
        return None
    return reachable(publisher.endpoint, publisher.replay_endpoint, host=host)


class MemberDirectory:
    """Answers for those pods that are members of a pool, as they change."""

    def __init__(
        self, *, members: Mapping[str, Member], pods: EventSourceDirectory, at_once: int = QUESTIONS_AT_ONCE
    ) -> None:
        """Take `members` by address, as it changes, and `pods` to ask what no pool declares."""
        self._members = members
        self._pods = pods
        self._limit = asyncio.Semaphore(at_once)

    async def find(self, endpoint: str) -> Mapping[int, EventAddresses]:
        """See `find_streams.EventDirectory`; the addresses are `PoolFeed`s."""
        async with self._limit:
            member = self._member(endpoint)
            ranks = await self._ranks(member)
            model = member.model or await self._model(endpoint)
        return {
            rank: PoolFeed(events=addresses.events, replay=addresses.replay, pool=member.pool, model=model)
            for rank, addresses in ranks.items()
        }

    async def served_models(self, endpoint: str) -> AbstractSet[str]:
        """See `find_streams.EventDirectory`."""
        async with self._limit:
            return await self._pods.served_models(endpoint)

    def _member(self, endpoint: str) -> Member:
        member = self._members.get(endpoint)
        if member is None:
            raise FeedLostError(f"{endpoint} is in no pool any more")
        return member

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
        return model
