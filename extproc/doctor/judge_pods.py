"""Judges the pods, the pools that they are in, and the running picker in front of them."""

import re
from collections.abc import Iterator, Mapping

from extproc.doctor.facts import SERVING, Facts, PodFacts, PoolFacts
from extproc.doctor.findings import Finding, Severity, error, fine, unchecked, warning
from extproc.models.models import TokensFrom
from extproc.policy.status import ACCEPTED, FALSE, PENDING, PROGRAMMED, WARNING, Condition
from kvmesh.pods.pod_access import FORBIDDEN, UNAUTHORIZED

OLDEST = (0, 8)  # vLLM; docs/limits.md
WITHOUT_GROUP_KINDS = frozenset({(0, 20), (0, 21)})
CLOCK_LIMIT_SECONDS = 5.0  # a Date header and a slow answer make two of these
_VERSION = re.compile(r"v?(\d+)\.(\d+)")
OK = 200  # HTTP
GIVE_KEY = (
    "put the key that the pods have as --api-key into a file, and name it in --pod-key-file of picker, indexer and "
    "this command (`kvmesh install --pod-key-secret` mounts a Secret)"
)
MODELS_PATH = "/v1/models"
NAMED = 4  # addresses or pools that one finding names


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


def pods_let_in(facts: Facts) -> Iterator[Finding]:
    """Every pod lets us see its pages."""
    for pod in facts.answering:
        if pod.refused:
            yield error(pod.endpoint, f"{', '.join(pod.refused)}: {pod.refusal}", fix=GIVE_KEY)


def models_served(facts: Facts) -> Iterator[Finding]:
    """Pods and settings agree on the models and on their names."""
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
    """Where tokens are to come from the pods, they render or tokenize prompts."""
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
    """Say which pods only tokenize, which is fine, and which do neither."""
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
            f"{_first_names(only_tokenize)}: tokenize prompts and do not render them; with --enable-scale-out, media "
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
    """The running picker knows the same endpoints."""
    picker = facts.picker
    if picker is None or picker.problem:
        return
    expected = frozenset(facts.expected.endpoints)
    if expected != picker.endpoints:
        missing, further = sorted(expected - picker.endpoints), sorted(picker.endpoints - expected)
        parts = [f"does not know {', '.join(missing)}"] if missing else []
        parts += [f"also has {', '.join(further)}"] if further else []
        yield error(
            picker.url,
            " and ".join(parts),
            fix="give the running picker and this command the same --endpoints",
        )


def pool_documents(facts: Facts) -> Iterator[Finding]:
    """No document is refused."""
    for problem in facts.mesh.problems if facts.mesh else ():
        yield error(
            problem.where,
            f"{problem.words} ({problem.reason})",
            fix="correct the document; docs/guides/discovery.md has a line for each of these reasons",
        )


def pool_policies(facts: Facts) -> Iterator[Finding]:
    """Every policy is in force as it is written."""
    for status in facts.mesh.policies if facts.mesh else ():
        where = f"InferencePolicy {status.source}"
        fix = f"see what is in force: `kvmesh policy explain InferencePolicy/{status.source}`"
        by_type = {condition.type: condition for condition in status.conditions}
        accepted, programmed, warned = (by_type.get(each) for each in (ACCEPTED, PROGRAMMED, WARNING))
        if accepted is not None and accepted.status == FALSE:
            yield error(where, _words(accepted), fix="correct the field that is named")
        elif programmed is not None and programmed.reason not in (PROGRAMMED, PENDING):
            yield warning(where, _words(programmed), fix=fix)
        if warned is not None:  # that it covers no pool is said here, too
            yield warning(where, _words(warned), fix=fix)


def _words(condition: Condition) -> str:
    return f"{condition.message} ({condition.reason})"


def pool_endpoints(facts: Facts) -> Iterator[Finding]:
    """Every pool has endpoints that may get requests, of its own, and a model; those where all is well say so."""
    if facts.mesh is None:
        return
    if not facts.mesh.pools:
        yield error(
            "pools",
            "no document names a pool",
            fix='create an InferencePool, or give a Service the label kvmesh.io/pool: "true"',
        )
    shared = _shared_addresses(facts.mesh.pools)
    for pool in facts.mesh.pools:
        wrong = list(_wrong_with_pool(pool))
        if pool.name in shared:
            others, address = shared[pool.name]
            seen = f"shares {address} with {', '.join(others[:NAMED])}: the pod's blocks are indexed for one pool alone"
            wrong.append(error(pool.name, seen, fix="put each pod into one pool: let no two selectors match it"))
        yield from wrong or [Finding(check="", severity=Severity.OK, subject=pool.name, seen=_pool_summary(pool))]


def pool_picker(facts: Facts) -> Iterator[Finding]:
    """The running picker serves the pools of the documents, with as many endpoints."""
    mesh, picker = facts.mesh, facts.picker
    if mesh is None or mesh.served is None or picker is None:
        return
    fix = (
        "see its log and `kvmesh policy explain --picker`: it reads other documents (--namespaces, --policies), or late"
    )
    expected = {pool.name: len(pool.endpoints) for pool in mesh.pools}
    if missing := sorted(expected.keys() - mesh.served.keys()):
        yield error(picker.url, f"does not serve {_first_names(missing)}", fix=fix)
    if further := sorted(mesh.served.keys() - expected.keys()):
        yield error(picker.url, f"also serves {_first_names(further)}", fix=fix)
    for name in sorted(expected.keys() & mesh.served.keys()):
        if expected[name] != mesh.served[name]:
            seen = f"has {mesh.served[name]} endpoints of {name}, the documents {expected[name]}"
            yield warning(picker.url, seen, fix="ask again: pods that come and go just now look like this; else " + fix)


def _wrong_with_pool(pool: PoolFacts) -> Iterator[Finding]:
    usable = [each for each in pool.endpoints if each.ready and not each.terminating]
    if not pool.endpoints:
        yield error(pool.name, "has no pods", fix="compare the pool's selector with the labels of its pods")
    elif not usable:
        seen = f"none of its {len(pool.endpoints)} endpoints is ready: its requests are answered 503"
        yield error(pool.name, seen, fix="see why: kubectl describe pod")
    elif away := [each.pod or each.address for each in pool.endpoints if not each.ready and not each.terminating]:
        seen = f"{len(usable)} of {len(pool.endpoints)} endpoints are ready; not {_first_names(away)}"
        yield warning(pool.name, seen, fix="see why: kubectl describe pod")
    if usable and pool.model is None:
        yield error(
            pool.name,
            "nobody says which model it serves: nothing of it is indexed",
            fix="set the annotation kvmesh.io/model on the pool, or let its pods answer /v1/models",
        )


def _pool_summary(pool: PoolFacts) -> str:
    usable = sum(each.ready and not each.terminating for each in pool.endpoints)
    policies = f"policies {', '.join(pool.policies)}" if pool.policies else "no policy"
    return (
        f"{usable} of {len(pool.endpoints)} endpoints ready; blocks under {pool.hash_seed!r}, model {pool.model!r}; "
        f"{policies}"
    )


def _shared_addresses(pools: tuple[PoolFacts, ...]) -> dict[str, tuple[list[str], str]]:
    """Return for each pool that has an address of others: these, and the first such address."""
    owners: dict[str, list[str]] = {}
    for pool in pools:
        for endpoint in pool.endpoints:
            owners.setdefault(endpoint.address, []).append(pool.name)
    found: dict[str, tuple[list[str], str]] = {}
    for address, names in owners.items():
        for name in names if len(names) > 1 else ():
            found.setdefault(name, ([other for other in names if other != name], address))
    return found


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
