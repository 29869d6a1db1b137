"""istio-proxy is built without many of Envoy's extensions: what we render needs none of those that it lacks."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from operate.install.plan import BodyMode, Mode
from operate.local.envoy_config import SocketAddress
from operate.local.processes import HttpReady, ProcessSpec, find_envoy
from tests.e2e.stack import free_ports
from tests.e2e.supervised import HOST, START_SECONDS, address, supervised
from tests.mesh.installations import FILTER_MODES, Installation
from tests.mesh.istio_envoys import without_what_istio_proxy_lacks

INSTALLATIONS = (
    *(Installation(minor=minor, mode=mode) for minor in (28, 31) for mode in FILTER_MODES),
    Installation(minor=28, mode=Mode.GATEWAY, body_mode=BodyMode.BUFFERED),
    Installation(minor=30, mode=Mode.GATEWAY),
)
# registered by match_delegate itself, which every Envoy has, and not listed
UNLISTED = frozenset({"envoy.extensions.filters.common.matcher.action.v3.SkipFilter"})


def types_in(value: Any) -> Iterator[str]:
    """Yield every message type that a document names."""
    if isinstance(value, dict):
        if "@type" in value:
            yield value["@type"].removeprefix("type.googleapis.com/")
        for each in value.values():
            yield from types_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from types_in(each)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> frozenset[str]:
    """The types that an Envoy takes which has what istio-proxy has."""
    return asyncio.run(_known(tmp_path_factory.mktemp("envoy")))


async def _known(folder: Path) -> frozenset[str]:
    (admin,) = free_ports(1)
    config = folder / "envoy.json"
    config.write_text(json.dumps({"admin": {"address": address(SocketAddress(host=HOST, port=admin))}}))
    spec = ProcessSpec(
        name="envoy",
        argv=(str(find_envoy()), "-c", str(config), "--disable-hot-restart", *without_what_istio_proxy_lacks()),
        ready=(HttpReady(url=f"http://{HOST}:{admin}/ready"),),
        ready_within_seconds=START_SECONDS,
    )
    async with (
        supervised([spec], folder),
        aiohttp.ClientSession() as http,
        http.get(f"http://{HOST}:{admin}/config_dump") as response,
    ):
        dump = await response.json()
    extensions = dump["configs"][0]["bootstrap"]["node"]["extensions"]
    return frozenset(name for each in extensions if not each.get("disabled") for name in each.get("type_urls", ()))


@pytest.mark.parametrize("installation", INSTALLATIONS, ids=str)
def test_istio_proxy_has_every_extension_that_an_installation_needs(
    installation: Installation, known: frozenset[str]
) -> None:
    named = {name for document in installation.documents() for name in types_in(document)}
    assert "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor" in named
    assert named - known == named & UNLISTED


def test_the_envoy_of_this_test_lacks_what_istio_proxy_was_seen_to_refuse(known: frozenset[str]) -> None:
    assert "envoy.extensions.matching.input_matchers.metadata.v3.Metadata" not in known
    assert "envoy.extensions.matching.common_inputs.network.v3.DynamicMetadataInput" not in known
