"""Simulated pods with `--api-key`, and the file with a key that is written anew."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from podsim.core.scheduler import EngineSettings
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.pod import PodSettings
from podsim.publisher import PublisherSettings
from podsim.server import RunningPod, running_pods

ENGINE = EngineSettings(total_blocks=400, prefill_tokens_per_second=1e6, inter_token_seconds=0.001)
KEY = "sk-planted-4d5e6f"


@asynccontextmanager
async def keyed_pod(*keys: str) -> AsyncIterator[RunningPod]:
    """A pod that one of these keys opens."""
    settings = PodSettings(max_model_len=4096, api_keys=keys, engine=ENGINE)
    folder, publisher = load_model_folder(TINY_MODEL), PublisherSettings(host="127.0.0.1")
    async with running_pods(settings, folder=folder, publisher=publisher) as [pod]:
        yield pod


def address_of(pod: RunningPod) -> str:
    return f"{pod.host}:{pod.port}"


def write_key(path: Path, key: str) -> Path:
    """Put another file into its place, as the kubelet does."""
    new = path.with_name("new")
    new.write_text(f"{key}\n", encoding="utf-8")
    return new.replace(path)
