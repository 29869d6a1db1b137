"""Templates with the content format that vLLM 0.32 detects for each; checked against vLLM in `tests/vllm`."""

LOOP = "{% for m in messages %}"
END = "{% endfor %}"
PARTS = "{{ p }}" + END + END

CONTENT_FORMATS = (
    ("", "string"),
    ("{{ messages[0].content }}", "string"),
    (LOOP + "{{ m.content }}" + END, "string"),
    (LOOP + "{% for p in m.content %}" + PARTS, "openai"),
    (LOOP + "{% for p in m['content'] %}" + PARTS, "openai"),
    (LOOP + "{% for p in m.content | list %}" + PARTS, "openai"),
    (LOOP + "{% for p in m.content[1:] %}" + PARTS, "openai"),
    (LOOP + "{% for p in m.other %}" + PARTS, "string"),
    (LOOP + "{% for p in other.content %}" + PARTS, "string"),
    (LOOP + "{% for p in m.content.parts %}" + PARTS, "string"),
    (LOOP + "{% set content = m.content %}{% for p in content %}" + PARTS, "openai"),
    (LOOP + "{% set text = m.content %}{% for p in text %}" + PARTS, "string"),
    (LOOP + "{% for k, v in m.content %}{{ k }}" + END + END, "string"),
    ("{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}" + PARTS, "openai"),
    ("{% set a = messages | list %}{% set b = a %}{% for m in b %}{% for p in m.content %}" + PARTS, "openai"),
    ("{% set rest = others %}{% for m in rest %}{% for p in m.content %}" + PARTS, "string"),
    ("{% set ns.rest = messages %}{% for m in messages %}{% for p in m.content %}" + PARTS, "string"),
    ("{% for m in messages | reverse %}{% for p in m.content %}" + PARTS, "openai"),
    ("{% for i, m in messages %}{% for p in m.content %}" + PARTS, "string"),
    (
        "{% macro show(c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
        "openai",
    ),
    (
        "{% macro show(x, c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(1, c=m.content) }}{% endfor %}",
        "openai",
    ),
    (
        "{% macro show(x, c) %}{% for p in x %}{{ p }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(1, m.content) }}{% endfor %}",
        "string",
    ),
    (
        "{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.text) }}{% endfor %}",
        "string",
    ),
)
