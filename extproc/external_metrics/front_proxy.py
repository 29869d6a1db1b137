"""Who may ask: the API server, by the client certificate with which it hands requests on. Pure.

The cluster says in a ConfigMap whose certificates these are and which names they have. The API server has found out who
asks it, and whether that user may, before it hands a request on; it names the user in headers.
https://kubernetes.io/docs/tasks/extend-kubernetes/configure-aggregation-layer/#authentication-flow
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

NAMESPACE, NAME = "kube-system", "extension-apiserver-authentication"
READER_ROLE = "extension-apiserver-authentication-reader"  # a Role of every cluster, to be bound to who reads it
CA_KEY = "requestheader-client-ca-file"
NAMES_KEY = "requestheader-allowed-names"
USER_HEADERS_KEY = "requestheader-username-headers"


class FrontProxyError(Exception):
    """The ConfigMap is of no use; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontProxy:
    """What is let in."""

    authorities: str  # PEM: who signs the client certificate
    names: frozenset[str]  # that it may have as its common name; none: any
    user_headers: tuple[str, ...]  # one of which names the user

    def refusal(self, peer: Mapping[str, Any] | None, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Return why this request is refused, with its status; None: it is let in.

        `peer` is the client's certificate as Python's ssl gives it, once its authority was found right.
        """
        if not peer:
            return HTTPStatus.UNAUTHORIZED, "only the API server may ask here, with its front-proxy client certificate"
        name = common_name(peer)
        if self.names and name not in self.names:
            allowed = ", ".join(sorted(self.names))
            return (
                HTTPStatus.FORBIDDEN,
                f"the client certificate is that of {name!r}; only {allowed} may ask ({NAMES_KEY})",
            )
        if not any(headers.get(header) for header in self.user_headers):
            return HTTPStatus.UNAUTHORIZED, f"no user is named in {' or '.join(self.user_headers)}"
        return None


def common_name(peer: Mapping[str, Any]) -> str:
    """Return the common name of a certificate, "" where it has none."""
    parts = (part for relative in peer.get("subject", ()) for part in relative)
    return next((value for key, value in parts if key == "commonName"), "")


def read_front_proxy(document: Mapping[str, Any]) -> FrontProxy:
    """Read the ConfigMap. Raise FrontProxyError."""
    data = document.get("data") or {}
    authorities = data.get(CA_KEY) or ""
    if "BEGIN CERTIFICATE" not in authorities:
        raise FrontProxyError(
            f"ConfigMap {NAMESPACE}/{NAME} has no {CA_KEY}: the API server runs without --{CA_KEY}, so that no API of "
            "others can be served"
        )
    headers = _names(data, USER_HEADERS_KEY)
    if not headers:
        raise FrontProxyError(f"ConfigMap {NAMESPACE}/{NAME} names no {USER_HEADERS_KEY}")
    return FrontProxy(authorities=authorities, names=frozenset(_names(data, NAMES_KEY)), user_headers=headers)


def _names(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    try:
        listed = json.loads(data.get(key) or "[]")
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise FrontProxyError(f"ConfigMap {NAMESPACE}/{NAME}: {key} is no JSON list of names")
    return tuple(each for each in listed if each)
