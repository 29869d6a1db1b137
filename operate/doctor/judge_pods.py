"""Judges the pods and the running picker."""

import re
from collections.abc import Iterator, Mapping

from extproc.models.models import TokensFrom
from extproc.pages.findings import Finding, error, fine, unchecked, warning
from extproc.prompts.folder_checks import TokenVerdict
from extproc.prompts.prompt_tokens import TokenSource
from kvmesh.pods.pod_access import FORBIDDEN, UNAUTHORIZED
from operate.doctor.facts import SERVING, Facts, PodFacts

OLDEST = (0, 8)  # vLLM; docs/limits.md
WITHOUT_GROUP_KINDS = frozenset({(0, 20), (0, 21)})
CLOCK_LIMIT_SECONDS = 5.0  # a Date header and a slow answer alone make up to 2 s
LONG_FETCH_SECONDS = 5.0  # mean; some that last as long as a lease
_VERSION = re.compile(r"v?(\d+)\.(\d+)")
OK = 200  # HTTP
GIVE_KEY = (
    "put the key that the pods have as --api-key into a file, and name it in --pod-key-file of picker, indexer and "
    "this command (`kvmesh install --pod-key-secret` mounts a Secret)"
)
MODELS_PATH = "/v1/models"
NAMED = 4  # addresses or pools named in a finding


def pods_answer(facts: Facts) -> Iterator[Finding]:
    """Every pod serves vLLM's /metrics."""
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


def pods_let_in(facts: Facts) -> Iterator[Finding]:
    """Every pod grants access to its pages."""
    for pod in facts.answering:
        if pod.refused:
            yield error(pod.endpoint, f"{', '.join(pod.refused)}: {pod.refusal}", fix=GIVE_KEY)


def models_served(facts: Facts) -> Iterator[Finding]:
    """Pods and settings agree on the models and their names."""
    models = facts.expected.models
    known = {name for model in models.served for name in (model.name, *model.aliases)}
    if not models.served:
        yield warning(
            "models",
            "no model is configured: prompts are not tokenized, only balanced and predicted from their text",
            fix="give --model and --tokenizer, or a `models` document (docs/guides/models.md)",
        )
        return
    for pod in facts.answering:
        if MODELS_PATH in pod.refused:
            yield unchecked(pod.endpoint, "does not let this command see its models", fix=GIVE_KEY)
        elif pod.served is None:
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
        listed = [pod.served for pod in facts.answering if pod.served is not None]
        if listed and not any(served.models & {model.name, *model.aliases} for served in listed):
            yield error(
                model.name,
                f"none of {len(listed)} pods serves it",
                fix=f"correct its name in --model or `models`, or start a pod with --served-model-name {model.name}",
            )


def _other_names(pod: PodFacts, known: set[str]) -> Iterator[Finding]:
    further = (pod.served.models if pod.served is not None else frozenset()) - known
    if further:
        yield warning(
            pod.endpoint,
            f"also answers to {_names(further)}, which the picker does not know: such requests match no prefix",
            fix="list these names as `aliases` of the model in `models` (docs/guides/models.md)",
        )


def _lengths(facts: Facts, pod: PodFacts) -> Iterator[Finding]:
    served = pod.served
    for model in facts.expected.models.served:
        if served is None or not served.models & {model.name, *model.aliases} or not served.max_model_len:
            continue
        if model.max_model_len is not None and model.max_model_len != served.max_model_len:
            yield warning(
                pod.endpoint,
                f"takes {served.max_model_len} tokens of {model.name}, and `maxModelLen` says {model.max_model_len}",
                fix=f"set maxModelLen to {served.max_model_len} in `models`, or leave it out: pods are asked",
            )


def vllm_version(facts: Facts) -> Iterator[Finding]:
    """All pods of vLLM run the same, supported version."""
    versions: dict[str, list[str]] = {}
    for pod in facts.vllms:
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
    """Every pod of vLLM caches prefixes."""
    for pod in facts.vllms:
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


def kv_fetches(facts: Facts) -> Iterator[Finding]:
    """Fetches from prefill pods end long before the lease of the blocks, 30 s."""
    for pod in facts.vllms:
        if pod.fetch_seconds is not None and pod.fetch_seconds >= LONG_FETCH_SECONDS:
            yield warning(
                pod.endpoint,
                f"a fetch of a prompt's blocks from a prefill pod takes {pod.fetch_seconds:.0f} s",
                fix="give both pods RDMA: over TCP, UCX needs the help of the prefill pod, which may be idle; look for "
                '"expired KV blocks" in its log',
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
        if ahead > CLOCK_LIMIT_SECONDS:  # only ahead is proof: replayed batches are old
            yield warning(source.endpoint, f"the clock in its events {_away(ahead)} Redis'", fix=fix)


def render(facts: Facts) -> Iterator[Finding]:
    """Pods that must supply tokens can render or tokenize prompts."""
    for model in facts.expected.models.served:
        statuses = {
            pod.endpoint: pod.render_status[model.name] for pod in facts.pods if model.name in pod.render_status
        }
        match model.tokens_from:
            case TokensFrom.RENDER:
                yield from _only_rendered(model.name, statuses)
            case TokensFrom.AUTO:
                tokenized = {pod.endpoint: pod.tokenize_status.get(model.name, 0) for pod in facts.pods}
                yield from _rendered_or_tokenized(model.name, statuses, tokenized)
            case TokensFrom.TEXT:
                yield warning(
                    model.name,
                    "is routed on text only, which only predicts: its settings say `tokens: text`",
                    fix="leave `tokens` out of `models`: its pods are asked then; or give it a `tokenizer`",
                )


def _only_rendered(model: str, statuses: Mapping[str, int]) -> Iterator[Finding]:
    for endpoint, status in statuses.items():
        if status == FORBIDDEN:
            yield error(
                endpoint,
                f"refuses to render prompts of {model} (403)",
                fix="start vLLM with --enable-scale-out, or give the model a `tokenizer` in `models`",
            )
        elif status == UNAUTHORIZED:
            yield error(endpoint, f"wants a key to render prompts of {model} (401)", fix=GIVE_KEY)
        elif status != OK:
            yield error(
                endpoint,
                f"/v1/chat/completions/render of {model} answers {status or 'nothing'}",
                fix="use a vLLM with render endpoints (0.31 or newer), or give the model a `tokenizer` in `models`",
            )


def _rendered_or_tokenized(model: str, rendered: Mapping[str, int], tokenized: Mapping[str, int]) -> Iterator[Finding]:
    """Report pods that neither render nor tokenize (an error), and those that only tokenize (fine)."""
    only_tokenize = [each for each, status in rendered.items() if status != OK and tokenized[each] == OK]
    neither = [each for each, status in rendered.items() if status != OK and tokenized[each] != OK]
    alone = len(neither) == len(rendered)
    so = "as no pod does, it is routed on text only, which only predicts" if alone else "other pods are asked"
    for endpoint in neither:
        statuses = [each or "no answer" for each in (rendered[endpoint], tokenized[endpoint])]
        yield error(
            endpoint,
            f"neither renders ({statuses[0]}) nor tokenizes ({statuses[1]}) prompts of {model}: {so}",
            fix="give the model a `tokenizer` in `models` (or --tokenizer, KVMESH_TOKENIZERS); or let the picker reach "
            "POST /tokenize of the pod, which every vLLM answers, one with --api-key, too",
        )
    if only_tokenize:
        yield fine(
            model,
            f"{first_names(only_tokenize)}: tokenize prompts and do not render them; with --enable-scale-out, media "
            "and fields that /tokenize lacks have tokens, too",
        )


def _away(seconds: float) -> str:
    return f"is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'}"


def _names(names: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def picker_answers(facts: Facts) -> Iterator[Finding]:
    """The running picker is ready, serves gRPC and reads the index."""
    picker = facts.picker
    if picker is None:
        return
    if picker.problem:
        yield unchecked(
            picker.url, picker.problem, fix="check the URL given as --picker (its --host and --admin-port) and its log"
        )
        return
    if not picker.ready:
        yield error(picker.url, "is not ready", fix="see /readyz there and its log; it is starting or stopping")
    if picker.grpc_health != SERVING:
        yield error(
            picker.grpc_address,
            f"its gRPC health is {picker.grpc_health}",
            fix="give this command the picker's --grpc-port; see that nothing else has that port and that it listens "
            "where Envoy reaches it (--host)",
        )
    if picker.index_problem:
        yield error(
            picker.url,
            f"its index: {picker.index_problem}",
            fix="compare its --redis with this command's, and see that an indexer runs",
        )


def picker_endpoints(facts: Facts) -> Iterator[Finding]:
    """The running picker has the same endpoints."""
    picker = facts.picker
    if picker is None or picker.problem:
        return
    expected = frozenset(facts.expected.endpoints)
    if expected != picker.endpoints:
        missing, further = sorted(expected - picker.endpoints), sorted(picker.endpoints - expected)
        parts = [f"does not know {', '.join(missing)}"] if missing else []
        parts += [f"also has {', '.join(further)}"] if further else []
        yield error(
            picker.url, " and ".join(parts), fix="give the running picker and this command the same --endpoints"
        )


def picker_tokens(facts: Facts) -> Iterator[Finding]:
    """The running picker's tokenizer folders make the pods' tokens, by its own comparison."""
    picker = facts.picker
    if picker is None:
        return
    for model, (verdict, why) in picker.token_states.items():
        if verdict is TokenVerdict.DIFFERS:
            yield error(
                picker.url,
                f"tokens of {model}: {why}",
                fix="where all pods differ, copy tokenizer.json, tokenizer_config.json and the chat template from what "
                "they load (`chatTemplate`, `chatTemplateKwargs` in `models`); else start all pods with the same "
                "--tokenizer, --chat-template and --default-chat-template-kwargs",
            )
        elif verdict is TokenVerdict.UNVERIFIED:
            yield unchecked(
                picker.url, f"tokens of {model}: {why}", fix="let the picker reach POST /tokenize of its pods"
            )
    for model, source in picker.token_sources.items():
        if source == TokenSource.TEXT:
            yield warning(
                picker.url,
                f"prompts of {model} are routed on text only, which only predicts",
                fix="see its log, and give it a `tokenizer` in `models` (or --tokenizer, KVMESH_TOKENIZERS)",
            )


def first_names(names: list[str]) -> str:
    """Return the first of them, and how many more there are."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
