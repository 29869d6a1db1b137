"""Notices prompts that never match although the pod finds them in its cache: the picker computes other blocks than it.

The indexer cannot see this: its blocks are right, but the picker asks for other ones (another chat template, tokenizer,
model name, hash seed). What was routed to a pod is compared with what the pod counted, a window of requests at a time.
Pure; time is an argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass

NEVER_MATCHES = "never-matches"
REMEDY = (
    "compare --model, --hash-seed, the --tokenizer folder and its chat template with the pod's and the indexer's: "
    "`kvmesh explain` shows the prompt and its tokens, the pod's POST /tokenize what it should be"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchPolicy:
    """What counts as evidence for a finding."""

    least_requests: int = 50  # with a known prompt, in one window
    least_seconds: float = 30.0
    most_seconds: float = 600.0  # a window in which so little happened says nothing
    least_tokens: int = 1024  # of the pod's hits that must be ours
    predicted_share: float = 0.1  # of these; what is predicted below it is next to nothing
    foreign_share: float = 0.5  # of the traffic; above it, hits may be others' and only a high hit rate is evidence
    telling_hit_rate: float = 0.3  # of all that the pod looked up


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchFinding:
    """One pod whose hits are not predicted."""

    endpoint: str
    message: str
    since: float  # monotonic seconds
    reason: str = NEVER_MATCHES


@dataclass(slots=True, kw_only=True)
class _Window:
    began_at: float
    hit_tokens: int  # the pod's counters when it began
    query_tokens: int
    requests: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0


class MatchWatch:
    """Compares prediction and outcome, pod by pod."""

    def __init__(self, policy: MatchPolicy | None = None) -> None:
        self._policy = policy or MatchPolicy()
        self._windows: dict[str, _Window] = {}
        self._findings: dict[str, MatchFinding] = {}

    @property
    def findings(self) -> Mapping[str, MatchFinding]:
        """Return the findings by endpoint; one that persists keeps its `since`."""
        return self._findings

    def routed(self, endpoint: str, *, prompt_tokens: int, matched_tokens: int) -> None:
        """Note a request that was sent there; counts as the decision had them, 0 prompt tokens if not known."""
        window = self._windows.get(endpoint)
        if window is None or not prompt_tokens:
            return
        window.requests += 1
        window.prompt_tokens += prompt_tokens
        window.predicted_tokens += matched_tokens

    def reported(self, endpoint: str, *, hit_tokens: int, query_tokens: int, now: float) -> None:
        """Take the pod's counters since it started, as scraped at `now` (monotonic seconds)."""
        window = self._windows.get(endpoint)
        policy = self._policy
        if window is None or hit_tokens < window.hit_tokens or query_tokens < window.query_tokens:
            self._findings.pop(endpoint, None)  # another process: its cache is empty
        elif now - window.began_at < policy.least_seconds:
            return
        elif window.requests >= policy.least_requests:
            self._judge(
                endpoint, window, hits=hit_tokens - window.hit_tokens, queries=query_tokens - window.query_tokens
            )
        elif now - window.began_at < policy.most_seconds:
            return
        self._windows[endpoint] = _Window(began_at=now, hit_tokens=hit_tokens, query_tokens=query_tokens)

    def forget(self, endpoint: str) -> None:
        """Forget an endpoint that is gone."""
        self._windows.pop(endpoint, None)
        self._findings.pop(endpoint, None)

    def _judge(self, endpoint: str, window: _Window, *, hits: int, queries: int) -> None:
        policy = self._policy
        # other pickers' traffic, and prompts that we could not read: at worst all of it was hit
        foreign = max(queries - window.prompt_tokens, 0)
        ours, sure = hits - foreign, ""
        if ours < policy.least_tokens:
            # that proves nothing where most traffic is foreign, unless the pod's hit rate is high while ours is nothing
            is_telling = foreign >= policy.foreign_share * queries and hits >= policy.telling_hit_rate * queries
            ours = hits * window.prompt_tokens // queries if is_telling and queries else 0
            sure = "probably "
        if ours < policy.least_tokens or window.predicted_tokens >= policy.predicted_share * ours:
            self._findings.pop(endpoint, None)
            return
        message = (
            f"{endpoint} {sure}found about {ours} tokens of our last {window.requests} prompts in its cache, "
            f"{window.predicted_tokens} were predicted: {REMEDY}"
        )
        before = self._findings.get(endpoint)
        since = before.since if before else window.began_at
        self._findings[endpoint] = MatchFinding(endpoint=endpoint, message=message, since=since)
