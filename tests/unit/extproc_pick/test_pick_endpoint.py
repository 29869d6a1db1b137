"""The use case: from a request's bytes to a decision, with every input there and with each one missing."""

import gzip
import json
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from extproc.admission.asked_request import AskedRequest
from extproc.admission.degradation import Measures
from extproc.admission.prepared_request import Picked
from extproc.answers.answer_lengths import LEAST_ANSWERS
from extproc.choosing.hot_prefixes import HotLimits
from extproc.errors import (
    BodyTooLargeError,
    MalformedRequestError,
    NoReadyEndpointError,
    PromptTokensError,
    RequestShedError,
    UnknownModelError,
    UnsupportedEncodingError,
)
from extproc.models.models import ModelRule, ModelTable, ModelTarget
from extproc.pick import pick, prepare
from extproc.pods.endpoint import EndpointModels, Reachability
from extproc.pods.inflight import MOST_SEQUENCES
from extproc.policy.priority import ClassRule, OverloadPolicy, Quota
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import PRESETS, PickPolicy, Strategy
from extproc.prefixes.prompt_match import IndexHits, PromptKeys
from extproc.prompts.tokenized_prompt import PromptTokens, TokenizedPrompt
from extproc.shared.shared_load import EndpointBookings, SharedView
from tests.unit.extproc_pick.pick_fakes import (
    ONE_MODEL,
    TINY,
    FakeIndex,
    FakePrompts,
    Hits,
    chat,
    decided,
    explained,
    facts,
    pod,
    runtime,
    tokens,
)

KEYS = PromptKeys(keys=bytes(range(240)), tokens_each=16)  # 30 keys
NO_LIMITS = PriorityPolicy(overload=OverloadPolicy(enabled=False))  # every pod has room
WARM_B = IndexHits(prompts=[Hits({"b": 30})], keys=[KEYS], states={"a": "live", "b": "live"})


async def test_the_pod_that_holds_the_prompt_is_picked_and_the_phases_are_timed() -> None:
    index = FakeIndex(WARM_B)
    a_pool = runtime(pod("a"), pod("b"), index=index, prompts=FakePrompts(tokens(500)))
    picked = await explained(a_pool, facts(), chat(cache_salt="s"))
    decision = picked.decision
    assert (decision.endpoints, decision.prompt_tokens, decision.matched_tokens) == (("b", "a"), 500, 480)
    assert (decision.best_matched_tokens, decision.degraded, picked.prepared.sent.changed) == (480, {}, None)
    assert (picked.is_comparable, picked.prepared.query.prompts) == (True, [KEYS])
    assert index.asked == [
        {"prompts": 1, "model": "tiny", "adapter": None, "cache_salt": "s", "session": None, "quota": None}
    ]
    draft = a_pool.begin(facts())
    prepared = await prepare(chat(), draft, a_pool)
    a_pool.book(Picked(prepared=prepared, choice=picked.choice), draft)
    assert list(draft.phases) == ["parse", "tokenize", "lookup", "decide"]


async def test_a_prompt_whose_tokens_are_scored_finds_nothing_in_a_cache_and_is_booked_whole() -> None:
    index = FakeIndex(WARM_B)
    a_pool = runtime(pod("a"), pod("b"), index=index, prompts=FakePrompts(tokens(500)))
    index.answer = IndexHits()
    picked = await explained(a_pool, facts(), chat(prompt_logprobs=1))
    assert [asked["prompts"] for asked in index.asked] == [0]
    decision = picked.decision
    assert (decision.prompt_tokens, decision.matched_tokens, picked.uncached_tokens) == (500, 0, 500)
    assert not picked.is_comparable


async def test_a_pod_that_caches_no_prefixes_is_expected_to_have_none() -> None:
    for caches, matched in ((True, 480), (False, 0)):
        hits = IndexHits(prompts=[Hits({})], keys=[KEYS], states={})
        a_pool = runtime(pod("a", caches_prefixes=caches), index=FakeIndex(hits), prompts=FakePrompts(tokens(500)))
        await decided(a_pool, facts(), chat())
        assert (await explained(a_pool, facts(), chat())).decision.matched_tokens == matched


async def test_several_choices_are_not_compared_with_usage() -> None:
    a_pool = runtime(pod("a"), pod("b"), index=FakeIndex(WARM_B), prompts=FakePrompts(tokens(500)))
    assert (await explained(a_pool, facts(), chat())).is_comparable
    assert not (await explained(a_pool, facts(), chat(n=2))).is_comparable


async def test_a_dead_pod_that_reports_nothing_is_no_missing_input_of_a_decision() -> None:
    gone = structs.replace(pod("b", reachability=Reachability.UNREACHABLE), load=None)
    picked = await explained(runtime(pod("a"), gone, prompts=FakePrompts(tokens(500))), facts(), chat())
    assert "load-unknown" not in picked.decision.degraded
    silent = structs.replace(pod("b"), load=None)
    picked = await explained(runtime(pod("a"), silent, prompts=FakePrompts(tokens(500))), facts(), chat())
    assert picked.decision.degraded["load-unknown"] == "no recent report of b"


@pytest.mark.parametrize("waiting", [0, 50])
async def test_an_explanation_decides_as_the_pick_does_and_changes_nothing(waiting: int) -> None:
    pods = (pod("a", waiting_requests=waiting, running_requests=waiting), pod("b"), pod("c", waiting_requests=1))
    a_pool = runtime(*pods, index=FakeIndex(WARM_B), prompts=FakePrompts(tokens(500)))
    a_pool.view.bookings.book("b", now=1.0, uncached_tokens=300)
    first = await explained(a_pool, facts(), chat())
    second = await explained(a_pool, facts(), chat())
    assert first.decision == second.decision == await decided(a_pool, facts(), chat())
    assert (a_pool.under_way, len(a_pool.recent)) == (0, 1)


async def test_a_prompt_that_was_just_sent_somewhere_is_expected_there_before_its_event() -> None:
    index = FakeIndex(IndexHits(keys=[KEYS], states={"a": "live", "b": "live"}))
    a_pool = runtime(pod("a"), pod("b"), index=index, prompts=FakePrompts(tokens(500)))
    routed = [KEYS]
    a_pool.view.memory.began("b", routed, now=1.0)
    a_pool.view.memory.note("b", prompts=routed, session=None, adapter=None, now=1.0)
    decision = (await explained(a_pool, facts(), chat())).decision
    assert (decision.endpoints[0], decision.matched_tokens, decision.winner.indexed_tokens) == ("b", 480, 0)


async def test_where_no_events_are_followed_a_route_is_expected_whatever_the_index_has_shown() -> None:
    index = FakeIndex(IndexHits(prompts=WARM_B.prompts, keys=[KEYS], states={"a": "live", "b": "replaying"}))
    a_pool = runtime(pod("a"), pod("b"), index=index, prompts=FakePrompts(tokens(500)))
    a_pool.view.memory.note("b", prompts=[KEYS], session=None, adapter=None, now=1.0)
    await explained(a_pool, facts(), chat())
    index.answer = IndexHits(keys=[KEYS], states={"a": "live", "b": "replaying"})
    assert (await explained(a_pool, facts(), chat())).decision.matched_tokens == 480


@pytest.mark.parametrize(
    ("view", "moved"),
    [
        (SharedView(session_endpoint="a", session_read=True), True),
        (SharedView(session_read=True), True),
        (SharedView(session_endpoint="b", session_read=True), False),
        (SharedView(), False),
        (None, False),
    ],
)
async def test_a_session_whose_place_is_read_as_another_than_the_winner_has_moved(
    view: SharedView | None, moved: bool
) -> None:
    hits = IndexHits(prompts=WARM_B.prompts, keys=[KEYS], states=WARM_B.states, view=view)
    a_pool = runtime(pod("a"), pod("b"), index=FakeIndex(hits), prompts=FakePrompts(tokens(500)))
    picked = await explained(a_pool, facts(headers={"x-session-id": "s1"}), chat())
    assert (picked.decision.endpoints[0], picked.session_moved) == ("b", moved)


async def test_text_chunks_predict_where_tokens_are_unknown_and_the_decision_says_so() -> None:
    chunks = PromptTokens(
        chunks=KEYS.keys, chunk_tokens=64, estimated_tokens=2000, degraded="no-tokenizer", degraded_why="none"
    )
    a_pool = runtime(pod("a"), pod("b"), prompts=FakePrompts(chunks))
    a_pool.view.memory.note("b", prompts=[KEYS], session=None, adapter=None, now=1.0)
    picked = await explained(a_pool, facts(), chat())
    assert (picked.decision.endpoints[0], picked.decision.matched_tokens) == ("b", 30 * 64)
    assert (picked.decision.degraded, picked.is_comparable) == ({"no-tokenizer": "none"}, False)


async def test_without_tokens_and_index_the_load_decides_and_everything_missing_is_named() -> None:
    index = FakeIndex(IndexHits(degraded={"prefix-index-timeout": "no answer within 20 ms"}))
    a_pool = runtime(
        pod("a", waiting_requests=9), pod("b"), index=index, prompts=FakePrompts(PromptTokensError("broken"))
    )
    decision = (await explained(a_pool, facts(), chat())).decision
    assert decision.endpoints[0] == "b"
    assert decision.degraded == {"prompt-tokens": "broken", "prefix-index-timeout": "no answer within 20 ms"}


async def test_what_the_other_replicas_have_booked_counts_as_load() -> None:
    view = SharedView(others={"a": EndpointBookings(9, 50_000, 60_000)}, replicas=2)
    a_pool = runtime(pod("a"), pod("b"), index=FakeIndex(IndexHits(view=view)), policy=PickPolicy(priorities=NO_LIMITS))
    decision = (await explained(a_pool, facts(), chat())).decision
    assert decision.endpoints == ("b", "a")
    assert decision.kept[0].backlog_tokens == 50_000


async def test_a_winner_whose_events_are_not_all_there_is_named() -> None:
    hits = IndexHits(prompts=WARM_B.prompts, keys=[KEYS], states={"a": "live", "b": "degraded"})
    a_pool = runtime(pod("a"), pod("b"), index=FakeIndex(hits), prompts=FakePrompts(tokens(500)))
    assert list((await explained(a_pool, facts(), chat())).decision.degraded) == ["prefix-source-degraded"]


@pytest.mark.parametrize("header", ["x-session-id", "session-id", "x-session-affinity", "x-claude-code-session-id"])
async def test_a_session_returns_to_its_pod_when_nothing_else_tells(header: str) -> None:
    index = FakeIndex()
    a_pool = runtime(pod("a"), pod("b"), index=index)
    a_pool.view.memory.note("b", prompts=(), session="tiny\0s1", adapter=None, now=1.0)
    picked = await explained(a_pool, facts(headers={header: "s1"}), chat())
    assert (picked.decision.endpoints[0], picked.prepared.query.session) == ("b", "tiny\0s1")
    assert index.asked[0]["session"] == "tiny\0s1"


async def test_only_the_route_s_subset_is_picked_from() -> None:
    a_pool = runtime(pod("a"), pod("b"))
    decision = (await explained(a_pool, facts(subset=frozenset({"b"})), chat())).decision
    assert (set(decision.endpoints), decision.rejected) == ({"b"}, {"a": "subset: not in the route's subset"})
    with pytest.raises(NoReadyEndpointError):
        await explained(a_pool, facts(subset=frozenset()), chat())


async def test_requests_take_turns_with_round_robin() -> None:
    policy = PickPolicy(strategy=Strategy.ROUND_ROBIN, weights=PRESETS[Strategy.ROUND_ROBIN])
    a_pool = runtime(pod("a"), pod("b"), pod("c"), policy=policy)
    winners = [(await decided(a_pool, facts(), chat())).endpoints[0] for _ in range(4)]
    assert winners == ["a", "b", "c", "a"]


async def test_each_model_takes_turns_of_its_own() -> None:
    policy = PickPolicy(strategy=Strategy.ROUND_ROBIN, weights=PRESETS[Strategy.ROUND_ROBIN])
    a_pool = runtime(pod("a"), pod("b"), policy=policy)
    asked = [chat(model=model) for model in ("one", "two", "one", "two")]
    winners = [(await decided(a_pool, facts(), body)).endpoints[0] for body in asked]
    assert winners == ["a", "a", "b", "b"]


REWRITTEN = ModelTable(served=(TINY,), rules=(ModelRule(model="best", targets=(ModelTarget(model="tiny"),)),))


async def test_a_rewritten_model_changes_that_field_alone_and_before_tokens_are_asked_for() -> None:
    prompts = FakePrompts(tokens(500))
    a_pool = runtime(pod("a"), prompts=prompts, models=REWRITTEN)
    body = b'{"seed": 12345678901234567890,\n "model" : "best","messages":[{"role":"user","content":"hi"}]}'
    picked = await explained(a_pool, facts(), body)
    changed = body.replace(b'"best"', b'"tiny"')
    sent = picked.prepared.sent
    # the answer's name is changed back, so that the pod may not compress it
    removed = ("accept-encoding",)
    assert (sent.changed, sent.removed_headers, picked.prepared.asked.resolved.requested) == (changed, removed, "best")
    assert prompts.asked == [{"body": changed, "model": "tiny", "adapter": None}]


async def test_a_compressed_body_is_read_and_sent_plain_only_where_it_changes() -> None:
    packed = gzip.compress(chat("best"))
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    picked = await explained(runtime(pod("a"), models=REWRITTEN), facts(headers=headers), packed)
    assert picked.prepared.sent.changed is not None
    assert (json.loads(picked.prepared.sent.changed)["model"], picked.prepared.sent.removed_headers) == (
        "tiny",
        ("content-encoding", "accept-encoding"),
    )
    prompts = FakePrompts()
    picked = await explained(runtime(pod("a"), prompts=prompts), facts(headers=headers), gzip.compress(chat()))
    assert (picked.prepared.sent.changed, picked.prepared.sent.removed_headers) == (None, ())
    assert prompts.asked[0]["body"] == chat()


FALLS_BACK = ModelTable(
    served=(TINY, TINY.__class__(name="small")),
    rules=(ModelRule(model="best", targets=(ModelTarget(model="tiny"),), fallbacks=("absent", "small")),),
)


async def test_a_model_that_no_ready_pod_serves_is_replaced_by_the_first_fallback_that_one_does() -> None:
    a_pool = runtime(pod("a", "tiny", reachability=Reachability.UNREACHABLE), pod("b", "small"), models=FALLS_BACK)
    picked = await explained(a_pool, facts(), chat("best"))
    assert (picked.prepared.asked.resolved.model, picked.decision.endpoints) == ("small", ("b",))
    assert picked.prepared.sent.changed is not None
    assert json.loads(picked.prepared.sent.changed)["model"] == "small"
    assert [note.split(":")[0] for note in picked.decision.notes] == [
        "absent in place of tiny",
        "small in place of absent",
    ]


async def test_a_request_is_turned_away_by_the_model_that_would_serve_it_and_before_its_prompt_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = FakePrompts()
    shrinks = runtime(pod("a"), models=ModelTable(served=(TINY, TINY.__class__(name="small"))), prompts=prompts)
    monkeypatch.setattr(shrinks.pressure, "measures", lambda *_, **__: Measures(model="small"))
    assert (await prepare(chat("tiny"), shrinks.begin(facts()), shrinks)).asked.resolved.model == "small"
    seen: list[str | None] = []

    def turn_away(asked: AskedRequest) -> None:
        seen.append(asked.resolved.model)
        raise RequestShedError("not today")

    monkeypatch.setattr(shrinks.admission, "turn_away", turn_away)
    prompts.asked.clear()
    with pytest.raises(RequestShedError):
        await pick(facts(), chat("tiny"), shrinks)
    assert (seen, prompts.asked) == (["small"], [])


async def test_the_last_fallback_is_tried_though_no_pod_lists_it() -> None:
    picked = await explained(runtime(pod("a", "other"), models=FALLS_BACK), facts(), chat("best"))
    assert (picked.prepared.asked.resolved.model, picked.decision.endpoints) == ("small", ("a",))


async def test_an_adapter_is_looked_up_under_its_base_model() -> None:
    for learned, name in (({}, "lora"), ({"new-lora": "tiny"}, "new-lora")):
        index = FakeIndex()
        picked = await explained(runtime(pod("a"), index=index, learned=learned), facts(), chat(name))
        assert (index.asked[0]["model"], index.asked[0]["adapter"], picked.prepared.asked.resolved.adapter) == (
            "tiny",
            name,
            name,
        )


async def test_a_model_that_nobody_configured_is_routed_on_load_and_said() -> None:
    prompts = FakePrompts()
    picked = await explained(runtime(pod("a"), prompts=prompts), facts(), chat("other"))
    assert list(picked.decision.degraded) == ["no-tokenizer-for-model"]
    assert prompts.asked == [{"body": chat("other"), "model": "", "adapter": "other"}]


async def test_a_model_is_refused_where_the_accepted_ones_are_listed() -> None:
    a_pool = runtime(pod("a"), models=replace(ONE_MODEL, only_listed=True))
    with pytest.raises(UnknownModelError):
        await explained(a_pool, facts(), chat("other"))
    assert (await explained(a_pool, facts(), chat(None))).decision.endpoints == ("a",)


async def test_a_malformed_body_is_refused_and_an_unknown_api_is_balanced() -> None:
    a_pool = runtime(pod("a"))
    with pytest.raises(MalformedRequestError):
        await explained(a_pool, facts(), b"{")
    for body in (b"\x00\xff", b"", None):
        assert (await explained(a_pool, facts(path="/upload"), body)).decision.endpoints == ("a",)


async def test_a_prefix_that_keeps_its_pod_waiting_is_copied_to_another_on_purpose() -> None:
    policy = PickPolicy(weights={"prefix": 1.0}, priorities=NO_LIMITS)  # would never leave by itself
    a_pool = runtime(pod("a"), pod("b"), index=FakeIndex(WARM_B), prompts=FakePrompts(tokens(500)), policy=policy)
    for _ in range(9):
        a_pool.view.bookings.book("b", now=1.0, uncached_tokens=1000)
    winners = [await decided(a_pool, facts(), chat()) for _ in range(HotLimits().least_requests)]
    # the copy counts as warm, and of two that are equally warm the draw decides
    assert [decision.notes for decision in winners[:-1]] == [()] * (len(winners) - 1)
    assert winners[-1].notes == ("hot prefix: a gets a copy of what b holds",)


async def test_a_copy_that_other_scorers_prevent_is_neither_told_nor_remembered() -> None:
    policy = PickPolicy(weights={"prefix": 1.0, "kv-usage": 9.0}, priorities=NO_LIMITS)
    pods = (pod("a", kv_usage=0.9), pod("b"))
    a_pool = runtime(*pods, index=FakeIndex(WARM_B), prompts=FakePrompts(tokens(500)), policy=policy)
    a_pool.view.bookings.book("b", now=1.0, uncached_tokens=9000)
    for _ in range(HotLimits().least_requests):
        decision = await decided(a_pool, facts(), chat())
        assert (decision.endpoints[0], decision.notes) == ("b", ())
    seen = a_pool.view.hot.look(KEYS.keys, matched_keys=30, wait_tokens=9000, saved_tokens=480, idlest="a", now=1.0)
    assert seen is not None
    assert seen.hot is not None  # still to be made


async def test_text_that_was_sent_somewhere_is_expected_there_for_long_although_events_are_followed() -> None:
    chunks = PromptTokens(chunks=KEYS.keys, chunk_tokens=64, estimated_tokens=2000)
    index = FakeIndex(IndexHits(states={"a": "live", "b": "live"}))
    a_pool = runtime(pod("a"), pod("b"), index=index, prompts=FakePrompts(chunks))
    a_pool.view.memory.note("b", prompts=[KEYS], session=None, adapter=None, now=-60.0)
    assert (await explained(a_pool, facts(), chat())).decision.matched_tokens == 30 * 64


async def test_what_clients_may_make_long_is_remembered_short() -> None:
    headers = {"x-session-id": "s" * 50_000}
    picked = await explained(runtime(pod("a")), facts(headers=headers), chat("m" * 100_000))
    asked = picked.prepared.summary
    assert picked.prepared.query.session is not None
    assert max(map(len, (picked.prepared.query.session, asked.model or "", asked.served_model or ""))) == 200
    other = await explained(runtime(pod("a")), facts(headers={"x-session-id": "s" * 50_001}), chat("m" * 100_000))
    assert other.prepared.query.session != picked.prepared.query.session


async def test_each_prompt_of_a_batch_has_the_model_s_context_for_itself() -> None:
    small = EndpointModels(models=frozenset({"tiny"}), adapters={}, max_model_len=400)
    pods = (
        structs.replace(pod("a"), models=small),
        structs.replace(pod("b", waiting_requests=9), models=replace(small, max_model_len=9999)),
    )
    batch = PromptTokens(prompts=(TokenizedPrompt(tokens=bytes(4 * 300)),) * 2, estimated_tokens=600)
    body = json.dumps({"model": "tiny", "prompt": ["one", "two"]}).encode()
    picked = await explained(runtime(*pods, prompts=FakePrompts(batch)), facts(path="/v1/completions"), body)
    assert (picked.decision.endpoints, picked.decision.rejected) == (("a", "b"), {})


@pytest.mark.parametrize(
    ("tokens", "counted"),
    [
        (PromptTokens(prompts=(TokenizedPrompt(tokens=bytes(4 * 399)),), estimated_tokens=399), 399),
        (PromptTokens(prompts=(TokenizedPrompt(tokens=bytes(4 * 400)),), estimated_tokens=400), 0),
        (PromptTokens(chunks=b"12345678", chunk_tokens=64, estimated_tokens=1500), 1500),
        (PromptTokens(chunks=b"12345678", chunk_tokens=64, estimated_tokens=1600), 0),
    ],
    ids=["fits", "known to be too long", "may be too long", "surely too long"],
)
async def test_a_prompt_that_every_pod_will_refuse_at_once_is_not_booked_as_work(
    tokens: PromptTokens, counted: int
) -> None:
    small = EndpointModels(models=frozenset({"tiny"}), adapters={}, max_model_len=400)
    keys = tuple([PromptKeys(keys=bytes(8 * 25), tokens_each=16)] if tokens.prompts else ())
    index = FakeIndex(IndexHits(keys=keys))
    a_pool = runtime(structs.replace(pod("a"), models=small), prompts=FakePrompts(tokens), index=index)
    assert (await explained(a_pool, facts(), chat())).decision.prompt_tokens == counted


async def test_what_cannot_be_read_is_balanced_and_refused_only_where_the_policy_depends_on_it() -> None:
    limited = PickPolicy(priorities=PriorityPolicy(quotas=(Quota(requests_per_minute=1),)))
    coded = facts(headers={"content-encoding": "br"})
    complex_body = b'{"messages":[],"x":[' + b"[]," * 150_000 + b"0]}"
    assert (await explained(runtime(pod("a")), coded, b"\x1b")).decision.endpoints == ("a",)
    assert (await explained(runtime(pod("a")), facts(), complex_body)).decision.endpoints == ("a",)
    with pytest.raises(UnsupportedEncodingError):
        await explained(runtime(pod("a"), policy=limited), coded, b"\x1b")
    with pytest.raises(BodyTooLargeError):
        await explained(runtime(pod("a"), policy=limited), facts(), complex_body)


@pytest.mark.parametrize("name", [None, "", "tiny", "small"])
async def test_all_names_of_a_model_and_none_are_classed_and_counted_as_the_model(name: str | None) -> None:
    table = ModelTable(served=(TINY,), rules=(ModelRule(model="small", targets=(ModelTarget(model="tiny"),)),))
    rule = ClassRule(priority_class="sheddable", models=("tiny", "small"))
    policy = PickPolicy(priorities=PriorityPolicy(rules=(rule,), quotas=(Quota(requests_per_minute=1),)))
    picked = await explained(runtime(pod("a"), models=table, policy=policy), facts(), chat(name))
    asked = picked.prepared.asked
    assert (asked.request_class.class_name, asked.request_class.tenant, asked.charged) == ("sheddable", "", "tiny")


async def test_a_learned_answer_length_is_part_of_the_request_and_bounded_by_its_own_limit() -> None:
    pool = runtime(pod("a"))

    async def answer(**fields: Any) -> tuple[float, float]:
        asked = (await explained(pool, facts(), chat(**fields))).prepared.summary
        return asked.answer_tokens, asked.answer_spread

    assert await answer() == (0, 0)
    kind = (await explained(pool, facts(), chat())).prepared.asked.answer_kind(None)
    assert kind is not None
    for length in [200, 400] * LEAST_ANSWERS:
        pool.books.answers.note(kind, length)
    mean, spread = await answer()
    assert (mean, spread) == pytest.approx((300, 100))
    assert await answer(n=2) == pytest.approx((2 * mean, 2**0.5 * spread))
    assert (await answer(n=1 << 40))[0] == pytest.approx(MOST_SEQUENCES * mean)
    assert await answer(max_tokens=250) == (250, 0)
    embedding = json.dumps({"model": "tiny", "input": "hi"}).encode()
    other = await explained(pool, facts(path="/v1/embeddings"), embedding)
    assert other.prepared.summary.answer_tokens == 0
