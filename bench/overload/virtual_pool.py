"""A pool's picker in virtual time: put together as `pools.pool` does it, without gRPC, Redis and HTTP."""

import random
from collections.abc import Callable, Sequence
from typing import cast

from extproc.admission.admission_queue import AdmissionQueue
from extproc.admission.admit_request import RequestAdmission
from extproc.admission.asked_request import RequestReader
from extproc.admission.degradation import Degradation
from extproc.admission.flow_queue import FlowQueue
from extproc.admission.pool_pressure import PoolPressure
from extproc.admission.prepared_request import PrefixIndex, PromptSource
from extproc.admission.waiting_bodies import WaitingBodies
from extproc.answers.stream_promises import stream_promises
from extproc.choosing.choose import Endpoints, PoolView, RoundRobin
from extproc.choosing.hot_prefixes import HotPrefixes
from extproc.ledger.feature_telemetry import OverloadTelemetry
from extproc.ledger.ledger import DegradationLog, Ledger, RequestWatch
from extproc.ledger.picker_telemetry import PickerTelemetry
from extproc.models.models import ModelTable
from extproc.policy.values import PickPolicy
from extproc.pools.picker_books import PickerBooks
from extproc.pools.plan_response import Pace
from extproc.pools.pool_ledger import listeners_of
from extproc.pools.pool_runtime import PoolRuntime
from extproc.shared.shared_quotas import Quotas
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
        index: PrefixIndex,
        policy: PickPolicy,
        models: ModelTable,
        clock: Callable[[], float],
        seed: int,
    ) -> None:
        telemetry, priorities = PickerTelemetry(most_recent=1), policy.priorities
        overload = OverloadTelemetry(telemetry.registry, classes=priorities.classes)
        draw = random.Random(seed).random
        self.books = books = PickerBooks(
            list(addresses),
            policy=policy,
            clock=clock,
        )
        watch = RequestWatch()
        listeners = listeners_of(
            "", books=books, telemetry=telemetry, overload=overload, degradations=DegradationLog(), watch=watch
        )
        books.ledger = Ledger(watch, listeners)
        order = FlowQueue(priorities)
        queue = AdmissionQueue(order, bodies=WaitingBodies(most_bytes=1 << 30), clock=clock, telemetry=overload)
        books.freed = queue.wake
        # its writes go nowhere: nothing runs that would send them
        quotas = books.quotas = Quotas(cast("RedisLink", None), hash_seed="", quotas=priorities.quotas, clock=clock)
        quotas.is_shadow = overload.is_shadow = priorities.shadow
        pressure = PoolPressure(
            estimates=books.estimates,
            degradation=Degradation(priorities, on_change=overload.step_changed),
            waiting=order,
            clock=clock,
            random=draw,
        )
        self.runtime = PoolRuntime(
            name="",
            reader=RequestReader(models=models, policy=priorities, max_body_bytes=MAX_BODY_BYTES),
            view=PoolView(
                endpoints=endpoints,
                bookings=books.bookings,
                memory=books.memory,
                health=books.health,
                estimates=books.estimates,
                links=books.links,
                hot=HotPrefixes(),
                turns=RoundRobin(),
                policy=policy,
                random=draw,
                promises=stream_promises(priorities),
            ),
            prompts=prompts,
            index=index,
            pressure=pressure,
            admission=RequestAdmission(policy=priorities, pressure=pressure, queue=queue, clock=clock),
            books=books,
            promise_of=telemetry.slo.promise_of,
            watch=watch,
            reads=Pace(per_second=0.0, burst_seconds=0.0),
            full=queue.wake_at,
            quotas=quotas,
            clock=clock,
        )

    def close(self) -> None:
        """Let nothing wait any more."""
        self.runtime.admission.close()
