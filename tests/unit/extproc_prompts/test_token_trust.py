"""Which sources of a model's tokens are believed."""

from extproc.prompts.token_trust import LAST_ANSWERS, Cause, Teller, TokenTrust


def test_a_source_is_let_go_of_once_and_believed_again_when_nothing_is_left_against_it() -> None:
    trust = TokenTrust()
    assert trust.distrust("m", Teller.FOLDER, Cause.PROBES, "probes differ")
    assert not trust.distrust("m", Teller.FOLDER, Cause.DRIFT, "counts differ")
    assert trust.doubt("m", Teller.FOLDER) == "probes differ; counts differ"
    assert (trust.doubt("m", Teller.RENDER), trust.doubt("n", Teller.FOLDER)) == (None, None)
    assert trust.doubts == {"m": "folder: probes differ; counts differ"}
    trust.believe("m", Teller.FOLDER, Cause.PROBES)
    assert trust.doubt("m", Teller.FOLDER) == "counts differ"
    trust.believe("m", Teller.FOLDER, Cause.DRIFT)
    trust.believe("m", Teller.FOLDER, Cause.DRIFT)
    assert trust.doubt("m", Teller.FOLDER) is None


def test_pods_that_have_changed_take_back_what_responses_have_shown_but_not_what_probes_have() -> None:
    trust = TokenTrust()
    trust.distrust("a", Teller.RENDER, Cause.DRIFT, "wrong")
    trust.distrust("b", Teller.FOLDER, Cause.PROBES, "differs")
    assert trust.renew() == {"a"}
    assert trust.doubts == {"b": "folder: differs"}


def test_the_path_that_told_most_of_the_last_answers_is_to_blame() -> None:
    trust = TokenTrust()
    assert trust.teller_of_most("m") is None
    for _ in range(LAST_ANSWERS):
        trust.told("m", Teller.TOKENIZE)
    for _ in range(LAST_ANSWERS // 2 + 1):
        trust.told("m", Teller.RENDER)
    assert trust.teller_of_most("m") is Teller.RENDER
    trust.distrust("m", Teller.RENDER, Cause.DRIFT, "wrong")
    assert trust.teller_of_most("m") is None  # what comes from now on is another source's


def test_models_that_are_not_configured_any_more_are_forgotten() -> None:
    trust = TokenTrust()
    trust.told("m", Teller.RENDER)
    trust.distrust("m", Teller.FOLDER, Cause.PROBES, "differs")
    trust.keep({"n"})
    assert (trust.doubts, trust.teller_of_most("m")) == ({}, None)
