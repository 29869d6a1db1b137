"""What a test can do to the server: refuse, slow down, stand still, show a wrong time."""

import asyncio
from dataclasses import dataclass

from tests.kube_api.calls import Call
from tests.kube_api.errors import ApiError

_REASONS = {429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout"}


@dataclass(slots=True, kw_only=True)
class Failure:
    """Answers the next `times` matching calls with that code."""

    code: int
    times: int
    verb: str | None
    plural: str | None
    retry_after_seconds: int | None

    def fits(self, call: Call) -> bool:
        return self.times > 0 and self.verb in {None, call.verb} and self.plural in {None, call.resource.plural}


class Faults:
    """Switches that the server looks at; all off at first."""

    def __init__(self) -> None:
        self.slow_seconds = 0.0
        self.starting = False  # without its own roles: all but the administrator are refused, at /readyz too
        self.refused_at_start = 0
        self._failures: list[Failure] = []
        self._moving = asyncio.Event()
        self._moving.set()

    def fail(
        self,
        code: int,
        *,
        times: int = 1,
        verb: str | None = None,
        plural: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        """Answer the next calls of that verb on that resource (None: any) with an error."""
        failure = Failure(code=code, times=times, verb=verb, plural=plural, retry_after_seconds=retry_after_seconds)
        self._failures.append(failure)

    def freeze(self) -> None:
        """Accept connections and requests, answer none, send no events."""
        self._moving.clear()

    def thaw(self) -> None:
        self._moving.set()

    async def moving(self) -> None:
        """Wait while the server stands still."""
        await self._moving.wait()

    async def before(self) -> None:
        await self.moving()
        if self.slow_seconds:
            await asyncio.sleep(self.slow_seconds)
            await self.moving()

    def check(self, call: Call) -> None:
        for failure in self._failures:
            if failure.fits(call):
                failure.times -= 1
                details = {"retryAfterSeconds": failure.retry_after_seconds} if failure.retry_after_seconds else None
                reason = _REASONS.get(failure.code, "InternalError")
                raise ApiError(failure.code, reason, f"a fault that the test asked for: {failure.code}", details)
