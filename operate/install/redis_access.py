"""Access to Redis: its URL, the Secrets that picker and indexer mount, and the users of the bundled Redis. Pure.

The bundled Redis gets the hashes of its users' passwords, and each client its own password.
"""

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from kvmesh.redis.keys import PICKERS, PREFIX
from operate.install.objects import INSTALLATION, Document, kube_object
from operate.install.plan import REDIS, REDIS_PORT, InstallPlan, RedisKind

FOLDER = "/etc/kvmesh/redis"
USERS_SECRET = "kvmesh-redis-users"  # noqa: S105 - its name
PICKER_USER, INDEXER_USER, DASHBOARDS_USER = "picker", "indexer", "dashboards"
USERS = (PICKER_USER, INDEXER_USER, DASHBOARDS_USER)
PROBE = ["valkey-cli", "-e", "--user", "probe", "--pass", "none", "--no-auth-warning", "ping"]  # any password will do
_PREFIX, _PICKERS = PREFIX.decode(), PICKERS.decode()
_COMMANDS = "-@all +@read +@write -@dangerous -@scripting +eval +evalsha +multi +exec +ping +time +info +role"
_SHOWN = " ".join(f"%R~{_PREFIX}{name}" for name in ("heartbeat", "indexers", "registry", "slots"))
USER_RIGHTS = {
    # reads the index and shares its own state; its scripts name the bare prefix as their key
    PICKER_USER: f"%R~{_PREFIX}* ~{_PREFIX} ~{_PICKERS}* {_COMMANDS} +client|tracking",
    INDEXER_USER: f"~{_PREFIX}* {_COMMANDS}",
    DASHBOARDS_USER: f"{_SHOWN} -@all +dbsize +get +hgetall +info +ping",
}


def redis_url(plan: InstallPlan, user: str) -> str:
    """Return the URL for a user of the bundled Redis, or the user's own, with the paths of the mounted Secrets."""
    url = plan.redis_url or f"redis://{REDIS}.{plan.namespace}.svc:{REDIS_PORT}/0?username={user}"
    for part, _, files in _secrets(plan):
        for parameter, file in files.items():
            url += f"{'&' if '?' in url else '?'}{parameter}={FOLDER}/{part}/{file}"
    return url


def redis_mounts(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return the mounts of `redis_volumes`."""
    return [
        {"name": f"redis-{part}", "mountPath": f"{FOLDER}/{part}", "readOnly": True} for part, _, _ in _secrets(plan)
    ]


def redis_volumes(plan: InstallPlan, user: str) -> list[dict[str, Any]]:
    """Return the volumes with the Secrets; of the bundled Redis' users, the password of `user` alone."""
    own = {"items": [{"key": user, "path": "password"}]} if plan.redis is RedisKind.BUNDLED else {}
    return [
        {"name": f"redis-{part}", "secret": {"secretName": secret, **own, "defaultMode": 0o440}}
        for part, secret, _ in _secrets(plan)
    ]


def _secrets(plan: InstallPlan) -> list[tuple[str, str, dict[str, str]]]:
    """Return the mounted Secrets as (folder, Secret, {parameter of the URL: file})."""
    password = users_secret_name(plan) if plan.redis is RedisKind.BUNDLED else plan.redis_password_secret
    secrets = [
        ("password", password, {"password_file": "password"}),
        ("sentinel", plan.redis_sentinel_password_secret, {"sentinel_password_file": "password"}),
        ("ca", plan.redis_ca_secret, {"ca_file": "ca.crt"}),
        ("tls", plan.redis_tls_secret, {"cert_file": "tls.crt", "key_file": "tls.key"}),
    ]
    return [(part, secret, files) for part, secret, files in secrets if secret]


def users_secret_name(plan: InstallPlan) -> str:
    """Return the name of the bundled Redis' Secret: ours or the user's."""
    return plan.redis_password_secret or USERS_SECRET


def users_secret(plan: InstallPlan, *, passwords: Mapping[str, str]) -> list[Document]:
    """Return the Secret to create if missing, or nothing if the user names one or has a Redis."""
    if plan.redis_password_secret or plan.redis is not RedisKind.BUNDLED:
        return []
    hashes = {_hash_key(user): sha256(password.encode("ascii")).hexdigest() for user, password in passwords.items()}
    data = {key: b64encode(text.encode("ascii")).decode("ascii") for key, text in {**passwords, **hashes}.items()}
    mark = {INSTALLATION: plan.namespace}
    return [kube_object("Secret", USERS_SECRET, plan.namespace, labels=mark, type="Opaque", data=data)]


def user_arguments() -> list[str]:
    """Return the server's arguments for its users, which refer to `hash_environment`."""
    users = [
        "default off",
        "probe on nopass -@all +ping",
        *(f"{user} on #$({_hash_variable(user)}) {USER_RIGHTS[user]}" for user in USERS),
    ]
    return [part for user in users for part in ("--user", *user.split())]


def hash_environment(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return the server's environment: the hashes of its users' passwords."""
    secret = users_secret_name(plan)
    return [
        {"name": _hash_variable(user), "valueFrom": {"secretKeyRef": {"name": secret, "key": _hash_key(user)}}}
        for user in USERS
    ]


def _hash_variable(user: str) -> str:
    return f"{user.upper()}_SHA256"


def _hash_key(user: str) -> str:
    return f"{user}.sha256"
