"""What each release of Istio can carry: the gates that decide how the picker is wired. Pure values.

Source of the gates: go-control-plane at the commit that each release's go.mod names, and the release's Envoy. An older
istiod drops a field that it does not know in silence, and refuses a patch with a type or an enum that it does not know.
"""

import re
from dataclasses import dataclass

from extproc.errors import ConfigError
from extproc.install.plan import BodyMode, FailureMode, InstallPlan, IstioVersion
from extproc.policy.values import Steering

OLDEST_MINOR = 24
NEWEST_TESTED_MINOR = 31  # newer ones are taken for like this one

DUPLEX_FROM = 26  # Envoy 1.34; istiod 1.25 parses the mode, but its Envoy has the name only
OVERRIDE_HOST_FROM = 27  # istiod 1.26 has no such type
ROUTE_FAILURE_MODE_FROM = 27  # ExtProcOverrides.failure_mode_allow
DOMAIN_NAME_MATCH_FROM = 26
STATUS_ON_ERROR_FROM = 28
ROUTE_BUFFER_LIMIT_FROM = 28  # Envoy 1.36: Route.request_body_buffer_limit
SELECTED_HOST_KEY_FROM = 30
INFERENCE_POOL_FROM = 28  # InferencePool v1; 1.27 reads another API group


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """How a release is wired."""

    body_mode: BodyMode
    steering: Steering
    route_failure_mode: bool  # a route may set its own failure mode
    domain_name_match: bool
    status_on_error: bool
    route_buffer_limit: bool
    selected_host_key: bool
    proxy_version: str  # regular expression of the proxies that can carry this


def parse_release(text: str) -> IstioVersion:
    """Read `1.27` or `1.27.3`. Raise ConfigError for what is no release, and for those that are too old."""
    match = re.fullmatch(r"1\.(\d{1,3})(\.\d+)?(-[\w.-]+)?", text.strip())
    if match is None:
        raise ConfigError(f"--istio-version {text!r}: must be a release like 1.27")
    minor = int(match[1])
    if minor < OLDEST_MINOR:
        raise ConfigError(f"--istio-version {text}: the oldest release that can be wired is 1.{OLDEST_MINOR}")
    return IstioVersion(minor=minor)


def plan_wiring(plan: InstallPlan) -> Wiring:
    """Return how a plan is wired. Failing open needs buffered bodies: in duplex a byte that is sent is too late."""
    fails_open = plan.failure_mode is FailureMode.FAIL_OPEN
    return wiring(plan.istio, body_mode=plan.body_mode or (BodyMode.BUFFERED if fails_open else None))


def wiring(release: IstioVersion, *, body_mode: BodyMode | None = None) -> Wiring:
    """Return the best that a release can do. Raise ConfigError where it cannot do the `body_mode` asked for."""
    minor = release.minor
    duplex = minor >= DUPLEX_FROM
    if body_mode is BodyMode.DUPLEX and not duplex:
        raise ConfigError(f"--body-mode {body_mode}: Istio {release} cannot; it begins with 1.{DUPLEX_FROM}")
    override_host = minor >= OVERRIDE_HOST_FROM
    return Wiring(
        body_mode=body_mode or (BodyMode.DUPLEX if duplex else BodyMode.BUFFERED),
        steering=Steering.OVERRIDE_HOST if override_host else Steering.ORIGINAL_DST,
        route_failure_mode=minor >= ROUTE_FAILURE_MODE_FROM,
        domain_name_match=minor >= DOMAIN_NAME_MATCH_FROM,
        status_on_error=minor >= STATUS_ON_ERROR_FROM,
        route_buffer_limit=minor >= ROUTE_BUFFER_LIMIT_FROM,
        selected_host_key=minor >= SELECTED_HOST_KEY_FROM,
        proxy_version=_proxies_from(_oldest_proxy(minor, body_mode or BodyMode.DUPLEX)),
    )


def _oldest_proxy(minor: int, body_mode: BodyMode) -> int:
    """Return the oldest release whose Envoy does the same; what is dropped in silence does not count."""
    gates = [OLDEST_MINOR]
    if minor >= OVERRIDE_HOST_FROM:
        gates.append(OVERRIDE_HOST_FROM)
    if minor >= DUPLEX_FROM and body_mode is BodyMode.DUPLEX:
        gates.append(DUPLEX_FROM)
    if minor >= ROUTE_BUFFER_LIMIT_FROM and body_mode is BodyMode.BUFFERED:
        gates.append(ROUTE_BUFFER_LIMIT_FROM)  # below, it would refuse bodies above 1 MiB
    return max(gates)


def _proxies_from(minor: int) -> str:
    """Write the guard of a patch: proxies from 1.`minor` on.

    Open upwards, so that an installation goes on working while Istio is upgraded under it; closed downwards, so that
    proxies that were not upgraded yet do not get what they refuse.
    """
    tens, ones = divmod(minor, 10)
    return rf"^1\.({tens}[{ones}-9]|[{tens + 1}-9][0-9]|[1-9][0-9]{{2}}).*"
