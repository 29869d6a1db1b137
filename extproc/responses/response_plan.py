"""What is to be done with a response: decided with the pick, carried out when the response comes.

A plan may travel through Envoy (`ext_proc.messages`), because the response may reach another picker.
"""

from enum import IntEnum

import msgspec

from extproc.quotas.quota import QuotaNote
from extproc.slo.promise import AnswerPromise


class ResponseHandling(IntEnum):
    """What the picker needs of a response's body."""

    PASS = 0  # nothing: Envoy need not send it
    READ = 1  # its bytes, which pass unchanged
    REWRITE = 2  # its bytes, some of which change


class Prediction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the pick expected the pod to find in its cache; tokens."""

    model: str  # a label: a configured name
    requested: str = ""  # a label: the configured name that the client asked for, "" where it is none
    arm: str = ""  # a label: the arm of a split, "" without one
    endpoint: str
    prompt_tokens: int
    matched_tokens: int  # on the chosen endpoint
    best_matched_tokens: int  # on the endpoint that holds most
    sent_at: float = 0.0  # unix seconds of the pick: another picker's clock may read it; 0: not known


class ResponsePlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to do with one response."""

    pool: str = ""  # "namespace/name" of the pool that made it; "": the static one
    requested_model: str | None = None  # goes back into the response's `model`; None: nothing was rewritten
    prediction: Prediction | None = None  # None: nothing to compare usage with
    sampled: bool = False  # read for usage whatever its size
    read_below_bytes: int = 0  # a response that is no stream and at most so long is read for usage; 0: none
    quota: QuotaNote | None = None  # whose generated tokens are to be counted, whatever the response's size
    promise: AnswerPromise | None = None  # what the response is judged by; None: it is not judged

    @property
    def wants_body(self) -> bool:
        """Whether any response could be read."""
        return (
            self.requested_model is not None
            or self.quota is not None
            or self.promise is not None
            or (self.prediction is not None and (self.sampled or self.read_below_bytes > 0))
        )


PASS_PLAN = ResponsePlan()
