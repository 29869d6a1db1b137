"""Quotas: which one a request falls under, what it asks for, and what the answer tells the client. Values, no clock.

Made and used by `quotas.shared_quotas`, carried through the index lookup. `docs/quotas.md`.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import ceil

import msgspec

from extproc.policy.priority import Quota
from extproc.quotas.quota_share import QuotaShare
from extproc.quotas.token_bucket import BucketTerms, terms_of

QUOTA_LOCAL = "quota-local"  # the degradation's word: decided by this replica's share
ANY = "*"
WITHOUT_LIMIT = BucketTerms(-1.0, 0.0)  # as the script reads it, too
# a longer Retry-After was not obeyed by openai's Python SDK (60 s; 120 s in version 3): it came back at once
MOST_RETRY_AFTER_SECONDS = 60.0


class Limit(StrEnum):
    """What a quota bounds; in the order in which scripts and buckets have them."""

    REQUESTS = "requests"
    PROMPT_TOKENS = "prompt-tokens"
    GENERATED_TOKENS = "generated-tokens"
    CONCURRENT_REQUESTS = "concurrent-requests"


LIMITS = tuple(Limit)
Amounts = tuple[float, float, float]  # requests, prompt tokens, generated tokens
NOTHING: Amounts = (0.0, 0.0, 0.0)


class QuotaKey(msgspec.Struct, eq=False, kw_only=True):
    """What one tenant may use of one model, and what this replica knows of it. Compared by identity."""

    quota: Quota
    tenant: str
    model: str
    name: bytes  # keyed hash of both, as Redis knows them
    terms: tuple[BucketTerms, BucketTerms, BucketTerms]  # as `Amounts`; WITHOUT_LIMIT where there is none
    limit_words: tuple[str, str, str]  # what a minute gives, for people; "" where there is no limit
    share: QuotaShare
    # the parts of its commands that never change; `quotas.quota_records` makes them
    fixed: tuple[bytes, ...] = ()
    packed_take: bytes = b""

    @property
    def counts_generated(self) -> bool:
        """Whether the responses must be read: nobody else tells how much was generated."""
        return self.quota.generated_tokens_per_minute is not None


class QuotaNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the reader of a response needs to count its tokens; it may be another picker than the request's."""

    tenant: str
    model: str
    reserved_tokens: int


class QuotaAsk(msgspec.Struct, eq=False, kw_only=True):
    """One request's part, from the question until it is settled or cancelled. Changed by `shared_quotas` only."""

    key: QuotaKey
    prompt_tokens: int
    reserved_tokens: int  # generated ones, taken before they are generated
    member: bytes  # names it among the open requests of all replicas
    asked_at: float  # monotonic seconds
    is_sent: bool = False
    is_answered: bool = False  # False, though sent: it may have been taken, and nobody knows
    is_local: bool = False  # admitted by this replica's share
    admitted: bool = False
    is_over: bool = False  # settled or cancelled
    taken: Amounts = NOTHING  # from the shared buckets, as far as we know

    @property
    def note(self) -> QuotaNote | None:
        """What goes with the response's plan; None: nothing is to be counted in it."""
        key = self.key
        return QuotaNote(key.tenant, key.model, self.reserved_tokens) if key.counts_generated else None


class QuotaVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one request."""

    key: QuotaKey
    limit: Limit | None = None  # that refuses it; None: allowed
    wait_seconds: float = 0.0  # until it may be tried again
    levels: tuple[float, ...] = ()  # what is left, as `Amounts`; negative: a debt
    terms: tuple[BucketTerms, ...] = ()  # of the buckets that were asked: shared ones, or this replica's share
    degraded: str | None = None  # why the share of this replica decided, for people

    @property
    def allowed(self) -> bool:
        """Whether the request may go on."""
        return self.limit is None

    @property
    def error_type(self) -> str:
        """OpenAI's `type` of a rate limit's error: what there was too much of."""
        return "tokens" if self.limit in (Limit.PROMPT_TOKENS, Limit.GENERATED_TOKENS) else "requests"

    @property
    def message(self) -> str:
        """What a refused client is told."""
        quota = self.key.quota
        words = {
            Limit.REQUESTS: f"{quota.requests_per_minute or 0:g} requests a minute",
            Limit.PROMPT_TOKENS: f"{quota.prompt_tokens_per_minute or 0:g} prompt tokens a minute",
            Limit.GENERATED_TOKENS: f"{quota.generated_tokens_per_minute or 0:g} generated tokens a minute",
            Limit.CONCURRENT_REQUESTS: f"{quota.concurrent_requests or 0} requests at a time",
            None: "",
        }[self.limit]
        return f"rate limit reached: {words}; try again in {duration(self.wait_seconds)}"

    @property
    def headers(self) -> Mapping[str, str]:
        """OpenAI's rate limit headers; `tokens` are those of the bucket of which less is left."""
        requests, prompt, generated = self.key.limit_words
        headers: dict[str, str] = {}
        if self.limit is not None and self.wait_seconds > MOST_RETRY_AFTER_SECONDS:
            headers["x-should-retry"] = "false"  # the SDKs of OpenAI and Anthropic obey it
        if requests:
            headers["x-ratelimit-limit-requests"] = requests
            headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-reset-requests"] = self._left(0)
        if prompt or generated:
            bucket = 2 if not prompt or (generated and self._generated_is_scarcer()) else 1
            headers["x-ratelimit-limit-tokens"] = self.key.limit_words[bucket]
            headers["x-ratelimit-remaining-tokens"], headers["x-ratelimit-reset-tokens"] = self._left(bucket)
        return headers

    def _left(self, bucket: int) -> tuple[str, str]:
        """Return what is left of a bucket, and how long until it is full."""
        terms, level = self.terms[bucket], self.levels[bucket]
        rest = (terms.capacity - level) / terms.per_second if terms.per_second > 0 else 0.0
        return str(int(level) if level > 0 else 0), duration(rest)

    def _generated_is_scarcer(self) -> bool:
        if self.limit in (Limit.PROMPT_TOKENS, Limit.GENERATED_TOKENS):
            return self.limit is Limit.GENERATED_TOKENS
        _, prompt, generated = self.terms
        return self.levels[2] * prompt.capacity < self.levels[1] * generated.capacity


def matching_quota(quotas: Sequence[Quota], *, tenant: str, model: str) -> Quota | None:
    """Return the first quota that is for this tenant and model."""
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
    terms = (requests, prompt, generated)
    # less than one a minute is something, too
    one, two, three = ("" if limit is None else str(ceil(limit)) for limit in limits)
    return QuotaKey(
        quota=quota,
        tenant=tenant,
        model=model,
        name=name,
        terms=terms,
        limit_words=(one, two, three),
        share=QuotaShare(),
    )


def duration(seconds: float) -> str:
    """Return seconds as OpenAI writes them: 20ms, 1.5s, 6m0s, 1h2m0s; rounded up to milliseconds, seconds from 60."""
    milliseconds = -int(-max(seconds, 0.0) * 1000 // 1)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    whole = -(-milliseconds // 1000)
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60}m{rest}s"
