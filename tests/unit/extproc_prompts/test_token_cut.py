"""truncate_prompt_tokens cuts as vLLM does."""

from array import array

import pytest

from extproc.prompts.tokenized_prompt import NO_FRAME, Frame, cut_tokens, kept_tokens
from extproc.requests.request import Truncation, TruncationSide

LEFT, RIGHT = TruncationSide.LEFT, TruncationSide.RIGHT


def cut(ids: list[int], *, keep: int, side: TruncationSide = LEFT, frame: Frame = NO_FRAME) -> list[int]:
    return list(array("I", cut_tokens(array("I", ids).tobytes(), keep=keep, side=side, frame=frame)))


@pytest.mark.parametrize(
    ("keep", "side", "frame", "expected"),
    [
        (5, LEFT, NO_FRAME, [1, 2, 3, 4, 5]),
        (9, RIGHT, Frame(1, 1), [1, 2, 3, 4, 5]),
        (3, LEFT, NO_FRAME, [3, 4, 5]),
        (3, RIGHT, NO_FRAME, [1, 2, 3]),
        (3, LEFT, Frame(1, 0), [1, 4, 5]),
        (3, RIGHT, Frame(1, 0), [1, 2, 3]),
        (4, LEFT, Frame(1, 1), [1, 3, 4, 5]),
        (4, RIGHT, Frame(1, 1), [1, 2, 3, 5]),
        (2, LEFT, Frame(1, 1), [1, 5]),
        (0, LEFT, NO_FRAME, []),
    ],
)
def test_so_many_tokens_are_kept_and_special_ones_around_the_text_among_them(
    keep: int, side: TruncationSide, frame: Frame, expected: list[int]
) -> None:
    assert cut([1, 2, 3, 4, 5], keep=keep, side=side, frame=frame) == expected


def test_less_room_than_the_special_tokens_need_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 tokens leave no room beside 2 special tokens"):
        cut([1, 2, 3], keep=1, frame=Frame(1, 1))


@pytest.mark.parametrize(
    ("truncation", "max_model_len", "expected"),
    [
        (Truncation(tokens=7, held_back=1), 100, 7),
        (Truncation(tokens=7), None, 7),
        (Truncation(tokens=0), 100, 0),
        (Truncation(tokens=-1), 100, 100),
        (Truncation(tokens=-1, held_back=1), 100, 99),
        (Truncation(tokens=-1), None, None),
    ],
)
def test_minus_one_stands_for_the_context_length_less_what_is_held_back_for_output(
    truncation: Truncation, max_model_len: int | None, expected: int | None
) -> None:
    assert kept_tokens(truncation, max_model_len=max_model_len) == expected
