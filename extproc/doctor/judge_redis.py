"""Judges the Redis or Valkey under the index: there, new enough, never evicting, quick."""

import re
from collections.abc import Iterator

from extproc.doctor.facts import Facts
from extproc.doctor.findings import Finding, error, unchecked, warning

OLDEST = (6, 2)
FULL_SHARE = 0.85  # of maxmemory
_VERSION = re.compile(r"(\d+)\.(\d+)")


def redis_answers(facts: Facts) -> Iterator[Finding]:
    """Redis answers, is new enough and takes writes."""
    redis = facts.redis
    if redis.problem:
        yield error(
            redis.label,
            f"cannot be used: {redis.problem}",
            fix="check --redis and the other --redis-… settings (docs/redis-connection.md) and that Redis runs; until "
            "then requests are routed on load alone",
        )
        return
    version = _VERSION.match(redis.version)
    if version is None:
        yield unchecked(
            redis.label, "does not tell its version", fix="allow INFO to kvmesh's user; it must be 6.2 or newer"
        )
    elif not redis.is_valkey and (int(version[1]), int(version[2])) < OLDEST:
        yield error(redis.label, f"is Redis {redis.version}", fix="use Redis 6.2 or newer, or Valkey")
    if redis.role == "slave":
        yield warning(
            redis.label,
            "is a replica: the index may be late, and replicas of the picker cannot share their load",
            fix="name the master in --redis, or use redis+sentinel:// (docs/redis-connection.md)",
        )


def redis_memory(facts: Facts) -> Iterator[Finding]:
    """Redis evicts nothing and has room."""
    redis = facts.redis
    if redis.problem:
        return
    fix = "CONFIG SET maxmemory-policy noeviction (and in its configuration file): evicted keys make the index lie"
    if not redis.maxmemory_policy:
        yield unchecked(redis.label, "does not tell its eviction policy", fix="see that maxmemory-policy is noeviction")
    elif redis.maxmemory_policy != "noeviction":
        say = error if redis.maxmemory_bytes else warning  # without a limit nothing is evicted yet
        yield say(redis.label, f"maxmemory-policy is {redis.maxmemory_policy}", fix=fix)
    if redis.maxmemory_bytes and redis.used_bytes > FULL_SHARE * redis.maxmemory_bytes:
        yield warning(
            redis.label,
            f"uses {redis.used_bytes / redis.maxmemory_bytes:.0%} of its maxmemory ({redis.maxmemory_bytes:,} bytes)",
            fix="raise maxmemory: docs/redis.md, Size, says how much the index needs",
        )


def redis_persistence(facts: Facts) -> Iterator[Finding]:
    """Redis writes no append-only file for what the pods can replay."""
    if not facts.redis.problem and facts.redis.appends_to_file:
        yield warning(
            facts.redis.label,
            "appendonly is on: every event is written to disk",
            fix='CONFIG SET appendonly no, also `save ""`: an emptied Redis is rebuilt from the pods by replay',
        )


def redis_latency(facts: Facts) -> Iterator[Finding]:
    """Redis answers well within the time that a pick waits for it."""
    redis, limit = facts.redis, facts.expected.index_timeout_seconds
    if redis.problem or redis.round_trip_seconds <= limit / 2:
        return
    say = error if redis.round_trip_seconds >= limit else warning
    yield say(
        redis.label,
        f"a round trip takes {redis.round_trip_seconds * 1000:.1f} ms, and a pick waits {limit * 1000:g} ms for all of "
        "its lookup",
        fix="put Redis into the picker's zone and off busy machines, or raise --index-timeout-ms",
    )
