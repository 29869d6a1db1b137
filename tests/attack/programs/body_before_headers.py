"""A peer of the picker's own port that sends a body where the headers should be, on one stream after another."""

import contextlib

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from extproc.http2 import frames as http2
from tests.attack.http2_client import raw_client
from tests.attack.target import Target

PATH = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"


async def attack(target: Target) -> None:
    """Send as fast as the picker reads."""
    target.begin()
    message = ProcessingRequest()
    message.request_body.body = b"{}"
    message.request_body.end_of_stream = True
    content = message.SerializeToString()
    while True:
        async with raw_client(*target.picker_address()) as client:
            with contextlib.suppress(ConnectionError):
                while True:
                    stream, head = client.open(
                        target.picker, path=PATH, content_type=b"application/grpc", te=b"trailers"
                    )
                    data = b"\0" + len(content).to_bytes(4, "big") + content
                    await client.send(head + http2.frame(http2.DATA, http2.END_STREAM, stream, data))
                    target.done += 1
