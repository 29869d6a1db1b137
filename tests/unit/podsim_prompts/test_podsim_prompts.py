from typing import Any

import pytest

from podsim.core.generate import Limits
from podsim.errors import RequestRefusedError
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.prompts import bounded_prompt, chat_token_ids, completion_token_ids, limits_for
from podsim.wire.openai_requests import ChatRequest, CompletionRequest

FOLDER = load_model_folder(TINY_MODEL)
LONGEST = 100


def ids(text: str, *, special: bool = True) -> list[int]:
    return FOLDER.encode_by_reference(text, add_special_tokens=special)


def prompts(prompt: Any, *, special: bool = True) -> list[list[int]]:
    return completion_token_ids(prompt, add_special_tokens=special, folder=FOLDER, encode=FOLDER.encode)


def test_texts_get_bos_and_token_ids_do_not() -> None:
    assert prompts("abc") == [ids("abc")]
    assert prompts(["abc", "def"]) == [ids("abc"), ids("def")]
    assert prompts([5, 6]) == [[5, 6]]
    assert prompts([[5], [6, 7]]) == [[5], [6, 7]]
    assert prompts("abc", special=False) == [ids("abc", special=False)]


@pytest.mark.parametrize(
    "prompt", [["a", 1], [1, "a"], [[1], 2], [[1], ["a"]], [True], [1.5], [-1], [[1], [-1]], [4096]]
)
def test_prompts_that_mix_forms_or_hold_impossible_ids_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        prompts(prompt)
    assert refused.value.http_status == 400


def test_a_chats_template_kwargs_never_override_what_the_request_itself_says() -> None:
    request = ChatRequest(
        messages=[{"role": "user", "content": "hi"}], chat_template_kwargs={"add_generation_prompt": False}
    )
    token_ids = chat_token_ids(request, folder=FOLDER, model="tiny", encode=FOLDER.encode)
    assert FOLDER.decode(token_ids).endswith("<|im_start|>assistant\n")


def forwarded(ids: Any) -> list[int]:
    request = ChatRequest(messages=[{"role": "user", "content": "hi"}], kv_transfer_params={"prompt_token_ids": ids})
    return chat_token_ids(request, folder=FOLDER, model="tiny", encode=FOLDER.encode)


def test_ids_that_a_prefill_stage_has_left_replace_the_messages() -> None:
    assert forwarded([5, 6]) == [5, 6]
    plain = ChatRequest(messages=[{"role": "user", "content": "hi"}])
    assert forwarded(None) == chat_token_ids(plain, folder=FOLDER, model="tiny", encode=FOLDER.encode)


@pytest.mark.parametrize("ids", [[], "5", [5, "6"], [-1], [True], [4096]])
def test_impossible_ids_of_a_prefill_stage_are_refused(ids: Any) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        forwarded(ids)
    assert refused.value.param == "kv_transfer_params.prompt_token_ids"


@pytest.mark.parametrize(
    ("limit", "side", "expected"),
    [(None, None, range(50)), (5, None, range(45, 50)), (5, "left", range(45, 50)), (5, "right", range(5))],
)
def test_a_prompt_is_truncated_from_the_left_unless_told_otherwise(
    limit: int | None, side: str | None, expected: range
) -> None:
    request = CompletionRequest(truncate_prompt_tokens=limit, truncation_side=side)
    assert bounded_prompt(list(range(50)), request=request, max_model_len=LONGEST) == list(expected)


def test_truncation_to_the_models_length_leaves_room_for_one_token() -> None:
    request = CompletionRequest(truncate_prompt_tokens=-1)
    assert len(bounded_prompt(list(range(500)), request=request, max_model_len=LONGEST)) == LONGEST - 1


@pytest.mark.parametrize(
    ("request_", "prompt_tokens", "expected"),
    [
        (ChatRequest(messages=[]), 40, 60),
        (ChatRequest(messages=[], max_tokens=7), 40, 7),
        (ChatRequest(messages=[], max_tokens=7, max_completion_tokens=9), 40, 9),
        (ChatRequest(messages=[], max_tokens=70), 40, 60),
        (CompletionRequest(), 40, 16),
        (CompletionRequest(), 95, 5),
        (CompletionRequest(max_tokens=3), 99, 1),
    ],
)
def test_the_answer_is_bounded_by_the_request_and_by_the_room_behind_the_prompt(
    request_: ChatRequest | CompletionRequest, prompt_tokens: int, expected: int
) -> None:
    assert limits_for(request_, prompt_tokens=prompt_tokens, max_model_len=LONGEST) == Limits(
        max_tokens=expected, stop=[]
    )


@pytest.mark.parametrize(
    ("request_", "prompt_tokens", "param"),
    [
        (ChatRequest(messages=[], max_tokens=0), 1, "max_tokens"),
        (ChatRequest(messages=[], max_tokens=101), 1, "max_tokens"),
        (ChatRequest(messages=[], max_completion_tokens=101), 1, "max_completion_tokens"),
        (CompletionRequest(), 100, "max_tokens"),
    ],
)
def test_impossible_lengths_are_refused_by_name(
    request_: ChatRequest | CompletionRequest, prompt_tokens: int, param: str
) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        limits_for(request_, prompt_tokens=prompt_tokens, max_model_len=LONGEST)
    assert refused.value.param == param


@pytest.mark.parametrize(("prompt", "complaint"), [([], "cannot be empty"), (list(range(101)), "at least 101 input")])
def test_empty_and_too_long_prompts_are_refused(prompt: list[int], complaint: str) -> None:
    with pytest.raises(RequestRefusedError, match=complaint):
        bounded_prompt(prompt, request=CompletionRequest(), max_model_len=LONGEST)
