"""The Helm chart against `kvmesh install`: object for object the same, and what one refuses the other refuses."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from operate.install.commands import app
from tests.mesh.chart import CHART, RELEASE, flags_of, helm, objects, run_helm

NAMESPACE = "kvmesh-system"
OWNER_LABELS = {
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "app.kubernetes.io/managed-by",
    "helm.sh/chart",
}
TOKEN = ("Secret", NAMESPACE, "kvmesh-admin-token")
USERS = ("Secret", NAMESPACE, "kvmesh-redis-users")
RELEASES = ("1.28", "1.29.1", "1.30", "1.31", "1.33")
LLAMA = {"namespace": "llm", "name": "vllm-llama", "selector": {"app": "vllm-llama"}}
QWEN = {"namespace": "qwen", "name": "vllm-qwen", "port": 80, "podPort": 8000}
LONG = {"namespace": "llm", "name": "a" * 39 + "-bcd-" + "e" * 18, "port": 10000, "selector": {"app": "long"}}
BASE: dict[str, Any] = {"image": "registry.example.com/kvmesh:0.1.0", "istioVersion": "1.28", "pools": [LLAMA]}
GATEWAY = {"gateways": [{"namespace": "istio-ingress", "name": "inference"}], "routes": [{"host": "llm.example.com"}]}
MODES: dict[str, dict[str, Any]] = {
    "gateway": GATEWAY,
    "sidecar": {"mode": "sidecar", "clients": [{"namespace": "apps"}]},
    "ambient-gateway": {"mode": "ambient-gateway", **GATEWAY},
}
OWN_NAMESPACE = [LLAMA | {"namespace": NAMESPACE}, LONG | {"namespace": NAMESPACE}]  # as native pools must have it
NATIVE: dict[str, Any] = {"mode": "inferencepool", "pools": OWN_NAMESPACE, "gateways": GATEWAY["gateways"]}
SEVERAL: dict[str, Any] = {
    "pools": [LLAMA, QWEN, LONG],
    "gateways": [
        {"namespace": "istio-system", "name": "ingress", "selector": {"istio": "ingress"}},
        {"namespace": "istio-system", "name": "second", "selector": {"a": "b", "c": "d"}, "serviceAccount": "other"},
        {"namespace": "edge", "name": "inference"},
    ],
    "routes": [
        {"host": "a.example.com", "route": "llm.both.1", "pool": "qwen/vllm-qwen"},
        {"host": "a.example.com", "pool": "llm/vllm-llama"},
        {"host": "*.example.org", "port": 8443, "pool": f"llm/{LONG['name']}"},
        {"host": "*", "port": 8080, "route": "llm.one.0", "pool": "llm/vllm-llama"},
    ],
}
SEVERAL_CLIENTS: dict[str, Any] = {
    "mode": "sidecar",
    "pools": [LONG, LLAMA, QWEN],
    "clients": [{"namespace": "web"}, {"namespace": "apps", "selector": {"asks": "yes", "team": "a"}}],
}
OWN_REDIS = {
    "redis": "rediss+sentinel://sentinel.redis.svc:26379/mymaster/0?username=kvmesh",
    "redisPasswordSecret": "redis-password",
    "redisSentinelPasswordSecret": "sentinel-password",
    "redisCaSecret": "redis-ca",
    "redisTlsSecret": "redis-tls",
}
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"{release} {mode}": {"istioVersion": release, **MODES[mode]} for release in RELEASES for mode in MODES},
    **{f"{release} native": NATIVE | {"istioVersion": release} for release in RELEASES},
    "native, in ambient": NATIVE | {"istioVersion": "1.31", "membership": "ambient", "monitoring": True},
    "native, namespaced": NATIVE | {"istioVersion": "1.31", "membership": "none", "scope": "namespaced"},
    "several": SEVERAL,
    "several clients": SEVERAL_CLIENTS,
    "several clients, buffered": SEVERAL_CLIENTS | {"bodyMode": "buffered"},
    "namespaced": SEVERAL | {"scope": "namespaced", "monitoring": True},
    "namespaced, all in one namespace": {**GATEWAY, "scope": "namespaced", "pools": [LLAMA | {"namespace": NAMESPACE}]},
    "monitoring": {**GATEWAY, "monitoring": True, "monitoringNamespace": "prometheus"},
    "fails open": {**GATEWAY, "failureMode": "FailOpen", "istioVersion": "1.30"},
    "routes replaced": {**GATEWAY, "routeSettings": "replace", "longestStreamSeconds": 61, "longestQueueSeconds": 30},
    "own Redis": {**GATEWAY, **OWN_REDIS},
    "a single Redis": {**GATEWAY, "redis": "rediss://redis.example.com:6380/0?username=a"},
    "a single Redis by address": {**GATEWAY, "redis": "redis://[fd00::1]"},
    "a hub of plain HTTP": {**GATEWAY, "fetchModels": ["org/a"], "hubEndpoint": "http://mirror.example.com"},
    "numbers": {
        **GATEWAY,
        "replicas": 3,
        "maxReplicas": 4,
        "indexerReplicas": 1,
        "drainSeconds": 7,
        "redisMemoryMib": 65,
        "redisStorageGib": 3,
        "hashSeed": "a \"seed\": #{{ of }} 7 'words'",
    },
    "a trust domain, in ambient": {**MODES["ambient-gateway"], "trustDomain": "prod.example.com", "monitoring": True},
    "a trust domain, clients": {**SEVERAL_CLIENTS, "trustDomain": "prod.example.com"},
    "OpenShift": {**GATEWAY, "runAsUser": False, "imagePullSecrets": ["one", "two"], "istioRevision": "canary"},
    "an image of tokenizers": {**GATEWAY, "tokenizersImage": "registry.example.com/tokenizers:1"},
    "models fetched": {**GATEWAY, "fetchModels": ["meta/llama@v1"], "hubEndpoint": "https://mirror.example.com"},
    "models fetched into a claim": {
        **MODES["ambient-gateway"],
        "fetchModels": ["meta/llama", "chat=org/model"],
        "modelCacheClaim": "cache",
        "hubTokenSecret": "hub",
    },
    "odds and ends": {
        **GATEWAY,
        "redisPasswordSecret": "redis-password",
        "tokenizersClaim": "models",
        "adminTokenSecret": "my.token",
        "podKeySecret": "vllm.key",
        "podKeySecretKey": "VLLM_API_KEY",
        "rootNamespace": "istio-config",
        "membership": "none",
        "poolsInMesh": False,
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "no pool": {**GATEWAY, "pools": []},
    "no gateway": {"routes": [{"host": "a.example.com"}]},
    "no host": {"gateways": GATEWAY["gateways"]},
    "a pool without a route": {**GATEWAY, "pools": [LLAMA, QWEN], "routes": [{"host": "a", "pool": "qwen/vllm-qwen"}]},
    "a route to no pool": {**GATEWAY, "routes": [{"host": "a", "pool": "qwen/vllm-qwen"}]},
    "a route to any of two": {**GATEWAY, "pools": [LLAMA, QWEN]},
    "no host name": {**GATEWAY, "routes": [{"host": "Llm.example.com"}]},
    "a pool twice": {**GATEWAY, "pools": [LLAMA, LLAMA]},
    "a bad name": {**GATEWAY, "pools": [{"namespace": "llm", "name": "Vllm"}]},
    "a bad port": {**GATEWAY, "pools": [LLAMA | {"port": 65536}]},
    "a host twice": {**GATEWAY, "routes": [{"host": "a"}, {"host": "a"}]},
    "clients with a gateway": {**GATEWAY, "clients": [{"namespace": "apps"}]},
    "a gateway with clients": {**MODES["sidecar"], **GATEWAY},
    "an old Istio": {**GATEWAY, "istioVersion": "1.27.9"},
    "no Istio": {**GATEWAY, "istioVersion": "latest"},
    "open, duplex": {**GATEWAY, "bodyMode": "duplex", "failureMode": "FailOpen"},
    "an authority of no Redis": {**GATEWAY, "redisCaSecret": "redis-ca"},
    "a password for all to read": {**GATEWAY, "redis": "redis://me:secret@redis:6379"},
    "no Redis": {**GATEWAY, "redis": "http://redis:6379"},
    "fewer than the fewest": {**GATEWAY, "replicas": 3, "maxReplicas": 2},
    "another root": {**GATEWAY, "scope": "namespaced", "rootNamespace": "istio-system"},
    "sidecars in ambient": {**MODES["ambient-gateway"], "membership": "sidecar"},
    "a revision without sidecars": {**GATEWAY, "membership": "none", "istioRevision": "canary"},
    "no trust domain": {**GATEWAY, "trustDomain": "*"},
    "a short drain": {**GATEWAY, "drainSeconds": 4},
    "two places of tokenizers": {**GATEWAY, "tokenizersClaim": "a", "tokenizersImage": "b"},
    "a read-only cache": {**GATEWAY, "fetchModels": ["org/a"], "tokenizersClaim": "a"},
    "a hub for nothing": {**GATEWAY, "hubTokenSecret": "hub"},
    "native pools elsewhere": NATIVE | {"istioVersion": "1.31", "pools": [LLAMA]},
    "native pools with a route": NATIVE | {"istioVersion": "1.31", "routes": GATEWAY["routes"]},
    "native pools, open": NATIVE | {"istioVersion": "1.31", "failureMode": "FailOpen"},
    "native pools, buffered": NATIVE | {"istioVersion": "1.31", "bodyMode": "buffered"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_chart_gives_what_install_gives(name: str, tmp_path: Path) -> None:
    assert_the_same(BASE | VARIANTS[name], tmp_path)


@pytest.mark.parametrize("seed", range(40))
def test_the_chart_gives_what_install_gives_whatever_is_chosen(seed: int, tmp_path: Path) -> None:
    assert_the_same(drawn(random.Random(seed)), tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_the_chart_refuses_what_install_refuses(name: str, tmp_path: Path) -> None:
    values = BASE | REFUSED[name]
    if values["pools"]:
        assert CliRunner().invoke(app, ["install", "--dry-run", *flags_of(values)]).exit_code != 0
    refused = run_helm("template", RELEASE, str(CHART), "--values", str(written(values, tmp_path)))
    assert refused.returncode != 0
    assert "values don't meet the specifications" in refused.stderr or "execution error" in refused.stderr, (
        refused.stderr
    )


def test_a_misspelt_value_is_refused(tmp_path: Path) -> None:
    values = written(BASE | GATEWAY | {"redisPaswordSecret": "x"}, tmp_path)
    refused = run_helm("template", RELEASE, str(CHART), "--values", str(values))
    assert "redisPaswordSecret" in refused.stderr


@pytest.mark.parametrize("mode", MODES)
def test_helm_has_nothing_against_it(mode: str, tmp_path: Path) -> None:
    values = written(BASE | MODES[mode], tmp_path)
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), "--values", str(values))


def assert_the_same(values: dict[str, Any], folder: Path) -> None:
    flags = flags_of(values)
    printed = CliRunner().invoke(app, ["install", "--dry-run", "--no-create-namespace", *flags])
    assert printed.exit_code == 0, (flags, printed.output, printed.exception)
    planned = _without_owner(objects(printed.stdout))
    templated = helm(
        *("template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--include-crds"),
        *("--values", str(written(values, folder))),
    )
    charted = _without_owner(objects(templated))
    assert (charted.pop(TOKEN, None) is None) == ("adminTokenSecret" in values)
    assert (charted.pop(USERS, None) is None) == ("redis" in values or "redisPasswordSecret" in values)
    assert charted.keys() == planned.keys()
    for key, document in planned.items():
        assert charted[key] == document, key


def _without_owner(part: Any) -> Any:
    """Drop the labels that name the installer."""
    if isinstance(part, list):
        return [_without_owner(each) for each in part]
    if not isinstance(part, dict):
        return part
    return {key: _without_owner(value) for key, value in part.items() if key not in OWNER_LABELS}


def written(values: dict[str, Any], folder: Path) -> Path:
    path = folder / "values.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def drawn(chance: random.Random) -> dict[str, Any]:
    """Draw values that `kvmesh install` takes."""
    while True:
        values = BASE | dict(_choices(chance))
        if CliRunner().invoke(app, ["install", "--dry-run", *flags_of(values)]).exit_code == 0:
            return values


def _choices(chance: random.Random) -> Iterator[tuple[str, Any]]:
    yield from chance.choice([*MODES.values(), NATIVE, SEVERAL, SEVERAL_CLIENTS]).items()
    yield "istioVersion", chance.choice(RELEASES)
    options: dict[str, list[Any]] = {
        "membership": ["sidecar", "ambient", "none"],
        "failureMode": ["FailOpen", "FailClose"],
        "bodyMode": ["duplex", "buffered"],
        "routeSettings": ["keep", "replace"],
        "scope": ["mesh", "namespaced"],
        "monitoring": [True, False],
        "runAsUser": [True, False],
        "poolsInMesh": [True, False],
        "istioRevision": ["canary"],
        "imagePullSecrets": [["one"], ["one", "two"]],
        "adminTokenSecret": ["token"],
        "podKeySecret": ["vllm"],
        "podKeySecretKey": ["key", "api.key"],
        "tokenizersClaim": ["models"],
        "modelCacheClaim": ["cache"],
        "fetchModels": [["org/a"], ["org/a@v1", "b=org/b"]],
        "hubTokenSecret": ["hub"],
        "redisPasswordSecret": ["redis-password"],
        "redisImage": ["registry.example.com/valkey@sha256:" + "a" * 64],
    }
    for name, each in options.items():
        if chance.random() < 0.4:
            yield name, chance.choice(each)
    if chance.random() < 0.4:
        yield "redis", "redis+cluster://redis.redis.svc:6379"
        for name in OWN_REDIS.keys() - {"redis"}:
            if chance.random() < 0.5:
                yield name, OWN_REDIS[name]
