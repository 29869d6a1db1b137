"""Limits on the demands of one HTTP/2 connection, with the reason for each number.

Our peer is an Envoy, which carries the requests of unknown clients: a limit that ordinary clients can reach through it
would let them break each other's requests. Behaviour of only a broken or hostile peer ends the connection. Behaviour
that clients can cause (cancelled streams) only retires it: open streams go on, new ones go to another connection.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Limits:
    """Limits of one connection."""

    # Each request in flight holds a stream until its last token; beyond this Envoy opens another connection. When a
    # client leaves, Envoy resets all its streams at once, and closes the connection for everyone if more than 1,000
    # resets wait to be written (its max_outbound_control_frames): twice as many as this allows. A gRPC library with a
    # single connection can have no more requests in flight than this.
    max_concurrent_streams: int = 512
    # Only streams beyond this are refused. Streams that Envoy opens before it has read our SETTINGS are no fault of its
    # clients, who would get a 503. Envoy's own default per connection is 1,024; a stream costs us about 3 KB.
    most_streams: int = 4096
    # gRPC's own hard limit for metadata is 16 KiB, and Envoy sends less than 1 KiB.
    max_header_list_bytes: int = 16_384
    # Envoy fills its frames, so this many would be a block of 128 KiB (CVE-2024-27316).
    max_continuations: int = 8
    # How far a peer may run ahead of us on one stream (a prompt of 125,000 tokens) and on all together. Long bodies in
    # flight delay the next headers of all other streams: by about 4 ms at 2 MiB.
    stream_window_bytes: int = 1 << 19
    connection_window_bytes: int = 2 << 20
    # Streams reset by the peer before our answer, and streams that we must reset for the peer's errors (CVE-2023-44487
    # and "MadeYouReset" of 2025). Even if all streams of a connection end at once, as when a gateway's clients are cut
    # off, and then again, this must suffice. 1000 per second cost 5-10 % of a core.
    resets: int = 10_000
    resets_per_second: float = 1_000
    # streams opened on a retired connection: a peer that has read our GOAWAY opens none
    streams_after_goaway: int = 1_000
    # Frames without content for us: PING, SETTINGS, PRIORITY, empty DATA, WINDOW_UPDATE, frames for ended streams. 3 µs
    # each. Like Envoy we allow 10 window updates per DATA frame; grpc probes the bandwidth with at most one PING per
    # round trip.
    idle_frames: int = 10_000
    idle_frames_per_second: float = 1_000
    idle_frames_per_answer: int = 10
    # One connection's share of a turn before the event loop serves the others, like Envoy's max_requests_per_io_cycle:
    # new streams, each starting a pick, and the time for its frames. Even the smallest frame takes 3 to 8 µs, and a
    # maliciously packed header block 2 ms.
    streams_per_turn: int = 128
    turn_seconds: float = 0.002
    # nginx's client_header_timeout of 60 s is for people on slow lines; our peer is in the same cluster.
    preface_seconds: float = 10.0
    # An Envoy on a failed machine closes nothing: without this its streams and bookings would stay.
    ping_after_seconds: float = 30.0
    ping_timeout_seconds: float = 10.0
    # a peer that accepts no bytes for this long is gone or fills our memory; nginx's send_timeout
    stall_seconds: float = 60.0
    check_every_seconds: float = 1.0  # precision of the times above
    linger_seconds: float = 1.0  # for a peer to read our GOAWAY; an immediate close could lose it


class Allowance:
    """A token bucket that refills with time and with work done."""

    __slots__ = ("_capacity", "_left", "_per_second", "_seen_at")

    def __init__(self, *, capacity: float, per_second: float, now: float) -> None:
        self._capacity = self._left = capacity
        self._per_second = per_second
        self._seen_at = now

    def spend(self, amount: float, *, now: float) -> bool:
        """Take tokens; return False if there were too few."""
        self._left = min(self._capacity, self._left + (now - self._seen_at) * self._per_second) - amount
        self._seen_at = now
        return self._left >= 0

    def earn(self, amount: float) -> None:
        """Add tokens for work done. The capacity is applied at the next `spend`."""
        self._left += amount
