"""One thread for what would hold up other requests: reading a long body, tokenizing a long prompt.

Only one such work is under way at a time. Tenants take turns, so that a tenant who sends nothing but long bodies waits
for itself; and who waits in vain is told so at once. Python's lock is held while JSON is read, so work that was long is
followed by a pause: the other requests have half of the time at least.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import thread_time
from typing import Any, NamedTuple, TypeVar

from extproc.errors import KvmeshError

_T = TypeVar("_T")

MOST_BYTES = 256 << 20  # of the bodies that wait
MOST_BYTES_OF_TENANT = 64 << 20
MOST_OF_TENANT = 64
SHORT_WORK_SECONDS = 0.005  # of CPU; what takes no longer is followed by no pause
LONGEST_PAUSE_SECONDS = 0.1


class LongWorkError(KvmeshError):
    """Too much of it waits, or it takes too long."""


class _Job(NamedTuple):
    """One work that waits or is under way."""

    work: Callable[[], Any]
    size: int
    result: asyncio.Future[Any]


class LongWork:
    """The thread, and the works that wait for it by tenant. Used by one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[_Job]] = {}  # tenant -> its works; the first tenant is the next one
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-work")
        self._is_busy = False  # or in a pause
        self.done = 0  # works ever

    async def run(
        self,
        work: Callable[[], _T],
        *,
        size: int,
        tenant: str = "",
        most_waiting: int = MOST_OF_TENANT,
        timeout_seconds: float | None = None,
    ) -> _T:
        """Return the result of `work`, or raise what it raises; LongWorkError where its turn does not come in time.

        `size`: bytes that it holds while it waits. `most_waiting`: works of the tenant, beyond which it need not wait.
        Work that is given up while it runs goes on to its end, and the thread with it.
        """
        self._check_room(tenant, size, most_waiting)
        job = _Job(work, size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(tenant, deque()).append(job)
        self._next()
        try:
            async with asyncio.timeout(timeout_seconds):
                result: _T = await job.result
                return result
        except TimeoutError:
            raise LongWorkError(f"it took longer than {timeout_seconds:g} s") from None
        finally:
            self._forget(tenant, job)
            # an error's traceback has this frame, and the job has the error: together they would keep the body
            del job, work

    def _check_room(self, tenant: str, size: int, most_waiting: int) -> None:
        own = self._waiting.get(tenant, ())
        of_tenant = sum(job.size for job in own)
        in_all = sum(job.size for jobs in self._waiting.values() for job in jobs)
        if len(own) >= most_waiting or (own and of_tenant + size > MOST_BYTES_OF_TENANT) or in_all + size > MOST_BYTES:
            raise LongWorkError(
                f"{len(own)} long requests of the tenant wait already, with {of_tenant >> 20} MiB; of all tenants "
                f"{in_all >> 20} MiB"
            )

    def close(self) -> None:
        """Take nothing new; what is under way ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        """Begin the next work, of the tenant whose turn it is."""
        if self._is_busy or not self._waiting:
            return
        tenant = next(iter(self._waiting))
        jobs = self._waiting.pop(tenant)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs  # behind the others
        self._is_busy = True
        loop = asyncio.get_running_loop()
        done = self._thread.submit(_timed, job.work)
        done.add_done_callback(lambda finished: loop.call_soon_threadsafe(self._done, job, finished))

    def _done(self, job: _Job, finished: "Future[tuple[Any, BaseException | None, float]]") -> None:
        result, error, seconds = finished.result()
        self.done += 1
        if not job.result.done():
            if error is None:
                job.result.set_result(result)
            else:
                job.result.set_exception(error)
        pause = min(seconds, LONGEST_PAUSE_SECONDS) if seconds > SHORT_WORK_SECONDS else 0.0
        asyncio.get_running_loop().call_later(pause, self._free)

    def _free(self) -> None:
        self._is_busy = False
        self._next()

    def _forget(self, tenant: str, job: _Job) -> None:
        """Take out what has not begun: nobody waits for it any more."""
        jobs = self._waiting.get(tenant)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._waiting[tenant]


def _timed(work: Callable[[], Any]) -> tuple[Any, BaseException | None, float]:
    """Return the result or the error, and the seconds of CPU that it took."""
    began = thread_time()
    try:
        return work(), None, thread_time() - began
    except Exception as error:
        return None, error, thread_time() - began
