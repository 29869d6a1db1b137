"""Rendering of chat templates; the whole behaviour is compared with vLLM's own code in `tests/vllm`."""

from datetime import datetime
from typing import Any

import pytest
from jinja2 import Undefined
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from extproc.errors import ChatTemplateError
from extproc.prompts import chat_template
from extproc.prompts.chat_template import ChatTemplate
from extproc.prompts.template_limits import LimitedEnvironment
from extproc.requests.request import ChatPrompt

NOON = datetime(2026, 3, 4, 12, 0, 0)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


def render(source: str, *messages: Any, **fields: Any) -> str:
    template = ChatTemplate(source, special_tokens=TOKENS, now=lambda: NOON)
    return template.render(ChatPrompt(messages=messages or ({"role": "user", "content": "x"},), **fields))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ eos_token }}{{ unk_token is defined }}", "<s></s>False"),
        ("{{ add_generation_prompt }} {{ tools }} {{ documents }}", "True None None"),
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{{ '<b>&\"é' | tojson }}", '"<b>&\\"é"'),
        ("{{ {'b': 1, 'a': [1.0, none]} | tojson }}", '{"b": 1, "a": [1.0, null]}'),
        ("{{ {'b': 1} | tojson(indent=2) }}", '{\n  "b": 1\n}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(true, none, (',', ':'), true) }}", '{"a":"\\u00e9","b":1}'),
        ("{{ strftime_now('%d %b %Y %H:%M') }}", "04 Mar 2026 12:00"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}{% set x = 1 %}in{{ x }}{% endgeneration %}{{ x }}", "in1"),
        ("{{ messages[0].items() | list }}", "[('role', 'user'), ('content', 'x')]"),
        ("{{ messages[0].missing is defined }}{{ messages[0].missing }}", "False"),
    ],
)
def test_templates_find_what_transformers_gives_them(source: str, expected: str) -> None:
    assert render(source) == expected


def test_variables_of_the_request_reach_the_template_and_win_over_special_tokens() -> None:
    kwargs = {"thinking": False, "bos_token": "!", "padding": 1, "messages_unused": 2}
    source = "{{ thinking }} {{ bos_token }} {{ padding is defined }}"
    assert render(source, chat_template_kwargs=kwargs) == "False ! False"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "brief low served ['d']"),
        ({"chat_template_kwargs": {"style": "long", "tools": ["own"]}}, "long low ['own'] ['d']"),
        ({"documents": ("mine",)}, "brief low served ['mine']"),
        ({"tools": ()}, "brief low [] ['d']"),
    ],
)
def test_the_servers_defaults_lie_beneath_what_the_request_says(fields: dict[str, Any], expected: str) -> None:
    template = ChatTemplate(
        "{{ style }} {{ effort }} {{ tools }} {{ documents }}",
        special_tokens=TOKENS,
        defaults={"style": "brief", "effort": "low", "tools": "served", "documents": ["d"], "messages": "never"},
    )
    assert template.render(ChatPrompt(messages=({"role": "user", "content": "x"},), **fields)) == expected


def test_a_variable_that_the_template_only_sets_cannot_be_given() -> None:
    source = "{% set own = 1 %}{{ own }}"
    assert render(source, chat_template_kwargs={"own": 2}) == "1"


def test_tools_come_from_the_template_variables_when_they_are_there() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert render("{{ tools[0].function.name }}", tools=(tool,)) == "f"
    assert render("{{ tools }}", tools=(tool,), chat_template_kwargs={"tools": "other"}) == "other"


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (TURNS, "One, two", "[assistant]One, two"),
        (TURNS, "One, two ", "[assistant]One, two "),
        (TURNS, "", "[assistant]"),
        ("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", " One, two  ", "<One, two"),
        ("{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}", "One", "<One"),
    ],
)
def test_a_continued_message_ends_where_the_model_goes_on(template: str, content: str, expected: str) -> None:
    message = {"role": "assistant", "content": content}
    rendered = render(template, message, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected


@pytest.mark.parametrize(
    ("source", "messages", "fields"),
    [
        (TURNS, [], {}),
        (TURNS, [{"role": "user", "content": "x"}], {"continue_final_message": True}),
        ("no such field", [{"role": "user", "content": "x"}], {"continue": True}),
        ("{{ messages[0].content[:1] }}", [{"role": "user", "content": "abc"}], {"continue": True}),
        (
            "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}",
            [{"role": "a"}],
            {"continue": True},
        ),
        ("{{ raise_exception('no') }}", [{"role": "user", "content": "x"}], {}),
        ("{{ messages.append(1) }}", [{"role": "user", "content": "x"}], {}),
        ("{{ ''.__class__.__mro__ }}", [{"role": "user", "content": "x"}], {}),
        ("{{ 1 // 0 }}", [{"role": "user", "content": "x"}], {}),
        ("{{ messages[0].content + 1 }}", [{"role": "user", "content": "x"}], {}),
        ("{{ messages }}", [{"role": "user", "content": "x"}], {"chat_template_kwargs": {"messages": 1}}),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", [{"role": "user", "content": "x"}], {}),
    ],
)
def test_what_vllm_would_refuse_is_an_error_with_a_reason(
    source: str, messages: list[Any], fields: dict[str, Any]
) -> None:
    if fields.pop("continue", False):
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    template = ChatTemplate(source, special_tokens=TOKENS, now=lambda: NOON)
    with pytest.raises(ChatTemplateError) as caught:
        template.render(ChatPrompt(messages=tuple(messages), **fields))
    assert caught.value.reason == "chat-template"


@pytest.mark.parametrize("source", ["{% for %}", "{{ ", "{% unknown %}"])
def test_a_template_that_does_not_compile_is_an_error_at_once(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, special_tokens={})


def test_developers_become_system_unless_the_template_knows_them() -> None:
    messages = ({"role": "user", "content": "x"}, {"role": "developer", "content": "D"})
    assert render(TURNS, *messages) == "[system]D</s>[user]x</s>"
    assert render("{# 'developer' #}" + TURNS, *messages) == "[user]x</s>[developer]D</s>"


def test_one_template_renders_many_conversations_without_remembering_any() -> None:
    template = ChatTemplate(TURNS, special_tokens=TOKENS)
    prompts = [ChatPrompt(messages=({"role": "user", "content": str(number)},)) for number in range(3)]
    rendered = [template.render(prompt) for prompt in prompts + prompts]
    assert rendered == ["[user]0</s>", "[user]1</s>", "[user]2</s>"] * 2


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("'<' + none + '>'", "TypeError"),
        ("'<' + messages[0].missing + '>'", "UndefinedError"),
        ("'<' + none + raise_exception('later')", "TypeError"),
        ("'<' + raise_exception('sooner') + none", "sooner"),
    ],
)
def test_a_sum_of_other_things_than_texts_fails_as_it_always_did(expression: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=rf"refused the conversation: {reason}$"):
        render("{{ " + expression + " }}")


@pytest.mark.parametrize("source", ["{{ self }}", "{{ messages }}"])
def test_a_variable_of_the_renderer_itself_never_comes_from_the_request(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"refused the conversation: TypeError$"):
        render("{{ messages }}" + source, chat_template_kwargs={"messages": 1})
    given = render(source, chat_template_kwargs={"self": "own", "context": "own", "environment": "own"})
    assert given == ("<TemplateReference None>" if "self" in source else "[{'role': 'user', 'content': 'x'}]")


class Loud(str):
    """A text that tells when it is asked."""

    __slots__ = ()


def objects_of_templates() -> list[Any]:
    loop = LoopContext(iter((1, 2)), Undefined)
    next(loop)
    return [
        *("text", {"a": 1, "items": 2, "pop": 3}, [1], (1,), 1, None, {1}, loop, Loud("x"), str, dict, lambda: 1),
        Namespace(text="t", number=1, none=None, items=[1], method="{0}".format, _hidden="h", map="{x}".format_map),
        (number for number in (1, 2)),
    ]


def test_the_short_cuts_of_the_sandbox_answer_as_the_sandbox_without_them() -> None:
    short, own = chat_template._environment(datetime.now), LimitedEnvironment()
    names = {name for item in objects_of_templates() for name in dir(item)} | {"nextitem", "previtem", "text", "", "_"}
    names |= {"number", "none", "method", "_hidden", "map", "missing", "a", "__class__", "mro", "gi_frame", "__attrs"}
    for mine, theirs in zip(objects_of_templates(), objects_of_templates(), strict=True):
        for name in sorted(names):
            found, expected = short.getattr(mine, name), own.getattr(theirs, name)
            assert type(found) is type(expected), (mine, name)
            if isinstance(expected, Undefined):
                assert (str(found._undefined_message), found._undefined_exception) == (
                    str(expected._undefined_message),
                    expected._undefined_exception,
                ), (mine, name)
            elif isinstance(expected, str | int | float | bool | None | list | dict):
                assert found == expected, (mine, name)
            else:
                assert getattr(found, "__qualname__", None) == getattr(expected, "__qualname__", None), (mine, name)


@pytest.mark.parametrize(
    "source",
    [
        "{{ '{0.__class__}'.format(messages) }}",
        "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
        "{% set ns = namespace(f='{0.__class__}'.format) %}{{ ns.f(messages) }}",
        "{% for f in ['{0.__class__}'.format, 1] %}{{ loop.previtem and loop.previtem(messages) }}{% endfor %}",
        "{{ messages[0].pop('role') }}",
        "{{ messages[0].update(role='x') }}",
        "{% for m in messages %}{{ loop.__class__ }}{{ loop._iterator.x }}{% endfor %}",
        "{{ namespace(a=1)._Namespace__attrs.x }}",
        "{{ messages[0].content.__class__.mro() }}",
        "{% set ns = namespace(a=1) %}{% set ns.b = 'c'.upper %}{{ ns.a }}{{ ns.b() }}{{ ns.missing }}",
        "{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.index0 }}{% endfor %}",
        "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.changed(1) }}{{ loop.nothing }}{% endfor %}",
        "{{ 'a,b'.split(',') }}{{ messages[0].get('role') }}{{ messages[0].items() | list }}",
    ],
)
def test_templates_get_from_objects_what_jinjas_own_sandbox_gives(source: str) -> None:
    message = {"role": "user", "content": "x"}
    own = ImmutableSandboxedEnvironment().from_string(source)
    try:
        expected = own.render(messages=[message])
    except Exception as error:
        with pytest.raises(ChatTemplateError, match=f"{type(error).__name__}$"):
            render(source, message)
    else:
        assert render(source, message) == expected
