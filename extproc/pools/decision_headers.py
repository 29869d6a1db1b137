"""What a client is told of the decision about its request, so that what it reports leads there.

The id is what the access log (`decision_id`), traces (`kvmesh.decision_id`) and the page call the decision. Clients may
send the same request id twice; a decision's is the picker's own.
"""

import random
from collections.abc import Mapping

DECISION_HEADER = "x-kvmesh-decision-id"
PREDICTED_HEADER = "x-kvmesh-predicted-cached-tokens"


def new_decision_id() -> str:
    """Return a name for a decision: 16 hex digits, which no one need be unable to guess."""
    return f"{random.getrandbits(64):016x}"


def decision_headers(decision_id: str, *, predicted_tokens: int | None = None) -> dict[str, str]:
    """Return the headers; `predicted_tokens`: of the prompt, which the pod is expected to hold. None: not known."""
    if predicted_tokens is None:
        return {DECISION_HEADER: decision_id}
    return {DECISION_HEADER: decision_id, PREDICTED_HEADER: str(predicted_tokens)}


def predicted_anew(headers: Mapping[str, str], predicted_tokens: int | None) -> Mapping[str, str]:
    """Return the headers with another prediction, or with none, where they had one."""
    if PREDICTED_HEADER not in headers:
        return headers
    changed = dict(headers)
    if predicted_tokens is None:
        del changed[PREDICTED_HEADER]
    else:
        changed[PREDICTED_HEADER] = str(predicted_tokens)
    return changed
