"""Secrets that a test plants in requests and settings, and the search for them in whatever a process lets out."""

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    """One of each kind; every value is unlike anything else that the mesh says."""

    prompt: str = "zebra7f3a quagga91bc okapi52de"
    system: str = "systemic4410 giraffe8812"
    tool: str = "toolsecret6621"
    end_user: str = "enduser2203"
    cache_salt: str = "saltysalt7741"
    authorization: str = "sk-planted-authorization-1f2e3d"
    api_key: str = "planted-api-key-5a6b7c"
    cookie: str = "session=planted-cookie-9d8e7f"
    subject: str = "planted-subject-3c4d5e"  # in the payload of a JWT
    query: str = "planted-query-0a1b2c"
    tenant: str = "planted-tenant-acme-8f7e6d"
    redis_password: str = "planted-redis-pass-4b5c6d"
    admin_token: str = "planted-admin-token-2e3f4a5b"
    wrong_token: str = "planted-wrong-token-6c7d8e9f"
    audit_key: str = "planted-audit-key-9e8d7c6b"

    @property
    def jwt(self) -> str:
        """A token whose payload names the subject; nobody has signed it."""
        parts = ({"alg": "none"}, {"sub": self.subject}, {"sig": "x"})
        return ".".join(base64.urlsafe_b64encode(json.dumps(each).encode()).decode().rstrip("=") for each in parts)

    def all(self) -> dict[str, str]:
        """Return each by its name."""
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"jwt": self.jwt}


def traces_of(secrets: Mapping[str, str]) -> dict[str, bytes]:
    """Return what a secret looks like where it has leaked: as it is, each word of it, as base64 and as hex."""
    found: dict[str, bytes] = {}
    for name, text in secrets.items():
        for word in {text, *text.split()}:
            raw = word.encode()
            found[f"{name} {word!r}"] = raw
            found[f"{name} {word!r} as hex"] = raw.hex().encode()
            for shift in range(3):  # base64 of a text that has it at any place
                middle = base64.b64encode(b"\0" * shift + raw)[4 if shift else 0 :]
                found[f"{name} {word!r} as base64, {shift}"] = middle.rstrip(b"=")[:-2]
    return found


def token_traces(name: str, tokens: Iterable[int]) -> dict[str, bytes]:
    """Return what token ids look like where they have leaked: as JSON, as Python prints them, as uint32."""
    ids = list(tokens)
    return {
        f"{name} as JSON tokens": ",".join(map(str, ids)).encode(),
        f"{name} as printed tokens": ", ".join(map(str, ids)).encode(),
        f"{name} as packed tokens": b"".join(each.to_bytes(4, "little") for each in ids),
    }


def leaks(places: Mapping[str, bytes], traces: Mapping[str, bytes]) -> list[str]:
    """Return where anything was found, with what stands around it."""
    found = []
    for place, content in places.items():
        for name, trace in traces.items():
            at = content.find(trace)
            if at >= 0:
                found.append(f"{place} has {name}: …{content[max(0, at - 80) : at + len(trace) + 40]!r}…")
    return found
