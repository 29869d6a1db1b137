"""Asks a running picker, and an indexer, about themselves by their admin pages. Judges nothing."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp

from extproc.doctor.facts import Expected, IndexerFacts, IndexerFinding, PickerFacts, PickerTokens, PodFacts
from extproc.doctor.grpc_health_check import ask_health
from extproc.doctor.http_page import ask
from extproc.doctor.probes import PROBES, Probe
from kvmesh.admin.admin_login import AdminLogin


async def gather_picker(
    http: aiohttp.ClientSession,
    url: str,
    *,
    expected: Expected,
    pods: Sequence[PodFacts],
    timeout_seconds: float,
    login: AdminLogin,
) -> PickerFacts:
    """Return what the picker at this admin address says."""
    url = url.rstrip("/")
    readiness = await ask(http, f"{url}/readyz", timeout_seconds=timeout_seconds, login=login)
    page = await ask(http, f"{url}/state", timeout_seconds=timeout_seconds, login=login)
    state = page.json() if page.status == 200 else None
    if not isinstance(state, Mapping) or not isinstance(state.get("endpoints"), list):
        answer = readiness.problem or page.problem or page.refusal or f"/state answers {page.status}"
        return PickerFacts(url=url, problem=answer if page.status != 200 else "/state is not what a picker answers")
    index = state.get("index")
    address = picker_address(url, grpc_port=expected.grpc_port)
    return PickerFacts(
        url=url,
        ready=readiness.status == 200,
        endpoints=frozenset(str(each.get("address")) for each in state["endpoints"] if isinstance(each, Mapping)),
        index_problem=str((index.get("problem") if isinstance(index, Mapping) else None) or ""),
        tokens=await gather_picker_tokens(http, url, pods=pods, timeout_seconds=timeout_seconds, login=login),
        grpc_address=address,
        grpc_health=await ask_health(address, timeout_seconds=timeout_seconds),
    )


async def gather_picker_tokens(
    http: aiohttp.ClientSession,
    url: str,
    *,
    pods: Sequence[PodFacts],
    timeout_seconds: float,
    login: AdminLogin,
    pool: str = "",
) -> tuple[PickerTokens, ...]:
    """Return how many tokens the picker sees in what the pods have tokenized; `pool` is whose they are, of several."""
    return tuple(
        [
            tokens
            for pod in _one_pod_a_model(pods)
            for tokens in await _tokens(http, url, pod, timeout_seconds=timeout_seconds, login=login, pool=pool)
        ]
    )


def picker_address(url: str, *, grpc_port: int) -> str:
    """Return where the picker at this admin address serves Envoy."""
    host = urlsplit(url).hostname or "127.0.0.1"
    return f"[{host}]:{grpc_port}" if ":" in host else f"{host}:{grpc_port}"


def _one_pod_a_model(pods: Sequence[PodFacts]) -> list[PodFacts]:
    """Return the first pod for each set of models: what differs between pods is found pod by pod."""
    first: dict[frozenset[str], PodFacts] = {}
    for pod in pods:
        first.setdefault(frozenset(one.model for one in pod.tokens), pod)
    return [pod for models, pod in first.items() if models]


async def _tokens(
    http: aiohttp.ClientSession, url: str, pod: PodFacts, *, timeout_seconds: float, login: AdminLogin, pool: str
) -> list[PickerTokens]:
    probes: Mapping[str, Probe] = {probe.name: probe for probe in PROBES}
    found = []
    of_pool = f"&pool={quote(pool, safe='')}" if pool else ""
    for one in pod.tokens:
        if one.theirs is None:
            continue
        probe = probes[one.probe]
        page = await ask(
            http,
            f"{url}/v1/explain?path={probe.path}{of_pool}",
            timeout_seconds=timeout_seconds,
            post=probe.body(one.model),
            login=login,
        )
        said: Any = page.json() if page.status == 200 else None
        tokens = said.get("prompt_tokens") if isinstance(said, Mapping) else None
        if isinstance(tokens, int):
            found.append(PickerTokens(model=one.model, probe=one.probe, picker=tokens, pod=len(one.theirs)))
    return found


async def gather_indexer(
    http: aiohttp.ClientSession, url: str, *, timeout_seconds: float, login: AdminLogin
) -> IndexerFacts:
    """Return the findings that the indexers share, by one indexer's admin page."""
    url = url.rstrip("/")
    page = await ask(http, f"{url}/sources", timeout_seconds=timeout_seconds, login=login)
    content = page.json() if page.status == 200 else None
    findings = content.get("findings") if isinstance(content, Mapping) else None
    if not isinstance(findings, list):
        status = f"/sources answers {page.status}" if page.status != 200 else "it is no indexer"
        why = page.problem or page.refusal or status
        return IndexerFacts(url=url, problem=why)
    return IndexerFacts(
        url=url,
        findings=tuple(
            IndexerFinding(
                endpoint=_subject(each), reason=str(each.get("reason", "")), message=str(each.get("message", ""))
            )
            for each in findings
            if isinstance(each, Mapping)
        ),
    )


def _subject(finding: Mapping[str, Any]) -> str:
    rank = finding.get("dp_rank")
    return str(finding.get("endpoint", "")) + ("" if rank is None else f"#{rank}")
