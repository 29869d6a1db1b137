"""Play legs of split requests on vLLM's own scheduler with NixlConnector; runs in the vLLM environment, with no server.

Called by `test_load_parity.py` as a subprocess with a model folder. Reads JSON from standard input, a list of
{"policy": "fail" | "recompute", "block_size": tokens, "blocks": of the pool, "slots": sequences that run at a time,
"steps": [...]}, where a step is one of
    {"add": name, "tokens": [...], "output": tokens of the answer, "leg": "plain" | "prefill" | "decode"}
    {"loaded": [names], "failed": [names], "sent": [names]}   one engine step, and the loads and reads that end with it
    {"abort": name}.
Writes for each a list with what was seen after each step, see `Play.state`.
"""

import json
import os
import sys
import traceback
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch  # type: ignore[import-not-found]
from vllm.distributed.kv_events import BlockStored  # type: ignore[import-not-found]
from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found]
from vllm.utils.hashing import sha256  # type: ignore[import-not-found]
from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found]
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler  # type: ignore[import-not-found]
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found]
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # type: ignore[import-not-found]
from vllm.v1.request import Request, RequestStatus  # type: ignore[import-not-found]
from vllm.v1.structured_output import StructuredOutputManager  # type: ignore[import-not-found]

PARAMS: dict[str, dict[str, Any]] = {  # the scheduler writes into them
    "plain": {},
    "prefill": {"do_remote_decode": True, "do_remote_prefill": False},
    "decode": {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1]],
        "remote_engine_id": "theirs",
        "remote_request_id": "leg",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
    },
}


class Play:
    """One scheduler and the legs on it."""

    def __init__(self, model: str, story: dict[str, Any]) -> None:
        config = EngineArgs(
            model=model,
            block_size=story["block_size"],
            num_gpu_blocks_override=story["blocks"],
            max_model_len=2048,
            max_num_seqs=story["slots"],
            enable_prefix_caching=True,
            async_scheduling=False,
            kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
            kv_transfer_config={
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": story["policy"],
            },
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = story["blocks"]
        spec = FullAttentionSpec(block_size=story["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = Scheduler(
            config,
            KVCacheConfig(
                num_blocks=story["blocks"], kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
            ),
            StructuredOutputManager(config),
            block_size=story["block_size"],
            log_stats=True,
        )
        self.scheduler.kv_event_publisher = self
        self.hasher = get_request_block_hasher(story["block_size"], sha256)
        self.answers: dict[str, list[int]] = {}
        self.events: list[Any] = []
        self.totals = dict.fromkeys(("queries", "hits", "external_queries", "external_hits"), 0)
        self.cached: dict[str, list[int]] = {}
        self.handed_over: dict[str, Any] = {}
        self.work: dict[str, int] = {}
        self.ended: dict[str, str] = {}

    def publish(self, batch: Any) -> None:
        """Stand for the publisher of events."""
        for event in batch.events:
            stored = isinstance(event, BlockStored)
            tokens = [len(event.token_ids), event.parent_block_hash is None] if stored else []
            self.events.append([type(event).__name__, len(event.block_hashes), *tokens])

    def play(self, step: dict[str, Any]) -> dict[str, Any]:
        self.events, self.work, self.ended = [], {}, {}
        if "add" in step:
            self.add(**step)
        elif "abort" in step:
            self.scheduler.finish_requests(step["abort"], RequestStatus.FINISHED_ABORTED)
        else:
            self.step(**{key: set(names) for key, names in step.items()})
        return self.state()

    def add(self, add: str, tokens: list[int], output: int, leg: str) -> None:
        params = SamplingParams(
            max_tokens=output, ignore_eos=True, extra_args={"kv_transfer_params": dict(PARAMS[leg])}
        )
        self.scheduler.add_request(Request(add, tokens, params, None, block_hasher=self.hasher))

    def step(self, loaded: set[str], failed: set[str], sent: set[str]) -> None:
        planned = self.scheduler.schedule()
        self.work = dict(planned.num_scheduled_tokens)
        names = list(self.work)
        done = {
            name: (request := self.scheduler.requests[name]).num_computed_tokens >= request.num_tokens for name in names
        }
        invalid = {
            block.block_id
            for name in failed
            for block in self.scheduler.kv_cache_manager.get_blocks(name).blocks[0]
            if block.block_hash is None
        }
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[7] if done[name] else [] for name in names],
            kv_connector_output=KVConnectorOutput(
                finished_sending=sent,
                finished_recving=loaded | failed,
                failed_recving=failed,
                invalid_block_ids=invalid,
            ),
        )
        for outputs in self.scheduler.update_from_output(planned, result).values():
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    stats = output.prefill_stats
                    self.cached[output.request_id] = [stats.num_cached_tokens, stats.num_external_cached_tokens]
                if output.finish_reason is not None:
                    self.ended[output.request_id] = str(output.finish_reason)
                if output.kv_transfer_params is not None:
                    told = output.kv_transfer_params
                    self.handed_over[output.request_id] = [
                        len(told["remote_block_ids"][0]),
                        told["remote_num_tokens"],
                        told.get("remote_prefill_cached_tokens"),
                    ]
            if (stats := outputs.scheduler_stats) is not None:
                self.totals["queries"] += stats.prefix_cache_stats.queries
                self.totals["hits"] += stats.prefix_cache_stats.hits
                self.totals["external_queries"] += stats.connector_prefix_cache_stats.queries
                self.totals["external_hits"] += stats.connector_prefix_cache_stats.hits

    def state(self) -> dict[str, Any]:
        running, waiting = self.scheduler.get_request_counts()
        stages = self.scheduler._kv_fetch_counts
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "work": self.work,
            "events": self.events,
            "ended": self.ended,
            "running": running,
            "waiting": waiting,
            "deferred": len(self.scheduler.deferred_waiting),
            "stages": [stages[stage] for stage in ("waiting_to_start", "in_progress", "completed_waiting")],
            "used_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "cached": dict(self.cached),
            "handed_over": dict(self.handed_over),
            **self.totals,
        }


def main() -> None:
    os.environ.pop("PYTHONHASHSEED", None)
    init_none_hash(sha256)
    json.dump([seen(Play(sys.argv[1], story), story["steps"]) for story in json.load(sys.stdin)], sys.stdout)


def seen(play: Play, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    for step in steps:
        try:
            told.append(play.play(step))
        except Exception:
            return [*told, {"died": traceback.format_exc()}]
    return told


if __name__ == "__main__":
    main()
