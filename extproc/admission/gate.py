"""What a policy refuses or changes under load takes effect here; in shadow mode it is only noted."""

from collections.abc import Callable, Mapping
from math import ceil

import msgspec

from extproc.admission.asked_request import AskedRequest, RequestReader, require_within_limit
from extproc.admission.degradation import NO_MEASURES, Measures, may_change_model
from extproc.admission.prepared_request import Preview
from extproc.disaggregation.offload import Verdict
from extproc.disaggregation.prefill_plan import PrefillPlan
from extproc.disaggregation.transfer_protocols import protocol_of
from extproc.errors import (
    PickError,
    PromptLimitError,
    QuotaExceededError,
    RequestShedError,
    TokenQuotaExceededError,
)
from extproc.policy.priority import StepKind
from extproc.policy.shadow import ShadowAction, ShadowRule, Withheld
from extproc.prompts.tokenized_prompt import PromptTokens
from extproc.shared.quota import QuotaVerdict

FIRST_POD = Withheld(
    rule=ShadowRule.AUTOSCALE,
    action=ShadowAction.WAIT,
    reason="first-pod",
    words="no pod may serve it: it would wait for the pool's first pod",
)


class Gate:
    """One request's gate: it applies the policy's actions, or notes them in shadow mode."""

    __slots__ = ("is_shadow", "noted", "would_take")

    def __init__(self, *, is_shadow: bool) -> None:
        self.is_shadow = is_shadow
        self.noted: list[Withheld] = []  # each kind of action once
        self.would_take = NO_MEASURES  # shadow mode: the measures in force

    def note(self, *actions: Withheld) -> None:
        """Note skipped actions."""
        for action in actions:
            if not any((action.rule, action.code) == (each.rule, each.code) for each in self.noted):
                self.noted.append(action)

    def degrade(
        self,
        asked: AskedRequest,
        measures_of: Callable[..., Measures],
        reader: RequestReader,
        *,
        adapters: Mapping[str, str],
    ) -> AskedRequest:
        """Return the request under the measures in force for its class. Raise RequestShedError if they refuse it."""
        try:
            measures = measures_of(asked.request_class, pool=asked.pool)
        except RequestShedError as refusal:
            if not self.is_shadow:
                raise
            self.note(refused(refusal, rule=ShadowRule.DEGRADATION))
            return asked
        if not self.is_shadow:
            return reader.under(asked, measures, adapters=adapters)
        self.would_take = measures
        self.note(*_steps(asked, measures))
        return asked

    def limit_prompt(self, asked: AskedRequest, tokens: PromptTokens) -> None:
        """Raise PromptLimitError if the prompt is above the class's present limit."""
        require_within_limit(asked, tokens, asked.measures)
        if not self.is_shadow:
            return
        try:
            require_within_limit(asked, tokens, self.would_take)
        except PromptLimitError as refusal:
            self.note(refused(refusal, rule=ShadowRule.DEGRADATION))

    def limit_quota(self, verdict: QuotaVerdict | None) -> QuotaVerdict | None:
        """Return the verdict to report to the client. Raise QuotaExceededError if the quota is used up."""
        if verdict is None:
            return None
        if self.is_shadow:
            if verdict.limit is not None:
                action, reason = ShadowAction.REFUSE, verdict.limit.value
                self.note(Withheld(rule=ShadowRule.QUOTA, action=action, reason=reason, words=verdict.message))
            return None
        if not verdict.allowed:
            kind = TokenQuotaExceededError if verdict.error_type == "tokens" else QuotaExceededError
            seconds = ceil(max(verdict.wait_seconds, 1.0))
            raise kind(verdict.message, retry_after_seconds=seconds, headers=verdict.headers)
        return verdict

    def preview(self, preview: Preview) -> Preview:
        """Return the fate of a request that came now."""
        if not self.is_shadow:
            return preview
        seconds = preview.expected_ttft_seconds
        if preview.verdict == "refuse":
            words = f"the first token is expected after {seconds:.3g} s, later than its class promises"
            action = ShadowAction.REFUSE
            self.note(Withheld(rule=ShadowRule.ADMISSION, action=action, reason="shed", words=words))
        elif preview.verdict == "wait":
            self.note(waits(seconds))
        return msgspec.structs.replace(preview, verdict="go")

    def offload(self, plan: PrefillPlan | None) -> PrefillPlan | None:
        """Return where the prompt is computed; the decode pod computes it in shadow mode, if its protocol lets it."""
        if not self.is_shadow or plan is None or not plan.is_remote:
            return plan
        protocol = protocol_of(plan.policy)
        if protocol is not None and not protocol.decode_pods_prefill:
            return plan
        why = plan.verdict.why
        words = f"{plan.places[0].endpoint} would compute the prompt: {why}"
        action, reason = ShadowAction.OFFLOAD, plan.policy.rule.value
        self.note(Withheld(rule=ShadowRule.DISAGGREGATION, action=action, reason=reason, words=words))
        return msgspec.structs.replace(
            plan, verdict=Verdict(remote=False, why=f"shadow, else remote: {why}"), race=None
        )


def refused(refusal: PickError, *, rule: ShadowRule = ShadowRule.ADMISSION) -> Withheld:
    """Return a skipped refusal."""
    return Withheld(rule=rule, action=ShadowAction.REFUSE, reason=refusal.reason, words=refusal.message)


def waits(expected_seconds: float) -> Withheld:
    """Return a skipped wait in the queue."""
    words = f"no pod has room: it would wait, and have its first token after about {expected_seconds:.3g} s"
    return Withheld(rule=ShadowRule.ADMISSION, action=ShadowAction.WAIT, reason="full", words=words)


def _steps(asked: AskedRequest, measures: Measures) -> tuple[Withheld, ...]:
    """Return the steps in force that would change the request; refusals are not among them."""
    if measures is NO_MEASURES:
        return ()
    most, cap, model = asked.request.max_tokens, measures.output_tokens, measures.model
    changes = {
        StepKind.CAP_OUTPUT: cap is not None and (most is None or most > cap),
        StepKind.SMALLER_MODEL: model is not None
        and model != asked.resolved.model
        and may_change_model(asked.request, adapter=asked.resolved.adapter),
        StepKind.NO_REMOTE_PREFILL: measures.no_remote_prefill,
    }
    kinds = dict.fromkeys(step.step for step in measures.steps if changes.get(step.step, False))
    return tuple(
        Withheld(
            rule=ShadowRule.DEGRADATION, action=ShadowAction.DEGRADE, reason=kind.value, words=_words(kind, measures)
        )
        for kind in kinds
    )


def _words(kind: StepKind, measures: Measures) -> str:
    if kind is StepKind.CAP_OUTPUT:
        return f"the answer would have {measures.output_tokens} tokens at most"
    if kind is StepKind.SMALLER_MODEL:
        return f"the model {measures.model} would answer"
    return "a prefiller that the request names would not be used"
