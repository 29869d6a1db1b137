"""Asks each vLLM pod about itself: /metrics, /v1/models, /version, /kv_event_sources, /tokenize. Judges nothing.

Probes (`prompts.token_probes`) are tokenized here, as the picker would, and by the pod.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from extproc.doctor.facts import Expected, PodFacts, Publisher
from extproc.doctor.questions import Client, Page
from extproc.errors import PromptTokensError
from extproc.models.models import ServedModel, TokensFrom
from extproc.pods.endpoint import EndpointModels, parse_served_models
from extproc.prompts.prompt_tokens import load_tokenizer
from extproc.prompts.token_checks import tokens_of_probe
from extproc.prompts.token_probes import PROBES, Probe, TokenComparison, Tokens
from extproc.prompts.tokenizer import ModelTokenizer
from kvmesh.pods.engine_metrics import parse_load, parse_pod_report
from kvmesh.pods.engine_profiles import ENGINES, PROFILES
from kvmesh.pods.page_steps import UnreadablePageError
from kvmesh.pods.page_turns import PageTurns
from kvmesh.pods.pod_access import FORBIDDEN, UNAUTHORIZED
from kvmesh.pods.pod_http import MAX_MODELS_BYTES, MAX_PAGE_BYTES
from kvmesh.pods.pod_report import sum_counters

PODS_AT_A_TIME = 16
MOST_RANKS = 1024  # of one pod
SHOWN_CHARACTERS = 200  # of what a pod says to a request that it refuses
TokensByProbe = Mapping[str, Tokens]


async def gather_pods(client: Client, expected: Expected, own: Mapping[str, TokensByProbe]) -> tuple[PodFacts, ...]:
    """Ask all pods, so many at a time; `own` are the picker's tokens by model."""
    slots, turns = asyncio.Semaphore(PODS_AT_A_TIME), PageTurns()

    async def ask_one(endpoint: str) -> PodFacts:
        async with slots:
            return await _gather_pod(client, endpoint, models=expected.models.served, own=own, turns=turns)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask_one(each), name=f"ask {each}") for each in expected.endpoints]
    return tuple(task.result() for task in tasks)


async def _gather_pod(
    client: Client,
    endpoint: str,
    *,
    models: Sequence[ServedModel],
    own: Mapping[str, TokensByProbe],
    turns: PageTurns,
) -> PodFacts:
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
    text = next(probe for probe in PROBES if not probe.is_chat)  # also models without a chat template take it
    asked = {
        model.name: chat if model.tokens_from is TokensFrom.RENDER else text
        for model in models
        if model.name in names and model.tokens_from in (TokensFrom.RENDER, TokensFrom.AUTO)
    }
    return PodFacts(
        endpoint=endpoint,
        refused=tuple(refusals),
        refusal=next(iter(refusals.values()), ""),
        served=served,
        version=_version(version),
        block_sizes=report.block_sizes,
        prefix_caching=report.caches_prefixes,
        prompt_tokens=None if engines is None else engines.prompt_tokens,
        running=0 if load is None else load.running_requests,
        sources_status=sources.status,
        publishers=_publishers(sources),
        clock_ahead_seconds=metrics.clock_ahead_seconds,
        tokens=tuple(
            [
                _compare(
                    probe,
                    model=model,
                    ours=own[model][probe.name],
                    answer=await ask("/tokenize", post=probe.body(name)),
                )
                for model, name in names.items()
                if model in own
                for probe in PROBES
            ]
        ),
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


def served_name(model: ServedModel, served: EndpointModels | None) -> str | None:
    """Return a name under which a pod serves the model, None where it does not; our own where the pod lists none."""
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


async def own_tokens(
    models: Sequence[ServedModel], *, loaded: Mapping[str, ModelTokenizer] | None = None
) -> dict[str, TokensByProbe]:
    """Return what the picker's settings make of every probe, for each model that has a tokenizer folder.

    They are made in a thread, because loading a tokenizer takes long. `loaded` are those that are loaded already.
    """
    return {
        model.name: await asyncio.to_thread(_of_model, model, (loaded or {}).get(model.name))
        for model in models
        if model.tokens_from is TokensFrom.TOKENIZER
    }


def _of_model(model: ServedModel, tokenizer: ModelTokenizer | None) -> TokensByProbe:
    try:
        tokenizer = tokenizer or load_tokenizer(model)
    except PromptTokensError as error:
        return {probe.name: str(error) for probe in PROBES}
    return {probe.name: tokens_of_probe(probe, model.name, tokenizer) for probe in PROBES}


def _compare(probe: Probe, *, model: str, ours: Tokens, answer: Page) -> TokenComparison:
    """Set one probe's own tokens beside the answer of POST /tokenize."""
    theirs = _their_tokens(answer)
    return TokenComparison(
        model=model,
        probe=probe.name,
        is_chat=probe.is_chat,
        ours=ours if isinstance(ours, tuple) else None,
        theirs=theirs if isinstance(theirs, tuple) else None,
        our_problem=ours if isinstance(ours, str) else "",
        their_problem=theirs if isinstance(theirs, str) else "",
        refused=answer.status == 400,
    )


def _their_tokens(answer: Page) -> Tokens:
    if answer.status in (UNAUTHORIZED, FORBIDDEN):  # what it says to that may repeat the key
        return f"/tokenize answers {answer.status}"
    if answer.status != 200:
        said = answer.body[:SHOWN_CHARACTERS].decode("utf-8", "replace")
        return answer.problem or f"/tokenize answers {answer.status}: {said}"
    tokens = answer.field("tokens")
    if not isinstance(tokens, list) or not all(type(each) is int for each in tokens):
        return "/tokenize answers no list of tokens"
    return tuple(tokens)
