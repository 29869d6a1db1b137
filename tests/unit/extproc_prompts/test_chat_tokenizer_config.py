"""What the JSON files of a tokenizer folder say, in the forms that transformers has written over the years."""

from typing import Any

import pytest
from tokenizers import AddedToken

from extproc.prompts.tokenizer_folder import added_tokens, chat_templates, special_tokens


@pytest.mark.parametrize(
    ("config", "legacy", "expected"),
    [
        ({}, {}, {}),
        ({"bos_token": "<s>", "eos_token": None, "add_bos_token": True}, {}, {"bos_token": "<s>"}),
        ({"bos_token": {"__type": "AddedToken", "content": "<s>"}}, {}, {"bos_token": "<s>"}),
        ({"bos_token": "a"}, {"bos_token": {"content": "b"}, "eos_token": "e"}, {"bos_token": "b", "eos_token": "e"}),
        ({"bos_token": "a", "added_tokens_decoder": {}}, {"bos_token": "b"}, {"bos_token": "a"}),
        ({"image_token": "<img>", "tokenizer_class": "X"}, {}, {"image_token": "<img>"}),
        ({"extra_special_tokens": {"boi": "<i>"}, "pad_token": "p"}, {}, {"pad_token": "p", "boi": "<i>"}),
        ({"extra_special_tokens": ["<i>"], "additional_special_tokens": ["<j>"]}, {}, {}),
    ],
)
def test_templates_see_the_named_tokens(
    config: dict[str, Any], legacy: dict[str, Any], expected: dict[str, str]
) -> None:
    assert special_tokens(config, legacy) == expected


def test_added_tokens_come_in_the_order_of_their_ids() -> None:
    config = {"added_tokens_decoder": {"10": {"content": "b", "special": True}, "9": {"content": "a", "lstrip": False}}}
    assert list(added_tokens(config)) == [
        AddedToken("a", lstrip=False),
        AddedToken("b", special=True),
    ]
    assert list(added_tokens({})) == []


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {}, {}),
        ({"chat_template": "T"}, {}, {"default": "T"}),
        ({"chat_template": "T"}, {"default": "F"}, {"default": "F"}),
        (
            {"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}]},
            {},
            {"default": "D", "tool_use": "U"},
        ),
        ({"chat_template": {"default": "D"}}, {}, {"default": "D"}),
    ],
)
def test_template_files_win_over_the_configuration(
    config: dict[str, Any], files: dict[str, str], expected: dict[str, str]
) -> None:
    assert chat_templates(config, files) == expected
