"""Judges whether the picker and the pods make the same tokens of a prompt: else no prefix is ever found."""

from collections.abc import Iterator, Sequence

from extproc.doctor.facts import Facts, TokenComparison
from extproc.doctor.findings import Finding, error, unchecked, warning


def tokens(facts: Facts) -> Iterator[Finding]:
    """Every probe has the same tokens here and on every pod."""
    for model in facts.expected.models.served:
        if not any(one.model == model.name for pod in facts.pods for one in pod.tokens):
            continue
        broken = _unusable_here(
            model.name, [one for pod in facts.pods for one in pod.tokens if one.model == model.name]
        )
        if broken is not None:
            yield broken
            continue
        for pod in facts.answering:
            compared = [one for one in pod.tokens if one.model == model.name]
            yield from _of_pod(pod.endpoint, model.name, compared)


def _unusable_here(model: str, compared: Sequence[TokenComparison]) -> Finding | None:
    """Find what is the same for all pods: the tokenizer here cannot be used at all."""
    if any(one.ours is not None for one in compared):
        return None
    return error(
        model,
        f"the tokenizer cannot be used: {compared[0].our_problem}",
        fix="copy tokenizer.json, tokenizer_config.json and the chat template of the pods' model anew, and name that "
        "folder in --tokenizer",
    )


def _of_pod(endpoint: str, model: str, compared: Sequence[TokenComparison]) -> Iterator[Finding]:
    answered = [one for one in compared if one.theirs is not None or one.refused]
    if compared and not answered:
        yield unchecked(
            endpoint,
            f"the tokens of {model} cannot be compared: {compared[0].their_problem}",
            fix="let this machine reach POST /tokenize of the pod",
        )
        return
    wrong = [one for one in answered if not one.agree]
    if not wrong:
        return
    names = ", ".join(one.probe for one in wrong)
    first = wrong[0]
    if not all(one.is_chat for one in wrong):
        yield error(endpoint, f"other tokens of {model} ({names}): {_difference(first)}", fix=_tokenizer_fix(first))
    elif first.ours is None:
        yield error(
            endpoint,
            f"chats of {model} cannot be rendered here ({names}): {first.our_problem}",
            fix="copy the pods' chat template to the --tokenizer folder (chat_template.jinja) or name it as "
            "`chatTemplate` in `models`",
        )
    else:
        yield error(
            endpoint,
            f"the same text tokens of {model}, but other chats ({names}): {_difference(first)}",
            fix="use the pods' chat template: what they have as --chat-template and --default-chat-template-kwargs "
            "belongs in `chatTemplate` and `chatTemplateKwargs` of `models`",
        )


def _difference(one: TokenComparison) -> str:
    if one.ours is None or one.theirs is None:
        return one.our_problem or one.their_problem
    at = next((i for i, pair in enumerate(zip(one.ours, one.theirs, strict=False)) if pair[0] != pair[1]), None)
    where = f"token {at} differs" if at is not None else "one begins like the other"
    return f"{len(one.ours)} here, {len(one.theirs)} there, {where}"


def _tokenizer_fix(one: TokenComparison) -> str:
    ours, theirs = one.ours or (), one.theirs or ()
    if ours[1:] == theirs or theirs[1:] == ours:
        return (
            "only the first token differs, a begin-of-text: copy tokenizer.json and tokenizer_config.json (with its "
            "add_bos_token) from the pods' model to the --tokenizer folder"
        )
    return "the --tokenizer folder is another model's or another revision's: copy it from what the pods load"


def picker_tokens(facts: Facts) -> Iterator[Finding]:
    """The running picker counts the tokens that the pods count."""
    picker = facts.picker
    if picker is None or picker.problem:
        return
    for model in dict.fromkeys(one.model for one in picker.tokens):
        wrong = [one for one in picker.tokens if one.model == model and one.picker != one.pod]
        if wrong:
            first = wrong[0]
            yield error(
                picker.url,
                f"the running picker sees {first.picker} tokens of {model} where a pod has {first.pod} "
                f"({', '.join(one.probe for one in wrong)})",
                fix="give the running picker the --model, --tokenizer and `models` that this command was given",
            )
    known = frozenset(one.model for one in picker.tokens)
    compared = {one.model for pod in facts.pods for one in pod.tokens if one.theirs is not None}
    for model in sorted(compared - known):
        yield warning(
            picker.url,
            f"the running picker explains no request for {model}",
            fix="see its log and `kvmesh explain`",
        )
