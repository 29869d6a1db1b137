"""A Hugging Face hub for tests: two real HTTP servers, the hub and the CDN that it sends large files to.

It speaks what huggingface_hub 2.4 asks for: `GET /api/models/…` (also `/tree/…`), `HEAD` and `GET /…/resolve/…` with
the headers `X-Repo-Commit`, `ETag` and `X-Linked-*`, and the headers `X-Error-Code` of refusals. `faults` break it.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
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
        elif "/tree/" in self.asked_path:
            self._tree()
        elif self.asked_path.startswith("/api/models/"):
            self._model()
        else:
            self._file(self.asked_path.strip("/"))

    def _tree(self) -> None:
        name, _, revision = self.asked_path.removeprefix("/api/models/").partition("/tree/")
        commit = self._commit(name, revision, needs_access=False)
        if commit is not None:
            files = self.server.state.repositories[name].commits[commit]
            self.answer(200, json.dumps([_in_tree(path, content) for path, content in files.items()]).encode())

    def _model(self) -> None:
        name, _, revision = self.asked_path.removeprefix("/api/models/").partition("/revision/")
        commit = self._commit(name, revision or "main", needs_access=False)
        if commit is None:
            return
        siblings = [{"rfilename": path} for path in self.server.state.repositories[name].commits[commit]]
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
            self.answer(200, content, headers | {"ETag": f'"{_in_tree(path, content)["oid"]}"'})
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
        elif repository is None:
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


def _in_tree(path: str, content: bytes) -> dict[str, Any]:
    """Describe a file as the hub does: by its checksum in git, and where it is large by its own, too."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if len(content) >= LARGE_BYTES:
        digest = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    return entry


@contextmanager
def hub_server() -> Iterator[HubState]:
    """Serve an empty hub and its CDN until the end of the block."""
    state = HubState()
    with ExitStack() as stack:
        for place in ("hub", "cdn"):
            server = _Server(state, place)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            url = f"http://127.0.0.1:{server.server_address[1]}"
            setattr(state, "endpoint" if place == "hub" else "cdn", url)
        yield state


def other_content(handler: _Handler) -> bool:
    """Send something of the same length from the CDN."""
    if handler.server.place != "cdn":
        return False
    handler.answer(200, bytes(len(handler.server.state.blobs[handler.asked_path.strip("/")])))
    return True


def large_list(handler: _Handler) -> bool:
    """Answer half a GiB to what is asked about a model."""
    if not handler.asked_path.startswith("/api/models/org/large"):
        return False
    with suppress(ConnectionError):
        handler.answer(200, bytes(512 << 20))
    return True


def away(handler: _Handler) -> bool:
    """Answer nothing but 410, which is not asked again."""
    handler.answer(410, b"")
    return True
