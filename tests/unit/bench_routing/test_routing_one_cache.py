"""The yardstick of the hit rate: one cache that forgets nothing."""

from typing import Any

from bench.routing.one_cache import OneCacheHits, block_keys, one_cache
from operate.load.script import Record, Session, Turn
from podsim.model_folder import TINY_MODEL, load_model_folder

FOLDER = load_model_folder(TINY_MODEL)
TEXT = " ".join(["import"] * 100)


def completion(name: str, text: str) -> Session:
    return Session(name=name, system=None, turns=(Turn(due=0.0, text=text, answer_tokens=1),))


def answered(name: str, *, sent: float, ended: float, turn: int = 0, **fields: Any) -> Record:
    return Record(
        session=name, turn=turn, due=sent, ready=sent, sent=sent, first=ended, ended=ended, error=None, **fields
    )


def tokens(text: str) -> int:
    return len(FOLDER.encode(text, add_special_tokens=True))


def test_a_prompt_finds_the_full_blocks_of_what_was_sent_before_it_but_never_its_last_token() -> None:
    count = tokens(TEXT)
    sessions = [completion("a", TEXT), completion("b", TEXT)]
    records = [answered(name, sent=at, ended=9, prompt_tokens=count) for at, name in enumerate("ab")]

    assert one_cache(sessions, records, folder=FOLDER, measured_from=0) == OneCacheHits(
        prompt_tokens=2 * count, cached_tokens=(count - 1) // 16 * 16, miscounted=0
    )


def test_an_answer_is_found_once_it_is_complete() -> None:
    answer = " return" * 64
    sessions = [
        Session(
            name="chat",
            system="You",
            turns=(
                Turn(due=0, text="Go on", answer_tokens=64),
                Turn(due=1, text="And then", answer_tokens=1),
            ),
        )
    ]

    def second_turn(sent: float) -> int:
        records = [
            answered("chat", turn=0, sent=0, ended=1, answer=answer),
            answered("chat", turn=1, sent=sent, ended=9),
        ]
        return one_cache(sessions, records, folder=FOLDER, measured_from=sent).cached_tokens

    assert second_turn(2.0) >= 64
    assert second_turn(0.5) <= 16


def test_failed_requests_leave_nothing_behind_and_warm_up_is_not_counted() -> None:
    sessions = [completion("a", TEXT), completion("b", TEXT)]
    failed = Record(session="a", turn=0, due=0, ready=0, sent=0, first=None, ended=1, error="status 503")

    hits = one_cache(sessions, [failed, answered("b", sent=2, ended=3)], folder=FOLDER, measured_from=1)
    assert (hits.prompt_tokens, hits.cached_tokens, hits.miscounted) == (tokens(TEXT), 0, 1)


def test_block_keys_depend_on_all_tokens_before() -> None:
    one, other = block_keys([1] * 48), block_keys([2] + [1] * 47)

    assert len(one) == len(other) == 3
    assert not set(one) & set(other)
    assert block_keys([1] * 47) == one[:2]
