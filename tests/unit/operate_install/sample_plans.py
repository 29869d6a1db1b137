"""Plans that several tests render: every release and mode, and what else can be chosen."""

from dataclasses import replace
from typing import Any

from operate.install.plan import FailureMode, InstallPlan, IstioVersion, MeshMembership, Mode, RedisKind, Scope
from tools.kustomize_tree import AMBIENT, SAMPLE, SIDECAR

RELEASES = (28, 29, 30, 31)
MODES: dict[Mode, dict[str, Any]] = {Mode.GATEWAY: {}, Mode.SIDECAR: SIDECAR, Mode.AMBIENT_GATEWAY: AMBIENT}
VARIANTS: dict[str, dict[str, Any]] = {
    "namespaced": {"scope": Scope.NAMESPACED, "root_namespace": "kvmesh-system"},
    "monitoring": {"monitoring": True},
    "external redis": {
        "redis": RedisKind.EXTERNAL,
        "redis_url": "rediss+sentinel://sentinel.redis.svc:26379/mymaster/0?username=kvmesh",
        "redis_password_secret": "redis-password",
        "redis_sentinel_password_secret": "sentinel-password",
        "redis_ca_secret": "redis-ca",
        "redis_tls_secret": "redis-tls",
    },
    "bundled redis with a password": {"redis_password_secret": "redis-password"},
    "pods that want a key": {"pod_key_secret": "vllm", "pod_key_secret_key": "VLLM_API_KEY"},
    "tokenizers": {"tokenizers_claim": "models"},
    "tokenizers in an image": {"tokenizers_image": "registry.example.com/tokenizers@sha256:1234"},
    "models fetched into each pod": {"fetch_models": ("meta/llama@v1", "chat=org/model")},
    "models fetched into a claim": {
        "fetch_models": ("meta/llama",),
        "model_cache_claim": "cache",
        "hub_endpoint": "https://mirror.example.com",
        "hub_token_secret": "hub",
    },
    "outside of the mesh": {"membership": MeshMembership.NONE},
    "fails open": {"failure_mode": FailureMode.FAIL_OPEN},
}


def plan(minor: int = 28, mode: Mode = Mode.GATEWAY, **changes: Any) -> InstallPlan:
    return replace(SAMPLE, istio=IstioVersion(minor=minor), **{**MODES[mode], **changes})


def every_plan() -> dict[str, InstallPlan]:
    plans = {f"1.{minor} {mode}": plan(minor, mode) for minor in RELEASES for mode in MODES}
    return plans | {name: plan(**changes) for name, changes in VARIANTS.items()}


def one(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    [found] = [each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name]
    return found
