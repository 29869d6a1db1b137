"""The access log: one line per request with its outcome, buffered so that writing never delays a pick.

It observes requests (`records.facts`). The event loop puts each line into every target's buffer; a full buffer
drops lines, counts them, and reports them in the log itself. `write_records` writes the buffers.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b

import msgspec

from extproc.choosing.decision import Decision
from extproc.disaggregation.transfer_protocols import LegOutcome
from extproc.ledger.audit_chain import DECISION, GAP
from extproc.ledger.facts import Decided, Ended, RequestOutcome
from extproc.ledger.ledger import Throttle

LONGEST_TEXT = 200  # characters of client text: a request id, a path, a model
NAME_HASH_BYTES = 8
MICROSECONDS = 1_000_000


class AccessRecord(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The record of one request; tokens, microseconds, unix seconds. docs/guides/audit.md has each field."""

    kind: str
    at: float  # unix seconds of the decision
    fate: str
    pool: str = ""
    request_id: str = ""
    decision_id: str = ""  # the answer's `x-kvmesh-decision-id`
    method: str = ""
    path: str = ""  # without its query
    tenant: str | None = None  # keyed hash
    prompt: str | None = None  # keyed hash of the prompt's last whole block, and thereby of the prefix before it
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
    candidates: int | None = None  # endpoints that had room and passed the filters
    degraded: tuple[str, ...] = ()  # missing inputs
    shadow: tuple[str, ...] = ()  # withheld decisions of shadow mode: action and reason
    reason: str | None = None  # of a refusal
    prompt_tokens: int | None = None  # 0: unknown; set for a refused request if it was tokenized
    predicted_cached_tokens: int | None = None
    best_cached_tokens: int | None = None  # on any endpoint
    decided_us: int  # from the request's arrival here to the decision
    queued_us: int | None = None  # part of `decided_us` spent waiting for room
    trace_id: str | None = None
    share: float | None = None  # sampled share of the requests; None if all are written
    # from here on the outcome
    prefill_endpoint: str | None = None  # prefill pod; None if the endpoint computed the prompt
    prefill_us: int | None = None  # from the start of the first prefill request to the end of the last, in any outcome
    prefill_lost_endpoint: str | None = None  # prefill pod that lost the race
    served_by: str | None = None
    status: int | None = None  # of the client's answer; 0: no answer came
    unserved: bool = False
    headers_us: int | None = None  # from the request's arrival here to the answer's headers
    ended_us: int | None = None  # from the request's arrival here to the end of its exchange
    first_token_us: int | None = None  # from the request's arrival here, if the stream was read
    realised_cached_tokens: int | None = None
    realised_prompt_tokens: int | None = None
    output_tokens: int | None = None
    stream_failed: bool = False  # an error followed good headers, or the stream was empty; if it was read


class NameHashes:
    """Keyed hashes of names: equal for equal names, and not computable without the key."""

    def __init__(self, key: bytes) -> None:
        self._hasher = blake2b(digest_size=NAME_HASH_BYTES, key=key)
        self._sampler = blake2b(digest_size=8, key=key, person=b"kvmesh-sample")
        self.tenant = lru_cache(maxsize=4096)(self._tenant)  # tenants recur

    def prompt(self, key: bytes) -> str:
        """Return the hash of a prompt's key."""
        hasher = self._hasher.copy()
        hasher.update(key)
        return hasher.hexdigest()

    def is_written(self, request_id: str, *, share: float) -> bool:
        """Return whether a request is in the sample: by its id's keyed hash, which no client can steer."""
        hasher = self._sampler.copy()
        hasher.update(request_id.encode("utf-8", "surrogatepass"))
        return int.from_bytes(hasher.digest(), "big") < share * 2**64

    def _tenant(self, name: str) -> str:
        return self.prompt(b"tenant\0" + name.encode("utf-8", "surrogatepass"))


def record_of_decision(decided: Decided, names: NameHashes) -> AccessRecord:
    """Return the record of the decision, which is complete if nothing was sent to an endpoint."""
    record, span, queued = decided.record, decided.arrival.span, decided.queued_seconds
    facts, asked, outcome = record.facts, record.asked, record.outcome
    path = facts.path
    line = AccessRecord(
        kind=DECISION,
        at=record.at,
        fate=decided.outcome_kind.value,
        pool=decided.arrival.pool,
        request_id=facts.request_id[:LONGEST_TEXT],
        decision_id=record.id,
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
        line.api, line.model = asked.api, asked.model
        line.served_model, line.adapter = asked.served_model, asked.adapter
        line.arm, line.stream, line.max_tokens, line.steps = asked.arm, asked.stream, asked.max_tokens, asked.steps
        line.class_, line.class_by = request_class.class_name, request_class.why
        if request_class.tenant:
            line.tenant = names.tenant(request_class.tenant)
    if isinstance(outcome, Decision):
        _decide(line, outcome)
        if record.shadow:
            line.shadow = tuple([each.code for each in record.shadow])
    else:
        line.reason = outcome.reason
        if asked is not None and asked.prompt_tokens:
            line.prompt_tokens = asked.prompt_tokens
        if decided.endpoint is None:
            line.status = outcome.status
    return line


def add_end(line: AccessRecord, ended: Ended) -> None:
    """Add the outcome to the record."""
    line.status, line.served_by, line.unserved = ended.status, ended.served_by, ended.unserved
    line.stream_failed = ended.stream_failed
    line.ended_us = int(ended.seconds * MICROSECONDS)
    if ended.seconds_to_headers is not None:
        line.headers_us = int(ended.seconds_to_headers * MICROSECONDS)
    if ended.first_token_seconds is not None:
        line.first_token_us = int(ended.first_token_seconds * MICROSECONDS)
    if ended.legs:
        began = min(leg.began_seconds for leg in ended.legs)
        line.prefill_us = int((max(leg.began_seconds + leg.seconds for leg in ended.legs) - began) * MICROSECONDS)
        by_outcome = {leg.outcome: leg.endpoint for leg in ended.legs}
        line.prefill_endpoint = by_outcome.get(LegOutcome.ANSWERED)
        line.prefill_lost_endpoint = by_outcome.get(LegOutcome.LOST, by_outcome.get(LegOutcome.LATE))
    usage = ended.usage
    if usage is not None:
        line.realised_cached_tokens, line.realised_prompt_tokens = usage.cached_tokens, usage.prompt_tokens
        line.output_tokens = usage.output_tokens


def _decide(line: AccessRecord, decision: Decision) -> None:
    endpoints, weights, kept = decision.endpoints, decision.weights, decision.kept
    picked, winner = endpoints[0], 0
    while kept[winner].address != picked:
        winner += 1
    line.fallbacks = tuple(decision.fallbacks)
    line.scores = {name: score * weights[name] for name, column in decision.scores.items() if (score := column[winner])}
    line.candidates = len(kept)
    if decision.degraded:
        line.degraded = tuple(decision.degraded)
    line.prompt_tokens, line.predicted_cached_tokens = decision.prompt_tokens, decision.matched_tokens
    line.best_cached_tokens = decision.best_matched_tokens


log = logging.getLogger(__name__)

MOST_WAITING = 10_000  # records per target, a few hundred bytes each


class GapRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A gap of `dropped` records: the target was too slow."""

    kind: str = GAP
    at: float  # unix seconds
    dropped: int
    why: str


Record = AccessRecord | GapRecord


class RecordBuffer:
    """The records waiting for one target. The event loop puts, one writer thread or task takes, concurrently."""

    def __init__(self, target: str, *, most: int = MOST_WAITING, unix_seconds: Callable[[], float] = time.time) -> None:
        """`target` names it in metrics and logs: stdout, file, stream."""
        self.target = target
        self.written = 0  # counted by the writer
        self.dropped = 0  # counted here, and by the writer at the end
        self._most = most
        self._unix_seconds = unix_seconds
        self._waiting: deque[Record] = deque()  # a deque, as two threads use its two ends
        self._missing = 0  # dropped since the last record that fitted
        self._throttle = Throttle()

    def put(self, record: AccessRecord) -> None:
        """Append the record, or drop and count it if the buffer is full."""
        waiting = self._waiting
        if len(waiting) >= self._most:
            self._missing += 1
            self.dropped += 1
            if self._throttle.passes():
                log.error("the access log drops records", extra={"target": self.target, "dropped": self.dropped})
            return
        if self._missing:
            waiting.append(self._gap())
        waiting.append(record)

    def take(self, most: int) -> Sequence[Record]:
        """Remove and return at most `most` records, the oldest first."""
        waiting = self._waiting
        return [waiting.popleft() for _ in range(min(most, len(waiting)))]

    def rest(self) -> Sequence[Record]:
        """Return all remaining records, and a gap for the last dropped ones. No `put` may follow."""
        rest = list(self.take(len(self._waiting)))
        if self._missing:
            rest.append(self._gap())
        return rest

    def lose(self, lines: int) -> None:
        """Count and log, at the end, lines that could not be written and the records that still wait."""
        self.dropped += lines + len(self.take(len(self._waiting)))
        log.error("the access log ends early", extra={"target": self.target, "dropped": self.dropped})

    def _gap(self) -> GapRecord:
        missing, self._missing = self._missing, 0
        return GapRecord(at=self._unix_seconds(), dropped=missing, why="the target was too slow")


class AccessLog:
    """Implements `facts.RequestObserver`."""

    def __init__(self, *, names_key: bytes) -> None:
        """`names_key` is the key for hashing tenants and prompts."""
        self.buffers: list[RecordBuffer] = []  # one per target
        self._names = NameHashes(names_key)
        self._open: dict[int, AccessRecord] = {}  # by exchange number; bounded by the open exchanges

    def use_names_key(self, key: bytes) -> None:
        """Hash names with another key from now on. May be called from any thread."""
        self._names = NameHashes(key)

    def decided(self, decided: Decided, /) -> None:
        """Record the decision, if it is in the sample; write it if nothing was sent."""
        share = decided.audit_share
        if share < 1.0 and not self._is_written(decided, share):
            return
        line = record_of_decision(decided, self._names)
        if decided.outcome_kind in (RequestOutcome.ROUTED, RequestOutcome.FAILED_OPEN):
            self._open[decided.arrival.number] = line
        else:
            self._put(line)

    def ended(self, ended: Ended, /) -> None:
        """Write the record, unless its request is older than this log or outside the sample."""
        line = self._open.pop(ended.arrival.number, None)
        if line is not None:
            add_end(line, ended)
            self._put(line)

    def close(self) -> None:
        """Write the unfinished records of open exchanges: no other picker will report their end."""
        lines, self._open = self._open, {}
        for line in lines.values():
            self._put(line)

    def _put(self, line: AccessRecord) -> None:
        for buffer in self.buffers:
            buffer.put(line)

    def _is_written(self, decided: Decided, share: float) -> bool:
        return self._names.is_written(decided.record.facts.request_id or str(decided.arrival.number), share=share)
