"""A pool's picker in virtual time: put together as `pools.pool` does it, without gRPC, Redis and HTTP."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from extproc.admission.admission_queue import AdmissionQueue
from extproc.admission.admit_request import RequestAdmission
from extproc.admission.asked_request import RequestReader
from extproc.admission.degradation import Degradation
from extproc.admission.flow_queue import FlowQueue
from extproc.admission.pool_pressure import PoolPressure
from extproc.admission.prepared_request import PrefixIndex, PromptSource
from extproc.choosing.choose import Endpoints, PoolView, RoundRobin
from extproc.choosing.hot_prefixes import HotPrefixes
from extproc.models.models import ModelTable
from extproc.policy.values import PickPolicy
from extproc.pools.picker_books import PickerBooks
from extproc.pools.plan_response import Pace
from extproc.pools.pool_runtime import PoolRuntime
from extproc.pools.request_watch import RequestWatch
from extproc.quotas.shared_quotas import Quotas
from extproc.records.request_events import RequestObserver
from extproc.slo.stream_promises import stream_promises
from extproc.telemetry.degradation_log import DegradationLog
from extproc.telemetry.overload_telemetry import OverloadTelemetry
from extproc.telemetry.picker_telemetry import PickerTelemetry
from kvmesh.redis.link import RedisLink

MAX_BODY_BYTES = 1 << 22


class VirtualPool:
    """One replica of the picker, for one pool. `runtime` is what `extproc.pick` goes through."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        endpoints: Endpoints,
        prompts: PromptSource,
        index: Callable[[Quotas], PrefixIndex],
        policy: PickPolicy,
        models: ModelTable,
        clock: Callable[[], float],
        seed: int,
        observer: RequestObserver | None = None,
    ) -> None:
        """`index` is given the quotas, which it may decide in a lookup's answer as Redis does."""
        telemetry, priorities = PickerTelemetry(), policy.priorities
        overload = OverloadTelemetry(telemetry.registry, classes=priorities.classes)
        draw, degradations = random.Random(seed).random, DegradationLog()  # noqa: S311
        self.books = books = PickerBooks(
            list(addresses),
            policy=policy,
            telemetry=telemetry,
            overload=overload,
            degradations=degradations,
            clock=clock,
        )
        order = FlowQueue(priorities)
        queue = AdmissionQueue(order, clock=clock, telemetry=overload)
        books.freed = queue.wake
        # its writes go nowhere: nothing runs that would send them
        quotas = books.quotas = Quotas(cast("RedisLink", None), hash_seed="", quotas=priorities.quotas, clock=clock)
        quotas.is_shadow = overload.is_shadow = priorities.shadow
        pressure = PoolPressure(
            policy=priorities,
            estimates=books.estimates,
            degradation=Degradation(priorities, on_change=overload.step_changed),
            waiting=order,
            clock=clock,
            random=draw,
        )
        watch = RequestWatch(clock=clock, unix_ns=lambda: int(clock() * 1e9))
        if observer is not None:
            watch.observers.append(observer)
        self.runtime = PoolRuntime(
            name="",
            reader=RequestReader(
                models=models, known_models=frozenset(), policy=priorities, max_body_bytes=MAX_BODY_BYTES
            ),
            view=PoolView(
                endpoints=endpoints,
                bookings=books.bookings,
                memory=books.memory,
                health=books.health,
                estimates=books.estimates,
                links=books.links,
                hot=HotPrefixes(policy.hotspot),
                turns=RoundRobin(),
                policy=policy,
                random=draw,
                promises=stream_promises(priorities),
            ),
            prompts=prompts,
            index=index(quotas),
            pressure=pressure,
            admission=RequestAdmission(policy=priorities, pressure=pressure, queue=queue, clock=clock),
            books=books,
            telemetry=telemetry,
            overload=overload,
            watch=watch,
            degradations=degradations,
            reads=Pace(per_second=0.0, burst_seconds=0.0),
            full=queue.wake_at,
            quotas=quotas,
            clock=clock,
            recent=deque(maxlen=1),
        )

    def close(self) -> None:
        """Let nothing wait any more."""
        self.runtime.admission.close()
