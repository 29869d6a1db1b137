"""What the load would take from a request, or refuse it for, were its policy not in shadow. Pure."""

from collections.abc import Sequence

from extproc.admission.asked_request import AskedRequest, require_within_limit
from extproc.admission.degradation import NO_MEASURES, Measures, may_change_model
from extproc.admission.prepared_request import Preview
from extproc.disaggregation.prefill_plan import PrefillPlan
from extproc.errors import PickError, PromptLimitError
from extproc.policy.priority import StepKind
from extproc.policy.shadow import ShadowAction, ShadowRule, Withheld
from extproc.prompts.token_ids import PromptTokens
from extproc.quotas.quota import QuotaVerdict

FIRST_POD = "first-pod"


def withheld_steps(asked: AskedRequest, measures: Measures) -> tuple[Withheld, ...]:
    """Return the steps in force that would change the request; refusals are no steps of these."""
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


def withheld_limit(asked: AskedRequest, measures: Measures, tokens: PromptTokens) -> tuple[Withheld, ...]:
    """Return the refusal of a prompt that is longer than the class may send now."""
    try:
        require_within_limit(asked, tokens, measures)
    except PromptLimitError as refusal:
        return (withheld_refusal(refusal, rule=ShadowRule.DEGRADATION),)
    return ()


def withheld_quota(verdict: QuotaVerdict) -> tuple[Withheld, ...]:
    """Return the refusal of a request beyond its tenant's quota."""
    if verdict.limit is None:
        return ()
    limit = verdict.limit.value
    return (Withheld(rule=ShadowRule.QUOTA, action=ShadowAction.REFUSE, reason=limit, words=verdict.message),)


def withheld_refusal(refusal: PickError, *, rule: ShadowRule = ShadowRule.ADMISSION) -> Withheld:
    """Return a refusal that was not made."""
    return Withheld(rule=rule, action=ShadowAction.REFUSE, reason=refusal.reason, words=refusal.message)


def withheld_wait(expected_seconds: float, *, reason: str = "full") -> Withheld:
    """Return a wait in the queue that was left out."""
    words = f"no pod has room: it would wait, and have its first token after about {expected_seconds:.3g} s"
    return Withheld(rule=ShadowRule.ADMISSION, action=ShadowAction.WAIT, reason=reason, words=words)


def withheld_offload(plan: PrefillPlan | None) -> tuple[Withheld, ...]:
    """Return the prefill pod that was not asked."""
    if plan is None or plan.withheld is None:
        return ()
    words = f"{plan.places[0].endpoint} would compute the prompt: {plan.withheld.why}"
    reason = plan.policy.rule.value
    return (Withheld(rule=ShadowRule.DISAGGREGATION, action=ShadowAction.OFFLOAD, reason=reason, words=words),)


def of_preview(preview: Preview) -> Sequence[Withheld]:
    """Return what the load would do to a request that came now."""
    if preview.verdict == "refuse":
        words = (
            f"the first token is expected after {preview.expected_ttft_seconds:.3g} s, later than its class promises"
        )
        return (Withheld(rule=ShadowRule.ADMISSION, action=ShadowAction.REFUSE, reason="shed", words=words),)
    return (withheld_wait(preview.expected_ttft_seconds),) if preview.verdict == "wait" else ()


def _words(kind: StepKind, measures: Measures) -> str:
    if kind is StepKind.CAP_OUTPUT:
        return f"the answer would have {measures.output_tokens} tokens at most"
    if kind is StepKind.SMALLER_MODEL:
        return f"the model {measures.model} would answer"
    return "a prefiller that the request names would not be used"
