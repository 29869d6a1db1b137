"""Contradictions in a plan, found before anything is rendered: each names the flag to change. Pure."""

import re
from collections.abc import Iterable, Iterator

from extproc.errors import ConfigError
from extproc.install.istio_release import OVERRIDE_HOST_FROM, plan_wiring
from extproc.install.plan import BodyMode, FailureMode, InstallPlan, MeshMembership, Mode, RedisKind, Scope
from extproc.policy.values import Steering

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
DNS_NAME = re.compile(rf"{DNS_LABEL.pattern}(\.{DNS_LABEL.pattern})*")
KINDS_OF_REDIS = ("", "+sentinel", "+cluster")
REDIS_SCHEMES = tuple(f"{scheme}{kind}://" for kind in KINDS_OF_REDIS for scheme in ("redis", "rediss"))


def check_plan(plan: InstallPlan) -> None:
    """Raise ConfigError where the plan contradicts itself or what the release of Istio can do."""
    _check_names(plan)
    _check_targets(plan)
    _check_failure_mode(plan)
    _check_redis(plan)
    _check_numbers(plan)


def _check_names(plan: InstallPlan) -> None:
    names = {
        "--namespace": [plan.namespace],
        "--root-namespace": [plan.root_namespace],
        "--monitoring-namespace": [plan.monitoring_namespace],
        "--pool": [part for pool in plan.pools for part in (pool.namespace, pool.name)],
        "--gateway": [part for gateway in plan.gateways for part in (gateway.namespace, *gateway.name.split("."))],
        "--clients": [clients.namespace for clients in plan.clients],
    }
    for flag, values in names.items():
        for value in values:
            if DNS_LABEL.fullmatch(value) is None:
                raise ConfigError(f"{flag}: {value!r} is no Kubernetes name (a-z, 0-9 and -, at most 63 characters)")
    for flag, name in _long_names(plan):
        if DNS_NAME.fullmatch(name) is None:
            raise ConfigError(f"{flag}: {name!r} is no Kubernetes name (a-z, 0-9, - and dots)")


def _long_names(plan: InstallPlan) -> Iterator[tuple[str, str]]:
    """Return the names that may have dots, by their flag."""
    given = {
        "--redis-password-secret": plan.redis_password_secret,
        "--redis-sentinel-password-secret": plan.redis_sentinel_password_secret,
        "--redis-ca-secret": plan.redis_ca_secret,
        "--redis-tls-secret": plan.redis_tls_secret,
        "--admin-token-secret": plan.admin_token_secret,
        "--tokenizers-claim": plan.tokenizers_claim,
    }
    yield from ((flag, name) for flag, name in given.items() if name is not None)
    yield from (("--gateway", gateway.service_account) for gateway in plan.gateways)


def _check_targets(plan: InstallPlan) -> None:
    _refuse_twice("--pool", (pool.identity for pool in plan.pools))
    _refuse_twice("--gateway", (f"{gateway.namespace}/{gateway.name}" for gateway in plan.gateways))
    _refuse_twice("--hostname", (f"{each.host}:{each.port}/{each.route or ''}" for each in plan.routes))
    _refuse_twice("--clients", (each.namespace for each in plan.clients))
    if not plan.pools:
        raise ConfigError("--pool is missing: the Service of the vLLM pods, as NAMESPACE/NAME:PORT")
    if plan.mode is Mode.SIDECAR:
        if not plan.clients:
            raise ConfigError("--mode sidecar needs --clients: whose sidecars are to ask the picker")
        if any(not clients.selector for clients in plan.clients):
            raise ConfigError("--clients: without labels the picker's own sidecar would ask the picker, in a loop")
        if plan.gateways or plan.routes:
            raise ConfigError("--gateway and --hostname: not with --mode sidecar, where the sidecars of --clients ask")
        return
    if not plan.gateways or not plan.routes:
        missing = "--gateway" if not plan.gateways else "--hostname"
        raise ConfigError(f"--mode {plan.mode} needs {missing}")
    unserved = {pool.identity for pool in plan.pools} - {route.pool.identity for route in plan.routes}
    if unserved:
        names = ", ".join(sorted(unserved))
        raise ConfigError(f"--hostname: none leads to {names}; write --hostname HOST=NAMESPACE/NAME")
    if plan.clients:
        raise ConfigError(f"--clients: not with --mode {plan.mode}, where the pods of --gateway ask")


def _refuse_twice(flag: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f"{flag}: {value.removesuffix('/')} is given twice")
        seen.add(value)


def _check_failure_mode(plan: InstallPlan) -> None:
    steering = plan_wiring(plan).steering
    if plan.failure_mode is FailureMode.FAIL_OPEN and steering is Steering.ORIGINAL_DST:
        raise ConfigError(
            f"--failure-mode FailOpen: not with Istio {plan.istio}, where only the picker knows an address: unpicked "
            f"requests would go to the gateway itself, in a loop. It can from 1.{OVERRIDE_HOST_FROM} on"
        )
    if plan.failure_mode is FailureMode.FAIL_OPEN and plan.body_mode is BodyMode.DUPLEX:
        raise ConfigError(
            f"--failure-mode FailOpen: not with --body-mode {BodyMode.DUPLEX}: Envoy cannot fail open once a byte of "
            f"the body is on its way to the picker. Leave --body-mode out or say {BodyMode.BUFFERED}"
        )


def _check_redis(plan: InstallPlan) -> None:
    if plan.redis is RedisKind.EXTERNAL and not plan.redis_url:
        raise ConfigError("--redis is missing: the address of your Redis")
    if plan.redis is RedisKind.BUNDLED:
        for flag, value in _of_own_redis(plan).items():
            if value:
                raise ConfigError(f"{flag}: is for a Redis of your own, and --redis is missing")
    if plan.redis_url and ("@" in plan.redis_url or "password=" in plan.redis_url):
        raise ConfigError(
            "--redis: a user or a password does not belong into a URL that everybody may read: --redis-username, and "
            "--redis-password-secret for the name of a Secret"
        )
    if plan.redis_url and not plan.redis_url.startswith(REDIS_SCHEMES):
        raise ConfigError(f"--redis {plan.redis_url!r}: must begin with one of {', '.join(REDIS_SCHEMES)}")


def _of_own_redis(plan: InstallPlan) -> dict[str, str | None]:
    """Return what the bundled server has none of."""
    return {
        "--redis-username": plan.redis_username,
        "--redis-sentinel-password-secret": plan.redis_sentinel_password_secret,
        "--redis-ca-secret": plan.redis_ca_secret,
        "--redis-tls-secret": plan.redis_tls_secret,
    }


def _check_numbers(plan: InstallPlan) -> None:
    if plan.picker_replicas_max < plan.picker_replicas:
        raise ConfigError(f"--max-replicas {plan.picker_replicas_max}: is below --replicas {plan.picker_replicas}")
    if plan.scope is Scope.NAMESPACED and plan.root_namespace != plan.namespace:
        raise ConfigError("--root-namespace: a namespaced installation reads mesh-wide policies from its own namespace")
    if plan.mode is Mode.AMBIENT_GATEWAY and plan.membership is MeshMembership.SIDECAR:
        raise ConfigError("--mode ambient-gateway: kvmesh's own pods are in ambient, too: --membership ambient")
