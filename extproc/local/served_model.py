"""Asks the pods of --endpoints what they serve (`GET /v1/models`), and fills in what the flags leave open.

Called by `service` before it plans; pods that are simulated need no asking.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import msgspec

from extproc.local.envoy_config import SocketAddress
from extproc.local.errors import UnnamedModelError
from extproc.local.stack import StackSettings

ASK_SECONDS = 2.0
NO_PREFIX_ROUTING = (
    "requests are routed on load alone, without the prefix cache; name the model's folder in --tokenizer"
)


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of /v1/models; `root` is what vLLM was started with, a name or a folder on the pod's machine."""

    id: str
    root: str | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """What one pod serves; the base model comes first."""

    pod: SocketAddress
    cards: tuple[ModelCard, ...]


async def first_served_models(pods: Sequence[SocketAddress]) -> ServedModels | None:
    """The answer of the first pod that serves a model, or None; takes no longer than ASK_SECONDS for all of them."""
    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(_ask(session, pod) for pod in pods))
    return next((answer for answer in answers if answer is not None and answer.cards), None)


def fill_in_model(settings: StackSettings, served: ServedModels | None) -> tuple[StackSettings, tuple[str, ...]]:
    """Settings with a model, and with a tokenizer where the pod's model lies on this machine; and lines for the user.

    Raise UnnamedModelError if neither a flag nor a pod names the model.
    """
    if settings.model is None and served is None:
        pods = ", ".join(map(str, settings.pods))
        raise UnnamedModelError(
            f"no pod of --endpoints says which model it serves (GET /v1/models of {pods}); start one, or give --model"
        )
    model = settings.model or (served.cards[0].id if served else "")
    notes = [] if settings.model or served is None else [f"model {model}, as {served.pod} says"]
    folder = settings.tokenizer_folder
    if folder is None and served is not None:
        root = next((card.root for card in served.cards if card.id == model), None)
        folder = _tokenizer_folder(root)
        if folder is not None:
            notes.append(f"tokenizer {folder}, as {served.pod} says")
    if folder is None:
        notes.append(f"no tokenizer: {NO_PREFIX_ROUTING}")
    return replace(settings, model=model, tokenizer_folder=folder), tuple(notes)


async def _ask(session: aiohttp.ClientSession, pod: SocketAddress) -> ServedModels | None:
    try:
        async with asyncio.timeout(ASK_SECONDS), session.get(f"http://{pod}/v1/models") as response:
            models = msgspec.json.decode(await response.read(), type=_Models)
    except (TimeoutError, aiohttp.ClientError, msgspec.MsgspecError, OSError):
        return None
    return ServedModels(pod=pod, cards=models.data)


def _tokenizer_folder(root: str | None) -> Path | None:
    try:
        # a name like org/model is no folder here, as a rule
        return Path(root).resolve() if root and (Path(root) / "tokenizer.json").is_file() else None
    except (OSError, ValueError):
        return None  # a text that cannot be a path
