"""A pod of SGLang's own parts, without a model: its prefix cache, its event publisher, its metrics; no GPU is needed.

Runs in the environment of `environment.ensure_sglang`. Arguments: a model's folder, HTTP port, event port, replay port,
tokens a page, and the key of --api-key where it has one.
Reads JSON lines from standard input and answers each with one: {"serve": token ids} computes a prompt as far as it is
not cached (answers how many tokens were), {"evict": tokens}, {"clear": true}, or {"load": {"running", "waiting",
"usage"}}.
"""

import json
import os
import sys
import tempfile
import threading
import time
from array import array
from typing import Any

os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp()  # before prometheus_client is imported, as SGLang does

import torch  # type: ignore[import-not-found]
import uvicorn  # type: ignore[import-not-found]
from fastapi import FastAPI  # type: ignore[import-not-found]
from sglang.srt import runtime_context  # type: ignore[import-not-found]
from sglang.srt.disaggregation.kv_events import (  # type: ignore[import-not-found]
    EventPublisherFactory,
    KVEventBatch,
)
from sglang.srt.mem_cache.base_prefix_cache import (  # type: ignore[import-not-found]
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # type: ignore[import-not-found]
from sglang.srt.observability import metrics_collector  # type: ignore[import-not-found]
from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]
from sglang.srt.utils.auth import add_api_key_middleware  # type: ignore[import-not-found]
from sglang.srt.utils.common import add_prometheus_middleware  # type: ignore[import-not-found]

MODEL = "tiny"
MAX_TOKENS = 65536
LABELS = {"model_name": MODEL, "engine_type": "unified"}
RANKS = {"tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}


class Allocator:
    """As much of the memory pool as the cache asks for."""

    device = torch.device("cpu")

    def free(self, indices: Any) -> None: ...

    def free_segment(self, indices: Any, *, start_pos: int) -> None: ...


class Pod:
    def __init__(self, model: str, *, events: int, replay: int, page: int) -> None:
        config = json.dumps(
            {"publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
        )
        self.arguments = ServerArgs(
            model_path=model, device="cpu", page_size=page, enable_metrics=True, kv_events_config=config
        )
        runtime_context.publish(self.arguments, role="scheduler")
        self.page = page
        self.cache = RadixCache.create_simulated(
            mock_allocator=Allocator(), page_size=page, enable_kv_cache_events=True
        )
        self.publisher = EventPublisherFactory.create(config)
        self.scheduler = metrics_collector.SchedulerMetricsCollector(
            labels={**LABELS, **RANKS}, server_args=self.arguments
        )
        self.tokenizer = metrics_collector.TokenizerMetricsCollector(labels=LABELS)
        self.scheduler.page_size.labels(**self.scheduler.labels).set(page)
        self.scheduler.max_total_num_tokens.labels(**self.scheduler.labels).set(MAX_TOKENS)
        self.load(running=0, waiting=0, usage=0.0)
        self.publish()

    def load(self, *, running: int, waiting: int, usage: float) -> None:
        count = metrics_collector.QueueCount
        self.scheduler.log_stats(
            metrics_collector.SchedulerStats(
                num_running_reqs=count(total=running), num_queue_reqs=count(total=waiting), token_usage=usage
            )
        )

    def serve(self, ids: list[int]) -> int:
        """Return the cached tokens; the last token is always computed."""
        key = RadixKey(array("q", ids))
        matched = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", ids[:-1])).page_aligned(self.page)))
        cached = int(matched.device_prefix_len)
        whole = key.page_aligned(self.page)
        self.cache.insert(InsertParams(key=whole, value=torch.arange(len(whole))))
        self.scheduler.increment_realtime_tokens(
            prefill_compute_tokens=len(ids) - cached,
            prefill_cache_tokens=cached,
            decode_tokens=1,
            dp_cooperation_info=None,
        )
        self.tokenizer.observe_time_to_first_token(LABELS, 0.05, stream=True)
        self.tokenizer.observe_one_finished_request(LABELS, len(ids), 1, cached, 0.1, False)
        self.publish()
        return cached

    def publish(self) -> None:
        if events := self.cache.take_events():
            self.publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        if "serve" in command:
            return {"cached": self.serve(command["serve"])}
        if "evict" in command:
            self.cache.evict(EvictParams(num_tokens=command["evict"]))
        elif "clear" in command:
            self.cache.reset()
        elif "load" in command:
            self.load(**command["load"])
        self.publish()
        return {}


def main() -> None:
    port, events, replay, page = map(int, sys.argv[2:6])
    answers = os.fdopen(os.dup(1), "w", buffering=1)  # SGLang may print
    os.dup2(2, 1)
    pod = Pod(sys.argv[1], events=events, replay=replay, page=page)
    app = FastAPI()
    add_prometheus_middleware(app)
    if key := "".join(sys.argv[6:]):
        add_api_key_middleware(app, api_key=key, admin_api_key=None)

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        # what sglang/srt/entrypoints/http_server.py answers
        card = {"id": MODEL, "object": "model", "owned_by": "sglang", "root": MODEL, "max_model_len": 4096}
        return {"object": "list", "data": [card]}

    @app.get("/server_info")
    def server_info() -> Any:
        return {"kv_events": runtime_context.describe_kv_events_publisher(pod.arguments), "version": "0.5.23"}

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    answers.write("{}\n")
    for line in sys.stdin:
        answers.write(json.dumps(pod.do(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
