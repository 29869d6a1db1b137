"""The errors of requests, and the client's answer for each.

The class is the reason: adapters and the use case raise these errors, and `ext_proc.answers` turns them into an OpenAI
error object with the class's status. This module knows no gRPC or HTTP library.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar


class KvmeshError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(KvmeshError):
    """A setting is missing, unknown or contradictory; the message names it and the fix."""


class NoPoliciesError(KvmeshError):
    """Policies were requested, but this picker follows none."""


class Cause(StrEnum):
    """The causes of refusals that are counted apart."""

    SHED = "shed"  # load
    LIMIT = "limit"  # of the prompt, under load
    NO_POD = "no-pod"
    OTHER = "other"


class PluginSkippedError(KvmeshError):
    """A plug-in has no part in this decision; the message names it and says why."""


class PickError(KvmeshError):
    """A request that the picker answers itself instead of routing it.

    `http_status` goes to the client, `reason` into the header `x-kvmesh-reason`, `error_type` and `error_code` into the
    OpenAI error object (https://platform.openai.com/docs/guides/error-codes).
    """

    http_status: ClassVar[int] = 500
    reason: ClassVar[str] = "internal-error"
    error_type: ClassVar[str] = "server_error"
    error_code: ClassVar[str | None] = None
    cause: ClassVar[Cause] = Cause.OTHER
    waited_seconds: float | None = None  # in the queue, or for the first pod; None if it did not wait

    def __init__(
        self,
        message: str,
        *,
        retry_after_seconds: int | None = None,
        headers: Mapping[str, str] | None = None,
        http_status: int | None = None,
    ) -> None:
        """`headers` are extra answer headers (lowercase); `http_status` is the policy's status, if it sets one."""
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds
        self.headers: Mapping[str, str] = headers or {}
        self.status = self.http_status if http_status is None else http_status


class LocalAnswer(PickError):  # noqa: N818 - it is no error
    """A request that the picker answers itself: `document` is the JSON body."""

    http_status = 200
    reason = "answered-here"

    def __init__(self, document: bytes) -> None:
        super().__init__("answered by the picker")
        self.document = document


DEFECT = "kvmesh failed to route this request; its log says why"


class InternalPickError(PickError):
    """A bug in kvmesh: the request is answered, the process keeps running, and the log has the traceback."""


class MalformedRequestError(PickError):
    """The body is not valid for the API."""

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
    """The body arrives in chunks of a few bytes; each costs as much as a large chunk."""

    http_status = 413
    reason = "body-in-pieces"
    error_type = "invalid_request_error"
    error_code = "body_in_pieces"


class BadUpgradeError(PickError):
    """The request asks for a WebSocket in a way that no server grants."""

    http_status = 400
    reason = "bad-upgrade"
    error_type = "invalid_request_error"
    error_code = "bad_upgrade"


class UploadsLimitedError(PickError):
    """Unfinished bodies have reached their memory limit, and this body is among the largest."""

    http_status = 503
    reason = "uploads-limited"
    error_code = "uploads_limited"


class LongBodiesLimitedError(PickError):
    """The body takes long to parse, and its tenant's queue of such bodies is full."""

    http_status = 503
    reason = "long-bodies-limited"
    error_code = "long_bodies_limited"


class UnsupportedEncodingError(PickError):
    """The picker cannot decode the body's content-encoding, and the policy depends on the content."""

    http_status = 415
    reason = "unsupported-encoding"
    error_type = "invalid_request_error"
    error_code = "unsupported_content_encoding"


class UnknownModelError(PickError):
    """The configuration restricts the models, and this one is not listed."""

    http_status = 404
    reason = "unknown-model"
    error_type = "invalid_request_error"
    error_code = "model_not_found"


class UnknownResponseError(PickError):
    """The request needs a response stored on a pod, and that pod is unknown."""

    http_status = 404
    reason = "unknown-response"
    error_type = "invalid_request_error"
    error_code = "response_not_found"


class ResponseGoneError(PickError):
    """The request needs a response stored on a pod that is gone."""

    http_status = 410
    reason = "response-gone"
    error_type = "invalid_request_error"
    error_code = "response_gone"


class UnknownPoolError(PickError):
    """The gateway names a pool that this picker does not know (yet)."""

    http_status = 503
    reason = "unknown-pool"
    error_code = "unknown_pool"


class NoPoolForHostError(PickError):
    """This picker serves several pools, and the request's host belongs to none of them."""

    http_status = 404
    reason = "no-pool-for-host"
    error_type = "invalid_request_error"
    error_code = "no_pool_for_host"


class NoReadyEndpointError(PickError):
    """No endpoint passed the filters."""

    http_status = 503
    reason = "no-ready-endpoint"
    error_code = "no_ready_endpoint"
    cause = Cause.NO_POD


class FirstPodLateError(NoReadyEndpointError):
    """The pool was scaled to zero, and its first pod was not ready within the request's wait."""

    reason = "no-pod-in-time"


class FirstPodNeededError(NoReadyEndpointError):
    """The request would wait for its pool's first pod; raised by `explain` only."""

    reason = "waits-for-first-pod"


class DeadlyRequestError(PickError):
    """A pod died under this request, and it may end another one."""

    http_status = 503
    reason = "ended-a-pod"
    error_code = "ended_a_pod"


class RequestShedError(PickError):
    """The request's class is sheddable, and no endpoint can meet its target now."""

    http_status = 503
    reason = "shed"
    error_code = "overloaded"
    cause = Cause.SHED


class QueueFullShedError(RequestShedError):
    """The queue of the request's class is full."""

    reason = "queue-full"


class QueueTimeoutShedError(RequestShedError):
    """The request waited as long as its class allows."""

    reason = "queue-timeout"


class DisplacedShedError(RequestShedError):
    """A request of higher priority took this one's place in the queue."""

    reason = "displaced"


class StoppingShedError(RequestShedError):
    """The request was still waiting when this picker stopped; another picker can serve it at once."""

    reason = "picker-stopping"


class PromptLimitError(PickError):
    """The prompt is longer than its class allows while the pool is under pressure."""

    http_status = 413
    reason = "prompt-limited"
    error_type = "invalid_request_error"
    error_code = "prompt_limited_under_load"
    cause = Cause.LIMIT


class QuotaExceededError(PickError):
    """The tenant has reached its request quota; `headers` state the limit."""

    http_status = 429
    reason = "quota-exceeded"
    error_type = "requests"
    error_code = "rate_limit_exceeded"


class TokenQuotaExceededError(QuotaExceededError):
    """The tenant has used up its token quota."""

    error_type = "tokens"


class PromptTokensError(KvmeshError):
    """The prompt's tokens cannot be determined here; the request is routed on load and the decision says so."""

    reason: ClassVar[str] = "prompt-tokens"


class TokenizerError(PromptTokensError):
    """The tokenizer's folder or one of its files cannot be used; the message names it and the fix."""

    reason = "tokenizer"


class ChatTemplateError(PromptTokensError):
    """The model's chat template refused these messages."""

    reason = "chat-template"


class TemplateLimitError(ChatTemplateError):
    """The model's chat template takes too much time or memory."""


class PromptTooLargeError(PromptTokensError):
    """Parsing or tokenizing the prompt would delay other requests."""

    reason = "prompt-too-large"


class PrefixIndexError(KvmeshError):
    """The prefix index cannot be used now; the request is routed on load and the decision says so."""

    reason: ClassVar[str] = "prefix-index"


class PrefixIndexUnavailableError(PrefixIndexError):
    """Redis is unreachable or returns errors."""

    reason = "prefix-index-unavailable"


class PrefixIndexTimeoutError(PrefixIndexError):
    """Redis did not answer within the deadline."""

    reason = "prefix-index-timeout"


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error inside a group: users need its message, not the nesting of tasks."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first
