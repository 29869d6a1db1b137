"""Quotas: the matching one, the request's ask, the verdict and its headers. Values, no clock."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from http import HTTPStatus
from math import ceil, inf

import msgspec

from extproc.policy.priority import Quota

TOLERANCE = 0.001  # units a take may lack: levels are rounded on their way to Redis and back
LONGEST_WAIT_SECONDS = 1e9  # thirty years: the client always gets a finite number
NEVER_SECONDS = 60.0  # reported wait for a bucket without a rate
LONGEST_DEBT_SECONDS = 3600.0


class BucketTerms(msgspec.Struct, frozen=True):
    """Rate and capacity of one token bucket."""

    per_second: float
    capacity: float  # the level of a full bucket

    def shared_by(self, replicas: int) -> "BucketTerms":
        """Return one replica's share, at least one unit: a smaller one would admit no request."""
        if replicas <= 1 or self.capacity <= 0:
            return self
        return BucketTerms(self.per_second / replicas, max(self.capacity / replicas, 1.0))


def terms_of(per_minute: float, *, burst_seconds: float) -> BucketTerms:
    """Return the terms for a limit per minute, with a burst of `burst_seconds` of it, at least one unit."""
    per_second = per_minute / 60.0
    return BucketTerms(per_second, max(per_second * burst_seconds, 1.0) if per_minute > 0 else 0.0)


class TokenBucket(msgspec.Struct):
    """A token bucket: the level refills up to the capacity. Ask `wait` before each `change`."""

    terms: BucketTerms
    level: float
    at: float  # seconds of the callers' clock

    def wait(self, amount: float, *, now: float) -> float:
        """Return the seconds until `amount` may be taken; 0 is now.

        An amount above the capacity may be taken from a full bucket, and leaves a debt: otherwise it never could be.
        """
        self._rise(now)
        terms = self.terms
        missing = (min(amount, terms.capacity) if terms.capacity > 0 else amount) - self.level
        if missing <= TOLERANCE:
            return 0.0
        return min(missing / terms.per_second, LONGEST_WAIT_SECONDS) if terms.per_second > 0 else NEVER_SECONDS

    def change(self, amount: float, *, now: float) -> None:
        """Take `amount`, or give it back if negative; the part above the capacity is lost."""
        self._rise(now)
        self.level = self._bounded(self.level - amount)

    def _rise(self, now: float) -> None:
        self.level = self._bounded(self.level + max(now - self.at, 0.0) * self.terms.per_second)
        self.at = now

    def _bounded(self, level: float) -> float:
        return min(max(level, -LONGEST_DEBT_SECONDS * self.terms.per_second), self.terms.capacity)


FIRST_GENERATED = 256.0  # expected tokens of an answer before the first measurement
FIRST_SECONDS = 2.0  # expected duration of a request before the first measurement
WEIGHT = 0.2  # of the newest value in the moving averages


class QuotaShare(msgspec.Struct, eq=False):
    """This replica's knowledge of one key's use. Levels are in the order of `Amounts`."""

    open_requests: int = 0  # admitted here, not ended
    mean_generated: float = FIRST_GENERATED
    mean_seconds: float = FIRST_SECONDS
    heard: tuple[float, ...] = ()  # the shared levels of Redis' last answer; infinite without a limit then
    heard_at: float = 0.0
    buckets: tuple[TokenBucket, ...] = ()  # in use while Redis is down
    replicas: int = 1  # number of replicas that the buckets were made for

    def note(self, levels: Sequence[float], terms: Sequence[BucketTerms], *, now: float) -> None:
        """Take the levels that Redis has answered to these terms, in place of local buckets."""
        # a limit that the policy adds later starts full, in Redis, too
        limited = (each.per_second >= 0 for each in terms)
        self.heard = tuple(level if has else inf for level, has in zip(levels, limited, strict=True))
        self.heard_at = now
        if self.buckets:
            self.buckets = ()

    def took(self, seconds: float) -> None:
        """Learn from one request's duration."""
        self.mean_seconds += WEIGHT * (max(seconds, 0.0) - self.mean_seconds)

    def generated(self, tokens: int) -> None:
        """Learn from one request's generated tokens."""
        self.mean_generated += WEIGHT * (tokens - self.mean_generated)

    def local(self, terms: Sequence[BucketTerms], *, replicas: int, now: float) -> tuple[TokenBucket, ...]:
        """Return this replica's own buckets; they start at its share of the levels that Redis answered last."""
        replicas = max(replicas, 1)
        if not self.buckets or replicas != self.replicas:
            self.buckets = tuple(self._bucket(i, each, replicas, now) for i, each in enumerate(terms))
            self.replicas = replicas
        return self.buckets

    def _bucket(self, index: int, terms: BucketTerms, replicas: int, now: float) -> TokenBucket:
        share = terms.shared_by(replicas)
        if self.buckets:  # the number of replicas has changed
            old = self.buckets[index]
            level, at = old.level * self.replicas / replicas, old.at
        elif self.heard:
            level, at = self.heard[index] / replicas, self.heard_at
        else:
            level, at = share.capacity, now
        return TokenBucket(share, min(level, share.capacity), at)

    def is_crowded(self, most_open: int, *, replicas: int) -> bool:
        """Return whether the open requests here fill this replica's share of `most_open`, which is at least one."""
        return self.open_requests >= (max(most_open // max(replicas, 1), 1) if most_open > 0 else 0)

    def wait_for_an_end(self) -> float:
        """Return the seconds until one of the open requests here is likely to end."""
        return self.mean_seconds / max(self.open_requests, 1)


QUOTA_LOCAL = "quota-local"  # the degradation's name: decided by this replica's share
ANY = "*"
WITHOUT_LIMIT = BucketTerms(-1.0, 0.0)  # as the script reads it, too
# openai's Python SDK ignores a longer Retry-After (above 60 s; in version 3 above 120 s) and retries at once
MOST_RETRY_AFTER_SECONDS = 60.0


class Limit(StrEnum):
    """What a quota limits; in the order of the script and the buckets."""

    REQUESTS = "requests"
    PROMPT_TOKENS = "prompt-tokens"
    GENERATED_TOKENS = "generated-tokens"
    CONCURRENT_REQUESTS = "concurrent-requests"


LIMITS = tuple(Limit)
Amounts = tuple[float, float, float]  # requests, prompt tokens, generated tokens
NOTHING: Amounts = (0.0, 0.0, 0.0)


class QuotaKey(msgspec.Struct, eq=False, kw_only=True):
    """One tenant's quota of one model, and this replica's knowledge of its use. Compared by identity."""

    quota: Quota
    tenant: str
    model: str
    name: bytes  # keyed hash of tenant and model, for the keys in Redis
    terms: tuple[BucketTerms, BucketTerms, BucketTerms]  # in the order of `Amounts`; WITHOUT_LIMIT if unlimited
    limit_texts: tuple[str, str, str]  # limits per minute, for headers; "" if unlimited
    share: QuotaShare
    # the constant parts of its commands, made by `shared.quota_records`
    fixed: tuple[bytes, ...] = ()
    packed_take: bytes = b""

    @property
    def counts_generated(self) -> bool:
        """Whether responses must be read to count generated tokens."""
        return self.quota.generated_tokens_per_minute is not None


class QuotaNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the reader of a response needs to count its tokens; the reader may be another picker."""

    tenant: str
    model: str
    reserved_tokens: int


class QuotaAsk(msgspec.Struct, eq=False, kw_only=True):
    """One request's ask, until it is settled or cancelled. Changed only by `shared_quotas`."""

    key: QuotaKey
    prompt_tokens: int
    reserved_tokens: int  # taken in advance for generated tokens
    member: bytes  # unique name among the open requests of all replicas
    asked_at: float  # monotonic seconds
    is_sent: bool = False
    is_answered: bool = False  # False although sent: unknown whether Redis has taken the amounts
    is_local: bool = False  # admitted by this replica's share
    admitted: bool = False
    is_over: bool = False  # settled or cancelled
    taken: Amounts = NOTHING  # from the shared buckets, as far as known

    @property
    def note(self) -> QuotaNote | None:
        """The note for the response's plan, or None if its tokens need no counting."""
        key = self.key
        return QuotaNote(key.tenant, key.model, self.reserved_tokens) if key.counts_generated else None


class QuotaVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The decision for one request."""

    key: QuotaKey
    limit: Limit | None = None  # the exceeded limit, or None if allowed
    wait_seconds: float = 0.0  # until a retry may succeed
    levels: tuple[float, ...] = ()  # remaining amounts, in the order of `Amounts`; negative: a debt
    terms: tuple[BucketTerms, ...] = ()  # of the buckets that decided: shared, or this replica's share
    degraded: str | None = None  # why this replica's share decided, for people

    @property
    def allowed(self) -> bool:
        """Whether no limit refuses the request."""
        return self.limit is None

    @property
    def error_type(self) -> str:
        """OpenAI's `type` of a rate limit error: the exceeded unit."""
        return "tokens" if self.limit in (Limit.PROMPT_TOKENS, Limit.GENERATED_TOKENS) else "requests"

    @property
    def message(self) -> str:
        """The error message for a refused client."""
        quota = self.key.quota
        limit = {
            Limit.REQUESTS: f"{quota.requests_per_minute or 0:g} requests a minute",
            Limit.PROMPT_TOKENS: f"{quota.prompt_tokens_per_minute or 0:g} prompt tokens a minute",
            Limit.GENERATED_TOKENS: f"{quota.generated_tokens_per_minute or 0:g} generated tokens a minute",
            Limit.CONCURRENT_REQUESTS: f"{quota.concurrent_requests or 0} requests at a time",
            None: "",
        }[self.limit]
        return f"rate limit reached: {limit}; try again in {duration(self.wait_seconds)}"

    @property
    def headers(self) -> Mapping[str, str]:
        """OpenAI's rate limit headers; `tokens` are for the scarcer of the two token buckets."""
        requests, prompt, generated = self.key.limit_texts
        headers: dict[str, str] = {}
        if self.limit is not None and self.wait_seconds > MOST_RETRY_AFTER_SECONDS:
            headers["x-should-retry"] = "false"  # the SDKs of OpenAI and Anthropic obey it
        if requests:
            headers["x-ratelimit-limit-requests"] = requests
            headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-reset-requests"] = self._left(0)
        if prompt or generated:
            bucket = 2 if not prompt or (generated and self._generated_is_scarcer()) else 1
            headers["x-ratelimit-limit-tokens"] = self.key.limit_texts[bucket]
            headers["x-ratelimit-remaining-tokens"], headers["x-ratelimit-reset-tokens"] = self._left(bucket)
        return headers

    def _left(self, bucket: int) -> tuple[str, str]:
        """Return the remaining amount of a bucket, and the time until it is full."""
        terms, level = self.terms[bucket], self.levels[bucket]
        rest = (terms.capacity - level) / terms.per_second if terms.per_second > 0 else 0.0
        return str(int(level) if level > 0 else 0), duration(rest)

    def _generated_is_scarcer(self) -> bool:
        if self.limit in (Limit.PROMPT_TOKENS, Limit.GENERATED_TOKENS):
            return self.limit is Limit.GENERATED_TOKENS
        _, prompt, generated = self.terms
        return self.levels[2] * prompt.capacity < self.levels[1] * generated.capacity


def matching_quota(quotas: Sequence[Quota], *, tenant: str, model: str) -> Quota | None:
    """Return the first quota that matches this tenant and model."""
    for quota in quotas:
        if quota.tenant in (ANY, tenant) and quota.model in (ANY, model):
            return quota
    return None


def quota_key(quota: Quota, *, name: bytes, tenant: str = "", model: str = "") -> QuotaKey:
    """Return the key with full buckets."""
    limits = (quota.requests_per_minute, quota.prompt_tokens_per_minute, quota.generated_tokens_per_minute)
    requests, prompt, generated = (
        WITHOUT_LIMIT if limit is None else terms_of(limit, burst_seconds=quota.burst_seconds) for limit in limits
    )
    # rounded up: less than one a minute must not read 0
    one, two, three = ("" if limit is None else str(ceil(limit)) for limit in limits)
    return QuotaKey(
        quota=quota,
        tenant=tenant,
        model=model,
        name=name,
        terms=(requests, prompt, generated),
        limit_texts=(one, two, three),
        share=QuotaShare(),
    )


def duration(seconds: float) -> str:
    """Return seconds in OpenAI's form: 20ms, 1.5s, 6m0s, 1h2m0s; rounded up to milliseconds, from 60 s to seconds."""
    milliseconds = -int(-max(seconds, 0.0) * 1000 // 1)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    whole = -(-milliseconds // 1000)
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60}m{rest}s"


def surely_generated(status: int, *, is_stream: bool) -> int | None:
    """Return the tokens that an answer with this status has surely cost, or None if only its reader may know."""
    if 200 <= status < 300:
        return None
    # without a stream, all tokens are generated before the headers; a stream's headers precede its first token
    return None if status in (0, HTTPStatus.GATEWAY_TIMEOUT) and not is_stream else 0
