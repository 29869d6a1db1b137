"""What a chat template does with two of Anthropic's ideas, found out as vLLM 0.32 does at start-up: by trying.

Called once per template when a model is loaded; the answers choose between the alternatives of a ChatPrompt.
"""

from collections.abc import Callable

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extproc.errors import PromptTokensError
from extproc.requests.request import ChatPrompt
from extproc.requests.request_fields import template_variables

EFFORTS = ("low", "medium", "high", "xhigh", "max")


def refuses_later_system(source: str | None) -> bool:
    """Tell whether a template raises for a system message after the first one, or there is none.

    vLLM then moves the texts of later ones into the first: render `ChatPrompt.messages_system_first`.
    """
    if not source:
        return True
    conversation = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    try:
        environment.from_string(source).render(messages=conversation, add_generation_prompt=False)
    except TemplateError:
        return True
    except Exception:  # vLLM lets it end the server's start; a template is a program that may raise anything
        return True
    return False


def cannot_disable_thinking(render: Callable[[ChatPrompt], str]) -> bool:
    """Tell whether the effort "none" is refused, or rendered like a real effort.

    vLLM then asks for a low effort instead: render with `ChatPrompt.kwargs_low_effort`.
    """
    off = _probe(render, "none")
    return off is None or any(_probe(render, effort) == off for effort in EFFORTS)


def _probe(render: Callable[[ChatPrompt], str], effort: str) -> str | None:
    prompt = ChatPrompt(
        messages=({"role": "user", "content": "Hi"},), chat_template_kwargs=template_variables(None, effort)
    )
    try:
        return render(prompt)
    except PromptTokensError:
        return None
