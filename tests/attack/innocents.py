"""Users who have nothing to do with an attack: how many of their requests fail, and how long the others take."""

import asyncio
import itertools
import math
import random
import time
from dataclasses import dataclass, field

import aiohttp

REQUESTS_PER_SECOND = 40.0
SYSTEMS = 8  # long beginnings that the users share
SYSTEM_WORDS = 150
REQUEST_SECONDS = 20.0
WORDS = ("the", "mesh", "holds", "a", "block", "of", "tokens", "for", "every", "pod", "and", "user")


@dataclass(kw_only=True)
class Felt:
    """What the users of one period felt."""

    seconds: list[float] = field(default_factory=list)  # of each that was answered well
    failures: list[str] = field(default_factory=list)

    @property
    def p50(self) -> float:
        """Seconds."""
        return self._quantile(0.5)

    @property
    def p99(self) -> float:
        """Seconds."""
        return self._quantile(0.99)

    def _quantile(self, share: float) -> float:
        assert self.seconds, f"nobody was answered: {self.failures[:3]}"
        return sorted(self.seconds)[math.ceil(share * len(self.seconds)) - 1]

    def __str__(self) -> str:
        if not self.seconds:
            return f"0 answered, {len(self.failures)} failed"
        return (
            f"{len(self.seconds)} answered, {len(self.failures)} failed, "
            f"p50 {1e3 * self.p50:.0f} ms, p99 {1e3 * self.p99:.0f} ms"
        )


class Innocents:
    """Sends short chats at a steady rate, whatever becomes of those before (an open loop)."""

    def __init__(self, *, gateway: str, http: aiohttp.ClientSession, seed: int = 1) -> None:
        chooser = random.Random(seed)
        self._gateway = gateway
        self._http = http
        self._systems = [" ".join(chooser.choices(WORDS, k=SYSTEM_WORDS)) for _ in range(SYSTEMS)]
        self._numbers = itertools.count()

    async def during(self, seconds: float) -> Felt:
        """Send for so long and wait for all answers."""
        felt = Felt()
        begun = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for i in range(int(seconds * REQUESTS_PER_SECOND)):
                await asyncio.sleep(begun + i / REQUESTS_PER_SECOND - time.monotonic())
                tasks.create_task(self._one(felt))
        return felt

    async def _one(self, felt: Felt) -> None:
        number = next(self._numbers)
        body = {
            "model": "tiny",
            "max_tokens": 1,
            "messages": [
                {"role": "system", "content": self._systems[number % SYSTEMS]},
                {"role": "user", "content": f"question {number}"},
            ],
        }
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                async with self._http.post(f"{self._gateway}/v1/chat/completions", json=body) as answer:
                    text = await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            felt.failures.append(repr(error))
            return
        if answer.status == 200:
            felt.seconds.append(time.perf_counter() - begun)
        else:
            felt.failures.append(f"{answer.status}: {text[:200]}")
