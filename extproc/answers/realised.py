"""Predicted versus real cache hits, per model: the pick's prediction against the cached tokens in the pod's usage.

Each usage object read gives one comparison. Pure; time is an argument.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from extproc.answers.response_plan import Prediction

OVERPREDICTED = "cache-overpredicted"
UNDERPREDICTED = "cache-underpredicted"
OTHER_TOKENS = "other-prompt-tokens"

REMEDIES: Mapping[str, str] = {
    OVERPREDICTED: "the index holds blocks that the pods have lost: see `kvmesh index verify` and events that were "
    "missed",
    UNDERPREDICTED: "the picker asks for other blocks than the pods store, or their events do not arrive: compare the "
    "tokenizer folder, chat template and block size with the pod's (`kvmesh explain`, the pod's POST /tokenize)",
    OTHER_TOKENS: "compare the tokenizer folder, the chat template and its default kwargs with the pod's "
    "(`kvmesh doctor`)",
}


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage object of a response, in tokens; None if the pod does not report them."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # vLLM needs --enable-prompt-tokens-details
    output_tokens: int | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One request's prediction and outcome; tokens."""

    model: str
    arm: str
    endpoint: str
    prompt_tokens: int  # the pod's count
    predicted_tokens: int
    realised_tokens: int
    error_tokens: int  # realised - predicted: negative if the pod held less than expected
    regret_tokens: int  # best predicted hit - the chosen endpoint's: given up for load or policy
    requested: str = ""  # the client's model name, "" if it is not a configured one
    generated_tokens: int = 0
    first_token_seconds: float | None = None  # from the pick to the first bytes of a stream's body
    trace_id: str = ""  # of the request, "" if it is not traced
    prompt_error_tokens: int  # the pod's count - ours: not 0 if we tokenize differently; 0 if our count is unknown


def compare(prediction: Prediction, usage: Usage, *, first_token_seconds: float | None = None) -> Comparison | None:
    """Compare prediction and usage, or return None if the pod does not report its cached tokens."""
    if usage.prompt_tokens is None or usage.cached_tokens is None:
        return None
    return Comparison(
        model=prediction.model,
        arm=prediction.arm,
        endpoint=prediction.endpoint,
        prompt_tokens=usage.prompt_tokens,
        predicted_tokens=prediction.matched_tokens,
        realised_tokens=usage.cached_tokens,
        error_tokens=usage.cached_tokens - prediction.matched_tokens,
        regret_tokens=max(prediction.best_matched_tokens - prediction.matched_tokens, 0),
        requested=prediction.requested,
        generated_tokens=usage.output_tokens or 0,
        first_token_seconds=first_token_seconds,
        prompt_error_tokens=usage.prompt_tokens - prediction.prompt_tokens if prediction.prompt_tokens else 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftPolicy:
    """Thresholds for a finding."""

    window_requests: int = 200  # last requests of a model in the window
    window_seconds: float = 900.0  # age limit of the window's requests
    least_requests: int = 20
    least_tokens: int = 4096  # wrongly predicted tokens in the window
    error_share: float = 0.25  # wrong tokens / max(predicted, realised)
    prompt_error_share: float = 0.2  # share of requests whose prompt length differs from the pod's


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftFinding:
    """A model with wrong predictions."""

    model: str
    reason: str
    message: str
    since: float  # monotonic seconds


@dataclass(slots=True)
class _Window:
    """Running sums over a model's last comparisons: a request costs no pass over the window."""

    taken: deque[tuple[float, Comparison]] = field(default_factory=deque)
    predicted: int = 0  # tokens, like the next three
    realised: int = 0
    over: int = 0  # predicted and not found
    under: int = 0  # found and not predicted
    other_prompts: int = 0  # requests whose prompt length differs from the pod's

    def change(self, comparison: Comparison, *, by: int) -> None:
        error = comparison.error_tokens
        self.predicted += by * comparison.predicted_tokens
        self.realised += by * comparison.realised_tokens
        self.over += by * max(-error, 0)
        self.under += by * max(error, 0)
        self.other_prompts += by * (comparison.prompt_error_tokens != 0)


class RealisedWatch:
    """A sliding window and its findings per model; bounded, as models are configured names."""

    def __init__(self, policy: DriftPolicy | None = None) -> None:
        self._policy = policy or DriftPolicy()
        self.findings: dict[str, DriftFinding] = {}  # by model; one that persists keeps its `since`
        self._windows: dict[str, _Window] = {}

    def add(self, comparison: Comparison, *, now: float) -> None:
        """Add one comparison at `now` (monotonic seconds) and judge the model's window."""
        window = self._windows.setdefault(comparison.model, _Window())
        window.taken.append((now, comparison))
        window.change(comparison, by=1)
        self._forget_old(window, now=now)
        self._judge(comparison.model, window, now=now)

    def expire(self, *, now: float) -> None:
        """Drop old comparisons and the findings based on them: a model without requests has no finding."""
        for model, window in self._windows.items():
            self._forget_old(window, now=now)
            self._judge(model, window, now=now)

    def _forget_old(self, window: _Window, *, now: float) -> None:
        taken, policy = window.taken, self._policy
        while taken and (len(taken) > policy.window_requests or now - taken[0][0] > policy.window_seconds):
            window.change(taken.popleft()[1], by=-1)

    def _judge(self, model: str, window: _Window, *, now: float) -> None:
        found = self._finding(window)
        before = self.findings.get(model)
        if found is None:
            self.findings.pop(model, None)
            return
        reason, facts = found
        since = before.since if before is not None and before.reason == reason else now
        message = f"{model}: {facts}: {REMEDIES[reason]}"
        self.findings[model] = DriftFinding(model=model, reason=reason, message=message, since=since)

    def _finding(self, window: _Window) -> tuple[str, str] | None:
        policy, requests = self._policy, len(window.taken)
        if requests < policy.least_requests:
            return None
        facts = (
            f"of {requests} responses, {window.predicted} cached tokens were predicted and {window.realised} reported"
        )
        if window.other_prompts >= policy.prompt_error_share * requests:
            return OTHER_TOKENS, f"{window.other_prompts} of {requests} prompts are longer or shorter than counted here"
        most = max(window.predicted, window.realised)
        for reason, wrong in ((OVERPREDICTED, window.over), (UNDERPREDICTED, window.under)):
            if wrong >= policy.least_tokens and wrong >= policy.error_share * most:
                return reason, facts
        return None
