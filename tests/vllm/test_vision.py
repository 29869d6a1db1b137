"""Real vision models on real servers: images get their tokens from /render, and what is predicted is in the cache.

The models are a LLaVA and a Qwen2-VL, tiny and with random weights (`tiny_vision`). Their events name an image by the
hash that /render has told, and where in a block it begins (`extra_keys`).
"""

import base64
import itertools
import struct
import uuid
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kv_indexer.events.vllm_events import decode_batch
from kv_indexer.events.zmq_sockets import ZmqReplaySource
from kvmesh.blocks.events import BlockStored
from tests.e2e.stack import Stack, eventually
from tests.vllm.environment import MODEL_DEADLINE_SECONDS, VllmEnvironment, ensure_torchvision, offline, run
from tests.vllm.servers import BLOCK_SIZE, MODEL_NAME, VllmPod, running_pods
from tests.vllm.test_stack import stack_before, text

CHAT = "/v1/chat/completions"
Color = tuple[int, int, int]


def colors(count: int) -> list[Color]:
    """Return colours that no picture has had."""
    return [(random[0], random[1], random[2]) for random in (uuid.uuid4().bytes for _ in range(count))]


def picture(color: Color, *, width: int = 280, height: int = 196) -> str:
    """Return a PNG of one colour as a data: URL."""
    rows = (b"\0" + bytes(color) * width) * height

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()


def said(words: str, *shown_colors: Color) -> dict[str, Any]:
    """Return what a user says of some pictures."""
    shown = [{"type": "image_url", "image_url": {"url": picture(color)}} for color in shown_colors]
    return {"role": "user", "content": [*shown, {"type": "text", "text": words}]}


def body(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL_NAME, "temperature": 0, "max_tokens": 4, "messages": list(messages)}


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def vision_pods(
    vllm_environment: VllmEnvironment,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[tuple[VllmPod, ...]]:
    folder = tmp_path_factory.mktemp("vision") / "model"
    logs = tmp_path_factory.mktemp("logs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ensure_torchvision(vllm_environment)))
        script = str(Path(__file__).parent / "tiny_vision.py")
        command = [str(vllm_environment.python), script, request.param, str(tiny_model), str(folder)]
        run(command, env=offline(), deadline_seconds=MODEL_DEADLINE_SECONDS)
        flags = ("--load-format", "dummy")
        running = running_pods(2, environment=vllm_environment, model_folder=folder, logs=logs, extra_flags=flags)
        pods = running.__enter__()
    try:
        yield pods
    finally:
        running.__exit__(None, None, None)


@pytest.fixture
async def stack(vision_pods: tuple[VllmPod, ...], tmp_path: Path) -> AsyncIterator[Stack]:
    async with stack_before(vision_pods, tmp_path) as running:
        yield running


async def send(stack: Stack, request: dict[str, Any]) -> tuple[str, int, int]:
    """Send a chat and wait until its blocks are indexed; return its pod, and what was predicted and what was cached."""
    answer = await stack.send("POST", CHAT, json=request)
    assert answer.status == 200, answer.body
    decision = (await stack.state())["decisions"][0]
    prompt = answer.json["usage"]["prompt_tokens"]
    assert (decision["degraded"], decision["prompt_tokens"]) == ([], prompt)

    def complete(explanation: Any) -> bool:
        held = {each["endpoint"]: each["matched_blocks"] for each in explanation["candidates"]}
        return bool(held[answer.upstream] >= (prompt - 1) // BLOCK_SIZE)

    await eventually(lambda: stack.explain(request, path=CHAT), complete)
    return answer.upstream, decision["matched_tokens"], answer.cached_tokens


async def stored(pod: VllmPod) -> list[BlockStored]:
    """Return what the pod says it has stored since its start."""
    (source,) = pod.get("/kv_event_sources").values()
    port = source["replay_endpoint"].rpartition(":")[2]
    context = zmq.Context[Any]()
    try:
        replay = ZmqReplaySource(context=context, address=f"tcp://127.0.0.1:{port}", on_malformed=lambda: None)
        frames = (await replay.replay(0)).frames
    finally:
        context.destroy(linger=0)
    events = [event for frame in frames for event in decode_batch(frame.payload).events]
    return [event for event in events if isinstance(event, BlockStored)]


async def test_a_picture_s_tokens_and_name_are_those_of_the_server_s_events(vision_pods: tuple[VllmPod, ...]) -> None:
    pod = vision_pods[0]
    request = body(said(text(2), *colors(1)))
    status, rendered = pod.post(f"{CHAT}/render", request)
    (name,), (place,) = (rendered["features"][field]["image"] for field in ("mm_hashes", "mm_placeholders"))
    assert status == 200
    begin, end = place["offset"], place["offset"] + place["length"]
    status, answer = pod.post(CHAT, request)
    assert status == 200, answer

    async def look() -> list[Any]:
        events = await stored(pod)
        return [event.extra_keys for event in events if name in str(event.extra_keys)]

    keys, *_ = await eventually(look, bool)
    blocks = [(number * BLOCK_SIZE, (number + 1) * BLOCK_SIZE) for number in range(len(keys))]
    assert list(keys) == [((name, begin - first),) if first < end and begin < last else None for first, last in blocks]
    assert sum(each is not None for each in keys) >= 2


async def test_chats_with_pictures_hit_exactly_as_predicted(stack: Stack) -> None:
    question, other = text(4), text(6)
    red, green, blue = colors(3)
    again = [await send(stack, body(said(question, red))) for _ in range(2)]
    pods, predicted, cached = zip(*again, strict=True)
    assert (len(set(pods)), predicted, predicted[0], predicted[1] > 3 * BLOCK_SIZE) == (1, cached, 0, True)
    # the same words and places under another picture share no block
    _, *of_another = await send(stack, body(said(question, green)))
    assert of_another == [0, 0]
    # pictures in another order, and the words of one chat under the pictures of another
    hits = []
    for shown, words in itertools.product(((red, green), (green, red), (red, blue)), (question, other)):
        for _ in range(2):
            _, expected, found = await send(stack, body(said(words, *shown)))
            hits.append((expected, found))
    assert [expected for expected, _ in hits] == [found for _, found in hits]
    assert min(found for _, found in hits[1::2]) > 5 * BLOCK_SIZE


async def test_a_conversation_goes_on_where_its_pictures_are(stack: Stack) -> None:
    first, *more = colors(4)
    messages = [said(text(3), first)]
    pods = set()
    for turn in range(3):
        pod, predicted, cached = await send(stack, body(*messages))
        assert (predicted, predicted > 0) == (cached, turn > 0)
        pods.add(pod)
        messages += [{"role": "assistant", "content": f"answer {turn}"}, said(text(2), more[turn])]
    assert len(pods) == 1


async def test_texts_are_predicted_beside_pictures_without_asking_a_pod(stack: Stack) -> None:
    messages = [{"role": "user", "content": text(5)}]
    for turn in range(2):
        _, predicted, cached = await send(stack, body(*messages))
        assert (predicted, predicted > 0) == (cached, turn > 0)
