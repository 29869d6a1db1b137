"""One line of the access log: who asked for what, where it went and why, and what came of it. Pure.

Prompts, generated text and tokens are in none of it; tenants and prompts appear as keyed hashes. Made by `access_log`
in two halves: when a request was decided, and when it is over.
"""

from functools import lru_cache
from hashlib import blake2b

import msgspec

from extproc.choosing.decision import Decision
from extproc.records.audit_chain import DECISION
from extproc.records.request_story import Decided, Ended

LONGEST_TEXT = 200  # characters of what clients write: a request id, a path, a model
NAME_HASH_BYTES = 8
MICROSECONDS = 1_000_000


class AccessRecord(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What is written of one request; tokens, microseconds, unix seconds. docs/audit.md has each field."""

    kind: str
    at: float  # unix seconds of the decision
    fate: str
    pool: str = ""
    request_id: str = ""
    method: str = ""
    path: str = ""  # without its query
    tenant: str | None = None  # keyed hash
    prompt: str | None = None  # keyed hash of the prompt's last whole block, and so of all before it
    api: str | None = None
    model: str | None = None  # as the client wrote it
    served_model: str | None = None
    adapter: str | None = None
    arm: str = ""
    class_: str | None = msgspec.field(name="class", default=None)
    class_by: str | None = None
    steps: tuple[str, ...] = ()
    stream: bool = False
    max_tokens: int | None = None
    endpoint: str | None = None
    fallbacks: tuple[str, ...] = ()
    scores: dict[str, float] | None = None  # the endpoint's: scorer -> score x weight
    candidates: int | None = None  # that had room and passed the filters
    degraded: tuple[str, ...] = ()  # inputs that were missing
    reason: str | None = None  # of a refusal
    prompt_tokens: int | None = None  # 0: unknown
    predicted_cached_tokens: int | None = None
    best_cached_tokens: int | None = None  # that any endpoint held
    decided_us: int  # from the request's arrival here to the decision
    queued_us: int | None = None  # of these, waiting for room
    trace_id: str | None = None
    share: float | None = None  # of the requests that are written, where not all are
    # from here on what came of it
    served_by: str | None = None
    status: int | None = None  # the client's answer; 0: none came
    unserved: bool = False
    headers_us: int | None = None  # from the request's arrival here to the answer's headers
    ended_us: int | None = None  # from the request's arrival here to the end of its exchange
    realised_cached_tokens: int | None = None
    realised_prompt_tokens: int | None = None
    output_tokens: int | None = None


class NameHashes:
    """Hashes that stand for names: the same for the same name and key, and without the key nobody's."""

    def __init__(self, key: bytes) -> None:
        self._hasher = blake2b(digest_size=NAME_HASH_BYTES, key=key)
        self._sampler = blake2b(digest_size=8, key=key, person=b"kvmesh-sample")
        self.tenant = lru_cache(maxsize=4096)(self._tenant)  # tenants come again and again

    def prompt(self, key: bytes) -> str:
        """Return what stands for a prompt."""
        hasher = self._hasher.copy()
        hasher.update(key)
        return hasher.hexdigest()

    def is_written(self, request_id: str, *, share: float) -> bool:
        """Tell whether a request is among the share; the same for the same id, and no client can choose it."""
        hasher = self._sampler.copy()
        hasher.update(request_id.encode("utf-8", "surrogatepass"))
        return int.from_bytes(hasher.digest(), "big") < share * 2**64

    def _tenant(self, name: str) -> str:
        return self.prompt(b"tenant\0" + name.encode("utf-8", "surrogatepass"))


def record_of_decision(decided: Decided, names: NameHashes) -> AccessRecord:
    """Return the first half of the line; the whole one where nothing was sent to an endpoint."""
    record, span, queued = decided.record, decided.span, decided.queued_seconds
    facts, asked, outcome = record.facts, record.asked, record.outcome
    path = facts.path
    line = AccessRecord(
        kind=DECISION,
        at=record.at,
        fate=decided.fate.value,
        pool=decided.pool,
        request_id=facts.request_id[:LONGEST_TEXT],
        method=facts.method[:LONGEST_TEXT],
        path=(path if "?" not in path else path.partition("?")[0])[:LONGEST_TEXT],
        endpoint=decided.endpoint,
        decided_us=int(decided.seconds * MICROSECONDS),
        queued_us=None if queued is None else int(queued * MICROSECONDS),
        prompt=names.prompt(decided.prompt_key) if decided.prompt_key else None,
        trace_id=None if span is None else f"{span.trace_id:032x}",
        share=None if decided.audit_share >= 1.0 else decided.audit_share,
    )
    if asked is not None:
        request_class = asked.request_class
        line.api, line.model, line.served_model, line.adapter = (
            asked.api,
            asked.model,
            asked.served_model,
            asked.adapter,
        )
        line.arm, line.stream, line.max_tokens, line.steps = asked.arm, asked.stream, asked.max_tokens, asked.steps
        line.class_, line.class_by = request_class.class_name, request_class.why
        if request_class.tenant:
            line.tenant = names.tenant(request_class.tenant)
    if isinstance(outcome, Decision):
        _decide(line, outcome)
    else:
        line.reason = outcome.reason
        if decided.endpoint is None:
            line.status = outcome.status
    return line


def add_end(line: AccessRecord, ended: Ended) -> None:
    """Add what came of it."""
    line.status, line.served_by, line.unserved = ended.status, ended.served_by, ended.unserved
    line.ended_us = int(ended.seconds * MICROSECONDS)
    if ended.seconds_to_headers is not None:
        line.headers_us = int(ended.seconds_to_headers * MICROSECONDS)
    usage = ended.usage
    if usage is not None:
        line.realised_cached_tokens, line.realised_prompt_tokens = usage.cached_tokens, usage.prompt_tokens
        line.output_tokens = usage.output_tokens


def _decide(line: AccessRecord, decision: Decision) -> None:
    endpoints, weights, kept = decision.endpoints, decision.weights, decision.kept
    picked, winner = endpoints[0], 0
    while kept[winner].address != picked:
        winner += 1
    line.fallbacks = endpoints[1:]
    line.scores = {name: score * weights[name] for name, column in decision.scores.items() if (score := column[winner])}
    line.candidates = len(kept)
    if decision.degraded:
        line.degraded = tuple(decision.degraded)
    line.prompt_tokens, line.predicted_cached_tokens = decision.prompt_tokens, decision.matched_tokens
    line.best_cached_tokens = decision.best_matched_tokens
