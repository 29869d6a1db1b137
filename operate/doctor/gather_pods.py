"""Queries each pod: /metrics, /v1/models, /version, /kv_event_sources, /tokenize. No judgement."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import partial

from extproc.models.models import ServedModel, TokensFrom
from extproc.pods.endpoint import EndpointModels, parse_served_models
from extproc.prompts.folder_checks import PROBES
from kvmesh.pods.engine_metrics import parse_load, parse_pod_report
from kvmesh.pods.engine_profiles import ENGINES, PROFILES, VLLM
from kvmesh.pods.page_steps import UnreadablePageError
from kvmesh.pods.page_turns import PageTurns
from kvmesh.pods.pod_http import MAX_MODELS_BYTES, MAX_PAGE_BYTES
from kvmesh.pods.pod_report import sum_counters
from operate.doctor.facts import Expected, PodFacts, Publisher
from operate.doctor.questions import Client, Page

_FETCHES = re.compile(rb"(?m)^vllm:nixl_xfer_time_seconds_(sum|count)\{[^}\n]*\} (\d+(?:\.\d+)?(?:e[+-]?\d+)?)$")
PODS_AT_A_TIME = 16
MOST_RANKS = 1024  # per pod


async def gather_pods(client: Client, expected: Expected) -> tuple[PodFacts, ...]:
    """Ask all pods, PODS_AT_A_TIME at once."""
    slots, turns = asyncio.Semaphore(PODS_AT_A_TIME), PageTurns()

    async def ask_one(endpoint: str) -> PodFacts:
        async with slots:
            return await _gather_pod(client, endpoint, models=expected.models.served, turns=turns)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask_one(each), name=f"ask {each}") for each in expected.endpoints]
    return tuple(task.result() for task in tasks)


async def _gather_pod(client: Client, endpoint: str, *, models: Sequence[ServedModel], turns: PageTurns) -> PodFacts:
    ask = partial(client.ask_pod, endpoint)
    metrics, listed, version, sources = await asyncio.gather(
        ask("/metrics", limit_bytes=MAX_PAGE_BYTES),
        ask("/v1/models", limit_bytes=MAX_MODELS_BYTES),
        ask("/version"),
        ask("/kv_event_sources"),
    )
    if metrics.status != 200:
        refusal = client.pods.why_refused(metrics.status)
        said = f"/metrics: {refusal}" if refusal is not None else f"/metrics answers {metrics.status}"
        return PodFacts(endpoint=endpoint, problem=metrics.problem or said)
    if not any(profile.prefix in metrics.body for profile in PROFILES):
        return PodFacts(
            endpoint=endpoint, problem=f"/metrics shows no engine that is known here ({ENGINES}): its load is unknown"
        )
    try:
        async with asyncio.timeout(client.timeout_seconds):
            load = await turns.read(parse_load(metrics.body, reported_at=0.0))
            report = await turns.read(parse_pod_report(metrics.body, scraped_at=0.0))
    except (UnreadablePageError, TimeoutError) as error:
        return PodFacts(endpoint=endpoint, problem=str(error) or "/metrics takes too long to be read")
    refusals = {
        path: why
        for path, page in (("/v1/models", listed), ("/version", version), ("/kv_event_sources", sources))
        if (why := client.pods.why_refused(page.status)) is not None
    }
    engines = sum_counters((report.engines or {}).values())
    served = parse_served_models(listed.body) if listed.status == 200 else None
    names = {model.name: name for model in models if (name := served_name(model, served)) is not None}
    chat = next(probe for probe in PROBES if probe.is_chat)
    text = next(probe for probe in PROBES if not probe.is_chat)  # works without a chat template, too
    asked = {
        model.name: chat if model.tokens_from is TokensFrom.RENDER else text
        for model in models
        if model.name in names and model.tokens_from in (TokensFrom.RENDER, TokensFrom.AUTO)
    }
    return PodFacts(
        endpoint=endpoint,
        is_vllm=VLLM.prefix in metrics.body,
        refused=tuple(refusals),
        refusal=next(iter(refusals.values()), ""),
        served=served,
        version=_version(version),
        block_sizes=report.block_sizes,
        prefix_caching=report.caches_prefixes,
        prompt_tokens=None if engines is None else engines.prompt_tokens,
        running=0 if load is None else load.running_requests,
        fetch_seconds=_fetch_seconds(metrics.body),
        sources_status=sources.status,
        publishers=_publishers(sources),
        clock_ahead_seconds=metrics.clock_ahead_seconds,
        render_status={
            name: (await ask(f"{probe.path}/render", post=probe.body(names[name]))).status
            for name, probe in asked.items()
        },
        tokenize_status={
            name: (await ask("/tokenize", post=text.body(names[name]))).status
            for name, probe in asked.items()
            if probe is text
        },
    )


def _fetch_seconds(page: bytes) -> float | None:
    totals = {b"sum": 0.0, b"count": 0.0}
    for name, value in _FETCHES.findall(page):
        totals[name] += float(value)
    return totals[b"sum"] / totals[b"count"] if totals[b"count"] else None


def served_name(model: ServedModel, served: EndpointModels | None) -> str | None:
    """Return the name under which a pod serves the model, or None. If the pod lists no models, assume our name."""
    if served is None:
        return model.name
    return next((name for name in (model.name, *sorted(model.aliases)) if name in served.models), None)


def _version(page: Page) -> str | None:
    version = page.field("version")
    return version[:40] if isinstance(version, str) else None


def _publishers(page: Page) -> tuple[Publisher, ...]:
    content = page.content
    if not isinstance(content, Mapping):
        return ()
    return tuple(_publisher(str(rank), said) for rank, said in sorted(content.items())[:MOST_RANKS])


def _publisher(rank: str, said: object) -> Publisher:
    config = said if isinstance(said, Mapping) else {}
    kind, replay = config.get("publisher", "zmq"), config.get("replay_endpoint")
    return Publisher(
        rank=rank,
        enabled=bool(config) and config.get("enable_kv_cache_events", True) is True,
        kind=kind if isinstance(kind, str) else None,
        events=str(config.get("endpoint", "")),
        replay=replay if isinstance(replay, str) else None,
    )
