"""Which models are to be fetched: how that is written, and the folder that each gets. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from extproc.errors import ConfigError
from extproc.models.model_folders import folder_parts

WRITTEN = "[NAME=]MODEL[@REVISION]"
COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9_][\w./-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedModel:
    """A model of the hub, and the name that its pods serve it under."""

    served: str  # the folder's name below the cache
    repository: str  # on the hub
    revision: str | None = None  # a branch, a tag or a commit; None: the branch main

    def folder(self, into: Path) -> Path:
        """Return where a picker looks for it below `into`."""
        return into.joinpath(*self.served.split("/"))


def parse_wanted(text: str) -> WantedModel:
    """Read `[NAME=]MODEL[@REVISION]`; raise ConfigError."""
    name, separator, source = text.rpartition("=")
    repository, at, revision = source.partition("@")
    served = name if separator else repository
    if _REPOSITORY.fullmatch(repository) is None:
        raise ConfigError(f"{text!r}: {repository!r} is no model of a hub; write {WRITTEN}, such as org/model@v1")
    if folder_parts(served) is None:
        raise ConfigError(f"{text!r}: {served!r} cannot be a folder's name; write {WRITTEN}, NAME as the pods serve it")
    if at and (_REVISION.fullmatch(revision) is None or ".." in revision):
        raise ConfigError(f"{text!r}: {revision!r} is no branch, tag or commit; write {WRITTEN}")
    return WantedModel(served=served, repository=repository, revision=revision or None)


def check_endpoint(url: str) -> str:
    """Return the address of a hub; raise ConfigError where it is none, or holds what not everybody may read."""
    if "@" in url or "?" in url or "#" in url:
        raise ConfigError(
            "--hub-endpoint: a user, a password or a token does not belong into an address that everybody may read"
        )
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or any(not 32 < ord(each) < 127 for each in url):
        raise ConfigError(f"--hub-endpoint {url[:200]!r}: must be https://HOST or http://HOST")
    return url


def parse_all(texts: Iterable[str]) -> tuple[WantedModel, ...]:
    """Read several, also with commas between them; raise ConfigError, also for two of one name."""
    found = [parse_wanted(part.strip()) for text in texts for part in text.split(",") if part.strip()]
    names = [each.served for each in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice!r} is given twice: a name has one folder")
    return tuple(found)
