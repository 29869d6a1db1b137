"""llm-d's guide as a peer: it sticks to what it has sent, spreads the new, lets go of a pod that is too far behind."""

from bench.routing.llm_d_guide import Guide, GuideSettings


def guide(pods: int = 3, **settings: float) -> Guide:
    return Guide(pods, GuideSettings(**{"cache_blocks": 1000, **settings}), random=lambda: 0.0)  # type: ignore[arg-type]


def test_a_prompt_goes_back_to_the_pod_that_had_its_beginning() -> None:
    it = guide()
    first = it.pick([1, 2, 3, 4], tokens=256)
    other = it.pick([9, 8, 7, 6], tokens=256)

    again = it.pick([1, 2, 3, 4, 5], tokens=320)

    assert (first.pod, other.pod, again.pod) == (0, 1, 0)
    assert again.uncached_tokens == 64


def test_what_is_new_goes_where_the_fewest_tokens_are_in_flight() -> None:
    it = guide()
    picks = [it.pick([100 * number], tokens=tokens) for number, tokens in enumerate((300, 100, 200))]
    assert [pick.pod for pick in picks] == [0, 1, 2]

    assert it.pick([999], tokens=50).pod == 1
    it.answered(picks[0])
    assert it.pick([998], tokens=50).pod == 0


def test_a_prompt_of_which_too_little_is_held_goes_by_tokens_alone() -> None:
    it = guide(pods=2)
    it.pick([1, 2], tokens=129)  # half of the next one's blocks, and in flight

    assert it.pick([1, 2, 3, 4], tokens=256).pod == 1


def test_a_pod_that_is_too_far_behind_is_let_go() -> None:
    sticking, leaving = guide(pods=2, most_penalty_seconds=1.0), guide(pods=2, most_penalty_seconds=0.5)
    for it in (sticking, leaving):
        it.pick([1, 2, 3], tokens=12_000)  # 0.75 s of work

    assert sticking.pick([1, 2, 3], tokens=192).pod == 0
    assert leaving.pick([1, 2, 3], tokens=192).pod == 1


def test_what_does_not_fit_is_forgotten_the_oldest_first() -> None:
    it = guide(pods=1, cache_blocks=2)
    it.pick([1, 2, 3], tokens=192)

    assert it.pick([2], tokens=64).uncached_tokens == 0
    assert it.pick([1], tokens=64).uncached_tokens == 64
