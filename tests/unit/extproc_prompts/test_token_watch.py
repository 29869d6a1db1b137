"""From where most of a model's last prompts got their tokens."""

import pytest

from extproc.prompts.prompt_tokens import LEAST_PROMPTS, UNKNOWN_MODEL, WINDOW_SECONDS, TokenSource, TokenWatch

FOLDER, PODS, CLIENT, TEXT = TokenSource


def took(watch: TokenWatch, source: TokenSource, times: int = 1, *, now: float = 0.0, model: str = "m") -> None:
    for _ in range(times):
        watch.took(model, source, why="no pod answers" if source is TEXT else "")
    watch.judge(now=now)


@pytest.mark.parametrize("source", [FOLDER, PODS, TEXT])
def test_the_first_prompt_says_where_tokens_come_from_and_further_ones_make_it_certain(source: TokenSource) -> None:
    watch = TokenWatch()
    took(watch, source)
    assert watch.sources == {"m": source}
    assert watch.text_only == {}

    took(watch, source, LEAST_PROMPTS - 1)
    assert watch.sources == {"m": source}
    assert watch.text_only == ({"m": "no pod answers"} if source is TEXT else {})


def test_most_prompts_count_and_as_many_of_both_are_not_text_only() -> None:
    watch = TokenWatch()
    took(watch, TEXT, 4)
    took(watch, PODS, 4)
    assert watch.sources == {"m": PODS}
    took(watch, TEXT)
    assert list(watch.text_only) == ["m"]


def test_ids_that_clients_send_say_nothing_of_the_model() -> None:
    watch = TokenWatch()
    took(watch, CLIENT, 50)
    assert watch.sources == {}
    took(watch, TEXT, LEAST_PROMPTS)
    assert list(watch.text_only) == ["m"]
    assert watch.counts() == {("m", "client"): 50, ("m", "text"): LEAST_PROMPTS}


def test_a_source_that_comes_back_is_seen_after_the_window_and_rest_changes_nothing() -> None:
    watch = TokenWatch()
    took(watch, TEXT, 1000)
    took(watch, TEXT, now=WINDOW_SECONDS)  # the window begins anew
    watch.judge(now=100 * WINDOW_SECONDS)
    assert list(watch.text_only) == ["m"]
    took(watch, PODS, LEAST_PROMPTS - 1, now=101 * WINDOW_SECONDS)
    assert list(watch.text_only) == ["m"]
    took(watch, PODS, now=101 * WINDOW_SECONDS)
    assert (watch.text_only, watch.sources) == ({}, {"m": PODS})


def test_names_that_are_not_configured_are_counted_together_and_make_no_finding_of_a_model() -> None:
    watch = TokenWatch()
    took(watch, TEXT, 10, model="")
    took(watch, TEXT, 10, model="gone")
    watch.keep({"m"})
    assert (watch.sources, watch.text_only) == ({}, {})
    assert watch.counts() == {(UNKNOWN_MODEL, "text"): 10}
    assert watch.has_unknown
