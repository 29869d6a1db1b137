"""The errors of the indexer and of the index, one class each; `reason` is the metric label and is logged."""

from typing import ClassVar


class KvIndexerError(Exception):
    """Base of every error this package raises on purpose."""

    reason: ClassVar[str] = "internal-error"


class DecodeError(KvIndexerError):
    """A payload is no event batch at all; a single bad event never raises this."""

    reason = "undecodable-batch"


class IndexUnavailableError(KvIndexerError):
    """Redis is unreachable, loading, full, read-only, too slow or holds foreign data; the message says which."""

    reason = "index-unavailable"


class IndexRefusesError(IndexUnavailableError):
    """Redis refuses such requests from everyone: it is loading, full, read-only, …"""


class StreamForgottenError(KvIndexerError):
    """Redis no longer knows a stream that we follow: it was emptied, or the endpoint was dropped."""

    reason = "stream-forgotten"


class LeaseLostError(KvIndexerError):
    """Another indexer follows this stream now, or our lease on it has run out: nothing may be written any more."""

    reason = "lease-lost"


class FeedLostError(KvIndexerError):
    """A pod's event socket cannot be reached or has gone away."""

    reason = "unreachable"


class PodRefusesError(FeedLostError):
    """A pod refuses us: it wants a key, or another one; the message names the flag to give."""

    reason = "pod-refuses"


class UnknownModelError(FeedLostError):
    """A pod of a pool that declares no model does not say which one it serves."""

    reason = "unknown-model"


class UnstablePublisherError(KvIndexerError):
    """A publisher contradicts itself too often; the session ends and is retried later."""

    reason = "unstable-publisher"

    def __init__(self, message: str, *, wait_seconds: float) -> None:
        super().__init__(f"{message}; trying again in {wait_seconds:.1f} s")
        self.wait_seconds = wait_seconds


class NoEventSourceError(KvIndexerError):
    """A pod publishes no events, or does not say where, and no source is configured for it."""

    reason = "no-event-source"


class SettingError(KvIndexerError):
    """A setting is malformed; the message names it and describes a valid one."""

    reason = "bad-setting"


class RedisUrlError(SettingError, ValueError):
    """A Redis address is malformed; the message names it without its password and shows a valid one."""


class ListenError(KvIndexerError):
    """The admin pages cannot be opened at their address; the message says why."""

    reason = "cannot-listen"


class UnknownSourceError(KvIndexerError):
    """A command names a source that the index does not have; the message lists the existing ones."""

    reason = "unknown-source"
