import pytest
from jinja2 import Environment

from podsim.wire.chat_template import wants_parts

LOOP = "{% for m in messages %}"
PARTS = "{{ p }}{% endfor %}{% endfor %}"
MACRO = "{% macro show(c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (LOOP + "{{ m.content }}{% endfor %}", False),
        (LOOP + "{% for p in m.content %}" + PARTS, True),
        (LOOP + "{% for p in m['content'][1:] | list %}" + PARTS, True),
        (LOOP + "{% for p in m.other %}" + PARTS, False),
        (LOOP + "{% for p in other.content %}" + PARTS, False),
        (LOOP + "{% set content = m.content %}{% for p in content %}" + PARTS, True),
        (LOOP + "{% for k, v in m.content %}{% endfor %}{% endfor %}", False),
        ("{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}" + PARTS, True),
        ("{% for i, m in messages %}{% for p in m.content %}" + PARTS, False),
        (MACRO + LOOP + "{{ show(m.content) }}{% endfor %}", True),
        (MACRO + LOOP + "{{ show(m.text) }}{% endfor %}", False),
    ],
)
def test_contents_are_parts_where_vllm_finds_a_loop_over_them(source: str, expected: bool) -> None:
    assert wants_parts(Environment().parse(source)) is expected
