"""What one HTTP/2 connection may demand of the server, with the reason for each number.

Our peer is an Envoy, which carries the requests of unknown clients: a limit that ordinary clients can reach through it
would let them break each other's requests. What only a broken or hostile peer does ends the connection. What clients
can cause (cancelled streams) only retires it: streams in flight go on, new ones go to another connection.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Limits:
    """Limits of one connection."""

    # Each request in flight holds a stream until its last token; an Envoy opens another connection beyond this. It
    # resets all streams of a client that leaves at once, and closes the connection, everybody's, when more than 1,000
    # resets wait to be written (its max_outbound_control_frames): twice as many as there can be. A gRPC library that
    # keeps to one connection has no more requests in flight than this.
    max_concurrent_streams: int = 512
    # Only more than this many are refused: what an Envoy opens before it has read our SETTINGS is no fault of its
    # clients, who would get a 503. Envoy's own default for one connection is 1,024; a stream costs us about 3 KB.
    most_streams: int = 4096
    # gRPC's own hard limit for metadata is 16 KiB, and Envoy sends less than 1 KiB.
    max_header_list_bytes: int = 16_384
    # A block of this many frames would be 128 KiB from an Envoy, which fills them (CVE-2024-27316).
    max_continuations: int = 8
    # How far a peer may run ahead of us, on one stream (a prompt of 125,000 tokens) and on all of them: what of long
    # bodies is on its way goes before everybody's next headers, some 4 ms at 2 MiB.
    stream_window_bytes: int = 1 << 19
    connection_window_bytes: int = 2 << 20
    # Streams that the peer resets before we answered, and those we must reset for a fault of its (CVE-2023-44487 and
    # the "made you reset" of 2025). All streams of a connection ending at once, as when a gateway's clients are cut
    # off, must not exhaust it, twice in a row; 1000 a second are 5-10 % of a core.
    resets: int = 10_000
    resets_per_second: float = 1_000
    # after that, streams opened on the retired connection: a peer that has read our GOAWAY opens none
    streams_after_goaway: int = 1_000
    # Frames that bring nothing: PING, SETTINGS, PRIORITY, empty DATA, WINDOW_UPDATE, frames for streams that have
    # ended. 3 µs each. Envoy allows its peers 10 window updates a DATA frame, so do we; grpc probes the bandwidth with
    # a PING a round trip at most.
    idle_frames: int = 10_000
    idle_frames_per_second: float = 1_000
    idle_frames_per_answer: int = 10
    # What one connection may do before the event loop serves the others (as Envoy's max_requests_per_io_cycle): streams
    # to open, each of them a pick that begins, and the time that its frames may take. A frame takes 3 to 8 µs, however
    # few bytes it brings, and a header block that is packed to hurt 2 ms.
    streams_per_turn: int = 128
    turn_seconds: float = 0.002
    # nginx's client_header_timeout is 60 s for people on slow lines; our peer is in the same cluster.
    preface_seconds: float = 10.0
    # An Envoy whose machine has failed closes nothing: without this its streams and bookings would stay.
    ping_after_seconds: float = 30.0
    ping_timeout_seconds: float = 10.0
    # a peer that lets us write nothing for so long is gone or exhausts our memory; nginx's send_timeout
    stall_seconds: float = 60.0
    check_every_seconds: float = 1.0  # how exactly the times above are kept
    linger_seconds: float = 1.0  # for a peer to read our GOAWAY; closing at once could lose it


class Allowance:
    """A bucket of tokens that fills with time and with work done."""

    __slots__ = ("_capacity", "_left", "_per_second", "_seen_at")

    def __init__(self, *, capacity: float, per_second: float, now: float) -> None:
        self._capacity = self._left = capacity
        self._per_second = per_second
        self._seen_at = now

    def spend(self, amount: float, *, now: float) -> bool:
        """Take tokens; return False when there are not enough."""
        self._left = min(self._capacity, self._left + (now - self._seen_at) * self._per_second) - amount
        self._seen_at = now
        return self._left >= 0

    def earn(self, amount: float) -> None:
        """Put tokens back for work done. They are capped when some are spent."""
        self._left += amount
