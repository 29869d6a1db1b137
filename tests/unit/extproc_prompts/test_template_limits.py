"""A chat template from anywhere takes a bounded time and memory, and a published one renders as ever."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extproc.errors import ChatTemplateError, TemplateLimitError
from extproc.prompts import chat_template, template_limits
from extproc.prompts.chat_template import MOST_BREACHES, ChatTemplate, cannot_disable_thinking, refuses_later_system
from extproc.prompts.template_units import LimitedContext
from extproc.requests.request import ChatPrompt

MOST_BYTES = 200 << 20
ROOT = Path(__file__).parents[3]
HI = ChatPrompt(messages=({"role": "user", "content": "Hi"},))
GROWING = "{%% set n = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set n.x = %s %%}{%% endfor %%}%s"

ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ 10 ** 100000000 }}",
    "a power of a power": "{% set n = 9 ** 999 ** 9 %}",
    "products of numbers": GROWING % ("9 ** 999", "n.x * n.x", ""),
    "a long text": "{{ 'a' * 2000000000 }}",
    "a long text first": "{{ 2000000000 * 'a' }}",
    "a long list": "{{ ([1] * 2000000000) | length }}",
    "a sum with itself": GROWING % ("'ab'", "n.x + n.x", ""),
    "a list with itself": GROWING % ("[1, i]", "n.x + n.x", ""),
    "a text beside itself": GROWING % ("'ab'", "n.x ~ n.x", ""),
    "a block twice": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set x %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% set n.x = x %}{% endfor %}",
    "a list in a list": GROWING % ("[1]", "[n.x, n.x]", "{{ n.x }}"),
    "a list in JSON": GROWING % ("[1]", "[n.x, n.x]", "{{ n.x | tojson }}"),
    "a list as a text": GROWING % ("[1]", "[n.x, n.x]", "{{ n.x | string }}{{ n.x ~ 'a' }}"),
    "a list compared": "{% set m = namespace(x=[1]) %}"
    + GROWING % ("[1]", "[n.x, n.x]", "")
    + "{% for i in range(60) %}{% set m.x = [m.x, m.x] %}{% endfor %}{{ m.x == n.x }}",
    "a list sought": GROWING % ("[1]", "[n.x, n.x]", "{{ n.x in [messages] + [n.x | list] }}"),
    "a list selected": GROWING % ("[1]", "[n.x, n.x]", "{{ [n.x] | select('equalto', n.x | list) | list | length }}"),
    "a list as an error": GROWING % ("[1]", "[n.x, n.x]", "{{ raise_exception(n.x) }}"),
    "a tuple as a key": GROWING % ("(1, i)", "(n.x, n.x)", "{{ {n.x: 1} }}"),
    "a tuple in a dict": GROWING % ("(1, i)", "(n.x, n.x)", "{{ n.x in messages[0] }}"),
    "a tuple got": GROWING % ("(1, i)", "(n.x, n.x)", "{{ messages[0].get(n.x) }}"),
    "a namespace in itself": GROWING % ("1", "namespace(a=n.x, b=n.x)", "{{ n.x }}"),
    "messages many times": "{{ (messages * 100000) | tojson | length }}{{ (messages * 100000) | tojson | length }}",
    "messages for numbers": "{{ range(99999) | map('default', messages, true) | map(attribute='x', default=messages) "
    "| list | tojson | length }}",
    "a wide centre": "{{ 'a' | center(1000000000) }}",
    "a wide method": "{{ 'a'.ljust(1000000000) }}{{ 'a'.zfill(1000000000) }}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a wide format filter": "{{ '%1000000000d' | format(1) }}",
    "a given width": "{{ '%*d' % (1000000000, 1) }}",
    "a wide format method": "{{ '{:1000000000}'.format(1) }}",
    "a width in a width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "a wide indent": "{{ 'a\nb' | indent(1000000000) }}",
    "wide JSON": "{{ [1] | tojson(indent=1000000000) }}",
    "a precise number": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "replacing": "{% set a = 'a' * 90000 %}{{ a.replace('a', a) }}",
    "a replacing filter": "{% set a = 'a' * 90000 %}{{ a | replace('a', a) }}",
    "joining": "{% set a = 'a' * 90000 %}{{ a.join(a) }}",
    "a joining filter": "{% set a = 'a' * 90000 %}{{ range(90000) | join(a) }}",
    "searching": "{% set a = 'a' * 90000 %}{% for i in range(9999) %}{% if 'b' in a %}{% endif %}{% endfor %}",
    "searching numbers": "{% set r = range(99999) %}{% for i in r %}{% if 'b' in r %}{% endif %}{% endfor %}",
    "adding numbers": "{% set r = range(99999) %}{% for i in r %}{% if r | sum %}{% endif %}{% endfor %}",
    "changes": "{% set r = ['a' * 90000, 'a' * 90000] %}"
    "{% for i in range(99999) %}{% if loop.changed(r[i % 2]) %}{% endif %}{% endfor %}",
    "a list formatted": GROWING % ("[1]", "[n.x, n.x]", "{{ n.x | format(1) }}"),
    "comparing": "{% set a = 'a' * 90000 %}{% set b = 'a' * 90000 %}"
    "{% for i in range(99999) %}{% if a == b %}{% endif %}{% endfor %}",
    "stripping": "{% set a = ' ' * 90000 %}{% for i in range(99999) %}{% if a.strip() %}{% endif %}{% endfor %}",
    "sorting": "{% for i in range(9999) %}{% for j in range(9999) | sort %}{% break %}{% endfor %}{% endfor %}",
    "slices": "{% set a = [1] * 90000 %}{% for i in range(9999) %}{% set b = a[1:] %}{% endfor %}",
    "much written": "{% set a = 'a' * 90000 %}{% for i in range(99999) %}{{ a }}{{ a + a + a + a }}{% endfor %}",
    "much in a macro": "{% macro m() %}{% set a = 'a' * 90000 %}{% for i in range(9999) %}{{ a + a }}{% endfor %}"
    "{% endmacro %}{{ m() }}",
    "macros that call macros": "{% macro a() %}{% for i in range(99) %}{% endfor %}{% endmacro %}"
    "{% macro b() %}{% for i in range(99) %}{{ a() }}{% endfor %}{% endmacro %}"
    "{% for i in range(99999) %}{{ b() }}{% endfor %}",
    "a macro that forks": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "an endless filter": "{{ range(99999) | map('string') | map('string') | select('equalto', 'b') | list }}"
    "{% for i in range(99999) %}{{ range(99999) | select('equalto', 1) | list }}{% endfor %}",
    "an endless test": "{% for i in range(99999) if (range(99999) | list) %}{% endfor %}",
}
REFUSED = {
    "a macro without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a number with bytes": "{{ (1).to_bytes(2000000000, 'big') }}",
    "tabs": "{{ 'a\tb'.expandtabs(2000000000) }}",
    "characters for others": "{{ 'a'.translate({97: 'b'}) }}",
    "a sum of lists": "{{ [[1]] | sum(start=[]) }}",
    "an error with a list": GROWING % ("[1]", "[n.x, n.x]", "{{ messages[n.x].x }}"),
}
UNREADABLE = {
    "an unknown filter": "{{ 'a' | urlize }}",
    "a recursive loop": "{% for l in x recursive %}{{ loop(l) }}{% endfor %}",
    "more arguments": "{% macro m() %}{{ varargs }}{% endmacro %}",
    "a block": "{% block a %}{% endblock %}",
    "escapes": "{% autoescape true %}{% endautoescape %}",
    "a long one": "a" * (template_limits.MOST_CHARACTERS + 1),
    "a wide one": "{{a}}" * 20_000,
    "a deep one": "{{ " + "(" * 9_000 + ")" * 9_000 + " }}",
    "deep loops": "{% for a in b %}" * 40 + "{% endfor %}" * 40,
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.fixture
def few_bytes() -> Iterator[None]:
    tracemalloc.start()
    yield
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < MOST_BYTES


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_render_without_end_is_ended(name: str) -> None:
    endless = template(ENDLESS[name])
    with pytest.raises(TemplateLimitError):
        endless.render(HI)


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", REFUSED)
def test_what_costs_an_unknown_time_is_refused(name: str) -> None:
    with pytest.raises(ChatTemplateError, match="refused the conversation"):
        template(REFUSED[name]).render(HI)


@pytest.mark.usefixtures("few_bytes")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_bounded_does_not_compile(name: str) -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        template(UNREADABLE[name])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("source", [*ENDLESS.values(), *UNREADABLE.values()])
def test_the_probes_of_a_start_end_too(source: str) -> None:
    assert refuses_later_system(source)
    if source in ENDLESS.values():
        assert cannot_disable_thinking(template(source).render)


def test_a_template_that_breaks_its_limits_is_no_longer_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    for_a_word = (
        "{% for m in messages %}{% if m.content == 'boo' %}" + ENDLESS["nested loops"] + "{% endif %}{% endfor %}"
    )
    tried = template(for_a_word)
    boo = ChatPrompt(messages=({"role": "user", "content": "boo"},))
    for _ in range(MOST_BREACHES):
        assert tried.render(HI) == ""
        assert not tried.breach
        with pytest.raises(TemplateLimitError):
            tried.render(boo)
    monkeypatch.setattr(LimitedContext, "concatenated", None)
    with pytest.raises(TemplateLimitError, match="more time or memory"):
        tried.render(HI)
    assert tried.breach


def test_a_long_conversation_has_units_for_its_length() -> None:
    messages = tuple({"role": "user", "content": "x"} for _ in range(6_000))
    tiny = template((ROOT / "podsim/tiny_model/chat_template.jinja").read_text())
    assert tiny.render(ChatPrompt(messages=messages)).count("x") >= 6_000


def real_templates() -> dict[str, str]:
    found = {path.name: path.read_text() for path in (ROOT / "tests/vllm/templates").glob("*.jinja")}
    found["tiny"] = (ROOT / "podsim/tiny_model/chat_template.jinja").read_text()
    return found


def as_transformers(source: str, prompt: ChatPrompt) -> str:
    def fail(message: str) -> None:
        raise TemplateError(message)

    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[chat_template._GenerationBlock, loopcontrols]
    )
    plain.filters["tojson"] = chat_template._tojson
    plain.globals |= {"raise_exception": fail, "strftime_now": lambda layout: "now"}
    return plain.from_string(source).render(
        *({"bos_token": "<s>", "eos_token": "</s>", **prompt.chat_template_kwargs},),
        messages=[dict(message) for message in prompt.messages],
        tools=None if prompt.tools is None else list(prompt.tools),
        documents=None,
        add_generation_prompt=prompt.add_generation_prompt,
    )


TEXTS = ("Hi", "  two\n\n", "<think>why</think>so", "é𝄞\u2028<b>&", "")
TOOLS: tuple[Any, ...] = (
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
)


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", real_templates())
def test_real_templates_render_as_in_jinjas_own_sandbox(name: str, text: str, tools: Any) -> None:
    source = real_templates()[name]
    limited = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    if limited.content_format == "openai":
        content: Any = [{"type": "text", "text": text}]
    else:
        content = text
    roles = ("system", "user", "assistant", "user")
    prompt = ChatPrompt(messages=tuple({"role": role, "content": content} for role in roles), tools=tools)
    limited._template.globals["strftime_now"] = lambda layout: "now"
    try:
        expected = as_transformers(source, prompt)
    except Exception:
        with pytest.raises(ChatTemplateError):
            limited.render(prompt)
    else:
        assert limited.render(prompt) == expected
        assert json.dumps(expected)
