"""The plan for a response: made at the pick, carried out when the response comes.

A plan may travel through Envoy (`ext_proc.messages`), as the response may reach a different picker.
"""

from enum import IntEnum, StrEnum

import msgspec

from extproc.answers.promise import AnswerPromise
from extproc.shared.quota import QuotaNote


class Miss(StrEnum):
    """Why a part of a response's plan was not carried out; a metric's label."""

    COMPRESSED = "compressed"  # only plain bytes are read
    NO_MODEL_FIELD = "other-content-type"  # neither JSON nor events: no `model` to rewrite
    NO_USAGE = "no-usage"  # a stream whose client did not request usage (stream_options.include_usage)
    NO_CACHED_TOKENS = "no-cached-tokens"  # vLLM without --enable-prompt-tokens-details
    NOT_DELIVERED = "not-delivered"  # Envoy was asked for the body and sent nothing: allow_mode_override is off
    NO_RESPONSE_FILTER = "no-response-filter"  # duplex bodies without the second filter of envoy/local.yaml
    TOO_LARGE = "too-large"
    SERVED_ELSEWHERE = "served-elsewhere"  # a retry: the prediction was for another pod


class ResponseHandling(IntEnum):
    """How the picker handles a response's body."""

    PASS = 0  # Envoy need not send it
    READ = 1  # read only
    REWRITE = 2  # read and change


class Prediction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The cache hit that the pick expected, in tokens."""

    model: str  # a label: a configured name
    requested: str = ""  # a label: the client's model name, "" if it is not a configured one
    arm: str = ""  # a label: the arm of a split, "" without one
    endpoint: str
    prompt_tokens: int
    matched_tokens: int  # on the chosen endpoint
    best_matched_tokens: int  # on the endpoint with the longest hit
    sent_at: float = 0.0  # unix seconds of the pick, as a different picker may compare them; 0 if unknown


class ResponsePlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The plan for one response."""

    pool: str = ""  # "namespace/name" of the pool that made it; "" for the static one
    requested_model: str | None = None  # restored in the response's `model`; None if nothing was rewritten
    prediction: Prediction | None = None  # None if usage has nothing to be compared with
    sampled: bool = False  # read for usage, whatever its size
    watched: bool = False  # a stream of a pod that may fail after good headers
    read_below_bytes: int = 0  # longest body, other than a stream, to read for usage; 0 reads none
    quota: QuotaNote | None = None  # quota to charge with the generated tokens, whatever the response's size
    promise: AnswerPromise | None = None  # targets to judge the response by, or None

    @property
    def key(self) -> tuple[float, str] | None:
        """What finds the open exchange of a response that is read, on its picker; None for all others."""
        if self.prediction is not None:
            return self.prediction.sent_at, self.prediction.endpoint
        return (self.promise.arrived_at, self.promise.endpoint) if self.promise is not None else None

    @property
    def wants_body(self) -> bool:
        """Whether some response to this request has to be read."""
        return (
            self.requested_model is not None
            or self.quota is not None
            or self.promise is not None
            or self.watched
            or (self.prediction is not None and (self.sampled or self.read_below_bytes > 0))
        )


PASS_PLAN = ResponsePlan()
