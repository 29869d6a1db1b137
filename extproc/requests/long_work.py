"""One thread for work that would delay other requests: reading a long body, tokenizing a long prompt.

Only one job runs at a time. Tenants take turns, so that a tenant with nothing but long bodies waits only for itself. A
job beyond the limits is refused at once. Reading JSON holds the GIL, so a pause follows each long job: the other
requests have at least half of the time.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import thread_time
from typing import Any, NamedTuple, TypeVar

from extproc.errors import KvmeshError

_T = TypeVar("_T")

MOST_BYTES = 256 << 20  # of all waiting jobs' bodies
MOST_BYTES_OF_TENANT = 64 << 20
MOST_OF_TENANT = 64
MOST_WAITING = 256  # of all tenants, whose names clients may invent
SHORT_WORK_SECONDS = 0.005  # of CPU; no pause after a job this short
LONGEST_PAUSE_SECONDS = 0.1


class LongWorkError(KvmeshError):
    """Too many jobs wait, or the job takes too long."""


class _Job(NamedTuple):
    work: Callable[[], Any]
    size: int
    result: asyncio.Future[Any]


class LongWork:
    """The thread, and the jobs waiting for it by tenant. Used by one event loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[_Job]] = {}  # tenant -> its jobs; the first tenant is the next one
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-work")
        self._is_busy = False  # or in a pause
        self.done = 0  # total of jobs

    async def run(
        self,
        work: Callable[[], _T],
        *,
        size: int,
        tenant: str = "",
        most_waiting: int = MOST_OF_TENANT,
        timeout_seconds: float | None = None,
    ) -> _T:
        """Return the result of `work` or raise its error; raise LongWorkError if there is no room or time for it.

        `size` is the bytes that it holds in memory. `most_waiting` is the number of waiting jobs of the tenant at which
        this one is refused. A job abandoned while it runs still occupies the thread until it ends.
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
            # breaks a cycle (error, traceback, this frame, job) that would keep the body in memory
            del job, work

    def _check_room(self, tenant: str, size: int, most_waiting: int) -> None:
        own = self._waiting.get(tenant, ())
        of_tenant = sum(job.size for job in own)
        sizes = [job.size for jobs in self._waiting.values() for job in jobs]
        is_own_share_full = len(own) >= most_waiting or (own and of_tenant + size > MOST_BYTES_OF_TENANT)
        if is_own_share_full or len(sizes) >= MOST_WAITING or sum(sizes) + size > MOST_BYTES:
            raise LongWorkError(
                f"{len(own)} long requests of the tenant wait already, with {of_tenant >> 20} MiB; of all tenants "
                f"{len(sizes)}, with {sum(sizes) >> 20} MiB"
            )

    def close(self) -> None:
        """Accept no more jobs; a running one finishes."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        if self._is_busy or not self._waiting:
            return
        tenant = next(iter(self._waiting))
        jobs = self._waiting.pop(tenant)
        job = jobs.popleft()
        if jobs:
            self._waiting[tenant] = jobs  # behind the other tenants
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
        """Remove a job that has not started: its caller has left."""
        jobs = self._waiting.get(tenant)
        if jobs is not None and job in jobs:
            jobs.remove(job)
            if not jobs:
                del self._waiting[tenant]


def _timed(work: Callable[[], Any]) -> tuple[Any, BaseException | None, float]:
    """Return the result or the error, and the CPU seconds used."""
    began = thread_time()
    try:
        return work(), None, thread_time() - began
    except BaseException as error:
        seconds = thread_time() - began
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            return None, error, seconds
        # a panic of a Rust library would pass every handler of the request, and a future refuses StopIteration
        failed = RuntimeError(f"long work failed: {error!r}")
        failed.__cause__ = error
        return None, failed, seconds
