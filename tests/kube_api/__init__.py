"""A Kubernetes API server for tests: the real protocol over HTTP, all state in this process. Not for production."""

from tests.kube_api.server import KubeApi, kube_api

__all__ = ["KubeApi", "kube_api"]
