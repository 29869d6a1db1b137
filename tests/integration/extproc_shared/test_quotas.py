"""Quotas of several replicas over one real Redis: no tenant gets more than is allowed, and everything comes back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from extproc.errors import PrefixIndexUnavailableError
from extproc.policy.priority import Quota
from extproc.prefixes.prefix_index import RedisPrefixIndex
from extproc.prefixes.prompt_match import IndexHits
from extproc.prompts.tokenized_prompt import TokenizedPrompt
from extproc.shared.quota import QUOTA_LOCAL, Limit, QuotaAsk, QuotaVerdict
from extproc.shared.shared_quotas import Quotas, QuotaSettings
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.redis.link import RedisLink
from operate.install.redis_access import PICKER_USER, USER_RIGHTS
from tests.integration.kv_fake_redis import error, fake_redis
from tests.integration.kv_redis import RedisServer
from tests.integration.kv_redis_groups import RIGHTS, ClusterGroup

DEADLINE_SECONDS = 10.0
QUICK = QuotaSettings(lease_seconds=0.4, timeout_seconds=1.0)
MODEL = "tiny"
PROMPT = TokenizedPrompt(tokens=bytes(400))
TEN_A_MINUTE = Quota(requests_per_minute=10, burst_seconds=60)


@dataclass
class Replica:
    """A picker, as far as quotas go."""

    quotas: Quotas
    index: RedisPrefixIndex
    link: RedisLink
    running: "asyncio.Task[None]"
    asks: list[QuotaAsk] = field(default_factory=list)

    async def look(
        self,
        *,
        tenant: str = "alice",
        model: str = MODEL,
        prompt_tokens: int = 100,
        most_generated: int | None = 50,
        prompts: Sequence[TokenizedPrompt] = (PROMPT,),
    ) -> IndexHits:
        key = self.quotas.match(tenant, model)
        assert key is not None
        ask = self.quotas.ask(key, prompt_tokens=prompt_tokens, most_generated=most_generated)
        self.asks.append(ask)
        return await self.index.lookup(prompts, model=MODEL, quota=ask)

    async def asked(self, **what: Any) -> QuotaVerdict:
        verdict = (await self.look(**what)).quota
        assert verdict is not None
        return verdict

    async def admitted(self, count: int, **what: Any) -> int:
        """How many of so many requests at one time may pass."""
        verdicts = await asyncio.gather(*(self.asked(**what) for _ in range(count)))
        return sum(verdict.allowed for verdict in verdicts)

    def settle_all(self, **used: Any) -> None:
        for ask in self.asks:
            self.quotas.settle(ask, **used)
        self.asks.clear()

    async def kill(self) -> None:
        """End it without a goodbye."""
        self.running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.running


@dataclass
class Replicas:
    """All that a test has started."""

    url: str
    quotas: Sequence[Quota] = (TEN_A_MINUTE,)
    others: int = 0
    started: list[Replica] = field(default_factory=list)

    def start(
        self, *quotas: Quota, settings: QuotaSettings = QUICK, hash_seed: str = "seed", timeout_seconds: float = 1.0
    ) -> Replica:
        link = RedisLink(self.url)
        shared = Quotas(
            link,
            hash_seed=hash_seed,
            quotas=quotas or self.quotas,
            others=lambda: self.others,
            settings=settings,
        )
        reader = PrefixIndexReader(url=self.url, hash_seed="seed")
        index = RedisPrefixIndex(reader, hash_seed="seed", timeout_seconds=timeout_seconds, quotas=shared)
        running = asyncio.create_task(shared.run(), name="quotas")
        replica = Replica(quotas=shared, index=index, running=running, link=link)
        self.started.append(replica)
        return replica

    async def close(self) -> None:
        for replica in self.started:
            await replica.kill()
            await replica.quotas.close()
            await replica.link.close()
            await replica.index._reader.close()


@pytest.fixture
async def replicas(redis_server: RedisServer) -> AsyncIterator[Replicas]:
    started = Replicas(url=redis_server.url)
    yield started
    await started.close()


async def until(condition: Callable[[], Any], what: str = "") -> None:
    deadline = asyncio.get_running_loop().time() + DEADLINE_SECONDS
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"never came true: {what}"
        await asyncio.sleep(0.005)


def keys(server: RedisServer) -> list[bytes]:
    found: Any = server.client().keys("{kv2}picker:quota:*")
    return sorted(found)


async def test_all_replicas_together_let_pass_what_the_quota_allows(replicas: Replicas) -> None:
    one, two, three = (replicas.start() for _ in range(3))
    counts = await asyncio.gather(*(replica.admitted(8) for replica in (one, two, three)))

    assert sum(counts) == 10
    refused = await two.asked()
    assert (refused.allowed, refused.limit, refused.degraded) == (False, Limit.REQUESTS, None)
    assert 5.0 < refused.wait_seconds <= 6.0


async def test_an_allowed_answer_tells_what_is_left_and_when_it_is_full(replicas: Replicas) -> None:
    one = replicas.start(
        Quota(requests_per_minute=60, prompt_tokens_per_minute=6000, generated_tokens_per_minute=600, burst_seconds=60)
    )
    headers = (await one.asked(prompt_tokens=1000, most_generated=60)).headers

    assert {name: headers[name] for name in headers if "reset" not in name} == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5000",
    }
    assert (headers["x-ratelimit-reset-requests"], headers["x-ratelimit-reset-tokens"]) == ("1s", "10s")


async def test_tenants_and_models_do_not_use_each_others_quota(replicas: Replicas) -> None:
    one = replicas.start()
    assert await one.admitted(12) == 10
    assert await one.admitted(12, tenant="bob") == 10
    assert await one.admitted(12, model="other") == 10


async def test_a_bucket_fills_again_by_redis_clock(replicas: Replicas) -> None:
    one = replicas.start(Quota(prompt_tokens_per_minute=1200, burst_seconds=60))  # 20 a second
    assert (await one.asked(prompt_tokens=1300)).allowed
    refused = await one.asked(prompt_tokens=1)
    assert 0.0 < refused.wait_seconds <= 5.1  # long before what Redis holds of it expires

    async with asyncio.timeout(DEADLINE_SECONDS):
        while not (await one.asked(prompt_tokens=1)).allowed:
            await asyncio.sleep(0.01)


async def test_a_limit_added_to_a_used_quota_starts_full(replicas: Replicas) -> None:
    replica = replicas.start(TEN_A_MINUTE)
    assert await replica.admitted(1) == 1
    replica.quotas.reconfigure((structs.replace(TEN_A_MINUTE, prompt_tokens_per_minute=1000),))
    verdict = await replica.asked(prompt_tokens=100)
    assert verdict.allowed
    assert verdict.levels[1] == pytest.approx(900, abs=50)


async def test_all_or_nothing_is_taken(replicas: Replicas) -> None:
    one = replicas.start(Quota(requests_per_minute=10, prompt_tokens_per_minute=1000, burst_seconds=60))
    await one.asked(prompt_tokens=900)
    refused = [await one.asked(prompt_tokens=200) for _ in range(3)]

    assert [verdict.limit for verdict in refused] == [Limit.PROMPT_TOKENS] * 3
    assert refused[-1].error_type == "tokens"
    assert (await one.asked(prompt_tokens=50)).headers["x-ratelimit-remaining-requests"] == "8"


async def test_a_prompt_longer_than_the_burst_passes_once_and_leaves_a_debt(replicas: Replicas) -> None:
    one = replicas.start(Quota(prompt_tokens_per_minute=600, burst_seconds=10))
    assert (await one.asked(prompt_tokens=700)).allowed
    refused = await one.asked(prompt_tokens=1)

    assert (refused.limit, refused.headers["x-ratelimit-remaining-tokens"]) == (Limit.PROMPT_TOKENS, "0")
    assert 59.0 < refused.wait_seconds <= 60.2


async def test_generated_tokens_are_reserved_and_what_was_not_generated_is_given_back(replicas: Replicas) -> None:
    one, two = (replicas.start(Quota(generated_tokens_per_minute=1000, burst_seconds=60)) for _ in range(2))
    assert (await one.asked(most_generated=900)).allowed
    assert (await two.asked(most_generated=200)).limit is Limit.GENERATED_TOKENS
    one.settle_all(generated_tokens=100)

    async with asyncio.timeout(DEADLINE_SECONDS):
        while not (verdict := await two.asked(most_generated=890)).allowed:
            await asyncio.sleep(0.005)
    assert int(verdict.headers["x-ratelimit-remaining-tokens"]) <= 20


async def test_a_response_that_another_picker_reads_gives_back_all_the_same(replicas: Replicas) -> None:
    one, two = (replicas.start(Quota(generated_tokens_per_minute=1000, burst_seconds=60)) for _ in range(2))
    await one.asked(most_generated=900)
    note = one.asks[0].note
    assert note is not None
    one.settle_all()
    two.quotas.generated(note, 100)

    async with asyncio.timeout(DEADLINE_SECONDS):
        while not (await one.asked(most_generated=890)).allowed:
            await asyncio.sleep(0.005)


async def test_more_generated_than_reserved_is_charged_afterwards(replicas: Replicas) -> None:
    one = replicas.start(Quota(generated_tokens_per_minute=1000, burst_seconds=60))
    await one.asked(most_generated=10)
    one.settle_all(generated_tokens=3000)
    await until(lambda: one.quotas.facts()["unwritten_keys"] == 0)

    async with asyncio.timeout(DEADLINE_SECONDS):
        while (verdict := await one.asked(most_generated=1)).allowed:
            await asyncio.sleep(0.005)
    assert verdict.wait_seconds > 100


async def test_without_max_tokens_what_is_usual_is_reserved(replicas: Replicas) -> None:
    one = replicas.start(Quota(generated_tokens_per_minute=6000, burst_seconds=60))
    for _ in range(40):
        await one.asked(most_generated=None)
        one.settle_all(generated_tokens=20)
    await one.asked(most_generated=None)

    assert 20 <= one.asks[-1].reserved_tokens <= 22


async def test_a_cancelled_request_gives_everything_back(replicas: Replicas, redis_server: RedisServer) -> None:
    one = replicas.start(
        Quota(
            requests_per_minute=600,
            prompt_tokens_per_minute=6000,
            generated_tokens_per_minute=600,
            concurrent_requests=1,
            burst_seconds=10,
        )
    )
    assert (await one.asked()).allowed
    one.quotas.cancel(one.asks[0])
    one.quotas.settle(one.asks[0], generated_tokens=10_000)  # only the first counts

    await until(lambda: keys(redis_server) == [], "full buckets and no open request leave nothing in Redis")
    assert one.quotas.facts() == {
        "quotas": 1,
        "keys": 1,
        "open_requests": 0,
        "leases": 0,
        "unwritten_keys": 0,
        "writes_failing": False,
        "problem": None,
    }


async def test_open_requests_are_counted_over_all_replicas(replicas: Replicas) -> None:
    slow = replace(QUICK, lease_seconds=4000.0)  # so that only an end can free a place
    one, two = (replicas.start(Quota(concurrent_requests=3), settings=slow) for _ in range(2))
    counts = await asyncio.gather(one.admitted(4), two.admitted(4))
    assert sum(counts) == 3
    refused = await two.asked()
    assert (refused.limit, refused.error_type, refused.headers) == (Limit.CONCURRENT_REQUESTS, "requests", {})
    one.settle_all()
    two.settle_all()

    async with asyncio.timeout(DEADLINE_SECONDS):
        while not (await two.asked()).allowed:
            await asyncio.sleep(0.005)


async def test_a_long_request_stays_open_beyond_its_lease(replicas: Replicas, redis_server: RedisServer) -> None:
    one, two = (replicas.start(Quota(concurrent_requests=1)) for _ in range(2))
    assert (await one.asked()).allowed
    (name,) = keys(redis_server)
    client: Any = redis_server.client()
    (before,) = client.zrange(name, 0, -1, withscores=True)
    await until(lambda: client.zrange(name, 0, -1, withscores=True)[0][1] > before[1] + 2 * QUICK.lease_seconds * 1000)

    assert not (await two.asked()).allowed


async def test_what_a_dead_replica_had_open_is_free_after_the_lease(replicas: Replicas) -> None:
    one, two = (replicas.start(Quota(concurrent_requests=3)) for _ in range(2))
    assert await one.admitted(2) == 2
    assert (await two.asked()).allowed  # its lease goes on, and with it the key
    await one.kill()
    assert not (await two.asked()).allowed

    async with asyncio.timeout(DEADLINE_SECONDS):
        while not (await two.asked()).allowed:
            await asyncio.sleep(0.005)


async def test_a_client_that_leaves_during_the_lookup_leaves_nothing_open(
    replicas: Replicas, redis_server: RedisServer
) -> None:
    one = replicas.start(Quota(concurrent_requests=1))
    await one.asked(tenant="warm-up")
    one.settle_all()
    asking = asyncio.create_task(one.asked())
    await asyncio.sleep(0)  # it has been sent, and nothing came back yet
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    one.quotas.cancel(one.asks[0])

    await until(lambda: keys(redis_server) == [])
    assert one.quotas.facts()["open_requests"] == 0


async def test_after_a_storm_of_requests_that_end_in_every_way_nothing_is_left(
    replicas: Replicas, redis_server: RedisServer
) -> None:
    slow = replace(QUICK, lease_seconds=4000.0)  # so that nothing ends but by our own word
    quota = Quota(requests_per_minute=1e6, generated_tokens_per_minute=1e8, concurrent_requests=60, burst_seconds=0.05)
    pickers = [replicas.start(quota, settings=slow) for _ in range(2)]

    async def request(number: int) -> None:
        one = pickers[number % 2].quotas
        key = one.match(f"tenant-{number % 3}", MODEL)
        assert key is not None
        ask = one.ask(key, prompt_tokens=number, most_generated=None if number % 5 else 30)
        try:
            index = pickers[number % 2].index
            hits = await index.lookup([PROMPT] if number % 7 else [], model=MODEL, quota=ask)
            assert hits.quota is not None
            if hits.quota.allowed and number % 4:
                one.settle(ask, generated_tokens=number % 50)
        finally:
            one.cancel(ask)

    for wave in range(5):
        tasks = [asyncio.create_task(request(wave * 100 + number)) for number in range(100)]
        for number, task in enumerate(tasks):
            if number % 9 == 0:
                await asyncio.sleep(0)
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}

    def left() -> list[int]:
        facts = [picker.quotas.facts() for picker in pickers]
        return [each[name] for each in facts for name in ("open_requests", "leases", "unwritten_keys")]

    await until(lambda: not keys(redis_server) and not any(left()), "nothing is left, in Redis and here")


async def test_a_request_without_a_lookup_is_asked_for_by_itself(replicas: Replicas) -> None:
    one = replicas.start()
    hits = await one.look(prompts=())
    assert hits.quota is not None
    assert (hits.quota.allowed, hits.quota.headers["x-ratelimit-remaining-requests"]) == (True, "9")
    assert hits.degraded == {}


async def test_a_request_without_quota_asks_nothing(replicas: Replicas) -> None:
    one = replicas.start(Quota(tenant="bob", requests_per_minute=1))
    assert one.quotas.match("alice", MODEL) is None
    assert (await one.index.lookup([PROMPT], model=MODEL)).quota is None


async def test_the_lookup_and_the_quota_are_one_round_trip(replicas: Replicas, redis_server: RedisServer) -> None:
    one = replicas.start(settings=replace(QUICK, lease_seconds=4000.0))
    client: Any = redis_server.client()

    async def reads(count: int, **what: Any) -> int:
        """How often Redis has read from a connection meanwhile."""
        before = client.info("stats")["total_reads_processed"]
        for _ in range(count):
            await one.index.lookup([PROMPT], model=MODEL, **what)
        return int(client.info("stats")["total_reads_processed"] - before)

    await one.asked()
    key = one.quotas.match("alice", MODEL)
    assert key is not None
    ask = one.quotas.ask(key, prompt_tokens=1, most_generated=1)
    without = await reads(5)
    assert without < 5 + 3  # the registry is read once a second beside them
    assert await reads(5, quota=ask) <= without + 1


AMOUNTS = (3, 50, 700, 20, 400, 900, 1, 80, 250, 1200, 5)


@pytest.mark.parametrize(
    "quota",
    [
        Quota(requests_per_minute=0.05, burst_seconds=7200),
        Quota(prompt_tokens_per_minute=0.1, burst_seconds=600_000),
        Quota(generated_tokens_per_minute=0.1, prompt_tokens_per_minute=0.2, burst_seconds=600_000),
        Quota(requests_per_minute=0.05, concurrent_requests=3, burst_seconds=7200),
        Quota(concurrent_requests=4),
        Quota(requests_per_minute=0),
        Quota(concurrent_requests=0),
    ],
    ids=["requests", "prompt", "both tokens", "requests and open", "open", "no request", "none open"],
)
async def test_what_redis_decides_a_share_of_all_decides_alike(replicas: Replicas, quota: Quota) -> None:
    nowhere = RedisLink("redis://127.0.0.1:1")
    shared, alone = replicas.start(quota).quotas, Quotas(nowhere, hash_seed="seed", quotas=[quota])
    decided: dict[str, list[tuple[Any, ...]]] = {"shared": [], "alone": []}
    for name, quotas in (("shared", shared), ("alone", alone)):
        key = quotas.match("alice", MODEL)
        assert key is not None
        for amount in AMOUNTS:
            ask = quotas.ask(key, prompt_tokens=amount, most_generated=1000 - amount if amount < 1000 else None)
            verdict = await quotas.read(ask)
            levels = [round(level) for level, terms in zip(verdict.levels, key.terms, strict=True) if terms.capacity]
            decided[name].append((verdict.limit, levels, round(verdict.wait_seconds, -1)))
            assert (verdict.degraded is None) == (name == "shared")
    await alone.close()
    await nowhere.close()

    assert decided["shared"] == decided["alone"]


async def test_a_script_that_redis_has_forgotten_is_sent_again(replicas: Replicas, redis_server: RedisServer) -> None:
    one = replicas.start()
    assert await one.admitted(4) == 4
    redis_server.client().script_flush()
    verdict = await one.asked()
    assert "NOSCRIPT" in (verdict.degraded or "")
    assert (await one.asked()).degraded is None
    one.settle_all()
    await until(lambda: one.quotas.facts()["unwritten_keys"] == 0)


async def test_without_redis_each_replica_gives_its_share_and_says_so(
    replicas: Replicas, redis_server: RedisServer
) -> None:
    replicas.others = 1
    one = replicas.start()
    assert (await one.asked()).degraded is None
    redis_server.kill()
    hits = await one.look()
    assert hits.quota is not None
    assert "a share of 1/2 of the quota" in hits.degraded[QUOTA_LOCAL]
    assert await one.admitted(20) == 3  # of the 9 that were left: 4.5, of which one is gone
    refused = await one.asked()
    assert (refused.limit, refused.headers["x-ratelimit-remaining-requests"]) == (Limit.REQUESTS, "0")
    assert 0.0 < refused.wait_seconds <= 12.0

    redis_server.start()

    async def shared() -> bool:
        return (await one.asked()).degraded is None

    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await shared():
            await asyncio.sleep(0.02)
    assert one.quotas.problem is None


async def test_without_redis_open_requests_are_shared_out_too(replicas: Replicas, redis_server: RedisServer) -> None:
    replicas.others = 1
    one = replicas.start(Quota(concurrent_requests=4))
    assert (await one.asked()).allowed
    redis_server.kill()
    assert await one.admitted(5) == 1
    one.settle_all()
    assert await one.admitted(5) == 2


async def test_what_was_admitted_without_redis_is_open_for_all_when_it_is_back(
    replicas: Replicas, redis_server: RedisServer
) -> None:
    one = replicas.start(Quota(concurrent_requests=1))
    redis_server.kill()
    assert (await one.asked()).allowed
    redis_server.start()
    await until(lambda: len(keys(redis_server)) == 1)
    two = replicas.start(Quota(concurrent_requests=1))

    assert (await two.asked()).limit is Limit.CONCURRENT_REQUESTS


async def test_a_frozen_redis_delays_no_request_beyond_the_deadline(
    replicas: Replicas, redis_server: RedisServer
) -> None:
    one = replicas.start(settings=replace(QUICK, timeout_seconds=0.02), timeout_seconds=0.02)
    await one.asked()
    redis_server.freeze()
    try:
        started = asyncio.get_running_loop().time()
        with_lookup = await one.asked()
        without = await one.asked(prompts=())
        assert asyncio.get_running_loop().time() - started < 10.0
        assert "no answer within 20 ms" in (with_lookup.degraded or "")
        assert "no answer within 20 ms" in (without.degraded or "")
        assert with_lookup.allowed
    finally:
        redis_server.thaw()


async def test_requests_that_end_while_redis_is_frozen_are_not_counted_afterwards(
    replicas: Replicas, redis_server: RedisServer
) -> None:
    quota = Quota(concurrent_requests=3)
    one = replicas.start(quota, settings=QuotaSettings(lease_seconds=4.0, timeout_seconds=0.02), timeout_seconds=0.02)
    assert await one.admitted(3) == 3
    redis_server.freeze()
    try:
        one.settle_all()
        assert await one.admitted(3, prompts=()) == 3  # Redis takes them later, when they have ended
        one.settle_all()
        await until(lambda: one.quotas.facts()["writes_failing"], "a write has failed")
    finally:
        redis_server.thaw()
    answered = 0
    while answered < 20:
        verdict = await one.asked()
        assert verdict.allowed, verdict
        answered += verdict.degraded is None
        one.settle_all()


async def test_a_full_redis_means_shares(replicas: Replicas, redis_server: RedisServer) -> None:
    one = replicas.start()
    await one.asked()
    redis_server.client().config_set("maxmemory", 1)
    verdict = await one.asked()
    assert "OOM" in (verdict.degraded or "")
    assert verdict.allowed
    redis_server.client().config_set("maxmemory", 0)
    assert (await one.asked()).degraded is None


async def test_an_address_that_leads_to_a_replica_does_not_break_lookups(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    folder = tmp_path / "replica"
    folder.mkdir()
    second = RedisServer(folder, "--replicaof", "127.0.0.1", str(redis_server.port))
    second.start()
    started = Replicas(url=second.url)
    try:
        client: Any = second.client()
        await until(lambda: client.info("replication")["master_link_status"] == "up")
        one = started.start()
        first = await one.look()
        assert "READONLY" in first.degraded[QUOTA_LOCAL]
        later = await one.look()
        assert "prefix-index-unavailable" not in later.degraded
        assert later.quota is not None
        assert later.quota.allowed
    finally:
        await started.close()
        second.kill()


@pytest.mark.parametrize("spoil", ["list", "text", "nan", "future", "future and empty"])
async def test_what_others_have_left_under_our_names_ends_nothing(
    replicas: Replicas, redis_server: RedisServer, spoil: str
) -> None:
    client: Any = redis_server.client()
    one = replicas.start(structs.replace(TEN_A_MINUTE, concurrent_requests=100))
    await one.asked()
    levels, members = sorted(keys(redis_server), key=lambda name: b":open:" in name)
    if spoil == "list":
        for name in (levels, members):
            client.delete(name)
            client.rpush(name, "junk")
    else:
        now = int(client.time()[0]) * 1000
        later = now + 10**9
        texts = {"text": b"\xffjunk", "nan": f"{now} nan -inf x", "future": f"{later} 5 5 5"}
        client.set(levels, texts.get(spoil, f"{later} 0 0 0"))

    if spoil == "future and empty":  # refused until it has risen, by a clock that is right
        assert (await one.asked()).limit is Limit.REQUESTS
        assert float(client.get(levels).split()[0]) < now + 3_600_000
        return
    assert (await one.asked()).degraded is None
    if spoil == "future":  # what the level says holds, and it rises from now on
        assert await one.admitted(20) == 4
        assert (await one.asked()).wait_seconds <= 6.0
    else:
        assert await one.admitted(20) == 9
    one.settle_all()
    await until(lambda: one.quotas.facts()["unwritten_keys"] == 0)


@pytest.mark.parametrize("score", ["+inf", "1e18"])
async def test_members_that_no_picker_can_have_written_block_nobody(
    replicas: Replicas, redis_server: RedisServer, score: str
) -> None:
    one = replicas.start(Quota(concurrent_requests=2))
    await one.asked()
    (name,) = keys(redis_server)
    client: Any = redis_server.client()
    client.execute_command("ZADD", name, score, "junk-1", score, "junk-2", score, "junk-3")
    client.persist(name)

    assert (await one.asked()).allowed
    assert client.zcount(name, 1e15, "+inf") == 0
    client.persist(name)
    assert (await one.asked()).limit is Limit.CONCURRENT_REQUESTS
    assert 0 < client.pttl(name) <= QUICK.lease_ms + 1000


async def test_what_the_first_round_trip_has_taken_is_known_though_a_later_one_fails(
    replicas: Replicas, redis_server: RedisServer
) -> None:
    one = replicas.start(Quota(generated_tokens_per_minute=6000, burst_seconds=60))
    reader = one.index._reader
    lookup = reader.lookup

    async def fails_late(*what: Any, **more: Any) -> Any:
        if more["also"]:  # another prompt fails before that one has an answer
            await lookup(*what, **more)
        raise IndexUnavailableError("the connection is gone")

    reader.lookup = fails_late  # type: ignore[method-assign]
    for prompts in ((PROMPT,), (PROMPT, PROMPT)):
        hits = await one.look(prompts=prompts, most_generated=3000)
        assert hits.quota is not None
        assert (hits.quota.allowed, set(hits.degraded)) == (True, {PrefixIndexUnavailableError.reason})
    assert (await one.asked(most_generated=3000)).limit is Limit.GENERATED_TOKENS
    one.settle_all(generated_tokens=5)
    await until(lambda: one.quotas.facts()["unwritten_keys"] == 0)
    (name,) = keys(redis_server)
    client: Any = redis_server.client()
    await until(lambda: float((client.get(name) or b"0 0 0 6000").split()[3]) > 5980)


async def test_no_word_of_a_client_is_in_redis(replicas: Replicas, redis_server: RedisServer) -> None:
    one, other_seed = replicas.start(), replicas.start(hash_seed="another")
    await one.asked(tenant="alice@example.org", model="secret-model")
    await other_seed.asked(tenant="alice@example.org", model="secret-model")
    client: Any = redis_server.client()
    everything = b"\n".join(bytes(name) + (client.dump(name) or b"") for name in client.keys("*"))

    assert b"alice" not in everything
    assert b"secret" not in everything
    assert len(keys(redis_server)) == 2


async def test_everything_expires_by_itself(replicas: Replicas, redis_server: RedisServer) -> None:
    one = replicas.start(Quota(requests_per_minute=600, concurrent_requests=5))
    await one.asked()
    client: Any = redis_server.client()
    left = {name: client.pttl(name) for name in keys(redis_server)}

    assert len(left) == 2
    assert all(0 < milliseconds <= 1500 for milliseconds in left.values())


@pytest.mark.parametrize("rights", [RIGHTS, USER_RIGHTS[PICKER_USER].split()], ids=["documented", "bundled"])
async def test_the_rights_suffice(rights: Sequence[str], redis_7_server: RedisServer) -> None:
    client: Any = redis_7_server.client()
    client.execute_command("ACL", "SETUSER", "kvmesh", "on", ">secret", *rights)
    started = Replicas(url=redis_7_server.url.replace("redis://", "redis://kvmesh:secret@"))
    try:
        one = started.start(structs.replace(TEN_A_MINUTE, concurrent_requests=5))
        assert (await one.asked()).degraded is None
        one.quotas.cancel(one.asks[0])
        await until(lambda: keys(redis_7_server) == [])
        assert one.quotas.problem is None
    finally:
        await started.close()


async def test_it_works_on_a_cluster(tmp_path: Path) -> None:
    group = ClusterGroup(tmp_path)
    started = Replicas(url=group.url)
    try:
        await group.formed()
        one, two = (started.start(structs.replace(TEN_A_MINUTE, concurrent_requests=100)) for _ in range(2))
        counts = await asyncio.gather(one.admitted(8), two.admitted(8))
        assert sum(counts) == 10
        assert (await two.asked()).degraded is None
        one.quotas.cancel(one.asks[0])
        await until(lambda: one.quotas.facts()["unwritten_keys"] == 0)
        assert one.quotas.problem is None
    finally:
        await started.close()
        group.kill()


async def test_an_error_of_another_kind_means_shares(redis_server: RedisServer) -> None:
    async with fake_redis(lambda command: error("ERR no scripts here") if command[0] == b"EVAL" else b"") as fake:
        link = RedisLink(fake.url)
        shared = Quotas(link, hash_seed="seed", quotas=[TEN_A_MINUTE], settings=QUICK)
        key = shared.match("alice", MODEL)
        assert key is not None
        verdict = await shared.read(shared.ask(key, prompt_tokens=1, most_generated=None))
        assert (verdict.allowed, "no scripts here" in (verdict.degraded or "")) == (True, True)
        await shared.close()
        await link.close()
