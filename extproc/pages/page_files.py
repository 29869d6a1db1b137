"""The page's files at `/` and `/page/…`, read once at start. Wired by `admin_http`; needs no token, shows no data."""

import hashlib
from collections.abc import Mapping
from importlib.resources import files

from aiohttp import web

CONTENT_TYPES: Mapping[str, str] = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
# Nothing but our own files, no frames, no forms that leave, and no way from a string to markup or code
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    # kept, but asked about every time: a picker of another version must not get the old one's scripts
    "Cache-Control": "no-cache",
}


class PageFiles:
    """Serves the files of `extproc/pages/page`, and nothing else: a name that is not among them is not looked for."""

    def __init__(self) -> None:
        folder = files("extproc.pages") / "page"
        self._files = {
            item.name: (item.read_bytes(), CONTENT_TYPES[item.name.rpartition(".")[2]])
            for item in folder.iterdir()
            if item.name.rpartition(".")[2] in CONTENT_TYPES
        }
        self._etags = {name: hashlib.sha256(content).hexdigest()[:32] for name, (content, _) in self._files.items()}

    @property
    def names(self) -> frozenset[str]:
        """The files that are served."""
        return frozenset(self._files)

    def routes(self) -> list[web.RouteDef]:
        """Return the routes; none of them needs a token."""
        return [web.get("/", self._index), web.get("/page/{name}", self._file)]

    async def _index(self, request: web.Request) -> web.Response:
        return self._answer(request, "index.html")

    async def _file(self, request: web.Request) -> web.Response:
        return self._answer(request, request.match_info["name"])

    def _answer(self, request: web.Request, name: str) -> web.Response:
        if name not in self._files:
            return web.Response(status=404, text="no such file\n", headers=HEADERS)
        etag = self._etags[name]
        if any(known.value in (etag, "*") for known in request.if_none_match or ()):
            response = web.Response(status=304, headers=HEADERS)
        else:
            content, content_type = self._files[name]
            response = web.Response(body=content, content_type=content_type, charset="utf-8", headers=HEADERS)
        response.etag = etag
        return response
