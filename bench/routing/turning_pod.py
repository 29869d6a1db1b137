"""A simulated pod that turns bad when it is told to. Called by `quick_pod`.

Its other pages stay as they are, so that routers see an idle pod.
"""

from aiohttp import web

from bench.routing.script import Way
from operate.load.request_body import CHAT_PATH, COMPLETION_PATH
from podsim.api import PodApi

TURN_PATH = "/turn_bad"


class TurningApi(PodApi):
    """podsim's API; `POST /turn_bad?way=WAY` makes it bad until the process ends."""

    _way: Way | None = None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, or fail it."""
        if request.path == TURN_PATH:
            self._way = Way(request.query["way"])
            return web.Response()
        if self._way is None or request.path not in (CHAT_PATH, COMPLETION_PATH):
            return await super().handle(request)
        await request.read()
        if self._way is Way.REFUSES:
            return web.Response(text="local_rate_limited", status=429)  # as a proxy beside the pod
        return await _break_off(request)


async def _break_off(request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    assert request.transport is not None
    request.transport.abort()
    return response
