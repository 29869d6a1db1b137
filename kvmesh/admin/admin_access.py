"""Decides who may see the admin pages, by the facts of a request and the wrong tokens that its address has sent.

Pure: time is an argument. It knows no files, no token texts and no HTTP library; `admin.admin_gate` calls it.
"""

from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from math import ceil
from pathlib import Path
from urllib.parse import urlsplit

from kvmesh.errors import SettingError
from kvmesh.settings import setting

WHAT_TO_DO = (
    "start it with --admin-token-file FILE (clients: --token-file), or with --admin-tls CERT,KEY and "
    "--admin-client-ca (clients: --cert); bound to loopback (--host 127.0.0.1) it needs neither"
)
TRIES_AT_ONCE = 10  # different wrong tokens of one address
SECONDS_A_TRY = 6.0  # until one of them is forgotten
REMEMBERED_ADDRESSES = 1024  # beyond this, the address that failed longest ago is forgotten
IPV6_NETWORK_BITS = 64  # one machine usually has a whole network of this size


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminAccess:
    """How an operator has protected the admin pages; a token or a client certificate opens them."""

    token_file: Path | None = setting(
        None,
        "File with admin tokens, one a line, at least 16 bytes each; reloaded on change. Default: none; the "
        "pages are open on loopback, closed elsewhere.",
        "admin_token_file",
    )
    tls: str | None = setting(
        None,
        "PEM file with the certificate of the admin pages; after a comma its key's, if separate. Reloaded on change.",
        "admin_tls",
        metavar="CERT[,KEY]",
    )
    client_ca: Path | None = setting(
        None, "PEM file with the CA of client certificates for the admin pages.", "admin_client_ca"
    )

    def __post_init__(self) -> None:
        if self.tls is None and self.client_ca is not None:
            raise SettingError("--admin-client-ca needs TLS: give --admin-tls, too")

    @property
    def is_set_up(self) -> bool:
        """Whether a token or a certificate could open the pages."""
        return self.token_file is not None or self.client_ca is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """The relevant facts of a request; the texts are raw headers, None if absent."""

    is_open: bool  # for a page that needs no token
    is_read: bool  # GET or HEAD
    host: str | None
    origin: str | None
    fetch_site: str | None
    fetch_mode: str | None
    has_certificate: bool  # one signed by the authority


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is refused; the message never repeats a client's text."""

    status: int
    reason: str
    message: str
    retry_after_seconds: int | None = None


TOKEN_MISSING = Refusal(
    status=401,
    reason="token-missing",
    message="this page needs a token: send the header Authorization: Bearer TOKEN (kvmesh: --token-file FILE)",
)
TOKEN_WRONG = Refusal(status=401, reason="token-wrong", message="this token is not one of those that are let in")
TOKENS_UNUSABLE = Refusal(
    status=503,
    reason="token-file-unusable",
    message="the file of --admin-token-file cannot be used, so nobody is let in; the log says what is wrong with it",
)
CERTIFICATE_MISSING = Refusal(
    status=403,
    reason="certificate-missing",
    message="this page needs a client certificate (kvmesh: --cert CERT,KEY)",
)
NOT_SET_UP = Refusal(
    status=403,
    reason="access-not-set-up",
    message=f"nobody can be let in here, for there is neither a token nor an authority for certificates: {WHAT_TO_DO}",
)
STRANGE_HOST = Refusal(
    status=403,
    reason="strange-host",
    message="these pages need no token, and answer for that to localhost, 127.0.0.1 and [::1] alone, not to another "
    f"name in the address; to use one, {WHAT_TO_DO.partition(';')[0]}",
)
CROSS_SITE = Refusal(
    status=403, reason="cross-site", message="a page of another site has sent this request: it is not answered"
)


def refusal(request: PageRequest, access: AdminAccess, *, is_loopback: bool) -> Refusal | None:
    """Return why a request is refused, whatever its token; None if at most a token is missing.

    `is_loopback`: the pages listen on this machine only. Without any protection they are open there. Then only the
    browser separates them from other sites, so the Host header must name this machine: DNS may resolve any other name
    to 127.0.0.1.
    """
    if is_loopback and not access.is_set_up and not _is_local_name(request.host):
        return STRANGE_HOST
    if request.is_open:
        return None
    if _is_cross_site(request):
        return CROSS_SITE
    return None if is_loopback or access.is_set_up else NOT_SET_UP


def needs_token(request: PageRequest, access: AdminAccess) -> bool:
    """Tell whether a request that is not refused must show a token."""
    return access.is_set_up and not request.is_open and not request.has_certificate


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a server on `host`; of names only localhost counts."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _is_local_name(host: str | None) -> bool:
    name = (urlsplit(f"//{host}").hostname or "") if _is_plain(host) else ""
    return is_loopback(name.removesuffix("."))


def _is_plain(host: str | None) -> bool:
    """Tell whether a Host header is only a host and a port, which `urlsplit` does not check."""
    if not host or any(each in "/?#@\\" or each <= " " for each in host):
        return False
    try:
        return urlsplit(f"//{host}").port is None or True
    except ValueError:
        return False


def _is_cross_site(request: PageRequest) -> bool:
    """Tell whether a browser sends this for a page of another site.

    The rule of Go's net/http.CrossOriginProtection (Sec-Fetch-Site, else Origin against Host, else it is no browser),
    extended to reads. Only a link may lead here: its page never sees the answer.
    """
    if request.is_read and request.fetch_mode == "navigate":
        return False
    if request.fetch_site is not None:
        return request.fetch_site not in {"same-origin", "none"}
    if request.origin is None:
        return False
    try:
        return urlsplit(request.origin).netloc.lower() != (request.host or "").lower()
    except ValueError:
        return True


@dataclass(slots=True, kw_only=True)
class _Tries:
    count: float
    at: float  # monotonic seconds
    last: tuple[bytes, ...]  # digests, newest last


class FailedTokens:
    """A leaky bucket of failed tries for each address."""

    def __init__(self) -> None:
        self._tries: OrderedDict[str, _Tries] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tries)

    def wait_seconds(self, address: str, *, now: float) -> int:
        """Return how long tokens of this address are ignored, in whole seconds rounded up; usually 0."""
        tries = self._tries.get(_network(address))
        if tries is None:
            return 0
        return max(0, ceil((self._left(tries, now=now) - TRIES_AT_ONCE + 1) * SECONDS_A_TRY))

    def failed(self, address: str, digest: bytes, *, now: float) -> bool:
        """Note a wrong token, by its digest; tell whether it counts.

        A repetition of one of the last few does not: it guesses nothing, and clients with old settings must not lock
        out others at their address (behind a sidecar: all of them).
        """
        network = _network(address)
        tries = self._tries.pop(network, None)
        if tries is None:
            tries = _Tries(count=0.0, at=now, last=())
            while len(self._tries) >= REMEMBERED_ADDRESSES:
                self._tries.popitem(last=False)
        self._tries[network] = tries
        counts = digest not in tries.last
        tries.count = self._left(tries, now=now) + counts
        tries.at = now
        tries.last = (*(each for each in tries.last if each != digest), digest)[-TRIES_AT_ONCE:]
        return counts

    @staticmethod
    def _left(tries: _Tries, *, now: float) -> float:
        return max(0.0, tries.count - (now - tries.at) / SECONDS_A_TRY)


def _network(address: str) -> str:
    """Return an IP address, or the upper half of an IPv6 address: one machine usually has the whole network."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is None:
        return str(IPv6Address(int(parsed) >> IPV6_NETWORK_BITS << IPV6_NETWORK_BITS))
    return str(parsed)
