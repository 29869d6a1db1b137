"""How to reach a Kubernetes API, as it is configured. A value; `documents.kubernetes_client` acts on it."""

from dataclasses import dataclass
from pathlib import Path

from kvmesh.errors import KvIndexerError


class KubernetesConfigError(KvIndexerError):
    """There is no usable configuration of a Kubernetes API; the message says what was looked for."""

    reason = "kubernetes-config"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """Where the API server is, and who we are there."""

    kubeconfig: Path | None = None  # None: $KUBECONFIG, else the pod's service account, else ~/.kube/config
    service_account: Path | None = None  # folder with token, ca.crt, namespace; None: where Kubernetes mounts it
