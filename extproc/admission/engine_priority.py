"""A class's priority as vLLM's scheduler takes it; for pods that run with `--scheduling-policy priority`.

Called by `output_cap.body_changes` where the policy says `engine_priority`.
"""

from collections.abc import Mapping

from extproc.requests.json_edit import JsonObject
from extproc.requests.request import ApiKind, InferenceRequest

FIELD = "priority"
# all of vLLM 0.32's APIs that generate or pool, but Anthropic's, whose fields are not passed on
_APIS = frozenset(
    (
        *(ApiKind.CHAT_COMPLETIONS, ApiKind.COMPLETIONS, ApiKind.RESPONSES, ApiKind.GENERATE),
        *(ApiKind.EMBEDDINGS, ApiKind.POOLING, ApiKind.SCORE, ApiKind.RERANK),
    )
)
_LEAST, _MOST = -(2**63), 2**63 - 1  # outside them vLLM answers 400


def engine_priority(request: InferenceRequest, plain: JsonObject, *, priority: int) -> Mapping[str, bytes]:
    """Return the field (name -> JSON) for a class's priority, over what the client wrote; none where nothing changes.

    vLLM serves the lower number first, and a class with the higher one is more important: the sign turns. On a path
    that we do not know only what the client wrote is replaced. Raise MalformedRequestError for an object that may have
    the field and cannot be searched: vLLM may be able to.
    """
    is_known = request.api in _APIS
    if not is_known and request.api is not ApiKind.OTHER:
        return {}
    # 0 is vLLM's own: the body is copied only where the client may have written another one
    if (priority == 0 or not is_known) and not plain.may_name(FIELD):
        return {}
    if not request.prompts and not request.has_media and not plain.may_be_object:
        return {}  # another application's body on a path like /score
    if not is_known and not plain.values(frozenset((FIELD,))):
        return {}
    return {FIELD: b"%d" % min(max(-priority, _LEAST), _MOST)}
