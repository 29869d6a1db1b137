"""`llm_d_guide` between real clients and pods: `python -m bench.routing.guide_router --port P --pods HOST:PORT,...`.

A reverse proxy of the bench's own: its picks are the guide's, what it costs in CPU is not. Prompts are known by their
text, four bytes of which are taken for a token, as the guide does without a tokenizer.
"""

import argparse
import random
from collections.abc import Sequence

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from bench.routing.llm_d_guide import BLOCK_TOKENS, BYTES_A_TOKEN, Guide, GuidePick, GuideSettings, block_keys
from bench.routing.plan import STANDARD


class _Message(msgspec.Struct):
    role: str
    content: str


class _Body(msgspec.Struct):
    messages: list[_Message] = []
    prompt: str = ""


class GuideProxy:
    """Picks for each request, and passes its answer on as it comes."""

    def __init__(self, pods: Sequence[str], *, http: aiohttp.ClientSession) -> None:
        engine = STANDARD.pods
        settings = GuideSettings(
            peak_tokens_per_second=engine.prefill_tokens_per_second,
            cache_blocks=engine.kv_blocks * 16 // BLOCK_TOKENS,
        )
        self._pods, self._http = pods, http
        self._guide = Guide(len(pods), settings, random=random.Random(1).random)

    @property
    def in_flight_tokens(self) -> Sequence[int]:
        """Of each pod."""
        return self._guide.in_flight

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Send the request to the pod that the guide picks."""
        body = await request.read()
        text = prompt_bytes(body)
        pick = self._guide.pick(block_keys(text), tokens=len(text) // BYTES_A_TOKEN)
        awaited = [pick]
        try:
            return await self._pass_on(request, body, pick, awaited)
        finally:
            self._has_begun(awaited)

    async def _pass_on(
        self, request: web.Request, body: bytes, pick: GuidePick, awaited: list[GuidePick]
    ) -> web.StreamResponse:
        url = f"http://{self._pods[pick.pod]}{request.path_qs}"
        async with self._http.post(url, data=body, headers={"content-type": "application/json"}) as answer:
            response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                self._has_begun(awaited)
                await response.write(piece)
            await response.write_eof()
            return response

    def _has_begun(self, awaited: list[GuidePick]) -> None:
        """Nothing of it is in flight from now on; only the first call counts."""
        while awaited:
            self._guide.answered(awaited.pop())


def prompt_bytes(body: bytes) -> bytes:
    """What the blocks are made of."""
    found = msgspec.json.decode(body, type=_Body)
    chat = "".join(f"{message.role}{message.content}" for message in found.messages)
    return (chat + found.prompt).encode()


async def application(pods: Sequence[str]) -> web.Application:
    """The proxy, with a page that says that it is ready."""
    app = web.Application(client_max_size=1 << 24)
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))

    async def close(_: web.Application) -> None:
        await http.close()

    async def ready(_: web.Request) -> web.Response:
        return web.Response()

    app.on_cleanup.append(close)
    app.router.add_get("/readiness", ready)
    app.router.add_post("/{path:.*}", GuideProxy(pods, http=http).serve)
    return app


def main() -> None:
    """Serve until the bench ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pods", required=True)
    options = parser.parse_args()
    uvloop.install()
    web.run_app(application(options.pods.split(",")), host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
