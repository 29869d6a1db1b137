"""Queries Redis' state, reads the index, and tries it: sends each pod a fresh prompt and looks it up.

A trial's prompt is sent as token ids, so tokenizers cannot cause a miss; events, block size, seed or model can. Only
plain read commands are sent to Redis; nothing is judged.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from extproc.models.models import ServedModel
from extproc.requests.request import TokenPrompt
from kvmesh.blocks.block_keys import root_key
from kvmesh.blocks.source import SourceStatus
from kvmesh.errors import IndexUnavailableError, RedisUrlError
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.redis.address import read_address
from kvmesh.redis.link import RedisLink, pack
from operate.doctor.facts import Expected, IndexFacts, PickerFacts, PodFacts, RedisFacts, TrialFacts
from operate.doctor.gather_pods import served_name
from operate.doctor.questions import Client

PINGS = 15
_PING = pack("PING")
DEFAULT_SEED = "kvmesh"
DEFAULT_BLOCK_TOKENS = 16
BLOCKS = 3  # full blocks in a trial's prompt
MOST_TOKENS = 4096  # a pod with larger blocks is not tried
PAUSE_SECONDS = 0.02  # between lookups


async def gather_redis(access: str, *, timeout_seconds: float) -> RedisFacts:
    """Return Redis' state; `problem` is set if it cannot be used."""
    label = "redis"
    try:
        label = read_address(access).label
        link = RedisLink(access, reads_only=True, connect_timeout_seconds=timeout_seconds)
    except RedisUrlError as error:
        return RedisFacts(label=label, problem=str(error))
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _read(link, label)
    except (IndexUnavailableError, TimeoutError) as error:
        return RedisFacts(label=label, problem=str(error) or f"no answer within {timeout_seconds:g} s")
    finally:
        await link.close()


async def _read(link: RedisLink, label: str) -> RedisFacts:
    # one section per command: Redis 6 does not accept several
    commands = b"".join(pack("INFO", section) for section in ("server", "memory", "persistence", "replication"))
    info: dict[str, str] = {}
    for reply in await link.request(commands, replies=4):
        info |= _lines(reply)
    times = []
    for _ in range(PINGS):
        began = time.perf_counter()
        await link.request(_PING, replies=1)  # an error reply takes as long
        times.append(time.perf_counter() - began)
    began = time.time()
    (clock,) = await link.request(pack("TIME"), replies=1)
    here = (began + time.time()) / 2
    return RedisFacts(
        label=label,
        version=info.get("valkey_version") or info.get("redis_version", ""),
        is_valkey="valkey_version" in info,
        role=info.get("role", ""),
        maxmemory_policy=info.get("maxmemory_policy", ""),
        maxmemory_bytes=_number(info.get("maxmemory")),
        used_bytes=_number(info.get("used_memory")),
        appends_to_file=info.get("aof_enabled") == "1",
        round_trip_seconds=median(times),
        clock_ahead_seconds=int(clock[0]) + int(clock[1]) / 1e6 - here if isinstance(clock, list) else 0.0,
    )


def _lines(reply: object) -> Mapping[str, str]:
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""  # empty for an error reply
    return {name: value for name, _, value in (line.partition(":") for line in text.splitlines())}


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


async def gather_index(access: str, *, hash_seed: str, timeout_seconds: float) -> IndexFacts:
    """Return the index's status and sources."""
    try:
        reader = PrefixIndexReader(url=access, hash_seed=hash_seed)
    except RedisUrlError as error:
        return IndexFacts(problem=str(error))
    try:
        async with asyncio.timeout(timeout_seconds):
            status = await reader.status()
    except (IndexUnavailableError, TimeoutError) as error:
        return IndexFacts(problem=str(error) or f"no answer within {timeout_seconds:g} s")
    finally:
        await reader.close()
    return IndexFacts(
        indexer_alive=status.indexer_alive, unreadable=tuple(status.unreadable), sources=tuple(status.sources)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Runs the trials."""

    client: Client
    access: str
    expected: Expected
    picker: PickerFacts | None  # a running picker, also asked for its match
    visible_within_seconds: float  # deadline for a served prompt to appear in the index

    async def gather(self, pods: Sequence[PodFacts]) -> tuple[TrialFacts, ...]:
        """Try every pod with each configured model that it serves."""
        try:
            reader = PrefixIndexReader(url=self.access, hash_seed=self.expected.hash_seed)
        except RedisUrlError:
            return ()  # reported by `redis-answers`
        try:
            tries = [
                self._try(reader, pod, model, name)
                for pod in pods
                for model in self.expected.models.served
                if not pod.problem and (name := served_name(model, pod.served)) is not None and _prompt_tokens(pod)
            ]
            return tuple([facts for facts in await asyncio.gather(*tries) if facts is not None])
        finally:
            await reader.close()

    async def _try(self, reader: PrefixIndexReader, pod: PodFacts, model: ServedModel, name: str) -> TrialFacts | None:
        """Return the trial's result, or None if the index cannot be read."""
        try:
            before = _batches(await self._sources(reader), pod.endpoint)
            ids = await self._fresh_prompt(pod, name)
            problem = ids if isinstance(ids, str) else await self._send(pod, name, ids)
            if problem or isinstance(ids, str):
                return TrialFacts(endpoint=pod.endpoint, model=model.name, problem=problem)
            matched, waited = await self._look(reader, pod.endpoint, model.name, ids)
            after = _batches(await self._sources(reader), pod.endpoint)
            return TrialFacts(
                endpoint=pod.endpoint,
                model=model.name,
                tokens=len(ids),
                matched_tokens=matched,
                waited_seconds=waited,
                batches=sum(max(count - before.get(rank, 0), 0) for rank, count in after.items()),
                found_as=None if matched else await self._found_as(reader, pod, model, ids),
                picker_tokens=await self._ask_picker(pod.endpoint, model, ids) if matched else None,
            )
        except (IndexUnavailableError, TimeoutError):
            return None  # reported by `index-follows`

    async def _fresh_prompt(self, pod: PodFacts, name: str) -> list[int] | str:
        """Return valid token ids of a new prompt (random words, tokenized by the pod), or an error message."""
        words = " ".join(f"{random.getrandbits(32):08x}" for _ in range(_prompt_tokens(pod)))
        body = msgspec.json.encode({"model": name, "prompt": words})
        page = await self.client.ask_pod(pod.endpoint, "/tokenize", post=body)
        tokens = page.field("tokens")
        if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each < 1 << 32 for each in tokens):
            return f"/tokenize: {page.problem or page.status}"
        return tokens[: _prompt_tokens(pod)]

    async def _send(self, pod: PodFacts, name: str, ids: Sequence[int]) -> str:
        """Send the prompt; return an error message, or ''."""
        body = msgspec.json.encode({"model": name, "prompt": ids, "max_tokens": 1, "temperature": 0})
        page = await self.client.ask_pod(pod.endpoint, "/v1/completions", post=body)
        if (why := self.client.pods.why_refused(page.status)) is not None:
            return f"/v1/completions: {why}"
        said = page.body[:200].decode("utf-8", "replace")
        return "" if page.status == 200 else page.problem or f"/v1/completions answers {page.status}: {said}"

    async def _look(
        self, reader: PrefixIndexReader, endpoint: str, model: str, ids: Sequence[int]
    ) -> tuple[int, float]:
        """Poll until the endpoint holds the prompt or the deadline; return matched tokens and elapsed seconds."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            matched = await self._matched(reader, endpoint, self.expected.hash_seed, model, ids)
            waited = clock() - began
            if matched or waited >= self.visible_within_seconds:
                return matched, waited
            await asyncio.sleep(PAUSE_SECONDS)

    async def _found_as(
        self, reader: PrefixIndexReader, pod: PodFacts, model: ServedModel, ids: Sequence[int]
    ) -> tuple[str, str] | None:
        for seed, name in _other_names(self.expected, pod, model):
            if await self._matched(reader, pod.endpoint, seed, name, ids):
                return seed, name
        return None

    async def _matched(
        self, reader: PrefixIndexReader, endpoint: str, seed: str, model: str, ids: Sequence[int]
    ) -> int:
        async with asyncio.timeout(self.client.timeout_seconds):
            tokens = TokenPrompt.of(ids).token_bytes
            found = await reader.lookup(tokens, root=root_key(hash_seed=seed, model=model))
        names = (endpoint, *found.ranked.get(endpoint, ()))  # the pod gave it to any of its ranks
        return max(found.matched_blocks.get(name, 0) * (found.block_size.get(name) or 0) for name in names)

    async def _ask_picker(self, endpoint: str, model: ServedModel, ids: Sequence[int]) -> int | None:
        if self.picker is None or endpoint not in self.picker.endpoints:
            return None
        body = msgspec.json.encode({"model": model.name, "prompt": ids, "max_tokens": 1})
        page = await self.client.ask_admin(f"{self.picker.url}/v1/explain?path=/v1/completions", post=body)
        candidates = page.field("candidates")
        for candidate in candidates if isinstance(candidates, list) else ():
            if isinstance(candidate, Mapping) and candidate.get("endpoint") == endpoint:
                tokens = candidate.get("indexed_tokens")
                return tokens if isinstance(tokens, int) else None
        return None

    async def _sources(self, reader: PrefixIndexReader) -> Sequence[SourceStatus]:
        async with asyncio.timeout(self.client.timeout_seconds):
            return await reader.sources()


def _prompt_tokens(pod: PodFacts) -> int:
    """Return the prompt's length, or 0 for pods that are not tried (blocks too large, or context too short)."""
    wanted = BLOCKS * max(pod.block_sizes, default=DEFAULT_BLOCK_TOKENS) + 1
    longest = pod.served.max_model_len if pod.served is not None else None
    return wanted if wanted <= MOST_TOKENS and (longest is None or wanted + 1 < longest) else 0


def _batches(sources: Sequence[SourceStatus], endpoint: str) -> Mapping[int, int]:
    return {source.dp_rank: source.last_seq + 1 for source in sources if source.endpoint == endpoint}


def _other_names(expected: Expected, pod: PodFacts, model: ServedModel) -> Iterator[tuple[str, str]]:
    names = dict.fromkeys((model.name, *sorted(model.aliases)))
    names |= dict.fromkeys(sorted(pod.served.models) if pod.served is not None else ())
    names |= dict.fromkeys(other.name for other in expected.models.served)
    for seed in dict.fromkeys((expected.hash_seed, DEFAULT_SEED, "")):
        for name in names:
            if (seed, name) != (expected.hash_seed, model.name):
                yield seed, name
