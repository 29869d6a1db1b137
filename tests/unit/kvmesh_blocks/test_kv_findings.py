"""Findings appear once, keep their beginning, and heal once."""

from kvmesh.blocks.findings import Finding, FindingBook, FindingNews, FindingReason


def finding(message: str = "does this: do that", *, rank: int | None = 0, since: float = 100.0) -> Finding:
    return Finding(endpoint="10.0.0.1:8000", dp_rank=rank, reason=FindingReason.NO_EVENTS, message=message, since=since)


def test_a_finding_is_news_when_it_appears_and_when_it_heals_and_at_no_other_time() -> None:
    book = FindingBook(heal_seconds=3.0)

    assert book.look([finding()], now=0.0) == FindingNews(appeared=(finding(),))
    assert book.look([finding()], now=1.0) == FindingNews()
    assert book.look([], now=2.0) == FindingNews()  # perhaps it flickers
    assert book.look([finding()], now=3.0) == FindingNews()
    assert book.look([], now=5.9) == FindingNews()
    assert book.look([], now=6.0) == FindingNews(healed=(finding(),))
    assert book.look([], now=7.0) == FindingNews()
    assert book.current == ()


def test_what_stands_has_the_latest_words_and_the_first_time() -> None:
    book = FindingBook()
    book.look([finding("for 30 s", since=100.0)], now=0.0)
    book.look([finding("for 40 s", since=103.0)], now=1.0)

    assert book.current == (finding("for 40 s", since=100.0),)


def test_ranks_and_the_pod_as_a_whole_are_kept_apart() -> None:
    book = FindingBook()
    found = (finding(rank=None), finding(rank=0), finding(rank=1))

    assert book.look(found, now=0.0).appeared == found
    assert [each.subject for each in book.current] == ["10.0.0.1:8000", "10.0.0.1:8000#0", "10.0.0.1:8000#1"]


def test_what_is_not_ours_any_more_goes_without_healing() -> None:
    book = FindingBook()
    book.look([finding(rank=0), finding(rank=1)], now=0.0)
    book.forget(["10.0.0.1:8000#1"])

    assert book.look([finding(rank=0)], now=100.0) == FindingNews()
    assert book.current == (finding(rank=0),)
