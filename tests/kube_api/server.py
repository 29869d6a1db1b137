"""The server as tests hold it: starts and stops it, puts objects in without HTTP, and causes trouble on demand."""

import asyncio
import copy
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from tests.kube_api.access import ADMIN
from tests.kube_api.certificates import make_server_certificate
from tests.kube_api.deleting import Deletion, delete
from tests.kube_api.errors import Document
from tests.kube_api.faults import Faults
from tests.kube_api.registry import Resource
from tests.kube_api.serving import STATE, handle
from tests.kube_api.state import State
from tests.kube_api.writing import Intent

MANAGER = Intent(manager="test", tracked=False)
_STATUS = Intent(manager="test", subresource="status", tracked=False)
_RBAC = "rbac.authorization.k8s.io"


class KubeApi:
    """A Kubernetes API server on a loopback port. Objects put in here pass through the same rules as over HTTP."""

    def __init__(self, folder: Path, *, tls: bool = False, port: int = 0) -> None:
        self.state = State()
        self.port = port
        self._folder = folder
        self._tls = make_server_certificate(folder) if tls else None
        self._runner: web.AppRunner | None = None
        for namespace in ("default", "kube-system"):
            self._namespace(namespace)

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def faults(self) -> Faults:
        return self.state.faults

    @property
    def requests(self) -> list[tuple[str, str, str, str]]:
        """What was asked: (verb, plural, path with query, user)."""
        return self.state.requests

    @property
    def clock_offset_seconds(self) -> float:
        return self.state.clock_offset_seconds

    @clock_offset_seconds.setter
    def clock_offset_seconds(self, seconds: float) -> None:
        self.state.clock_offset_seconds = seconds

    # -- the process

    async def come_up(self) -> None:
        """Listen; after `go_down` on the same port, with the same objects."""
        app = web.Application(client_max_size=3 * 1024 * 1024)
        app[STATE] = self.state
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        context = None
        if self._tls:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self._tls.cert, self._tls.key)
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=context).start()
        self.port = int(self._runner.addresses[0][1])

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        return await handle(request, self.state)

    async def go_down(self) -> None:
        """Stop listening and cut every connection; connecting is refused from now on."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for site in list(runner.sites):
                await site.stop()
            self._cut(runner)
            await runner.cleanup()

    async def restart(self) -> None:
        await self.go_down()
        await self.come_up()

    async def drop_connections(self) -> None:
        """Cut every connection without a word; new ones are welcome."""
        if self._runner is not None:
            self._cut(self._runner)
        await asyncio.sleep(0)

    @staticmethod
    def _cut(runner: web.AppRunner) -> None:
        for connection in runner.server.connections if runner.server else ():
            if connection.transport is not None:
                connection.transport.abort()

    # -- how clients get in

    def kubeconfig(self, token: str = ADMIN) -> Path:
        """A file for KUBECONFIG with that token."""
        cluster: Document = {"server": self.url}
        if self._tls:
            cluster["certificate-authority"] = str(self._tls.authority)
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}],
            "current-context": "test",
        }
        path = self._folder / f"kubeconfig-{self.port}-{abs(hash(token)):x}.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    def user(self, name: str, rules: Sequence[Document], namespace: str | None = None) -> str:
        """A user who may do just that, everywhere or in one namespace; returns a token."""
        scope = "Role" if namespace else "ClusterRole"
        title = name.rpartition(":")[2]
        metadata: Document = {"name": title, **({"namespace": namespace} if namespace else {})}
        self.put({"apiVersion": f"{_RBAC}/v1", "kind": scope, "metadata": metadata, "rules": list(rules)})
        self.put(
            {
                "apiVersion": f"{_RBAC}/v1",
                "kind": f"{scope}Binding",
                "metadata": metadata,
                "subjects": [{"kind": "User", "name": name, "apiGroup": _RBAC}],
                "roleRef": {"kind": scope, "name": title, "apiGroup": _RBAC},
            }
        )
        return self.state.access.token(name)

    def token(self, user: str) -> str:
        """A token for a user whose rights the stored (Cluster)RoleBindings tell, e.g. system:serviceaccount:NS:NAME."""
        return self.state.access.token(user)

    def service_account_folder(self, user: str) -> Path:
        """What a pod finds mounted: token, ca.crt, namespace. Needs `tls`."""
        if self._tls is None:
            raise ValueError("clients take in-cluster credentials over TLS only")
        folder = self._folder / ("account-" + user.replace(":", "-"))
        folder.mkdir(exist_ok=True)
        (folder / "ca.crt").write_bytes(self._tls.authority.read_bytes())
        (folder / "namespace").write_text(
            user.split(":")[2] if user.startswith("system:serviceaccount:") else "default"
        )
        (folder / "token").write_text(self.state.access.token(user))
        return folder

    def rotate_token(self, user: str) -> None:
        """Replace the mounted token, as the kubelet does every hour; the old one is refused from now on."""
        path = self.service_account_path(user) / "token"
        old = path.read_text()
        fresh = path.with_suffix(".new")
        fresh.write_text(self.state.access.token(user))
        fresh.replace(path)
        self.state.access.revoke(old)

    def service_account_path(self, user: str) -> Path:
        return self._folder / ("account-" + user.replace(":", "-"))

    # -- objects

    def put(self, document: Document) -> Document:
        """Create or replace, status included; its namespace is made where it is missing."""
        document = copy.deepcopy(document)
        resource = self._resource_of(document)
        metadata = document["metadata"]
        namespace = metadata.setdefault("namespace", "default") if resource.namespaced else ""
        if namespace and self.state.store.get(("", "namespaces"), ("", namespace)) is None:
            self._namespace(namespace)
        at = (namespace, metadata["name"])
        writer = self.state.writer
        status = document.get("status")
        old = self.state.store.get(resource.key, at)
        if old is None:
            stored = writer.create(resource, namespace, document, MANAGER)
        else:
            metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
            metadata.pop("uid", None)
            stored = writer.update(resource, at, document, MANAGER)
        if status is not None and resource.status and resource.kind != "CustomResourceDefinition":
            stored = writer.update(resource, at, {**copy.deepcopy(stored), "status": status}, _STATUS)
        return copy.deepcopy(stored)

    def get(self, kind: str, name: str) -> Document | None:
        """By "Pod" or "Kind.group", and "namespace/name" (or "name" for cluster-wide kinds)."""
        resource = self._resource(kind)
        namespace, _, short = name.rpartition("/")
        return copy.deepcopy(self.state.store.get(resource.key, (namespace, short)))

    def documents(self, kind: str) -> list[Document]:
        return [copy.deepcopy(one) for _, one in sorted(self.state.store.objects(self._resource(kind).key).items())]

    def remove(self, kind: str, name: str, **how: Any) -> None:
        """Delete as a client would; takes the fields of `Deletion`."""
        namespace, _, short = name.rpartition("/")
        delete(self.state.writer, self._resource(kind), (namespace, short), Deletion(**how))

    def install_crd(self, source: Path | Document) -> None:
        """Add the CustomResourceDefinitions of a YAML file, or one given as a document."""
        documents = yaml.safe_load_all(source.read_text()) if isinstance(source, Path) else [source]
        for document in documents:
            if document and document.get("kind") == "CustomResourceDefinition":
                self.put(document)

    def loose_crd(self, *, group: str, version: str, kind: str, plural: str, namespaced: bool = True) -> None:
        """A resource that takes any fields, for kinds whose definition a test does not have."""
        anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        self.put(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{plural}.{group}"},
                "spec": {
                    "group": group,
                    "scope": "Namespaced" if namespaced else "Cluster",
                    "names": {"kind": kind, "plural": plural},
                    "versions": [
                        {
                            "name": version,
                            "served": True,
                            "storage": True,
                            "subresources": {"status": {}},
                            "schema": {"openAPIV3Schema": anything},
                        }
                    ],
                },
            }
        )

    def _namespace(self, name: str) -> None:
        self.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def _resource(self, kind: str) -> Resource:
        found = self.state.registry.of_kind(kind)
        if found is None:
            raise LookupError(f"no resource of kind {kind}")
        return found

    def _resource_of(self, document: Document) -> Resource:
        found = self.state.registry.of_document(document)
        if found is None:
            raise LookupError(f"no resource for {document.get('apiVersion')} {document.get('kind')}")
        return found

    # -- trouble

    def compact(self) -> None:
        """Forget all history: watches from before get 410 Gone, continue tokens expire."""
        self.state.store.compact()

    def freeze(self) -> None:
        self.state.faults.freeze()

    def thaw(self) -> None:
        self.state.faults.thaw()

    def send_bookmarks(self) -> None:
        """Send one to every watch that allows them."""
        for watch in self.state.watches:
            watch.bookmark_asked = watch.bookmarks
        self.state.store.wake()

    def watches(self, plural: str) -> int:
        """How many watches of that resource are open."""
        return sum(watch.resource.plural == plural for watch in self.state.watches)


@asynccontextmanager
async def kube_api(folder: Path, *, tls: bool = False, port: int = 0) -> AsyncIterator[KubeApi]:
    """A running server with the namespaces default and kube-system; gone when the block ends."""
    server = KubeApi(folder, tls=tls, port=port)
    await server.come_up()
    try:
        yield server
    finally:
        server.thaw()
        await server.go_down()
