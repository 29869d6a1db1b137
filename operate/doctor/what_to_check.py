"""Discovers what to check: the pools of the documents, the parts in the cluster, and without any option the settings.

These come from a running picker, a mesh of `kvmesh up`, or the kubeconfig.
"""

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from extproc.errors import ConfigError
from extproc.pages.findings import Finding
from extproc.pools.mesh import namespaces_read
from extproc.pools.pool_hosts import pool_name
from extproc.reach.view import snapshot_once
from extproc.settings.config import PickerSettings
from extproc.settings.running_mesh import running_meshes
from extproc.settings.shown_settings import ShownSettings, files_of, taken_over, without
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.bounded_answer import read_within
from kvmesh.documents.documents import ClusterAccess, KubernetesConfigError, Snapshot
from kvmesh.documents.pool_resolver import resolve_pools
from kvmesh.errors import SettingError
from kvmesh.plain_text import cut_end, printable
from operate.doctor.examine import DoctorSettings
from operate.options import DEFAULT_PICKER

ADVICE = (
    "name what to check: --picker URL of a running picker, --endpoints IP:PORT,…, or pools by --kubernetes or "
    "--policies FOLDER"
)
SEEN_LIMIT = 200  # characters of another program's message


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatToCheck:
    """The discovered settings, and messages about their source and their unusable parts."""

    settings: DoctorSettings
    words: Sequence[str]


async def find_what_to_check(settings: DoctorSettings, *, given: Collection[str]) -> WhatToCheck:
    """Ask the picker of --picker, or else the default address and meshes of `kvmesh up`; or else use a kubeconfig.

    Flags in `given` were set by the user and are kept. Raise ConfigError if nothing is found.
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
    url: str, shown: ShownSettings, settings: DoctorSettings, *, mesh: Mapping[str, Any] | None, given: Collection[str]
) -> WhatToCheck:
    words = [f"checking by the settings of the picker at {url}" + (" of `kvmesh up`" if mesh is not None else "")]
    missing = [(flag, path) for flag, path in files_of(shown) if flag not in given and not Path(path).exists()]
    if shown.policies and ("policies", shown.policies) in missing:
        raise ConfigError(
            f"the picker at {url} reads its pools from {shown.policies}, which is not on this machine: give --policies"
        )
    for flag, path in missing:
        words.append(f"{path} of the picker is not on this machine: give --{flag.replace('_', '-')}, or do without")
    if shown.redis_has_password and "redis" not in given:
        words.append("the picker's address of Redis has a password that it does not show: give --redis")
    mesh = mesh or {}
    found = replace(
        settings,
        picker=taken_over(without(shown, [path for _, path in missing]), settings.picker, given=given),
        picker_admin=url,
        indexer_admin=settings.indexer_admin or _url(mesh, "indexer_admin"),
        envoy_admin=settings.envoy_admin or _url(mesh, "envoy_admin"),
    )
    return WhatToCheck(settings=found, words=[printable(line) for line in words])


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSettings:
    """Why no settings were received."""

    words: str
    is_there: bool = False  # a picker answered but denied access


async def _ask(url: str, *, login: AdminLogin, timeout_seconds: float) -> ShownSettings | NoSettings:
    page = f"{url.rstrip('/')}/v1/settings"
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    try:
        headers, tls = login.headers(), login.tls()
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(page, headers=headers, ssl=tls, allow_redirects=False) as response,
        ):
            content = await read_within(response)
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
    """Return the first existing kubeconfig, or the mention of this pod's service account, or None."""
    named = os.environ.get("KUBECONFIG", "")
    paths = [Path(part) for part in named.split(os.pathsep) if part] or [Path("~/.kube/config").expanduser()]
    present = next((path for path in paths if path.is_file()), None)
    if present is not None:
        return str(present)
    return "this pod's service account" if os.environ.get("KUBERNETES_SERVICE_HOST") else None


def _url(mesh: Mapping[str, Any], name: str) -> str | None:
    value = mesh.get(name)
    return value if isinstance(value, str) else None


def snapshot_of(settings: PickerSettings, *, timeout_seconds: float) -> Snapshot:
    """Read the documents once. Raise ConfigError or KvmeshError."""
    try:
        return snapshot_once(
            settings.policies_folder,
            program="kvmesh-doctor",
            namespaces=namespaces_read(settings),
            timeout_seconds=timeout_seconds,
        )
    except KubernetesConfigError as error:
        raise ConfigError(f"--kubernetes: {error}") from error


def locate(settings: DoctorSettings) -> tuple[DoctorSettings, tuple[Finding, ...]]:
    """Complete the settings with parts found in the cluster; findings name the unreachable ones."""
    from operate.doctor.cluster_parts import locate_parts  # noqa: PLC0415 # lightkube: 0.1 s and 20 MB

    given = {"picker": settings.picker_admin, "indexer": settings.indexer_admin, "envoy-admin": settings.envoy_admin}
    named = [flag for flag, url in given.items() if url]
    spaces = settings.picker.namespaces
    located = asyncio.run(locate_parts(ClusterAccess(program="kvmesh-doctor"), named=named, namespaces=spaces))
    found = replace(
        settings,
        picker_admin=settings.picker_admin or located.urls.get("picker"),
        indexer_admin=settings.indexer_admin or located.urls.get("indexer"),
        envoy_admin=settings.envoy_admin or located.urls.get("envoy-admin"),
    )
    return found, located.findings


def asked_pools(snapshot: Snapshot, texts: Sequence[str]) -> frozenset[str]:
    """Return the pools of --pool (empty: all). Raise ConfigError if one does not exist."""
    names = resolve_pools(snapshot.documents).pools
    try:
        asked = frozenset(map(pool_name, texts))
    except ValueError as error:
        raise ConfigError(f"--pool: {error}") from error
    if missing := sorted(asked - names.keys()):
        raise ConfigError(f"--pool: there is no pool {missing[0]!r}, but {', '.join(sorted(names)) or 'none'}")
    return asked
