"""Judges what a control plane has given Envoy: whether it was taken, and whether any request passes our filter."""

from collections.abc import Iterator

from extproc.doctor.facts import Facts
from extproc.doctor.findings import Finding, error, warning

NAMED = 3  # refused resources that are named
OUTBOUND = "outbound|"  # how istiod's clusters of services begin


def envoy_updates(facts: Facts) -> Iterator[Finding]:
    """Envoy has taken what it was told; what it has refused is not in force, and a restarted Envoy has nothing."""
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
        # of listeners, an earlier refusal that was mended leaves its count and no error; of clusters, Envoy shows none
        if kind not in shown and kind != "listener":
            yield warning(
                envoy.url,
                f"Envoy has refused {count} updates of {kind}s since it started, and does not show whether the last "
                "one is among them",
                fix="see its log for `update rejected` (`istioctl proxy-status` shows who is STALE); "
                "if that is mended, restart it or live with this line",
            )


def envoy_routes(facts: Facts) -> Iterator[Finding]:
    """Some route switches the filter on; `kvmesh install` writes it switched off."""
    picking = facts.envoy.picking_filter() if facts.envoy is not None else None
    if (
        facts.envoy is None
        or picking is None
        or not picking.is_disabled
        or picking.name in facts.envoy.enabling_filters
    ):
        return
    yield error(
        facts.envoy.url,
        f"the filter {picking.name!r} is off and no route switches it on: requests go to any pod, without a pick",
        fix="compare --hostname, --route and --pool of `kvmesh install` with the routes here "
        "(`istioctl proxy-config routes`): host, port and route name must be those that Envoy has",
    )


def why_no_cluster(name: str) -> str:
    """Return what to do where Envoy lacks the picker's cluster."""
    if not name.startswith(OUTBOUND):
        return "give the cluster of the picker its address (--host and --grpc-port of `kvmesh extproc`)"
    host = name.rpartition("|")[2]
    return (
        f"Istio has not told this proxy of the Service {host}: see that it exists and has ready pods, that no Sidecar "
        "of the proxy's namespace leaves its host out, that discoverySelectors cover its namespace, and that it is "
        'exported (annotation networking.istio.io/exportTo: "*")'
    )
