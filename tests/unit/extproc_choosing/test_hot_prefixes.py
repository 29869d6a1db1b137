"""A prefix that keeps its endpoint waiting is copied to a further one, once, and remembered."""

from extproc.choosing.decision import apply_filters
from extproc.choosing.hot_prefixes import DEPTHS, KEY_BYTES, HotLimits, HotPrefixes, copy_of_hot_prefix
from extproc.pods.endpoint import NOTHING_ASKED, Ask, Candidate
from extproc.policy.values import PRESETS, PickPolicy, Strategy
from extproc.prefixes.prompt_match import PromptKeys
from tests.unit.extproc_choosing.pick_candidates import candidate, load, serving

LIMITS = HotLimits(
    pressure=0.5, least_requests=3, window_seconds=5.0, copies=1, remember_seconds=60.0, most_prefixes=50
)
KV_AWARE = PickPolicy()
SYSTEM = bytes(range(16)) * KEY_BYTES  # 16 keys


def asked(
    hot: HotPrefixes, *, now: float, keys: bytes = SYSTEM, wait: float = 1000.0, idlest: str = "idle", matched: int = 16
) -> str | None:
    seen = hot.look(keys, matched_keys=matched, wait_tokens=wait, saved_tokens=1600.0, idlest=idlest, now=now)
    if seen is None:
        return None
    hot.note(seen, endpoint=idlest, now=now)
    return None if seen.hot is None else idlest


def test_a_copy_is_made_once_enough_requests_have_waited() -> None:
    hot = HotPrefixes(LIMITS)
    assert [asked(hot, now=0.1 * i) for i in range(7)] == [None, None, "idle", None, None, None, None]


def test_no_copy_is_made_while_waiting_costs_less_than_the_share_of_the_saving() -> None:
    hot = HotPrefixes(LIMITS)
    assert [asked(hot, now=0.1 * i, wait=700.0) for i in range(9)] == [None] * 9


def test_requests_that_are_far_apart_are_no_hot_prefix() -> None:
    hot = HotPrefixes(LIMITS)
    assert [asked(hot, now=6.0 * i) for i in range(9)] == [None] * 9


def test_a_prefix_that_is_still_hot_when_its_copy_is_forgotten_gets_another() -> None:
    hot = HotPrefixes(LIMITS)
    made_at = [i for i in range(70) if asked(hot, now=1.0 * i, idlest=f"pod{i}")]
    assert len(made_at) == 2
    assert made_at[1] - made_at[0] >= LIMITS.remember_seconds


def test_short_shared_beginnings_are_not_copied() -> None:
    hot = HotPrefixes(LIMITS)
    assert [asked(hot, now=0.1 * i, matched=DEPTHS[0] - 1) for i in range(9)] == [None] * 9
    assert len(hot) == 0


def test_chats_that_share_their_beginning_heat_it_together() -> None:
    hot = HotPrefixes(LIMITS)
    chats = [SYSTEM + bytes([i]) * 48 * KEY_BYTES for i in range(5)]
    assert [asked(hot, now=0.1 * i, keys=chat, matched=64) for i, chat in enumerate(chats)].count("idle") == 1


def test_it_remembers_no_more_prefixes_than_it_may() -> None:
    hot = HotPrefixes(LIMITS)
    for i in range(500):
        asked(hot, now=0.0, keys=i.to_bytes(2, "little") * 64)
    assert len(hot) == LIMITS.most_prefixes


def test_to_look_changes_nothing() -> None:
    hot = HotPrefixes(HotLimits(least_requests=1))
    looks = [
        hot.look(SYSTEM, matched_keys=16, wait_tokens=1000.0, saved_tokens=1600.0, idlest="idle", now=0.1 * i)
        for i in range(3)
    ]
    assert (looks[0], len(hot)) == (looks[2], 0)


def spread(
    candidates: list[Candidate], *, policy: PickPolicy = KV_AWARE, ask: Ask = NOTHING_ASKED
) -> tuple[list[float], str | None]:
    hot = HotPrefixes(HotLimits(least_requests=1))
    result, copy = copy_of_hot_prefix(
        apply_filters(candidates, ask=ask)[0],
        [PromptKeys(keys=SYSTEM, tokens_each=16)],
        hot=hot,
        policy=policy,
        now=0.0,
    )
    return [
        candidate.saved_tokens for candidate in result
    ], copy.words if copy is not None and copy.hot is not None else None


def test_the_idlest_endpoint_without_the_prefix_counts_as_warm_for_the_request_that_warms_it() -> None:
    warm = candidate("warm", prompt=300, matched=256, backlog_tokens=9000.0)
    assert spread([warm, candidate("busy", prompt=300, backlog_tokens=5000.0), candidate("idle", prompt=300)]) == (
        [256, 0, 256.0],
        "hot prefix: idle gets a copy of what warm holds",
    )


def test_it_can_be_switched_off() -> None:
    warm = candidate("warm", prompt=300, matched=256, backlog_tokens=9000.0)
    policy = PickPolicy(copy_hot_prefixes=False)
    assert spread([warm, candidate("idle", prompt=300)], policy=policy) == ([256, 0], None)


def test_nothing_is_copied_while_a_holder_is_idle_or_nobody_else_may_take_it() -> None:
    warm = candidate("warm", prompt=300, matched=256, backlog_tokens=9000.0)
    assert spread([warm, candidate("also", prompt=300, matched=256), candidate("idle")])[1] is None
    assert spread([warm, candidate("closed", cordoned=True), candidate("unknown", reported=None)])[1] is None
    waiting = candidate("waits", prompt=300, reported=load(waiting_requests=30))
    assert spread([warm, waiting])[1] is None


def test_a_batch_whose_first_prompt_is_short_heats_only_what_it_has() -> None:
    hot = HotPrefixes(LIMITS)
    batches = [bytes([i]) * 16 * KEY_BYTES for i in range(9)]
    assert [asked(hot, now=0.0, keys=keys, matched=500) for keys in batches] == [None] * 9


def test_a_copy_goes_only_to_an_endpoint_that_may_serve_the_request() -> None:
    warm = candidate("warm", prompt=300, matched=256, backlog_tokens=9000.0, models=serving("asked"))
    busy = candidate("busy", prompt=300, backlog_tokens=5000.0, models=serving("asked"))
    stranger = candidate("stranger", prompt=300, models=serving("other"))
    assert spread([warm, busy, stranger], ask=Ask(model="asked")) == (
        [256, 256.0],
        "hot prefix: busy gets a copy of what warm holds",
    )
    assert spread([warm, busy], ask=Ask(model="asked", subset=frozenset({"warm"})))[1] is None


def test_nothing_is_copied_by_a_policy_that_does_not_look_at_hits() -> None:
    warm = candidate("warm", prompt=300, matched=256, backlog_tokens=9000.0)
    blind = PickPolicy(weights=PRESETS[Strategy.ROUND_ROBIN])
    assert spread([warm, candidate("idle", prompt=300)], policy=blind)[1] is None
