"""How much is measured: sizes, concurrencies, rounds, and the limits that every run keeps."""

from dataclasses import dataclass

SEED = 2
# pods that answer at once and forget nothing: what is measured must not wait for them
SIMULATOR: dict[str, object] = {
    "prefill_tokens_per_second": 1e9,
    "inter_token_ms": 0.1,
    "kv_blocks": 262_144,
    "max_num_seqs": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Every case (a size at a concurrency) is measured in `rounds`; in each, every route gets one turn."""

    sizes_tokens: tuple[int, ...] = (200, 2000, 8000)
    requests: tuple[tuple[int, int], ...] = ((1, 50), (16, 128))  # (concurrency, requests a turn)
    warm_up: tuple[int, int] = (16, 48)  # the same, once a size and route, not measured
    rounds: int = 11
    prefixes: int = 8
    pods: int = 4
    idle_seconds: float = 5.0
    turn_limit_seconds: float = 60.0
    limit_seconds: float = 225.0  # start to end; ending all processes comes on top


QUICK = Plan(
    requests=((1, 12), (16, 24)),
    warm_up=(16, 16),
    rounds=5,
    prefixes=4,
    idle_seconds=1.0,
    turn_limit_seconds=20.0,
    limit_seconds=60.0,
)
