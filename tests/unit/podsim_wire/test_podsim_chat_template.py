import json
from pathlib import Path
from typing import Any

import pytest

from podsim.errors import RequestRefusedError
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.wire.chat_messages import normalise_messages, normalise_tools
from podsim.wire.chat_template import ChatTemplate

RENDERINGS = json.loads((Path(__file__).parents[2] / "data" / "podsim_vllm_renderings.json").read_text())["chats"]
FOLDER = load_model_folder(TINY_MODEL)


def render(source: str, **values: Any) -> str:
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    messages = normalise_messages(
        values.pop("messages", [{"role": "user", "content": "hi"}]), parts=template.wants_parts, model="m"
    )
    return template.render(messages, **values)


@pytest.mark.parametrize("chat", RENDERINGS, ids=lambda chat: chat["name"])
def test_chats_become_the_prompts_that_vllm_rendered(chat: dict[str, Any]) -> None:
    request = chat["request"]
    template = FOLDER.require_chat_template()
    text = template.render(
        normalise_messages(request["messages"], parts=template.wants_parts, model="tiny"),
        tools=normalise_tools(request.get("tools")),
        add_generation_prompt=request.get("add_generation_prompt", True),
        continue_final_message=request.get("continue_final_message", False),
    )
    bos = "<|bos|>" if request.get("add_special_tokens") else ""
    assert bos + text == chat["text"]


def test_json_in_templates_is_not_escaped_for_html_or_ascii_and_keeps_its_order() -> None:
    value = {"z": "<é & 日本>", "a": [1, None, True]}
    assert render("{{ value | tojson }}", kwargs={"value": value}) == '{"z": "<é & 日本>", "a": [1, null, true]}'
    assert render("{{ value | tojson(indent=2) }}", kwargs={"value": {"a": 1}}) == '{\n  "a": 1\n}'


def test_blocks_leave_no_newlines_and_no_leading_blanks() -> None:
    assert render("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}\n") == "x\n"


def test_generation_and_loop_control_tags_are_understood() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(source, messages=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]) == "a"


def test_what_a_template_raises_is_refused_in_its_own_words() -> None:
    with pytest.raises(RequestRefusedError) as refused:
        render("{{ raise_exception('No tools here.') }}")
    assert (refused.value.message, refused.value.http_status) == ("No tools here.", 400)


@pytest.mark.parametrize("source", ["{{ missing.field }}", "{{ 1 + 'a' }}", "{{ ''.__class__.__mro__ }}{{ x.y.z }}"])
def test_a_template_that_trips_over_a_request_refuses_it_and_raises_nothing_else(source: str) -> None:
    with pytest.raises(RequestRefusedError):
        render(source)


def test_no_messages_are_refused() -> None:
    with pytest.raises(RequestRefusedError, match="empty conversation"):
        render("x", messages=[])


def test_templates_that_loop_over_contents_get_parts_and_others_text() -> None:
    looping = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(looping, messages=parts) == "[a][b]"
    assert render("{{ messages[0].content }}", messages=parts) == "a\nb"
    assert render(looping, messages=[{"role": "user", "content": "plain"}]) == "[plain]"


def test_developer_messages_become_system_ones_unless_the_template_knows_them() -> None:
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "developer", "content": "d"},
    ]
    listing = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    assert render(listing, messages=chat) == "system=s\n\nd;user=u;"
    assert render("{# 'developer' #}" + listing, messages=chat) == "system=s;user=u;developer=d;"


def test_a_continued_message_that_the_template_trims_is_cut_behind_its_text() -> None:
    chat = [{"role": "assistant", "content": "so far  "}]
    kept = "{{ messages[0].content }}</s>"
    trimmed = "{{ messages[0].content | trim }}</s>"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(kept, messages=chat, **options) == "so far  "
    assert render(trimmed, messages=chat, **options) == "so far"
    with pytest.raises(RequestRefusedError, match="does not appear in the chat"):
        render("nothing", messages=chat, **options)
