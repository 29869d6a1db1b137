"""The credentials of a client of the admin pages: a token, a certificate.

Both go only to the address that the user named: send requests with `allow_redirects=False`.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from kvmesh.admin.admin_credentials import certificate_files, load_authorities, load_own, read_tokens
from kvmesh.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminLogin:
    """Credential files, read again at every use."""

    token_file: Path | None = setting(None, "File with the admin token (its first line).")
    ca_file: Path | None = setting(None, "PEM file with the CA of the admin pages. Default: the system's.", "ca")
    cert: str | None = setting(
        None,
        "PEM file with the client certificate for the admin pages; after a comma its key's, if separate.",
        metavar="CERT[,KEY]",
    )

    def require_usable(self) -> None:
        """Raise SettingError if a file cannot be used; called once, for options from the command line."""
        self.headers()
        self.tls()

    def headers(self) -> dict[str, str]:
        """Return the headers to send. Raise SettingError."""
        if self.token_file is None:
            return {}
        return {"authorization": f"Bearer {read_tokens(self.token_file)[0]}"}

    def tls(self) -> ssl.SSLContext | bool:
        """Return the context for https://, or True for the default one. Raise SettingError."""
        if self.ca_file is None and self.cert is None:
            return True
        context = ssl.create_default_context()
        if self.ca_file is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            load_authorities(context, self.ca_file, flag="--ca")
        if self.cert is not None:
            load_own(context, *certificate_files(self.cert), flag="--cert")
        return context
