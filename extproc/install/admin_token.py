"""The Secret with the token of the admin pages: made once, by `kvmesh install`, and mounted by both roles. Pure.

It is no part of what `render` returns: a file that is applied again and again must not hold a token.
"""

from base64 import b64encode
from typing import Any

from extproc.install.labels import INSTALLATION, object_meta
from extproc.install.plan import InstallPlan

SECRET = "kvmesh-admin-token"  # noqa: S105 - its name
KEY = "token"
FOLDER = "/etc/kvmesh/admin"
VOLUME = "admin-token"


def secret_name(plan: InstallPlan) -> str:
    """Return the Secret that is mounted: ours, or the operator's own."""
    return plan.admin_token_secret or SECRET


def token_secret(plan: InstallPlan, *, token: str) -> list[dict[str, Any]]:
    """Return what is to be made where it is not there yet; nothing where the operator has a Secret of his own."""
    if plan.admin_token_secret:
        return []
    meta = object_meta(SECRET, plan.namespace)
    meta["labels"] |= {INSTALLATION: plan.namespace}
    data = {KEY: b64encode(token.encode("ascii")).decode("ascii")}
    return [{"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "data": data}]


def token_settings() -> dict[str, str]:
    """Return the setting that names the file."""
    return {"admin_token_file": f"{FOLDER}/{KEY}"}


def token_mount() -> dict[str, Any]:
    """Return the mount: of the whole Secret, so that a new token arrives."""
    return {"name": VOLUME, "mountPath": FOLDER, "readOnly": True}


def token_volume(plan: InstallPlan) -> dict[str, Any]:
    """Return the volume. Without the Secret the pods run, and nobody sees the pages."""
    secret = {"secretName": secret_name(plan), "defaultMode": 0o440, "optional": True}
    return {"name": VOLUME, "secret": secret}
