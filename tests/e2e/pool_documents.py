"""The documents of a folder that a picker follows: pools, pods, policies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from operate.local.service import simulated_tokenizer

MODEL = "tiny"


def write_documents(folder: Path, name: str, *documents: Mapping[str, Any]) -> None:
    """Put a file into the folder, at once and whole."""
    path = folder / f".{name}.tmp"
    path.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    path.rename(folder / f"{name}.yaml")


def inference_pool(pool: str, *, port: int, ips: Sequence[str]) -> list[dict[str, Any]]:
    """Return a pool and its pods as the API has them."""
    namespace, _, name = pool.partition("/")
    declared = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": {"matchLabels": {"app": name}}, "targetPorts": [{"number": port}]},
    }
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{name}-{ip}", "namespace": namespace, "uid": ip, "labels": {"app": name}},
            "spec": {"containers": [{"name": "vllm"}]},
            "status": {"phase": "Running", "podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]},
        }
        for ip in ips
    ]
    return [declared, *pods]


def mesh_policy() -> dict[str, Any]:
    """Return the policy of the whole mesh: the model that all pods serve, and where its tokenizer is."""
    served = {"name": MODEL, "tokenizer": str(simulated_tokenizer())}
    return inference_policy("mesh", "istio-system", models={"served": [served]})


def inference_policy(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    """Return a policy."""
    return {
        "apiVersion": "kvmesh.io/v1alpha1",
        "kind": "InferencePolicy",
        "metadata": {"name": name, "namespace": namespace, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": spec,
    }
