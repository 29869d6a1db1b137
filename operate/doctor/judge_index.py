"""Judges the index: its Redis or Valkey, and the path of KV events to the picker's keys.

An event must be published, replayable, followed, applied, and found under the picker's keys.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from extproc.pages.findings import Finding, error, unchecked, warning
from kvmesh.blocks.source import NOT_FOLLOWED, SourceState, reachable
from operate.doctor.facts import Facts, PodFacts, Publisher, TrialFacts

OLDEST_REDIS = (6, 2)
FULL_SHARE = 0.85  # of maxmemory
CONFIG = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", '
    '"replay_endpoint": "tcp://*:5558"}\''
)
NO_REPLAY = "no-replay-endpoint"  # the indexer's reason for a stream that cannot be replayed
SILENT_SECONDS = 300.0  # for a pod with running requests
FOLLOWED = (SourceState.LIVE, SourceState.DEGRADED)
REACHED = frozenset(SourceState) - {SourceState.LOST}
LOOPBACK = ("127.", "localhost", "::1")
_VERSION = re.compile(r"(\d+)\.(\d+)")


def redis_answers(facts: Facts) -> Iterator[Finding]:
    """Redis answers, is new enough and takes writes."""
    redis = facts.redis
    if redis.problem:
        yield error(
            redis.label,
            f"cannot be used: {redis.problem}",
            fix="check --redis with its parameters (docs/guides/redis-connection.md) and that Redis runs; "
            "until then requests are routed on load alone",
        )
        return
    version = _VERSION.match(redis.version)
    if version is None:
        yield unchecked(
            redis.label, "does not tell its version", fix="allow INFO to kvmesh's user; it must be 6.2 or newer"
        )
    elif not redis.is_valkey and (int(version[1]), int(version[2])) < OLDEST_REDIS:
        yield error(redis.label, f"is Redis {redis.version}", fix="use Redis 6.2 or newer, or Valkey")
    if redis.role == "slave":
        yield warning(
            redis.label,
            "is a replica: the index may be late, and replicas of the picker cannot share their load",
            fix="name the master in --redis, or use redis+sentinel:// (docs/guides/redis-connection.md)",
        )


def redis_memory(facts: Facts) -> Iterator[Finding]:
    """Redis evicts nothing and has room."""
    redis = facts.redis
    if redis.problem:
        return
    fix = "CONFIG SET maxmemory-policy noeviction (and in its configuration file): evicted keys make the index lie"
    if not redis.maxmemory_policy:
        yield unchecked(redis.label, "does not tell its eviction policy", fix="see that maxmemory-policy is noeviction")
    elif redis.maxmemory_policy != "noeviction":
        say = error if redis.maxmemory_bytes else warning  # without a limit nothing is evicted
        yield say(redis.label, f"maxmemory-policy is {redis.maxmemory_policy}", fix=fix)
    if redis.maxmemory_bytes and redis.used_bytes > FULL_SHARE * redis.maxmemory_bytes:
        yield warning(
            redis.label,
            f"uses {redis.used_bytes / redis.maxmemory_bytes:.0%} of its maxmemory ({redis.maxmemory_bytes:,} bytes)",
            fix="raise maxmemory: docs/reference/redis.md, Size, says how much the index needs",
        )


def redis_persistence(facts: Facts) -> Iterator[Finding]:
    """Redis writes no append-only file, because the pods can replay the index."""
    if not facts.redis.problem and facts.redis.appends_to_file:
        yield warning(
            facts.redis.label,
            "appendonly is on: every event is written to disk",
            fix='CONFIG SET appendonly no, also `save ""`: an emptied Redis is rebuilt from the pods by replay',
        )


def redis_latency(facts: Facts) -> Iterator[Finding]:
    """Redis answers well within a pick's index timeout."""
    redis, limit = facts.redis, facts.expected.index_timeout_seconds
    if redis.problem or redis.round_trip_seconds <= limit / 2:
        return
    say = error if redis.round_trip_seconds >= limit else warning
    yield say(
        redis.label,
        f"a round trip takes {redis.round_trip_seconds * 1000:.1f} ms, and a pick waits {limit * 1000:g} ms for all of "
        "its lookup",
        fix="put Redis into the picker's zone and off busy machines, or raise --index-timeout-ms",
    )


def event_publisher(facts: Facts) -> Iterator[Finding]:
    """Every pod publishes its KV events at a distinct, reachable address."""
    for pod in facts.answering:
        if pod.sources_status == 404:
            if not facts.index.of(pod.endpoint):
                yield error(
                    pod.endpoint,
                    "has no /kv_event_sources (a vLLM before 0.31), and the index does not know its events",
                    fix=f"start it with {CONFIG} and name its addresses to the indexer in --event-sources",
                )
        elif pod.sources_status != 200:
            yield unchecked(
                pod.endpoint,
                f"/kv_event_sources answers {pod.sources_status or 'nothing'}",
                fix="let this machine reach it, or look at the pod's command line for --kv-events-config",
            )
        elif not any(each.enabled for each in pod.publishers):
            yield error(pod.endpoint, "publishes no KV events", fix=f"start it with {CONFIG}")
        else:
            yield from _addresses(pod)
    yield from _shared_addresses(facts)


def _addresses(pod: PodFacts) -> Iterator[Finding]:
    for publisher in pod.publishers:
        subject = _subject(pod, publisher)
        if not publisher.enabled:
            yield error(subject, "this rank publishes no KV events", fix=f"start it with {CONFIG}")
        elif publisher.kind != "zmq":
            yield error(
                subject,
                f"its KV events go to the publisher {publisher.kind!r}",
                fix='set "publisher": "zmq" in --kv-events-config',
            )
        elif _is_loopback(publisher.events) and not _is_loopback(pod.endpoint):
            yield error(
                subject,
                f"publishes at {publisher.events}, which only its own machine reaches",
                fix='set "endpoint": "tcp://*:5557" in --kv-events-config',
            )


def _shared_addresses(facts: Facts) -> Iterator[Finding]:
    publishing: dict[str, list[str]] = {}
    for pod in facts.answering:
        for publisher in pod.publishers:
            if publisher.enabled and publisher.events:
                address = reachable(publisher.events, None, host=pod.endpoint.rpartition(":")[0]).events
                publishing.setdefault(address, []).append(_subject(pod, publisher))
    for address, subjects in publishing.items():
        if len(subjects) > 1:
            yield error(
                ", ".join(subjects),
                f"all say that they publish at {address}: the index would take one pod's blocks for another's",
                fix="give each a port of its own in --kv-events-config, or name each pod's real address in "
                "--event-sources",
            )


def replay_socket(facts: Facts) -> Iterator[Finding]:
    """Every publisher can replay missed events."""
    for pod in facts.answering:
        for publisher in pod.publishers:
            if publisher.enabled and not publisher.replay:
                yield warning(
                    _subject(pod, publisher),
                    "has no replay endpoint: what an indexer misses, or was published before it came, is lost",
                    fix='set "replay_endpoint": "tcp://*:5558" in --kv-events-config',
                )


def index_follows(facts: Facts) -> Iterator[Finding]:
    """An indexer is alive and follows every pod."""
    index = facts.index
    if index.problem:
        if not facts.redis.problem:
            yield error(
                "index", f"cannot be read: {index.problem}", fix="see docs/reference/redis.md, What others have written"
            )
        return
    if not index.indexer_alive:
        yield error(
            "index",
            "no indexer is alive: the index stands still",
            fix="start `kvmesh indexer` with the same --redis, --model and --hash-seed as the picker; restart one that "
            "runs and does nothing",
        )
    if index.unreadable:
        yield error(
            "index",
            f"{len(index.unreadable)} records are not believed, the first: {index.unreadable[0]}",
            fix="see docs/reference/redis.md, What others have written; give kvmesh a Redis database that nobody else "
            "writes to",
        )
    if index.indexer_alive:  # else no pod is followed, and the pods are not at fault
        yield from _states(facts)


def _states(facts: Facts) -> Iterator[Finding]:
    index = facts.index
    # already reported by `replay_socket`
    without_replay = {pod.endpoint for pod in facts.pods for each in pod.publishers if each.enabled and not each.replay}
    for endpoint in facts.expected.endpoints:
        sources = index.of(endpoint)
        if all(source.state is SourceState.LOST and source.reason == NOT_FOLLOWED for source in sources):
            yield error(
                endpoint,
                "no indexer follows it: the index does not know it",
                fix="name it in the indexer's --endpoints, written exactly as in the picker's",
            )
            continue
        for source in sources:
            subject = f"{endpoint}#{source.dp_rank}"
            if source.state is SourceState.LOST:
                yield error(
                    subject,
                    f"its events cannot be reached ({source.reason or 'lost'})",
                    fix="let the indexer reach both event ports of the pod: network policies, a mesh that intercepts "
                    "them (ZMQ is no HTTP), the addresses in --event-sources; its log says why",
                )
            elif source.state is not SourceState.LIVE and not (
                source.reason == NO_REPLAY and endpoint in without_replay
            ):
                yield warning(
                    subject,
                    f"is {source.state.value} ({source.reason or 'catching up'}): part of its cache is not known",
                    fix="see docs/reference/findings.md and the indexer's log for this reason; a replay ends by itself",
                )


def events_flow(facts: Facts) -> Iterator[Finding]:
    """Events arrive for the prompts that pods compute."""
    if facts.index.problem:
        return
    dark = _without(facts, REACHED, of=[pod.endpoint for pod in facts.answering])
    yield from _not_judged(facts, dark)
    for pod in facts.answering:
        sources = facts.index.of(pod.endpoint)
        if pod.prefix_caching is False or pod.endpoint in dark:
            continue  # reported by other checks
        last = max(source.last_batch_at for source in sources)
        ever = any(source.last_seq >= 0 for source in sources)
        if not ever and (pod.prompt_tokens or 0) > 20 * max(pod.block_sizes, default=16):
            yield error(
                pod.endpoint,
                f"has served {pod.prompt_tokens} prompt tokens, and no event has ever come",
                fix="check that the events address is this pod's own and that its port is open "
                "(docs/reference/findings.md, no-events)",
            )
        elif ever and pod.running and facts.now - last > SILENT_SECONDS:
            yield warning(
                pod.endpoint,
                f"runs {pod.running} requests, and its last event is {facts.now - last:.0f} s old",
                fix="see docs/reference/findings.md, no-events and short-prompts",
            )


def _without(facts: Facts, states: Collection[SourceState], *, of: Iterable[str]) -> list[str]:
    """Return the endpoints that no live indexer follows in one of these states."""
    index = facts.index
    return [
        endpoint
        for endpoint in dict.fromkeys(of)
        if not index.indexer_alive or not any(source.state in states for source in index.of(endpoint))
    ]


def _not_judged(facts: Facts, endpoints: Sequence[str]) -> Iterator[Finding]:
    """Report on one line which endpoints a check cannot judge; `index-follows` reports the cause."""
    index, fix = facts.index, "mend what index-follows says, and run this again"
    if endpoints and not index.indexer_alive:
        yield unchecked("index", f"not checked: {index.problem or 'no indexer is alive'}", fix=fix)
    elif endpoints:
        yield unchecked(", ".join(endpoints), "not checked: the index does not follow it, or not yet", fix=fix)


def block_size(facts: Facts) -> Iterator[Finding]:
    """Index and pod agree on the block size, and so do the pods of a model."""
    for pod in facts.answering:
        for source in facts.index.of(pod.endpoint):
            if source.block_size and pod.block_sizes and source.block_size not in pod.block_sizes:
                yield error(
                    pod.endpoint,
                    f"has blocks of {_sizes(pod)} tokens, and its events have {source.block_size}",
                    fix="the events are another pod's, or are from before a restart with another --block-size: check "
                    f"the events address, then `kvmesh index clear {pod.endpoint}#{source.dp_rank}`",
                )
    of_model: dict[frozenset[str], dict[str, list[str]]] = {}
    for pod in facts.answering:
        if pod.served is not None and pod.block_sizes:
            of_model.setdefault(pod.served.models, {}).setdefault(_sizes(pod), []).append(pod.endpoint)
    for models, sizes in of_model.items():
        if len(sizes) > 1:
            yield warning(
                ", ".join(sorted(models)),
                "has blocks of " + "; ".join(f"{each} tokens on {', '.join(on)}" for each, on in sizes.items()),
                fix="start all pods of a model with the same --block-size: each size is one more lookup a request",
            )


def same_keys(facts: Facts) -> Iterator[Finding]:
    """A fresh prompt is found in the index for the pod that served it, under the picker's seed and model."""
    lost = [trial.endpoint for trial in facts.trials or () if _is_lost(trial)]
    yield from _not_judged(facts, _without(facts, FOLLOWED, of=lost))
    for trial in facts.trials or ():
        if trial.problem:
            yield unchecked(
                trial.endpoint, f"did not serve a prompt of {trial.model}: {trial.problem}", fix="see the pod's log"
            )
        elif not trial.matched_tokens:
            yield from _not_found(facts, trial)
        elif trial.picker_tokens == 0:
            yield error(
                trial.endpoint,
                f"the index holds a prompt of {trial.model} that the running picker does not find there",
                fix=f"give the running picker --hash-seed {facts.expected.hash_seed} and the model's name "
                f"{trial.model}, as the indexer has them, and the same --redis",
            )


def _is_lost(trial: TrialFacts) -> bool:
    """Tell whether the prompt was served but left no trace in the index."""
    return not (trial.problem or trial.matched_tokens or trial.batches or trial.found_as)


def _not_found(facts: Facts, trial: TrialFacts) -> Iterator[Finding]:
    if trial.found_as is not None:
        seed, model = trial.found_as
        yield error(
            trial.endpoint,
            f"a prompt of {trial.model} is in the index, but with hash seed {seed!r} and model {model!r}; the picker "
            f"asks with {facts.expected.hash_seed!r} and {trial.model!r}",
            fix="give indexer and picker the same --hash-seed and --model",
        )
    elif trial.batches:
        yield error(
            trial.endpoint,
            f"events came of a prompt of {trial.model} ({trial.tokens} tokens), but the index does not have it under "
            "the picker's keys",
            fix=f"give the indexer --hash-seed {facts.expected.hash_seed} and --model {trial.model}, as the picker "
            "has them",
        )
    elif not _without(facts, FOLLOWED, of=[trial.endpoint]):
        yield error(
            trial.endpoint,
            f"a prompt of {trial.model} ({trial.tokens} tokens) was served, and no event came within "
            f"{trial.waited_seconds:.1f} s",
            fix="check --kv-events-config, prefix caching and that the events address is this pod's own "
            "(docs/reference/findings.md, no-events)",
        )


def indexer_findings(facts: Facts) -> Iterator[Finding]:
    """The indexers report no findings."""
    if facts.indexer is None:
        return
    if facts.indexer.problem:
        yield unchecked(facts.indexer.url, facts.indexer.problem, fix="check the URL given as --indexer")
    for finding in facts.indexer.findings:
        yield error(
            finding.endpoint,
            f"{finding.reason}: {finding.message}",
            fix=f"see docs/reference/findings.md, {finding.reason}",
        )


def _subject(pod: PodFacts, publisher: Publisher) -> str:
    return pod.endpoint if len(pod.publishers) == 1 else f"{pod.endpoint}#{publisher.rank}"


def _sizes(pod: PodFacts) -> str:
    return " or ".join(str(size) for size in sorted(pod.block_sizes))


def _is_loopback(address: str) -> bool:
    host = urlsplit(address if "://" in address else f"tcp://{address}").netloc.rpartition(":")[0].strip("[]")
    return host.startswith(LOOPBACK)
