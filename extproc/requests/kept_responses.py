"""Responses that a pod keeps: which request needs one, and an id that names the pod.

vLLM and SGLang keep a response, its conversation with it, in the memory of the server that made it, so that only this
one can go on with it, return or cancel it. Both take the response's id from the request (`request_id`), where the
picker writes one that names the pod: any picker then finds the pod by the id alone, and no response has to be read.
"""

import re
from functools import lru_cache
from hashlib import blake2b

PREFIX = "resp_k"  # no id of an engine begins so: they go on in hex
_TAG_BYTES = 6  # a pod's name in an id: two of ten thousand pods have the same one once in five million fleets
RANDOM_BYTES = 10
_TAG = slice(len(PREFIX), len(PREFIX) + 2 * _TAG_BYTES)
UNOWNED_ID = PREFIX + "0" * 2 * (_TAG_BYTES + RANDOM_BYTES)  # stands where the id will come, once a pod is chosen
_UNOWNED = UNOWNED_ID.encode()
_OURS = re.compile(rf"{PREFIX}[0-9a-f]{{{2 * (_TAG_BYTES + RANDOM_BYTES)}}}")
_PATH = re.compile(r"/v1/responses/([^/?]+)(?:/[^/?]*)?$")
_NO_ID = frozenset(("render", "compact", "input_tokens"))  # paths of the API that name no response
LONGEST_ID = 200  # characters; engines' own have some forty


def response_in_path(path: str) -> str | None:
    """Return the response that a path without a query names: to be returned, cancelled or deleted."""
    if "/v1/responses/" not in path:  # as in nearly all
        return None
    found = _PATH.search(path)
    return None if found is None or found[1] in _NO_ID else found[1]


def owned_id(endpoint: str, random: bytes) -> str:
    """Return an id with the pod's name (host:port) in it, as long as UNOWNED_ID. `random`: RANDOM_BYTES."""
    return f"{PREFIX}{tag_of(endpoint)}{random.hex()}"


def with_response_id(body: bytes, response_id: str) -> bytes:
    """Return a body that ends with UNOWNED_ID with the id in its place."""
    at = body.rindex(_UNOWNED)
    return b"".join((body[:at], response_id.encode(), body[at + len(_UNOWNED) :]))


def tag_in(response_id: str) -> str | None:
    """Return the name of the pod that keeps the response; None for an id that is not of our making."""
    return response_id[_TAG] if _OURS.fullmatch(response_id) else None


@lru_cache(maxsize=8192)
def tag_of(endpoint: str) -> str:
    """Return the name of an endpoint (host:port): the same in every picker, and no address."""
    return blake2b(endpoint.encode(), digest_size=_TAG_BYTES, person=b"kvmesh-response").hexdigest()
