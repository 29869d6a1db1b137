"""Which quota counts, and what the client is told of it."""

from typing import Any

import pytest

from extproc.policy.priority import Quota
from extproc.shared.quota import Limit, QuotaVerdict, duration, matching_quota, quota_key

ALICE = Quota(tenant="alice", requests_per_minute=1)
ALICE_BIG = Quota(tenant="alice", model="big", requests_per_minute=2)
BIG = Quota(model="big", requests_per_minute=3)
EVERYONE = Quota(requests_per_minute=4)
ALL = Quota(
    requests_per_minute=60, prompt_tokens_per_minute=6000, generated_tokens_per_minute=600, concurrent_requests=7
)


@pytest.mark.parametrize(
    ("quotas", "tenant", "model", "expected"),
    [
        ([ALICE_BIG, ALICE, EVERYONE], "alice", "big", ALICE_BIG),
        ([ALICE_BIG, ALICE, EVERYONE], "alice", "small", ALICE),
        ([ALICE, ALICE_BIG], "alice", "big", ALICE),  # the first one that matches
        ([ALICE, BIG], "bob", "big", BIG),
        ([ALICE, BIG], "bob", "small", None),
        ([ALICE, EVERYONE], "", "", EVERYONE),  # who says nothing has a quota, too
        ([], "alice", "big", None),
    ],
)
def test_the_first_quota_that_matches_counts(
    quotas: list[Quota], tenant: str, model: str, expected: Quota | None
) -> None:
    assert matching_quota(quotas, tenant=tenant, model=model) is expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0ms"),
        (-1.0, "0ms"),
        (0.0201, "21ms"),
        (1.0, "1s"),
        (1.5, "1.5s"),
        (59.999, "59.999s"),
        (59.9999, "1m0s"),
        (360.0, "6m0s"),
        (3661.0, "1h1m1s"),
    ],
)
def test_durations_read_as_openai_writes_them(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def verdict(quota: Quota = ALL, *, levels: tuple[float, ...] = (9.0, 900.0, 90.0), **more: Any) -> QuotaVerdict:
    key = quota_key(quota, name=b"name")
    return QuotaVerdict(key=key, levels=levels, terms=key.terms, **more)


def test_an_allowed_request_is_told_what_is_left() -> None:
    assert verdict(levels=(9.5, 900.0, 95.0)).headers == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "500ms",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "900",
        "x-ratelimit-reset-tokens": "1s",
    }


@pytest.mark.parametrize(
    ("levels", "limit", "expected"),
    [
        ((9.0, 500.0, 90.0), None, ("6000", "500")),
        ((9.0, 500.0, 10.0), None, ("600", "10")),
        ((9.0, 500.0, -10.0), None, ("600", "0")),
        ((9.0, 500.0, 10.0), Limit.PROMPT_TOKENS, ("6000", "500")),  # the one that refuses
        ((9.0, 500.0, 90.0), Limit.GENERATED_TOKENS, ("600", "90")),
    ],
)
def test_the_scarcer_tokens_are_told(levels: tuple[float, ...], limit: Limit | None, expected: tuple[str, str]) -> None:
    headers = verdict(levels=levels, limit=limit).headers
    assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == expected


@pytest.mark.parametrize(
    ("quota", "names"),
    [
        (Quota(concurrent_requests=3), set()),
        (Quota(requests_per_minute=3), {"requests"}),
        (Quota(prompt_tokens_per_minute=3), {"tokens"}),
        (Quota(generated_tokens_per_minute=3), {"tokens"}),
    ],
)
def test_only_limits_that_there_are_have_headers(quota: Quota, names: set[str]) -> None:
    assert {header.rpartition("-")[2] for header in verdict(quota, levels=(0.0, 0.0, 0.0)).headers} == names


@pytest.mark.parametrize(
    ("limit", "error_type", "message"),
    [
        (Limit.REQUESTS, "requests", "rate limit reached: 60 requests a minute; try again in 1.5s"),
        (Limit.PROMPT_TOKENS, "tokens", "rate limit reached: 6000 prompt tokens a minute; try again in 1.5s"),
        (Limit.GENERATED_TOKENS, "tokens", "rate limit reached: 600 generated tokens a minute; try again in 1.5s"),
        (Limit.CONCURRENT_REQUESTS, "requests", "rate limit reached: 7 requests at a time; try again in 1.5s"),
    ],
)
def test_a_refusal_says_which_limit_and_when_to_come_again(limit: Limit, error_type: str, message: str) -> None:
    refused = verdict(limit=limit, wait_seconds=1.5)
    assert (refused.allowed, refused.error_type, refused.message) == (False, error_type, message)


def test_a_limit_of_nothing_has_headers_too() -> None:
    quota = Quota(requests_per_minute=0)
    assert verdict(quota, levels=(0.0, 0.0, 0.0)).headers == {
        "x-ratelimit-limit-requests": "0",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "0ms",
    }


def test_less_than_one_a_minute_is_not_told_as_nothing() -> None:
    headers = verdict(Quota(requests_per_minute=0.4), levels=(0.0, 0.0, 0.0)).headers
    assert headers["x-ratelimit-limit-requests"] == "1"


@pytest.mark.parametrize(
    ("limit", "wait_seconds", "expected"),
    [(Limit.REQUESTS, 60.0, None), (Limit.REQUESTS, 60.1, "false"), (None, 100.0, None)],
)
def test_whoever_would_have_to_wait_longer_than_sdks_do_is_told_not_to_retry(
    limit: Limit | None, wait_seconds: float, expected: str | None
) -> None:
    headers = verdict(limit=limit, wait_seconds=wait_seconds).headers
    assert headers.get("x-should-retry") == expected
