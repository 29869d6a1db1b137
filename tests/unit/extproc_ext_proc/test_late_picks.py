"""A pick may be made in the moment in which its stream ends: its cancellation comes too late, and it is released."""

import asyncio
from contextlib import suppress

from extproc.ext_proc.call import ExtProcCalls
from extproc.ext_proc.exchange import RequestFacts
from tests.unit.extproc_ext_proc.test_response_let_go import FakeExchange, FakePicks, FakeStream, request_headers


class LatePicks(FakePicks):
    async def pick(self, facts: RequestFacts, body: bytes | None) -> FakeExchange:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return self.exchange


async def test_a_pick_that_is_made_although_its_stream_has_ended_is_released() -> None:
    picks, stream = LatePicks(), FakeStream()
    calls = ExtProcCalls(picks=picks, max_body_bytes=1000)
    stream.call = call = calls.serve(stream)  # type: ignore[arg-type]
    call.message(request_headers())
    await asyncio.sleep(0)  # it waits
    stream.finish()
    assert picks.exchange.finishes == 0
    await asyncio.gather(*calls.tasks)
    assert picks.exchange.finishes == 1
