"""How many requests a pod runs at a time before others wait, and how fast it starts them: learned from its reports.

Pure. vLLM does not tell its max_num_seqs, and often it is the KV cache that decides. `latency_estimate` has one for
each endpoint. A limit is learned only while requests really wait. It is raised as soon as the pod is seen to run more,
and grows while nobody waits: what long prompts have shown says little of short ones.
"""

from kvmesh.pods.pod_report import EndpointLoad

# requests that a pod starts within this time are in its scheduler's hands, and wait for nothing but the next step
LEAST_WAIT_SECONDS = 0.1
FADING_SECONDS = 30.0  # half-life of what it usually runs, and of the starts while others waited
LEAST_SECONDS = 0.3  # of waiting, from which the starts mean something
LESS_SECONDS = 2.0  # half-life of the way down to fewer running requests: memory may be short for a while
STARTS_SECONDS = 1.0  # half-life of the starts
# in which the limit doubles while nobody waits. Picks go little beyond it, and what is on its way is open too: without
# this the pod would never be seen to run more
GROWTH_SECONDS = 3.0
# of the limit, that runs: it grows where it is reached and where little runs. In between, that nobody waits at a busy
# pod for a moment tells nothing, and would raise the limit beyond what the pod can run
REACHED_SHARE, QUIET_SHARE = 0.9, 0.5
MOST_LIMIT = 4096.0  # from which it is none
LONGEST_SECONDS = 60.0  # between two reports that the growth counts: 2 ** more is no float at some time


class RunningLimit:
    """One endpoint's."""

    __slots__ = ("_busy_seconds", "_busy_starts", "is_queued", "limit", "starts_a_second", "usual")

    def __init__(self) -> None:
        self.limit: float | None = None  # requests that run when others wait; None: none was seen to wait
        self.usual = 0.0  # the most that ran of late
        self.starts_a_second = 0.0  # of late, whether others waited or not
        self._busy_starts = self._busy_seconds = 0.0
        self.is_queued = False  # at the last report: more waited than the next step takes in

    @property
    def busy_starts_a_second(self) -> float | None:
        """Requests that it starts a second while others wait: how fast its queue moves. None: not seen of late."""
        if self._busy_seconds < LEAST_SECONDS:
            return None
        return self._busy_starts / self._busy_seconds

    def report(self, load: EndpointLoad, *, seconds: float, starts: int) -> None:
        """Take a report, the time since the last one and the requests that got their first token in it.

        A pod that has never counted any tells nothing of how fast its queue moves: other servers than vLLM.
        """
        share = 0.5 ** (seconds / FADING_SECONDS)
        running = float(load.running_requests)
        self.usual = max(running, self.usual * share)
        self._busy_starts *= share
        self._busy_seconds *= share
        self.starts_a_second += (1.0 - 0.5 ** (seconds / STARTS_SECONDS)) * (starts / seconds - self.starts_a_second)
        is_queued = load.waiting_requests > self.starts_a_second * LEAST_WAIT_SECONDS
        if self.is_queued and (
            load.first_token_count or load.prefill_count
        ):  # up to the window in which the last one starts: the others alone would show the slow ones
            self._busy_starts += starts
            self._busy_seconds += seconds
        if self.is_queued and is_queued:
            if self.limit is None:
                self.limit = max(running, 1.0)
            elif running < self.limit:
                self.limit -= (1.0 - 0.5 ** (seconds / LESS_SECONDS)) * (self.limit - max(running, 1.0))
        if self.limit is not None and running > self.limit:
            self.limit = running
        is_telling = self.limit is not None and not QUIET_SHARE <= running / self.limit < REACHED_SHARE
        if self.limit is not None and is_telling and not load.waiting_requests:
            self.limit *= 2.0 ** (min(seconds, LONGEST_SECONDS) / GROWTH_SECONDS)
            if self.limit > MOST_LIMIT:
                self.limit = None
        self.is_queued = is_queued
