"""Checks before an installation that it can work. Pure.

Each finding says what to do. Some plans are adapted instead: without a given release, the oldest proxy's is used, and
a user's DestinationRule for a pool's host replaces ours.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from operate.install.mesh_facts import MeshFacts, describe_caller
from operate.install.network_objects import EVENTS_PORT, NAMESPACE_NAME, REPLAY_PORT
from operate.install.objects import INSTALLATION, Document
from operate.install.parse_targets import OLDEST_MINOR, too_old
from operate.install.plan import (
    GATEWAY_LABEL,
    TRUST_DOMAIN,
    GatewayTarget,
    InstallPlan,
    IstioVersion,
    Mode,
    PoolTarget,
    RouteTarget,
)

EVENTS_FLAG = "--kv-events-config"
PROXY = "istio-proxy"  # container name
SHOWN = 8  # names per line


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The adapted plan, and findings about it."""

    plan: InstallPlan
    refusals: Sequence[str] = ()  # reasons not to apply anything
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()  # facts found and used


def judge(plan: InstallPlan, facts: MeshFacts, *, release_is_given: bool = True) -> Preflight:
    """Compare a plan with the cluster's facts."""
    if not facts.has_istio:
        return Preflight(plan=plan)  # the installer reports it
    refusals: list[str] = []
    warnings = [f"not looked at: {reason}" for reason in facts.unread]
    notes: list[str] = []
    plan = _with_release(plan, facts, refusals, warnings, notes, is_given=release_is_given)
    plan = _with_trust_domain(plan, facts, notes)
    refusals += [*_gateways(plan, facts), *_hosts(plan, facts), *_hidden_picker(plan, facts)]
    warnings += [*_idle_callers(plan, facts), *_other_backends(plan, facts), *_pool_pods(plan, facts)]
    plan = _with_rules(plan, facts, refusals, notes)
    return Preflight(plan=plan, refusals=refusals, warnings=warnings, notes=notes)


def _with_release(
    plan: InstallPlan, facts: MeshFacts, refusals: list[str], warnings: list[str], notes: list[str], *, is_given: bool
) -> InstallPlan:
    proxies = sorted({minor for pods in facts.callers.values() for pod in pods if (minor := _minor(pod, PROXY))})
    istiods = sorted({minor for pod in facts.istiods or () if (minor := _minor(pod, "discovery"))})
    found = [*proxies, *istiods]
    if not found:
        if not is_given:
            refusals.append("Istio's release was not found: name it by --istio-version, as the oldest gateway has it")
        return plan
    oldest = min(found)
    if len(set(found)) > 1:
        releases = ", ".join(f"1.{minor}" for minor in sorted(set(found)))
        warnings.append(f"Istio is half upgraded ({releases}): what is installed is made for the oldest")
    if oldest < OLDEST_MINOR:
        refusals.append(too_old(oldest))
        return plan
    if is_given and plan.istio.minor > oldest:
        refusals.append(
            f"--istio-version {plan.istio}: there is 1.{oldest} here, which would drop or ignore parts of it: "
            f"say --istio-version 1.{oldest}, or leave it out"
        )
        return plan
    if is_given:
        return plan
    notes.append(f"Istio 1.{oldest}, as its oldest proxy or istiod says")
    return replace(plan, istio=IstioVersion(minor=oldest))


def _with_trust_domain(plan: InstallPlan, facts: MeshFacts, notes: list[str]) -> InstallPlan:
    found = (facts.mesh_config or {}).get("trustDomain")
    if not isinstance(found, str) or plan.trust_domain != TRUST_DOMAIN or found == TRUST_DOMAIN:
        return plan
    notes.append(f"trust domain {found}, as the mesh's configuration says")
    return replace(plan, trust_domain=found)


def _minor(pod: Document, container: str) -> int | None:
    spec = pod.get("spec") or {}
    for each in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
        tag = re.search(r":1\.(\d+)[^/]*$", each.get("image") or "")
        if each.get("name") == container and tag:
            return int(tag[1])
    return None


def _gateways(plan: InstallPlan, facts: MeshFacts) -> Iterator[str]:
    if facts.gateways is None:
        return
    known = {_identity(each) for each in facts.gateways}
    for target in plan.gateways:
        is_resource = GATEWAY_LABEL in target.selector
        identity = f"{target.namespace}/{target.name}"
        if is_resource and identity not in known:
            yield f"--gateway {identity}: there is no such Gateway{_here(known)}"
        if not is_resource and not facts.callers.get(describe_caller(target)):
            labels = ",".join(f"{name}={value}" for name, value in target.selector.items())
            yield f"--gateway {identity}: no pod there has the labels {labels}"


def _hosts(plan: InstallPlan, facts: MeshFacts) -> Iterator[str]:
    if facts.http_routes is None or facts.virtual_services is None or facts.gateways is None:
        return
    attached = [each for each in facts.http_routes if _leads_through(each, plan.gateways)]
    hosts = {host for route in attached for host in route["spec"].get("hostnames") or ["*"]}
    services = [each for each in facts.virtual_services if set(each["spec"].get("gateways") or ()) - {"mesh"}]
    hosts |= {host for each in services for host in each["spec"].get("hosts") or ()}
    ports = {
        listener["port"]
        for gateway in facts.gateways
        if _identity(gateway) in {f"{each.namespace}/{each.name}" for each in plan.gateways}
        for listener in gateway["spec"].get("listeners") or ()
    }
    for route in plan.routes:
        where = f"--hostname {route.host}"
        if route.host not in hosts:
            yield f"{where}: no route of the gateway has this host{_here(hosts)}"
        elif route.route is not None and route.route not in (names := _route_names(route, attached, services)):
            yield f"{where}/{route.route}: there is no such route{_here(names)}"
        if route.port is not None and ports and route.port not in ports:
            yield f"{where}:{route.port}: no listener of the gateway has this port{_here(map(str, ports))}"


def _route_names(route: RouteTarget, attached: Sequence[Document], services: Sequence[Document]) -> list[str]:
    names = [
        f"{each['metadata']['namespace']}.{each['metadata']['name']}.{index}"
        for each in attached
        if route.host in (each["spec"].get("hostnames") or ["*"])
        for index in range(len(each["spec"].get("rules") or ()))
    ]
    named = [http.get("name") for each in services for http in each["spec"].get("http") or ()]
    return [*names, *(name for name in named if name)]


def _leads_through(route: Document, gateways: Sequence[GatewayTarget]) -> bool:
    own = route["metadata"]["namespace"]
    parents = {(each.get("namespace") or own, each["name"]) for each in route["spec"].get("parentRefs") or ()}
    return any((each.namespace, each.name) in parents for each in gateways)


def _hidden_picker(plan: InstallPlan, facts: MeshFacts) -> Iterator[str]:
    selectors = (facts.mesh_config or {}).get("discoverySelectors") or ()
    labels = {NAMESPACE_NAME: plan.namespace, **(((facts.namespace or {}).get("metadata") or {}).get("labels") or {})}
    if selectors and not any(_selects(each, labels) for each in selectors):
        yield (
            f"meshConfig.discoverySelectors leave out namespace {plan.namespace}, so that no gateway could find the "
            f"picker: create the namespace with labels that they select, or add it to them"
        )
    if plan.mode is not Mode.SIDECAR:
        return
    for each in facts.sidecars or ():
        spaces = {target.namespace for target in plan.clients}
        hosts = [host for egress in each["spec"].get("egress") or () for host in egress.get("hosts") or ()]
        seen = {host.partition("/")[0] for host in hosts}
        if each["metadata"]["namespace"] in spaces and hosts and not seen & {"*", plan.namespace}:
            yield (
                f"Sidecar {_identity(each)} hides the picker from the clients: add {plan.namespace}/* to its "
                "egress[].hosts"
            )


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    if any(labels.get(name) != value for name, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_holds(each, labels) for each in selector.get("matchExpressions") or ())


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case _:
            return value is None


def _idle_callers(plan: InstallPlan, facts: MeshFacts) -> Iterator[str]:
    for target in plan.callers:
        name = describe_caller(target)
        if name in facts.callers and not facts.callers[name]:
            yield f"{name} has no pods now: nobody asks the picker until it has"


def _other_backends(plan: InstallPlan, facts: MeshFacts) -> Iterator[str]:
    pools = {pool.identity for pool in plan.pools}
    for host in [each.host for each in plan.routes if each.route is None]:
        for document in facts.http_routes or ():
            is_of_host = host in (document["spec"].get("hostnames") or ["*"])
            others = sorted(set(_backends(document)) - pools)
            if others and is_of_host and _leads_through(document, plan.gateways):
                yield (
                    f"--hostname {host}: HTTPRoute {_identity(document)} also leads to {_names(others)}; those "
                    f"requests would ask the picker, too. Name the routes of the pool: {host}/NAMESPACE.ROUTE.RULE"
                )


def _backends(route: Document) -> Iterator[str]:
    own = route["metadata"]["namespace"]
    for rule in route["spec"].get("rules") or ():
        for to in rule.get("backendRefs") or ():
            yield f"{to.get('namespace') or own}/{to['name']}"


def _pool_pods(plan: InstallPlan, facts: MeshFacts) -> Iterator[str]:
    for pool in plan.pools:
        if (
            plan.mode is not Mode.INFERENCE_POOL
            and pool.identity in facts.services
            and facts.services[pool.identity] is None
        ):
            yield f"--pool {pool.identity}: there is no such Service now"
            continue
        pods = facts.pods.get(pool.identity) or ()
        configs = [_events_config(pod) for pod in pods]
        if configs and not any(configs):
            yield (
                f"pool {pool.identity}: its pods publish no KV events, so that no prefix is known: start vLLM with "
                f"--kv-events-config (README), endpoint tcp://*:{EVENTS_PORT}, replay_endpoint tcp://*:{REPLAY_PORT}"
            )
        for name, expected in (("endpoint", EVENTS_PORT), ("replay_endpoint", REPLAY_PORT)):
            found = {_port_of(config.get(name)) for config in configs if config}
            if pool.selector is not None and found and found != {expected}:
                told = ", ".join(sorted(str(each) if each else "none" for each in found))
                yield (
                    f"pool {pool.identity}: {name} of its pods is port {told}; --pool-selector opens {expected} for "
                    "mTLS alone, so that under STRICT nothing comes by it"
                )


def _events_config(pod: Document) -> Mapping[str, Any] | None:
    """Return vLLM's --kv-events-config from the pod's command line, as JSON or as dotted options, or None."""
    for container in (pod.get("spec") or {}).get("containers") or ():
        given = [*(container.get("command") or ()), *(container.get("args") or ())]
        words = [word for each in given for word in _words(str(each))]
        config: dict[str, Any] = {}
        for place, word in enumerate(words):
            name, is_whole, value = word.partition("=")
            flag, _, field = name.replace("_", "-").partition(".")
            if flag != EVENTS_FLAG:
                continue
            value = value if is_whole else next(iter(words[place + 1 :]), "")
            try:
                loaded = json.loads(value)
            except ValueError:
                loaded = value
            if field:
                config[field.replace("-", "_")] = loaded
            elif isinstance(loaded, dict):
                config |= loaded
        if config:
            return config
    return None


def _words(argument: str) -> list[str]:
    if EVENTS_FLAG not in argument or argument.startswith(EVENTS_FLAG):
        return [argument]
    try:
        return shlex.split(argument)
    except ValueError:  # a quote without its end
        return argument.split()


def _port_of(endpoint: Any) -> int | None:
    number = str(endpoint or "").rpartition(":")[2]
    return int(number) if number.isascii() and number.isdigit() else None


def _with_rules(plan: InstallPlan, facts: MeshFacts, refusals: list[str], notes: list[str]) -> InstallPlan:
    if plan.mode is Mode.INFERENCE_POOL:
        return plan  # no rule of ours for a pool's host
    pools = []
    for pool in plan.pools:
        theirs = [each for each in facts.rules or () if _governs(each, pool, plan)]
        if not theirs:
            pools.append(pool)
            continue
        names = _names(sorted(map(_identity, theirs)))
        if any(_is_weighted(each, facts.mesh_config) for each in theirs):
            refusals.append(_merge_to_write(pool, theirs[0], names))
        else:
            notes.append(f"DestinationRule {names} stays in force for {pool.host}; kvmesh's own is left out")
        pools.append(replace(pool, has_rule=True))
    by_identity = {pool.identity: pool for pool in pools}
    routes = tuple(replace(each, pool=by_identity[each.pool.identity]) for each in plan.routes)
    return replace(plan, pools=tuple(pools), routes=routes)


def _governs(rule: Document, pool: PoolTarget, plan: InstallPlan) -> bool:
    meta, spec = rule["metadata"], rule.get("spec") or {}
    if INSTALLATION in (meta.get("labels") or {}):
        return False
    own = meta["namespace"]
    askers = {each.namespace for each in plan.callers}
    if own not in {pool.namespace, plan.root_namespace, *askers}:
        return False
    exported = spec.get("exportTo") or ["*"]
    if "*" not in exported and not askers & {own if each == "." else each for each in exported}:
        return False
    host = spec.get("host") or ""
    if host.startswith("*"):
        return pool.host.endswith(host[1:])
    short = f"{pool.name}.{pool.namespace}"
    return host in {pool.host, short, f"{short}.svc"} or (own == pool.namespace and host == pool.name)


def _is_weighted(rule: Document, mesh_config: Mapping[str, Any] | None) -> bool:
    """Tell whether Envoy would get locality weights, with which it rejects override_host."""
    balancer = ((rule.get("spec") or {}).get("trafficPolicy") or {}).get("loadBalancer") or {}
    own = balancer.get("localityLbSetting")
    setting = own if own is not None else (mesh_config or {}).get("localityLbSetting") or {}
    return setting.get("enabled", True) is not False and bool(setting.get("distribute"))


def _merge_to_write(pool: PoolTarget, theirs: Document, names: str) -> str:
    policy = dict((theirs.get("spec") or {}).get("trafficPolicy") or {})
    balancer = dict(policy.get("loadBalancer") or {"simple": "LEAST_REQUEST"})
    policy["loadBalancer"] = balancer | {"localityLbSetting": {"enabled": False}}
    written = yaml.safe_dump({"trafficPolicy": policy}, sort_keys=False)
    return (
        f"DestinationRule {names} is for {pool.host}: Envoy refuses a cluster that has weights by locality and obeys "
        f"picks. Write into its spec:\n{written}"
    )


def _identity(document: Document) -> str:
    return f"{document['metadata']['namespace']}/{document['metadata']['name']}"


def _here(names: Any) -> str:
    found = sorted(names)
    return f"; here: {_names(found)}" if found else "; there is none at all"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
