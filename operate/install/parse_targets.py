"""Parses the flags for pools, gateways, hosts, clients and the Istio release. Pure; the functions raise ConfigError.

Supported releases know the fields of the picker's filters. Sources: go-control-plane at the commit in each release's
go.mod, and the release's Envoy. An istiod silently drops unknown fields, and refuses patches with unknown types or enum
values.
"""

import re
from collections.abc import Mapping, Sequence

from extproc.errors import ConfigError
from operate.install.plan import (
    GATEWAY_LABEL,
    BodyMode,
    ClientsTarget,
    FailureMode,
    GatewayTarget,
    InstallPlan,
    IstioVersion,
    PoolTarget,
    RouteTarget,
)

CLIENT_LABEL = "kvmesh.io/client"
LABEL_NAME = re.compile(r"([a-z0-9][-a-z0-9.]{0,251}[a-z0-9]/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?", re.ASCII)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
OLDEST_MINOR = 28  # Envoy 1.36: Route.request_body_buffer_limit; istiod knows status_on_error and InferencePool v1
SELECTED_HOST_KEY_FROM = 30
# Proxies that get the patches. No upper bound, so that an installation keeps working while Istio is upgraded; a lower
# bound, so that older proxies do not get patches that they reject.
PROXY_VERSIONS = r"^1\.(2[8-9]|[3-9][0-9]|[1-9][0-9]{2}).*"


def parse_pools(texts: Sequence[str], *, selectors: Sequence[str] = (), in_mesh: bool = True) -> tuple[PoolTarget, ...]:
    """Parse `NAMESPACE/NAME[:PORT[:PODPORT]]`, and optional selectors `NAMESPACE/NAME=LABEL=VALUE,…`."""
    labels = dict(_parse_selector(text) for text in selectors)
    pools = []
    for text in texts:
        identity, *ports = text.split(":")
        namespace, name = _pair(identity, flag="--pool", text=text)
        if len(ports) > 2:
            raise ConfigError(f"--pool {text!r}: must be NAMESPACE/NAME:PORT or NAMESPACE/NAME:PORT:PODPORT")
        numbers = [_port(port, flag="--pool", text=text) for port in ports]
        pools.append(
            PoolTarget(
                namespace=namespace,
                name=name,
                port=numbers[0] if numbers else 8000,
                pod_port=numbers[1] if len(numbers) == 2 else None,
                selector=labels.pop(identity, None),
                in_mesh=in_mesh,
            )
        )
    if labels:
        raise ConfigError(f"--pool-selector: no --pool is called {', '.join(sorted(labels))}")
    return tuple(pools)


def parse_gateway(text: str) -> GatewayTarget:
    """Parse `NAMESPACE/NAME`, a Gateway of the Gateway API, or `NAMESPACE/NAME@LABEL=VALUE,…[@SERVICEACCOUNT]`.

    The second form is for gateways without a Gateway resource, like istio-system/istio-ingressgateway: the labels of
    their pods, and their service account if its name differs from the gateway's (the default of Istio's chart).
    """
    identity, *more = text.split("@")
    namespace, name = _pair(identity, flag="--gateway", text=text)
    if len(more) > 2:
        raise ConfigError(f"--gateway {text!r}: must be NAMESPACE/NAME@LABELS@SERVICEACCOUNT")
    selector = _labels(more[0], flag="--gateway", text=text) if more else {GATEWAY_LABEL: name}
    account = more[1] if len(more) == 2 else name if more else f"{name}-istio"
    return GatewayTarget(namespace=namespace, name=name, selector=selector, service_account=account)


def parse_clients(text: str) -> ClientsTarget:
    """Parse `NAMESPACE` or `NAMESPACE@LABEL=VALUE,…`."""
    namespace, separator, labels = text.partition("@")
    selector = _labels(labels, flag="--clients", text=text) if separator else {CLIENT_LABEL: "true"}
    return ClientsTarget(namespace=namespace, selector=selector)


def parse_hosts(texts: Sequence[str], pools: Sequence[PoolTarget]) -> tuple[RouteTarget, ...]:
    """Parse `HOST[:PORT][/ROUTE][=NAMESPACE/POOL]`; the pool is optional if there is only one."""
    by_identity = {pool.identity: pool for pool in pools}
    return tuple(_parse_host(text, by_identity) for text in texts)


def _parse_host(text: str, pools: Mapping[str, PoolTarget]) -> RouteTarget:
    where, separator, identity = text.partition("=")
    if separator and identity not in pools:
        raise ConfigError(f"--hostname {text!r}: no --pool is called {identity!r}")
    if not separator and len(pools) != 1:
        raise ConfigError(f"--hostname {text!r}: there are {len(pools)} pools; write HOST=NAMESPACE/POOL")
    pool = pools[identity] if separator else next(iter(pools.values()))
    authority, _, route = where.partition("/")
    host, colon, port = authority.partition(":")
    if not re.fullmatch(r"\*|(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", host):
        raise ConfigError(f"--hostname {text!r}: {host!r} is no host name (lower case, or * for any)")
    number = _port(port, flag="--hostname", text=text) if colon else None
    return RouteTarget(host=host, port=number, route=route or None, pool=pool)


def _pair(identity: str, *, flag: str, text: str) -> tuple[str, str]:
    namespace, _, name = identity.partition("/")
    if not namespace or not name or "/" in name:
        raise ConfigError(f"{flag} {text!r}: must be NAMESPACE/NAME")
    return namespace, name


def _port(number: str, *, flag: str, text: str) -> int:
    if not (number.isascii() and number.isdigit()) or not 0 < int(number) < 65536:
        raise ConfigError(f"{flag} {text!r}: {number!r} is no port")
    return int(number)


def _parse_selector(text: str) -> tuple[str, Mapping[str, str]]:
    identity, _, labels = text.partition("=")
    return identity, _labels(labels, flag="--pool-selector", text=text)


def _labels(pairs: str, *, flag: str, text: str) -> dict[str, str]:
    labels = {}
    for part in pairs.split(","):
        name, separator, value = part.strip().partition("=")
        if not separator or LABEL_NAME.fullmatch(name) is None or LABEL_VALUE.fullmatch(value) is None:
            raise ConfigError(f"{flag} {text!r}: labels are written NAME=VALUE,NAME=VALUE; {part!r} is none")
        labels[name] = value
    return labels


def parse_release(text: str) -> IstioVersion:
    """Parse `1.28` or `1.28.3`. Raise ConfigError if it is malformed or too old."""
    match = re.fullmatch(r"1\.(\d{1,3})(\.\d+)?(-[\w.-]+)?", text.strip())
    if match is None:
        raise ConfigError(f"--istio-version {text!r}: must be a release like 1.{OLDEST_MINOR}")
    minor = int(match[1])
    if minor < OLDEST_MINOR:
        raise ConfigError(f"--istio-version {text}: {too_old(minor)}")
    return IstioVersion(minor=minor)


def too_old(minor: int) -> str:
    """Return the message for a release that is too old."""
    return f"Istio 1.{minor} is too old: kvmesh needs 1.{OLDEST_MINOR} (Envoy 1.36) or newer. Upgrade Istio first"


def planned_body_mode(plan: InstallPlan) -> BodyMode:
    """Return the body mode. Failing open needs buffered bodies: Envoy cannot take back bytes already streamed."""
    fails_open = plan.failure_mode is FailureMode.FAIL_OPEN
    return plan.body_mode or (BodyMode.BUFFERED if fails_open else BodyMode.DUPLEX)
