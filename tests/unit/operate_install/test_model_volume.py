"""Where pickers find tokenizer folders, and what fetches them."""

from typing import Any

import pytest

from extproc.errors import ConfigError
from operate.install.model_volume import HF_SETTINGS, check_models, lacks_image_volume
from operate.install.plan import MeshMembership
from operate.install.render import render
from tests.unit.operate_install.sample_plans import one, plan

FETCHED = {"fetch_models": ("meta/llama@v1", "chat=org/model")}


def pod(**changes: Any) -> dict[str, Any]:
    """Return the picker's pod."""
    spec: dict[str, Any] = one(render(plan(**changes)), "Deployment", "kvmesh-picker")["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({}, None),
        ({"tokenizers_claim": "folders"}, {"persistentVolumeClaim": {"claimName": "folders", "readOnly": True}}),
        ({"model_cache_claim": "cache"}, {"persistentVolumeClaim": {"claimName": "cache"}}),
        ({"tokenizers_image": "r/t:1"}, {"image": {"reference": "r/t:1", "pullPolicy": "IfNotPresent"}}),
        (FETCHED, {"emptyDir": {"sizeLimit": "2Gi"}}),
        (FETCHED | {"model_cache_claim": "cache"}, {"persistentVolumeClaim": {"claimName": "cache"}}),
    ],
)
def test_pickers_look_for_folders_where_a_volume_has_them(
    changes: dict[str, Any], source: dict[str, Any] | None
) -> None:
    spec = pod(**changes)
    [container] = spec["containers"]
    settings = {each["name"]: each.get("value") for each in container["env"]}
    mounts = {each["name"]: each for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    if source is None:
        assert "KVMESH_TOKENIZERS" not in settings
        assert not {"models"} & (mounts.keys() | volumes.keys())
    else:
        assert settings["KVMESH_TOKENIZERS"] == "/models"
        assert mounts["models"] == {"name": "models", "mountPath": "/models", "readOnly": True}
        assert volumes["models"] == {"name": "models"} | source


def test_models_are_fetched_before_a_picker_starts_and_never_keep_it_from_starting() -> None:
    [first] = pod(**FETCHED, hub_endpoint="https://mirror.example.com", hub_token_secret="hub")["initContainers"]
    assert first["command"][:2] == ["sh", "-c"]
    assert first["args"] == ["/models", "meta/llama@v1,chat=org/model", "/dev/termination-log"]
    assert {each["name"]: each["value"] for each in first["env"]} == {
        **HF_SETTINGS,
        "HF_ENDPOINT": "https://mirror.example.com",
        "HF_TOKEN_PATH": "/run/secrets/kvmesh/hub/token",
    }
    assert {each["mountPath"]: each.get("readOnly", False) for each in first["volumeMounts"]} == {
        "/tmp": False,
        "/models": False,
        "/run/secrets/kvmesh/hub": True,
    }
    assert "initContainers" not in pod()


@pytest.mark.parametrize(
    ("membership", "run_as_user", "user"),
    [
        (MeshMembership.SIDECAR, True, 1337),
        (MeshMembership.SIDECAR, False, None),
        (MeshMembership.AMBIENT, True, None),
        (MeshMembership.NONE, True, None),
    ],
)
def test_only_beside_a_sidecar_that_is_not_there_yet_it_runs_as_the_proxys_user(
    membership: MeshMembership, run_as_user: bool, user: int | None
) -> None:
    [first] = pod(**FETCHED, membership=membership, run_as_user=run_as_user)["initContainers"]
    assert first["securityContext"].get("runAsUser") == user
    assert first["securityContext"]["readOnlyRootFilesystem"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizers_claim": "a", "tokenizers_image": "b"}, "--tokenizers-claim and --tokenizers-image"),
        ({"tokenizers_claim": "a", "model_cache_claim": "b"}, "--tokenizers-claim and --model-cache-claim"),
        (FETCHED | {"tokenizers_claim": "a"}, "--tokenizers-claim is only read"),
        (FETCHED | {"tokenizers_image": "a"}, "--tokenizers-image is only read"),
        ({"fetch_models": ("org/a", "org/a@v2")}, "'org/a' is given twice"),
        ({"hub_endpoint": "https://mirror"}, "of --fetch-model"),
        ({"hub_token_secret": "hub"}, "of --fetch-model"),
        (FETCHED | {"hub_endpoint": "https://me:secret@mirror"}, "everybody may read"),
        (FETCHED | {"hub_endpoint": "ftp://mirror"}, "must be https://HOST"),
        (FETCHED | {"hub_endpoint": "https://[mirror"}, "must be https://HOST"),
        (FETCHED | {"hub_token_secret": "Not A Name"}, "--hub-token-secret"),
        ({"model_cache_claim": "Not A Name"}, "--model-cache-claim"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render(plan(**changes))


@pytest.mark.parametrize(
    "text",
    [
        *("", "../x", "org/../x", "a/b/c", "org/llama@", "org/llama@../x", "../up=org/llama", "=org/llama", "a b/c"),
        *("org/a,org/b", "$(id)=org/a", "--token=org/a", "org/a@v1;id", "a=b=org/c"),
    ],
)
def test_what_could_lead_elsewhere_is_no_model(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write \[NAME=\]MODEL\[@REVISION\]"):
        check_models([text])


def test_models_with_a_name_or_a_revision_of_their_own() -> None:
    check_models(["org/llama", "gpt2@v1.0", "chat=org/llama@refs/pr/1", "a/b/c=org/llama"])


def test_a_volume_that_the_api_server_has_emptied_is_seen() -> None:
    picker = one(render(plan(tokenizers_image="r/t:1")), "Deployment", "kvmesh-picker")
    assert not lacks_image_volume(picker)
    for volume in picker["spec"]["template"]["spec"]["volumes"]:
        volume.pop("image", None)
    assert lacks_image_volume(picker)
    assert not lacks_image_volume(None)
