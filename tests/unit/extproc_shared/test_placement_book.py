"""Which placements are written: what is new, and what would end before it is used again."""

from extproc.shared.shared_records import MAX_PENDING, Placement, PlacementBook

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def session(endpoint: str = A, *, at: float = 0.0, key: bytes = b"session") -> Placement:
    return Placement(key=key, endpoint=endpoint, placed_at=at, ttl_seconds=100.0, is_one_of_several=False)


def adapter(endpoint: str, *, at: float = 0.0) -> Placement:
    return Placement(key=b"adapter", endpoint=endpoint, placed_at=at, ttl_seconds=100.0, is_one_of_several=True)


def test_a_session_that_stays_is_written_again_after_a_quarter_of_its_time() -> None:
    book = PlacementBook()

    assert [book.place(session(at=at)) for at in (0.0, 1.0, 24.9, 25.0, 26.0)] == [True, False, False, True, False]
    assert book.take() == [session(at=25.0)]


def test_a_session_that_moves_is_written_at_once_and_replaces_what_waits() -> None:
    book = PlacementBook()

    assert [book.place(session(A)), book.place(session(B)), book.place(session(A, at=1.0))] == [True, True, True]
    assert book.take() == [session(A, at=1.0)]
    assert book.take() == []


def test_a_session_that_somebody_else_has_moved_is_written_though_it_stays_for_us() -> None:
    book = PlacementBook()
    places = [book.place(session(A)), book.place(session(A, at=1.0), moved=True), book.place(session(A, at=2.0))]

    assert places == [True, True, False]
    assert book.take() == [session(A, at=1.0)]


def test_an_adapter_is_in_several_places_at_a_time() -> None:
    book = PlacementBook()

    assert [book.place(adapter(A)), book.place(adapter(B)), book.place(adapter(A, at=1.0))] == [True, True, False]
    assert book.take() == [adapter(A), adapter(B)]


def test_what_could_not_be_written_comes_back_unless_something_newer_waits() -> None:
    book = PlacementBook()
    book.place(session(A))
    book.place(session(A, key=b"other"))
    taken = book.take()
    book.place(session(B))
    book.put_back(taken)

    assert book.take() == [session(B), session(A, key=b"other")]


def test_the_oldest_placements_are_dropped_when_nothing_can_be_written() -> None:
    book = PlacementBook()
    for number in range(MAX_PENDING + 2):
        book.place(session(key=b"%d" % number))
    taken = book.take()

    assert [taken[0].key, len(taken)] == [b"2", MAX_PENDING]
    book.place(session(B, key=b"new"))
    book.put_back(taken)
    assert len(book.take()) == MAX_PENDING
