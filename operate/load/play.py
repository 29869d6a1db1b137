"""Plays a load at one target after another, and reports progress."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from operate.load.asking import Target, ask_by, open_http, served_model
from operate.load.clients import Clients
from operate.load.plan import Load, salt_of
from operate.load.summary import ArmSummary, summarise

TELL_SECONDS = 0.25

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A named target, and the seed of the salt that its prompts begin with."""

    name: str
    target: Target
    salt: str


async def with_model(arms: Sequence[Arm]) -> tuple[Arm, ...]:
    """Fill in the model of the first arm's server where none is given. Raise KvmeshError if an arm does not answer."""
    model, named = arms[0].target.model, []
    async with open_http() as http:
        for arm in arms:
            model = await served_model(http, replace(arm.target, model=model))
            named.append(replace(arm, target=replace(arm.target, model=model)))
    return tuple(named)


async def play(
    load: Load, arms: Sequence[Arm], *, request_seconds: float, tell: Tell, stop: asyncio.Event
) -> tuple[ArmSummary, ...]:
    """Play the load at each arm; an arm begins after the last answer of the one before.

    Once `stop` is set, requests in flight are cut off and no further arm begins.
    """
    summaries: list[ArmSummary] = []
    async with open_http() as http:
        for arm in arms:
            salt = salt_of(arm.salt) if arm.salt else ""
            ask = ask_by(http, arm.target, salt=salt)
            clients = Clients(load.sessions, ask=ask, request_seconds=request_seconds, salt=salt)
            await _until_done(clients, arm, load, tell=tell, stop=stop)
            summaries.append(
                summarise(
                    arm.name,
                    clients.records,
                    measured_from=load.measured_from,
                    seconds=clients.seconds,
                    unfinished=clients.in_flight,
                )
            )
            if stop.is_set():
                break
    return tuple(summaries)


async def _until_done(clients: Clients, arm: Arm, load: Load, *, tell: Tell, stop: asyncio.Event) -> None:
    running = asyncio.create_task(clients.run(), name=f"load of {arm.name}")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        while not running.done() and not stopped.done():
            tell(progress(clients, load, name=arm.name))
            await asyncio.wait({running, stopped}, timeout=TELL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        running.cancel()
        await asyncio.wait({running})
    if not running.cancelled():
        running.result()


def progress(clients: Clients, load: Load, *, name: str) -> str:
    """Return the arm's progress as a line; after the last due time, the number of outstanding answers."""
    records, in_flight = clients.records, clients.in_flight
    failed = sum(not record.is_answered for record in records)
    last = f"{in_flight:,} in flight"
    if clients.seconds > load.seconds and in_flight:
        last = f"waiting for {in_flight:,} {'answer' if in_flight == 1 else 'answers'}"
    return (
        f"{name}: {max(0.0, clients.seconds):.0f} of {load.seconds:.0f} s, "
        f"{clients.sent:,} of {load.requests:,} sent, "
        f"{len(records) - failed:,} answered, {failed:,} not, {last}"
    )
