"""`python -m tests.kube_api`: the server in a process of its own, for trying things out with kubectl."""

import argparse
import asyncio
import signal
import tempfile
from pathlib import Path

import yaml

from tests.kube_api.server import KubeApi, kube_api


async def serve(port: int, folder: Path | None, *, tls: bool) -> None:
    """Serve until interrupted or terminated; prints the line that points kubectl here."""
    stop = asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, stop.set)
    with tempfile.TemporaryDirectory() as home:
        async with kube_api(Path(home), tls=tls, port=port) as api:
            for path in sorted(folder.rglob("*.y*ml")) if folder else ():
                load(api, path)
            print(f"export KUBECONFIG={api.kubeconfig()}", flush=True)
            await stop.wait()


def load(api: KubeApi, path: Path) -> None:
    """Put every document of a YAML file into the server."""
    for document in yaml.safe_load_all(path.read_text()):
        if document:
            api.put(document)


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m tests.kube_api", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--folder", type=Path, help="YAML files to load first, in the order of their names")
    parser.add_argument("--tls", action="store_true")
    given = parser.parse_args()
    asyncio.run(serve(given.port, given.folder, tls=given.tls))


if __name__ == "__main__":
    main()
