"""Judges Envoy's configuration: it must accept it, send the picker every prompt, and not cut generations.

The reason for each setting is in the comments of `envoy/*.yaml`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from extproc.pages.findings import Finding, error, unchecked, warning
from operate.doctor.facts import EnvoyFacts, ExtProcFilter, Facts
from operate.doctor.judge_clusters import (
    EXAMPLES,
    NAMESPACE,
    PICK_KEY,
    missing_picker,
    pod_clusters,
    trusts_header,
    with_filter,
)
from operate.install.envoy_filters import UNPICKED_FILTER

SAFE_RETRIES = ("connect-failure", "refused-stream", "reset-before-request")  # safe: no pod has begun the request
# gRPC statuses, which OpenAI responses never have
_GRPC_RETRIES = ("cancelled", "deadline-exceeded", "internal", "resource-exhausted", "unavailable")
_BY_STATUS = "retriable-status-codes"
DUPLEX, BUFFERED = "FULL_DUPLEX_STREAMED", "BUFFERED"
DEFAULT_BUFFER_BYTES = 1 << 20
LONGEST_GENERATION_SECONDS = 600.0  # queueing included; no client waits longer
NAMED = 3  # rejected resources named in findings


def envoy_filter(facts: Facts) -> Iterator[Finding]:
    """Envoy answers its admin page and has an ext_proc filter that sees requests."""
    envoy = facts.envoy
    if envoy is None:
        return
    if envoy.problem:
        yield unchecked(envoy.url, envoy.problem, fix="check the URL given as --envoy-admin (Istio: port 15000)")
    elif envoy.picking_filter() is None and envoy.asked_by_routes:
        for name in sorted(envoy.asked_by_routes):
            yield from missing_picker(envoy, name)
    elif envoy.picking_filter() is None:
        seen = "no ext_proc filter" if not envoy.filters else "no ext_proc filter with request_header_mode: SEND"
        yield error(envoy.url, f"{seen} in any listener: requests do not pass the picker", fix=EXAMPLES)


def envoy_updates(facts: Facts) -> Iterator[Finding]:
    """Envoy accepted its configuration. A rejected resource is not in force, and a restarted Envoy lacks it."""
    envoy = facts.envoy
    if envoy is None:
        return
    for refused in envoy.refused[:NAMED]:
        instead = "it runs with the version before" if refused.has_earlier else "it has no such thing now"
        yield error(
            envoy.url,
            f"Envoy refuses {refused.kind} {refused.name!r}, and {instead}: {refused.details}",
            fix="mend what the message names (an EnvoyFilter: `kvmesh install` anew with the --istio-version of the "
            "proxies). A proxy that starts now has nothing of it and does not become ready",
        )
    if len(envoy.refused) > NAMED:
        yield error(
            envoy.url, f"Envoy refuses {len(envoy.refused) - NAMED} more", fix="see error_state in /config_dump"
        )
    shown = {refused.kind for refused in envoy.refused}
    for kind, count in envoy.rejected_updates.items():
        # Listeners: a fixed rejection leaves a count but no error_state. Clusters: Envoy never shows an error_state.
        if kind not in shown and kind != "listener":
            yield warning(
                envoy.url,
                f"Envoy has refused {count} updates of {kind}s since it started, and does not show whether the last "
                "one is among them",
                fix="see its log for `update rejected` (`istioctl proxy-status` shows who is STALE); "
                "if that is mended, restart it or live with this line",
            )


@with_filter
def envoy_routes(_: Facts, envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    """Some route enables the filter, which `kvmesh install` writes as disabled."""
    if picking.is_disabled and picking.name not in envoy.enabling_filters:
        yield error(
            envoy.url,
            f"the filter {picking.name!r} is off and no route switches it on: requests go to any pod, without a pick",
            fix="compare --hostname, --route and --pool of `kvmesh install` with the routes here "
            "(`istioctl proxy-config routes`): host, port and route name must be those that Envoy has",
        )


@with_filter
def envoy_mode(_: Facts, envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    """The filter sends the picker the whole request and the end of the exchange, and accepts its answer."""
    body = picking.mode("request_body_mode")
    if body not in (DUPLEX, BUFFERED):
        yield error(
            envoy.url,
            f"request_body_mode is {body}: the picker does not see whole prompts",
            fix=f"set processing_mode.request_body_mode: {DUPLEX} (or {BUFFERED} before Envoy 1.34)",
        )
    elif body == BUFFERED:
        yield from _buffered(envoy, picking)
    for name in ("response_header_mode", "response_trailer_mode"):
        if picking.mode(name) != "SEND":
            yield error(
                envoy.url,
                f"{name} is {picking.mode(name)}: the picker takes requests for ended that still run",
                fix=f"set processing_mode.{name}: SEND",
            )
    if picking.mode("response_body_mode") != "NONE":
        yield warning(
            envoy.url,
            f"response_body_mode is {picking.mode('response_body_mode')}: every generated token passes the picker",
            fix="set processing_mode.response_body_mode: NONE; sampled responses are asked for as envoy/*.yaml show",
        )
    namespaces = picking.config.get("metadata_options", {}).get("receiving_namespaces", {}).get("untyped", [])
    if NAMESPACE not in namespaces:
        yield error(
            envoy.url,
            "the filter drops the picker's metadata: the pick is ignored and requests go to random pods",
            fix=f"set metadata_options.receiving_namespaces.untyped: [{NAMESPACE}, kvmesh]",
        )
    if picking.fails_open and UNPICKED_FILTER not in envoy.enabling_filters:
        yield warning(
            envoy.url,
            "failure_mode_allow is true: without a picker, requests spread over all pods and nobody notices",
            fix="set failure_mode_allow: false and status_on_error: {code: ServiceUnavailable}",
        )


def _buffered(envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    if "message_timeout" not in picking.config:
        yield warning(
            envoy.url,
            f"{BUFFERED} bodies with the default message_timeout of 200 ms: a request with a slow pick is refused",
            fix="set message_timeout: 360s: longer than any request may wait in the picker (docs/guides/priorities.md)",
        )
    limit = picking.listener.get("per_connection_buffer_limit_bytes", DEFAULT_BUFFER_BYTES)
    of_listener = limit if isinstance(limit, int) else DEFAULT_BUFFER_BYTES
    least = min(
        (of_listener if each.buffer_bytes is None else each.buffer_bytes for each in envoy.pool_routes),
        default=of_listener,
    )
    if least <= DEFAULT_BUFFER_BYTES:
        yield warning(
            envoy.url,
            f"{BUFFERED} bodies where {least:,} bytes are held: longer prompts are answered 413",
            fix="set the listener's per_connection_buffer_limit_bytes: 67108864 (routes: request_body_buffer_limit)",
        )


@with_filter
def envoy_timeouts(facts: Facts, envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    """No timeout cuts a long generation."""
    timeout = picking.config.get("grpc_service", {}).get("timeout")
    if _seconds(timeout) > 0:
        yield error(
            envoy.url,
            f"grpc_service.timeout is {timeout}: it bounds the whole exchange, not the picker's first answer",
            fix="remove grpc_service.timeout; message_timeout is the one for answers",
        )
    if "stream_idle_timeout" not in picking.manager or _seconds(picking.manager["stream_idle_timeout"]) > 0:
        yield warning(
            envoy.url,
            f"stream_idle_timeout is {picking.manager.get('stream_idle_timeout', '5 minutes, the default')}: it cuts "
            "requests that wait for a long prefill",
            fix="set stream_idle_timeout: 0s on the connection manager",
        )
    pods = {cluster.name for cluster in pod_clusters(facts, envoy)}
    cut = {
        str(route.get("timeout", "15 s, the default"))
        for route in envoy.routes
        if route.get("cluster") in pods and ("timeout" not in route or _cuts(route["timeout"]))
    }
    if cut:
        yield warning(
            envoy.url,
            f"a route to the pods has a timeout of {', '.join(sorted(cut))}: it cuts long generations",
            fix="set timeout: 0s on the route",
        )
    policies = [route.get("retry_policy") or {} for route in envoy.routes if route.get("cluster") in pods]
    if cut := {str(each["per_try_timeout"]) for each in policies if _cuts(each.get("per_try_timeout"))}:
        yield warning(
            envoy.url,
            f"a route to the pods gives each try {', '.join(sorted(cut))} (per_try_timeout): it cuts long generations "
            "and sends them to another pod, from their beginning",
            fix="remove the per-try timeout (VirtualService retries.perTryTimeout, HTTPRoute timeouts.backendRequest)",
        )


@with_filter
def envoy_retries(facts: Facts, envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    """No retry sends used transfer parameters to a second pod, which would then answer different words.

    The picker forbids such retries by an Envoy header, which works only if the filter may set Envoy's headers.
    """
    if facts.picker is None or not facts.picker.prefill_pods:
        return
    rules = picking.config.get("mutation_rules") or {}
    if rules.get("allow_envoy") and not rules.get("disallow_all"):
        return
    if rules.get("disallow_is_error"):
        yield error(
            envoy.url,
            "the filter ends requests with headers that the picker may not set (mutation_rules.disallow_is_error): all "
            "whose prompts another pod has computed, which have x-envoy-max-retries",
            fix="set mutation_rules.allow_envoy, or remove disallow_is_error",
        )
    pods = {cluster.name for cluster in pod_clusters(facts, envoy)}
    policies = [route.get("retry_policy") or {} for route in envoy.routes if route.get("cluster") in pods]
    if unsafe := {word for policy in policies for word in _retried_after_an_answer(policy)}:
        yield error(
            envoy.url,
            f"a route to the pods is retried on {', '.join(sorted(unsafe))}, and prefill pods compute prompts: what "
            "one decode pod has fetched is gone, and the next one answers with other words",
            fix=f"retry on {', '.join(SAFE_RETRIES)} only (`kvmesh install --route-settings replace`), or set "
            "mutation_rules.allow_envoy of the filter: then the picker forbids these retries",
        )


def _retried_after_an_answer(policy: Mapping[str, Any]) -> Iterator[str]:
    """Yield the retry conditions that may fire after a pod has begun."""
    for word in map(str.strip, str(policy.get("retry_on", "")).split(",")):
        if word == _BY_STATUS:
            codes = policy.get("retriable_status_codes", ())  # Istio sets the condition without codes
            yield from (f"status {code}" for code in codes)
        elif word and word not in (*SAFE_RETRIES, *_GRPC_RETRIES):
            yield word


@with_filter
def envoy_header(facts: Facts, envoy: EnvoyFacts, picking: ExtProcFilter) -> Iterator[Finding]:
    """Clients cannot choose their pod."""
    if PICK_KEY in _removed_headers(picking):
        return
    trusts = any(trusts_header(cluster) for cluster in pod_clusters(facts, envoy))
    say = error if trusts else warning
    seen = f"the client's own header {PICK_KEY} is not removed"
    yield say(
        envoy.url,
        f"{seen}, and Envoy follows it: clients choose their pod" if trusts else f"{seen}: pods and logs see it",
        fix=f"remove {PICK_KEY} in early_header_mutation_extensions of the connection manager, and steer by metadata",
    )


def _removed_headers(picking: ExtProcFilter) -> list[str]:
    """Return the headers removed before the filter: early in the connection manager, or by a mutation filter."""
    extensions = picking.manager.get("early_header_mutation_extensions", [])
    mutations = [each.get("typed_config", {}).get("mutations", []) for each in extensions]
    for entry in picking.manager.get("http_filters", []):
        if entry.get("name") == picking.name:
            break
        mutations.append(entry.get("typed_config", {}).get("mutations", {}).get("request_mutations", []))
    return [str(one.get("remove", "")).lower() for of_one in mutations for one in of_one if isinstance(one, Mapping)]


def _cuts(duration: object) -> bool:
    """Tell whether a timeout may cut a generation: 0 means none, and `kvmesh install` sets 20 minutes."""
    return 0 < _seconds(duration) < LONGEST_GENERATION_SECONDS


def _seconds(duration: object) -> float:
    """Parse a protobuf duration in JSON, like `15s`."""
    try:
        return float(str(duration).removesuffix("s")) if duration is not None else 0.0
    except ValueError:
        return 0.0
