"""Finds out what to check where no option says it: from a running picker, a mesh of `kvmesh up`, or the kubeconfig."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from extproc.doctor.examine import DoctorSettings
from extproc.errors import ConfigError
from extproc.settings.running_mesh import running_meshes
from extproc.settings.shown_settings import ShownSettings, files_of, taken_over, without
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.errors import SettingError
from kvmesh.plain_text import cut_end, printable

DEFAULT_PICKER = "http://127.0.0.1:9090"
ADVICE = (
    "name what to check: --picker URL of a running picker, --endpoints IP:PORT,…, or pools by --kubernetes or "
    "--policies FOLDER"
)
SEEN_LIMIT = 200  # characters of another program's words


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatToCheck:
    """The settings to check by, and in words where they are from and what of them cannot be used here."""

    settings: DoctorSettings
    words: Sequence[str]


async def find_what_to_check(settings: DoctorSettings, *, given: Collection[str]) -> WhatToCheck:
    """Ask the picker that is named, or that of the default address; a mesh of `kvmesh up`; look for a kubeconfig.

    `given` are the flags that were set by whoever calls: they stay. Raise ConfigError where nothing is found.
    """
    meshes = running_meshes()
    tried = []
    named = settings.picker_admin
    for url in dict.fromkeys([named] if named else [DEFAULT_PICKER, *(str(facts["admin"]) for facts in meshes)]):
        answer = await _ask(url, login=settings.login, timeout_seconds=settings.timeout_seconds)
        if isinstance(answer, ShownSettings):
            mesh = next((facts for facts in meshes if facts["admin"] == url), None)
            return _of_picker(url, answer, settings, mesh=mesh, given=given)
        if answer.is_there or named:
            raise ConfigError(f"{answer.words}; {ADVICE}" if not answer.is_there else answer.words)
        tried.append(answer.words)
    if (cluster := _kubeconfig()) is not None:
        picker = replace(settings.picker, kubernetes=True)
        words = [*tried, f"checking the cluster of {cluster}, as with --kubernetes"]
        return WhatToCheck(settings=replace(settings, picker=picker), words=words)
    nothing = "" if meshes else ", there is no mesh of `kvmesh up` on this machine"
    raise ConfigError(f"{'; '.join(tried)}{nothing}, and no kubeconfig: {ADVICE}")


def _of_picker(
    url: str,
    shown: ShownSettings,
    settings: DoctorSettings,
    *,
    mesh: Mapping[str, Any] | None,
    given: Collection[str],
) -> WhatToCheck:
    words = [f"checking by the settings of the picker at {url}" + (" of `kvmesh up`" if mesh is not None else "")]
    missing = {flag: text for flag, text in files_of(shown) if flag not in given and not Path(text).exists()}
    if shown.policies and "policies" in missing:
        raise ConfigError(
            f"the picker at {url} reads its pools from {shown.policies}, which is not on this machine: give --policies"
        )
    for flag, text in missing.items():
        words.append(f"{text} of the picker is not on this machine: give {_flag(flag)}, or do without")
    if shown.redis_has_password and "redis" not in given:
        words.append("the picker's address of Redis has a password that it does not show: give --redis")
    mesh = mesh or {}
    found = replace(
        settings,
        picker=taken_over(without(shown, missing.keys()), settings.picker, given=given),
        picker_admin=url,
        indexer_admin=settings.indexer_admin or _url(mesh, "indexer_admin"),
        envoy_admin=settings.envoy_admin or _url(mesh, "envoy_admin"),
    )
    return WhatToCheck(settings=found, words=[printable(line) for line in words])


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSettings:
    """Why there are none."""

    words: str
    is_there: bool = False  # a picker is, and does not let this client in


async def _ask(url: str, *, login: AdminLogin, timeout_seconds: float) -> ShownSettings | NoSettings:
    """Return a picker's settings, or why there are none."""
    page = f"{url.rstrip('/')}/v1/settings"
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    try:
        headers, tls = login.headers(), login.tls()
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(page, headers=headers, ssl=tls, allow_redirects=False) as response,
        ):
            content = await response.read()
            if response.status != 200:
                closed = response.status in (401, 403)
                why = "give --token-file, or --cert" if closed else "it is no picker, or an older one"
                words = f"{url} answered {response.status} to GET /v1/settings: {why}"
                return NoSettings(words=words, is_there=closed)
            return msgspec.json.decode(content, type=ShownSettings)
    except aiohttp.InvalidURL:
        return NoSettings(words=f"--picker {url!r} is not a URL like {DEFAULT_PICKER}")
    except SettingError as error:
        return NoSettings(words=str(error), is_there=True)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return NoSettings(words=f"{url} is not a picker's admin page: its answer has no settings")
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        words = getattr(getattr(error, "os_error", None), "strerror", None) or str(error) or "timed out"
        return NoSettings(words=f"no picker answers at {url} ({cut_end(printable(words), limit=SEEN_LIMIT)})")


def _kubeconfig() -> str | None:
    """Return the first file of kubectl's that is there, or this pod's account; None: there is no cluster to ask."""
    named = os.environ.get("KUBECONFIG", "")
    paths = [Path(part) for part in named.split(os.pathsep) if part] or [Path("~/.kube/config").expanduser()]
    present = next((path for path in paths if path.is_file()), None)
    if present is not None:
        return str(present)
    return "this pod's service account" if os.environ.get("KUBERNETES_SERVICE_HOST") else None


def _url(mesh: Mapping[str, Any], name: str) -> str | None:
    value = mesh.get(name)
    return value if isinstance(value, str) else None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
