"""What a client of the admin pages sends: a token, a certificate.

Both go only to the address that the user named: send requests with `allow_redirects=False`.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

from kvmesh.admin.admin_credentials import load_authorities, load_own, read_tokens
from kvmesh.errors import SettingError
from kvmesh.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminLogin:
    """Files, read again at every use."""

    token_file: Path | None = setting(None, "File with the token for the admin pages; its first line counts.")
    ca_file: Path | None = setting(
        None, "PEM file with the authorities of the admin pages' certificate. Default: the system's.", "ca"
    )
    cert_file: Path | None = setting(None, "PEM file with the certificate that the admin pages are shown.", "cert")
    key_file: Path | None = setting(None, "PEM file with the key of --cert. Default: it is in that file.", "key")

    def require_usable(self) -> None:
        """Raise SettingError where a file cannot be used; called once for what came from the command line."""
        self.headers()
        self.tls()

    def headers(self) -> dict[str, str]:
        """Return the headers to send. Raise SettingError."""
        if self.token_file is None:
            return {}
        return {"authorization": f"Bearer {read_tokens(self.token_file)[0]}"}

    def tls(self) -> ssl.SSLContext | bool:
        """Return the context for https://; True: the default one. Raise SettingError."""
        if self.ca_file is None and self.cert_file is None and self.key_file is None:
            return True
        if self.key_file is not None and self.cert_file is None:
            raise SettingError("--key without --cert")
        context = ssl.create_default_context()
        if self.ca_file is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            load_authorities(context, self.ca_file, flag="--ca")
        load_own(context, self.cert_file, self.key_file, flags=("--cert", "--key"))
        return context
