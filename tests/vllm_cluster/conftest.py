"""The cluster of tests/mesh_cluster and the environment with vLLM; run in a network of its own by `make test-vllm`."""

from tests.mesh_cluster.conftest import kube, secrets, started
from tests.vllm.conftest import tiny_model, vllm_environment

__all__ = ["kube", "secrets", "started", "tiny_model", "vllm_environment"]
