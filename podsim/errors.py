"""The errors of podsim, in vLLM's wording. The server turns `RequestRefusedError` into the OpenAI error object."""

# why a pod refuses: labels of vllm:admission_rejections
MAX_QUEUED_REQUESTS, MAX_QUEUED_TOKENS = "max_num_queued_reqs", "max_num_queued_tokens"


class PodsimError(Exception):
    """Anything podsim raises on purpose."""

    reason = "podsim"


class SettingsError(PodsimError):
    """The settings contradict each other, or name a folder that holds no tokenizer."""

    reason = "settings"


class PortInUseError(PodsimError):
    """A port that was asked for cannot be bound."""

    reason = "port-in-use"


class PeerError(PodsimError):
    """Another pod does not answer a KV transfer message, or refuses it."""

    reason = "peer"


class RequestRefusedError(PodsimError):
    """A request that vLLM answers with an error object.

    `error_type` is "BadRequestError" if vLLM's own checks refuse the request, "Bad Request" if its request models do.
    """

    reason = "request-refused"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        http_status: int = 400,
        error_type: str = "BadRequestError",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.http_status = http_status
        self.error_type = error_type


class UnknownModelError(RequestRefusedError):
    """The request names a model that the pod does not serve."""

    reason = "unknown-model"

    def __init__(self, model: str, *, served: str) -> None:
        super().__init__(
            f"The model `{model}` does not exist. Valid aliases: {served}.",
            param="model",
            http_status=404,
            error_type="NotFoundError",
        )


class ScaleOutDisabledError(RequestRefusedError):
    """A /render request to a pod that was started without --enable-scale-out."""

    reason = "scale-out-disabled"

    def __init__(self) -> None:
        super().__init__(
            "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
            http_status=403,
            error_type="PermissionDeniedError",
        )


class GenerationFailedError(RequestRefusedError):
    """The engine gave up a request because its prompt's KV did not arrive."""

    reason = "generation-failed"

    def __init__(self, message: str = "Internal server error") -> None:
        super().__init__(message, http_status=500, error_type="InternalServerError")


class EngineDeadError(GenerationFailedError):
    """A real engine would have crashed here, and all its requests would get this error."""

    reason = "engine-dead"

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class PodFullError(RequestRefusedError):
    """A queue limit of the pod is reached; `reason` is also the label in vllm:admission_rejections."""

    def __init__(self, reason: str) -> None:
        what = {
            MAX_QUEUED_REQUESTS: "is currently busy and cannot accept new requests",
            MAX_QUEUED_TOKENS: "has reached its prefill token backlog limit",
        }[reason]
        super().__init__(
            f"The engine {what}. Please try again later or on a different instance.",
            http_status=503,
            error_type="Service Unavailable",
        )
        self.reason = reason


class MalformedRequestError(RequestRefusedError):
    """The body is not JSON, or a field has the wrong type; `location` is the dotted path, such as "body.prompt"."""

    reason = "malformed-request"

    def __init__(self, detail: str, *, location: str = "body", kind: str = "value_error") -> None:
        super().__init__(
            f"1 validation error:\n  {{'type': '{kind}', 'loc': '{location}', 'msg': '{detail}'}}",
            param=location,
            error_type="Bad Request",
        )
