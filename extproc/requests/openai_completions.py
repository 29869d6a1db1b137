"""Read /v1/completions and /inference/v1/generate, with vLLM 0.32's defaults.

Called by `openai.parse_request`.
"""

from typing import Any

from extproc.requests.request import ApiKind, InferenceRequest, Prompt, Truncation, TruncationSide
from extproc.requests.request_fields import (
    Body,
    TruncatedBody,
    UnsupportedPromptError,
    completion_prompts,
    facts,
    flag,
    token_prompt,
    truncation,
)

COMPLETION_MAX_TOKENS = 16  # vLLM's default in this API, also for null; chats may use up the context


class CompletionBody(TruncatedBody, kw_only=True):
    """The fields that change a completion's tokens."""

    prompt: Any = None
    prompt_embeds: Any = None
    suffix: Any = None
    max_tokens: Any = None
    add_special_tokens: Any = None


class GenerateBody(Body, kw_only=True):
    """Token ids and what goes with them."""

    token_ids: Any = None
    features: Any = None
    content_parts: Any = None
    sampling_params: Any = None


def completion_request(path: str, body: CompletionBody) -> InferenceRequest:
    """Return the facts of a completion; several prompts are several prefills."""
    limit = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompts: tuple[Prompt, ...] | UnsupportedPromptError
    cut: Truncation | None = None
    try:
        for name in ("prompt_embeds", "suffix"):
            if getattr(body, name) is not None:
                raise UnsupportedPromptError(f"{name} gives the prompt tokens that only the pod knows")
        cut = truncation(body, output_tokens=limit, default_side=TruncationSide.LEFT)
        special = body.add_special_tokens is None or flag(body.add_special_tokens, default=True)
        prompts = completion_prompts(body.prompt, name="prompt", add_special_tokens=special)
    except UnsupportedPromptError as error:
        prompts = error
    return facts(ApiKind.COMPLETIONS, path, body, prompts, max_tokens=limit, truncation=cut)


def generate_request(path: str, body: GenerateBody) -> InferenceRequest:
    """Return the facts of a request whose prompt was rendered elsewhere."""
    prompts: tuple[Prompt, ...] | UnsupportedPromptError
    try:
        if body.features is not None or body.content_parts is not None:
            raise UnsupportedPromptError("the token ids come with media, which enter the block keys")
        prompts = (token_prompt(body.token_ids),)
    except UnsupportedPromptError as error:
        prompts = error
    sampling = body.sampling_params
    limit = sampling.get("max_tokens", COMPLETION_MAX_TOKENS) if isinstance(sampling, dict) else None
    return facts(ApiKind.GENERATE, path, body, prompts, max_tokens=limit)
