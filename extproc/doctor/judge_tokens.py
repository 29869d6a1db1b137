"""Judges the tokens that picker and pods make of the probes. Where pods differ, those that are the most are right."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from extproc.doctor.facts import Facts
from extproc.doctor.findings import Finding, error, unchecked, warning
from extproc.prompts.token_probes import TokenComparison

TEMPLATE_FLAGS = "--chat-template and --default-chat-template-kwargs"
TOKENIZER_FLAGS = "--model, --tokenizer and --revision"


@dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """The pods of a model that differ from the picker."""

    endpoints: tuple[str, ...]
    compared: int  # pods, these included

    @property
    def count(self) -> str:
        """How many they are, in words."""
        return f"{len(self.endpoints)} of {self.compared} pods {'differs' if len(self.endpoints) == 1 else 'differ'}"

    def fix(self, flags: str, *, of_picker: str) -> str:
        """Say who is to be mended: `of_picker` would break the pods that agree with the picker, if there are any."""
        one = len(self.endpoints) == 1
        if len(self.endpoints) == self.compared:
            return of_picker
        if 2 * len(self.endpoints) < self.compared:
            which = "that pod: start it" if one else "those pods: start them"
            return f"{self.count}: mend {which} with the others' {flags}"
        return f"{self.count}, so they are not alike: start all with the same {flags}, and give those to the picker"


def tokens(facts: Facts) -> Iterator[Finding]:
    """Every probe has the same tokens here and on every pod."""
    for model in facts.expected.models.served:
        of_pods = {pod.endpoint: [one for one in pod.tokens if one.model == model.name] for pod in facts.pods}
        compared = [one for of_pod in of_pods.values() for one in of_pod]
        if compared and all(one.ours is None for one in compared):
            yield error(
                model.name,
                f"the tokenizer cannot be used: {compared[0].our_problem}",
                fix="copy tokenizer.json, tokenizer_config.json and the chat template of the pods' model anew, and "
                "name that folder in --tokenizer",
            )
            continue
        differing = Differing(
            endpoints=tuple(endpoint for endpoint, of_pod in of_pods.items() if _wrong(of_pod)),
            compared=sum(bool(_answered(of_pod)) for of_pod in of_pods.values()),
        )
        for endpoint, of_pod in of_pods.items():
            yield from _tokens_of_pod(endpoint, model.name, of_pod, differing)


def _answered(compared: Sequence[TokenComparison]) -> list[TokenComparison]:
    return [one for one in compared if one.theirs is not None or one.refused]


def _wrong(compared: Sequence[TokenComparison]) -> list[TokenComparison]:
    return [one for one in _answered(compared) if not one.agree]


def _tokens_of_pod(
    endpoint: str, model: str, compared: Sequence[TokenComparison], differing: Differing
) -> Iterator[Finding]:
    if compared and not _answered(compared):
        yield unchecked(
            endpoint,
            f"the tokens of {model} cannot be compared: {compared[0].their_problem}",
            fix="let this machine reach POST /tokenize of the pod",
        )
        return
    wrong = _wrong(compared)
    if not wrong:
        return
    names = ", ".join(one.probe for one in wrong)
    first = wrong[0]
    if not all(one.is_chat for one in wrong):
        fix = differing.fix(TOKENIZER_FLAGS, of_picker=_tokenizer_fix(first))
        yield error(endpoint, f"other tokens of {model} ({names}): {first.difference}", fix=fix)
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
            f"the same text tokens of {model}, but other chats ({names}): {first.difference}",
            fix=differing.fix(
                TEMPLATE_FLAGS,
                of_picker=f"use the pods' chat template: what they have as {TEMPLATE_FLAGS} belongs in `chatTemplate` "
                "and `chatTemplateKwargs` of `models`",
            ),
        )


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
        counts = {one.probe: one.count for one in picker.tokens if one.model == model}
        yield from _picker_tokens_of(model, counts, facts)
    known = frozenset(one.model for one in picker.tokens)
    compared = {one.model for pod in facts.pods for one in pod.tokens if one.theirs is not None}
    for model in sorted(compared - known):
        yield warning(
            picker.url,
            f"the running picker explains no request for {model}",
            fix="see its log and `kvmesh explain`",
        )


def _picker_tokens_of(model: str, counts: Mapping[str, int], facts: Facts) -> Iterator[Finding]:
    """Compare the picker's counts, by probe, with those of every pod."""
    wrong: dict[str, list[tuple[str, int]]] = {}  # endpoint -> (probe, its tokens)
    compared = 0
    for pod in facts.pods:
        of_pod = [
            (one.probe, len(one.theirs))
            for one in pod.tokens
            if one.model == model and one.theirs is not None and one.probe in counts
        ]
        compared += bool(of_pod)
        if others := [(probe, count) for probe, count in of_pod if count != counts[probe]]:
            wrong[pod.endpoint] = others
    if not wrong or facts.picker is None:
        return
    differing = Differing(endpoints=tuple(wrong), compared=compared)
    endpoint, others = next(iter(wrong.items()))
    probe, count = others[0]
    yield error(
        facts.picker.url,
        f"the running picker sees {counts[probe]} tokens of {model} where {endpoint} has {count} "
        f"({', '.join(name for name, _ in others)}); {differing.count}",
        fix=differing.fix(
            f"--tokenizer, {TEMPLATE_FLAGS}",
            of_picker="give the running picker the --model, --tokenizer and `models` that this command was given",
        ),
    )
