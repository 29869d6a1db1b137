"""What would keep an installation from working, judged before anything is applied. Pure.

Each finding says what to do. A plan that can be mended is: whose release is not given runs as the oldest proxy does,
and a rule that people have for a pool's host takes the place of ours.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from extproc.errors import ConfigError
from extproc.install.istio_release import DOMAIN_NAME_MATCH_FROM, OLDEST_MINOR, plan_wiring
from extproc.install.mesh_facts import MeshFacts, describe_caller
from extproc.install.network_objects import EVENTS_PORT, NAMESPACE_NAME, REPLAY_PORT, mesh_objects
from extproc.install.objects import INSTALLATION, Document
from extproc.install.plan import (
    GATEWAY_LABEL,
    GatewayTarget,
    InstallPlan,
    IstioVersion,
    Mode,
    PoolTarget,
    RouteTarget,
)
from extproc.policy.values import Steering

PROXY = "istio-proxy"  # the container
SHOWN = 8  # names in one line


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The plan as it is to be installed, and what there is to say of it."""

    plan: InstallPlan
    refusals: Sequence[str] = ()  # nothing may be applied
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()  # what was found and is used


def judge(plan: InstallPlan, facts: MeshFacts, *, release_is_given: bool = True) -> Preflight:
    """Compare a plan with what the cluster has."""
    if not facts.has_istio:
        return Preflight(plan=plan)  # the installer names what the cluster lacks
    refusals: list[str] = []
    warnings = [f"not looked at: {reason}" for reason in facts.unread]
    notes: list[str] = []
    plan = _with_release(plan, facts, refusals, warnings, notes, is_given=release_is_given)
    refusals += [*_gateways(plan, facts), *_hosts(plan, facts), *_hidden_picker(plan, facts)]
    warnings += [*_idle_callers(plan, facts), *_other_backends(plan, facts), *_pool_pods(plan, facts)]
    plan = _with_rules(plan, facts, refusals, notes)
    return Preflight(plan=plan, refusals=refusals, warnings=warnings, notes=notes)


def _with_release(
    plan: InstallPlan,
    facts: MeshFacts,
    refusals: list[str],
    warnings: list[str],
    notes: list[str],
    *,
    is_given: bool,
) -> InstallPlan:
    """Take the release of the oldest proxy that is to ask, and of istiod, where none was named."""
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
    if is_given and plan.istio.minor > oldest:
        refusals.append(
            f"--istio-version {plan.istio}: there is 1.{oldest} here, which would drop or ignore parts of it: "
            f"say --istio-version 1.{oldest}, or leave it out"
        )
        return plan
    if is_given:
        return plan
    if oldest < OLDEST_MINOR:
        refusals.append(f"Istio 1.{oldest} cannot be wired; the oldest release that can is 1.{OLDEST_MINOR}")
        return plan
    notes.append(f"Istio 1.{oldest}, as its oldest proxy or istiod says")
    return replace(plan, istio=IstioVersion(minor=oldest))


def _minor(pod: Document, container: str) -> int | None:
    """Return the minor release of an Istio container, by its image's tag."""
    spec = pod.get("spec") or {}
    for each in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
        tag = re.search(r":1\.(\d+)[^/]*$", each.get("image") or "")
        if each.get("name") == container and tag:
            return int(tag[1])
    return None


def _gateways(plan: InstallPlan, facts: MeshFacts) -> Iterator[str]:
    """Refuse gateways that are not there."""
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
    """Refuse hosts, routes and ports that no gateway of the plan has."""
    if facts.http_routes is None or facts.virtual_services is None or facts.gateways is None:
        return
    attached = [each for each in facts.http_routes if _leads_through(each, plan.gateways)]
    hosts = {host for route in attached for host in route["spec"].get("hostnames") or ["*"]}
    services = [each for each in facts.virtual_services if _gateways_of(each)]
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
        if plan.istio.minor < DOMAIN_NAME_MATCH_FROM and route.route is None:
            for each in services:
                if route.host in (each["spec"].get("hosts") or ()) and len(each["spec"]["hosts"]) > 1:
                    yield (
                        f"{where}: VirtualService {_identity(each)} has several hosts, which Istio {plan.istio} puts "
                        f"into one under another name: name the route, {route.host}/ROUTE (http[].name)"
                    )


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


def _gateways_of(virtual_service: Document) -> list[str]:
    return [each for each in virtual_service["spec"].get("gateways") or () if each != "mesh"]


def _hidden_picker(plan: InstallPlan, facts: MeshFacts) -> Iterator[str]:
    """Refuse a mesh whose settings keep the picker from those who are to ask it."""
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
    """Warn of a host whose other routes would ask the picker, too."""
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
    """Warn of pools whose events do not come, or not again."""
    for pool in plan.pools:
        if pool.identity in facts.services and facts.services[pool.identity] is None:
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
    """Return what vLLM was told of its events, None if nothing."""
    for container in (pod.get("spec") or {}).get("containers") or ():
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        text = " ".join(map(str, words))
        match = re.search(r"--kv-events-config[= ]\s*'?(\{.*?\})'?(\s|$)", text)
        if match:
            try:
                loaded = json.loads(match[1])
            except ValueError:
                return None
            return loaded if isinstance(loaded, dict) else None
    return None


def _port_of(endpoint: Any) -> int | None:
    number = str(endpoint or "").rpartition(":")[2]
    return int(number) if number.isascii() and number.isdigit() else None


def _with_rules(plan: InstallPlan, facts: MeshFacts, refusals: list[str], notes: list[str]) -> InstallPlan:
    """Leave a DestinationRule of ours out where people have one, or refuse and show what to merge."""
    try:
        needs_ours = plan_wiring(plan).steering is Steering.ORIGINAL_DST
    except ConfigError:
        return plan  # the renderer says what is wrong
    pools = []
    for pool in plan.pools:
        theirs = [each for each in facts.rules or () if _governs(each, pool, plan)]
        if not theirs:
            pools.append(pool)
            continue
        names = _names(sorted(map(_identity, theirs)))
        is_weighted = any(_is_weighted(each, facts.mesh_config) for each in theirs)
        if needs_ours or is_weighted:
            refusals.append(_merge_to_write(plan, pool, theirs[0], names, needs_ours=needs_ours))
        else:
            notes.append(f"DestinationRule {names} stays in force for {pool.host}; kvmesh's own is left out")
        pools.append(replace(pool, has_rule=True))
    by_identity = {pool.identity: pool for pool in pools}
    routes = tuple(replace(each, pool=by_identity[each.pool.identity]) for each in plan.routes)
    return replace(plan, pools=tuple(pools), routes=routes)


def _governs(rule: Document, pool: PoolTarget, plan: InstallPlan) -> bool:
    """Tell whether somebody else's rule is for a pool's host, as a proxy that asks sees it."""
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
    return host == pool.host or (own == pool.namespace and host == pool.name) or host in _short_names(pool)


def _short_names(pool: PoolTarget) -> set[str]:
    return {f"{pool.name}.{pool.namespace}", f"{pool.name}.{pool.namespace}.svc"}


def _is_weighted(rule: Document, mesh_config: Mapping[str, Any] | None) -> bool:
    """Tell whether Envoy would get weights by locality, beside which it refuses to obey picks."""
    balancer = ((rule.get("spec") or {}).get("trafficPolicy") or {}).get("loadBalancer") or {}
    own = balancer.get("localityLbSetting")
    setting = own if own is not None else (mesh_config or {}).get("localityLbSetting") or {}
    return setting.get("enabled", True) is not False and bool(setting.get("distribute"))


def _merge_to_write(plan: InstallPlan, pool: PoolTarget, theirs: Document, names: str, *, needs_ours: bool) -> str:
    """Return a refusal with the rule to write."""
    policy = dict((theirs.get("spec") or {}).get("trafficPolicy") or {})
    if needs_ours:
        ours = next(
            each["spec"]["trafficPolicy"]
            for each in mesh_objects(plan)
            if each["kind"] == "DestinationRule" and each["spec"]["host"] == pool.host
        )
        policy |= {"loadBalancer": ours["loadBalancer"], "tls": ours["tls"]}
        reason = f"Istio {plan.istio} follows the picks by kvmesh's rule, and of two rules for a host it takes one"
    else:
        balancer = dict(policy.get("loadBalancer") or {"simple": "LEAST_REQUEST"})
        policy["loadBalancer"] = balancer | {"localityLbSetting": {"enabled": False}}
        reason = "Envoy refuses a cluster that has weights by locality and obeys picks"
    written = yaml.safe_dump({"trafficPolicy": policy}, sort_keys=False)
    return f"DestinationRule {names} is for {pool.host}: {reason}. Write into its spec:\n{written}"


def _identity(document: Document) -> str:
    return f"{document['metadata']['namespace']}/{document['metadata']['name']}"


def _here(names: Any) -> str:
    found = sorted(names)
    return f"; here: {_names(found)}" if found else "; there is none at all"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
