"""Ask a pod over HTTP where it publishes KV events and which models it serves. Used by the service."""

from collections.abc import Mapping

import msgspec

from kv_indexer.pools.pod_pages import PodPages
from kvmesh.blocks.source import EventAddresses, reachable
from kvmesh.errors import FeedLostError, NoEventSourceError
from kvmesh.pods.served_models import first_base_model, model_cards

ANSWER_LIMIT_BYTES = 1 << 20
MAX_RANKS = 1024


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
        self,
        *,
        pages: PodPages,
        configured: Mapping[str, tuple[EventAddresses, ...]],
        timeout_seconds: float = 2.0,
    ) -> None:
        self._pages = pages
        self._configured = configured
        self._timeout = timeout_seconds

    async def find(self, endpoint: str) -> dict[int, EventAddresses]:
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

    async def served_models(self, endpoint: str) -> set[str]:
        """Return the model names that the pod answers to. Raise FeedLostError."""
        status, body = await self._get(endpoint, "/v1/models")
        try:
            return {card.id for card in model_cards(body)} if status == 200 else set()
        except ValueError as error:
            raise FeedLostError(f"{endpoint}/v1/models is not what vLLM answers: {error}") from error

    async def first_model(self, endpoint: str) -> str | None:
        """See `ports.PodDirectory`."""
        status, body = await self._get(endpoint, "/v1/models")
        if status != 200:
            raise FeedLostError(f"{endpoint}/v1/models answers {status}")
        try:
            return first_base_model(model_cards(body))
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
    replay = publisher.replay_endpoint
    return EventAddresses(
        events=reachable(publisher.endpoint, host=host), replay=reachable(replay, host=host) if replay else None
    )
