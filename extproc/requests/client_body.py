"""A request's body as the client sent it, and as it may go to a pod.

KV-transfer fields are removed: a client could make a pod read another's blocks, connect to a host, or crash. vLLM 0.32
reads its connectors' fields at the top level of every text API, in `vllm_xargs`, and in the `extra_args` of
`/inference/v1/generate`; with a wrong type they crash the engine. Their names inside strings stay.
"""

import json
import re

import xxhash

from extproc.errors import BodyTooLargeError, KvmeshError, MalformedRequestError
from extproc.requests.json_body import LONG_BODY_BYTES, UnknownContentEncodingError, decoded_body, may_be_object
from extproc.requests.json_edit import JsonObject

KV_PARAMETERS, ENCODER_PARAMETERS = "kv_transfer_params", "ec_transfer_params"  # vLLM's
BOOTSTRAP_HOST, BOOTSTRAP_PORT, BOOTSTRAP_ROOM = "bootstrap_host", "bootstrap_port", "bootstrap_room"  # SGLang's
PHASE_PARAMETERS = "disaggregated_params"  # TensorRT-LLM's
TRANSFER_FIELDS = frozenset(
    (
        *(KV_PARAMETERS, ENCODER_PARAMETERS, PHASE_PARAMETERS),
        *(BOOTSTRAP_HOST, BOOTSTRAP_PORT, BOOTSTRAP_ROOM),
        *("disagg_prefill_dp_rank", "routed_dp_rank", "data_parallel_rank"),
    )
)
FEW_UNDERSCORES = 32
# the ends of these names, from an underscore on: the search takes 0.5 ns per byte
_NAME_END = re.compile(
    rb'_(?:transfer_params|params(?<=disaggregated_params)|dp_rank|parallel_rank|(?:host|port|room)(?<=bootstrap_....))"'
)
_WITHIN = frozenset(("vllm_xargs", "extra_args", "sampling_params"))
_DEPTH = 2  # sampling_params.extra_args
_ESCAPED = re.compile(rb"\\u00[567]")  # an escaped underscore or lowercase letter: may be part of a name


class FieldsNotRemovedError(MalformedRequestError):
    """The body may have such fields and cannot be edited: no pod gets it."""


def without_transfer_fields(body: bytes) -> bytes:
    """Return a body without transfer fields; the same object if it has none or is not a JSON object.

    Raise FieldsNotRemovedError if there may be some, but the body cannot be searched.
    """
    if not may_be_object(body):
        return body
    plain = body if b"\0" not in body[:4] else _in_utf8(body)
    if plain is None or not (_has_name(plain) or (b"\\" in plain and _ESCAPED.search(plain) is not None)):
        return body
    try:
        left = JsonObject(plain).without(TRANSFER_FIELDS, within=_WITHIN, depth=_DEPTH)
    except (BodyTooLargeError, MalformedRequestError) as error:
        raise FieldsNotRemovedError(f"Fields that no client may set cannot be looked for: {error}") from None
    return body if left == plain else left


def _has_name(body: bytes) -> bool:
    at = -1
    for _ in range(FEW_UNDERSCORES):  # `find` is some twenty times as fast as the search
        if (at := body.find(b"_", at + 1)) < 0:
            return False
        if _NAME_END.match(body, at) is not None:
            return True
    return _NAME_END.search(body, at) is not None


def _in_utf8(body: bytes) -> bytes | None:
    """Return a body in UTF-16 or UTF-32 in UTF-8, converted like Python's parser does; None if undecodable."""
    try:
        return body.decode(json.detect_encoding(body), "surrogatepass").encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None


class ClientBody:
    """A body that is decoded and stripped of transfer fields once, on first use."""

    __slots__ = ("_coding", "_decoded", "_is_cleaned", "_max_bytes", "_plain", "_refusal", "raw")

    def __init__(self, raw: bytes, *, content_encoding: str | None, max_bytes: int) -> None:
        """`content_encoding` is the header's value; `max_bytes` limits the decoded body."""
        self.raw = raw
        self._coding = content_encoding
        self._max_bytes = max_bytes
        self._decoded = None if content_encoding else raw
        self._plain: bytes | None = None
        self._is_cleaned = False
        # not the exception itself: its traceback would hold this body until the next garbage collection
        self._refusal: tuple[type[KvmeshError], str] | None = None

    def digest(self, seed: int) -> int:
        """Return a name of these bytes; without the seed, no client can find others with the same."""
        return xxhash.xxh3_64_intdigest(self.raw, seed=seed)

    @property
    def is_long(self) -> bool:
        """Whether the body is worth a thread. To find out, decode a short coded one up to LONG_BODY_BYTES."""
        if self._decoded is None and self._refusal is None and len(self.raw) <= LONG_BODY_BYTES < self._max_bytes:
            try:
                self._unpack(max_bytes=LONG_BODY_BYTES)
            except BodyTooLargeError:
                return True
        return len(self.raw if self._decoded is None else self._decoded) > LONG_BODY_BYTES

    def plain(self) -> bytes:
        """Return the body without codings and transfer fields; the same object if it has none.

        Raise as `decoded_body` and `without_transfer_fields`.
        """
        if self._plain is None and self._refusal is None:
            try:
                if self._decoded is None:
                    self._unpack(max_bytes=self._max_bytes)
                if self._decoded is not None:
                    self._plain = without_transfer_fields(self._decoded)
                    self._is_cleaned = self._plain is not self._decoded
                    self._decoded = self._plain
            except (BodyTooLargeError, MalformedRequestError) as error:
                self._refusal = type(error), str(error)
        if self._refusal is not None:
            kind, words = self._refusal
            raise kind(words)
        assert self._plain is not None, "it was unpacked, or refused"
        return self._plain

    @property
    def cleaned(self) -> bytes | None:
        """The body without transfer fields, or None if it had none. Valid after a call of `plain`."""
        return self._plain if self._is_cleaned else None

    def _unpack(self, *, max_bytes: int) -> None:
        """Decode the body and keep the result or the refusal; raise BodyTooLargeError above `max_bytes`."""
        try:
            self._decoded = decoded_body(self.raw, content_encoding=self._coding, max_bytes=max_bytes)
        except (UnknownContentEncodingError, MalformedRequestError) as error:
            self._refusal = type(error), str(error)
