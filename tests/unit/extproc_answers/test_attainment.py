"""The share of the last minutes: weights count, and what is old is forgotten."""

from extproc.answers.attainment import Attainment, AttainmentWindow


def test_a_class_without_verdicts_has_no_share() -> None:
    assert AttainmentWindow().of("chat", now=0.0) is None


def test_verdicts_count_by_their_weight_and_class_by_class() -> None:
    window = AttainmentWindow()
    window.add("chat", met=True, weight=50.0, now=0.0)
    window.add("chat", met=True, weight=50.0, now=1.0)
    window.add("chat", met=False, weight=25.0, now=30.0)
    window.add("batch", met=False, weight=1.0, now=30.0)
    assert window.of("chat", now=40.0) == Attainment(share=0.8, judged=3)
    assert window.of("batch", now=40.0) == Attainment(share=0.0, judged=1)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    window = AttainmentWindow(window_seconds=60, slice_seconds=10)
    window.add("chat", met=False, weight=1.0, now=0.0)
    window.add("chat", met=True, weight=1.0, now=50.0)
    assert window.of("chat", now=59.0) == Attainment(share=0.5, judged=2)
    assert window.of("chat", now=60.0) == Attainment(share=1.0, judged=1)
    assert window.of("chat", now=110.0) is None
    assert window.of("chat", now=111.0) is None
