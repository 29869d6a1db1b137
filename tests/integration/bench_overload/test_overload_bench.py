"""The overload benchmark end to end, as small as it gets: beside a pod that turns bad."""

import asyncio
from dataclasses import replace
from pathlib import Path

from bench.overload.arms import LEAST_REQUEST, arms
from bench.overload.measure import Bench, measure_arm
from bench.overload.plan import Plan
from bench.prompts import vocabulary_words
from bench.routing.plan import PodSettings
from bench.routing.script import POD_MISSING, Way
from bench.routing.subject import Subject
from podsim.model_folder import TINY_MODEL

PLAN = Plan(pods=PodSettings(pods=2), capacity=14_000, bad_pod_load=0.5, bad_pod_at_seconds=0.2, bad_pod_seconds=4.7)


async def test_a_pod_that_turns_bad_fails_its_requests_and_the_others_serve_theirs(tmp_path: Path) -> None:
    bench = Bench(
        plan=PLAN, subject=Subject(), words=vocabulary_words(TINY_MODEL), directory=tmp_path, say=lambda _: None
    )
    async with asyncio.timeout(90):
        runs = await measure_arm(bench, replace(arms(PLAN)[LEAST_REQUEST], loads=()))

    assert [run.scenario for run in runs] == [POD_MISSING, *Way]
    requests = [sum(each.requests for each in run.classes) for run in runs]
    answered = [sum(each.answered for each in run.classes) for run in runs]
    assert requests[1:] == requests[:1] * len(Way)
    assert answered[0] == requests[0]
    assert all(0 < count < requests[0] for count in answered[1:])
    assert [set(run.refusals.reasons) for run in runs] == [set(), {"429"}, set()]
