"""What can go wrong for a request, and what the client is told.

The class is the reason: adapters and the use case raise these, `ext_proc.answers` turns them into an OpenAI error
object with the class's status. Nothing here knows gRPC or HTTP libraries.
"""

from collections.abc import Mapping
from typing import ClassVar


class KvmeshError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(KvmeshError):
    """A setting is missing, unknown or contradictory; the message names it and says what to do."""


class NoPoliciesError(KvmeshError):
    """Somebody asks for policies where none are followed."""


class PickError(KvmeshError):
    """A request that the picker answers itself instead of routing it.

    `http_status` goes to the client, `reason` into the header `x-kvmesh-reason`, `error_type` and `error_code` into the
    OpenAI error object (https://platform.openai.com/docs/guides/error-codes).
    """

    http_status: ClassVar[int] = 500
    reason: ClassVar[str] = "internal-error"
    error_type: ClassVar[str] = "server_error"
    error_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        retry_after_seconds: int | None = None,
        headers: Mapping[str, str] | None = None,
        http_status: int | None = None,
    ) -> None:
        """Take further `headers` of the answer (lowercase), and a status where the policy names another one."""
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds
        self.headers: Mapping[str, str] = headers or {}
        self.status = self.http_status if http_status is None else http_status


DEFECT = "kvmesh failed to route this request; its log says why"


class InternalPickError(PickError):
    """A defect of ours: the request is answered, the process lives on, the log has the traceback."""


class MalformedRequestError(PickError):
    """The body is not what the API takes."""

    http_status = 400
    reason = "malformed-json"
    error_type = "invalid_request_error"
    error_code = "malformed_request"


class BodyTooLargeError(PickError):
    """The body is larger than the configured limit."""

    http_status = 413
    reason = "body-too-large"
    error_type = "invalid_request_error"
    error_code = "body_too_large"


class BodyInPiecesError(PickError):
    """The body comes in pieces of a few bytes, each of which costs as much as a large one."""

    http_status = 413
    reason = "body-in-pieces"
    error_type = "invalid_request_error"
    error_code = "body_in_pieces"


class UploadsLimitedError(PickError):
    """The bodies that are on their way hold as much memory as they may, and this one is among the largest."""

    http_status = 503
    reason = "uploads-limited"
    error_code = "uploads_limited"


class LongBodiesLimitedError(PickError):
    """The body takes long to read, and as many of its tenant's wait to be read as may."""

    http_status = 503
    reason = "long-bodies-limited"
    error_code = "long_bodies_limited"


class UnsupportedEncodingError(PickError):
    """The body has a content-encoding that the picker does not read, and the policy depends on what is in it."""

    http_status = 415
    reason = "unsupported-encoding"
    error_type = "invalid_request_error"
    error_code = "unsupported_content_encoding"


class UnknownModelError(PickError):
    """The configuration lists the models, and this is none of them."""

    http_status = 404
    reason = "unknown-model"
    error_type = "invalid_request_error"
    error_code = "model_not_found"


class UnknownResponseError(PickError):
    """The request needs a response that a pod keeps, and which pod that may be is not known."""

    http_status = 404
    reason = "unknown-response"
    error_type = "invalid_request_error"
    error_code = "response_not_found"


class ResponseGoneError(PickError):
    """The request needs a response whose pod is gone."""

    http_status = 410
    reason = "response-gone"
    error_type = "invalid_request_error"
    error_code = "response_gone"


class UnknownPoolError(PickError):
    """The gateway names a pool that this picker does not know, or not yet."""

    http_status = 503
    reason = "unknown-pool"
    error_code = "unknown_pool"


class NoPoolForHostError(PickError):
    """Several pools are served here, and the request's host belongs to none of them."""

    http_status = 404
    reason = "no-pool-for-host"
    error_type = "invalid_request_error"
    error_code = "no_pool_for_host"


class NoReadyEndpointError(PickError):
    """No endpoint passed the filters."""

    http_status = 503
    reason = "no-ready-endpoint"
    error_type = "server_error"
    error_code = "no_ready_endpoint"


class FirstPodLateError(NoReadyEndpointError):
    """The pool was scaled to zero, and its first pod has not come while the request was waiting."""

    reason = "no-pod-in-time"
    waited_seconds: float | None = None  # for the pod


class FirstPodNeededError(NoReadyEndpointError):
    """The request would wait for its pool's first pod; for explanations."""

    reason = "waits-for-first-pod"


class RequestShedError(PickError):
    """The request's class may be refused, and no endpoint can meet its target now."""

    http_status = 503
    reason = "shed"
    error_type = "server_error"
    error_code = "overloaded"
    waited_seconds: float | None = None  # in the queue; None: it did not wait


class QueueFullShedError(RequestShedError):
    """As many requests of the class wait as may."""

    reason = "queue-full"


class QueueTimeoutShedError(RequestShedError):
    """The request has waited as long as its class may."""

    reason = "queue-timeout"


class DisplacedShedError(RequestShedError):
    """A request of a higher priority took the place in the queue."""

    reason = "displaced"


class StoppingShedError(RequestShedError):
    """This picker stops, and the request was still waiting; another picker takes it at once."""

    reason = "picker-stopping"


class PromptLimitError(PickError):
    """The prompt is longer than its class may send while the pool is under pressure."""

    http_status = 413
    reason = "prompt-limited"
    error_type = "invalid_request_error"
    error_code = "prompt_limited_under_load"


class QuotaExceededError(PickError):
    """The tenant has as many requests as it may; `headers` say how many that is."""

    http_status = 429
    reason = "quota-exceeded"
    error_type = "requests"
    error_code = "rate_limit_exceeded"


class TokenQuotaExceededError(QuotaExceededError):
    """The tenant has used as many tokens as it may."""

    error_type = "tokens"


class PromptTokensError(KvmeshError):
    """The prompt's tokens cannot be known here; the request is routed on load and the decision says so."""

    reason: ClassVar[str] = "prompt-tokens"


class TokenizerError(PromptTokensError):
    """The tokenizer's folder or one of its files cannot be used; the message names it and says what to do."""

    reason = "tokenizer"


class ChatTemplateError(PromptTokensError):
    """The model's chat template refused these messages."""

    reason = "chat-template"


class PromptTooLargeError(PromptTokensError):
    """Reading or tokenizing the prompt would hold up other requests."""

    reason = "prompt-too-large"


class PrefixIndexError(KvmeshError):
    """The prefix index cannot be used now; the request is routed on load and the decision says so."""

    reason: ClassVar[str] = "prefix-index"


class PrefixIndexUnavailableError(PrefixIndexError):
    """Redis is away or refuses."""

    reason = "prefix-index-unavailable"


class PrefixIndexTimeoutError(PrefixIndexError):
    """Redis did not answer within the deadline."""

    reason = "prefix-index-timeout"


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return one of the errors itself: people are told what to mend, not how tasks were nested."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
