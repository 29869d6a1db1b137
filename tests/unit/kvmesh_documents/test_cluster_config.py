"""Kubeconfigs are read as kubectl reads them, or refused with a word on what to change."""

import json
import sys
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from kvmesh.documents.cluster_config import IN_CLUSTER, read_cluster_config
from kvmesh.documents.documents import ClusterAccess, KubernetesConfigError

EXEC = "client.authentication.k8s.io/v1"


@pytest.fixture(autouse=True)
def _nobodys_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for name in ("KUBECONFIG", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


def kubeconfig(
    path: Path, *, name: str = "a", cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None
) -> Path:
    content = {
        "current-context": name,
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "llm"}}],
        "clusters": [{"name": name, "cluster": {"server": f"https://{name}.example"} | (cluster or {})}],
        "users": [{"name": name, "user": user or {}}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return path


def plugin(folder: Path, status: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the exec section of a program that prints `status` and keeps what it was told in `told.json`."""
    program = folder / "plugin.py"
    program.write_text(
        "import json, os, pathlib\n"
        f"pathlib.Path({str(folder / 'told.json')!r}).write_text(os.environ['KUBERNETES_EXEC_INFO'])\n"
        f"print(json.dumps({{'apiVersion': {EXEC!r}, 'kind': 'ExecCredential', 'status': {status!r}}}))\n"
    )
    return {"apiVersion": EXEC, "command": sys.executable, "args": [str(program)], "interactiveMode": "Never"} | more


def dressed(path: Path) -> httpx2.Request:
    request = httpx2.Request("GET", "https://a.example/api")
    read_cluster_config(ClusterAccess(kubeconfig=path)).dress(request)
    return request


def service_account(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir()
    for name, text in (("token", "t"), ("namespace", "n"), ("ca.crt", "")):
        (folder / name).write_text(text)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    return folder


def test_files_of_a_list_are_joined_and_the_first_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kubeconfig(tmp_path / "one" / "config", user={"client-certificate": "a.crt", "client-key": "a.key"})
    second = kubeconfig(tmp_path / "two" / "config", name="b", cluster={"certificate-authority": "b.crt"})
    third = kubeconfig(tmp_path / "three" / "config", cluster={"server": "https://not-this.example"})
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'nothing'}:{first}:{second}:{third}")
    chosen = read_cluster_config(ClusterAccess())
    other = read_cluster_config(ClusterAccess(context="b"))
    assert (chosen.context, chosen.server) == ("a", "https://a.example")
    assert chosen.login.user is not None
    assert chosen.login.user.client_cert == str(first.parent / "a.crt")
    assert (other.server, other.login.cluster.certificate_auth) == ("https://b.example", str(second.parent / "b.crt"))


def test_kubeconfigs_come_before_the_account_of_the_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    account = service_account(tmp_path / "account", monkeypatch)
    access = ClusterAccess(service_account=account)
    assert read_cluster_config(access).context == IN_CLUSTER
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config")))
    assert read_cluster_config(access).server == "https://a.example"


def test_the_usual_file_is_read_where_nothing_is_named(tmp_path: Path) -> None:
    kubeconfig(tmp_path / "home" / ".kube" / "config")
    assert read_cluster_config(ClusterAccess()).context == "a"


def test_a_plugin_gives_a_token(tmp_path: Path) -> None:
    authority = tmp_path / "ca.crt"
    authority.write_text("the authority")
    cluster = {"certificate-authority": "ca.crt", "tls-server-name": "kubernetes"}
    exec_section = plugin(tmp_path, {"token": "t-1"}, provideClusterInfo=True, env=[{"name": "A", "value": "1"}])
    found = read_cluster_config(
        ClusterAccess(kubeconfig=kubeconfig(tmp_path / "config", cluster=cluster, user={"exec": exec_section}))
    )
    assert found.login.user is not None
    assert found.login.user.token == "t-1"
    assert json.loads((tmp_path / "told.json").read_text()) == {
        "apiVersion": EXEC,
        "kind": "ExecCredential",
        "spec": {
            "interactive": False,
            "cluster": {
                "server": "https://a.example",
                "tls-server-name": "kubernetes",
                "certificate-authority-data": "dGhlIGF1dGhvcml0eQ==",
            },
        },
    }


def test_a_plugin_gives_a_client_certificate(tmp_path: Path) -> None:
    given = {"clientCertificateData": "CERT", "clientKeyData": "KEY"}
    path = kubeconfig(tmp_path / "config", user={"exec": plugin(tmp_path, given)})
    user = read_cluster_config(ClusterAccess(kubeconfig=path)).login.user
    assert user is not None
    assert (user.client_cert_data, user.client_key_data, user.token, user.exec) == ("Q0VSVA==", "S0VZ", None, None)


def test_a_token_file_is_found_beside_the_kubeconfig(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config", user={"tokenFile": "token"})
    user = read_cluster_config(ClusterAccess(kubeconfig=path)).login.user
    assert user is not None
    assert user.token_file == str(tmp_path / "token")


def test_requests_are_made_in_the_name_of_whom_the_kubeconfig_says(tmp_path: Path) -> None:
    user = {"as": "ann", "as-uid": "7", "as-groups": ["one", "two"], "as-user-extra": {"reason": ["r"]}}
    headers = dressed(kubeconfig(tmp_path / "config", user=user)).headers
    assert [(key, value) for key, value in headers.multi_items() if key.startswith("impersonate")] == [
        ("impersonate-user", "ann"),
        ("impersonate-uid", "7"),
        ("impersonate-group", "one"),
        ("impersonate-group", "two"),
        ("impersonate-extra-reason", "r"),
    ]
    assert headers["user-agent"].startswith("kvmesh/")


def test_the_servers_name_and_the_proxy_are_those_of_the_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://everywhere.example:3128")
    path = kubeconfig(tmp_path / "config", cluster={"tls-server-name": "kubernetes", "proxy-url": "http://p.example"})
    assert dressed(path).extensions["sni_hostname"] == "kubernetes"
    assert read_cluster_config(ClusterAccess(kubeconfig=path)).proxy == "http://p.example"
    plain = ClusterAccess(kubeconfig=kubeconfig(tmp_path / "plain"))
    assert read_cluster_config(plain).proxy == "http://everywhere.example:3128"
    monkeypatch.setenv("NO_PROXY", ".example")
    assert read_cluster_config(plain).proxy is None


@pytest.mark.parametrize(
    ("user", "cluster", "words"),
    [
        ({"auth-provider": {"name": "gcp"}}, {}, "auth-provider went from kubectl"),
        ({"as-groups": ["one"]}, {}, "need `as`"),
        ({"exec": {"apiVersion": "x/v2", "command": "c"}}, {}, "exec plugin c: x/v2 is not"),
        ({"exec": {"apiVersion": EXEC, "command": "/nonexistent", "installHint": "Get it."}}, {}, r"No such.*Get it"),
        ({"exec": {"apiVersion": EXEC, "command": "false"}}, {}, "ended with exit code 1"),
        ({"exec": {"apiVersion": EXEC, "command": "true"}}, {}, "printed no ExecCredential"),
        ({"exec": {"apiVersion": EXEC, "command": "true", "interactiveMode": "Always"}}, {}, "no terminal"),
        ({}, {"proxy-url": "socks5://p.example"}, "is not http:// or https://"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], words: str
) -> None:
    path = kubeconfig(tmp_path / "config", user=user, cluster=cluster)
    with pytest.raises(KubernetesConfigError, match=words):
        read_cluster_config(ClusterAccess(kubeconfig=path))


def test_a_name_that_is_not_there_is_told_with_those_that_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kubeconfig(tmp_path / "config")
    with pytest.raises(KubernetesConfigError, match=r"'b' is not among its contexts \(a\)"):
        read_cluster_config(ClusterAccess(kubeconfig=path, context="b"))
    with pytest.raises(KubernetesConfigError, match="there is no kubeconfig /nonexistent"):
        read_cluster_config(ClusterAccess(kubeconfig=Path("/nonexistent")))
    monkeypatch.setenv("KUBECONFIG", "/nonexistent:/neither")
    with pytest.raises(KubernetesConfigError, match="KUBECONFIG: there is no file /nonexistent, /neither"):
        read_cluster_config(ClusterAccess())
