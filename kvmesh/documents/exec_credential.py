"""Credentials that a program of the kubeconfig gives (`users[].user.exec`): a token, or a client certificate.

https://kubernetes.io/docs/reference/config-api/client-authentication.v1/
"""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvmesh.documents.documents import KubernetesConfigError

PLUGIN_SECONDS = 120.0  # it may open a browser
GROUP = "client.authentication.k8s.io"
VERSIONS = (f"{GROUP}/v1", f"{GROUP}/v1beta1")
OF_CLUSTER = ("server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority-data", "proxy-url")


def run_plugin(plugin: Mapping[str, Any], cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Run it and return what it gives, as keys of a kubeconfig's user. Raise KubernetesConfigError."""
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
