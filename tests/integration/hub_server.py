"""A Hugging Face hub for tests: two real HTTP servers, the hub and the CDN that it sends large files to.

It speaks what huggingface_hub 2.4 asks for: `GET /api/models/…`, `HEAD` and `GET /…/resolve/…` with the headers
`X-Repo-Commit`, `ETag` and `X-Linked-*`, and the headers `X-Error-Code` of refusals. `faults` break it.
"""

import hashlib
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 1000  # such a file is on the CDN
COMMIT = "{:040x}".format


@dataclass(kw_only=True)
class Repository:
    """A model: files by commit, and what its branches and tags are."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: Mapping[str, bytes], *, branch: str = "main") -> str:
        """Add a commit, and move a branch to it."""
        name = COMMIT(len(self.commits) + 1)
        self.commits[name] = dict(files)
        self.refs[branch] = name
        return name


@dataclass(frozen=True, kw_only=True)
class Request:
    """What somebody asked for."""

    place: str  # hub, or cdn
    method: str
    path: str
    token: str | None


Fault = Callable[["_Handler"], bool]  # answers in place of the hub, or returns False


@dataclass(kw_only=True)
class HubState:
    """What the hub has, and what it was asked."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_right"
    blobs: dict[str, bytes] = field(default_factory=dict)  # of the CDN, by sha256
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    endpoint: str = ""
    cdn: str = ""
    describes_files: bool = True  # mirrors may leave out sizes and checksums

    def repository(self, name: str, files: Mapping[str, bytes]) -> Repository:
        """Add a model with one commit."""
        made = self.repositories[name] = Repository()
        made.commit(files)
        return made

    def asked(self, place: str) -> list[str]:
        """Return the paths that a place was asked for."""
        return [each.path for each in self.requests if each.place == place]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Server"

    def log_message(self, *_: object) -> None:
        """Be quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        state = self.server.state
        bearer = self.headers.get("Authorization")
        self.token = bearer.removeprefix("Bearer ") if bearer else None
        self.asked_path = unquote(urlsplit(self.path).path)
        state.requests.append(
            Request(place=self.server.place, method=self.command, path=self.asked_path, token=self.token)
        )
        if any(fault(self) for fault in list(state.faults)):
            return
        if self.server.place == "cdn":
            self.answer(200, state.blobs[self.asked_path.strip("/")])
        elif self.asked_path.startswith("/api/models/"):
            self.answer_model()
        else:
            self._file(self.asked_path.strip("/"))

    def answer_model(self) -> None:
        name, _, revision = self.asked_path.removeprefix("/api/models/").partition("/revision/")
        commit = self._commit(name, revision or "main", needs_access=False)
        if commit is None:
            return
        files = self.server.state.repositories[name].commits[commit]
        siblings = [_described(path, content) for path, content in files.items()]
        if not self.server.state.describes_files:
            siblings = [{"rfilename": path} for path in files]
        self.answer(200, json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings}).encode())

    def _file(self, rest: str) -> None:
        name, _, where = rest.partition("/resolve/")
        revision, _, path = where.partition("/")
        commit = self._commit(name, revision, needs_access=True)
        if commit is None:
            return
        content = self.server.state.repositories[name].commits[commit].get(path)
        if content is None:
            self.refuse(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": commit}
        if len(content) < LARGE_BYTES:
            self.answer(200, content, headers | {"ETag": f'"{_described(path, content)["blobId"]}"'})
            return
        digest = hashlib.sha256(content).hexdigest()
        self.server.state.blobs[digest] = content
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        self.answer(302, b"", headers | linked | {"Location": f"{self.server.state.cdn}/{digest}"})

    def _commit(self, name: str, revision: str, *, needs_access: bool) -> str | None:
        """Return the commit, or refuse as the hub does: what may not be seen is not there."""
        repository = self.server.state.repositories.get(name)
        known = self.token == self.server.state.token
        if self.token is not None and not known:
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif repository is None or (repository.private and not known):
            status = 404 if known else 401
            self.refuse(status, "RepoNotFound" if known else "", "Repository not found")
        elif repository.gated and needs_access and not known:
            self.refuse(401, "GatedRepo", "Access to model is restricted. You must be authenticated to access it.")
        elif (commit := repository.refs.get(revision, revision)) not in repository.commits:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return commit
        return None

    def refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self.answer(status, b"{}", {name: value for name, value in headers.items() if value})

    def answer(
        self, status: int, content: bytes, headers: Mapping[str, str] | None = None, *, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        if length is not None and length != len(content):
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, state: HubState, place: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.state, self.place = state, place

    def handle_error(self, *_: object) -> None:
        """Clients that hang up are part of the tests."""


def _described(path: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    described: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": blob}
    if len(content) >= LARGE_BYTES:
        digest = hashlib.sha256(content).hexdigest()
        described["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
    return described


@contextmanager
def hub_server(*, tls: ssl.SSLContext | None = None) -> Iterator[HubState]:
    """Serve an empty hub and its CDN until the end of the block."""
    state = HubState()
    with ExitStack() as stack:
        for place in ("hub", "cdn"):
            server = _Server(state, place)
            if tls is not None:
                server.socket = tls.wrap_socket(server.socket, server_side=True)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
            setattr(state, "endpoint" if place == "hub" else "cdn", url)
        yield state


def times(count: int, fault: Fault, *, where: str = "") -> Fault:
    """Break the first `count` requests whose path contains `where`."""
    left = [count]

    def once(handler: _Handler) -> bool:
        if where not in handler.path or left[0] <= 0:
            return False
        left[0] -= 1
        return fault(handler)

    return once


def status(code: int, **headers: str) -> Fault:
    """Answer with a status."""

    def answer(handler: _Handler) -> bool:
        handler.answer(code, b"", {name.replace("_", "-"): value for name, value in headers.items()})
        return True

    return answer


def cut_off(handler: _Handler) -> bool:
    """Send half of a file of the CDN and hang up."""
    content = handler.server.state.blobs[handler.asked_path.strip("/")]
    handler.answer(200, content[: len(content) // 2], length=len(content))
    return True


def other_content(handler: _Handler) -> bool:
    """Send something of the same length."""
    content = handler.server.state.blobs[handler.asked_path.strip("/")]
    handler.answer(200, bytes(len(content)))
    return True


def web_page(handler: _Handler) -> bool:
    """Send a page with status 200, as a proxy does that wants a login."""
    handler.answer(200, b"<html>Please log in</html>", {"Content-Type": "text/html"})
    return True


def moved(handler: _Handler) -> bool:
    """Send clients of the API to another host, which answers."""
    if not handler.asked_path.startswith("/api/"):
        return False
    if handler.server.place == "hub":
        handler.answer(307, b"", {"Location": handler.server.state.cdn + handler.path})
    else:
        handler.answer_model()
    return True


def trickle(handler: _Handler) -> bool:
    """Send a byte now and then, for ever: no read times out."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    while True:
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.05)
