"""Asks each vLLM pod about itself: /metrics, /v1/models, /version, /kv_event_sources, /tokenize. Judges nothing."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from extproc.doctor.facts import PodFacts, Publisher
from extproc.doctor.gather_tokens import OwnTokens, compare
from extproc.doctor.http_page import Page, ask
from extproc.doctor.probes import PROBES
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pods.endpoint import EndpointModels, parse_served_models
from kvmesh.pods.pod_report import sum_counters
from kvmesh.pods.vllm_metrics import parse_load, parse_pod_report

POD_ANSWER_BYTES = 8 << 20


class PodQuestions:
    """What every pod is asked, and with what patience."""

    def __init__(
        self, http: aiohttp.ClientSession, *, models: ModelTable, own: Mapping[str, OwnTokens], timeout_seconds: float
    ) -> None:
        self._http = http
        self._models = models
        self._own = own
        self._timeout_seconds = timeout_seconds

    async def gather(self, endpoint: str) -> PodFacts:
        """Return what one pod says."""
        metrics, models, version, sources = await asyncio.gather(
            *(self._get(endpoint, path) for path in ("/metrics", "/v1/models", "/version", "/kv_event_sources"))
        )
        if metrics.status != 200:
            return PodFacts(endpoint=endpoint, problem=metrics.problem or f"/metrics answers {metrics.status}")
        if b"\nvllm:" not in b"\n" + metrics.body:
            return PodFacts(endpoint=endpoint, problem="/metrics has no vLLM metrics: something else answers there")
        load = parse_load(metrics.body, reported_at=0.0)
        report = parse_pod_report(metrics.body, scraped_at=0.0)
        engines = sum_counters((report.engines or {}).values())
        served = parse_served_models(models.body) if models.status == 200 else None
        ours = [model for model in self._models.served if served is None or _name_at(model, served) is not None]
        tokens = [await self._tokens(endpoint, model, served) for model in ours]
        return PodFacts(
            endpoint=endpoint,
            served=served,
            version=_version(version),
            block_sizes=report.block_sizes,
            prefix_caching=report.caches_prefixes,
            prompt_tokens=None if engines is None else engines.prompt_tokens,
            running=0 if load is None else load.running_requests,
            sources_status=sources.status,
            publishers=_publishers(sources),
            clock_ahead_seconds=metrics.clock_ahead_seconds,
            tokens=tuple(one for of_model in tokens for one in of_model),
            render_status={
                model.name: await self._render_status(endpoint, model, served)
                for model in ours
                if model.tokens_from is TokensFrom.RENDER
            },
        )

    async def _tokens(self, endpoint: str, model: ServedModel, served: EndpointModels | None) -> Sequence[Any]:
        own = self._own.get(model.name)
        if own is None:
            return ()
        name = model.name if served is None else _name_at(model, served) or model.name
        return [
            compare(probe, own=own, answer=await self._post(endpoint, "/tokenize", probe.body(name)))
            for probe in PROBES
        ]

    async def _render_status(self, endpoint: str, model: ServedModel, served: EndpointModels | None) -> int:
        name = model.name if served is None else _name_at(model, served) or model.name
        chat = next(probe for probe in PROBES if probe.is_chat)
        return (await self._post(endpoint, f"{chat.path}/render", chat.body(name))).status

    async def _get(self, endpoint: str, path: str) -> Page:
        return await ask(
            self._http,
            f"http://{endpoint}{path}",
            timeout_seconds=self._timeout_seconds,
            limit_bytes=POD_ANSWER_BYTES,
        )

    async def _post(self, endpoint: str, path: str, body: bytes) -> Page:
        return await ask(
            self._http,
            f"http://{endpoint}{path}",
            timeout_seconds=self._timeout_seconds,
            post=body,
            limit_bytes=POD_ANSWER_BYTES,
        )


def _name_at(model: ServedModel, served: EndpointModels) -> str | None:
    """Return a name under which the pod serves the model."""
    return next((name for name in (model.name, *sorted(model.aliases)) if name in served.models), None)


def _version(page: Page) -> str | None:
    content = page.json() if page.status == 200 else None
    version = content.get("version") if isinstance(content, Mapping) else None
    return version[:40] if isinstance(version, str) else None


def _publishers(page: Page) -> tuple[Publisher, ...]:
    content = page.json() if page.status == 200 else None
    if not isinstance(content, Mapping):
        return ()
    return tuple(_publisher(str(rank), said) for rank, said in sorted(content.items()))


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
