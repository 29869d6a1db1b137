"""Where pickers find tokenizer folders: a volume, and what fills it before they start. Pure.

Nothing is needed: without any of it the pods of each model are asked for tokens.
"""

from collections.abc import Mapping
from typing import Any

from extproc.errors import ConfigError
from extproc.hub.wanted_models import check_endpoint, parse_all
from extproc.install.plan import InstallPlan, MeshMembership
from extproc.install.pod_parts import LOCKED_DOWN, TMP_MOUNT, image_of

MODELS = "/models"
VOLUME = "models"
TOKEN_KEY = "token"  # noqa: S105 - of the Secret
CACHE_SIZE = "2Gi"  # of a node's disk: some sixty models, at up to 34 MB each
# Istio's own user. A pod's init containers run before its proxy, and whatever others send is led to it and lost
PROXY_USER = 1337
IMAGE_VOLUMES_SINCE = 31  # Kubernetes 1.31, with the feature ImageVolume; without asking since 1.35


def check_model_folders(plan: InstallPlan) -> None:
    """Raise ConfigError where what is said of tokenizer folders contradicts itself."""
    given = {
        "--tokenizers-claim": plan.tokenizers_claim,
        "--model-cache-claim": plan.model_cache_claim,
        "--tokenizers-image": plan.tokenizers_image,
    }
    flags = [flag for flag, value in given.items() if value]
    if len(flags) > 1:
        raise ConfigError(f"{' and '.join(flags)}: /models is one volume, give one of them")
    if plan.fetch_models and (plan.tokenizers_claim or plan.tokenizers_image):
        raise ConfigError(f"{flags[0]} is only read: give --model-cache-claim, or nothing, for --fetch-model")
    if plan.fetch_models:
        parse_all(plan.fetch_models)
    elif plan.hub_endpoint or plan.hub_token_secret:
        raise ConfigError("--hub-endpoint and --hub-token-secret are of --fetch-model")
    if plan.hub_endpoint:
        check_endpoint(plan.hub_endpoint)


def check_image_volumes(minor: int) -> None:
    """Raise ConfigError where Kubernetes 1.`minor` has no volumes of images."""
    if minor < IMAGE_VOLUMES_SINCE:
        raise ConfigError(
            f"--tokenizers-image: Kubernetes 1.{minor} has no image volumes, 1.{IMAGE_VOLUMES_SINCE} is the first that "
            "has: put the folders into a claim (--tokenizers-claim)"
        )


def lacks_image_volume(deployment: Mapping[str, Any] | None) -> bool:
    """Tell whether the API server has left the image out of the volume, as one without the feature ImageVolume does."""
    if deployment is None:
        return False
    volumes = deployment["spec"]["template"]["spec"].get("volumes") or ()
    return not any(each["name"] == VOLUME and "image" in each for each in volumes)


def model_volume(plan: InstallPlan) -> dict[str, Any] | None:
    """Return the volume that pickers see at /models, None where they see none."""
    if plan.tokenizers_claim:
        source: dict[str, Any] = {"persistentVolumeClaim": {"claimName": plan.tokenizers_claim, "readOnly": True}}
    elif plan.model_cache_claim:
        source = {"persistentVolumeClaim": {"claimName": plan.model_cache_claim}}
    elif plan.tokenizers_image:
        source = {"image": {"reference": plan.tokenizers_image, "pullPolicy": "IfNotPresent"}}
    elif plan.fetch_models:
        source = {"emptyDir": {"sizeLimit": CACHE_SIZE}}
    else:
        return None
    return {"name": VOLUME, **source}


def fetching_containers(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return the init container that fetches the models, or none.

    It ends well whatever becomes of the models: a picker whose hub is away asks the pods, and says so.
    """
    if not plan.fetch_models:
        return []
    options = [f"--tokenizers={MODELS}", "--best-effort", "--summary-file=/dev/termination-log"]
    environment: list[dict[str, Any]] = [{"name": "HF_HOME", "value": "/tmp/huggingface"}]  # noqa: S108
    if plan.hub_endpoint:
        environment.append({"name": "HF_ENDPOINT", "value": plan.hub_endpoint})
    if plan.hub_token_secret:
        source = {"name": plan.hub_token_secret, "key": TOKEN_KEY, "optional": True}
        environment.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": source}})
    is_behind_proxy = plan.membership is MeshMembership.SIDECAR and plan.run_as_user
    return [
        {
            "name": "fetch-models",
            **image_of(plan),
            "args": ["models", "fetch", *options, ",".join(plan.fetch_models)],
            "env": environment,
            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
            "securityContext": LOCKED_DOWN | ({"runAsUser": PROXY_USER} if is_behind_proxy else {}),
            "volumeMounts": [TMP_MOUNT, {"name": VOLUME, "mountPath": MODELS}],
        }
    ]
