"""The HTTPS port of the external-metrics API: real TLS, right and wrong certificates, and files that change."""

import asyncio
import base64
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.external_metrics.api_server import ExternalMetricsServer
from extproc.external_metrics.front_proxy_watch import FrontProxyWatch
from extproc.external_metrics.settings import ExternalMetricsSettings
from extproc.install.external_metrics import server_names, serving_secret
from extproc.install.plan import InstallPlan
from extproc.install.serving_certificate import with_certificate
from extproc.local.ports import pick_free_port
from tests.kube_api.certificates import Authority, ServerCertificate, make_authority
from tests.unit.extproc_external_metrics.test_answers import BASE, POOLS
from tests.unit.extproc_install.test_installer import FakeCluster

HOST = "127.0.0.1"
NAME = server_names(InstallPlan())[0]
VALUE = f"{BASE}/namespaces/llm/kvmesh-wanted-replicas"
USER = {"X-Remote-User": "system:serviceaccount:kube-system:horizontal-pod-autoscaler"}


@dataclass(kw_only=True)
class Cluster:
    """What the API server of a cluster would have."""

    folder: Path
    front: Authority  # signs the front-proxy certificate
    proxy: ServerCertificate
    data: dict[str, str]
    fails: Exception | None = None

    async def config_map(self) -> Mapping[str, Any]:
        if self.fails is not None:
            raise self.fails
        return {"data": self.data}


def made_cluster(folder: Path) -> Cluster:
    front = authority(folder / "front")
    return Cluster(
        folder=folder,
        front=front,
        proxy=front.issue("proxy", subject="/CN=front-proxy-client"),
        data={
            "requestheader-client-ca-file": front.cert.read_text(),
            "requestheader-allowed-names": json.dumps(["front-proxy-client"]),
            "requestheader-username-headers": json.dumps(["X-Remote-User"]),
        },
    )


def authority(folder: Path) -> Authority:
    folder.mkdir()
    return make_authority(folder)


@dataclass(kw_only=True)
class Served:
    server: ExternalMetricsServer
    watch: FrontProxyWatch
    cluster: Cluster
    port: int
    trusted: bytes  # the certificate that the APIService trusts

    async def get(
        self,
        path: str = f"{VALUE}?labelSelector=pool%3Da%2Crole%3Dboth",
        *,
        shows: ServerCertificate | None,
        headers: Mapping[str, str] = USER,
        method: str = "GET",
    ) -> tuple[int, Any]:
        """Ask as the API server does: for the Service's name, whatever the address is."""
        context = ssl.create_default_context(cadata=self.trusted.decode())
        if shows is not None:
            context.load_cert_chain(shows.cert, shows.key)
        url = f"https://{HOST}:{self.port}{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, ssl=context, server_hostname=NAME, headers=headers) as response,
        ):
            return response.status, await response.json()


@asynccontextmanager
async def served(folder: Path, *, with_files: bool = True) -> AsyncIterator[Served]:
    cluster = made_cluster(folder)
    _, [secret] = with_certificate(FakeCluster(), InstallPlan(external_metrics=True))
    if with_files:
        write(folder, secret)
    settings = ExternalMetricsSettings(
        port=pick_free_port(host=HOST, avoid=set()), cert=folder / "tls.crt", key=folder / "tls.key"
    )
    watch = FrontProxyWatch(cluster.config_map)
    server = ExternalMetricsServer(settings, POOLS, host=HOST, watch=watch)
    running = asyncio.create_task(server.run())
    assert settings.port is not None
    try:
        yield Served(server=server, watch=watch, cluster=cluster, port=settings.port, trusted=content(secret, "ca.crt"))
    finally:
        running.cancel()
        await asyncio.wait([running])


def content(secret: dict[str, Any], name: str) -> bytes:
    return base64.b64decode(secret["data"][name])


def write(folder: Path, secret: dict[str, Any]) -> None:
    for name in ("tls.crt", "tls.key"):
        (folder / name).write_bytes(content(secret, name))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not holds():
            await asyncio.sleep(0.05)


async def test_the_api_server_gets_the_number_and_nobody_else_does(tmp_path: Path) -> None:
    async with served(tmp_path) as running:
        cluster = running.cluster
        await until(lambda: running.server.is_listening)
        code, body = await running.get(shows=cluster.proxy)
        assert (code, body["items"][0]["value"]) == (200, "4")
        code, body = await running.get(shows=None)
        assert (code, body["kind"], body["reason"]) == (401, "Status", "Unauthorized")
        code, body = await running.get(shows=cluster.front.issue("other", subject="/CN=somebody"))
        assert (code, body["reason"]) == (403, "Forbidden")
        assert "'somebody'; only front-proxy-client may ask" in body["message"]
        code, body = await running.get(shows=cluster.proxy, headers={})
        assert (code, body["message"]) == (401, "no user is named in X-Remote-User")
        stranger = authority(tmp_path / "stranger").issue("proxy", subject="/CN=front-proxy-client")
        with pytest.raises(aiohttp.ClientError):
            await running.get(shows=stranger)
        assert running.server.answers == {200: 1, 401: 2, 403: 1}


async def test_a_certificate_for_servers_alone_is_not_a_clients(tmp_path: Path) -> None:
    async with served(tmp_path) as running:
        await until(lambda: running.server.is_listening)
        made = running.cluster.front.issue(
            "server", subject="/CN=front-proxy-client", names="DNS:a\nextendedKeyUsage=serverAuth"
        )
        with pytest.raises(aiohttp.ClientError):
            await running.get(shows=made)


async def test_clients_that_speak_no_tls_and_methods_that_write_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as running:
        await until(lambda: running.server.is_listening)
        reader, writer = await asyncio.open_connection(HOST, running.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        writer.close()
        code, body = await running.get(shows=running.cluster.proxy, method="DELETE")
        assert (code, body["reason"]) == (405, "MethodNotAllowed")
        code, body = await running.get(BASE, shows=running.cluster.proxy)
        assert (code, body["kind"]) == (200, "APIResourceList")
        code, body = await running.get("/openapi/v2", shows=running.cluster.proxy)
        assert (code, body["reason"]) == (404, "NotFound")


async def test_it_waits_for_its_certificate_and_takes_up_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(tmp_path, with_files=False) as running:
        await until(lambda: "No such file" in running.server.problem)
        assert not running.server.is_listening
        _, [first] = with_certificate(FakeCluster(), InstallPlan(external_metrics=True))
        write(tmp_path, first)
        await until(lambda: running.server.is_listening)
        running.trusted = content(first, "ca.crt")
        assert (await running.get(shows=running.cluster.proxy))[0] == 200

        _, [second] = with_certificate(FakeCluster(), InstallPlan(external_metrics=True))
        (tmp_path / "tls.crt").write_bytes(content(second, "tls.crt"))  # the key is still the old one's
        await until(lambda: "no certificate with its key" in running.server.problem)
        assert (await running.get(shows=running.cluster.proxy))[0] == 200
        assert "served with the certificates from before" in caplog.text
        write(tmp_path, second)
        await until(lambda: running.server.problem == "")
        running.trusted = content(second, "ca.crt")
        assert (await running.get(shows=running.cluster.proxy))[0] == 200


async def test_a_cluster_that_changes_who_may_ask_shuts_the_old_certificate_out(tmp_path: Path) -> None:
    async with served(tmp_path) as running:
        await until(lambda: running.server.is_listening)
        before, after = running.cluster.proxy, authority(tmp_path / "after")
        running.cluster.data["requestheader-client-ca-file"] = after.cert.read_text()
        await running.watch.look()
        await running.server.look()
        assert (await running.get(shows=after.issue("proxy", subject="/CN=front-proxy-client")))[0] == 200
        with pytest.raises(aiohttp.ClientError):
            await running.get(shows=before)
        running.cluster.fails = OSError("the API server is away")
        await running.watch.look()
        assert running.watch.problem == "OSError: the API server is away"
        assert (await running.get(shows=after.issue("again", subject="/CN=front-proxy-client")))[0] == 200


async def test_nothing_is_served_where_it_cannot_be_read_who_may_ask(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = made_cluster(tmp_path)
    del cluster.data["requestheader-client-ca-file"]
    watch = FrontProxyWatch(cluster.config_map)
    with caplog.at_level(logging.ERROR):
        await watch.look()
        await watch.look()
    assert watch.current is None
    assert caplog.text.count("nobody is let in") == 1
    settings = ExternalMetricsSettings(port=1, cert=tmp_path / "tls.crt")
    server = ExternalMetricsServer(settings, POOLS, host=HOST, watch=watch)
    await server.look()
    assert not server.is_listening


async def test_a_port_that_is_taken_is_said_and_tried_again(tmp_path: Path) -> None:
    async with served(tmp_path, with_files=False) as running:
        blocker = await asyncio.start_server(lambda *_: None, HOST, running.port)
        _, [secret] = with_certificate(FakeCluster(), InstallPlan(external_metrics=True))
        write(tmp_path, secret)
        await until(lambda: "--external-metrics-port" in running.server.problem)
        blocker.close()
        await blocker.wait_closed()
        await until(lambda: running.server.is_listening)


def test_the_secret_that_is_made_has_the_name_that_the_api_server_compares() -> None:
    plan = InstallPlan(external_metrics=True, namespace="elsewhere")
    changed, [secret] = with_certificate(FakeCluster(), plan)
    assert changed.external_metrics_ca == secret["data"]["ca.crt"]
    assert secret == serving_secret(plan, cert=content(secret, "tls.crt"), key=content(secret, "tls.key"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=content(secret, "ca.crt").decode())
    [shown] = context.get_ca_certs()
    assert ("DNS", "kvmesh-external-metrics.elsewhere.svc") in shown["subjectAltName"]
