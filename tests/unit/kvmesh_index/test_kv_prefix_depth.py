"""How many blocks of a prompt the reader asks for at a time."""

from kvmesh.blocks.block_keys import FIRST_BATCH, KEY_BYTES, LARGEST_BATCH, DepthHints, next_batch


def keys(blocks: int, *, conversation: int = 0, shared: int = 0) -> bytes:
    """Packed keys of a prompt whose first blocks are those of every conversation."""
    made = [(block if block < shared else (conversation << 32) + block) for block in range(blocks)]
    return b"".join((number + 1).to_bytes(KEY_BYTES, "big") for number in made)


def first_batch(hints: DepthHints, prompt: bytes) -> int:
    return hints.first_batch(prompt, blocks=len(prompt) // KEY_BYTES)


def test_a_prompt_that_we_know_nothing_of_begins_with_a_small_chunk() -> None:
    assert first_batch(DepthHints(), keys(512)) == FIRST_BATCH
    assert first_batch(DepthHints(), b"") == FIRST_BATCH


def test_a_prompt_seen_before_is_asked_for_as_a_whole() -> None:
    for blocks in (1, 31, 32, 33, 100, 512, 2000):
        hints = DepthHints()
        hints.learn(keys(blocks), matched=blocks)
        assert first_batch(hints, keys(blocks)) >= blocks, blocks


def test_a_conversation_that_grew_is_asked_for_with_what_was_added() -> None:
    hints = DepthHints()
    hints.learn(keys(100), matched=60)

    assert first_batch(hints, keys(130)) >= 100


def test_a_new_conversation_after_a_shared_beginning_is_asked_for_up_to_about_there() -> None:
    hints = DepthHints()
    for conversation in range(5):
        hints.learn(keys(1000, conversation=conversation, shared=40), matched=40)

    assert 40 <= first_batch(hints, keys(1000, conversation=9, shared=40)) <= 40 + 2 * FIRST_BATCH


def test_hints_are_found_with_the_keys_of_a_part_of_the_prompt() -> None:
    hints = DepthHints()
    hints.learn(keys(500), matched=500)

    assert hints.first_batch(keys(500)[: 64 * KEY_BYTES], blocks=500) >= 64
    assert hints.first_batch(keys(500)[: 300 * KEY_BYTES], blocks=600) >= 500


def test_what_nobody_held_teaches_nothing() -> None:
    hints = DepthHints()
    hints.learn(keys(512), matched=0)

    assert first_batch(hints, keys(512)) == FIRST_BATCH


def test_a_chunk_is_never_longer_than_redis_should_work_at_a_time() -> None:
    hints = DepthHints()
    hints.learn(keys(10_000), matched=10_000)

    assert first_batch(hints, keys(10_000)) == LARGEST_BATCH
    assert [next_batch(asked) for asked in (32, 128, 512, 2048)] == [512, 2048, 2048, 2048]


def test_the_oldest_hints_are_forgotten_first() -> None:
    hints = DepthHints(limit=4)
    hints.learn(keys(64, conversation=1), matched=64)
    hints.learn(keys(64, conversation=2), matched=64)
    hints.learn(keys(64, conversation=3), matched=64)

    assert [first_batch(hints, keys(64, conversation=number)) for number in (1, 2, 3)] == [FIRST_BATCH, 96, 96]
