"""Read the bodies of prefill and decode legs with vLLM's own code; runs in the vLLM environment.

Called by `test_transfer_forms.py` as a subprocess, without a server. Reads JSON from standard input:
{"bodies": [[path, body]], "asked": Mooncake's parameters for the prefill pod, "handed": those for the decode pod}.
Writes what the engine's sampling parameters are by these bodies, what Mooncake's scheduler makes of the parameters, and
the page of its bootstrap server.
"""

import json
import re
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector import v1  # type: ignore[import-not-found]
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import (  # type: ignore[import-not-found]
    mooncake_connector as mooncake,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import (  # type: ignore[import-not-found]
    EngineEntry,
    MooncakeBootstrapServer,
)
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # type: ignore[import-not-found]
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages  # type: ignore[import-not-found]
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # type: ignore[import-not-found]
from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # type: ignore[import-not-found]
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # type: ignore[import-not-found]
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest  # type: ignore[import-not-found]
from vllm.v1.request import RequestStatus  # type: ignore[import-not-found]

FORMS = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/inference/v1/generate": GenerateRequest,
}
ROOM = 1000  # tokens that the model has left


def sampling(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the limit, the parameters and whether it is a stream, as the engine gets them."""
    request = FORMS[path].model_validate(body)
    stream = bool(request.stream)
    if isinstance(request, GenerateRequest):
        # serving.py puts these two together
        return {"stream": stream, "limit": request.sampling_params.max_tokens, "parameters": request.kv_transfer_params}
    if isinstance(request, AnthropicMessagesRequest):
        request = AnthropicServingMessages.to_chat_completion_request(request)
    if isinstance(request, ResponsesRequest):
        found = request.to_sampling_params(ROOM)
    else:
        own = getattr(request, "max_completion_tokens", None) or request.max_tokens
        found = request.to_sampling_params(own or ROOM, {})
    return {
        "stream": stream,
        "limit": found.max_tokens,
        "parameters": (found.extra_args or {}).get("kv_transfer_params"),
    }


class Scheduler(mooncake.MooncakeConnectorScheduler):  # type: ignore[misc]
    """Mooncake's, of a pod that does both, without its engine."""

    def __init__(self) -> None:
        self.is_kv_producer = self.is_kv_consumer = False
        self._reqs_need_recv: dict[str, Any] = {}
        self._reqs_need_send: dict[str, Any] = {}
        self._reqs_not_processed: set[str] = set()

    def get_sw_clipped_blocks(self, block_ids: Any) -> Any:
        return list(block_ids)


def mooncakes(asked: dict[str, Any], handed: dict[str, Any]) -> dict[str, Any]:
    """Return what the scheduler has to fetch and to keep by the parameters of both legs."""
    blocks = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: [[1, 2]])
    decode = Scheduler()
    decode.update_state_after_alloc(SimpleNamespace(request_id="d", kv_transfer_params=dict(handed)), blocks, 32)
    (fetched,) = decode.build_connector_meta(SimpleNamespace()).reqs_to_recv.values()
    keeps = {}
    for status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED):
        request = SimpleNamespace(request_id="p", kv_transfer_params=dict(asked), status=status)
        prefill = Scheduler()
        prefill.update_state_after_alloc(request, blocks, 0)
        assert "p" in prefill._reqs_need_send
        keeps[status.name] = prefill.request_finished(request, ([1, 2],))
    meta = fetched["d"]
    return {
        "fetched": [meta.transfer_id, meta.remote_engine_id, meta.remote_bootstrap_addr],
        "kept": keeps,
    }


def bootstrap_page() -> str:
    server = MooncakeBootstrapServer("127.0.0.1", 0)
    server.start()
    try:
        server.workers[0] = EngineEntry(engine_id="engine-0", worker_addr={0: {0: "tcp://10.0.0.1:7"}})
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/query", timeout=10) as response:
            return str(response.read().decode())
    finally:
        server.shutdown()


def lmcache_parameters() -> list[str]:
    """Return the parameters that LMCache's connectors look for."""
    folder = Path(v1.__file__).parent
    files = [folder / "lmcache_connector.py", folder / "lmcache_mp_connector.py", *folder.glob("lmcache_integration/*")]
    sources = [file.read_text() for file in files if file.suffix == ".py"]
    found = [name for text in sources for name in re.findall(r'"(\w+)" in (?:kv_transfer_)?params\b', text)]
    return sorted(set(found))


def main() -> None:
    """Answer."""
    given = json.load(sys.stdin)
    answer = {
        "sampling": [sampling(path, body) for path, body in given["bodies"]],
        "mooncake": mooncakes(given["asked"], given["handed"]),
        "bootstrap": bootstrap_page(),
        "lmcache": lmcache_parameters(),
    }
    sys.stdout.write("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
