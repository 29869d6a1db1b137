"""Who may do what: bearer tokens of users, and the RBAC objects in the store."""

import secrets
from collections.abc import Iterator
from typing import Any

from tests.kube_api.calls import Call
from tests.kube_api.errors import ApiError, Document, qualified
from tests.kube_api.store import Store

ADMIN = "admin"
_RBAC = "rbac.authorization.k8s.io"


class Access:
    """Tokens and their users. The user "admin" (token "admin", and no token at all) may do everything."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._users = {ADMIN: ADMIN}

    def token(self, user: str) -> str:
        """A new token for that user; older ones stay good until `revoke`."""
        token = secrets.token_urlsafe(24)
        self._users[token] = user
        return token

    def revoke(self, token: str) -> None:
        self._users.pop(token, None)

    def user_of(self, authorization: str | None, impersonated: str | None = None) -> str:
        """Who asks; the admin may speak for others, as `kubectl --as` does."""
        user = self._bearer(authorization)
        return impersonated if impersonated and user == ADMIN else user

    def _bearer(self, authorization: str | None) -> str:
        if not authorization:
            return ADMIN
        user = self._users.get(authorization.removeprefix("Bearer ").strip())
        if user is None:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return user

    def check(self, user: str, call: Call) -> None:
        """Raise 403 in the words of the real server unless a rule allows the call."""
        if not self.may(
            user, call.verb, call.resource.group, call.resource.plural, call.subresource, call.namespace, call.name
        ):
            raise self._forbidden(user, call)

    def may(self, user: str, verb: str, group: str, plural: str, subresource: str, namespace: str, name: str) -> bool:
        if user == ADMIN:
            return True
        wanted = f"{plural}/{subresource}" if subresource else plural
        return any(
            _in(rule.get("verbs"), verb)
            and _in(rule.get("apiGroups"), group)
            and (_in(rule.get("resources"), wanted) or f"*/{subresource}" in rule.get("resources", ()))
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for rule in self._rules(user, namespace)
        )

    def _rules(self, user: str, namespace: str) -> Iterator[Document]:
        for binding in self._store.objects((_RBAC, "clusterrolebindings")).values():
            if _binds(binding, user):
                yield from self._role(("", binding["roleRef"]["name"]), "clusterroles")
        for (where, _), binding in self._store.objects((_RBAC, "rolebindings")).items():
            if namespace and where == namespace and _binds(binding, user):
                reference = binding["roleRef"]
                cluster_wide = reference["kind"] == "ClusterRole"
                at = ("" if cluster_wide else where, reference["name"])
                yield from self._role(at, "clusterroles" if cluster_wide else "roles")

    def _role(self, at: tuple[str, str], plural: str) -> list[Document]:
        role = self._store.get((_RBAC, plural), at)
        return list((role or {}).get("rules") or ())

    @staticmethod
    def _forbidden(user: str, call: Call) -> ApiError:
        resource = call.resource
        plural = f"{resource.plural}/{call.subresource}" if call.subresource else resource.plural
        named = f' "{call.name}"' if call.name else ""
        where = f'in the namespace "{call.namespace}"' if call.namespace else "at the cluster scope"
        text = (
            f'{qualified(resource.plural, resource.group)}{named} is forbidden: User "{user}" cannot {call.verb} '
            f'resource "{plural}" in API group "{resource.group}" {where}'
        )
        details: dict[str, Any] = {"kind": resource.plural}
        if call.name:
            details["name"] = call.name
        if resource.group:
            details["group"] = resource.group
        return ApiError(403, "Forbidden", text, details)


def _in(values: Any, value: str) -> bool:
    return bool(values) and ("*" in values or value in values)


def _binds(binding: Document, user: str) -> bool:
    for subject in binding.get("subjects") or ():
        if subject["kind"] == "ServiceAccount":
            where = subject.get("namespace") or binding["metadata"].get("namespace", "")
            if user == f"system:serviceaccount:{where}:{subject['name']}":
                return True
        elif subject["name"] in ({user} if subject["kind"] == "User" else _groups(user)):
            return True
    return False


def _groups(user: str) -> set[str]:
    groups = {"system:authenticated"}
    if user.startswith("system:serviceaccount:"):
        groups |= {"system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}"}
    return groups
