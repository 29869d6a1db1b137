"""Which content a template gets. `tests/vllm` compares the same templates with vLLM's own detection."""

import pytest
from jinja2 import Environment

from extproc.prompts.chat_template import content_format
from tests.data.content_formats import CONTENT_FORMATS


@pytest.mark.parametrize(("source", "expected"), CONTENT_FORMATS)
def test_a_template_that_loops_over_content_gets_parts(source: str, expected: str) -> None:
    assert content_format(Environment().parse(source)) == expected
