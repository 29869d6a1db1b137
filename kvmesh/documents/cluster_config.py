"""The Kubernetes API server of all our programs, and its login: reads kubeconfigs as kubectl does.

Imported only if Kubernetes is used, because lightkube takes 0.1 s and 20 MB.

An exec plugin (`users[].user.exec`) gives a token or a client certificate:
https://kubernetes.io/docs/reference/config-api/client-authentication.v1/
"""

import base64
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from ssl import SSLContext
from typing import Any
from urllib.parse import urlsplit

import httpx2
import yaml
from lightkube import KubeConfig
from lightkube.config.client_adapter import verify_cluster
from lightkube.config.kubeconfig import SERVICE_ACCOUNT, SingleConfig
from lightkube.config.models import User

from kvmesh.documents.documents import ClusterAccess, KubernetesConfigError

DEFAULT_KUBECONFIG = "~/.kube/config"
IN_CLUSTER = "this pod's service account"
FILES_OF_CLUSTER = ("certificate-authority",)
FILES_OF_USER = ("client-certificate", "client-key", "tokenFile")
PLUGIN_SECONDS = 120.0  # it may open a browser
GROUP = "client.authentication.k8s.io"
VERSIONS = (f"{GROUP}/v1", f"{GROUP}/v1beta1")
OF_CLUSTER = ("server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority-data", "proxy-url")


def run_plugin(plugin: Mapping[str, Any], cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Run the plugin and return its credentials, as keys of a kubeconfig's user. Raise KubernetesConfigError."""
    command, spoken = plugin.get("command", ""), plugin.get("apiVersion")
    if spoken not in VERSIONS:
        raise KubernetesConfigError(f"kubeconfig: exec plugin {command}: {spoken} is not {' or '.join(VERSIONS)}")
    interactive = sys.stdin.isatty() and plugin.get("interactiveMode") != "Never"
    if plugin.get("interactiveMode") == "Always" and not interactive:
        raise KubernetesConfigError(f"kubeconfig: exec plugin {command} wants to ask you, and there is no terminal")
    told = {"apiVersion": spoken, "kind": "ExecCredential", "spec": {"interactive": interactive}}
    if plugin.get("provideClusterInfo"):
        told["spec"] = {"interactive": interactive, "cluster": _cluster_info(cluster)}
    environment = os.environ | {each["name"]: each["value"] for each in plugin.get("env") or ()}
    try:
        done = subprocess.run(
            [command, *(plugin.get("args") or ())],
            env=environment | {"KUBERNETES_EXEC_INFO": json.dumps(told)},
            stdin=None if interactive else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            timeout=PLUGIN_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        hint = plugin.get("installHint") or ""
        raise KubernetesConfigError(f"kubeconfig: exec plugin {command}: {error}. {hint}".rstrip(". ")) from error
    if done.returncode != 0:
        raise KubernetesConfigError(f"kubeconfig: exec plugin {command} ended with exit code {done.returncode}")
    return _credential(command, done.stdout)


def _credential(command: str, printed: bytes) -> dict[str, Any]:
    try:
        status = json.loads(printed)["status"]
    except (ValueError, KeyError, TypeError) as error:
        raise KubernetesConfigError(f"kubeconfig: exec plugin {command} printed no ExecCredential") from error
    given = {"token": status.get("token")} if status.get("token") else {}
    if status.get("clientCertificateData") and status.get("clientKeyData"):
        for key, ours in (("clientCertificateData", "client-certificate-data"), ("clientKeyData", "client-key-data")):
            given[ours] = base64.b64encode(status[key].encode()).decode("ascii")
    if not given:
        raise KubernetesConfigError(f"kubeconfig: exec plugin {command} gave neither a token nor a certificate")
    return given


def _cluster_info(cluster: Mapping[str, Any]) -> dict[str, Any]:
    info = {key: cluster[key] for key in OF_CLUSTER if key in cluster}
    if file := cluster.get("certificate-authority"):
        info["certificate-authority-data"] = base64.b64encode(Path(file).read_bytes()).decode("ascii")
    for extension in cluster.get("extensions") or ():
        if extension.get("name") == f"{GROUP}/exec":
            info["config"] = extension.get("extension")
    return info


@dataclass(frozen=True, kw_only=True)  # no slots: the certificates are read once
class ClusterConfig:
    """One cluster, and one way to log in there."""

    context: str  # the context's name, or `IN_CLUSTER`
    login: SingleConfig  # lightkube's form of it
    headers: tuple[tuple[str, str], ...] = ()  # of every request
    server_name: str | None = None  # name that the certificate must have; None for the server's host
    proxy: str | None = None

    @property
    def server(self) -> str:
        """The API server's URL."""
        return self.login.cluster.server

    @cached_property
    def verify(self) -> SSLContext:
        """The TLS context that checks the server's certificate and shows ours."""
        return verify_cluster(self.login.cluster, self.login.user or User(), self.login.abs_file)

    def dress(self, request: httpx2.Request) -> None:
        """Complete a request with the parts that lightkube leaves to its users."""
        for name in dict(self.headers):
            request.headers.pop(name, None)
        request.headers = httpx2.Headers([*request.headers.multi_items(), *self.headers])
        request.headers["Accept-Encoding"] = "identity"
        if self.server_name is not None:
            request.extensions["sni_hostname"] = self.server_name


def read_cluster_config(access: ClusterAccess) -> ClusterConfig:
    """Return the API server and login to use. Raise KubernetesConfigError, which says what to fix.

    The order is kubectl's: the named file, the files of $KUBECONFIG together, ~/.kube/config, and last the service
    account of the pod that this runs in.
    """
    try:
        paths = _kubeconfigs(access)
        if paths:
            return _of_files(paths, access)
        if access.context is not None:
            raise KubernetesConfigError(f"there is no kubeconfig that could have a context {access.context!r}")
        return _of_service_account(access)
    except KubernetesConfigError:
        raise
    except Exception as error:  # foreign files: lightkube raises anything from AttributeError to YAMLError
        raise KubernetesConfigError(f"cannot reach a Kubernetes API: {type(error).__name__}: {error}") from error


def _kubeconfigs(access: ClusterAccess) -> list[Path]:
    if access.kubeconfig is not None:
        path = access.kubeconfig.expanduser()
        if not path.is_file():
            raise KubernetesConfigError(f"there is no kubeconfig {path}")
        return [path]
    named = [Path(each).expanduser() for each in os.environ.get("KUBECONFIG", "").split(os.pathsep) if each]
    found = [path for path in named if path.is_file()]
    if named and not found:
        raise KubernetesConfigError(f"KUBECONFIG: there is no file {', '.join(map(str, named))}")
    usual = Path(DEFAULT_KUBECONFIG).expanduser()
    return found or ([usual] if access.service_account is None and usual.is_file() else [])


def _of_service_account(access: ClusterAccess) -> ClusterConfig:
    login = KubeConfig.from_service_account(access.service_account or SERVICE_ACCOUNT).get()
    if login is None:
        raise KubernetesConfigError("this pod's service account is unusable")
    return ClusterConfig(context=IN_CLUSTER, login=login, headers=_user_agent(access))


def _of_files(paths: list[Path], access: ClusterAccess) -> ClusterConfig:
    merged = _merged(paths)
    name = access.context or merged["current-context"]
    if not name:
        files = ", ".join(map(str, paths))
        raise KubernetesConfigError(f"{files}: there is no current-context; name one (kubectl config use-context)")
    chosen = _named(merged, "contexts", name)
    cluster = _named(merged, "clusters", chosen.get("cluster") or "")
    user = _named(merged, "users", chosen["user"]) if chosen.get("user") else {}
    if "auth-provider" in user:
        raise KubernetesConfigError(
            f"kubeconfig, user {chosen['user']!r}: auth-provider went from kubectl in 1.26; use an exec plugin"
        )
    plugin = user.pop("exec", None)
    if plugin is not None and not {"token", "tokenFile"} & user.keys():
        user |= run_plugin(plugin, cluster)
    proxy = cluster.get("proxy-url") or _proxy_of_environment(cluster.get("server", ""))
    if proxy is not None and urlsplit(proxy).scheme not in {"http", "https"}:
        raise KubernetesConfigError(f"kubeconfig, context {name!r}: proxy-url {proxy!r} is not http:// or https://")
    login = KubeConfig.from_dict(
        {
            "current-context": name,
            "contexts": [{"name": name, "context": chosen}],
            "clusters": [{"name": chosen["cluster"], "cluster": cluster}],
            "users": [{"name": chosen.get("user") or "", "user": user}],
        }
    ).get()
    if login is None:
        raise KubernetesConfigError(f"kubeconfig: the context {name!r} is unusable")
    return ClusterConfig(
        context=name,
        login=login._replace(user=login.user or User()),
        headers=(*_user_agent(access), *_impersonation(user)),
        server_name=cluster.get("tls-server-name"),
        proxy=proxy,
    )


def _merged(paths: list[Path]) -> dict[str, Any]:
    """Join files as kubectl does: for each name, and for the current context, the first file counts."""
    merged: dict[str, Any] = {"current-context": "", "contexts": {}, "clusters": {}, "users": {}}
    for path in paths:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        if not isinstance(content, dict):
            raise KubernetesConfigError(f"{path} is no kubeconfig")
        merged["current-context"] = merged["current-context"] or content.get("current-context") or ""
        for plural, files in (("contexts", ()), ("clusters", FILES_OF_CLUSTER), ("users", FILES_OF_USER)):
            for entry in content.get(plural) or ():
                value = dict(entry.get(plural.removesuffix("s")) or {})
                value |= {key: str(path.parent / value[key]) for key in files if value.get(key)}
                merged[plural].setdefault(entry["name"], value)
    return merged


def _named(merged: Mapping[str, Any], plural: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] | None = merged[plural].get(name)
    if found is None:
        known = ", ".join(sorted(merged[plural])) or "none"
        raise KubernetesConfigError(f"kubeconfig: {name!r} is not among its {plural} ({known})")
    return dict(found)


def _impersonation(user: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not user.get("as"):
        if any(key.startswith("as-") and value for key, value in user.items()):
            raise KubernetesConfigError("kubeconfig: as-uid, as-groups and as-user-extra need `as`, the user's name")
        return []
    groups = user.get("as-groups") or []
    extra = user.get("as-user-extra") or {}
    return [
        ("Impersonate-User", user["as"]),
        *([("Impersonate-Uid", user["as-uid"])] if user.get("as-uid") else []),
        *(("Impersonate-Group", group) for group in groups),
        *((f"Impersonate-Extra-{key}", value) for key, values in extra.items() for value in values),
    ]


def _proxy_of_environment(server: str) -> str | None:
    """Return the proxy from $HTTPS_PROXY and similar variables, as kubectl uses it."""
    url = urlsplit(server)
    if not url.hostname or urllib.request.proxy_bypass(url.hostname):
        return None
    return urllib.request.getproxies_environment().get(url.scheme)


def _user_agent(access: ClusterAccess) -> tuple[tuple[str, str], ...]:
    return (("User-Agent", f"{access.program}/{version('kvmesh')}"),)
