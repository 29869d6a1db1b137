"""What a picker's live feed says, made up: pods, classes, index, prefixes and decisions of any number."""

import random
from collections.abc import Mapping
from typing import Any

NOW = 1_800_000_000.0  # unix seconds; tests give their own
WEIGHTS = {
    "prefill-work": 16.0,
    "decode-work": 2.0,
    "cache-room": 2.0,
    "queue-depth": 1.0,
    "kv-usage": 0.5,
    "lora": 4.0,
    "session": 0.5,
}
TEXTS = (
    "You are the librarian of a small town. You answer in two sentences",
    "You are a careful SQL assistant. Answer with one query and no prose",
    "Translate the user's text to French. Keep names as they are",
    "Summarise the following support ticket in three bullets for an engineer",
    "Classify the message as billing, technical or other",
    "You review pull requests. Point to the line, say what breaks, and stop",
)


def address(i: int) -> str:
    return f"10.0.{3 + i // 32}.{11 + i % 32}:8000"


def pods(
    count: int, *, now: float = NOW, blocks: int = 0, seed: int = 1, changes: Mapping[int, Any] | None = None
) -> Any:
    """`blocks` in the index in all; `changes` of single pods by position: {3: {"state": "unreachable"}}."""
    dice = random.Random(seed)
    weights = [0.3 + dice.random() for _ in range(count)]
    lines: list[dict[str, Any]] = []
    for i in range(count):
        cached = round(blocks * weights[i] / sum(weights))
        load = min(0.97, dice.betavariate(2, 2.5)) if blocks else 0.0
        usual: dict[str, Any] = {}
        lines.append(
            usual
            | {
                "address": address(i),
                "state": "ready",
                "avoided": None,
                "role": "both",
                "running": round(load * 34),
                "waiting": dice.choice([0, 0, 0, 0, 1, 3, 7]) if load > 0.6 else 0,
                "kv_usage": load,
                "hit_rate": 0.4 + 0.4 * dice.random() if blocks else None,
                "bookings": round(load * 30),
                "picks": round(900 * weights[i]) if blocks else 0,
                "share": weights[i] / sum(weights) if blocks else 0.0,
                "cached_blocks": cached,
                "cached_tokens": cached * 16,
                "block_tokens": 16 if blocks else None,
                "tiers": {"GPU": cached} if cached else {},
                "index_state": "live",
                "index_reason": "",
                "models": ["qwen3-32b"],
                "adapters": ["support-de"] if i % 5 == 0 else [],
                "max_model_len": 131072,
                "prefill_tokens_per_second": 9400.0 if blocks else None,
                "inter_token_ms": 18.2 if blocks else None,
                "ttft_estimate_error_ms": 31 if blocks else None,
            }
            | (changes or {}).get(i, {})
        )
    total = {name: sum(line[name] or 0 for line in lines) for name in ("cached_blocks", "cached_tokens", "running")}
    total |= {name: sum(line[name] or 0 for line in lines) for name in ("waiting", "bookings", "picks")}
    total |= {"pods": count, "ready": sum(line["state"] == "ready" for line in lines)}
    return {"now": now, "pods": lines, "totals": total}


def classes(*, now: float = NOW, busy: bool = False) -> Any:
    step = {"step": "cap-output", "model_pool": "qwen3-32b", "since_seconds": 94, "pressure": 0.82}
    lines = [
        _class("critical", 100, 500, routed=12 if busy else 0),
        _class("standard", 0, 2000, routed=121 if busy else 0, waiting=4 if busy else 0),
        _class("sheddable", -100, 10000, routed=41 if busy else 0, waiting=31 if busy else 0)
        | {"sheddable": True}
        | ({"steps": ["cap-output"], "in_force": [step]} if busy else {}),
    ]
    quotas = {"quotas": 0, "keys": 0, "open_requests": 0, "leases": 0, "unwritten_keys": 0, "problem": None}
    refusals = {"shed": 21, "quota": 4, "no-ready-endpoint": 1} if busy else {}
    waiting = sum(line["waiting"] for line in lines)
    common = {"now": now, "waiting": waiting, "remembered": 200 if busy else 0}
    return common | {"classes": lines, "quotas": quotas, "refusals": refusals}


def _class(name: str, priority: int, target_ms: int, *, routed: int = 0, waiting: int = 0) -> dict[str, Any]:
    common = {"class": name, "priority": priority, "sheddable": False, "target_ttft_ms": target_ms}
    common |= {"target_inter_token_ms": target_ms / 10, "objective": 0.99, "judged": routed}
    common |= {"attainment": 0.983 if routed else None}
    return common | {"waiting": waiting, "steps": [], "in_force": [], "routed": routed}


def finding(severity: str = "warning", **fields: str) -> dict[str, str]:
    seen = "has no replay endpoint: what an indexer misses while it starts is lost"
    fix = 'set "replay_endpoint": "tcp://*:5558" in --kv-events-config'
    return {
        "check": "replay-socket",
        "severity": severity,
        "subject": address(2),
        "seen": seen,
        "fix": fix,
    } | fields


def index(count: int, *, now: float = NOW, busy: bool = False, **changes: Any) -> Any:
    lines = [
        {
            "endpoint": address(i),
            "dp_rank": 0,
            "tier": "GPU",
            "state": "live",
            "reason": "",
            "cached_blocks": 15000 + 97 * i if busy else 0,
            "block_size": 16,
            "last_batch_at": now - 0.4 - i % 7,
            "applied_at": now - 0.3 - i % 7,
            "events": 90210 + i if busy else 0,
            "owner": f"indexer-{i % 2}",
        }
        for i in range(count)
    ]
    return {
        "now": now,
        "state": "ok",
        "problem": None,
        "indexer_alive": True,
        "sources_count": count,
        "sources": lines,
        "left_out": 0,
        "unreadable": [],
        "findings": [],
        "findings_state": "done",
        "replicas": {"replica": "picker-7d9f-a1", "others": 1, "others_bookings": {}, "problem": None},
        "degraded": [],
    } | changes


def prefixes(pods_count: int, *, now: float = NOW, texts: bool = False, roots: int = 6, seed: int = 3) -> Any:
    """A tree of prompts: `roots` system prompts, each with documents and turns that go on from it."""
    dice = random.Random(seed)
    nodes: list[dict[str, Any]] = []

    def grow(parent: dict[str, Any] | None, requests: float, depth: int, spread: float, text: str) -> None:
        start = parent["from_tokens"] + parent["tokens"] if parent else 0
        blocks = dice.randint(3, 60)
        holders = sorted(dice.sample(range(pods_count), max(1, round(spread * pods_count))))
        node = {
            "id": f"{dice.getrandbits(64):016x}",
            "parent": parent["id"] if parent else None,
            "model": "qwen3-32b",
            "adapter": None,
            "depth": depth,
            "from_tokens": start,
            "tokens": blocks * 16,
            "blocks": blocks,
            "requests": requests,
            "hit_tokens": requests * blocks * 12,
            "holders": [{"endpoint": address(i), "blocks": blocks, "tiers": {"GPU": blocks}} for i in holders],
            "held_blocks": blocks * len(holders),
            "last_at": now - dice.randint(0, 90),
            "text": text[:80] if texts else None,
        }
        nodes.append(node)
        rest = requests * 0.92
        for turn in range(dice.randint(2, 4) if depth < 4 and requests > 3 else 0):
            part = rest * dice.uniform(0.3, 0.6)
            rest -= part
            grow(node, part, depth + 1, spread * dice.uniform(0.25, 0.7), f"… turn {turn + 1}: and what if the reader")

    for i in range(roots):
        grow(None, 420 / (i + 1), 0, max(0.1, 1.0 - 0.17 * i), TEXTS[i % len(TEXTS)])
    hits, held = sum(node["hit_tokens"] for node in nodes), sum(node["held_blocks"] for node in nodes)
    whole = sum(node["requests"] for node in nodes if node["parent"] is None)
    for node in nodes:
        node["share_of_hits"] = node["hit_tokens"] / hits
        node["share_of_memory"] = node["held_blocks"] / held
        node["share_of_requests"] = node["requests"] / whole
    return {
        "now": now,
        "pool": "",
        "since": now - 7200,
        "half_life_seconds": 300,
        "sampled_share": 1.0,
        "requests": whole,
        "hit_tokens": hits,
        "cached_blocks": held,
        "index": "ok",
        "text_shown": texts,
        "left_out": 0,
        "nodes": nodes,
    }


def no_prefixes(*, now: float = NOW) -> Any:
    return prefixes(1, now=now, roots=0)


def history(*, now: float = NOW, busy: bool = True, model: str = "qwen3-32b", seed: int = 11) -> Any:
    """The last 15 minutes: of three classes as the picker saw them, and of a model as the pods did."""
    dice = random.Random(seed)
    slices, parts = range(60 if busy else 0), range(180)

    def series(source: str, measure: str, p50: float, observed: int, **more: Any) -> Any:
        counts = [dice.randint(0, 2 * observed) if i > 8 else 0 for i in slices]
        tide = [1 + 0.5 * (25 < i < 38) + 0.2 * dice.random() for i in slices]
        columns = {
            f"{name}_ms": [round(p50 * factor * each, 2) if n else None for each, n in zip(tide, counts, strict=True)]
            for name, factor in (("p50", 1.0), ("p95", 2.1), ("p99", 3.2))
        }
        whole = {"observed": sum(counts), "p50_ms": p50 * 1.1, "p95_ms": p50 * 2.4, "p99_ms": p50 * 4.1}
        common = {"source": source, "measure": measure, "class": None, "model": model, "role": None} | more
        return common | {"whole": whole, "slices": {"observed": counts} | columns}

    latencies = [
        series("answers", measure, p50 * factor, observed, **{"class": name})
        for name, p50, observed in (("standard", 180.0, 4), ("critical", 90.0, 1), ("sheddable", 900.0, 2))
        for measure, factor in (("ttft", 1.0), ("inter-token", 0.1))
    ]
    latencies += [
        series("pods", "ttft", 84.0, 200, role="both"),
        series("pods", "inter-token", 18.0, 9000, role="both"),
    ]
    requests = [round(20 + 12 * dice.random()) if busy and i > 25 else 0 for i in parts]
    prompt = [each * 1400 for each in requests]
    return {
        "now": now,
        "pool": "",
        "picker": "picker-7d9f-a1",
        "since": now - 86_400.0,
        "sample_share": 0.02,
        "slice_seconds": 15.0,
        "first_at": now - 890.0,
        "latencies": latencies if busy else [],
        "left_out": 0,
        "load": {
            "slice_seconds": 5.0,
            "first_at": now - 902.0,
            "requests": requests,
            "refused": [1 if busy and i % 20 == 7 else 0 for i in parts],
            "prompt_tokens": prompt,
            "cached_tokens": [round(each * (0.3 + 0.3 * i / 180)) for i, each in enumerate(prompt)],
        },
    }


def decision(i: int, pods_count: int, *, now: float = NOW, seed: int = 5) -> dict[str, Any]:
    """Decision number i, routed; `refused` makes one that is not."""
    dice = random.Random(seed * 100_003 + i)
    prompt = dice.choice([180, 960, 2400, 7800, 31000]) + dice.randint(0, 120)
    best = int(prompt * dice.choice([0, 0.4, 0.8, 0.93])) // 16 * 16
    chosen = sorted(dice.sample(range(pods_count), min(8, pods_count)), key=lambda _: dice.random())
    lines: list[dict[str, Any]] = []
    for place, pod in enumerate(chosen):
        matched = best if place == 0 or dice.random() < 0.3 else int(best * dice.choice([0, 0, 0.4])) // 16 * 16
        scores = {name: round(1 - dice.random() * (0.1 + 0.05 * place), 3) for name in WEIGHTS} | {"lora": 1.0}
        scores |= {"session": 1.0 if place == 0 and i % 3 == 0 else 0.0, "prefill-work": 1 - place * dice.random() / 9}
        lines.append(
            {
                "endpoint": address(pod),
                "state": "ready",
                "fill": None,
                "full": None,
                "matched_tokens": matched,
                "matched_blocks": matched // 16,
                "indexed_tokens": matched,
                "recent_tokens": 0,
                "worth_tokens": float(matched),
                "waiting": dice.choice([0, 0, 2]),
                "running": dice.randint(2, 30),
                "kv_usage": dice.random(),
                "booked_since_report": dice.choice([0, 1]),
                "open_requests": dice.randint(0, 30),
                "backlog_tokens": dice.randint(0, 9000),
                "prefill_tokens_per_second": 9400.0,
                "inter_token_ms": 18.0,
                "session": place == 0,
                "unhealthy": None,
                "index_state": None,
                "scores": scores,
                "total": sum(WEIGHTS[name] * score for name, score in scores.items()),
            }
        )
    lines.sort(key=lambda line: -line["total"])
    winner = lines[0]
    klass = dice.choice(["critical", "standard", "standard", "standard", "sheddable"])
    return {
        "id": f"p-{i}",
        "at": now - 0.7 * i,
        "request_id": f"{dice.getrandbits(128):032x}",
        "path": "/v1/chat/completions",
        "class": klass,
        "queued_ms": dice.choice([None, None, None, None, 340]),
        "decided_ms": 1.84,
        "phases_ms": {"parse": 0.11, "tokenize": 0.42, "lookup": 0.98, "decide": 0.21},
        "request": {
            "api": "chat-completions",
            "model": "qwen3-32b",
            "served_model": "qwen3-32b",
            "adapter": None,
            "arm": "",
            "prompts": 1,
            "stream": True,
            "max_tokens": 512,
            "class": klass,
            "class_by": "default",
            "priority": 0,
            "tenant": "",
            "steps": [],
        },
        "endpoint": winner["endpoint"],
        "status": 200,
        "fallbacks": [line["endpoint"] for line in lines[1:3]],
        "prompt_tokens": prompt,
        "matched_tokens": winner["matched_tokens"],
        "best_matched_tokens": best,
        "degraded": [],
        "notes": [],
        "reasons": [],
        "strategy": "kv-aware",
        "weights": WEIGHTS,
        "candidates": lines,
        "candidates_left_out": max(0, pods_count - 8 - 1),
        "rejected": [{"endpoint": address(pods_count - 1), "filter": "ready: unreachable"}] if pods_count > 8 else [],
        "rejected_left_out": 0,
    }


def refused(i: int, *, now: float = NOW, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"r-{i}",
        "at": now - 0.7 * i,
        "request_id": f"refused-{i}",
        "path": "/v1/chat/completions",
        "class": "sheddable",
        "queued_ms": None,
        "endpoint": None,
        "status": 503,
        "reason": "shed",
        "message": "no room for class 'sheddable': the first token is expected after 14.2 s, promised within 10 s",
    } | fields


def ended(of: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "missed": 0,
        "at": of["at"] + 1.2,
        "decision_id": of["id"],
        "request_id": of["request_id"],
        "endpoint": of["endpoint"],
        "served_by": of["endpoint"],
        "status": 200,
        "seconds_to_headers": 0.18,
        "seconds": 1.24,
        "usage": None,
    } | fields


def snapshot(count: int, *, now: float = NOW, busy: bool = True, texts: bool = False, **parts: Any) -> dict[str, Any]:
    """The first event. `busy`: a pool under load with a million blocks, else one that nobody has used."""
    decisions = [refused(i, now=now) if i % 9 == 4 else decision(i, count, now=now) for i in range(20 if busy else 0)]
    return {
        "version": 1,
        "now": now,
        "process_id": "5f2c81d0",
        "kvmesh": "0.1.0",
        "pool": "",
        "pools": [],
        "picker": "picker-7d9f-a1",
        "docs": "https://docs.example/kvmesh/index.md",
        "policy": {
            "strategy": "kv-aware",
            "weights": WEIGHTS,
            "show_prompt_text": texts,
            "pod_hour_price": 0.0,
            "currency": "USD",
        },
        "pods": pods(count, now=now, blocks=1_000_000 * count // 64 if busy else 0),
        "classes": classes(now=now, busy=busy),
        "index": index(count, now=now, busy=busy),
        "prefixes": prefixes(count, now=now, texts=texts) if busy and count else no_prefixes(now=now),
        "history": history(now=now, busy=busy),
        "decisions": decisions,
    } | parts
