"""A picker that picks without looking: `python -m bench.bare_picker --port N --pods HOST:PORT,HOST:PORT,…`.

The product's gRPC server, started as `kvmesh extproc` starts it, with a pick that is known beforehand: no body parsed,
no token, no index, no scrape, no booking. What it costs is the ext_proc exchange alone; the rest is the picking.
`--server grpcio` serves with gRPC's own server.
"""

import argparse
import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import uvloop

from extproc.answers.response_plan import PASS_PLAN, ResponsePlan
from extproc.ext_proc.call import OpenResponse
from extproc.ext_proc.exchange import RequestFacts
from extproc.ext_proc.grpc_server import ExtProcServer, Http2Transport, Transport
from extproc.ext_proc.grpc_tls import server_tls

MAX_BODY_BYTES = 16 << 20


@dataclass(slots=True, kw_only=True)
class _Unbooked:
    """An exchange without a record."""

    endpoints: Sequence[str]
    body: bytes | None = None
    removed_headers: tuple[str, ...] = ()
    set_headers: Mapping[str, str] = field(default_factory=dict)
    response_headers: Mapping[str, str] = field(default_factory=dict)
    plan: ResponsePlan = PASS_PLAN

    def responded(self, *, status: int, served_by: str | None, from_pod: bool, content_type: str) -> None:
        """Learn nothing."""

    def response_missed(self, why: str) -> None:
        """Miss nothing."""

    def finish(self) -> None:
        """Release nothing."""


class PicksInTurn:
    """Each pod first in turn, the others behind it, so that the pods are as busy as with the real picker."""

    def __init__(self, pods: Sequence[str]) -> None:
        orders = [(*pods[i:], *pods[:i]) for i in range(len(pods))]
        self._next = cycle(_Unbooked(endpoints=order[:3]) for order in orders)

    async def pick(self, facts: RequestFacts, body: bytes | None) -> _Unbooked:  # noqa: ARG002  (the point of it)
        """The next one; nothing is read."""
        return next(self._next)

    def response(self, plan: ResponsePlan) -> OpenResponse:
        """No response is asked for."""
        raise AssertionError(f"nobody has made a plan: {plan}")


async def serve(*, host: str, port: int, pods: Sequence[str], server_name: str, tls_cert: Path | None) -> None:
    """Serve until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server = ExtProcServer(picks=PicksInTurn(pods), max_body_bytes=MAX_BODY_BYTES, transport=_transport(server_name))
    await server.start(host=host, port=port, tls=server_tls(str(tls_cert) if tls_cert else None))
    await server.set_serving(True)
    await stop.wait()
    await server.stop(grace_seconds=0)


def _transport(server_name: str) -> type[Transport]:
    if server_name == "own":
        return Http2Transport
    from extproc.ext_proc.grpcio_server import GrpcioTransport  # noqa: PLC0415  (grpc stays out of the own server's process)

    return GrpcioTransport


def main() -> None:
    """Parse the flags and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pods", required=True, help="comma-separated HOST:PORT, as the picker would name them")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--server", choices=("own", "grpcio"), default="own")
    parser.add_argument("--tls-cert", type=Path, help="PEM file with a certificate and its key; default: clear text")
    options = parser.parse_args()
    serving = serve(
        host=options.host,
        port=options.port,
        pods=options.pods.split(","),
        server_name=options.server,
        tls_cert=options.tls_cert,
    )
    (asyncio.run if options.loop == "asyncio" else uvloop.run)(serving)


if __name__ == "__main__":
    main()
