"""Tokenizes requests without holding up others: small ones at once, large ones one after another in one thread.

Implements `ports.TokenSource`. What would take too long is given up: the request is then routed on load.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from extproc.adapters.tokenizer import ModelTokenizer
from extproc.core.request import InferenceRequest
from extproc.errors import PromptTooLargeError

# A million tokens take fastokens some 50 ms; only a body made to hurt takes longer than this.
TIMEOUT_SECONDS = 2.0
MAX_WAITING = 8


class PromptTokens:
    """One model's tokenizer behind a bounded thread."""

    def __init__(
        self, tokenizer: ModelTokenizer, *, timeout_seconds: float = TIMEOUT_SECONDS, max_waiting: int = MAX_WAITING
    ) -> None:
        self._tokenizer = tokenizer
        self._timeout_seconds = timeout_seconds
        self._max_waiting = max_waiting
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="large-prompts")
        self._under_way = 0

    async def tokens(self, request: InferenceRequest, *, limit: int) -> Sequence[bytes]:
        """Return the token ids of the first `limit` prompts, as `ModelTokenizer.token_buffers`.

        Raise PromptTokensError, also when a large prompt takes too long or too many of them wait.
        """
        if request.body_bytes <= self._tokenizer.thread_above_bytes:
            return self._tokenizer.token_buffers(request, limit=limit)
        if self._under_way >= self._max_waiting:
            raise PromptTooLargeError(f"{self._under_way} other large prompts wait to be tokenized")
        work = self._thread.submit(self._tokenizer.token_buffers, request, limit=limit)
        self._under_way += 1
        loop = asyncio.get_running_loop()
        # whether or not somebody still waits for it: the thread is busy until it is done
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done))
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            raise PromptTooLargeError(f"tokenizing took longer than {self._timeout_seconds:g} s") from None

    def close(self) -> None:
        """Take nothing new; what is under way ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _done(self) -> None:
        self._under_way -= 1
