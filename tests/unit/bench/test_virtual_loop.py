"""The loop whose clock jumps."""

import asyncio
import time

import pytest

from bench.virtual_loop import run


def test_hours_pass_in_no_time_and_timers_fire_in_their_order() -> None:
    fired: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        fired.append((name, asyncio.get_running_loop().time()))

    async def both() -> None:
        await asyncio.gather(sleeper("late", 3600.0), sleeper("early", 0.25))

    began = time.monotonic()
    run(both())

    assert fired == [("early", 0.25), ("late", 3600.0)]
    assert time.monotonic() - began < 60


def test_years_pass_as_well() -> None:
    async def sleeps() -> float:
        for seconds in (0.001, 2e9, 0.001, 0.25):
            await asyncio.sleep(seconds)
        return asyncio.get_running_loop().time()

    assert run(sleeps()) == pytest.approx(2e9 + 0.252, abs=1e-3)


def test_timeouts_are_virtual_too() -> None:
    async def waits() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(120):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run(waits()) == 120.0


def test_waiting_for_nothing_is_an_error_and_no_hang() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing will ever happen"):
        run(forever())
