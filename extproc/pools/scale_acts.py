"""Use case: what policies with `act` want -> the scale of the Deployments that they name, while this picker leads."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from extproc.scaling.acting import WRONG, ActMemory, ActOutcome, ActState, ScaleWish
from kvmesh.documents.documents import ClusterAccess
from kvmesh.documents.scales import ScaleRequestError, Scales

log = logging.getLogger(__name__)

ACT_SECONDS = 5.0
AUTOSCALER_SECONDS = 30.0  # between two looks whether there is one, where nothing is to be written
CONFLICT, FORBIDDEN, NOT_FOUND = 409, (401, 403), 404
Key = tuple[str, str]  # namespace, Deployment


class ActedPools(Protocol):
    """See `pools.Pools`."""

    def scale_wishes(self) -> Sequence[ScaleWish]:
        """Return what the pools want written."""

    def note_acts(self, outcomes: Sequence[ActOutcome]) -> None:
        """Take what has come of all wishes."""


class ScaleActs:
    """Of all pools."""

    def __init__(
        self, pools: ActedPools, scales: Scales, *, leads: Callable[[], bool], clock: Callable[[], float]
    ) -> None:
        """`leads`: whether this picker is the one that writes; `clock`: monotonic seconds."""
        self._pools, self._scales, self._leads, self._clock = pools, scales, leads, clock
        self._memories: dict[Key, ActMemory] = {}
        self._autoscalers: dict[Key, tuple[float, str | None]] = {}  # when it was looked, and what was found
        self._said: dict[Key, ActState] = {}

    async def run(self) -> None:
        """Act until cancelled."""
        while True:
            try:
                await self.act()
            except Exception:  # a defect: requests are picked all the same
                log.exception("what is wanted could not be written into the scale of Deployments")
            await asyncio.sleep(ACT_SECONDS)

    async def act(self) -> None:
        """Look at each named Deployment once, and write what is to be written."""
        wishes = self._pools.scale_wishes()
        if not self._leads():
            self._memories.clear()  # whoever leads next knows nothing of ours
            words = "another picker leads and writes"
            self._pools.note_acts([ActOutcome(wish=each, state=ActState.NOT_LEADING, words=words) for each in wishes])
            return
        named = Counter((wish.namespace, wish.deployment) for wish in wishes)
        self._memories = {key: memory for key, memory in self._memories.items() if key in named}
        self._autoscalers = {key: found for key, found in self._autoscalers.items() if key in named}
        self._said = {key: state for key, state in self._said.items() if key in named}
        outcomes = []
        for wish in wishes:
            if named[wish.namespace, wish.deployment] > 1:
                words = "several roles, variants or pools name it: give each a Deployment of its own"
                outcome = ActOutcome(wish=wish, state=ActState.NAMED_TWICE, words=words)
            else:
                outcome = await self._outcome(wish)
            self._say(outcome)
            outcomes.append(outcome)
        self._pools.note_acts(outcomes)

    async def _outcome(self, wish: ScaleWish) -> ActOutcome:
        key = wish.namespace, wish.deployment
        memory = self._memories.setdefault(key, ActMemory(began_at=self._clock()))
        replicas: int | None = None
        try:
            seen = await self._scales.read(*key)
            replicas = seen.replicas
            memory.see(seen.replicas, now=self._clock())
            number, state, words = memory.next(wish, seen.replicas, now=self._clock())
            autoscaler = await self._autoscaler(key, is_fresh=number is not None)
            if autoscaler is not None:
                words = f"HorizontalPodAutoscaler {autoscaler} has it for its target: delete that one, or leave act off"
                return ActOutcome(wish=wish, state=ActState.AUTOSCALER, words=words, replicas=replicas)
            if number is not None and self._leads():
                if not memory.has_tried:
                    await self._scales.write(*key, number, seen=seen, dry_run=True)
                    memory.has_tried = True
                await self._scales.write(*key, number, seen=seen, dry_run=False)
                memory.wrote(number, before=seen.replicas, now=self._clock())
                log.info(
                    "scale written",
                    extra={"deployment": "/".join(key), "replicas": number, "before": seen.replicas},
                )
                words = f"{seen.replicas} -> {number}"
            return ActOutcome(wish=wish, state=state, words=words, replicas=replicas)
        except ScaleRequestError as error:
            if error.code == CONFLICT:  # changed since it was read: the next look sees what to
                words = "it has changed meanwhile"
                return ActOutcome(wish=wish, state=ActState.IN_STEPS, words=words, replicas=replicas)
            state, words = _named(error.code, str(error), "/".join(key))
            return ActOutcome(wish=wish, state=state, words=words, replicas=replicas)

    async def _autoscaler(self, key: Key, *, is_fresh: bool) -> str | None:
        looked_at, found = self._autoscalers.get(key, (float("-inf"), None))
        now = self._clock()
        if is_fresh or now - looked_at >= AUTOSCALER_SECONDS:
            found = await self._scales.autoscaler_of(*key)
            self._autoscalers[key] = now, found
        return found

    def _say(self, outcome: ActOutcome) -> None:
        """Log what is wrong when it begins, and that it is mended."""
        key = outcome.wish.namespace, outcome.wish.deployment
        before, self._said[key] = self._said.get(key), outcome.state
        if outcome.state in WRONG and outcome.state is not before:
            log.error("Deployment %s is not scaled: %s", "/".join(key), outcome.words, extra={"reason": outcome.state})
        elif before in WRONG and outcome.state not in WRONG:
            log.info("Deployment %s is scaled again", "/".join(key))


def _named(code: int | None, message: str, deployment: str) -> tuple[ActState, str]:
    if code == NOT_FOUND:
        return ActState.NOT_FOUND, f"there is no Deployment {deployment}: {message}"
    if code in FORBIDDEN:
        words = f"the picker may not (kvmesh install --scale-deployments gives it the right): {message}"
        return ActState.FORBIDDEN, words
    if code is None or code >= 500 or code == 429:
        return ActState.UNREACHABLE, message
    return ActState.REFUSED, f"the API server refuses it: {message}"


async def act_in_cluster(pools: ActedPools, access: ClusterAccess, *, leads: Callable[[], bool]) -> None:
    """Act until cancelled. Raise KubernetesConfigError where no cluster is configured."""
    from kvmesh.documents.scale_subresource import DeploymentScales  # noqa: PLC0415 # 0.1 s and 20 MB

    scales = DeploymentScales(access)
    try:
        await ScaleActs(pools, scales, leads=leads, clock=time.monotonic).run()
    finally:
        await scales.close()
