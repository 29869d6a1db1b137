"""Judges what the pods say of themselves: reachable, the right models, caching, a known version, a sane clock."""

import re
from collections.abc import Iterator

from extproc.doctor.facts import Facts, PodFacts
from extproc.doctor.findings import Finding, error, unchecked, warning
from extproc.models.models import TokensFrom

OLDEST = (0, 8)  # vLLM; docs/limits.md
WITHOUT_GROUP_KINDS = frozenset({(0, 20), (0, 21)})
CLOCK_LIMIT_SECONDS = 5.0  # a Date header and a slow answer make two of these
_VERSION = re.compile(r"v?(\d+)\.(\d+)")


def pods_answer(facts: Facts) -> Iterator[Finding]:
    """Every pod answers /metrics as a vLLM does."""
    if not facts.expected.endpoints:
        yield error("endpoints", "no endpoint is configured", fix="name the pods in --endpoints IP:PORT,…")
    for pod in facts.pods:
        if pod.problem:
            yield error(
                pod.endpoint,
                pod.problem,
                fix="check the address and port in --endpoints, that vLLM runs there (without --disable-log-stats), "
                "and that network policies let the picker reach it",
            )


def models_served(facts: Facts) -> Iterator[Finding]:
    """Pods and settings agree on the models and on their names."""
    models = facts.expected.models
    known = {name for model in models.served for name in (model.name, *model.aliases)}
    if not models.served:
        yield warning(
            "models",
            "no model is configured: prompts are not tokenized, only balanced and predicted from their text",
            fix="give --model and --tokenizer, or a `models` document (docs/models.md)",
        )
        return
    for pod in facts.answering:
        if pod.served is None:
            yield unchecked(pod.endpoint, "/v1/models lists no model", fix="check that the API server there is vLLM's")
        elif not pod.served.models & known:
            yield error(
                pod.endpoint,
                f"serves {_names(pod.served.models)}, and the picker is set up for {_names(known)}",
                fix=f"start vLLM with --served-model-name {models.served[0].name}, or name its model in --model or "
                "`models`",
            )
        else:
            yield from _other_names(pod, known)
            yield from _lengths(facts, pod)
    for model in models.served:
        told = [pod.served for pod in facts.answering if pod.served is not None]
        if told and not any(served.models & {model.name, *model.aliases} for served in told):
            yield error(
                model.name,
                f"none of {len(told)} pods serves it",
                fix=f"correct its name in --model or `models`, or start a pod with --served-model-name {model.name}",
            )


def _other_names(pod: PodFacts, known: set[str]) -> Iterator[Finding]:
    further = (pod.served.models if pod.served is not None else frozenset()) - known
    if further:
        yield warning(
            pod.endpoint,
            f"also answers to {_names(further)}, which the picker does not know: such requests match no prefix",
            fix="list these names as `aliases` of the model in `models` (docs/models.md)",
        )


def _lengths(facts: Facts, pod: PodFacts) -> Iterator[Finding]:
    served = pod.served
    for model in facts.expected.models.served:
        if served is None or not served.models & {model.name, *model.aliases} or not served.max_model_len:
            continue
        if model.max_model_len is not None and model.max_model_len != served.max_model_len:
            yield warning(
                pod.endpoint,
                f"takes {served.max_model_len} tokens of {model.name}, and `max_model_len` says {model.max_model_len}",
                fix=f"set max_model_len to {served.max_model_len} in `models`, or leave it out: pods are asked",
            )


def vllm_version(facts: Facts) -> Iterator[Finding]:
    """Every pod runs a vLLM that kvmesh knows, and all of them the same."""
    versions: dict[str, list[str]] = {}
    for pod in facts.answering:
        found = _VERSION.match(pod.version or "")
        if found is None:
            yield unchecked(
                pod.endpoint,
                f"/version says {pod.version!r}",
                fix="check that the API server there is vLLM's, 0.8.5 or newer",
            )
            continue
        versions.setdefault(pod.version or "", []).append(pod.endpoint)
        number = int(found[1]), int(found[2])
        if number < OLDEST:
            yield error(pod.endpoint, f"runs vLLM {pod.version}", fix="update it: kvmesh reads vLLM 0.8.5 and newer")
        elif number in WITHOUT_GROUP_KINDS:
            yield warning(
                pod.endpoint,
                f"runs vLLM {pod.version}, whose events do not tell the kind of a KV cache group",
                fix="update it to 0.22 or newer; until then models with several groups are not indexed",
            )
    if len(versions) > 1:
        yield warning(
            "pods",
            "run different versions: " + "; ".join(f"{each} on {', '.join(on)}" for each, on in versions.items()),
            fix="update all to one version: chat templates and tokens differ between versions",
        )


def prefix_caching(facts: Facts) -> Iterator[Finding]:
    """Every pod caches prefixes."""
    for pod in facts.answering:
        if pod.prefix_caching is False:
            yield error(
                pod.endpoint,
                'vllm:cache_config_info has enable_prefix_caching="False": nothing is cached and no events come',
                fix="start vLLM with --enable-prefix-caching (without --no-enable-prefix-caching)",
            )
        elif pod.prefix_caching is None:
            yield unchecked(
                pod.endpoint,
                "does not say whether it caches prefixes (no enable_prefix_caching in vllm:cache_config_info)",
                fix="look at its command line for --no-enable-prefix-caching",
            )


def clocks(facts: Facts) -> Iterator[Finding]:
    """The clocks of pods, Redis and this machine agree."""
    fix = "run NTP (chrony) on its machine: times in logs, metrics and event ages are wrong"
    for pod in facts.answering:
        if pod.clock_ahead_seconds is not None and abs(pod.clock_ahead_seconds) > CLOCK_LIMIT_SECONDS:
            yield warning(pod.endpoint, f"its clock {_away(pod.clock_ahead_seconds)} this machine's", fix=fix)
    if not facts.redis.problem and abs(facts.redis.clock_ahead_seconds) > CLOCK_LIMIT_SECONDS:
        yield warning("redis", f"its clock {_away(facts.redis.clock_ahead_seconds)} this machine's", fix=fix)
    for source in facts.index.sources:
        ahead = source.last_batch_at - source.applied_at if source.applied_at and source.last_batch_at else 0.0
        if ahead > CLOCK_LIMIT_SECONDS:  # behind is no proof: a replay is old by nature
            yield warning(source.endpoint, f"the clock in its events {_away(ahead)} Redis'", fix=fix)


def render(facts: Facts) -> Iterator[Finding]:
    """Where tokens are to come from a pod's render endpoint, it answers."""
    for model in facts.expected.models.served:
        if model.tokens_from is not TokensFrom.RENDER:
            continue
        statuses = {
            pod.endpoint: pod.render_status[model.name] for pod in facts.pods if model.name in pod.render_status
        }
        for endpoint, status in statuses.items():
            if status == 403:
                yield error(
                    endpoint,
                    f"refuses to render prompts of {model.name} (403)",
                    fix="start vLLM with --enable-scale-out, or give the model a `tokenizer` in `models`",
                )
            elif status != 200:
                yield error(
                    endpoint,
                    f"/v1/chat/completions/render of {model.name} answers {status or 'nothing'}",
                    fix="use a vLLM with render endpoints (0.31 or newer), or give the model a `tokenizer` in `models`",
                )


def _away(seconds: float) -> str:
    return f"is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'}"


def _names(names: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
