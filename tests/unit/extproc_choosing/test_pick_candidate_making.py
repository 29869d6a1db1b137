"""Every endpoint as one request sees it: reports, bookings of all replicas, what was routed, what is avoided."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from extproc.choosing.candidates import SLOW_FACTOR, candidates_of
from extproc.choosing.endpoint_health import EndpointHealth
from extproc.pods.endpoint import Candidate, EndpointStatus, EndpointTrend, Reachability, Role
from extproc.pods.inflight import Bookings
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import NO_HITS, NO_MATCH, IndexHits, PromptKeys, PromptMatch
from extproc.prefixes.routing_memory import ROUTES_LIMIT, UNFOLLOWED_SECONDS, RecentRoutes, RoutingMemory
from extproc.shared.shared_load import Claims, EndpointBookings, SharedView
from kvmesh.blocks.cache_groups import CacheGroup
from kvmesh.blocks.source import Registry
from kvmesh.index.group_match import HeldBack
from kvmesh.index.prefix_match import PrefixLookup
from tests.unit.extproc_choosing.pick_candidates import load

POLICY = PickPolicy()
KEYS = PromptKeys(keys=bytes(range(80)), tokens_each=16)  # 10 keys


def status(address: str, **values: Any) -> EndpointStatus:
    facts: dict[str, Any] = {"reachability": Reachability.READY, "load": load(reported_at=10.0)}
    return EndpointStatus(address=address, **(facts | values))


def seen(
    *statuses: EndpointStatus,
    match: PromptMatch = NO_MATCH,
    hits: IndexHits = NO_HITS,
    bookings: Bookings | None = None,
    memory: RoutingMemory | None = None,
    health: EndpointHealth | None = None,
    policy: PickPolicy = POLICY,
    session: str | None = None,
    adapter: str | None = None,
) -> list[Candidate]:
    return candidates_of(
        statuses,
        match,
        hits,
        bookings=bookings or Bookings(),
        claims=Claims(),
        memory=memory or RoutingMemory(policy),
        health=health or EndpointHealth(),
        policy=policy,
        session=session,
        adapter=adapter,
        now=11.0,
    )


def test_a_match_never_covers_the_last_token() -> None:
    match = PromptMatch(prompt_tokens=64, matched_tokens={"a": 64}, worth_tokens={"a": 64.0}, indexed_tokens={"a": 48})
    (pod,) = seen(status("a"), match=match)
    assert (pod.matched_tokens, pod.saved_tokens, pod.indexed_tokens) == (63, 63, 48)


def test_a_candidate_says_why_the_index_expects_less_than_full_attention_holds() -> None:
    back = HeldBack(tokens=96, by=CacheGroup(kind="mamba", block_size=16))
    found = PrefixLookup(
        matched_blocks={}, block_size={}, endpoints={}, registry=Registry(version=b"1"), indexer_alive=True
    )
    held_back = structs.replace(found, held_back={"a": back})
    pods = seen(status("a"), status("b"), hits=IndexHits(prompts=(held_back,)))
    assert [pod.held_back for pod in pods] == [back.words, ""]
    assert "96 tokens" in back.words


def test_bookings_of_this_and_the_other_replicas_add_up() -> None:
    bookings = Bookings(tokens_per_second=0.0)
    bookings.book("a", now=9.0, uncached_tokens=100, context_tokens=1000)  # the report shows it
    bookings.book("a", now=10.5, uncached_tokens=200, context_tokens=2000)
    view = SharedView(others={"a": EndpointBookings(3, 50, 500)}, replicas=1)
    report = load(reported_at=10.0, running_requests=1, waiting_requests=1)
    (pod,) = seen(status("a", load=report), hits=IndexHits(view=view), bookings=bookings)
    assert (pod.open_requests, pod.backlog_tokens, pod.context_tokens) == (5, 350.0, 3500)
    assert pod.booked_requests == 3  # 5 are open, the pod shows 2
    (alone,) = seen(status("a", load=report), bookings=bookings)
    assert (alone.open_requests, alone.booked_requests) == (2, 1)
    fetching = load(reported_at=10.0, running_requests=1, fetching_requests=1)
    (pod,) = seen(status("a", load=fetching), hits=IndexHits(view=view), bookings=bookings)
    assert (pod.booked_requests, pod.queue_depth, pod.active_requests) == (3, 3, 5)  # the pod shows 2, and none queues


def test_streams_with_a_promise_are_those_of_all_replicas() -> None:
    bookings = Bookings()
    bookings.book("a", now=9.0, promised="chat")
    bookings.book("b", now=9.0)
    view = SharedView(others={"a": EndpointBookings(3, 0, 0, {"chat": 2, "code": 1})}, replicas=1)
    pods = seen(status("a"), status("b"), hits=IndexHits(view=view), bookings=bookings)
    assert [pod.promised for pod in pods] == [{"chat": 3, "code": 1}, {}]


def test_a_session_is_where_any_replica_saw_it_last_else_where_this_one_did() -> None:
    memory = RoutingMemory(PickPolicy())
    memory.note("a", prompts=(), session="s", adapter=None, now=10.0)

    def places(view: SharedView | None) -> list[bool]:
        pods = seen(status("a"), status("b"), memory=memory, session="s", hits=IndexHits(view=view))
        return [pod.session for pod in pods]

    assert places(None) == [True, False]
    assert places(SharedView(session_endpoint="b")) == [False, True]


def test_an_adapter_is_expected_where_any_replica_sent_it() -> None:
    memory = RoutingMemory(PickPolicy())
    memory.note("a", prompts=(), session=None, adapter="lora", now=10.0)
    hits = IndexHits(view=SharedView(adapter_endpoints=frozenset({"b"})))
    pods = seen(status("a"), status("b"), status("c"), memory=memory, adapter="lora", hits=hits)
    assert [pod.adapter_placed for pod in pods] == [True, True, False]


def test_the_policy_s_roles_and_cordons_and_the_index_s_doubts_reach_the_candidate() -> None:
    policy = PickPolicy(cordoned=frozenset({"a"}), roles={"b": Role.PREFILL})
    a, b = seen(status("a"), status("b"), policy=policy, hits=IndexHits(states={"a": "live", "b": "degraded"}))
    assert (a.cordoned, a.role, a.source_state) == (True, Role.BOTH, "")
    assert (b.cordoned, b.role, b.source_state) == (False, Role.PREFILL, "degraded")


def test_failing_endpoints_are_avoided_then_slow_ones_up_to_half_of_all() -> None:
    health = EndpointHealth()

    def fail(endpoint: str) -> None:
        for _ in range(3):
            health.note(endpoint, failed=True, now=11.0)

    fail("a")
    slow = [status(name, trend=EndpointTrend(inter_token_seconds=0.02)) for name in "abc"]
    slow.append(status("d", trend=EndpointTrend(inter_token_seconds=0.5)))
    assert [pod.unhealthy for pod in seen(*slow, health=health)] == [
        "3 requests in a row failed",
        None,
        None,
        "500 ms a token, the others 20 ms",
    ]
    fail("b")
    assert [pod.unhealthy for pod in seen(*slow, health=health)] == [
        "3 requests in a row failed",
        "3 requests in a row failed",
        None,
        None,
    ]


def test_an_endpoint_that_decodes_slowly_beside_prompts_is_not_avoided() -> None:
    policy, rate = PickPolicy(), Bookings().tokens_per_second
    pods = [status(name, trend=EndpointTrend(inter_token_seconds=0.02)) for name in "abc"]
    for share, is_avoided in (
        (0.9 / SLOW_FACTOR, True),
        (1.1 / SLOW_FACTOR, False),
    ):  # as much as a slow one could compute
        busy = EndpointTrend(inter_token_seconds=0.5, prompt_tokens_per_second=share * rate)
        d = seen(*pods, status("d", trend=busy), policy=policy)[-1]
        assert (d.unhealthy is not None) == is_avoided


def test_what_was_routed_is_expected_for_seconds_where_events_flow_and_for_minutes_where_not() -> None:
    memory = RoutingMemory(PickPolicy(recent_prefix_seconds=5.0))
    routed = [KEYS]
    for endpoint in ("live", "silent"):
        memory.began(endpoint, routed, now=0.0)
        memory.note(endpoint, prompts=routed, session=None, adapter=None, now=0.0)

    def matches(now: float) -> dict[str, int]:
        ((ends, _),) = memory.matches([KEYS], states={"live": "live"}, endpoints=("live", "silent"), now=now)
        return dict(ends)

    assert matches(1.0) == {"live": 10, "silent": 10}
    assert matches(60.0) == {"silent": 10}
    assert matches(400.0) == {}


def test_only_an_index_that_follows_the_endpoint_replaces_an_expectation() -> None:
    memory = RoutingMemory(PickPolicy())
    routed = [KEYS]
    memory.began("a", routed, now=0.0)
    memory.note("a", prompts=routed, session=None, adapter=None, now=0.0)

    def matches(state: str, **indexed: int) -> dict[str, int]:
        ((found, _),) = memory.matches([KEYS], states={"a": state}, endpoints=("a",), indexed=indexed, now=1.0)
        return dict(found)

    assert matches("degraded", a=160) == {"a": 10}
    assert matches("live") == {"a": 10}
    assert matches("live", a=160) == {}


def test_what_was_routed_to_a_process_that_is_gone_is_forgotten() -> None:
    memory = RoutingMemory(PickPolicy())
    memory.note("a", prompts=[KEYS], session=None, adapter=None, now=0.0)
    memory.forget("a")
    assert memory.matches([KEYS], states={}, endpoints=("a",), now=0.0) == [({}, 16)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),  # endpoint
            st.integers(0, 10),  # keys of it
            st.floats(0.0, 60.0),  # seconds since the step before
            st.sampled_from(["note", "note", "note", "look", "forget"]),
        ),
        max_size=40,
    )
)
def test_what_the_memory_notes_is_found_as_in_routes_alone(steps: list[tuple[str, int, float, str]]) -> None:
    memory = RoutingMemory(PickPolicy())
    plain = RecentRoutes(ttl_seconds=UNFOLLOWED_SECONDS, limit=ROUTES_LIMIT)
    now = 0.0
    for endpoint, count, seconds, what in [*steps, ("a", 10, 0.0, "look")]:
        now += seconds
        keys = KEYS.keys[: count * 8]
        prompt = PromptKeys(keys=keys, tokens_each=16)
        if what == "note":
            memory.note(endpoint, prompts=[prompt], session=None, adapter=None, now=now)
            plain.note(keys, endpoint=endpoint, now=now)
        elif what == "forget":
            memory.forget(endpoint)
            plain.forget(endpoint)
        else:
            assert memory.matches([prompt], states={}, endpoints="abc", now=now) == [(plain.match(keys, now=now), 16)]


def test_a_session_is_forgotten_after_its_time() -> None:
    memory = RoutingMemory(PickPolicy(session_seconds=10.0))
    memory.note("a", prompts=(), session="s", adapter=None, now=0.0)
    assert (memory.session_place("s", now=10.0), memory.session_place("s", now=10.1)) == ("a", None)


@given(
    held=st.dictionaries(st.sampled_from("abc"), st.integers(0, 80)),
    others=st.dictionaries(st.sampled_from("abc"), st.builds(EndpointBookings, st.integers(0, 3), st.integers(0, 99))),
    states=st.dictionaries(st.sampled_from("abc"), st.sampled_from(["live", "stale"])),
    booked=st.lists(st.sampled_from("abc"), max_size=4),
)
def test_endpoints_that_nothing_sets_apart_are_made_as_all_others_are(
    held: dict[str, int],
    others: dict[str, EndpointBookings],
    states: dict[str, str],
    booked: list[str],
) -> None:
    def made(**policy: Any) -> list[Candidate]:
        bookings = Bookings()
        for endpoint in booked:
            bookings.book(endpoint, now=10.5, uncached_tokens=9000, context_tokens=9000)
        match = PromptMatch(
            prompt_tokens=64,
            matched_tokens=held,
            worth_tokens={endpoint: tokens / 2 for endpoint, tokens in held.items()},
            indexed_tokens=held,
            recent_tokens=dict(list(held.items())[:1]),
        )
        hits = IndexHits(states=states, view=SharedView(others=others))
        pods = [status("a"), status("b", ready_since=5.0), status("c", load=None)]
        return seen(*pods, match=match, hits=hits, bookings=bookings, policy=PickPolicy(**policy))

    # a role of one that is not there: then each is asked for all that may set it apart
    assert made() == made(roles={"elsewhere": Role.DECODE})


def test_expected_answers_count_from_half_of_the_cache_in_use_on() -> None:
    bookings = Bookings()
    for _ in range(2):
        bookings.book("a", now=10.5, answer_tokens=600.0, answer_variance=5000.0)
    others = IndexHits(view=SharedView(others={"a": EndpointBookings(2)}))

    def growth(usage: float, hits: IndexHits = NO_HITS) -> float:
        report = load(reported_at=10.0, running_requests=4, kv_usage=usage, kv_capacity_tokens=6000)
        (pod,) = seen(status("a", load=report), bookings=bookings, hits=hits)
        return pod.growth_tokens

    assert growth(0.5) == 650
    assert growth(0.5, others) == 1300
    assert growth(0.49) == 0
