"""Where names were sent last, within a bound."""

from extproc.prefixes.routing_memory import LastPlaces


def test_the_last_place_counts_and_the_oldest_names_make_room() -> None:
    places = LastPlaces(ttl_seconds=10.0, limit=2)
    for name, endpoint in [("a", "1"), ("b", "1"), ("a", "2"), ("c", "3")]:
        places.note(name, endpoint=endpoint, now=0.0)
    assert [places.get(name, now=1.0) for name in "abc"] == ["2", None, "3"]
