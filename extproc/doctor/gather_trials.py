"""Sends each pod one fresh prompt for one token, and looks for it in the index: all of the chain at once.

The prompt is token ids, so no tokenizer takes part: what is not found was lost by events, block size, seed or model.
"""

import asyncio
import random
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence

import aiohttp
import msgspec

from extproc.doctor.facts import Expected, PickerFacts, PodFacts, TrialFacts
from extproc.doctor.http_page import Page, ask
from extproc.models.models import ServedModel
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.blocks.block_keys import root_key
from kvmesh.blocks.source import SourceStatus
from kvmesh.errors import IndexUnavailableError, RedisUrlError
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.redis.address import RedisAccess

USUAL_SEED = "kvmesh"
USUAL_BLOCK_TOKENS = 16
BLOCKS = 3  # full ones of the prompt
MOST_TOKENS = 4096  # a pod with larger blocks is not tried
PAUSE_SECONDS = 0.02  # between two looks


class Trials:
    """Tries pods; `picker` is a running one to be asked, too."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        access: RedisAccess | str,
        expected: Expected,
        picker: PickerFacts | None,
        login: AdminLogin,
        timeout_seconds: float,
        visible_within_seconds: float,
    ) -> None:
        self._http = http
        self._access = access
        self._expected = expected
        self._picker = picker if picker is not None and not picker.problem else None
        self._login = login
        self._timeout_seconds = timeout_seconds
        self._visible_within_seconds = visible_within_seconds

    async def gather(self, pods: Sequence[PodFacts]) -> tuple[TrialFacts, ...]:
        """Try every pod with each model that it serves under a name of ours."""
        try:
            reader = PrefixIndexReader(url=self._access, hash_seed=self._expected.hash_seed)
        except RedisUrlError:
            return ()  # the check of Redis says so
        try:
            tries = [
                self._try(reader, pod, model, name)
                for pod in pods
                for model in self._expected.models.served
                if not pod.problem and (name := _served_name(model, pod)) is not None and _prompt_tokens(pod)
            ]
            return tuple([facts for facts in await asyncio.gather(*tries) if facts is not None])
        finally:
            await reader.close()

    async def _try(self, reader: PrefixIndexReader, pod: PodFacts, model: ServedModel, name: str) -> TrialFacts | None:
        """Return what became of the prompt, or None where the index cannot be read."""
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
            return None  # the check of the index says so

    async def _fresh_prompt(self, pod: PodFacts, name: str) -> list[int] | str:
        """Return token ids that the model has and nobody has sent before: random words, as the pod tokenizes them."""
        words = " ".join(f"{random.getrandbits(32):08x}" for _ in range(_prompt_tokens(pod)))
        body = msgspec.json.encode({"model": name, "prompt": words})
        page = await self._post(f"http://{pod.endpoint}/tokenize", body)
        content = page.json() if page.status == 200 else None
        tokens = content.get("tokens") if isinstance(content, Mapping) else None
        if not isinstance(tokens, list) or not all(type(each) is int and 0 <= each < 1 << 32 for each in tokens):
            return f"/tokenize: {page.problem or page.status}"
        return tokens[: _prompt_tokens(pod)]

    async def _send(self, pod: PodFacts, name: str, ids: Sequence[int]) -> str:
        """Return why the pod did not serve the prompt, or ''."""
        body = msgspec.json.encode({"model": name, "prompt": ids, "max_tokens": 1, "temperature": 0})
        page = await self._post(f"http://{pod.endpoint}/v1/completions", body)
        said = page.body[:200].decode("utf-8", "replace")
        return "" if page.status == 200 else page.problem or f"/v1/completions answers {page.status}: {said}"

    async def _look(
        self, reader: PrefixIndexReader, endpoint: str, model: str, ids: Sequence[int]
    ) -> tuple[int, float]:
        """Look until the prompt is seen at the endpoint; return matched tokens and the seconds it took."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while True:
            matched = await self._matched(reader, endpoint, self._expected.hash_seed, model, ids)
            waited = clock() - began
            if matched or waited >= self._visible_within_seconds:
                return matched, waited
            await asyncio.sleep(PAUSE_SECONDS)

    async def _found_as(
        self, reader: PrefixIndexReader, pod: PodFacts, model: ServedModel, ids: Sequence[int]
    ) -> tuple[str, str] | None:
        for seed, name in _other_names(self._expected, pod, model):
            if await self._matched(reader, pod.endpoint, seed, name, ids):
                return seed, name
        return None

    async def _matched(
        self, reader: PrefixIndexReader, endpoint: str, seed: str, model: str, ids: Sequence[int]
    ) -> int:
        async with asyncio.timeout(self._timeout_seconds):
            found = await reader.lookup(_packed(ids), root=root_key(hash_seed=seed, model=model))
        return found.matched_blocks.get(endpoint, 0) * (found.block_size.get(endpoint) or 0)

    async def _ask_picker(self, endpoint: str, model: ServedModel, ids: Sequence[int]) -> int | None:
        if self._picker is None or endpoint not in self._picker.endpoints:
            return None
        page = await self._post(
            f"{self._picker.url}/v1/explain?path=/v1/completions",
            msgspec.json.encode({"model": model.name, "prompt": ids, "max_tokens": 1}),
            login=self._login,
        )
        content = page.json() if page.status == 200 else None
        candidates = content.get("candidates") if isinstance(content, Mapping) else None
        for candidate in candidates if isinstance(candidates, list) else ():
            if isinstance(candidate, Mapping) and candidate.get("endpoint") == endpoint:
                tokens = candidate.get("indexed_tokens")
                return tokens if isinstance(tokens, int) else None
        return None

    async def _sources(self, reader: PrefixIndexReader) -> Sequence[SourceStatus]:
        async with asyncio.timeout(self._timeout_seconds):
            return await reader.sources()

    async def _post(self, url: str, body: bytes, *, login: AdminLogin | None = None) -> Page:
        return await ask(self._http, url, timeout_seconds=self._timeout_seconds, post=body, login=login)


def _served_name(model: ServedModel, pod: PodFacts) -> str | None:
    names = (model.name, *sorted(model.aliases))
    return names[0] if pod.served is None else next((name for name in names if name in pod.served.models), None)


def _prompt_tokens(pod: PodFacts) -> int:
    """Return how long the prompt must be, 0 for a pod that is not tried."""
    wanted = BLOCKS * max(pod.block_sizes, default=USUAL_BLOCK_TOKENS) + 1
    longest = pod.served.max_model_len if pod.served is not None else None
    return wanted if wanted <= MOST_TOKENS and (longest is None or wanted + 1 < longest) else 0


def _batches(sources: Sequence[SourceStatus], endpoint: str) -> Mapping[int, int]:
    """Return the numbers of the last batch by rank, counted from 1."""
    return {source.dp_rank: source.last_seq + 1 for source in sources if source.endpoint == endpoint}


def _other_names(expected: Expected, pod: PodFacts, model: ServedModel) -> Iterator[tuple[str, str]]:
    names = dict.fromkeys((model.name, *sorted(model.aliases)))
    names |= dict.fromkeys(sorted(pod.served.models) if pod.served is not None else ())
    names |= dict.fromkeys(other.name for other in expected.models.served)
    for seed in dict.fromkeys((expected.hash_seed, USUAL_SEED, "")):
        for name in names:
            if (seed, name) != (expected.hash_seed, model.name):
                yield seed, name


def _packed(ids: Sequence[int]) -> bytes:
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
