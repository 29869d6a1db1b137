"""The real istiod over one file of objects: its configuration generation and xDS without an API server."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from operate.local.processes import HttpReady, ProcessSpec
from tests.e2e.stack import free_ports
from tests.e2e.supervised import HOST, supervised
from tests.mesh.go_programs import go_program

START_SECONDS = 60.0
# what only Istio's own Envoy has is left out, so that any Envoy takes what is sent
ENVIRONMENT: Mapping[str, str] = {
    "PILOT_ENABLE_METADATA_EXCHANGE": "false",
    "PILOT_ENABLE_ALPN_FILTER": "false",
    "PILOT_ENVOY_FILTER_STATS": "true",
    "XDS_AUTH_PLAINTEXT": "true",  # or nobody has an identity, and no gateway gets its TLS secret
}


@dataclass(frozen=True, kw_only=True)
class Istiod:
    """The running istiod."""

    xds: str  # ip:port
    http: str  # http://ip:port of /debug and /metrics

    async def filter_errors(self) -> dict[str, float]:
        """Return the EnvoyFilter patches that found nothing or could not be applied, and how often."""
        async with aiohttp.ClientSession() as client:
            await client.post(f"{self.http}/push")
            async with client.get(f"{self.http}/metrics") as response:
                lines = (await response.text()).splitlines()
        found = [line.rpartition(" ") for line in lines if line.startswith("pilot_envoy_filter_status{")]
        return {name: float(value) for name, _, value in found if 'result="applied"' not in name}


@asynccontextmanager
async def running_istiod(
    objects: Sequence[Mapping[str, Any]], folder: Path, *, mesh_config: Mapping[str, Any] | None = None
) -> AsyncIterator[Istiod]:
    """Start istiod with these objects; its log is `folder/istiod.log`."""
    written, config = folder / "objects.yaml", folder / "mesh_config.yaml"
    written.write_text(yaml.safe_dump_all(objects), encoding="utf-8")
    config.write_text(yaml.safe_dump(dict(mesh_config or {})), encoding="utf-8")
    xds, http = free_ports(2)
    istiod = Istiod(xds=f"{HOST}:{xds}", http=f"http://{HOST}:{http}")
    flags = {"objects": written, "mesh-config": config, "xds": istiod.xds, "http": f"{HOST}:{http}"}
    spec = ProcessSpec(
        name="istiod",
        argv=(str(go_program("istiod")), "files", *(f"--{name}={value}" for name, value in flags.items())),
        environment=dict(ENVIRONMENT),
        ready=(HttpReady(url=f"{istiod.http}/metrics"),),
        ready_within_seconds=START_SECONDS,
    )
    async with supervised([spec], folder):
        yield istiod
