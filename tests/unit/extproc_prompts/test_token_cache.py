"""Tokens that were made before: found under their text and kind, and never more than so many bytes."""

from extproc.prompts.token_cache import TokenMemory, key_of


def test_a_text_has_a_key_for_each_kind() -> None:
    keys = {key_of(text, kind=kind) for text in ("", "a", "\ud800") for kind in (b"", b"x")}
    assert len(keys) == 6
    assert key_of("a", kind=b"") in keys


def test_what_was_not_asked_for_the_longest_goes_first() -> None:
    memory = TokenMemory(most_bytes=12)
    for name in (b"a", b"b", b"c"):
        memory.put(name, name * 4)
    assert memory.get(b"a") == b"aaaa"
    memory.put(b"d", b"dddd")
    assert [memory.get(name) for name in (b"a", b"b", b"c", b"d")] == [b"aaaa", None, b"cccc", b"dddd"]
    assert memory.held_bytes == 12


def test_what_is_put_twice_is_held_once_and_what_is_too_large_not_at_all() -> None:
    memory = TokenMemory(most_bytes=8)
    memory.put(b"a", b"aaaa")
    memory.put(b"a", b"aaaa")
    assert memory.held_bytes == 4
    memory.put(b"b", b"b" * 9)
    assert (memory.held_bytes, memory.get(b"b")) == (0, None)
