"""The hit rate of one unlimited cache: what a single pod that forgets nothing would have found of the same requests.

Called by `summary` after a run, on the run's own order of events: a request finds the blocks of every prompt that was
sent before it, and of every answer that was complete.
"""

import heapq
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from operate.load.script import Record, Session
from podsim.model_folder import ModelFolder
from podsim.prompts import chat_token_ids, completion_token_ids
from podsim.wire.openai_requests import ChatRequest

BLOCK_TOKENS = 16  # podsim's and vLLM's default


@dataclass(frozen=True, slots=True, kw_only=True)
class OneCacheHits:
    """Sums over the measured requests."""

    prompt_tokens: int
    cached_tokens: int
    miscounted: int  # requests whose prompt had another number of tokens for the pod: must be 0

    @property
    def rate(self) -> float:
        """Cached share of the prompt tokens."""
        return self.cached_tokens / max(1, self.prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    record: Record
    prompt: Sequence[int]
    answer: Sequence[int]


def one_cache(
    sessions: Sequence[Session], records: Sequence[Record], *, folder: ModelFolder, measured_from: float
) -> OneCacheHits:
    """Play the answered requests against one cache."""
    seen: set[int] = set()
    finished: list[tuple[float, int, Sequence[int]]] = []
    prompt_tokens = cached_tokens = miscounted = 0
    sent = sorted(_tokenized(sessions, records, folder=folder), key=lambda each: each.record.sent)
    for number, each in enumerate(sent):
        while finished and finished[0][0] <= each.record.sent:
            seen.update(heapq.heappop(finished)[2])
        keys = block_keys(each.prompt)
        if each.record.due >= measured_from:
            limit = (len(each.prompt) - 1) // BLOCK_TOKENS  # the last token is always computed
            found = next((index for index, key in enumerate(keys[:limit]) if key not in seen), min(limit, len(keys)))
            prompt_tokens += len(each.prompt)
            cached_tokens += found * BLOCK_TOKENS
            miscounted += len(each.prompt) != each.record.prompt_tokens
        seen.update(keys)
        whole = block_keys([*each.prompt, *each.answer])
        heapq.heappush(finished, (each.record.ended, number, whole[len(keys) :]))
    return OneCacheHits(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, miscounted=miscounted)


def block_keys(token_ids: Sequence[int]) -> list[int]:
    """A number for each full block and all before it."""
    keys, parent, tokens = [], 0, array("I", token_ids)
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = xxhash.xxh3_64_intdigest(tokens[start : start + BLOCK_TOKENS].tobytes(), seed=parent)
        keys.append(parent)
    return keys


def _tokenized(sessions: Sequence[Session], records: Sequence[Record], *, folder: ModelFolder) -> Iterator[_Sent]:
    by_turn: Mapping[tuple[str, int], Record] = {(record.session, record.turn): record for record in records}
    for session in sessions:
        messages = [] if session.system is None else [{"role": "system", "content": session.system}]
        for number, turn in enumerate(session.turns):
            record = by_turn.get((session.name, number))
            if record is None or record.error is not None:
                continue
            asked = [*messages, {"role": "user", "content": turn.text}]
            yield _Sent(
                record=record,
                prompt=prompt_tokens(session, asked, folder=folder),
                answer=folder.encode(record.answer, add_special_tokens=False),
            )
            messages = [*asked, {"role": "assistant", "content": record.answer}]


def prompt_tokens(session: Session, messages: list[dict[str, str]], *, folder: ModelFolder) -> Sequence[int]:
    """The tokens of a request as the pods make them."""
    if session.system is None:
        text = messages[-1]["content"]
        return completion_token_ids(text, add_special_tokens=True, folder=folder, encode=folder.encode)[0]
    request = ChatRequest(messages=messages)
    return chat_token_ids(request, folder=folder, model="", encode=folder.encode)
